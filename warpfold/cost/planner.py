"""Choose the fastest plan that fits, before a job runs.

Memory and time of a plan are estimated from a record of the code itself (cost/record.py). A training plan that
recomputes nothing and gives each device the same number of complete examples is chosen at once. Otherwise grids of
ranks are compared in the order of their lower bounds of time. For each grid, the ways to run an example are tried from
the least computation to the least memory, until one fits. A single device is treated as a cluster of one. Keys of the
plan that the user has set stay fixed, and precision is never chosen.
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
from warpfold.cost.machine import Machine
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
from warpfold.progress import Progress, format_gb, no_progress

# Numbers of slices of z that are tried.
SLICE_COUNTS = (4, 32, 256)
# Fewest rows of a slice. With fewer, the calls cost more than their computation.
MIN_CHUNK = 4
# Accuracy of the estimates. Among plans whose times differ by less, the one with the fewest busy devices is chosen,
# then the simplest.
TIE_TOLERANCE = 1.05
# Sharing an example among more ranks must be faster by at least this factor.
GAIN_TOLERANCE = 1.01
# Sizes between two powers of two to which jobs are rounded up for memory estimates: at most 6 % too many residues.
ROUNDED_SIZES = 16
# If a rounded job needs more than this multiple of the free memory, the exact job does not fit either.
REFINE_BELOW = 1.3
# Most estimates in the search for the longest protein, and the relative accuracy of the search.
MAX_ESTIMATES = 5
LENGTH_TOLERANCE = 1.03
# Bucket sizes in MiB that are tried besides the default, and numbers of examples that run together.
BUCKET_SIZES = (1.0, 4.0, 64.0)
BATCH_SIZES = (2, 4, 8, 16)
# Memory is estimated for at most this many data ranks. More ranks need no more, and with `shard_state` little less.
MAX_ESTIMATED_RANKS = 8
# Keys of the plan that are chosen for predictions and for training.
CHOSEN = ("data", "axial", "chunk", "in_place", "offload")
CHOSEN_IN_TRAINING = (
    *("data", "axial", "branch", "batch", "recompute", "keep_blocks", "offload", "triangle", "sync", "sizes"),
)
# `Plan.sizes` where graphs replay passes: about 24 shapes of a monomer's examples.
SIZES = 2
# Keys of the best training plan that are varied one after another, in the order of their trials.
VARIED_KEYS = ("batch", "triangle", "strategy", "shard_state", "bucket")


@dataclass(frozen=True)
class Candidate:
    """A plan that was considered. memory, time: None if not estimated. reason: why it does not fit, or ""."""

    plan: Plan
    memory: MemoryEstimate | None = None
    time: StepTime | None = None
    reason: str = ""


@dataclass(frozen=True)
class Choice:
    """The plan that was chosen for a job, and the candidates in the order of their estimates.

    chosen: its memory is that of the job or of a slightly larger one. Its time is None if no rates are known or if no
    other plan could be better.
    single_seconds: of one example on a single device without slices or recomputation.
    computed: seconds of a step without cached trunk outputs, if the job caches them.
    skipped: plans that were not considered, with a lower bound of their seconds.
    """

    job: Job
    machine: Machine
    cluster: Cluster
    chosen: Candidate
    considered: tuple[Candidate, ...] = field(repr=False)
    single_seconds: float | None = None
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
        return all(candidate.memory is None for candidate in self.considered)

    @property
    def idle(self) -> int:
        """Number of devices that the plan does not use."""
        return self.machine.devices - ranks_of(self.plan)

    def efficiency(self, candidate: Candidate) -> float | None:
        """Compute the throughput relative to the same devices working on separate examples, each alone."""
        if self.single_seconds is None or candidate.time is None:
            return None
        return examples_of(self.job) * self.single_seconds / (self.machine.devices * candidate.time.total)

    def hours_per_million(self, candidate: Candidate) -> float | None:
        """Compute the device-hours of a million examples."""
        if candidate.time is None:
            return None
        return self.machine.devices * candidate.time.total * 10**6 / examples_of(self.job) / 3600


def examples_of(job: Job) -> int:
    """Return the number of examples in a step; 1 for a prediction."""
    return 1 if job.optim is None else job.optim.accumulate


@lru_cache(maxsize=64)
def parameters(model: ModelConfig) -> int:
    """Count the parameters of a model."""
    with torch.device("meta"):
        return sum(p.numel() for p in AlphaFold(model).parameters())


def choose(
    job: Job,
    machine: Machine,
    fixed: Mapping[str, Any] | None = None,
    sync: Mapping[str, Any] | None = None,
    cluster: Cluster | None = None,
    rates: Rates | None = None,
    estimate_all: bool = False,
    examples: int = 1,
    tell: Progress = no_progress,
) -> Choice:
    """Choose the fastest plan that fits; among equally fast ones that with the fewest busy devices, then the simplest.

    More devices never take longer, because training leaves devices idle if dividing its work further gains nothing.
    fixed: fixed keys of the plan. sync: fixed keys of `plan.sync`. cluster: connections of the devices; None means a
    single node. rates: speed of the devices; None means the machine's.
    estimate_all: estimate all ways to run an example for the exact sizes, instead of only until one fits. Otherwise, a
    job that fits by an upper bound gets the first plan without an estimate.
    examples: number of examples to fold. Devices that do not share an example fold different ones.
    Raises UserError if no plan fits, with suggestions, and ValueError for keys that exclude each other or for devices
    that no plan can use.
    """
    cluster, fixed = cluster or one_node(machine.devices), with_implied_keys(job, fixed or {})
    search = _Search(job, machine, cluster, fixed, sync or {}, rates, estimate_all, examples, tell)
    plans = search.plans
    if not estimate_all and (bound := _trivial_fit(job, plans, machine, examples)) is not None:
        return Choice(job, machine, cluster, Candidate(plans[0], bound), tuple(map(Candidate, plans)))
    bounds = [(plan, lower_bound(job, plan)) for plan in plans]
    if all(why_not_fit(bound, machine) for _, bound in bounds):
        # Nothing can fit, so no time needs to be estimated.
        too_large = [Candidate(plan, bound, None, why_not_fit(bound, machine)) for plan, bound in bounds]
        raise NothingFitsError(job, machine, too_large, tell)
    search.run()
    fitting = search.fitting()
    if not fitting:
        raise NothingFitsError(job, machine, search.considered, tell)
    chosen = search.simplest(fitting)
    considered = list(search.considered)
    if not (job.learns and machine.devices > 1):
        # Plans of the chosen grid that need less memory, for `next_smaller_plan`.
        estimated = {candidate.plan for candidate in considered}
        grid = grid_of(chosen.plan)
        considered += [Candidate(plan) for plan in plans if plan not in estimated and grid_of(plan) == grid]
    computed = None
    if job.keeps_trunk(chosen.plan):
        time = search.timed(chosen.plan, replace(job, finetune=replace(job.finetune, trunk="computed")), cluster)
        computed = None if time is None else time.total
    return Choice(
        job, machine, cluster, chosen, tuple(considered), search.single_seconds, computed, tuple(search.skipped)
    )


def with_implied_keys(job: Job, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fixed keys of a plan, with defaults that the trained parts of the model imply."""
    if not (job.learns and job.finetune.freezes):
        return dict(fixed)
    cached_trunk_keys = {"axial": 1, "batch": 1} if job.keeps_trunk(Plan()) else {}
    return {"branch": 1, **cached_trunk_keys, **fixed}


