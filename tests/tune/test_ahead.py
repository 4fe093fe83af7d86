"""Kernels that were compiled ahead are those that a GPU's launches look for, as far as this can be said without one."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget

from tests.helpers import tiny_config
from tests.ops.triton.model_launches import one_block
from warpfold.engine.optim import OptimConfig
from warpfold.model.losses import LossConfig
from warpfold.ops.triton.compile import identity
from warpfold.ops.triton.launch import SHIPPED, KernelLaunch
from warpfold.parallel.plan import Plan
from warpfold.tune import ahead
from warpfold.tune.ahead import AheadJob, compile_share, compile_shares, recorded_launches
from warpfold.tune.example import ExampleSizes, ModelBench

DEFAULT = SHIPPED / "default.json"
GATES = AheadJob((("gate", "pair:8"),), None, DEFAULT, 90)
TARGET = GPUTarget("cuda", 90, 32)
DEVICE = 4242  # of the stand-in: none of Triton's own caches in this process knows it


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton's driver of a GPU that is not there, and an empty cache."""
    stand_in = SimpleNamespace(
        get_current_device=lambda: DEVICE,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: TARGET,
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", stand_in)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def looked_up(launch: KernelLaunch, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What Triton finds in its cache when a launch asks for its code, as `KernelLaunch.run` does: hit or not."""
    hits: list[bool] = []

    def note(**told: Any) -> None:
        hits.append(told["cache_hit"])

    monkeypatch.setattr(triton.knobs.compilation, "listener", note)
    launch.kernel.function.run(grid=launch.grid, warmup=True, **launch.arguments, **launch.options)
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    return hits


def test_a_launch_finds_what_was_compiled_ahead(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = recorded_launches(GATES)
    assert compile_share(GATES) == (len({identity(x, TARGET) for x in recorded_launches(GATES)}), 0)
    assert looked_up(first, monkeypatch) == [True]
    other = KernelLaunch(first.kernel, first.grid, first.kernel.candidates[-1], first.key, first.arguments)
    if other.config == first.config:
        other = KernelLaunch(first.kernel, first.grid, first.kernel.candidates[0], first.key, first.arguments)
    arguments = {**first.arguments, **other.config.sizes}
    other = KernelLaunch(first.kernel, first.grid, other.config, first.key, arguments)
    assert looked_up(other, monkeypatch) == [False]  # nobody compiled this one: the test can tell


def test_shares_are_all_of_it_and_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ModelBench(
        model=one_block(tiny_config()),
        loss=LossConfig(),
        optim=OptimConfig(),
        plan=Plan(precision="bf16"),
        sizes=ExampleSizes(residues=16, sequences=5, extra=6, templates=2),
    )
    compiled: list[str] = []
    monkeypatch.setattr(
        "warpfold.ops.triton.compile.compiled", lambda launch, target: compiled.append(identity(launch, target))
    )
    job = AheadJob((("attention", "starting:12"), ("gate", "pair:8")), given, DEFAULT, 90, shares=3)
    launches = recorded_launches(job)
    monkeypatch.setattr(ahead, "recorded_launches", lambda job: launches)
    for share in range(3):
        assert compile_share(replace(job, share=share))[1] == 0
    everything = {identity(launch, TARGET) for launch in launches}
    assert sorted(compiled) == sorted(everything)
    names = {one.partition("-")[0] for one in everything}
    assert {"attention_forward", "gate_backward", "norm_linear", "sum_partials"} <= names


def test_a_kernel_that_does_not_compile_is_counted_and_the_others_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia.compiler import PTXASError

    def fails(launch: KernelLaunch, target: GPUTarget) -> None:
        if launch.kernel.name == "gate":
            raise PTXASError("too large")

    monkeypatch.setattr("warpfold.ops.triton.compile.compiled", fails)
    assert compile_share(GATES) == (1, 1)


def test_nothing_recorded_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "recorded_launches", lambda job: [])
    with pytest.raises(RuntimeError, match="nothing was compiled"):
        compile_shares((), None, DEFAULT, 90, 1)
