"""The doctor: its sizes are those of the settings, and its rows contain the path that ran and its errors."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_cli import run
from warpfold import settings
from warpfold.bench import doctor
from warpfold.bench.doctor import (
    HEADS,
    MAX_LOGITS,
    Finding,
    cases_of,
    cut,
    examine,
    of_findings,
    of_machine,
    report,
    table,
)
from warpfold.check import checks
from warpfold.check.cases import OPS, size_in_words
from warpfold.check.checks import Verdict
from warpfold.check.op_profile import OpCase
from warpfold.check.sizes import DataSizes
from warpfold.cost.example import SECTIONS
from warpfold.data.features.choose import SampleConfig
from warpfold.ops.linear import gate, layer_norm
from warpfold.training.config import RunConfig

CPU = torch.device("cpu")
GATE = OpCase(op="gate", where="triangle factor", rows=6, length=5, channels=16)


def test_defaults_are_those_of_the_data() -> None:
    for name in DataSizes.__dataclass_fields__:
        assert getattr(DataSizes(), name) == getattr(SampleConfig(), name)
    assert set(SECTIONS) == set(RunConfig.__dataclass_fields__)


@pytest.mark.parametrize("preset", sorted(settings.presets()))
def test_every_preset_has_its_cases(preset: str) -> None:
    values = settings.load(preset)
    cases = cases_of(values, preset)
    crop = values["data"]["crop"]
    row = next(case for case in cases if case.where == "msa row" and case.op == "attention")
    assert row.length == crop
    assert row.width == values["model"]["c_m"] // row.heads
    templates = values["model"]["templates"]["enabled"]
    assert any(case.where.startswith("template") for case in cases) is templates
    assert {case.op for case in cases} == set(OPS)


def test_monomer_by_the_supplement() -> None:
    cases = {(case.op, case.where): case for case in cases_of(settings.load("monomer"), "monomer")}
    row, extra = cases["attention", "msa row"], cases["attention", "extra msa row"]
    assert (row.rows, row.length, row.heads, row.width) == (124 + 4, 256, 8, 32)
    assert (extra.rows, extra.length, extra.width) == (1024, 256, 8)
    assert cases["global_attention", "global column"].keys == 1024
    assert cases["attention", "template pointwise"].keys == 4
    assert cases["norm_linear", "triangle starting"].outputs == 4 * 128 + 4
    assert [cases["tail", where].drawn for where in ("msa row", "msa column", "triangle ending")] == [True, False, True]


def test_rows_are_cut_and_lengths_stay() -> None:
    big = OpCase(op="attention", where="", rows=512, length=384, heads=2, width=32, bias=True)
    small = cut(big, CPU)
    assert small.logits <= MAX_LOGITS["cpu"]
    assert (small.length, small.heads, small.full_rows) == (384, 2, 512)
    assert "of 512 rows" in size_in_words(small)
    pointwise = OpCase(op="attention", where="", rows=256 * 256, batches=256, length=1, keys=4, heads=4, width=16)
    assert cut(pointwise, CPU).rows % 256 == 0
    assert cut(GATE, CPU) is GATE
    deep = OpCase(op="attention", where="", rows=9, length=4096, heads=8, width=32)
    # One row to compute, and one that is completely masked
    assert cut(deep, CPU).rows == 2


def test_findings_say_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    norm = OpCase(op="layer_norm", where="pair transition", rows=6, length=5, channels=16)
    monkeypatch.setattr(layer_norm, "unsupported_reason", lambda *_: "no")
    monkeypatch.setattr(gate, "prefer_definition", lambda t: t.x.shape[0] < 6)
    found = examine([GATE, norm], CPU, progress=lambda done, total, what: seen.append(what))
    assert [f.says for f in found] == ["ok", "ok", "not fast: no", "not fast: no"]
    assert [f.verdict.way for f in found] == ["cpu", "cpu", "definition", "definition"]
    assert found[0].speed is not None
    assert found[2].speed is None
    assert seen[0] == "gate triangle factor fp32"
    lines = table(found)
    assert all(len(line) == len(HEADS) for line in lines)
    assert lines[0][:5] == ("gate", "triangle factor", "6 rows of 5, 16 channels", "fp32", "cpu")
    held = report(found, CPU, "tiny")
    assert held["red"] == 0
    json.dumps(held, allow_nan=False)


def test_what_is_small_is_checked_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the model decides whether a case is small, and not the smaller size that is checked."""
    monkeypatch.setattr(gate, "prefer_definition", lambda t: t.x.shape[0] <= 6)
    (small,) = examine([GATE], CPU, ["fp32"])
    assert small.says == "ok; small, so its definition is chosen"
    assert small.verdict.errors
    monkeypatch.setattr(gate, "prefer_definition", lambda t: t.x.shape[0] <= 5000)
    large = replace(GATE, rows=5001, length=300)
    assert cut(large, CPU).rows < 5000
    assert examine([large], CPU, ["fp32"])[0].says == "ok"
    monkeypatch.setattr(gate, "fast", lambda x, g: x * g)
    assert examine([GATE], CPU, ["fp32"])[0].says == "RED"


