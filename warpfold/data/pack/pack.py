"""Structures, alignments and template hits -> a packed store, with an account of all kept and dropped (Supp. 1.2).

Four steps: find the files; read the queries of the alignments (`pack_queries`); read each structure, match its chains
to alignments and hits by name and sequence, and make their records (`pack_structures`); merge.  Workers do the reading
and making, in any order (`pack_work`), and what they have done is kept in a part (`pack_part`) that outlives a kill;
merging (`pack_merge`) puts the records of one part or of many into the store, in the order of the files' names.  So
the store is the same bytes for any number of workers, parts and kills.  One bad file is an entry of the report, never
the end of the run.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from warpfold import __version__
from warpfold.bulk import AHEAD, Part, pool
from warpfold.data.formats.sources import ALIGNMENTS, HITS, STRUCTURES, Source, digest, find
from warpfold.data.pack.build import DEFAULTS, Options, library_of
from warpfold.data.pack.merge import finished, merge_parts, report_part
from warpfold.data.pack.part import PartFolder, PartWriter, Plan, check_parts, part_path, remove_part
from warpfold.data.pack.queries import Matching, Queries, own_alignments, own_structures
from warpfold.data.pack.report import Report
from warpfold.data.pack.structures import Structures
from warpfold.data.pack.work import Work
from warpfold.errors import UserError
from warpfold.progress import Progress, no_progress

CLUSTER_AHEAD = 1024  # files handed to a cluster at a time: enough for some 500 cores, and 1 GB here at the most


@dataclass(frozen=True)
class Inputs:
    """All that is packed.  clusters: a file of clusters, if given."""

    structures: list[Source]
    alignments: list[Source]
    hits: list[Source]
    unasked: list[Source]  # files of hits among the alignments that nobody asked for
    library: list[Source]  # structures of templates, where they are not those packed
    folders: tuple[Path, ...]  # where the templates' structures are looked for
    clusters: Path | None

    def plan(self, options: Options, part: Part) -> Plan:
        """What these are and how they are packed, as far as it decides the result."""
        kinds = {name: getattr(self, name) for name in ("structures", "alignments", "hits", "library")}
        kinds["clusters"] = find([self.clusters], (), "clusters") if self.clusters else []
        return {
            "part": str(part),
            "warpfold": __version__,
            "options": asdict(options),
            "inputs": {
                name: {"files": len(found), "bytes": sum(one.size for one in found), "digest": digest(found)}
                for name, found in kinds.items()
            },
            "clusters": str(self.clusters.absolute()) if self.clusters else None,
        }


def find_inputs(
    structures: Sequence[Path],
    msas: Sequence[Path] = (),
    hits: Sequence[Path] = (),
    template_structures: Sequence[Path] = (),
    clusters: Path | None = None,
) -> Inputs:
    """What lies in the given files and folders.

    Files in `msas` whose names are those of template hits (`pdb70_hits.hhr`, `hmm_output.sto` ...) are no alignments;
    in `hits`, everything is hits but for the alignments of `msas`.
    Errors: UserError for a path that does not exist, or holds nothing of its kind.
    """
    found = find(structures, STRUCTURES, "structures")
    aligned = find(msas, (*ALIGNMENTS, *HITS), "alignments") if msas else []
    alignments = [one for one in aligned if not one.is_hits]
    taken = {one.identity for one in alignments}
    all_hits = [one for one in find(hits, HITS, "template hits") if one.identity not in taken] if hits else []
    taken |= {one.identity for one in all_hits}
    library = find(template_structures, STRUCTURES[:2], "structures of templates") if template_structures else []
    folders = [path if path.is_dir() else path.parent for path in map(Path, template_structures or structures)]
    return Inputs(
        structures=found,
        alignments=alignments,
        hits=all_hits,
        unasked=[one for one in aligned if one.identity not in taken],
        library=library,
        folders=tuple(dict.fromkeys(folder.absolute() for folder in folders)) if hits else (),
        clusters=clusters,
    )


def pack(
    structures: Sequence[Path],
    msas: Sequence[Path],
    out: Path,
    options: Options = DEFAULTS,
    *,
    hits: Sequence[Path] = (),
    template_structures: Sequence[Path] = (),
    clusters: Path | None = None,
    workers: int = 1,
    cluster: str | None = None,
    part: Part | None = None,
    progress: Progress | None = None,
) -> Report:
    """Makes the store `out` from files of structures, alignments and template hits, or folders of them.

    template_structures: folders in which hits are looked up (default: those of `structures`).  clusters: a file of
    clusters (`data.similar.clusters.read_clusters`); without one they are made (`Options.cluster_identity`).
    workers, cluster: as of `bulk.pool`.  part: pack only these, into a folder beside `out` (`pack_part.part_path`), for
    `merge`; then the report is of this part.
    A run that was stopped continues; one that is finished is left as it is, if it was of the same inputs and options.
    Errors: UserError if a path does not exist; `out` is something else, or of other inputs or options; another
    process is writing it; nothing is kept (then there is no store).  What is wrong with single files is in the report.
    """
    whole = Part(1, 1)
    inputs = find_inputs(structures, msas, hits, template_structures, clusters)
    plan = inputs.plan(options, part or whole)
    folder = part_path(out, part or whole)
    if part is None and (report := finished(out, plan)) is not None:
        remove_part(folder)  # of a run that was killed at its very end
        return report
    tell = progress or no_progress
    library_of.cache_clear()  # of an earlier run of this process: files may have come and gone
    with pool(workers, cluster) as executor:
        writer = PartWriter(folder, plan)
        try:
            if not writer.finished:
                ahead = max(AHEAD, 4 * workers) if cluster is None else CLUSTER_AHEAD
                _fill(writer, inputs, options, part or whole, out, Work(writer, executor, ahead), tell)
                writer.finish()
            if part is not None:
                return report_part(writer)
            report = merge_parts([writer], out, executor, tell)
            writer.remove()
        finally:  # before the workers end what they are at: a stop that has to be quick is a stop, and not a death
            if not writer.answers:
                writer.remove()
            writer.close()
    return _with_content(report, out)


def merge(
    parts: Sequence[Path],
    out: Path,
    workers: int = 1,
    cluster: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Puts the parts of a store, packed with `part`, into the store `out`: the same that one run would have made.

    The parts stay where they are.
    Errors: UserError if they do not belong together, one is missing, unfinished or given twice; `out` as of `pack`.
    """
    opened = [PartFolder(path) for path in parts]
    check_parts(opened)
    if (report := finished(out, opened[0].plan)) is not None:
        return report
    with pool(workers, cluster) as executor:
        report = merge_parts(opened, out, executor, progress or no_progress)
    return _with_content(report, out)


