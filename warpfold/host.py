"""A pair representation in host memory, whose rows or columns travel to the device that computes, and back.

`fetch`, `store` and `fetch_each` serve ordinary tensors too, without a copy: who uses them need not know where z is.
"""

import math
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from warpfold.device import Upload
from warpfold.errors import UserError
from warpfold.ops.dispatch import backend
from warpfold.ops.torch_internals import no_torch_function, wrapper_tensor

ROWS = -3  # of z [*, i, j, c]
SEGMENT = 2**28  # bytes allocated at once: torch rounds pinned memory up to a power of two


class HostTensor(Tensor):
    """z [*, i, j, c] in host memory, zeros at first; its shape, dtype and device are those of what `fetch` returns.

    For a CUDA device it lies in pinned memory, and travels on streams of its own.  For a CPU it lies in a temporary
    file without a name, in the system's folder for these (TMPDIR), which the system reads and writes as it has memory.
    On "meta" it has a shape alone.

    It lies in square tiles, so that a block of rows and a block of columns are both made of pieces without gaps:
    a column of rows would be one piece of c numbers for each row.
    No operation but `fetch` and `store` takes it: each would bring all of it to the device.
    Errors: UserError where the folder has not as much space.
    """

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, tile: int) -> "HostTensor":
        return wrapper_tensor(cls, torch.Size(shape), dtype, device)

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, tile: int) -> None:
        """tile: rows and columns of a tile; slices that begin and end between tiles travel fastest."""
        self._edge = tile
        *leading, rows, columns, channels = shape
        self._leading, self._down, self._across = math.prod(leading), -(-rows // tile), -(-columns // tile)
        self._slot = tile * tile * channels  # numbers of a tile
        self._per_segment = max(1, SEGMENT // max(1, self._slot * dtype.itemsize))  # tiles
        slots = self._leading * self._down * self._across
        self._segments = [] if device.type == "meta" else self._allocate(slots * self._slot)
        on_gpu = device.type == "cuda"
        self._two = backend(self) == "triton"  # parts are on the device, also of a GPU that tensors on "meta" stand for
        self._in, self._out = (torch.cuda.Stream(device) if on_gpu else None for _ in range(2))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"z lies in host memory, so {func} cannot read it whole: fetch its rows (warpfold/host.py)")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HostTensor({list(self.shape)}, {self.dtype}, for {self.device})"

    def __deepcopy__(self, memo: Any) -> "HostTensor":
        raise RuntimeError("z lies in host memory, where there is one of it alone")

    def _allocate(self, numbers: int) -> list[Tensor]:
        """Return memory for so many numbers, in segments of whole tiles."""
        each = self._per_segment * self._slot
        if self.device.type != "cuda":
            return list(in_file(numbers, self.dtype, "plan.offload").split(max(each, 1)))
        sizes = [min(each, numbers - start) for start in range(0, numbers, each)]
        return [torch.zeros(size, dtype=self.dtype, pin_memory=True) for size in sizes]

    def _pieces(self, part: slice, axis: int, block: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Return views of the same numbers, tile by tile: in host memory, and in a block of some rows or columns."""
        edge, channels = self._edge, self.shape[-1]
        first, last = part.start // edge, -(-part.stop // edge)
        block = block.view(self._leading, *block.shape[-3:])
        by_rows = axis == ROWS
        down, across = (range(first, last), range(self._across)) if by_rows else (range(self._down), range(first, last))
        for lead in range(self._leading):
            for i in down:
                height = min(edge, self.shape[-3] - i * edge)
                for j in across:
                    width = min(edge, self.shape[-2] - j * edge)
                    k = (lead * self._down + i) * self._across + j
                    begin = k % self._per_segment * self._slot
                    tile = self._segments[k // self._per_segment][begin : begin + height * width * channels]
                    tile, here = tile.view(height, width, channels), block[lead]
                    cut, at, length = (0, i, height) if by_rows else (1, j, width)
                    low, high = max(part.start, at * edge), min(part.stop, at * edge + length)
                    tile = tile.narrow(cut, low - at * edge, high - low)
                    here = here.narrow(cut, low - part.start, high - low)
                    other, begin = (1, j * edge) if by_rows else (0, i * edge)
                    yield tile, here.narrow(other, begin, width if by_rows else height)

    def _start(self, part: slice, axis: int) -> Upload:
        """Begin to copy some rows or columns to the device."""
        shape = list(self.shape)
        shape[axis] = part.stop - part.start
        with torch.cuda.stream(self._in):  # nothing without a stream
            block = torch.empty(shape, dtype=self.dtype, device=self.device)
            if self.device.type != "meta":
                for tile, here in self._pieces(part, axis, block):
                    here.copy_(tile, non_blocking=True)
            return Upload(block, None if self._in is None else self._in.record_event())

    def _settle(self) -> None:
        """Have what is fetched from now on be what was stored before."""
        if self._in is not None and self._out is not None:
            self._in.wait_stream(self._out)

    def fetch(self, part: slice, axis: int = ROWS) -> Tensor:
        """Return some rows (or columns) on the device: a copy."""
        self._settle()
        return self._start(part, axis).wait()

    def fetch_each(self, parts: Sequence[slice], axis: int = ROWS) -> Iterator[tuple[slice, Tensor]]:
        """Return each of some parts, the next of which travels while one is used.

        Within the loop a part may be stored when it, or a later one, was returned.
        """
        self._settle()
        ahead: Upload | None = None
        for index, part in enumerate(parts):
            here = (ahead or self._start(part, axis)).wait()
            ahead = None
            if self._two and index + 1 < len(parts):
                ahead = self._start(parts[index + 1], axis)
            yield part, here

    def store(self, part: slice, new: Tensor, axis: int = ROWS) -> None:
        """Write some rows (or columns); on a GPU behind what the current stream has to do."""
        if self.device.type == "meta":
            return
        new = new.detach().to(self.dtype).expand(*self.shape[:-3], *new.shape[-3:])
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            for tile, here in self._pieces(part, axis, new.contiguous() if self._leading > 1 else new):
                tile.copy_(here, non_blocking=True)
        if self._out is not None:
            new.record_stream(self._out)


def in_file(numbers: int, dtype: torch.dtype, asked_by: str) -> Tensor:
    """Return a tensor [numbers] that lies in a temporary file, which is gone when the tensor is.

    asked_by: the setting without which there would be none.  Errors: UserError where there is no space.
    """
    size = max(numbers, 1) * dtype.itemsize
    try:
        with tempfile.TemporaryFile(prefix="warpfold-") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)  # else a full disk would end the process later
            else:
                file.truncate(size)
            memory = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise UserError(
            f"{asked_by}: no file of {size / 1e9:.1f} GB in {tempfile.gettempdir()} ({error.strerror}); "
            f"set TMPDIR to a folder with more space, or do without {asked_by}"
        ) from error
    return torch.frombuffer(memory, dtype=dtype)[:numbers]


def fetch(x: Tensor, part: slice, axis: int = ROWS) -> Tensor:
    """Return some rows (or columns) of x on the device that computes: of an ordinary tensor a view."""
    if isinstance(x, HostTensor):
        return x.fetch(part, axis)
    return x.narrow(axis, part.start, part.stop - part.start)


def fetch_each(x: Tensor, parts: Sequence[slice], axis: int = ROWS) -> Iterator[tuple[slice, Tensor]]:
    """Return each of some parts of x; from host memory the next one travels while one is used."""
    if isinstance(x, HostTensor):
        yield from x.fetch_each(parts, axis)
        return
    for part in parts:
        yield part, fetch(x, part, axis)


def store(x: Tensor, part: slice, new: Tensor, axis: int = ROWS) -> None:
    """Write some rows (or columns) of x; nothing is copied where `new` is that part of x itself."""
    if isinstance(x, HostTensor):
        x.store(part, new, axis)
        return
    there = fetch(x, part, axis)
    same = new.untyped_storage()._cdata == there.untyped_storage()._cdata
    if not (same and new.storage_offset() == there.storage_offset() and new.stride() == there.stride()):
        there.copy_(new)
