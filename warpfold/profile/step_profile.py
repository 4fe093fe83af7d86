"""Profile one training step, or one forward pass: where its time goes, by layer and by operation, forward and backward.

Times are those of one run under torch's profiler, which is slower than a run without: both are measured and said.  Work
(products, exponentials, bytes) is counted apart, by the definitions (profile/work.py); what the device could do at best
follows from it and from rates measured in the same process (cost/rates.py).
"""

import datetime
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from warpfold.cost.example import ModelBench, TrainingStep
from warpfold.cost.machine import describe
from warpfold.cost.measured_memory import without_stderr
from warpfold.cost.observe import MODEL, Place, Spans
from warpfold.cost.rates import Ceilings, ceilings, finish
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.ops.dispatch import refusals
from warpfold.parallel.plan import DTYPES
from warpfold.profile.trace import AUTOGRAD, PYTHON, WHOLE, Spent, TraceReading, attribute, read_events
from warpfold.profile.work import CountedWork, WorkKey, work_of
from warpfold.progress import Progress, no_progress

RUNS = {"cpu": 2, "cuda": 5}  # without the profiler, after as many warm-up runs as `WARM`
WARM = {"cpu": 1, "cuda": 3}
LOSSES, OPTIMIZER = "losses", "optimizer"
NOT_PLACED = "not attributed"  # kernels that no event of the host launched
Row = dict[str, Any]


