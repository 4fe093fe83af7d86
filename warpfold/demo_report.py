"""The report of the demo: proteins or dimers, folded before and after training."""

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

# Held-out examples shown in 3D.
DRAWN = 4
TOYS = (
    "The proteins are short and the model trained for minutes. Expect low confidence, chain breaks and clashes, and "
    "the warnings about them below. The true structure is grey."
)


@dataclass(frozen=True)
class DemoSubject:
    """The subject of a demo: its examples, its measures and the text of its page.

    count: the number of examples.
    longest: residues of the longest chain. Small proteins train fast.
    left_out: folds that are not generated.
    interface: measures in addition to lDDT-Cα.
    made: how the examples were generated, and the meaning of the scores.
    """

    noun: str
    preset: str
    count: int
    longest: int
    left_out: tuple[str, ...]
    interface: tuple[Measure, ...]
    title: str
    lead: str
    made: str

    @property
    def measures(self) -> tuple[Measure, ...]:
        """Return all measures. The page leads with the first one."""
        return (*self.interface, LDDT)


PROTEINS = DemoSubject(
    noun="proteins",
    preset="tiny",
    count=240,
    longest=40,
    # Whether a run learns the handedness of helical hairpins depends on the seed.
    left_out=("helical hairpin",),
    interface=(),
    title="WarpFold learns to fold",
    lead="A small AlphaFold2, trained just now on synthetic proteins, folds proteins that it has never seen. " + TOYS,
    made="proteins were generated with ideal bond geometry and with alignments that co-vary at contacts. Some were "
    "held out: new sequences and structures of the same folds. lDDT-Cα (0 to 1) is the share of correct distances "
    "between Cα atoms.",
)
DIMERS = DemoSubject(
    noun="dimers",
    preset="tiny_multimer",
    count=200,
    longest=34,
    left_out=(),
    interface=(INTERFACE_LDDT, DOCKQ, IPTM),
    title="WarpFold learns to dock",
    lead="A small AlphaFold-Multimer, trained just now on synthetic dimers, folds dimers that it has never seen. "
    + TOYS,
    made="dimers were generated, half of them homodimers. Residues in contact across the interface co-vary in rows of "
    "the same organism, so the alignments determine the interface. Some dimers were held out: new sequences and "
    "structures of the same folds. Interface lDDT (0 to 1) is the share of correct distances between atoms of the two "
    "chains. DockQ (0 to 1) compares contacts and positions of the chains with the true structure: 0.23 is acceptable, "
    "and 0.49 is medium quality. An untrained model places all residues at one point, which has every contact, and "
    "therefore scores about 0.4.",
)


def demo_report(
    out: Path, result: Mapping[str, Any], measured: Mapping[str, Sequence[Measured]], subject: DemoSubject
) -> ReportPage:
    """Build the page.

    result: the summary; its predictions are in `out/predictions`, in the order of `measured`.
    """
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
            (lddt, "Held out: with the averaged weights. Training: the crops of each step, before its update."),
            (loss, "The loss of AlphaFold2: FAPE, torsions, distogram, masked MSA, confidence."),
        ],
    )
