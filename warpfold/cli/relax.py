"""`warpfold relax`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from warpfold.cli.common import AsJson, Device, app, argument, decides, device_of, show, writes
from warpfold.progress import progress_bar


class Relax(StrEnum):
    """Which predictions `predict --relax` relaxes."""

    all = "all"
    best = "best"
    none = "none"


@app.command(epilog="Example:  warpfold predict query.fasta ... --out folded && warpfold relax folded")
def relax(
    paths: Annotated[list[Path], argument("Folders of `warpfold predict`; mmCIF or PDB files.")],
    best: Annotated[
        bool, decides("Of several predictions of one query, only the one that is ranked first.", "--best")
    ] = False,
    device: Device = None,
    force: Annotated[bool, writes("Relax again what is relaxed already.", "--force")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove clashes and broken bonds with Amber's force field; needs OpenMM: pip install "warpfold\\[relax]"."""
    from warpfold.run.relax_files import relax_paths

    with progress_bar() as progress:
        done = relax_paths(paths, device_of(device), "best" if best else "all", force, progress)
    if as_json:
        show(done)
    say_relaxed(done, quiet=as_json)
    raise typer.Exit(1 if done["failures"] else 0)


def say_relaxed(done: dict[str, Any], quiet: bool) -> None:
    """Print what was relaxed, a line for each structure, unless quiet; and in any case what failed."""
    for entry in [] if quiet else done["relaxed"]:
        before, after = (entry[f"violations_{when}"]["residues"] for when in ("before", "after"))
        typer.echo(
            f"{entry['name']}: residues with violations {before} → {after}, energy {_energy(entry['energy_before'])} → "
            f"{_energy(entry['energy_after'])} kcal/mol, Cα moved {entry['ca_rmsd']:.2f} Å (at most "
            f"{entry['ca_max']:.2f}), rounds {entry['rounds']}, {entry['seconds']:.0f} s, {entry['platform']}"
            f"{', D residues ' + str(entry['mirrored']) if entry['mirrored'] else ''}"
            f"{', kept from an earlier run' if entry['kept'] else ''}, {entry['path']}"
        )
    for failure in done["failures"]:
        typer.echo(f"failed {failure['name']}: {failure['error']}", err=True)


def _energy(energy: float | None) -> str:
    return "infinite" if energy is None else f"{energy:.3g}" if abs(energy) >= 1e6 else f"{energy:.0f}"
