"""Read queries: FASTA, tables, alignments, structures, folders of these, standard input, or a sequence itself.

The files define which records form a complex:

* A sequence `A:B` (ColabFold's form, in FASTA and tables) is a complex with chains A, B and so on.
* A row of a table with a column for each chain (`target` and `binder`, or the chains' letters) is a complex.
* Other FASTA records are single proteins or, with `as_one`, the chains of a complex. Each chain is named by its header,
  which in the PDB's files lists all copies (`>2HHB_1|Chains A, C|...`).
* A structure, an alignment of a complex (`#120,88<TAB>1,2`), AlphaFold-Multimer's `chain_id_map.json`, and a job of
  another program (`job_files.py`) are one complex each.
* A folder is read file by file, but alignments of one protein become a single query.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from warpfold.data.example.complex import Complex, chain_ids, distinct_names, first_word
from warpfold.data.example.guess import guess_from_structure
from warpfold.data.example.job_files import FOREIGN_HEADER, JOBS, read_fasta_job, read_jobs
from warpfold.data.example.pairing import pair_rows
from warpfold.data.example.raw_example import Assembly, RawExample, from_sequence
from warpfold.data.formats.alignment import (
    Alignment,
    announced,
    as_row,
    fasta_records,
    is_complex,
    parse_chain_alignments,
    parse_fasta,
    plain_text,
    table_rows,
    table_titles,
)
from warpfold.data.formats.input_files import (
    ALIGNMENTS,
    STRUCTURES,
    ChainAlignments,
    InputFile,
    find,
    limit_as_alphafold,
    stacking_order,
)
from warpfold.data.structure.mmcif import parse_structure
from warpfold.errors import UserError
from warpfold.files import file_name, is_given_pipe, opened, read_file
from warpfold.geometry.residue import RESTYPES

FASTA = (".fasta", ".fas", ".fa", ".faa", ".fsa", ".seq")
TABLES = (".csv", ".tsv")
CHAIN_MAP = "chain_id_map.json"  # AlphaFold-Multimer's, in NAME/msas
STDIN = Path("/dev/stdin")
# Shortest sequence, in letters, that is accepted as an argument. Shorter text may be a word.
MIN_SEQUENCE_LETTERS = 10
# Headers of rcsb.org's FASTA files: >7W72_4|Chain D[auth K]|...
_PDB_HEADER = re.compile(r"\w+_\d+\|Chains? ([^|]+)\|")
_PDB_CHAIN = re.compile(r"(\w+)(?:\[auth (\w+)\])?")
MAX_LISTED_CHAINS = 8
# Columns of tables without a column `sequence`.
_CHAIN_COLUMN = re.compile(r"(target|binder)|(?:chain[ _]?)?([a-z0-9])")
# Headers of designs by ProteinMPNN and LigandMPNN.
_DESIGN = re.compile(r"(T=)?[^\s,]+,.*?\b(?:sample|id)=(\d+)")
_LINE = re.compile(rb"[A-Za-z:*\s]+")
# File names of predictions by AlphaFold (ranked_0.pdb, relaxed_model_1.pdb), ColabFold (NAME_unrelaxed_rank_001_...),
# WarpFold (NAME_rank_1.cif, NAME_relaxed.cif), AlphaFold 3 (NAME_model.cif, model.cif), its server and Boltz
# (NAME_model_0.cif), and Chai (pred.model_idx_0.cif).
_PREDICTED = re.compile(
    r"ranked_\d+\.|(.*_)?(un)?relaxed[_.]|.*_rank_\d+\.|(.*_)?model\.cif|.*_model_\d+\.(cif|pdb)|pred\.model_idx_\d+\.",
    re.IGNORECASE,
)

Given = str | Path


@dataclass(frozen=True)
class QueryFiles:
    """The queries in the user's files.

    hits: files of template hits. predicted: predicted structures, which are not folded again.
    """

    found: list[Complex]
    hits: list[str]
    predicted: list[str]


def search_names(name: str, chains: Mapping[str, str]) -> dict[str, str]:
    """Name the search results of each sequence of a query: NAME, or in a complex NAME_CHAIN with its first copy.

    chains: sequences by chain id. Returns the names by sequence, in the order of the chains. Some file systems ignore
    case, so chain a of a complex that also has a chain A becomes NAME_a_.
    """
    names: dict[str, str] = {}
    for chain, sequence in chains.items():
        if sequence not in names:
            chain_name = name if len(chains) == 1 else file_name(f"{name}_{chain}")
            while chain_name.lower() in map(str.lower, names.values()):
                chain_name += "_"
            names[sequence] = chain_name
    return names


def assemble(
    query: Complex, alignments: ChainAlignments | None = None, cache: dict[str, RawExample] | None = None
) -> tuple[Assembly, list[str]]:
    """Build the raw examples of a query's chains with their alignments. Returns the assembly, and notes for the user.

    Copies share their example. A chain without an alignment gets its own sequence as the only row. cache: examples by
    sequence, built with the same `alignments`, which complexes with equal chains share (such as the target of many
    designs). New examples are added to it.
    Raises UserError for an alignment of another protein, and for a sequence that is not a protein.
    """
    own_alignments: dict[str, list[Alignment]] = {}
    for alignment in query.alignments:
        own_alignments.setdefault(alignment.query, []).append(alignment)
    examples: dict[str, RawExample] = {} if cache is None or own_alignments else cache
    bare: list[str] = []
    single_row: list[str] = []
    for chain, sequence in zip(query.ids, query.sequences):
        stack = own_alignments.get(as_row(sequence), []) + (alignments.of(sequence) if alignments else [])
        bare += [] if stack else [chain]
        if sequence not in examples:
            name = f"{query.name}_{chain}"
            stack = stack or [Alignment.of_query(sequence, name)]
            examples[sequence] = from_sequence(sequence, stack, name, pairing=True)
        single_row += [chain] if chain not in bare and examples[sequence].depth == 1 else []
    notes = [*query.notes]
    if bare and len(query.ids) > 1:
        notes.append(f"no alignment for {list_chains(bare)}: folded by the sequence alone")
    if single_row:
        notes.append(f"the alignment of {list_chains(single_row)} has one row, its own: folded by the sequence alone")
    unique = [examples[sequence] for sequence in dict.fromkeys(query.sequences)]
    deep = [example for example in unique if example.depth > 1]
    if len(deep) > 1 and len(pair_rows([example.pairing for example in unique])) == 1:
        if sum(example.pairing is not None for example in deep) > 1:
            notes.append("no rows are paired: the alignments of different chains have no species in common")
        else:
            notes.append(
                "no rows are paired: the headers of the alignments name no species (UniProt's "
                "tr|A0A0K0ME10|A0A0K0ME10_9STAP, UniRef's RepID=A0A0K0ME10_9STAP, or OX=1295)"
            )
    return Assembly(query.name, query.ids, tuple(examples[sequence] for sequence in query.sequences)), notes


def list_chains(names: Sequence[str]) -> str:
    """Format chain names for a sentence; of more than eight, only the first three are listed."""
    if len(names) > MAX_LISTED_CHAINS:
        return f"{len(names)} chains ({', '.join(names[:3])} ...)"
    return f"{'chain' if len(names) == 1 else 'chains'} {', '.join(names)}"


def read_complexes(sources: Given | Sequence[Given], as_one: bool = False) -> list[Complex]:
    """Read queries as `read_query_files` does, but also raise UserError for an invalid record."""
    queries = read_query_files(sources, as_one).found
    for query in queries:
        if query.error:
            raise UserError(query.error)
    return queries


def read_query_files(sources: Given | Sequence[Given], as_one: bool = False) -> QueryFiles:
    """Read queries from files, which may be pipes such as /dev/stdin, from folders, or from text.

    Text is the path of a file or a folder, `-` for standard input, or a sequence itself (see `is_sequence`). A file is
    a table (.csv, .tsv: columns `id` and `sequence`, or `id` and a column for each chain), a structure (the first
    biological assembly of an mmCIF or PDB file), an alignment, FASTA, or jobs of other programs (.yaml, .json). Its
    ending decides, or its content if the ending is another one. as_one: the records of a FASTA file, and sequences
    passed as text, are the chains of a single complex; ignored if a record contains `:`.

    Alignments of one sequence and name (`InputFile.protein`) form a query, unless a record or a structure has that
    sequence and takes them. The alignment of a complex belongs to the record with its name or its sequences. Otherwise
    it is a separate query, and its rows are not used for other queries that share a chain.

    A record that cannot be folded is returned with its error (`Complex.error`). Raises UserError for a file that cannot
    be read, and for two queries or two chains with one name.
    """
    inputs = [sources] if isinstance(sources, Given) else list(sources)
    is_bare = [isinstance(source, str) and is_sequence(source) for source in inputs]
    bare = [str(source) for source, is_text in zip(inputs, is_bare) if is_text]
    queries: list[Complex] = []
    hits: list[str] = []
    predicted: list[str] = []
    for position, source in enumerate(inputs):
        if is_bare[position]:
            # All sequences are read together, in the position of the first one.
            if position == is_bare.index(True):
                names = ["query"] if len(bare) == 1 else [f"query_{number}" for number in range(1, len(bare) + 1)]
                if as_one and len(bare) > 1 and not any(":" in sequence for sequence in bare):
                    names = chain_ids(len(bare))
                text = "".join(f">{name}\n{sequence}\n" for name, sequence in zip(names, bare)).encode()
                records = _parse_fasta(text, "query", "the sequences", as_one, Path())
                queries += [replace(record, source="the sequences") for record in records]
            continue
        path = STDIN if source == "-" else Path(source)
        if not path.is_dir():
            check_path(source)
            queries += _read_file(InputFile(str(path), path), read_file(path, pipe=True), as_one)
            continue
        files = find([path], (*FASTA, *TABLES, *STRUCTURES, *ALIGNMENTS, *JOBS, ".hhr"), "queries")
        read: dict[str, list[Complex]] = {}
        # Jobs are read first, because the alignments and templates that they refer to are not queries.
        used: set[Path] = set()
        for file in sorted(files, key=lambda file: _file_ending(file) in (*TABLES, *STRUCTURES, *ALIGNMENTS)):
            if file.is_hits:
                hits.append(file.name)
            elif _PREDICTED.match(file.file) and _file_ending(file) in STRUCTURES:
                predicted.append(file.name)
            elif file.path.resolve() not in used and _holds_queries(file):
                read[file.name] = _read_file(file, file.read_bytes(), as_one)
                used.update(path for query in read[file.name] for path in query.uses)
        queries += [query for file in files for query in read.get(file.name, ())]
    if not queries:
        raise UserError(
            f"{inputs[0]}: has no queries, only predictions, template hits or other files. Pass other files."
        )
    queries = _merge_alignments(queries)
    source_of: dict[str, str] = {}
    for query in queries:
        # Some file systems ignore case.
        if (key := query.name.lower()) in source_of:
            other_place = "twice" if source_of[key] == query.source else f"in {source_of[key]} too"
            raise UserError(
                f"{query.source}: a record is called {query.name} {other_place}. Give each protein a unique name."
            )
        source_of[key] = query.source
    return QueryFiles(queries, hits, predicted)


def is_sequence(text: str) -> bool:
    """Return whether text is a protein sequence, or several separated by `:`, rather than the name of a file.

    A sequence has at least ten letters, which are the upper-case letters of the twenty amino acids or X, and there is
    no file with this name.
    """
    letters = text.replace(":", "")
    return len(letters) >= MIN_SEQUENCE_LETTERS and set(letters) <= {*RESTYPES, "X"} and not Path(text[:200]).exists()


def sequences_to_search(sources: Sequence[Given]) -> dict[str, str]:
    """Read the unique sequences of queries by name: NAME, or in a complex NAME_CHAIN with the first copy.

    Raises the errors of `read_complexes`, and UserError for two sequences with one name.
    """
    sequence_of: dict[str, str] = {}
    used_names: set[str] = set()
    for query in read_complexes(sources):
        for sequence, name in search_names(query.name, dict(zip(query.ids, query.sequences))).items():
            if name.lower() in used_names:
                raise UserError(
                    f"{query.source}: another sequence is called {name} too. Give each protein a unique name."
                )
            used_names.add(name.lower())
            sequence_of[name] = sequence
    return sequence_of


def check_path(source: Given) -> None:
    """Raise UserError for a missing file whose name is almost a sequence, and for `-` without piped input."""
    text, letters = str(source), {*RESTYPES, "X", ":"}
    if text == "-":
        if not (is_given_pipe(STDIN) or STDIN.is_file()):
            raise UserError("-: nothing is piped in. Write `command | warpfold predict - ...`, or `< file`.")
        return
    if Path(text[:200]).exists():
        return
    short = text if len(text) <= 40 else f"{text[:37]}..."
    if len(text) >= MIN_SEQUENCE_LETTERS and text != text.upper() and set(text.upper()) <= letters:
        raise UserError(f"{short}: no such file. If it is a sequence, write it in capitals.")
    if re.fullmatch(r"[A-Z0-9:*-]+", text):
        invalid = sorted(set(text) - letters)
        if invalid and len(text) >= 2 * MIN_SEQUENCE_LETTERS:
            raise UserError(
                f"{short}: no such file, and not a sequence: has {invalid[0]!r}. Write it as FASTA, or correct it."
            )
        if not invalid:
            raise UserError(
                f"{text}: no such file. A sequence on the command line needs at least {MIN_SEQUENCE_LETTERS} residues: "
                "write shorter ones as FASTA."
            )


def _merge_alignments(queries: Sequence[Complex]) -> list[Complex]:
    """Merge queries from alignments into the queries that use them.

    The alignments of a record or a structure are added to it. The remaining alignments with one name form a single
    query, that with the most chains; alignments of that name with other sequences stay separate.
    """
    # Encoding the sequences of ten thousand designs takes seconds.
    if all(query.place is None for query in queries):
        return [*queries]
    records = [query for query in queries if query.place is None]
    chains = {row for record in records for row in record.rows}
    # Alignments with the name of an invalid record are not queries.
    invalid = {query.name.lower() for query in queries if query.error}
    donors: list[Complex] = []
    by_name: dict[str, list[Complex]] = {}
    for query in queries:
        if query.place is None:
            continue
        if query.rows <= chains and any(_is_usable(query, record) for record in records):
            donors.append(query)
        elif query.name.lower() not in invalid:
            by_name.setdefault(query.name.lower(), []).append(query)
    merged: list[Complex] = []
    for query in queries:
        if query.place is None:
            merged.append(query.joined(donor for donor in donors if _is_usable(donor, query)))
        elif all(query is not donor for donor in donors) and (group := by_name.pop(query.name.lower(), None)):
            whole = max(group, key=lambda member: (len(member.sequences), not member.is_part))
            parts = [member for member in group if member is not whole and member.rows <= whole.rows]
            # ColabFold's NAME.a3m includes the rows of the downloaded parts already.
            has_all = not whole.is_part and all(part.is_part for part in parts)
            merged += [whole.joined([] if has_all else parts), *(q for q in group if not q.rows <= whole.rows)]
    return merged


def _is_usable(alignment: Complex, record: Complex) -> bool:
    """Return whether an alignment from the same input may be used for a record."""
    has_same_chains = alignment.name.lower() == record.name.lower() or alignment.rows == record.rows
    return has_same_chains or len(alignment.rows) == 1


def _file_ending(file: InputFile) -> str:
    """Return the ending of a file's name in lower case, without .gz."""
    return Path(file.file.lower().removesuffix(".gz")).suffix


