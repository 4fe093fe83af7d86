"""`warpfold bench`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from warpfold.cli.common import (
    AsJson,
    Device,
    app,
    chosen,
    decides,
    device_of,
    name_operations,
    parts,
    reads,
    runs,
    show,
    show_table,
    writes,
)
from warpfold.errors import UserError
from warpfold.files import check_new, write_atomically
from warpfold.progress import progress_bar


class _Bench(TyperGroup):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with the operations that can be timed."""
        name_operations(self, "BENCHED")
        super().format_help(ctx, formatter)


bench = typer.Typer(cls=_Bench, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
app.add_typer(bench, name="bench")


@bench.callback(epilog="Example:  warpfold bench --op attention --shapes starting:256 --plot attention.png")
def operations(
    context: typer.Context,
    op: Annotated[
        list[str] | None,
        decides("OPERATIONS; several with commas, or repeated."),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        decides("row, column, global, msa (:128x256), starting, ending, pair, dropout (:256); default: all that fit."),
    ] = None,
    dtype: Annotated[list[str] | None, decides("bf16, fp32; default: bf16 on a GPU, fp32 on a CPU.")] = None,
    ways: Annotated[list[str] | None, decides("Time only these: definition, compile, sdpa, ours ...")] = None,
    quick: Annotated[bool, runs("Time one size of each kind of shape.", "--quick")] = False,
    repeats: Annotated[int | None, runs("Runs of each measurement; default: 30 on a GPU, 5 on a CPU.", min=1)] = None,
    device: Device = None,
    csv: Annotated[Path | None, writes("File for the figures, as CSV.", "--csv")] = None,
    plot: Annotated[Path | None, writes("File for a picture: .png, .pdf, .svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the speed of operations on this machine (--op), or of data (`warpfold bench data --help`).

    --op first checks the operations, forward and backward, against their definitions in fp64; if one is wrong, it
    times nothing and exits with 1.
    """
    given = op or shapes or dtype or ways or quick or repeats or device or csv or plot or as_json
    if context.invoked_subcommand is not None:
        if given:
            raise UserError(f"options of `{context.invoked_subcommand}` go behind it; those before it belong to --op")
        return
    if not op:
        raise UserError("--op is missing: name an operation, for example warpfold bench --op attention")
    for file in filter(None, (csv, plot)):
        check_new(file)
    import torch

    from warpfold.tune import bench_ops, cases, checks, peers, sizes

    ops = chosen("--op", op, cases.BENCHED)
    where = torch.device(device_of(device))
    dtypes = chosen("--dtype", dtype or ["bf16" if where.type == "cuda" else "fp32"], checks.DTYPES)
    names = chosen("--ways", ways or [], [way.name for one in ops for way in peers.WAYS[one]])
    wanted = parts(shapes or [])
    for one in ops:
        sizes.shapes(one, wanted)  # so that a wrong name is an error before the checks begin
    wrong = checks.failures(checks.odd(ops), where)
    for verdict in wrong:
        typer.echo(f"red: {verdict.says()}", err=True)
    if wrong:
        raise typer.Exit(1)
    with progress_bar(narrate=True) as progress:
        more: dict[str, Any] = {"quick": quick, "repeats": repeats or 0, "ways": names, "progress": progress}
        found = bench_ops.bench(ops, where, dtypes, wanted, **more)
    _say(found, csv, plot, as_json)


def _say(found: dict[str, Any], csv: Path | None, plot: Path | None, as_json: bool) -> None:
    """Write and print the figures as asked for."""
    from warpfold.tune.bench_ops import HEADS, picture, table, write_csv

    if csv is not None:
        write_csv(found, csv)
    if plot is not None:
        picture(found, plot)
    if as_json:
        show(found)
        return
    for key, value in found["machine"].items():
        typer.echo(f"{key}: {value}")
    for dtype, top in found["ceilings"].items():
        exps = "" if top["gexp_per_s"] is None else f", {top['gexp_per_s']:.3g} Gexp/s"
        typer.echo(f"{dtype}: {top['tflops']:.3g} TFLOP/s, {top['gb_per_s']:.4g} GB/s{exps} ({top['how']})")
    typer.echo()
    show_table(HEADS, table(found["rows"]), lambda row: "bold" if row[3] == "ours" else "")
    if any(row.get("share_of_limit", 0) > 1 for row in found["rows"]):
        typer.echo(
            "over 100 % of the limit: the machine was busier while its ceilings were measured, or the way stores "
            "what the ideal recomputes"
        )
    if found["left_out"]:
        typer.echo(f"left out, too large for this device unless named (--shapes): {', '.join(found['left_out'])}")


@bench.command(epilog="Example:  warpfold bench data --store store --sources files/ --out data.json")
def data(
    store: Annotated[Path, reads("What `warpfold pack` made.")],
    sources: Annotated[Path | None, reads("The folder that holds what the store was packed from.")] = None,
    entries: Annotated[
        int, runs("How many entries to make features of, spread over the alignment depths.", min=2)
    ] = 48,
    steps: Annotated[int, runs("Steps of the simulated ranks.", min=1)] = 200,
    out: Annotated[Path | None, writes("File for the figures, as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure features per second, reading, memory, what slow examples cost a step, packing.  Takes some minutes."""
    from warpfold.data.store.store import Store
    from warpfold.tune.bench_data import bench_data, rows
    from warpfold.tune.bench_loader import Simulation

    if out is not None:
        check_new(out)
    with progress_bar() as progress:
        found = bench_data(Store(store), sources, entries, Simulation(steps=steps), progress)
    if out is not None:
        write_atomically(out, json.dumps(found, indent=1) + "\n")
    if as_json:
        show(found)
        return
    lines, last = [], ""
    for part, what, figure in rows(found):
        lines.append((part if part != last else "", what, figure))
        last = part
    show_table(("", "", "figure"), lines)
