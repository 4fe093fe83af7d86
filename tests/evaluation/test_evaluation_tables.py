"""Test the numbers of an evaluation: means, groups, comparisons and the results table, from rows without files."""

from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.evaluation.results import measured_of, row, set_of
from warpfold.evaluation import tables
from warpfold.evaluation.confidence import PLDDT_BINS, Sums
from warpfold.evaluation.evaluate import DEFINITIONS, as_suite, report, table_rows
from warpfold.evaluation.suite import Entry, Suite, read_suite
from warpfold.scoring.intervals import interval, paired_difference

# The metrics with their decimals, and whether smaller values are better.
SHOWN = {
    **dict.fromkeys(("lddt", "lddt_ca", "gdt_ts", "gdt_ha", "tm", "dockq", "ilddt", "qs_global", "ics", "ips"), 3),
    "coverage": 3,
    "rmsd": 2,
    "plddt": 1,
    "clashes": 1,
    "chain_breaks": 1,
}
LOWER = {"rmsd", "clashes", "chain_breaks"}


def test_values_are_shown_with_the_digits_of_their_metric() -> None:
    for metric in tables.METRICS:
        assert metric.show(12.34567) == f"{12.34567:.{SHOWN[metric.key]}f}"
        assert (metric.show(None), metric.show(12)) == ("–", "12")


def test_means_are_over_the_targets_with_a_value() -> None:
    values = [0.1, 0.2, 0.9, 0.4]
    rows = [row(str(n), lddt_ca=value, tm=0.5 if n == 2 else None) for n, value in enumerate(values)]
    expected = {
        "lddt_ca": {"mean": pytest.approx(0.4), "median": pytest.approx(0.3), "targets": 4},
        "tm": {"mean": 0.5, "interval": None, "median": 0.5, "targets": 1},
    }
    found = tables.means(rows)
    expected["lddt_ca"]["interval"] = interval(values, 0)
    assert found == expected
    expected["lddt_ca"]["interval"] = interval(values, 3)
    assert interval(values, 3) != interval(values, 0)
    assert tables.means(rows, 3) == expected


LIMITS = {
    "residues": [None, 100, 200, 400, 800, None],
    "depth": [None, 1, 30, 100, 1000, None],
    "train_identity": [None, 0.0, 0.3, 0.5, 0.7, 0.95, None],
}


@pytest.mark.parametrize("by", LIMITS)
def test_a_limit_belongs_to_the_lower_group(by: str) -> None:
    limits = LIMITS[by]
    step = 0.0005 if by == "train_identity" else 1
    values = [value for limit in limits if limit is not None for value in (limit, limit + step)]
    rows = [row(str(n), **{by: value, "lddt_ca": n / 10}) for n, value in enumerate(values)]
    rows += [row("none", **{by: None})] if by != "residues" else []
    found = tables.groups(rows, by)
    assert [(group["above"], group["to"]) for group in found] == list(pairwise(limits))
    # Every inner group has the value above its lower limit and its upper limit.
    counts = [1, *[2] * (len(limits) - 3), 1]
    assert [group["targets"] for group in found] == counts
    means = [0.0, *((4 * n + 3) / 20 for n in range(len(limits) - 3)), (len(values) - 1) / 10]
    assert [group["mean"] for group in found] == [{"lddt_ca": pytest.approx(value)} for value in means]


def test_empty_groups_are_left_out() -> None:
    assert tables.groups([row("a"), row("b", depth=5)], "depth") == [
        {"above": 1, "to": 30, "targets": 1, "mean": {"lddt_ca": 0.5}}
    ]
    assert tables.groups([row("a")], "depth") == []


@pytest.mark.parametrize(
    ("low", "high", "by", "name"),
    [
        (None, 100, "residues", "to 100"),
        (0, 1, "depth", "1 to 1"),
        (100, 200, "residues", "101 to 200"),
        (800, None, "residues", "over 800"),
        (None, 0.0, "train_identity", "no relative"),
        (0.0, 0.3, "train_identity", "to 30%"),
        (0.3, 0.5, "train_identity", "30% to 50%"),
        (0.95, None, "train_identity", "over 95%"),
    ],
)
def test_names_of_groups(low: float | None, high: float | None, by: str, name: str) -> None:
    assert tables.group_name({"above": low, "to": high}, by) == name


def sequences(count: int) -> list[str]:
    random = np.random.default_rng(0)
    return ["".join(random.choice(list("ACDEFGHIKLMNPQRSTVWY"), 60)) for _ in range(count)]


def test_clusters_of_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = sequences(3)
    similar = "W" + a[1:]
    rows = [
        row("1", sequences=[a, b]),
        row("2", sequences=[b, similar]),
        row("3", sequences=[c]),
        row("4", sequences=[a]),
    ]
    first, second, third, fourth = tables.target_clusters(rows)
    assert first == second == tuple(sorted(first))
    assert len({*first, *third}) == 3
    assert len(fourth) == 1
    assert fourth[0] in first
    monkeypatch.setattr(tables, "MAX_SEQUENCES", 4)
    assert tables.target_clusters(rows) == [first, second, third, fourth]
    # With more sequences than that, each of them is a cluster.
    monkeypatch.setattr(tables, "MAX_SEQUENCES", 3)
    assert tables.target_clusters(rows) == [(0, 1), (1, 2), (3,), (0,)]


