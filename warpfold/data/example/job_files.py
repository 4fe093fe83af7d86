"""Read input files of other programs: Boltz (YAML, FASTA), AlphaFold 3 and its server (JSON), and Chai (FASTA).

A job is a single query. Its proteins are the chains of a complex, with the alignments that the job contains or refers
to. A job with components that AlphaFold2 cannot fold (ligands, DNA, modified residues, bonds) gets an error. Settings
that do not change the folded chains (seeds, affinities, templates) are ignored with a note.

The formats are described in these repositories: jwohlwend/boltz, docs/prediction.md (YAML of version 1, FASTA,
alignments with keys in .csv); google-deepmind/alphafold3, docs/input.md (versions 1 to 4); google-deepmind/alphafold,
server/README.md (version 1); chaidiscovery/chai-lab, README.md and examples. AlphaFold 3 resolves relative paths from
the file's folder, Boltz from the working directory. Here both are tried, the file's folder first.
"""

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from warpfold.data.example.complex import Complex, chain_ids, distinct_names, first_word
from warpfold.data.example.pairing import hash_name, species_keys
from warpfold.data.formats.alignment import Alignment, encode, parse_alignment, plain_sequence, plain_text, table_rows
from warpfold.errors import UserError
from warpfold.files import read_file
from warpfold.geometry.residue import GAP

YAML = (".yaml", ".yml")
JOBS = (*YAML, ".json")
FOREIGN_HEADER = re.compile(  # >A|protein|./msa/a.a3m (Boltz), >protein|name=A (Chai)
    r"[^|\s]+\|(protein|dna|rna|ccd|smiles)(\||\s|$)|(protein|dna|rna|ligand|glycan)\|", re.IGNORECASE
)
# Limits of YAML files. Alignments are separate files, so a job has thousands of characters, and Boltz's jobs 6 levels.
MAX_YAML_CHARACTERS = 300_000
MAX_DIGITS = 40  # of an integer
MAX_YAML_DEPTH = 20
MAX_COPIES = 1000  # of a protein, by `count`
_REMEDY = "Pass Boltz's YAML, AlphaFold 3's JSON or its server's, or FASTA."

# Kinds of molecules in `sequences`, in lower case. `proteinChain` and `dnaSequence` are names of AlphaFold's server.
_PROTEINS = ("protein", "proteinchain")
_OTHERS = {
    **dict.fromkeys(("ligand", "ccd", "smiles"), "a ligand"),
    **dict.fromkeys(("dna", "dnasequence"), "DNA"),
    **dict.fromkeys(("rna", "rnasequence"), "RNA"),
    "ion": "an ion",
    "glycan": "a glycan",
}
# Known keys of jobs and of proteins. Other keys are refused, because they may change the folded system.
_JOB_KEYS = (
    *("name", "sequences", "dialect", "version"),
    *("modelSeeds", "properties", "userCCD", "userCCDPath", "templates"),
)
_BONDS = {"constraints": "constraints", "bondedAtomPairs": "bonds", "covalent_bonds": "bonds"}
_MSAS = ("msa", "unpairedMsa", "unpairedMsaPath", "pairedMsa", "pairedMsaPath")
_CHANGES = {"modifications": "modified residues", "cyclic": "a cyclic chain", "glycans": "glycans"}
_PROTEIN_KEYS = ("id", "count", "sequence", "description", "templates", "useStructureTemplate", "maxTemplateDate")
_PATHS = ("msa", "unpairedMsaPath", "pairedMsaPath", "userCCDPath", "cif", "pdb", "mmcifPath")
# The newest version of each dialect. Boltz's files have no dialect.
_VERSIONS = {None: 1, "alphafold3": 4, "alphafoldserver": 1}
# Descriptions of other files that users may pass, by a top-level key.
_OTHER_FILES = {
    "queries": "OpenFold 3's queries",
    "entities": "a design for BoltzGen",
    "protein_inputs": "an input of RoseTTAFold All-Atom",
    **dict.fromkeys(("atom_plddts", "chain_pair_iptm", "iptm", "ptm", "plddt", "pae"), "scores of a prediction"),
}


