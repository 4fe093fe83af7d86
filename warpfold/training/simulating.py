"""What `warpfold simulate` does: a training of some settings on a cluster that need not be here."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from warpfold.cost.example import Job
from warpfold.cost.links import Cluster, read_cluster
from warpfold.cost.machine import of_sheet, planned_cluster, planned_machine
from warpfold.cost.measured_rates import measured
from warpfold.cost.planner import CHOSEN_IN_TRAINING, choose
from warpfold.cost.rates import SHEETS, Rates, of_gpu
from warpfold.cost.replay import Span
from warpfold.cost.report import choice_in_words
from warpfold.cost.simulation import (
    Chance,
    Interruptions,
    Scenario,
    SimulatedTraining,
    checkpoint_seconds,
    simulate,
)
from warpfold.errors import UserError
from warpfold.parallel.plan import DTYPES, Plan
from warpfold.progress import Progress, no_progress
from warpfold.training.config import GivenSettings
from warpfold.training.planning import training_job


def known_cluster(
    path: Path | None, devices: int | None, per_node: int | None, device: str, link: str | None
) -> Cluster:
    """Return the cluster of a file, with another number of devices if one is given, or of vendor specifications."""
    if path is None:
        of_gpu(device)
        return planned_cluster(planned_machine(device, None, devices or 1), per_node, link)
    cluster = read_cluster(path)
    return cluster if devices is None else replace(cluster, ranks=devices)


def rates_of(cluster: Cluster, precision: str) -> Rates:
    """Return the rates of a cluster's devices: of a data sheet, or measured here where they are this machine's."""
    if any(name.lower() in cluster.device.lower() for name in SHEETS):
        return of_gpu(cluster.device)
    return measured("cuda" if torch.cuda.is_available() else "cpu", DTYPES[precision])


def scenario_of(
    given: GivenSettings,
    cluster: Cluster,
    plan: dict[str, int | None],
    chance: Chance,
    interruptions: Interruptions,
    recycles: int | None = None,
    tell: Progress = no_progress,
    **more: Any,
) -> Scenario:
    """Return what is to be simulated: the training of some settings on all ranks of a cluster.

    plan: keys that are given; what neither they nor the settings say is chosen, as in `train`.
    more: of the `Scenario`.
    Errors: UserError for a plan that does not fill the cluster, that the settings do not allow, or that does not fit.
    """
    asked: dict[str, Any] = {name: value for name, value in plan.items() if value is not None}
    config = given.config()
    job = training_job(given, config)
    job = job if recycles is None else replace(job, recycles=recycles)
    rates = rates_of(cluster, config.plan.precision)
    chosen, said = (
        _chosen(given, job, cluster, rates, asked, tell)
        if given.auto
        else (replace(config.plan, **dict[str, Any](asked)), "")
    )
    if (needed := chosen.data * chosen.axial * chosen.branch) != cluster.ranks:
        raise UserError(
            f"plan: data {chosen.data} x axial {chosen.axial} x branch {chosen.branch} does not fill {cluster.ranks} "
            f"devices; give --devices {needed}, or another plan"
        )
    built = given.config(**vars(chosen))
    return Scenario(
        job=job,
        plan=built.plan,
        said=said,
        cluster=cluster,
        rates=rates,
        examples=config.optim.accumulate,
        steps=config.train.steps,
        chance=chance,
        interruptions=interruptions,
        **more,
    )


def _chosen(
    given: GivenSettings, job: Job, cluster: Cluster, rates: Rates, asked: Mapping[str, int], tell: Progress
) -> tuple[Plan, str]:
    """Return the plan that a training would choose on a cluster, and why.  Errors: UserError where there is none."""
    fixed, sync = given.fixed_on_ranks(CHOSEN_IN_TRAINING)
    machine = planned_machine(of_sheet(cluster.device), None, cluster.ranks)
    try:
        choice = choose(job, machine, {**fixed, **asked}, sync, cluster, rates, tell=tell)
    except ValueError as error:
        raise UserError(str(error)) from error
    return choice.plan, choice_in_words(choice)


def chance_of(workers: int | None, example: float | None, slow: float, spread: float | None) -> Chance:
    """Return how ranks differ, with what was said."""
    said = {"workers": workers, "example": example, "slow": slow, "spread": spread, "noise": spread}
    return Chance(**{name: value for name, value in said.items() if value is not None})  # type: ignore[arg-type]


def interruptions_of(given: GivenSettings, failures: float, restart: float, validate: float) -> Interruptions:
    """Return what keeps a training from its steps; how often it saves and validates stands in its settings."""
    train = given.config().train
    return Interruptions(
        failures=failures,
        restart=restart,
        save_every=train.save_every,
        validate_every=train.validate_every,
        validate=validate,
    )


def run_scenario(given: Scenario, tell: Progress) -> tuple[SimulatedTraining, list[Span]]:
    """Simulate, and return also what was on the timeline of a step with one pass."""
    spans: list[Span] = []
    saved = replace(given.interruptions, save=checkpoint_seconds(given.job, given.rates))
    return simulate(replace(given, interruptions=saved), tell, spans.append), spans
