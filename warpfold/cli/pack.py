"""`warpfold pack`."""

from pathlib import Path
from typing import Annotated

import typer

from warpfold.cli.common import AsJson, Lists, Workers, app, decides, progress_bar, reads, show, writes


@app.command(cls=Lists, epilog="Example:  warpfold pack --structures mmcif/ --msas msas/*.a3m --out store")
def pack(
    structures: Annotated[list[Path], reads("mmCIF or PDB files, or folders of them; gz or not.")],
    out: Annotated[Path, writes("The store to make; it must not exist.")],
    msas: Annotated[list[Path] | None, reads("A3M or Stockholm files, or folders of them.")] = None,
    max_resolution: Annotated[float, decides("Å; worse structures are dropped.")] = 9.0,
    min_length: Annotated[int, decides("Residues; shorter chains are dropped.", min=1)] = 10,
    max_length: Annotated[int | None, decides("Residues; longer chains are dropped.", min=1)] = None,
    require_msa: Annotated[bool, decides("Drop chains without an alignment.", "--require-msa")] = False,
    workers: Workers = 1,
    as_json: AsJson = False,
) -> None:
    """Make the store that `train` reads, and list what was dropped and why."""
    from warpfold.data import pack as packing

    filters = packing.Filters(
        max_resolution=max_resolution, min_length=min_length, max_length=max_length, require_msa=require_msa
    )
    with progress_bar() as progress:
        report = packing.pack(
            structures, msas or [], out, filters, workers, lambda stage, done, total: progress(done, total, stage)
        )
    if as_json:
        show(report.to_json())
        return
    for entry in report.dropped:
        typer.echo(f"dropped {entry.name or entry.file}: {entry.reason}")
    for file, reason in report.unused.items():
        typer.echo(f"unused {file}: {reason}")
    typer.echo(f"{out}: {report.summary()}")
