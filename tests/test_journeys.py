"""Test that the script that measures journeys runs, and that a new layer needs no changes outside its own code."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests import journeys

PAGE = journeys.ROOT / "docs/explanation/architecture.md"


@cache
def rows_of(journey: str) -> list[journeys.Row]:
    rows: list[journeys.Row] = getattr(journeys, f"journey_{journey}")()
    return rows


def recorded() -> dict[str, list[int]]:
    """Read the page's table: the counts of a journey, and its lines of code if there are any."""
    table = PAGE.read_text(encoding="utf-8").partition("## Journeys")[2]
    found = {}
    for label, cells in re.findall(r"^\| ([^|]+) \|([^-].*)\|$", table, re.MULTILINE)[1:]:
        what, _, lines = label.partition(": ") if re.search(r": [\d,]+ lines$", label) else (label, "", "")
        numbers = [cell.strip().replace(",", "") for cell in (*cells.split("|"), lines.removesuffix(" lines"))]
        found[what] = [int(number) for number in numbers if number]
    return found


@pytest.mark.parametrize("journey", journeys.JOURNEYS)
def test_no_journey_is_longer_than_recorded(journey: str) -> None:
    """A value of the page may be raised together with a reason, which stands below the table."""
    for row in rows_of(journey):
        lines = re.search(r"(\d+) lines", f"{row.what} {row.note}")
        counts = [row.files, row.functions, row.calls, int(lines[1]) if lines else None]
        found = [count for count in counts if count is not None]
        limits = recorded()[re.sub(r": \d+ lines$", "", row.what)]
        assert len(found) == len(limits), row
        assert all(count <= 1.1 * limit for count, limit in zip(found, limits)), (row, limits)


@pytest.mark.parametrize("journey", journeys.JOURNEYS)
def test_a_journey_is_measured(journey: str) -> None:
    rows = rows_of(journey)
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
