"""`warpfold bench --model`: a user's model from the current folder, before and after `accelerate`."""

import copy
import csv
import json
import sys
from pathlib import Path

import pytest
import torch

from tests.test_cli import run
from warpfold.adapt.accelerate import accelerate
from warpfold.bench.model import ACCELERATED, bench_accelerated, user_model
from warpfold.bench.ops import table
from warpfold.bench.timing import Times

# A file in the current folder: a plain torch model, selected by --only
MINE = """
from torch import nn, ones, zeros

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x, scale=1):
        return scale * self.mlp(x)

def make_model():
    return Model()

def make_both():
    return make_model(), {"x": zeros(1, 5, 16)}

def make_inputs():
    return (ones(2, 7, 16),), {"scale": zeros(2, 7, 1)}

def frozen():
    return make_model().requires_grad_(False), ones(2, 7, 16)

def wrong():
    return 3

number = 3
"""
BENCH = ("bench", "--device", "cpu", "--repeats", "1")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with a module of the user."""
    (tmp_path / "mine_to_bench.py").write_text(MINE, encoding="utf-8")
    (tmp_path / "broken_bench.py").write_text("import nowhere_to_be_found\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    return tmp_path


def test_a_model_is_timed_before_and_after(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of = ["--model", "mine_to_bench:make_model", "--inputs", "mine_to_bench:make_inputs"]
    only = ["--only", "transition"]
    code, out, _ = run(capsys, *BENCH, *of, *only, "--json", "--csv", "out.csv")
    assert code == 0
    found = json.loads(out)
    assert found["swapped"] == {"mlp": "transition"}
    assert found["difference"] < 1e-5
    assert [row["pass"] for row in found["rows"]] == ["forward", "both"]
    assert all(
        row[f"{way}_{what}"] > 0 for row in found["rows"] for way in ("before", "after") for what in ("ms", "mib")
    )
    rows = list(csv.DictReader((here / "out.csv").open(encoding="utf-8")))
    assert [float(row["times_faster"]) for row in rows] == [row["times_faster"] for row in found["rows"]]
    _, said, _ = run(capsys, *BENCH, "--model", "mine_to_bench:make_both", *only)
    assert "outputs differ by" in said
    assert "mlp" in said


def test_a_frozen_model_has_one_pass_and_what_is_slower_says_so(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, call = user_model("mine_to_bench:frozen", None, torch.device("cpu"))
    after = accelerate(copy.deepcopy(model), only="transition")

    def measured(ways: object, *_: object) -> dict[str, Times]:
        return {"before": Times({"forward": [1.0]}), "after": Times({"forward": [1.25]})}

    monkeypatch.setattr("warpfold.bench.model.measure", measured)
    rows = bench_accelerated("mine", model, after, call, torch.device("cpu"))["rows"]
    assert [row["note"] for row in rows] == ["slower here", "no parameter requires a gradient"]
    assert table(rows, ACCELERATED)[1][0][:4] == ("forward", "1000", "1250", "0.80")
