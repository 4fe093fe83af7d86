"""Choose how a job runs, before it runs: what each plan needs and how long it takes, and the fastest that fits.

Memory is what the model's own code holds on tensors without memory (cost/memory.py), time is counted work by a device's
rates (cost/seconds.py).  Keys of the plan that are given stay as they are; precision is never among those chosen.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from warpfold.cost.job import Job
from warpfold.cost.machine import Machine, in_gb
from warpfold.cost.memory import MemoryEstimate, estimate_memory, with_margin
from warpfold.cost.plan_words import describe_plan, duration
from warpfold.cost.rates import Rates
from warpfold.cost.seconds import TimeEstimate, estimate_seconds, parameters
from warpfold.errors import UserError
from warpfold.parallel.plan import CACHED, DTYPES, Plan, Recompute
from warpfold.progress import Progress, no_progress, within

SLICES = (4, 16, 64, 256)  # into how many slices z is cut
FEWEST = 4  # rows of a slice: with fewer, calls cost more than what they compute
EQUAL = 1.1  # plans whose times differ by less are equally fast, as far as anybody knows; the simplest is taken
STEPS = 16  # sizes between a power of two and the next for which memory is estimated: at most 6 % too many residues
NEARLY = 1.3  # what needs so many times what is free, for rounded sizes, does not fit for its own sizes either
LOOKS = 8  # estimates, at most, that the longest protein is looked for with
CHOSEN = ("data", "axial", "chunk", "in_place", "offload")  # keys of the plan of a prediction that are chosen
CHOSEN_IN_TRAINING = ("data", "axial", "recompute", "keep_blocks", "offload")


@dataclass(frozen=True)
class Considered:
    """A plan that was looked at; memory, seconds: None where nobody needed to know.  reason: why it does not fit."""

    plan: Plan
    memory: MemoryEstimate | None
    seconds: TimeEstimate | None
    reason: str = ""


@dataclass(frozen=True)
class Choice:
    """A plan for a job, and what it was chosen from, from the fastest to the tightest.

    memory: of the job, or of one a little larger.  seconds: None where no rates are known, or where the plan was
    beyond doubt.
    """

    job: Job
    machine: Machine
    plan: Plan
    memory: MemoryEstimate
    seconds: TimeEstimate | None
    considered: tuple[Considered, ...]

    @property
    def evident(self) -> bool:
        """Whether the job is so small that nothing had to be estimated."""
        return all(one.memory is None for one in self.considered)

    def __str__(self) -> str:
        """ "slices of 16 rows, in place: 3.1 of 18.0 GB, about 4 min"."""
        have = memory_of_free(self.memory, self.machine)
        return f"{describe_plan(self.plan, self.job.training)}: {have}" + (
            f", {duration(self.seconds)}" if self.seconds else ""
        )


def choose(
    job: Job,
    machine: Machine,
    fixed: Mapping[str, Any] | None = None,
    every: bool = False,
    examples: int = 1,
    tell: Progress = no_progress,
) -> Choice:
    """Return the fastest plan that fits, the simplest of those that are equally fast.

    fixed: keys of the plan that stay as they are.  every: estimate all plans, not only until one fits, and for these
    very sizes; else what needs little by a bound is run whole, without an estimate.  examples: how many of them there
    are to fold: devices that do not share one fold others; a training has as many as `optim.accumulate`.
    Errors: UserError where nothing fits, saying what would; ValueError for keys that no plan can have together.
    """
    plans = candidates(job, machine, fixed or {}, kept=False)
    if not every and (bound := _evident(job, plans, machine, examples)) is not None:
        rest = (Considered(plan, None, None) for plan in plans)
        return Choice(job, machine, plans[0], bound, None, tuple(rest))
    if all(lacking(lower_bound(job, plan), machine) for plan in plans):  # nor is it of interest how long they take
        bounds = [(plan, lower_bound(job, plan)) for plan in plans]
        too_large = [Considered(plan, bound, None, lacking(bound, machine)) for plan, bound in bounds]
        raise NothingFitsError(job, machine, fixed or {}, too_large, tell)
    plans = candidates(job, machine, fixed or {}, tell=within(tell, 0, 3)) if job.training else plans
    looked, chosen = list[Considered](), None
    for plan, seconds in _by_time(job, machine, plans, examples, within(tell, 1, 3)):
        if chosen is not None and not every:
            looked.append(Considered(plan, None, seconds))
            continue
        within(tell, 2, 3)(len(looked), len(plans), f"estimating memory: {describe_plan(plan, job.training)}")
        memory = estimate(job, plan, machine, rounded=not every)
        looked.append(Considered(plan, memory, seconds, lacking(memory, machine)))
        if chosen is None and not looked[-1].reason:
            chosen = looked[-1]
    if chosen is None or chosen.memory is None:
        raise NothingFitsError(job, machine, fixed or {}, looked, tell)
    return Choice(job, machine, chosen.plan, chosen.memory, chosen.seconds, tuple(looked))


def tighter(choice: Choice) -> Choice | None:
    """Return the next plan of the ladder that needs less memory, where a plan ran out of it nevertheless; None: none.

    It is in `considered` behind the plan that was chosen.
    """
    plans = [one.plan for one in choice.considered]
    now = estimate(choice.job, choice.plan, choice.machine)
    for one in choice.considered[plans.index(choice.plan) + 1 :]:
        memory = one.memory or estimate(choice.job, one.plan, choice.machine)
        if memory.peak < now.peak:
            return replace(choice, plan=one.plan, memory=memory, seconds=one.seconds)
    return None


# Which plans there are


def candidates(
    job: Job, machine: Machine, fixed: Mapping[str, Any], kept: bool = True, tell: Progress = no_progress
) -> list[Plan]:
    """Return the plans that could run a job, the simplest first; none has another value of a fixed key.

    kept: find out how many blocks of a training can keep everything, which needs estimates.
    """
    found: list[Plan] = []
    for devices in _grids(job, machine, fixed):
        ways = _prediction_ways(job, machine)
        for way in _training_ways(job, machine, devices, fixed, kept, tell) if job.training else ways:
            keys = devices | {key: value for key, value in way.items() if key not in fixed} | dict(fixed)
            if not job.training and "in_place" not in fixed:
                keys["in_place"] = keys.get("chunk") is not None
            plan = possible(keys)
            if plan is not None and plan not in found and not (plan.offload and not job.training and not plan.in_place):
                found.append(plan)
    return found or [Plan(**fixed)]  # which says what is wrong with it


def possible(keys: Mapping[str, Any]) -> Plan | None:
    """Return the plan of keys that were put together; None where they do not go together."""
    try:
        return Plan(**keys)
    except ValueError:
        return None


def _grids(job: Job, machine: Machine, fixed: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """Yield how the devices may share out the work: first an example each, then more and more of them share one."""
    branch = fixed.get("branch", 1)
    for axial in range(1, machine.devices + 1):
        data, rest = divmod(machine.devices, axial * branch)
        accumulate = job.optim.accumulate if job.training and job.optim is not None else data
        agrees = fixed.get("axial", axial) == axial and fixed.get("data", data) == data
        if rest == 0 and 0 < data <= accumulate and agrees:
            yield {"data": data, "axial": axial}
    if fixed.get("axial", 1) * branch > machine.devices:
        yield {}


def _prediction_ways(job: Job, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield whole; in more and more slices, in place; z in host memory."""
    residues = rounded(job).sizes.residues
    yield {"chunk": None}
    sizes = {max(FEWEST, math.ceil(residues / count)) for count in SLICES}
    if machine.kind == "cpu":
        sizes.add(cached_rows(job))
    chunks = [size for size in sorted(sizes, reverse=True) if size < residues]
    yield from ({"chunk": chunk} for chunk in chunks)
    yield from ({"chunk": chunk, "offload": True} for chunk in chunks[-2:])


