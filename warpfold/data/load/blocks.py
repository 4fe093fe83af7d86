"""Share memory between two processes in reusable blocks, which the reader uses without a copy.

A block has no name and no file. It does not depend on the size of /dev/shm, and the system frees it with the last
process that maps it, even if that process is killed.
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

# Alignment in bytes of the arrays in a block, so that they can be viewed in their dtype.
ALIGN = 64
# Smallest block in bytes. Pages that are never written use no memory.
MIN_BLOCK_BYTES = 2**16

Layout = list[tuple[str, str, tuple[int, ...], int]]  # name, dtype, shape, offset in bytes


class Written(NamedTuple):
    """The writer's message about arrays in a block. All fields except `descriptor` are JSON-serialisable.

    size: bytes of the arrays. block: its number. capacity: bytes of the block. gone: blocks that the writer has
    dropped. descriptor: the file descriptor of a new block, else None.
    """

    layout: Layout
    size: int
    block: int
    capacity: int
    gone: list[int]
    descriptor: int | None


class BlockWriter:
    """The blocks that this process writes. The reader owns a block until it returns it (see `returned`)."""

    def __init__(self) -> None:
        self._blocks: dict[int, mmap.mmap] = {}
        self._free: set[int] = set()
        self._count = 0

    def returned(self, blocks: Iterable[int]) -> None:
        """Mark blocks as free, because the reader has released them."""
        self._free.update(blocks)

    def write(self, arrays: Mapping[str, np.ndarray]) -> Written:
        """Write arrays into a free block, or into a new one if no free block is large enough."""
        layout, size = [], 0
        for name, array in arrays.items():
            layout.append((name, array.dtype.str, array.shape, size))
            size += array.nbytes + -array.nbytes % ALIGN
        gone, descriptor = list[int](), None
        fitting = [number for number in self._free if len(self._blocks[number]) >= size]
        if fitting:
            number = min(fitting, key=lambda number: len(self._blocks[number]))
            self._free.remove(number)
        else:
            # All free blocks are too small. They are dropped, because sizes tend to grow.
            gone = [*self._free]
            for number in gone:
                del self._blocks[number]
            self._free.clear()
            capacity = max(MIN_BLOCK_BYTES, 1 << (size - 1).bit_length())
            number, self._count = self._count, self._count + 1
            descriptor = _allocate(capacity)
            self._blocks[number] = mmap.mmap(descriptor, capacity)
        block = self._blocks[number]
        for (_, _, shape, offset), array in zip(layout, arrays.values()):
            np.ndarray(shape, array.dtype, block, offset)[...] = array
        return Written(layout, size, number, len(block), gone, descriptor)


class BlockReader:
    """The blocks of one writer, mapped into this process."""

    def __init__(self) -> None:
        self._blocks: dict[int, mmap.mmap] = {}
        self._returned: deque[int] = deque()

    def returned(self) -> list[int]:
        """Return the blocks that have been released since the last call, for the writer to reuse."""
        blocks = []
        while self._returned:
            blocks.append(self._returned.popleft())
        return blocks

    def read(self, written: Written) -> np.ndarray:
        """Return a view of the written bytes. The block is released when no view of them exists any more."""
        for number in written.gone:
            del self._blocks[number]
        if written.descriptor is not None:
            self._blocks[written.block] = mmap.mmap(written.descriptor, written.capacity)
            os.close(written.descriptor)
        whole = np.frombuffer(self._blocks[written.block], np.uint8, written.size)
        weakref.finalize(whole, self._returned.append, written.block).atexit = False
        return whole


def send(pipe: Connection, written: Written) -> None:
    """Send the message of a `BlockWriter` as JSON, followed by the descriptor of a new block."""
    pipe.send_bytes(json.dumps({"written": [*written[:-1], written.descriptor is not None]}).encode())
    if written.descriptor is not None:
        send_handle(pipe, written.descriptor, 0)
        os.close(written.descriptor)


def receive(pipe: Connection, answer: list[Any]) -> Written:
    """Decode the JSON of `send`, and receive the descriptor of a new block, which follows in the pipe."""
    layout, size, block, capacity, gone, described = answer
    layout = [(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in layout]
    return Written(layout, size, block, capacity, gone, recv_handle(pipe) if described else None)


def view(buffer: Tensor, dtype: str, shape: Sequence[int], offset: int) -> Tensor:
    """Return a tensor that shares the memory of an array in a uint8 buffer on any device. offset: in bytes."""
    kind = _torch_dtype(dtype)
    return buffer[offset : offset + math.prod(shape) * kind.itemsize].view(kind).reshape(tuple(shape))


@cache
def _torch_dtype(dtype: str) -> torch.dtype:
    return torch.from_numpy(np.empty((), dtype)).dtype


def _allocate(size: int) -> int:
    """Allocate `size` bytes of anonymous memory, or an unnamed file on systems without it. Returns the descriptor."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("warpfold")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
