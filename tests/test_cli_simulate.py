"""`warpfold simulate`: what it says, as text, JSON and a picture, and what it refuses."""

import json
from pathlib import Path

import pytest

from tests.test_cli import refused, run
from warpfold.cli.plan import PlanCommand
from warpfold.cli.simulate import SimulateCommand
from warpfold.cost.planner import joined


def test_a_step_and_a_training_are_said_and_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cluster = ("--devices", 4, "--node", 2, "--plan.axial", 2, "--link", "eth25", "--set", "optim.accumulate=4")
    code, out, err = run(
        capsys, "simulate", "tiny", *cluster, "--recycles", 1, "--failures-per-day", 5, "--price", 2, "--json",
        "--figure", tmp_path / "timeline.svg",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    assert found["why"].startswith("data 2 x axial 2, ")
    assert found["plan"] | {"data": 2, "axial": 2, "branch": 1} == found["plan"]
    step = found["step"]
    assert sum(step["parts"].values()) == pytest.approx(step["mean"])
    assert step["from"] <= step["median"] <= step["to"]
    assert set(step["undisturbed"]) == {"0", "1"}
    assert 0 < found["efficiency"] <= 1
    assert found["cost"] == pytest.approx(2 * found["device_hours"])
    assert found["device_hours"] == pytest.approx(4 * found["training"]["seconds"] / 3600)
    assert found["training"]["failed"] > 0
    assert (tmp_path / "timeline.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_what_does_not_fit_together_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fixed = ("--set", "plan.auto=false", "--plan.data", 3)
    assert "does not fill 8" in refused(run(capsys, "simulate", "tiny", "--devices", 8, *fixed))
    assert "cannot share a step of 1 so" in refused(run(capsys, "simulate", "tiny", "--devices", 8, "--plan.data", 3))
    assert "not a network" in refused(run(capsys, "simulate", "tiny", "--link", "wifi"))
    assert "is not known" in refused(run(capsys, "simulate", "tiny", "--device", "GTX 480"))
    assert "ends in .png or .svg" in refused(run(capsys, "simulate", "tiny", "--figure", tmp_path / "a.pdf"))
    assert "does not fill 64 devices; give --devices 1" in refused(run(capsys, "simulate", "tiny", "--devices", 64))


def test_plan_and_simulate_take_devices_to_be_joined_alike() -> None:
    """`plan` once put 256 devices on one node."""
    _, there = PlanCommand(target="monomer", devices=256, device="H100").machine_and_cluster()
    assert there == SimulateCommand(settings="monomer", devices=256).joined()
    assert there is not None
    assert joined(there).startswith("32 nodes of 8, 360 GB/s within and 320 GB/s between")
