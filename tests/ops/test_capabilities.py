"""The capabilities of a GPU are known before any work starts; GPUs, compilers and folders are stand-ins."""

import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from warpfold import device
from warpfold.errors import UserError
from warpfold.ops import capabilities
from warpfold.ops.capabilities import Capabilities, has_code, launch_problem

GPU = torch.device("cuda:0")
CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
MakeGPU = Callable[..., None]


@pytest.fixture
def make_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeGPU]:
    """Stand in for one GPU with its compute capability, and for the architectures of the torch build."""

    def make(name: str, major: int, minor: int, built_for: list[str] = CUDA_13, problem: str = "") -> None:
        properties = SimpleNamespace(name=name, major=major, minor=minor, gcnArchName=name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(capabilities, "launch_problem", lambda: problem)
        capabilities.capabilities.cache_clear()

    yield make
    capabilities.capabilities.cache_clear()
    device._warn_if_slow.cache_clear()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stand in for a machine with all requirements of Triton, in a folder from which tests remove some."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcuda.so.1").touch()
    monkeypatch.setattr(capabilities, "TRITON", True)
    monkeypatch.setattr(capabilities, "_is_compiled_already", lambda: False)
    monkeypatch.setattr(capabilities.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "gcc" else None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path / "include")})
    listed = SimpleNamespace(stdout=f"\tlibcuda.so.1 (libc6,x86-64) => {tmp_path / 'lib' / 'libcuda.so.1'}\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: listed)
    for name in ("CC", "CPATH", "C_INCLUDE_PATH", "LD_LIBRARY_PATH", "TRITON_LIBCUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    launch_problem.cache_clear()
    yield tmp_path
    launch_problem.cache_clear()


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((8, 6), ["sm_80"], True),  # machine code of the same major version
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80", "sm_86"], False),
        ((9, 0), ["sm_80", "compute_80"], True),  # the driver compiles PTX
        ((7, 0), ["sm_75", "compute_80"], False),
        ((9, 0), ["sm_90a"], True),
        ((12, 1), ["compute_120a"], False),
        ((10, 3), ["sm_100f"], True),
        ((12, 0), ["sm_100f"], False),
    ],
)
def test_code_runs_on_its_major_version_and_ptx_on_all_later_ones(
    capability: tuple[int, int], built_for: list[str], runs: bool
) -> None:
    assert has_code(*capability, built_for) is runs


def test_a_new_gpu_has_everything(make_gpu: MakeGPU, caplog: pytest.LogCaptureFixture) -> None:
    make_gpu("NVIDIA H100", 9, 0)
    assert capabilities.capabilities(GPU) == Capabilities(has_bf16=True)
    assert capabilities.no_kernels_reason(GPU) is None
    device._warn_if_slow("cuda:0")
    assert not caplog.records