def cached_rows(job: Job) -> int:
    """Return how many rows of the largest temporary, an attention's logits, are in the caches of a CPU (`CACHED`)."""
    longest = max(job.sizes.residues, job.sizes.sequences)
    return max(FEWEST, CACHED // (8 * longest**2))


def _training_ways(
    job: Job, machine: Machine, devices: Mapping[str, int], fixed: Mapping[str, Any], kept: bool, tell: Progress
) -> Iterator[dict[str, Any]]:
    """Yield everything kept; recomputed but for as many blocks as fit; all of it; what is kept in host memory."""
    yield {"recompute": None}
    kinds: tuple[Recompute, ...] = ("block", "layer")
    for kind in kinds:
        keys: dict[str, Any] = {"recompute": kind}
        plan = possible({**devices, **keys, **fixed}) if kept else None
        counts = plan is not None and plan.recompute == kind and "keep_blocks" not in fixed
        if plan is not None and counts and (most := most_kept(job, machine, plan, tell)):
            yield keys | {"keep_blocks": most}
        yield keys
    yield from ({"recompute": kind, "offload": True} for kind in kinds)


def most_kept(job: Job, machine: Machine, plan: Plan, tell: Progress = no_progress) -> int:
    """Return how many of the last blocks can keep everything: memory grows by the same with each of them.

    0 also where all can, and nothing need be computed again.
    """

    def needs(plan: Plan, rounded: bool = False) -> MemoryEstimate:
        """Return the estimate of a plan, and say so before."""
        tell(0, 1, f"estimating memory: {describe_plan(plan, job.training)}")
        return estimate(job, plan, machine, rounded)

    blocks = job.model.evoformer.blocks
    if blocks < 2 or not lacking(needs(replace(plan, recompute=None), rounded=True), machine):
        return 0
    first, second = (needs(replace(plan, keep_blocks=count)) for count in (0, 1))
    one = with_margin(second.peak, machine.kind) - with_margin(first.peak, machine.kind)
    left = machine.free - needed_bytes(first, machine)
    most = min(blocks - 1, left // max(one, 1)) if left > 0 else 0
    while most > 0 and lacking(needs(replace(plan, keep_blocks=most)), machine):
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
    """Return what a plan needs for a job; rounded: or for one a little larger, unless that is nearly too large.

    Of a job that is far too large a bound is enough, as nothing has to be run for it.
    """
    if not job.training:
        plan = replace(plan, data=1)
    bound = lower_bound(job, plan)
    if lacking(bound, machine):
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
    """Return what is needed of what is free, in words: "3.1 of 18.0 GB"."""
    needed, unit = needed_bytes(memory, machine), in_gb(machine.free)
    return f"{needed / 1e9:.1f} of {unit}" if needed >= 5e7 and machine.free >= 1e8 else f"{in_gb(needed)} of {unit}"


def lacking(memory: MemoryEstimate, machine: Machine) -> str:
    """Return what a plan lacks here, or ""."""
    needed, needs = needed_bytes(memory, machine), "needs at least" if memory.at_least else "needs"
    if needed > machine.free:
        return f"{needs} {in_gb(needed)}, {in_gb(machine.free)} are free"
    if machine.host is not None and memory.host > machine.host:
        where = "on disk for temporary files" if machine.kind == "cpu" else "of host memory"
        return f"{needs} {in_gb(memory.host)} {where}, {in_gb(machine.host)} are free"
    return ""


def _evident(job: Job, plans: Sequence[Plan], machine: Machine, examples: int) -> MemoryEstimate | None:
    """Return a bound of what the first plan needs, where it is plain that this one is best; else None.

    The first computes everything at once, where keys that are given do not say otherwise, and shares out the least.
    """
    first, sizes = plans[0], job.sizes
    longest = max(sizes.residues, sizes.sequences)
    # On a CPU slices can be faster than the whole, but not where the whole's largest temporaries are in its caches.
    cached = 8 * longest**2 * max(longest, sizes.extra) <= CACHED
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
        kept = 0 if plan.offload else plan.batch * model.evoformer.blocks * shard
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
    copies = 8 if job.training else 2
    passes = (job.recycles + 1) * model.ensemble
    features = 4 * passes * n * (64 * s + 32 * e) + 4 * n * n * 64
    width = max(4, DTYPES[plan.precision].itemsize)
    weights = copies * width * parameters(model)
    peak = weights + width * one * (2 + 2 * blocks) * plan.batch + features
    return MemoryEstimate(peak=peak, weights=weights, features=features)


# How long they take


def _by_time(
    job: Job, machine: Machine, plans: Sequence[Plan], examples: int, tell: Progress
) -> list[tuple[Plan, TimeEstimate | None]]:
    """Return plans from the fastest on; of those that are equally fast the simplest first; as they are without rates.

    The time is that of all examples, of which `data` are at work at once.
    """
    left = list[tuple[Plan, TimeEstimate | None]]()

    def told(what: str) -> None:
        """Say what is measured."""
        tell(len(left), len(plans), what)

    rates = machine.rates(DTYPES[plans[0].precision], told) if len(plans) > 1 else None
    for plan in plans:
        told(f"estimating time: {describe_plan(plan, job.training)}")
        left.append((plan, seconds(job, plan, rates)))
    if job.training and job.optim is not None:
        examples = job.optim.accumulate
    found: list[tuple[Plan, TimeEstimate | None]] = []
    while left:
        times = [math.inf if time is None else time.total * math.ceil(examples / plan.data) for plan, time in left]
        found.append(left.pop(next(i for i, time in enumerate(times) if time <= EQUAL * min(times))))
    return found


def seconds(job: Job, plan: Plan, rates: Rates | None) -> TimeEstimate | None:
    """Return how long a plan takes; None where the rates of the device, in this precision, are not known."""
    if rates is None:
        return None
    try:
        return estimate_seconds(job, plan, rates)
    except ValueError:  # no rate of this dtype
        return None


# What would fit


class NothingFitsError(UserError):
    """No plan fits: a message that says what the tightest needs, and what would fit."""

    def __init__(
        self, job: Job, machine: Machine, fixed: Mapping[str, Any], looked: Sequence[Considered],
        tell: Progress = no_progress,
    ) -> None:  # fmt: skip
        self.looked = looked
        least = min((one for one in looked if one.memory is not None), key=lambda one: one.memory.peak)  # type: ignore[union-attr]
        what = "a training on" if job.training else "folding"
        sizes = f"{job.sizes.residues:,} residues with {job.sizes.sequences + job.sizes.extra:,} alignment rows"
        would = "; ".join(_cures(job, machine, least.plan, tell))
        cure = f"what would fit: {would}" if would else "not even a few residues fit; give more memory"
        super().__init__(f"{what} {sizes}, {describe_plan(least.plan, job.training)}, {least.reason}; {cure}")


def _cures(job: Job, machine: Machine, tightest: Plan, tell: Progress) -> Iterator[str]:
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
        return not lacking(estimate(job, plan, machine), machine)

    more = [devices for devices in (2, 4, 8, 16, 32, 64) if devices > machine.devices and tightest.branch == 1]
    if (least := bisect_left(more, True, key=enough)) < len(more):
        yield f"{more[least]} devices"
    if tightest.precision == "fp32":
        tell(0, 1, "whether it fits in bf16")
        if not lacking(estimate(job, replace(tightest, precision="bf16"), machine), machine):
            yield "bf16 (plan.precision)"
    if most := longest(job, machine, tightest, tell):
        yield f"at most {most:,} residues"


def longest(job: Job, machine: Machine, plan: Plan, tell: Progress = no_progress) -> int:
    """Return how many residues fit with a plan, to about one in fifty; of a slice, rows in proportion.

    Memory grows with a power of them, which two sizes tell: a few estimates find it.  0: nothing fits.
    """

    def room(residues: int, turn: int = 0) -> tuple[int, bool]:
        """Return the bytes that are left free, and whether so many residues fit."""
        tell(turn, LOOKS + 1, f"whether {residues:,} residues fit: {describe_plan(plan, job.training)}")
        one = replace(job, sizes=replace(job.sizes, residues=residues))
        chunk = None if plan.chunk is None else max(FEWEST, math.ceil(plan.chunk * residues / job.sizes.residues))
        memory = estimate(one, replace(plan, chunk=chunk), machine, rounded=False)
        return machine.free - needed_bytes(memory, machine), not lacking(memory, machine)

    most, possible = room(FEWEST)
    if not possible:
        return 0
    fits, fails, at = FEWEST, 0, max(job.sizes.residues, 2 * FEWEST)
    while lacking(lower_bound(replace(job, sizes=replace(job.sizes, residues=at)), plan), machine):
        at = max(at - at // 8 - 1, FEWEST)  # without an estimate
    power, before = 2.0, None
    for turn in range(LOOKS):
        left, possible = room(at, turn + 1)
        fits, fails = (at, fails) if possible else (fits, at)
        step = max(1, fits // 100)
        if fails and fails - fits <= 2 * step:
            break
        taken = max(1, most - left)  # by these residues, of what a few leave free
        if before is not None and before[0] != at:
            power = min(3.0, max(0.5, math.log(taken / before[1]) / math.log(at / before[0])))
        before = at, taken
        at = int(at * min(4.0, 0.99 * (most / taken) ** (1 / power)))  # a little less, so that the next one fits
        if fits <= at <= fits + step:
            break
        at = max(min(at, fails - step if fails else 2**20), fits + step)
    return fits
