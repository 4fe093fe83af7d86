"""`warpfold design`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from warpfold import arguments
from warpfold.arguments import (
    Changes,
    Device,
    Force,
    Memory,
    PathLike,
    Seed,
    argument,
    checked,
    decides,
    reads,
    writes,
)
from warpfold.cli.common import Answer, command, log_plans, table, this_process
from warpfold.errors import UserError
from warpfold.prediction.request import DEFAULT_PRECISION, ChainGap, TrunkPrecision
from warpfold.progress import Progress, progress_bar

if TYPE_CHECKING:
    from rich.table import Table

# Designs in the table on the terminal.
SHOWN = 20


@checked()
def design(
    settings: Annotated[PathLike, argument("TOML file of chains, losses and stages, or a preset: hallucination ...")],
    params: Annotated[PathLike, reads("Parameters: WarpFold's, DeepMind's .npz or OpenFold's .pt.")],
    out: Annotated[PathLike, writes("Folder for the designs. The same command continues a stopped run.")],
    *,
    target: Annotated[PathLike | None, reads("Desired structure, instead of the settings' target.")] = None,
    starts: Annotated[int, decides("Number of designs. A later run may ask for more.", min=1)] = 1,
    set: Annotated[
        Changes | None,
        decides("Settings that override those of the file, KEY=VALUE: chains.A=100.", shell=list[str] | None),
    ] = None,
    chain_gap: ChainGap = None,
    seed: Seed = 0,
    force: Force = False,
    device: Device = None,
    precision: TrunkPrecision = DEFAULT_PRECISION,
    memory: Memory = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Design sequences by the gradient of a model, from many starts.

    Writes designs.fasta, the structures of the designs, and report.html. Returns the content of `OUT/design.json`, with
    `designs` sorted, best first.
    Errors: UserError for invalid settings and files, for chains or losses that the parameters do not support, and if
    OUT holds another run.
    """
    from warpfold.files import sha256
    from warpfold.prediction.predictor import load
    from warpfold.sequence_design.run import run_design
    from warpfold.sequence_design.settings import load_design

    changes = arguments.changes_of("set", set)
    if target is not None:
        changes = [*changes, f"target={target}"]
    design_settings = load_design(Path(settings), changes)
    predictor = load(params, device, precision=precision, memory=memory, chain_gap=chain_gap)
    tell = arguments.progress_of(progress)
    return run_design(predictor, design_settings, Path(out), starts, seed, sha256(Path(params)), force, tell)


@command(
    design,
    continues=True,
    example="Example:  warpfold design hallucination --params params_model_1_ptm.npz --set chains.A=100 --starts 10 "
    "--out designs\n\nA sequence for a backbone:  warpfold design fixed_backbone --params params_model_1_ptm.npz "
    "--target fold.cif --out designs\n\nA binder, chain B:  warpfold design binder --params "
    "params_model_1_multimer_v3.npz --set chains.A=MKT... --set chains.B=80 --out binders",
)
def design_in_shell(given: dict[str, Any]) -> Answer:
    """Design sequences by the gradient of a model, from many starts.

    Writes designs.fasta, the structures of the designs, and report.html.
    """
    if this_process().ranks > 1:
        raise UserError("design: cannot run under torchrun. Call it from Python with a team (docs/howto/design.md).")
    with progress_bar(narrate=True) as bar, log_plans():
        summary = design(**given, progress=bar)
    return Answer(summary, _text(summary, Path(given["out"])))


def _text(summary: dict[str, Any], out: Path) -> "Iterator[str | Table]":
    rows = [
        [entry["name"], f"{entry['loss']:.4f}", f"{entry['mean_plddt']:.1f}", ", ".join(entry["designed"].values())]
        for entry in summary["designs"][:SHOWN]
    ]
    yield table(("design", "loss", "pLDDT", "designed"), rows)
    yield f"Check {out / 'designs.fasta'} with warpfold predict and other parameters. Report: {out / 'report.html'}"
