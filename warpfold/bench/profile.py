"""Profile a training step or a forward pass with torch.profiler: time by layer and operation, and a trace for Perfetto.

Hooks on the layers and on the calls of our operations open `record_function` ranges with their names. A node of the
backward pass belongs to the layer and operation in whose range the forward pass created it.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from re import sub
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity

from warpfold.cost.example import ModelBench, TrainingStep
from warpfold.cost.machine import describe
from warpfold.cost.memory import without_stderr
from warpfold.cost.rates import finish
from warpfold.model.axial import AxialUpdate
from warpfold.ops import dispatch
from warpfold.ops.dispatch import Op, refusals
from warpfold.progress import Progress, no_progress

WARMUP_RUNS, TIMED_RUNS = {"cpu": 1, "cuda": 3}, {"cpu": 2, "cuda": 5}
# Prefixes of the names of ranges.
LAYER, OPERATION = "layer ", "operation "
# Modules down to this depth have a range, and so has every layer of the trunk.
DEPTH = 2
# torch's prefix for the range of a node of the backward pass.
NODE = "autograd::engine::evaluate_function: "
OUTSIDE, PARAMETERS = "outside of layers", "gradients of parameters"


@dataclass(frozen=True)
class Place:
    """The layer and operation to which an event of the profiler belongs.

    op: "" outside of our operations. call: number of the range of the layer or operation.
    """

    layer: str
    op: str = ""
    backward: bool = False
    call: int = 0


def profile_model(
    bench: ModelBench,
    device: torch.device,
    trace: Path | None = None,
    training: bool = True,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Profile one training step, or one forward pass without gradients; returns the figures as a JSON value.

    trace: a new file, .json or .json.gz, for Perfetto or Chrome.
    """
    warmup, runs, cuda = WARMUP_RUNS[device.type], TIMED_RUNS[device.type], device.type == "cuda"
    before, step = refusals(), TrainingStep(bench, device)
    # The kernels of a replayed graph belong to no layer.
    step.bind(replace(bench.plan, graph=False))

    def run() -> float:
        """Run once and return the seconds."""
        start = time.perf_counter()
        if training:
            with record_function(LAYER + OUTSIDE):
                step.learn()
            with record_function(LAYER + "optimizer"):
                step.update()
        else:
            with torch.no_grad(), record_function(LAYER + OUTSIDE):
                step.model.eval()(step.batch, step.recycles)
        finish(device)
        return time.perf_counter() - start

    seconds = []
    for number in range(warmup + runs):
        progress(number, warmup + runs + 1, f"run {number + 1} of {warmup + runs} without the profiler")
        seconds.append(run())
    progress(warmup + runs, warmup + runs + 1, "run with the profiler")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with without_stderr(), torch.profiler.profile(activities=activities) as profiler, named_ranges(step.model):
        profiled = run()
    if trace is not None:
        with without_stderr():
            profiler.export_chrome_trace(str(trace))
    events = list(profiler.events() or ())
    rows, kernels = time_rows(events, cuda), kernel_rows(events)
    if cuda and not kernels:
        raise RuntimeError("the profiler recorded no kernel on the device: there is nothing to report")
    blocks = bench.model.evoformer.blocks
    passes = f"recycles {bench.recycles}, {blocks} block{'s' * (blocks > 1)}, {bench.plan.precision}"
    return {
        "what": f"{'one training step' if training else 'one forward pass'}: {bench.sizes}, {passes}",
        "machine": describe(device),
        "clock": "kernels on the device" if cuda else "operations on the CPU",
        "run_ms": statistics.median(seconds[warmup:]) * 1e3,
        "profiled_ms": profiled * 1e3,
        "ms": sum(row["ms"] for row in rows),
        "rows": rows,
        "kernels": kernels,
        "refused": refusals(before),
    }


