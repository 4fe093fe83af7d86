"""Choose how a training runs on the ranks of a cluster: who shares what, what is computed again, how gradients travel.

Time is that of a whole step (tune/step_seconds.py), memory what the code itself holds (tune/memory.py).  What a rank
holds hardly depends on how many have other examples, so few estimates of memory serve thousands of ranks.
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.plan import DTYPES, Plan, Recompute
from warpfold.tune.cluster.links import Cluster
from warpfold.tune.gradient_traffic import data_ranks_on_node
from warpfold.tune.job import Job
from warpfold.tune.machine import Machine
from warpfold.tune.memory import MemoryEstimate
from warpfold.tune.planner import (
    CHOSEN_IN_TRAINING,
    Considered,
    NothingFitsError,
    estimate,
    lacking,
    most_kept,
    needed_bytes,
    possible,
)
from warpfold.tune.rates import Rates
from warpfold.tune.seconds import parameters
from warpfold.tune.step_seconds import ExampleTime, StepTime, alone, example_seconds, step_seconds

CHOSEN_ON_RANKS = (*CHOSEN_IN_TRAINING, "branch", "triangle", "batch", "sync")  # keys of the plan that are chosen
EQUAL = 1.05  # of two plans whose times differ by less, the simpler one is taken
ALMOST = 1.01  # of two that differ in how things travel alone, the faster one is not even shown then
LOOKED = 1.25  # a plan that takes longer than so many times the best is shown without its memory
BUCKETS = (0.25, 1.0, 4.0, 16.0, 64.0)  # MiB
MOST_TOGETHER = 16  # examples
ALIKE = 8  # more data ranks than these hold no more, and with `shard_state` little less, than so many
STATE = 16  # bytes per parameter by which a sharded state can be smaller, at most


@dataclass(frozen=True)
class Candidate:
    """A plan of a training on many ranks; memory: None where nobody needed to know.  reason: why it does not fit."""

    plan: Plan
    time: StepTime
    memory: MemoryEstimate | None = None
    reason: str = ""


@dataclass(frozen=True)
class StepChoice:
    """A plan for a training on a cluster, and what it was chosen from, from the fastest on.

    alone: seconds of one example on one device by itself, as the plan computes it.  fewer: where ranks share examples,
    what fewer of them would do that share none, if that is as fast.
    """

    job: Job
    machine: Machine
    cluster: Cluster
    chosen: Candidate
    alone: float
    considered: tuple[Candidate, ...] = field(repr=False)
    fewer: Candidate | None = None

    @property
    def plan(self) -> Plan:
        """The plan that was chosen."""
        return self.chosen.plan

    def efficiency(self, candidate: Candidate) -> float:
        """Return the examples of an hour as a share of what as many devices would do, each alone with one example."""
        return examples_of(self.job) * self.alone / (self.cluster.ranks * candidate.time.total)

    def device_hours(self, candidate: Candidate, examples: int = 10**6) -> float:
        """Return the hours of devices that so many examples take."""
        return self.cluster.ranks * candidate.time.total * examples / examples_of(self.job) / 3600


def examples_of(job: Job) -> int:
    """Return how many examples a step has."""
    return 1 if job.optim is None else job.optim.accumulate


def choose_step(
    job: Job,
    machine: Machine,
    cluster: Cluster,
    rates: Rates,
    fixed: Mapping[str, Any] | None = None,
    sync: Mapping[str, Any] | None = None,
) -> StepChoice:
    """Return the fastest plan that fits, the simplest of those that take at most `EQUAL` times as long.

    fixed: keys of the plan that stay as they are; sync: those of `plan.sync`.
    Errors: UserError where nothing fits, saying what would; ValueError for keys that no plan can have together, ranks
    that no plan can use, and rates that do not have the precision.
    """
    search = _Search(job, machine, cluster, rates, fixed or {}, sync or {})
    looked = search.run()
    fitting = [one for one in looked if one.memory is not None and not one.reason]
    if not fitting:
        raise NothingFitsError(
            job, machine, fixed or {}, [Considered(one.plan, one.memory, None, one.reason) for one in looked]
        )
    least = min(one.time.total for one in fitting)
    near = [one for one in fitting if one.time.total <= EQUAL * least]
    chosen = min(near, key=lambda one: (simplicity(one.plan), one.time.total))
    by_itself = example_seconds(job, alone(chosen.plan), rates, None).total
    return StepChoice(job, machine, cluster, chosen, by_itself, tuple(looked), search.fewer(chosen))


def simplicity(plan: Plan) -> tuple[int, int, int]:
    """Return what orders plans from simple to complicated: how much differs from the default; data, axial, branch."""
    sync, usual = plan.sync, SyncConfig()
    differing = (
        *(plan.axial > 1, plan.branch > 1, plan.batch > 1, plan.triangle != "auto"),
        *(plan.recompute is not None, plan.keep_blocks > 0, plan.offload),
        *(sync.strategy != usual.strategy, sync.shard_state, sync.bucket != usual.bucket),
    )
    return sum(differing), plan.branch, plan.axial


# Which plans there are


def rough_plans(job: Job, cluster: Cluster, fixed: Mapping[str, Any], sync: Mapping[str, Any]) -> list[list[Plan]]:
    """Return the plans that could run a training, in groups that differ in how things travel alone.

    `keep_blocks` is not chosen here, as that needs estimates of memory.
    Errors: ValueError for keys that no plan can have together, or ranks that no plan can use.
    """
    groups: list[list[Plan]] = []
    for grid in grids(job, cluster.ranks, fixed):
        for way in _ways(fixed):
            for batch in _batches(job, grid, fixed):
                keys = {**grid, **way, "batch": batch, "sync": SyncConfig(**sync), **fixed}
                plan = possible(keys)
                if plan is not None and [plan] not in [group[:1] for group in groups]:
                    groups.append([plan, *_travelling(job, plan, cluster, fixed, sync)])
    if not groups:
        Plan(**fixed)  # says what is wrong with the keys themselves
        given = ", ".join(f"plan.{key} = {fixed[key]}" for key in ("data", "axial", "branch", "batch") if key in fixed)
        raise ValueError(
            f"{given or 'the plan'}: {cluster.ranks} ranks cannot share a step of {examples_of(job)} so; "
            "data x axial x branch must be the number of ranks, and data x batch divide optim.accumulate"
        )
    return groups


def grids(job: Job, ranks: int, fixed: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """Yield how ranks may share out the work of a step: all of them have something to do, and equally much."""
    branches = (1,) if job.model.evoformer.outer == "middle" else (1, 2)
    for branch in (fixed["branch"],) if "branch" in fixed else branches:
        for axial in range(1, ranks // branch + 1):
            data, rest = divmod(ranks, axial * branch)
            grid = {"data": data, "axial": axial, "branch": branch}
            agrees = all(fixed.get(key, size) == size for key, size in grid.items())
            useful = axial <= job.sizes.residues or "axial" in fixed
            if rest == 0 and examples_of(job) % data == 0 and agrees and useful:
                yield grid


def _ways(fixed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield everything kept; blocks or layers recomputed; what these keep in host memory."""
    found: list[dict[str, Any]] = [
        {"recompute": kind, "offload": offload}
        for offload in (False, True)
        for kind in (None, "block", "layer")
        if kind or not offload
    ]
    seen: list[dict[str, Any]] = []
    for way in found:
        own = {key: fixed.get(key, value) for key, value in way.items()}
        if own not in seen:
            seen.append(own)
            yield own


