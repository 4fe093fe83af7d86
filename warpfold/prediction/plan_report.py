"""The targets of `warpfold plan`, which are queries or proteins of given lengths, and its report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from warpfold.cost.example import ExampleSizes, Job
from warpfold.cost.links import Cluster
from warpfold.cost.machine import Machine
from warpfold.cost.planner import NothingFitsError, choose
from warpfold.cost.report import choice_in_words, job_report, plan_row
from warpfold.data.example.query_files import Given
from warpfold.data.features.choose import SampleConfig
from warpfold.errors import UserError
from warpfold.model.alphafold import ModelConfig
from warpfold.prediction.params import Params
from warpfold.prediction.queries import Query, read_queries
from warpfold.progress import Progress, no_progress, within

# A report with more targets gives upper bounds for those that obviously fit.
ESTIMATED_TARGETS = 20


@dataclass(frozen=True)
class PlanTarget:
    """A named job to plan for."""

    name: str
    job: Job


def sizes_of_query(query: Query, model: ModelConfig, sample: SampleConfig, whole: bool) -> ExampleSizes:
    """Return the sizes of a query in a model; whole: as if it had the largest number of rows."""
    if whole:
        return full_sizes(query.residues, model, sample)
    sequences = min(query.rows, sample.max_msa)
    extra = max(1, min(query.rows - sequences, sample.max_extra))
    return ExampleSizes(
        residues=query.residues, sequences=sequences, extra=extra, templates=min(query.templates, sample.max_templates)
    )


def full_sizes(residues: int, model: ModelConfig, sample: SampleConfig) -> ExampleSizes:
    """Return the sizes of an example with the largest numbers of rows and templates that a model takes."""
    templates = sample.max_templates if model.templates.enabled else 0
    return ExampleSizes(residues=residues, sequences=sample.max_msa, extra=sample.max_extra, templates=templates)


def targets_of_queries(
    given: Given, msas: Sequence[Path], model: ModelConfig, sample: SampleConfig, recycles: int | None
) -> list[PlanTarget]:
    """Read queries as targets; a query without an alignment is planned with the deepest alignment."""
    targets = []
    for query in read_queries(given, msas, model.multimer is not None):
        is_whole = not msas and (query.is_complex or query.rows == 1)
        sizes = sizes_of_query(query, model, sample, whole=is_whole)
        targets.append(PlanTarget(query.name, folding(model, sizes, recycles)))
    return targets


def folding(model: ModelConfig, sizes: ExampleSizes, recycles: int | None) -> Job:
    """Return a prediction as a job."""
    return Job(model=model, sizes=sizes, recycles=model.recycles if recycles is None else recycles)


def check_fits(
    queries: Sequence[Query], params: Params, recycles: int | None, choose_for: Callable[[ExampleSizes, int], object]
) -> None:
    """Raise UserError, before anything runs, if not even the shortest query fits, with what would fit.

    choose_for: chooses a plan for sizes and a number of recycles, or raises UserError.
    """
    all_sizes = [sizes_of_query(query, params.config, params.sample, whole=False) for query in queries]
    passes = params.config.recycles if recycles is None else recycles
    if all_sizes:
        choose_for(min(all_sizes, key=lambda sizes: sizes.residues), passes)


def plan_report(
    targets: Sequence[PlanTarget],
    machine: Machine,
    fixed: Mapping[str, Any],
    sync: Mapping[str, Any] | None = None,
    cluster: Cluster | None = None,
    price: float | None = None,
    tell: Progress = no_progress,
) -> dict[str, Any]:
    """Plan each target on a machine and return a report for JSON, with all plans of the largest target."""
    largest = max(targets, key=lambda target: target.job.sizes.residues)
    reports = []
    for index, target in enumerate(targets):
        target_progress = within(tell, index, len(targets), f"{target.name}, ")
        if target is largest:
            report = job_report(target.name, target.job, machine, fixed, sync, cluster, None, price, target_progress)
            target_report: dict[str, Any] = {key: report[key] for key in ("said", "refused") if key in report}
            target_report |= next((plan for plan in report["plans"] if plan["chosen"]), {})
        else:
            target_report = _said(
                target, machine, fixed, sync, cluster, len(targets) <= ESTIMATED_TARGETS, target_progress
            )
        reports.append({"name": target.name, "residues": target.job.sizes.residues, **target_report})
    machine_report = {"machine": str(machine), "free": machine.free, "devices": machine.devices, "how": machine.how}
    return machine_report | {"targets": reports, "largest": report}


def _said(
    target: PlanTarget, machine: Machine, fixed: Mapping[str, Any], sync: Mapping[str, Any] | None,
    cluster: Cluster | None, every: bool, tell: Progress,
) -> dict[str, Any]:  # fmt: skip
    """Report a target other than the largest. every: estimate all ways; otherwise small targets get an upper bound."""
    try:
        choice = choose(target.job, machine, fixed, sync, cluster, estimate_all=every, tell=tell)
    except NothingFitsError as error:
        return {"refused": str(error)}
    except ValueError as error:
        raise UserError(str(error)) from error
    return {"said": choice_in_words(choice), **plan_row(choice.chosen, choice, machine, target.job, None)}


def with_sizes(job: Job, **sizes: int | None) -> Job:
    """Replace some sizes of a job."""
    return replace(job, sizes=replace(job.sizes, **{name: size for name, size in sizes.items() if size is not None}))
