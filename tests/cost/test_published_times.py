"""The file of published step times: its counts follow from its rows, and the estimates are unchanged."""

import json
from pathlib import Path

import pytest

from benchmarks.step_times_published import BAR, SOURCES, Row, aiak

FILE = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("step-times-published-20*.json"))[-1]


def test_the_file_says_what_its_rows_do() -> None:
    report = json.loads(FILE.read_text(encoding="utf-8"))
    names = ("source", "what", "unit", "measured", "estimated", "calibrated", "why")
    rows = [Row(**{name: row[name] for name in names}) for row in report["rows"]]
    assert [row.as_json() for row in rows] == report["rows"]
    assert {row.source for row in rows} <= set(SOURCES)
    predicted = [row for row in rows if not row.calibrated]
    assert report["predicted"] == len(predicted)
    assert report["within"] == sum(abs(row.off) <= BAR for row in predicted)
    assert all(row.why for row in predicted if abs(row.off) > BAR)
    assert report["within"] >= 0.7 * report["predicted"]


def test_the_page_has_the_figures_of_the_file() -> None:
    report = json.loads(FILE.read_text(encoding="utf-8"))
    page = (Path(__file__).parents[2] / "docs" / "time.md").read_text(encoding="utf-8")
    assert FILE.name in page
    for row in report["rows"]:
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {row['source']} | {row['what']} |"))
        assert ("missed" in line) == (row["within"] is False)
        assert ("fitted" in line) == row["calibrated"]


def test_the_estimates_still_give_the_gains_of_hierarchical_sums() -> None:
    report = json.loads(FILE.read_text(encoding="utf-8"))
    known = {row["what"]: row["estimated"] for row in report["rows"] if row["source"] == "AIAK"}
    assert {row.what: row.estimated for row in aiak()} == pytest.approx(known, rel=1e-6)
