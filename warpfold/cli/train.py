"""`warpfold train` and `warpfold validate`."""

import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union

import typer

from warpfold import arguments
from warpfold.arguments import Device, Memory, PathLike, Set, Strict, argument, checked, reads, runs, writes
from warpfold.cli.common import (
    Answer,
    AsJson,
    Axial,
    Branch,
    command,
    device_of,
    log_plans,
    print_fallbacks,
    resume_hint,
    show,
    this_process,
    warn,
)
from warpfold.errors import UserError, listed

if TYPE_CHECKING:
    from warpfold.data.load.order import Source
    from warpfold.data.store.store import Store
    from warpfold.engine.watch import Watching
    from warpfold.parallel.team import Team
    from warpfold.training.config import RunConfig, SettingsLike
    from warpfold.training.train import Summary

StoreLike = Union[PathLike, "Store", "Source"]  # a path may end in =WEIGHT


@checked()
def train(
    settings: Annotated[
        "SettingsLike", argument("A TOML file, or the name of a preset: monomer, tiny ...", shell=str, path="local")
    ],
    data: Annotated[
        StoreLike | Sequence[StoreLike],
        reads("Stores that `warpfold pack` made: STORE or STORE=WEIGHT.", shell=list[str], path="store"),
    ],
    out: Annotated[PathLike, writes("Folder of the run; the same command continues a stopped run, bit for bit.")],
    *,
    init: Annotated[PathLike | None, reads("Parameters to start from; default: random ones.")] = None,
    replay: Annotated[PathLike | None, reads("order.txt of a run of the same data and seed, to follow.")] = None,
    set: Set = None,
    device: Device = None,
    memory: Memory = None,
    cluster: Annotated[
        PathLike | None, reads("How the processes are joined, as the doctor wrote it; default: measured.")
    ] = None,
    strict: Strict = False,
    watch: "Watching | None" = None,
    team: "Team | None" = None,
) -> "Summary":
    """Train or fine-tune into the folder `out`, or continue the run there, and return its summary.

    A kill loses only the steps since the last checkpoint.
    settings: the name of a preset, a TOML file, its values, or a `RunConfig`.
    data: stores or their paths.
    set: overrides of the settings, such as {"train.steps": 500}.
    watch: watchers, or functions that receive each row of metrics.jsonl (docs/howto/train.md).
    team: the processes that train together. All of them call this function.
    Errors: UserError for bad arguments, settings, stores and parameters, and if `out` holds another run.
    """
    from warpfold.cost.links import read_cluster
    from warpfold.device import caveats, device_of
    from warpfold.engine.checkpoint import RunFolder
    from warpfold.engine.loop import StopSignals
    from warpfold.engine.watch import as_watchers
    from warpfold.parallel.team import team_of
    from warpfold.training import train as training
    from warpfold.training.config import load_settings
    from warpfold.training.planning import graphs_in_words, plan_training

    team = team_of(team)
    changes = [*arguments.changes_of("set", set), *kernel_changes(strict)]
    loaded_settings = load_settings(settings, changes)
    device_name, folder, start = device_of(device), Path(out), arguments.path_or_none("init", init)
    limit = None if memory is None else arguments.parse_memory(memory)
    watchers = as_watchers(watch)
    stores = sources_of(data, loaded_settings.config().model.multimer is not None)
    measured_cluster = None if cluster is None else read_cluster(Path(cluster))
    _check_start(loaded_settings.config(), start, folder, team)
    config, plan_text = plan_training(loaded_settings, folder, device_name, limit, team, measured_cluster)
    team.remesh(config.plan, idle=loaded_settings.auto)
    log = logging.getLogger("warpfold.plan")
    if team.process.is_idle:
        log.warning("rank %d: the plan has no use for this process; it waits until the run ends", team.process.rank)
        with StopSignals():  # the others end the run
            return training.Summary(**team.wait_idle(), params=RunFolder(folder, writes=False).params)
    if plan_text and team.is_rank_zero:
        log.info("plan: %s", plan_text)
    if team.is_rank_zero and (graphs := graphs_in_words(config.plan, device_name)):
        log.info("graphs: %s", graphs)
    for caveat in caveats(config.plan.precision, device_name) if team.is_rank_zero else ():
        log.warning("%s", caveat)
    return training.train(
        config,
        stores,
        folder,
        init=start,
        replay=arguments.path_or_none("replay", replay),
        device=device_name,
        watch=watchers,
        team=team,
        command=shlex.join(["warpfold", *sys.argv[1:]]) if sys.argv[1:2] == ["train"] else "",
    )


def kernel_changes(strict: bool) -> list[str]:
    """Return the changes of settings that `strict` makes."""
    return ['plan.kernels="strict"'] if strict else []


def _check_start(config: "RunConfig", start: Path | None, folder: Path, team: "Team") -> None:
    """Raise UserError on all ranks if the run cannot start from its parameters or their moments.

    This precedes the planning, which takes minutes. One process reads the files, since they may be large.
    """
    from warpfold.engine.checkpoint import RunFolder
    from warpfold.training.first_weights import check_first, check_moments

    if start is None and not config.train.moments:
        return
    problem = ""
    if team.is_rank_zero:
        try:
            if start is not None:
                check_first(config.model, start, config.train.new_heads)
            if config.train.moments and RunFolder(folder, writes=False).latest() is None:
                check_moments(config.optim.name, start)
        except UserError as error:
            problem = str(error)
    if problem := team.broadcast(problem, "the parameters to start from"):
        raise UserError(problem)


