"""Read what to fold: FASTA, tables, alignments, structures, folders of them, standard input, a sequence itself.

Which records make a complex is never guessed:

* `A:B` in a sequence (ColabFold's form, in FASTA and tables) is a complex of its own, with chains A, B, ...;
* so is a row of a table that has a column for each chain, `target` and `binder`, or their letters;
* other FASTA records are single proteins or, if the caller asks for that (`as_one`), the chains of one complex, each
  named by its header, which in the PDB's files names all copies (`>2HHB_1|Chains A, C|...`);
* a structure, an alignment of a complex (`#120,88<TAB>1,2`), AlphaFold-Multimer's `chain_id_map.json`, and a job of
  another program (`job_files.py`) are one complex each;
* a folder is all of these, file by file, but alignments of one protein are one query.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from warpfold.data.example.complex import Complex, chain_ids, distinct_names, first_word
from warpfold.data.example.guess import guess_of_structure
from warpfold.data.example.job_files import FOREIGN_HEADER, JOBS, job_of_fasta, jobs_of_text
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
    as_alphafold_reads,
    find,
    stacking_order,
)
from warpfold.data.structure.mmcif import parse_structure
from warpfold.errors import UserError
from warpfold.files import file_name, is_given_pipe, opened, read_file
from warpfold.geometry.residue import RESTYPES

FASTA = (".fasta", ".fas", ".fa", ".faa", ".fsa", ".seq")
TABLES = (".csv", ".tsv")
CHAIN_MAP = "chain_id_map.json"  # of AlphaFold-Multimer, in NAME/msas
STDIN = Path("/dev/stdin")
SHORTEST = 10  # letters of a sequence that is given as text; what is shorter may be a word
_PDB_HEADER = re.compile(r"\w+_\d+\|Chains? ([^|]+)\|")  # of rcsb.org's FASTA files: >7W72_4|Chain D[auth K]|...
_PDB_CHAIN = re.compile(r"(\w+)(?:\[auth (\w+)\])?")
MOST_LISTED = 8  # chains in one line
_CHAIN_COLUMN = re.compile(r"(target|binder)|(?:chain[ _]?)?([a-z0-9])")  # of tables without a column `sequence`
_DESIGN = re.compile(r"(T=)?[^\s,]+,.*?\b(?:sample|id)=(\d+)")  # of ProteinMPNN and LigandMPNN
_LINE = re.compile(rb"[A-Za-z:*\s]+")
# What predictions are called by AlphaFold (ranked_0.pdb, relaxed_model_1.pdb), ColabFold (NAME_unrelaxed_rank_001_...),
# WarpFold (NAME_rank_1.cif, NAME_relaxed.cif), AlphaFold 3 (NAME_model.cif, model.cif), its server and Boltz
# (NAME_model_0.cif), and Chai (pred.model_idx_0.cif).
_PREDICTED = re.compile(
    r"ranked_\d+\.|(.*_)?(un)?relaxed[_.]|.*_rank_\d+\.|(.*_)?model\.cif|.*_model_\d+\.(cif|pdb)|pred\.model_idx_\d+\.",
    re.IGNORECASE,
)

Given = str | Path


@dataclass(frozen=True)
class QueryFiles:
    """What to fold, and what else the folders have.

    hits: files of template hits.  predicted: structures that somebody predicted, which are not folded anew.
    """

    found: list[Complex]
    hits: list[str]
    predicted: list[str]


def search_names(name: str, chains: Mapping[str, str]) -> dict[str, str]:
    """Name the results of searching for each sequence: NAME, or NAME_CHAIN of a complex's first copy.

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


