"""Check the files of published and measured step times: counts follow from the rows, and the page shows the figures."""

import json
from pathlib import Path

import pytest

from benchmarks.step_times_published import BAR, SOURCES, Row, aiak

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FILE = sorted(RESULTS.glob("step-times-published-*.json"))[-1]
MEASURED = sorted(RESULTS.glob("step-times-measured-*.json"))[-1]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


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
    assert FILE.name in PAGE
    assert f"{report['within']} of the {report['predicted']} predictions are within 20 %" in PAGE
    for row in report["rows"]:
        (line,) = (line for line in PAGE.splitlines() if line.startswith(f"|{row['source']}|{row['what']}|"))
        assert ("missed" in line) == (row["within"] is False)
        assert ("fitted" in line) == row["calibrated"]


def test_the_estimates_still_give_the_gains_of_hierarchical_sums() -> None:
    report = json.loads(FILE.read_text(encoding="utf-8"))
    known = {row["what"]: row["estimated"] for row in report["rows"] if row["source"] == "AIAK"}
    assert {row.what: row.estimated for row in aiak()} == pytest.approx(known, rel=1e-6)


def test_the_page_has_the_measured_steps() -> None:
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
    assert MEASURED.name in PAGE
    for row in rows:
        off = row["estimated"]["seconds"] / row["measured"] - 1
        assert off == pytest.approx(row["off"], abs=6e-4)
        assert row["within"] == (abs(off) <= 0.15)
        estimated = row["estimated"]["seconds"]
        assert f"|{row['name']}|{row['measured']:.2f}|{estimated:.2f}|{100 * row['off']:+.0f} %|" in PAGE
    within = sum(row["within"] for row in rows)
    assert f"{within} of the {len(rows)} cases are within 15 %" in PAGE