@dataclass(frozen=True)
class _Protein:
    """A protein of a job. ids: the chain names of its copies. entry: its content in the file."""

    ids: tuple[str, ...]
    sequence: str
    entry: Mapping[str, Any]


@dataclass(frozen=True)
class _Rows:
    """An alignment of a job.

    kind: msa, unpairedMsa, pairedMsa, or "" without any. keys: uint64 [R]; rows of different chains with equal keys are
    paired, 0 means unpaired. None: rows are paired by their headers.
    """

    sequence: str
    kind: str
    alignment: Alignment
    keys: np.ndarray | None = None


def read_jobs(data: bytes, ending: str, source: str, here: Path, name: str) -> list[Complex]:
    """Read the jobs of a JSON or YAML file, depending on its ending. Another file becomes a job with an error.

    source: the file's name in errors. here: the folder from which relative paths start. name: default name of jobs.
    """
    try:
        text = plain_text(data, source).decode()
        content = _parse_yaml(text, source) if ending in YAML else _parse_json(text, source)
        jobs = content if isinstance(content, list) else [content]
        if not any(isinstance(job, dict) and "sequences" in job for job in jobs):
            description = "is an empty list" if content == [] else "is neither a job nor a list of jobs"
            if isinstance(content, dict):
                other_kinds = [f"looks like {kind}" for key, kind in _OTHER_FILES.items() if key in content]
                description = next(iter(other_kinds), "has no sequences, so it is not a job")
            raise UserError(f"{source}: {description}. {_REMEDY}")
    except UserError as error:
        return [Complex(name, (), (), error=str(error))]
    several = len(jobs) > 1
    names = []
    for number, job in enumerate(jobs, 1):
        job_name = job.get("name") if isinstance(job, dict) else None
        default = f"{name}_{number}" if several else name
        names.append(job_name if job_name and isinstance(job_name, str) else default)
    named = zip(jobs, distinct_names(names))
    return [_read_job(job, name, f"{source}: {name}" if several else source, here) for job, name in named]


def read_fasta_job(headers: Sequence[str], sequences: Sequence[str], source: str, here: Path, name: str) -> Complex:
    """Read FASTA records with headers of Boltz or Chai (`FOREIGN_HEADER`) as a single job. See `read_jobs`."""
    molecules: list[dict[str, dict[str, Any]]] = []
    for header, sequence in zip(headers, sequences):
        if not FOREIGN_HEADER.match(header):
            problem = "is not like the others, >CHAIN|protein|MSA or >protein|name=CHAIN. Use one form for all records"
            return Complex(name, (), (), error=f"{source}: >{header[:60]}: {problem}")
        first, second, *third = header.split()[0].split("|", 2)
        if second.lower() in (*_PROTEINS, *_OTHERS):
            entry = {"ccd": sequence} if second.lower() == "ccd" else {"sequence": sequence, "msa": "".join(third)}
            molecules.append({second: {"id": first, **entry}})
        else:
            # Chai writes modified residues within the sequence, such as (SEP).
            chain = first_word("|".join((second, *third)).removeprefix("name=")) or None
            modified = re.findall(r"[(\[](\w+)[)\]]", sequence) if first.lower() == "protein" else []
            plain = re.sub(r"[(\[]\w+[)\]]", "X", sequence)
            molecules.append({first: {"id": chain, "sequence": plain, "modifications": modified}})
    return _read_job({"sequences": molecules}, name, source, here)


def _parse_json(text: str, source: str) -> Any:
    """Parse JSON. Raises UserError for invalid JSON and for repeated keys, of which `json` would keep only one."""

    def object_from_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            repeated = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
            raise UserError(f"{source}: has {_quote(repeated)} twice in one object. Write two objects, or remove one.")
        return result

    try:
        return json.loads(text, object_pairs_hook=object_from_pairs)
    except json.JSONDecodeError as error:
        raise UserError(f"{source}: line {error.lineno} is not JSON ({error.msg}). Correct it.") from None
    except RecursionError:
        raise UserError(f"{source}: is nested too deeply. Write it as its program describes it.") from None
    except ValueError:
        raise UserError(f"{source}: has a number of thousands of digits. Correct it.") from None


