"""Training over ranks: the run of one device, dealt, cut and branched; what is written by whom; who stops when."""

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.ranks import RankError, run_ranks
from tests.run.runs import equal_tensors, make_store, rows, tiny_run
from tests.run.test_train import damage
from warpfold import settings
from warpfold.data.store import Store
from warpfold.errors import UserError
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import Launch, Team
from warpfold.run import train as module
from warpfold.run.train import RunConfig, Summary, train

STEPS = 4


def config_for(plan: Plan, outer: str = "middle", accumulate: int = 2, **train: Any) -> RunConfig:
    defaults = {"steps": STEPS, "validation": 0.4, "validate_every": 2, "save_every": 2}
    config = tiny_run(**(defaults | train))
    model = replace(config.model, evoformer=replace(config.model.evoformer, outer=outer))
    return replace(config, model=model, plan=plan, optim=replace(config.optim, accumulate=accumulate))


def train_on_ranks(config: RunConfig, store: Store, out: Path, **more: Any) -> list[Summary]:
    plan = config.plan
    ranks = plan.data * plan.axial * plan.branch

    def on_a_rank() -> Summary:
        mesh = make_mesh(plan.data, plan.axial, plan.branch)
        return train(config, store, out, team=Team(Launch(mesh.world.rank, ranks), mesh), **more)

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


def assert_alike(out: Path, alone: Path, rel: float = 2e-4) -> None:
    """The same run but for rounding: rows, and the averaged weights."""

    def flat(value: Any) -> Any:
        """Numbers last, in one list, everything else first."""
        if isinstance(value, dict):
            parts = [flat(item) for item in value.values()]
            return [list(value), *(p[0] for p in parts)], [n for p in parts for n in p[1]]
        if isinstance(value, list):
            parts = [flat(item) for item in value]
            return [p[0] for p in parts], [n for p in parts for n in p[1]]
        return ("number", [value]) if isinstance(value, float) else (value, [])

    (names, numbers), (names_alone, numbers_alone) = flat(rows(out)), flat(rows(alone))
    assert names == names_alone
    assert numbers == pytest.approx(numbers_alone, rel=rel, abs=1e-6)
    here, there = (load_file(folder / "params.safetensors") for folder in (out, alone))
    moved = max(float((here[name] - there[name]).abs().max()) for name in there)
    assert moved < 1e-4, moved


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
