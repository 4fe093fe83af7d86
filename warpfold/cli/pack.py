"""`warpfold pack`."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warpfold.cli.common import AsJson, Lists, Workers, app, decides, how_to_go_on, reads, runs, show, writes
from warpfold.errors import UserError
from warpfold.progress import progress_bar

if TYPE_CHECKING:
    from warpfold.bulk import JobPart
    from warpfold.data.pack.report import PackReport

SHOWN = 50  # lines about single entries; a large set has thousands


def instead(help: str, *names: str) -> Any:
    """Return an option that does something else instead of packing."""
    return typer.Option(*names, help=help, rich_help_panel="In place of packing")


@app.command(
    cls=Lists,
    epilog="Example:  warpfold pack --structures mmcif/ --msas msas/ --hits msas/ --out store --workers 16",
)
def pack(
    structures: Annotated[list[Path] | None, reads("mmCIF or PDB files, or folders of them; gz or not.")] = None,
    msas: Annotated[
        list[Path] | None,
        reads("A3M or Stockholm files, their folders (OpenProteinSet's too), or the .index of an alignment database."),
    ] = None,
    hits: Annotated[list[Path] | None, reads("Template hits: HHR, or hmmsearch's Stockholm or A3M.")] = None,
    template_structures: Annotated[
        list[Path] | None, reads("Folders of the templates' mmCIF files; default: those of --structures.")
    ] = None,
    clusters: Annotated[Path | None, reads("Clusters, one per line, or MMseqs2's TSV; default: computed.")] = None,
    out: Annotated[Path | None, writes("The store; the same command continues a stopped run.", "--out", "-o")] = None,
    max_resolution: Annotated[float, decides("Å; worse structures are dropped.")] = 9.0,
    max_single: Annotated[float, decides("Share of one amino acid; chains with more are dropped.", max=1)] = 0.8,
    min_length: Annotated[int, decides("Residues; shorter chains are dropped.", min=1)] = 10,
    max_length: Annotated[int | None, decides("Residues; longer chains are dropped.", min=1)] = None,
    released_after: Annotated[str | None, decides("YYYY-MM-DD; entries from this day on are kept.")] = None,
    released_before: Annotated[str | None, decides("YYYY-MM-DD; entries up to the day before are kept.")] = None,
    require_msa: Annotated[bool, decides("Drop chains without an alignment.", "--require-msa")] = False,
    max_template_date: Annotated[
        str | None, decides("YYYY-MM-DD; later templates are refused, and so are those later than their chain.")
    ] = None,
    cluster_identity: Annotated[float, decides("Identity within a cluster; 1: equal sequences.", min=0, max=1)] = 0.4,
    assemblies: Annotated[bool, decides("Add each entry's first assembly, for multimers.", "--assemblies")] = False,
    all_assemblies: Annotated[bool, decides("As --assemblies, all of each entry.", "--all-assemblies")] = False,
    max_chains: Annotated[int, decides("Of an assembly, copies too; larger ones are dropped.", min=1)] = 20,
    max_residues: Annotated[int, decides("Of an assembly; larger ones are dropped.", min=1)] = 10_000,
    max_file_gb: Annotated[float, decides("GB of a file when unpacked; larger files are left out.")] = 4.0,
    workers: Workers = 1,
    cluster: Annotated[str | None, runs("Address of a Dask scheduler, tcp://host:8786.")] = None,
    shard: Annotated[str | None, runs("I/N: only the I-th of N parts, for job arrays; then --merge.")] = None,
    merge: Annotated[list[Path] | None, instead("Join the parts that --shard made into the store --out.")] = None,
    verify: Annotated[Path | None, instead("Check every byte of a store.")] = None,
    info: Annotated[Path | None, instead("Show what is in a store.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make the store that `train` reads from structures, alignments and template hits, and report on every entry."""
    from warpfold import commands
    from warpfold.bulk import JobPart

    _one_of({"--structures": structures, "--merge": merge, "--verify": verify, "--info": info})
    if verify is not None:
        return _verify(verify, as_json)
    if info is not None:
        return _info(info, as_json)
    if out is None:
        raise UserError("pack: --out is missing; name the store to make")
    report = _make(partial(
        commands.pack, structures, msas, out, hits=hits, template_structures=template_structures, clusters=clusters,
        max_resolution=max_resolution, max_single=max_single, min_length=min_length, max_length=max_length,
        released_after=released_after, released_before=released_before, require_msa=require_msa,
        max_template_date=max_template_date, cluster_identity=cluster_identity, assemblies=assemblies,
        all_assemblies=all_assemblies, max_chains=max_chains, max_residues=max_residues, max_file_gb=max_file_gb,
        workers=workers, cluster=cluster, shard=shard, merge=merge,
    ))  # fmt: skip
    part = JobPart.parse(shard) if shard and not merge else None
    return show(report.to_json()) if as_json else _print_report(report, out, part)


