"""`warpfold score`."""

from pathlib import Path
from typing import Annotated

import typer

from warpfold.cli.common import AsJson, app, argument, reads, show, show_table


@app.command(epilog="Example:  warpfold score predicted.cif 1ubq.cif.gz")
def score(
    predicted: Annotated[Path, argument("mmCIF or PDB file.")],
    reference: Annotated[Path, argument("mmCIF or PDB file: the truth.")],
    chains: Annotated[str | None, reads("Pairs, predicted:reference, e.g. A:B,B:C; default: by sequence.")] = None,
    assembly: Annotated[
        bool, reads("Compare with the first biological assembly of the reference, as predict folds it.", "--assembly")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare a structure with its reference: lDDT, GDT, TM-score, RMSD; of complexes also DockQ and other scores."""
    from warpfold import commands
    from warpfold.scoring.score_complex import HEADS

    result = commands.score(predicted, reference, chains=chains, assembly=assembly)
    if as_json:
        show(result.to_dict())
        return
    for what, value in result.rows():
        typer.echo(f"{what:18s} {value}")
    if result.complex and result.complex.interfaces:
        typer.echo()
        show_table(HEADS, result.complex.table())
