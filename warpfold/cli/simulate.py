"""`warpfold simulate`: a training of some settings on a cluster that need not be here."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from warpfold.arguments import Seed, argument, decides, reads, runs
from warpfold.cli.common import Answer, Axial, Branch, Change, Figure, check_outputs, command, table, warn
from warpfold.cli.plan import Between, Node, Passes
from warpfold.errors import UserError
from warpfold.files import write_atomically
from warpfold.progress import Progress, as_time, progress_bar, within

if TYPE_CHECKING:
    from rich.table import Table

    from warpfold.cost.links import Cluster
    from warpfold.cost.simulation import Scenario, SimulatedTraining

WAITS = {
    "compute": "operations",
    "exposed": "waits for messages",
    "launch": "waits for the host's launches",
    "stragglers": "waits for slower ranks",
    "loader": "waits for examples",
}


@command(
    example="Example:  warpfold simulate monomer --devices 2048 --plan.axial 8 --link ib400 --set optim.accumulate=256"
    "\n\nWhat failures cost:  warpfold simulate monomer --devices 128 --failures-per-day 2 --price 2.5"
)
@dataclass(frozen=True, kw_only=True)
class SimulateCommand:
    """Say how long a step of training takes on a cluster, and a whole training, on paper; nothing is computed.

    The schedule is the code's own, recorded; times are of data sheets, or measured where this machine is the cluster's.
    """

    settings: Annotated[str, argument("What `train` reads: a TOML file or a preset.")]
    devices: Annotated[int | None, runs("How many there are in all; default: 1, or those of --cluster.", min=1)] = None
    node: Node = None
    device: Annotated[str, runs("A GPU that need not be here: A100, H100, H200, B200 ...")] = "H100"
    link: Between = None
    cluster: Annotated[Path | None, reads("What `doctor --cluster` measured; else vendor specifications.")] = None
    data: Annotated[int | None, runs("Examples at the same time; what is not given is chosen.", "--plan.data")] = None
    axial: Axial = None
    branch: Branch = None
    change: Change = None
    recycles: Passes = None
    graphs: Annotated[bool, runs("As if graphs held whole steps, messages too; the code's hold the passes alone.")] = (
        False
    )
    workers: Annotated[
        int | None, runs("Processes of each data rank that make examples; 0: never waited for.", min=0)
    ] = None
    example_seconds: Annotated[
        float | None, runs("Seconds in which one of them makes an example, in the median.", min=0)
    ] = None
    slow: Annotated[float, runs("The share of examples that take ten times as long.", min=0, max=1)] = 0.0
    spread: Annotated[float | None, runs("How much devices differ, as a share of their speed.", min=0)] = None
    failures: Annotated[
        float, runs("Of all devices together, each of which ends the run.", "--failures-per-day", min=0)
    ] = 0.0
    restart: Annotated[float, runs("Seconds from a failure until it trains again.", min=0)] = 120.0
    validation_seconds: Annotated[float, runs("Seconds that each validation takes.", min=0)] = 0.0
    price: Annotated[float | None, decides("Of a device for an hour, in any currency.", min=0)] = None
    steps: Annotated[int | None, decides("Steps of the whole training; default: the settings'.", min=1)] = None
    seed: Seed = 0
    figure: Figure = None

    def __call__(self) -> Answer:
        """Simulate, and draw a block's timeline, forward and backward."""
        from warpfold.cost.simulation import checkpoint_seconds, simulate

        check_outputs(picture=self.figure)
        spans: list[Any] = []  # what is on the timeline of a step with one pass
        with progress_bar(every=10) as progress:
            given = self._scenario(within(progress, 0, 2, "choosing a plan, "))
            saved = replace(given.interruptions, save=checkpoint_seconds(given.job, given.rates))
            found = simulate(replace(given, interruptions=saved), within(progress, 1, 2), spans.append)
        if self.figure is not None:
            from warpfold.report.figures import draw_timeline

            picture = draw_timeline(spans, given.job.model.evoformer.blocks, self.figure.suffix[1:])
            write_atomically(self.figure, picture)
            warn(f"wrote {self.figure}")
        cost = {} if self.price is None else {"cost": self.price * found.device_hours}
        return Answer(found.as_json() | cost, _text(found, self.price))

    def joined(self) -> "Cluster":
        """Return the cluster of a file, with another number of devices if one is given, or of vendor specifications."""
        from warpfold.cost.links import read_cluster
        from warpfold.cost.machine import planned_cluster, planned_machine
        from warpfold.cost.rates import of_gpu

        if self.cluster is None:
            of_gpu(self.device)
            return planned_cluster(planned_machine(self.device, None, self.devices or 1), self.node, self.link)
        cluster = read_cluster(self.cluster)
        return cluster if self.devices is None else replace(cluster, ranks=self.devices)

    def _scenario(self, tell: Progress) -> "Scenario":
        """Return the scenario; the parts of the plan that neither options nor settings give are chosen, as in `train`.

        A plan that is chosen may leave devices idle.
        Errors: UserError for a given plan that does not fill the cluster, or one that the settings do not allow, or
        that does not fit.
        """
        import torch

        from warpfold.cost.machine import of_sheet, planned_machine
        from warpfold.cost.measured_rates import measured
        from warpfold.cost.planner import CHOSEN_IN_TRAINING, choose
        from warpfold.cost.rates import SHEETS, of_gpu
        from warpfold.cost.replay import ranks_of
        from warpfold.cost.report import choice_in_words
        from warpfold.cost.simulation import Chance, Interruptions, Scenario
        from warpfold.parallel.plan import DTYPES
        from warpfold.training.config import load_settings
        from warpfold.training.planning import training_job

        given, cluster = load_settings(self.settings, self.change or []), self.joined()
        config = given.config()
        job, train = training_job(given, config), config.train
        job = job if self.recycles is None else replace(job, recycles=self.recycles)
        if any(name.lower() in cluster.device.lower() for name in SHEETS):
            rates = of_gpu(cluster.device)
        else:
            rates = measured("cuda" if torch.cuda.is_available() else "cpu", DTYPES[config.plan.precision])
        asked: dict[str, Any] = _given(data=self.data, axial=self.axial, branch=self.branch)
        if given.auto:
            fixed, sync = given.fixed_on_ranks(CHOSEN_IN_TRAINING)
            machine = planned_machine(of_sheet(cluster.device), None, cluster.ranks)
            try:
                choice = choose(job, machine, {**fixed, **asked}, sync, cluster, rates, tell=tell)
            except ValueError as error:
                raise UserError(str(error)) from error
            plan, said = choice.plan, choice_in_words(choice)
        else:
            plan, said = replace(config.plan, **asked), ""
            if (needed := ranks_of(plan)) != cluster.ranks:
                raise UserError(
                    f"plan: data {plan.data} x axial {plan.axial} x branch {plan.branch} does not fill {cluster.ranks} "
                    f"devices; give --devices {needed}, or another plan"
                )
        chance = _given(workers=self.workers, example=self.example_seconds, spread=self.spread, noise=self.spread)
        return Scenario(
            job=job,
            plan=given.config(**vars(plan)).plan,
            said=said,
            cluster=cluster,
            rates=rates,
            examples=config.optim.accumulate,
            steps=self.steps or train.steps,
            chance=Chance(slow=self.slow, **chance),
            interruptions=Interruptions(
                failures=self.failures,
                restart=self.restart,
                save_every=train.save_every,
                validate_every=train.validate_every,
                validate=self.validation_seconds,
            ),
            graphs=self.graphs,
            seed=self.seed,
        )


