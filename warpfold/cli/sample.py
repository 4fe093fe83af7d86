"""`warpfold sample`."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from warpfold.arguments import Checked, PathLike, Seed, decides, function, progress_of, writes
from warpfold.cli.common import AsJson, command, show
from warpfold.progress import Progress, progress_bar


@dataclass(frozen=True)
class SampleCommand(Checked):
    """Make sample proteins with alignments, to try a pipeline or a cluster without downloading anything."""

    out: Annotated[PathLike, writes("New folder for mmCIF and A3M files.")]
    _: KW_ONLY
    proteins: Annotated[int, decides("Number of proteins.", min=0)] = 200
    dimers: Annotated[int, decides("Number of dimers besides, of equal chains and of different ones.", min=0)] = 0
    min_length: Annotated[int, decides("Residues of the shortest chain.", min=1)] = 30
    max_length: Annotated[int, decides("Residues of the longest chain.", min=1)] = 60
    seed: Seed = 0
    progress: Progress | None = None

    def __call__(self) -> list[dict[str, Any]]:
        """Return what each of the proteins is."""
        from warpfold.data.synthetic.folder import generate

        return generate(
            Path(self.out), self.proteins, self.seed, dimers=self.dimers, min_length=self.min_length,
            max_length=self.max_length, progress=progress_of(self.progress),
        )  # fmt: skip


sample = function(SampleCommand)


@command(SampleCommand, example="Example:  warpfold sample --proteins 200 --out proteins")
def in_shell(given: dict[str, Any], as_json: AsJson = False) -> None:
    """Say what was made."""
    with progress_bar() as progress:
        made = sample(**given, progress=progress)
    if as_json:
        show(made)
    else:
        dimers = f" and {given['dimers']} dimers" if given["dimers"] else ""
        typer.echo(f"{given['proteins']} proteins{dimers} in {given['out']}")
