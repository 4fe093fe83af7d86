"""Write artificial protein families as a FASTA database, for tests of searches."""

from functools import cache
from pathlib import Path

from warpfold.data.formats.alignment import decode, write_fasta
from warpfold.data.synthetic.proteins import make_protein
from warpfold.geometry.residue import GAP

UNLIKE = (0, 1, 3, 4)  # sample proteins that no search finds to be related


@cache
def family(number: int) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the sequence of protein `number` (0 to 3), and (name, sequence) of its relatives."""
    protein = make_protein(seed=7, index=UNLIKE[number], min_length=40, max_length=60, depth=(24, 40))
    rows = [decode(row[row != GAP]) for row in protein.alignment.rows[1:]]
    return protein.sequence, tuple((f"fam{number}_{i} relative of {number}", row) for i, row in enumerate(rows))


def database(path: Path, *numbers: int) -> Path:
    """Write a FASTA file of families."""
    path.write_text(write_fasta([record for number in numbers for record in family(number)[1]]))
    return path


def queries(path: Path, *numbers: int) -> Path:
    """Write a FASTA file of the proteins of the families, p0, p1, ...."""
    path.write_text(write_fasta([(f"p{number} the protein", family(number)[0]) for number in numbers]))
    return path


def headers(a3m: str) -> list[str]:
    """Parse the row names of an A3M file."""
    return [line[1:].split()[0] for line in a3m.splitlines() if line.startswith(">")]
