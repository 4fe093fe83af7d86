"""Test `train.digest_every` and `doctor --replay`: repeated digests, planted bit flips, and refused input."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.recorder import OperationRecorder
from tests.test_cli import refused, run
from tests.training.flips import PLACES, Flip, plant
from tests.training.runs import equal_tensors, make_store, rows, tiny_run
from tests.training.test_train_ranks import PARTS, team_of
from warpfold import device, settings
from warpfold.data.load.order import Source
from warpfold.data.store.store import Store
from warpfold.engine.learn import Learner
from warpfold.engine.optim import Optimizer
from warpfold.errors import UserError
from warpfold.parallel.compress import CompressionConfig
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.plan import Plan
from warpfold.training.config import RunConfig
from warpfold.training.replay import Replay, replay
from warpfold.training.train import Summary, state_digest, train

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("replay") / "store", proteins=4)


def config_for(plan: Plan | None = None, optim: dict[str, Any] | None = None, **more: Any) -> RunConfig:
    """Six steps with checkpoints after 2, 4 and 6 and a digest of each step; more: of [train]."""
    config = tiny_run(**({"validation": 0.0, "keep": 9, "digest_every": 1} | more))
    return replace(config, plan=plan or Plan(), optim=replace(config.optim, **(optim or {})))


def on_ranks(plan: Plan, function: Callable[[Any], Any]) -> Any:
    """Call a function on all ranks of a plan, and return the result, which must be equal on all."""
    sizes = plan.data, plan.axial, plan.branch
    first, *others = run_ranks(lambda: function(team_of(*sizes)), plan.data * plan.axial * plan.branch)
    assert all(other == first for other in others)
    return first


def train_and_replay(config: RunConfig, store: Store, out: Path, start: int | None = None) -> Replay:
    """Replay a run on its number of ranks."""
    on_ranks(config.plan, lambda team: train(config, store, out, team=team) and None)
    found: Replay = on_ranks(config.plan, lambda team: replay(out, start, CPU, team))
    assert not (out / ".replay").exists()
    return found


def digests(out: Path) -> dict[int, str]:
    return {row["step"]: row["digest"] for row in rows(out, kind="digest")}


# Digests


PLANS: dict[str, tuple[Plan, dict[str, Any]]] = {
    "alone": (Plan(), {}),
    "data": (Plan(data=2), {}),
    "sharded": (Plan(data=2, sync=SyncConfig(shard_state=True)), {"accumulate": 3, "name": "lamb"}),
    "compressed": (Plan(data=2), {"compression": CompressionConfig(method="powersgd", start=0)}),
    "axial": (Plan(axial=2), {"average": "uniform"}),
    "fp16": (Plan(precision="fp16", data=2), {}),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_sound_run_has_equal_digests(name: str, store: Store, tmp_path: Path) -> None:
    """Digests do not change any bit of a run."""
    config = config_for(*PLANS[name], steps=4)
    found = train_and_replay(config, store, tmp_path / "run")
    assert found == Replay(start=2, last=4, equal=3)
    without = replace(config, train=replace(config.train, digest_every=0))
    on_ranks(config.plan, lambda team: train(without, store, tmp_path / "without", team=team) and None)
    state = "checkpoints/step-00000004/state.safetensors"
    assert equal_tensors(tmp_path / "run" / state, tmp_path / "without" / state)
    assert {row["kind"] for row in rows(tmp_path / "without")} == {"step"}


@pytest.mark.parametrize("accumulate", [2, 3])
def test_so_it_is_with_recorded_graphs(
    accumulate: int, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test one example for each of two ranks, which exchange gradients in the backward pass, and three examples."""
    monkeypatch.setattr(device, "find_recorder", lambda _: OperationRecorder())
    config = config_for(Plan(data=2, sizes=1, graph=True), {"accumulate": accumulate}, steps=4)
    assert train_and_replay(config, store, tmp_path / "run") == Replay(start=2, last=4, equal=3)
    plain = replace(config, plan=replace(config.plan, graph=False))
    on_ranks(plain.plan, lambda team: train(plain, store, tmp_path / "plain", team=team) and None)
    assert digests(tmp_path / "run") == digests(tmp_path / "plain")


def test_so_it_is_where_a_part_is_trained(store: Store, tmp_path: Path) -> None:
    """Replay a run with `init` and a cached trunk.  Other parameters are refused."""
    init = train(config_for(steps=1), store, tmp_path / "first").params
    config = replace(config_for(steps=4), finetune=PARTS["cached"])
    train(config, store, tmp_path / "run", init=init)
    assert replay(tmp_path / "run", None, CPU, team_of()) == Replay(start=2, last=4, equal=3)
    shutil.copy(train(config_for(steps=2), store, tmp_path / "second").params, init)
    with pytest.raises(UserError, match=r"its parameters to start from have changed since it began\. Put them back"):
        replay(tmp_path / "run", None, CPU, team_of())


