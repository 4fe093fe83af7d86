"""Replay a record on a timeline: a stream that computes, and one for each wire, with the overlap that the code has.

The host launches operation after operation, or a graph of them, and does not wait for them.  An operation begins when
those before it have ended and it has been launched.  A collective begins when what it sends exists and its wire is free
(one wire joins the devices of a node, another the nodes); the computing stream waits for it where the code waits for
it, and no sooner.  Measured operations take now more, now less: then a collective begins when the last of its ranks
does, on average.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist
from typing import Literal, cast, get_args

from warpfold.cost.example import Job
from warpfold.cost.links import Cluster, GroupName, Kind, Placement, collective_seconds, place
from warpfold.cost.measured_rates import MEASURED
from warpfold.cost.rates import KERNEL, OURS, OURS_WITHOUT_GRADIENT, TORCH, PassName, Rates
from warpfold.cost.record import RecordedStep, record
from warpfold.cost.recorder import HOST, Begin, Entry, Operation, Phase
from warpfold.data.load.schedule import share_of
from warpfold.parallel.plan import Plan
from warpfold.progress import Progress, no_progress, within

WITHIN, BETWEEN, HOST_WIRE = "within a node", "between nodes", "to host memory and back"
PASS: Mapping[Phase, PassName] = {  # in which torch's own operations are
    "early": "forward", "forward": "training", "recomputed": "training", "backward": "backward", "update": "forward"
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast a rank is: of operations by `rates`, of collectives by `cluster`.

    launch: seconds of the host for each kernel of torch's or collective that no graph replays; ours: for each of our
    kernels, with a gradient to follow and without.  kernel: seconds of the device that a kernel takes whatever it does;
    all are 0 for measured rates, which include them.  overlap: whether collectives are awaited where the code does;
    else where they begin, as in code that blocks.
    """

    rates: Rates
    cluster: Cluster
    launch: float = 0.0
    ours: tuple[float, float] = (0.0, 0.0)
    kernel: float = 0.0
    overlap: bool = True

    @classmethod
    def of(cls, rates: Rates, cluster: Cluster) -> "Pace":
        """Return the pace of a device: rates of a data sheet leave out what launches take."""
        if rates.how == "measured":
            return cls(rates=rates, cluster=cluster)
        ours = OURS, OURS_WITHOUT_GRADIENT
        return cls(rates=rates, cluster=cluster, launch=rates.call, ours=ours, kernel=KERNEL)

    def launching(self, entry: Operation) -> float:
        """Return the seconds of the host for each kernel of an operation."""
        if entry.replayed:
            return 0.0
        return self.launch if _is_torchs(entry) else self.ours[entry.phase == "early"]

    def seconds(self, entry: Operation) -> float:
        """Return the seconds that an operation takes on the device, once it has begun."""
        calls = max(1, entry.launches) if _is_torchs(entry) else 1
        return self.kernel * entry.launches + self.rates.seconds(*_timed_as(entry), entry.cost, calls, entry.dtype)

    def spread(self, entry: Operation) -> float:
        """Return the standard deviation of that, in seconds, from one run or rank to another."""
        return self.seconds(entry) * self.rates.spread(*_timed_as(entry), entry.dtype)


def _is_torchs(entry: Operation) -> bool:
    return entry.op not in MEASURED or entry.op == TORCH


def _timed_as(entry: Operation) -> tuple[str, PassName]:
    """Return the operation and the pass that it is timed as."""
    return (TORCH, PASS[entry.phase]) if _is_torchs(entry) else (entry.op, entry.which)


@dataclass
class ReplayedStep:
    """How long a rank takes: compute + exposed + launch = seconds.

    compute: operations on the device.  exposed: it waits for collectives, which begin when the slowest of their ranks
    does.  launch: it waits for the host.  launching: the host launches.  hidden: collectives that travel while
    something is computed.  by_op, by_phase: seconds of operations.
    """

    seconds: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0
    launch: float = 0.0
    launching: float = 0.0
    collectives: float = 0.0
    sent: float = 0.0
    kernels: float = 0.0
    by_op: dict[str, float] = field(default_factory=dict)
    by_phase: dict[str, float] = field(default_factory=dict)
    exposed_by_group: dict[str, float] = field(default_factory=dict)

    @property
    def hidden(self) -> float:
        """Seconds of collectives that nothing waits for."""
        return max(0.0, self.collectives - self.exposed)


