"""A training on a cluster, on paper: record its step, replay it, draw what chance does, and say where the time goes."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from warpfold.cost.job import Job
from warpfold.cost.links import Cluster
from warpfold.cost.rates import Rates
from warpfold.cost.record import RecordedStep, record
from warpfold.cost.replay import Pace, ReplayedStep, Span, replay
from warpfold.cost.seconds import parameters
from warpfold.cost.steps import Chance, Steps, draw_steps
from warpfold.cost.training import STATES, Interruptions, WholeTraining, whole_training
from warpfold.data.load.schedule import share_of
from warpfold.parallel.plan import Plan
from warpfold.progress import Progress, no_progress, within


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is simulated.  examples: of a step, on all ranks; steps: of the whole training.

    said: why this plan, where it was chosen.
    graphs: as if graphs of the device held whole steps, messages included (the code's graphs are for one process).
    """

    job: Job
    plan: Plan
    cluster: Cluster
    rates: Rates
    examples: int
    steps: int
    chance: Chance = field(default_factory=Chance)
    interruptions: Interruptions = field(default_factory=Interruptions)
    graphs: bool = False
    said: str = ""
    drawn: int = 300  # steps that are drawn
    seed: int = 0

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.plan.data * self.plan.axial * self.plan.branch


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
        """Return the share of the ranks' time that one device alone would need for the same examples."""
        return self.alone / (self.steps.mean * self.scenario.ranks)

    @property
    def device_hours(self) -> float:
        """Return those of the whole training."""
        return self.scenario.ranks * self.training.seconds / 3600

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON can hold them; seconds, bytes."""
        given, middle = self.scenario, self.times[sorted(self.times)[len(self.times) // 2]]
        return {
            "ranks": given.ranks,
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
    pace = Pace.of(given.rates, given.cluster, given.graphs)
    gpu = given.rates.device != "cpu"
    share = share_of(given.examples, plan.data, 0)  # of the ranks that have most
    items = plan.branch + 2
    halves = [
        record(given.job, plan, share, given.cluster.per_node, gpu, branch, within(tell, branch, items, "recording "))
        for branch in range(plan.branch)
    ]
    schedule = halves[0]
    single = Plan(precision=plan.precision, recompute=plan.recompute, keep_blocks=plan.keep_blocks)
    lone = (
        schedule
        if given.ranks == 1
        else record(given.job, single, 1, None, gpu, tell=within(tell, items - 2, items, "recording, on one device: "))
    )
    passes = range(given.job.recycles + 1)
    times, alone = {}, []
    for n in passes:
        tell(items - 1 + n / len(passes), items, f"replaying a step with {n} recycling passes")
        times[n] = replay_longest(halves, n, plan, pace, *([seen] if n == 0 else []))
        alone.append(_alone(lone, single, n, pace) * (1 if given.ranks == 1 else given.examples))
    drawn = draw_steps(
        times, plan.data, plan.axial * plan.branch, given.chance, schedule.examples, given.drawn, given.seed
    )
    training = whole_training(drawn.mean, given.steps, given.interruptions)
    return SimulatedTraining(given, times, drawn, training, sum(alone) / len(alone))


def replay_longest(
    halves: Sequence[RecordedStep],
    passes: int,
    plan: Plan,
    pace: Pace,
    seen: Callable[[Span], None] = lambda span: None,
) -> ReplayedStep:
    """Return the step of the branch that takes longer, with so many passes without gradient.

    The other waits for it in every block.  halves: the recorded steps of a plan's branches; one where there is one.
    """
    steps = [half.step(passes) for half in halves]
    if len(steps) > 1:
        steps.sort(key=lambda entries: replay(entries, plan, pace).seconds)
    return replay(steps[-1], plan, pace, seen)


def _alone(schedule: RecordedStep, plan: Plan, passes: int, pace: Pace) -> float:
    """Return the seconds of operations alone, launches hidden."""
    return replay(schedule.step(passes), plan, pace).compute


def checkpoint_seconds(job: Job, rates: Rates) -> float:
    """Return how long a step waits for its checkpoint: until its state has been copied to host memory."""
    return rates.host.latency + STATES * 4 * parameters(job.model) / rates.host.bandwidth
