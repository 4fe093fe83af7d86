"""`warpfold simulate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warpfold.arguments import Seed, argument, decides, reads, runs, writes
from warpfold.cli.common import AsJson, Axial, Branch, Change, command, show, show_table
from warpfold.errors import UserError
from warpfold.files import check_new, write_atomically
from warpfold.progress import as_time, progress_bar, within

if TYPE_CHECKING:
    from warpfold.cost.simulation import SimulatedTraining

Settings = Annotated[str, argument("What `train` reads: a TOML file or a preset.")]
Devices = Annotated[int | None, runs("How many there are in all; default: 1, or those of --cluster.", min=1)]
Node = Annotated[int | None, runs("Devices of each node; default: 8.", min=1)]
Kind = Annotated[str, runs("A GPU that need not be here: A100, H100, H200, B200 ...", "--device")]
LinkName = Annotated[
    str | None,
    runs("Between nodes: ib400 (the default), roce100, eth25 (Gb/s), ib200x4 for four adapters on each.", "--link"),
]
ClusterFile = Annotated[
    Path | None, reads("What `doctor --cluster` measured; else vendor specifications.", "--cluster")
]
Data = Annotated[int | None, runs("Examples at the same time; what is not given is chosen.", "--plan.data")]
Passes = Annotated[int | None, decides("Passes before the last, at most; default: the model's.", "--recycles", min=0)]
Graphs = Annotated[bool, runs("As if graphs held whole steps, messages too; the code's are for one process.")]
Loaders = Annotated[int | None, runs("Processes of each data rank that make examples; 0: never waited for.", min=0)]
MakeSeconds = Annotated[float | None, runs("Seconds in which one of them makes an example, in the median.", min=0)]
Slow = Annotated[float, runs("The share of examples that take ten times as long.", "--slow", min=0, max=1)]
Spread = Annotated[float | None, runs("How much devices differ, as a share of their speed.", "--spread", min=0)]
Failures = Annotated[float, runs("Of all devices together, each of which ends the run.", "--failures-per-day", min=0)]
Restart = Annotated[float, runs("Seconds from a failure until it trains again.", min=0)]
Validate = Annotated[float, runs("Seconds that each validation takes.", min=0)]
Price = Annotated[float | None, decides("Of a device for an hour, in any currency.", min=0)]
Count = Annotated[int | None, decides("Steps of the whole training; default: the settings'.", min=1)]
Figure = Annotated[Path | None, writes("Picture of a block's timeline, forward and backward: .svg or .png.")]


@command(
    example="Example:  warpfold simulate monomer --devices 2048 --plan.axial 8 --link ib400 --set optim.accumulate=256"
    "\n\nWhat failures cost:  warpfold simulate monomer --devices 128 --failures-per-day 2 --price 2.5"
)
def simulate(
    settings: Settings,
    devices: Devices = None,
    node: Node = None,
    device: Kind = "H100",
    link: LinkName = None,
    cluster: ClusterFile = None,
    data: Data = None,
    axial: Axial = None,
    branch: Branch = None,
    change: Change = None,
    recycles: Passes = None,
    graphs: Graphs = False,
    workers: Loaders = None,
    example_seconds: MakeSeconds = None,
    slow: Slow = 0.0,
    spread: Spread = None,
    failures: Failures = 0.0,
    restart: Restart = 120.0,
    validation_seconds: Validate = 0.0,
    price: Price = None,
    steps: Count = None,
    seed: Seed = 0,
    figure: Figure = None,
    as_json: AsJson = False,
) -> None:
    """Say how long a step of training takes on a cluster, and a whole training, on paper; nothing is computed.

    The schedule is the code's own, recorded; times are of data sheets, or measured where this machine is the cluster's.
    """
    from warpfold.training.config import load_settings
    from warpfold.training.simulating import chance_of, interruptions_of, known_cluster, run_scenario, scenario_of

    _check(figure)
    given = load_settings(settings, change or [])
    with progress_bar(every=10) as progress:
        found = scenario_of(
            given,
            known_cluster(cluster, devices, node, device, link),
            {"data": data, "axial": axial, "branch": branch},
            chance_of(workers, example_seconds, slow, spread),
            interruptions_of(given, failures, restart, validation_seconds),
            recycles,
            within(progress, 0, 2, "choosing a plan, "),
            graphs=graphs,
            seed=seed,
            **({} if steps is None else {"steps": steps}),
        )
        result, spans = run_scenario(found, within(progress, 1, 2))
    if as_json:
        cost = {} if price is None else {"cost": price * result.device_hours}
        show(result.as_json() | cost)
    else:
        _say(result, price)
    if figure is not None:
        from warpfold.report.timeline import draw_timeline

        write_atomically(figure, draw_timeline(spans, found.job.model.evoformer.blocks, figure.suffix[1:]))
        typer.echo(f"wrote {figure}", err=as_json)


def _check(figure: Path | None) -> None:
    """Raise UserError where a picture cannot be written."""
    if figure is not None:
        if figure.suffix not in (".svg", ".png"):
            raise UserError(f"--figure {figure}: a picture's name ends in .svg or .png")
        check_new(figure)


def _say(found: "SimulatedTraining", price: float | None) -> None:
    """Print a step, where its time goes, and the whole training."""
    from warpfold.cost.planner import joined

    given, steps, whole = found.scenario, found.steps, found.training
    plan, cluster = given.plan, given.cluster
    typer.echo(
        f"{given.ranks} x {cluster.device or given.rates.name}; {joined(cluster)}; data {plan.data} x axial "
        f"{plan.axial} x branch {plan.branch}; {given.job.sizes}; {given.examples} examples a "
        f"step, {plan.precision}; device {given.rates.how}"
    )
    typer.echo(
        f"a step takes {steps.percentile(50):.3f} s (5 to 95 % of steps: {steps.percentile(5):.3f} to "
        f"{steps.percentile(95):.3f} s; {given.job.recycles} recycling passes at most), "
        f"{found.examples_per_second:.1f} examples/s; efficiency {found.efficiency:.0%} of one that only computes"
    )
    if given.said:
        typer.echo(f"the plan that training would choose: {given.said}")
    names = {"compute": "operations", "exposed": "waits for messages", "launch": "waits for the host's launches",
             "stragglers": "waits for slower ranks", "loader": "waits for examples"}  # fmt: skip
    taken = {names[name]: max(0.0, seconds) for name, seconds in steps.parts.items()}
    rows = [[name, f"{seconds:.4f}", f"{seconds / steps.mean:.1%}"] for name, seconds in taken.items()]
    show_table(["in the mean", "s", "share"], rows)
    cost = "" if price is None else f", {price * found.device_hours:,.0f} at {price:g} a device-hour"
    typer.echo(f"{given.steps:,} steps: {whole.days:.2f} days, {found.device_hours:,.0f} device-hours{cost}")
    _say_parts(whole)


def _say_parts(whole: Any) -> None:
    """Print what a training does beside its steps."""
    parts = {"saving": whole.saving, "validating": whole.validating, "repeated after failures": whole.repeated,
             "restarting": whole.restarting}  # fmt: skip
    said = [f"{name} {as_time(seconds)}" for name, seconds in parts.items() if seconds >= 1]
    if said:
        failed = f"; {whole.failed:.1f} failures" if whole.failed else ""
        typer.echo(f"beside its steps: {', '.join(said)}{failed}")
