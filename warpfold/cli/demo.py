"""`warpfold demo` and `warpfold sample`: a tour of WarpFold, and proteins to experiment with."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any

from warpfold.arguments import Checked, Force, PathLike, Seed, decides, function, progress_of, writes
from warpfold.cli.common import Answer, command, device_of
from warpfold.progress import Progress, progress_bar

NAMES = {"lddt_ca": "lDDT-Ca", "dockq": "DockQ", "interface_lddt": "interface lDDT"}


@command(continues=True, example="Example:  warpfold demo --out demo")
def demo(
    out: Annotated[Path, writes("Folder for the report and everything else.")] = Path("demo"),
    multimer: Annotated[bool, decides("Dimers, and a small AlphaFold-Multimer.")] = False,
    steps: Annotated[
        int | None, decides("Training steps. Fewer steps are faster and less accurate. Default: the preset's.", min=1)
    ] = None,
    seed: Seed = 0,
    force: Force = False,
) -> Answer:
    """Make proteins, train a small AlphaFold2 on them, fold proteins it never saw, and write report.html."""
    from warpfold.demo import run_demo
    from warpfold.device import cores

    device_of("cpu")
    changes = [] if steps is None else [f"train.steps={steps}"]
    with progress_bar(narrate=True) as progress:
        summary = run_demo(
            out, multimer=multimer, seed=seed, force=force, changes=changes, processes=cores(), progress=progress
        )

    def lines() -> Iterator[str]:
        scores = summary["held_out"]
        for key in (key for key in NAMES if key in scores):
            score = scores[key]
            yield f"{NAMES[key]}, held out: {score['untrained']:.2f} untrained, {score['trained']:.2f} trained"
        yield f"open {out / 'report.html'}"

    return Answer(summary, lines())


@dataclass(frozen=True)
class SampleCommand(Checked):
    """Make sample proteins with alignments, to try a pipeline or a cluster without downloading anything."""

    out: Annotated[PathLike, writes("New folder for mmCIF and A3M files.")]
    _: KW_ONLY
    proteins: Annotated[int, decides("Number of proteins.", min=0)] = 200
    dimers: Annotated[int, decides("Number of additional dimers, both homo- and heterodimers.", min=0)] = 0
    min_length: Annotated[int, decides("Residues of the shortest chain.", min=1)] = 30
    max_length: Annotated[int, decides("Residues of the longest chain.", min=1)] = 60
    seed: Seed = 0
    progress: Progress | None = None

    def __call__(self) -> list[dict[str, Any]]:
        """Write the proteins and return a description of each."""
        from warpfold.data.synthetic.folder import generate

        return generate(
            Path(self.out), self.proteins, self.seed, dimers=self.dimers, min_length=self.min_length,
            max_length=self.max_length, progress=progress_of(self.progress),
        )  # fmt: skip


sample = function(SampleCommand)


@command(SampleCommand, example="Example:  warpfold sample --proteins 200 --out proteins")
def sample_in_shell(given: dict[str, Any]) -> Answer:
    """Make the proteins and print their number."""
    with progress_bar() as progress:
        made = sample(**given, progress=progress)
    dimers = f" and {given['dimers']} dimers" if given["dimers"] else ""
    return Answer(made, [f"{given['proteins']} proteins{dimers} in {given['out']}"])
