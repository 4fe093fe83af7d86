"""Kernels that were compiled ahead are those that a GPU's launches look for, as far as this can be said without one."""

import ctypes
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from benchmarks import gpu_ahead as ahead
from benchmarks.gpu_ahead import AheadJob, compile_share, compile_shares, recorded_launches
from tests.helpers import tiny_config
from tests.ops.triton.model_launches import one_block
from warpfold.bench.kernels import Workload
from warpfold.check.sizes import shapes
from warpfold.cost.example import ExampleSizes, ModelBench
from warpfold.engine.optim import OptimConfig
from warpfold.model.losses import LossConfig
from warpfold.ops.triton.compile import compiled, identity
from warpfold.ops.triton.launch import SHIPPED, KernelLaunch
from warpfold.parallel.plan import Plan

DEFAULT = (SHIPPED / "default.json",)
GATES = AheadJob(tuple(Workload("gate", case, "bf16") for _, case in shapes("gate", ["pair:8"])), (), DEFAULT, 90)
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
    assert compile_share(GATES) == (len({identity(x, TARGET) for x in recorded_launches(GATES)}), [])
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
    made: list[str] = []
    monkeypatch.setattr(
        "warpfold.ops.triton.compile.compiled", lambda launch, target: made.append(identity(launch, target))
    )
    attention = tuple(Workload("attention", case, "bf16") for _, case in shapes("attention", ["starting:12"]))
    job = AheadJob((*attention, *GATES.workloads), (given,), DEFAULT, 90)
    launches = recorded_launches(job)
    monkeypatch.setattr(ahead, "recorded_launches", lambda job: launches)
    for part in job.divided(3):
        assert compile_share(part)[1] == []
    everything = {identity(launch, TARGET) for launch in launches}
    assert sorted(made) == sorted(everything)
    names = {one.partition("-")[0] for one in everything}
    assert {"attention_forward", "gate_backward", "norm_linear", "sum_partials", "adam_step"} <= names


def test_a_kernel_that_does_not_compile_is_counted_and_the_others_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia.compiler import PTXASError

    def fails(launch: KernelLaunch, target: GPUTarget) -> None:
        if launch.kernel.name == "gate":
            raise PTXASError("too large")

    monkeypatch.setattr("warpfold.ops.triton.compile.compiled", fails)
    assert compile_share(GATES) == (1, ["gate: PTXASError: PTXAS error: too large"])


def test_nothing_recorded_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "recorded_launches", lambda job: [])
    with pytest.raises(RuntimeError, match="nothing was compiled"):
        compile_shares(GATES, 1)


@pytest.mark.skipif(not hasattr(nvidia, "make_launcher"), reason="this Triton has one launcher for all kernels")
def test_launchers_are_made_ahead(driver: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a library in the place of the driver's that has its names: a launcher calls them when it launches."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path / "libcuda.so.1"
    names = set(re.findall(r"\bcu[A-Z]\w+(?=\()", Path(nvidia.__file__).read_text()))
    (tmp_path / "stub.c").write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in names))
    subprocess.run([compiler, "-shared", "-Wl,-soname,libcuda.so.1", "-o", library, tmp_path / "stub.c"], check=True)
    ctypes.CDLL(str(library))
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    nvidia.libcuda_dirs.cache_clear()
    nvidia.library_dirs.cache_clear()
    assert compile_share(replace(GATES, launchers=True))[1] == []
    made: list[str] = []
    monkeypatch.setattr("triton.runtime.build._build", lambda *given: made.append(given[0]))
    for launch in recorded_launches(GATES):
        kernel = compiled(launch, TARGET)
        nvidia.CudaLauncher(kernel.src, kernel.metadata)  # as at its first launch
    assert not made