def _holds_queries(file: InputFile) -> bool:
    """Return whether a file in a folder holds queries. JSON, YAML and tables are inspected; others are accepted.

    Jobs have `sequences` near the beginning. Tables have a column `id` or `sequence`, but tables with only `key` and
    `sequence` are alignments of Boltz.
    """
    ending = _file_ending(file)
    if ending not in (*JOBS, *TABLES) or file.file == CHAIN_MAP:
        return True
    with opened(file.path) as content:
        head = content.read(1 << 16).removeprefix(b"\xef\xbb\xbf")
    if ending in JOBS:
        return re.search(rb'"sequences"\s*:|^sequences\s*:', head, re.MULTILINE) is not None
    titles = {title.strip(b' \t\r"').lower() for title in re.split(rb"[,\t]", head.partition(b"\n")[0])}
    return bool(titles & {b"id", b"sequence"}) and titles != {b"key", b"sequence"}


def _detect_format(file: InputFile, data: bytes) -> str:
    """Detect the format of a file (one of the endings) from its name or, if the ending is unknown, from its content."""
    if file.file == CHAIN_MAP:
        return CHAIN_MAP
    ending = _file_ending(file)
    if ending in (*TABLES, *STRUCTURES, *ALIGNMENTS, *FASTA, *JOBS):
        return ending
    text = data.removeprefix(b"\xef\xbb\xbf").lstrip()
    if re.match(rb"[{\[]", text):
        return ".json"
    if re.match(rb"(#[^\n]*\n\s*)*(---\s*\n)?(version|sequences):", text):
        return ".yaml"
    first = text.partition(b"\n")[0].lower()
    if text.startswith(b"# STOCKHOLM") or is_complex(text):
        return ".sto"
    if text.startswith(b">"):
        return ".a3m" if re.search(rb"^[A-Za-z]*-", text, re.MULTILINE) else ".fasta"
    if (b"sequence" in first and b"id" in first) or first.startswith(b"sep="):
        return ".csv"
    if text.startswith((b"data_", b"HEADER", b"ATOM  ", b"CRYST1", b"REMARK")):
        return ".cif" if text.startswith(b"data_") else ".pdb"
    return ".seq" if _LINE.fullmatch(text.rstrip()) and len(text.split()) == 1 else ".fasta"


