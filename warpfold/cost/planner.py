"""Choose how a job runs, before it runs: what each plan needs and how long it takes, and the fastest that fits.

Memory and time are read from a record of the code itself (cost/record.py).  A training plan that keeps everything on
each device, with a whole share of the examples, is taken at once.  Otherwise grids are compared, from the one on that
could be fastest at best.  For each grid the ways to run an example are tried, from the one that computes least to the
tightest, until one fits.  One device is a cluster of one.  Keys of the plan that are given stay as they are; precision
is never among those chosen.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from warpfold.cost.example import Job
from warpfold.cost.links import Cluster, one_node
from warpfold.cost.machine import Machine, in_gb
from warpfold.cost.memory import MemoryEstimate, estimate_memory, with_margin
from warpfold.cost.rates import NoRateError, Rates
from warpfold.cost.replay import StepTime, data_ranks_on_node, ranks_of, step_time, waiting_for
from warpfold.data.load.schedule import share_of
from warpfold.device import slow_precision
from warpfold.errors import UserError
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.execution import TILE
from warpfold.parallel.plan import CACHED, DTYPES, Plan, Recompute
from warpfold.progress import Progress, as_time, no_progress

SLICES = (4, 32, 256)  # into how many slices z is cut
FEWEST = 4  # rows of a slice: with fewer, calls cost more than what they compute
# Estimates are no better than this: of plans whose times differ by less, the one with the fewest busy devices is taken,
# then the simplest.
TIE_TOLERANCE = 1.05
GAIN_TOLERANCE = 1.01  # more ranks that share an example gain nothing if they are not faster by this
STEPS = 16  # sizes between a power of two and the next for which memory is estimated: at most 6 % too many residues
NEARLY = 1.3  # what needs so many times what is free, for rounded sizes, does not fit for its own sizes either
LOOKS = 5  # estimates, at most, that the longest protein is looked for with
NEAR = 1.03  # it is known as well as this
BUCKETS = (1.0, 4.0, 64.0)  # MiB, beside the default
TOGETHER = (2, 4, 8, 16)  # examples that go through the model together
ALIKE = 8  # more data ranks than these hold no more, and with `shard_state` little less, than so many
CHOSEN = ("data", "axial", "chunk", "in_place", "offload")  # keys of the plan of a prediction that are chosen
CHOSEN_IN_TRAINING = (
    *("data", "axial", "branch", "batch", "recompute", "keep_blocks", "offload", "triangle", "sync", "sizes"),
)
# To which axes are padded where graphs replay passes: some 24 shapes of a monomer's examples.
SIZES = 2


@dataclass(frozen=True)
class Candidate:
    """A plan that was looked at; memory, time: None where nobody needed to know.  reason: why it does not fit."""

    plan: Plan
    memory: MemoryEstimate | None = None
    time: StepTime | None = None
    reason: str = ""


@dataclass(frozen=True)
class Choice:
    """A plan for a job, and what it was chosen from, in the order in which it was looked at.

    chosen: its memory is that of the job, or of one a little larger; its time None where no rates are known, or where
    the plan was beyond doubt.  alone: seconds of one example on one device by itself, everything at once.  computed:
    seconds of a step if what the trunk makes were not kept, where it is.  skipped: plans that were not looked at,
    with the seconds that they take at least.
    """

    job: Job
    machine: Machine
    cluster: Cluster
    chosen: Candidate
    considered: tuple[Candidate, ...] = field(repr=False)
    alone: float | None = None
    computed: float | None = None
    skipped: tuple[tuple[Plan, float], ...] = ()

    @property
    def plan(self) -> Plan:
        return self.chosen.plan

    @property
    def memory(self) -> MemoryEstimate:
        assert self.chosen.memory is not None
        return self.chosen.memory

    @property
    def trivially_fits(self) -> bool:
        """Whether the job is so small that nothing had to be estimated."""
        return all(one.memory is None for one in self.considered)

    @property
    def idle(self) -> int:
        """How many devices have no part of a step."""
        return self.machine.devices - ranks_of(self.plan)

    def efficiency(self, one: Candidate) -> float | None:
        """Return the examples of an hour as a share of what as many devices would do, each alone with one example."""
        if self.alone is None or one.time is None:
            return None
        return examples_of(self.job) * self.alone / (self.machine.devices * one.time.total)

    def device_hours(self, one: Candidate, examples: int = 10**6) -> float | None:
        """Return the hours of devices that so many examples take."""
        if one.time is None:
            return None
        return self.machine.devices * one.time.total * examples / examples_of(self.job) / 3600


def examples_of(job: Job) -> int:
    """Return how many examples a step has; a prediction: one."""
    return 1 if job.optim is None else job.optim.accumulate


@lru_cache(maxsize=64)
def parameters(model: ModelConfig) -> int:
    """Return how many numbers a model learns."""
    with torch.device("meta"):
        return sum(p.numel() for p in AlphaFold(model).parameters())


def choose(
    job: Job,
    machine: Machine,
    fixed: Mapping[str, Any] | None = None,
    sync: Mapping[str, Any] | None = None,
    cluster: Cluster | None = None,
    rates: Rates | None = None,
    every: bool = False,
    examples: int = 1,
    tell: Progress = no_progress,
) -> Choice:
    """Return the fastest plan that fits; of equally fast ones that with the fewest busy devices, then the simplest.

    More devices never take longer: a training leaves some idle where sharing its work out to them gains nothing.
    fixed: keys of the plan that stay as they are; sync: those of `plan.sync`.  cluster: how devices are joined; None:
    all on one node.  rates: how fast they are; None: as the machine says.
    every: look at all ways to run an example, not only until one fits, and for these very sizes; else what needs little
    by a bound is run whole, without an estimate.  examples: how many of them there are to fold; devices that do not
    share one fold others.
    Errors: UserError where nothing fits, saying what would; ValueError for keys that no plan can have together, and
    devices that no plan can use.
    """
    cluster, fixed = cluster or one_node(machine.devices), limited(job, fixed or {})
    search = _Search(job, machine, cluster, fixed, sync or {}, rates, every, examples, tell)
    plans = search.plans
    if not every and (bound := _trivial_fit(job, plans, machine, examples)) is not None:
        return Choice(job, machine, cluster, Candidate(plans[0], bound), tuple(map(Candidate, plans)))
    bounds = [(plan, lower_bound(job, plan)) for plan in plans]
    if all(why_not_fit(bound, machine) for _, bound in bounds):  # nor is it of interest how long they take
        far = [Candidate(plan, bound, None, why_not_fit(bound, machine)) for plan, bound in bounds]
        raise NothingFitsError(job, machine, far, tell)
    search.run()
    fitting = [one for one in search.looked if one.memory is not None and not one.reason]
    if not fitting:
        raise NothingFitsError(job, machine, search.looked, tell)
    chosen = search.simplest(fitting)
    seen = {one.plan for one in search.looked}
    grid = (chosen.plan.data, chosen.plan.axial, chosen.plan.branch)
    tighter_ones = [p for p in plans if p not in seen and (p.data, p.axial, p.branch) == grid]
    looked = tuple(search.looked) + tuple(map(Candidate, () if job.learns and machine.devices > 1 else tighter_ones))
    computed = None
    if job.keeps_trunk(chosen.plan):
        found = search.timed(chosen.plan, replace(job, finetune=replace(job.finetune, trunk="computed")), cluster)
        computed = None if found is None else found.total
    return Choice(job, machine, cluster, chosen, looked, search.alone, computed, tuple(search.skipped))


def limited(job: Job, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a plan that stay, with those that what is trained decides where they are not given."""
    if not (job.learns and job.finetune.freezes):
        return dict(fixed)
    alone = {"axial": 1, "batch": 1} if job.keeps_trunk(Plan()) else {}
    return {"branch": 1, **alone, **fixed}