def next_smaller_plan(choice: Choice) -> Choice | None:
    """Return the next plan in `considered` that needs less memory, after a run has run out of it; None if none does."""
    plans = [candidate.plan for candidate in choice.considered]
    now = estimate(choice.job, choice.plan, choice.machine)
    for candidate in choice.considered[plans.index(choice.plan) + 1 :]:
        memory = candidate.memory or estimate(choice.job, candidate.plan, choice.machine)
        if memory.peak < now.peak:
            return replace(choice, chosen=replace(candidate, memory=memory))
    return None


# Candidates


def candidates(
    job: Job, machine: Machine, fixed: Mapping[str, Any], sync: Mapping[str, Any] | None = None,
    cluster: Cluster | None = None,
) -> list[Plan]:  # fmt: skip
    """List the plans that could run a job: by grid, and within a grid from the least computation on.

    Fixed keys keep their values. `variants` varies the communication of gradients and the number of examples that run
    together, and `keep_blocks` needs memory estimates; neither is varied here. If graphs may replay passes, the plans
    pad examples to few shapes.
    Raises ValueError for keys that exclude each other, or devices that no plan can use.
    """
    fixed, sync = with_implied_keys(job, fixed), sync or {}
    plans: dict[Plan, None] = {}
    for data, axial, branch in grids(job, cluster or one_node(machine.devices), fixed):
        for way in _training_ways(data, fixed, sync) if job.training else _prediction_ways(job, machine):
            keys: dict[str, Any] = {"data": data, "axial": axial, "branch": branch, **way, **fixed}
            if sync and "sync" not in way:
                keys["sync"] = SyncConfig(**sync)
            if not job.training and "in_place" not in fixed:
                keys["in_place"] = keys.get("chunk") is not None
            try:
                plan = Plan(**keys)
            except ValueError:
                continue
            splits_batch = plan.batch > 1 and examples_of(job) % (plan.data * plan.batch) > 0
            offloads_whole = not job.training and plan.offload and not plan.in_place
            if plan.unsupported_on(machine.kind) or splits_batch or offloads_whole:
                continue
            padded = replace(plan, sizes=SIZES)
            if job.learns and "sizes" not in fixed and padded.why_no_graphs(machine.kind) is None:
                # Graphs can replay passes if examples are padded to few shapes.
                plan = padded
            plans[plan] = None
    if plans:
        return list(plans)
    # `Plan` raises an error if the keys themselves exclude each other.
    if reason := Plan(**fixed).unsupported_on(machine.kind):
        raise ValueError(reason)
    grid = ", ".join(f"plan.{key} = {fixed[key]}" for key in ("data", "axial", "branch", "batch") if key in fixed)
    raise ValueError(
        f"{grid or 'the plan'}: {machine.devices} ranks cannot divide a step of {examples_of(job)} in this way. Data x "
        "axial x branch must be the number of ranks, each data rank needs an example, and data x batch must divide "
        "optim.accumulate."
    )


