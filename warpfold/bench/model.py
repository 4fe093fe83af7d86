"""Time implementations of an Evoformer block, a training step, or a user-supplied model before and after `accelerate`.

These are `warpfold bench --block`, `--step` and `--model`. Other packages are imported only if they are installed, and
their signatures come from their public code.

Implementations are interleaved, so that a slow machine affects all of them equally. Each row is an implementation and a
pass: "forward" saves no tensors, "training" is a forward pass that saves tensors, "backward" is the backward pass
alone, "both" are these two, and "step" is everything from the batch on the device to the new weights.

* ms: on a GPU, the device's time by events, with the device kept busy until all work is queued; on a CPU, wall time.
* wall_ms: time until the result exists, from an idle device. host_ms: time until Python has queued all work.
* launches: on a GPU, kernels, copies and fills by the profiler; elsewhere, the counted launches that a GPU would make.
"""

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from warpfold.bench.ops import Columns, Row, report_of
from warpfold.bench.peers import compile_unsupported
from warpfold.bench.timing import SLOWER, Subject, Times, Whole, kernels_launched, measure, subject, tensors_of
from warpfold.cost.example import BlockSizes, ModelBench, RandomBlock, TrainingStep
from warpfold.cost.launches import block_launches, step_launches
from warpfold.cost.rates import ceilings
from warpfold.device import find_recorder
from warpfold.errors import UserError
from warpfold.memory import is_out_of_memory
from warpfold.ops.dispatch import Kernels, refusals
from warpfold.ops.torch_internals import map_tensors
from warpfold.parallel.plan import DTYPES, Plan, Precision
from warpfold.progress import Progress, no_progress

REPEATS = {"cpu": 3, "cuda": 20}
# Seconds for an implementation, without warm-up.
BUDGET = {"cpu": 60.0, "cuda": 4.0}
COLUMNS: Columns = {
    "what": (None, ""), "way": ("way", ""), "pass": ("pass", ""), "ms": ("ms", ".4g"),
    "times_definition": ("x definition", ".2f"), "wall_ms": ("wall ms", ".4g"), "host_ms": ("host ms", ".4g"),
    "tflops": ("TFLOP/s", ".3g"), "share_of_gemm": ("of GEMM", ".0%"), "peak_mib": ("MiB", ".0f"),
    "launches": ("launches", "d"), "repeats": (None, ""), "note": ("", ""),
}  # fmt: skip
# Implementations whose launches are counted.
COUNTED: Mapping[str, Kernels] = {"definition": "definition", "ours": "fast"}
# The parts of a block that a pass consists of, and the run whose memory and wall time are those of the pass.
PASSES = {
    "forward": (("forward",), "forward"),
    "training": (("training",), ""),
    "backward": (("backward",), ""),
    "both": (("training", "backward"), "both"),
}
# Receives each row as soon as it is measured.
RowSink = Callable[[Row], None]
OPENFOLD = "openfold.model.evoformer"