def _with_content(report: Report, out: Path) -> Report:
    """The report, if anything was kept; else UserError: no store was written."""
    if report.kept:
        return report
    reason, _ = Counter(entry.reason for entry in report.dropped).most_common(1)[0]
    raise UserError(f"{out}: nothing to keep, entries: {len(report.entries)}; most often: {reason}")


def _fill(
    writer: PartWriter, inputs: Inputs, options: Options, part: Part, out: Path, work: Work, tell: Progress
) -> None:
    """Do the jobs of a part that are not done yet, and forget those of files that are gone."""
    own = own_structures(inputs.structures, part)
    aligned = own_alignments(inputs.alignments, inputs.structures, part)
    wanted = {f"structure {one.name}" for one in own}
    writer.forget([job for job, _ in writer.jobs("structure") if job not in wanted])
    unasked = [[one.name, "template hits; name their folder in --hits to use them"] for one in inputs.unasked]
    _keep(writer, "hits", [*([one.name, ""] for one in inputs.hits), *unasked])

    def reading(sources: Sequence[Source]) -> Callable[[int], None]:
        return lambda done: tell(done, len(sources), "reading alignments")

    queries = Queries(work, options, part, out)
    queries.need(aligned, reading(aligned))
    matching = Matching(queries, inputs.alignments, inputs.hits, reading(inputs.alignments))
    jobs = Structures(work, matching, options, inputs.folders)
    waiting = [one for one in own if not jobs.hold(one)]
    waiting.sort(key=_work(inputs), reverse=True)  # the longest first, so that none is alone at the end
    done = len(own) - len(waiting)
    tell(done, len(own), "packing")
    for _ in jobs.do(waiting):
        done += 1
        tell(done, len(own), "packing")
    _keep(writer, "alignments", [[one.name, *queries[one]] for one in aligned])


def _keep(writer: PartWriter, job: str, data: list[list[str]]) -> None:
    """Add an answer, unless it is there."""
    if job not in writer.answers or writer.answers[job].data != data:
        writer.add(job, data)


def _work(inputs: Inputs) -> Callable[[Source], tuple[int, str]]:
    """By what structure files are sorted: their bytes, and those of the alignments that bear their names."""
    sizes: dict[str, int] = defaultdict(int)
    for source in inputs.alignments:
        for name in source.bears:
            sizes[name.partition("_")[0]] += source.size
    return lambda file: (file.size + sizes[file.path.name.partition(".")[0].lower()], file.name)
