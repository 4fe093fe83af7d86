"""A training on a cluster, on paper: record its step, replay it, draw what chance does, and say where the time goes.

What nothing disturbs is replayed once for each number of passes (`replay.py`); what chance does to it is drawn for
every rank and step, from a seed.  Ranks that share an example wait for each other in every layer, all at the end of a
step.  Between two checkpoints the same work is done again until no failure comes; of failures at a constant rate r,
work of W seconds takes (exp(r W) - 1) / r in the mean, and is begun anew exp(r W) - 1 times (J. Daly, Future Generation
Computer Systems 22, 303, 2006).  Restarts fail at the same rate: each is work of its own, which takes as above.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from warpfold.cost.example import Job
from warpfold.cost.links import Cluster
from warpfold.cost.planner import alone, parameters
from warpfold.cost.rates import Rates
from warpfold.cost.replay import Pace, ReplayedStep, Span, record_rank, replay, replay_longest
from warpfold.errors import UserError
from warpfold.parallel.plan import Plan
from warpfold.progress import Progress, no_progress, within

DAY = 86_400.0
STATES = 4  # numbers of fp32 that a checkpoint has of each parameter: weights, their average, two moments
HOPELESS = 50.0  # failures between two checkpoints, from which on nothing is gained
SETTLING = 0.1  # the share of the steps that are left out: full queues hide at first how slow a loader is


@dataclass(frozen=True, kw_only=True)
class Chance:
    """How ranks differ.  Defaults are guesses, but for the loader's: its figures were measured (docs/figures.md).

    spread: of the devices' lasting speeds, as the standard deviation of their logarithms; noise: of one step.
    example: seconds in which one process of the loader makes one example, in the median; tail: the standard deviation
    of its logarithm.  slow: the share of examples that take `slower` times as long.
    workers: processes of each data rank; 0: the loader keeps nobody waiting.  ahead: examples that each makes ahead.
    """

    spread: float = 0.01
    noise: float = 0.01
    example: float = 0.04
    tail: float = 0.7
    slow: float = 0.0
    slower: float = 10.0
    workers: int = 8
    ahead: int = 4


@dataclass(frozen=True)
class Steps:
    """What was drawn.  seconds: of each step.  parts: where a step's time goes in the mean, seconds; they add up to it.

    ideal: the seconds of each step if no rank were late.
    """

    seconds: np.ndarray
    ideal: np.ndarray
    parts: dict[str, float]

    @property
    def mean(self) -> float:
        """Return the mean seconds of a step."""
        return float(self.seconds.mean())

    def percentile(self, share: float) -> float:
        """Return the seconds that so many percent of the steps do not exceed."""
        return float(np.percentile(self.seconds, share))


@dataclass(frozen=True, kw_only=True)
class Interruptions:
    """What keeps a training from its steps, in seconds where nothing else is said.

    failures: of all devices together, a day.  restart: until it trains again, the checkpoint read.
    save_every, validate_every: steps; 0: never.  save: that a step waits for its checkpoint; the file is written by a
    thread.  validate: that the ranks validate.
    """

    failures: float = 0.0
    restart: float = 120.0
    save_every: int = 500
    save: float = 1.0
    validate_every: int = 1000
    validate: float = 0.0


@dataclass(frozen=True)
class WholeTraining:
    """How long a training takes in the mean, in seconds: the parts add up to `seconds`.

    failed: how many failures there are.
    """

    steps: float
    saving: float
    validating: float
    repeated: float  # work that was lost and is done again
    restarting: float
    failed: float

    @property
    def seconds(self) -> float:
        """Return all of it."""
        return self.steps + self.saving + self.validating + self.repeated + self.restarting

    @property
    def days(self) -> float:
        """Return all of it in days."""
        return self.seconds / DAY


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is simulated.  examples: of a step, on all ranks; steps: of the whole training.

    said: why this plan, where it was chosen.
    """

    job: Job
    plan: Plan
    cluster: Cluster
    rates: Rates
    examples: int
    steps: int
    chance: Chance = field(default_factory=Chance)
    interruptions: Interruptions = field(default_factory=Interruptions)
    said: str = ""
    drawn: int = 300  # steps that are drawn
    seed: int = 0

    @property
    def devices(self) -> int:
        """How many devices there are, those that the plan leaves idle among them."""
        return self.cluster.ranks