@dataclass(frozen=True, kw_only=True)
class ModelWay:
    """An implementation of a block or a step: changes of a plan, or a block of another package that `make` returns.

    unsupported_reason: returns why a device does not support it, or None. left_out: why it is not timed in steps by
    default, or "".
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    of: tuple[str, ...] = ("block", "step")
    unsupported_reason: Callable[[torch.device], str | None] = lambda device: None
    left_out: str = ""
    make: Callable[[BlockSizes, Precision, torch.device], Subject] | None = None

    def block(self, sizes: BlockSizes, precision: Precision, device: torch.device) -> Subject:
        """Create a block as a subject."""
        if self.make is not None:
            return self.make(sizes, precision, device)
        block = RandomBlock(sizes, Plan(precision=precision, **self.changes), device)
        return Subject(self.name, block.forward, block.wanted, block.grads)


def _graph_unsupported(device: torch.device) -> str | None:
    return None if find_recorder(device) else f"a {device.type} has no graphs"


def _openfold_unsupported(device: torch.device) -> str | None:
    try:
        spec = importlib.util.find_spec(OPENFOLD)
    except ModuleNotFoundError:
        # The package itself is missing.
        spec = None
    return None if spec else "not installed"


def _openfold(sizes: BlockSizes, precision: Precision, device: torch.device) -> Subject:
    """Bind OpenFold's EvoformerBlock(m [*, s, r, c_m], z [*, r, r, c_z], msa_mask, pair_mask), under autocast in bf16.

    The arguments of the constructor differ between releases, and unknown ones are left out.
    """
    block_class = importlib.import_module(OPENFOLD).EvoformerBlock
    config, pair = sizes.config, sizes.config.pair
    arguments = {
        "c_m": sizes.c_m,
        "c_z": sizes.c_z,
        "c_hidden_msa_att": sizes.c_m // config.heads,
        "c_hidden_opm": config.c_outer,
        "c_hidden_mul": pair.c_triangle,
        "c_hidden_pair_att": pair.head_width or sizes.c_z // pair.heads,
        "no_heads_msa": config.heads,
        "no_heads_pair": pair.heads,
        "transition_n": config.transition,
        "msa_dropout": config.rate,
        "pair_dropout": pair.rate,
        "no_column_attention": False,
        "opm_first": config.outer == "first",
        "fuse_projection_weights": pair.fused,
        "inf": 1e9,
        "eps": 1e-10,
    }
    accepted = inspect.signature(block_class).parameters
    module = block_class(**{name: value for name, value in arguments.items() if name in accepted}).to(device).train()
    block, dtype = RandomBlock(sizes, Plan(precision=precision), device), DTYPES[precision]
    msa_mask, pair_mask = (mask.to(dtype) for mask in block.masks)

    def forward() -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            m, z = module(block.m, block.z, msa_mask=msa_mask, pair_mask=pair_mask)
        return m, z

    with_gradient = [block.m, block.z, *(p for p in module.parameters() if p.requires_grad)]
    return Subject("openfold", forward, with_gradient, block.grads)


KEPT: dict[str, Any] = {"kernels": "fast", "recompute": None, "keep_blocks": 0}
MAY_NOT_FIT = "left out, because without recomputation it may not fit: name it (--ways)"
WAYS = (
    ModelWay(name="definition", changes={"kernels": "definition", "compile": False}),
    ModelWay(
        name="compile",
        changes={"kernels": "definition", "compile": True},
        unsupported_reason=compile_unsupported,
        left_out="left out, because it compiles for minutes: name it (--ways)",
    ),
    ModelWay(name="openfold", of=("block",), unsupported_reason=_openfold_unsupported, make=_openfold),
    ModelWay(name="ours", changes={"kernels": "fast"}),
    ModelWay(
        name="graph", changes={"kernels": "fast", "graph": True}, of=("step",), unsupported_reason=_graph_unsupported
    ),
    ModelWay(name="kept", changes=KEPT, of=("step",), left_out=MAY_NOT_FIT),
    ModelWay(
        name="kept-graph",
        changes={**KEPT, "graph": True},
        of=("step",),
        unsupported_reason=_graph_unsupported,
        left_out=MAY_NOT_FIT,
    ),
)


def _chosen(of: str, ways: Sequence[str], device: torch.device) -> dict[str, tuple[ModelWay, str]]:
    """Choose implementations by name, all by default. Each comes with the reason why it is not timed, or ""."""
    return {
        way.name: (way, ("" if ways or of == "block" else way.left_out) or way.unsupported_reason(device) or "")
        for way in WAYS
        if of in way.of and (not ways or way.name in ways)
    }


def _row(times: Mapping[str, Times], way: str, parts: Sequence[str], run: str, flops: float | None, rate: float) -> Row:
    """Compute the figures of an implementation: for some parts of its runs, and for the run that consists of them."""
    own_times, seconds = times[way], times[way].median(*parts)
    plain, peak = times.get("definition", Times()).median(*parts), own_times.peaks.get(run)
    wall, host = own_times.median_wall(run)
    tflops = flops / seconds / 1e12 if flops and seconds else None
    return {
        "ms": seconds and seconds * 1e3,
        "times_definition": plain / seconds if plain and seconds else None,
        "tflops": tflops,
        "share_of_gemm": tflops and tflops * 1e12 / rate,
        "wall_ms": wall and wall * 1e3,
        "host_ms": host and host * 1e3,
        "peak_mib": None if peak is None else peak / 2**20,
        "repeats": own_times.repeats,
    }


def _launches(run: Callable[[], object], device: torch.device) -> Row:
    """Count the launches of a run on a GPU. If the profiler recorded none, the row has a note instead of a count."""
    try:
        return {"launches": kernels_launched(run, device)}
    except RuntimeError as error:
        return {"launches": None, "note": str(error)}


def bench_block(
    given: ModelBench,
    device: torch.device,
    *,
    ways: Sequence[str] = (),
    repeats: int = 0,
    progress: Progress = no_progress,
    sink: RowSink = lambda row: None,
) -> dict[str, Any]:
    """Time each implementation of an Evoformer block.

    ways: names, all by default. sink: receives each row as soon as it is measured.
    Returns the machine, its peak throughput, the rows, and the operations that ran by their definitions.
    """
    kind, precision = device.type, given.plan.precision
    title = f"Evoformer block, {given.block}, {precision}"
    counts: dict[str, dict[str, int]] = {}
    for way, kernels in COUNTED.items() if kind != "cuda" else ():
        by_pass = block_launches(given.block, precision, kernels)
        counts[way] = {
            pass_name: sum(by_pass[part].total for part in parts) for pass_name, (parts, _) in PASSES.items()
        }
    # Refusals of the counting, which imitates a GPU, are excluded.
    before = refusals()
    selected = _chosen("block", ways, device)
    subjects = {name: way.block(given.block, precision, device) for name, (way, note) in selected.items() if not note}
    top, flops = ceilings(device, DTYPES[precision]), block_flops(given.block)
    progress(0, 1, f"a block of {given.block}")
    times = measure(list(subjects.values()), device, repeats or REPEATS[kind], BUDGET[kind], walls=True)
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append({"what": title, **row})
        sink(rows[-1])

    for name, (_, note) in selected.items():
        if note := note or times[name].failed:
            add({"way": name, "note": note})
            continue
        late = f"in {times[name].late} of {times[name].repeats} runs the device waited for the host"
        for pass_name, (parts, run) in PASSES.items():
            row = {"way": name, "pass": pass_name, **_row(times, name, parts, run, flops[pass_name], top.flops)}
            row |= {"note": late if times[name].late else "", "launches": counts.get(name, {}).get(pass_name)}
            if kind == "cuda":
                timed = subjects[name].runs
                if pass_name == "backward":
                    timed["both"]["training"]()
                runs = [run for run_parts in timed.values() for part, run in run_parts.items() if part in parts]
                row |= _launches(lambda: [run() for run in runs], device)  # noqa: B023, it is called here
            add(row)
    if kind == "cuda" and "ours" in subjects:
        add(_as_graph(subjects["ours"], device))
    return report_of(f"{title}: ms are medians of turns", device, {precision: top}, rows) | {
        "precision": precision, "refused": dict(refusals(before)),
    }  # fmt: skip


def _as_graph(one: Subject, device: torch.device) -> Row:
    """Time our forward pass as a replayed CUDA graph, or explain why it cannot be captured."""
    row: Row = {"way": "ours, as a graph", "pass": "forward"}
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.no_grad(), torch.cuda.graph(graph):
            one.forward()
    except RuntimeError as error:
        return row | {"note": f"cannot be captured: {str(error).splitlines()[0]}"}
    times = measure([Whole("graph", graph.replay)], device, REPEATS["cuda"], BUDGET["cuda"], peaks=False)["graph"]
    seconds = times.median("whole")
    return row | {"ms": seconds and seconds * 1e3, "repeats": times.repeats, "note": times.failed}


def bench_step(
    given: ModelBench,
    device: torch.device,
    *,
    ways: Sequence[str] = (),
    repeats: int = 0,
    progress: Progress = no_progress,
    sink: RowSink = lambda row: None,
) -> dict[str, Any]:
    """Time each implementation of a training step like `bench_block`, with the plan of the settings."""
    kind, precision = device.type, given.plan.precision
    blocks = f"{given.model.evoformer.blocks} blocks, recycles {given.recycles}"
    title = f"training step, {given.sizes}, {blocks}, {precision}"
    selected = _chosen("step", ways, device)
    plans = {name: replace(given.plan, **{"graph": False, **way.changes}) for name, (way, note) in selected.items()
             if not note}  # fmt: skip
    progress(0, 3, "counting")
    # On a GPU, counting would take longer than the measurement.
    flops, launches = step_counts(given) if kind == "cpu" else (None, {})
    # Refusals of the counting, which imitates a GPU, are excluded.
    before = refusals()
    top = ceilings(device, DTYPES[precision])
    progress(1, 3, f"a step of {given.sizes}")
    step = TrainingStep(given, device)
    subjects = [Whole(name, step, functools.partial(step.bind, plan)) for name, plan in plans.items()]
    turns, budget = repeats or REPEATS[kind], 3 * BUDGET[kind]
    times = measure(subjects, device, turns, budget, peaks=kind == "cpu", walls=True)
    progress(2, 3, "launches")
    rows: list[Row] = []
    for name, (_, note) in selected.items():
        note = note or times[name].failed
        row: Row = {"what": title, "way": name, "note": note}
        if not note:
            execution = step.bind(plans[name])
            row |= {"plan": str(execution), "pass": "step"}
            row |= {"launches": launches[name]} if name in launches else {}
            row |= _row(times, name, ["whole"], "whole", flops, top.flops)
            if kind == "cuda":
                row |= {"peak_mib": times[name].warm_peak / 2**20, **_launches(step, device)}
            refused = [f"{reason}, {count} times" for reason, count in execution.graphs.refused.items()]
            row |= {"replayed": execution.graphs.replayed, "rerecorded": execution.graphs.rerecorded}
            if execution.graphs.rerecorded:
                refused.append(f"graphs recorded again {execution.graphs.rerecorded} times")
            row["note"] = "; ".join([*filter(None, [row["note"]]), *refused])
        rows.append(row)
        sink(row)
    return report_of(f"{title}: ms are medians of turns", device, {precision: top}, rows) | {
        "precision": precision, "refused": dict(refusals(before)),
    }  # fmt: skip


def block_flops(sizes: BlockSizes) -> dict[str, int]:
    """Count the floating point operations of the products in a block's definition."""
    with torch.device("meta"):
        block = RandomBlock(sizes, Plan(kernels="definition"), "meta")
        with_gradient = block.wanted
        with FlopCounterMode(display=False) as counter:
            out = block.forward()
        forward = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(out, with_gradient, block.grads)
        backward = counter.get_total_flops()
    return {"forward": forward, "training": forward, "backward": backward, "both": forward + backward}