def assemble(
    query: Complex, alignments: ChainAlignments | None = None, made: dict[str, RawExample] | None = None
) -> tuple[Assembly, list[str]]:
    """Return a complex with the alignments of its chains, and what the user should know about it, a line each.

    Copies share their example.  A chain without alignment has its own row alone.  made: of sequences, with these
    alignments, that are in other complexes too, such as the target of many designs; new ones are added.
    Errors: UserError for an alignment of another protein, or a sequence that is no protein's.
    """
    given: dict[str, list[Alignment]] = {}
    for alignment in query.alignments:
        given.setdefault(alignment.query, []).append(alignment)
    examples: dict[str, RawExample] = {} if made is None or given else made
    bare: list[str] = []
    thin: list[str] = []
    for chain, sequence in zip(query.ids, query.sequences):
        own = given.get(as_row(sequence), []) + (alignments.of(sequence) if alignments else [])
        bare += [] if own else [chain]
        if sequence not in examples:
            name = f"{query.name}_{chain}"
            examples[sequence] = from_sequence(
                sequence, own or [Alignment.of_query(sequence, name)], name, pairing=True
            )
        thin += [chain] if own and examples[sequence].depth == 1 else []
    notes = [*query.notes]
    if bare and len(query.ids) > 1:
        notes.append(f"no alignment for {listed(bare)}: folded by the sequence alone")
    if thin:
        notes.append(f"the alignment of {listed(thin)} has one row, its own: folded by the sequence alone")
    own_examples = [examples[sequence] for sequence in dict.fromkeys(query.sequences)]
    deep = [one for one in own_examples if one.depth > 1]
    if len(deep) > 1 and len(pair_rows([one.pairing for one in own_examples])) == 1:
        if sum(one.pairing is not None for one in deep) > 1:
            notes.append("no rows are paired: the alignments of different chains have no species in common")
        else:
            notes.append(
                "no rows are paired: the headers of the alignments name no species (UniProt's "
                "tr|A0A0K0ME10|A0A0K0ME10_9STAP, UniRef's RepID=A0A0K0ME10_9STAP, or OX=1295)"
            )
    return Assembly(query.name, query.ids, tuple(examples[sequence] for sequence in query.sequences)), notes


def listed(names: Sequence[str]) -> str:
    """Return chains as a sentence names them, some of them if there are many."""
    if len(names) > MOST_LISTED:
        return f"{len(names)} chains ({', '.join(names[:3])} ...)"
    return f"{'chain' if len(names) == 1 else 'chains'} {', '.join(names)}"


def read_complexes(given: Given | Sequence[Given], as_one: bool = False) -> list[Complex]:
    """Read proteins and complexes as `read_query_files` does.  Errors: UserError for a bad record too."""
    found = read_query_files(given, as_one).found
    for query in found:
        if query.error:
            raise UserError(query.error)
    return found


def read_query_files(given: Given | Sequence[Given], as_one: bool = False) -> QueryFiles:
    """Read what to fold from files, which may be pipes such as /dev/stdin, from folders, or from text.

    Text is the path of a file or a folder, `-` for standard input, or a sequence itself (`is_sequence`).  By its ending
    a file is a table (.csv, .tsv: columns `id` and `sequence`, or `id` and one for each chain), a structure (the first
    biological assembly of an mmCIF or PDB file), an alignment, FASTA, or jobs of other programs (.yaml, .json); by what
    is in it if it has another ending.  as_one: the records of a FASTA file, and sequences given as text, are the chains
    of one complex; without effect where a record has `:`.
    Alignments of one sequence and name (`InputFile.protein`) are one query; those of a sequence that a record or a
    structure has belong to it.  The alignment of a complex belongs to a record of its name, or of the same sequences;
    otherwise it is a query of its own, and its rows are not offered to others that share a chain.
    A record that cannot be folded is found with its error (`Complex.error`).
    Errors: UserError for a file that cannot be read, two queries or two chains of one name.
    """
    several = [given] if isinstance(given, Given) else list(given)
    bare = [one for one in several if isinstance(one, str) and is_sequence(one)]
    found: list[Complex] = []
    hits: list[str] = []
    predicted: list[str] = []
    for one in several:
        if isinstance(one, str) and one in bare:
            if one is bare[0]:
                names = ["query"] if len(bare) == 1 else [f"query_{place}" for place in range(1, len(bare) + 1)]
                if as_one and len(bare) > 1 and not any(":" in sequence for sequence in bare):
                    names = chain_ids(len(bare))
                text = "".join(f">{name}\n{sequence}\n" for name, sequence in zip(names, bare)).encode()
                records = _of_fasta(text, "query", "the sequences", as_one, Path())
                found += [replace(record, source="the sequences") for record in records]
            continue
        path = STDIN if one == "-" else Path(one)
        if not path.is_dir():
            check_path(one)
            found += _read(InputFile(str(path), path), read_file(path, pipe=True), as_one)
            continue
        files = find([path], (*FASTA, *TABLES, *STRUCTURES, *ALIGNMENTS, *JOBS, ".hhr"), "queries")
        read: dict[str, list[Complex]] = {}
        used: set[Path] = set()  # by jobs, which are read first: their alignments and templates are no queries
        for file in sorted(files, key=lambda file: _ending(file) in (*TABLES, *STRUCTURES, *ALIGNMENTS)):
            if file.is_hits:
                hits.append(file.name)
            elif _PREDICTED.match(file.file) and _ending(file) in STRUCTURES:
                predicted.append(file.name)
            elif file.path.resolve() not in used and _holds_queries(file):
                read[file.name] = _read(file, file.read_bytes(), as_one)
                used.update(path for one in read[file.name] for path in one.uses)
        found += [one for file in files for one in read.get(file.name, ())]
    if not found:
        raise UserError(
            f"{several[0]}: has nothing to fold, but predictions, template hits or other files; name other files"
        )
    queries = _with_alignments(found)
    sources: dict[str, str] = {}
    for query in queries:
        if (key := query.name.lower()) in sources:  # some file systems do not tell A from a
            where = "twice" if sources[key] == query.source else f"in {sources[key]} too"
            raise UserError(
                f"{query.source}: a record is called {query.name} {where}; give each protein a name of its own"
            )
        sources[key] = query.source
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
    for query in read_complexes(given):
        for sequence, name in search_names(query.name, dict(zip(query.ids, query.sequences))).items():
            if name.lower() in taken:
                raise UserError(
                    f"{query.source}: another sequence is called {name} too; give each protein a name of its own"
                )
            taken.add(name.lower())
            found[name] = sequence
    return found


