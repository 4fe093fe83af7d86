"""What to fold: single proteins and complexes, from FASTA, tables, alignments and structures.

Which records make a complex is never guessed:

* `A:B` in a sequence (ColabFold's form, in FASTA and tables) is a complex of its own, with chains A, B, ...;
* other FASTA records are single proteins or, if the caller asks for that (`as_one`), the chains of one complex, each
  named by its header, which in the PDB's files names all copies (`>2HHB_1|Chains A, C|...`);
* a structure, and an alignment of a complex (`#120,88<TAB>1,2`), are one complex each;
* a folder is all of these, file by file.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits

from warpfold.data.example.assembly import Assembly
from warpfold.data.example.pairing import pair_rows
from warpfold.data.example.raw_example import RawExample, from_sequence
from warpfold.data.formats.alignment import Alignment
from warpfold.data.formats.chain_alignments import ChainAlignments, as_row, parse_chain_alignments
from warpfold.data.formats.complex_a3m import announced
from warpfold.data.formats.input_files import ALIGNMENTS, STRUCTURES, find
from warpfold.data.formats.sequences import parse_fasta, plain_text
from warpfold.data.structure.mmcif import parse_structure
from warpfold.errors import UserError
from warpfold.files import file_name, read_file

MOST_LISTED = 8  # chains in one line
FASTA = (".fasta", ".fas", ".fa", ".faa", ".fsa", ".seq")
TABLES = (".csv", ".tsv")
_PDB_HEADER = re.compile(r"\w+_\d+\|Chains? ([^|]+)\|")  # of rcsb.org's FASTA files: >7W72_4|Chain D[auth K]|...
_PDB_CHAIN = re.compile(r"(\w+)(?:\[auth (\w+)\])?")
_ID = re.compile(r"(?![.?]\Z)[!#-&(-~]{1,100}")  # printable ASCII without blanks and quotes; . and ? mean none in mmCIF
_LETTERS = ascii_uppercase + ascii_lowercase + digits  # what a PDB file can name


@dataclass(frozen=True)
class Complex:
    """Chains to fold together, in the user's order; a single protein is one of one chain."""

    name: str  # as a file can be called
    ids: tuple[str, ...]  # [K], all different
    sequences: tuple[str, ...]  # [K], upper case
    alignments: tuple[Alignment, ...] = ()  # that came with it, each of one of the sequences
    notes: tuple[str, ...] = ()  # what the user should know, such as chains that were left out

    def __post_init__(self) -> None:
        if twice := [name for name, times in Counter(self.ids).items() if times > 1]:
            raise UserError(f"{self.name}: has two chains called {twice[0]}; give each chain a name of its own")
        if wrong := [name for name in self.ids if not _ID.fullmatch(name)]:
            raise UserError(f"{self.name}: {wrong[0][:40]!r} cannot be a chain's name in mmCIF; use letters and digits")


def chain_ids(count: int) -> list[str]:
    """Return names for chains: A to Z, a to z, 0 to 9, as PDB files can have them, then AA, AB and so on."""
    length, named = 1, len(_LETTERS)
    found = list(_LETTERS[:count])
    while named < count:
        length += 1
        found += ["".join(letters) for letters, _ in zip(product(ascii_uppercase, repeat=length), range(count - named))]
        named = len(found)
    return found


def read_complexes(path: Path, as_one: bool = False) -> list[Complex]:
    """Read what to fold from a file, which may be a pipe such as /dev/stdin, or from all files in a folder.

    By its ending a file is a table (.csv, .tsv: columns `id` and `sequence`), a structure (the first biological
    assembly of an mmCIF or PDB file), an alignment, or else FASTA.  as_one: the records of a FASTA file are the chains
    of one complex; without effect where a record has `:`.
    Errors: UserError for a file that cannot be read, a chain without residues, two queries or two chains of one name.
    """
    endings = (*FASTA, *TABLES, *STRUCTURES, *ALIGNMENTS)
    files = [file.path for file in find([path], endings, "queries")] if path.is_dir() else [path]
    found = [(file, query) for file in files for query in _read(file, as_one)]
    _refuse_twice(found)
    return [query for _, query in found]


