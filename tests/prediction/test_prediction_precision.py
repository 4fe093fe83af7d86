"""Test the precision of predictions: choice by device, records, and the error of bf16 relative to that of seeds."""

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import warpfold
from benchmarks.precision import Protein, effects
from tests.helpers import tiny_model
from tests.prediction.runs import run_cli
from warpfold.cli.design import design
from warpfold.cost.machine import Machine
from warpfold.data.features.choose import SampleConfig
from warpfold.errors import UserError
from warpfold.model.losses import lddt
from warpfold.ops.capabilities import Capabilities
from warpfold.parallel.plan import Precision, log_precision, resolve_precision
from warpfold.prediction.outputs import Prediction
from warpfold.prediction.predictor import Predictor, load
from warpfold.prediction.request import DEFAULT_PRECISION, Request

ONE = "MKTAYIAKQRQISFVKSH"


@pytest.fixture
def with_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as a GPU with bf16 matrix products."""
    monkeypatch.setattr("warpfold.parallel.plan.capabilities", lambda device: Capabilities(has_bf16=True))


@pytest.mark.parametrize(("has_bf16", "expected"), [(True, "bf16"), (False, "fp32")])
def test_auto_is_bf16_on_a_gpu_that_multiplies_it(
    has_bf16: bool, expected: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("warpfold.parallel.plan.capabilities", lambda device: Capabilities(has_bf16=has_bf16))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    with caplog.at_level(logging.INFO, "warpfold.plan"):
        assert resolve_precision("auto", "cuda:0") == expected
        assert resolve_precision("fp16", "cuda:0") == "fp16"
        log_precision("auto", resolve_precision("auto", "cuda:0"), "cuda:0")
        log_precision("fp16", "fp16", "cuda:0")
    assert [record.getMessage() for record in caplog.records] == [f"precision: {expected} (auto, on NVIDIA H100)"]


def test_auto_is_fp32_on_other_devices() -> None:
    assert [resolve_precision("auto", device) for device in ("cpu", "mps")] == ["fp32", "fp32"]
    assert Machine(kind="cpu", free=1, here=True).prediction_precision == "fp32"
    assert Machine(kind="cuda", free=1, name="H100").prediction_precision == "bf16"


def test_the_default_is_declared_once() -> None:
    functions = load, Predictor, Request, design
    declared = [inspect.signature(function).parameters["precision"].default for function in functions]
    assert declared == 4 * [DEFAULT_PRECISION] == 4 * ["auto"]


def test_a_run_prints_and_records_what_was_chosen(
    tmp_path: Path, tiny_params: Path, with_bf16: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was begun in one precision is not continued in another."""
    out = tmp_path / "out"
    arguments = [ONE, "--params", tiny_params, "--out", out]
    code, _, err = run_cli(capsys, *arguments)
    assert code == 0
    assert err.count("precision: bf16 (auto, on cpu)") == 1
    summary = json.loads((out / "summary.json").read_text())
    assert summary["settings"]["precision"] == summary["models"][0]["precision"] == "bf16"
    assert run_cli(capsys, *arguments, "--precision", "bf16")[0] == 0  # the same run
    with pytest.raises(UserError, match=str(out)):
        warpfold.predict(ONE, tiny_params, out, device="cpu", precision="fp32")


def test_a_predictor_chooses_for_its_device(tiny_params: Path, with_bf16: None) -> None:
    found, explicit = load(tiny_params, "cpu"), load(tiny_params, "cpu", precision="bf16")
    assert found.precision == "bf16"
    assert "bf16 on cpu" in repr(found)
    np.testing.assert_array_equal(found.fold(ONE).positions, explicit.fold(ONE).positions)
    assert load(tiny_params, "cpu", precision="fp32").precision == "fp32"


def test_a_predictor_chooses_again_when_it_moves(tiny_params: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = load(tiny_params, "cpu")
    assert predictor.precision == "fp32"
    monkeypatch.setattr("warpfold.parallel.plan.capabilities", lambda device: Capabilities(has_bf16=True))
    assert predictor.to("cpu").precision == "bf16"


def test_bf16_changes_a_prediction_by_less_than_seeds_do() -> None:
    """The model is small and has random parameters. Its own prediction in fp32 serves as the true structure."""
    rng = np.random.default_rng(0)
    rows = ["".join(np.where(rng.random(18) < 0.4, rng.choice(list(ONE), 18), list(ONE))) for _ in range(12)]
    model, sample = tiny_model(), SampleConfig(max_msa=3, max_extra=2)
    truth = torch.from_numpy(Predictor(model, precision="fp32").fold(ONE, rows, seed=9).ca)

    def make(precision: Precision) -> Predictor:
        return Predictor(model, precision=precision, sample=sample)

    def fold(predictor: Predictor, seed: int) -> Prediction:
        return predictor.fold(ONE, rows, seed=seed)

    def lddt_ca(prediction: Prediction) -> float:
        return float(lddt(torch.from_numpy(prediction.ca), truth, torch.ones(len(ONE))))

    (row,) = effects(make, [Protein("one", len(ONE), fold, lddt_ca)], range(4))
    found: dict[str, Any] = {key: row[key] for key in ("mean_plddt", "lddt_ca")}
    assert found["mean_plddt"]["effect_of_bf16"] > 0
    assert all(one["effect_of_bf16"] < one["effect_of_seeds"] for one in found.values()), found
