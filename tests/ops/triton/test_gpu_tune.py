"""Tuning on a GPU: candidates are checked and timed there, what they say is a table, and runs use it."""

from pathlib import Path

import pytest
import torch

from warpfold.bench.kernels import GpuBench, Workload, choose, head, launches_of, timed, tuning_tasks, write
from warpfold.check.cases import inputs
from warpfold.check.op_profile import OpCase
from warpfold.ops.linear import gate
from warpfold.ops.triton import launch as launches
from warpfold.ops.triton.launch import config_for, recorded, table_for

pytestmark = pytest.mark.gpu
GATE = Workload("gate", OpCase(op="gate", where="toy", rows=64, length=64, channels=64), "bf16")
ATTENTION = Workload(
    "attention", OpCase(op="attention", where="toy", rows=40, length=130, heads=4, width=32, bias=True), "bf16"
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> torch.device:
    """The GPU, with a home of its own for tables."""
    monkeypatch.setattr(launches, "home", lambda: tmp_path)
    launches.reset()
    return torch.device("cuda:0")


@pytest.mark.parametrize("workload", [GATE, ATTENTION], ids=lambda workload: workload.op)
def test_the_table_that_is_made_is_used(workload: Workload, gpu: torch.device, tmp_path: Path) -> None:
    todo = tuning_tasks([workload], quick=True)
    entries = choose(timed(todo, GpuBench(gpu, repeats=3).time))
    path = write(tmp_path, head(gpu), entries)
    assert table_for(gpu)[0].path == path
    assert {(e.kernel, e.key) for e in entries} == {(task.kernel, task.key) for task in todo}
    assert all(config_for(e.kernel, e.key, gpu) == e.config for e in entries)
    assert {"driver", "torch", "triton"} <= set(head(gpu))


def test_what_would_be_launched_is_what_is_launched(gpu: torch.device) -> None:
    """Calls that were noted without memory, against those on the GPU: the same kernels, keys, grids and launches."""
    with recorded(run=True) as made:
        given = inputs(GATE.case, torch.bfloat16, gpu)
        torch.autograd.grad(gate.fast(*given.args), given.wanted, given.grad)
    found = [(call.kernel.name, call.key, call.grid, call.config) for call in made]
    assert found == [(call.kernel.name, call.key, call.grid, call.config) for call in launches_of(GATE)]


def test_what_is_not_exact_is_not_timed(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "definition", lambda x, g: 1.5 * x * g.sigmoid())
    (task, *_) = tuning_tasks([GATE])
    seconds, out = GpuBench(gpu, repeats=1).time(task)
    assert not seconds
    assert set(out) == set(task.candidates)
    assert all(reason.startswith("not exact: output") for reason in out.values())
