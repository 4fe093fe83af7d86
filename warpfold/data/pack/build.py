"""The jobs of packing, as workers do them: the queries of alignments, structures read, and the records of chains."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.data.example.hits import Hit, parse_hits
from warpfold.data.example.raw_example import RawExample, from_chain
from warpfold.data.example.templates import count_refusals, templates_from_hits
from warpfold.data.formats.input_files import InputFile, read_query
from warpfold.data.formats.sequences import parse_alignment
from warpfold.data.pack.report import Entry
from warpfold.data.similar.pairwise import MIN_IDENTITY
from warpfold.data.store.store import Packed, pack_record
from warpfold.data.store.stored_example import example_arrays, example_notes
from warpfold.data.structure.chain import Chain, Structure, given_date
from warpfold.data.structure.library import Library
from warpfold.data.structure.mmcif import parse_structure
from warpfold.errors import UserError
from warpfold.files import LARGEST, within_memory
from warpfold.geometry.residue import ATOM_ORDER

WORTH_SHARING = 1024  # bytes of an array: smaller ones are repeated


@dataclass(frozen=True)
class Options:
    """What decides the content of a store.  The paper's filters are the resolution and the share of one amino acid
    (Supp. 1.2.5), and clusters at 40 % identity.

    Dates are kept as text, YYYY-MM-DD however they were given, since a store records them; `day` parses one.
    Errors: UserError for what is no date.
    """

    max_resolution: float = 9.0  # angstrom; structures without one (NMR) pass
    max_single: float = 0.8  # share of the sequence that one amino acid may have
    min_length: int = 10  # residues, and as many must have a CA
    max_length: int | None = None
    released_after: str | None = None  # YYYY-MM-DD, itself included
    released_before: str | None = None  # itself not included
    require_msa: bool = False  # otherwise a chain without alignment is kept with its sequence alone
    min_identity: float = MIN_IDENTITY  # between a chain and an alignment's query
    max_template_date: str | None = None  # itself included; a chain's templates are never newer than the chain
    cluster_identity: float = 0.4  # 1: equal sequences; of no account with a file of clusters
    max_file_gb: float = LARGEST / 1e9  # of a file when it is unpacked; larger ones are left out

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"pack: --{option.name.replace('_', '-')} {value}: a finite number expected")
        if not 0 < self.max_file_gb <= 1e6:
            raise UserError(f"pack: --max-file-gb {self.max_file_gb:g}: expected a number over 0, and up to 1e6")
        for name in ("released_after", "released_before", "max_template_date"):
            if (day := self.day(name)) is not None:
                object.__setattr__(self, name, day.isoformat())  # one day is one text: stores compare their options

    @property
    def limit(self) -> int:
        """Return how many bytes a file may have when it is unpacked."""
        return int(self.max_file_gb * 1e9)

    def day(self, name: str) -> date | None:
        """Return the option `name`, a date, parsed."""
        return given_date(getattr(self, name), f"--{name.replace('_', '-')}")

    def refuses(self, structure: Structure, chain: Chain) -> str | None:
        """Why this chain is dropped, or None."""
        length, resolved = len(chain.sequence), int((chain.mask[:, ATOM_ORDER["CA"]] > 0).sum())
        residue, count = Counter(chain.sequence).most_common(1)[0] if length else ("", 0)
        if structure.resolution is not None and structure.resolution > self.max_resolution:
            return f"resolution {structure.resolution:g} Å, over {self.max_resolution:g}"
        after, before = self.day("released_after"), self.day("released_before")
        if after is not None or before is not None:
            released = structure.release_date
            if released is None:
                return "no release date"
            if after is not None and released < after:
                return f"released {released}, before {after}"
            if before is not None and released >= before:
                return f"released {released}, not before {before}"
        if length < self.min_length:
            return f"{length} residues, fewer than {self.min_length}"
        if self.max_length is not None and length > self.max_length:
            return f"{length} residues, more than {self.max_length}"
        if resolved < self.min_length:
            return f"{resolved} residues with a CA, fewer than {self.min_length}"
        if count > self.max_single * length:
            return f"{count / length:.0%} of the sequence is {residue}, over {self.max_single:.0%}"
        return None


DEFAULTS = Options()


@dataclass(frozen=True)
class Read:
    """A structure file as it was read: the chains to pack, and what became of the others."""

    file: InputFile
    structure: Structure | None  # with these chains alone
    dropped: list[Entry]


@dataclass(frozen=True)
class ChainJob:
    """A chain to pack."""

    chain: str  # its name in the structure
    alignments: list[InputFile]
    hits: list[InputFile]
    note: str


@dataclass(frozen=True)
class BuildJob:
    """The chains to pack of one structure file."""

    file: InputFile
    structure: Structure
    chains: list[ChainJob]
    options: Options
    library: tuple[Path, ...]  # folders of the templates' structures


@dataclass
class Built:
    """What became of the chains of a structure file.

    entries: as `Entry`, with "sequence", "entity", and of those kept "record" (its number, header and crc) and "meta".
    bad: alignments and hits that could not be read, with the reason.  looked_up: the entries that its hits name.
    library: what the library had of them, as `Folders.digest`.
    """

    entries: list[dict[str, Any]]
    records: list[Packed] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)
    looked_up: list[str] = field(default_factory=list)
    library: str = ""


def read_queries(job: tuple[Sequence[InputFile], int]) -> list[tuple[str, str]]:
    """Return (query, "") for each alignment, or ("", what is wrong with it).  job: alignments, `Options.limit`."""
    sources, limit = job
    found = []
    for source in sources:
        try:
            with within_memory(source.name):
                found.append((read_query(source, limit), ""))
        except UserError as error:
            found.append(("", str(error)))
    return found


def read_chains(job: tuple[InputFile, Options]) -> Read:
    """The chains of a structure file that the options let pass."""
    file, options = job
    try:
        with within_memory(file.name):
            structure = parse_structure(file.read_bytes(options.limit), file.name)
    except UserError as error:
        return Read(file, None, [Entry(file.title, file.name, False, str(error))])
    dropped = [Entry(f"{structure.id}_{name}", file.name, False, why) for name, why in structure.dropped.items()]
    kept = {}
    for name, chain in structure.chains.items():
        if reason := options.refuses(structure, chain):
            dropped.append(_entry(structure, name, file, False, reason))
        else:
            kept[name] = chain
    return Read(file, replace(structure, chains=kept), dropped)


def _entry(structure: Structure, chain: str, file: InputFile, kept: bool, reason: str) -> Entry:
    return Entry(
        name=f"{structure.id}_{chain}",
        file=file.name,
        kept=kept,
        reason=reason,
        length=len(structure.chains[chain].sequence),
        resolution=structure.resolution,
        release_date=None if structure.release_date is None else structure.release_date.isoformat(),
    )


def build(job: BuildJob) -> Built:
    """The records of the chains; copies of a chain share one alignment and its templates."""
    built = Built([])
    copies: dict[tuple[Any, ...], list[ChainJob]] = defaultdict(list)
    for chain in job.chains:
        sequence = job.structure.chains[chain.chain].sequence
        copies[(sequence, *chain.alignments, None, *chain.hits)].append(chain)
    for group in copies.values():
        _build_copies(job, group, built)
    return built


def _build_copies(job: BuildJob, group: Sequence[ChainJob], built: Built) -> None:
    """Adds the records of chains of one sequence with the same alignments and hits to `built`."""
    structure, first = job.structure, job.structure.chains[group[0].chain]
    alignments, used, notes = [], [], [note for note in dict.fromkeys(chain.note for chain in group) if note]
    for source in group[0].alignments:
        try:
            with within_memory(source.name):
                alignments.append(parse_alignment(source.read_bytes(job.options.limit), source.name))
            used.append(source.name)
        except UserError as error:
            notes.append(str(error))
            built.bad[source.name] = str(error)
    model = _entry(structure, group[0].chain, job.file, True, "; ".join(notes))
    model.alignments, model.hits = used, [source.name for source in group[0].hits]
    try:
        if job.options.require_msa and not used:
            raise UserError("no alignment" + (f": {model.reason}" if notes else ""))
        with within_memory(job.file.name):
            raw = from_chain(model.name, structure, first, alignments, used, job.options.min_identity)
            del alignments
            if group[0].hits:
                raw = _with_templates(raw, group[0].hits, job, model, built)
            model.depth = raw.depth
            whole = example_arrays(raw)
            for chain in group:
                _build_one(raw, whole, structure, chain.chain, model, built)
    except UserError as error:
        done = {entry["name"] for entry in built.entries}
        for name in (f"{structure.id}_{chain.chain}" for chain in group):
            if name not in done:
                entry = replace(model, name=name, kept=False, reason=str(error), alignments=[])
                built.entries.append(asdict(entry))


def _build_one(
    raw: RawExample, whole: dict[str, np.ndarray], structure: Structure, name: str, model: Entry, built: Built
) -> None:
    """Adds one of the copies; `raw` is the first's, `whole` its arrays."""
    chain = structure.chains[name]
    entry = replace(model, name=f"{structure.id}_{name}")
    if entry.name == raw.name:
        arrays, notes, shared = whole, example_notes(raw), {}
    else:
        own = example_arrays(from_chain(entry.name, structure, chain))
        arrays = {**whole, "positions": own["positions"], "mask": own["mask"]}
        notes = {**example_notes(raw), "name": entry.name}
        shared = {
            key: raw.name for key, array in whole.items() if arrays[key] is array and array.nbytes >= WORTH_SHARING
        }
        arrays = {key: array for key, array in arrays.items() if key not in shared}
    record = pack_record(arrays, notes, shared)
    built.records.append(record)
    meta = {
        "length": entry.length,
        "depth": entry.depth,
        "templates": entry.templates,
        "resolution": entry.resolution,
        "release_date": entry.release_date,
        "method": structure.method,
    }
    place = {"number": len(built.records) - 1, "header": record.header, "crc": record.crc}
    more = {"sequence": raw.sequence, "entity": f"{structure.id}_{chain.entity}", "record": place, "meta": meta}
    built.entries.append(asdict(entry) | more | ({"shares": raw.name} if shared else {}))


