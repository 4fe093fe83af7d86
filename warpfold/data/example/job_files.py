"""Read the inputs of other programs: Boltz's YAML and FASTA, AlphaFold 3's JSON, its server's, and Chai's FASTA.

A job is one query: its proteins are the chains of one complex, with the alignments that it names or holds.  What
AlphaFold2 cannot fold (ligands, DNA, modified residues, bonds ...) is refused, job by job; what can be left out without
folding other chains (seeds, affinities, templates) is noted.

The formats are described in these repositories: jwohlwend/boltz, docs/prediction.md (YAML of version 1, FASTA,
alignments with keys in .csv); google-deepmind/alphafold3, docs/input.md (versions 1 to 4); google-deepmind/alphafold,
server/README.md (version 1); chaidiscovery/chai-lab, README.md and examples.  Relative paths begin at the file's folder
for AlphaFold 3 and at the working directory for Boltz; here both are tried, the file's folder first.
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
from warpfold.data.example.pairing import key_of, species_keys
from warpfold.data.formats.alignment import Alignment, encode, parse_alignment, plain_sequence, plain_text, table_rows
from warpfold.errors import UserError
from warpfold.files import read_file
from warpfold.geometry.residue import GAP

YAML = (".yaml", ".yml")
JOBS = (*YAML, ".json")
FOREIGN_HEADER = re.compile(  # >A|protein|./msa/a.a3m (Boltz), >protein|name=A (Chai)
    r"[^|\s]+\|(protein|dna|rna|ccd|smiles)(\||\s|$)|(protein|dna|rna|ligand|glycan)\|", re.IGNORECASE
)
LARGEST_YAML = 300_000  # characters; alignments are files of their own, so a job has thousands
MOST_DIGITS = 40  # of a whole number in YAML
DEEPEST_YAML = 20  # levels; Boltz's have 6
MOST_COPIES = 1000  # of a protein, by `count`
_READ = "give Boltz's YAML, AlphaFold 3's JSON or its server's, or FASTA"

# What stands in `sequences`, in lower case: `proteinChain`, `dnaSequence` and the like are the server's.
_PROTEINS = ("protein", "proteinchain")
_OTHERS = {
    **dict.fromkeys(("ligand", "ccd", "smiles"), "a ligand"),
    **dict.fromkeys(("dna", "dnasequence"), "DNA"),
    **dict.fromkeys(("rna", "rnasequence"), "RNA"),
    "ion": "an ion",
    "glycan": "a glycan",
}
# Keys of jobs and of proteins.  Any other is refused, for it may change what is to be folded.
_OF_JOB = ("name", "sequences", "dialect", "version", "modelSeeds", "properties", "userCCD", "userCCDPath", "templates")
_BONDS = {"constraints": "constraints", "bondedAtomPairs": "bonds", "covalent_bonds": "bonds"}
_MSAS = ("msa", "unpairedMsa", "unpairedMsaPath", "pairedMsa", "pairedMsaPath")
_CHANGES = {"modifications": "modified residues", "cyclic": "a cyclic chain", "glycans": "glycans"}
_OF_PROTEIN = ("id", "count", "sequence", "description", "templates", "useStructureTemplate", "maxTemplateDate")
_PATHS = ("msa", "unpairedMsaPath", "pairedMsaPath", "userCCDPath", "cif", "pdb", "mmcifPath")
_VERSIONS = {None: 1, "alphafold3": 4, "alphafoldserver": 1}  # the newest of each dialect; Boltz names none
_LOOKS = {  # like what else people may give, by a key at its top
    "queries": "OpenFold 3's queries",
    "entities": "a design for BoltzGen",
    "protein_inputs": "an input of RoseTTAFold All-Atom",
    **dict.fromkeys(("atom_plddts", "chain_pair_iptm", "iptm", "ptm", "plddt", "pae"), "scores of a prediction"),
}


@dataclass(frozen=True)
class _Protein:
    """A protein of a job, with the names of its copies."""

    ids: tuple[str, ...]
    sequence: str
    given: Mapping[str, Any]  # as the file has it


@dataclass(frozen=True)
class _Rows:
    """An alignment of a job.  keys: which rows of other chains its rows belong to, uint64 [R], 0: none; None: as their
    headers say.
    """

    sequence: str
    kind: str  # msa, unpairedMsa or pairedMsa
    alignment: Alignment
    keys: np.ndarray | None = None


def jobs_of_text(data: bytes, ending: str, source: str, here: Path, name: str) -> list[Complex]:
    """Read a file of JSON, or of YAML by its ending.  One that is none of the formats is a job with an error.

    source: the file in errors.  here: the folder at which relative paths begin.  name: of jobs that have none.
    """
    try:
        text = plain_text(data, source).decode()
        content = _parse_yaml(text, source) if ending in YAML else _parse_json(text, source)
        jobs = content if isinstance(content, list) else [content]
        if not any(isinstance(job, dict) and "sequences" in job for job in jobs):
            raise UserError(f"{source}: {_looks_like(content)}; {_READ}")
    except UserError as error:
        return [Complex(name, (), (), error=str(error))]
    several = len(jobs) > 1
    given = [job.get("name") if isinstance(job, dict) else None for job in jobs]
    called = [
        one if one and isinstance(one, str) else f"{name}_{n}" if several else name for n, one in enumerate(given, 1)
    ]
    named = zip(jobs, distinct_names(called))
    return [_job(job, own, f"{source}: {own}" if several else source, here) for job, own in named]


def job_of_fasta(headers: Sequence[str], sequences: Sequence[str], source: str, here: Path, name: str) -> Complex:
    """Read records with headers of Boltz or Chai (`FOREIGN_HEADER`) as one job.  The rest is as of `jobs_of_text`."""
    molecules: list[dict[str, dict[str, Any]]] = []
    for header, sequence in zip(headers, sequences):
        if not FOREIGN_HEADER.match(header):
            said = "has not the form of the others, >CHAIN|protein|MSA or >protein|name=CHAIN; write all records alike"
            return Complex(name, (), (), error=f"{source}: >{header[:60]}: {said}")
        first, second, *rest = header.split()[0].split("|", 2)
        if second.lower() in (*_PROTEINS, *_OTHERS):
            given = {"ccd": sequence} if second.lower() == "ccd" else {"sequence": sequence, "msa": "".join(rest)}
            molecules.append({second: {"id": first, **given}})
        else:  # Chai's, which has modified residues within the sequence: (SEP)
            chain = first_word("|".join((second, *rest)).removeprefix("name=")) or None
            modified = re.findall(r"[(\[](\w+)[)\]]", sequence) if first.lower() == "protein" else []
            plain = re.sub(r"[(\[]\w+[)\]]", "X", sequence)
            molecules.append({first: {"id": chain, "sequence": plain, "modifications": modified}})
    return _job({"sequences": molecules}, name, source, here)


def _parse_json(text: str, source: str) -> Any:
    """Parse JSON.  Errors: UserError, also for an object with a key that it has twice, of which one would be lost."""

    def of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
            raise UserError(f"{source}: has {_shown(twice)} twice in one object; write two objects, or remove one")
        return found

    try:
        return json.loads(text, object_pairs_hook=of_pairs)
    except json.JSONDecodeError as error:
        raise UserError(f"{source}: line {error.lineno} is no JSON ({error.msg}); correct it") from None
    except RecursionError:
        raise UserError(f"{source}: is nested too deep; write it as its program describes it") from None
    except ValueError:
        raise UserError(f"{source}: has a number of thousands of digits; correct it") from None


def _parse_yaml(text: str, source: str) -> Any:
    """Parse YAML that is small, flat, and without aliases and tags, by which a few lines can stand for gigabytes.

    Errors: UserError, also for a mapping with a key that it has twice, of which one would be lost.
    """
    import yaml

    if len(text) > LARGEST_YAML:
        raise UserError(f"{source}: has more than {LARGEST_YAML:,} characters; give alignments as files of their own")
    try:
        opened: list[tuple[set[str], Iterator[bool]]] = []  # keys so far, and whether the next node is one
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None):
                raise UserError(f"{source}: has an alias (*) or a tag (!), which are not read; write the value itself")
            if isinstance(event, yaml.NodeEvent) and opened and next(opened[-1][1]):
                key, keys = getattr(event, "value", ""), opened[-1][0]
                if key and key in keys:
                    raise UserError(f"{source}: has {_shown(key)} twice in one entry; begin each entry with a dash")
                keys.add(key)
            if isinstance(event, yaml.CollectionStartEvent):
                is_mapping = isinstance(event, yaml.MappingStartEvent)
                opened.append((set(), itertools.cycle((is_mapping, False))))
                if len(opened) > DEEPEST_YAML:
                    raise UserError(f"{source}: is nested too deep; write it as its program describes it")
            elif isinstance(event, yaml.CollectionEndEvent):
                opened.pop()
        return yaml.load(text, _core_loader())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{source}: line {line} is no YAML ({error.problem}); correct it") from None
    except (yaml.YAMLError, ValueError):
        raise UserError(f"{source}: has a character or a number that YAML cannot have; correct it") from None


@cache
def _core_loader() -> Any:
    """Make a loader for YAML 1.2's core schema: numbers, true, false and null, and everything else is text.

    YAML 1.1 also has numbers of base 60 (1:30), dates, and NO for false.
    """
    import yaml

    class CoreLoader(yaml.SafeLoader):
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def integer(loader: Any, node: Any) -> int:
        text = loader.construct_scalar(node)
        if len(text) > MOST_DIGITS:
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


def _looks_like(content: Any) -> str:
    """Say what JSON or YAML without sequences seems to be."""
    if isinstance(content, dict):
        looks = [what for key, what in _LOOKS.items() if key in content]
        return f"looks like {looks[0]}" if looks else "has no sequences, so it is no job"
    return "is an empty list" if content == [] else "is no job, and no list of jobs"


def _job(job: Any, name: str, where: str, here: Path) -> Complex:
    """Read a job, or say why it cannot be folded.  where: what it is called in errors."""
    uses = _files_named(job, here)
    try:
        if not isinstance(job, dict):
            raise UserError(f"{where}: is no object with sequences; correct or remove it")
        proteins, notes = _proteins(job, where)
        alignments, more = _paired(_alignments(proteins, where, here))
        ids = tuple(id for protein in proteins for id in protein.ids)
        sequences = tuple(protein.sequence for protein in proteins for _ in protein.ids)
        return Complex(name, ids, sequences, tuple(alignments), (*notes, *more), uses=uses)
    except UserError as error:
        text = str(error)
        return Complex(name, (), (), error=text if text.startswith(where) else f"{where}: {text}", uses=uses)


def _files_named(job: Any, here: Path) -> tuple[Path, ...]:
    """Return the files that a job names, its alignments, templates and others, as far as they are there."""

    def of(owner: Any, key: str) -> list[Any]:
        found = owner.get(key) if isinstance(owner, dict) else None
        return found if isinstance(found, list) else []

    molecules = [one for item in of(job, "sequences") if isinstance(item, dict) for one in item.values()]
    owners = [job, *molecules]
    owners += [template for owner in owners for template in of(owner, "templates")]
    named = [owner.get(key) for owner in owners if isinstance(owner, dict) for key in _PATHS]
    found = [_find(text, here) for text in named if isinstance(text, str)]
    return tuple(path.resolve() for path in found if path is not None)


def _find(text: str, here: Path) -> Path | None:
    """Find a file by its absolute path, or by a relative one, from the folder `here` or from the working directory."""
    return next((path for path in (here / text, Path(text)) if os.path.isfile(path)), None)


def _proteins(job: Mapping[str, Any], where: str) -> tuple[list[_Protein], list[str]]:
    """Return the proteins of a job, and notes on what it asks for in vain.

    Errors: UserError for what is not as the formats have it, and for all that AlphaFold2 cannot fold, in one line.
    """
    _check_keys(job, (*_OF_JOB, *_BONDS), where)
    dialect, version, listed = job.get("dialect"), job.get("version"), job.get("sequences")
    if not isinstance(dialect, str | None) or dialect not in _VERSIONS:
        raise UserError(f"{where}: its dialect, {_shown(dialect)}, is not known; {_READ}")
    newest = _VERSIONS[dialect]
    if version is not None and (type(version) is not int or not 1 <= version <= newest):
        known = "version 1 is" if newest == 1 else f"versions 1 to {newest} are"
        raise UserError(f"{where}: its version, {_shown(version)}, is not known; {known} read")
    if not isinstance(job.get("name"), str | None):
        raise UserError(f"{where}: its name, {_shown(job['name'])}, is no text; put it in quotes")
    if not isinstance(listed, list) or not listed:
        raise UserError(f"{where}: its sequences are no list, or an empty one; list the proteins there")
    proteins: list[_Protein] = []
    counts: list[int] = []
    cannot: list[str] = []
    for number, item in enumerate(listed, 1):
        kind, given = next(iter(item.items())) if isinstance(item, dict) and len(item) == 1 else (None, None)
        entry, lower = f"{where}: entry {number}", str(kind).lower()
        if not isinstance(given, dict) or lower not in (*_PROTEINS, *_OTHERS):
            raise UserError(
                f"{entry}: is no molecule that is known, as `protein` and what it has; correct or remove it"
            )
        ids = _texts(given.get("id"))
        if ids is None or (not ids and given.get("id") is not None):
            raise UserError(
                f"{entry}: its id, {_shown(given['id'])}, is no text and no list of texts; put it in quotes"
            )
        if lower in _OTHERS:
            codes = next(filter(None, (_texts(given.get(key)) for key in ("ccd", "ccdCodes", "ligand", "ion"))), [])
            about = ": ".join(filter(None, (_listed(ids), _listed([code.removeprefix("CCD_") for code in codes]))))
            cannot.append(f"{_OTHERS[lower]} ({about})" if about else _OTHERS[lower])
            continue
        _check_keys(given, (*_OF_PROTEIN, *_MSAS, *_CHANGES), entry)
        sequence = given.get("sequence")
        if not isinstance(sequence, str) or not sequence.split():
            raise UserError(f"{entry}: has no sequence; give its residues as letters")
        sequence = plain_sequence(sequence)
        encode(sequence, entry)  # an error for letters that are no residues
        count = given.get("count", 1)
        if type(count) is not int or not 1 <= count <= MOST_COPIES:
            raise UserError(f"{entry}: its count, {_shown(count)}, is no number from 1 to {MOST_COPIES}; correct it")
        changed = [what for key, what in _CHANGES.items() if given.get(key)]
        cannot += [f"{what} ({_listed(ids) or f'entry {number}'})" for what in changed]
        proteins.append(_Protein(tuple(ids), sequence, given))
        counts.append(0 if ids else count)
    cannot += dict.fromkeys(what for key, what in _BONDS.items() if job.get(key))
    if cannot:
        cure = "remove it to fold the proteins alone" if proteins else "there is no protein to fold; give one"
        raise UserError(f"{where}: has {_listed(cannot)}, which AlphaFold2 cannot fold; {cure}")
    taken = {id for protein in proteins for id in protein.ids}
    free = (id for id in chain_ids(len(taken) + sum(counts)) if id not in taken)
    own = [protein.ids or tuple(itertools.islice(free, count)) for protein, count in zip(proteins, counts)]
    proteins = [replace(protein, ids=ids) for protein, ids in zip(proteins, own)]

    def any_has(*keys: str) -> bool:
        return any(one.get(key) for one in (job, *(protein.given for protein in proteins)) for key in keys)

    vain = {
        "modelSeeds are not used: --seeds says how many": any_has("modelSeeds"),
        "properties such as affinity are not predicted": any_has("properties"),
        "components of userCCD are not used": any_has("userCCD", "userCCDPath"),
        "templates in the file are not used: give their structures by --template": any_has("templates"),
        "templates are not searched for: give hits by --hits": any_has("useStructureTemplate", "maxTemplateDate"),
    }
    return proteins, [note for note, is_asked in vain.items() if is_asked]


def _alignments(proteins: Sequence[_Protein], where: str, here: Path) -> list[_Rows]:
    """Read the alignments of proteins, each once; for what is to be folded without any, one of its own row.

    Errors: UserError for a file that is not there, and for an alignment of another sequence.
    """
    found: dict[tuple[str, str, str | Path], _Rows] = {}
    for protein in proteins:
        given, sequence, chain = protein.given, protein.sequence, f"{where}: chain {_listed(protein.ids[:1])}"
        is_bare = given.get("msa") == "empty" or given.get("unpairedMsa") == ""
        fields = [field for field in _MSAS if given.get(field) and (field, given[field]) != ("msa", "empty")]
        for field in fields:
            text, kind = given[field], field.removesuffix("Path")
            if not isinstance(text, str) or (field != kind and kind in fields):
                raise UserError(f"{chain}: its {field} is no text, or there is {kind} too; give one of them")
            path = _find(text, here) if field in _PATHS else None
            if path is None and field in _PATHS:
                raise UserError(
                    f"{chain}: its {field}, {_shown(text)}, is not there; correct the path, from the file's folder or "
                    "the working directory, or leave it out and give alignments by --msa"
                )
            if (key := (sequence, kind, path or text)) in found:
                continue
            data = text.encode(errors="replace") if path is None else read_file(path)
            source = f"{chain}: {field}" if path is None else str(path)
            if path is not None and path.name.lower().removesuffix(".gz").endswith(".csv"):
                alignment, keys = _of_keyed_table(data, source, sequence)
            else:
                alignment, keys = parse_alignment(data, source, sequence), None
            alignment = replace(alignment, stands_alone=kind != "pairedMsa")
            found[key] = _Rows(sequence, kind, alignment, keys)
        if is_bare and not fields:
            found[sequence, "", ""] = _Rows(sequence, "", Alignment.of_query(sequence, chain))
    return [*found.values()]


def _of_keyed_table(data: bytes, source: str, sequence: str) -> tuple[Alignment, np.ndarray]:
    """Parse Boltz's alignment with keys, columns `key` and `sequence` (rows as A3M has them), and return the keys too.

    uint64 [R]: rows of one key belong together, 0 for no key, which is empty, -1, or NaN.
    """
    if b"\0" in data:
        raise UserError(f"{source}: has NUL bytes, so it is no table; export it again")
    rows = table_rows(data, source, ("key", "sequence"))
    text = "".join(f">row {number}\n{row}\n" for number, (_, row) in enumerate(rows, 1))
    alignment = parse_alignment(text, source, sequence)
    named = [key.removesuffix(".0") for key, _ in rows]  # where some are missing, pandas writes 1.0
    keys = [0 if key.lower() in ("", "-1", "nan") else key_of(f"key {key}") for key in named]
    return alignment, np.array([0, *keys[1:]], np.uint64)


def _paired(every: Sequence[_Rows]) -> tuple[list[Alignment], list[str]]:
    """Return alignments whose `pair_keys` say which of their rows belong together, and notes.

    Rows with keys pair by these.  AlphaFold 3's pairedMsa pairs by the organisms in its headers or, where these name
    none and there are as many rows for each chain, row i with row i.  So do the rows of unpairedMsa if there is no
    pairedMsa and some are empty, as its documentation advises to those who pair rows by hand.
    """
    notes: list[str] = []
    rows = [*every]
    for kind in ("pairedMsa", "unpairedMsa"):
        own = [one.alignment for one in rows if one.kind == kind]
        empty = [(one.rows == GAP).all(1) for one in own]
        chains = {one.sequence for one in rows if one.kind == kind}
        if len(chains) < 2 or len({len(one) for one in own}) > 1 or len(own[0]) < 2:
            continue
        if kind == "pairedMsa":
            by_place = not any(species_keys(one.names[1:]).any() for one in own)
        else:
            by_place = all(one.kind != "pairedMsa" for one in rows) and any(one.any() for one in empty)
        if by_place:
            place = np.array([0, *(key_of(f"row {i}") for i in range(1, len(own[0])))], np.uint64)
            keys = iter([np.where(one, np.uint64(0), place) for one in empty])
            rows = [replace(one, keys=next(keys)) if one.kind == kind else one for one in rows]
            notes.append(f"rows of {kind} are paired by their place, the second with the second and so on")
    of_chain: dict[str, set[int]] = {}
    for one in rows:
        of_chain.setdefault(one.sequence, set()).update([] if one.keys is None else one.keys.tolist())
    times = Counter(key for keys in of_chain.values() for key in keys)
    shared = np.array([key for key, count in times.items() if key and count > 1], np.uint64)
    found: list[Alignment] = []
    for one in rows:
        if one.keys is None:
            found.append(one.alignment)
            continue
        first, in_pairs = np.arange(len(one.keys)) == 0, np.isin(one.keys, shared)
        found.append(one.alignment.select(first | ~in_pairs))
        if in_pairs.any():
            pairs = replace(one.alignment, pair_keys=one.keys, stands_alone=False)
            found.append(pairs.select(first | in_pairs))
    return found, notes


def _check_keys(given: Mapping[Any, Any], known: Collection[str], where: str) -> None:
    """Raise UserError for a key that is not known, and says something."""
    for key, value in given.items():
        if key not in known and value:
            raise UserError(f"{where}: has {_shown(key)}, which is not known; correct or remove it")


def _texts(value: Any) -> list[str] | None:
    """Return a text, or a list of texts, as a list; none of nothing; None for what is neither."""
    found = [] if value is None else value if isinstance(value, list) else [value]
    return found if all(isinstance(one, str) for one in found) else None


def _shown(value: Any) -> str:
    """Return a value as an error shows it, in one short line."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return repr(value[:60] if isinstance(value, str) else value)[:70]


def _listed(names: Sequence[str]) -> str:
    """Return names in one line, not all if there are many; what cannot be printed is ?."""
    short = ["".join(c if c.isprintable() else "?" for c in name[:60]) for name in names[:8]]
    return ", ".join(short) + (" ..." if len(names) > 8 else "")