def _read_file(file: InputFile, data: bytes, as_one: bool) -> list[Complex]:
    """Read the queries of a file. See `read_query_files`."""
    kind, path, source = _detect_format(file, data), file.path, file.name
    # Relative paths in the file start here.
    base_folder = Path() if path == STDIN else path.parent
    name = "query" if path == STDIN else file_name(path.name.split(".")[0])
    if kind in TABLES:
        queries = _parse_table(data, source)
    elif kind in JOBS:
        queries = read_jobs(data, kind, source, base_folder, name)
    elif kind in STRUCTURES:
        structure = parse_structure(data, source)
        structure.check_placed(source)
        placed = structure.assembly()
        if not placed.chains:
            raise UserError(f"{source}: its first assembly has no protein chain. Pass a file with proteins.")
        notes = (*structure.notes, *(f"{name} is left out: {reason}" for name, reason in placed.left_out.items()))
        sequences = tuple(structure.chains[chain].sequence for chain, _ in placed.chains)
        guess = guess_from_structure(structure, data, path if path != STDIN and path.is_file() else None, source)
        queries = [Complex(name, placed.ids, sequences, notes=notes, structure=guess)]
    elif kind == CHAIN_MAP:
        name = file_name(path.parent.parent.name)
        try:
            chains = {str(id): chain["sequence"] for id, chain in json.loads(data).items()}
            text = "".join(f">{id}\n{sequence}\n" for id, sequence in chains.items())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(
                f"{source}: is not AlphaFold-Multimer's list of chains. Write it again, or remove it."
            ) from None
        queries = [Complex(name, tuple(chains), tuple(sequence for _, sequence in parse_fasta(text, source)))]
    elif kind in ALIGNMENTS:
        queries = [_parse_alignment(data, name if path == STDIN else file_name(file.protein), file)]
    else:
        bare = kind == ".seq" and not data.lstrip().startswith(b">")
        queries = _parse_fasta(b">query\n" + data if bare else data, name, source, as_one, base_folder)
    return [replace(query, source=source) for query in queries]


