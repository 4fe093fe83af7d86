"""Time an Evoformer block, or a whole training step, each way to compute it: `warpfold bench --block`, `--step`.

Other packages are imported only where they are installed; their signatures come from their public code.

Ways take turns, so that a slow minute of the machine affects all of them.  Each row is one way and one pass: "forward"
keeps nothing for a gradient, "training" is a forward pass that keeps what its gradient needs, "backward" the backward
pass alone, "both" these two, "step" everything from the batch on the device to the new weights.

* ms: on a GPU the device's own time, by events, with the device kept busy until all is queued; on a CPU wall time.
* wall_ms: until the result is there, nothing queued before.  host_ms: until Python had queued everything.
* launches: on a GPU kernels, copies and fills, as the profiler saw them; elsewhere what a GPU would launch, counted.
"""

import datetime
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from warpfold.bench.peers import compile_unsupported
from warpfold.bench.timing import Subject, Times, WallTimes, kernels_launched, measure, peak, wall_times
from warpfold.cost.example import BlockSizes, ModelBench, RandomBlock, TrainingStep
from warpfold.cost.launches import LaunchCount, block_launches, counted_products, step_launches
from warpfold.cost.machine import describe
from warpfold.cost.rates import ceilings
from warpfold.device import find_recorder
from warpfold.ops.dispatch import Kernels, refusals
from warpfold.parallel.plan import DTYPES, Plan, Precision
from warpfold.progress import Progress, no_progress

REPEATS = {"cpu": 3, "cuda": 20}
BUDGET = {"cpu": 60.0, "cuda": 4.0}  # seconds for a way, without its warm-up
COLUMNS = (
    "what", "way", "pass", "ms", "times_definition", "wall_ms", "host_ms", "tflops", "share_of_gemm", "peak_mib",
    "launches", "repeats", "note",
)  # fmt: skip
COUNTED: Mapping[str, Kernels] = {"definition": "definition", "ours": "fast"}  # ways whose launches are counted
PASSES = ("forward", "training", "backward", "both")
Row = dict[str, Any]
RowSink = Callable[[Row], None]  # is given each row as soon as it is there
OPENFOLD = "openfold.model.evoformer"