def step_counts(given: ModelBench) -> tuple[int, dict[str, int]]:
    """Count the floating point operations of a step's products by the definitions, and launches without a GPU.

    Recomputed products count once.
    """
    step = TrainingStep(given, "meta")
    plan = Plan(precision=given.plan.precision, recompute=given.plan.recompute)
    step.bind(replace(plan, kernels="fast"))
    launches = {"ours": step_launches(step).total}
    step.bind(replace(plan, kernels="definition"))
    with FlopCounterMode(display=False) as counter:
        launches["definition"] = step_launches(step).total
    if plan.recompute:
        step.bind(replace(plan, kernels="definition", recompute=None))
        with FlopCounterMode(display=False) as counter:
            step.learn()
    return counter.get_total_flops(), launches


# ---- a user-supplied model, before and after `accelerate`

ACCELERATED_REPEATS = {"cpu": 5, "cuda": 20}
# Seconds for each of the two models, without warm-up.
ACCELERATED_BUDGET = {"cpu": 120.0, "cuda": 20.0}
Call = tuple[tuple[Any, ...], dict[str, Any]]
ACCELERATED: Columns = {
    "model": (None, ""), "pass": ("pass", ""), "before_ms": ("before, ms", ".4g"), "after_ms": ("after, ms", ".4g"),
    "times_faster": ("times faster", ".2f"), "before_mib": ("before, MiB", ".0f"), "after_mib": ("after, MiB", ".0f"),
    "note": ("", ""),
}  # fmt: skip


