"""Replay a record on a timeline: a stream that computes, and one for each wire, with the overlap that the code has.

The host launches operation after operation and does not wait for them.  An operation begins when those before it have
ended and it has been launched.  A collective begins when what it sends exists and its wire is free (one wire joins the
devices of a node, another the nodes); the computing stream waits for it where the code waits for it, and no sooner.
Measured operations take now more, now less: then a collective begins when the last of its ranks does, on average.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist
from typing import cast, get_args

from warpfold.cost.collectives import GroupName, Kind, Placement, collective_seconds, place
from warpfold.cost.links import Cluster
from warpfold.cost.measured_rates import MEASURED
from warpfold.cost.rates import KERNEL, TORCH, PassName, Rates
from warpfold.cost.record import Begin, Entry, Operation, Phase
from warpfold.parallel.plan import Plan

WITHIN, BETWEEN = "within a node", "between nodes"
PASS: Mapping[Phase, PassName] = {  # in which torch's own operations are
    "early": "forward", "forward": "training", "recomputed": "training", "backward": "backward", "update": "forward"
}  # fmt: skip


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
        sheet = rates.how == "modelled"
        return cls(
            rates=rates,
            cluster=cluster,
            launch=0.0 if graphs or not sheet else rates.call,
            kernel=KERNEL if sheet else 0.0,
        )

    def seconds(self, entry: Operation) -> float:
        """Return what an operation takes on the device, once it has begun."""
        if self.rates.how == "measured":
            calls = max(1, entry.launches) if _is_torchs(entry) else 1
            return self.rates.seconds(*_timed_as(entry), entry.cost, calls, entry.dtype)
        return self.kernel * entry.launches + self.rates.tops[entry.dtype].limit(entry.cost) / self.rates.efficiency

    def spread(self, entry: Operation) -> float:
        """Return the standard deviation of that, in seconds, from one run or rank to another."""
        return self.seconds(entry) * self.rates.spread(*_timed_as(entry), entry.dtype)


def _is_torchs(entry: Operation) -> bool:
    return entry.op not in MEASURED or entry.op == TORCH


def _timed_as(entry: Operation) -> tuple[str, PassName]:
    """Return the operation and the pass that it is timed as."""
    return (TORCH, PASS[entry.phase]) if _is_torchs(entry) else (entry.op, entry.which)


@dataclass(frozen=True)
class Span:
    """Something on the timeline, from `begin` to `end` in seconds; stream: "computing", or a wire."""

    stream: str
    name: str
    phase: Phase
    begin: float
    end: float


@dataclass
class ReplayedStep:
    """How long a rank takes: compute + exposed + launch = seconds.

    compute: operations on the device.  exposed: it waits for collectives, which begin when the slowest of their ranks
    does.  launch: it waits for the host.  hidden:
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
    entries: Iterable[Entry], plan: Plan, pace: Pace, seen: Callable[[Span], None] = lambda span: None
) -> ReplayedStep:
    """Return how long the entries take; `seen` is told of everything on the timeline.

    plan: that the entries were recorded of.
    """
    timeline = _Timeline(plan, pace, seen)
    for entry in entries:
        if isinstance(entry, Operation):
            timeline.compute(entry)
        elif isinstance(entry, Begin):
            timeline.begin(entry)
        else:
            timeline.wait(entry.number)
    for number in list(timeline.ends):  # a step has ended when all has arrived
        timeline.wait(number)
    found = timeline.found
    found.seconds = timeline.free
    return found


class _Timeline:
    """Until when the host launches, the device computes and the wires are busy, as entry follows entry."""

    def __init__(self, plan: Plan, pace: Pace, seen: Callable[[Span], None]) -> None:
        self.pace, self.seen, self.wires = pace, seen, _Wires(plan, pace.cluster)
        self.found, self.host, self.free = ReplayedStep(), 0.0, 0.0
        self.ends: dict[int, tuple[float, str]] = {}  # of collectives under way, with their groups
        self.variance = 0.0  # of what was computed since ranks last waited for each other
        self._known: dict[tuple[object, ...], tuple[float, float]] = {}  # seconds, and how much they vary

    def compute(self, entry: Operation) -> None:
        """Do an operation after those before it, and not before it is launched."""
        key = (entry.op, entry.which, entry.cost, entry.dtype, entry.launches, entry.phase)
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self.pace.seconds(entry), self.pace.spread(entry)
        taken, spread = known
        begin = max(self.free, self.host + self.pace.launch * min(1, entry.launches))
        self.host += self.pace.launch * entry.launches
        end = max(begin + taken, self.host)  # of several kernels the last is launched then
        self.variance += spread**2
        found = self.found
        found.launch += end - self.free - taken
        found.compute += taken
        found.kernels += entry.launches
        _add(found.by_op, entry.op, taken)
        _add(found.by_phase, entry.phase, taken)
        self.seen(Span("computing", entry.op, entry.phase, end - taken, end))
        self.free = end

    def begin(self, entry: Begin) -> None:
        """Have a collective travel as soon as what it sends exists and its wire is free."""
        self.host += self.pace.launch
        ready = max([self.host, self.free, *(self.ends[number][0] for number in entry.after if number in self.ends)])
        stream, seconds, ranks = self.wires.of(entry)
        begin = max(ready + latest(ranks) * math.sqrt(self.variance), self.wires.free[stream])
        self.wires.free[stream] = end = begin + seconds
        self.ends[entry.number] = end, entry.group
        self.found.collectives += seconds
        self.found.sent += entry.sent
        self.seen(Span(stream, f"{entry.kind}, {entry.group}", entry.phase, begin, end))
        if not self.pace.overlap:
            self.wait(entry.number)

    def wait(self, number: int) -> None:
        """Go on when a collective has ended."""
        end, group = self.ends.pop(number, (0.0, ""))
        if end > self.free:
            _add(self.found.exposed_by_group, group, end - self.free)
            self.found.exposed += end - self.free
            self.free, self.variance = end, 0.0


@cache
def latest(ranks: int) -> float:
    """Return by how many standard deviations the last of so many ranks is late, on average, if they vary normally.

    Source: G. Blom, Statistical Estimates and Transformed Beta-Variables, 1958: within 5 % for two, nearer for more.
    """
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def _add(found: dict[str, float], name: str, seconds: float) -> None:
    found[name] = found.get(name, 0.0) + seconds


class _Wires:
    """Which wire a collective takes, and for how long; each carries one after another."""

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self.plan, self.cluster = plan, cluster
        self.free: dict[str, float] = defaultdict(float)
        self._known: dict[tuple[str, str, int], tuple[str, float, int]] = {}

    def of(self, entry: Begin) -> tuple[str, float, int]:
        """Return the wire of a collective, the seconds that it takes, and of how many ranks it is."""
        key = entry.kind, entry.group, entry.sent
        if key not in self._known:
            where = placement(self.cluster, self.plan, entry.group)
            seconds = collective_seconds(cast(Kind, entry.kind), entry.sent, where, self.cluster)
            self._known[key] = BETWEEN if where.nodes > 1 else WITHIN, seconds, where.ranks
        return self._known[key]


def placement(cluster: Cluster, plan: Plan, group: str) -> Placement:
    """Return where the ranks of a plan's group are; "node" and "nodes" are the two groups of hierarchical sums."""
    if group in get_args(GroupName):
        return place(cluster, plan.data, plan.axial, plan.branch, cast(GroupName, group))
    each = max(1, cluster.per_node // (plan.axial * plan.branch))  # data ranks of a node
    if group == "node":
        return Placement(each, each)
    return Placement(plan.data // each, 1, cluster.per_node)
