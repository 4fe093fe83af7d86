"""Build results of evaluations without files: rows of the table, measured predictions and sets."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from warpfold.evaluation.evaluate import PredictionSet
from warpfold.evaluation.layouts import PredictedFile, Predictions
from warpfold.evaluation.measure import Job, Measured
from warpfold.evaluation.tables import METRICS
from warpfold.evaluation.truths import Truth
from warpfold.report import figures

FIGURES = ("draw_shares", "draw_against", "draw_reliability", "draw_calibration", "draw_improvement", "draw_training")


def row(target: str, **values: Any) -> dict[str, Any]:
    """Build a row of the results table in which all scores but lDDT-Cα are missing, unless `values` has them."""
    whole = {
        "target": target, "model": "m", "rank": 1, "residues": 50, "paired": 48, "identity": 1.0, "lddt_ca": 0.5,
        "interfaces": [], "depth": None, "train_identity": None, "released": None, "length": 50, "chains": {},
        "notes": [], "prediction": f"p/{target}.cif", "prediction_sha256": "0a", "truth": f"t/{target}.cif",
        "truth_chains": ["A"], "truth_sha256": "0b", "sequences": [target],
    }  # fmt: skip
    return dict.fromkeys(metric.key for metric in METRICS) | whole | values


def measured_of(row: dict[str, Any], **sums: Any) -> Measured:
    """Build the result of a prediction from its row; its files do not exist."""
    target = row["target"]
    file = PredictedFile(target, Path(row["prediction"]), "AlphaFold", (target,), row["rank"])
    return Measured(Job(file, Truth(target, Path(row["truth"]))), row, **sums)


def set_of(name: str, measured: Sequence[Measured], **fields: Any) -> PredictionSet:
    """Build a set of measured predictions in the folder p/NAME."""
    files = [result.job.prediction for result in measured]
    return PredictionSet(name, Predictions(Path("p", name), files), measured=list(measured), **fields)


def record_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each function that draws a figure return its name and its arguments."""

    def recorded(name: str) -> Any:
        return lambda *given, **named: (name, *given, named)

    for name in FIGURES:
        monkeypatch.setattr(figures, name, recorded(name))
