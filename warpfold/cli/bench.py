"""`warpfold bench`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from warpfold.arguments import Device, Memory, decides, reads, runs, writes
from warpfold.cli.common import (
    AsJson,
    Blocks,
    Change,
    Extra,
    Recycles,
    Residues,
    Sequences,
    Templates,
    app,
    chosen,
    command,
    device_of,
    measured,
    name_operations,
    parts,
    say_refused,
    show,
    show_table,
)
from warpfold.errors import UserError
from warpfold.files import check_new, row_file, write_atomically
from warpfold.progress import progress_bar

if TYPE_CHECKING:
    from warpfold.cost.example import ModelBench


Operations = Annotated[
    list[str] | None,
    decides("OPERATIONS; several with commas, or repeated."),
]
ShapesOf = Annotated[
    list[str] | None,
    decides("row, column, global, msa (:128x256), starting, ending, pair, dropout (:256); default: all that fit."),
]
SettingsOf = Annotated[
    str | None, reads("TOML file or preset of --block, --step; default: tiny on a CPU, monomer on a GPU.")
]
Unchecked = Annotated[
    bool, runs("Time at once: whether the figures are of right results, `doctor --kernels` says.", "--unchecked")
]
Model = Annotated[
    str | None,
    decides("module:function that returns a user-supplied model (or model and inputs): before and after accelerate.",
            "--model"),
]  # fmt: skip
Inputs = Annotated[
    str | None, decides("module:function that returns what it is called with: a tensor, a tuple, a dict by name.")
]
Only = Annotated[list[str] | None, decides("Of --model: patterns of its layers' names, or operations; default: all.")]
Rows = Annotated[Path | None, writes("File for each figure as soon as it is measured, a JSON object a line.")]


class _Bench(TyperGroup):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with the operations that can be timed."""
        name_operations(self, "BENCHED")
        super().format_help(ctx, formatter)


