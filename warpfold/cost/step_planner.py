"""Choose how a training runs on the ranks of a cluster: who shares what, what is computed again, how gradients travel.

Time is that of a whole step (cost/step_seconds.py), memory what the code itself holds (cost/memory.py).  What a rank
holds hardly depends on how many have other examples, so few estimates of memory serve thousands of ranks.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

from warpfold.cost.gradient_traffic import data_ranks_on_node
from warpfold.cost.job import Job
from warpfold.cost.links import Cluster
from warpfold.cost.machine import Machine
from warpfold.cost.memory import MemoryEstimate
from warpfold.cost.plan_words import describe_plan
from warpfold.cost.planner import (
    CHOSEN_IN_TRAINING,
    Considered,
    NothingFitsError,
    estimate,
    lacking,
    most_kept,
    needed_bytes,
    possible,
)
from warpfold.cost.rates import Rates
from warpfold.cost.seconds import parameters
from warpfold.cost.step_seconds import ExampleTime, StepTime, alone, example_seconds, step_seconds
from warpfold.data.load.schedule import share_of
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.plan import DTYPES, Plan, Recompute
from warpfold.progress import Progress, no_progress, within

CHOSEN_ON_RANKS = (*CHOSEN_IN_TRAINING, "branch", "triangle", "batch", "sync")  # keys of the plan that are chosen
EQUAL = 1.05  # of two plans whose times differ by less, the simpler one is taken
ALMOST = 1.01  # of two that differ in how things travel alone, or in idle devices, the faster one is not shown then
LOOKED = 1.1  # a plan that takes longer than so many times the best is shown without its memory
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

    alone: seconds of one example on one device by itself, as the plan computes it.
    """

    job: Job
    machine: Machine
    cluster: Cluster
    chosen: Candidate
    alone: float
    considered: tuple[Candidate, ...] = field(repr=False)

    @property
    def plan(self) -> Plan:
        """The plan that was chosen."""
        return self.chosen.plan

    @property
    def idle(self) -> int:
        """How many devices have no part of a step."""
        return self.cluster.ranks - ranks_of(self.plan)

    def efficiency(self, candidate: Candidate) -> float:
        """Return the examples of an hour as a share of what as many devices would do, each alone with one example."""
        return examples_of(self.job) * self.alone / (self.cluster.ranks * candidate.time.total)

    def device_hours(self, candidate: Candidate, examples: int = 10**6) -> float:
        """Return the hours of devices that so many examples take."""
        return self.cluster.ranks * candidate.time.total * examples / examples_of(self.job) / 3600


def examples_of(job: Job) -> int:
    """Return how many examples a step has."""
    return 1 if job.optim is None else job.optim.accumulate


def ranks_of(plan: Plan) -> int:
    """Return how many ranks a plan has."""
    return plan.data * plan.axial * plan.branch


def choose_step(
    job: Job,
    machine: Machine,
    cluster: Cluster,
    rates: Rates,
    fixed: Mapping[str, Any] | None = None,
    sync: Mapping[str, Any] | None = None,
    tell: Progress = no_progress,
) -> StepChoice:
    """Return the fastest plan that fits, the simplest of those that take at most `EQUAL` times as long.

    More ranks never take longer: what cannot be shared out so that it helps leaves some of them idle.
    fixed: keys of the plan that stay as they are; sync: those of `plan.sync`.
    Errors: UserError where nothing fits, saying what would; ValueError for keys that no plan can have together, ranks
    that no plan can use, and rates that do not have the precision.
    """
    search = _Search(job, machine, cluster, rates, fixed or {}, sync or {}, tell)
    looked = search.run()
    fitting = [one for one in looked if one.memory is not None and not one.reason]
    if not fitting:
        raise NothingFitsError(
            job, machine, fixed or {}, [Considered(one.plan, one.memory, None, one.reason) for one in looked], tell
        )
    chosen = simplest(fitting)
    by_itself = example_seconds(job, alone(chosen.plan), rates, None).total
    return StepChoice(job, machine, cluster, chosen, by_itself, tuple(looked))