def _with_templates(
    raw: RawExample, sources: Sequence[InputFile], job: BuildJob, entry: Entry, built: Built
) -> RawExample:
    """The example with its templates; counts of those used and refused go into `entry`."""
    hits: list[Hit] = []
    for source in sources:
        try:
            with within_memory(source.name):
                text = source.read_bytes(job.options.limit).decode("utf-8", "replace")
                hits += parse_hits(text, raw.sequence, source.name)
        except UserError as error:
            built.bad[source.name] = str(error)
    dates = [day for day in (job.options.day("max_template_date"), job.structure.release_date) if day is not None]
    library = library_of(job.library, job.options.limit)
    templates, outcomes = templates_from_hits(
        raw.sequence, hits, library, min(dates, default=None), exclude=(job.structure.id.lower(),)
    )
    built.looked_up = sorted({*built.looked_up, *(hit.pdb_id for hit in hits)})
    built.library = library.digest(built.looked_up)
    entry.templates = 0 if templates is None else len(templates)
    entry.templates_refused = count_refusals(outcomes)
    return replace(raw, templates=templates)


class Folders(Library):
    """Several folders as one library of templates: an entry is looked for in one after another."""

    def __init__(self, folders: Sequence[Path], limit: int = LARGEST) -> None:
        super().__init__(folders[-1], limit=limit)
        self._others = [Library(folder) for folder in folders[:-1]]
        self._files: dict[str, str] = {}  # what `digest` saw

    def find(self, pdb_id: str) -> Path:
        """The file of an entry, in the first folder that has it.  UserError if none does."""
        for library in self._others:
            with suppress(UserError):
                return library.find(pdb_id)
        return super().find(pdb_id)

    def digest(self, pdb_ids: Sequence[str]) -> str:
        """Return a fingerprint of the files of some entries: where they are, their sizes, when they were written."""
        for pdb_id in pdb_ids:
            if pdb_id not in self._files:
                self._files[pdb_id] = ""
                with suppress(UserError, OSError):
                    status = (path := self.find(pdb_id)).stat()
                    self._files[pdb_id] = f"{path}\0{status.st_size}\0{status.st_mtime_ns}"
        found = "\n".join(self._files[pdb_id] for pdb_id in pdb_ids)
        return blake2b(found.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


@lru_cache(maxsize=2)
def library_of(folders: tuple[Path, ...], limit: int) -> Folders:
    """Return the library of some folders, which this process keeps for further jobs.  limit: as of `Library`."""
    return Folders(folders, limit)
