"""`warpfold golden`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from warpfold.cli.common import AsJson, app, argument, reads, show
from warpfold.progress import progress_bar


@app.command(epilog="Example:  warpfold golden tests/golden --only units/*")
def golden(
    folder: Annotated[Path, argument("Folder of reference cases.")],
    only: Annotated[str | None, reads("A pattern for the cases' paths.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare WarpFold with numbers of DeepMind's official code, array by array."""
    from rich.console import Console

    from warpfold import golden as reference

    with progress_bar() as progress:
        results = reference.run(folder, only, progress)
    if as_json:
        show(reference.as_data(results))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(reference.table(results))
        typer.echo(reference.summary(results))
    raise typer.Exit(reference.exit_code(results))
