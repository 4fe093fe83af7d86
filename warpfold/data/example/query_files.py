"""Read what to fold: FASTA, tables, alignments, structures, folders of them, standard input, a sequence itself.

Which records make a complex is never guessed:

* `A:B` in a sequence (ColabFold's form, in FASTA and tables) is a complex of its own, with chains A, B, ...;
* other FASTA records are single proteins or, if the caller asks for that (`as_one`), the chains of one complex, each
  named by its header, which in the PDB's files names all copies (`>2HHB_1|Chains A, C|...`);
* a structure, an alignment of a complex (`#120,88<TAB>1,2`), and AlphaFold-Multimer's `chain_id_map.json` are one
  complex each;
* a folder is all of these, file by file, but alignments of one protein are one query.
"""

import csv
import io
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from warpfold.data.example.complexes import Complex, chain_ids, first_word, search_names
from warpfold.data.formats.alignment import (
    announced,
    as_row,
    fasta_records,
    is_complex,
    parse_chain_alignments,
    parse_fasta,
    plain_text,
)
from warpfold.data.formats.input_files import (
    ALIGNMENTS,
    STRUCTURES,
    InputFile,
    as_alphafold_reads,
    find,
    stacking_order,
)
from warpfold.data.structure.mmcif import parse_structure
from warpfold.errors import UserError
from warpfold.files import file_name, is_given_pipe, read_file
from warpfold.geometry.residue import RESTYPES

FASTA = (".fasta", ".fas", ".fa", ".faa", ".fsa", ".seq")
TABLES = (".csv", ".tsv")
CHAIN_MAP = "chain_id_map.json"  # of AlphaFold-Multimer, in NAME/msas
STDIN = Path("/dev/stdin")
SHORTEST = 10  # letters of a sequence that is given as text; what is shorter may be a word
_PDB_HEADER = re.compile(r"\w+_\d+\|Chains? ([^|]+)\|")  # of rcsb.org's FASTA files: >7W72_4|Chain D[auth K]|...
_PDB_CHAIN = re.compile(r"(\w+)(?:\[auth (\w+)\])?")
_FOREIGN_HEADER = re.compile(  # >A|protein|./msa/a.a3m (Boltz), >protein|name=A (Chai)
    r"[^|\s]+\|(protein|dna|rna|ccd|smiles)(\||$)|(protein|dna|rna|ligand|glycan)\|", re.IGNORECASE
)
_LINE = re.compile(rb"[A-Za-z:*\s]+")
# What predictions are called by AlphaFold (ranked_0.pdb, relaxed_model_1.pdb), ColabFold (NAME_unrelaxed_rank_001_...)
# and WarpFold (NAME_rank_1.cif, NAME_relaxed.cif).
_PREDICTED = re.compile(r"ranked_\d+\.|(.*_)?(un)?relaxed[_.]|.*_rank_\d+\.", re.IGNORECASE)

Given = str | Path


@dataclass(frozen=True)
class QueryFiles:
    """What to fold, each with the file that it stands in, and what else the folders have.

    hits: files of template hits.  predicted: structures that somebody predicted, which are not folded anew.
    """

    found: list[tuple[str, Complex]]
    hits: list[str]
    predicted: list[str]


@dataclass(frozen=True)
class _Read:
    """What was read from one file.

    place: where an alignment is stacked; None: it is none.  is_part: ColabFold has put it into NAME.a3m, too.
    """

    source: str
    query: Complex
    place: int | None = None
    is_part: bool = False

    @property
    def sequences(self) -> set[str]:
        return set(map(as_row, self.query.sequences))

    def joined(self, others: Iterable["_Read"]) -> "_Read":
        """Return the query with the alignments of its sequences from others."""
        every = [self, *others] if self.place is not None else [*others]
        every.sort(key=lambda one: one.place or 0)
        more = [a for one in every for a in one.query.alignments if a.query in self.sequences]
        notes = dict.fromkeys(note for one in (self, *every) for note in one.query.notes)
        return replace(self, query=replace(self.query, alignments=tuple(more), notes=tuple(notes))) if more else self


def read_complexes(given: Given | Sequence[Given], as_one: bool = False) -> list[Complex]:
    """Return what to fold, as `read_query_files` reads it.  Errors: UserError for a bad record too."""
    return [query for _, query in _without_bad(read_query_files(given, as_one).found)]


def _without_bad(found: list[tuple[str, Complex]]) -> list[tuple[str, Complex]]:
    """Return queries as they are; raise UserError for the first that cannot be folded."""
    for _, query in found:
        if query.error:
            raise UserError(query.error)
    return found