@dataclass(frozen=True, kw_only=True)
class ModelWay:
    """One way to compute a block or a step: changes of a plan, or a block of another package, which `make` returns.

    unsupported_reason: says why a device cannot compute it so; None if it can.
    left_out: why it is not timed in steps unless it is asked for.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    of: tuple[str, ...] = ("block", "step")
    unsupported_reason: Callable[[torch.device], str | None] = lambda device: None
    left_out: str = ""
    make: Callable[[BlockSizes, Precision, torch.device], Subject] | None = None

    def block(self, sizes: BlockSizes, precision: Precision, device: torch.device) -> Subject:
        """Return a block as a subject."""
        if self.make is not None:
            return self.make(sizes, precision, device)
        block = RandomBlock(sizes, Plan(precision=precision, **self.changes), device)
        return Subject(self.name, block.forward, block.wanted, block.grads)

    def plan(self, plan: Plan) -> Plan:
        """Return the plan of a step."""
        return replace(plan, **{"graph": False, **self.changes})


def _graph_unsupported(device: torch.device) -> str | None:
    return None if find_recorder(device) else f"a {device.type} has no graphs"


def _openfold_unsupported(device: torch.device) -> str | None:
    try:
        found = importlib.util.find_spec(OPENFOLD)
    except ModuleNotFoundError:  # the package itself
        found = None
    return None if found else "not installed"


def _openfold(sizes: BlockSizes, precision: Precision, device: torch.device) -> Subject:
    """Bind OpenFold's EvoformerBlock(m [*, s, r, c_m], z [*, r, r, c_z], msa_mask, pair_mask), under autocast in bf16.

    Its releases differ in what the constructor takes: what one does not know is left out.
    """
    made = importlib.import_module(OPENFOLD).EvoformerBlock
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
    known = inspect.signature(made).parameters
    module = made(**{name: value for name, value in arguments.items() if name in known}).to(device).train()
    block, dtype = RandomBlock(sizes, Plan(precision=precision), device), DTYPES[precision]
    msa_mask, pair_mask = (mask.to(dtype) for mask in block.masks)

    def forward() -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            m, z = module(block.m, block.z, msa_mask=msa_mask, pair_mask=pair_mask)
        return m, z

    wanted = [block.m, block.z, *(p for p in module.parameters() if p.requires_grad)]
    return Subject("openfold", forward, wanted, block.grads)


KEPT: dict[str, Any] = {"kernels": "fast", "recompute": None, "keep_blocks": 0}
MAY_NOT_FIT = "left out, as nothing is recomputed, which may not fit: name it (--ways)"
WAYS = (
    ModelWay(name="definition", changes={"kernels": "definition", "compile": False}),
    ModelWay(
        name="compile",
        changes={"kernels": "definition", "compile": True},
        unsupported_reason=compile_unsupported,
        left_out="left out, as it compiles for minutes: name it (--ways)",
    ),
    ModelWay(name="openfold", of=("block",), unsupported_reason=_openfold_unsupported, make=_openfold),
    ModelWay(name="ours", changes={"kernels": "fast"}),
    ModelWay(
        name="graph",
        changes={"kernels": "fast", "graph": True},
        of=("step",),
        unsupported_reason=_graph_unsupported,
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


def bench_block(
    given: ModelBench,
    device: torch.device,
    *,
    ways: Sequence[str] = (),
    repeats: int = 0,
    progress: Progress = no_progress,
    sink: RowSink = lambda row: None,
) -> dict[str, Any]:
    """Time one Evoformer block each way.  ways: names, all by default; sink: gets each row as soon as it is measured.

    Returns the machine, what it can do, the rows, and what was refused.
    """
    kind, precision = device.type, given.plan.precision
    counts = {way: block_launches(given.block, precision, kernels) for way, kernels in COUNTED.items()}
    before = refusals()  # what a GPU would refuse does not count
    chosen = [way for way in WAYS if "block" in way.of and (not ways or way.name in ways)]
    notes = {way.name: way.unsupported_reason(device) or "" for way in chosen}
    subjects = {way.name: way.block(given.block, precision, device) for way in chosen if not notes[way.name]}
    top, turns = ceilings(device, DTYPES[precision]), repeats or REPEATS[kind]
    progress(0, 2, f"a block of {given.block}")
    times = measure(list(subjects.values()), device, turns, BUDGET[kind])
    notes |= {name: found.failed for name, found in times.items()}
    subjects = {name: subject for name, subject in subjects.items() if not notes[name]}
    progress(1, 2, f"a block of {given.block}, by the wall's clock")
    walls = {
        which: wall_times({n: _run(s, which) for n, s in subjects.items()}, device, turns, BUDGET[kind])
        for which in ("forward", "both")
    }
    clock = _BlockClock(times, walls, block_flops(given.block), top.flops)
    what = block_name(given)
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append({"what": what, **row})
        sink(rows[-1])

    for way in chosen:
        if notes[way.name]:
            add({"way": way.name, "note": notes[way.name]})
            continue
        for which in PASSES:
            row = {"way": way.name, "pass": which, **clock.row(way.name, which)}
            try:
                row["launches"] = _launches(subjects[way.name], which, device, counts.get(way.name))
            except RuntimeError as error:  # the times stand; a count of nothing is none
                row |= {"launches": None, "note": str(error)}
            add(row)
    if kind == "cuda" and "ours" in subjects:
        add(_as_graph(subjects["ours"]))
    return _report(what, device, precision, top, rows, refusals(before))


def bench_step(
    given: ModelBench,
    device: torch.device,
    *,
    ways: Sequence[str] = (),
    repeats: int = 0,
    progress: Progress = no_progress,
    sink: RowSink = lambda row: None,
) -> dict[str, Any]:
    """Time a whole training step each way, as `bench_block` does a block; the plan is that of the settings."""
    kind, precision = device.type, given.plan.precision
    chosen = [way for way in WAYS if "step" in way.of and (not ways or way.name in ways)]
    notes = {way.name: ("" if ways else way.left_out) or way.unsupported_reason(device) or "" for way in chosen}
    plans = {way.name: way.plan(given.plan) for way in chosen if not notes[way.name]}
    progress(0, 3, "counting")
    flops, launches = step_counts(given) if kind == "cpu" else (None, {})  # on a GPU they would take longer than it
    before = refusals()  # what a GPU would refuse does not count
    top = ceilings(device, DTYPES[precision])
    progress(1, 3, f"a step of {given.sizes}")
    step = TrainingStep(given, device)

    def prepare(name: str) -> None:
        step.bind(plans[name])

    walls = wall_times(dict.fromkeys(plans, step), device, repeats or REPEATS[kind], 3 * BUDGET[kind], prepare)
    notes |= {name: found.failed for name, found in walls.items()}
    progress(2, 3, "memory and launches")
    seconds = {name: found.median("device" if kind == "cuda" else "wall") for name, found in walls.items()}
    what = step_name(given)
    rows: list[Row] = []
    for name, note in notes.items():
        row: Row = {"what": what, "way": name, "note": note}
        if name in plans:
            execution = step.bind(plans[name])
            row["plan"] = str(execution)
        if not note:
            found = walls[name]
            row |= {"pass": "step", **_figures(seconds[name], seconds.get("definition"), flops, top.flops)}
            most = peak(step, device) if kind == "cpu" else found.peak
            row |= {"wall_ms": _ms(found.median("wall")), "host_ms": _ms(found.median("host"))}
            row |= {"peak_mib": most / 2**20, "repeats": len(found.wall)}
            if name in launches:
                row["launches"] = launches[name]
            if kind == "cuda":
                try:
                    row["launches"] = kernels_launched(step, device)
                except RuntimeError as error:  # the times stand; a count of nothing is none
                    row |= {"launches": None, "note": str(error)}
            refused = [f"{reason}, {count} times" for reason, count in execution.graphs.refused.items()]
            row |= {"replayed": execution.graphs.replayed, "note": "; ".join([*filter(None, [row["note"]]), *refused])}
        rows.append(row)
        sink(row)
    return _report(what, device, precision, top, rows, refusals(before))


def block_name(given: ModelBench) -> str:
    """Return what the rows of a block say of its size."""
    return f"Evoformer block, {given.block}, {given.plan.precision}"


def step_name(given: ModelBench) -> str:
    """Return what the rows of a step say of its size."""
    blocks = f"{given.model.evoformer.blocks} blocks, recycles {given.recycles}"
    return f"training step, {given.sizes}, {blocks}, {given.plan.precision}"


def block_flops(sizes: BlockSizes) -> dict[str, int]:
    """Count the floating point operations of a block's products by its definition, as torch counts them."""
    with torch.device("meta"):
        block = RandomBlock(sizes, Plan(kernels="definition"), "meta")
        wanted = block.wanted
        with counted_products() as forward:
            out = block.forward()
        with counted_products() as backward:
            torch.autograd.grad(out, wanted, block.grads)
    return {
        "forward": sum(forward),
        "training": sum(forward),
        "backward": sum(backward),
        "both": sum(forward) + sum(backward),
    }


