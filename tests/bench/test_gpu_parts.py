"""The measurements of benchmarks/gpu_parts.py on a CPU, and that kernels compiled ahead are found."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.compiler import PTXASError

from benchmarks import gpu_parts
from benchmarks.gpu_parts import Options, compile_share, kernels, predictions, prepared, products, recorded_launches
from warpfold.bench.kernels import Workload, launches_of
from warpfold.check.sizes import shapes
from warpfold.ops.triton.compile import compiled, identity
from warpfold.ops.triton.launch import KernelLaunch

TOY = Options(torch.device("cpu"), toy=True)
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


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> list[KernelLaunch]:
    """Make the two launches of a gate, forward and backward, the list of kernels to compile."""
    ((_, case),) = shapes("gate", ["pair:8"])
    found = {identity(launch, TARGET): launch for launch in launches_of(Workload("gate", case, "bf16"))}
    monkeypatch.setattr(gpu_parts, "_to_compile", list(found.values()))
    return list(found.values())


def looked_up(launch: KernelLaunch, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Launch a kernel without a GPU; return whether Triton found its code in the cache."""
    hits: list[bool] = []

    def note(**compilation: Any) -> None:
        hits.append(compilation["cache_hit"])

    monkeypatch.setattr(triton.knobs.compilation, "listener", note)
    launch.kernel.function.run(grid=launch.grid, warmup=True, **launch.arguments, **launch.options)
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    return hits


def test_a_launch_finds_what_was_compiled_ahead(
    driver: None, gates: list[KernelLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compile_share(0, 2, False) == (0, 2, [])
    assert compile_share(0, 2, False) == (2, 0, [])
    first = gates[0]
    assert looked_up(first, monkeypatch) == [True]
    config = next(other for other in first.kernel.candidates if other != first.config)
    other = KernelLaunch(first.kernel, first.grid, config, first.key, {**first.arguments, **config.sizes})
    assert looked_up(other, monkeypatch) == [False]  # it was not compiled


def test_a_kernel_that_does_not_compile_is_reported_and_the_others_are_compiled(
    gates: list[KernelLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def fails(launch: KernelLaunch, target: GPUTarget) -> None:
        if launch.kernel.name == "gate":
            raise PTXASError("too large")
        made.append(launch.kernel.name)

    monkeypatch.setattr("warpfold.ops.triton.compile.compiled", fails)
    _, _, (failed,) = compile_share(0, 2, False)
    assert failed.startswith("gate (")
    assert failed.endswith("PTXASError: PTXAS error: too large")
    assert made == ["gate_backward"]


def test_the_first_row_says_whether_the_cache_was_hit(driver: None) -> None:
    rows: list[dict[str, Any]] = []
    for _ in range(2):
        prepared(Options(torch.device("cpu"), toy=True, workers=1), lambda row: rows.append(dict(row)))
    assert [row["cache"] for row in rows[::2]] == ["miss", "hit"]
    assert [(row["hits"], row["misses"], row["failed"]) for row in rows[1::2]] == [(0, 2, []), (2, 0, [])]


def test_steps_blocks_predictions_and_checks_are_compiled_ahead() -> None:
    names = {launch.kernel.name for launch in recorded_launches(TOY)}
    # Of training, of the extra MSA, of a block without gradient, of the optimizer.
    assert {"attention_forward", "transition", "norm_linear", "sum_partials", "adam_step", "tail_backward"} <= names


@pytest.mark.skipif(not hasattr(nvidia, "make_launcher"), reason="this Triton has one launcher for all kernels")
def test_launchers_are_made_ahead(
    driver: None, gates: list[KernelLaunch], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
    assert compile_share(0, 2, True) == (0, 2, [])
    made: list[str] = []
    monkeypatch.setattr("triton.runtime.build._build", lambda *given: made.append(given[0]))
    for launch in gates:
        kernel = compiled(launch, TARGET)
        nvidia.CudaLauncher(kernel.src, kernel.metadata)  # as at its first launch
    assert not made


def test_products_kernels_and_predictions_write_rows_that_measure_something() -> None:
    rows: dict[str, list[dict[str, Any]]] = {}
    for part in (products, kernels, predictions):
        part(TOY, lambda row, name=part.__name__: rows.setdefault(name, []).append(dict(row)))  # type: ignore[misc]
    assert not [row for row in rows["products"] if row["note"]]
    assert min(row["us"] for row in rows["products"]) > 0
    assert {row["row"][0] for row in rows["products"]} == set("13456bn")
    assert min(row["us"] for row in rows["kernels"]) > 0
    assert len({row["what"] for row in rows["kernels"]}) == 4
    assert [(row["precision"], row["recycles"]) for row in rows["predictions"]] == [
        (precision, recycles) for precision in ("fp32", "bf16") for recycles in (0, 0, 3)
    ]
    assert all(row["equals_plain"] for row in rows["predictions"] if row["recycles"])
