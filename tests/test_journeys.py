"""Test that the script that measures journeys runs, and that a new layer needs no changes outside its own code."""

from pathlib import Path

import pytest

from tests import journeys


@pytest.mark.parametrize("journey", journeys.JOURNEYS)
def test_a_journey_is_measured(journey: str) -> None:
    rows = getattr(journeys, f"journey_{journey}")()
    assert journeys.table(rows).count("\n") >= len(rows)
    for row in rows:
        assert (
            row.files
            or row.functions
            or row.what in ("files in circles", f"rooms of more than {journeys.MOST_FILES} files")
        )
        if journey == "layer":
            assert row.note == "runs unchanged: whole, in chunks, in place, recomputed, axial = 2"


def test_a_name_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty package defines none of the names."""
    monkeypatch.setattr(journeys, "ROOT", tmp_path)
    with pytest.raises(journeys.Gone, match="Evoformer is not defined in warpfold"):
        journeys.journey_block()