def grids(job: Job, cluster: Cluster, fixed: Mapping[str, Any]) -> Iterator[tuple[int, int, int]]:
    """Yield grids data x axial x branch: first those with separate examples, then those whose ranks share examples.

    Predictions use all devices. For training, only the fewest data ranks are yielded among those with the same largest
    share of examples, and those that fill nodes. The grids of fewer devices are included, so devices may stay idle
    unless the number of data ranks is fixed.
    """
    examples, ranks = examples_of(job), cluster.ranks
    if not job.training:
        branch = fixed.get("branch", 1)
        for axial in range(1, ranks // branch + 1):
            data, idle = divmod(ranks, axial * branch)
            if idle == 0 and fixed.get("axial", axial) == axial and fixed.get("data", data) == data:
                yield data, axial, branch
        if fixed.get("axial", 1) * branch > ranks:
            # The user has asked for more ranks than there are.
            yield fixed.get("data", 1), fixed.get("axial", 1), branch
        return
    # Beyond 16, in steps of at most an eighth.
    sizes = [*range(1, 17)]
    while sizes[-1] < ranks:
        sizes += [2 * size for size in sizes[-8:]]
    counts = {-(-examples // share) for share in range(1, examples + 1)}
    counts |= {*range(cluster.per_node, examples + 1, cluster.per_node)}
    branches = (1,) if job.model.evoformer.outer == "middle" else (1, 2)
    for branch in (fixed["branch"],) if "branch" in fixed else branches:
        for axial in (fixed["axial"],) if "axial" in fixed else [a for a in sizes if a <= job.sizes.residues]:
            data_ranks = sorted((data for data in counts if data * axial * branch <= ranks), reverse=True)
            if "data" in fixed:
                fills = fixed["data"] * axial * branch == ranks and fixed["data"] <= examples
                data_ranks = [fixed["data"]] if fills else []
            yield from ((data, axial, branch) for data in data_ranks)


def _prediction_ways(job: Job, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield keys for a prediction: without slices, in place with more and more slices, and with z in host memory."""
    residues = round_up(job).sizes.residues
    yield {"chunk": None}
    sizes = {max(MIN_CHUNK, math.ceil(residues / count)) for count in SLICE_COUNTS}
    if machine.kind == "cpu":
        # The attention logits of a row are the largest temporary. This chunk keeps them in the cache.
        longest = max(job.sizes.residues, job.sizes.sequences)
        sizes.add(max(MIN_CHUNK, CACHED // (8 * longest**2)))
    chunks = [size for size in sorted(sizes, reverse=True) if size < residues]
    yield from ({"chunk": chunk} for chunk in chunks)
    # Narrower bands of columns would be copied to and from a GPU in ranges whose launches take longer than the copies.
    least = TILE if machine.kind == "cuda" and residues > TILE else 0
    yield from ({"chunk": max(chunk, least), "offload": True} for chunk in chunks[-1:])


def _training_ways(data: int, fixed: Mapping[str, Any], sync: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield keys for training: no recomputation; recomputed layers or blocks; sharded state; offloaded tensors."""
    yielded: list[dict[str, Any]] = []
    for kind, shard, offload in (
        *((None, False, False), ("layer", False, False), ("block", False, False)),
        *(("block", True, False), ("layer", False, True), ("block", False, True)),
    ):
        way = {"recompute": fixed.get("recompute", kind), "offload": fixed.get("offload", offload)}
        if shard and data > 1 and "shard_state" not in sync:
            way["sync"] = SyncConfig(**sync, shard_state=True)
        if way not in yielded:
            yielded.append(way)
            yield way


def variants(
    key: str, job: Job, plan: Plan, cluster: Cluster, fixed: Mapping[str, Any], sync: Mapping[str, Any]
) -> list[Plan]:
    """List the training plans that differ from a plan in one of `VARIED_KEYS`; none if the key is fixed or has no use.

    The keys are the examples that run together, the sharding of triangle products, and the communication of gradients.
    """
    optim = job.optim
    assert optim is not None
    if key in fixed or key in sync:
        return []
    if key == "batch" and optim.clip == "step" and job.model.multimer is None and plan.axial * plan.branch == 1:
        sizes = [size for size in BATCH_SIZES if size != plan.batch and optim.accumulate % (plan.data * size) == 0]
        return [replace(plan, batch=size) for size in sizes]
    if key == "triangle" and plan.axial > 1:
        itemsize, model = DTYPES[plan.precision].itemsize, job.model
        channels = model.evoformer.pair.c_triangle
        cut = replace(plan, triangle="auto").by_channels(job.sizes.residues, plan.axial, channels, model.c_z, itemsize)
        return [replace(plan, triangle="gather" if cut else "channels")]
    syncs: list[SyncConfig] = []
    compressed = optim.compression.method != "none"
    if key == "strategy" and data_ranks_on_node(plan, cluster) is not None and not compressed:
        syncs = [replace(plan.sync, strategy="hierarchical")]
    elif key == "shard_state" and plan.data > 1 and not compressed:
        syncs = [replace(plan.sync, shard_state=not plan.sync.shard_state)]
    elif key == "bucket" and ranks_of(plan) > 1:
        syncs = [replace(plan.sync, bucket=size) for size in BUCKET_SIZES if size * 2**18 < parameters(job.model)]
    return [replace(plan, sync=changed) for changed in syncs]


def simplicity(plan: Plan) -> tuple[int, int, int]:
    """Return a sort key from simple to complicated: number of non-default settings, then branch and axial."""
    sync, usual = plan.sync, SyncConfig()
    differing = (
        *(plan.axial > 1, plan.branch > 1, plan.batch > 1, plan.triangle != "auto", plan.chunk is not None),
        *(plan.recompute is not None, plan.keep_blocks > 0, plan.offload),
        *(sync.strategy != usual.strategy, sync.shard_state, sync.bucket != usual.bucket),
    )
    return sum(differing), plan.branch, plan.axial


# The search


class _Search:
    """Estimate memory and time of a job's plans until the fastest is found. `considered` lists the estimated ones."""

    def __init__(
        self, job: Job, machine: Machine, cluster: Cluster, fixed: Mapping[str, Any], sync: Mapping[str, Any],
        rates: Rates | None, estimate_all: bool, examples: int, tell: Progress,
    ) -> None:  # fmt: skip
        self.job, self.machine, self.cluster, self.fixed, self.sync = job, machine, cluster, fixed, sync
        self.estimate_all, self.examples, self.tell = estimate_all, examples, tell
        self.plans = candidates(job, machine, fixed, sync, cluster)
        self.considered: list[Candidate] = []
        self.single_seconds: float | None = None
        self.skipped: list[tuple[Plan, float]] = []
        # Seconds in which the host launches an example's kernels; 0 if graphs launch them for ranks that share one.
        self._launching = 0.0
        self._rates = rates
        # By branch: the largest `axial` so far, and pairs of `axial` and the parallel efficiency of its ranks.
        self._reach: dict[int, int] = {}
        self._efficiencies: dict[int, list[tuple[int, float]]] = {}

    def run(self) -> None:
        """Consider grids in the order of their lower bounds of time, until no other grid can be faster."""
        first = self.plans[0]
        evident = None
        if is_evident(self.job, first, self.machine) and not why_not_fit(memory := self._memory(first), self.machine):
            evident = Candidate(first, memory)
        # Rates of several local devices would be measured, which an evident plan does not need. The time of a design's
        # gradient is not recorded.
        needs_rates = not (evident and self.machine.here and self.machine.devices > 1)
        if self._rates is None and len(self.plans) > 1 and self.job.gradient is None and needs_rates:
            self._rates = self.machine.rates(DTYPES[first.precision], self._say)
        if self._rates is not None:
            by_itself = replace(self.job, optim=self.job.optim and replace(self.job.optim, accumulate=first.batch))
            time = self.timed(single_device_plan(first), by_itself, None)
            self.single_seconds = None if time is None else time.total / first.batch
            shares = next((plan for plan in self.plans if plan.axial > 1), None)
            if shares is not None and shares.why_no_graphs(self.machine.kind) is not None:
                time = self.timed(replace(single_device_plan(first), graph=False), by_itself, None)
                self._launching = 0.0 if time is None else time.launching / first.batch
        if evident is not None:
            self._add(evident)
        remaining: dict[tuple[int, int, int], list[Plan]] = {}
        for plan in self.plans if evident is None else ():
            remaining.setdefault(grid_of(plan), []).append(plan)
        while remaining:
            within_reach = [grid for grid in remaining if self._within_reach(grid)]
            # Without rates, the first plan that fits is taken.
            if self.fitting() and (not within_reach or self._rates is None):
                break
            within_reach = within_reach or [min(remaining, key=lambda grid: grid[1:])]
            grid = min(within_reach, key=lambda grid: (self._bound(grid), simplicity(remaining[grid][0])))
            self._consider(remaining.pop(grid))
            self._reach[grid[2]] = max(grid[1], self._reach.get(grid[2], 0))
            self._skip_hopeless(remaining)
        if self.job.learns and self._rates is not None and self.fitting():
            self._vary()

    def _say(self, what: str) -> None:
        self.tell(len(self.considered), len(self.considered) + 2, what)

    def fitting(self) -> list[Candidate]:
        """Return the candidates that fit."""
        return [candidate for candidate in self.considered if candidate.memory is not None and not candidate.reason]

    def _rounds(self, data: int) -> int:
        """Return the number of consecutive examples on the data ranks that have most."""
        return share_of(examples_of(self.job), data, 0) if self.job.training else math.ceil(self.examples / data)

    def _total(self, candidate: Candidate) -> float:
        """Return the seconds of a step, or of all examples to fold. Without rates all plans count as equally fast."""
        if candidate.time is None:
            return 0.0 if self._rates is None else math.inf
        return candidate.time.total * (1 if self.job.training else self._rounds(candidate.plan.data))

    def _bound(self, grid: tuple[int, int, int]) -> float:
        """Compute a lower bound of a grid's seconds: efficiency does not grow with the ranks that share an example.

        The efficiency is interpolated between the values of `axial` that were considered. Without graphs, each rank
        launches as many kernels as a single device.
        """
        data, axial, branch = grid
        if self.single_seconds is None:
            return 0.0
        points = [(1, 1.0), *sorted(self._efficiencies.get(branch, []))]
        below = max(point for point in points if point[0] <= axial)
        above = min((point for point in points if point[0] > axial), default=below)
        weight = (axial - below[0]) / max(1, above[0] - below[0])
        efficiency = below[1] + weight * (above[1] - below[1])
        launching = self._launching if axial > 1 else 0.0
        return self._rounds(data) * max(self.single_seconds / (axial * branch * efficiency), launching)

    def _within_reach(self, grid: tuple[int, int, int]) -> bool:
        """Return whether `axial` is at most twice the largest value so far, if the last increase was faster."""
        _, axial, branch = grid
        reach = self._reach.get(branch, 0)
        times = {a: 1 / (a * efficiency) for a, efficiency in self._efficiencies.get(branch, [])}
        before = min((t for a, t in times.items() if a < max(times)), default=0.0)
        gains = len(times) < 2 or times[max(times)] < before / GAIN_TOLERANCE
        return axial <= (max(1, 2 * reach) if gains else reach)

    def _skip_hopeless(self, remaining: dict[tuple[int, int, int], list[Plan]]) -> None:
        """Remove grids within reach that cannot be faster than the best so far, or not by enough to share examples.

        If no grid of a branch is left within reach, the removed ones extend the reach as if they had been considered.
        """
        best = min(self.fitting(), key=self._total, default=None)
        while best is not None and self._rates is not None:
            total, best_sharing = self._total(best), (best.plan.branch, best.plan.axial)
            hopeless = []
            for grid in filter(self._within_reach, remaining):
                bound, is_simpler = self._bound(grid), (grid[2], grid[1]) < best_sharing
                if bound > TIE_TOLERANCE * total or (bound >= total / GAIN_TOLERANCE and not is_simpler):
                    hopeless.append((grid, bound))
            for grid, bound in hopeless:
                self.skipped.append((remaining.pop(grid)[0], bound))
            if not hopeless:
                return
            in_reach = {grid[2] for grid in remaining if self._within_reach(grid)}
            for (_, axial, branch), _ in hopeless:
                if branch not in in_reach:
                    self._reach[branch] = max(axial, self._reach.get(branch, 0))

    def _consider(self, plans: Sequence[Plan]) -> None:
        """Estimate the plans of a grid, from the least computation on, until one fits and no other can be faster."""
        for plan in plans:
            fits = [other for other in self.considered if not other.reason and grid_of(other.plan) == grid_of(plan)]
            if fits and not self.estimate_all and not self._may_be_faster(plan, fits):
                continue
            memory = self._memory(plan)
            candidate = Candidate(plan, memory, None, why_not_fit(memory, self.machine))
            may_keep = plan.recompute is not None and "keep_blocks" not in self.fixed and not plan.offload
            if may_keep and not candidate.reason:
                kept_blocks = most_kept(self.job, self.machine, _memory_equivalent_plan(self.job, plan), self.tell)
                if kept_blocks:
                    more = replace(plan, keep_blocks=kept_blocks)
                    self._add(Candidate(more, self._memory(more)))
                    if not self.estimate_all:
                        continue
            self._add(candidate)

    def _may_be_faster(self, plan: Plan, fits: Sequence[Candidate]) -> bool:
        """Return whether a plan may be faster than those of its grid that fit.

        On a CPU, slices may be faster because they stay in the cache. In training, recomputing blocks may be faster
        than recomputing layers, because more blocks can keep everything.
        """
        if self._rates is None:
            return False
        if not self.job.training:
            return self.machine.kind == "cpu" and not plan.offload and len(fits) < 2
        recomputes_nothing = any(candidate.plan.recompute is None for candidate in fits)
        return not (recomputes_nothing or plan.offload or plan.sync.shard_state)

    def _add(self, candidate: Candidate) -> None:
        """Add a candidate, with its time if it fits or if all times are requested."""
        if not candidate.reason or self.estimate_all:
            candidate = replace(candidate, time=self.timed(candidate.plan, self.job, self.cluster))
        plan = candidate.plan
        if candidate.time is not None and self.single_seconds and plan.recompute is None and plan.chunk is None:
            round_seconds = candidate.time.total / (self._rounds(plan.data) if self.job.training else 1)
            efficiency = self.single_seconds / (round_seconds * plan.axial * plan.branch)
            self._efficiencies.setdefault(plan.branch, []).append((plan.axial, min(1.0, efficiency)))
        self.considered.append(candidate)

    def timed(self, plan: Plan, job: Job, cluster: Cluster | None) -> StepTime | None:
        """Estimate the time of a plan; returns None without rates."""
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
        return estimate(self.job, _memory_equivalent_plan(self.job, plan), self.machine, rounded=not self.estimate_all)

    def _vary(self) -> None:
        """Change one key of the best plan after another, and continue with plans that are faster and fit."""
        best = self.simplest(self.fitting())
        done: set[Plan] = set()
        for key in VARIED_KEYS:
            for plan in variants(key, self.job, best.plan, self.cluster, self.fixed, self.sync):
                saves, total = could_save(best, plan), self._total(best)
                if plan in done or TIE_TOLERANCE * (total - saves) >= total:
                    continue
                done.add(plan)
                memory = self._memory(plan)
                self._add(Candidate(plan, memory, None, why_not_fit(memory, self.machine)))
                new = self.considered[-1]
                if not new.reason and TIE_TOLERANCE * self._total(new) < self._total(best):
                    best = new

    def simplest(self, fitting: Sequence[Candidate]) -> Candidate:
        """Choose among the plans within `TIE_TOLERANCE` of the fastest: fewest busy devices, simplest, fastest."""
        least = min(map(self._total, fitting))
        ties = [candidate for candidate in fitting if self._total(candidate) <= TIE_TOLERANCE * least]
        return min(
            ties, key=lambda candidate: (ranks_of(candidate.plan), simplicity(candidate.plan), self._total(candidate))
        )


def is_evident(job: Job, plan: Plan, machine: Machine) -> bool:
    """Return whether a training's first plan is certainly best if it fits.

    The plan recomputes nothing and shares no example, and each device has equally many examples. On a CPU it may leave
    devices idle if an example is so small that its tensors stay in the cache: its time is then that of the calls, which
    more ranks do not reduce.
    """
    is_simple = plan.axial * plan.branch == plan.batch == 1 and plan.recompute is None and not plan.offload
    if not (job.learns and is_simple and examples_of(job) % plan.data == 0):
        return False
    return plan.data == machine.devices or (machine.kind == "cpu" and in_caches(job))


def in_caches(job: Job) -> bool:
    """Return whether the largest temporaries of an example fit in a CPU's cache."""
    longest = max(job.sizes.residues, job.sizes.sequences)
    return 8 * longest**2 * max(longest, job.sizes.extra) <= CACHED


def could_save(one: Candidate, other: Plan) -> float:
    """Compute an upper bound of the seconds per step that a variant of a plan with one other key can save.

    Running examples together saves launches, and other communication saves waits.
    """
    time, plan = one.time, one.plan
    if time is None or not time.by_part:
        return math.inf
    if other.batch != plan.batch:
        return time.overhead
    groups = ("axial",) if other.triangle != plan.triangle else ("data", "model", "node", "nodes")
    return sum(time.by_part.get(waiting_for(group), 0.0) for group in groups)


def grid_of(plan: Plan) -> tuple[int, int, int]:
    """Return the grid of a plan: data, axial, branch."""
    return plan.data, plan.axial, plan.branch


def single_device_plan(plan: Plan) -> Plan:
    """Return the reference for efficiencies: the plan on a single device without slices or recomputation."""
    sync = replace(plan.sync, strategy="plain", shard_state=False)
    return replace(plan, data=1, axial=1, branch=1, chunk=None, in_place=False, recompute=None, keep_blocks=0,
                   offload=False, sync=sync)  # fmt: skip


def _memory_equivalent_plan(job: Job, plan: Plan) -> Plan:
    """Return a plan with few data ranks and at least the same memory per rank, so that plans share an estimate."""
    plan = replace(plan, sizes=0, graph=False)
    if not job.training:
        return replace(plan, data=1)
    few = MAX_ESTIMATED_RANKS if plan.sync.shard_state else 2
    if job.optim is not None and job.optim.compression.method == "topk":
        # Each rank gathers what all ranks send.
        few = plan.data
    return replace(plan, data=min(plan.data, few), sync=SyncConfig(shard_state=plan.sync.shard_state))


def most_kept(job: Job, machine: Machine, plan: Plan, tell: Progress) -> int:
    """Compute the number of last blocks that need not be recomputed. Memory grows linearly with it.

    Returns 0 if all blocks can keep everything, because nothing needs to be recomputed then.
    """

    def needs(plan: Plan, rounded: bool = False) -> MemoryEstimate:
        tell(0, 1, f"estimating memory: {describe_plan(plan, job.training)}")
        return estimate(job, plan, machine, rounded)

    blocks = job.model.evoformer.blocks
    if blocks < 2 or not why_not_fit(needs(replace(plan, recompute=None), rounded=True), machine):
        return 0
    first, second = (needs(replace(plan, keep_blocks=count)) for count in (0, 1))
    block_bytes = with_margin(second.peak, machine.kind) - with_margin(first.peak, machine.kind)
    free_bytes = machine.free - needed_bytes(first, machine)
    most = min(blocks - 1, free_bytes // max(block_bytes, 1)) if free_bytes > 0 else 0
    while most > 0 and why_not_fit(needs(replace(plan, keep_blocks=most)), machine):
        most -= max(1, most // 8)
    return max(0, most)


# Memory


def round_up(job: Job) -> Job:
    """Round the sizes of a job up to one of few values, so that similar jobs share a memory estimate."""
    rounded = {}
    for name in ("residues", "sequences", "extra"):
        size = getattr(job.sizes, name)
        step = max(1, 2 ** max(0, size - 1).bit_length() // (2 * ROUNDED_SIZES))
        rounded[name] = -(-size // step) * step
    return replace(job, sizes=replace(job.sizes, **rounded))


def estimate(job: Job, plan: Plan, machine: Machine, rounded: bool = True) -> MemoryEstimate:
    """Estimate the memory of a plan for a job.

    rounded: estimate a slightly larger job, unless that is only slightly too large for the machine. For a job that
    cannot fit by a lower bound, the bound is returned.
    """
    plan = _memory_equivalent_plan(job, plan)
    bound = lower_bound(job, plan)
    if why_not_fit(bound, machine):
        return bound
    if rounded:
        memory = estimate_memory(round_up(job), plan, machine.kind)
        needed = needed_bytes(memory, machine)
        if needed <= machine.free or needed > REFINE_BELOW * machine.free:
            return memory
    return estimate_memory(job, plan, machine.kind)


def needed_bytes(memory: MemoryEstimate, machine: Machine) -> int:
    """Compute the bytes that must be free on each device, with a margin but without weights that are already loaded."""
    return with_margin(memory.peak, machine.kind) - (memory.weights if machine.loaded else 0)


def why_not_fit(memory: MemoryEstimate, machine: Machine) -> str:
    """Explain which memory a plan lacks on this machine; "" if it fits."""
    needed, needs = needed_bytes(memory, machine), "needs at least" if memory.at_least else "needs"
    if needed > machine.free:
        return f"{needs} {format_gb(needed)}, {format_gb(machine.free)} are free"
    if machine.host is not None and memory.host > machine.host:
        memory_kind = "on disk for temporary files" if machine.kind == "cpu" else "of host memory"
        return f"{needs} {format_gb(memory.host)} {memory_kind}, {format_gb(machine.host)} are free"
    return ""


def _trivial_fit(job: Job, plans: Sequence[Plan], machine: Machine, examples: int) -> MemoryEstimate | None:
    """Return an upper bound of the first plan's memory if the plan fits by the bound and is certainly best, else None.

    Unless fixed keys say otherwise, the first plan uses no slices and shares no example. `is_evident` covers trainings
    that do not fit by the bound: it needs an estimate, but also accepts several devices.
    """
    first = plans[0]
    if first.offload or (job.training and (machine.devices > 1 or first.batch > 1)):
        return None
    # On a CPU, slices can be faster, but not if the largest temporaries of the full computation fit in the cache.
    cached = in_caches(job)
    same_chunk = {plan.chunk for plan in plans} == {first.chunk}
    if not (job.training or same_chunk or machine.kind == "cuda" or cached):
        return None
    # Devices without an example of their own could share one.
    same_axial = {plan.axial for plan in plans} == {first.axial}
    if not (job.training or examples >= machine.devices or same_axial or cached):
        return None
    bound = upper_bound(job, first)
    return bound if needed_bytes(bound, machine) <= machine.free else None


def lower_bound(job: Job, plan: Plan) -> MemoryEstimate:
    """Compute a lower bound of a job's memory from its sizes: the pair representation once per block that saves it.

    It is 0 for branch ranks, one of which holds no z, and for tensors that are offloaded to the host.
    """
    model, sizes, itemsize = job.model, job.sizes, DTYPES[plan.precision].itemsize
    row = sizes.residues * model.c_z * itemsize
    whole, shard = sizes.residues * row, math.ceil(sizes.residues / plan.axial) * row
    if job.training:
        kept_bytes = 0 if plan.offload else plan.batch * job.backward_blocks * shard
        return MemoryEstimate(peak=0 if plan.branch > 1 else kept_bytes, weights=0, features=0, at_least=True)
    is_on_host = plan.offload and plan.in_place
    held_bytes = 0 if is_on_host or plan.branch > 1 else shard
    return MemoryEstimate(peak=held_bytes, weights=0, features=0, host=whole if is_on_host else 0, at_least=True)


def upper_bound(job: Job, plan: Plan) -> MemoryEstimate:
    """Compute an upper bound of a job's memory from its sizes, as if everything was computed at once and kept."""
    model, sizes = job.model, job.sizes
    n, s, e, t = sizes.residues, sizes.sequences + sizes.templates, sizes.extra, sizes.templates
    pairs = n * n * max(model.c_z, model.evoformer.pair.c_triangle)
    aligned, extra = s * n * model.c_m, e * n * model.c_e
    heads = max(model.evoformer.heads, model.evoformer.pair.heads)
    logits = heads * n * (n * n + s * n + s * s + e * n + t * n * n)
    outer = n * n * model.evoformer.c_outer**2
    block_elements = 16 * (pairs + aligned + extra) + 4 * logits + 2 * outer + 64 * n * (n + 64) * (t + 1)
    blocks = model.evoformer.blocks + model.extra_blocks + t * model.templates.blocks if job.training else 1
    copies = 8 if job.learns else 2
    passes = (job.recycles + 1) * model.ensemble
    features = 4 * passes * n * (64 * s + 32 * e) + 4 * n * n * 64
    width = max(4, DTYPES[plan.precision].itemsize)
    weights = copies * width * parameters(model)
    peak = weights + width * block_elements * (2 + 2 * blocks) * plan.batch + features
    return MemoryEstimate(peak=peak, weights=weights, features=features)


# Suggestions


class NothingFitsError(UserError):
    """No plan fits. The message says what the plan with the least memory needs, and what would fit."""

    def __init__(self, job: Job, machine: Machine, considered: Sequence[Candidate], tell: Progress) -> None:
        self.considered = considered
        least = min((entry for entry in considered if entry.memory is not None), key=lambda entry: entry.memory.peak)  # type: ignore[union-attr]
        task = "a training on" if job.learns else "folding" if job.gradient is None else "a gradient by the sequence of"
        sizes = f"{job.sizes.residues:,} residues with {job.sizes.sequences + job.sizes.extra:,} alignment rows"
        would = "; ".join(_suggestions(job, machine, least.plan, tell))
        remedy = f"what would fit: {would}" if would else "not even a few residues fit; give more memory"
        super().__init__(f"{task} {sizes}, {describe_plan(least.plan, job.training)}, {least.reason}; {remedy}")


def _suggestions(job: Job, machine: Machine, tightest: Plan, tell: Progress) -> Iterator[str]:
    """Yield changes with which a job would fit: more devices, 16-bit precision, fewer residues."""
    tell(0, 1, "what would fit")
    memory = estimate(job, tightest, machine)
    # At best each of p devices holds 1/p of these bytes.
    shared = (memory.peak - memory.weights) * tightest.axial
    recompute: Recompute | None = "block" if job.training else None

    def enough(devices: int) -> bool:
        plan = replace(tightest, data=1, axial=devices, offload=False, recompute=recompute)
        if memory.weights + shared // devices > machine.free:
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
    if most := max_residues(job, machine, tightest, tell):
        yield f"at most {most:,} residues"


def max_residues(job: Job, machine: Machine, plan: Plan, tell: Progress = no_progress) -> int:
    """Find the largest number of residues that fits with a plan, to about 3 %. Chunks grow in proportion.

    The memory apart from the weights is modelled as a n + b n^2, so a few estimates suffice. Returns 0 if nothing fits.
    """
    fits, at, points = 0, max(job.sizes.residues, 2 * MIN_CHUNK), list[tuple[int, int]]()
    fails = math.inf
    # Reduce the size without estimates while the lower bound is too large.
    while at > MIN_CHUNK:
        bound = lower_bound(replace(job, sizes=replace(job.sizes, residues=at)), plan)
        if not why_not_fit(bound, machine):
            break
        at = max(at - at // 8 - 1, MIN_CHUNK)
    for number in range(MAX_ESTIMATES):
        tell(number, MAX_ESTIMATES, f"whether {at:,} residues fit")
        sized = replace(job, sizes=replace(job.sizes, residues=at))
        chunk = None if plan.chunk is None else max(MIN_CHUNK, math.ceil(plan.chunk * at / job.sizes.residues))
        memory = estimate(sized, replace(plan, chunk=chunk), machine, rounded=False)
        always = with_margin(memory.weights, machine.kind) - (memory.weights if machine.loaded else 0)
        points.append((at, max(1, needed_bytes(memory, machine) - always)))
        if why_not_fit(memory, machine):
            fails = min(fails, at)
        else:
            fits = max(fits, at)
        if always >= machine.free or fails <= LENGTH_TOLERANCE * fits or fails <= MIN_CHUNK:
            break
        # Slightly less than the model says, so that it fits.
        guess = int(0.99 * min(16 * at, _residues_for(machine.free - always, points)))
        if memory.host > (machine.host or math.inf) or (guess > at and at >= fails):
            guess = int(0.9 * at)
        if 0 < guess <= LENGTH_TOLERANCE * fits:
            break
        at = max(min(guess, math.ceil(fails) - 1 if fails < math.inf else guess), MIN_CHUNK)
    return fits


def _residues_for(available: int, points: Sequence[tuple[int, int]]) -> float:
    """Solve a n + b n^2 = available bytes for n, with a and b from the last two points (residues, bytes).

    With a single point the memory counts as proportional to n. This overshoots, and the next guess is interpolated.
    """
    n, needed = points[-1]
    before, less = points[-2] if len(points) > 1 and points[-2][0] != n else (0, 0)
    pair = (needed / n - less / before) / (n - before) if before else 0.0
    linear = needed / n - pair * n
    if pair <= 0:
        return n * available / needed
    if linear < 0:
        return n * (available / needed) ** (1 / 3)
    return (math.sqrt(linear**2 + 4 * pair * available) - linear) / (2 * pair)


def describe_plan(plan: Plan, training: bool = False) -> str:
    """Describe a plan: "data 4 x axial 2, blocks recomputed", or of a fold "slices of 16 rows, in place"."""
    default, sync = SyncConfig(), plan.sync
    words = [describe_grid(plan)] if ranks_of(plan) > 1 else []
    if plan.recompute:
        exception = f", all but the last {plan.keep_blocks}" if plan.keep_blocks else ""
        words.append(f"{plan.recompute}s recomputed{exception}")
    elif training and not plan.offload:
        words.append("everything kept")
    if plan.chunk is not None:
        words.append(f"slices of {plan.chunk} row{'s' * (plan.chunk > 1)}{', in place' if plan.in_place else ''}")
    elif not training:
        words.append("whole")
    if plan.offload:
        words.append("z in host memory" if plan.in_place else "saved tensors in host memory")
    words += [f"{plan.batch} examples together"] if plan.batch > 1 else []
    words += [f'products by "{plan.triangle}"'] if plan.triangle != "auto" else []
    words += [f"{sync.strategy} sums"] if sync.strategy != default.strategy else []
    words += ["sharded state"] if sync.shard_state else []
    words += [f"buckets of {sync.bucket:g} MiB"] if sync.bucket != default.bucket else []
    return ", ".join(words)


def describe_grid(plan: Plan) -> str:
    """Format the grid of a plan: "data 4 x axial 2"."""
    sizes = {"data": plan.data, "axial": plan.axial, "branch": plan.branch}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
