"""The doctor's last lines: what a machine is good for, and what is slow or wrong on it and why."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_cli import run
from warpfold.bench import doctor
from warpfold.bench.doctor import Finding, of_findings, of_machine
from warpfold.check.checks import Verdict
from warpfold.check.op_profile import OpCase

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GATE = OpCase(op="gate", where="triangle factor", rows=6, length=5, channels=16)
FAST = Finding(Verdict(GATE, "fp32", "cpu", "", (), True), 2.0)
SMALL = replace(FAST, small=True)
LEFT = Finding(Verdict(GATE, "bf16", "definition", "1024 channels (kernels are for 512 at most)", (), True), None)
WRONG = replace(FAST, verdict=Verdict(GATE, "fp32", "cpu", "", (), False))  # two runs differ


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU with everything, which a test takes away."""
    has: dict[str, Any] = {"free": 80 * 10**9, "host": 100 * 10**9, "packages": {"openmm", "tensorboard"}}
    monkeypatch.setattr(doctor, "free_memory", lambda device: has["free"])
    monkeypatch.setattr(doctor, "host_memory", lambda: has["host"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in has["packages"] else None)
    monkeypatch.setattr(doctor, "TRITON", True)
    monkeypatch.setattr(doctor, "LITTLE_SHARED", 0)
    return has


def test_a_gpu_with_everything_is_fine_and_nothing_else_is_said(machine: dict[str, Any]) -> None:
    (said,) = of_machine(GPU)
    assert said == "This machine is fine for training, fine-tuning and predictions: a GPU with 80.0 GB free."


def test_what_is_missing_is_said_with_its_cure(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    machine.update(free=10**9, host=2 * 10**9, packages=set())
    monkeypatch.setattr(doctor, "TRITON", False)
    monkeypatch.setattr(doctor, "LITTLE_SHARED", 10**18)
    monkeypatch.setattr(Path, "is_dir", lambda self: True)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 64 * 10**6}))
    said = "\n".join(of_machine(GPU)[1:])
    for words in ("pip install triton", "1.0 GB of memory is free", "host memory", "/dev/shm", "warpfold[relax]"):
        assert words in said


def test_a_cpu_is_told_what_it_is_good_for_and_what_not(machine: dict[str, Any]) -> None:
    first, slow = of_machine(CPU)
    assert "fine for the demo" in first
    assert slow.startswith("Slow: full-size models, because there is no GPU; warpfold plan ")


def test_another_device_is_said_to_be_none_of_ours() -> None:
    (said,) = of_machine(torch.device("meta"))
    assert "meta" in said


def test_operations_are_summed_up() -> None:
    first, *more = of_findings([FAST, SMALL, LEFT], "monomer", CPU)
    assert first == "All 3 operations of monomer are computed as they should be, forward and backward."
    ours, small, slow = more
    assert ours.startswith("Ours: 1 run in WarpFold's own way, 2.0 times as fast")
    assert small.startswith("As good: 1 are so small in monomer")
    assert slow == ("Slow: 1 run by their definitions (gate), because 1024 channels (kernels are for 512 at most)")


@pytest.mark.parametrize(("device", "cure"), [(CPU, "do not trust"), (GPU, "use --device cpu")])
def test_what_is_wrong_comes_first(device: torch.device, cure: str) -> None:
    first, *_ = of_findings([FAST, WRONG], "tiny", device)
    assert first.startswith("WRONG: 1 of 2 operations are not computed as they should be (gate); " + cure)


def test_the_command_ends_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor", "--device", "cpu")
    assert code == 0
    assert "This machine is fine for the demo" in out
