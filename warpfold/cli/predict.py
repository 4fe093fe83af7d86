"""`warpfold predict`."""

from pathlib import Path
from typing import Annotated

import typer

from warpfold.cli.common import (
    AsJson,
    Device,
    Force,
    Lists,
    Precision,
    Seed,
    app,
    argument,
    decides,
    device_of,
    progress_bar,
    reads,
    runs,
    show,
    writes,
)


@app.command(
    cls=Lists, epilog="Example:  warpfold predict query.fasta --msa query.a3m --params params.safetensors --out folded"
)
def predict(
    query: Annotated[Path, argument("FASTA (every record is folded), or an alignment (A3M, Stockholm).")],
    params: Annotated[Path, reads("WarpFold's .safetensors, or DeepMind's params_model_*.npz (monomer, ptm).")],
    out: Annotated[Path, writes("Folder for the predictions; a stopped run continues in it.")],
    msa: Annotated[
        list[Path] | None, reads("Alignments of the records; each goes to the record that is its first row.")
    ] = None,
    seed: Seed = 0,
    recycles: Annotated[int | None, decides("Passes through the trunk, less one; default: the model's.", min=0)] = None,
    ensemble: Annotated[int | None, decides("Samples of the alignment averaged in each pass.", min=1)] = None,
    max_msa: Annotated[int | None, decides("Cluster centres of the alignment; default: as trained.", min=1)] = None,
    max_extra: Annotated[int | None, decides("Rows of the extra alignment; default: as trained.", min=0)] = None,
    representations: Annotated[bool, writes("Keep single, pair and msa in the .npz.", "--representations")] = False,
    device: Device = None,
    chunk: Annotated[int | None, runs("Rows computed at a time, 0 for all; default: what fits.", min=0)] = None,
    precision: Annotated[Precision, runs("Of the trunk's activations.")] = Precision.fp32,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Fold sequences: mmCIF, PDB, pLDDT, PAE, a summary and a report."""
    from warpfold.run import predict as prediction

    options = prediction.Options(
        seed=seed,
        recycles=recycles,
        ensemble=ensemble,
        max_msa=max_msa,
        max_extra=max_extra,
        device=device_of(device),
        chunk=chunk,
        precision=precision.value,
        representations=representations,
        force=force,
    )
    with progress_bar() as progress:
        summary = prediction.predict(query, msa or [], params, out, options, progress)
    if as_json:
        show(summary)
    else:
        for entry in summary["predictions"]:
            ptm = "" if entry["ptm"] is None else f", pTM {entry['ptm']:.2f}"
            typer.echo(f"{entry['name']}: mean pLDDT {entry['mean_plddt']:.1f}{ptm}, {out / entry['folder']}")
        typer.echo(f"report: {out / 'report.html'}")
    for failure in summary["failures"]:
        typer.echo(f"failed {failure['name']}: {failure['error']}", err=True)
    raise typer.Exit(1 if summary["failures"] else 0)
