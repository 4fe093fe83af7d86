"""`warpfold bench`, `warpfold tune` and `warpfold profile`: measure and improve the speed of this machine."""

import contextlib
import copy
import io
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warpfold.arguments import (
    Device,
    Memory,
    PathLike,
    Set,
    argument,
    changes_of,
    checked,
    decides,
    path,
    path_or_none,
    progress_of,
    reads,
    runs,
    writes,
)
from warpfold.cli.common import (
    Answer,
    AsJson,
    Change,
    app,
    check_outputs,
    chosen,
    command,
    device_of,
    log_plans,
    parts,
    print_fallbacks,
    show,
    table,
    warn,
)
from warpfold.errors import UserError
from warpfold.files import row_file, write_atomically
from warpfold.progress import Progress, progress_bar

if TYPE_CHECKING:
    from rich.table import Table

    from warpfold.cost.example import ModelBench

log = logging.getLogger("warpfold.plan")
# A copy of the list in check/cases.py, whose import would load torch for --help.
BENCHED = (
    "attention", "gated_attention", "layer_norm", "norm_linear", "gate", "tail", "transition", "triangle_factor",
    "outer_product", "outer_product_mean", "triangle_multiplication", "aligned_errors", "overlaps",
)  # fmt: skip
TUNED = tuple(op for op in BENCHED if op not in ("gated_attention", "outer_product_mean"))

# Sizes of the random example that is timed or profiled. The defaults are those of the settings' training examples.
Residues = Annotated[
    int | None, decides("Residues of the example; default: the settings' crop, on a CPU at most 64.", min=4)
]
Sequences = Annotated[
    int | None, decides("Rows of its alignment; default: the settings' max_msa, on a CPU at most 32.", min=1)
]
Extra = Annotated[
    int | None, decides("Rows of its extra MSA; default: the settings' max_extra, on a CPU at most 64.", min=1)
]
Templates = Annotated[
    int | None, decides("Templates of the example; default: the settings' max_templates, on a CPU at most 1.", min=0)
]
Blocks = Annotated[int | None, decides("Most blocks of each stack; default: the settings', on a CPU 2.", min=1)]
Recycles = Annotated[int, decides("Passes without gradients before the last one.", min=0)]
# Limits of the defaults for a whole model on a CPU, with which large settings take a minute or two.
ON_CPU = {"residues": 64, "sequences": 32, "extra": 64, "templates": 1}
BLOCKS_ON_CPU = 2
# Rows of a profile's table on the terminal. profile.json has all rows.
MAX_ROWS = 30


def measured(
    settings: str,
    changes: Sequence[str],
    sizes: Mapping[str, int | None],
    blocks: int | None,
    recycles: int,
    on_cpu: bool = False,
) -> "ModelBench":
    """Build the example of `bench --block`, `bench --step` and `profile` from settings and options.

    on_cpu: limit the default sizes of a whole model to `ON_CPU`, with a warning in the log.
    Raises UserError for wrong settings, and for settings of several processes.
    """
    from warpfold import settings as toml
    from warpfold.cost.example import bench_of, shortened

    bench = bench_of(toml.load(settings, changes), settings, blocks)
    chosen_sizes = {name: value for name, value in sizes.items() if value is not None}
    requested = replace(bench, sizes=replace(bench.sizes, **chosen_sizes), recycles=recycles)
    if not on_cpu:
        return requested
    limited = {
        name: min(limit, getattr(requested.sizes, name)) for name, limit in ON_CPU.items() if name not in chosen_sizes
    }
    model = requested.model if blocks else shortened(requested.model, BLOCKS_ON_CPU)
    reduced = replace(requested, model=model, sizes=replace(requested.sizes, **limited))
    if reduced != requested:
        limits_text = ", ".join(f"{count} {name}" for name, count in ON_CPU.items())
        log.warning("%s", f"on a CPU, unless options say otherwise, at most: {limits_text}, {BLOCKS_ON_CPU} blocks")
    return reduced