def check_path(given: Given) -> None:
    """Raise UserError for text that is no file, but nearly a sequence, and for `-` where nothing is piped in."""
    text, letters = str(given), {*RESTYPES, "X", ":"}
    if text == "-":
        if not (is_given_pipe(STDIN) or STDIN.is_file()):
            raise UserError("-: nothing is piped in; write `command | warpfold predict - ...`, or `< file`")
        return
    if Path(text[:200]).exists():
        return
    short = text if len(text) <= 40 else f"{text[:37]}..."
    if len(text) >= SHORTEST and text != text.upper() and set(text.upper()) <= letters:
        raise UserError(f"{short}: no such file; if it is a sequence, write it in capitals")
    if re.fullmatch(r"[A-Z0-9:*-]+", text):
        wrong = sorted(set(text) - letters)
        if wrong and len(text) >= 2 * SHORTEST:
            raise UserError(
                f"{short}: no such file, and no sequence: has {wrong[0]!r}; write it as FASTA, or correct it"
            )
        if not wrong:
            raise UserError(
                f"{text}: no such file; a sequence that is given itself has {SHORTEST} residues or more (others as "
                "FASTA)"
            )


def _with_alignments(found: Sequence[Complex]) -> list[Complex]:
    """Return the queries with the alignments that were found beside them, each query once.

    Alignments of one name are one query, that of the most chains; those of other sequences stay as they are.
    """
    if all(one.place is None for one in found):
        return [*found]
    chains = {row for one in found if one.place is None for row in one.rows}
    bad = {one.name.lower() for one in found if one.error}  # whose alignments are no other proteins
    records = [one for one in found if one.place is None]
    beside: list[Complex] = []
    of_name: dict[str, list[Complex]] = {}
    for one in found:
        if one.place is not None and one.rows <= chains and any(_serves(one, record) for record in records):
            beside.append(one)
        elif one.place is not None and one.name.lower() not in bad:
            of_name.setdefault(one.name.lower(), []).append(one)
    kept: list[Complex] = []
    for one in found:
        if one.place is None:
            kept.append(one.joined(each for each in beside if _serves(each, one)))
        elif all(one is not each for each in beside) and (own := of_name.pop(one.name.lower(), None)):
            whole = max(own, key=lambda each: (len(each.sequences), not each.is_part))
            parts = [each for each in own if each is not whole and each.rows <= whole.rows]
            has_all = not whole.is_part and all(each.is_part for each in parts)
            kept += [whole.joined([] if has_all else parts), *(each for each in own if not each.rows <= whole.rows)]
    return kept


def _serves(alignment: Complex, record: Complex) -> bool:
    """Return whether an alignment that was given together with a record may be used for it."""
    is_own = alignment.name.lower() == record.name.lower() or alignment.rows == record.rows
    return is_own or len(alignment.rows) == 1