def user_model(factory: str, inputs: str | None, device: torch.device) -> tuple[nn.Module, Call]:
    """Create a model and its inputs by functions "module:function", and move both to a device.

    The model's function has no parameters and returns a model, or (model, inputs). The function of the inputs has no
    parameters and returns a tensor, a tuple of arguments, a dict of arguments by name, or (tuple, dict).
    Raises UserError for a function that does not exist or returns something else.
    """
    model, arguments = _function("--model", factory)(), None
    if isinstance(model, tuple) and len(model) == 2:
        model, arguments = model
    if not isinstance(model, nn.Module):
        raise UserError(f"--model {factory}: it returns a {type(model).__name__}. Return a torch.nn.Module.")
    if inputs is not None:
        arguments = _function("--inputs", inputs)()
    if arguments is None:
        raise UserError(f"--inputs: missing. Name a function that returns the inputs of {factory}.")
    if isinstance(arguments, Mapping):
        call: Call = (), dict(arguments)
    elif not isinstance(arguments, tuple):
        call = (arguments,), {}
    elif len(arguments) == 2 and isinstance(arguments[0], tuple) and isinstance(arguments[1], Mapping):
        call = arguments[0], dict(arguments[1])
    else:
        call = arguments, {}
    return model.to(device), map_tensors(lambda x: x.to(device), call)


