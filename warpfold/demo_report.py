"""What a demo measures and shows: proteins or dimers before and after training, on one page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warpfold.evaluation.before_after import (
    DOCKQ,
    INTERFACE_LDDT,
    IPTM,
    LDDT,
    Measure,
    Measured,
    compared,
    target_with_truth,
)
from warpfold.report import figures
from warpfold.report.report import ReportPage, Section

DRAWN = 4  # held-out examples shown in 3D
TOYS = (
    "The proteins are short and the model trained for minutes: low confidence, chain breaks and clashes, of which "
    "warnings stand below, are to be expected. Grey is the true structure."
)


@dataclass(frozen=True)
class DemoSubject:
    """What a demo is about: how it is made and measured, and the words of its page."""

    noun: str
    preset: str
    count: int  # how many are made
    longest: int  # residues of a chain: small proteins train fast
    left_out: tuple[str, ...]  # folds of single chains that are not made
    interface: tuple[Measure, ...]  # measured besides lDDT-Cα
    title: str
    lead: str
    made: str  # how they were made, and what the scores mean

    @property
    def measures(self) -> tuple[Measure, ...]:
        """Return all measures; the first is what the page is about."""
        return (*self.interface, LDDT)


PROTEINS = DemoSubject(
    noun="proteins",
    preset="tiny",
    count=240,
    longest=40,
    # Whether helices of a hairpin turn over within a run is a matter of luck.
    left_out=("helical hairpin",),
    interface=(),
    title="WarpFold learns to fold",
    lead="A small AlphaFold2, trained here and now on made-up proteins, folds some that it has never seen. " + TOYS,
    made="proteins were made from ideal bond geometry, with alignments that vary as contacts allow; some were held "
    "out, new sequences and structures of the same kinds of fold. lDDT-Cα, 0 to 1, is the share of distances between "
    "Cα that are right.",
)
DIMERS = DemoSubject(
    noun="dimers",
    preset="tiny_multimer",
    count=200,
    longest=34,
    left_out=(),
    interface=(INTERFACE_LDDT, DOCKQ, IPTM),  # DockQ is no guide before chains keep apart
    title="WarpFold learns to dock",
    lead="A small AlphaFold-Multimer, trained here and now on made-up dimers, folds some that it has never seen. "
    + TOYS,
    made="dimers were made, every second one of equal chains. Residues that touch across the interface vary together "
    "in rows of one organism, so the alignments tell how the chains meet. Some dimers were held out, new sequences and "
    "structures of the same kinds. Interface lDDT, 0 to 1, is the share of distances between atoms of the two chains "
    "that are right. DockQ, 0 to 1, compares contacts and places of the chains with the truth: from 0.23 a model is "
    "called acceptable, from 0.49 of medium quality; but an untrained model leaves all residues in one place, which "
    "has every contact, and gets some 0.4 for that.",
)


def demo_report(
    out: Path, result: Mapping[str, Any], measured: Mapping[str, Sequence[Measured]], subject: DemoSubject
) -> ReportPage:
    """Return the page: `result` is the summary, whose predictions are in `out/predictions`, ordered as `measured`."""
    held_out, first = measured["held_out"], subject.measures[0]
    order = sorted(range(len(held_out)), key=lambda i: -first.of(held_out[i])[1])
    drawn = order[:: max(1, len(held_out) // DRAWN)][:DRAWN]
    scores, seconds, versions = first.means(held_out), result["seconds"], result["versions"]
    return ReportPage(
        title=subject.title,
        lead=subject.lead,
        facts=[
            (f"{first.label} of held-out {subject.noun}, trained", f"{scores['trained']:.2f}"),
            ("the same, untrained", f"{scores['untrained']:.2f}"),
            ("training steps", f"{result['steps']:,}"),
            ("parameters", f"{result['parameters']:,}"),
            ("minutes in all", f"{sum(seconds.values()) / 60:.1f}"),
        ],
        sections=[
            _training(out / "run" / "metrics.jsonl", result, measured, subject),
            compared(
                f"{subject.noun.capitalize()} it never saw",
                subject.noun[:-1],
                held_out,
                subject.measures,
                ("untrained", "trained"),
            ),
        ],
        targets=[
            target_with_truth(out / "predictions", result["predictions"][i], held_out[i], subject.measures, "untrained")
            for i in drawn
        ],
        footer=[
            f"WarpFold {versions['warpfold']} · torch {versions['torch']} · seed {result['seed']} · "
            + " · ".join(f"{stage} {value:.0f} s" for stage, value in seconds.items()),
            "Everything on this page is in this folder: summary.json, run/metrics.jsonl, predictions/.",
        ],
    )


def _training(
    log: Path, result: Mapping[str, Any], measured: Mapping[str, Sequence[Measured]], subject: DemoSubject
) -> Section:
    lddt, loss = figures.draw_training(log, "held out")
    first = subject.measures[0]
    trained, held_out = first.means(measured["training"]), first.means(measured["held_out"])
    return Section(
        "Training",
        f"{result['proteins']} {subject.made} "
        f"Afterwards {first.label} is {trained['trained']:.2f} on {len(measured['training'])} {subject.noun} of the "
        f"training set ({trained['untrained']:.2f} before) and {held_out['trained']:.2f} on "
        f"{len(measured['held_out'])} held out ({held_out['untrained']:.2f} before).",
        [
            (lddt, "Held out: with the averaged weights. Training: of each step's crops, before its update."),
            (loss, "AlphaFold2's loss: frames, torsions, distances, masked alignment, confidence."),
        ],
    )
