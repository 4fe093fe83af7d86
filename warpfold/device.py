"""What only some devices have: streams, events, pinned memory.  On a CPU all of it is nothing, at no cost.

And how a CPU's memory is kept from one tensor to the next.
"""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@contextmanager
def one_thread() -> Iterator[None]:
    """Processes that are started within it compute with one thread each, in NumPy as in torch.

    The libraries read these variables when they are loaded, so that nothing changes in this process.
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


def helpers(device: torch.device | str) -> int:
    """How many processes prepare examples for a device when nobody says: up to 8 for a GPU; on a CPU, whose cores
    compute, none."""
    if torch.device(device).type != "cuda":
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // torch.cuda.device_count() - 1))


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
KEPT = 2**28  # larger tensors (of one Evoformer block at 256 residues: none) go back to the system at once


def keep_memory() -> str | None:
    """From now on and for the whole process, keep the memory of tensors that are let go for the next ones.

    glibc gives blocks above 32 MiB back to the system at once, and those that come next are faulted in anew, page by
    page: 0.22 s for each GiB on 2 cores of an EPYC, 1.17 million faults in one Evoformer block forward and backward
    (128 x 256, fp32).  Kept, there are 16 thousand; the peak grows from 2.0 to 2.5 GiB, since a hole that an aligned
    tensor leaves is a little too small for the next of its size, until holes join.
    Errors: none; returns why nothing was done, or None.
    """
    if platform.libc_ver()[0] != "glibc":
        return "the memory of tensors is kept with glibc alone"
    libc = ctypes.CDLL(None)
    if not libc.mallopt(M_MMAP_THRESHOLD, KEPT):
        return "this glibc does not keep blocks so large"
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # never
    return None


@dataclass(frozen=True)
class Upload:
    """A copy under way."""

    _copy: Tensor
    _done: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """The copy, for the current stream: the stream waits for it, this process does not."""
        if self._done is not None:
            current = torch.cuda.current_stream(self._copy.device)
            current.wait_event(self._done)
            self._copy.record_stream(current)  # the side stream owns it: not used anew before `current` is done
        return self._copy


class Uploads:
    """Copies from host memory to a device, on a stream of their own: they overlap what the device computes."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def host(self, size: int) -> Tensor:
        """Host memory that the device can be filled from, uint8 [size]; pinned for CUDA."""
        if self._stream is None:
            return torch.empty(size, dtype=torch.uint8)
        with torch.cuda.device(self.device):  # pinning opens a context on the thread's current device
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def start(self, buffer: Tensor) -> Upload:
        """Begin to copy what `host` gave, and was filled since; `wait` on the result before the copy is used.

        `buffer` may be let go at once: torch keeps pinned memory until the copies from it are done.
        """
        if self._stream is None:
            return Upload(buffer.to(self.device), None)
        with torch.cuda.stream(self._stream):
            return Upload(buffer.to(self.device, non_blocking=True), self._stream.record_event())
