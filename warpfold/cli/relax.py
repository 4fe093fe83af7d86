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


def _check(which: Relax) -> Relax:
    """Raise UserError where OpenMM is missing: before hours of work, not after them."""
    from warpfold.relax.amber import require_openmm

    if which != Relax.none:
        require_openmm()
    return which


RelaxOption = Annotated[
    Relax,
    decides("Relax all predictions, or of each query the best one, with OpenMM: docs/relax.md.", callback=_check),
]


@app.command(epilog="Example:  warpfold relax folded")
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
    from warpfold.relax.files import relax_paths

    with progress_bar() as progress:
        done = relax_paths(paths, device_of(device), "best" if best else "all", force, progress)
    if as_json:
        show(done)
    for entry in [] if as_json else done["relaxed"]:
        typer.echo(f"{relaxed_line(entry['name'], entry)}{', kept' if entry['kept'] else ''}, {entry['path']}")
    for failure in done["failures"]:
        typer.echo(f"failed {failure['name']}: {failure['error']}", err=True)
    raise typer.Exit(1 if done["failures"] else 0)


def relaxed_line(name: str, report: dict[str, Any]) -> str:
    """Return what was done to a structure, for people."""
    before, after = (report[f"violations_{when}"]["residues"] for when in ("before", "after"))
    mirrored = f", D residues {report['mirrored']}" if report["mirrored"] else ""
    return (
        f"{name}: residues with violations {before} → {after}, energy {_energy(report['energy_before'])} → "
        f"{_energy(report['energy_after'])} kcal/mol, Cα moved {report['ca_rmsd']:.2f} Å (at most "
        f"{report['ca_max']:.2f}), rounds {report['rounds']}, {report['seconds']:.0f} s, {report['platform']}{mirrored}"
    )


def _energy(energy: float | None) -> str:
    return "infinite" if energy is None else f"{energy:.3g}" if abs(energy) >= 1e6 else f"{energy:.0f}"