def simplest(found: Sequence[Candidate]) -> Candidate:
    """Return the simplest of those that take at most `EQUAL` times as long as the fastest.

    Of several the fastest, or one that takes hardly longer and leaves fewer devices idle.
    """
    least = min(one.time.total for one in found)
    near = [one for one in found if one.time.total <= EQUAL * least]
    simple = min(simplicity(one.plan) for one in near)
    near = sorted((one for one in near if simplicity(one.plan) == simple), key=lambda one: one.time.total)
    alike = (one for one in near if one.time.total <= ALMOST * near[0].time.total)
    return max(alike, key=lambda one: ranks_of(one.plan))


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
    """Return the plans that could run a training, in groups that differ in the data ranks alone, most of them first.

    How things travel (`travelling`) is not chosen here, nor `keep_blocks`, as that needs estimates of memory.
    Errors: ValueError for keys that no plan can have together, or ranks that no plan can use.
    """
    groups: list[list[Plan]] = []
    for axial, branch, counts in grids(job, cluster, fixed):
        for way in _ways(fixed):
            for batch in _batches(job, axial * branch, fixed):
                grid = {"axial": axial, "branch": branch, "batch": batch, "sync": SyncConfig(**sync)}
                usable = (data for data in counts if batch == 1 or examples_of(job) % (data * batch) == 0)
                plans = [plan for data in usable if (plan := possible({**grid, **way, "data": data, **fixed}))]
                if plans and plans not in groups:
                    groups.append(plans)
    if not groups:
        Plan(**fixed)  # says what is wrong with the keys themselves
        given = ", ".join(f"plan.{key} = {fixed[key]}" for key in ("data", "axial", "branch", "batch") if key in fixed)
        raise ValueError(
            f"{given or 'the plan'}: {cluster.ranks} ranks cannot share a step of {examples_of(job)} so; data x axial "
            "x branch must be the number of ranks, each data rank needs an example, and data x batch must divide "
            "optim.accumulate"
        )
    return groups


