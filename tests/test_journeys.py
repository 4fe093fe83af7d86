"""The script that measures journeys still finds its way, and a new layer still takes no more than the layer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.journeys import JOURNEYS

SCRIPT = Path(__file__).with_name("journeys.py")


@pytest.mark.parametrize("journey", JOURNEYS)
def test_a_journey_is_measured(journey: str) -> None:
    ran = subprocess.run([sys.executable, SCRIPT, "--json", journey], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    for row in json.loads(ran.stdout):
        assert row["files"] or row["functions"] or row["note"] or row["what"] == "files in circles", row
        if journey == "layer":
            assert row["note"] == "runs unchanged: whole, in chunks, in place, recomputed, axial = 2"


def test_a_name_that_is_gone_is_named(tmp_path: Path) -> None:
    """An empty package has none of them."""
    (tmp_path / "warpfold").mkdir()
    ran = subprocess.run([sys.executable, SCRIPT, "--root", tmp_path, "block"], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "block: Evoformer is not defined in warpfold" in ran.stderr
