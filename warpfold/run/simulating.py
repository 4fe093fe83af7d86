"""What `warpfold simulate` does: a training of some settings on a cluster that need not be here."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from warpfold.errors import UserError
from warpfold.parallel.plan import DTYPES, Plan
from warpfold.progress import Progress
from warpfold.run.config import GivenSettings
from warpfold.run.planning import training_job
from warpfold.settings import plain
from warpfold.tune.cluster.links import LINKS, Cluster, network, read_cluster
from warpfold.tune.rates import SHEETS, Rates, measured, of_gpu
from warpfold.tune.simulate.replay import Span
from warpfold.tune.simulate.simulation import Scenario, SimulatedTraining, checkpoint_seconds, simulate
from warpfold.tune.simulate.steps import Chance
from warpfold.tune.simulate.training import Interruptions


def described_cluster(devices: int, per_node: int, device: str, link: str) -> Cluster:
    """Return a cluster from makers' figures.  Errors: UserError for what is not known, or does not fit together."""
    name = of_gpu(device).name
    per_node = min(per_node, devices)
    try:
        return Cluster(
            ranks=devices,
            per_node=per_node,
            within=LINKS[SHEETS[name].link],
            between=network(link, per_node),
            device=name,
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def known_cluster(path: Path | None, devices: int | None, per_node: int, device: str, link: str) -> Cluster:
    """Return the cluster of a file, with another number of devices if one is given, or one from makers' figures."""
    if path is None:
        return described_cluster(devices or 1, per_node, device, link)
    cluster = read_cluster(path)
    try:
        return cluster if devices is None else replace(cluster, ranks=devices)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


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
    **more: Any,
) -> Scenario:
    """Return what is to be simulated: the training of some settings on all ranks of a cluster.

    plan: keys that are given; data, if it is not, takes the ranks that axial and branch leave.
    more: of the `Scenario`.
    Errors: UserError for a plan that does not fill the cluster, or that the settings do not allow.
    """
    values: dict[str, Any] = {"recompute": "block", **given.values.get("plan", {})}
    values = {name: value for name, value in values.items() if name != "data" or name in given.own}
    values |= {name: value for name, value in plan.items() if value is not None}
    shared = int(values.get("axial", 1)) * int(values.get("branch", 1))
    if "data" not in values:
        values["data"] = max(1, cluster.ranks // shared)
    if values["data"] * shared != cluster.ranks:
        raise UserError(
            f"plan: data {values['data']} x axial {values.get('axial', 1)} x branch {values.get('branch', 1)} does not "
            f"fill {cluster.ranks} devices; give --devices {values['data'] * shared}, or another plan"
        )
    config = replace(given, values={**given.values, "plan": plain(values)}).config()
    job = training_job(given, config)
    job = job if recycles is None else replace(job, recycles=recycles)
    built: Plan = config.plan
    return Scenario(
        job=job,
        plan=built,
        cluster=cluster,
        rates=rates_of(cluster, built.precision),
        examples=config.optim.accumulate,
        steps=config.train.steps,
        chance=chance,
        interruptions=interruptions,
        **more,
    )


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