def test_an_old_gpu_computes_by_definitions_and_says_how_slowly(
    make_gpu: MakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    make_gpu("Tesla T4", 7, 5)
    found = capabilities.capabilities(GPU)
    assert (found.unusable, found.has_bf16) == ("", False)
    reason = "the Tesla T4 has compute capability 7.5, and the kernels need 8.0"
    assert capabilities.no_kernels_reason(GPU) == reason
    device._warn_if_slow("cuda:0")
    device._warn_if_slow("cuda:0")
    (record,) = caplog.records
    assert record.getMessage() == (
        f"--device cuda:0: operations are computed in plain torch, {capabilities.SLOWDOWN}, because {reason}"
    )
    assert device.caveats("bf16", GPU) == [
        "bf16 is slower than fp32 on this GPU, which does not multiply bf16. Use fp32 or fp16."
    ]


@pytest.mark.parametrize(
    ("name", "capability", "remedy"),
    [
        ("Tesla V100", (7, 0), "install a torch built for CUDA 12.6 (docs/install.md), or give cpu"),
        ("Next", (13, 0), "install a newer torch, or give cpu"),
    ],
)
def test_a_gpu_without_code_in_torch_is_refused_before_work(
    make_gpu: MakeGPU, name: str, capability: tuple[int, int], remedy: str
) -> None:
    make_gpu(name, *capability, built_for=CUDA_13[:-1])
    with pytest.raises(UserError, match=f"--device cuda: the {name} has compute capability") as error:
        device.device_of(None)
    assert str(error.value).endswith(remedy)
    assert "\n" not in str(error.value)


def test_a_gpu_that_allocates_and_does_not_compute_is_refused(
    make_gpu: MakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_gpu("NVIDIA H100", 9, 0)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available\nCompile with ...")

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(UserError, match=r"torch cannot compute on it \(CUDA error: no kernel image is available\)\."):
        device.device_of("cuda:0")


@pytest.mark.parametrize(("name", "has_bf16"), [("gfx942:sramecc+:xnack-", True), ("gfx906", False)])
def test_bf16_on_gpus_of_amd(make_gpu: MakeGPU, name: str, has_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make_gpu(name, 9, 4, built_for=[name])
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert capabilities.capabilities(GPU) == Capabilities(has_bf16=has_bf16)


def test_a_complete_machine_can_launch(machine: Path) -> None:
    assert launch_problem() == ""
    assert not list((machine / "cache").iterdir())


@pytest.mark.parametrize("found", ["CC", "CPATH", "TRITON_LIBCUDA_PATH", "LD_LIBRARY_PATH", "compiled already"])
def test_what_is_elsewhere_is_found(machine: Path, monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    if found == "CC":
        monkeypatch.setattr(capabilities.shutil, "which", lambda name: name if name == "cc" else None)
        monkeypatch.setenv("CC", "cc")
    elif found == "CPATH":
        monkeypatch.setenv("CPATH", str(machine / "include"))
        monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": "nowhere"})
    else:
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=""))
        monkeypatch.setattr(capabilities, "_is_compiled_already", lambda: found == "compiled already")
        if found != "compiled already":
            monkeypatch.setenv(found, str(machine / "lib"))
    assert launch_problem() == ""


@pytest.mark.parametrize(
    ("missing", "problem"),
    [
        ("triton", "triton is not installed; pip install triton"),
        ("compiler", "Triton needs a C compiler, and there is no gcc or clang; install gcc, or set CC"),
        ("CC", "Triton needs a C compiler, and CC=icc is not one; install gcc, or unset CC"),
        ("header", "Triton needs Python.h, and {machine}/include has none; install python{version}-dev"),
        ("libcuda", "Triton does not find libcuda.so.1; set TRITON_LIBCUDA_PATH to the folder of libcuda.so.1"),
        ("ldconfig", "Triton looks for libcuda.so.1 with /sbin/ldconfig, which does not run; set TRITON_LIBCUDA_PATH"),
        ("cache", "the Triton cache {machine}/include/Python.h/cache cannot be written (Not a directory); set TRITON_"),
    ],
)
def test_what_triton_lacks_is_said_with_the_remedy(
    machine: Path, monkeypatch: pytest.MonkeyPatch, missing: str, problem: str
) -> None:
    if missing == "triton":
        monkeypatch.setattr(capabilities, "TRITON", False)
    elif missing == "compiler":
        monkeypatch.setattr(capabilities.shutil, "which", lambda name: None)
    elif missing == "CC":
        monkeypatch.setenv("CC", "icc")
    elif missing == "header":
        (machine / "include" / "Python.h").unlink()
    elif missing == "libcuda":
        (machine / "lib" / "libcuda.so.1").unlink()
    elif missing == "ldconfig":
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError()))
    else:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(machine / "include" / "Python.h" / "cache"))
    found = launch_problem()
    assert found.startswith(problem.format(machine=machine, version=sysconfig.get_python_version()))
    assert "\n" not in found


def test_dispatch_refuses_with_the_reason(make_gpu: MakeGPU) -> None:
    from warpfold.ops.dispatch import _unsupported_by_triton

    make_gpu("NVIDIA H100", 9, 0, problem="Triton needs a C compiler, and there is no gcc or clang")
    assert _unsupported_by_triton(GPU) == "Triton needs a C compiler, and there is no gcc or clang"
    assert capabilities.capabilities(GPU).has_bf16  # cuBLAS multiplies bf16 without Triton
