"""Pack structures, alignments and template hits into a store, and report all that is kept and dropped (Supp. 1.2).

Four steps: find the files; read the queries of the alignments (`match`); read each structure, match its
chains to alignments and hits by name and sequence, and make their records (`build`); merge.  Workers read and build in
any order (`jobs`), and their results are kept in a part (`part`) that survives a kill; merging (`merge`) puts the
records of one part or of many into the store, in the order of the files' names.  So the store has the same bytes for
any number of workers, parts and kills.  A bad file becomes an entry of the report and does not end the run.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, replace
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
    OF_MERGE,
    STRUCTURE,
    Manifest,
    PartFolder,
    PartWriter,
    check_parts,
    differences,
    part_path,
    remove_part,
)
from warpfold.data.pack.predicted import LATER, SAME, PredictedFile, files_beside, find_predictions
from warpfold.data.pack.report import PackEntry, PackReport
from warpfold.errors import UserError
from warpfold.progress import Progress, no_progress

CLUSTER_AHEAD = 1024  # files handed to a cluster at a time: enough for some 500 cores, and 1 GB here at the most


@dataclass(frozen=True)
class PackInputs:
    """All files that are packed.  clusters: a file of clusters, if given."""

    structures: list[InputFile]
    alignments: list[InputFile]
    hits: list[InputFile]
    unrequested: list[InputFile]  # files of hits among the alignments that nobody asked for
    library: list[InputFile]  # structures of templates, where they are not those packed
    folders: tuple[Path, ...]  # where the templates' structures are looked for
    clusters: Path | None
    predicted: dict[str, PredictedFile] = field(default_factory=dict)  # what each structure's file is a prediction of

    def manifest(self, options: PackOptions, part: JobPart) -> Manifest:
        """Return the inputs and options that decide the result."""
        kinds = {name: getattr(self, name) for name in ("structures", "alignments", "hits", "library")}
        if self.predicted:
            kinds["predicted"] = [*kinds.pop("structures"), *files_beside(self.predicted)]
        kinds["clusters"] = find([self.clusters], (), "clusters") if self.clusters else []
        return {
            "part": str(part),
            "warpfold": __version__,
            "options": options.recorded(bool(self.predicted)),
            "inputs": {
                name: {"files": len(found), "bytes": sum(one.size for one in found), "digest": digest(found)}
                for name, found in kinds.items()
            },
            "clusters": str(self.clusters.absolute()) if self.clusters else None,
        }

    def alignments_of(self, part: JobPart) -> list[InputFile]:
        """Return the alignments whose queries a part reads: those with its structures' names, and some others.

        By the names of files alone, every alignment belongs to one part.
        """
        if part.count == 1:
            return self.alignments
        entries = {source.path.name.partition(".")[0].lower(): source.name for source in reversed(self.structures)}
        own = []
        for source in self.alignments:
            named = (
                entries[entry] for name in sorted(source.protein_names) if (entry := name.partition("_")[0]) in entries
            )
            if is_of(next(named, source.name), part):
                own.append(source)
        return own


def is_of(name: str, part: JobPart) -> bool:
    """Return whether the file of this name is one of a part's: that follows from the name alone."""
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
    """Find the inputs in the given files and folders.

    Files in `msas` that are named like template hits (`pdb70_hits.hhr`, `hmm_output.sto` ...) are not taken as
    alignments; in `hits`, every file is taken as hits except the alignments of `msas`.
    min_kl: where the structures are predictions, as of `PackOptions`.
    Errors: UserError for a path that does not exist, or where nothing is found.
    """
    found = find(structures, STRUCTURES, "structures")
    aligned = find(msas, (*ALIGNMENTS, *HITS), "alignments") if msas else []
    alignments = [one for one in aligned if not one.is_hits]
    taken = {one.identity for one in alignments}
    all_hits = [one for one in find(hits, HITS, "template hits") if one.identity not in taken] if hits else []
    taken |= {one.identity for one in all_hits}
    library = find(template_structures, STRUCTURES[:2], "structures of templates") if template_structures else []
    folders = [path if path.is_dir() else path.parent for path in map(Path, template_structures or structures)]
    return PackInputs(
        structures=found,
        alignments=alignments,
        hits=all_hits,
        unrequested=[one for one in aligned if one.identity not in taken],
        library=library,
        folders=tuple(dict.fromkeys(folder.absolute() for folder in folders)) if hits else (),
        clusters=clusters,
        predicted={} if min_kl is None else find_predictions(found, min_kl),
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
    """Make the store `out` from files of structures, alignments and template hits, or folders of them.

    template_structures: folders in which hits are looked up (default: those of `structures`).  clusters: a file of
    clusters (`data.similar.clusters.read_clusters`); without one they are made (`PackOptions.cluster_identity`).
    workers, cluster: as for `bulk.pool`; MMseqs2 gets as many threads, where it makes the clusters.  part: pack only
    these, into a folder beside `out` (`part_path`), for `merge`; then the report is of this part.
    predicted: the structures are predictions (`data/pack/predicted.py`).
    A stopped run continues; a finished store of the same inputs and options is left as it is.
    Errors: UserError if a path does not exist; `out` is something else, or of other inputs or options; another
    process is writing it; nothing is kept (then there is no store).  The report says what is wrong with single files.
    """
    own = part or JobPart(1, 1)
    options = options or PackOptions()
    if predicted and hits and not template_structures:
        raise UserError("pack: --hits with --predicted needs --template-structures. A prediction is no template")
    min_kl = options.min_kl if predicted else None
    inputs = find_inputs(structures, msas, hits, template_structures, clusters, min_kl)
    manifest = inputs.manifest(options, own)
    path = part_path(out, own)
    if part is None and (report := finished_report(out, manifest)) is not None:
        remove_part(path)  # left by a run that was killed just before its end
        return report
    template_library.cache_clear()  # of an earlier run of this process: files may have come and gone
    with pool(workers, cluster) as executor:
        ahead = max(AHEAD, 4 * workers) if cluster is None else CLUSTER_AHEAD
        try:
            # Closed before the pool waits for its workers: a stop that cannot wait must not look like a crash.
            with PartWriter(path, manifest) as writer:
                _fill(JobRunner(writer, executor, ahead), inputs, options, out, progress)
                writer.finish()
        except UserError:
            if not (path / "plan.json").exists():  # otherwise it is finished, by an earlier run or by another process
                raise
        if part is not None:
            return report_part(_finished_part(path, manifest))
        report = _merged([path], out, manifest, executor, progress, workers)
    remove_part(path)
    return _with_content(report, out)


def _finished_part(path: Path, manifest: Manifest, ignored: Sequence[str] = ()) -> PartFolder:
    """Open a finished part of this run.  Errors: UserError for one of other inputs or options, but the `ignored`."""
    part = PartFolder(path)
    if found := differences(part.manifest, manifest, ignored):
        raise UserError(
            f"{path}: packed from other inputs or options ({', '.join(found)}). Remove it, or choose another name"
        )
    return part


def merge(
    parts: Sequence[Path],
    out: Path,
    workers: int = 1,
    cluster: str | None = None,
    progress: Progress = no_progress,
) -> PackReport:
    """Merge the parts of a store, packed with `part`, into the store `out`, with what one run would have made.

    The parts stay as they are.
    Errors: UserError if they do not belong together, or one is missing, unfinished or given twice; `out` as in `pack`.
    """
    opened = [PartFolder(path) for path in parts]
    check_parts(opened)
    manifest = opened[0].manifest
    del opened  # a million names of jobs are 100 MB
    if (report := finished_report(out, manifest)) is not None:
        return report
    with pool(workers, cluster) as executor:
        report = _merged(parts, out, manifest, executor, progress, workers)
    return _with_content(report, out)


def _merged(
    parts: Sequence[Path], out: Path, manifest: Manifest, executor: Executor | None, progress: Progress, threads: int
) -> PackReport:
    """Merge the parts, unless another process has finished the same store since this one has looked for it."""
    try:
        # Other clusters need no other records: the merge takes them from this run's manifest.
        opened = [_finished_part(path, manifest, OF_MERGE) for path in parts]
        return merge_parts(opened, out, manifest, executor, progress, threads)
    except UserError:
        if (report := finished_report(out, manifest)) is None:
            raise
        return report


def _with_content(report: PackReport, out: Path) -> PackReport:
    """Return the report; raise UserError if nothing was kept, so that no store was written."""
    if report.kept:
        return report
    reasons = Counter(entry.reason for entry in report.dropped)
    counted = Counter({why: count for why, count in reasons.items() if why not in (SAME, LATER)}) or reasons
    reason, _ = counted.most_common(1)[0]
    raise UserError(f"{out}: nothing to keep, entries: {len(report.entries)}. Most often: {reason}")


def _fill(runner: JobRunner, inputs: PackInputs, options: PackOptions, out: Path, progress: Progress) -> None:
    """Do the jobs of a part that have no result yet."""
    writer, part = runner.writer, runner.writer.part
    shared = None if part.count == 1 else out.with_name(f"{out.name}.part-queries")
    queries = Queries(runner, inputs.alignments, options.limit, shared)
    aligned = inputs.alignments_of(part)
    queries.read(aligned, progress)
    queries.keep(aligned)
    matcher = Matcher(queries, inputs.alignments, inputs.hits, progress)
    own = {STRUCTURE + one.name: one for one in inputs.structures if is_of(one.name, part)}
    waiting = {job: file for job, file in own.items() if job not in writer.jobs}
    sizes: Counter[str] = Counter()  # bytes of the alignments that are named after an entry
    for source in inputs.alignments:
        for name in source.protein_names:
            sizes[name.partition("_")[0]] += source.size

    def cost(job: str) -> tuple[int, str]:
        file = waiting[job]
        return file.size + sizes[file.path.name.partition(".")[0].lower()], file.name

    longest_first = sorted(waiting, key=cost, reverse=True)  # so that no worker is busy alone at the end
    before = len(own) - len(waiting)
    progress(before, len(own), "packing")
    jobs = _pack_structures(runner, matcher, options, inputs, {job: waiting[job] for job in longest_first})
    for done, _ in enumerate(jobs, before + 1):
        progress(done, len(own), "packing")
    if HIT_FILES not in writer.jobs:
        unrequested = [
            [one.name, "template hits; name their folder in --hits to use them"] for one in inputs.unrequested
        ]
        writer.add(HIT_FILES, [*([one.name, ""] for one in inputs.hits), *unrequested])


def _pack_structures(
    runner: JobRunner, matcher: Matcher, options: PackOptions, inputs: PackInputs, files: dict[str, InputFile]
) -> Iterator[str]:
    """Read structure files, match their chains and build their records; yield each job when its result is kept.

    files: by the names of their jobs.
    """
    dropped: dict[str, list[PackEntry]] = {}  # chains, by job that builds the others

    def build_next(job: PackJob, result: ReadChains | BuiltChains) -> Call | None:
        """Return the call that builds the chains of a structure, if there are any to keep."""
        if isinstance(result, BuiltChains):
            return None
        name, structure = job.name, result.structure
        dropped[name] = result.dropped
        if structure is None or not structure.chains:
            return None
        matched = [
            replace(
                matcher.find(f"{structure.id}_{chain}", chain, found.sequence),
                confidence=result.confidence.get(chain, {}),
            )
            for chain, found in structure.chains.items()
        ]
        return build, BuildJob(files[name], structure, matched, options, inputs.folders)

    by_file = files_to_name_by(inputs.structures)
    jobs = (
        PackJob(name, (read_chains, (file, options, inputs.predicted.get(file.name), file.name in by_file)))
        for name, file in files.items()
    )
    for job, result in runner.run(jobs, build_next):
        name = job.name
        file, entries = files[name], dropped.pop(name, [])
        if result is None:
            entries = [PackEntry(file.title, file.name, False, f"{file.name}: {DIED}")]
        built = result if isinstance(result, BuiltChains) else BuiltChains()
        found = [asdict(entry) for entry in (*entries, *built.entries)]
        runner.writer.add(name, {"entries": found, "bad": built.bad}, built.records)
        yield name