def grids(job: Job, cluster: Cluster, fixed: Mapping[str, Any]) -> Iterator[tuple[int, int, list[int]]]:
    """Yield how ranks may share out the work of a step: axial, branch, and counts of data ranks, most first.

    Of data ranks that have the same largest share the fewest, and those that fill nodes.  More ranks have every grid
    of fewer, too, and need not be slower; some may be left idle, but where the data ranks are given.
    """
    examples, ranks, sizes = examples_of(job), cluster.ranks, [*range(1, 17)]
    while sizes[-1] < ranks:  # then in steps of an eighth at most
        sizes += [2 * size for size in sizes[-8:]]
    counts = {-(-examples // share) for share in range(1, examples + 1)}
    counts |= {*range(cluster.per_node, examples + 1, cluster.per_node)}
    branches = (1,) if job.model.evoformer.outer == "middle" else (1, 2)
    for branch in (fixed["branch"],) if "branch" in fixed else branches:
        for axial in (fixed["axial"],) if "axial" in fixed else (a for a in sizes if a <= job.sizes.residues):
            model = axial * branch
            found = sorted((data for data in counts if data * model <= ranks), reverse=True)
            if "data" in fixed:
                found = [fixed["data"]] if fixed["data"] * model == ranks and fixed["data"] <= examples else []
            if found:
                yield axial, branch, found


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


def _batches(job: Job, model: int, fixed: Mapping[str, Any]) -> Sequence[int]:
    """Return how many examples may go through the model together: single chains, whose clip is that of the step.

    model: ranks that share an example.
    """
    if "batch" in fixed:
        return (fixed["batch"],)
    alike = job.optim is not None and job.optim.clip == "step" and job.model.multimer is None
    return range(1, min(examples_of(job), MOST_TOGETHER) + 1) if alike and model == 1 else (1,)


def travelling(
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
        sync: Mapping[str, Any], tell: Progress,
    ) -> None:  # fmt: skip
        self.job, self.machine, self.cluster, self.rates = job, machine, cluster, rates
        self.fixed, self.sync, self.tell = fixed, sync, tell
        self._examples: dict[Plan, ExampleTime] = {}
        self._times: dict[Plan, StepTime] = {}
        self._left: list[tuple[float, int, Candidate]] = []
        self._number = count()

    def run(self) -> list[Candidate]:
        """Return plans from the fastest on; of those that differ in how things travel alone, the best."""
        groups = rough_plans(self.job, self.cluster, self.fixed, self.sync)
        for done, group in enumerate(groups):
            within(self.tell, 0, 2)(done, len(groups), f"estimating time: {_described(group[0])}")
            self._add_best(group)
        found: list[Candidate] = []
        best = float("inf")
        while self._left:
            _, _, one = heapq.heappop(self._left)
            if one.time.total <= LOOKED * best:
                within(self.tell, 1, 2)(
                    len(found), len(found) + len(self._left) + 1, f"estimating memory: {_described(one.plan)}"
                )
                memory = estimate(self.job, _of_memory(self.job, one.plan), self.machine)
                one = replace(one, memory=memory, reason=lacking(memory, self.machine))
                best = best if one.reason else min(best, one.time.total)
                self._add_tighter(one)
            if one.plan not in [other.plan for other in found]:
                found.append(one)
        return sorted(found, key=lambda one: one.time.total)

    def time(self, plan: Plan) -> StepTime:
        """Return the time of a step."""
        if plan not in self._times:
            # Which of its two ways "auto" takes is measured when the run begins; it never takes a worse one.
            known = replace(plan, sync=replace(plan.sync, strategy="plain")) if plan.sync.strategy == "auto" else plan
            self._times[plan] = step_seconds(self.job, known, self.example(plan), self.rates, self.cluster)
        return self._times[plan]

    def example(self, plan: Plan) -> ExampleTime:
        """Return the time of an example, which is the same however gradients travel."""
        alike = replace(plan, sync=SyncConfig())
        if alike not in self._examples:
            self._examples[alike] = example_seconds(self.job, alike, self.rates, self.cluster)
        return self._examples[alike]

    def _add_best(self, group: Sequence[Plan]) -> None:
        """Add the best of plans that differ in their data ranks, of which the first has the smallest shares."""
        best, plans = float("inf"), list[Plan]()
        for plan in group:
            if share_of(examples_of(self.job), plan.data, 0) * self.example(plan).total > best:
                break  # the others compute for longer, and what travels takes time, too
            ways = [plan, *travelling(self.job, plan, self.cluster, self.fixed, self.sync)]
            best = min([best, *(self.time(way).total for way in ways)])
            plans += ways
        self._add(plans)

    def _add(self, group: Sequence[Plan]) -> None:
        """Add the fastest plan of a group, and the simplest of those that are about as fast."""
        timed = [Candidate(plan, self.time(plan)) for plan in group]
        fastest, other = min(timed, key=lambda one: one.time.total), simplest(timed)
        for one in [other] if other.time.total <= ALMOST * fastest.time.total else [fastest, other]:
            heapq.heappush(self._left, (one.time.total, next(self._number), one))

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
                if tighter is not None and (
                    most := most_kept(self.job, self.machine, _of_memory(self.job, tighter), within(self.tell, 1, 2))
                ):
                    self._add([replace(tighter, keep_blocks=most)])
        can_share = {one.sync.shard_state for one in travelling(self.job, plan, self.cluster, {}, self.sync)} == {0, 1}
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


def _described(plan: Plan) -> str:
    return f"data {plan.data}, {describe_plan(plan, training=True)}"