def sources_of(data: StoreLike | Sequence[StoreLike], assemblies: bool = False) -> "list[Source]":
    """Open stores with their weights: "pdb=0.25" has the weight 0.25, and the default is 1.

    assemblies: draw complexes instead of chains from stores that have complexes.
    Errors: UserError for paths that are not stores.
    """
    from warpfold.data.load.order import Source
    from warpfold.data.store.store import Store

    store_arguments: Sequence[Any] = data if arguments.is_list(data) else [data]  # type: ignore[assignment]
    if not store_arguments:
        raise UserError("data: is empty. Name a store that `warpfold pack` made.")
    sources = []
    for store_argument in store_arguments:
        if isinstance(store_argument, Source):
            sources.append(store_argument)
            continue
        weight = "1"
        if not isinstance(store_argument, Store):
            folder, separator, weight = str(arguments.path("data", store_argument, store=True)).rpartition("=")
            if not separator or Path(store_argument).exists():
                folder, weight = str(store_argument), "1"
        try:
            store = store_argument if isinstance(store_argument, Store) else Store(folder)
            sources.append(Source(store, weight=float(weight), assemblies=assemblies))
        except ValueError:
            raise UserError(
                f"--data {store_argument}: {weight!r} is not a number. Pass STORE or STORE=WEIGHT."
            ) from None
    return sources


@command(train, continues=True, example="Example:  warpfold train tiny --data store --out run --set train.steps=500")
def train_in_shell(
    given: dict[str, Any],
    examples: Annotated[
        int | None, runs("Proteins at a time, each on its own processes.", "--plan.data", min=1)
    ] = None,
    axial: Axial = None,
    branch: Branch = None,
    as_json: AsJson = False,
) -> None:
    """Train or fine-tune; Ctrl-C or kill -9 loses only the steps since the last checkpoint.

    On several processes, under torchrun: docs/howto/clusters.md.
    """
    from warpfold.parallel.team import distributed_context
    from warpfold.training.config import load_settings
    from warpfold.training.terminal import training_progress

    plan_options = {"plan.data": examples, "plan.axial": axial, "plan.branch": branch}
    changes = [
        *(given.pop("set") or []),
        *(f"{key}={value}" for key, value in plan_options.items() if value is not None),
    ]
    changes += kernel_changes(given.pop("strict"))
    settings, process = load_settings(given.pop("settings"), changes), this_process()
    config, device_name = settings.config(), device_of(given.pop("device"), process)
    if config.train.wandb == "offline":  # W&B reads it when it begins
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    bar = training_progress(config.train.steps, every=config.train.report_every) if process.rank == 0 else nullcontext()
    join = distributed_context(process, None, device_name, config.plan.time_limit, config.plan.start_limit)
    with join as team, bar as watcher, log_plans(process.rank):
        run_summary = train(settings, device=device_name, watch=watcher, team=team, **given)
    if team.is_rank_zero:
        if run_summary.quarantined:
            names, reasons = listed(run_summary.quarantined, 3), given["out"] / "quarantine.jsonl"
            warn(f"entries that could not be used: {len(run_summary.quarantined)} ({names}); {reasons} has the reasons")
        print_fallbacks(run_summary.refused)
        for reason, count in run_summary.unrecorded.items():
            warn(f"slower than necessary: no {reason}, {count} times")
        if run_summary.rerecorded:
            warn(f"slower than necessary: CUDA graphs were recorded again {run_summary.rerecorded} times")
        if not run_summary.finished and not as_json:
            warn(f"stopped after {run_summary.steps} steps; {resume_hint()}")
        lines = [f"{run_summary.steps} steps; parameters: {run_summary.params}"] if run_summary.finished else []
        show(Answer({**asdict(run_summary), "params": str(run_summary.params)}, lines), as_json)
    raise typer.Exit(0 if run_summary.finished or run_summary.signal == signal.SIGTERM else 130)


@checked()
def validate(
    run: Annotated[PathLike, argument("Folder of `warpfold train`, its --out.")],
    data: Annotated[
        StoreLike | Sequence[StoreLike],
        reads("The stores that it trains on: STORE or STORE=WEIGHT.", shell=list[str], path="store"),
    ],
    *,
    follow: Annotated[bool, runs("Wait for further checkpoints, until that of the last step.")] = False,
    device: Device = None,
    watch: "Watching | None" = None,
) -> list[dict[str, Any]]:
    """Fold the held-out proteins of a run with each of its checkpoints, during or after training, on any machine.

    Appends a row per checkpoint to RUN/evaluations.jsonl, and writes the best weights to RUN/best.safetensors.
    Checkpoints that have a row already are omitted. Returns the new rows.
    watch: watchers, or functions that receive each row.
    Errors: UserError if `run` is not the folder of a run or has other data, and if another process evaluates it.
    """
    from warpfold.device import device_of
    from warpfold.training import validate as validating

    folder = Path(run)
    stores = sources_of(data, validating.settings_of(folder).model.multimer is not None)
    return validating.validate(folder, stores, follow=follow, device=device_of(device), watch=watch)


@command(validate, example="Example:  warpfold validate run --data store --follow")
def validate_in_shell(given: dict[str, Any]) -> Answer:
    """Fold the held-out proteins of a run with each of its checkpoints, during or after training, on any machine.

    Appends a row per checkpoint to RUN/evaluations.jsonl, and writes the best weights to RUN/best.safetensors.
    """

    def tell(row: dict[str, object]) -> None:
        warn(f"step {row['step']}: held-out lDDT-Cα {row['lddt_ca']:.3f}, loss {row['loss']:.3f}")

    device_name = device_of(given.pop("device"), this_process())
    with log_plans():
        return Answer(validate(**given, device=device_name, watch=tell), [])