def read_query_files(given: Given | Sequence[Given], as_one: bool = False) -> QueryFiles:
    """Read what to fold from files, which may be pipes such as /dev/stdin, from folders, or from text.

    Text is the path of a file or a folder, `-` for standard input, or a sequence itself (`is_sequence`).  By its ending
    a file is a table (.csv, .tsv: columns `id` and `sequence`), a structure (the first biological assembly of an mmCIF
    or PDB file), an alignment, or FASTA; by what is in it if it has none of these endings.  as_one: the records of a
    FASTA file, and sequences given as text, are the chains of one complex; without effect where a record has `:`.
    Alignments of one sequence and name (`InputFile.protein`) are one query; those of a sequence that a record or a
    structure has belong to it.
    A record that cannot be folded is found with its error (`Complex.error`).
    Errors: UserError for a file that cannot be read, two queries or two chains of one name.
    """
    several = [given] if isinstance(given, Given) else list(given)
    bare = [one for one in several if isinstance(one, str) and is_sequence(one)]
    found: list[_Read] = []
    hits: list[str] = []
    predicted: list[str] = []
    for one in several:
        if isinstance(one, str) and one in bare:
            found += _of_texts(bare, as_one) if one is bare[0] else []
            continue
        path = STDIN if one == "-" else Path(one)
        if not path.is_dir():
            _check_path(one)
            found += _read(InputFile(str(path), path), read_file(path, pipe=True), as_one)
            continue
        for file in find([path], (*FASTA, *TABLES, *STRUCTURES, *ALIGNMENTS, CHAIN_MAP, ".hhr"), "queries"):
            if file.is_hits:
                hits.append(file.name)
            elif _PREDICTED.match(file.file) and _ending(file) in STRUCTURES:
                predicted.append(file.name)
            else:
                found += _read(file, file.read_bytes(), as_one)
    if not found:
        raise UserError(f"{several[0]}: has predictions or template hits, but nothing to fold; name other files")
    queries = [(one.source, one.query) for one in _with_alignments(found)]
    _refuse_twice(queries)
    return QueryFiles(queries, hits, predicted)


def is_sequence(text: str) -> bool:
    """Return whether text is a protein's sequence, or several with : in between, rather than the name of a file.

    It has ten letters or more, all of them capitals and of the twenty amino acids or X, and there is no such file.
    """
    letters = text.replace(":", "")
    return len(letters) >= SHORTEST and set(letters) <= {*RESTYPES, "X"} and not Path(text[:200]).exists()


def sequences_to_search(given: Sequence[Given]) -> dict[str, str]:
    """Return the different sequences of the queries by name: NAME, or NAME_CHAIN of a complex's first copy.

    Errors: UserError as in `read_complexes`, and for two of one name.
    """
    found: dict[str, str] = {}
    taken: set[str] = set()
    for source, query in _without_bad(read_query_files(given).found):
        for sequence, name in search_names(query.name, dict(zip(query.ids, query.sequences))).items():
            if name.lower() in taken:
                raise UserError(f"{source}: another sequence is called {name} too; give each protein a name of its own")
            taken.add(name.lower())
            found[name] = sequence
    return found


def _check_path(given: Given) -> None:
    """Raise UserError for text that is no file, but nearly a sequence, and for `-` where nothing is piped in."""
    text = str(given)
    if text == "-" and not (is_given_pipe(STDIN) or STDIN.is_file()):
        raise UserError("-: nothing is piped in; write `command | warpfold predict - ...`, or `< file`")
    if (
        len(text) >= SHORTEST
        and set(text.upper()) <= {*RESTYPES, "X", ":"}
        and text != text.upper()
        and not Path(text[:200]).exists()
    ):
        short = text if len(text) <= 40 else f"{text[:37]}..."
        raise UserError(f"{short}: no such file; if it is a sequence, write it in capitals")
    if not re.fullmatch(r"[A-Z0-9:*-]+", text) or Path(text[:200]).exists() or text == "-":
        return
    wrong = sorted(set(text) - {*RESTYPES, "X", ":"})
    if len(text) >= 2 * SHORTEST and wrong:
        short = text if len(text) <= 40 else f"{text[:37]}..."
        raise UserError(f"{short}: no such file, and no sequence: has {wrong[0]!r}; write it as FASTA, or correct it")
    if not wrong:
        raise UserError(
            f"{text}: no such file; a sequence that is given itself has {SHORTEST} residues or more (others as FASTA)"
        )


def _with_alignments(found: Sequence[_Read]) -> list[_Read]:
    """Return the queries with the alignments that were found beside them, each query once."""
    if all(read.place is None for read in found):
        return [*found]
    chains = {sequence for read in found if read.place is None for sequence in read.sequences}
    beside = [read for read in found if read.place is not None and read.sequences <= chains]
    bad = {read.query.name.lower() for read in found if read.query.error}  # whose alignments are no other proteins
    of_name: dict[str, list[_Read]] = {}
    for read in found:
        if read.place is not None and not read.sequences <= chains and read.query.name.lower() not in bad:
            of_name.setdefault(read.query.name.lower(), []).append(read)
    kept: list[_Read] = []
    for read in found:
        if read.place is None:
            kept.append(read.joined(beside))
        elif own := of_name.pop(read.query.name.lower(), None) if not read.sequences <= chains else None:
            kept += _one_of_name(own)
    return kept


