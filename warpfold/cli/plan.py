"""`warpfold plan`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from warpfold.arguments import argument, decides, reads, runs, writes
from warpfold.cli.common import AsJson, Change, Lists, command, show, show_table
from warpfold.errors import UserError
from warpfold.files import check_new, write_atomically
from warpfold.progress import progress_bar

if TYPE_CHECKING:
    from warpfold.cost.links import Cluster
    from warpfold.cost.machine import Machine
    from warpfold.prediction.plan_report import PlanTarget

PICTURES = (".png", ".svg")


Target = Annotated[
    str, argument("What `predict` folds (FASTA, CSV, A3M ...), or what `train` reads: a TOML file or a preset.")
]
OfEach = Annotated[
    str | None,
    runs("Of each device: 24GB, 24GiB; default: what is free, or its nominal memory.", "--memory", show_default=False),
]
Devices = Annotated[int | None, runs("How many there are; default: 1.", min=1, show_default=False)]
Node = Annotated[int | None, runs("Devices of each node; default: 8.", "--node", min=1)]
Between = Annotated[
    str | None,
    runs("Between nodes: ib400 (the default), roce100, eth25 (Gb/s), ib200x4 for four adapters on each.", "--link"),
]
ClusterFile = Annotated[
    Path | None,
    reads("What `doctor --cluster` wrote of a cluster, in place of --devices, --node and --link.", "--cluster"),
]
Price = Annotated[
    float | None, decides("Of a device for an hour; else what a training takes is in device-hours.", min=0)
]
AnyDevice = Annotated[
    str | None, runs("cpu, cuda, or a GPU that need not be here: A100, H100, H200, 'RTX 4090' ...", "--device")
]
Lengths = Annotated[
    list[int] | None, decides("Fold proteins of so many residues with the model of the settings.", "--residues")
]
Params = Annotated[Path | None, reads("Parameters that would fold; default: the model of monomer.")]
Msa = Annotated[list[Path] | None, reads("Alignments, as of `predict`; default: as many rows as the model takes.")]
Passes = Annotated[int | None, decides("Passes after the first; default: the model's.", "--recycles", min=0)]
MaxMsa = Annotated[int | None, decides("Cluster centres of the alignment.", min=1)]
MaxExtra = Annotated[int | None, decides("Rows of the extra alignment.", min=1)]
Templates = Annotated[int | None, decides("Templates of each protein.", min=0)]
TrunkPrecision = Annotated[
    Literal["fp32", "bf16", "bf16_all", "fp16"] | None,
    runs("Of the trunk's activations; default: as `predict` or the settings.", "--precision"),
]
Figure = Annotated[Path | None, writes("Picture of the memory over the run, by what holds it: .png or .svg.")]


@command(
    cls=Lists,
    example="Example:  warpfold plan query.fasta --memory 24GB --devices 4;  warpfold plan finetune --device H100\n\n"
    "How long a protein can be:  warpfold plan monomer --residues 1000 3000 --device 'RTX 4090' --figure memory.png\n\n"
    "A training on a cluster:  warpfold plan monomer --device H100 --devices 256 --node 8 --link ib400 --price 2.50",
)
def plan(
    target: Target,
    memory: OfEach = None,
    devices: Devices = None,
    node: Node = None,
    link: Between = None,
    cluster: ClusterFile = None,
    device: AnyDevice = None,
    residues: Lengths = None,
    params: Params = None,
    msa: Msa = None,
    recycles: Passes = None,
    max_msa: MaxMsa = None,
    max_extra: MaxExtra = None,
    templates: Templates = None,
    precision: TrunkPrecision = None,
    change: Change = None,
    price: Price = None,
    figure: Figure = None,
    as_json: AsJson = False,
) -> None:
    """Say what a prediction or a training needs and how long it takes, before it runs; nothing is computed.

    Every plan that could run it is shown, and the one that `predict` or `train` would choose; of a training on many
    devices the best dozen.
    """
    from warpfold.data.example.query_files import is_sequence
    from warpfold.prediction.plan_report import with_sizes
    from warpfold.training.config import load_settings

    if figure is not None:
        if figure.suffix not in PICTURES:
            raise UserError(f"--figure {figure}: a picture's name ends in {' or '.join(PICTURES)}")
        check_new(figure)
    asked = _Asked(memory, devices, node, link, cluster, device, price, precision)
    is_query = target == "-" or is_sequence(target) or (Path(target).exists() and Path(target).suffix != ".toml")
    given = load_settings("monomer" if is_query else target, change or [])
    found = _targets(target if is_query else None, given, params, msa or [], residues or [], recycles)
    changed = {"sequences": max_msa, "extra": max_extra, "templates": templates}
    found = [type(one)(one.name, with_sizes(one.job, **changed)) for one in found]
    report = _report(found, given, asked, of_training=not is_query and not residues)
    if as_json:
        show(report)
    else:
        _say(report)
    if figure is not None:
        _draw(report, figure)
        typer.echo(f"wrote {figure}", err=as_json)
    raise typer.Exit(1 if any("refused" in row for row in report["targets"]) else 0)


@dataclass(frozen=True)
class _Asked:
    """What the options say of devices."""

    memory: str | None
    devices: int | None
    node: int | None
    link: str | None
    cluster: Path | None
    device: str | None
    price: float | None
    precision: str | None

    def machine_and_cluster(self) -> "tuple[Machine, Cluster | None]":
        """Return the devices, and how they are joined where there are several.

        Errors: UserError for what contradicts itself, is not known, or is not a cluster.
        """
        from warpfold.cost.links import read_cluster
        from warpfold.cost.machine import of_sheet, parse_memory, planned_cluster, planned_machine

        for name, value in (("--devices", self.devices), ("--node", self.node), ("--link", self.link)):
            if self.cluster is not None and value is not None:
                raise UserError(f"{name}: {self.cluster} says it; leave one of the two out")
        there = None if self.cluster is None else read_cluster(self.cluster)
        device, devices = self.device, self.devices or 1
        if there is not None:
            device, devices = device or of_sheet(there.device), there.ranks
        machine = planned_machine(device, None if self.memory is None else parse_memory(self.memory), devices)
        if there is None and devices > 1:
            there = planned_cluster(machine, self.node, self.link)
        return machine, there

    @property
    def only_for_ranks(self) -> str:
        """Return an option that was given and says something of trainings on several devices; or ""."""
        given = {"--node": self.node, "--link": self.link, "--cluster": self.cluster, "--price": self.price}
        return next((name for name, value in given.items() if value is not None), "")


def _report(found: "list[PlanTarget]", given: Any, asked: _Asked, of_training: bool) -> dict[str, Any]:
    """Return the report of predictions, or of a training.  Errors: UserError for options that do not go together."""
    from warpfold.cost.planner import CHOSEN, CHOSEN_IN_TRAINING
    from warpfold.device import slow_precision
    from warpfold.prediction.plan_report import plan_report

    machine, there = asked.machine_and_cluster()
    if asked.only_for_ranks and not (of_training and there is not None):
        raise UserError(
            f"{asked.only_for_ranks}: it is for trainings on several devices; leave it out, or give --devices"
        )
    fixed, sync = given.fixed_on_ranks(CHOSEN_IN_TRAINING) if of_training else (given.fixed(CHOSEN), {})
    if not of_training:  # of settings, keys that the user gave; the rest is for trainings
        fixed = {key: value for key, value in fixed.items() if key in given.own}
    fixed |= {} if asked.precision is None else {"precision": asked.precision}
    if machine.here and (slow := slow_precision(fixed.get("precision", "fp32"), machine.kind)):
        typer.echo(slow, err=True)
    with progress_bar(every=10) as tell:
        return plan_report(found, machine, fixed, sync, there, asked.price, tell)


def _draw(report: dict[str, Any], figure: Path) -> None:
    """Write the picture of the largest target, or of a rank.  Errors: UserError where nothing fits."""
    from warpfold.report.figures import draw_memory

    largest = report["largest"]
    if not largest["course"]:
        raise UserError(f"{largest['name']}: nothing fits, so there is no course of memory to draw")
    write_atomically(figure, draw_memory(largest["course"], report["free"], figure.suffix[1:]))


def _targets(
    query: str | None, given: Any, params: Path | None, msas: list[Path], residues: list[int], recycles: int | None
) -> "list[PlanTarget]":
    """Return what is to be planned: queries, proteins of some length, or the training of the settings."""
    from dataclasses import replace

    from warpfold.prediction.params import read_params
    from warpfold.prediction.plan_report import PlanTarget, folding, full_sizes, targets_of_queries
    from warpfold.training.planning import training_job

    config = given.config()
    model, sample = config.model, replace(config.data, crop=None)
    if params is not None:
        (known,) = read_params([params])
        model, sample = known.config, known.sample
    elif query is not None or residues:
        sample = type(sample)()  # AlphaFold2's at inference
    if residues:
        if min(residues) < 1:
            raise UserError(f"--residues {min(residues)}: a protein has at least 1")
        return [PlanTarget(f"{n} residues", folding(model, full_sizes(n, model, sample), recycles)) for n in residues]
    if query is not None:
        return targets_of_queries(query, msas, model, sample, recycles)
    job = training_job(given, config)
    return [PlanTarget(given.source, job if recycles is None else replace(job, recycles=recycles))]


def _say(report: dict[str, Any]) -> None:
    """Print the machine, a line for each target, the plans of the largest, and how long a protein can be."""
    from warpfold.cost.machine import in_gb

    largest = report["largest"]
    typer.echo("; ".join([f"on {report['machine']}", *([largest["joined"]] if "joined" in largest else [])]))
    for row in report["targets"]:
        typer.echo(f"{row['name']}: {row.get('said') or row['refused']}")
    sizes = ", ".join(f"{size:,} {name}" for name, size in largest["sizes"].items())
    count = largest["examples"]
    step = f"a step of {count} example{'s' * (count > 1)}" if largest["training"] else largest["name"]
    rates = f"; {largest['rates']} rates" if largest.get("rates") else ""
    typer.echo(f"\nplans of {step} ({sizes}{rates}):")
    show_table(*_table(largest), lambda row: "bold" if row[0] else "dim" if row[-1] != "fits" else "")
    if largest["at_peak"]:
        (chosen,) = (one for one in largest["plans"] if one["chosen"])
        owners = {**largest["at_peak"], "margin": chosen["bytes"] - sum(largest["at_peak"].values())}
        most = sorted(owners.items(), key=lambda item: -item[1])
        shown = [f"{name} {in_gb(size)}" for name, size in most if size > 0.01 * chosen["bytes"]]
        typer.echo(f"at its peak: {', '.join(shown)}")
    if largest["longest"]:
        typer.echo("\nthe longest protein that fits, with as many rows and templates:")
        for title, most in largest["longest"].items():
            typer.echo(f"  {title}: {f'about {most:,} residues' if most else 'none'}")
    if largest["left_out"]:
        typer.echo("\nleft out:")
        for line in largest["left_out"]:
            typer.echo(f"  {line}")


def _table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and rows of the table of plans: columns of which none has anything to say are left out."""
    from warpfold.cost.machine import in_gb
    from warpfold.cost.planner import in_words, sent

    plans = report["plans"]
    priced = any(one["cost_per_million"] is not None for one in plans)
    dear = "cost_per_million" if priced else "device_hours_per_million"
    of_million = "cost of a million" if priced else "device-hours of a million"
    columns = {
        "memory": [None if one["bytes"] is None else in_gb(one["bytes"]) for one in plans],
        "off device": [in_gb(one["host_bytes"]) if one["host_bytes"] else None for one in plans],
        "a step" if report["training"] else "time": [
            None if one["seconds"] is None else in_words(one["seconds"]) for one in plans
        ],
        "efficiency": [
            f"{100 * one['efficiency']:.0f} %" if one["efficiency"] and one["sent_bytes"] else None for one in plans
        ],
        "sent by a rank": [sent(one["sent_bytes"]) if one["sent_bytes"] else None for one in plans],
        of_million: [None if one[dear] is None else f"{one[dear]:,.0f}" for one in plans],
    }
    shown = {head: cells for head, cells in columns.items() if any(cells)}
    rows = []
    for number, one in enumerate(plans):
        fits = "fits" if not one["lacks"] else "too large" if "on disk" not in one["lacks"] else "disk too small"
        fits = "" if one["bytes"] is None else fits
        cells = [cells[number] or "" for cells in shown.values()]
        rows.append(["->" if one["chosen"] else "", one["title"], *cells, fits])
    return ["", "plan", *shown, ""], rows