bench = typer.Typer(cls=_Bench, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
app.add_typer(bench, name="bench")


@command(
    register=bench.callback,
    example="Example:  warpfold bench --op attention --shapes starting:256 --plot attention.png;  "
    "warpfold bench --block --settings monomer --csv block.csv;  warpfold bench --step --settings tiny;  "
    "warpfold bench --model mine:make_model --inputs mine:make_inputs",
)
def operations(
    context: typer.Context,
    block: Annotated[bool, decides("Time one Evoformer block of the settings.", "--block")] = False,
    step: Annotated[bool, decides("Time whole training steps of the settings.", "--step")] = False,
    model: Model = None,
    inputs: Inputs = None,
    only: Only = None,
    memory: Memory = None,
    op: Operations = None,
    shapes: ShapesOf = None,
    dtype: Annotated[list[str] | None, decides("bf16, fp32; default: bf16 on a GPU, fp32 on a CPU.")] = None,
    ways: Annotated[list[str] | None, decides("Time only these: definition, compile, sdpa, ours ...")] = None,
    settings: SettingsOf = None,
    change: Change = None,
    residues: Residues = None,
    sequences: Sequences = None,
    extra: Extra = None,
    templates: Templates = None,
    blocks: Blocks = None,
    recycles: Recycles = 0,
    quick: Annotated[bool, runs("Time one size of each kind of shape.", "--quick")] = False,
    unchecked: Unchecked = False,
    repeats: Annotated[int | None, runs("Runs of each measurement; default: 30 on a GPU, 5 on a CPU.", min=1)] = None,
    device: Device = None,
    csv: Annotated[Path | None, writes("File for the figures, as CSV.", "--csv")] = None,
    plot: Annotated[Path | None, writes("File for a picture: .png, .pdf, .svg.")] = None,
    rows: Rows = None,
    as_json: AsJson = False,
) -> None:
    """Measure the speed of operations (--op), a block (--block), a training step (--step) on this machine, each way to
    compute it; of a user-supplied model (--model) before and after accelerate; or of data (`bench data --help`).

    --op first checks the operations, forward and backward, against their definitions in fp64; if one is wrong, it
    times nothing and exits with 1.
    """
    of_model = [settings, change, residues, sequences, extra, templates, blocks, recycles]
    of_ops, foreign = [op, shapes, quick, unchecked, plot], [model, inputs, only, memory]
    if context.invoked_subcommand is not None:
        if any([*of_model, *of_ops, *foreign, block, step, dtype, ways, repeats, device, csv, rows, as_json]):
            raise UserError(f"options of `{context.invoked_subcommand}` go behind it; those before it belong to --op")
        return
    to = _Output(csv, plot, rows, as_json)
    if any(foreign):
        alone = not any([*of_model, *of_ops, block, step, dtype, ways, rows])
        _foreign(model if alone else None, inputs, only or [], memory, repeats or 0, device_of(device), to)
        return
    if block or step:
        if any(of_ops):
            raise UserError("--block and --step go without --op, --shapes, --quick, --unchecked and --plot")
        sizes = {"residues": residues, "sequences": sequences, "extra": extra, "templates": templates}
        where = device_of(device)
        given = _bench_of(settings, change, dtype, sizes, blocks, recycles, where, step)
        _models(given, [block, step], where, ways or [], repeats or 0, to)
        return
    if any(of_model):
        raise UserError("--settings, --set and the sizes of an example are for --block and --step")
    if not op:
        raise UserError("--op is missing: name an operation, for example warpfold bench --op attention")
    more = {"quick": quick, "repeats": repeats or 0}
    _operations(op, shapes or [], dtype or [], ways or [], device_of(device), not unchecked, more, to)


def _bench_of(
    settings: str | None,
    change: list[str] | None,
    dtype: list[str] | None,
    sizes: Mapping[str, int | None],
    blocks: int | None,
    recycles: int,
    device: str,
    step: bool,
) -> "ModelBench":
    """Return what is timed of a model of ours."""
    changes = [*(change or ()), *(f"plan.precision={one}" for one in dtype or ())]
    source = settings or ("tiny" if device == "cpu" else "monomer")
    return measured(source, changes, sizes, blocks, recycles, on_cpu=step and device == "cpu")


@dataclass(frozen=True)
class _Output:
    """Hold where the figures go."""

    csv: Path | None
    plot: Path | None
    rows: Path | None
    as_json: bool

    def __post_init__(self) -> None:
        for file in filter(None, (self.csv, self.plot, self.rows)):
            check_new(file)


def _operations(
    op: list[str],
    shapes: list[str],
    dtype: list[str],
    ways: list[str],
    device: str,
    checked: bool,
    more: Mapping[str, Any],
    to: _Output,
) -> None:
    """Check the operations, and time them."""
    import torch

    from warpfold.bench import ops as bench_ops
    from warpfold.bench import peers
    from warpfold.check import cases, checks, sizes

    ops = chosen("--op", op, cases.BENCHED)
    where = torch.device(device)
    dtypes = chosen("--dtype", dtype or ["bf16" if where.type == "cuda" else "fp32"], checks.DTYPES)
    names = chosen("--ways", ways, [way.name for one in ops for way in peers.WAYS[one]])
    wanted = parts(shapes)
    for one in ops:
        sizes.shapes(one, wanted)  # so that a wrong name is an error before the checks begin
    wrong = checks.failures(checks.odd(ops), where) if checked else []
    for verdict in wrong:
        typer.echo(f"red: {verdict.says()}", err=True)
    if wrong:
        raise typer.Exit(1)
    with progress_bar(narrate=True) as progress, row_file(to.rows) as sink:
        found = bench_ops.bench(ops, where, dtypes, wanted, ways=names, progress=progress, sink=sink, **more)
    _say(found, to)


def _models(given: "ModelBench", wanted: list[bool], device: str, ways: list[str], repeats: int, to: _Output) -> None:
    """Time a block, a step, or both; wanted: which of the two."""
    import torch

    from warpfold.bench import model as bench_model
    from warpfold.bench import ops as bench_ops

    more: dict[str, Any] = {"ways": chosen("--ways", ways, [way.name for way in bench_model.WAYS]), "repeats": repeats}
    with progress_bar(narrate=True) as progress, row_file(to.rows) as sink:
        benches = [bench for bench, on in zip((bench_model.bench_block, bench_model.bench_step), wanted) if on]
        found = [bench(given, torch.device(device), progress=progress, sink=sink, **more) for bench in benches]
    if to.csv is not None:
        rows = [row for one in found for row in one["rows"]]
        bench_ops.write_csv({**found[0], "rows": rows}, to.csv, bench_model.COLUMNS)
    if to.as_json:
        show(found[0] if len(found) == 1 else {"parts": found})
        return
    for key, value in found[0]["machine"].items():
        typer.echo(f"{key}: {value}")
    for one in found:
        typer.echo(f"\n{one['what']}")
        show_table(bench_model.HEADS, bench_model.table(one["rows"]), lambda row: "bold" if row[0] == "ours" else "")
        if device == "cpu":
            typer.echo("launches: what a GPU would launch, counted without one")
        for refusal, count in one["refused"].items():
            typer.echo(f"by its definition, {count} times: {refusal}")


def _foreign(
    model: str | None,
    inputs: str | None,
    only: list[str],
    memory: str | int | None,
    repeats: int,
    device: str,
    to: _Output,
) -> None:
    """Time a user-supplied model before and after `accelerate`; model: None if other options were given with it."""
    if model is None:
        raise UserError("--model goes with --inputs, --only, --memory, --device, --repeats, --csv and --json alone")
    import torch

    from warpfold.adapt.bench import COLUMNS, HEADS, bench_foreign, foreign_model, table
    from warpfold.bench.ops import write_csv

    where = torch.device(device)
    with progress_bar(narrate=True) as progress:
        given = foreign_model(model, inputs, where)
        more: dict[str, Any] = {"only": parts(only), "memory": memory, "repeats": repeats}
        found = bench_foreign(given, where, progress=progress, **more)
    if to.csv is not None:
        write_csv(found, to.csv, COLUMNS)
    if to.as_json:
        show(found)
        return
    for key, value in found["machine"].items():
        typer.echo(f"{key}: {value}")
    typer.echo(f"\n{found['table']}\n\n{found['what']}")
    show_table(HEADS, table(found["rows"]), lambda row: "bold" if row[-1] else "")
    typer.echo(f"outputs differ by {found['difference']:.0e}")
    say_refused(found["refused"])


def _say(found: dict[str, Any], to: _Output) -> None:
    """Write and print the figures as asked for."""
    from warpfold.bench.ops import HEADS, picture, table, write_csv

    if to.csv is not None:
        write_csv(found, to.csv)
    if to.plot is not None:
        picture(found, to.plot)
    if to.as_json:
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


@command(register=bench.command, example="Example:  warpfold bench data --store store --sources files/ --out data.json")
def data(
    store: Annotated[Path, reads("What `warpfold pack` made.")],
    sources: Annotated[Path | None, reads("The folder that holds what the store was packed from.")] = None,
    entries: Annotated[
        int, runs("How many entries to make features of, spread over the alignment depths.", min=2)
    ] = 48,
    steps: Annotated[int, runs("Steps of the simulated ranks.", min=1)] = 200,
    out: Annotated[Path | None, writes("File for the figures, as JSON.", "--out", "-o")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure features per second, reading, memory, what slow examples cost a step, packing.  Takes some minutes."""
    from warpfold.bench.data import Simulation, bench_data, rows
    from warpfold.data.store.store import Store

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
