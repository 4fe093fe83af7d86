"""Read what torch's profiler saw: whose time each event is, layer by layer and operation by operation.

Every event's own time, without that of the events within it, belongs to one place: to the layer and operation whose
span is around it, or, in the backward pass, to those during whose span its node of autograd's graph was made.  So the
times of all places add up to the whole: on a CPU to the step, on a GPU to the time in which its kernels ran.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from warpfold.cost.launches import ALLOCATE
from warpfold.cost.observe import MARK, MODEL, Place, Spans
from warpfold.profile.work import WorkKey

NODE = "autograd::engine::evaluate_function: "  # how the event around a node of the backward pass is called
WHOLE = "warpfold step"  # the range around all that is measured
PYTHON = "Python"  # the operation of a layer's time in which none of its operations ran
OUTSIDE_OF_LAYERS = Place(MODEL)
AUTOGRAD = "autograd"  # likewise, in the backward pass
OURS = "warpfold::"
VIEWS = {
    "as_strided", "view", "_unsafe_view", "reshape", "_reshape_alias", "transpose", "t", "permute", "expand", "slice",
    "select", "unsqueeze", "squeeze", "detach", "alias", "unbind", "split", "split_with_sizes", "chunk", "narrow",
    "movedim", "numpy_T", "to", "contiguous", "expand_as", "view_as", "diagonal", "lift_fresh", "result_type",
    "resolve_conj", "resolve_neg", "is_nonzero", "item", "_local_scalar_dense", "flatten", "unflatten", "swapaxes",
    *ALLOCATE,
}  # fmt: skip


@dataclass
class TraceEvent:
    """One event of the profiler on the host; seconds.  node: the number of autograd's node, or -1."""

    name: str
    start: float
    own: float  # without the events within it
    node: int = -1
    parent: "TraceEvent | None" = None
    kernels: tuple[float, ...] = ()  # seconds of what it launched on the device


@dataclass
class Spent:
    """What was spent at one place: seconds of the host and of the device, and launches (on a CPU: operations)."""

    host: float = 0.0
    device: float = 0.0
    launches: int = 0
    calls: int = 0


@dataclass
class TraceReading:
    """What a profile says.  spent: by place; whole: seconds from the first to the last; busy: of the device."""

    spent: dict[WorkKey, Spent]
    whole: float
    busy: float = 0.0
    unplaced: float = 0.0  # seconds of kernels that no event launched, as replayed graphs have them
    device_launches: int = 0


def read_events(events: Iterable[Any]) -> tuple[list[TraceEvent], list[tuple[float, float]]]:
    """Return a profile's events on the host, and the (start, end) of everything that ran on a device, in seconds."""
    found: dict[int, TraceEvent] = {}
    on_device: list[tuple[float, float]] = []
    originals = []
    for e in events:
        if e.device_type != torch.autograd.DeviceType.CPU:
            on_device.append((e.time_range.start / 1e6, e.time_range.end / 1e6))
        elif not e.is_async:
            kernels = tuple(kernel.duration / 1e6 for kernel in e.kernels)
            own = e.self_cpu_time_total / 1e6
            found[id(e)] = TraceEvent(e.name, e.time_range.start / 1e6, own, e.sequence_nr, None, kernels)
            originals.append(e)
    for e in originals:
        if e.cpu_parent is not None:
            found[id(e)].parent = found.get(id(e.cpu_parent))
    return [found[id(e)] for e in originals], on_device


def attribute(
    events: Sequence[TraceEvent], spans: Spans, on_device: Sequence[tuple[float, float]] = ()
) -> TraceReading:
    """Give each event's own time, and what it launched, to its place.

    Events outside the range of the whole count where they ran on another thread (autograd's own, of a GPU), else not.
    Errors: RuntimeError where the range of the whole was not seen, or nothing ran within it.
    """
    spent: dict[WorkKey, Spent] = defaultdict(Spent)
    known, marks = dict[int, _Surroundings](), spans.by_name
    computing = set() if on_device else _computing(events)
    whole = 0.0
    for e in events:
        at = _around(e, spans, marks, known)
        whole += e.own if at.within else 0.0
        if not (at.within or at.backward):
            continue  # the profiler's own, before and after
        one = spent[_key(e, at)]
        one.host += e.own
        one.device += sum(e.kernels)
        if e.kernels:
            one.launches += len(e.kernels)
        elif not on_device and id(e) in computing:
            one.launches += 1
        one.calls += e.name.startswith(MARK)
    if whole == 0:
        raise RuntimeError("the profiler saw nothing of the step: there is nothing to report")
    busy = _union(on_device)
    placed = sum(one.device for one in spent.values())
    unplaced = max(0.0, sum(end - start for start, end in on_device) - placed)
    return TraceReading(dict(spent), whole, busy, unplaced, len(on_device))


def _computing(events: Sequence[TraceEvent]) -> set[int]:
    """Return the events (by id) that are torch's operations that compute themselves: no views, nor those that call
    others which compute."""
    candidates, callers = [], set()
    for e in events:
        name = e.name.removeprefix("aten::")
        if name != e.name and name.rstrip("_") not in VIEWS:
            candidates.append(id(e))
            above = e.parent
            while above is not None and id(above) not in callers:
                callers.add(id(above))
                above = above.parent
    return set(candidates) - callers


@dataclass(frozen=True)
class _Surroundings:
    """What is around an event: the range of the whole, a backward pass, a place, our operation where it has no span."""

    within: bool = False
    backward: bool = False
    place: Place = OUTSIDE_OF_LAYERS
    ours: str = ""


def _around(e: TraceEvent, spans: Spans, marks: Mapping[str, Place], known: dict[int, _Surroundings]) -> _Surroundings:
    """Find what is around an event, itself included.  Within a backward pass a span is of what is computed again.

    marks: the spans' places by name.  known: of other events, by id; they are many and nest deeply.
    """
    if id(e) in known:
        return known[id(e)]
    outer = _Surroundings() if e.parent is None else _around(e.parent, spans, marks, known)
    if e.name == WHOLE:
        outer = replace(outer, within=True)
    elif e.name.startswith(NODE):
        outer = replace(outer, backward=True, place=spans.places[spans.of_node(e.node)], ours="")
    elif e.name.startswith(MARK):
        outer = replace(outer, place=marks[e.name], ours="")
    elif e.name.startswith(OURS) and not outer.ours:
        outer = replace(outer, ours=e.name.removeprefix(OURS).split(".")[0].removesuffix("_backward"))
    known[id(e)] = outer
    return outer


def _key(e: TraceEvent, at: _Surroundings) -> WorkKey:
    """Return whose time an event's own is."""
    if at.place.op or at.ours:
        return WorkKey(at.place.layer, at.place.op or at.ours, at.place.shape, at.backward)
    if e.name.startswith("aten::"):
        return WorkKey(at.place.layer, e.name.removeprefix("aten::"), (), at.backward)
    return WorkKey(at.place.layer, AUTOGRAD if at.backward else PYTHON, (), at.backward)


def _union(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the time in which at least one of some intervals ran."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total
