"""Run the parts of an operation in threads that each compute a whole part.

By default torch splits each product and each sum among all threads, which then wait for the slowest.  A block's
backward pass has thousands of such barriers, and when another program interrupts one thread, all of them wait.  Here a
thread takes a part, computes all of it and takes the next, and the threads wait only at the end of the operation.
"""

import contextlib
import ctypes
import functools
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from warpfold.ops.dispatch import seen_by_others, uniform_loop

# The smallest number of parts per thread. With fewer, threads would often wait, and torch splits the work better.
LEAST = 2
# Parts that are summed are divided into this many groups, or one per thread if there are more threads.
SHARES = 16
# If the sums have more elements than this, there is one group per thread.
LARGE = 2**20

T = TypeVar("T")
Sums = TypeVar("Sums", bound=Sequence[Tensor])
log = logging.getLogger("warpfold")


def in_threads(compute: Callable[..., None], parts: Iterable[Sequence[Any]]) -> None:
    """Call `compute` with each part, in any order; each call writes to its own memory."""
    every_part = list(parts)
    if (threads := _threads(len(every_part))) > 1:
        _divide(lambda part: compute(*part), every_part, threads)
        return
    for part in uniform_loop(every_part):
        compute(*part)


def summed(compute: Callable[..., None], parts: Iterable[Sequence[Any]], zeros: Callable[[], Sums]) -> Sums:
    """Return sums over all parts: compute(sums, *part) adds a part to sums in place.

    zeros: makes sums that are zero.  The order of additions depends on the numbers of parts and threads only, not on
    the speed of threads, so runs repeat bit for bit.
    """
    every_part, sums = list(parts), zeros()
    if (threads := _threads(len(every_part))) == 1:
        for part in uniform_loop(every_part):
            compute(sums, *part)
        return sums
    size = -(-len(every_part) // (threads if sum(map(torch.numel, sums)) > LARGE else max(threads, SHARES)))
    groups = [sums, *(zeros() for _ in range(size, len(every_part), size))]

    def add(number: int) -> None:
        for part in every_part[number * size : (number + 1) * size]:
            compute(groups[number], *part)

    _divide(add, range(len(groups)), threads)
    for other_sums in groups[1:]:
        add_sums(sums, other_sums)
    return sums


def add_sums(sums: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add sums over other parts in place."""
    for total, other in zip(sums, others, strict=True):
        total += other


def _threads(parts: int) -> int:
    """Return the number of threads for this number of parts; 1: this thread alone, where torch splits operations."""
    threads = torch.get_num_threads()
    if threads == 1 or parts < LEAST * threads or seen_by_others() or not _can_compute_alone():
        return 1
    return threads


def _divide(compute: Callable[[T], None], parts: Sequence[T], threads: int) -> None:
    """Call a function with each part in this many threads.  Raises an error of a thread after all have ended.

    This thread is one of them, and each thread takes its next part itself.  If this thread distributed the parts, it
    would wake up for each, on a core that another thread uses (docs/explanation/kernels.md).
    """
    inference, left_numbers = torch.is_inference_mode_enabled(), deque(range(len(parts)))

    def taken() -> Iterator[int]:
        """Take parts until none are left, and yield their numbers in ascending order."""
        with contextlib.suppress(IndexError):
            while True:
                yield left_numbers.popleft()

    def run() -> None:
        """Compute parts until none are left."""
        try:
            # Both modes are thread-local.
            with torch.inference_mode(inference), torch.no_grad():
                for number in taken():
                    compute(parts[number])
        finally:
            # After an error no thread starts another part.
            left_numbers.clear()

    running = [_pool(threads - 1).submit(run) for _ in range(threads - 1)]
    before = _set_threads()
    try:
        with torch.no_grad():
            part_numbers = taken()
            next_part = next(part_numbers, None)
            # This loop has one iteration per part of any thread, because it notifies this thread's watcher.
            for number in uniform_loop(range(len(parts))):
                if number == next_part:
                    compute(parts[number])
                    next_part = next(part_numbers, None)
    finally:
        _set_threads(before)
        left_numbers.clear()
        # Cancel tasks that have not started because the pool is busy with another operation.
        running = [task for task in running if not task.cancel()]
        wait(running)
    for task in running:
        task.result()


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "warpfold", initializer=_begin)


# A forked process has none of the threads.
os.register_at_fork(after_in_child=_pool.cache_clear)


def _begin() -> None:
    """Make torch compute in a new thread without other threads."""
    # torch sets the number of threads when a thread first splits an operation, so do that before changing it.
    torch.ones(2**16).add_(1)
    _set_threads()


def _set_threads(numbers: Sequence[int] = ()) -> list[int]:
    """Set the numbers of threads for this thread's operations in MKL and each OpenMP library; return the old numbers.

    Without `numbers` all are 1.  torch.set_num_threads would also change MKL's number for the whole process.
    """
    openmp, mkl = _libraries()
    numbers = numbers or [1] * (1 + len(openmp))
    before = [0 if mkl is None else mkl.MKL_Set_Num_Threads_Local(numbers[0])]
    for library, number in zip(openmp, numbers[1:]):
        before.append(library.omp_get_max_threads())
        library.omp_set_num_threads(number)
    return before


@functools.cache
def _libraries() -> tuple[list[ctypes.CDLL], ctypes.CDLL | None]:
    """Return the loaded OpenMP libraries, and the library of torch's MKL or None."""
    maps = Path("/proc/self/maps")
    loaded = sorted(set(re.findall(r"\S+\.so\S*$", maps.read_text(), re.MULTILINE))) if maps.exists() else []
    openmp = [ctypes.CDLL(path) for path in loaded if re.match(r"lib(g|i)?omp\d*[.-]", Path(path).name)]
    of_torch = [ctypes.CDLL(path) for path in loaded if Path(path).name.startswith("libtorch_cpu")]
    return openmp, next((library for library in of_torch if hasattr(library, "MKL_Set_Num_Threads_Local")), None)


@functools.cache
def _can_compute_alone() -> bool:
    """Return whether torch in a thread of the pool reports that it uses no other threads."""
    with ThreadPoolExecutor(1, initializer=_begin) as pool:
        info = pool.submit(torch.__config__.parallel_info).result()
    numbers = {int(n) for n in re.findall(r"(?:at::get_num|omp_get_max|mkl_get_max)_threads\(\) : (\d+)", info)}
    if numbers != {1}:
        log.info("torch splits each operation among its threads: their number cannot be set per thread")
    return numbers == {1}
