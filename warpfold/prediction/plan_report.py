"""What `warpfold plan` says: the plan of each query, every plan of the largest, and how long is too long."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from warpfold.cost.example import ExampleSizes
from warpfold.cost.job import Job
from warpfold.cost.machine import Machine
from warpfold.cost.plan_words import describe_plan
from warpfold.cost.planner import (
    FEWEST,
    SLICES,
    Choice,
    Considered,
    NothingFitsError,
    choose,
    longest,
    needed_bytes,
)
from warpfold.data.example.query_files import Given
from warpfold.data.features.choose import SampleConfig
from warpfold.errors import UserError
from warpfold.model.alphafold import ModelConfig
from warpfold.parallel.plan import Plan
from warpfold.prediction.params import Params
from warpfold.prediction.queries import Query, read_queries
from warpfold.progress import Progress, no_progress, within
from warpfold.settings import to_dict


@dataclass(frozen=True)
class PlanTarget:
    """Something to plan for, with a name."""

    name: str
    job: Job


def sizes_of_query(query: Query, model: ModelConfig, sample: SampleConfig, whole: bool) -> ExampleSizes:
    """Return the sizes with which a query goes through a model; whole: as if it had all the rows that this takes."""
    if whole:
        return full_sizes(query.residues, model, sample)
    sequences = min(query.rows, sample.max_msa)
    extra = max(1, min(query.rows - sequences, sample.max_extra))
    return ExampleSizes(
        residues=query.residues,
        sequences=sequences,
        extra=extra,
        templates=min(query.templates, sample.max_templates),
    )


def full_sizes(residues: int, model: ModelConfig, sample: SampleConfig) -> ExampleSizes:
    """Return the sizes of an example with as many rows and templates as a model takes."""
    templates = sample.max_templates if model.templates.enabled else 0
    return ExampleSizes(residues=residues, sequences=sample.max_msa, extra=sample.max_extra, templates=templates)


def targets_of_queries(
    given: Given, msas: Sequence[Path], model: ModelConfig, sample: SampleConfig, recycles: int | None
) -> list[PlanTarget]:
    """Read queries; where no alignments are given, and the query's own has but one row, the deepest is planned for."""
    found = []
    for query in read_queries(given, msas, model.multimer is not None):
        alone = not msas and (query.is_complex or query.rows == 1)
        sizes = sizes_of_query(query, model, sample, whole=alone)
        found.append(PlanTarget(query.name, folding(model, sizes, recycles)))
    return found


def folding(model: ModelConfig, sizes: ExampleSizes, recycles: int | None) -> Job:
    """Return a prediction as a job."""
    return Job(model=model, sizes=sizes, recycles=model.recycles if recycles is None else recycles)


def check_fits(
    queries: Sequence[Query], params: Params, recycles: int | None, choose_for: Callable[[ExampleSizes, int], object]
) -> None:
    """Raise UserError, before anything runs, if not even the shortest of some queries fits, saying what would.

    choose_for: chooses a plan for sizes and a number of recycles, and raises UserError where nothing fits.
    """
    every = [sizes_of_query(query, params.config, params.sample, whole=False) for query in queries]
    passes = params.config.recycles if recycles is None else recycles
    if every:
        choose_for(min(every, key=lambda sizes: sizes.residues), passes)


def plan_report(
    targets: Sequence[PlanTarget], machine: Machine, fixed: Mapping[str, Any], progress: Progress | None = None
) -> dict[str, Any]:
    """Return what a machine could do about each target, as JSON can hold it; all plans of the largest of them."""
    tell = progress or no_progress
    largest = max(targets, key=lambda target: target.job.sizes.residues)
    found = []
    for done, target in enumerate(targets):
        found.append(_row(target, machine, fixed, within(tell, done, len(targets) + 2, f"{target.name}, ")))
    all_plans, lengths = (within(tell, len(targets) + more, len(targets) + 2) for more in (0, 1))
    every = _every(largest.job, machine, fixed, all_plans)
    far = every.pop("far", False)  # too large: the refusal has said already what would fit
    most = {} if largest.job.training or far else longest_of(largest.job, machine, fixed, lengths)
    return {
        "machine": str(machine),
        "free": machine.free,
        "devices": machine.devices,
        "how": machine.how,
        "targets": found,
        "largest": {"name": largest.name, "sizes": vars(largest.job.sizes), **every},
        "longest": most,
    }


