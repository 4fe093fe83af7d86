"""`warpfold train`."""

from pathlib import Path
from typing import Annotated

import typer

from warpfold.cli.common import (
    AsJson,
    Device,
    Lists,
    app,
    argument,
    decides,
    device_of,
    reads,
    show,
    writes,
)


@app.command(cls=Lists, epilog="Example:  warpfold train tiny --data store --out run --set train.steps=500")
def train(
    settings: Annotated[str, argument("A TOML file, or the name of a preset: monomer, tiny ...")],
    data: Annotated[Path, reads("The store that `warpfold pack` made.")],
    out: Annotated[Path, writes("Folder of the run; the same command continues a stopped one, bit for bit.")],
    init: Annotated[Path | None, reads("Parameters to start from; default: random ones.")] = None,
    change: Annotated[list[str] | None, decides("Settings over those of the file, KEY=VALUE.", "--set")] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Train or fine-tune; Ctrl-C or kill -9 loses nothing but the steps since the last checkpoint."""
    from dataclasses import asdict

    from warpfold import settings as toml
    from warpfold.data.store import Store
    from warpfold.run import train as training
    from warpfold.run import watch

    config = toml.build(training.RunConfig, toml.load(settings, change or []), settings)
    with watch.progress_bar(config.train.steps) as watcher:
        result = training.train(config, Store(data), out, init=init, device=device_of(device), watch=watcher)
    if as_json:
        show({**asdict(result), "params": str(result.params)})
    elif result.finished:
        typer.echo(f"{result.steps} steps; parameters: {result.params}")
    else:
        typer.echo(f"stopped after {result.steps} steps; the same command continues", err=True)
    raise typer.Exit(0 if result.finished else 130)
