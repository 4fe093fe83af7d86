"""Test the figure files of a prediction: one for each kind of data, in both formats, with labelled chain starts."""

import numpy as np
import pytest

from warpfold.report.charts import tick_labels
from warpfold.report.coverage import Coverage
from warpfold.report.prediction_figures import draw_figures

CHAINS = {"A": slice(0, 40), "heavy": slice(40, 42), "C": slice(42, 90)}
SIGNATURES = {"png": b"\x89PNG\r\n\x1a\n", "svg": b"<svg"}


def coverage(residues: int) -> Coverage:
    return Coverage(np.full(residues, 3, np.int32), np.full((3, residues), 101, np.uint8), 3)


def test_each_kind_of_data_has_a_figure_in_both_formats() -> None:
    figures = draw_figures(np.full(90, 80.0), np.full((90, 90), 5.0), coverage(90), CHAINS)
    assert set(figures) == {f"{name}.{form}" for name in ("plddt", "pae", "coverage") for form in SIGNATURES}
    for name, data in figures.items():
        assert data.startswith(SIGNATURES[name.partition(".")[2]])
    assert all(label in figures["pae.svg"].decode() for label in ("A1", "heavy1", "scored residue"))


def test_missing_data_have_no_figure() -> None:
    assert set(draw_figures(np.full(5, 80.0), None, None, {})) == {"plddt.png", "plddt.svg"}


@pytest.mark.parametrize("residues", [1, 2, 3000])
def test_any_length_is_drawn(residues: int) -> None:
    pae = np.full((residues, residues), 40.0, np.float32)
    assert len(draw_figures(np.full(residues, 0.0), pae, coverage(residues), {})) == 6


def test_equal_predictions_have_equal_bytes() -> None:
    first, second = (draw_figures(np.full(9, 80.0), np.full((9, 9), 5.0), coverage(9), {}) for _ in range(2))
    assert first == second


def test_chain_starts_are_labelled_and_labels_do_not_touch() -> None:
    labels = tick_labels(CHAINS, 90, 320.0)
    assert {"A1", "heavy1"} <= {name for _, name in labels}
    positions = [position for position, _ in labels]
    assert positions == sorted(positions)
    assert min(np.diff(positions)) * 320 / 90 > 30
    assert [name for _, name in tick_labels({}, 250, 320.0)] == ["1", "50", "100", "150", "200", "250"]
