"""Replay a record on a timeline: a stream that computes, and one for each wire, with the overlap that the code has.

The host launches operation after operation and does not wait for them.  An operation begins when those before it have
ended and it has been launched.  A collective begins when what it sends exists and its wire is free (one wire joins the
devices of a node, another the nodes); the computing stream waits for it where the code waits for it, and no sooner.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import cast, get_args

from warpfold.parallel.plan import Plan
from warpfold.tune.cluster.collectives import GroupName, Kind, Placement, collective_seconds, place
from warpfold.tune.cluster.links import Cluster
from warpfold.tune.rates import MEASURED, TORCH, Rates
from warpfold.tune.simulate.record import Await, Begin, Entry, Operation, Phase

KERNEL = 2e-6  # seconds that a kernel takes however little it does: until all its programs run, and until they end
WITHIN, BETWEEN = "within a node", "between nodes"


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast a rank is: of operations by `rates`, of collectives by `cluster`.

    launch: seconds of the host for each kernel or collective; 0: graphs hold the whole step.  kernel: seconds of the
    device that a kernel takes whatever it does; both are 0 for measured rates, which include them.  overlap: whether
    collectives are awaited where the code does; else where they begin, as in code that blocks.
    """

    rates: Rates
    cluster: Cluster
    launch: float = 0.0
    kernel: float = 0.0
    overlap: bool = True

    @classmethod
    def of(cls, rates: Rates, cluster: Cluster, graphs: bool = False) -> "Pace":
        """Return the pace of a device: rates of a data sheet leave out what launches take."""
        sheet = not rates.ops
        return cls(
            rates=rates,
            cluster=cluster,
            launch=0.0 if graphs or not sheet else rates.call,
            kernel=KERNEL if sheet else 0.0,
        )

    def seconds(self, entry: Operation) -> float:
        """Return what an operation takes on the device, once it has begun."""
        if self.rates.ops:
            known = entry.op in MEASURED
            op = entry.op if known else TORCH
            return self.rates.seconds(op, entry.which if known else "forward", entry.cost, 1, entry.dtype)
        return self.kernel * entry.launches + self.rates.tops[entry.dtype].limit(entry.cost) / self.rates.efficiency


@dataclass(frozen=True)
class Span:
    """Something on the timeline, from `begin` to `end` in seconds; stream: "computing", or a wire."""

    stream: str
    name: str
    phase: Phase
    begin: float
    end: float


@dataclass
class StepTime:
    """How long a rank takes that nothing disturbs: compute + exposed + launch = seconds.

    compute: operations on the device.  exposed: it waits for collectives.  launch: it waits for the host.  hidden:
    collectives that travel while something is computed.  by_op, by_phase: seconds of operations.
    """

    seconds: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0
    launch: float = 0.0
    collectives: float = 0.0
    sent: int = 0
    kernels: int = 0
    by_op: dict[str, float] = field(default_factory=dict)
    by_phase: dict[str, float] = field(default_factory=dict)
    exposed_by_group: dict[str, float] = field(default_factory=dict)

    @property
    def hidden(self) -> float:
        """Seconds of collectives that nothing waits for."""
        return max(0.0, self.collectives - self.exposed)


def replay(
    entries: Iterable[Entry], plan: Plan, pace: Pace, seen: Callable[[Span], None] | None = None
) -> StepTime:
    """Return how long the entries take; `seen` is told of everything on the timeline.

    plan: that the entries were recorded of.
    """
    found, wires = StepTime(), _Wires(plan, pace.cluster)
    by_op, by_phase, by_group = (defaultdict[str, float](float) for _ in range(3))
    host = free = 0.0  # until when the host launches, and the device computes
    times: dict[tuple[object, ...], float] = {}
    ends: dict[int, tuple[float, str]] = {}

    def wait(number: int) -> None:
        nonlocal free
        end, group = ends.pop(number, (0.0, ""))
        if end > free:
            by_group[group] += end - free
            found.exposed += end - free
            free = end

    for entry in entries:
        if isinstance(entry, Operation):
            key = (entry.op, entry.which, entry.cost, entry.dtype, entry.launches)
            if (taken := times.get(key)) is None:
                taken = times[key] = pace.seconds(entry)
            begin = max(free, host + pace.launch * min(1, entry.launches))
            host += pace.launch * entry.launches
            end = max(begin + taken, host)  # of several kernels the last is launched then
            found.launch += end - free - taken
            free = end
            found.compute += taken
            found.kernels += entry.launches
            by_op[entry.op] += taken
            by_phase[entry.phase] += taken
            if seen is not None:
                seen(Span("computing", entry.op, entry.phase, end - taken, end))
        elif isinstance(entry, Begin):
            host += pace.launch
            ready = max([host, free, *(ends[number][0] for number in entry.after if number in ends)])
            stream, seconds = wires.of(entry)
            begin = max(ready, wires.free[stream])
            wires.free[stream] = end = begin + seconds
            ends[entry.number] = end, entry.group
            found.collectives += seconds
            found.sent += entry.sent
            if seen is not None and seconds:
                seen(Span(stream, f"{entry.kind}, {entry.group}", entry.phase, begin, end))
            if not pace.overlap and not entry.after:
                wait(entry.number)
        else:
            wait(entry.number)
    for number in list(ends):  # a step has ended when all has arrived
        wait(number)
    found.seconds, found.by_op, found.by_phase, found.exposed_by_group = free, *map(dict, (by_op, by_phase, by_group))
    return found


class _Wires:
    """Which wire a collective takes, and for how long; each carries one after another."""

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self.plan, self.cluster = plan, cluster
        self.free: dict[str, float] = defaultdict(float)
        self._known: dict[tuple[str, str, int], tuple[str, float]] = {}

    def of(self, entry: Begin) -> tuple[str, float]:
        """Return the wire of a collective, and the seconds that it takes."""
        key = entry.kind, entry.group, entry.sent
        if key not in self._known:
            where = placement(self.cluster, self.plan, entry.group)
            seconds = collective_seconds(cast(Kind, entry.kind), entry.sent, where, self.cluster)
            self._known[key] = BETWEEN if where.nodes > 1 else WITHIN, seconds
        return self._known[key]


def placement(cluster: Cluster, plan: Plan, group: str) -> Placement:
    """Return where the ranks of a plan's group are; "node" and "nodes" are the two groups of hierarchical sums."""
    if group in get_args(GroupName):
        return place(cluster, plan.data, plan.axial, plan.branch, cast(GroupName, group))
    each = max(1, cluster.per_node // (plan.axial * plan.branch))  # data ranks of a node
    if group == "node":
        return Placement(each, each)
    return Placement(plan.data // each, 1, cluster.per_node)

