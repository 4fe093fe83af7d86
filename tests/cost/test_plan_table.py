"""`warpfold plan` for training on many devices: the table, the cost, and options that exclude each other."""

import json
from pathlib import Path

import pytest

from warpfold.cli import main
from warpfold.cost import planner
from warpfold.cost.links import Cluster, Link
from warpfold.cost.memory import MemoryEstimate

FOUR = ["--device", "H100", "--devices", "4", "--node", "2", "--link", "eth25", "--set", "optim.accumulate=4"]


@pytest.fixture(autouse=True)
def no_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MemoryEstimate(peak=10**9, weights=10**6, features=0, course=[("run", {"kept": 10**9})])
    monkeypatch.setattr(planner, "estimate_memory", lambda job, plan, kind: memory)


def said(command: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["plan", *command])
    found = capsys.readouterr()
    return int(end.value.code or 0), found.out, found.err


def test_the_table_has_what_each_plan_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(["tiny", *FOUR, "--price", "2", "--json"], capsys)
    found = json.loads(out)
    assert code == 0
    (row,), found = found["targets"], found["largest"]
    (chosen,) = (one for one in found["plans"] if one["chosen"])
    assert row["said"] == found["said"]
    assert (chosen["plan"]["data"], found["cluster"]["per_node"], found["examples"]) == (4, 2, 4)
    assert len(found["plans"]) <= 12
    assert sum(one["seconds"] is not None for one in found["plans"]) > 1
    for one in (one for one in found["plans"] if one["seconds"] is not None):
        hours = 4 * one["seconds"] * 1e6 / 4 / 3600
        assert one["device_hours_per_million"] == pytest.approx(hours)
        assert one["cost_per_million"] == pytest.approx(2 * hours)
        assert one["sent_bytes"] > 0
    # The same cluster from a file, with the result as text
    cluster = Cluster(ranks=4, per_node=2, within=Link(**found["cluster"]["within"]), device="H100",
                      between=Link(**found["cluster"]["between"]))  # fmt: skip
    cluster.save(tmp_path / "cluster.toml")
    code, out, _ = said(["tiny", "--cluster", str(tmp_path / "cluster.toml"), "--set", "optim.accumulate=4"], capsys)
    assert code == 0
    assert found["said"] in out
    assert "device-hours of a million" in out
    assert "2 nodes of 2" in out
    assert "left out:" in out


def test_a_design_is_planned_as_a_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(["tiny", "--residues", "200", "--design", "--device", "A100", "--json"], capsys)
    found = json.loads(out)["largest"]
    assert code == 0
    assert found["sizes"] == {"residues": 200, "sequences": 1, "extra": 1, "templates": 0}
    assert {one["plan"]["recompute"] for one in found["plans"]} == {"none", "layer", "block"}
    code, out, _ = said(["tiny", "--residues", "200", "--design", "--max-msa", "8", "--memory", "100MB"], capsys)
    assert code == 1
    assert "a gradient by the sequence of 200 residues with 9 alignment rows" in out


def test_what_fits_nowhere_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(["tiny", *FOUR, "--memory", "100MB"], capsys)
    assert code == 1
    assert "a training on 48 residues" in out


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--devices", "16", "--node", "8", "--link", "ib"], "ib: not a network"),
        (["--cluster", "nowhere.toml", "--devices", "4"], "--devices: nowhere.toml contains it. Omit one of the two"),
        (["--cluster", "nowhere.toml"], "nowhere.toml"),
        (["--link", "ib400"], "--link: it is for training on several devices"),
        (["--design"], "--design: it needs a sequence. Pass a query, or its length with --residues"),
        (["--residues", "100", "--price", "3"], "--price: it is for training on several devices"),
        (
            ["--devices", "4", "--set", "optim.accumulate=3", "--set", "plan.data=3"],
            "4 ranks cannot divide a step of 3",
        ),
    ],
)
def test_what_does_not_go_together_is_one_line(given: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(["tiny", "--device", "H100", *given], capsys)
    assert (code, len(err.splitlines())) == (2, 1), err
    assert why in err