def _one_of_name(found: Sequence[_Read]) -> list[_Read]:
    """Return alignments of one name as one query, that of the most chains, and those of other sequences as they are."""
    whole = max(found, key=lambda read: (len(read.query.sequences), not read.is_part))
    others = [read for read in found if read is not whole and read.sequences <= whole.sequences]
    more = [] if not whole.is_part and all(read.is_part for read in others) else others
    return [whole.joined(more), *(read for read in found if read is not whole and read not in others)]


def _refuse_twice(queries: Iterable[tuple[str, Complex]]) -> None:
    """Raise UserError if two queries have one name; some file systems do not tell A from a."""
    sources: dict[str, str] = {}
    for source, query in queries:
        if (key := query.name.lower()) in sources:
            where = "twice" if sources[key] == source else f"in {sources[key]} too"
            raise UserError(f"{source}: a record is called {query.name} {where}; give each protein a name of its own")
        sources[key] = source


def _ending(file: InputFile) -> str:
    """Return what a file's name ends with, without .gz."""
    return Path(file.file.lower().removesuffix(".gz")).suffix


def _kind(file: InputFile, data: bytes) -> str:
    """Return what a file is, one of the endings: by its name or, where that does not say, by what is in it."""
    if file.file == CHAIN_MAP:
        return CHAIN_MAP
    ending = _ending(file)
    if ending in (*TABLES, *STRUCTURES, *ALIGNMENTS, *FASTA):
        return ending
    text = data.removeprefix(b"\xef\xbb\xbf").lstrip()
    _refuse_other_forms(text, file.name)
    first = text.partition(b"\n")[0].lower()
    if text.startswith(b"# STOCKHOLM") or is_complex(text):
        return ".sto"
    if text.startswith(b">"):
        return ".a3m" if re.search(rb"^[A-Za-z]*-", text, re.MULTILINE) else ".fasta"
    if b"sequence" in first and b"id" in first:
        return ".csv"
    if text.startswith((b"data_", b"HEADER", b"ATOM  ", b"CRYST1", b"REMARK")):
        return ".cif" if text.startswith(b"data_") else ".pdb"
    return ".seq" if _LINE.fullmatch(text.rstrip()) and len(text.split()) == 1 else ".fasta"


def _read(file: InputFile, data: bytes, as_one: bool) -> list[_Read]:
    """Read one file.  See `read_query_files`."""
    kind, path, source = _kind(file, data), file.path, file.name
    name = "query" if path == STDIN else file_name(path.name.split(".")[0])
    if kind in TABLES:
        queries = _of_records(fasta_records(_fasta_of_table(data, source), source, chains=True), source)
    elif kind in STRUCTURES:
        queries = [_of_structure(data, name, source)]
    elif kind == CHAIN_MAP:
        queries = [_of_chain_map(data, file_name(path.parent.parent.name), source)]
    elif kind in ALIGNMENTS:
        name = name if path == STDIN else file_name(file.protein)
        query = _of_alignment(data, name, source, file)
        return [_Read(source, query, stacking_order(file.file), file.is_colabfolds_part)]
    elif kind == ".seq" and not data.lstrip().startswith(b">"):
        queries = _of_fasta(b">query\n" + data, name, source, as_one)
    else:
        queries = _of_fasta(data, name, source, as_one)
    return [_Read(source, query) for query in queries]


def _refuse_other_forms(text: bytes, source: str) -> None:
    """Raise UserError for the input of other programs, by what is in it."""
    if text.startswith((b"{", b"[")):
        what = "JSON, such as AlphaFold 3's or its server's"
    elif re.match(rb"(#[^\n]*\n\s*)*(version|sequences):", text):
        what = "YAML, such as Boltz's"
    else:
        return
    raise UserError(
        f"{source}: is {what}, which is not read; write FASTA (>NAME, and the sequence; chains of a complex as A:B), "
        "and give alignments by --msa"
    )


def _of_texts(sequences: Sequence[str], as_one: bool) -> list[_Read]:
    """Return sequences that were given as text, as records of a FASTA file."""
    names = ["query"] if len(sequences) == 1 else [f"query_{place}" for place in range(1, len(sequences) + 1)]
    together = as_one and len(names) > 1
    ids = chain_ids(len(names)) if together and not any(":" in one for one in sequences) else names
    text = "".join(f">{id}\n{sequence}\n" for id, sequence in zip(ids, sequences))
    return [_Read("the sequences", query) for query in _of_fasta(text.encode(), "query", "the sequences", as_one)]


