"""Replay a record on a timeline with a compute stream and one stream per wire, with the overlap of the code.

The host launches operations, or graphs of them, without waiting for them. An operation begins when the previous ones
have ended and it has been launched. A collective begins when its input exists and its wire is free. One wire joins the
devices of a node, another the nodes. The compute stream waits for a collective where the code waits for it. The times
of measured operations vary, so a collective begins when the slowest of its ranks arrives, on average.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist, fmean
from typing import Literal, cast

from warpfold.cost.example import Job
from warpfold.cost.links import Cluster, GroupName, Kind, collective_seconds, place
from warpfold.cost.measured_rates import MEASURED
from warpfold.cost.rates import KERNEL, OURS, OURS_WITHOUT_GRADIENT, TORCH, PassName, Rates
from warpfold.cost.record import RecordedStep, record
from warpfold.cost.recorder import HOST, Begin, Entry, Operation, Phase
from warpfold.data.load.schedule import share_of
from warpfold.parallel.plan import Plan

WITHIN, BETWEEN, HOST_WIRE = "within a node", "between nodes", "to host memory and back"
# The pass as which torch's own operations are timed, by phase.
PASS: Mapping[Phase, PassName] = {
    "early": "forward", "forward": "training", "recomputed": "training", "backward": "backward", "update": "forward"
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Speed of a rank: `rates` for operations, `cluster` for collectives.

    launch: host seconds per torch kernel or collective outside of graphs. ours: host seconds per kernel of ours, in
    passes with and without gradients. kernel: device seconds that any kernel takes. These three are 0 for measured
    rates, which include them.
    overlap: wait for collectives where the code waits; otherwise where they begin, as in blocking code.
    """

    rates: Rates
    cluster: Cluster
    launch: float = 0.0
    ours: tuple[float, float] = (0.0, 0.0)
    kernel: float = 0.0
    overlap: bool = True

    @classmethod
    def of(cls, rates: Rates, cluster: Cluster) -> "Pace":
        """Create the pace of a device. Rates of a data sheet do not include launches, so their times are added."""
        if rates.how == "measured":
            return cls(rates=rates, cluster=cluster)
        ours = OURS, OURS_WITHOUT_GRADIENT
        return cls(rates=rates, cluster=cluster, launch=rates.call, ours=ours, kernel=KERNEL)

    def launching(self, entry: Operation) -> float:
        """Return the host seconds per kernel of an operation."""
        if entry.replayed:
            return 0.0
        return self.launch if _is_torchs(entry) else self.ours[entry.phase == "early"]

    def seconds(self, entry: Operation) -> float:
        """Return the device seconds of an operation."""
        calls = max(1, entry.launches) if _is_torchs(entry) else 1
        return self.kernel * entry.launches + self.rates.seconds(*_timed_as(entry), entry.cost, calls, entry.dtype)

    def spread(self, entry: Operation) -> float:
        """Return the standard deviation of an operation's seconds between runs or ranks."""
        return self.seconds(entry) * self.rates.spread(*_timed_as(entry), entry.dtype)


def _is_torchs(entry: Operation) -> bool:
    return entry.op not in MEASURED or entry.op == TORCH


def _timed_as(entry: Operation) -> tuple[str, PassName]:
    """Return the operation and pass whose rate applies to an entry."""
    return (TORCH, PASS[entry.phase]) if _is_torchs(entry) else (entry.op, entry.which)


