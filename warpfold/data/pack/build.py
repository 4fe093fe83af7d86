"""Jobs of worker processes in packing: read the queries of alignments, read structures, build records of chains."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.data.example.hits import Hit, parse_hits
from warpfold.data.example.raw_example import CA, Templates, check_map, from_chain
from warpfold.data.example.templates import count_refusals, templates_from_hits
from warpfold.data.formats.alignment import Alignment, is_complex, parse_alignment, parse_chain_alignments
from warpfold.data.formats.input_files import InputFile, limit_as_alphafold, read_query
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.predicted import PredictedFile, with_confidence
from warpfold.data.pack.report import PackEntry
from warpfold.data.similar.pairwise import column_map
from warpfold.data.store.store import Packed, pack_record
from warpfold.data.store.stored_example import example_arrays, example_notes, pack_assembly
from warpfold.data.structure.chain import Chain, Structure, normal_entry_id
from warpfold.data.structure.library import Library
from warpfold.data.structure.mmcif import parse_structure
from warpfold.errors import UserError
from warpfold.files import opened, within_memory
from warpfold.geometry.residue import ATOM_ORDER

# Arrays with fewer bytes are stored again instead of shared.
MIN_SHARED_BYTES = 1024


@dataclass(frozen=True)
class ReadChains:
    """The result of reading a structure file.

    structure: with only the chains to pack; None if the file cannot be read. dropped: entries of the other chains.
    confidence: confidence fields of `PackEntry` for each chain of a prediction.
    """

    structure: Structure | None
    dropped: list[PackEntry]
    confidence: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class ChainJob:
    """A chain to pack. chain: its name in the structure. confidence: fields of `PackEntry` for a prediction."""

    chain: str
    alignments: list[InputFile]
    hits: list[InputFile]
    note: str
    confidence: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class BuildJob:
    """The chains to pack from a structure file. folders: folders with structures of templates."""

    file: InputFile
    structure: Structure
    chains: list[ChainJob]
    options: PackOptions
    folders: tuple[Path, ...]


@dataclass
class BuiltChains:
    """The result of building the chains of a structure file.

    bad: the reason for each alignment and hit file that could not be read.
    """

    entries: list[PackEntry] = field(default_factory=list)
    records: list[bytes] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)

    def keep(self, entry: PackEntry, record: Packed) -> None:
        """Add a kept entry and its record."""
        entry.kept, entry.record = True, (len(self.records), record.header, record.crc)
        self.entries.append(entry)
        self.records.append(record.data)


def read_queries(job: tuple[Sequence[InputFile], int]) -> list[tuple[str, str]]:
    """Read the query of each alignment; returns (query, "") or ("", error). job: alignments, `PackOptions.limit`."""
    sources, limit = job
    queries = []
    for source in sources:
        try:
            with within_memory(source.name):
                queries.append((read_query(source, limit), ""))
        except UserError as error:
            queries.append(("", str(error)))
    return queries


# The entry id is in these first bytes of a file: HEADER is the first line, and _entry.id one of the first.
ID_BYTES = 1 << 14
_ENTRY_ID = re.compile(rb"^(?:HEADER.{56}(?P<pdb>[0-9A-Za-z]{4})|_entry\.id\s+(?P<mmcif>\S+))", re.MULTILINE)


def files_to_name_by(files: Sequence[InputFile]) -> frozenset[str]:
    """Find the structure files whose entries must be named by their files, because several files have one entry id.

    gemmi, PyMOL and many pipelines copy the id of the original structure into derived files. A file that is named by
    its id keeps it. Files of PDB mirrors (1abc.cif, pdb1abc.ent) have such names and are not read here.
    Returns the names (`InputFile.name`) of the other files.
    """
    stems: dict[str, str] = {}
    by_id: dict[str, list[str]] = {}
    for file in files:
        stem = file.path.name.split(".")[0]
        stem = stem[3:] if re.fullmatch(r"pdb[0-9][a-z0-9]{3}", stem) else stem
        stems[file.name] = normal_entry_id(stem)
        entry = stems[file.name]
        if not re.fullmatch(r"[0-9][a-z0-9]{3}", entry):
            try:
                with opened(file.path) as content:
                    match = _ENTRY_ID.search(content.read(ID_BYTES))
            except UserError:
                # The error is reported when the file is read.
                continue
            entry = normal_entry_id((match["pdb"] or match["mmcif"]).decode("latin-1")) if match else ""
        by_id.setdefault(entry, []).append(file.name)
    shared = {entry: names for entry, names in by_id.items() if entry and len({stems[name] for name in names}) > 1}
    return frozenset(name for entry, names in shared.items() for name in names if stems[name] != entry)


def read_chains(job: tuple[InputFile, PackOptions, PredictedFile | None, bool]) -> ReadChains:
    """Read a structure file, and drop the chains that the options exclude.

    The last item of the job is True to name the entry by its file instead of its id (see `files_to_name_by`).
    """
    file, options, predicted, named_by_file = job
    confidence: dict[str, dict[str, float]] = {}
    if predicted is not None and predicted.why_not:
        return ReadChains(None, [PackEntry(file.title, file.name, False, predicted.why_not)])
    try:
        with within_memory(file.name):
            structure = parse_structure(file.read_bytes(options.limit), file.name)
            structure.check_placed(file.name)
            if named_by_file:
                structure = replace(structure, id=file.title.split(".")[0])
            if predicted is not None:
                structure, confidence = with_confidence(structure, file, predicted, options)
    except UserError as error:
        return ReadChains(None, [PackEntry(file.title, file.name, False, str(error))])
    dropped = [
        PackEntry(f"{structure.id}_{name}", file.name, False, cause) for name, cause in structure.dropped.items()
    ]
    kept_chains, reasons = {}, dict(structure.dropped)
    for name, chain in structure.chains.items():
        scores = confidence.get(name, {})
        if reason := drop_reason(options, structure, chain, scores):
            reasons[name] = reason
            entry = replace(_begin_entry(structure, name, file), reason=reason, length=len(chain.sequence))
            dropped.append(replace(entry, **scores))  # type: ignore[arg-type]  # numbers of `CONFIDENCES`
        else:
            kept_chains[name] = chain
    return ReadChains(replace(structure, chains=kept_chains, dropped=reasons), dropped, confidence)


def drop_reason(
    options: PackOptions, structure: Structure, chain: Chain, confidence: Mapping[str, float]
) -> str | None:
    """Return the reason to drop a chain, or None. confidence: of a prediction (`with_confidence`), else empty."""
    length, resolved = len(chain.sequence), int((chain.mask[:, ATOM_ORDER["CA"]] > 0).sum())
    if structure.resolution is not None and structure.resolution > options.max_resolution:
        return f"resolution {structure.resolution:g} Å, over {options.max_resolution:g}"
    after, before, released = options.day("released_after"), options.day("released_before"), structure.release_date
    if released is None and (after or before):
        return "no release date"
    if after and released and released < after:
        return f"released {released}, before {after}"
    if before and released and released >= before:
        return f"released {released}, not before {before}"
    if length < options.min_length:
        return f"{length} residues, fewer than {options.min_length}"
    if options.max_length is not None and length > options.max_length:
        return f"{length} residues, more than {options.max_length}"
    if resolved < options.min_length:
        return f"{resolved} residues with a CA, fewer than {options.min_length}"
    residue, count = Counter(chain.sequence).most_common(1)[0]
    if count > options.max_single * length:
        return f"{count / length:.0%} of the sequence is {residue}, over {options.max_single:.0%}"
    if not confidence:
        return None
    if confidence["plddt"] < options.min_plddt:
        return f"mean pLDDT {confidence['plddt']:.1f}, below {options.min_plddt:g}"
    if options.max_pae is not None and "pae" not in confidence:
        return "no file with its PAE"
    if options.max_pae is not None and confidence["pae"] > options.max_pae:
        return f"mean PAE {confidence['pae']:.1f} Å, over {options.max_pae:g}"
    if chain.b_factors is not None and not chain.b_factors.any():
        return f"no residue has a KL confidence of {options.min_kl:g}"
    return None


def _begin_entry(structure: Structure, name: str, file: InputFile, separator: str = "_") -> PackEntry:
    """Create the entry of a chain or an assembly of a structure with the fields of the structure."""
    released = None if structure.release_date is None else structure.release_date.isoformat()
    entry = PackEntry(f"{structure.id}{separator}{name}", file.name, kept=False, resolution=structure.resolution)
    entry.release_date, entry.method = released, structure.method
    return entry


def build(job: BuildJob) -> BuiltChains:
    """Build the records of the chains. Copies of a chain share the stored alignment and templates."""
    built = BuiltChains()
    copies: dict[tuple[Any, ...], list[ChainJob]] = defaultdict(list)
    for chain in job.chains:
        sequence = job.structure.chains[chain.chain].sequence
        copies[(sequence, *chain.alignments, None, *chain.hits)].append(chain)
    for group in copies.values():
        _build_copies(job, group, built)
    if job.options.has_assemblies:
        _build_assemblies(job, built)
    return built


def _build_copies(job: BuildJob, group: Sequence[ChainJob], built: BuiltChains) -> None:
    """Add the records of chains with one sequence, the same alignments and the same hits."""
    structure, options, first = job.structure, job.options, job.structure.chains[group[0].chain]
    alignments: list[Alignment] = []
    read: list[Alignment] = []
    used, notes = [], [*structure.notes, *(note for note in dict.fromkeys(chain.note for chain in group) if note)]
    for source in group[0].alignments:
        try:
            with within_memory(source.name):
                read, row_notes = _read_alignments(source, first.sequence, options)
        except UserError as error:
            notes.append(str(error))
            built.bad[source.name] = str(error)
        else:
            alignments += read
            notes += row_notes
            used.append(source.name)
    # The entry of the first chain; the entries of its copies differ in few fields.
    common = _begin_entry(structure, group[0].chain, job.file)
    common.reason, common.length = "; ".join(note.rstrip(".") for note in notes), len(first.sequence)
    common.hits = [source.name for source in group[0].hits]
    remaining, confidence = [chain.chain for chain in group], {chain.chain: chain.confidence for chain in group}
    try:
        if options.require_msa and not used:
            raise UserError("no alignment" + (f": {common.reason}" if notes else ""))
        with within_memory(job.file.name):
            raw = from_chain(common.name, structure, first, alignments, used, options.has_assemblies)
            # These may take most of the memory, and `raw` has copies of all rows.
            del alignments, read
            if group[0].hits:
                raw = replace(raw, templates=_build_templates(raw.sequence, group[0].hits, job, common, built))
            common.alignments, common.depth, common.sequence = used, raw.depth, raw.sequence
            if raw.depth < options.min_depth:
                raise UserError(f"{raw.depth} alignment rows, fewer than {options.min_depth}")
            arrays, example = example_arrays(raw), example_notes(raw)
            while remaining:
                chain = structure.chains[remaining[0]]
                entry = replace(common, name=f"{structure.id}_{remaining[0]}", entity=f"{structure.id}_{chain.entity}")
                entry = replace(entry, **confidence[remaining[0]])  # type: ignore[arg-type]
                atoms: dict[str, np.ndarray] = {"positions": chain.positions.astype(np.float32)}
                atoms["mask"] = (chain.mask > 0).astype(np.uint8)
                if options.has_assemblies:
                    # Spatial crops read the CA of all chains.
                    atoms["ca"] = atoms["positions"][:, CA]
                if confidence[remaining[0]] and chain.b_factors is not None:
                    atoms["confidence"] = chain.b_factors.astype(np.float16)
                shared: dict[str, str] = {}
                if entry.name != raw.name:
                    large = [name for name, array in arrays.items() if array.nbytes >= MIN_SHARED_BYTES]
                    shared = {name: raw.name for name in large if name not in atoms}
                    entry.shares = raw.name if shared else ""
                stored = {name: array for name, array in (arrays | atoms).items() if name not in shared}
                built.keep(entry, pack_record(stored, example | {"name": entry.name}, shared))
                del remaining[0]
    except UserError as error:
        for name in remaining:
            built.entries.append(replace(common, name=f"{structure.id}_{name}", reason=str(error), alignments=[]))


def _read_alignments(source: InputFile, sequence: str, options: PackOptions) -> tuple[list[Alignment], list[str]]:
    """Read an alignment of a chain; of a complex, the unpaired and the paired rows of the chain.

    Also returns notes on omitted rows.
    """
    data = source.read_bytes(options.limit)
    if is_complex(data):
        alignments = parse_chain_alignments(data, source.name)
        return [chain for chain in alignments if check_map(*column_map(chain.query, sequence)) is None], []
    alignment, notes = limit_as_alphafold(parse_alignment(data, source.name), source)
    return [alignment], notes


def _build_templates(
    sequence: str, sources: Sequence[InputFile], job: BuildJob, entry: PackEntry, built: BuiltChains
) -> Templates | None:
    """Build the templates of a chain, and store the numbers of used and refused hits in `entry`."""
    hits: list[Hit] = []
    for source in sources:
        try:
            with within_memory(source.name):
                text = source.read_bytes(job.options.limit).decode("utf-8", "replace")
                hits += parse_hits(text, sequence, source.name)
        except UserError as error:
            built.bad[source.name] = str(error)
    dates = [day for day in (job.options.day("max_template_date"), job.structure.release_date) if day is not None]
    library = template_library(job.folders, job.options.limit)
    latest, entry_id = min(dates, default=None), job.structure.id.lower()
    templates, outcomes = templates_from_hits(sequence, hits, library, latest, exclude=(entry_id,))
    entry.templates = 0 if templates is None else len(templates)
    entry.templates_refused = count_refusals(outcomes)
    missing = [hit.name.rpartition("_")[0].lower() or hit.name.lower() for hit in outcomes if hit.missing]
    entry.templates_missing, entry.structures_missing = len(missing), list(dict.fromkeys(missing))[:4]
    return templates


@lru_cache(maxsize=2)
def template_library(folders: tuple[Path, ...], limit: int) -> Library:
    """Open the library of some folders. It is cached in this process for later jobs. limit: see `Library`."""
    return Library(*folders, limit=limit)


def _build_assemblies(job: BuildJob, built: BuiltChains) -> None:
    """Add the requested assemblies of the kept chains. Their entries list the omitted components."""
    structure, options = job.structure, job.options
    entry_of = {entry.name.removeprefix(f"{structure.id}_"): entry for entry in built.entries}
    kept_entries = {chain: entry_of[chain] for chain in structure.chains if entry_of[chain].kept}
    dropped = structure.dropped | {chain: entry.reason for chain, entry in entry_of.items() if not entry.kept}
    names = structure.assemblies.ids
    for name in names if options.all_assemblies else names[:1]:
        # The PDB names the files of assemblies in this way.
        entry = _begin_entry(structure, name, job.file, "-assembly")
        built.entries.append(entry)
        try:
            placed = structure.assemblies.place(name, kept_entries, dropped)
        except UserError as error:
            entry.reason = str(error)
            continue
        chains = [kept_entries[chain] for chain, _ in placed.chains]
        entry.length = sum(chain.length for chain in chains)
        if not chains:
            entry.reason = "none of its chains is kept"
        elif len(chains) > options.max_chains:
            entry.reason = f"{len(chains)} chains, more than {options.max_chains}"
        elif entry.length > options.max_residues:
            entry.reason = f"{entry.length} residues, more than {options.max_residues}"
        else:
            # The first chain of each entity, by sequence.
            first: dict[str, PackEntry] = {}
            for chain in chains:
                first.setdefault(chain.sequence, chain)
            entry.chains = [chain.name for chain in chains]
            # Copies share the alignment. Templates of the chains are concatenated.
            entry.depth = sum(chain.depth for chain in first.values())
            entry.templates = max(chain.templates for chain in first.values())
            entry.reason = "; ".join(f"without {component}: {reason}" for component, reason in placed.left_out.items())
            entities = [[*first].index(chain.sequence) + 1 for chain in chains]
            operators = np.stack([operator for _, operator in placed.chains])
            release_date, resolution = entry.release_date, entry.resolution
            record = pack_assembly(entry.name, placed.ids, entry.chains, entities, operators, release_date, resolution)
            built.entries.pop()
            built.keep(entry, record)