def _refuse_twice(queries: Iterable[tuple[Path, Complex]]) -> None:
    """Raise UserError if two queries have one name; some file systems do not tell A from a."""
    sources: dict[str, Path] = {}
    for file, query in queries:
        if (key := query.name.lower()) in sources:
            where = "twice" if sources[key] == file else f"in {sources[key]} too"
            raise UserError(f"{file}: a record is called {query.name} {where}; give each protein a name of its own")
        sources[key] = file


def sequences_to_search(paths: Iterable[Path]) -> dict[str, str]:
    """Return the different sequences of the queries in files by name: NAME, or NAME_CHAIN of a complex's first copy.

    Errors: UserError as in `read_complexes`, and for two of one name.
    """
    queries = [(path, query) for path in paths for query in read_complexes(path)]
    _refuse_twice(queries)
    found: dict[str, str] = {}
    taken: set[str] = set()
    for path, query in queries:
        for sequence, name in search_names(query.name, dict(zip(query.ids, query.sequences))).items():
            if name.lower() in taken:
                raise UserError(f"{path}: another sequence is called {name} too; give each protein a name of its own")
            taken.add(name.lower())
            found[name] = sequence
    return found


def search_names(name: str, chains: Mapping[str, str]) -> dict[str, str]:
    """Return what the results of searching for each sequence are called: NAME, or NAME_CHAIN of a complex's first copy.

    Some file systems do not tell A from a: chains a of a complex that has a chain A too is NAME_a_.
    chains: id -> sequence.  The names are by sequence, in the order of the chains.
    """
    found: dict[str, str] = {}
    for chain, sequence in chains.items():
        if sequence not in found:
            own = name if len(chains) == 1 else file_name(f"{name}_{chain}")
            while own.lower() in map(str.lower, found.values()):
                own += "_"
            found[sequence] = own
    return found


def assemble(query: Complex, alignments: ChainAlignments | None = None) -> tuple[Assembly, list[str]]:
    """Return a complex with the alignments of its chains, and what the user should know about it, a line each.

    Copies share their example.  A chain without alignment has its own row alone.
    Errors: UserError for an alignment of another protein, or a sequence that is no protein's.
    """
    given: dict[str, list[Alignment]] = {}
    for alignment in query.alignments:
        given.setdefault(alignment.query, []).append(alignment)
    examples: dict[str, RawExample] = {}
    bare: list[str] = []
    for chain, sequence in zip(query.ids, query.sequences):
        own = given.get(as_row(sequence), []) + (alignments.of(sequence) if alignments else [])
        bare += [] if own else [chain]
        if sequence not in examples:
            name = f"{query.name}_{chain}"
            examples[sequence] = from_sequence(
                sequence, own or [Alignment.of_query(sequence, name)], name, pairing=True
            )
    notes = [*query.notes]
    if bare and len(query.ids) > 1:
        notes.append(f"no alignment for {_listed(bare)}: folded by the sequence alone")
    if unpaired := _unpaired_reason(list(examples.values())):
        notes.append(unpaired)
    return Assembly(query.name, query.ids, tuple(examples[sequence] for sequence in query.sequences)), notes


def _unpaired_reason(entities: Sequence[RawExample]) -> str | None:
    """Return why no rows of different sequences are paired though they have alignments, or None."""
    deep = [one for one in entities if one.depth > 1]
    if len(entities) < 2 or len(deep) < 2 or len(pair_rows([one.pairing for one in entities])) > 1:
        return None
    if sum(one.pairing is not None for one in deep) > 1:
        return "no rows are paired: the alignments of different chains have no species in common"
    return (
        "no rows are paired: the headers of the alignments name no species (UniProt's tr|A0A0K0ME10|A0A0K0ME10_9STAP, "
        "OX=1295 or TaxID=1295)"
    )


def _listed(names: Sequence[str]) -> str:
    if len(names) > MOST_LISTED:
        return f"{len(names)} chains ({', '.join(names[:3])} ...)"
    return f"{'chain' if len(names) == 1 else 'chains'} {', '.join(names)}"


