"""`warpfold params`."""

from pathlib import Path
from typing import Annotated

import typer

from warpfold.cli.common import AsJson, app, argument, decides, show, writes


@app.command(
    epilog="Example:  warpfold params params_model_1_ptm.npz --check\n\n"
    "To another format:  warpfold params finetuning_ptm_1.pt --out finetuning_ptm_1.safetensors"
)
def params(
    file: Annotated[Path, argument("WarpFold's .safetensors, DeepMind's params_model_*.npz, or OpenFold's .pt.")],
    check: Annotated[bool, decides("Check that all values are finite.", "--check")] = False,
    out: Annotated[
        Path | None,
        writes("A new file: .safetensors, or .npz by DeepMind's names, which others read too.", "--out", "-o"),
    ] = None,
    toml: Annotated[bool, writes("Print its settings as a file that `train` takes.", "--toml")] = False,
    as_json: AsJson = False,
) -> None:
    """Inspect a parameter file, check it, and write it in another format."""
    from warpfold.params_file import params as read

    found = read(file, check=check, out=out)
    if as_json:
        show(found.to_dict())
    elif toml:
        typer.echo(found.toml(), nl=False)
    else:
        for what, value in found.rows():
            typer.echo(f"{what:12s} {value}")
    raise typer.Exit(1 if found.problems else 0)
