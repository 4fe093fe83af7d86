"""Pack structures, alignments and template hits into a store, and report all kept and dropped chains (Supp. 1.2).

Packing has four steps: find the files; read the queries of the alignments (`match`); read each structure, match its
chains to alignments and hits, and build their records (`build`); merge. Workers read and build in any order (`jobs`).
Their results are stored in a part (`part`), which survives a kill. The merge (`merge`) writes the records of one or
several parts to the store in the order of the file names. Thus the bytes of the store do not depend on workers, parts
and kills. A bad file becomes an entry of the report and does not end the run.
"""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path

from warpfold import __version__
from warpfold.bulk import AHEAD, JobPart, pool
from warpfold.data.formats.input_files import ALIGNMENTS, HITS, STRUCTURES, InputFile, digest, find
from warpfold.data.pack.build import (
    BuildJob,
    BuiltChains,
    ReadChains,
    build,
    files_to_name_by,
    read_chains,
    template_library,
)
from warpfold.data.pack.jobs import DIED, Call, JobRunner, PackJob
from warpfold.data.pack.match import Matcher, Queries
from warpfold.data.pack.merge import finished_report, merge_parts, report_part
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.part import (
    HIT_FILES,
    MERGE_SETTINGS,
    STRUCTURE,
    Manifest,
    PartFolder,
    PartWriter,
    check_parts,
    differences,
    part_path,
    remove_part,
)
from warpfold.data.pack.predicted import LATER, SAME, PredictedFile, confidence_files, find_predictions
from warpfold.data.pack.report import PackEntry, PackReport
from warpfold.errors import UserError
from warpfold.progress import Progress, no_progress

# Files submitted to a cluster at a time. This is enough for about 500 cores and uses at most 1 GB here.
CLUSTER_AHEAD = 1024


@dataclass(frozen=True)
class PackInputs:
    """All input files.

    unrequested: template hits in the folders of alignments that were not passed as hits. library: structures of
    templates, if these are not the packed structures. folders: where structures of templates are looked up. clusters: a
    file of clusters. predicted: the prediction of each structure file.
    """

    structures: list[InputFile]
    alignments: list[InputFile]
    hits: list[InputFile]
    unrequested: list[InputFile]
    library: list[InputFile]
    folders: tuple[Path, ...]
    clusters: Path | None
    predicted: dict[str, PredictedFile]

    def manifest(self, options: PackOptions, part: JobPart) -> Manifest:
        """Return the manifest of the inputs and options that decide the result."""
        kinds = {name: getattr(self, name) for name in ("structures", "alignments", "hits", "library")}
        if self.predicted:
            kinds["predicted"] = [*kinds.pop("structures"), *confidence_files(self.predicted)]
        kinds["clusters"] = find([self.clusters], (), "clusters") if self.clusters else []
        return {
            "part": str(part),
            "warpfold": __version__,
            "options": options.recorded(bool(self.predicted)),
            "inputs": {
                name: {"files": len(files), "bytes": sum(file.size for file in files), "digest": digest(files)}
                for name, files in kinds.items()
            },
            "clusters": str(self.clusters.absolute()) if self.clusters else None,
        }

    def alignments_of(self, part: JobPart) -> list[InputFile]:
        """Return the alignments with queries that a part reads: those named after its structures, and some others.

        Each alignment belongs to exactly one part, which depends only on the names of the files.
        """
        if part.count == 1:
            return self.alignments
        entries = {source.path.name.partition(".")[0].lower(): source.name for source in reversed(self.structures)}
        alignments = []
        for source in self.alignments:
            named = (
                entries[entry] for name in sorted(source.protein_names) if (entry := name.partition("_")[0]) in entries
            )
            if is_in_part(next(named, source.name), part):
                alignments.append(source)
        return alignments