def _parse_yaml(text: str, source: str) -> Any:
    """Parse YAML with limits on size and depth, and without aliases and tags, which could expand to gigabytes.

    Raises UserError for invalid YAML and for repeated keys, of which the YAML loader would keep only one.
    """
    import yaml

    if len(text) > MAX_YAML_CHARACTERS:
        raise UserError(
            f"{source}: has more than {MAX_YAML_CHARACTERS:,} characters. Pass alignments as files of their own."
        )
    try:
        # For each open collection: its keys so far, and whether the next node is a key.
        opened: list[tuple[set[str], Iterator[bool]]] = []
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None):
                raise UserError(f"{source}: has an alias (*) or a tag (!), which are not read. Write the value itself.")
            if isinstance(event, yaml.NodeEvent) and opened and next(opened[-1][1]):
                key, keys = getattr(event, "value", ""), opened[-1][0]
                if key and key in keys:
                    raise UserError(f"{source}: has {_quote(key)} twice in one entry. Begin each entry with a dash.")
                keys.add(key)
            if isinstance(event, yaml.CollectionStartEvent):
                is_mapping = isinstance(event, yaml.MappingStartEvent)
                opened.append((set(), itertools.cycle((is_mapping, False))))
                if len(opened) > MAX_YAML_DEPTH:
                    raise UserError(f"{source}: is nested too deeply. Write it as its program describes it.")
            elif isinstance(event, yaml.CollectionEndEvent):
                opened.pop()
        return yaml.load(text, _build_core_loader())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{source}: line {line} is not YAML ({error.problem}). Correct it.") from None
    except (yaml.YAMLError, ValueError):
        raise UserError(f"{source}: has a character or a number that is not valid YAML. Correct it.") from None


@cache
def _build_core_loader() -> Any:
    """Build a loader for the core schema of YAML 1.2, in which only numbers, true, false and null are not text.

    PyYAML implements YAML 1.1, which also has numbers of base 60 (1:30), dates, and NO for false.
    """
    import yaml

    class CoreLoader(yaml.SafeLoader):
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def integer(loader: Any, node: Any) -> int:
        text = loader.construct_scalar(node)
        if len(text) > MAX_DIGITS:
            raise ValueError(f"a number of {len(text)} digits")
        base = {"0x": 16, "0o": 8}.get(text[:2], 10)
        return int(text[2:] if base != 10 else text, base)

    for tag, pattern, first in (
        ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
        ("bool", r"true|True|TRUE|false|False|FALSE", tuple("tTfF")),
        ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", tuple("-+0123456789")),
        ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", tuple("-+.0123456789")),
    ):
        CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})$"), list(first))
    CoreLoader.add_constructor("tag:yaml.org,2002:int", integer)
    CoreLoader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(loader.construct_scalar(node)))
    return CoreLoader


def _read_job(job: Any, name: str, where: str, here: Path) -> Complex:
    """Convert a job to a query, which has an error if it cannot be folded. where: the job's description in errors."""
    uses = _find_referenced_files(job, here)
    try:
        if not isinstance(job, dict):
            raise UserError(f"{where}: is not an object with sequences. Correct or remove it.")
        proteins, notes = _read_proteins(job, where)
        alignments, pairing_notes = _pair_alignments(_read_alignments(proteins, where, here))
        ids = tuple(id for protein in proteins for id in protein.ids)
        sequences = tuple(protein.sequence for protein in proteins for _ in protein.ids)
        return Complex(name, ids, sequences, tuple(alignments), (*notes, *pairing_notes), uses=uses)
    except UserError as error:
        text = str(error)
        return Complex(name, (), (), error=text if text.startswith(where) else f"{where}: {text}", uses=uses)