@contextmanager
def named_ranges(model: nn.Module) -> Iterator[None]:
    """Open a range in every layer of a model and in every call of our operations within the context."""
    ranges: list[record_function] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            ranges.append(record_function(LAYER + name))
            ranges[-1].__enter__()

        return hook

    def leave(*_: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    def call(original: Callable[..., Any], op: Op[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with record_function(OPERATION + op.name):
            return original(op, *args, **kwargs)

    with ExitStack() as undo:
        for name, module in model.named_modules():
            if name and (name.count(".") < DEPTH or isinstance(module, AxialUpdate)):
                undo.callback(module.register_forward_pre_hook(enter(name)).remove)
                undo.callback(module.register_forward_hook(leave, always_call=True).remove)
        undo.enter_context(dispatch.observed(call))
        yield


def time_rows(events: Sequence[Any], cuda: bool) -> list[dict[str, Any]]:
    """Sum the time of the profiler's events by layer and operation. The numbers of blocks are replaced by "*".

    The time of an event excludes nested events, so that the rows add up to the total. On a GPU it is the time of the
    kernels that the event launched.
    """
    host = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU and not event.is_async]
    # Outer events come before nested ones, and the forward pass before the backward pass.
    host.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    places: dict[int, Place | None] = {}
    # By the thread of the forward pass and the number of the node.
    made_at: dict[tuple[int, int], Place] = {}
    seconds, calls = defaultdict[Place, float](float), defaultdict[Place, set[int]](set)
    for number, event in enumerate(host):
        outer = places.get(id(event.cpu_parent)) if event.cpu_parent is not None else None
        place = outer
        if event.name.startswith(LAYER):
            is_backward = outer is not None and outer.backward
            place = Place(event.name.removeprefix(LAYER), "", is_backward, number)
        elif event.name.startswith(NODE):
            maker = made_at.get((event.fwd_thread, event.sequence_nr), Place(PARAMETERS, "", True, number))
            place = replace(maker, backward=True)
        elif event.name.startswith(OPERATION) and outer is not None and not outer.op:
            place = replace(outer, op=event.name.removeprefix(OPERATION), call=number)
        places[id(event)] = place
        if place is None:
            # An event of the profiler itself.
            continue
        # An event has the number of the next node, so the last event with a number has created the node.
        if event.sequence_nr >= 0 and not event.name.startswith(NODE):
            made_at[event.thread, event.sequence_nr] = place
        is_torch = event.name.startswith("aten::")
        op = place.op or (event.name if is_torch else "autograd" if place.backward else "Python")
        layer = sub(r"(?<=\.)\d+(?=\.|$)", "*", place.layer)
        key = Place(layer, op, place.backward)
        calls[key].add(number if is_torch and not place.op else place.call)
        microseconds = sum(kernel.duration for kernel in event.kernels) if cuda else event.self_cpu_time_total
        seconds[key] += microseconds / 1e6
    if cuda:
        # Kernels without a launching event on the host.
        placed = sum(seconds.values())
        whole = sum(row["ms"] for row in kernel_rows(events)) / 1e3
        seconds[Place("not attributed", "kernels")] = max(0.0, whole - placed)
    whole = sum(seconds.values())
    rows = [
        {"layer": key.layer, "op": key.op, "pass": "backward" if key.backward else "forward", "calls": len(calls[key]),
         "ms": 1e3 * spent, "share": spent / whole}
        for key, spent in seconds.items() if spent
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row["ms"])


def kernel_rows(events: Sequence[Any]) -> list[dict[str, Any]]:
    """Sum the time of the kernels, copies and fills on the device by name; empty for a CPU."""
    seconds, calls = defaultdict[str, float](float), defaultdict[str, int](int)
    for event in events:
        # Ranges of the host also appear on the device, around their kernels.
        is_range = event.name.startswith((LAYER, OPERATION)) or getattr(event, "is_user_annotation", False)
        if event.device_type != torch.autograd.DeviceType.CPU and not is_range:
            seconds[event.name] += event.time_range.elapsed_us() / 1e6
            calls[event.name] += 1
    rows = [{"kernel": name, "calls": calls[name], "ms": 1e3 * spent} for name, spent in seconds.items()]
    return sorted(rows, key=lambda row: -row["ms"])


def in_words(profile: Mapping[str, Any]) -> list[str]:
    """Summarise a profile in sentences."""
    lines = [
        f"{profile['what'].capitalize()}, on {profile['machine']['device']}.",
        f"A run took {profile['run_ms']:,.4g} ms, and {profile['profiled_ms']:,.4g} ms under the profiler, which slows "
        "down small operations.",
    ]
    if profile["kernels"]:
        busy = sum(row["ms"] for row in profile["kernels"])
        waited = max(0.0, 1 - busy / profile["run_ms"])
        lines.append(f"The device computed for {busy:,.4g} ms: for {waited:.0%} of a run it waited for the host.")
    lines += [f"Computed by its definition, {count} times: {refusal}." for refusal, count in profile["refused"].items()]
    return lines


HEADS = ("layer", "operation", "pass", "calls", "ms", "share")


def table_rows(profile: Mapping[str, Any], longest: int) -> list[list[str]]:
    """Format the rows of the printed table: the longest ones, and the sum of the others."""
    rows, other_rows = profile["rows"][:longest], profile["rows"][longest:]
    lines = [[row["layer"], row["op"], row["pass"], f"{row['calls']:,}", f"{row['ms']:,.4g}", f"{row['share']:.1%}"]
             for row in rows]  # fmt: skip
    if other_rows:
        ms, share = (sum(row[name] for row in other_rows) for name in ("ms", "share"))
        lines.append([f"{len(other_rows)} more", "", "", "", f"{ms:,.4g}", f"{share:.1%}"])
    return lines