def _function(option: str, text: str) -> Callable[[], Any]:
    """Import the function "module:function". Modules of the current folder come first."""
    name, _, attribute = text.partition(":")
    if not name or not attribute.isidentifier():
        raise UserError(f"{option} {text}: not a function. Pass module:function.")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UserError(f"{option} {text}: {name} needs {error.name}, which is not installed") from error
        raise UserError(
            f"{option} {text}: no module {error.name} in this folder or among installed packages"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"{option} {text}: {name} has no function {attribute}")
    return function


def bench_accelerated(
    name: str,
    before: nn.Module,
    after: nn.Module,
    call: Call,
    device: torch.device,
    *,
    repeats: int = 0,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Time a model before and after `accelerate`, interleaved: a forward pass without gradients, and both passes.

    Returns the machine, a row for each pass, the reasons why operations ran by their definitions, and the difference of
    the outputs without dropout, relative to the largest element of each.
    Raises UserError if the memory does not suffice.
    """
    args, kwargs = call
    refused = refusals()
    progress(0, 1, f"{name}, before and after")
    try:
        difference = _difference(before, after, call)
        ways = [
            subject(way, functools.partial(model, *args, **kwargs), [p for p in model.parameters() if p.requires_grad])
            for way, model in (("before", before), ("after", after))
        ]
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"--model {name}: out of memory. Use smaller inputs.") from error
    times = measure(ways, device, repeats or ACCELERATED_REPEATS[device.type], ACCELERATED_BUDGET[device.type])
    failed = "; ".join(f"{way}: {way_times.failed}" for way, way_times in times.items() if way_times.failed)
    rows: list[Row] = []
    for pass_name in ("forward", "both"):
        parts, run = PASSES[pass_name]
        row: Row = {"model": name, "pass": pass_name, "note": failed}
        if pass_name == "both" and not ways[0].wanted:
            rows.append(row | {"note": "no parameter requires a gradient"})
            continue
        for way, way_times in times.items():
            seconds, peak = way_times.median(*parts), way_times.peaks.get(run)
            row[f"{way}_ms"] = seconds and seconds * 1e3
            row[f"{way}_mib"] = None if peak is None else peak / 2**20
        if row["before_ms"] and row["after_ms"]:
            row["times_faster"] = row["before_ms"] / row["after_ms"]
            row["note"] = "slower here" if row["times_faster"] < SLOWER else ""
        rows.append(row)
    return {
        **report_of(f"{name}: medians of turns, before and after accelerate", device, {}, rows),
        "difference": difference,
        "refused": dict(refusals(refused)),
    }


def _difference(before: nn.Module, after: nn.Module, call: Call) -> float:
    """Compute the difference of the outputs without dropout, relative to the largest element of each."""
    args, kwargs = call
    outputs = []
    for model in (before, after):
        training = {module: module.training for module in model.modules()}
        with torch.no_grad():
            tensors = tensors_of(model.eval()(*args, **kwargs))
            outputs.append([x for x in tensors if x.is_floating_point() and x.numel()])
        for module, was in training.items():
            module.training = was
    return max((float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)) for a, b in zip(*outputs)), default=0.0)