def replay(entries: Iterable[Entry], plan: Plan, pace: Pace) -> ReplayedStep:
    """Compute how long the entries, recorded with this plan, take at this pace."""
    timeline = _Timeline(plan, pace)
    for entry in entries:
        if isinstance(entry, Operation):
            timeline.compute(entry)
        elif isinstance(entry, Begin):
            timeline.begin(entry)
        else:
            timeline.wait(entry.number)
    for number in list(timeline.under_way):  # what nobody waits for: a step has ended when all has arrived
        timeline.wait(number)
    found = timeline.found
    found.seconds, found.launching = timeline.free, timeline.launching
    return found


@dataclass(frozen=True)
class StepTime:
    """Seconds of a fold, or of a training step on the rank that has most to do: of all passes it may have, the mean.

    by_part: where they go, most first: operations, and what is waited for.  hidden: collectives that travel while
    something is computed.  sent: bytes that a rank sends to others.  how: whether the rates were measured on this
    device or modelled from a data sheet.  overhead: seconds of launches, and of kernels beyond their work; unknown, and
    so infinite, for measured rates.  launching: seconds in which the host launches.
    """

    total: float
    by_part: Mapping[str, float] = field(default_factory=dict)
    hidden: float = 0.0
    sent: float = 0.0
    how: Literal["measured", "modelled"] = "modelled"
    overhead: float = math.inf
    launching: float = 0.0


def waiting_for(group: str) -> str:
    """Return the name of the waits for a group's messages among the parts of a step's time."""
    return f"waiting for {group} messages"


def ranks_of(plan: Plan) -> int:
    """Return how many ranks a plan has."""
    return plan.data * plan.axial * plan.branch


def step_time(
    job: Job, plan: Plan, rates: Rates, cluster: Cluster | None = None, tell: Progress = no_progress
) -> StepTime:
    """Return how long a fold takes, or a step of a training, whose recycling passes are drawn anew for each.

    cluster: where the ranks are; None: all on one node, joined by the link of `rates`.
    Errors: NoRateError for rates that do not have the plan's precision.
    """
    ranks = ranks_of(plan)
    cluster = cluster or Cluster(ranks=ranks, per_node=ranks, within=rates.link, between=rates.link)
    halves, pace = record_rank(job, plan, cluster, rates.device != "cpu", tell), Pace.of(rates, cluster)
    passes = range(job.recycles + 1) if job.training else [job.recycles]
    found = [replay_longest(halves, n, plan, pace) for n in passes]
    parts: dict[str, float] = defaultdict(float)
    for one in found:
        waits = {waiting_for(group): seconds for group, seconds in one.exposed_by_group.items()}
        for name, seconds in {**one.by_op, **waits, "the host's launches": one.launch}.items():
            parts[name] += seconds / len(found)
    total, hidden, sent = (sum(getattr(one, x) for one in found) / len(found) for x in ("seconds", "hidden", "sent"))
    ordered = {name: seconds for name, seconds in sorted(parts.items(), key=lambda item: -item[1]) if seconds}
    overhead = math.inf if rates.how == "measured" else sum(one.launch + pace.kernel * one.kernels for one in found)
    launching = sum(one.launching for one in found) / len(found)
    return StepTime(total, ordered, hidden, sent, rates.how, overhead / len(found), launching)


def record_rank(job: Job, plan: Plan, cluster: Cluster, gpu: bool, tell: Progress = no_progress) -> list[RecordedStep]:
    """Record a step of the rank that has most to do, once for each branch of a plan."""
    share = 1 if job.optim is None else share_of(job.optim.accumulate, plan.data, 0)
    return [
        record(job, plan, share, cluster.per_node, gpu, branch, within(tell, branch, plan.branch))
        for branch in range(plan.branch)
    ]


def replay_longest(halves: Sequence[RecordedStep], passes: float, plan: Plan, pace: Pace) -> ReplayedStep:
    """Return the step of the branch that takes longer, with so many passes without gradient.

    The other waits for it in every block.  halves: the recorded steps of a plan's branches; one where there is one.
    """
    steps = [half.step(passes) for half in halves]
    if len(steps) > 1:
        steps.sort(key=lambda entries: replay(entries, plan, pace).seconds)
    return replay(steps[-1], plan, pace)