def _batches(job: Job, grid: Mapping[str, int], fixed: Mapping[str, Any]) -> Sequence[int]:
    """Return how many examples may go through the model together: single chains, whose clip is that of the step."""
    share = examples_of(job) // grid["data"]
    if "batch" in fixed:
        return (fixed["batch"],) if share % fixed["batch"] == 0 else ()
    alike = job.optim is not None and job.optim.clip == "step" and job.model.multimer is None
    if not alike or grid["axial"] * grid["branch"] > 1:
        return (1,)
    return [size for size in range(1, min(share, MOST_TOGETHER) + 1) if share % size == 0]


def _travelling(
    job: Job, plan: Plan, cluster: Cluster, fixed: Mapping[str, Any], sync: Mapping[str, Any]
) -> Iterator[Plan]:
    """Yield the plans that differ from one in how products are cut and how gradients travel."""
    products = [plan.triangle]
    if "triangle" not in fixed and plan.axial > 1:
        itemsize, model = DTYPES[plan.precision].itemsize, job.model
        channels = model.evoformer.pair.c_triangle
        cut = plan.by_channels(job.sizes.residues, plan.axial, channels, model.c_z, itemsize)
        products.append("gather" if cut else "channels")
    compressed = job.optim is not None and job.optim.compression.method != "none"
    strategies: list[Literal["plain", "hierarchical"]] = ["plain"]
    if data_ranks_on_node(plan, cluster) is not None and not compressed:
        strategies.append("hierarchical")
    shards = [False, True] if plan.data > 1 and not compressed else [False]
    size = parameters(job.model) * 4 / 2**20
    buckets = [b for b in BUCKETS if b < size or b == SyncConfig.bucket]
    for triangle in products:
        for strategy in [sync["strategy"]] if "strategy" in sync else strategies:
            for shard in [sync["shard_state"]] if "shard_state" in sync else shards:
                for bucket in [sync["bucket"]] if "bucket" in sync else buckets:
                    own = replace(plan.sync, strategy=strategy, shard_state=shard, bucket=bucket)
                    if (other := replace(plan, triangle=triangle, sync=own)) != plan:
                        yield other


# Which of them fit, and how long they take