def test_sets_are_compared_in_all_metrics_of_quality() -> None:
    random, chains = np.random.default_rng(1), sequences(4)
    keys = [metric.key for metric in tables.METRICS]
    made = [[row(name, sequences=[chain]) for name, chain in zip("0123", chains)] for _ in range(2)]
    a, b = ({one["target"]: one | dict(zip(keys, random.random(len(keys)))) for one in rows} for rows in made)
    # Target 3 has no DockQ in the second set. Target 4 and target 5 are only in one of the sets.
    b["3"]["dockq"] = None
    a, b = {**a, "4": row("4")}, {"5": row("5"), **b}
    found = tables.compare(a, b)
    assert (found["common"], set(found["metrics"])) == (4, set(keys) - {"coverage", "plddt"})
    for key, difference in found["metrics"].items():
        names = "012" if key == "dockq" else "0123"
        sign = -1 if key in LOWER else 1
        ours, theirs = ([sign * rows[name][key] for name in names] for rows in (a, b))
        expected = paired_difference(ours, theirs).to_dict()
        del expected["means"]
        assert difference == expected
    assert tables.compare(a, {}) == {"common": 0, "metrics": {}}


def test_the_results_table() -> None:
    whole = {"chains": {"A": "X", "B": "Y"}, "notes": ["one", "two"], "interfaces": [{}, {}, {}], "lddt": 0.25}
    rows = [row("1", set="ours", depth=0, **whole), {"set": "ours", "target": "2", "error": "has no atoms"}]
    lines = tables.table_of(rows).splitlines()
    assert lines == [
        "set,target,model,rank,residues,paired,identity,lddt,lddt_ca,gdt_ts,gdt_ha,tm,rmsd,dockq,ilddt,qs_global,ics,ips,"
        "coverage,plddt,clashes,chain_breaks,interfaces,depth,train_identity,released,chains,notes,prediction,"
        "prediction_sha256,truth,truth_sha256,error",
        "ours,1,m,1,50,48,1.0,0.25,0.5,,,,,,,,,,,,,,3,0,,,A:X B:Y,one; two,p/1.cif,0a,t/1.cif,0b,",
        "ours,2" + "," * 21 + "0" + "," * 10 + "has no atoms",
    ]


def sums(values: list[float]) -> Sums:
    return Sums.from_values(np.array(values), np.array(values) / 2, PLDDT_BINS)


def test_the_results_of_sets() -> None:
    """The second model of a target is in the rows alone, and a set without residues has no calibration."""
    ours = [
        measured_of(row("1", lddt_ca=0.4, released="2024-05-01", truth_chains=["A", "B"]), plddt=sums([50, 60])),
        measured_of(row("1", rank=2, lddt_ca=0.9), plddt=sums([10, 20]), pae=sums([1])),
        measured_of(row("2", lddt_ca=0.6), plddt=sums([70]), pae=sums([])),
        measured_of(row("3", lddt_ca=0.5)),
    ]
    theirs = [measured_of(row("2", lddt_ca=0.1))]
    sets = [
        set_of("ours", ours, failures={"4": "too long"}, without_truth=["5"], without_prediction=["6"]),
        set_of("theirs", theirs),
    ]
    found = report(sets, Path("truths"), None, 3)
    best = [ours[0].row, ours[2].row, ours[3].row]
    assert found["sets"][0] == {
        "name": "ours",
        "folder": "p/ours",
        "layout": "AlphaFold",
        "targets": 3,
        "means": tables.means(best, 3),
        "groups": {"residues": tables.groups(best, "residues")},
        "calibration": {"plddt": sums([50, 60, 70]).to_dict()},
        "failures": [{"target": "4", "error": "too long"}],
        "without_truth": ["5"],
        "without_prediction": ["6"],
        "rows": [{key: value for key, value in one.row.items() if key != "sequences"} for one in ours],
    }
    comparison = {"a": "ours", "b": "theirs", **tables.compare({"2": ours[2].row}, {"2": theirs[0].row})}
    whole = {"format": "warpfold-evaluation-1", "truth": "truths", "suite": None, "definitions": DEFINITIONS, "seed": 3}
    assert {key: value for key, value in found.items() if key != "sets"} == {**whole, "comparisons": [comparison]}
    suite = Suite(Path("folder/s.toml"), "0f", "Title", "", {})
    assert report(sets, Path("truths"), suite, 3)["suite"] == {"file": "s.toml", "sha256": "0f", "title": "Title"}
    assert table_rows(sets) == [
        *({"set": "ours", **one.row} for one in ours),
        {"set": "ours", "target": "4", "error": "too long"},
        {"set": "theirs", **theirs[0].row},
    ]


def test_scored_targets_are_written_as_a_suite(tmp_path: Path) -> None:
    rows = [row("1", released="2024-05-01", truth_chains=["A", "B"]), row("1", rank=2), row("2", truth_sha256="0c")]
    (tmp_path / "suite.toml").write_text(as_suite(set_of("ours", list(map(measured_of, rows))), "Title"))
    suite = read_suite(tmp_path / "suite.toml")
    expected: dict[str, Any] = {"1": Entry(date(2024, 5, 1), "0b", ("A", "B")), "2": Entry(None, "0c", ("A",))}
    assert (suite.title, suite.source, suite.targets) == ("Title", "", expected)
