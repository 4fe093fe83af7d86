"""`warpfold profile`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from warpfold.arguments import Device, argument, decides, writes
from warpfold.cli.common import (
    AsJson,
    Blocks,
    Change,
    Extra,
    Recycles,
    Residues,
    Sequences,
    Templates,
    command,
    device_of,
    measured,
    show,
    show_table,
)
from warpfold.files import check_new, write_atomically
from warpfold.progress import progress_bar

LONGEST = 16  # rows of a table on the terminal; profile.json has all


@command(example="Example:  warpfold profile tiny --out profile;  warpfold profile monomer --residues 128 --forward")
def profile(
    settings: Annotated[str, argument("A TOML file, or the name of a preset: monomer, tiny ...")],
    out: Annotated[
        Path | None,
        writes("New folder for profile.json, and trace.json.gz for ui.perfetto.dev.", "--out", "-o"),
    ] = None,
    forward: Annotated[
        bool, decides("One forward pass without gradient, in place of a training step.", "--forward")
    ] = False,
    change: Change = None,
    residues: Residues = None,
    sequences: Sequences = None,
    extra: Extra = None,
    templates: Templates = None,
    blocks: Blocks = None,
    recycles: Recycles = 0,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Say where the time of a training step goes: by layer and operation, forward and backward, on a CPU or a GPU.

    The example is random.  With fewer --blocks only those are run and shown: nothing is scaled up.  On a CPU large
    settings are measured at a small size unless the options name another.
    """
    import torch

    from warpfold.profile.step_profile import in_words, profile_model, table

    if out is not None:
        check_new(out)
    sizes = {"residues": residues, "sequences": sequences, "extra": extra, "templates": templates}
    where = torch.device(device_of(device))
    given = measured(settings, change or [], sizes, blocks, recycles, on_cpu=where.type == "cpu")
    if out is not None:
        out.mkdir()
    with progress_bar(narrate=True) as progress:
        trace = None if out is None else out / "trace.json.gz"
        found = profile_model(given, where, trace, training=not forward, progress=progress)
    if out is not None:
        write_atomically(out / "profile.json", json.dumps(found, indent=1, allow_nan=False) + "\n")
    if as_json:
        show(found)
        return
    typer.echo("\n".join(in_words(found)))
    for of in ("layers", "operations"):
        typer.echo()
        show_table(*table(found, of, LONGEST))
    if out is not None:
        typer.echo(f"\nwrote {out / 'profile.json'}, trace.json.gz: open it at ui.perfetto.dev")
