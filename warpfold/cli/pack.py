"""`warpfold pack`."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from warpfold import arguments
from warpfold.arguments import Cluster, PathLike, Paths, Workers, checked, in_panel, progress_of, reads, runs, writes
from warpfold.bulk import JobPart
from warpfold.cli.common import Answer, StoppedByUser, command, on_sigterm, warn
from warpfold.data.pack.options import PackOptions
from warpfold.errors import UserError
from warpfold.progress import Progress, progress_bar

if TYPE_CHECKING:
    from warpfold.data.pack.report import PackReport

# Lines about single entries in the output. A large set has thousands.
MAX_LINES = 50


instead = in_panel("Instead of packing")


@checked(PackOptions)
def pack(
    structures: Annotated[Paths | None, reads("mmCIF or PDB files, or folders of them; gz or not.")] = None,
    msas: Annotated[
        Paths | None,
        reads("A3M or Stockholm files, their folders (OpenProteinSet's too), or the .index of an alignment database."),
    ] = None,
    out: Annotated[PathLike | None, writes("The store; the same command continues a stopped run.")] = None,
    *,
    predicted: Annotated[
        Paths | None,
        reads(
            "Instead of --structures: predictions with pLDDT in the B column, to train on their confident residues: "
            "files of AlphaFold DB or ColabFold, or folders of `warpfold predict`."
        ),
    ] = None,
    hits: Annotated[Paths | None, reads("Template hits: HHR, or hmmsearch's Stockholm or A3M.")] = None,
    template_structures: Annotated[
        Paths | None, reads("Folders of the templates' mmCIF files; default: those of --structures.")
    ] = None,
    clusters: Annotated[PathLike | None, reads("Clusters, one per line, or MMseqs2's TSV; default: computed.")] = None,
    min_length: int = 10,
    max_length: int | None = None,
    min_depth: int = 1,
    min_plddt: float = 50.0,
    max_pae: float | None = None,
    min_kl: float = 0.5,
    cluster_identity: float = 0.4,
    max_resolution: float = 9.0,
    max_single: float = 0.8,
    released_after: str | None = None,
    released_before: str | None = None,
    require_msa: bool = False,
    max_template_date: str | None = None,
    assemblies: bool = False,
    all_assemblies: bool = False,
    max_chains: int = 20,
    max_residues: int = 10_000,
    max_file_gb: float = 4.0,
    workers: Workers = 1,
    cluster: Cluster = None,
    shard: Annotated[
        str | None, runs("I/N: only the I-th of N parts, for job arrays; then --merge joins them.")
    ] = None,
    merge: Annotated[Paths | None, instead("Merge the parts of --shard into the store --out.")] = None,
    progress: Progress | None = None,
) -> "PackReport":
    """Pack structures, alignments and template hits into a store for `train`, and report on every entry.

    The same call continues a stopped run.
    Errors: UserError for invalid arguments and paths, if nothing is kept, and if `out` is something else.
    """
    values = locals()
    options = PackOptions(**{field.name: values[field.name] for field in fields(PackOptions)})
    from warpfold.data.pack import pack as packing

    if out is None:
        raise UserError("pack: --out is missing. Pass the folder of the new store.")
    modes = {"--structures": structures, "--predicted": predicted, "--merge": merge}
    _check_one_mode({mode: paths is not None for mode, paths in modes.items()})
    part = JobPart.parse(shard) if shard else None
    if merge is not None:
        return packing.merge(arguments.paths("merge", merge), Path(out), workers, cluster, progress_of(progress))
    return packing.pack(
        arguments.paths("structures", structures) or arguments.paths("predicted", predicted),
        arguments.paths("msas", msas), Path(out), options, predicted=predicted is not None,
        hits=arguments.paths("hits", hits), clusters=arguments.path_or_none("clusters", clusters),
        template_structures=arguments.paths("template_structures", template_structures),
        workers=workers, cluster=cluster, part=part, progress=progress_of(progress),
    )  # fmt: skip


def _check_one_mode(modes: Mapping[str, object]) -> None:
    """Raise UserError unless exactly one of the modes is true."""
    given = [name for name, value in modes.items() if value]
    if len(given) != 1:
        raise UserError(f"pack: {' and '.join(given) or 'no mode'} given. Pass one of {', '.join(modes)}.")


@command(
    pack,
    continues=True,
    example="Example:  warpfold pack --structures mmcif/ --msas msas/ --hits msas/ --out store --workers 16",
)
def pack_in_shell(
    given: dict[str, Any],
    verify: Annotated[Path | None, instead("Check every byte of a store.", path="store")] = None,
    info: Annotated[Path | None, instead("Summarise a store.", path="store")] = None,
) -> Answer:
    """Pack structures, alignments and template hits into a store for `train`, and report on every entry."""
    from warpfold.data.pack.report import store_summary_text, summarize_store
    from warpfold.data.store.store import Store

    modes = {f"--{name}": given[name] for name in ("structures", "predicted", "merge")}
    modes |= {"--verify": verify, "--info": info}
    _check_one_mode(modes)
    if verify is not None:
        return _verify(verify)
    if info is not None:
        summary = summarize_store(Store(info))
        return Answer(summary, [store_summary_text(summary)])
    # Without a handler of SIGTERM, the files that are being read would count as the cause of the process's death.
    with on_sigterm(StoppedByUser(143)), progress_bar() as bar:
        report = pack(**given, progress=bar)
    part = JobPart.parse(given["shard"]) if given["shard"] and not given["merge"] else None
    return Answer(report.to_json, _lines(report, Path(given["out"]), part))


def _lines(report: "PackReport", out: Path, part: JobPart | None) -> Iterator[str]:
    """Yield the output: lines about single entries, warnings, and a summary."""
    lines = [f"dropped {entry.name or entry.file}: {entry.reason}" for entry in report.dropped]
    lines += [f"unused {file}: {reason}" for file, reason in (report.unused | report.unused_hits).items()]
    # Names may contain line ends.
    yield from (" ".join(line.split()) for line in lines[:MAX_LINES])
    if len(lines) > MAX_LINES:
        yield f"... and {len(lines) - MAX_LINES} more lines like these" + ("" if part else f", in {out / 'pack.tsv'}")
    for warning in report.warnings():
        warn(f"warning: {warning}")
    if part is not None:
        from warpfold.data.pack.part import part_path

        pattern = part_path(out, part).name.replace(f"part-{part.number}-", "part-*-")
        yield f"{part_path(out, part)}: part {part}, {report.summary()}"
        yield f"when all parts are finished: warpfold pack --merge {out.with_name(pattern)} --out {out}"
    else:
        prefix = "was finished before, from the same inputs and options: " if report.finished_before else ""
        yield f"{out}: {prefix}{report.summary()}"


def _verify(given: Path) -> Answer:
    """Check every byte of a store, and list damaged files and records."""
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
    verdict = f"{len(damaged)} damaged" if damaged else f"{entries} entries, none damaged"
    result = {"path": str(path), "entries": entries, "damaged": damaged}
    return Answer(result, [*damaged, f"{path}: {verdict}"], bool(damaged))