def _ending(file: InputFile) -> str:
    """Return the ending of a file's name, without .gz."""
    return Path(file.file.lower().removesuffix(".gz")).suffix


def _holds_queries(file: InputFile) -> bool:
    """Tell whether a file of a folder is meant as queries: JSON, YAML and tables may be anything.

    Jobs have `sequences` near the beginning; tables a column `id` or `sequence`, and alignments of Boltz `key` as well.
    """
    ending = _ending(file)
    if ending not in (*JOBS, *TABLES) or file.file == CHAIN_MAP:
        return True
    with opened(file.path) as content:
        head = content.read(1 << 16).removeprefix(b"\xef\xbb\xbf")
    if ending in JOBS:
        return re.search(rb'"sequences"\s*:|^sequences\s*:', head, re.MULTILINE) is not None
    titles = {title.strip(b' \t\r"').lower() for title in re.split(rb"[,\t]", head.partition(b"\n")[0])}
    return bool(titles & {b"id", b"sequence"}) and titles != {b"key", b"sequence"}


def _kind(file: InputFile, data: bytes) -> str:
    """Return the kind of a file, one of the endings: by its name or, where that does not say, by its content."""
    if file.file == CHAIN_MAP:
        return CHAIN_MAP
    ending = _ending(file)
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


def _read(file: InputFile, data: bytes, as_one: bool) -> list[Complex]:
    """Read one file.  See `read_query_files`."""
    kind, path, source = _kind(file, data), file.path, file.name
    here = Path() if path == STDIN else path.parent  # where the paths in it begin
    name = "query" if path == STDIN else file_name(path.name.split(".")[0])
    if kind in TABLES:
        found = _of_table(data, source)
    elif kind in JOBS:
        found = jobs_of_text(data, kind, source, here, name)
    elif kind in STRUCTURES:
        structure = parse_structure(data, source)
        structure.check_placed(source)
        placed = structure.assembly()  # its first; what else it has is left out, and noted
        if not placed.chains:
            raise UserError(f"{source}: its first assembly has no protein chain; give a file with proteins")
        notes = (*structure.notes, *(f"{what} is left out: {reason}" for what, reason in placed.left_out.items()))
        sequences = tuple(structure.chains[chain].sequence for chain, _ in placed.chains)
        own = guess_of_structure(structure, data, path if path != STDIN and path.is_file() else None, source)
        found = [Complex(name, placed.ids, sequences, notes=notes, structure=own)]
    elif kind == CHAIN_MAP:
        name = file_name(path.parent.parent.name)
        try:
            chains = {str(id): chain["sequence"] for id, chain in json.loads(data).items()}
            text = "".join(f">{id}\n{sequence}\n" for id, sequence in chains.items())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(
                f"{source}: is not AlphaFold-Multimer's list of chains; write it again, or remove it"
            ) from None
        found = [Complex(name, tuple(chains), tuple(sequence for _, sequence in parse_fasta(text, source)))]
    elif kind in ALIGNMENTS:
        found = [_of_alignment(data, name if path == STDIN else file_name(file.protein), file)]
    else:
        bare = kind == ".seq" and not data.lstrip().startswith(b">")
        found = _of_fasta(b">query\n" + data if bare else data, name, source, as_one, here)
    return [replace(one, source=source) for one in found]


def _of_table(data: bytes, source: str) -> list[Complex]:
    """Return the rows of a table: of columns `id` and `sequence`, or `id` and one for each chain; others do not count.

    Columns of one letter or digit, or `chain_a`, name their chains; those of `target` and `binder` are called A, B ...
    An empty cell is a chain that a complex does not have.
    """
    titles = table_titles(data, source)
    columns = ["sequence"]
    if "sequence" not in titles:
        columns = [title for title in titles if _CHAIN_COLUMN.fullmatch(title)] or columns
    cells = [
        (word, ["".join(cell.split()) for cell in row]) for word, *row in table_rows(data, source, ("id", *columns))
    ]
    text = "".join(f">{word}\n{':'.join(filter(None, row))}\n" for word, row in cells)
    found = _of_records(fasta_records(text, source, chains=True), [word for word, _ in cells], source)
    letters = [(match[2] or "").upper() for title in columns if (match := _CHAIN_COLUMN.fullmatch(title))]
    if not letters or not all(letters):
        return found
    if twice := [letter for letter in letters if letters.count(letter) > 1]:
        raise UserError(f"{source}: has two columns of chain {twice[0]}; give each chain one")
    named = list[Complex]()
    for one, (_, row) in zip(found, cells):
        ids = tuple(letter for letter, cell in zip(letters, row) if cell)
        if not one.error and len(ids) != len(one.sequences):
            wrong = (
                f"{source}: {one.name} has : in the column of a chain; give each chain a column, or all in `sequence`"
            )
            one = Complex(one.name, (), (), error=wrong)
        named.append(one if one.error else replace(one, ids=ids))
    return named


