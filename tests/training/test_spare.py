"""Spare ranks: what they find is what the ranks would have found, and nothing of a training waits for them."""

import json
import logging
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.laws.test_elastic import begin, ranks_of
from tests.parallel.test_team import FAILED, FINE, Crew
from tests.training.runs import equal_tensors, make_store, rows, tiny_run
from tests.training.test_train_ranks import config_for
from warpfold.data.store.store import Store
from warpfold.engine.step_folders import StepFolders
from warpfold.engine.watch import Row
from warpfold.errors import UserError
from warpfold.parallel import heartbeat
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import ProcessInfo, Team
from warpfold.training import spare as module
from warpfold.training.config import RunConfig, load_settings
from warpfold.training.spare import Spare, SpareValidation, set_apart
from warpfold.training.train import stand_by, train

STEPS = 6


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("spare") / "store", proteins=7)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("BEAT", 0.1), ("SILENT", 0.6), ("GRACE", 1.2)):
        monkeypatch.setattr(heartbeat, name, seconds)
    monkeypatch.setattr(module, "POLL", 0.02)


def config_of(plan: Plan = Plan(), **more: Any) -> RunConfig:  # noqa: B008 (frozen)
    """Three proteins are held out; they are folded after steps 0, 2, 4 and 6."""
    return config_for(plan, **({"steps": STEPS, "validate_every": 2, "save_every": 2} | more))


