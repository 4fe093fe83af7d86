"""`warpfold train`."""

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
    reads,
    runs,
    say_refused,
    show,
    writes,
)
from warpfold.errors import UserError

if TYPE_CHECKING:
    from warpfold.data.load.order import Source
    from warpfold.run.train import Summary


@app.command(cls=Lists, epilog="Example:  warpfold train tiny --data store --out run --set train.steps=500")
def train(
    settings: Annotated[str, argument("A TOML file, or the name of a preset: monomer, tiny ...")],
    data: Annotated[list[str], reads("Stores that `warpfold pack` made: STORE or STORE=WEIGHT.")],
    out: Annotated[Path, writes("Folder of the run; the same command continues a stopped run, bit for bit.")],
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
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Train or fine-tune; Ctrl-C or kill -9 loses only the steps since the last checkpoint.

    On several processes, under torchrun: docs/parallel.md.
    """
    from warpfold.parallel.team import ProcessInfo, distributed_context
    from warpfold.run import train as training
    from warpfold.run.config import load_settings
    from warpfold.run.planning import plan_training
    from warpfold.run.watching import training_progress
    from warpfold.tune.machine import parse_memory

    plan = {
        "plan.data": examples,
        "plan.axial": axial,
        "plan.branch": branch,
        "plan.kernels": "strict" if strict else None,
    }
    changes = [*(change or []), *(f"{key}={value}" for key, value in plan.items() if value is not None)]
    given, most = load_settings(settings, changes), None if memory is None else parse_memory(memory)
    config = given.config()
    process = ProcessInfo.from_environment(os.environ)
    where = device_of(device, process)
    bar = training_progress(config.train.steps, every=config.train.report_every) if process.rank == 0 else nullcontext()
    with distributed_context(process, None, where, config.plan.time_limit) as team, bar as watcher:
        stores = sources(data, config.model.multimer is not None)
        config, said = plan_training(given, out, where, most, team)
        team.remesh(config.plan)
        if said and team.is_rank_zero:
            typer.echo(f"plan: {said}", err=True)
        result = training.train(config, stores, out, init=init, replay=replay, device=where, watch=watcher, team=team)
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


def sources(texts: list[str], assemblies: bool = False) -> "list[Source]":
    """Open stores with their weights, from ["pdb=0.25", "distilled=0.75"]; a store without one has weight 1.

    assemblies: to draw complexes from, where a store has any, not chains.
    """
    from warpfold.data.load.order import Source
    from warpfold.data.store.store import Store

    found = []
    for text in texts:
        path, equals, weight = text.rpartition("=")
        if not equals or Path(text).exists():
            path, weight = text, "1"
        try:
            found.append(Source(Store(path), weight=float(weight), assemblies=assemblies))
        except ValueError:
            raise UserError(f"--data {text}: {weight!r} is not a number; expected STORE or STORE=WEIGHT") from None
    return found