def _read(path: Path, as_one: bool) -> list[Complex]:
    """Read one file.  See `read_complexes`."""
    data = read_file(path, pipe=True)
    name = file_name(path.name.split(".")[0])
    ending = Path(path.name.lower().removesuffix(".gz")).suffix
    if ending in TABLES:
        return _of_records(parse_fasta(_fasta_of_table(data, str(path)), str(path), chains=True), path)
    if ending in STRUCTURES:
        return [_of_structure(data, name, path)]
    if ending in ALIGNMENTS:
        return [_of_alignment(data, name, path)]
    records = parse_fasta(data, str(path), chains=True)
    ids = [_chains_of(header) for header, _ in records]
    single = len(records) == 1 and len(ids[0]) < 2
    if not as_one or single or any(":" in sequence for _, sequence in records):
        return _of_records(records, path)
    named = zip(ids, chain_ids(len(records)), records)
    chains = [(id, sequence) for own, letter, (_, sequence) in named for id in own or [letter]]
    return [Complex(name, tuple(id for id, _ in chains), tuple(sequence for _, sequence in chains))]


def _of_records(records: Iterable[tuple[str, str]], path: Path) -> list[Complex]:
    """Return each record as a query of its own."""
    found = []
    for header, text in records:
        name, sequences = file_name(_first_word(header) or "query"), tuple(text.split(":"))
        if not all(sequences):
            raise UserError(f"{path}: {name} has a chain without residues; write A:B, with a sequence on both sides")
        found.append(Complex(name, tuple(chain_ids(len(sequences))), sequences))
    return found


def _of_structure(data: bytes, name: str, path: Path) -> Complex:
    """Return the protein chains of a structure's first assembly; what else it has is left out, and noted."""
    structure = parse_structure(data, str(path))
    placed = structure.assembly()
    if not placed.chains:
        raise UserError(f"{path}: its first assembly has no protein chain; give a file with proteins")
    sequences = tuple(structure.chains[chain].sequence for chain, _ in placed.chains)
    notes = tuple(f"{what} is left out: {reason}" for what, reason in placed.left_out.items())
    return Complex(name, placed.ids, sequences, notes=notes)


def _of_alignment(data: bytes, name: str, path: Path) -> Complex:
    """Return the chains of an alignment, in the order and the copies that ColabFold's first line gives them."""
    alignments = parse_chain_alignments(data, str(path))
    sequences = [one.query for one in alignments if one.stands_alone]  # not those of its pairs, a second time
    _, copies, _ = announced(plain_text(data, str(path)).lstrip(b"\n"), str(path))
    counts = zip(sequences, copies) if copies else dict.fromkeys(sequences, 1).items()
    chains = tuple(sequence for sequence, count in counts for _ in range(count))
    return Complex(name, tuple(chain_ids(len(chains))), chains, tuple(alignments))


def _fasta_of_table(data: bytes, source: str) -> str:
    """Return the columns `id` and `sequence` of a table, separated by commas or tabs, as FASTA text.

    Errors: UserError without these columns, or for a line that is not complete.
    """
    text = plain_text(data, source).decode()
    lines = csv.reader(
        io.StringIO(text),
        "excel-tab" if "\t" in text.partition("\n")[0] else "excel",
        strict=True,
        skipinitialspace=True,
    )
    try:
        columns = [title.strip().lower() for title in next(lines, [])]
        rows = [(lines.line_num, line) for line in lines if any(cell.strip() for cell in line)]
    except csv.Error as error:
        raise UserError(f"{source}: line {lines.line_num}: {error}; correct the table") from None
    if not {"id", "sequence"} <= set(columns):
        raise UserError(f"{source}: has no columns id and sequence; its first line must name them: id,sequence")
    if not rows:
        raise UserError(f"{source}: has no records below its first line; give an id and a sequence in each")
    at = columns.index("id"), columns.index("sequence")
    records = []
    for number, line in rows:
        if len(line) <= max(at):
            raise UserError(f"{source}: line {number} has no id or no sequence; complete it")
        name, sequence = (line[column].split() for column in at)
        records.append(f">{' '.join(name)}\n{''.join(sequence)}\n")
    return "".join(records)


def _chains_of(header: str) -> list[str]:
    """Return the chains that a record of a complex stands for: its first word, or all that the PDB's header names."""
    if found := _PDB_HEADER.match(header):
        return [author or id for id, author in _PDB_CHAIN.findall(found[1])]
    word = _first_word(header)
    return [word] if word else []


def _first_word(header: str) -> str:
    """Return a record's name, as a chain can be called, or nothing."""
    word = (header.split() or [""])[0]
    return word if not word or _ID.fullmatch(word) else file_name(word)