def step_counts(given: ModelBench) -> tuple[int, dict[str, int]]:
    """Count the products of the model and its losses in one step by their definitions, those that are recomputed once;
    and the launches of each way that can be counted without a GPU.
    """
    step = TrainingStep(given, "meta")
    plan = Plan(precision=given.plan.precision, recompute=given.plan.recompute)
    step.bind(replace(plan, kernels="fast"))
    launches = {"ours": step_launches(step).total}
    step.bind(replace(plan, kernels="definition"))
    with counted_products() as once:
        launches["definition"] = step_launches(step).total
    if plan.recompute:
        step.bind(replace(plan, kernels="definition", recompute=None))
        with counted_products() as once:
            step.learn()
    return sum(once), launches


def _run(subject: Subject, which: str) -> Callable[[], object]:
    """Return what runs one pass of a block: "forward", "training" or "both"."""

    def forward() -> object:
        with torch.no_grad():
            return subject.forward()

    def both() -> object:
        return torch.autograd.grad(subject.forward(), subject.wanted, subject.grad)

    return {"forward": forward, "training": subject.forward, "both": both}[which]


def _launches(
    subject: Subject, which: str, device: torch.device, counts: Mapping[str, LaunchCount] | None
) -> int | None:
    """Return the launches of one pass; None for a way that cannot be counted here."""
    if device.type != "cuda":
        if counts is None:
            return None
        both = counts["training"].total + counts["backward"].total
        return both if which == "both" else counts[which].total
    if which != "backward":
        return kernels_launched(_run(subject, which), device)
    out = subject.forward()
    return kernels_launched(lambda: torch.autograd.grad(out, subject.wanted, subject.grad), device)


