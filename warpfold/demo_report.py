"""What a demo measures and shows: proteins or dimers before and after training, on one page."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.data.example.raw_example import Assembly
from warpfold.data.features.crop import move
from warpfold.data.structure.chain import Chain, Structure
from warpfold.data.structure.write import write_mmcif
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.prediction.outputs import Prediction
from warpfold.prediction.pages import target_of
from warpfold.report import figures
from warpfold.report.report import ReportPage, ReportTable, Section, Target
from warpfold.scoring import metrics
from warpfold.scoring.score import Score, score

CA = ATOM_ORDER["CA"]
DRAWN = 4  # held-out examples shown in 3D
TOYS = (
    "The proteins are short and the model trained for minutes: low confidence, chain breaks and clashes, of which "
    "warnings stand below, are to be expected. Grey is the true structure."
)


@dataclass(frozen=True)
class Measured:
    """One protein, as an assembly of one, or dimer, folded by the untrained and by the trained model."""

    assembly: Assembly
    truth: Structure
    predictions: tuple[Prediction, Prediction]
    scores: tuple[Score, Score]

    @property
    def trained(self) -> Prediction:
        """The prediction of the trained model."""
        return self.predictions[1]


@dataclass(frozen=True)
class Measure:
    """A number from 0 to 1 that training should raise: its name in summary.json, and that for people."""

    key: str
    label: str
    value: Callable[[Prediction, Score], float]

    def of(self, one: Measured) -> list[float]:
        """Return it for the untrained and for the trained model."""
        return [self.value(*folded) for folded in zip(one.predictions, one.scores)]

    def means(self, measured: Sequence[Measured]) -> dict[str, float]:
        """Return its means over examples, untrained and trained."""
        before, after = np.mean([self.of(one) for one in measured], axis=0)
        return {"untrained": round(float(before), 4), "trained": round(float(after), 4)}


LDDT = Measure("lddt_ca", "lDDT-Cα", lambda _, score: score.lddt_ca)
DOCKQ = Measure("dockq", "DockQ", lambda _, score: (score.complex and score.complex.dockq) or 0.0)
INTERFACE_LDDT = Measure(
    "interface_lddt", "interface lDDT", lambda _, score: (score.complex and score.complex.ilddt) or 0.0
)
IPTM = Measure("iptm", "ipTM", lambda prediction, _: prediction.iptm or 0.0)


@dataclass(frozen=True)
class DemoSubject:
    """What a demo is about: how it is made and measured, and the words of its page."""

    noun: str
    preset: str
    count: int  # how many are made
    longest: int  # residues of a chain: small proteins train fast
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


def measure(assembly: Assembly, before: Prediction, after: Prediction) -> Measured:
    """Score two predictions of an example against its chains where they stand in it.

    Errors: ValueError if a chain has no atoms.
    """
    chains = {}
    for place, (name, example) in enumerate(zip(assembly.ids, assembly.chains)):
        index = np.arange(example.length)
        atoms = example.atoms(index)
        if atoms is None:
            raise ValueError(f"{assembly.name}: chain {name} has no atoms")
        positions, mask = move(atoms[0], assembly.operators, place) * atoms[1][..., None], atoms[1].astype(np.float32)
        numbers = tuple(str(i + 1) for i in index)
        chains[name] = Chain(name, example.sequence, positions.astype(np.float32), mask, index, numbers)
    truth = Structure(assembly.name, None, None, None, chains)
    scores = score(before.structure(), truth), score(after.structure(), truth)
    return Measured(assembly, truth, (before, after), scores)


def means(measures: Sequence[Measure], measured: Sequence[Measured]) -> dict[str, Any]:
    """Return the mean of every measure, untrained and trained."""
    return {measure.key: measure.means(measured) for measure in measures}


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
            _held_out(held_out, subject),
        ],
        targets=[_target(out / "predictions", result["predictions"][i], held_out[i], subject) for i in drawn],
        footer=[
            f"WarpFold {versions['warpfold']} · torch {versions['torch']} · seed {result['seed']} · "
            + " · ".join(f"{stage} {value:.0f} s" for stage, value in seconds.items()),
            "Everything on this page is in this folder: summary.json, run/metrics.jsonl, predictions/.",
        ],
    )


def _training(
    log: Path, result: Mapping[str, Any], measured: Mapping[str, Sequence[Measured]], subject: DemoSubject
) -> Section:
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if row["kind"] == "step" and row["loss"] is not None]
    validations = [row for row in rows if row["kind"] == "validation"]
    x = [row["step"] for row in steps]
    lddt = [
        figures.Curve("training", x, [row["lddt_ca"] for row in steps]),
        figures.Curve("held out", [v["step"] for v in validations], [v["lddt_ca"] for v in validations], points=True),
    ]
    first = subject.measures[0]
    trained, held_out = first.means(measured["training"]), first.means(measured["held_out"])
    return Section(
        "Training",
        f"{result['proteins']} {subject.made} "
        f"Afterwards {first.label} is {trained['trained']:.2f} on {len(measured['training'])} {subject.noun} of the "
        f"training set ({trained['untrained']:.2f} before) and {held_out['trained']:.2f} on "
        f"{len(measured['held_out'])} held out ({held_out['untrained']:.2f} before).",
        [
            (
                figures.draw_curves(lddt, "lDDT-Cα", (0, 1)),
                "Held out: with the averaged weights. Training: of each step's crops, before its update.",
            ),
            (
                figures.draw_curves([figures.Curve("training loss", x, [row["loss"] for row in steps])], "loss"),
                "AlphaFold2's loss: frames, torsions, distances, masked alignment, confidence.",
            ),
        ],
    )


def _held_out(measured: Sequence[Measured], subject: DemoSubject) -> Section:
    known, rows = [], []
    for m in measured:
        lddt = 100 * lddt_per_residue(m)
        known += [(m.trained.plddt[i], lddt[i]) for i in np.flatnonzero(~np.isnan(lddt))]
        sizes = [str(m.assembly.length), str(max(chain.depth for chain in m.assembly.chains))]
        scores = [f"{value:.2f}" for measure in subject.measures for value in measure.of(m)]
        overlap = [f"{m.scores[1].tm:.2f}", f"{m.scores[1].rmsd:.1f}"]
        rows.append([m.assembly.name, *sizes, *scores, f"{m.trained.mean_plddt:.0f}", *overlap])
    names, first = [m.assembly.name for m in measured], subject.measures[0]
    before, after = ([first.of(m)[when] for m in measured] for when in (0, 1))
    compared = [f"{measure.label} {when}" for measure in subject.measures for when in ("before", "after")]
    return Section(
        f"{subject.noun.capitalize()} it never saw",
        figures=[
            (
                figures.draw_improvement(names, before, after, first.label),
                "Each that was held out, before and after training.",
            ),
            (
                figures.draw_calibration([p for p, _ in known], [v for _, v in known], "residue"),
                "Does it know what it knows? Expected against measured, residue by residue.",
            ),
        ],
        table=ReportTable(
            [subject.noun[:-1], "residues", "alignment rows", *compared, "pLDDT", "TM-score", "RMSD, Å"], rows
        ),
    )


def true_chains(measured: Measured) -> list[Chain]:
    """Return the true chains in the order, and under the names, of the predicted chains that stand for them."""
    found = measured.scores[1].chains
    return [replace(measured.truth.chains[found[chain]], id=chain) for chain in measured.trained.chain_ids]


def lddt_per_residue(measured: Measured) -> np.ndarray:
    """Return lDDT-Cα of each residue of the trained model [N], 0 to 1, NaN where nothing is known."""
    truth = true_chains(measured)
    positions, mask = (
        np.concatenate([getattr(chain, name)[:, [CA]] for chain in truth]) for name in ("positions", "mask")
    )
    return metrics.lddt_per_residue(measured.trained.positions[:, [CA]], positions, mask)


def _target(predictions: Path, entry: Mapping[str, Any], measured: Measured, subject: DemoSubject) -> Target:
    """Return a prediction with its truth superposed on it."""
    truth = true_chains(measured)
    positions, there = (
        np.concatenate(arrays) for arrays in zip(*((c.positions[:, CA], c.mask[:, CA] > 0) for c in truth))
    )
    rotation, translation = metrics.superpose(positions[there], measured.trained.ca[there])

    def moved(points: np.ndarray) -> np.ndarray:
        return (points @ rotation.T + translation).astype(np.float32)

    chains = [replace(chain, positions=moved(chain.positions) * chain.mask[..., None]) for chain in truth]
    numbers = []
    for measure in subject.measures:
        before, after = measure.of(measured)
        numbers += [(measure.label, f"{after:.2f}"), ("untrained", f"{before:.2f}")]
    return target_of(
        predictions,
        entry,
        numbers=numbers,
        truth_mmcif=write_mmcif(f"{measured.assembly.name} truth", chains),
        truth_ca=moved(positions[there]),
        lddt=100 * lddt_per_residue(measured),
    )
