"""Kernels that were compiled ahead in processes are found in Triton's cache when they are launched."""

import ctypes
import fcntl
import json
import re
import shutil
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.compiler import PTXASError

from tests.helpers import as_multimer, tiny_config
from warpfold.bench.kernels import Workload, launches_of
from warpfold.check.sizes import shapes
from warpfold.cost.example import ExampleSizes, Job
from warpfold.cost.launches import launches_of as launches_of_job
from warpfold.cost.record import features_of
from warpfold.data.features.make import padded_shape
from warpfold.engine.optim import OptimConfig
from warpfold.model.alphafold import ModelConfig
from warpfold.model.losses import LossConfig
from warpfold.model.template import TemplateConfig
from warpfold.ops.triton import ahead
from warpfold.ops.triton.ahead import Compilations, compile_ahead, is_cached
from warpfold.ops.triton.compile import compiled, identity
from warpfold.ops.triton.launch import SHIPPED, KernelLaunch, read, table_used
from warpfold.parallel.plan import Plan
from warpfold.training import planning

TARGET = GPUTarget("cuda", 90, 32)
JOB = Job(model=tiny_config(), sizes=ExampleSizes(residues=16, sequences=14, extra=16, templates=2))
LEARNS = {"loss": LossConfig(violation=1.0), "optim": OptimConfig(accumulate=2)}
DEVICE = 4242  # unknown to Triton's caches


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stand in for Triton's driver of a GPU, with an empty cache."""
    stand_in = SimpleNamespace(
        get_current_device=lambda: DEVICE,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: TARGET,
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", stand_in)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.fixture
def gates() -> list[KernelLaunch]:
    """Record the two launches of a gate, forward and backward."""
    ((_, case),) = shapes("gate", ["pair:8"])
    found = {identity(launch, TARGET): launch for launch in launches_of(Workload("gate", case, "bf16"))}
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


def test_a_launch_finds_what_processes_compiled_ahead(
    driver: None, gates: list[KernelLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int, str]] = []
    found = compile_ahead([*gates, *gates], TARGET, lambda *words: told.append(words), workers=2)
    assert found == Compilations(0, 2)
    assert [words[:2] for words in told] == [(0, 2), (1, 2), (2, 2)]
    assert told[-1][2].startswith("compiling 2 kernels, 2 done; kept in ")
    assert compile_ahead(gates, TARGET) == Compilations(2, 0)
    first = gates[0]
    assert is_cached(first, TARGET)
    assert looked_up(first, monkeypatch) == [True]
    config = next(other for other in first.kernel.candidates if other != first.config)
    other = KernelLaunch(first.kernel, first.grid, config, first.key, {**first.arguments, **config.sizes})
    assert not is_cached(other, TARGET)
    assert looked_up(other, monkeypatch) == [False]


def test_kernels_of_a_model_travel_to_processes_whole(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With named tuples, all kinds of constants and missing tensors, Triton's key stays the same."""
    job = replace(JOB, model=ModelConfig(), loss=LossConfig(), optim=OptimConfig())
    launches = {identity(launch, TARGET): launch for launch in launches_of_job(job, Plan(precision="bf16"))}
    hashes: list[str] = []

    def note(specialised: Any, target: GPUTarget, options: Any) -> None:
        hashes.append(specialised.hash())

    monkeypatch.setattr(ahead, "triton_compile", note)
    for launch in launches.values():
        ahead._compile_job(json.loads(json.dumps(ahead._job(launch, TARGET, False))))
        assert hashes[-1] == ahead.source(launch, TARGET)[0].hash()
    assert len(set(hashes)) > 100


def test_a_kernel_that_does_not_compile_is_reported_and_the_others_are_compiled(
    driver: None, gates: list[KernelLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def fails(launch: KernelLaunch, target: GPUTarget) -> None:
        if launch.kernel.name == "gate":
            raise PTXASError("too large")
        made.append(launch.kernel.name)

    monkeypatch.setattr(ahead, "compiled", fails)
    (failed,) = compile_ahead(gates, TARGET, workers=0).failed
    assert failed.startswith("gate (")
    assert failed.endswith("PTXASError: PTXAS error: too large")
    assert made == ["gate_backward"]


def test_a_process_that_ends_fails_its_kernels_alone(
    driver: None, gates: list[KernelLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead.sys, "executable", shutil.which("true"))
    found = compile_ahead(gates, TARGET, workers=2)
    assert found.compiled == 0
    assert [text.rpartition(": ")[2] for text in found.failed] == ["its process ended"] * 2


def test_one_process_of_a_machine_compiles_and_others_wait(
    driver: None, gates: list[KernelLaunch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other processes find the kernels afterwards."""
    monkeypatch.setattr(ahead, "POLL_SECONDS", 0.01)
    told: list[str] = []
    found: list[Compilations] = []

    def run() -> None:
        found.append(compile_ahead(gates[:1], TARGET, lambda done, total, what: told.append(what)))

    waiting = threading.Thread(target=run)
    with (tmp_path / "warpfold.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting.start()
        while not told:
            time.sleep(0.01)
        compiled(gates[0], TARGET)
    waiting.join()
    assert told == ["waiting for another process that compiles kernels"]
    assert found == [Compilations(1, 0)]


@pytest.mark.skipif(not hasattr(nvidia, "make_launcher"), reason="this Triton has one launcher for all kernels")
def test_launchers_are_made_ahead(
    driver: None, gates: list[KernelLaunch], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A library with the names of the driver's replaces it, because a launcher calls them when it launches."""
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
    # Compile in this process, because another would not find the stand-in of the library.
    assert compile_ahead(gates, TARGET, workers=0, launchers=True) == Compilations(0, 2)
    made: list[str] = []
    monkeypatch.setattr("triton.runtime.build._build", lambda *given: made.append(given[0]))
    for launch in gates:
        kernel = compiled(launch, TARGET)
        nvidia.CudaLauncher(kernel.src, kernel.metadata)  # as at the first launch
    assert not made


LENGTHS = (76, 98, 101, 118, 128, 137, 150, 160, 171, 185, 200, 223, 256, 263, 288, 304, 333, 380, 412, 480)


def kernels_of(length: int, rows: int = 512, extra: int = 1024) -> set[str]:
    """Return the kernels of a padded bf16 prediction of a single chain without templates on sm_90."""
    model = replace(ModelConfig(), templates=TemplateConfig(enabled=False))
    job = Job(model=model, sizes=ExampleSizes(residues=length, sequences=rows, extra=extra, templates=0))
    padded = padded_shape(features_of(job, 1), Plan().multiple_on("cuda"))
    sizes = replace(job.sizes, residues=padded["res"], sequences=padded["seq"], extra=padded["extra"])
    with table_used(read(SHIPPED / "sm_90.json")):
        launches = launches_of_job(replace(job, sizes=sizes), Plan(precision="bf16"))
    return {identity(launch, TARGET) for launch in launches}


def test_one_set_of_kernels_serves_all_lengths() -> None:
    """One set serves all alignments, too: docs/explanation/kernels.md has more counts."""
    first = kernels_of(LENGTHS[0])
    assert len(first) <= 30
    assert len(first.union(*map(kernels_of, LENGTHS[1:]))) <= 35
    assert kernels_of(101) == kernels_of(98, rows=500, extra=999)
    assert len(kernels_of(101, rows=1, extra=1) - kernels_of(101)) <= 2  # few rows have other tiles


@pytest.mark.parametrize(
    ("plan", "more"),
    [
        ({"kernels": "strict"}, {}),
        ({"chunk": 8, "in_place": True, "offload": True}, {}),
        ({"axial": 3, "chunk": 4, "in_place": True}, {}),
        ({"recompute": "block", "keep_blocks": 1, "graph": True}, LEARNS),
        ({"axial": 2, "data": 2}, LEARNS),
        ({"recompute": "block"}, {"gradient": "mean"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", [tiny_config(), as_multimer(tiny_config())], ids=["monomer", "multimer"])
def test_launches_are_collected_for_every_plan(model: ModelConfig, plan: dict[str, Any], more: dict[str, Any]) -> None:
    launches = launches_of_job(replace(JOB, model=model, **more), Plan(precision="bf16", **plan))
    assert len({launch.kernel.name for launch in launches}) >= 4


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Stand in for a GPU, for the compilation in a run."""
    monkeypatch.setattr(planning, "_without_kernels", lambda device: False)
    monkeypatch.setattr(planning, "_compiled_for", set())
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    table = read(SHIPPED / "sm_90.json")
    monkeypatch.setattr("warpfold.ops.triton.launch.launched_on", lambda device: table_used(table))
    return torch.device("cuda:0")


def test_a_run_says_what_it_compiles_and_looks_once(
    h100: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given: list[tuple[int, GPUTarget]] = []

    def compiles(launches: list[KernelLaunch], target: GPUTarget, tell: ahead.Tell, launchers: bool) -> Compilations:
        given.append((len({identity(launch, target) for launch in launches}), target))
        tell(0, 30, "compiling 30 kernels, 0 done; kept in here")
        tell(30, 30, "compiling 30 kernels, 30 done; kept in here")
        return Compilations(4, 29, ["gate: too large"])

    monkeypatch.setattr(ahead, "compile_ahead", compiles)
    with caplog.at_level("INFO"):
        planning.compile_kernels(JOB, Plan(precision="bf16"), h100)
    lines = [record.message for record in caplog.records]
    assert lines[0] == "compiling 30 kernels, 0 done; kept in here"
    assert re.fullmatch(r"29 kernels compiled in \d+ s; 4 were in the cache", lines[1])
    assert lines[2:] == ["1 kernels are compiled when they are first launched: gate: too large"]
    ((count, target),) = given
    assert count > 10
    assert target == TARGET
    more_rows = replace(JOB, sizes=replace(JOB.sizes, extra=17), recycles=1)
    planning.compile_kernels(more_rows, Plan(precision="bf16"), h100)
    assert len(given) == 1
    planning.compile_kernels(replace(JOB, sizes=replace(JOB.sizes, residues=32)), Plan(precision="bf16"), h100)
    assert len(given) == 2


def test_a_cache_that_cannot_be_written_is_no_error(
    h100: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level("INFO"):
        planning.compile_kernels(JOB, Plan(precision="bf16"), h100)
    (line,) = (record.message for record in caplog.records)
    assert line.startswith("kernels are compiled when they are first launched: Triton's cache cannot be written (")


def test_a_cpu_compiles_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        planning.compile_kernels(JOB, Plan(), "cpu")
    assert not caplog.records
