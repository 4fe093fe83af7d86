"""The jobs of packing that workers do: read the queries of alignments, read structures, build records of chains."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.data.example.hits import Hit, parse_hits
from warpfold.data.example.raw_example import CA, RawExample, check_map, from_chain
from warpfold.data.example.templates import count_refusals, templates_from_hits
from warpfold.data.formats.alignment import Alignment, is_complex, parse_alignment, parse_chain_alignments
from warpfold.data.formats.input_files import InputFile, as_alphafold_reads, read_query
from warpfold.data.pack.assemblies import build_assemblies
from warpfold.data.pack.inputs import drop_reason
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.report import PackEntry
from warpfold.data.similar.pairwise import MIN_IDENTITY, column_map
from warpfold.data.store.store import Packed, pack_record
from warpfold.data.store.stored_assembly import CHAINS
from warpfold.data.store.stored_example import example_arrays, example_notes
from warpfold.data.structure.chain import Structure
from warpfold.data.structure.library import Library
from warpfold.data.structure.mmcif import parse_structure
from warpfold.errors import UserError
from warpfold.files import within_memory

WORTH_SHARING = 1024  # bytes of an array: smaller ones are repeated


@dataclass(frozen=True)
class ReadChains:
    """A structure file as it was read: the chains to pack, and why the others were dropped."""

    structure: Structure | None  # with these chains alone
    dropped: list[PackEntry]


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
    options: PackOptions
    folders: tuple[Path, ...]  # of the templates' structures


@dataclass
class BuiltChains:
    """The result of building the chains of a structure file.

    entries: as `PackEntry`, with "sequence", "entity", and if kept "record" (its number, header and crc) and "meta".
    bad: alignments and hits that could not be read, with the reason.  looked_up: the entries that its hits name.
    library: `Library.digest` of these.
    """

    entries: list[dict[str, Any]] = field(default_factory=list)
    records: list[Packed] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)
    looked_up: list[str] = field(default_factory=list)
    library: str = ""

    def kept(self, entry: PackEntry, record: Packed, job: BuildJob) -> dict[str, Any]:
        """Take the record of an entry that is kept, and return the entry with where it is, and what the index says."""
        self.records.append(record)
        columns = ("length", "depth", "templates", "resolution", "release_date")
        meta = {name: getattr(entry, name) for name in columns} | {"method": job.structure.method}
        if job.options.has_assemblies:
            meta[CHAINS] = entry.chains or None
        place = {"number": len(self.records) - 1, "header": record.header, "crc": record.crc}
        return asdict(entry) | {"record": place, "meta": meta}


def read_queries(job: tuple[Sequence[InputFile], int]) -> list[tuple[str, str]]:
    """Return (query, "") for each alignment, or ("", what is wrong with it).  job: alignments, `PackOptions.limit`."""
    sources, limit = job
    found = []
    for source in sources:
        try:
            with within_memory(source.name):
                found.append((read_query(source, limit), ""))
        except UserError as error:
            found.append(("", str(error)))
    return found


def read_chains(job: tuple[InputFile, PackOptions]) -> ReadChains:
    """Read a structure file, and drop the chains that the options exclude."""
    file, options = job
    try:
        with within_memory(file.name):
            structure = parse_structure(file.read_bytes(options.limit), file.name)
    except UserError as error:
        return ReadChains(None, [PackEntry(file.title, file.name, False, str(error))])
    dropped = [PackEntry(f"{structure.id}_{name}", file.name, False, why) for name, why in structure.dropped.items()]
    kept, reasons = {}, dict(structure.dropped)
    for name, chain in structure.chains.items():
        if reason := drop_reason(options, structure, chain):
            reasons[name] = reason
            dropped.append(_entry(structure, name, file, False, reason))
        else:
            kept[name] = chain
    return ReadChains(replace(structure, chains=kept, dropped=reasons), dropped)


def _entry(structure: Structure, chain: str, file: InputFile, kept: bool, reason: str) -> PackEntry:
    return PackEntry(
        name=f"{structure.id}_{chain}",
        file=file.name,
        kept=kept,
        reason=reason,
        length=len(structure.chains[chain].sequence),
        resolution=structure.resolution,
        release_date=None if structure.release_date is None else structure.release_date.isoformat(),
    )


def build(job: BuildJob) -> BuiltChains:
    """Build the records of the chains; copies of a chain share one stored alignment and its templates."""
    built = BuiltChains()
    copies: dict[tuple[Any, ...], list[ChainJob]] = defaultdict(list)
    for chain in job.chains:
        sequence = job.structure.chains[chain.chain].sequence
        copies[(sequence, *chain.alignments, None, *chain.hits)].append(chain)
    for group in copies.values():
        _build_copies(job, group, built)
    for entry, packed in build_assemblies(job.structure, built.entries, job.file.name, job.options):
        built.entries.append(asdict(entry) if packed is None else built.kept(entry, packed, job))
    return built


def _build_copies(job: BuildJob, group: Sequence[ChainJob], built: BuiltChains) -> None:
    """Add the records of chains of one sequence with the same alignments and hits to `built`."""
    structure, name = job.structure, group[0].chain
    alignments: list[Alignment] = []
    used, notes = [], [note for note in dict.fromkeys(chain.note for chain in group) if note]
    for source in group[0].alignments:
        try:
            with within_memory(source.name):
                read, cut = _read_alignments(source, structure.chains[name].sequence, job.options)
            alignments += read
            notes += cut
            used.append(source.name)
        except UserError as error:
            notes.append(str(error))
            built.bad[source.name] = str(error)
    model = _entry(structure, name, job.file, True, "; ".join(notes))
    model.alignments, model.hits = used, [source.name for source in group[0].hits]
    todo = [chain.chain for chain in group]
    try:
        if job.options.require_msa and not used:
            raise UserError("no alignment" + (f": {model.reason}" if notes else ""))
        with within_memory(job.file.name):
            first = structure.chains[name]
            pairing = job.options.has_assemblies
            raw = from_chain(model.name, structure, first, alignments, used, MIN_IDENTITY, pairing)
            del alignments  # they may take most of the memory, and `raw` has all their rows
            if group[0].hits:
                raw = _with_templates(raw, group[0].hits, job, model, built)
            model.depth = raw.depth
            whole = _arrays(raw, job.options)
            while todo:
                _build_one(raw, whole, job, todo[0], model, built)
                del todo[0]
    except UserError as error:
        for name in todo:
            entry = replace(model, name=f"{structure.id}_{name}", kept=False, reason=str(error), alignments=[])
            built.entries.append(asdict(entry))


def _read_alignments(source: InputFile, sequence: str, options: PackOptions) -> tuple[list[Alignment], list[str]]:
    """Read an alignment of a chain; of a complex's, what belongs to the chain: its own rows, and its pairs.

    Also return notes on rows that are left out.
    """
    data = source.read_bytes(options.limit)
    if is_complex(data):
        every = parse_chain_alignments(data, source.name)
        return [one for one in every if check_map(*column_map(one.query, sequence), MIN_IDENTITY) is None], []
    alignment, notes = as_alphafold_reads(parse_alignment(data, source.name), source)
    return [alignment], notes


def _build_one(
    raw: RawExample,
    whole: dict[str, np.ndarray],
    job: BuildJob,
    chain: str,
    model: PackEntry,
    built: BuiltChains,
) -> None:
    """Add the record of one of the copies; `raw` is the first copy, `whole` its arrays."""
    structure = job.structure
    entry = replace(model, name=f"{structure.id}_{chain}")
    arrays, shared = whole, {}
    if entry.name != raw.name:
        own = _arrays(from_chain(entry.name, structure, structure.chains[chain]), job.options)
        arrays = whole | {name: own[name] for name in ("positions", "mask", "ca") if name in own}
        shared = {key: raw.name for key, a in whole.items() if arrays[key] is a and a.nbytes >= WORTH_SHARING}
        arrays = {key: array for key, array in arrays.items() if key not in shared}
    record = pack_record(arrays, {**example_notes(raw), "name": entry.name}, shared)
    found = built.kept(entry, record, job) | {
        "sequence": raw.sequence,
        "entity": f"{structure.id}_{structure.chains[chain].entity}",
    }
    built.entries.append(found | ({"shares": raw.name} if shared else {}))


def _arrays(raw: RawExample, options: PackOptions) -> dict[str, np.ndarray]:
    """Return the arrays to store: for assemblies also the CA atoms, of which a crop needs those of all chains."""
    arrays = example_arrays(raw)
    return arrays if not options.has_assemblies else {**arrays, "ca": arrays["positions"][:, CA]}


def _with_templates(
    raw: RawExample, sources: Sequence[InputFile], job: BuildJob, entry: PackEntry, built: BuiltChains
) -> RawExample:
    """Return the example with its templates; put the counts of used and refused ones into `entry`."""
    hits: list[Hit] = []
    for source in sources:
        try:
            with within_memory(source.name):
                text = source.read_bytes(job.options.limit).decode("utf-8", "replace")
                hits += parse_hits(text, raw.sequence, source.name)
        except UserError as error:
            built.bad[source.name] = str(error)
    dates = [day for day in (job.options.day("max_template_date"), job.structure.release_date) if day is not None]
    library = template_library(job.folders, job.options.limit)
    templates, outcomes = templates_from_hits(
        raw.sequence, hits, library, min(dates, default=None), exclude=(job.structure.id.lower(),)
    )
    built.looked_up = sorted({*built.looked_up, *(hit.pdb_id for hit in hits)})
    built.library = library.digest(built.looked_up)
    entry.templates = 0 if templates is None else len(templates)
    entry.templates_refused = count_refusals(outcomes)
    missing = [one.name.rpartition("_")[0].lower() or one.name.lower() for one in outcomes if one.missing]
    entry.templates_missing, entry.structures_missing = len(missing), list(dict.fromkeys(missing))[:4]
    return replace(raw, templates=templates)


@lru_cache(maxsize=2)
def template_library(folders: tuple[Path, ...], limit: int) -> Library:
    """Return the library of some folders, kept in this process for later jobs.  limit: as for `Library`."""
    return Library(*folders, limit=limit)