def _parse_table(data: bytes, source: str) -> list[Complex]:
    """Parse a table with columns `id` and `sequence`, or `id` and a column for each chain. Other columns are ignored.

    Columns named by a letter or digit (`a`, `chain_a`) name their chains; the chains of `target` and `binder` are
    called A and B. An empty cell means that the complex does not have this chain.
    """
    titles = table_titles(data, source)
    columns = ["sequence"]
    if "sequence" not in titles:
        columns = [title for title in titles if _CHAIN_COLUMN.fullmatch(title)] or columns
    cells = [
        (word, ["".join(cell.split()) for cell in row]) for word, *row in table_rows(data, source, ("id", *columns))
    ]
    text = "".join(f">{word}\n{':'.join(filter(None, row))}\n" for word, row in cells)
    queries = _queries_from_records(fasta_records(text, source, chains=True), [word for word, _ in cells], source)
    letters = [(match[2] or "").upper() for title in columns if (match := _CHAIN_COLUMN.fullmatch(title))]
    if not letters or not all(letters):
        return queries
    if repeated := [letter for letter in letters if letters.count(letter) > 1]:
        raise UserError(f"{source}: has two columns of chain {repeated[0]}. Keep one column for each chain.")
    named = list[Complex]()
    for query, (_, row) in zip(queries, cells):
        ids = tuple(letter for letter, cell in zip(letters, row) if cell)
        if not query.error and len(ids) != len(query.sequences):
            error = (
                f"{source}: {query.name} has : in the column of a chain. Give each chain a column, or write all in "
                "`sequence`"
            )
            query = Complex(query.name, (), (), error=error)
        named.append(query if query.error else replace(query, ids=ids))
    return named


