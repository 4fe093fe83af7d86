"""Streams and pinned memory: right where they exist, nothing where they do not."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from warpfold.device import THREADS, Uploads, default_workers, device_of, keep_memory, one_thread, slow_precision


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_overlap_and_are_whole_when_used() -> None:
    uploads = Uploads("cuda")
    assert 1 <= default_workers("cuda") <= 8
    busy = torch.randn(4096, 4096, device="cuda")
    for number in range(20):  # memory of earlier copies is used again while the device still works
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


def test_whoever_asks_for_a_cpu_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr("warpfold.device.keep_memory", lambda: called.append(1))
    assert device_of("cpu") == "cpu"
    assert called