def _find_referenced_files(job: Any, here: Path) -> tuple[Path, ...]:
    """List the existing files that a job refers to: alignments, templates and others."""

    def list_at(owner: Any, key: str) -> list[Any]:
        value = owner.get(key) if isinstance(owner, dict) else None
        return value if isinstance(value, list) else []

    molecules = [molecule for item in list_at(job, "sequences") if isinstance(item, dict) for molecule in item.values()]
    owners = [job, *molecules]
    owners += [template for owner in owners for template in list_at(owner, "templates")]
    names = [owner.get(key) for owner in owners if isinstance(owner, dict) for key in _PATHS]
    paths = [_find(name, here) for name in names if isinstance(name, str)]
    return tuple(path.resolve() for path in paths if path is not None)


def _find(text: str, here: Path) -> Path | None:
    """Find a file by its absolute path, or relative to the folder `here` or the working directory."""
    return next((path for path in (here / text, Path(text)) if os.path.isfile(path)), None)


def _read_proteins(job: Mapping[str, Any], where: str) -> tuple[list[_Protein], list[str]]:
    """Read the proteins of a job. Returns them, and notes on settings that are ignored.

    Raises UserError for content that does not follow the format, and for components that AlphaFold2 cannot fold.
    """
    _check_keys(job, (*_JOB_KEYS, *_BONDS), where)
    dialect, version, items = job.get("dialect"), job.get("version"), job.get("sequences")
    if not isinstance(dialect, str | None) or dialect not in _VERSIONS:
        raise UserError(f"{where}: its dialect, {_quote(dialect)}, is unknown. {_REMEDY}")
    newest = _VERSIONS[dialect]
    if version is not None and (type(version) is not int or not 1 <= version <= newest):
        supported = "version 1" if newest == 1 else f"versions 1 to {newest}"
        raise UserError(f"{where}: its version, {_quote(version)}, is unknown. Use {supported}.")
    if not isinstance(job.get("name"), str | None):
        raise UserError(f"{where}: its name, {_quote(job['name'])}, is not text. Put it in quotes.")
    if not isinstance(items, list) or not items:
        raise UserError(f"{where}: its sequences are not a list, or empty. List the proteins there.")
    proteins: list[_Protein] = []
    counts: list[int] = []
    unsupported: list[str] = []
    for number, item in enumerate(items, 1):
        kind, entry = next(iter(item.items())) if isinstance(item, dict) and len(item) == 1 else (None, None)
        entry_name, lower = f"{where}: entry {number}", str(kind).lower()
        if not isinstance(entry, dict) or lower not in (*_PROTEINS, *_OTHERS):
            raise UserError(f"{entry_name}: is not a known molecule, such as `protein: ...`. Correct or remove it.")
        ids = _as_texts(entry.get("id"))
        if ids is None or (not ids and entry.get("id") is not None):
            raise UserError(
                f"{entry_name}: its id, {_quote(entry['id'])}, is neither text nor a list of texts. Put it in quotes."
            )
        if lower in _OTHERS:
            codes = next(filter(None, (_as_texts(entry.get(key)) for key in ("ccd", "ccdCodes", "ligand", "ion"))), [])
            details = ": ".join(filter(None, (_join(ids), _join([code.removeprefix("CCD_") for code in codes]))))
            unsupported.append(f"{_OTHERS[lower]} ({details})" if details else _OTHERS[lower])
            continue
        _check_keys(entry, (*_PROTEIN_KEYS, *_MSAS, *_CHANGES), entry_name)
        sequence = entry.get("sequence")
        if not isinstance(sequence, str) or not sequence.split():
            raise UserError(f"{entry_name}: has no sequence. Write its residues as letters.")
        sequence = plain_sequence(sequence)
        # This raises an error for letters that are not residues.
        encode(sequence, entry_name)
        count = entry.get("count", 1)
        if type(count) is not int or not 1 <= count <= MAX_COPIES:
            raise UserError(
                f"{entry_name}: its count, {_quote(count)}, is not an integer from 1 to {MAX_COPIES}. Correct it."
            )
        changes = [change for key, change in _CHANGES.items() if entry.get(key)]
        unsupported += [f"{change} ({_join(ids) or f'entry {number}'})" for change in changes]
        proteins.append(_Protein(tuple(ids), sequence, entry))
        counts.append(count)
    unsupported += dict.fromkeys(name for key, name in _BONDS.items() if job.get(key))
    if unsupported:
        remedy = "Remove it to fold only the proteins." if proteins else "Add a protein: the job has none."
        raise UserError(f"{where}: has {_join(unsupported)}, which AlphaFold2 cannot fold. {remedy}")
    used_ids = {id for protein in proteins for id in protein.ids}
    free = (id for id in chain_ids(len(used_ids) + sum(counts)) if id not in used_ids)
    all_ids = [protein.ids or tuple(itertools.islice(free, count)) for protein, count in zip(proteins, counts)]
    proteins = [replace(protein, ids=ids) for protein, ids in zip(proteins, all_ids)]

    def any_has(*keys: str) -> bool:
        return any(owner.get(key) for owner in (job, *(protein.entry for protein in proteins)) for key in keys)

    ignored = {
        "modelSeeds are not used: set the number of seeds with --seeds": any_has("modelSeeds"),
        "properties such as affinity are not predicted": any_has("properties"),
        "components of userCCD are not used": any_has("userCCD", "userCCDPath"),
        "templates in the file are not used: pass their structures with --template": any_has("templates"),
        "templates are not searched for: pass hits with --hits": any_has("useStructureTemplate", "maxTemplateDate"),
    }
    return proteins, [note for note, is_requested in ignored.items() if is_requested]


