"""`warpfold train` and `warpfold evaluate`."""

import os
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING, Annotated

import typer

from warpfold.cli.common import (
    AsJson,
    Axial,
    Branch,
    Device,
    Lists,
    Memory,
    Strict,
    app,
    argument,
    decides,
    device_of,
    how_to_go_on,
    plans_said,
    reads,
    runs,
    say_refused,
    show,
    this_process,
    writes,
)

if TYPE_CHECKING:
    from warpfold.training.train import Summary


@app.command(cls=Lists, epilog="Example:  warpfold train tiny --data store --out run --set train.steps=500")
def train(
    settings: Annotated[str, argument("A TOML file, or the name of a preset: monomer, tiny ...")],
    data: Annotated[list[str], reads("Stores that `warpfold pack` made: STORE or STORE=WEIGHT.")],
    out: Annotated[
        Path, writes("Folder of the run; the same command continues a stopped run, bit for bit.", "--out", "-o")
    ],
    init: Annotated[Path | None, reads("Parameters to start from; default: random ones.")] = None,
    replay: Annotated[Path | None, reads("order.txt of a run of the same data and seed, to follow.")] = None,
    change: Annotated[
        list[str] | None, decides("Settings that override those of the file, KEY=VALUE.", "--set")
    ] = None,
    examples: Annotated[
        int | None, runs("Proteins at a time, each on its own processes.", "--plan.data", min=1)
    ] = None,
    axial: Axial = None,
    branch: Branch = None,
    device: Device = None,
    memory: Memory = None,
    cluster: Annotated[
        Path | None, reads("How the processes are joined, as the doctor wrote it; default: measured.", "--cluster")
    ] = None,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Train or fine-tune; Ctrl-C or kill -9 loses only the steps since the last checkpoint.

    On several processes, under torchrun: docs/parallel.md.
    """
    from warpfold import commands
    from warpfold.parallel.team import distributed_context
    from warpfold.training.watching import training_progress

    chosen = {"plan.data": examples, "plan.axial": axial, "plan.branch": branch}
    changes = [*(change or []), *(f"{key}={value}" for key, value in chosen.items() if value is not None)]
    given = commands.as_settings(settings, [*changes, *(['plan.kernels="strict"'] if strict else [])])
    config, process = given.config(), this_process()
    where = device_of(device, process)
    if config.train.wandb == "offline":  # W&B reads it when it begins
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    bar = training_progress(config.train.steps, every=config.train.report_every) if process.rank == 0 else nullcontext()
    join = distributed_context(process, None, where, config.plan.time_limit)
    with join as team, bar as watcher, plans_said(process):
        result = commands.train(
            given, data, out, init=init, replay=replay, device=where, memory=memory, cluster=cluster, watch=watcher,
            team=team,
        )  # fmt: skip
    if team.is_rank_zero:
        _say(result, out, as_json)
    raise typer.Exit(0 if result.finished or result.signal == SIGTERM else 130)


def _say(result: "Summary", out: Path, as_json: bool) -> None:
    """Say how a run ended."""
    if result.quarantined:
        names = ", ".join(result.quarantined[:3]) + (" ..." if len(result.quarantined) > 3 else "")
        count = len(result.quarantined)
        typer.echo(
            f"entries that could not be used: {count} ({names}); {out / 'quarantine.jsonl'} has the reasons", err=True
        )
    say_refused(result.refused)
    for reason, count in result.unrecorded.items():
        typer.echo(f"slower than necessary: no {reason}, {count} times", err=True)
    if as_json:
        show({**asdict(result), "params": str(result.params)})
    elif result.finished:
        typer.echo(f"{result.steps} steps; parameters: {result.params}")
    else:
        typer.echo(f"stopped after {result.steps} steps; {how_to_go_on()}", err=True)


@app.command(epilog="Example:  warpfold evaluate run --data store --follow")
def evaluate(
    run: Annotated[Path, argument("Folder of `warpfold train`, its --out.")],
    data: Annotated[list[str], reads("The stores that it trains on: STORE or STORE=WEIGHT.")],
    follow: Annotated[bool, runs("Wait for further checkpoints, until that of the last step.", "--follow")] = False,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Fold a run's held-out proteins with each of its checkpoints: beside the training, on any machine.

    `warpfold watch` shows what is found, in RUN/evaluations.jsonl; RUN/best.safetensors has the best weights.
    """
    from warpfold import commands

    def tell(row: dict[str, object]) -> None:
        typer.echo(f"step {row['step']}: held-out lDDT-Cα {row['lddt_ca']:.3f}, loss {row['loss']:.3f}", err=True)

    found = commands.evaluate(run, data, follow=follow, device=device_of(device, this_process()), watch=tell)
    if as_json:
        show(found)