def _row(target: PlanTarget, machine: Machine, fixed: Mapping[str, Any], tell: Progress) -> dict[str, Any]:
    row: dict[str, Any] = {"name": target.name, "residues": target.job.sizes.residues}
    try:
        choice = _chosen(target.job, machine, fixed, False, tell)
    except NothingFitsError as error:
        return row | {"refused": str(error)}
    return row | {"said": str(choice), **_numbers(_of(choice), target.job, machine)}


def _chosen(job: Job, machine: Machine, fixed: Mapping[str, Any], every: bool, tell: Progress) -> Choice:
    try:
        return choose(job, machine, fixed, every, tell=tell)
    except ValueError as error:
        raise UserError(str(error)) from error


def _of(choice: Choice) -> Considered:
    return Considered(choice.plan, choice.memory, choice.seconds)


def _numbers(one: Considered, job: Job, machine: Machine) -> dict[str, Any]:
    memory, seconds = one.memory, one.seconds
    return {
        "plan": to_dict(one.plan),
        "title": describe_plan(one.plan, job.training),
        "bytes": None if memory is None else needed_bytes(memory, machine),
        "host_bytes": None if memory is None else memory.host,
        "seconds": None if seconds is None else round(seconds.total, 3),
        "rates": None if seconds is None else seconds.how,
        "lacks": one.reason,
    }


def _every(job: Job, machine: Machine, fixed: Mapping[str, Any], tell: Progress) -> dict[str, Any]:
    """Return every plan of a job, the chosen one marked, and how it fills the memory over the run."""
    try:
        choice = _chosen(job, machine, fixed, True, tell)
    except NothingFitsError as error:
        plans = [_numbers(one, job, machine) | {"chosen": False} for one in error.looked]
        far = all(one.memory is not None and one.memory.at_least for one in error.looked)
        return {"plans": plans, "refused": str(error), "at_peak": {}, "course": [], "far": far}
    plans = [_numbers(one, job, machine) | {"chosen": one.plan == choice.plan} for one in choice.considered]
    course = [[name, dict(owners)] for name, owners in choice.memory.course]
    by_layer = {} if choice.seconds is None else {name: round(s, 3) for name, s in choice.seconds.by_layer.items()}
    return {"plans": plans, "at_peak": choice.memory.at_peak, "course": course, "seconds_by_layer": by_layer}


def longest_of(job: Job, machine: Machine, fixed: Mapping[str, Any], tell: Progress = no_progress) -> dict[str, int]:
    """Return how many residues fit: whole, in slices, with z in host memory, shared by all devices."""
    n = job.sizes.residues
    chunk = max(FEWEST, -(-n // SLICES[-2]))
    ways: dict[str, dict[str, Any]] = {
        "whole": {},
        "in slices": {"chunk": chunk, "in_place": True},
        "in slices, z in host memory": {"chunk": chunk, "in_place": True, "offload": True},
    }
    if machine.devices > 1:
        ways[f"in slices, on {machine.devices} devices"] = {"chunk": chunk, "in_place": True, "axial": machine.devices}
    found = {}
    for done, (title, keys) in enumerate(ways.items()):
        if all(fixed.get(key, value) == value for key, value in keys.items()):
            found[title] = longest(job, machine, Plan(**{**fixed, **keys, "data": 1}), within(tell, done, len(ways)))
    return found


def with_sizes(job: Job, **sizes: int | None) -> Job:
    """Return a job with some of its sizes changed."""
    return replace(job, sizes=replace(job.sizes, **{name: size for name, size in sizes.items() if size is not None}))
