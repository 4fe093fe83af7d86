"""Run the parts of an operation on threads that each compute alone.

By itself torch divides each product and each sum among all threads, which wait for the last of them before the next: a
block's backward pass has thousands of such meetings, and beside another program each lasts as long as that interrupts
one of them.  Here a thread takes a part, computes all of it, and takes the next; they meet at the end of the operation.
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

LEAST = 2  # parts for each thread; of fewer one would often wait for the rest, and torch divides them better
SHARES = 16  # into which parts are divided where they are summed, at least one for each thread;
LARGE = 2**20  # no more than one, where sums are of more numbers

T = TypeVar("T")
Sums = TypeVar("Sums", bound=Sequence[Tensor])
log = logging.getLogger("warpfold")


def in_threads(compute: Callable[..., None], parts: Iterable[Sequence[Any]]) -> None:
    """Call `compute` with each part, in any order; each writes to memory of its own."""
    every = list(parts)
    if (threads := _threads(len(every))) > 1:
        _divide(lambda part: compute(*part), every, threads)
        return
    for part in uniform_loop(every):
        compute(*part)


def summed(compute: Callable[..., None], parts: Iterable[Sequence[Any]], zeros: Callable[[], Sums]) -> Sums:
    """Call `compute` with sums and each part, which it adds to them in place; return the sums over all parts.

    zeros: makes sums.  Which parts are added up first follows from how many there are of them and of threads, not from
    which thread was the faster one: a run repeats to the bit.
    """
    every, sums = list(parts), zeros()
    if (threads := _threads(len(every))) == 1:
        for part in uniform_loop(every):
            compute(sums, *part)
        return sums
    size = -(-len(every) // (threads if sum(map(torch.numel, sums)) > LARGE else max(threads, SHARES)))
    found = [sums, *(zeros() for _ in range(size, len(every), size))]

    def add(number: int) -> None:
        for part in every[number * size : (number + 1) * size]:
            compute(found[number], *part)

    _divide(add, range(len(found)), threads)
    for others in found[1:]:
        for total, other in zip(sums, others, strict=True):
            total += other
    return sums


def _threads(parts: int) -> int:
    """Return how many threads compute so many parts; 1: this one, in which torch divides each of its operations."""
    threads = torch.get_num_threads()
    if threads == 1 or parts < LEAST * threads or seen_by_others() or not _can_compute_alone():
        return 1
    return threads


def _divide(compute: Callable[[T], None], parts: Sequence[T], threads: int) -> None:
    """Call a function with each part, in this many threads; what one raises is raised here, once all have ended.

    This thread is one of them, and each takes the next part when it has done one: if this one handed them out, it would
    wake up for each, on a core on which another computes (docs/explanation/kernels.md).
    """
    inference, left = torch.is_inference_mode_enabled(), deque(range(len(parts)))

    def taken() -> Iterator[int]:
        """Take parts until none is left, and yield the number of each, ascending."""
        with contextlib.suppress(IndexError):
            while True:
                yield left.popleft()

    def run() -> None:
        try:
            with torch.inference_mode(inference), torch.no_grad():  # which are each thread's own
                for number in taken():
                    compute(parts[number])
        finally:
            left.clear()  # after an error nobody begins another part

    running = [_pool(threads - 1).submit(run) for _ in range(threads - 1)]
    before = _set_threads()
    try:
        with torch.no_grad():
            own = taken()
            mine = next(own, None)
            for number in uniform_loop(range(len(parts))):  # the watcher of this thread is told of all of them
                if number == mine:
                    compute(parts[number])
                    mine = next(own, None)
    finally:
        _set_threads(before)
        left.clear()
        running = [one for one in running if not one.cancel()]  # those that another operation's parts keep waiting
        wait(running)
    for one in running:
        one.result()


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "warpfold", initializer=_begin)


os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process has none of its threads


def _begin() -> None:
    """Have a new thread compute alone."""
    torch.ones(2**16).add_(1)  # torch sets a thread's number of threads when it first divides an operation
    _set_threads()


def _set_threads(numbers: Sequence[int] = ()) -> list[int]:
    """Set how many threads compute this thread's operations, for MKL and each library of OpenMP; return those before.

    Without numbers: one, itself.  Not torch.set_num_threads, which also changes MKL's number for the whole process.
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
    """Return the loaded libraries of OpenMP, and that of torch's MKL, where there are such."""
    maps = Path("/proc/self/maps")
    loaded = sorted(set(re.findall(r"\S+\.so\S*$", maps.read_text(), re.MULTILINE))) if maps.exists() else []
    openmp = [ctypes.CDLL(path) for path in loaded if re.match(r"lib(g|i)?omp\d*[.-]", Path(path).name)]
    of_torch = [ctypes.CDLL(path) for path in loaded if Path(path).name.startswith("libtorch_cpu")]
    return openmp, next((one for one in of_torch if hasattr(one, "MKL_Set_Num_Threads_Local")), None)


@functools.cache
def _can_compute_alone() -> bool:
    """Return whether a thread can be made to compute alone, by what torch says in such a thread."""
    with ThreadPoolExecutor(1, initializer=_begin) as one:
        said = one.submit(torch.__config__.parallel_info).result()
    alone = {int(number) for number in re.findall(r"(?:at::get_num|omp_get_max|mkl_get_max)_threads\(\) : (\d+)", said)}
    if alone != {1}:
        log.info("threads of torch cannot be told to compute alone here: it divides each operation among them")
    return alone == {1}