def _read_alignments(proteins: Sequence[_Protein], where: str, here: Path) -> list[_Rows]:
    """Read the alignments of proteins, each one once. A protein that requests no alignment gets one of its own row.

    Raises UserError for a missing file, and for an alignment of another sequence.
    """
    alignments: dict[tuple[str, str, str | Path], _Rows] = {}
    for protein in proteins:
        entry, sequence, chain = protein.entry, protein.sequence, f"{where}: chain {_join(protein.ids[:1])}"
        is_bare = entry.get("msa") == "empty" or entry.get("unpairedMsa") == ""
        fields = [field for field in _MSAS if entry.get(field) and (field, entry[field]) != ("msa", "empty")]
        for field in fields:
            text, kind = entry[field], field.removesuffix("Path")
            if not isinstance(text, str) or (field != kind and kind in fields):
                raise UserError(f"{chain}: its {field} is not text, or it has {kind} too. Keep one of them.")
            path = _find(text, here) if field in _PATHS else None
            if path is None and field in _PATHS:
                raise UserError(
                    f"{chain}: its {field}, {_quote(text)}, does not exist. Correct the path, relative to the file's "
                    "folder or the working directory, or remove it and pass alignments with --msa."
                )
            if (key := (sequence, kind, path or text)) in alignments:
                continue
            data = text.encode(errors="replace") if path is None else read_file(path)
            source = f"{chain}: {field}" if path is None else str(path)
            if path is not None and path.name.lower().removesuffix(".gz").endswith(".csv"):
                alignment, keys = _parse_keyed_table(data, source, sequence)
            else:
                alignment, keys = parse_alignment(data, source, sequence), None
            alignment = replace(alignment, stands_alone=kind != "pairedMsa")
            alignments[key] = _Rows(sequence, kind, alignment, keys)
        if is_bare and not fields:
            alignments[sequence, "", ""] = _Rows(sequence, "", Alignment.of_query(sequence, chain))
    return [*alignments.values()]


