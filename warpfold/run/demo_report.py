"""The page that `warpfold demo` ends with: what was learnt, and what it looks like."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.data.example.raw_example import RawExample
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.write import write_mmcif
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.run import figures, metrics
from warpfold.run.outputs import Prediction
from warpfold.run.predict_report import target_of
from warpfold.run.report import Report, Section, Table, Target

CA = ATOM_ORDER["CA"]
DRAWN = 4  # held-out proteins shown in 3D


@dataclass(frozen=True)
class Measured:
    """One protein folded by the untrained and by the trained model."""

    raw: RawExample
    before: float  # lDDT-Ca, 0 to 1
    after: float
    prediction: Prediction  # the trained model's
    lddt: np.ndarray  # [N], 0 to 1, of the trained model, NaN where nothing is known


def ca_pair(prediction: Prediction, raw: RawExample) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Predicted and true Cα [N, 1, 3] of an example with coordinates, and which are known [N, 1]."""
    assert raw.positions is not None
    assert raw.mask is not None
    return prediction.positions[:, [CA]], raw.positions[:, [CA]], raw.mask[:, [CA]]


def demo_report(out: Path, result: Mapping[str, Any], measured: Mapping[str, Sequence[Measured]]) -> Report:
    """The page: `result` is the summary, whose predictions lie in `out/predictions`, in the order of `measured`."""
    held_out = measured["held_out"]
    drawn = sorted(range(len(held_out)), key=lambda i: -held_out[i].after)[:: max(1, len(held_out) // DRAWN)][:DRAWN]
    scores, seconds, versions = result["held_out"], result["seconds"], result["versions"]
    return Report(
        title="WarpFold learns to fold",
        lead="A small AlphaFold2, trained here and now on made-up proteins, folds some that it has never seen.",
        facts=[
            ("lDDT-Cα of held-out proteins, trained", f"{scores['trained']:.2f}"),
            ("the same, untrained", f"{scores['untrained']:.2f}"),
            ("training steps", f"{result['steps']:,}"),
            ("parameters", f"{result['parameters']:,}"),
            ("minutes in all", f"{sum(seconds.values()) / 60:.1f}"),
        ],
        sections=[_training(out / "run" / "metrics.jsonl", result), _held_out(held_out)],
        targets=[_target(out / "predictions", result["predictions"][i], held_out[i]) for i in drawn],
        footer=[
            f"WarpFold {versions['warpfold']} · torch {versions['torch']} · seed {result['seed']} · "
            + " · ".join(f"{stage} {value:.0f} s" for stage, value in seconds.items()),
            "Everything on this page is in this folder: summary.json, run/metrics.jsonl, predictions/.",
        ],
    )


def _training(log: Path, result: Mapping[str, Any]) -> Section:
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if row["kind"] == "step" and row["loss"] is not None]
    validations = [row for row in rows if row["kind"] == "validation"]
    x = [row["step"] for row in steps]
    lddt = [
        figures.Curve("training", x, [row["lddt_ca"] for row in steps]),
        figures.Curve("held out", [v["step"] for v in validations], [v["lddt_ca"] for v in validations], points=True),
    ]
    trained, held_out = result["training"], result["held_out"]
    return Section(
        "Training",
        f"{result['proteins']} proteins were made from ideal bond geometry, with alignments that vary as contacts "
        f"allow; some were held out, new sequences and structures of the same kinds of fold. lDDT-Cα, 0 to 1, is the "
        f"share of distances between Cα that are right. "
        f"Afterwards it is {trained['trained']:.2f} on {trained['proteins']} proteins of the training set "
        f"({trained['untrained']:.2f} before) and {held_out['trained']:.2f} on {held_out['proteins']} held out "
        f"({held_out['untrained']:.2f} before).",
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


def _held_out(measured: Sequence[Measured]) -> Section:
    known = [(m.prediction.plddt[i], 100 * m.lddt[i]) for m in measured for i in np.flatnonzero(~np.isnan(m.lddt))]
    names = [m.raw.name for m in measured]
    rows = []
    for m in measured:
        predicted, truth, mask = (array[:, 0] for array in ca_pair(m.prediction, m.raw))
        there = mask > 0
        overlap = metrics.overlap(predicted[there], truth[there])
        rmsd = metrics.rmsd(predicted[there], truth[there])
        values = [
            f"{m.before:.2f}",
            f"{m.after:.2f}",
            f"{m.prediction.mean_plddt:.0f}",
            f"{overlap.tm:.2f}",
            f"{rmsd:.1f}",
        ]
        rows.append([m.raw.name, str(len(m.raw.aatype)), str(len(m.raw.msa)), *values])
    return Section(
        "Proteins it never saw",
        figures=[
            (
                figures.draw_improvement(names, [m.before for m in measured], [m.after for m in measured]),
                "Each held-out protein, before and after training.",
            ),
            (
                figures.draw_calibration([p for p, _ in known], [v for _, v in known], "residue"),
                "Does it know what it knows? Expected against measured, residue by residue.",
            ),
        ],
        table=Table(
            [
                "protein",
                "residues",
                "alignment rows",
                "lDDT-Cα before",
                "lDDT-Cα after",
                "pLDDT",
                "TM-score",
                "RMSD, Å",
            ],
            rows,
        ),
    )


def _target(predictions: Path, entry: Mapping[str, Any], measured: Measured) -> Target:
    """A prediction with its truth laid over it."""
    raw, prediction = measured.raw, measured.prediction
    assert raw.positions is not None
    assert raw.mask is not None
    there = raw.mask[:, CA] > 0
    rotation, translation = metrics.superpose(raw.positions[there, CA], prediction.ca[there])
    moved = ((raw.positions @ rotation.T + translation) * raw.mask[..., None]).astype(np.float32)
    numbers = tuple(str(i + 1) for i in range(len(raw.aatype)))
    truth = Chain("A", raw.sequence, moved, raw.mask.astype(np.float32), raw.residue_index, numbers)
    return target_of(
        predictions,
        entry,
        numbers=[("lDDT-Cα", f"{measured.after:.2f}"), ("untrained", f"{measured.before:.2f}")],
        truth_mmcif=write_mmcif(f"{raw.name} truth", [truth]),
        truth_ca=moved[there, CA],
        lddt=100 * measured.lddt,
    )