def timed_device(name: str | None) -> str:
    """Choose the device for timing. Raises UserError as `device_of` does, and for an Apple GPU."""
    from warpfold.device import unsupported_on_mps

    device = device_of(name)
    # WarpFold has no fast path for Apple GPUs.
    if reason := unsupported_on_mps(device, {"timing": True}):
        raise UserError(reason)
    return device


bench = typer.Typer(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
app.add_typer(bench, name="bench")


@command(
    register=bench.callback,
    example="Example:  warpfold bench --op attention --shapes starting:256 --plot attention.png;  "
    "warpfold bench --block --settings monomer --csv block.csv;  warpfold bench --step --settings tiny;  "
    "warpfold bench --model mine:make_model --inputs mine:make_inputs",
)
def bench_in_shell(
    context: typer.Context,
    block: Annotated[bool, decides("Time one Evoformer block of the settings.")] = False,
    step: Annotated[bool, decides("Time whole training steps of the settings.")] = False,
    model: Annotated[
        str | None,
        decides(
            "Time a user-supplied model before and after accelerate: module:function that returns it, or (it, inputs)."
        ),
    ] = None,
    inputs: Annotated[
        str | None, decides("With --model: module:function that returns its inputs: tensor, tuple or dict by name.")
    ] = None,
    only: Annotated[
        list[str] | None, decides("With --model: patterns of layer names, or operations; default: all.")
    ] = None,
    memory: Memory = None,
    op: Annotated[list[str] | None, decides(f"{', '.join(BENCHED)}; several with commas, or repeated.")] = None,
    shapes: Annotated[
        list[str] | None,
        decides("row, column, global, msa (:128x256), starting, ending, pair, dropout (:256); default: all that fit."),
    ] = None,
    dtype: Annotated[list[str] | None, decides("bf16, fp32; default: bf16 on a GPU, fp32 on a CPU.")] = None,
    ways: Annotated[list[str] | None, decides("Time only these: definition, compile, sdpa, ours ...")] = None,
    settings: Annotated[
        str | None,
        reads("TOML file or preset of --block, --step; default: tiny on a CPU, monomer on a GPU.", path="local"),
    ] = None,
    change: Change = None,
    residues: Residues = None,
    sequences: Sequences = None,
    extra: Extra = None,
    templates: Templates = None,
    blocks: Blocks = None,
    recycles: Recycles = 0,
    quick: Annotated[bool, runs("Time one size of each kind of shape.")] = False,
    unchecked: Annotated[bool, runs("Skip the check of the operations (see `doctor --kernels`).")] = False,
    repeats: Annotated[int | None, runs("Runs of each measurement; default: 30 on a GPU, 5 on a CPU.", min=1)] = None,
    device: Device = None,
    csv: Annotated[Path | None, writes("File for the figures as CSV.")] = None,
    plot: Annotated[Path | None, writes("File for a picture: .png, .pdf, .svg.")] = None,
    rows: Annotated[Path | None, writes("File for figures as they are measured, one JSON object per line.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the speed of this machine.

    Times every implementation of operations (--op), a block (--block) or a training step (--step), or a user-supplied
    model before and after accelerate (--model). For data loading see `bench data --help`.

    --op first checks the operations, forward and backward, against their definitions in fp64. If one is wrong, it times
    nothing and exits with 1.
    """
    sizes = {"residues": residues, "sequences": sequences, "extra": extra, "templates": templates}
    has_model_options = any([settings, change, *sizes.values(), blocks, recycles])
    has_op_options = any([op, shapes, quick, unchecked, plot])
    has_user_model_options = any([model, inputs, only, memory])
    timed = any([block, step, dtype, ways, rows])
    if (name := context.invoked_subcommand) is not None:
        if any([has_model_options, has_op_options, has_user_model_options, timed, repeats, device, csv, as_json]):
            raise UserError(f"bench {name}: options before `{name}` belong to --op. Put its options after `{name}`.")
        return
    check_outputs(csv, plot, rows)
    if has_user_model_options:
        if model is None or has_model_options or has_op_options or timed:
            raise UserError("--model: it only allows --inputs, --only, --memory, --device, --repeats, --csv and --json")
        answer = _user_model(model, inputs, only, memory, repeats, device, csv)
    elif block or step:
        if has_op_options:
            raise UserError("--block, --step: they exclude --op, --shapes, --quick, --unchecked and --plot")
        device_name = timed_device(device)
        changes = [*(change or ()), *(f"plan.precision={name}" for name in dtype or ())]
        source, on_cpu = settings or ("tiny" if device_name == "cpu" else "monomer"), step and device_name == "cpu"
        with log_plans():
            bench = measured(source, changes, sizes, blocks, recycles, on_cpu)
        answer = _models(bench, device_name, block, step, ways, repeats, csv, rows)
    elif has_model_options:
        raise UserError("--settings, --set and the sizes of an example: they belong to --block and --step")
    elif not op:
        raise UserError("--op: missing. Name an operation, for example warpfold bench --op attention.")
    else:
        answer = _operations(op, shapes, dtype, ways, quick, unchecked, repeats, device, csv, plot, rows)
    show(answer, as_json)


def _operations(
    op: list[str],
    shapes: list[str] | None,
    dtype: list[str] | None,
    ways: list[str] | None,
    quick: bool,
    unchecked: bool,
    repeats: int | None,
    device: str | None,
    csv: Path | None,
    plot: Path | None,
    rows: Path | None,
) -> Answer:
    """Check the operations, and time them."""
    import torch

    from warpfold.bench import ops as bench_ops
    from warpfold.bench import peers
    from warpfold.check import checks, sizes
    from warpfold.parallel.plan import resolve_precision

    ops, torch_device = chosen("--op", op, BENCHED), torch.device(timed_device(device))
    dtypes = chosen("--dtype", dtype or [resolve_precision("auto", torch_device)], checks.DTYPES)
    names = chosen("--ways", ways, [way.name for op in ops for way in peers.WAYS[op]])
    wanted_shapes = parts(shapes)
    # Report a wrong name before the checks begin.
    for name in ops:
        sizes.shapes(name, wanted_shapes)
    failed_verdicts = [] if unchecked else checks.failures(checks.odd(ops), torch_device)
    for verdict in failed_verdicts:
        warn(f"red: {verdict.says()}")
    if failed_verdicts:
        raise typer.Exit(1)
    options: dict[str, Any] = {"ways": names, "quick": quick, "repeats": repeats or 0}
    with progress_bar(narrate=True) as progress, row_file(rows) as sink:
        report = bench_ops.bench(ops, torch_device, dtypes, wanted_shapes, progress=progress, sink=sink, **options)
    if csv is not None:
        bench_ops.write_csv(report, csv)
    if plot is not None:
        bench_ops.picture(report, plot)

    def text() -> "Iterator[str | Table]":
        """Yield the printed lines and tables."""
        yield from _facts(report)
        for dtype, top in report["ceilings"].items():
            exps = "" if top["gexp_per_s"] is None else f", {top['gexp_per_s']:.3g} Gexp/s"
            yield f"{dtype}: {top['tflops']:.3g} TFLOP/s, {top['gb_per_s']:.4g} GB/s{exps} ({top['how']})"
        yield ""
        yield table(*bench_ops.table(report["rows"]), lambda row: "bold" if row[3] == "ours" else "")
        if any(row.get("share_of_limit", 0) > 1 for row in report["rows"]):
            yield (
                "over 100 % of the limit: the machine was busier while its peak was measured, or the "
                "implementation stores tensors that the ideal recomputes"
            )
        if report["left_out"]:
            left_out = ", ".join(report["left_out"])
            yield f"left out, because too large for this device; name them to time them (--shapes): {left_out}"

    return Answer(report, text())


def _models(
    given: "ModelBench",
    device: str,
    block: bool,
    step: bool,
    ways: list[str] | None,
    repeats: int | None,
    csv: Path | None,
    rows: Path | None,
) -> Answer:
    """Time a block, a step, or both, of our model."""
    import torch

    from warpfold.bench import model as bench_model
    from warpfold.bench import ops as bench_ops

    options: dict[str, Any] = {"ways": chosen("--ways", ways, [way.name for way in bench_model.WAYS])}
    benches = [bench_model.bench_block] * block + [bench_model.bench_step] * step
    with progress_bar(narrate=True) as progress, row_file(rows) as sink:
        options |= {"repeats": repeats or 0, "progress": progress, "sink": sink}
        reports = [run(given, torch.device(device), **options) for run in benches]
    if csv is not None:
        combined = {**reports[0], "rows": [row for report in reports for row in report["rows"]]}
        bench_ops.write_csv(combined, csv, bench_model.COLUMNS)

    def text() -> "Iterator[str | Table]":
        """Yield the printed lines and tables."""
        yield from _facts(reports[0])
        for report in reports:
            yield f"\n{report['what']}"
            figures = bench_ops.table(report["rows"], bench_model.COLUMNS)
            yield table(*figures, lambda row: "bold" if row[0] == "ours" else "")
            if device == "cpu":
                yield "launches: those of a GPU, counted without one"
            for refusal, count in report["refused"].items():
                yield f"by its definition, {count} times: {refusal}"

    return Answer(reports[0] if len(reports) == 1 else {"parts": reports}, text())


def _user_model(
    model: str,
    inputs: str | None,
    only: list[str] | None,
    memory: str | int | None,
    repeats: int | None,
    device: str | None,
    csv: Path | None,
) -> Answer:
    """Time a user-supplied model before and after `accelerate`."""
    import torch

    from warpfold.adapt.accelerate import accelerate, acceleration
    from warpfold.bench import model as bench_model
    from warpfold.bench import ops as bench_ops

    torch_device = torch.device(timed_device(device))
    with progress_bar(narrate=True) as progress:
        original, call = bench_model.user_model(model, inputs, torch_device)
        # `accelerate` prints its table, which is printed below instead.
        with contextlib.redirect_stdout(io.StringIO()):
            accelerated = accelerate(copy.deepcopy(original), only=parts(only) or None, memory=memory)
        options: dict[str, Any] = {"repeats": repeats or 0, "progress": progress}
        report = bench_model.bench_accelerated(model, original, accelerated, call, torch_device, **options)
    swaps = acceleration(accelerated)
    report["table"] = str(swaps)
    report["swapped"] = {name: kind.operation for kind in swaps.swapped for name in kind.names}
    if csv is not None:
        bench_ops.write_csv(report, csv, bench_model.ACCELERATED)

    def text() -> "Iterator[str | Table]":
        """Yield the printed lines and tables."""
        yield from _facts(report)
        yield f"\n{report['table']}\n\n{report['what']}"
        figures = bench_ops.table(report["rows"], bench_model.ACCELERATED)
        yield table(*figures, lambda row: "bold" if row[-1] else "")
        yield f"outputs differ by {report['difference']:.0e}"
        print_fallbacks(report["refused"])

    return Answer(report, text())


def _facts(report: Mapping[str, Any]) -> list[str]:
    return [f"{key}: {value}" for key, value in report["machine"].items()]


@command(register=bench.command, example="Example:  warpfold bench data --store store --sources files/ --out data.json")
def data(
    store: Annotated[Path, reads("A store of `warpfold pack`.", path="store")],
    sources: Annotated[Path | None, reads("Folder with the files from which the store was packed.")] = None,
    entries: Annotated[int, runs("Number of entries to compute features for, over all alignment depths.", min=2)] = 48,
    gpus: Annotated[int, decides("Number of GPUs to feed.", min=1)] = 8,
    cores: Annotated[int, decides("Number of cores, with a loader process on each.", min=1)] = 16,
    step: Annotated[
        float | None,
        decides("Seconds in which a GPU uses an example; default: 0.41, an H200, initial training.", above=0),
    ] = None,
    storage: Annotated[
        str | None, decides("Emulate a slower storage: 20ms,100MB/s (latency per read, total bandwidth).")
    ] = None,
    out: Annotated[Path | None, writes("File for the figures as JSON.")] = None,
) -> Answer:
    """Check whether a store feeds your GPUs, and measure features per second, reading, memory and packing (minutes)."""
    from warpfold.bench.data import bench_data, rows
    from warpfold.bench.feeding import STEP, Emulation, SlowStore
    from warpfold.data.store.store import Store

    check_outputs(out)
    with progress_bar() as progress, tempfile.TemporaryDirectory() as scratch:
        opened_store = SlowStore(store, Emulation.of(storage, Path(scratch) / "link")) if storage else Store(store)
        report = bench_data(opened_store, sources, entries, progress, gpus, cores, STEP if step is None else step)
    if out is not None:
        write_atomically(out, json.dumps(report, indent=1) + "\n")
    lines, last = [], ""
    for part, quantity, figure in rows(report):
        lines.append((part if part != last else "", quantity, figure))
        last = part
    return Answer(report, [table(("", "", "figure"), lines), report["feeding"]["verdict"]])


@checked()
def tune(
    *,
    op: Annotated[list[str] | None, decides(f"{', '.join(TUNED)}; default: all; repeated, or with commas.")] = None,
    kernel: Annotated[
        list[str] | None,
        decides("Kernels to tune in this order: NAME, or NAME:256x1024 for one key; default: all of the operations."),
    ] = None,
    quick: Annotated[bool, decides("Tune only for initial training in bf16.")] = False,
    out: Annotated[
        PathLike | None, writes("Folder for the table; default: ~/.cache/warpfold/tuned, where runs look for it.")
    ] = None,
    device: Device = None,
    dry_run: Annotated[bool, runs("Only list the tasks; needs no GPU.")] = False,
    rows: Annotated[
        PathLike | None, writes("File for the times of tasks as they come, one JSON object per line.")
    ] = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Create the launch table of this GPU: for every kernel, the fastest launch with exact results.

    Takes minutes with `quick`, otherwise up to an hour. Returns the path of the table, the GPU and versions, and the
    chosen "launches"; with `dry_run`, only the tasks under "launches".
    Errors: UserError for unknown operations and kernels, an existing `rows`, and other devices than GPUs.
    """
    import torch

    from warpfold.bench.kernels import choose, choose_kernels, head, report, tune_on, tuning_tasks, workloads, write
    from warpfold.ops.triton.launch import home

    ops = chosen("--op", op or ["all"], ("all", *TUNED))
    ops = list(TUNED) if "all" in ops else ops
    log_file, tell = path_or_none("rows", rows), progress_of(progress)
    check_outputs(log_file)
    if dry_run:
        tasks = tuning_tasks(workloads(ops, quick), quick)
        tasks = choose_kernels(tasks, parts(kernel)) if kernel else tasks
        return {
            "launches": [
                {
                    "kernel": task.kernel,
                    "key": list(task.key),
                    "place": str(task.workload),
                    "candidates": len(task.candidates),
                }
                for task in tasks
            ]
        }
    torch_device, folder = torch.device(timed_device(device)), path_or_none("out", out) or home()
    with row_file(log_file) as sink:
        results = tune_on(torch_device, ops, quick, folder, tell, parts(kernel), sink)
    entries = choose(results)
    launches = report(results, entries)
    table_file = write(folder, head(torch_device), entries, whole=not kernel)
    return {"table": str(table_file), **head(torch_device), "launches": launches}


@command(
    tune, example="Example:  warpfold tune --op attention --quick;  warpfold tune --kernel attention_short --quick"
)
def tune_in_shell(given: dict[str, Any]) -> Answer:
    """Create the launch table of this GPU: for every kernel, the fastest launch with exact results.

    Takes minutes with --quick, otherwise up to an hour. Shapes that are not in the table, and GPUs without a table, use
    the package's default. Runs are bitwise equal only with the same table.
    """
    with progress_bar(narrate=True) as progress:
        tuned = tune(**given, progress=progress)
    if given["dry_run"]:
        tasks = tuned["launches"]
        lines = [
            f"{task['kernel']} {tuple(task['key'])}: {task['candidates']} candidates ({task['place']})"
            for task in tasks
        ]
        return Answer(tuned, [*lines, f"{sum(task['candidates'] for task in tasks)} trials; nothing was run"])
    rows = []
    for row in tuned["launches"]:
        key = " ".join(map(str, row["key"]))
        numbers = (f"{row['microseconds']:.1f}", f"{row['slowest']:.1f}", str(row["timed"]), str(len(row["out"])))
        rows.append((row["kernel"], key, *numbers, row["launch"]))
    launch_table = table(("kernel", "key", "us", "slowest us", "timed", "out", "launch"), rows)
    return Answer(tuned, [launch_table, f"wrote {tuned['table']}"])


@checked()
def profile(
    settings: Annotated[
        PathLike, argument("A TOML file, or the name of a preset: monomer, tiny ...", shell=str, path="local")
    ],
    *,
    out: Annotated[
        PathLike | None, writes("New folder for profile.json, and trace.json.gz for ui.perfetto.dev.")
    ] = None,
    forward: Annotated[bool, decides("Profile a forward pass without gradients instead of a training step.")] = False,
    set: Set = None,
    residues: Residues = None,
    sequences: Sequences = None,
    extra: Extra = None,
    templates: Templates = None,
    blocks: Blocks = None,
    recycles: Recycles = 0,
    device: Device = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure the time of a training step by layer and operation, forward and backward.

    The example is random. With fewer `blocks`, only these are run, and times are not scaled up. On a CPU, large
    settings are measured at a small size by default. Returns the content of `OUT/profile.json`.
    Errors: UserError for wrong settings, settings of several processes, and an existing `out`.
    """
    import torch

    from warpfold.bench.profile import profile_model

    folder = path_or_none("out", out)
    check_outputs(folder)
    sizes = {"residues": residues, "sequences": sequences, "extra": extra, "templates": templates}
    torch_device, changes = torch.device(timed_device(device)), changes_of("set", set)
    bench = measured(
        str(path("settings", settings)), changes, sizes, blocks, recycles, on_cpu=torch_device.type == "cpu"
    )
    if folder is not None:
        folder.mkdir()
    trace = None if folder is None else folder / "trace.json.gz"
    figures = profile_model(bench, torch_device, trace, training=not forward, progress=progress_of(progress))
    if folder is not None:
        write_atomically(folder / "profile.json", json.dumps(figures, indent=1, allow_nan=False) + "\n")
    return figures


@command(
    profile,
    example="Example:  warpfold profile tiny --out profile;  warpfold profile monomer --residues 128 --forward",
)
def profile_in_shell(given: dict[str, Any]) -> Answer:
    """Measure the time of a training step by layer and operation, forward and backward.

    The example is random. With fewer --blocks, only these are run, and times are not scaled up. On a CPU, large
    settings are measured at a small size by default.
    """
    from warpfold.bench.profile import HEADS, in_words, table_rows

    with progress_bar(narrate=True) as progress, log_plans():
        figures = profile(**given, progress=progress)
    text: list[Any] = [*in_words(figures), "", table(HEADS, table_rows(figures, MAX_ROWS))]
    if (out := given["out"]) is not None:
        text.append(f"\nwrote {out / 'profile.json'} and trace.json.gz: open it at ui.perfetto.dev")
    return Answer(figures, text)