class _Timeline:
    """Until when the host launches, the device computes and the wires are busy, as entry follows entry."""

    def __init__(self, plan: Plan, pace: Pace) -> None:
        self.pace, self.wires = pace, _Wires(plan, pace)
        self.found, self.host, self.free = ReplayedStep(), 0.0, 0.0
        self.launching = 0.0
        # Of collectives under way: when they end, their group, and how much ranks varied when they began.
        self.under_way: dict[int, tuple[float, str, float]] = {}
        self.variance = 0.0  # of what was computed
        self.met = 0.0  # of that, what came before the last collective began that was waited for: then ranks were even
        self._known: dict[tuple[object, ...], tuple[float, float]] = {}  # seconds, and how much they vary

    def compute(self, entry: Operation) -> None:
        """Do an operation after those before it, and not before it is launched."""
        key = (entry.op, entry.which, entry.cost, entry.dtype, entry.launches, entry.phase)
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self.pace.seconds(entry), self.pace.spread(entry)
        each, spread = known
        taken, launches = entry.times * each, entry.times * entry.launches
        launch = self.pace.launching(entry)
        begin = max(self.free, self.host + launch * min(1, entry.launches))
        self.host += launch * launches
        self.launching += launch * launches
        end = max(begin + taken, self.host)  # of several kernels the last is launched then
        self.variance += entry.times * spread**2
        found = self.found
        found.launch += end - self.free - taken
        found.compute += taken
        found.kernels += launches
        _add(found.by_op, entry.op, taken)
        _add(found.by_phase, entry.phase, taken)
        self.free = end

    def begin(self, entry: Begin) -> None:
        """Have a collective travel as soon as what it sends exists and its wire is free."""
        self.host += 0.0 if entry.replayed else self.pace.launch * entry.times
        before = [self.under_way[number][0] for number in entry.after if number in self.under_way]
        ready = max([self.host, self.free, *before])
        stream, each, ranks = self.wires.of(entry)
        seconds = entry.times * each
        begin = max(ready + latest(ranks) * math.sqrt(self.variance - self.met), self.wires.free[stream])
        self.wires.free[stream] = end = begin + seconds
        self.under_way[entry.number] = end, entry.group, self.variance
        self.found.collectives += seconds
        self.found.sent += 0 if entry.group == HOST else entry.times * entry.sent
        if not self.pace.overlap:
            self.wait(entry.number)

    def wait(self, number: int) -> None:
        """Go on when a collective has ended."""
        end, group, varied = self.under_way.pop(number, (0.0, "", 0.0))
        self.met = max(self.met, varied)
        if end > self.free:
            _add(self.found.exposed_by_group, group, end - self.free)
            self.found.exposed += end - self.free
            self.free = end


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

    def __init__(self, plan: Plan, pace: Pace) -> None:
        self.plan, self.pace = plan, pace
        self.free: dict[str, float] = defaultdict(float)
        self._known: dict[tuple[str, str, int], tuple[str, float, int]] = {}

    def of(self, entry: Begin) -> tuple[str, float, int]:
        """Return the wire of a collective, the seconds that it takes, and of how many ranks it is."""
        key, cluster = (entry.kind, entry.group, entry.sent), self.pace.cluster
        if entry.group == HOST:
            return HOST_WIRE, self.pace.rates.host.seconds(entry.sent), 1
        if key not in self._known:
            where = placement(cluster, self.plan, entry.group)
            seconds = collective_seconds(cast(Kind, entry.kind), entry.sent, where, cluster)
            self._known[key] = BETWEEN if where.nodes > 1 else WITHIN, seconds, where.ranks
        return self._known[key]


def data_ranks_on_node(plan: Plan, cluster: Cluster) -> int | None:
    """Return how many ranks that add up the same numbers are on each node; None where hierarchical sums cannot be.

    As `exchange.make_hierarchical` asks: several nodes with several of them each.
    """
    each, more = divmod(cluster.per_node, plan.axial * plan.branch)
    return None if more or not 1 < each < plan.data or plan.data % each else each


def placement(cluster: Cluster, plan: Plan, group: str) -> Placement:
    """Return where the ranks of a plan's group are; "node" and "nodes" are the two groups of hierarchical sums."""
    if group in get_args(GroupName):
        return place(cluster, plan.data, plan.axial, plan.branch, cast(GroupName, group))
    each = max(1, cluster.per_node // (plan.axial * plan.branch))  # data ranks of a node
    if group == "node":
        return Placement(each, each)
    return Placement(plan.data // each, 1, cluster.per_node)
