"""Test `warpfold validate`, whose scores equal those of the training, and idle processes."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import warpfold
from tests.ranks import FINE, Crew
from tests.training.runs import equal_tensors, make_store, rows, tiny_run
from tests.training.test_train_ranks import config_for
from warpfold.data.load.order import Source
from warpfold.data.store.store import Store
from warpfold.errors import UserError
from warpfold.files import lock_file
from warpfold.ops.capabilities import Capabilities
from warpfold.parallel import heartbeat
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import Team
from warpfold.training import validate as module
from warpfold.training.config import RunConfig
from warpfold.training.train import train

STEPS = 6


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("validate") / "store", proteins=7)


def config_of(plan: Plan = Plan(), **more: Any) -> RunConfig:  # noqa: B008 (frozen)
    """Return settings that hold out three proteins, which are folded after steps 0, 2, 4 and 6."""
    return config_for(plan, **({"steps": STEPS, "validate_every": 2, "save_every": 2, "keep": 9} | more))


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def run(request: pytest.FixtureRequest, store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("validate") / "run"
    train(config_of(Plan(precision=request.param)), store, out)
    return out


def of_row(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("seconds", "time")}


def test_it_finds_what_the_training_finds(run: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The precision of the device is that of the training here."""
    precision = module.settings_of(run).plan.precision
    has_bf16 = precision == "bf16"
    monkeypatch.setattr("warpfold.parallel.plan.capabilities", lambda device: Capabilities(has_bf16=has_bf16))
    told: list[Any] = []
    found = warpfold.validate(run, store, watch=told.append)
    expected = {row["step"]: of_row(row) for row in rows(run) if row["kind"] == "validation"}
    assert {row["step"]: of_row(row) for row in found} == {
        step: {**expected[step], "precision": precision} for step in (2, 4, 6)
    }
    assert told == found
    assert warpfold.validate(run, store) == []  # no new checkpoints
    best = max(found, key=lambda row: row["lddt_ca"])["step"]
    average = load_file(run / f"checkpoints/step-{best:08d}/state.safetensors")
    for name, x in load_file(run / "best.safetensors").items():
        assert torch.equal(x, average[f"average.{name}"]), name
    logged = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [of_row(row) for row in logged] == [of_row(row) for row in found]


def test_it_follows_a_run_that_trains(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It evaluates the first to the last checkpoint, and does not change the training."""
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    config, out = config_of(validate_every=0), tmp_path / "run"
    found: list[Any] = []

    def follow() -> None:
        found.extend(module.validate(out, [Source(store)], follow=True))

    follower = None

    def begin(row: dict[str, Any]) -> None:
        nonlocal follower
        if follower is None:
            follower = threading.Thread(target=follow)
            follower.start()

    train(config, store, out, watch=begin)
    assert follower is not None
    follower.join(60)
    assert [row["step"] for row in found] == [2, 4, 6]
    train(config, store, tmp_path / "alone")
    assert equal_tensors(out / "params.safetensors", tmp_path / "alone" / "params.safetensors")


def test_what_is_damaged_or_deleted_is_left_out(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    train(config_of(), store, out)
    (out / "checkpoints/step-00000002/state.json").write_text("{}")
    steps = module.StepFolders.steps
    monkeypatch.setattr(module.StepFolders, "steps", lambda self: [*steps(self), 100])
    assert [row["step"] for row in warpfold.validate(out, store)] == [4, 6]
    assert "step 2 is not evaluated: " in caplog.text
    assert "step 100 is not evaluated: the run has deleted it meanwhile" in caplog.text


def test_what_is_refused(store: Store, run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the folder of a training run"):
        warpfold.validate(tmp_path, store)
    (run / "evaluations.jsonl").write_text('{"step": "two"}\n')
    with pytest.raises(UserError, match=r"evaluations\.jsonl: damaged .*Remove it"):
        warpfold.validate(run, store)
    (run / "evaluations.jsonl").unlink()
    with pytest.raises(UserError, match="trains on other data"):
        warpfold.validate(run, make_store(tmp_path / "other", proteins=6))
    train(tiny_run(steps=1, validation=0.0), store, tmp_path / "none")
    with pytest.raises(UserError, match="hold nothing out"):
        warpfold.validate(tmp_path / "none", store)
    with (
        lock_file(run / ".validate-lock", UserError("it is free")),
        pytest.raises(UserError, match="another `warpfold validate`"),
    ):
        warpfold.validate(run, store)


# Idle processes


@pytest.mark.parametrize(("data", "keeps"), [(1, True), (2, False)])
def test_processes_that_a_plan_leaves_over_wait(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: int, keeps: bool
) -> None:
    """One or two of three processes train, and every bit equals a run without idle processes."""
    monkeypatch.setattr(heartbeat, "BEAT", 0.1)
    config, out, plan = config_of(Plan(data=data)), tmp_path / "run", Plan(data=data)

    def one(team: Team) -> None:
        team.remesh(plan, idle=True)
        assert team.process.is_idle == (team.process.rank >= data)
        if not team.process.is_idle:
            assert train(config, store, out, team=team).finished
        else:
            told = team.wait_idle()
            assert told["steps"] == STEPS
            assert told["finished"]

    codes, said = Crew(tmp_path).run(one, Plan(data=3), keeps)
    assert codes == [FINE] * 3, said

    def alone(team: Team) -> None:
        train(config, store, tmp_path / "alone", team=team)

    assert set(Crew(tmp_path).run(alone, plan)[0]) == {FINE}
    last = f"checkpoints/step-{STEPS:08d}/state.safetensors"
    assert equal_tensors(out / last, tmp_path / "alone" / last)


def test_who_waits_hears_that_another_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("BEAT", 0.1), ("SILENT", 0.6), ("GRACE", 1.2)):
        monkeypatch.setattr(heartbeat, name, seconds)

    def one(team: Team) -> None:
        team.remesh(Plan(data=2), idle=True)
        if team.process.is_idle:
            team.wait_idle()
        elif team.process.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        team.all_gather_object(None, "a step")

    codes, said = Crew(tmp_path).run(one, Plan(data=3))
    assert codes[1] == -signal.SIGKILL
    assert FINE not in codes
    assert "rank 1 is dead or frozen" in said[2]