def test_digests_are_logged_where_they_are_asked_for_and_at_checkpoints(store: Store, tmp_path: Path) -> None:
    train(config_for(digest_every=4, save_every=3), store, tmp_path / "run")
    assert list(digests(tmp_path / "run")) == [3, 4, 6]
    (session,) = rows(tmp_path / "run", kind="session")
    assert (session["step"], session["setup"]["ranks"]) == (0, 1)
    assert settings.build(Plan, session["setup"]["plan"], "", "") == Plan()


def test_every_element_of_the_state_changes_the_digest(store: Store, tmp_path: Path) -> None:
    seen: list[Optimizer] = []
    original = Learner.step

    def step(learner: Learner, number: int) -> Any:
        seen[:] = [learner.optimizer]
        return original(learner, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "step", step)
        train(config_for(steps=1), store, tmp_path / "run")
    (optimizer,), team = seen, team_of()
    before = state_digest(optimizer, team)
    assert before == digests(tmp_path / "run")[1]
    state = optimizer.weights, optimizer.average, *optimizer.rule.moments.values(), optimizer.rule.steps
    for x in state:
        for number in (0, x.numel() // 2, x.numel() - 1):
            bits = x.detach().view(-1)[number : number + 1].view(torch.int32)
            bits.bitwise_xor_(1)
            assert state_digest(optimizer, team) != before
            bits.bitwise_xor_(1)
    assert state_digest(optimizer, team) == before


def test_a_run_that_was_stopped_has_the_digests_of_one_that_was_not(store: Store, tmp_path: Path) -> None:
    """tests/laws/test_kills.py compares digests after a `kill -9`, too."""

    def stop(row: dict[str, Any]) -> None:
        if row["kind"] == "step" and row["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    train(config_for(), store, tmp_path / "whole")
    stopped: Summary = train(config_for(), store, tmp_path / "run", watch=stop)
    assert stopped.steps == 3
    train(config_for(Plan(chunk=4)), store, tmp_path / "run")  # another plan
    one, other = digests(tmp_path / "run"), digests(tmp_path / "whole")
    assert {step: one[step] for step in (1, 2, 3)} == {step: other[step] for step in (1, 2, 3)}
    found = replay(tmp_path / "run", None, CPU, team_of())
    # The digests of steps 2 to 6, and one at the start of the second session.
    assert found == Replay(start=2, last=6, equal=6)


# Flips


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_is_found(
    place: Any, ranks: int, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plant the flip in the fourth of six steps, which is named since each step has a digest."""
    config = config_for(Plan(data=ranks))
    with monkeypatch.context() as patch:
        plant(Flip(place, 3, ranks - 1), patch)
        on_ranks(config.plan, lambda team: train(config, store, tmp_path / "run", team=team) and None)
    found = on_ranks(config.plan, lambda team: replay(tmp_path / "run", None, CPU, team))
    assert found == Replay(start=2, last=6, equal=2, interval=(3, 4))


def test_with_few_digests_the_interval_is_found(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(steps=8, digest_every=3, save_every=5)
    with monkeypatch.context() as patch:
        plant(Flip("gradient", 6), patch)
        train(config, store, tmp_path / "run")
    assert list(digests(tmp_path / "run")) == [3, 5, 6, 8]
    assert replay(tmp_path / "run", None, CPU, team_of()) == Replay(start=5, last=8, equal=2, interval=(6, 8))


def test_a_replay_that_is_wrong_itself_is_told_from_a_wrong_run(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config_for(), store, tmp_path / "run")
    # The second step of the replay is the fourth of the run.
    plant(Flip("weight", 1), monkeypatch)
    assert replay(tmp_path / "run", None, CPU, team_of()) == Replay(
        start=2, last=6, equal=2, interval=(3, 4), unstable_step=4
    )


def test_a_checkpoint_that_came_back_changed_is_found(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run continues with another state than it stopped with, although each step is correct."""
    train(config_for(steps=4), store, tmp_path / "run")
    original = Optimizer.restore

    def restore(optimizer: Optimizer, state: Any) -> None:
        original(optimizer, state)
        Flip("weight", 0).apply(optimizer.owned, optimizer.layout.segments())

    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "restore", restore)
        train(config_for(), store, tmp_path / "run")
    found = replay(tmp_path / "run", 2, CPU, team_of())
    assert (found.interval, found.equal, found.unstable_step) == ((4, 4), 3, None)
    with pytest.raises(UserError, match=r"the checkpoint of step 4 does not have the digest .*another one with --from"):
        replay(tmp_path / "run", 4, CPU, team_of())


def test_a_session_that_cannot_be_repeated_ends_the_comparison(store: Store, tmp_path: Path) -> None:
    train(config_for(steps=4), store, tmp_path / "run")
    two = Plan(data=2)
    on_ranks(two, lambda team: train(config_for(two), store, tmp_path / "run", team=team) and None)
    found = replay(tmp_path / "run", None, CPU, team_of())
    assert (found.start, found.last, found.equal, found.interval) == (2, 4, 3, None)
    assert found.left_out.startswith("steps after 4: it was trained by 2 ranks, and the replay has 1. Use torchrun")


def test_other_examples_and_damaged_checkpoints_are_no_flips(store: Store, tmp_path: Path) -> None:
    other = make_store(tmp_path / "other", proteins=5)
    train(config_for(), [Source(store), Source(other, list(other.keys)[:2])], tmp_path / "part")
    with pytest.raises(UserError, match=r"draws other examples than the run in step \d\. Only a run that trains on"):
        replay(tmp_path / "part", None, CPU, team_of())
    train(config_for(), store, tmp_path / "run")
    state = tmp_path / "run/checkpoints/step-00000002/state.safetensors"
    state.write_bytes(state.read_bytes()[:-1] + b"\1")
    with pytest.raises(UserError, match=r"step-00000002: damaged .*\. Choose another one with --from\."):
        replay(tmp_path / "run", None, CPU, team_of())
    assert replay(tmp_path / "run", 4, CPU, team_of()) == Replay(start=4, last=6, equal=3)


def test_a_replay_that_is_interrupted_leaves_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config_for(), store, tmp_path / "run")
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    original = Learner.step

    def step(learner: Learner, number: int) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return original(learner, number)

    monkeypatch.setattr(Learner, "step", step)
    with pytest.raises(KeyboardInterrupt):
        replay(tmp_path / "run", None, CPU, team_of())
    assert not (tmp_path / "run/.replay").exists()
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_where_sums_have_no_fixed_order_there_are_no_digests(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.digest_every: not supported on mps"):
        train(config_for(), store, tmp_path / "run", device="mps")
    assert not (tmp_path / "run").exists()


# The command


def test_the_command_says_what_it_found(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config_for(), store, tmp_path / "run")
    code, out, _ = run(capsys, "doctor", "--replay", tmp_path / "run", "--device", "cpu")
    assert (code, out) == (0, "all 5 digests equal, steps 2 to 6\n")
    with monkeypatch.context() as patch:
        plant(Flip("moment", 4), patch)
        train(config_for(), store, tmp_path / "flipped")
    command = "doctor", "--replay", tmp_path / "flipped", "--from", "4", "--device", "cpu"
    code, out, _ = run(capsys, *command)
    first, second, third = out.splitlines()
    assert (code, first) == (1, "1 digest equal, steps 4 to 4")
    assert second == "step 5: the digest after step 5 differs"
    assert third.endswith("this machine repeats its work")
    code, out, _ = run(capsys, *command, "--json")
    assert (code, json.loads(out)["interval"]) == (1, [4, 5])


def test_what_cannot_be_replayed_is_refused_in_one_line(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def says(*arguments: Any) -> str:
        return refused(run(capsys, "doctor", "--device", "cpu", *arguments))

    plain = tmp_path / "plain"
    train(config_for(digest_every=0, steps=4), store, plain)
    assert "holds no digests. Train with --set train.digest_every=100" in says("--replay", plain)
    train(config_for(steps=5), store, plain)
    assert "has no digest of step 2. Choose one of 4, 5 with --from." in says("--replay", plain, "--from", "2")
    assert "has no digest after step 5" in says("--replay", plain, "--from", "5")

    own = make_store(tmp_path / "store", proteins=4)
    folder = tmp_path / "run"
    train(config_for(), own, folder)
    assert "has no checkpoint of step 3. Choose one of 2, 4, 6 with --from." in says("--replay", folder, "--from", "3")
    shutil.rmtree(own.path)
    make_store(own.path, proteins=5)
    assert "its stores have changed since it began. Put them back" in says("--replay", folder)
    shutil.rmtree(own.path)
    assert str(own.path) in says("--replay", folder)
    make_store(own.path, proteins=4)

    log = folder / "metrics.jsonl"
    text = log.read_text()
    for old, new, said in (
        ('"device": "cpu, ', '"device": "cuda, ', "it was trained with device cuda, "),
        ('"torch": "', '"torch": "9.', "it was trained with torch 9."),
        ('"ranks": 1', '"ranks": 2', "trained by 2 ranks, and the replay has 1. Use torchrun --nproc-per-node 2 -m"),
    ):
        log.write_text(text.replace(old, new))
        assert said in says("--replay", folder)
