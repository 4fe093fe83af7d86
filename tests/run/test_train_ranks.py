"""Training over ranks: the run of one device, dealt, cut and branched; what is written by whom; who stops when."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.ranks import run_ranks
from tests.run.runs import equal_tensors, make_store, rows, tiny_run
from warpfold.data.store import Store
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import Launch, Team
from warpfold.run.train import RunConfig, Summary, train
from warpfold.run.watch import Watcher

STEPS = 4


def config_for(plan: Plan, outer: str = "middle", accumulate: int = 2, **train: Any) -> RunConfig:
    defaults = {"steps": STEPS, "validation": 0.4, "validate_every": 2, "save_every": 2}
    config = tiny_run(**(defaults | train))
    model = replace(config.model, evoformer=replace(config.model.evoformer, outer=outer))
    return replace(config, model=model, plan=plan, optim=replace(config.optim, accumulate=accumulate))


def train_on_ranks(
    config: RunConfig, store: Store, out: Path, watch: Watcher | None = None, watching: int = 0, **more: Any
) -> list[Summary]:
    """`train` on as many ranks as the plan wants; `watch` is told the rows on one rank."""
    plan = config.plan
    ranks = plan.data * plan.axial * plan.branch

    def on_a_rank() -> Summary:
        mesh = make_mesh(plan.data, plan.axial, plan.branch)
        rank = mesh.world.rank
        team = Team(Launch(rank, ranks), mesh)
        return train(config, store, out, team=team, watch=watch if rank == watching else None, **more)

    return run_ranks(on_a_rank, ranks)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("ranks") / "store", proteins=7)


@pytest.fixture(scope="module")
def alone(store: Store, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run of one device, for each order of layers."""
    found = {}
    for outer in ("middle", "first"):
        found[outer] = tmp_path_factory.mktemp("ranks") / outer
        train(config_for(Plan(), outer), store, found[outer])
    return found


def parted(value: Any) -> tuple[Any, list[float]]:
    """A JSON value with its numbers taken out, and they."""
    if isinstance(value, float):
        return None, [value]
    if not isinstance(value, dict | list):
        return value, []
    rest, numbers = zip(*(parted(item) for item in (value.values() if isinstance(value, dict) else value)))
    return (list(value) if isinstance(value, dict) else [], rest), sum(numbers, [])


def assert_alike(out: Path, alone: Path, kinds: tuple[str, ...] = ("step", "validation")) -> None:
    """The same run but for rounding: its rows of these kinds, and the averaged weights."""
    (rest, numbers), (rest_alone, numbers_alone) = (
        parted([row for row in rows(folder) if row["kind"] in kinds]) for folder in (out, alone)
    )
    assert rest == rest_alone
    assert numbers == pytest.approx(numbers_alone, rel=2e-4, abs=1e-6)
    here, there = (load_file(folder / "params.safetensors") for folder in (out, alone))
    assert max(float((here[name] - there[name]).abs().max()) for name in there) < 1e-4


PLANS = [
    pytest.param("middle", Plan(data=2), id="data"),
    pytest.param("middle", Plan(axial=2, chunk=3), id="axial"),
    pytest.param("first", Plan(branch=2, recompute=True), id="branch"),
    pytest.param("first", Plan(data=2, branch=2), id="data-branch"),
    pytest.param("middle", Plan(data=2, axial=2), id="data-axial"),
]


@pytest.mark.parametrize(("outer", "plan"), PLANS)
def test_ranks_train_what_one_device_trains(
    store: Store, alone: dict[str, Path], tmp_path: Path, outer: str, plan: Plan
) -> None:
    out = tmp_path / "run"
    summaries = train_on_ranks(config_for(plan, outer), store, out)
    assert all((s.steps, s.finished, s.signal) == (STEPS, True, 0) for s in summaries)
    assert_alike(out, alone[outer])


def test_stopped_and_continued_it_is_the_same_to_the_bit(store: Store, tmp_path: Path) -> None:
    """A signal to any rank stops all at the same step; all that draws, exchanges and is sharded goes on as it was."""
    plan = Plan(data=2, axial=2, sync=SyncConfig(shard_state=True))
    config = config_for(plan, steps=6)
    train_on_ranks(config, store, tmp_path / "unbroken")

    def stop(row: dict[str, Any]) -> None:
        if row["kind"] == "step" and row["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = train_on_ranks(config, store, tmp_path / "run", watch=stop, watching=3)
    assert [(s.steps, s.finished, s.signal) for s in stopped] == [(3, False, signal.SIGTERM)] * 4
    train_on_ranks(config, store, tmp_path / "run")
    assert rows(tmp_path / "run") == rows(tmp_path / "unbroken")
    assert equal_tensors(tmp_path / "run/params.safetensors", tmp_path / "unbroken/params.safetensors")


def test_other_ranks_go_on(store: Store, alone: dict[str, Path], tmp_path: Path) -> None:
    """Another number of data ranks, or of axial ranks: the same run but for rounding."""
    out = tmp_path / "run"
    for steps, plan in ((2, Plan(data=2)), (3, Plan(axial=2)), (STEPS, Plan())):
        train_on_ranks(config_for(plan, steps=steps, validate_every=0), store, out)
    assert_alike(out, alone["middle"], kinds=("step",))