def is_in_part(name: str, part: JobPart) -> bool:
    """Return whether a file belongs to a part. This depends only on its name."""
    number = int.from_bytes(blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")
    return number % part.count == part.number - 1


def find_inputs(
    structures: Sequence[Path],
    msas: Sequence[Path] = (),
    hits: Sequence[Path] = (),
    template_structures: Sequence[Path] = (),
    clusters: Path | None = None,
    min_kl: float | None = None,
) -> PackInputs:
    """Find the inputs in files and folders.

    Files in `msas` with names of template hits (such as `pdb70_hits.hhr` and `hmm_output.sto`) are not read as
    alignments. In `hits`, every file is read as hits except the alignments of `msas`.
    min_kl: option of `PackOptions` if the structures are predictions, else None.
    Raises UserError for a path that does not exist or contains no inputs.
    """
    structure_files = find(structures, STRUCTURES, "structures")
    aligned = find(msas, (*ALIGNMENTS, *HITS), "alignments") if msas else []
    alignments = [file for file in aligned if not file.is_hits]
    identities = {file.identity for file in alignments}
    all_hits = [file for file in find(hits, HITS, "template hits") if file.identity not in identities] if hits else []
    identities |= {file.identity for file in all_hits}
    library = find(template_structures, STRUCTURES[:2], "structures of templates") if template_structures else []
    folders = [path if path.is_dir() else path.parent for path in map(Path, template_structures or structures)]
    return PackInputs(
        structures=structure_files,
        alignments=alignments,
        hits=all_hits,
        unrequested=[file for file in aligned if file.identity not in identities],
        library=library,
        folders=tuple(dict.fromkeys(folder.absolute() for folder in folders)) if hits else (),
        clusters=clusters,
        predicted={} if min_kl is None else find_predictions(structure_files, min_kl),
    )


def pack(
    structures: Sequence[Path],
    msas: Sequence[Path],
    out: Path,
    options: PackOptions | None = None,
    *,
    hits: Sequence[Path] = (),
    template_structures: Sequence[Path] = (),
    clusters: Path | None = None,
    workers: int = 1,
    cluster: str | None = None,
    part: JobPart | None = None,
    predicted: bool = False,
    progress: Progress = no_progress,
) -> PackReport:
    """Pack files or folders of structures, alignments and template hits into the store `out`. Returns the report.

    template_structures: folders in which hits are looked up (default: those of `structures`). clusters: a file of
    clusters (`data.similar.clusters.read_clusters`); by default they are computed (`PackOptions.cluster_identity`).
    workers, cluster: as for `bulk.pool`; MMseqs2 uses `workers` threads. part: pack only this part, into a folder next
    to `out` (`part_path`), for `merge`; the report is then of this part. predicted: the structures are predictions
    (`data/pack/predicted.py`).

    A stopped run continues. A finished store of the same inputs and options is not changed.
    Raises UserError if a path does not exist, if `out` is something else or has other inputs or options, if another
    process is writing it, and if nothing is kept (no store is written then). The report lists errors of single files.
    """
    this_part = part or JobPart(1, 1)
    options = options or PackOptions()
    if predicted and hits and not template_structures:
        raise UserError(
            "pack: --hits with --predicted needs --template-structures: predictions are not templates. Pass it too."
        )
    min_kl = options.min_kl if predicted else None
    inputs = find_inputs(structures, msas, hits, template_structures, clusters, min_kl)
    manifest = inputs.manifest(options, this_part)
    path = part_path(out, this_part)
    if part is None and (report := finished_report(out, manifest)) is not None:
        # A run that was killed just before its end leaves its part.
        remove_part(path)
        return report
    # Files may have changed since an earlier run of this process.
    template_library.cache_clear()
    with pool(workers, cluster) as executor:
        ahead = max(AHEAD, 4 * workers) if cluster is None else CLUSTER_AHEAD
        try:
            # The writer is closed before the pool waits for its workers, so that an interrupted wait does not look like
            # a crash.
            with PartWriter(path, manifest) as writer:
                _run_jobs(JobRunner(writer, executor, ahead), inputs, options, out, progress)
                writer.finish()
        except UserError:
            # If plan.json exists, an earlier run or another process has finished the part.
            if not (path / "plan.json").exists():
                raise
        if part is not None:
            return report_part(_open_part(path, manifest))
        report = _merge_or_read([path], out, manifest, executor, progress, workers)
    remove_part(path)
    return _require_entries(report, out)


def _open_part(path: Path, manifest: Manifest, ignored: Sequence[str] = ()) -> PartFolder:
    """Open a finished part of this run. Raises UserError if it has other inputs or options, except the `ignored`."""
    part = PartFolder(path)
    if changes := differences(part.manifest, manifest, ignored):
        raise UserError(
            f"{path}: packed from other inputs or options ({', '.join(changes)}). Remove it, or choose another name."
        )
    return part


def merge(
    parts: Sequence[Path], out: Path, workers: int = 1, cluster: str | None = None, progress: Progress = no_progress
) -> PackReport:
    """Merge the parts of a store, packed with `part`, into the store `out`, which equals that of a single run.

    The parts are not changed. Raises UserError if they do not belong together, if one is missing, unfinished or
    repeated, and for `out` as in `pack`.
    """
    opened = [PartFolder(path) for path in parts]
    check_parts(opened)
    manifest = opened[0].manifest
    # The names of a million jobs take 100 MB.
    del opened
    if (report := finished_report(out, manifest)) is not None:
        return report
    with pool(workers, cluster) as executor:
        report = _merge_or_read(parts, out, manifest, executor, progress, workers)
    return _require_entries(report, out)


def _merge_or_read(
    parts: Sequence[Path], out: Path, manifest: Manifest, executor: Executor | None, progress: Progress, threads: int
) -> PackReport:
    """Merge the parts, or read the report if another process has finished the same store in the meantime."""
    try:
        # The records do not depend on the clusters, whose settings come from this run's manifest.
        opened = [_open_part(path, manifest, MERGE_SETTINGS) for path in parts]
        return merge_parts(opened, out, manifest, executor, progress, threads)
    except UserError:
        if (report := finished_report(out, manifest)) is None:
            raise
        return report


def _require_entries(report: PackReport, out: Path) -> PackReport:
    """Return the report. Raises UserError if nothing was kept, because no store is written then."""
    if report.kept:
        return report
    reasons = Counter(entry.reason for entry in report.dropped)
    counted = Counter({cause: count for cause, count in reasons.items() if cause not in (SAME, LATER)}) or reasons
    reason, _ = counted.most_common(1)[0]
    raise UserError(f"{out}: all {len(report.entries)} entries are dropped; the most frequent reason: {reason}")


def _run_jobs(runner: JobRunner, inputs: PackInputs, options: PackOptions, out: Path, progress: Progress) -> None:
    """Read the queries and structures of a part that have no result yet, match the chains, and build their records."""
    writer, part = runner.writer, runner.writer.part
    shared = None if part.count == 1 else out.with_name(f"{out.name}.part-queries")
    queries = Queries(runner, inputs.alignments, options.limit, shared)
    aligned = inputs.alignments_of(part)
    queries.read(aligned, progress)
    queries.keep(aligned)
    matcher = Matcher(queries, inputs.alignments, inputs.hits, progress)
    files = {STRUCTURE + file.name: file for file in inputs.structures if is_in_part(file.name, part)}
    waiting = {job: file for job, file in files.items() if job not in writer.jobs}
    # Bytes of the alignments that are named after an entry.
    sizes: Counter[str] = Counter()
    for source in inputs.alignments:
        for name in source.protein_names:
            sizes[name.partition("_")[0]] += source.size

    def cost(item: tuple[str, InputFile]) -> tuple[int, str]:
        _, file = item
        return file.size + sizes[file.path.name.partition(".")[0].lower()], file.name

    # Dropped chains of each job.
    dropped: dict[str, list[PackEntry]] = {}

    def build_next(job: PackJob, result: ReadChains | BuiltChains) -> Call | None:
        """Return the call that builds the kept chains of a structure, if any."""
        if isinstance(result, BuiltChains):
            return None
        structure = result.structure
        dropped[job.name] = result.dropped
        if structure is None or not structure.chains:
            return None
        matched = []
        for name, chain in structure.chains.items():
            chain_job = matcher.find(f"{structure.id}_{name}", name, chain.sequence)
            matched.append(replace(chain_job, confidence=result.confidence.get(name, {})))
        return build, BuildJob(files[job.name], structure, matched, options, inputs.folders)

    before = len(files) - len(waiting)
    progress(before, len(files), "packing")
    named_by_file = files_to_name_by(inputs.structures)
    # The most expensive jobs start first, so that no worker is busy alone at the end.
    jobs = (
        PackJob(name, (read_chains, (file, options, inputs.predicted.get(file.name), file.name in named_by_file)))
        for name, file in sorted(waiting.items(), key=cost, reverse=True)
    )
    for done, (job, result) in enumerate(runner.run(jobs, build_next), before + 1):
        file, entries = files[job.name], dropped.pop(job.name, [])
        if result is None:
            entries = [PackEntry(file.title, file.name, False, f"{file.name}: {DIED}")]
        built = result if isinstance(result, BuiltChains) else BuiltChains()
        data = {"entries": [asdict(entry) for entry in (*entries, *built.entries)], "bad": built.bad}
        writer.add(job.name, data, built.records)
        progress(done, len(files), "packing")
    if HIT_FILES not in writer.jobs:
        reason = "template hits; pass their folder to --hits to use them"
        unrequested = [[file.name, reason] for file in inputs.unrequested]
        writer.add(HIT_FILES, [*([file.name, ""] for file in inputs.hits), *unrequested])