def run_job(
    config: RunConfig,
    store: Store,
    out: Path,
    spares: int,
    watch: Callable[[Row], object] | None = None,
    keeps: bool = False,
) -> tuple[list[int | None], list[str], list[dict[str, Any]]]:
    """A run on the plan's ranks and spares -> exit codes, what they said, and summaries of those that ended well.

    keeps: rank 0 keeps the store, which ends with it.
    """
    folder = out.parent / f"{out.name}-{len(list(out.parent.iterdir()))}"
    folder.mkdir()

    def one(team: Team) -> None:
        logging.getLogger().handlers.clear()  # of pytest: warnings go to stderr, as they do without it
        if team.process.is_spare:
            found = stand_by(store, out, None, "cpu", team)
        else:
            found = train(config, store, out, team=team, watch=watch if team.is_rank_zero else None)
        (folder / f"{team.process.rank}.json").write_text(json.dumps({**asdict(found), "params": str(found.params)}))

    codes, said = Crew(folder).run(one, config.plan, keeps, spares=spares)
    return codes, said, [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def steps_of(out: Path) -> list[Row]:
    return [row for row in rows(out) if row["kind"] == "step"]


def validations_of(out: Path) -> dict[int, Row]:
    return {row["step"]: row for row in rows(out) if row["kind"] == "validation"}


def assert_same_run(out: Path, other: Path) -> None:
    """Check that what two runs trained is the same to the bit: rows, weights, checkpoints, order files."""
    assert steps_of(out) == steps_of(other)
    last = f"checkpoints/step-{STEPS:08d}/state.safetensors"
    for name in ("params.safetensors", last):
        assert equal_tensors(out / name, other / name), name
    for path in other.glob("order*.txt"):
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.fixture(scope="module")
def unbroken(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one device without spares."""
    out = tmp_path_factory.mktemp("spare") / "run"
    train(config_of(), store, out)
    return out


# What they find


def wait_for_each(patch: pytest.MonkeyPatch) -> None:
    """Have the ranks wait for each validation, so that none is left out."""
    ask, catch_up = SpareValidation.__call__, SpareValidation.catch_up
    patch.setattr(SpareValidation, "__call__", lambda self, step, *more: ask(self, step, *more) or self._wait(step))
    patch.setattr(SpareValidation, "catch_up", lambda self, step: catch_up(self, step) or self._wait(step))


@pytest.mark.parametrize("data", [1, 2])
def test_processes_that_a_plan_leaves_idle_validate(store: Store, tmp_path: Path, unbroken: Path, data: int) -> None:
    """Three meet, and one or two train what as many train alone, to the bit."""
    config, out = config_of(Plan(data=data)), tmp_path / "run"

    def one(team: Team) -> None:
        team.remesh(config.plan, idle=True)
        assert team.process.is_spare == (team.process.rank >= data)
        if team.process.is_spare:
            assert stand_by(store, out, None, "cpu", team).finished
        else:
            assert train(config, store, out, team=team).finished

    codes, said = Crew(tmp_path).run(one, Plan(data=3))
    assert codes == [0] * 3, said
    if data > 1:
        unbroken = tmp_path / "two"
        assert run_job(config, store, unbroken, 0)[0] == [0, 0]
    assert_same_run(out, unbroken)
    assert validations_of(out)[STEPS] == validations_of(unbroken)[STEPS]


@pytest.mark.parametrize(
    ("plan", "spares", "keeps"),
    [(Plan(precision="bf16"), 2, True), (Plan(data=2), 1, False)],
    ids=["bf16", "ranks"],
)
def test_spares_find_what_the_ranks_would(
    store: Store, tmp_path: Path, plan: Plan, spares: int, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_each(monkeypatch)
    config = config_of(plan)
    without = run_job(config, store, tmp_path / "without", 0)
    codes, said, summaries = run_job(config, store, tmp_path / "with", spares, keeps=keeps)
    assert (codes, "".join(said)) == ([FINE] * len(codes), "")
    assert len(summaries) == plan.data + spares
    assert_same_run(tmp_path / "with", tmp_path / "without")
    found = validations_of(tmp_path / "with")
    assert found == validations_of(tmp_path / "without")
    assert list(found) == [0, 2, 4, 6]
    kept = [sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir()) for name in ("with", "without")]
    assert kept[0] == kept[1]
    score = without[2][0]["lddt_ca"]
    assert {(s["steps"], s["finished"], s["lddt_ca"], s["signal"]) for s in summaries} == {(STEPS, True, score, 0)}


def wait_for_step(out: Path, step: int, spare: Spare) -> None:
    """Wait, as a spare, until the log has the row of a step."""
    while f'"kind": "step", "step": {step},' not in (out / "metrics.jsonl").read_text():
        spare._look()
        time.sleep(0.01)


def test_no_step_waits_and_the_newest_is_folded_next(
    store: Store, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spare begins with the first weights when the last step is done."""
    out, load = tmp_path / "run", Spare._load

    def late(spare: Spare, step: int) -> None:
        wait_for_step(out, STEPS, spare)
        load(spare, step)

    monkeypatch.setattr(Spare, "_load", late)
    codes, said, summaries = run_job(config_of(), store, out, 1)
    assert codes == [FINE, FINE]
    assert [row["step"] for row in rows(out)] == [1, 2, 3, 4, 5, 6, 0, 6]
    assert_same_run(out, unbroken)
    expected = validations_of(unbroken)
    assert validations_of(out) == {0: expected[0], 6: expected[6]}
    assert re.findall(r"that after step (\d+) is left out", said[0]) == ["2"]  # and so is 4, but it is said once
    assert summaries[0]["lddt_ca"] == expected[6]["lddt_ca"]


# When they are stopped


@pytest.mark.parametrize("spares", [1, 0])
def test_what_was_not_folded_is_folded_when_the_run_continues(
    store: Store, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spares: int
) -> None:
    """A spare is at the first weights when a signal comes after step 3; step 2 waits, and its checkpoint with it."""
    out, config = tmp_path / "run", config_of(save_every=1, keep=1)

    def stop(row: Row) -> None:
        if row["kind"] == "step" and row["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Spare, "_load", lambda spare, _: wait_for_step(out, STEPS, spare))
        codes, _, summaries = run_job(config, store, out, 1, stop)
    assert codes == [FINE, FINE]
    assert [(s["steps"], s["finished"], s["signal"]) for s in summaries] == [(3, False, signal.SIGTERM)] * 2
    assert json.loads((out / "owed.json").read_text()) == [0, 2]
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]

    wait_for_each(monkeypatch)
    codes, _, summaries = run_job(config, store, out, spares)
    assert codes == [FINE] * (1 + spares)
    assert all(s["finished"] for s in summaries)
    assert_same_run(out, unbroken)
    expected = validations_of(unbroken)
    if not spares:
        del expected[0]  # the first weights are in no checkpoint
    assert validations_of(out) == expected
    assert json.loads((out / "owed.json").read_text()) == []


def test_a_signal_to_a_spare_stops_the_run(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"

    def stop(spare: Spare, _: int) -> None:
        wait_for_step(out, 2, spare)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_step(out, 10_000, spare)

    monkeypatch.setattr(Spare, "_load", stop)
    codes, _, summaries = run_job(config_of(steps=10_000, validate_every=0), store, out, 1)
    assert codes == [FINE, FINE]
    assert summaries[0]["signal"] == signal.SIGTERM
    assert 2 <= summaries[0]["steps"] < 10_000
    assert (out / f"checkpoints/step-{summaries[0]['steps']:08d}").is_dir()


# When one is lost


def test_training_goes_on_without_a_spare_that_was_killed(
    store: Store, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "GONE", 1.0)
    monkeypatch.setattr(Spare, "_load", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    out = tmp_path / "run"
    codes, said, summaries = run_job(config_of(), store, out, 1)
    assert codes == [FINE, -signal.SIGKILL]
    assert len(re.findall(r"rank 1 is dead or frozen: .*; the ranks that train validate from here on", said[0])) == 1
    assert_same_run(out, unbroken)
    assert validations_of(out)[STEPS] == validations_of(unbroken)[STEPS]
    assert summaries[0]["lddt_ca"] == validations_of(unbroken)[STEPS]["lddt_ca"]


def test_a_spare_that_fails_says_why_and_lets_the_other_go(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several ranks, all of which must come to know it."""

    def fail(spare: Spare, _: int) -> None:
        if spare.team.process.rank == 2:
            raise UserError("its disk is full; make room")
        wait_for_step(tmp_path / "run", 10_000, spare)

    monkeypatch.setattr(Spare, "_load", fail)
    codes, said, summaries = run_job(config_of(Plan(data=2)), store, tmp_path / "run", 2)
    assert codes == [FINE, FINE, FAILED, FINE]
    assert "UserError: its disk is full" in said[2]
    assert "rank 2 failed: its disk is full; make room; the ranks that train validate from here on" in said[0]
    assert all(s["finished"] for s in summaries)
    assert STEPS in validations_of(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("data", "rank 1, a spare, and rank 0 hold out different proteins; give all ranks the same --data"),
        ("checkpoints", "rank 1 does not see it after 1 s; put --out on a file system that all machines share"),
    ],
)
def test_a_spare_that_sees_other_files_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    others = {"data": make_store(tmp_path / "other", proteins=6), "checkpoints": StepFolders(tmp_path / "elsewhere")}
    begin_spare = Spare._begin

    def swapped(spare: Spare, *more: Any) -> None:
        setattr(spare, name, others[name])
        begin_spare(spare, *more)
        spare.config = replace(spare.config, plan=Plan(time_limit=1.0))

    monkeypatch.setattr(Spare, "_begin", swapped)
    codes, said, _ = run_job(config_of(), store, tmp_path / "run", 1)
    assert codes == [FINE, FAILED]
    assert says in said[1]


@pytest.mark.parametrize(("how", "ranks"), [("fails", 1), ("is killed", 1), ("is killed", 2)])
def test_when_a_rank_is_lost_its_spares_end_and_say_why(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, ranks: int
) -> None:
    if how == "is killed":  # who fails has half a minute to say why, on a busy machine too
        monkeypatch.setattr(heartbeat, "GONE", 1.0)

    def end(row: Row) -> None:
        if row["kind"] == "step" and row["step"] == 2:
            if how == "fails":
                raise UserError("no space left; make room")
            os.kill(os.getpid(), signal.SIGKILL)

    codes, said, _ = run_job(config_of(Plan(data=ranks)), store, tmp_path / "run", 1, end)
    assert codes[-1] in (1, FAILED)
    assert ("rank 0 failed: no space left" if how == "fails" else "rank 0 is dead or frozen") in said[-1]


# Which they are


@pytest.mark.parametrize(
    ("there", "changes", "expected"),
    [
        (3, [], (3, 0)),
        (3, ["train.spare=1"], (2, 1)),  # no sizes are asked for
        (1, ["train.spare=1"], (1, 0)),
        (3, ["train.spare=1", "plan.data=2"], (2, 1)),
        (2, ["train.spare=1", "plan.data=2"], (2, 0)),  # one was lost
        (6, ["train.spare=3", "plan.data=2", "plan.axial=2"], (4, 2)),
        (4, ["train.spare=1", "plan.data=2"], "data 2 x axial 1 x branch 1 needs 2 processes, and train.spare = 1"),
        (1, ["train.spare=1", "plan.data=2"], "there are 1; start it with torchrun, 2 to 3 processes in all"),
    ],
)
def test_the_plan_is_filled_first(there: int, changes: list[str], expected: tuple[int, int] | str) -> None:
    given = load_settings("tiny", ["optim.accumulate=4", *changes])
    for rank in range(there):
        process = ProcessInfo(rank, there, ranks_per_node=there)
        if isinstance(expected, str):
            with pytest.raises(UserError, match=expected):
                set_apart(process, given)
        else:
            found = set_apart(process, given)
            assert (found.ranks, found.spares, found.is_spare) == (*expected, rank >= expected[0])
            assert found.ranks_per_node == expected[0]


def test_a_number_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="spare must not be negative"):
        tiny_run(spare=-1)


# By torchrun


@pytest.mark.slow
def test_a_spare_stands_in_for_a_rank_that_was_lost(store: Store, tmp_path: Path) -> None:
    """Of two machines the one that trains is lost for good: the other, which validated, fills the plan."""
    out, logs = tmp_path / "run", [tmp_path / "first", tmp_path / "second"]
    config = config_of(Plan(time_limit=15.0), steps=40, spare=1)
    port = dist.TCPStore("127.0.0.1", 0, None, True).port  # free again in a moment
    options = f"--nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-id 1 --rdzv-endpoint 127.0.0.1:{port}".split()
    quick = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
    machines = []
    for host, log in enumerate(logs):  # of one host torchrun numbers ranks by their processes: the first is rank 0
        more = ["--rdzv-backend", "c10d", "--rdzv-conf", f"is_host={host},{quick}"]
        machines.append(begin(config, store, out, log, *options, *more, single=False))
    [lost] = ranks_of(machines[0], out, 5)
    for process in (machines[0].pid, lost):  # the one that does not keep torchrun's own store
        os.kill(process, signal.SIGKILL)
    machines[0].wait()
    assert machines[1].wait(200) == 0, logs[1].read_text()
    assert re.search(r"rank 0 is dead or frozen|the store where they meet is gone", logs[1].read_text())
    train(config, store, tmp_path / "alone")
    assert steps_of(out) == steps_of(tmp_path / "alone")
    assert equal_tensors(out / "params.safetensors", tmp_path / "alone/params.safetensors")
    assert validations_of(out)[40] == validations_of(tmp_path / "alone")[40]


@pytest.mark.slow
def test_torchrun_starts_a_run_with_a_spare(store: Store, unbroken: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    assert begin(config_of(spare=1), store, out, log).wait(120) == 0, log.read_text()
    assert_same_run(out, unbroken)
    assert validations_of(out)[STEPS] == validations_of(unbroken)[STEPS]
