"""A training in fp16: what overflows is no failure and is counted apart, and the loss scale continues."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.training.runs import equal_tensors, make_store, rows, tiny_run
from warpfold.engine import checkpoint, optim
from warpfold.engine import learn as module
from warpfold.errors import UserError
from warpfold.parallel.plan import Plan
from warpfold.training.config import RunConfig
from warpfold.training.train import train


def config_of(steps: int) -> RunConfig:
    return replace(tiny_run(steps=steps, validation=0.0, save_every=2), plan=Plan(precision="fp16"))


def test_overflows_are_counted_apart_and_a_resumed_run_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With on_nonfinite = "stop": at 2^24 gradients overflow, until the scale has come down."""
    monkeypatch.setattr(optim, "FIRST_SCALE", 2.0**24)
    store = make_store(tmp_path / "store")
    train(config_of(4), store, tmp_path / "unbroken")
    found = rows(tmp_path / "unbroken")
    assert found[0]["overflowed"] > 0
    for row in found:
        assert row["skipped"] == 0
        assert math.isfinite(row["loss"])
        assert (row["learning_rate"] > 0) == (row["overflowed"] < 2)
    with checkpoint.RunFolder(tmp_path / "unbroken") as run:
        state = run.load(4).tensors
    halved = sum(row["overflowed"] > 0 for row in found)
    assert state["loss_scale.scale"] == 2.0 ** (24 - halved)
    assert state["steps"] == sum(row["learning_rate"] > 0 for row in found)

    train(config_of(2), store, tmp_path / "broken")
    train(config_of(4), store, tmp_path / "broken")
    name = "checkpoints/step-00000004/state.safetensors"
    assert equal_tensors(tmp_path / "broken" / name, tmp_path / "unbroken" / name)


def test_a_loss_that_is_not_finite_still_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = module.total_loss

    def poisoned(*args, **more):  # type: ignore[no-untyped-def]
        loss, terms = original(*args, **more)
        return loss * math.nan, terms

    monkeypatch.setattr(module, "total_loss", poisoned)
    with pytest.raises(UserError, match="is not finite"):
        train(config_of(2), make_store(tmp_path / "store"), tmp_path / "run")
