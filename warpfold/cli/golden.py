"""`warpfold golden`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

import warpfold
from warpfold.arguments import argument, reads
from warpfold.cli.common import AsJson, command, show
from warpfold.errors import UserError
from warpfold.progress import progress_bar


@command(example="Example:  warpfold golden tests/golden --only units/*")
def golden(
    folder: Annotated[Path, argument("Folder of reference cases.")],
    only: Annotated[str | None, reads("A pattern for the cases' paths.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare WarpFold with numbers of DeepMind's official code, array by array; in a clone."""
    from rich.console import Console

    checkout = Path(warpfold.__file__).parents[1]  # whose tests know how each case is computed
    if not (checkout / "tests/golden/run.py").is_file():
        raise UserError("golden: the reference cases are tests of a clone of WarpFold (tests/golden); run it there")
    sys.path.insert(0, str(checkout))
    from tests.golden import run

    with progress_bar() as progress:
        results = run.run(folder, only, progress)
    if as_json:
        show({"cases": run.as_data(results), "summary": run.summary(results)})
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(run.table(results))
        typer.echo(run.summary(results))
    raise typer.Exit(any(result.verdict != run.PASS for result in results))
