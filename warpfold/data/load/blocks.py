"""Memory that two processes share, in blocks that are used again: what one writes the other reads in place, uncopied.

A block has no name and no place in a file system, so neither the size of /dev/shm nor a process that is killed matters:
it goes with the last process that has it.
"""

import json
import math
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

ALIGN = 64  # bytes: where an array begins in a block, so that it can be viewed in its dtype
LEAST = 2**16  # bytes of a block; pages that were never written to take no memory

Layout = list[tuple[str, str, tuple[int, ...], int]]  # name, dtype, shape, offset in bytes


class Written(NamedTuple):
    """What a writer tells the reader of arrays in a block; JSON-able, apart from `descriptor`, of a new block."""

    layout: Layout
    size: int  # bytes
    block: int
    capacity: int
    gone: list[int]  # blocks that will not be used again
    descriptor: int | None


class BlockWriter:
    """The blocks that this process writes to, each lent to the reader until it gives it back (`returned`)."""

    def __init__(self) -> None:
        self._blocks: dict[int, mmap.mmap] = {}
        self._free: set[int] = set()
        self._count = 0

    def returned(self, blocks: Iterable[int]) -> None:
        """Note that the reader does not use these any more."""
        self._free.update(blocks)

    def write(self, arrays: Mapping[str, np.ndarray]) -> Written:
        """Write arrays into a free block, or a new one where none is large enough."""
        layout, size = [], 0
        for name, array in arrays.items():
            layout.append((name, array.dtype.str, array.shape, size))
            size += array.nbytes + -array.nbytes % ALIGN
        number, gone, descriptor = self._take(size)
        block = self._blocks[number]
        for (_, _, shape, offset), array in zip(layout, arrays.values()):
            np.ndarray(shape, array.dtype, block, offset)[...] = array
        return Written(layout, size, number, len(block), gone, descriptor)

    def _take(self, size: int) -> tuple[int, list[int], int | None]:
        fitting = [number for number in self._free if len(self._blocks[number]) >= size]
        if fitting:
            number = min(fitting, key=lambda number: len(self._blocks[number]))
            self._free.remove(number)
            return number, [], None
        gone = [*self._free]  # all too small: sizes grow, and memory is not to be kept for smaller ones
        for number in gone:
            del self._blocks[number]
        self._free.clear()
        capacity = max(LEAST, 1 << (size - 1).bit_length())
        number, self._count = self._count, self._count + 1
        descriptor = _memory(capacity)
        self._blocks[number] = mmap.mmap(descriptor, capacity)
        return number, gone, descriptor


class BlockReader:
    """The blocks of one writer, as they lie in this process's memory."""

    def __init__(self) -> None:
        self._blocks: dict[int, mmap.mmap] = {}
        self._returned: deque[int] = deque()

    def returned(self) -> list[int]:
        """Return the blocks that are no longer used here, each once, for the writer to use again."""
        found = []
        while self._returned:
            found.append(self._returned.popleft())
        return found

    def read(self, written: Written) -> np.ndarray:
        """Return the bytes that were written, in place: the block is lent as long as any view of them exists."""
        for number in written.gone:
            del self._blocks[number]
        if written.descriptor is not None:
            self._blocks[written.block] = mmap.mmap(written.descriptor, written.capacity)
            os.close(written.descriptor)
        whole = np.frombuffer(self._blocks[written.block], np.uint8, written.size)
        weakref.finalize(whole, self._returned.append, written.block).atexit = False
        return whole


def send(pipe: Connection, written: Written) -> None:
    """Send what a `BlockWriter` wrote: JSON, and then the descriptor of a new block."""
    pipe.send_bytes(json.dumps({"written": [*written[:-1], written.descriptor is not None]}).encode())
    if written.descriptor is not None:
        send_handle(pipe, written.descriptor, 0)
        os.close(written.descriptor)


def received(pipe: Connection, answer: list[Any]) -> Written:
    """Read the answer of `send`, and the descriptor of a new block, which follows it in the pipe."""
    layout, size, block, capacity, gone, described = answer
    layout = [(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in layout]
    return Written(layout, size, block, capacity, gone, recv_handle(pipe) if described else None)


def view(buffer: Tensor, dtype: str, shape: Sequence[int], offset: int) -> Tensor:
    """Return an array that lies in a buffer (uint8), on any device, as a tensor that shares its memory."""
    kind = _torch_dtype(dtype)
    return buffer[offset : offset + math.prod(shape) * kind.itemsize].view(kind).reshape(tuple(shape))


@cache
def _torch_dtype(dtype: str) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _memory(size: int) -> int:
    """Return the descriptor of so many bytes of memory; of a file without a name where a system lacks these."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("warpfold")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