def profile_model(
    given: ModelBench,
    device: torch.device,
    trace: Path | None = None,
    training: bool = True,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Profile one step, or without `training` one forward pass, of a model at a size; returns the figures for JSON.

    trace: a new file, .json or .json.gz, for the events as Perfetto and Chrome read them.
    """
    turns = WARM[device.type] + RUNS[device.type]
    progress(0, turns + 3, "counting what there is to do")
    work = counted_work(given, training)
    progress(1, turns + 3, "measuring what the device can do")
    top = ceilings(device, DTYPES[given.plan.precision])
    before = refusals()
    step = TrainingStep(given, device)
    step.bind(replace(given.plan, graph=False))  # what a graph replays belongs to no layer
    run = _run(step, training)
    plain = []
    for turn in range(turns):  # the first ones do not count
        progress(turn + 2, turns + 3, f"without the profiler, run {turn + 1} of {turns}")
        plain.append(_seconds(run, device))
    del plain[: WARM[device.type]]
    progress(turns + 2, turns + 3, "under the profiler")
    reading, profiled = _profiled(step, run, device, trace)
    tables = Tables(reading, work, top, device.type == "cuda")
    passes = f"recycles {given.recycles}, {_blocks(given.model)}, {given.plan.precision}"
    return {
        "what": f"{'one training step' if training else 'one forward pass'}: {given.sizes}, {passes}",
        "date": datetime.date.today().isoformat(),
        "machine": describe(device),
        "clock": "kernels on the device" if tables.cuda else "operations on the CPU",
        "step_ms": statistics.median(plain) * 1e3,
        "step_runs_ms": [1e3 * seconds for seconds in plain],
        "profiled_ms": profiled * 1e3,
        **tables.totals(statistics.median(plain)),
        "ceilings": {"tflops": top.flops / 1e12, "gb_per_s": top.bytes / 1e9, "exps": top.exps, "how": top.how},
        "layers": tables.layers(),
        "operations": tables.operations(),
        "each_layer": tables.layers(each=True),
        "refused": refusals(before),
    }


def counted_work(given: ModelBench, training: bool) -> dict[WorkKey, CountedWork]:
    """Count what a step, or a forward pass, has to do, by the definitions; the optimizer's part is not counted."""
    step = TrainingStep(given, "meta")
    step.bind(replace(given.plan, kernels="definition", recompute=None, compile=False))
    return work_of(step.model, lambda spans: _run(step, training, update=False)(spans))


def _run(step: TrainingStep, training: bool, update: bool = True) -> Callable[[Spans], None]:
    """Return the step to measure, with spans for what belongs to no module."""

    def one_step(spans: Spans) -> None:
        with spans.open(Place(LOSSES)), _passes_of_model(step.model, spans):
            step.learn()
        if update:
            with spans.open(Place(OPTIMIZER)):
                step.update()

    def one_pass(spans: Spans) -> None:
        step.model.eval()
        with torch.no_grad():
            step.model(step.batch, step.recycles)

    return one_step if training else one_pass


@contextmanager
def _passes_of_model(model: AlphaFold, spans: Spans) -> Iterator[None]:
    """Have what a model's passes compute outside of its layers be the model's within the context."""

    def spanned(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with spans.open(Place(MODEL)):
                return function(*args, **kwargs)

        return call

    names = ("recycle", "inputs_of_pass", "last_pass")
    for name in names:
        setattr(model, name, spanned(getattr(model, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(model, name)


def _seconds(run: Callable[[Spans], None], device: torch.device) -> float:
    """Return the seconds of one run without the profiler."""
    start = time.perf_counter()
    run(Spans())
    finish(device)
    return time.perf_counter() - start


def _profiled(
    step: TrainingStep, run: Callable[[Spans], None], device: torch.device, trace: Path | None
) -> tuple[TraceReading, float]:
    """Run once under the profiler; return what it says and the seconds of the run."""
    spans, cuda = Spans(), device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with ExitStack() as stack:
        stack.enter_context(without_stderr())
        profile = stack.enter_context(torch.profiler.profile(activities=activities))
        stack.enter_context(spans.watching(step.model))
        stack.enter_context(record_function(WHOLE))
        start = time.perf_counter()
        run(spans)
        finish(device)
        seconds = time.perf_counter() - start
    if trace is not None:
        with without_stderr():
            profile.export_chrome_trace(str(trace))
    events, on_device = read_events(profile.events())
    if cuda and not on_device:
        raise RuntimeError("the profiler saw no kernel on the device: there is nothing to report")
    return attribute(events, spans, on_device), seconds


def _blocks(model: ModelConfig) -> str:
    count = model.evoformer.blocks
    return "1 block" if count == 1 else f"{count} blocks"


def kind_of(layer: str) -> str:
    """Return a layer's path with "*" for the numbers of blocks: "evoformer.blocks.*.msa.row"."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", layer)


@dataclass(frozen=True)
class Tables:
    """The tables of a profile: rows of plain numbers, sorted by time, whose milliseconds add up to `totals`.

    ms: of the device on CUDA, else of the CPU.  limit_ms: of the ideal pass, for what was counted.
    """

    reading: TraceReading
    work: Mapping[WorkKey, CountedWork]
    top: Ceilings
    cuda: bool

    def totals(self, plain: float) -> Row:
        """Say what the rows add up to, and how host and device shared the step; plain: its seconds."""
        host = sum(one.host for one in self.reading.spent.values())
        idle = [one.host for key, one in self.reading.spent.items() if key.op in (PYTHON, AUTOGRAD)]
        found = {
            "ms": self._ms(self.reading.spent) + (1e3 * self.reading.unplaced if self.cuda else 0.0),
            "flops": sum(one.flops for one in self.work.values()),
            "bytes": sum(one.bytes for one in self.work.values()),
            "launches": self.reading.device_launches
            if self.cuda
            else sum(one.launches for one in self.reading.spent.values()),
            "limit_ms": 1e3 * sum(self.top.limit(one.cost) for one in self.work.values()),
            "outside_operations": sum(idle) / host,  # share of the host's time
        }
        if self.cuda:
            found["device_busy_ms"] = 1e3 * self.reading.busy
            found["device_waited"] = max(0.0, 1 - self.reading.busy / plain)  # share of the step without the profiler
        return found

    def layers(self, each: bool = False) -> list[Row]:
        """Make a row for each kind of layer, or for `each` layer."""
        rows = []
        for layer, keys in self._grouped(lambda key: key.layer if each else kind_of(key.layer)).items():
            row = {"layer": layer, "layers": len({key.layer for key in keys}), **self._figures(keys)}
            row |= {f"{which}_ms": self._ms(k for k in keys if k.backward is back) for which, back in PASSES}
            rows.append(row)
        return self._sorted(rows, {"layer": NOT_PLACED, "layers": 1})

    def operations(self) -> list[Row]:
        """Make a row for each operation and pass."""
        rows = []
        for (op, backward), keys in self._grouped(lambda key: (key.op, key.backward)).items():
            ours = any(key.shape for key in keys)
            rows.append({"op": op, "ours": ours, "pass": "backward" if backward else "forward", **self._figures(keys)})
        return self._sorted(rows, {"op": NOT_PLACED, "ours": False, "pass": ""})

    def _grouped(self, name: Callable[[WorkKey], Any]) -> dict[Any, list[WorkKey]]:
        groups: dict[Any, list[WorkKey]] = {}
        for key in dict.fromkeys([*self.reading.spent, *self.work]):
            groups.setdefault(name(key), []).append(key)
        return groups

    def _sorted(self, rows: list[Row], unplaced: Row) -> list[Row]:
        """Sort rows by time, with one for kernels that no event launched."""
        if self.reading.unplaced:
            rows.append({**unplaced, **self._figures([]), "ms": 1e3 * self.reading.unplaced})
        return sorted(rows, key=lambda row: -row["ms"])

    def _ms(self, keys: Iterable[WorkKey]) -> float:
        found = [self.reading.spent.get(key, Spent()) for key in keys]
        return 1e3 * sum(one.device if self.cuda else one.host for one in found)

    def _figures(self, keys: Iterable[WorkKey]) -> Row:
        keys = list(keys)
        spent = [self.reading.spent[key] for key in keys if key in self.reading.spent]
        work = [self.work[key] for key in keys if key in self.work]
        ms, limit = self._ms(keys), 1e3 * sum(self.top.limit(one.cost) for one in work)
        flops, moved = sum(one.flops for one in work), sum(one.bytes for one in work)
        calls = sum(one.calls for one in work) or sum(one.calls for one in spent)
        return {
            "ms": ms,
            "host_ms": 1e3 * sum(one.host for one in spent),
            "calls": calls,
            "launches": sum(one.launches for one in spent),
            "flops": flops,
            "bytes": moved,
            "exps": sum(one.exps for one in work),
            "tflops": flops / ms / 1e9 if ms else None,
            "gb_per_s": moved / ms / 1e6 if ms else None,
            "limit_ms": limit,
            "share_of_limit": limit / ms if ms else None,
        }


PASSES = (("forward", False), ("backward", True))


# ---- in words


SUMMED = ("ms", "forward_ms", "backward_ms", "host_ms", "calls", "launches", "flops", "bytes", "limit_ms")
HEADS = {"layers": ("layer", "of them", "forward ms", "backward ms"), "operations": ("operation", "pass", "calls", "")}
FIGURES = ("ms", "of all", "GFLOP", "TFLOP/s", "MB", "GB/s", "launches", "of limit")


def in_words(found: Mapping[str, Any]) -> list[str]:
    """Put the findings of `profile_model` into sentences."""
    counts = f"{found['launches']:,} {'launches' if 'device_busy_ms' in found else 'operations of torch'}"
    rate = found["flops"] / found["step_ms"] / 1e9
    said = [
        f"{found['what'].capitalize()}, on {found['machine']['device']}.",
        f"Without the profiler a run took {_figure(found['step_ms'])} ms (median of {len(found['step_runs_ms'])}), and "
        f"under it {_figure(found['profiled_ms'])} ms: what the profiler costs lies mostly in small operations.",
        f"Products: {found['flops'] / 1e9:,.3g} GFLOP, {rate:.3g} TFLOP/s; {counts}.",
        f"Of the host's time {found['outside_operations']:.0%} was spent outside of operations, in Python and in "
        "autograd's graph.",
    ]
    if "device_busy_ms" in found:
        said.append(
            f"The device was busy for {_figure(found['device_busy_ms'])} ms: for {found['device_waited']:.0%} of a run "
            "without the profiler it waited for the host."
        )
    said += [f"Computed by its definition, {count} times: {what}." for what, count in found["refused"].items()]
    return said


def table(found: Mapping[str, Any], of: str, longest: int) -> tuple[tuple[str, ...], list[list[str]]]:
    """Return heads and rows of a table of "layers" or "operations": those that take longest, the others summed up."""
    rows, whole, cuda = found[of], found["ms"], "device_busy_ms" in found  # on a CPU the host's time is all there is
    shown = list(rows[:longest])
    if others := rows[longest:]:
        summed = {name: sum(row.get(name, 0) for row in others) for name in SUMMED}
        share = summed["limit_ms"] / summed["ms"] if summed["ms"] else None
        more = f"{len(others)} more"
        shown.append(summed | {"layer": more, "op": more, "share_of_limit": share})
    lines = []
    for row in shown:
        if of == "layers":
            line = [row["layer"], str(row.get("layers", ""))]
            line += [f"{row[name]:,.4g}" if name in row else "" for name in ("forward_ms", "backward_ms")]
        else:
            line = [row["op"], row.get("pass", ""), str(row["calls"] or ""), "ours" if row.get("ours") else ""]
        line += [f"{row['ms']:,.4g}", f"{row['ms'] / whole:.1%}"]
        line += [_number(row["flops"] / 1e9), _number(row.get("tflops") if row["flops"] else None)]
        line += [_number(row["bytes"] / 1e6), _number(row.get("gb_per_s") if row["bytes"] else None)]
        limit = row["share_of_limit"] if row["limit_ms"] else None
        line += [str(row["launches"]), "" if limit is None else f"{limit:.0%}"]
        lines.append([*line, *([f"{row['host_ms']:,.4g}"] if cuda else [])])
    return (*HEADS[of], *FIGURES, *(["host ms"] if cuda else [])), lines


def _figure(value: float) -> str:
    """Return a number with four digits, and with all of its whole ones."""
    return f"{value:,.0f}" if value >= 1e3 else f"{value:.4g}"


def _number(value: float | None) -> str:
    return "" if not value else f"{value:,.3g}" if value >= 1e-3 else "< 0.001"