@dataclass(frozen=True)
class _BlockClock:
    """What was measured of all ways to compute a block, with the products of each pass and the device's rate."""

    times: Mapping[str, Times]
    walls: Mapping[str, Mapping[str, WallTimes]]
    flops: Mapping[str, int]
    rate: float

    def seconds(self, way: str, which: str) -> float | None:
        """Return the seconds of a way's pass; None where it was not measured."""
        if way not in self.times:
            return None
        if which != "both":
            return self.times[way].median(which)
        parts = [self.times[way].median(part) for part in ("training", "backward")]
        return None if None in parts else sum(part or 0.0 for part in parts)

    def row(self, way: str, which: str) -> Row:
        """Return the figures of a way's pass."""
        times, wall = self.times[way], self.walls.get(which, {}).get(way, WallTimes())
        row = _figures(self.seconds(way, which), self.seconds("definition", which), self.flops[which], self.rate)
        row |= {"wall_ms": _ms(wall.median("wall")), "host_ms": _ms(wall.median("host"))}
        most = {"forward": times.forward_peak, "both": times.backward_peak}.get(which)  # those that are measured
        late = f"in {times.late} of {len(times.forward)} runs the device waited for the host" if times.late else ""
        return row | {"peak_mib": most and most / 2**20, "repeats": len(times.forward), "note": late}


def _figures(seconds: float | None, plain: float | None, flops: float | None, rate: float) -> Row:
    if seconds is None:
        return {"ms": None}
    return {
        "ms": seconds * 1e3,
        "times_definition": plain / seconds if plain else None,
        "tflops": flops and flops / seconds / 1e12,
        "share_of_gemm": flops and flops / seconds / rate,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _as_graph(one: Subject, repeats: int = 20) -> Row:
    """Return the row of our forward pass replayed as a CUDA graph, or why it cannot be captured."""
    row: Row = {"way": "ours, as a graph", "pass": "forward"}
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.no_grad(), torch.cuda.graph(graph):
            one.forward()
    except RuntimeError as error:
        return row | {"note": f"cannot be captured: {str(error).splitlines()[0]}"}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return row | {"ms": start.elapsed_time(end) / repeats, "repeats": repeats, "note": ""}


def _report(
    what: str,
    device: torch.device,
    precision: Precision,
    top: Any,
    rows: list[Row],
    refused: Mapping[str, int],
) -> dict[str, Any]:
    ceiling = {"tflops": top.flops / 1e12, "gb_per_s": top.bytes / 1e9, "how": top.how}
    return {
        "what": f"{what}: ms are medians of turns",
        "date": datetime.date.today().isoformat(),
        "machine": describe(device),
        "precision": precision,
        "ceilings": {precision: ceiling},
        "rows": rows,
        "refused": dict(refused),
    }


HEADS = (
    "way", "pass", "ms", "x definition", "wall ms", "host ms", "TFLOP/s", "of GEMM", "MiB", "launches", "",
)  # fmt: skip


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the rows as figures for people; what did not run says why."""

    def number(row: Row, name: str, form: str) -> str:
        value = row.get(name)
        return "" if value is None else format(value, form)

    return [
        (
            row["way"],
            row.get("pass", ""),
            number(row, "ms", ".4g"),
            number(row, "times_definition", ".2f"),
            number(row, "wall_ms", ".4g"),
            number(row, "host_ms", ".4g"),
            number(row, "tflops", ".3g"),
            number(row, "share_of_gemm", ".0%"),
            number(row, "peak_mib", ".0f"),
            number(row, "launches", "d"),
            row["note"],
        )
        for row in rows
    ]