def _parse_keyed_table(data: bytes, source: str, sequence: str) -> tuple[Alignment, np.ndarray]:
    """Parse Boltz's alignment table with columns `key` and `sequence` (A3M rows).

    Returns the alignment and the keys, uint64 [R]: rows with equal keys are paired. The key is 0 if the cell is empty,
    -1, or NaN.
    """
    if b"\0" in data:
        raise UserError(f"{source}: has NUL bytes, so it is not a table. Export it again.")
    rows = table_rows(data, source, ("key", "sequence"))
    text = "".join(f">row {number}\n{row}\n" for number, (_, row) in enumerate(rows, 1))
    alignment = parse_alignment(text, source, sequence)
    # pandas writes 1.0 instead of 1 if some keys are missing.
    names = [key.removesuffix(".0") for key, _ in rows]
    keys = [0 if key.lower() in ("", "-1", "nan") else hash_name(f"key {key}") for key in names]
    return alignment, np.array([0, *keys[1:]], np.uint64)


def _pair_alignments(every: Sequence[_Rows]) -> tuple[list[Alignment], list[str]]:
    """Split alignments into unpaired rows and rows with `pair_keys`. Returns the alignments, and notes.

    Rows with keys are paired by their keys. AlphaFold 3's pairedMsa is paired by the organisms in its headers. If these
    name none and all chains have the same number of rows, row i is paired with row i. The rows of unpairedMsa are
    paired by index if there is no pairedMsa and some rows are empty, as AlphaFold 3's documentation recommends for
    manual pairing.
    """
    notes: list[str] = []
    rows = [*every]
    for kind in ("pairedMsa", "unpairedMsa"):
        alignments = [row.alignment for row in rows if row.kind == kind]
        is_empty = [(alignment.rows == GAP).all(1) for alignment in alignments]
        chains = {row.sequence for row in rows if row.kind == kind}
        if len(chains) < 2 or len(set(map(len, alignments))) > 1 or len(alignments[0]) < 2:
            continue
        if kind == "pairedMsa":
            by_index = not any(species_keys(alignment.names[1:]).any() for alignment in alignments)
        else:
            by_index = all(row.kind != "pairedMsa" for row in rows) and any(empty.any() for empty in is_empty)
        if by_index:
            index = np.array([0, *(hash_name(f"row {i}") for i in range(1, len(alignments[0])))], np.uint64)
            keys = iter([np.where(empty, np.uint64(0), index) for empty in is_empty])
            rows = [replace(row, keys=next(keys)) if row.kind == kind else row for row in rows]
            notes.append(f"rows of {kind} are paired by index, the second with the second and so on")
    keys_of_chain: dict[str, set[int]] = {}
    for row in rows:
        keys_of_chain.setdefault(row.sequence, set()).update([] if row.keys is None else row.keys.tolist())
    times = Counter(key for keys in keys_of_chain.values() for key in keys)
    shared = np.array([key for key, count in times.items() if key and count > 1], np.uint64)
    split: list[Alignment] = []
    for row in rows:
        if row.keys is None:
            split.append(row.alignment)
            continue
        first, in_pairs = np.arange(len(row.keys)) == 0, np.isin(row.keys, shared)
        split.append(row.alignment.select(first | ~in_pairs))
        if in_pairs.any():
            pairs = replace(row.alignment, pair_keys=row.keys, stands_alone=False)
            split.append(pairs.select(first | in_pairs))
    return split, notes


def _check_keys(entry: Mapping[Any, Any], known_keys: Collection[str], where: str) -> None:
    """Raise UserError for an unknown key with a value that is not empty."""
    for key, value in entry.items():
        if key not in known_keys and value:
            raise UserError(f"{where}: has {_quote(key)}, which is unknown. Correct or remove it.")


def _as_texts(value: Any) -> list[str] | None:
    """Convert a text or a list of texts to a list. None becomes an empty list; another value returns None."""
    texts = [] if value is None else value if isinstance(value, list) else [value]
    return texts if all(isinstance(text, str) for text in texts) else None


def _quote(value: Any) -> str:
    """Format a value for an error in one short line."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return repr(value[:60] if isinstance(value, str) else value)[:70]


def _join(names: Sequence[str]) -> str:
    """Join at most eight names in one line. Unprintable characters become ?."""
    short = ["".join(c if c.isprintable() else "?" for c in name[:60]) for name in names[:8]]
    return ", ".join(short) + (" ..." if len(names) > 8 else "")
