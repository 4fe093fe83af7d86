"""`warpfold demo` and `warpfold sample`: a tour of WarpFold, and proteins to experiment with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from warpfold.arguments import Force, PathLike, Seed, checked, decides, progress_of, writes
from warpfold.cli.common import Answer, command
from warpfold.progress import Progress, progress_bar

NAMES = {"lddt_ca": "lDDT-Ca", "dockq": "DockQ", "interface_lddt": "interface lDDT"}


@checked()
def demo(
    out: Annotated[PathLike, writes("Folder for the report and everything else.")] = "demo",
    *,
    multimer: Annotated[bool, decides("Dimers, and a small AlphaFold-Multimer.")] = False,
    steps: Annotated[
        int | None, decides("Training steps. Fewer steps are faster and less accurate. Default: the preset's.", min=1)
    ] = None,
    seed: Seed = 0,
    force: Force = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make proteins, train a small AlphaFold2 on them, fold proteins it never saw, and write report.html.

    Returns the content of `OUT/summary.json`. The same call continues a stopped demo.
    Errors: UserError if `out` holds other files.
    """
    from warpfold.demo_run import run_demo
    from warpfold.device import cores, device_of

    device_of("cpu")
    changes = [] if steps is None else [f"train.steps={steps}"]
    return run_demo(
        Path(out), multimer=multimer, seed=seed, force=force, changes=changes, processes=cores(),
        progress=progress_of(progress),
    )  # fmt: skip


@command(demo, continues=True, example="Example:  warpfold demo --out demo")
def demo_in_shell(given: dict[str, Any]) -> Answer:
    """Make proteins, train a small AlphaFold2 on them, fold proteins it never saw, and write report.html."""
    with progress_bar(narrate=True) as progress:
        summary = demo(**given, progress=progress)
    return Answer(summary, _lines(summary, given["out"]))


def _lines(summary: dict[str, Any], out: Path) -> Iterator[str]:
    scores = summary["held_out"]
    for key in (key for key in NAMES if key in scores):
        score = scores[key]
        yield f"{NAMES[key]}, held out: {score['untrained']:.2f} untrained, {score['trained']:.2f} trained"
    yield f"open {out / 'report.html'}"


@checked()
def sample(
    out: Annotated[PathLike, writes("New folder for mmCIF and A3M files.")],
    *,
    proteins: Annotated[int, decides("Number of proteins.", min=0)] = 200,
    dimers: Annotated[int, decides("Number of additional dimers, both homo- and heterodimers.", min=0)] = 0,
    min_length: Annotated[int, decides("Residues of the shortest chain.", min=1)] = 30,
    max_length: Annotated[int, decides("Residues of the longest chain.", min=1)] = 60,
    seed: Seed = 0,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Make sample proteins with alignments, to try a pipeline or a cluster without downloading anything.

    Returns a description of each protein.
    """
    from warpfold.data.synthetic.folder import generate

    return generate(
        Path(out), proteins, seed, dimers=dimers, min_length=min_length, max_length=max_length,
        progress=progress_of(progress),
    )  # fmt: skip


@command(sample, example="Example:  warpfold sample --proteins 200 --out proteins")
def sample_in_shell(given: dict[str, Any]) -> Answer:
    """Make sample proteins with alignments, to try a pipeline or a cluster without downloading anything."""
    with progress_bar() as progress:
        report = sample(**given, progress=progress)
    dimers = f" and {given['dimers']} dimers" if given["dimers"] else ""
    return Answer(report, [f"{given['proteins']} proteins{dimers} in {given['out']}"])