def _of_fasta(data: bytes, name: str, source: str, as_one: bool) -> list[Complex]:
    """Return the records of FASTA text, or the complex `name` whose chains they are.

    Errors: UserError for another program's headers, and for an alignment.
    """
    records = fasta_records(data, source, chains=True)
    if foreign := [header for header, *_ in records if _FOREIGN_HEADER.match(header)]:
        raise UserError(
            f"{source}: >{foreign[0][:60]}: a header of Boltz or Chai, whose form is not read; write >NAME, chains of "
            "a complex as A:B in one sequence, and give alignments by --msa"
        )
    if len({len(text) for _, text, _ in records}) == 1 and sum("-" in text for _, text, _ in records) > 1:
        raise UserError(f"{source}: has gaps in records of one length, so it is an alignment; call it .a3m")
    ids = [_chains_of(header) for header, *_ in records]
    single = len(records) == 1 and len(ids[0]) < 2
    if not as_one or single or any(":" in sequence for _, sequence, _ in records):
        return _of_records(records, source)
    if wrong := [error for *_, error in records if error]:  # without a chain it is another complex
        return [Complex(name, (), (), error=wrong[0])]
    named = zip(ids, chain_ids(len(records)), records)
    chains = [(id, sequence) for own, letter, (_, sequence, _) in named for id in own or [letter]]
    return [Complex(name, tuple(id for id, _ in chains), tuple(sequence for _, sequence in chains))]


def _of_records(records: Sequence[tuple[str, str, str]], source: str) -> list[Complex]:
    """Return each record as a query of its own; names that files cannot have become different ones, by numbers."""
    found: list[Complex] = []
    headers: dict[str, str] = {}  # by name, as file systems may see it
    given = {header.split()[0].lower() for header, *_ in records if header.strip()}
    for header, text, wrong in records:
        word = (header.split() or ["query"])[0]
        name, sequences = file_name(first_word(header) or "query"), tuple(text.split(":"))
        if name != word and (name.lower() in given or headers.get(name.lower(), word) != word):
            numbered = (f"{name}_{n}" for n in itertools.count(2))
            name = next(new for new in numbered if new.lower() not in headers.keys() | given)
        headers.setdefault(name.lower(), word)
        if not wrong and not all(sequences):
            wrong = f"{source}: >{header[:60]} has a chain without residues; write A:B, with a sequence on both sides"
        ids = tuple(chain_ids(len(sequences)))
        found.append(Complex(name, (), (), error=wrong) if wrong else Complex(name, ids, sequences))
    return found


def _of_structure(data: bytes, name: str, source: str) -> Complex:
    """Return the protein chains of a structure's first assembly; what else it has is left out, and noted."""
    structure = parse_structure(data, source)
    placed = structure.assembly()
    if not placed.chains:
        raise UserError(f"{source}: its first assembly has no protein chain; give a file with proteins")
    sequences = tuple(structure.chains[chain].sequence for chain, _ in placed.chains)
    notes = tuple(f"{what} is left out: {reason}" for what, reason in placed.left_out.items())
    return Complex(name, placed.ids, sequences, notes=notes)


def _of_alignment(data: bytes, name: str, source: str, file: InputFile) -> Complex:
    """Return the chains of an alignment, in the order and the copies that ColabFold's first line gives them."""
    alignments, notes = [], []
    for one in parse_chain_alignments(data, source, row_by_row=file.serves_pairing):
        one, cut = as_alphafold_reads(one, file)
        alignments.append(one)
        notes += cut
    sequences = [one.query for one in alignments if one.stands_alone]  # not those of its pairs, a second time
    sequences = sequences or [one.query for one in alignments]
    _, copies, _ = announced(plain_text(data, source).lstrip(b"\n"), source)
    counts = zip(sequences, copies) if copies else dict.fromkeys(sequences, 1).items()
    chains = tuple(sequence for sequence, count in counts for _ in range(count))
    return Complex(name, tuple(chain_ids(len(chains))), chains, tuple(alignments), tuple(notes))


def _of_chain_map(data: bytes, name: str, source: str) -> Complex:
    """Return the chains that AlphaFold-Multimer lists beside its alignments: {"A": {"sequence": "MKT..."}, ...}.

    Errors: UserError for anything else.
    """
    try:
        chains = {str(id): chain["sequence"] for id, chain in json.loads(data).items()}
        text = "".join(f">{id}\n{sequence}\n" for id, sequence in chains.items())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{source}: is not AlphaFold-Multimer's list of chains; write it again, or remove it") from None
    return Complex(name, tuple(chains), tuple(sequence for _, sequence in parse_fasta(text, source)))


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
    word = first_word(header)
    return [word] if word else []
