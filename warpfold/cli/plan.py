"""`warpfold plan`: estimate memory and time of predictions and training before they run."""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from warpfold import arguments
from warpfold.arguments import (
    PathLike,
    Paths,
    Set,
    argument,
    checked,
    decides,
    parse_memory,
    progress_of,
    reads,
    runs,
    writes,
)
from warpfold.cli.common import Answer, check_outputs, command, log_plans, table, warn
from warpfold.errors import UserError
from warpfold.files import write_atomically
from warpfold.progress import Progress, format_gb, progress_bar

if TYPE_CHECKING:
    from rich.table import Table

    from warpfold.cost.links import Cluster
    from warpfold.cost.machine import Machine
    from warpfold.prediction.plan_report import PlanTarget
    from warpfold.training.config import GivenSettings

log = logging.getLogger("warpfold.plan")
# Far above any real input: titin has 34,350 residues. Beyond these bounds, tensor sizes overflow 64 bits.
MAX_RESIDUES = 100_000
MAX_ROWS, MAX_TEMPLATES = 1_000_000, 1_000


@checked()
def plan(
    target: Annotated[
        PathLike,
        argument(
            "Input of `predict` (FASTA, CSV, A3M ...), or of `train`: a TOML file or a preset.",
            shell=str,
            path="local",
        ),
    ],
    *,
    memory: Annotated[
        str | int | None,
        runs(
            "Memory of each device: 24GB, 24GiB; default: its free or nominal memory.",
            shell=str | None,
            show_default=False,
        ),
    ] = None,
    devices: Annotated[int | None, runs("Number of devices; default: 1.", min=1, show_default=False)] = None,
    node: Annotated[int | None, runs("Devices per node; default: 8.", min=1)] = None,
    link: Annotated[
        str | None,
        runs("Link between nodes: ib400 (the default), roce100, eth25 (Gb/s), ib200x4 for 4 adapters per node."),
    ] = None,
    cluster: Annotated[
        PathLike | None, reads("Cluster file of `doctor --cluster`, instead of --devices, --node and --link.")
    ] = None,
    device: Annotated[str | None, runs("cpu, cuda, or a GPU of another machine: A100, H100, H200, 'RTX 4090' ...")] = (
        None
    ),
    residues: Annotated[
        list[int] | None,
        decides("Fold proteins of these lengths with the model of the settings.", min=1, max=MAX_RESIDUES),
    ] = None,
    design: Annotated[
        bool,
        decides("Plan a gradient by the sequence, as in `design`, instead of a fold; by default without alignment."),
    ] = False,
    params: Annotated[PathLike | None, reads("Parameters of the model; default: the model of monomer.")] = None,
    msa: Annotated[Paths | None, reads("Alignments as for `predict`; default: as many rows as the model uses.")] = None,
    recycles: Annotated[int | None, decides("Most passes before the last; default: the model's.", min=0)] = None,
    max_msa: Annotated[int | None, decides("Cluster centres of the alignment.", min=1, max=MAX_ROWS)] = None,
    max_extra: Annotated[int | None, decides("Rows of the extra alignment.", min=1, max=MAX_ROWS)] = None,
    templates: Annotated[int | None, decides("Templates of each protein.", min=0, max=MAX_TEMPLATES)] = None,
    precision: Annotated[
        Literal["fp32", "bf16", "bf16_all", "fp16"] | None,
        runs("Precision of the trunk's activations; default: that of `predict` or the settings."),
    ] = None,
    set: Set = None,
    price: Annotated[
        float | None,
        decides("Price of a device-hour in any currency; default: costs are in device-hours.", above=0),
    ] = None,
    figure: Annotated[PathLike | None, writes("File for a picture, .svg or .png.")] = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Estimate the memory and time of a prediction or a training run before it starts.

    Returns the machine, an estimate for each target, and under "largest" all possible plans of the largest target with
    the one that `predict` or `train` would choose. A target that does not fit has a reason, "refused".
    Errors: UserError for contradicting options, unknown devices, and targets and files that cannot be read.
    """
    from warpfold.cost.planner import CHOSEN, CHOSEN_IN_TRAINING
    from warpfold.data.example.query_files import is_sequence
    from warpfold.device import caveats
    from warpfold.prediction.plan_report import plan_report, with_sizes
    from warpfold.training.config import load_settings

    figure_path = None if figure is None else Path(figure)
    check_outputs(picture=figure_path)
    arguments.path("target", target)
    source = os.fspath(target)
    is_query = source == "-" or is_sequence(source) or (Path(source).exists() and Path(source).suffix != ".toml")
    settings = load_settings("monomer" if is_query else source, arguments.changes_of("set", set))
    lengths, alignments = residues or [], arguments.paths("msa", msa)
    model = None if params is None else Path(params)
    targets = _targets(settings, source if is_query else None, lengths, model, alignments, recycles)
    if design:
        if not (is_query or lengths):
            raise UserError("--design: it needs a sequence. Pass a query, or its length with --residues.")
        bare_sizes = {} if alignments else {"sequences": 1, "extra": 1, "templates": 0}
        targets = [
            type(planned)(planned.name, replace(with_sizes(planned.job, **bare_sizes), gradient="last"))
            for planned in targets
        ]
    changed = {"sequences": max_msa, "extra": max_extra, "templates": templates}
    targets = [type(target)(target.name, with_sizes(target.job, **changed)) for target in targets]

    machine, joined_cluster = machine_and_cluster(device, devices, memory, node, link, cluster)
    trains = not is_query and not lengths
    for name, value in {"--node": node, "--link": link, "--cluster": cluster, "--price": price}.items():
        if value is not None and not (trains and joined_cluster is not None):
            raise UserError(f"{name}: it is for training on several devices. Omit it, or pass --devices.")
    fixed_settings, sync = settings.fixed_on_ranks(CHOSEN_IN_TRAINING) if trains else (settings.fixed(CHOSEN), {})
    if not trains:
        # Presets fix keys for training. Only those that the user has set apply to predictions.
        fixed_settings = {key: value for key, value in fixed_settings.items() if key in settings.own}
    fixed_settings |= {} if precision is None else {"precision": precision}
    if not trains and fixed_settings.get("precision", "auto") == "auto":
        fixed_settings["precision"] = machine.prediction_precision
    for caveat in caveats(fixed_settings.get("precision", "fp32"), machine.kind) if machine.here else ():
        log.warning("%s", caveat)
    report = plan_report(targets, machine, fixed_settings, sync, joined_cluster, price, progress_of(progress))
    if figure_path is not None and (memory_course := report["largest"]["course"]):
        from warpfold.report.figures import draw_memory

        write_atomically(figure_path, draw_memory(memory_course, report["free"], figure_path.suffix[1:]))
    return report


def machine_and_cluster(
    device: str | None,
    devices: int | None = None,
    memory: str | int | None = None,
    node: int | None = None,
    link: str | None = None,
    file: PathLike | None = None,
) -> "tuple[Machine, Cluster | None]":
    """Return the devices, and for several devices their cluster.  file: a cluster file.

    Errors: UserError for contradicting options, unknown devices, and files that are not clusters.
    """
    from warpfold.cost.links import read_cluster
    from warpfold.cost.machine import planned_cluster, planned_machine
    from warpfold.cost.rates import sheet_of

    for name, value in (("--devices", devices), ("--node", node), ("--link", link)):
        if file is not None and value is not None:
            raise UserError(f"{name}: {file} contains it. Omit one of the two.")
    cluster = None if file is None else read_cluster(Path(file))
    if cluster is not None:
        device, devices = device or sheet_of(cluster.device) or None, cluster.ranks
    machine = planned_machine(device, None if memory is None else parse_memory(memory), devices or 1)
    if cluster is None and devices is not None and devices > 1:
        cluster = planned_cluster(machine, node, link)
    return machine, cluster


def _targets(
    given: "GivenSettings",
    query: str | None,
    lengths: Sequence[int],
    file: Path | None,
    msa: list[Path],
    recycles: int | None,
) -> "list[PlanTarget]":
    """List the targets to plan: queries, proteins of given lengths, or the training of the settings.

    file: parameters of the model.
    """
    from warpfold.prediction.params import read_params
    from warpfold.prediction.plan_report import PlanTarget, folding, full_sizes, targets_of_queries
    from warpfold.training.planning import training_job

    config = given.config()
    model, sample = config.model, replace(config.data, crop=None)
    if file is not None:
        (params,) = read_params([file])
        model, sample = params.config, params.sample
    elif query is not None or lengths:
        # AlphaFold2's sizes at inference.
        sample = type(sample)()
    if lengths:
        jobs = {length: folding(model, full_sizes(length, model, sample), recycles) for length in lengths}
        return [PlanTarget(f"{length} residues", job) for length, job in jobs.items()]
    if query is not None:
        return targets_of_queries(query, msa, model, sample, recycles)
    job = training_job(config)
    return [PlanTarget(given.source, job if recycles is None else replace(job, recycles=recycles))]


@command(
    plan,
    example="Example:  warpfold plan query.fasta --memory 24GB --devices 4;  warpfold plan finetune --device H100\n\n"
    "What a design needs:  warpfold plan monomer_ptm --residues 700 --design --precision bf16 --memory 16GB "
    "--device A100\n\nHow long a protein can be:  warpfold plan monomer --residues 1000 3000 --device 'RTX 4090' "
    "--figure memory.png\n\nA training on a cluster:  warpfold plan monomer --device H100 --devices 256 --node 8 "
    "--link ib400 --price 2.50",
)
def plan_in_shell(given: dict[str, Any]) -> Answer:
    """Estimate the memory and time of a prediction or a training run before it starts.

    All possible plans are listed with the one that `predict` or `train` would choose; for training on several devices,
    the best dozen.
    """
    with progress_bar(every=10) as progress, log_plans():
        report = plan(**given, progress=progress)
    if given["figure"] is not None:
        if report["largest"]["course"]:
            warn(f"wrote {given['figure']}")
        else:
            warn(f"{report['largest']['name']}: nothing fits, so there is no memory timeline to draw")
    return Answer(report, _text(report), any("refused" in row for row in report["targets"]))


def _text(report: dict[str, Any]) -> "Iterator[str | Table]":
    """Yield the machine, a line for each target, the plans of the largest, and the longest protein that fits."""
    largest = report["largest"]
    yield "; ".join([f"on {report['machine']}", *([largest["joined"]] if "joined" in largest else [])])
    for row in report["targets"]:
        yield f"{row['name']}: {row.get('said') or row['refused']}"
    sizes = ", ".join(f"{size:,} {name}" for name, size in largest["sizes"].items())
    count = largest["examples"]
    step = f"a step of {count} example{'s' * (count > 1)}" if largest["training"] else largest["name"]
    rates_text = f"; {largest['rates']} rates" if largest.get("rates") else ""
    yield f"\nplans of {step} ({sizes}{rates_text}):"
    yield table(*_table(largest), lambda row: "bold" if row[0] else "dim" if row[-1] != "fits" else "")
    if largest["at_peak"]:
        (chosen_plan,) = (plan for plan in largest["plans"] if plan["chosen"])
        owners = {**largest["at_peak"], "margin": chosen_plan["bytes"] - sum(largest["at_peak"].values())}
        most = sorted(owners.items(), key=lambda item: -item[1])
        largest_owners = [f"{name} {format_gb(size)}" for name, size in most if size > 0.01 * chosen_plan["bytes"]]
        yield f"at its peak: {', '.join(largest_owners)}"
    if largest["longest"]:
        yield "\nthe longest protein that fits, with as many rows and templates:"
        for title, most in largest["longest"].items():
            yield f"  {title}: {f'about {most:,} residues' if most else 'none'}"
    if largest["left_out"]:
        yield "\nleft out:"
        for line in largest["left_out"]:
            yield f"  {line}"


def _table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Format the heads and rows of the table of plans, without empty columns."""
    from warpfold.cost.report import format_seconds, format_sent_bytes

    plans = report["plans"]
    priced = any(plan["cost_per_million"] is not None for plan in plans)
    cost = "cost_per_million" if priced else "device_hours_per_million"
    cost_head = "cost of a million" if priced else "device-hours of a million"
    speeds = [plan["examples_per_second"] for plan in plans]
    columns = {
        "memory": [None if plan["bytes"] is None else format_gb(plan["bytes"]) for plan in plans],
        "off device": [format_gb(plan["host_bytes"]) if plan["host_bytes"] else None for plan in plans],
        "a step" if report["training"] else "time": [
            None if plan["seconds"] is None else format_seconds(plan["seconds"]) for plan in plans
        ],
        "examples/s": [None if speed is None else f"{speed:.3g}" for speed in speeds],
        "efficiency": [
            f"{100 * plan['efficiency']:.0f} %" if plan["efficiency"] and plan["sent_bytes"] else None for plan in plans
        ],
        "sent by a rank": [format_sent_bytes(plan["sent_bytes"]) if plan["sent_bytes"] else None for plan in plans],
        cost_head: [None if plan[cost] is None else f"{plan[cost]:,.0f}" for plan in plans],
    }
    shown_columns = {head: cells for head, cells in columns.items() if any(cells)}
    rows = []
    for number, plan in enumerate(plans):
        verdict = "fits" if not plan["lacks"] else "too large" if "on disk" not in plan["lacks"] else "disk too small"
        verdict = "" if plan["bytes"] is None else verdict
        cells = [cells[number] or "" for cells in shown_columns.values()]
        rows.append(["->" if plan["chosen"] else "", plan["title"], *cells, verdict])
    return ["", "plan", *shown_columns, ""], rows