def test_what_is_wrong_is_red_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "fast", lambda x, g: x / 0 * g)
    found = examine([GATE], CPU)
    assert [f.says for f in found] == ["RED", "RED"]
    assert [f.speed for f in found] == [None, None]
    held = report(found, CPU, "tiny")
    assert held["red"] == 2
    assert held["ops"][0]["errors"]["output"]["ours"] == "not finite"
    json.dumps(held, allow_nan=False)


def test_findings_are_written_as_they_come(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each finding is written before the next one is computed, so that an interrupted run keeps its findings."""
    rows, seen = tmp_path / "rows.jsonl", []

    def check(case: OpCase, dtype: str, device: torch.device) -> Verdict:
        seen.append(len(rows.read_text().splitlines()))
        return checks.check(case, dtype, device)

    monkeypatch.setattr(doctor, "check", check)
    monkeypatch.setattr(doctor, "cases_of", lambda values, source: [GATE, replace(GATE, rows=3)])
    monkeypatch.setattr(doctor, "_speed", lambda case, dtype, device: None)
    code, _, _ = run(capsys, "doctor", "--kernels", "--device", "cpu", "--dtype", "bf16", "--rows", rows)
    assert (code, seen) == (0, [0, 1])
    assert [json.loads(line)["dtype"] for line in rows.read_text().splitlines()] == ["bf16", "bf16"]


# ---- summaries

GPU = torch.device("cuda")
FAST = Finding(Verdict(GATE, "fp32", "cpu", "", (), True), 2.0)
SMALL = replace(FAST, small=True)
LEFT = Finding(Verdict(GATE, "bf16", "definition", "1024 channels (kernels are for 512 at most)", (), True), None)
# Two runs differ.
WRONG = replace(FAST, verdict=Verdict(GATE, "fp32", "cpu", "", (), False))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the properties of a complete GPU machine, which a test can change."""
    has: dict[str, Any] = {"free": 80 * 10**9, "host": 100 * 10**9, "packages": {"openmm", "tensorboard"}}
    monkeypatch.setattr(doctor, "free_memory", lambda device: has["free"])
    monkeypatch.setattr(doctor, "host_memory", lambda: has["host"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in has["packages"] else None)
    monkeypatch.setattr(doctor, "slow_notice", lambda device: None)
    monkeypatch.setattr(doctor, "MIN_SHARED", 0)
    return has


def test_a_gpu_with_everything_is_fine_and_nothing_else_is_said(machine: dict[str, Any]) -> None:
    (said,) = of_machine(GPU)
    assert said == "This machine is fine for training, fine-tuning and predictions: a GPU with 80.0 GB free."


def test_what_is_missing_is_said_with_its_cure(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    machine.update(free=10**9, host=2 * 10**9, packages=set())
    monkeypatch.setattr(doctor, "slow_notice", lambda device: "in plain torch, because triton is not installed")
    monkeypatch.setattr(doctor, "MIN_SHARED", 10**18)
    monkeypatch.setattr(Path, "is_dir", lambda self: True)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 64 * 10**6}))
    first, *more = of_machine(GPU)
    assert first.startswith("This machine is slow for training, fine-tuning and predictions")
    said = "\n".join(more)
    for words in (
        "Slow: in plain torch, because triton is not installed",
        "1.0 GB of memory is free",
        "host memory",
        "/dev/shm",
        ".[relax]",
    ):
        assert words in said


def test_a_cpu_is_told_what_it_is_good_for_and_what_not(machine: dict[str, Any]) -> None:
    first, slow = of_machine(CPU)
    assert "fine for the demo" in first
    assert slow.startswith("Slow: full-size models, because there is no GPU. warpfold plan ")


def test_another_device_is_said_to_be_none_of_ours() -> None:
    (said,) = of_machine(torch.device("meta"))
    assert "meta" in said


def test_operations_are_summed_up() -> None:
    first, *more = of_findings([FAST, SMALL, LEFT], "monomer", CPU)
    assert first == "All 3 operations of monomer are computed correctly, forward and backward."
    ours, small, slow = more
    assert ours.startswith("Ours: 1 run by WarpFold's fast paths, 2.0 times as fast")
    assert small.startswith("As good: 1 are so small in monomer")
    assert slow == ("Slow: 1 run by their definitions (gate), because 1024 channels (kernels are for 512 at most)")


@pytest.mark.parametrize(("device", "cure"), [(CPU, "Do not trust"), (GPU, "Use --device cpu")])
def test_what_is_wrong_comes_first(device: torch.device, cure: str) -> None:
    first, *_ = of_findings([FAST, WRONG], "tiny", device)
    assert first.startswith("WRONG: 1 of 2 operations are computed incorrectly (gate). " + cure)
