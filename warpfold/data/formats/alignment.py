"""An alignment as the model's features need it, and the alphabet of its rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from warpfold.errors import UserError
from warpfold.geometry.residue import RESTYPES, UNKNOWN

# The meaning of a letter in a row of an alignment is HHblits' (`HHBLITS_AA_TO_ID` in the official
# common/residue_constants.py): B as D, Z as E, U (selenocysteine) as C, J and O unknown.
LETTERS = {letter: code for code, letter in enumerate(RESTYPES)} | {"X": UNKNOWN, "J": UNKNOWN, "O": UNKNOWN}
LETTERS |= {"B": LETTERS["D"], "Z": LETTERS["E"], "U": LETTERS["C"]}
CODE_LETTERS = np.frombuffer(f"{RESTYPES}X-".encode(), dtype=np.uint8)  # code -> letter


@dataclass(frozen=True)
class Alignment:
    """Sequences aligned to a query, which is row 0 and has no gap.

    rows: uint8 [R, N], 0-19 in the order of RESTYPES, 20 unknown, 21 gap.  deletions: int32 [R, N], residues of the
    row between this column and the one before.  names: [R], the header lines.

    What pairs rows of this alignment with rows of another chain's is the organism in `names`, or else `pair_keys`:
    uint64 [R], rows with one number belong together, 0 for none.  stands_alone: False if the alignment serves pairing
    alone, as AlphaFold-Multimer's `uniprot_hits`.
    """

    rows: np.ndarray
    deletions: np.ndarray
    names: list[str]
    pair_keys: np.ndarray | None = None
    stands_alone: bool = True

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or self.rows.shape != self.deletions.shape or len(self.names) != len(self.rows):
            raise ValueError(f"rows {self.rows.shape}, deletions {self.deletions.shape}, {len(self.names)} names")

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of_query(cls, sequence: str, name: str = "query") -> "Alignment":
        """Return the alignment of a sequence with nothing else: one row."""
        rows = encode(sequence, source=name)[None]
        return cls(rows, np.zeros(rows.shape, dtype=np.int32), [name]).check_query(sequence, source=name)

    @property
    def query(self) -> str:
        """Return row 0 as one letter per residue."""
        return decode(self.rows[0])

    def select(self, rows: np.ndarray | Sequence[int] | slice) -> "Alignment":
        """Return some of the rows, by index, slice or mask, in that order."""
        picked = np.arange(len(self))[rows]
        names, keys = [self.names[i] for i in picked], None if self.pair_keys is None else self.pair_keys[picked]
        return Alignment(self.rows[picked], self.deletions[picked], names, keys, self.stands_alone)

    def check_query(self, sequence: str | None = None, source: str = "alignment") -> "Alignment":
        """Return the alignment itself; raise UserError unless row 0 is a protein, and is `sequence` if one is given.

        Letters that mean the same residue are equal.  `source` names the alignment in the error.
        """
        found = self.rows[0]
        if not found.size:
            raise UserError(f"{source}: the query has no residues; put the query's own sequence first")
        if is_nucleic(self.query if sequence is None else sequence):
            raise UserError(f"{source}: looks like nucleic acid (only A, C, G, T, U, N); WarpFold folds proteins")
        if sequence is None:
            return self
        wanted, cure = encode(sequence, source="query"), "give the alignment that was made for this query"
        if len(wanted) != len(found):
            raise UserError(f"{source}: its first row has {len(found)} residues, the query has {len(wanted)}; {cure}")
        differ = np.flatnonzero(wanted != found)
        if differ.size:
            i = int(differ[0])
            raise UserError(
                f"{source}: its first row differs from the query at {differ.size} of {len(wanted)} residues, first "
                f"at {i + 1} ({decode(found[i : i + 1])}, not {sequence[i]}); {cure}"
            )
        return self


def merge(alignments: Sequence[Alignment]) -> Alignment:
    """Stack alignments of one query, to be read as one that stands alone; the query's row is kept once, on top.

    Errors: ValueError without any; UserError if their first rows differ.
    """
    if not alignments:
        raise ValueError("no alignments to merge")
    for i, other in enumerate(alignments[1:]):
        other.check_query(alignments[0].query, source=f"alignment {i + 2}")
    parts = [alignments[0], *(a.select(slice(1, None)) for a in alignments[1:])]
    rows, deletions = (np.concatenate([getattr(p, name) for p in parts]) for name in ("rows", "deletions"))
    return Alignment(rows, deletions, [name for p in parts for name in p.names])


def encode(sequence: str, source: str = "sequence") -> np.ndarray:
    """Return the codes of a sequence by HHblits' table, uint8 [N], 0-20; lower case counts as upper.

    Errors: UserError for a character outside the table.
    """
    try:
        return np.array([LETTERS[letter] for letter in sequence.upper()], dtype=np.uint8)
    except KeyError as error:
        place = sequence.upper().index(error.args[0]) + 1
        raise UserError(
            f"{source}: has {error.args[0]!r} at position {place}, which is not an amino acid; correct or remove it"
        ) from None


def encode_residues(sequence: str, source: str = "sequence") -> np.ndarray:
    """Return the residue types of a protein's own sequence: uint8 [N], 0-19, and 20 (X) for all but the twenty letters.

    This follows the official code (`make_sequence_features` in data/pipeline.py, `map_unknown_to_x`), which encodes the
    same letter in the alignment's first row by HHblits' table (`encode`).  Errors: as in `encode`.
    """
    known = np.array([letter in RESTYPES for letter in sequence.upper()], dtype=bool)
    return np.where(known, encode(sequence, source), np.uint8(UNKNOWN))


def decode(codes: np.ndarray) -> str:
    """Return codes 0-21 [N] as letters: X for unknown, - for a gap."""
    return CODE_LETTERS[codes].tobytes().decode()


def is_nucleic(sequence: str) -> bool:
    """Return whether a sequence must be DNA or RNA: ten letters or more, all of ACGTUN, with A, C and G among them.

    An `Alignment` has C for U, which makes no difference here.  Silk, only G and A, is a protein.
    """
    letters = set(sequence.upper())
    return len(sequence) >= 10 and set("ACG") <= letters <= set("ACGTUN")
