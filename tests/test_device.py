"""Test streams and pinned memory: correct on devices that have them, without effect on others."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.mac import mac
from warpfold.device import (
    THREADS,
    OnHost,
    Uploads,
    caveats,
    cores,
    default_workers,
    device_meant,
    device_of,
    keep_memory,
    one_thread,
    slow_precision,
)
from warpfold.errors import UserError
from warpfold.ops.capabilities import Capabilities


def test_processes_begin_with_one_thread_and_this_one_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    code = f"import os; print(*(os.environ[name] for name in {THREADS}))"
    with one_thread():
        seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert seen.split() == ["1", "1", "1"]
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert "MKL_NUM_THREADS" not in os.environ


def test_on_a_cpu_nothing_is_copied_and_nothing_helps() -> None:
    uploads = Uploads("cpu")
    buffer = uploads.host(10)
    buffer[:] = torch.arange(10)
    copy = uploads.start(buffer).wait()
    assert copy.data_ptr() == buffer.data_ptr()
    assert not buffer.is_pinned()
    assert default_workers("cpu") == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_waits_on_the_host_comes_back_as_it_lay(device: str) -> None:
    """Check values and strides, because kernels read slices of padded buffers by their strides."""
    wide, stream = torch.randn(8, 8, 44, device=device), torch.cuda.Stream() if device == "cuda" else None
    for x in (
        *(wide[..., 3:11], wide.transpose(0, 1)[..., :6], wide[:, 0].T, wide[:, :, ::2], wide[0, 0, 0], wide[:0]),
        wide[:, :1].expand(8, 3, 44),
    ):
        kept = OnHost(x, stream, None)
        for _ in range(2):
            back = kept.take()
            assert torch.equal(back, x)
            assert back.stride() == x.stride()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_overlap_and_are_whole_when_used() -> None:
    uploads = Uploads("cuda")
    assert 1 <= default_workers("cuda") <= 8
    busy = torch.randn(4096, 4096, device="cuda")
    # The memory of earlier copies is reused while the device is still busy.
    for number in range(20):
        buffer = uploads.host(30_000_000)
        assert buffer.is_pinned()
        buffer.fill_(number)
        upload = uploads.start(buffer)
        del buffer
        busy = busy @ busy / 4096
        copy = upload.wait()
        assert copy.device.type == "cuda"
        assert bool((copy == number).all())


FAULTS = """
import resource, torch
from warpfold.device import keep_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        torch.empty(2**24).fill_(1)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first = faults()
reason = keep_memory()
for _ in range(15):
    faults()  # until the heap has a hole with room to align within
print(first, faults(), reason)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_that_is_kept_is_not_faulted_in_anew() -> None:
    seen = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True).stdout
    before, after, reason = seen.split()
    assert reason == "None"
    assert int(after) < int(before) / 50


def test_without_glibc_memory_is_not_kept_and_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert "glibc" in (keep_memory() or "")


def test_a_precision_that_a_cpu_only_imitates_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text("flags\t\t: fma avx2 avx512f\n")
    monkeypatch.setattr("warpfold.device.Path", lambda _: tmp_path / "cpuinfo")
    for precision in ("bf16", "bf16_all", "fp16"):
        assert "use fp32" in str(slow_precision(precision, "cpu"))
    assert slow_precision("fp32", "cpu") is None
    assert slow_precision("bf16", "cuda") is None
    (tmp_path / "cpuinfo").write_text("flags\t\t: fma avx2 avx512_bf16\n")
    assert slow_precision("bf16", "cpu") is None
    assert slow_precision("fp16", "cpu") is not None


# M1, M2, and a Mac that does not report the feature.
@pytest.mark.parametrize(("has", "is_slow"), [("0", True), ("1", False), ("", False)])
def test_a_mac_is_asked_whether_it_has_bf16(has: str, is_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("warpfold.device.Path", lambda _: Path("/nowhere"))
    monkeypatch.setattr("warpfold.device.sysctl", lambda name: asked.append(name) or has)
    assert [slow_precision(precision, "cpu") is not None for precision in ("bf16", "bf16_all")] == [is_slow] * 2
    assert asked == ["hw.optional.arm.FEAT_BF16"] * 2


def test_what_is_said_of_a_device_before_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpfold.device.capabilities", lambda device: Capabilities(has_bf16=True))
    assert caveats("fp32", "cpu") == caveats("bf16", "cuda") == []
    for version, count in (("2.13.0", 2), ("2.14.0", 1), ("2.15.1+cpu", 1)):
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
        said = caveats("bf16", "mps")
        assert "never run on an Apple GPU" in said[0]
        assert len(said) == count
    assert "177116" in caveats("bf16", "mps")[-1] or count == 1


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(
            ("gpu", "cuda"),
            ("GPU", "cuda"),
            ("0", "cuda:0"),
            ("cuda0", "cuda:0"),
            ("gpu:1", "cuda:1"),
            ("CUDA", "cuda"),
        ),
        *(("hip", "cuda"), ("metal", "mps"), ("MPS", "mps"), ("mps:1", "mps"), ("CPU", "cpu"), ("cpu:0", "cpu")),
        *(("A100", None), ("meta", None), ("", None), ("cuda:x y", "cuda")),
    ],
)
def test_a_name_that_is_none_of_a_device_is_refused_with_what_it_means(name: str, meant: str | None) -> None:
    assert device_meant(name) == meant
    cure = f"not known. (Pass )?{meant}" if meant else r"not known. Pass cpu, cuda, cuda:1 and so on, or mps on a Mac"
    with pytest.raises(UserError, match=f"^--device {name}: {cure}") as said:
        device_of(name)
    assert "\n" not in str(said.value)
    if meant is None:
        assert "warpfold plan" in str(said.value)


def test_a_device_that_is_not_here_is_refused_with_what_is() -> None:
    with mac():
        assert [device_of(name) for name in ("mps", "mps:0", "cpu", None)][1:] == ["mps:0", "cpu", device_of(None)]
        # An Apple GPU is never the default.
        assert device_of(None) == ("cuda" if torch.cuda.is_available() else "cpu")
        with pytest.raises(UserError, match=r"^--device gpu: not known. Pass mps$"):
            device_of("gpu")
        if not torch.cuda.is_available():
            with pytest.raises(UserError, match=r"^--device cuda: .*\. Pass cpu, or mps \(this Mac's GPU\)"):
                device_of("cuda")
    if not torch.backends.mps.is_available():
        with pytest.raises(UserError, match=r"^--device mps: torch .*\. Pass cpu\.$"):
            device_of("mps")


def test_cores_are_counted_without_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert cores() == os.cpu_count()


def test_whoever_asks_for_a_cpu_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr("warpfold.device.keep_memory", lambda: called.append(1))
    assert device_of("cpu") == "cpu"
    assert called