def _of_fasta(data: bytes, name: str, source: str, as_one: bool, here: Path) -> list[Complex]:
    """Return the records of FASTA text, or the complex `name` whose chains they are; Boltz's and Chai's always are.

    Errors: UserError for an alignment.
    """
    records = fasta_records(data, source, chains=True)
    if any(FOREIGN_HEADER.match(header) for header, *_ in records):
        return [job_of_fasta([one[0] for one in records], [one[1] for one in records], source, here, name)]
    if len({len(text) for _, text, _ in records}) == 1 and sum("-" in text for _, text, _ in records) > 1:
        raise UserError(f"{source}: has gaps in records of one length, so it is an alignment; call it .a3m")
    ids = []  # of each record: its first word, or all the chains that the PDB's header names
    for header, *_ in records:
        named, word = _PDB_HEADER.match(header), first_word(header)
        ids.append([author or id for id, author in _PDB_CHAIN.findall(named[1])] if named else [word] if word else [])
    single = len(records) == 1 and len(ids[0]) < 2
    if not as_one or single or any(":" in sequence for _, sequence, _ in records):
        return _of_records(records, _record_names([header for header, *_ in records]), source)
    if wrong := [error for *_, error in records if error]:  # without a chain it is another complex
        return [Complex(name, (), (), error=wrong[0])]
    each = zip(ids, chain_ids(len(records)), records)
    chains = [(id, sequence) for own, letter, (_, sequence, _) in each for id in own or [letter]]
    return [Complex(name, tuple(id for id, _ in chains), tuple(sequence for _, sequence in chains))]


def _record_names(headers: Sequence[str]) -> list[str]:
    """Name FASTA records by their first words; records of one name are numbered.

    ProteinMPNN calls its designs `T=0.1, sample=1`, and LigandMPNN `NAME, id=1`: they become NAME_1, with the NAME of
    the first record, which is the backbone.
    """
    words = [(header.split() or ["query"])[0].rstrip(",") or "query" for header in headers]
    for i, header in enumerate(headers):
        if found := _DESIGN.match(header):
            words[i] = f"{words[0] if found[1] else words[i]}_{found[2]}"
    counts, seen = Counter(words), Counter[str]()
    for i, word in enumerate(words):
        if counts[word] > 1:
            seen[word] += 1
            words[i] = f"{word}_{seen[word]}"
    return words


def _of_records(records: Sequence[tuple[str, str, str]], names: Sequence[str], source: str) -> list[Complex]:
    """Return each record as a query of its own, with a name that a file can have."""
    found: list[Complex] = []
    for name, (header, text, wrong) in zip(distinct_names(names), records):
        sequences = tuple(text.split(":"))
        if not wrong and not all(sequences):
            wrong = f"{source}: >{header[:60]} has a chain without residues; write A:B, with a sequence on both sides"
        ids = tuple(chain_ids(len(sequences)))
        found.append(Complex(name, (), (), error=wrong) if wrong else Complex(name, ids, sequences))
    return found


def _of_alignment(data: bytes, name: str, file: InputFile) -> Complex:
    """Return the chains of an alignment, in the order and the copies that ColabFold's first line gives them."""
    alignments, notes = [], []
    for one in parse_chain_alignments(data, file.name, row_by_row=file.serves_pairing):
        one, cut = as_alphafold_reads(one, file)
        alignments.append(one)
        notes += cut
    sequences = [one.query for one in alignments if one.stands_alone]  # not those of its pairs, a second time
    sequences = sequences or [one.query for one in alignments]
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
        is_part=file.is_colabfolds_part,
    )