@dataclass(frozen=True)
class SimulatedTraining:
    """What came out.  times: of a step that nothing disturbs, by its passes without gradient.

    alone: seconds of a step's examples on one device that waits for nothing, in the mean: what efficiency is of.
    """

    scenario: Scenario
    times: dict[int, ReplayedStep]
    steps: Steps
    training: WholeTraining
    alone: float

    @property
    def examples_per_second(self) -> float:
        """How many examples are learnt from in a second, while nothing fails."""
        return self.scenario.examples / self.steps.mean

    @property
    def efficiency(self) -> float:
        """Return the share of the devices' time that one device alone would need for the same examples."""
        return self.alone / (self.steps.mean * self.scenario.devices)

    @property
    def device_hours(self) -> float:
        """Return those of the whole training."""
        return self.scenario.devices * self.training.seconds / 3600

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON can hold them; seconds, bytes."""
        given, middle = self.scenario, self.times[sorted(self.times)[len(self.times) // 2]]
        return {
            "ranks": given.devices,
            "plan": {name: getattr(given.plan, name) for name in ("data", "axial", "branch", "recompute", "precision")},
            "why": given.said,
            "rates": {"device": given.rates.name, "how": given.rates.how},
            "cluster": asdict(given.cluster),
            "examples_per_step": given.examples,
            "step": {
                "median": self.steps.percentile(50),
                "from": self.steps.percentile(5),
                "to": self.steps.percentile(95),
                "mean": self.steps.mean,
                "parts": self.steps.parts,
                "undisturbed": {passes: time.seconds for passes, time in self.times.items()},
            },
            "sent_bytes": middle.sent,
            "kernels": middle.kernels,
            "collectives_hidden": middle.hidden,
            "exposed_by_group": middle.exposed_by_group,
            "by_op": middle.by_op,
            "by_phase": middle.by_phase,
            "efficiency": self.efficiency,
            "examples_per_second": self.examples_per_second,
            "training": {**asdict(self.training), "seconds": self.training.seconds, "days": self.training.days},
            "device_hours": self.device_hours,
        }


def simulate(
    given: Scenario, tell: Progress = no_progress, seen: Callable[[Span], None] = lambda span: None
) -> SimulatedTraining:
    """Simulate a training.

    seen: is told of everything on the timeline of a step with one pass.
    Errors: UserError as of `record` and `whole_training`.
    """
    plan = given.plan
    pace = Pace.of(given.rates, given.cluster)
    assert given.job.optim is not None
    gpu, job = (
        given.rates.device != "cpu",
        replace(given.job, optim=replace(given.job.optim, accumulate=given.examples)),
    )
    single = replace(alone(plan), batch=1, recompute=plan.recompute, keep_blocks=plan.keep_blocks)
    one = replace(job, optim=replace(given.job.optim, accumulate=1))
    halves = record_rank(job, plan, given.cluster, gpu, within(tell, 0, 3, "recording "))
    (lone,) = record_rank(one, single, given.cluster, gpu, within(tell, 1, 3, "recording, on one device: "))
    passes = range(job.recycles + 1)
    times, by_itself = {}, []
    for n in passes:
        tell(2 + n / len(passes), 3, f"replaying a step with {n} recycling passes")
        times[n] = replay_longest(halves, n, plan, pace, *([seen] if n == 0 else []))
        by_itself.append(given.examples * replay(lone.step(n), single, pace).compute)  # launches hidden
    examples = halves[0].examples
    drawn = draw_steps(times, plan.data, plan.axial * plan.branch, given.chance, examples, given.drawn, given.seed)
    training = whole_training(drawn.mean, given.steps, given.interruptions)
    return SimulatedTraining(given, times, drawn, training, sum(by_itself) / len(by_itself))


def checkpoint_seconds(job: Job, rates: Rates) -> float:
    """Return how long a step waits for its checkpoint: until its state has been copied to host memory."""
    return rates.host.latency + STATES * 4 * parameters(job.model) / rates.host.bandwidth


# Chance


def draw_steps(
    times: Mapping[int, ReplayedStep],
    data: int,
    model: int,
    chance: Chance,
    examples: int = 1,
    count: int = 300,
    seed: int = 0,
) -> Steps:
    """Draw `count` steps of data x model ranks.

    times: of a step, by its passes without gradient; each is as likely.  examples: of a rank and step.
    """
    settle = int(SETTLING * count)
    rng = [np.random.default_rng([seed, stream]) for stream in range(4)]
    recycles = rng[0].choice(sorted(times), count + settle)
    lasting = np.exp(chance.spread * rng[1].standard_normal((data, model)))
    loader = _Loader(chance, data, rng[2])
    now, seconds, ideal, late = 0.0, [], [], []
    for passes in recycles:
        base = times[int(passes)].seconds
        factors = (lasting * np.exp(chance.noise * rng[3].standard_normal((data, model)))).max(axis=1)
        ends = np.full(data, now)
        for _ in range(examples):
            begin = np.maximum(ends, loader.next())
            loader.used(begin)
            ends = begin + base / examples * factors
        undisturbed = base * float(factors.max())
        seconds.append(float(ends.max()) - now)
        ideal.append(base)
        late.append((undisturbed - base, seconds[-1] - undisturbed))
        now = float(ends.max())
    stragglers, loading = np.mean(late[settle:], axis=0)
    drawn = [times[int(passes)] for passes in recycles[settle:]]
    parts = {name: float(np.mean([getattr(one, name) for one in drawn])) for name in ("compute", "exposed", "launch")}
    parts |= {"stragglers": float(stragglers), "loader": float(loading)}
    return Steps(np.array(seconds[settle:]), np.array(ideal[settle:]), parts)


class _Loader:
    """The queues of all data ranks: each example is made by the process that is free first, and used in its turn."""

    def __init__(self, chance: Chance, ranks: int, rng: np.random.Generator) -> None:
        self.chance, self.rng = chance, rng
        self.free = np.zeros((ranks, max(1, chance.workers)))
        self.slots = chance.workers * chance.ahead
        self.ready = np.zeros((ranks, max(1, self.slots)))  # when each of those that are being made will be
        self.turn = 0

    def next(self) -> np.ndarray:
        """Return when the next example of each rank is ready."""
        return self.ready[:, self.turn % self.slots] if self.slots else np.zeros(len(self.free))

    def used(self, when: np.ndarray) -> None:
        """Have another example made in the place of the one that a step has begun with."""
        if not self.slots:
            return
        ranks, place = np.arange(len(self.free)), self.turn % self.slots
        worker = self.free.argmin(axis=1)
        cost = self.chance.example * np.exp(self.chance.tail * self.rng.standard_normal(len(ranks)))
        cost *= np.where(self.rng.random(len(ranks)) < self.chance.slow, self.chance.slower, 1.0)
        begin = np.maximum(self.free[ranks, worker], when)
        self.ready[:, place] = self.free[ranks, worker] = begin + cost
        self.turn += 1


# Failures


def whole_training(step: float, steps: int, told: Interruptions) -> WholeTraining:
    """Return how long so many steps of `step` seconds take in the mean.

    Errors: UserError where failures come so often that no checkpoint is reached.
    """
    saves = steps / told.save_every if told.save_every else 1.0
    validations = steps / told.validate_every if told.validate_every else 0.0
    saving, validating = (saves * told.save if told.save_every else 0.0), validations * told.validate
    work = (steps * step + saving + validating) / max(1.0, saves)  # between two checkpoints
    rate = told.failures / DAY
    if rate * (work + told.restart) > HOPELESS:
        raise UserError(
            f"failures: {told.failures:g} a day leave {1 / rate:.0f} s between two, and {work:.0f} s lie between two "
            f"checkpoints, {told.restart:.0f} s of restart aside, so the training would not end; save more often "
            "(train.save_every)"
        )
    repeated = max(0.0, max(1.0, saves) * work * (_stretched(rate * work) - 1))
    begun = max(1.0, saves) * math.expm1(rate * work)  # restarts, each until one is not interrupted
    restarting = begun * told.restart * _stretched(rate * told.restart)
    failed = begun * math.exp(rate * told.restart)
    return WholeTraining(steps * step, saving, validating, repeated, restarting, failed)


def _stretched(failures: float) -> float:
    """Return how many times as long work takes that so many failures are expected in: (exp(r W) - 1) / (r W)."""
    return math.expm1(failures) / failures if failures else 1.0
