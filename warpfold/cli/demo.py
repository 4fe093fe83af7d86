"""`warpfold demo`."""

from pathlib import Path
from typing import Annotated

import typer

from warpfold.cli.common import AsJson, Force, Seed, app, device_of, show, writes
from warpfold.progress import progress_bar


@app.command(epilog="Example:  warpfold demo --out demo")
def demo(
    out: Annotated[Path, writes("Folder for the report and everything else.")] = Path("demo"),
    seed: Seed = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make proteins, train a small AlphaFold2 on them, fold ones it never saw, and show it all in report.html."""
    from warpfold.run.demo import run_demo

    device_of("cpu")
    try:
        with progress_bar(narrate=True) as progress:
            summary = run_demo(out, seed=seed, force=force, progress=progress)
    except KeyboardInterrupt:
        typer.echo("stopped; the same command continues", err=True)
        raise typer.Exit(130) from None
    if as_json:
        show(summary)
        return
    scores = summary["held_out"]
    typer.echo(f"lDDT-Ca of held-out proteins: {scores['untrained']:.2f} untrained, {scores['trained']:.2f} trained")
    typer.echo(f"open {out / 'report.html'}")
