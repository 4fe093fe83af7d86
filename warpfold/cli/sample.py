"""`warpfold sample`."""

from pathlib import Path
from typing import Annotated

import typer

from warpfold.cli.common import AsJson, Seed, app, decides, show, writes
from warpfold.progress import progress_bar


@app.command(epilog="Example:  warpfold sample --proteins 200 --out proteins")
def sample(
    out: Annotated[Path, writes("Folder for mmCIF and A3M files.", "--out", "-o")],
    proteins: Annotated[int, decides("Number of proteins.", min=0)] = 200,
    dimers: Annotated[int, decides("Number of dimers besides, of equal chains and of different ones.", min=0)] = 0,
    min_length: Annotated[int, decides("Residues of the shortest chain.", min=1)] = 30,
    max_length: Annotated[int, decides("Residues of the longest chain.", min=1)] = 60,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Make sample proteins with alignments, to try a pipeline or a cluster without downloading anything."""
    from warpfold import commands

    sizes = {"proteins": proteins, "dimers": dimers, "min_length": min_length, "max_length": max_length}
    with progress_bar() as progress:
        made = commands.sample(out, **sizes, seed=seed, progress=progress)
    if as_json:
        show(made)
    else:
        typer.echo(f"{proteins} proteins{f' and {dimers} dimers' if dimers else ''} in {out}")