@dataclass
class ReplayedStep:
    """Times of a rank in seconds: compute + exposed + launch = seconds.

    compute: operations on the device. exposed: the device waits for collectives. launch: the device waits for launches.
    launching: the host launches. collectives: total of the collectives. hidden: collectives that overlap with
    computation. sent: bytes. kernels: number of launches. by_op, by_phase: seconds of operations.
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
        """Seconds of collectives for which the device does not wait."""
        return max(0.0, self.collectives - self.exposed)


def replay(entries: Iterable[Entry], plan: Plan, pace: Pace) -> ReplayedStep:
    """Compute the times of the entries, which were recorded with this plan, at this pace."""
    timeline = _Timeline(plan, pace)
    for entry in entries:
        if isinstance(entry, Operation):
            timeline.compute(entry)
        elif isinstance(entry, Begin):
            timeline.begin(entry)
        else:
            timeline.wait(entry.number)
    # A step ends when all collectives have ended, including those without a wait.
    for number in list(timeline.in_flight):
        timeline.wait(number)
    timeline.times.seconds = timeline.free
    return timeline.times


@dataclass(frozen=True)
class StepTime:
    """Seconds of a fold, or of a training step on the rank with most work, as the mean over the numbers of passes.

    by_part: operations and waits in descending order of their seconds. hidden: collectives that overlap with
    computation. sent: bytes that a rank sends to others. how: whether the rates were measured on this device or
    modelled from a data sheet. overhead: seconds of launches and of kernels' fixed times; infinite for measured rates,
    for which it is unknown. launching: seconds in which the host launches.
    """

    total: float
    by_part: Mapping[str, float] = field(default_factory=dict)
    hidden: float = 0.0
    sent: float = 0.0
    how: Literal["measured", "modelled"] = "modelled"
    overhead: float = math.inf
    launching: float = 0.0


def waiting_for(group: str) -> str:
    """Return the key of the waits for a group's messages in `StepTime.by_part`."""
    return f"waiting for {group} messages"


def ranks_of(plan: Plan) -> int:
    """Return the number of ranks of a plan."""
    return plan.data * plan.axial * plan.branch


def step_time(job: Job, plan: Plan, rates: Rates, cluster: Cluster | None = None) -> StepTime:
    """Estimate the time of a fold, or of a training step, whose number of recycling passes is random.

    cluster: placement of the ranks; None means a single node with the link of `rates`.
    Raises NoRateError if the rates do not include the plan's precision.
    """
    ranks = ranks_of(plan)
    cluster = cluster or Cluster(ranks=ranks, per_node=ranks, within=rates.link, between=rates.link)
    pace, gpu = Pace.of(rates, cluster), rates.device != "cpu"
    # The step of the rank with most work, once for each branch
    share = 1 if job.optim is None else share_of(job.optim.accumulate, plan.data, 0)
    halves = [record(job, plan, share, cluster.per_node, gpu, branch) for branch in range(plan.branch)]
    passes = range(job.recycles + 1) if job.training else [job.recycles]
    steps = [replay_longest(halves, n, plan, pace) for n in passes]
    parts: dict[str, float] = defaultdict(float)
    for step in steps:
        waits = {waiting_for(group): seconds for group, seconds in step.exposed_by_group.items()}
        for name, seconds in {**step.by_op, **waits, "the host's launches": step.launch}.items():
            parts[name] += seconds / len(steps)
    ordered = {name: seconds for name, seconds in sorted(parts.items(), key=lambda item: -item[1]) if seconds}
    overhead = math.inf if rates.how == "measured" else fmean(x.launch + pace.kernel * x.kernels for x in steps)
    total, hidden, sent, launching = (
        fmean(getattr(step, name) for step in steps) for name in ("seconds", "hidden", "sent", "launching")
    )
    return StepTime(total, ordered, hidden, sent, rates.how, overhead, launching)


def replay_longest(halves: Sequence[RecordedStep], passes: float, plan: Plan, pace: Pace) -> ReplayedStep:
    """Replay the slower branch of a step with a number of passes without gradients.

    The other branch waits for it in every block. halves: recorded steps of the plan's branches.
    """
    steps = [half.step(passes) for half in halves]
    if len(steps) > 1:
        steps.sort(key=lambda entries: replay(entries, plan, pace).seconds)
    return replay(steps[-1], plan, pace)