class _Search:
    """Look at plans from the fastest on, until enough of them have been found to fit."""

    def __init__(
        self, job: Job, machine: Machine, cluster: Cluster, rates: Rates, fixed: Mapping[str, Any],
        sync: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.job, self.machine, self.cluster, self.rates = job, machine, cluster, rates
        self.fixed, self.sync = fixed, sync
        self._examples: dict[Plan, ExampleTime] = {}
        self._left: list[tuple[float, int, Candidate]] = []
        self._number = count()

    def run(self) -> list[Candidate]:
        """Return plans from the fastest on; of those that differ in how things travel alone, the best."""
        for group in rough_plans(self.job, self.cluster, self.fixed, self.sync):
            self._add(group)
        found: list[Candidate] = []
        best = float("inf")
        while self._left:
            _, _, one = heapq.heappop(self._left)
            if one.time.total <= LOOKED * best:
                memory = estimate(self.job, _of_memory(self.job, one.plan), self.machine)
                one = replace(one, memory=memory, reason=lacking(memory, self.machine))
                best = best if one.reason else min(best, one.time.total)
                self._add_tighter(one)
            if one.plan not in [other.plan for other in found]:
                found.append(one)
        return sorted(found, key=lambda one: one.time.total)

    def time(self, plan: Plan) -> StepTime:
        """Return the time of a step; the example's is the same however gradients travel."""
        example = replace(plan, sync=SyncConfig())
        if example not in self._examples:
            self._examples[example] = example_seconds(self.job, example, self.rates, self.cluster)
        # Which of its two ways "auto" takes is measured when the run begins; it never takes a worse one.
        known = replace(plan, sync=replace(plan.sync, strategy="plain")) if plan.sync.strategy == "auto" else plan
        return step_seconds(self.job, known, self._examples[example], self.rates, self.cluster)

    def fewer(self, chosen: Candidate) -> Candidate | None:
        """Return the plan of as many ranks as have other examples, if it fits and takes no longer than the chosen one.

        A cluster that is given is to be used: so this is not chosen, and said.
        """
        ranks = chosen.plan.data
        if ranks == self.cluster.ranks:
            return None
        cluster = replace(self.cluster, ranks=ranks, per_node=math.gcd(ranks, self.cluster.per_node))
        for way in _ways(self.fixed):
            plan = possible({**vars(chosen.plan), "axial": 1, "branch": 1, "triangle": "auto", "keep_blocks": 0, **way})
            if plan is not None and not lacking(
                memory := estimate(self.job, _of_memory(self.job, plan), self.machine), self.machine
            ):
                example = example_seconds(self.job, plan, self.rates, cluster)
                time = step_seconds(self.job, plan, example, self.rates, cluster)
                return Candidate(plan, time, memory) if time.total <= chosen.time.total else None
        return None

    def _add(self, group: Sequence[Plan]) -> None:
        """Add the fastest plan of a group, and the simplest of those that are about as fast."""
        timed = [(plan, self.time(plan)) for plan in group]
        fastest = min(timed, key=lambda found: found[1].total)
        near = [(plan, time) for plan, time in timed if time.total <= EQUAL * fastest[1].total]
        simplest = min(near, key=lambda found: (simplicity(found[0]), found[1].total))
        for plan, time in [simplest] if simplest[1].total <= ALMOST * fastest[1].total else [fastest, simplest]:
            heapq.heappush(self._left, (time.total, next(self._number), Candidate(plan, time)))

    def _add_tighter(self, one: Candidate) -> None:
        """Add what follows from a plan that was looked at: as many blocks kept as fit; a state that is shared out."""
        plan, memory = one.plan, one.memory
        assert memory is not None
        given = "recompute" in self.fixed
        if "keep_blocks" not in self.fixed and not plan.keep_blocks and not plan.offload:
            kinds: tuple[Recompute, ...] = ("block", "layer")
            if plan.recompute is not None:
                kinds = (plan.recompute,) if given else ()
            elif given or not one.reason:
                kinds = ()
            for kind in kinds:
                tighter = possible({**vars(plan), "recompute": kind})
                if tighter is not None and (most := most_kept(self.job, self.machine, _of_memory(self.job, tighter))):
                    self._add([replace(tighter, keep_blocks=most)])
        can_share = {one.sync.shard_state for one in _travelling(self.job, plan, self.cluster, {}, self.sync)} == {0, 1}
        lacks = needed_bytes(memory, self.machine) - self.machine.free
        if one.reason and can_share and not plan.sync.shard_state and lacks < STATE * parameters(self.job.model):
            self._add([replace(plan, sync=replace(plan.sync, shard_state=True))])


def _of_memory(job: Job, plan: Plan) -> Plan:
    """Return a plan of few ranks that holds as much on each, or hardly more: so one estimate serves many plans.

    But what topk sends is gathered from all of them.
    """
    few = ALIKE if plan.sync.shard_state else 2
    if job.optim is not None and job.optim.compression.method == "topk":
        few = plan.data
    return replace(plan, data=min(plan.data, few), sync=SyncConfig(shard_state=plan.sync.shard_state))
