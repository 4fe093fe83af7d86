"""The script that measures journeys still finds its way, and a new layer still takes no more than the layer."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("journeys.py")


def measured(*journeys: str) -> list[dict[str, object]]:
    ran = subprocess.run([sys.executable, SCRIPT, "--json", *journeys], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    rows: list[dict[str, object]] = json.loads(ran.stdout)
    return rows


def test_journeys_are_measured() -> None:
    for row in measured("step", "block", "operation", "optimizer", "mmcif", "size"):
        assert row["files"] or row["functions"], row


def test_a_new_layer_runs_under_every_plan() -> None:
    (row,) = measured("layer")
    assert row["note"] == "runs unchanged: whole, in chunks, in place, recomputed, axial = 2"


def test_a_name_that_is_gone_is_named(tmp_path: Path) -> None:
    """An empty package has none of them."""
    (tmp_path / "warpfold").mkdir()
    ran = subprocess.run([sys.executable, SCRIPT, "--root", tmp_path, "block"], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "block: Evoformer is not defined in warpfold" in ran.stderr