class _Timeline:
    """Times until which the host launches, the device computes and the wires are busy, updated entry by entry."""

    def __init__(self, plan: Plan, pace: Pace) -> None:
        self.plan, self.pace, self.times = plan, pace, ReplayedStep()
        self.host, self.free, self.wire_free = 0.0, 0.0, defaultdict[str, float](float)
        # Collectives in flight: their end, their group, and the variance of the computation when they began.
        self.in_flight: dict[int, tuple[float, str, float]] = {}
        # The variance of the computation so far, and that before the last collective with a wait, which aligned the
        # ranks.
        self.variance = self.aligned_variance = 0.0
        # Seconds of operations with their standard deviations; wire, seconds and ranks of collectives.
        self._operations: dict[tuple[object, ...], tuple[float, float]] = {}
        self._collectives: dict[tuple[str, str, int], tuple[str, float, int]] = {}

    def compute(self, entry: Operation) -> None:
        """Run an operation after the previous ones, and after its launch."""
        key = (entry.op, entry.which, entry.cost, entry.dtype, entry.launches, entry.phase)
        if key not in self._operations:
            self._operations[key] = self.pace.seconds(entry), self.pace.spread(entry)
        operation_seconds, spread = self._operations[key]
        duration, launches = entry.times * operation_seconds, entry.times * entry.launches
        launch = self.pace.launching(entry)
        begin = max(self.free, self.host + launch * min(1, entry.launches))
        self.host += launch * launches
        # The last of several kernels cannot end before it was launched.
        end = max(begin + duration, self.host)
        self.variance += entry.times * spread**2
        times = self.times
        times.launching += launch * launches
        times.launch += end - self.free - duration
        times.compute += duration
        times.kernels += launches
        times.by_op[entry.op] = times.by_op.get(entry.op, 0.0) + duration
        times.by_phase[entry.phase] = times.by_phase.get(entry.phase, 0.0) + duration
        self.free = end

    def begin(self, entry: Begin) -> None:
        """Start a collective as soon as its input exists and its wire is free."""
        self.host += 0.0 if entry.replayed else self.pace.launch * entry.times
        before = [self.in_flight[number][0] for number in entry.after if number in self.in_flight]
        ready = max([self.host, self.free, *before])
        wire, wire_seconds, ranks = self._wire(entry)
        seconds = entry.times * wire_seconds
        delay = latest(ranks) * math.sqrt(self.variance - self.aligned_variance)
        self.wire_free[wire] = end = max(ready + delay, self.wire_free[wire]) + seconds
        self.in_flight[entry.number] = end, entry.group, self.variance
        self.times.collectives += seconds
        self.times.sent += 0 if entry.group == HOST else entry.times * entry.sent
        if not self.pace.overlap:
            self.wait(entry.number)

    def _wire(self, entry: Begin) -> tuple[str, float, int]:
        """Return the wire of a collective, its seconds, and its number of ranks."""
        if entry.group == HOST:
            return HOST_WIRE, self.pace.rates.host.seconds(entry.sent), 1
        key, cluster = (entry.kind, entry.group, entry.sent), self.pace.cluster
        if key not in self._collectives:
            plan = self.plan
            placement = place(cluster, plan.data, plan.axial, plan.branch, cast(GroupName, entry.group))
            seconds = collective_seconds(cast(Kind, entry.kind), entry.sent, placement, cluster)
            self._collectives[key] = BETWEEN if placement.nodes > 1 else WITHIN, seconds, placement.ranks
        return self._collectives[key]

    def wait(self, number: int) -> None:
        """Continue when a collective has ended."""
        end, group, variance = self.in_flight.pop(number, (0.0, "", 0.0))
        self.aligned_variance = max(self.aligned_variance, variance)
        if end > self.free:
            waits = self.times.exposed_by_group
            waits[group] = waits.get(group, 0.0) + end - self.free
            self.times.exposed += end - self.free
            self.free = end


@cache
def latest(ranks: int) -> float:
    """Compute the expected delay of the slowest of several ranks, in standard deviations of a normal distribution.

    Source: G. Blom, Statistical Estimates and Transformed Beta-Variables, 1958. The error is at most 5 %, for 2 ranks.
    """
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def data_ranks_on_node(plan: Plan, cluster: Cluster) -> int | None:
    """Return the number of data ranks of one sum on each node; None if hierarchical sums are impossible.

    `exchange.make_hierarchical` needs several nodes with several data ranks each.
    """
    node_ranks, remainder = divmod(cluster.per_node, plan.axial * plan.branch)
    return None if remainder or not 1 < node_ranks < plan.data or plan.data % node_ranks else node_ranks