def _one_of(modes: dict[str, Any]) -> None:
    """Raise UserError unless exactly one of the options is given."""
    chosen = [name for name, value in modes.items() if value]
    if len(chosen) != 1:
        raise UserError(f"pack: give one of {', '.join(modes)}, not {' and '.join(chosen) or 'none'}; see --help")


def _make(make: Callable[..., "PackReport"]) -> "PackReport":
    """Pack or merge under a progress bar."""
    try:
        with _sigterm_stops(), progress_bar() as bar:
            return make(progress=bar)
    except KeyboardInterrupt as stop:
        typer.echo(f"stopped; {how_to_go_on()}", err=True)
        raise typer.Exit(143 if isinstance(stop, _Terminated) else 130) from None


class _Terminated(KeyboardInterrupt):
    """The process was sent SIGTERM."""


@contextmanager
def _sigterm_stops() -> Iterator[None]:
    """Treat SIGTERM, which schedulers send some time before they kill a job, like Ctrl-C.

    Otherwise the files that are being read would be blamed for the death of the process.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_report(report: "PackReport", out: Path, part: "JobPart | None") -> None:
    lines = [f"dropped {entry.name or entry.file}: {entry.reason}" for entry in report.dropped]
    lines += [f"unused {file}: {why}" for file, why in (report.unused | report.unused_hits).items()]
    typer.echo("".join(f"{' '.join(line.split())}\n" for line in lines[:SHOWN]), nl=False)  # names may hold line ends
    if len(lines) > SHOWN:
        typer.echo(f"... and {len(lines) - SHOWN} more lines like these" + ("" if part else f", in {out / 'pack.tsv'}"))
    for warning in report.warnings():
        typer.echo(f"warning: {warning}", err=True)
    if part is not None:
        from warpfold.data.pack.part import part_path

        pattern = part_path(out, part).name.replace(f"part-{part.number}-", "part-*-")
        typer.echo(f"{part_path(out, part)}: part {part}, {report.summary()}")
        typer.echo(f"when all are there: warpfold pack --merge {out.with_name(pattern)} --out {out}")
    elif report.finished_before:
        typer.echo(f"{out}: was finished before, from the same inputs and options: {report.summary()}")
    else:
        typer.echo(f"{out}: {report.summary()}")


def _verify(path: Path, as_json: bool) -> None:
    """List what is damaged, and exit with 1 if anything is."""
    from warpfold.data.store.store import Store

    with progress_bar() as bar:
        try:
            store = Store(path)
            entries, damaged = len(store), list(store.verify(lambda done, total: bar(done, total, "checking")))
        except UserError as error:
            if not (path / "store.json").exists():
                raise
            entries, damaged = 0, [str(error)]
    if as_json:
        show({"path": str(path), "entries": entries, "damaged": damaged})
    else:
        typer.echo("".join(f"{line}\n" for line in damaged), nl=False)
        typer.echo(f"{path}: {f'{len(damaged)} damaged' if damaged else f'{entries} entries, all whole'}")
    raise typer.Exit(1 if damaged else 0)


def _info(path: Path, as_json: bool) -> None:
    """Print what is in a store."""
    from warpfold.data.pack.report import store_summary_text, summarize_store
    from warpfold.data.store.store import Store

    found = summarize_store(Store(path))
    if as_json:
        show(found)
    else:
        typer.echo(store_summary_text(found))