def tighter(choice: Choice) -> Choice | None:
    """Return the next plan that needs less memory, where one ran out of it nevertheless; None: none.

    It is in `considered` behind the plan that was chosen.
    """
    plans = [one.plan for one in choice.considered]
    now = estimate(choice.job, choice.plan, choice.machine)
    for one in choice.considered[plans.index(choice.plan) + 1 :]:
        memory = one.memory or estimate(choice.job, one.plan, choice.machine)
        if memory.peak < now.peak:
            return replace(choice, chosen=replace(one, memory=memory))
    return None


# Which plans there are


def candidates(
    job: Job, machine: Machine, fixed: Mapping[str, Any], sync: Mapping[str, Any] | None = None,
    cluster: Cluster | None = None,
) -> list[Plan]:  # fmt: skip
    """Return the plans that could run a job, by grid, and of each the one that computes least first.

    None has another value of a fixed key.  How gradients travel and examples go together (`variants`) is not chosen
    here, nor `keep_blocks`, which takes estimates of memory.  Where graphs may replay passes, shapes are made few.
    Errors: ValueError for keys that no plan can have together, or devices that no plan can use.
    """
    found: dict[Plan, None] = {}
    fixed = limited(job, fixed)
    for data, axial, branch in grids(job, cluster or one_node(machine.devices), fixed):
        for way in _training_ways(data, fixed, sync or {}) if job.training else _prediction_ways(job, machine):
            keys: dict[str, Any] = {"data": data, "axial": axial, "branch": branch}
            keys |= {key: value for key, value in way.items() if key not in fixed} | dict(fixed)
            if sync and "sync" not in way:
                keys["sync"] = SyncConfig(**sync)
            if not job.training and "in_place" not in fixed:
                keys["in_place"] = keys.get("chunk") is not None
            plan = possible(keys)
            if plan is None or plan.unsupported_on(machine.kind):
                continue
            if examples_of(job) % (plan.data * plan.batch if plan.batch > 1 else 1):
                continue
            few = replace(plan, sizes=SIZES)
            if "sizes" not in fixed and job.learns:
                plan = few if few.why_no_graphs(machine.kind) is None else plan
            if job.training or plan.in_place or not plan.offload:
                found[plan] = None
    if found:
        return list(found)
    if reason := Plan(**fixed).unsupported_on(machine.kind):  # Plan says what is wrong with the keys themselves
        raise ValueError(reason)
    given = ", ".join(f"plan.{key} = {fixed[key]}" for key in ("data", "axial", "branch", "batch") if key in fixed)
    raise ValueError(
        f"{given or 'the plan'}: {machine.devices} ranks cannot share a step of {examples_of(job)} so; data x axial "
        "x branch must be the number of ranks, each data rank needs an example, and data x batch must divide "
        "optim.accumulate"
    )


def possible(keys: Mapping[str, Any]) -> Plan | None:
    """Return the plan of keys that were put together; None where they do not go together."""
    try:
        return Plan(**keys)
    except ValueError:
        return None