def _given(**values: Any) -> dict[str, Any]:
    """Return those that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def _text(found: "SimulatedTraining", price: float | None) -> "Iterator[str | Table]":
    """Yield a step, where its time goes, and the whole training."""
    from warpfold.cost.planner import joined

    given, steps, whole = found.scenario, found.steps, found.training
    plan, cluster = given.plan, given.cluster
    yield (
        f"{given.devices} x {cluster.device or given.rates.name}; {joined(cluster)}; data {plan.data} x axial "
        f"{plan.axial} x branch {plan.branch}; {given.job.sizes}; {given.examples} examples a "
        f"step, {plan.precision}; device {given.rates.how}"
    )
    yield (
        f"a step takes {steps.percentile(50):.3f} s (5 to 95 % of steps: {steps.percentile(5):.3f} to "
        f"{steps.percentile(95):.3f} s; {given.job.recycles} recycling passes at most), "
        f"{found.examples_per_second:.1f} examples/s; efficiency {found.efficiency:.0%} of one that only computes"
    )
    if given.said:
        yield f"the plan that training would choose: {given.said}"
    taken = {WAITS[name]: max(0.0, seconds) for name, seconds in steps.parts.items()}
    rows = [[name, f"{seconds:.4f}", f"{seconds / steps.mean:.1%}"] for name, seconds in taken.items()]
    yield table(["in the mean", "s", "share"], rows)
    cost = "" if price is None else f", {price * found.device_hours:,.0f} at {price:g} a device-hour"
    yield f"{given.steps:,} steps: {whole.days:.2f} days, {found.device_hours:,.0f} device-hours{cost}"
    beside = {"saving": whole.saving, "validating": whole.validating, "repeated after failures": whole.repeated,
              "restarting": whole.restarting}  # fmt: skip
    if said := [f"{name} {as_time(seconds)}" for name, seconds in beside.items() if seconds >= 1]:
        failed = f"; {whole.failed:.1f} failures" if whole.failed else ""
        yield f"beside its steps: {', '.join(said)}{failed}"
