"""`warpfold demo`."""

from pathlib import Path
from typing import Annotated

import typer

from warpfold.arguments import Force, Seed, decides, writes
from warpfold.cli.common import AsJson, command, device_of, how_to_go_on, show
from warpfold.progress import progress_bar


@command(continues=True, example="Example:  warpfold demo --out demo")
def demo(
    out: Annotated[Path, writes("Folder for the report and everything else.", "--out", "-o")] = Path("demo"),
    multimer: Annotated[bool, decides("Dimers, and a small AlphaFold-Multimer.", "--multimer")] = False,
    steps: Annotated[
        int | None, decides("Training steps: fewer end sooner and teach less; default: the preset's.", min=1)
    ] = None,
    seed: Seed = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make proteins, train a small AlphaFold2 on them, fold ones it never saw, and show it all in report.html."""
    from warpfold.demo import run_demo

    device_of("cpu")
    changes = [] if steps is None else [f"train.steps={steps}"]
    try:
        with progress_bar(narrate=True) as progress:
            summary = run_demo(out, multimer=multimer, seed=seed, force=force, changes=changes, progress=progress)
    except KeyboardInterrupt:
        typer.echo(f"stopped; {how_to_go_on()}", err=True)
        raise typer.Exit(130) from None
    if as_json:
        show(summary)
        return
    scores = summary["held_out"]
    names = {"lddt_ca": "lDDT-Ca", "dockq": "DockQ", "interface_lddt": "interface lDDT"}
    for key in (key for key in names if key in scores):
        there = scores[key]
        typer.echo(f"{names[key]}, held out: {there['untrained']:.2f} untrained, {there['trained']:.2f} trained")
    typer.echo(f"open {out / 'report.html'}")
