"""What `warpfold plan` says of a training on many devices: the best plans, what each takes and costs, and why."""

from collections.abc import Mapping
from typing import Any

from warpfold.cost.gradient_traffic import data_ranks_on_node
from warpfold.cost.job import Job
from warpfold.cost.links import Cluster
from warpfold.cost.machine import Machine
from warpfold.cost.planner import NothingFitsError, needed_bytes
from warpfold.cost.rates import Rates
from warpfold.cost.step_planner import Candidate, StepChoice, choose_step, examples_of
from warpfold.cost.step_words import choice_in_words, describe_ranks_plan, describe_used, joined
from warpfold.errors import UserError
from warpfold.progress import Progress, no_progress
from warpfold.settings import to_dict

SHOWN = 12  # plans


def step_report(
    name: str,
    job: Job,
    machine: Machine,
    cluster: Cluster,
    rates: Rates,
    fixed: Mapping[str, Any],
    sync: Mapping[str, Any],
    price: float | None = None,
    tell: Progress = no_progress,
) -> dict[str, Any]:
    """Return the plans of a training on a cluster, the chosen one marked, as JSON can hold it.

    fixed, sync: keys that stay.  price: of a device for an hour.
    Where nothing fits it has "refused", which says what would.
    Errors: UserError for keys and ranks that do not go together.
    """
    about: dict[str, Any] = {
        "name": name,
        "machine": str(machine),
        "free": machine.free,
        "cluster": to_dict(cluster),
        "joined": joined(cluster),
        "sizes": vars(job.sizes),
        "examples": examples_of(job),
        "course": [],
    }
    try:
        choice = choose_step(job, machine, cluster, rates, fixed, sync, tell)
    except NothingFitsError as error:
        return about | {"refused": str(error), "plans": [], "left_out": []}
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
    found = [one for one in choice.considered if not one.reason]
    shown = found[:SHOWN] if choice.chosen in found[:SHOWN] else [choice.chosen, *found[: SHOWN - 1]]
    memory = choice.chosen.memory
    return about | {
        "said": choice_in_words(choice),
        "rates": choice.chosen.time.how,
        "seconds_by_part": {part: round(s, 6) for part, s in choice.chosen.time.by_part.items()},
        "plans": [_row(one, choice, price) for one in shown],
        "left_out": left_out(choice, len(shown)),
        "course": [] if memory is None else [[at, dict(owners)] for at, owners in memory.course],
    }


def _row(one: Candidate, choice: StepChoice, price: float | None) -> dict[str, Any]:
    hours = choice.device_hours(one)
    return {
        "title": describe_used(choice, one),
        "plan": to_dict(one.plan),
        "chosen": one is choice.chosen,
        "seconds": one.time.total,
        "hidden_seconds": one.time.hidden,
        "efficiency": choice.efficiency(one),
        "sent_bytes": one.time.sent,
        "bytes": None if one.memory is None else needed_bytes(one.memory, choice.machine),
        "device_hours_per_million": hours,
        "cost_per_million": None if price is None else price * hours,
    }


def left_out(choice: StepChoice, shown: int) -> list[str]:
    """Return why other plans are not shown, a line each."""
    job, cluster, chosen = choice.job, choice.cluster, choice.plan
    found = [f"{describe_ranks_plan(one.plan)}: {one.reason}" for one in choice.considered if one.reason]
    slower = [one for one in choice.considered if not one.reason][shown:]
    if slower:
        least, most = (one.time.total / choice.chosen.time.total for one in (slower[0], slower[-1]))
        found.append(f"{len(slower)} more take {least:.1f} to {most:.1f} times as long")
    if job.model.evoformer.outer == "middle":
        found.append('branch 2: in blocks of outer = "middle" the halves are not independent')
    if job.optim is not None and job.optim.clip == "example":
        found.append('several examples together: optim.clip = "example" needs the norm of each')
    if cluster.nodes > 1 and data_ranks_on_node(chosen, cluster) is None:
        found.append("hierarchical sums: they need several data ranks on each of several nodes")
    return found
