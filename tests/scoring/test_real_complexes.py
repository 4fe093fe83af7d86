"""Train a multimer on real entries of several chains."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REAL = Path(__file__).parents[3] / "shared/realdata"
# Entries of 2 to 4 chains of at most 146 residues.
ENTRIES = ("4cxl", "2oob", "3u8v", "4i6p", "1fki", "1hho", "3ln2", "2q2k")


def warpfold(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "warpfold", *map(str, arguments)], check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="needs ../shared/realdata")
def test_the_loss_falls_on_real_complexes(tmp_path: Path) -> None:
    structures = [REAL / f"mmcif/{name}.cif.gz" for name in ENTRIES]
    warpfold(
        *("pack", "--assemblies", "--max-resolution", "9", "--out", tmp_path / "store"),
        *(argument for path in structures for argument in ("--structures", path)),
        *("--msas", REAL / "msas"),
    )
    settings = ("train.steps=100", "train.validation=0", "optim.warmup_steps=10", "data.crop=64")
    warpfold(
        *("train", "tiny_multimer", "--data", tmp_path / "store", "--out", tmp_path / "run", "--device", "cpu"),
        *(argument for setting in settings for argument in ("--set", setting)),
    )
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "step"]
    assert len(losses) == 100
    # Measured means of 20 steps: 5.0, 4.6, 4.3, 4.1, 4.1.
    assert sum(losses[80:]) < 0.92 * sum(losses[:20])
