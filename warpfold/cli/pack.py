"""`warpfold pack`."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from warpfold import arguments
from warpfold.arguments import Cluster, PathLike, Paths, Workers, function, in_panel, progress_of, reads, runs, writes
from warpfold.bulk import JobPart
from warpfold.cli.common import Answer, StoppedByUser, command, on_sigterm, warn
from warpfold.data.pack.options import PackOptions
from warpfold.errors import UserError
from warpfold.progress import Progress, progress_bar

if TYPE_CHECKING:
    from warpfold.data.pack.report import PackReport

SHOWN = 50  # lines about single entries; a large set has thousands


instead = in_panel("In place of packing")


@dataclass(frozen=True)
class PackCommand(PackOptions):
    """Make the store that `train` reads from structures, alignments and template hits, and report on every entry."""

    structures: Annotated[Paths | None, reads("mmCIF or PDB files, or folders of them; gz or not.")] = None
    msas: Annotated[
        Paths | None,
        reads("A3M or Stockholm files, their folders (OpenProteinSet's too), or the .index of an alignment database."),
    ] = None
    out: Annotated[PathLike | None, writes("The store; the same command continues a stopped run.")] = None
    _: KW_ONLY
    predicted: Annotated[
        Paths | None,
        reads(
            "In place of --structures: predictions with pLDDT in the B column, to learn from the residues that are "
            "sure: AlphaFold DB's files, ColabFold's, or folders of `warpfold predict`."
        ),
    ] = None
    hits: Annotated[Paths | None, reads("Template hits: HHR, or hmmsearch's Stockholm or A3M.")] = None
    template_structures: Annotated[
        Paths | None, reads("Folders of the templates' mmCIF files; default: those of --structures.")
    ] = None
    clusters: Annotated[PathLike | None, reads("Clusters, one per line, or MMseqs2's TSV; default: computed.")] = None
    workers: Workers = 1
    cluster: Cluster = None
    shard: Annotated[str | None, runs("I/N: only the I-th of N parts, for job arrays; then --merge joins them.")] = None
    merge: Annotated[Paths | None, instead("Join the parts that --shard made into the store --out.")] = None
    progress: Progress | None = None

    def __call__(self) -> "PackReport":
        """Return the report.  A stopped run is continued by the same call.

        Errors: UserError for bad arguments and paths, where nothing is kept, and for an `out` that is something else.
        """
        from warpfold.data.pack import pack as packing

        if self.out is None:
            raise UserError("pack: --out is missing. Name the store to make")
        if sum(one is not None for one in (self.structures, self.predicted, self.merge)) != 1:
            raise UserError("pack: give structures, or predicted ones, or parts to merge, and only one of these")
        out, tell = arguments.path("out", self.out), progress_of(self.progress)
        part = JobPart.parse(self.shard) if self.shard else None
        if self.merge is not None:
            return packing.merge(arguments.paths("merge", self.merge), out, self.workers, self.cluster, tell)
        return packing.pack(
            arguments.paths("structures", self.structures) or arguments.paths("predicted", self.predicted),
            arguments.paths("msas", self.msas), out, self.only(PackOptions), predicted=self.predicted is not None,
            hits=arguments.paths("hits", self.hits), clusters=arguments.path_or_none("clusters", self.clusters),
            template_structures=arguments.paths("template_structures", self.template_structures),
            workers=self.workers, cluster=self.cluster, part=part, progress=tell,
        )  # fmt: skip


pack = function(PackCommand)


@command(
    PackCommand,
    continues=True,
    example="Example:  warpfold pack --structures mmcif/ --msas msas/ --hits msas/ --out store --workers 16",
)
def pack_in_shell(
    given: dict[str, Any],
    verify: Annotated[Path | None, instead("Check every byte of a store.", path="store")] = None,
    info: Annotated[Path | None, instead("Show what is in a store.", path="store")] = None,
) -> Answer:
    """Make a store under a progress bar, or look at one."""
    from warpfold.data.pack.report import store_summary_text, summarize_store
    from warpfold.data.store.store import Store

    modes = {f"--{name}": given[name] for name in ("structures", "predicted", "merge")}
    modes |= {"--verify": verify, "--info": info}
    chosen = [name for name, value in modes.items() if value]
    if len(chosen) != 1:
        raise UserError(f"pack: give one of {', '.join(modes)}, not {' and '.join(chosen) or 'none'}. See --help")
    if verify is not None:
        return _verified(verify)
    if info is not None:
        found = summarize_store(Store(info))
        return Answer(found, [store_summary_text(found)])
    # Without an answer to SIGTERM the files that are being read would be blamed for the death of the process.
    with on_sigterm(StoppedByUser(143)), progress_bar() as bar:
        report = pack(**given, progress=bar)
    part = JobPart.parse(given["shard"]) if given["shard"] and not given["merge"] else None
    return Answer(report.to_json, _lines(report, Path(given["out"]), part))


def _lines(report: "PackReport", out: Path, part: JobPart | None) -> Iterator[str]:
    lines = [f"dropped {entry.name or entry.file}: {entry.reason}" for entry in report.dropped]
    lines += [f"unused {file}: {why}" for file, why in (report.unused | report.unused_hits).items()]
    yield from (" ".join(line.split()) for line in lines[:SHOWN])  # names may hold line ends
    if len(lines) > SHOWN:
        yield f"... and {len(lines) - SHOWN} more lines like these" + ("" if part else f", in {out / 'pack.tsv'}")
    for warning in report.warnings():
        warn(f"warning: {warning}")
    if part is not None:
        from warpfold.data.pack.part import part_path

        pattern = part_path(out, part).name.replace(f"part-{part.number}-", "part-*-")
        yield f"{part_path(out, part)}: part {part}, {report.summary()}"
        yield f"when all are there: warpfold pack --merge {out.with_name(pattern)} --out {out}"
    else:
        before = "was finished before, from the same inputs and options: " if report.finished_before else ""
        yield f"{out}: {before}{report.summary()}"


def _verified(given: Path) -> Answer:
    """List what is damaged."""
    from warpfold.data.store.remote import open_storage, parse_place
    from warpfold.data.store.store import Store

    path = parse_place(given)
    with progress_bar() as bar:
        try:
            store = Store(path)
            entries, damaged = len(store), list(store.verify(lambda done, total: bar(done, total, "checking")))
        except UserError as error:
            try:
                open_storage(path).size("store.json")
            except FileNotFoundError:
                raise error from None
            entries, damaged = 0, [str(error)]
    verdict = f"{len(damaged)} damaged" if damaged else f"{entries} entries, all whole"
    found = {"path": str(path), "entries": entries, "damaged": damaged}
    return Answer(found, [*damaged, f"{path}: {verdict}"], bool(damaged))