def _parse_fasta(data: bytes, name: str, source: str, as_one: bool, here: Path) -> list[Complex]:
    """Parse FASTA into a query for each record or, with `as_one`, a complex `name` of all records.

    Records of Boltz and Chai always form a complex. Raises UserError for an alignment.
    """
    records = fasta_records(data, source, chains=True)
    if any(FOREIGN_HEADER.match(header) for header, *_ in records):
        return [read_fasta_job([r[0] for r in records], [r[1] for r in records], source, here, name)]
    if len({len(text) for _, text, _ in records}) == 1 and sum("-" in text for _, text, _ in records) > 1:
        raise UserError(f"{source}: has gaps in records of one length, so it is an alignment. Rename it to .a3m.")
    # The chain names of each record: its first word, or all chains in the PDB's header.
    ids = []
    for header, *_ in records:
        match, word = _PDB_HEADER.match(header), first_word(header)
        ids.append([author or id for id, author in _PDB_CHAIN.findall(match[1])] if match else [word] if word else [])
    single = len(records) == 1 and len(ids[0]) < 2
    if not as_one or single or any(":" in sequence for _, sequence, _ in records):
        return _queries_from_records(records, _name_records([header for header, *_ in records]), source)
    # Without the invalid chain it would be another complex.
    if errors := [error for *_, error in records if error]:
        return [Complex(name, (), (), error=errors[0])]
    rows = zip(ids, chain_ids(len(records)), records)
    chains = [(id, sequence) for names, letter, (_, sequence, _) in rows for id in names or [letter]]
    return [Complex(name, tuple(id for id, _ in chains), tuple(sequence for _, sequence in chains))]