def grids(job: Job, cluster: Cluster, fixed: Mapping[str, Any]) -> Iterator[tuple[int, int, int]]:
    """Yield how devices may share out the work, data x axial x branch: first an example each, then more share one.

    A prediction takes all devices.  Of a training's data ranks that have the same largest share there are the fewest,
    and those that fill nodes.  More devices have every grid of fewer, too; some may be left idle, but where the data
    ranks are given.
    """
    examples, ranks = examples_of(job), cluster.ranks
    if not job.training:
        branch = fixed.get("branch", 1)
        for axial in range(1, ranks // branch + 1):
            data, rest = divmod(ranks, axial * branch)
            if rest == 0 and fixed.get("axial", axial) == axial and fixed.get("data", data) == data:
                yield data, axial, branch
        if fixed.get("axial", 1) * branch > ranks:  # as it was asked for, on one device after another
            yield fixed.get("data", 1), fixed.get("axial", 1), branch
        return
    sizes = [*range(1, 17)]
    while sizes[-1] < ranks:  # then in steps of an eighth at most
        sizes += [2 * size for size in sizes[-8:]]
    counts = {-(-examples // share) for share in range(1, examples + 1)}
    counts |= {*range(cluster.per_node, examples + 1, cluster.per_node)}
    branches = (1,) if job.model.evoformer.outer == "middle" else (1, 2)
    for branch in (fixed["branch"],) if "branch" in fixed else branches:
        for axial in (fixed["axial"],) if "axial" in fixed else [a for a in sizes if a <= job.sizes.residues]:
            found = sorted((data for data in counts if data * axial * branch <= ranks), reverse=True)
            if "data" in fixed:
                whole = fixed["data"] * axial * branch == ranks and fixed["data"] <= examples
                found = [fixed["data"]] if whole else []
            yield from ((data, axial, branch) for data in found)


def _prediction_ways(job: Job, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield whole; in more and more slices, in place; z in host memory."""
    residues = rounded(job).sizes.residues
    yield {"chunk": None}
    sizes = {max(FEWEST, math.ceil(residues / count)) for count in SLICES}
    if machine.kind == "cpu":
        longest = max(job.sizes.residues, job.sizes.sequences)  # a row's logits are the largest temporary
        sizes.add(max(FEWEST, CACHED // (8 * longest**2)))
    chunks = [size for size in sorted(sizes, reverse=True) if size < residues]
    yield from ({"chunk": chunk} for chunk in chunks)
    # To and from a GPU narrower bands of columns would travel in pieces that take longer to ask for than to move.
    least = TILE if machine.kind == "cuda" and residues > TILE else 0
    yield from ({"chunk": max(chunk, least), "offload": True} for chunk in chunks[-1:])


def _training_ways(data: int, fixed: Mapping[str, Any], sync: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield everything kept; layers or blocks recomputed; the state shared out; what is kept in host memory."""
    seen: list[dict[str, Any]] = []
    for kind, shard, offload in (
        *((None, False, False), ("layer", False, False), ("block", False, False)),
        *(("block", True, False), ("layer", False, True), ("block", False, True)),
    ):
        way = {"recompute": fixed.get("recompute", kind), "offload": fixed.get("offload", offload)}
        if shard and data > 1 and "shard_state" not in sync:
            way["sync"] = SyncConfig(**sync, shard_state=True)
        if way not in seen:
            seen.append(way)
            yield way


def variants(
    job: Job, plan: Plan, cluster: Cluster, fixed: Mapping[str, Any], sync: Mapping[str, Any]
) -> Iterator[list[Plan]]:
    """Yield the plans of a training that differ from one in one key: how examples go together, products are cut, and
    gradients travel.
    """
    optim = job.optim
    assert optim is not None
    if "batch" not in fixed and optim.clip == "step" and job.model.multimer is None and plan.axial * plan.branch == 1:
        yield [replace(plan, batch=b) for b in TOGETHER if b != plan.batch and optim.accumulate % (plan.data * b) == 0]
    if "triangle" not in fixed and plan.axial > 1:
        itemsize, model = DTYPES[plan.precision].itemsize, job.model
        channels = model.evoformer.pair.c_triangle
        cut = replace(plan, triangle="auto").by_channels(job.sizes.residues, plan.axial, channels, model.c_z, itemsize)
        yield [replace(plan, triangle="gather" if cut else "channels")]
    compressed = optim.compression.method != "none"
    if "strategy" not in sync and data_ranks_on_node(plan, cluster) is not None and not compressed:
        yield [replace(plan, sync=replace(plan.sync, strategy="hierarchical"))]
    if "shard_state" not in sync and plan.data > 1 and not compressed:
        yield [replace(plan, sync=replace(plan.sync, shard_state=not plan.sync.shard_state))]
    if "bucket" not in sync and ranks_of(plan) > 1:
        yield [replace(plan, sync=replace(plan.sync, bucket=b)) for b in BUCKETS if b * 2**18 < parameters(job.model)]


def simplicity(plan: Plan) -> tuple[int, int, int]:
    """Return the key that sorts plans from simple to complicated: how much differs from the default; branch, axial."""
    sync, usual = plan.sync, SyncConfig()
    differing = (
        *(plan.axial > 1, plan.branch > 1, plan.batch > 1, plan.triangle != "auto", plan.chunk is not None),
        *(plan.recompute is not None, plan.keep_blocks > 0, plan.offload),
        *(sync.strategy != usual.strategy, sync.shard_state, sync.bucket != usual.bucket),
    )
    return sum(differing), plan.branch, plan.axial


# Which of them fit, and how long they take


class _Search:
    """Look at the plans of a job: `looked` has those that were."""

    def __init__(
        self, job: Job, machine: Machine, cluster: Cluster, fixed: Mapping[str, Any], sync: Mapping[str, Any],
        rates: Rates | None, every: bool, examples: int, tell: Progress,
    ) -> None:  # fmt: skip
        self.job, self.machine, self.cluster, self.fixed, self.sync = job, machine, cluster, fixed, sync
        self.every, self.examples, self.tell = every, examples, tell
        self.plans = candidates(job, machine, fixed, sync, cluster)
        self.looked: list[Candidate] = []
        self.alone: float | None = None
        self.skipped: list[tuple[Plan, float]] = []
        self._launching = 0.0  # to launch an example on one device; 0: graphs do it for ranks that share one
        self._rates = rates
        self._reach: dict[int, int] = {}  # by branch: the most ranks that shared an example among those looked at
        self._shares: dict[int, list[tuple[int, float]]] = {}  # by branch: axial, and how well its ranks were used

    def run(self) -> None:
        """Look at the grids from the one on that could be fastest at best, until no other can be faster."""
        one = self.plans[0]
        is_measured = self.machine.here and self.machine.devices > 1  # rates would be
        evident = self._evident(one)
        # The time of a design's gradient is not recorded.
        if self._rates is None and len(self.plans) > 1 and self.job.gradient is None and not (evident and is_measured):
            self._rates = self.machine.rates(DTYPES[one.precision], lambda what: self._say(what))
        if self._rates is not None:
            by_itself = replace(self.job, optim=self.job.optim and replace(self.job.optim, accumulate=one.batch))
            found = self.timed(alone(one), by_itself, None)
            self.alone = None if found is None else found.total / one.batch
            shares = next((plan for plan in self.plans if plan.axial > 1), None)
            launched = None
            if shares is not None and shares.why_no_graphs(self.machine.kind) is not None:
                launched = self.timed(replace(alone(one), graph=False), by_itself, None)
            self._launching = 0.0 if launched is None else launched.launching / one.batch
        if evident is not None:
            self._add(evident)
        left: dict[tuple[int, int, int], list[Plan]] = {}
        for plan in self.plans if evident is None else ():
            left.setdefault((plan.data, plan.axial, plan.branch), []).append(plan)
        while left:
            near = [grid for grid in left if self._within_reach(grid)]
            if not near and self._fitting():
                break
            near = near or [min(left, key=lambda grid: grid[1:])]
            grid = min(near, key=lambda grid: (self._bound(grid), simplicity(left[grid][0])))
            best = min(self._fitting(), key=self._total, default=None)
            if best is not None and self._rates is None:
                break
            self._look_at(left.pop(grid))
            self._reach[grid[2]] = max(grid[1], self._reach.get(grid[2], 0))
            self._skip_hopeless(left)
        if self.job.learns and self._rates is not None and self._fitting():
            self._vary()

    def _evident(self, plan: Plan) -> Candidate | None:
        """Return the first plan with its memory, where it fits and no way to share examples out can be worth more."""
        if not is_evident(self.job, plan, self.machine):
            return None
        memory = self._memory(plan)
        return None if why_not_fit(memory, self.machine) else Candidate(plan, memory)

    def _say(self, what: str) -> None:
        self.tell(len(self.looked), len(self.looked) + 2, what)

    def _fitting(self) -> list[Candidate]:
        return [one for one in self.looked if one.memory is not None and not one.reason]

    def _turns(self, data: int) -> int:
        """Return how many examples follow each other on the ranks that have most."""
        return share_of(examples_of(self.job), data, 0) if self.job.training else math.ceil(self.examples / data)

    def _total(self, one: Candidate) -> float:
        """Return the seconds of a step, or of all examples that are to be folded; without rates the first is best."""
        if one.time is None:
            return 0.0 if self._rates is None else math.inf
        return one.time.total * (1 if self.job.training else self._turns(one.plan.data))

    def _bound(self, grid: tuple[int, int, int]) -> float:
        """Return the seconds of a grid at best: more ranks that share an example are used no better than fewer.

        Without graphs each of them launches as many kernels as one device by itself.
        """
        data, axial, branch = grid
        if self.alone is None:
            return 0.0
        known = [(1, 1.0), *sorted(self._shares.get(branch, []))]
        before = max(one for one in known if one[0] <= axial)
        behind = min((one for one in known if one[0] > axial), default=before)
        part = (axial - before[0]) / max(1, behind[0] - before[0])
        used = before[1] + part * (behind[1] - before[1])
        launching = self._launching if axial > 1 else 0.0
        return self._turns(data) * max(self.alone / (axial * branch * used), launching)

    def _within_reach(self, grid: tuple[int, int, int]) -> bool:
        """Return whether at most twice the ranks that were looked at share an example, if the last of these gained."""
        _, axial, branch = grid
        reach = self._reach.get(branch, 0)
        times = {a: 1 / (a * used) for a, used in self._shares.get(branch, [])}
        before = min((t for a, t in times.items() if a < max(times)), default=0.0)
        gains = len(times) < 2 or times[max(times)] < before / GAIN_TOLERANCE
        return axial <= (max(1, 2 * reach) if gains else reach)

    def _hopeless(self, grid: tuple[int, int, int], best: Candidate) -> bool:
        """Return whether a grid cannot be faster than what was found, or not by enough to be worth its sharing."""
        bound, found = self._bound(grid), self._total(best)
        _, axial, branch = grid
        simpler = (branch, axial) < (best.plan.branch, best.plan.axial)
        return bound > TIE_TOLERANCE * found or (bound >= found / GAIN_TOLERANCE and not simpler)

    def _skip_hopeless(self, left: dict[tuple[int, int, int], list[Plan]]) -> None:
        """Remove the grids within reach that cannot be faster than the best so far.

        If none of a branch is left within reach, those that were removed bring others in reach, as if looked at.
        """
        best = min(self._fitting(), key=self._total, default=None)
        while best is not None and self._rates is not None:
            hopeless = [grid for grid in left if self._within_reach(grid) and self._hopeless(grid, best)]
            for grid in hopeless:
                self.skipped.append((left.pop(grid)[0], self._bound(grid)))
            if not hopeless:
                return
            in_reach = {grid[2] for grid in left if self._within_reach(grid)}
            for _, axial, branch in hopeless:
                if branch not in in_reach:
                    self._reach[branch] = max(axial, self._reach.get(branch, 0))

    def _look_at(self, plans: Sequence[Plan]) -> None:
        """Look at the ways of a grid, from the one on that computes least, until one fits and no other is faster."""
        for plan in plans:
            fits = [one for one in self.looked if not one.reason and _grid(one.plan) == _grid(plan)]
            if fits and not self.every and not self._may_be_faster(plan, fits):
                continue
            memory = self._memory(plan)
            one = Candidate(plan, memory, None, why_not_fit(memory, self.machine))
            if not one.reason and plan.recompute is not None and "keep_blocks" not in self.fixed and not plan.offload:
                kept = most_kept(self.job, self.machine, _memory_equivalent_plan(self.job, plan), self.tell)
                if kept:
                    more = replace(plan, keep_blocks=kept)
                    self._add(Candidate(more, self._memory(more)))
                    if not self.every:
                        continue
            self._add(one)

    def _may_be_faster(self, plan: Plan, fits: Sequence[Candidate]) -> bool:
        """Return whether a plan may be faster than those before it: slices on a CPU, whose caches they stay in; and
        blocks, of which more can keep everything than where layers are recomputed.
        """
        if self._rates is None:
            return False
        if not self.job.training:
            return self.machine.kind == "cpu" and not plan.offload and len(fits) < 2
        everything = any(one.plan.recompute is None for one in fits)
        return not (everything or plan.offload or plan.sync.shard_state)

    def _add(self, one: Candidate) -> None:
        """Note a plan, with its time if it fits or if all are asked for."""
        if not one.reason or self.every:
            one = replace(one, time=self.timed(one.plan, self.job, self.cluster))
        plan = one.plan
        if one.time is not None and self.alone and plan.recompute is None and plan.chunk is None:
            each = one.time.total / (self._turns(plan.data) if self.job.training else 1)
            used = self.alone / (each * plan.axial * plan.branch)
            self._shares.setdefault(plan.branch, []).append((plan.axial, min(1.0, used)))
        self.looked.append(one)

    def timed(self, plan: Plan, job: Job, cluster: Cluster | None) -> StepTime | None:
        """Return how long a plan takes; None where no rates are known."""
        if self._rates is None:
            return None
        self._say(f"estimating time: {describe_plan(plan, job.training)}")
        try:
            return step_time(job, plan, self._rates, cluster)
        except NoRateError:
            self._rates = None
            return None

    def _memory(self, plan: Plan) -> MemoryEstimate:
        self._say(f"estimating memory: {describe_plan(plan, self.job.training)}")
        return estimate(self.job, _memory_equivalent_plan(self.job, plan), self.machine, rounded=not self.every)

    def _vary(self) -> None:
        """Change one key after another of the plan that was found, and go on with what is faster and fits."""
        best = self.simplest(self._fitting())
        done: set[Plan] = set()
        for number in range(5):
            ways = list(variants(self.job, best.plan, self.cluster, self.fixed, self.sync))
            for plan in ways[number] if number < len(ways) else ():
                saves, total = could_save(best, plan), self._total(best)
                if plan in done or TIE_TOLERANCE * (total - saves) >= total:
                    continue
                done.add(plan)
                memory = self._memory(plan)
                self._add(Candidate(plan, memory, None, why_not_fit(memory, self.machine)))
                found = self.looked[-1]
                if not found.reason and TIE_TOLERANCE * self._total(found) < self._total(best):
                    best = found

    def simplest(self, found: Sequence[Candidate]) -> Candidate:
        """Return the plan to take among those that take at most `TIE_TOLERANCE` times as long as the fastest.

        The one with the fewest busy devices, then the simplest, then the fastest.
        """
        least = min(map(self._total, found))
        near = [one for one in found if self._total(one) <= TIE_TOLERANCE * least]
        return min(near, key=lambda one: (ranks_of(one.plan), simplicity(one.plan), self._total(one)))


def is_evident(job: Job, plan: Plan, machine: Machine) -> bool:
    """Return whether a training's first plan is best wherever it fits: it keeps everything and shares no example.

    Each device has as many examples as the others.  On a CPU also where devices are left idle, if an example is so
    small that its tensors stay in the caches: its time is that of calls, which ranks do not share.
    """
    whole = plan.axial * plan.branch == plan.batch == 1 and plan.recompute is None and not plan.offload
    if not (job.learns and whole and examples_of(job) % plan.data == 0):
        return False
    return plan.data == machine.devices or (machine.kind == "cpu" and in_caches(job))


def in_caches(job: Job) -> bool:
    """Return whether the largest temporaries of an example stay in a CPU's caches."""
    longest = max(job.sizes.residues, job.sizes.sequences)
    return 8 * longest**2 * max(longest, job.sizes.extra) <= CACHED


def could_save(one: Candidate, other: Plan) -> float:
    """Return the seconds of a step that a plan can save at most over one that differs in one key.

    Examples that go together save launches, and other ways to communicate save waits.
    """
    time, plan = one.time, one.plan
    if time is None or not time.by_part:
        return math.inf
    if other.batch != plan.batch:
        return time.overhead
    groups = ("axial",) if other.triangle != plan.triangle else ("data", "model", "node", "nodes")
    return sum(time.by_part.get(waiting_for(group), 0.0) for group in groups)


def _grid(plan: Plan) -> tuple[int, int, int]:
    return plan.data, plan.axial, plan.branch


def alone(plan: Plan) -> Plan:
    """Return the plan of one device by itself with everything at once, else the same: what others are held against."""
    sync = replace(plan.sync, strategy="plain", shard_state=False)
    return replace(plan, data=1, axial=1, branch=1, chunk=None, in_place=False, recompute=None, keep_blocks=0,
                   offload=False, sync=sync)  # fmt: skip


def _memory_equivalent_plan(job: Job, plan: Plan) -> Plan:
    """Return a plan of few ranks that holds as much on each, or hardly more: so one estimate serves many plans.

    But what topk sends is gathered from all of them.
    """
    plan = replace(plan, sizes=0, graph=False)
    if not job.training:
        return replace(plan, data=1)
    few = ALIKE if plan.sync.shard_state else 2
    if job.optim is not None and job.optim.compression.method == "topk":
        few = plan.data
    return replace(plan, data=min(plan.data, few), sync=SyncConfig(shard_state=plan.sync.shard_state))


def most_kept(job: Job, machine: Machine, plan: Plan, tell: Progress = no_progress) -> int:
    """Return how many of the last blocks can keep everything: memory grows by the same with each of them.

    0 also where all can, and nothing need be computed again.
    """

    def needs(plan: Plan, rounded: bool = False) -> MemoryEstimate:
        """Return the estimate of a plan, and say so before."""
        tell(0, 1, f"estimating memory: {describe_plan(plan, job.training)}")
        return estimate(job, plan, machine, rounded)

    blocks = job.model.evoformer.blocks
    if blocks < 2 or not why_not_fit(needs(replace(plan, recompute=None), rounded=True), machine):
        return 0
    first, second = (needs(replace(plan, keep_blocks=count)) for count in (0, 1))
    one = with_margin(second.peak, machine.kind) - with_margin(first.peak, machine.kind)
    left = machine.free - needed_bytes(first, machine)
    most = min(blocks - 1, left // max(one, 1)) if left > 0 else 0
    while most > 0 and why_not_fit(needs(replace(plan, keep_blocks=most)), machine):
        most -= max(1, most // 8)
    return max(0, most)


# What they need


def rounded(job: Job) -> Job:
    """Return a job a little larger, of which there are few: what it needs is enough for all that it stands for."""
    sizes = job.sizes
    up = {name: _round_up(getattr(sizes, name)) for name in ("residues", "sequences", "extra")}
    return replace(job, sizes=replace(sizes, **up))


def _round_up(size: int) -> int:
    step = max(1, 2 ** max(0, size - 1).bit_length() // (2 * STEPS))
    return -(-size // step) * step


def estimate(job: Job, plan: Plan, machine: Machine, rounded: bool = True) -> MemoryEstimate:
    """Estimate the memory of a plan for a job; rounded: or for one a little larger, unless that is nearly too large.

    Of a job that is far too large a bound is enough, as nothing has to be run for it.
    """
    plan = _memory_equivalent_plan(job, plan)
    bound = lower_bound(job, plan)
    if why_not_fit(bound, machine):
        return bound
    if rounded:
        found = estimate_memory(_rounded(job), plan, machine.kind)
        needed = needed_bytes(found, machine)
        if needed <= machine.free or needed > NEARLY * machine.free:
            return found
    return estimate_memory(job, plan, machine.kind)


_rounded = rounded  # `estimate` has a parameter of this name


def needed_bytes(memory: MemoryEstimate, machine: Machine) -> int:
    """Return the bytes that must be free on each device, with a margin; weights that lie there already excepted."""
    return with_margin(memory.peak, machine.kind) - (memory.weights if machine.loaded else 0)


def memory_of_free(memory: MemoryEstimate, machine: Machine) -> str:
    """Say how much is needed of what is free: "3.1 of 18.0 GB"."""
    needed, unit = needed_bytes(memory, machine), in_gb(machine.free)
    return f"{needed / 1e9:.1f} of {unit}" if needed >= 5e7 and machine.free >= 1e8 else f"{in_gb(needed)} of {unit}"


def why_not_fit(memory: MemoryEstimate, machine: Machine) -> str:
    """Return the memory that a plan lacks here, in words, or ""."""
    needed, needs = needed_bytes(memory, machine), "needs at least" if memory.at_least else "needs"
    if needed > machine.free:
        return f"{needs} {in_gb(needed)}, {in_gb(machine.free)} are free"
    if machine.host is not None and memory.host > machine.host:
        where = "on disk for temporary files" if machine.kind == "cpu" else "of host memory"
        return f"{needs} {in_gb(memory.host)} {where}, {in_gb(machine.host)} are free"
    return ""


def _trivial_fit(job: Job, plans: Sequence[Plan], machine: Machine, examples: int) -> MemoryEstimate | None:
    """Return a bound of what the first plan needs, where it is plain that this one is best; else None.

    The first computes everything at once, where keys that are given do not say otherwise, and shares out the least.
    """
    first = plans[0]
    if job.training and (machine.devices > 1 or first.batch > 1):
        return None
    # On a CPU slices can be faster than the whole, but not where the whole's largest temporaries are in its caches.
    cached = in_caches(job)
    alike = {plan.chunk for plan in plans} == {first.chunk}
    if not (job.training or alike or machine.kind == "cuda" or cached):
        return None
    if not (job.training or examples >= machine.devices or {plan.axial for plan in plans} == {first.axial} or cached):
        return None  # devices could share it
    bound = upper_bound(job, first)
    return bound if needed_bytes(bound, machine) <= machine.free and not first.offload else None


def lower_bound(job: Job, plan: Plan) -> MemoryEstimate:
    """Return less than a job needs, from its sizes alone: the pair representation, once for each block that keeps it.

    Of two branches or of what a training keeps in host memory nothing.
    """
    model, sizes, itemsize = job.model, job.sizes, DTYPES[plan.precision].itemsize
    row = sizes.residues * model.c_z * itemsize
    whole, shard = sizes.residues * row, math.ceil(sizes.residues / plan.axial) * row
    if job.training:
        kept = 0 if plan.offload else plan.batch * job.backward_blocks * shard
        return MemoryEstimate(peak=0 if plan.branch > 1 else kept, weights=0, features=0, at_least=True)
    away = plan.offload and plan.in_place
    held = 0 if away or plan.branch > 1 else shard
    return MemoryEstimate(peak=held, weights=0, features=0, host=whole if away else 0, at_least=True)


def upper_bound(job: Job, plan: Plan) -> MemoryEstimate:
    """Return more than a job can need, were everything computed at once and kept, from its sizes alone."""
    model, sizes = job.model, job.sizes
    n, s, e, t = sizes.residues, sizes.sequences + sizes.templates, sizes.extra, sizes.templates
    pairs, aligned, extra = (
        n * n * max(model.c_z, model.evoformer.pair.c_triangle),
        s * n * model.c_m,
        e * n * model.c_e,
    )
    heads = max(model.evoformer.heads, model.evoformer.pair.heads)
    logits = heads * n * (n * n + s * n + s * s + e * n + t * n * n)
    outer = n * n * model.evoformer.c_outer**2
    one = 16 * (pairs + aligned + extra) + 4 * logits + 2 * outer + 64 * n * (n + 64) * (t + 1)
    blocks = model.evoformer.blocks + model.extra_blocks + t * model.templates.blocks if job.training else 1
    copies = 8 if job.learns else 2
    passes = (job.recycles + 1) * model.ensemble
    features = 4 * passes * n * (64 * s + 32 * e) + 4 * n * n * 64
    width = max(4, DTYPES[plan.precision].itemsize)
    weights = copies * width * parameters(model)
    peak = weights + width * one * (2 + 2 * blocks) * plan.batch + features
    return MemoryEstimate(peak=peak, weights=weights, features=features)


# What would fit


class NothingFitsError(UserError):
    """No plan fits: a message that says what the tightest needs, and what would fit."""

    def __init__(self, job: Job, machine: Machine, looked: Sequence[Candidate], tell: Progress = no_progress) -> None:
        self.looked = looked
        least = min((one for one in looked if one.memory is not None), key=lambda one: one.memory.peak)  # type: ignore[union-attr]
        what = "a training on" if job.learns else "folding" if job.gradient is None else "a gradient by the sequence of"
        sizes = f"{job.sizes.residues:,} residues with {job.sizes.sequences + job.sizes.extra:,} alignment rows"
        would = "; ".join(_suggestions(job, machine, least.plan, tell))
        cure = f"what would fit: {would}" if would else "not even a few residues fit; give more memory"
        super().__init__(f"{what} {sizes}, {describe_plan(least.plan, job.training)}, {least.reason}; {cure}")


def _suggestions(job: Job, machine: Machine, tightest: Plan, tell: Progress) -> Iterator[str]:
    """Yield what would make a job fit: more devices, 16 bits, fewer residues."""
    tell(0, 1, "what would fit")
    one = estimate(job, tightest, machine)
    shared = (one.peak - one.weights) * tightest.axial  # at best each of p devices holds 1/p of it
    recompute: Recompute | None = "block" if job.training else None

    def enough(devices: int) -> bool:
        plan = replace(tightest, data=1, axial=devices, offload=False, recompute=recompute)
        if one.weights + shared // devices > machine.free:
            return False
        tell(0, 1, f"whether {devices} devices are enough")
        return not why_not_fit(estimate(job, plan, machine), machine)

    more = [devices for devices in (2, 4, 8, 16, 32, 64) if devices > machine.devices and tightest.branch == 1]
    if (least := bisect_left(more, True, key=enough)) < len(more):
        yield f"{more[least]} devices"
    if tightest.precision == "fp32":
        tell(0, 1, "whether it fits in bf16")
        if not why_not_fit(estimate(job, replace(tightest, precision="bf16"), machine), machine):
            slow = slow_precision("bf16", machine.kind)
            yield f"bf16 (plan.precision){', though many times slower on this CPU' if slow else ''}"
    if most := longest(job, machine, tightest, tell):
        yield f"at most {most:,} residues"


def longest(job: Job, machine: Machine, plan: Plan, tell: Progress = no_progress) -> int:
    """Return how many residues fit with a plan, to about one in thirty; of a slice, rows in proportion.

    What is held beside the weights is a residue's part and a pair's, which two sizes tell: a few estimates find it.
    0: nothing fits.
    """
    fits, at, known = 0, max(job.sizes.residues, 2 * FEWEST), list[tuple[int, int]]()
    fails = math.inf
    while at > FEWEST and why_not_fit(lower_bound(replace(job, sizes=replace(job.sizes, residues=at)), plan), machine):
        at = max(at - at // 8 - 1, FEWEST)  # without an estimate
    for turn in range(LOOKS):
        tell(turn, LOOKS, f"whether {at:,} residues fit")
        one = replace(job, sizes=replace(job.sizes, residues=at))
        chunk = None if plan.chunk is None else max(FEWEST, math.ceil(plan.chunk * at / job.sizes.residues))
        memory = estimate(one, replace(plan, chunk=chunk), machine, rounded=False)
        always = with_margin(memory.weights, machine.kind) - (memory.weights if machine.loaded else 0)
        known.append((at, max(1, needed_bytes(memory, machine) - always)))
        if why_not_fit(memory, machine):
            fails = min(fails, at)
        else:
            fits = max(fits, at)
        if always >= machine.free or fails <= NEAR * fits or fails <= FEWEST:
            break
        guess = int(0.99 * min(16 * at, _size_of(known, machine.free - always)))  # a little less, so that it fits
        if memory.host > (machine.host or math.inf) or (guess > at and at >= fails):
            guess = int(0.9 * at)
        if 0 < guess <= NEAR * fits:
            break
        at = max(min(guess, math.ceil(fails) - 1 if fails < math.inf else guess), FEWEST)
    return fits


def _size_of(known: Sequence[tuple[int, int]], left: int) -> float:
    """Return how many residues need so many bytes: a n + b n^2 of them, by the two last sizes that are known.

    Of one size alone, in proportion: that overshoots, and the next guess lies between two sizes that are known.
    """
    n, needed = known[-1]
    before, less = known[-2] if len(known) > 1 and known[-2][0] != n else (0, 0)
    pair = (needed / n - less / before) / (n - before) if before else 0.0
    each = needed / n - pair * n
    if pair <= 0:
        return n * left / needed
    if each < 0:
        return n * (left / needed) ** (1 / 3)
    return (math.sqrt(each**2 + 4 * pair * left) - each) / (2 * pair)


def describe_plan(plan: Plan, training: bool = False) -> str:
    """Describe a plan: "data 4 x axial 2, blocks recomputed"; of a fold, "slices of 16 rows, in place"."""
    usual, sync = SyncConfig(), plan.sync
    said = [describe_grid(plan)] if ranks_of(plan) > 1 else []
    if plan.recompute:
        kept = f", all but the last {plan.keep_blocks}" if plan.keep_blocks else ""
        said.append(f"{plan.recompute}s recomputed{kept}")
    elif training and not plan.offload:
        said.append("everything kept")
    if plan.chunk is not None:
        said.append(f"slices of {plan.chunk} row{'s' * (plan.chunk > 1)}{', in place' if plan.in_place else ''}")
    elif not training:
        said.append("whole")
    if plan.offload:
        said.append("z in host memory" if plan.in_place else "what is kept in host memory")
    said += [f"{plan.batch} examples together"] if plan.batch > 1 else []
    said += [f'products by "{plan.triangle}"'] if plan.triangle != "auto" else []
    said += [f"{sync.strategy} sums"] if sync.strategy != usual.strategy else []
    said += ["sharded state"] if sync.shard_state else []
    said += [f"buckets of {sync.bucket:g} MiB"] if sync.bucket != usual.bucket else []
    return ", ".join(said)


def describe_grid(plan: Plan) -> str:
    """Return who shares what: "data 4 x axial 2"."""
    sizes = {"data": plan.data, "axial": plan.axial, "branch": plan.branch}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"


def in_words(seconds: float) -> str:
    """Return a time in words: "about 0.43 s", "about 4 min", "about 2.1 h"."""
    return f"about {f'{seconds:.2g} s' if seconds < 10 else as_time(seconds)}"


def sent(size: float) -> str:
    """Return bytes that were sent: "12.6 GB", "0.8 MB"."""
    return f"{size / 1e6:.1f} MB" if 0 < size < 1e7 else in_gb(size)


def joined(cluster: Cluster) -> str:
    """Return how the ranks of a cluster are joined: "4 nodes of 8, 360 GB/s within and 40 GB/s between (given)"."""
    within, between = (_rate(link.bandwidth) for link in (cluster.within, cluster.between))
    if cluster.nodes == 1:
        return f"one node, {within} ({cluster.how})"
    last = f", the last of {rest}" if (rest := cluster.ranks % cluster.per_node) else ""
    return f"{cluster.nodes} nodes of {cluster.per_node}{last}, {within} within and {between} between ({cluster.how})"


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.3g} GB/s" if bandwidth >= 1e9 else f"{bandwidth / 1e6:.3g} MB/s"
