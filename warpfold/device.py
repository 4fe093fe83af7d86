"""Asynchronous copies to a GPU and back, for which a CPU does not wait; the CPU's threads and memory."""

import ctypes
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@contextmanager
def one_thread() -> Iterator[None]:
    """Have processes that are started within the context compute with one thread each, in NumPy and torch.

    The libraries read these variables when they are loaded, so nothing changes in this process.
    """
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def default_workers(device: torch.device | str) -> int:
    """Return how many processes prepare examples for a device by default.

    Up to 8 for each GPU; none on a CPU, whose cores compute.
    """
    if torch.device(device).type != "cuda":
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // torch.cuda.device_count() - 1))


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
KEPT = 2**28  # bytes; larger tensors, which a block at 256 residues does not have, go back to the system at once


def keep_memory() -> str | None:
    """Reuse the memory of freed tensors for new ones, from now on and in the whole process.

    glibc returns blocks above 32 MiB to the system at once, and page faults bring each new one in: 0.22 s for each GiB
    on 2 cores of an EPYC, 1.17 million faults in one Evoformer block forward and backward (128 x 256, fp32).  With this
    there are 16 thousand.  The peak grows from 2.0 to 2.5 GiB, as the hole that an aligned tensor leaves is a little
    too small for the next of its size, until holes join.
    Returns why nothing was done, or None.
    """
    if platform.libc_ver()[0] != "glibc":
        return "memory can be kept with glibc only"
    libc = ctypes.CDLL(None)
    if not libc.mallopt(M_MMAP_THRESHOLD, KEPT):
        return "this glibc cannot keep blocks so large"
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # never trim
    return None


@dataclass(frozen=True)
class Upload:
    """A copy to a device, in flight."""

    _copy: Tensor
    _done: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """Return the copy for the current stream, which waits for it; this process does not."""
        if self._done is not None:
            current = torch.cuda.current_stream(self._copy.device)
            current.wait_event(self._done)
            self._copy.record_stream(current)  # the side stream owns it, and must not reuse it before `current` is done
        return self._copy


@dataclass(frozen=True)
class Snapshot:
    """Copies of tensors in host memory, in flight: what happens to the tensors from now on does not change them."""

    _copies: dict[str, Tensor]
    _done: torch.cuda.Event | None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Snapshot":
        """Begin to copy tensors by name; those on a GPU to pinned memory, behind what the current stream has to do."""
        on_gpu = next((t.device for t in tensors.values() if t.is_cuda), None)
        if on_gpu is None:
            return cls({name: t.detach().clone() for name, t in tensors.items()}, None)
        copies = {}
        for name, t in tensors.items():
            copies[name] = torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t.detach(), non_blocking=True)
        return cls(copies, torch.cuda.current_stream(on_gpu).record_event())

    def wait(self) -> dict[str, Tensor]:
        """Return the copies when they are complete; called by a thread, only that one waits."""
        if self._done is not None:
            self._done.synchronize()
        return self._copies


class Uploads:
    """Copy from host memory to a device on a separate stream, while the device computes."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def host(self, size: int) -> Tensor:
        """Allocate host memory to copy from, uint8 [size]; pinned for CUDA."""
        if self._stream is None:
            return torch.empty(size, dtype=torch.uint8)
        with torch.cuda.device(self.device):  # pinning creates a context on the thread's current device
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def start(self, buffer: Tensor) -> Upload:
        """Begin to copy a buffer that `host` returned; call `wait` on the result to use the copy.

        `buffer` may be freed at once: torch keeps pinned memory until the copies from it are done.
        """
        if self._stream is None:
            return Upload(buffer.to(self.device), None)
        with torch.cuda.stream(self._stream):
            return Upload(buffer.to(self.device, non_blocking=True), self._stream.record_event())