def _name_records(headers: Sequence[str]) -> list[str]:
    """Name FASTA records by their first words, and number records with equal names.

    Designs of ProteinMPNN (`T=0.1, sample=1`) and LigandMPNN (`NAME, id=1`) become NAME_1. ProteinMPNN's NAME is that
    of the first record, the backbone.
    """
    words = [(header.split() or ["query"])[0].rstrip(",") or "query" for header in headers]
    for i, header in enumerate(headers):
        if match := _DESIGN.match(header):
            words[i] = f"{words[0] if match[1] else words[i]}_{match[2]}"
    counts, occurrences = Counter(words), Counter[str]()
    for i, word in enumerate(words):
        if counts[word] > 1:
            occurrences[word] += 1
            words[i] = f"{word}_{occurrences[word]}"
    return words


def _queries_from_records(records: Sequence[tuple[str, str, str]], names: Sequence[str], source: str) -> list[Complex]:
    """Convert each record (header, sequence, error) to a query with a name that is valid for a file."""
    queries: list[Complex] = []
    for name, (header, text, error) in zip(distinct_names(names), records):
        sequences = tuple(text.split(":"))
        if not error and not all(sequences):
            error = f"{source}: >{header[:60]} has a chain without residues. Write A:B, with a sequence on both sides"
        ids = tuple(chain_ids(len(sequences)))
        queries.append(Complex(name, (), (), error=error) if error else Complex(name, ids, sequences))
    return queries


def _parse_alignment(data: bytes, name: str, file: InputFile) -> Complex:
    """Parse an alignment into a query with the chains and copies that ColabFold's first line gives, if any."""
    alignments, notes = [], []
    for alignment in parse_chain_alignments(data, file.name, row_by_row=file.serves_pairing):
        alignment, row_notes = limit_as_alphafold(alignment, file)
        alignments.append(alignment)
        notes += row_notes
    # Alignments for pairing repeat the sequences.
    sequences = [alignment.query for alignment in alignments if alignment.stands_alone]
    sequences = sequences or [alignment.query for alignment in alignments]
    _, copies, _ = announced(plain_text(data, file.name).lstrip(b"\n"), file.name)
    counts = zip(sequences, copies) if copies else dict.fromkeys(sequences, 1).items()
    chains = tuple(sequence for sequence, count in counts for _ in range(count))
    return Complex(
        name,
        tuple(chain_ids(len(chains))),
        chains,
        tuple(alignments),
        tuple(notes),
        place=stacking_order(file.file),
        is_part=file.is_colabfold_download,
    )
