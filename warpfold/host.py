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
from warpfold.ops.torch_internals import wrapper_tensor

ROWS = -3  # of z [*, i, j, c]
SEGMENT = 2**28  # bytes allocated at once: torch rounds pinned memory up to a power of two


class HostTensor(Tensor):
    """z [*, i, j, c] in host memory, zeros at first; its shape, dtype and device are those of what `fetch` returns.

    For a CUDA device it lies in pinned memory, and travels on streams of its own.  For a CPU it lies in a temporary
    file without a name, in the system's folder for these (TMPDIR), which the system reads and writes as it has memory.
    On "meta" it has a shape alone.

    It lies in square tiles, one behind another, row of tiles after row of tiles.  What travels are bands of tiles:
    those of some rows are one piece of memory, those of some columns as many as there are tiles, none with a gap.  On
    the device a band is rearranged; so rows and columns that fill whole bands travel fastest, as the wire allows.
    No operation but `fetch` and `store` takes it: each would bring all of it to the device.
    Errors: UserError where the folder has not as much space.
    """

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, tile: int) -> "HostTensor":
        return wrapper_tensor(cls, torch.Size(shape), dtype, device)

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, tile: int) -> None:
        """tile: rows and columns of a tile, and so of a band."""
        *leading, rows, columns, channels = shape
        self._edge, self._slot = tile, tile * tile * channels  # numbers of a tile; the last ones have room to spare
        self._leading, self._down, self._across = math.prod(leading), -(-rows // tile), -(-columns // tile)
        self._per_segment = max(1, SEGMENT // max(1, self._slot * dtype.itemsize))  # tiles
        on_gpu = device.type == "cuda"
        self._two = backend(self) == "triton"  # bands are on the device, also of a GPU that "meta" stands for
        self._in, self._out = (torch.cuda.Stream(device) if on_gpu else None for _ in range(2))
        self._segments = [] if device.type == "meta" else self._allocate()
        self._slots = [slot for segment in self._segments for slot in segment.split(self._slot)] if self._two else []

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"z lies in host memory, so {func} cannot read it whole: fetch its rows (warpfold/host.py)")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HostTensor({list(self.shape)}, {self.dtype}, for {self.device})"

    def __deepcopy__(self, memo: Any) -> "HostTensor":
        raise RuntimeError("z lies in host memory, where there is one of it alone")

    def _allocate(self) -> list[Tensor]:
        """Return memory for all tiles, in segments of whole ones; of a CPU in one."""
        numbers, each = self._leading * self._down * self._across * self._slot, self._per_segment * self._slot
        if self.device.type != "cuda":
            memory = in_file(numbers, self.dtype, "plan.offload")
            return list(memory.split(max(each, 1))) if self._two else [memory]
        sizes = [min(each, numbers - start) for start in range(0, numbers, each)]
        return [torch.zeros(size, dtype=self.dtype, pin_memory=True) for size in sizes]

    def _band(self, number: int, axis: int, read: bool = True) -> Tensor:
        """Return a band [*, tiles, i, j, c]: of a CPU the memory itself, else a copy; not read: memory for one."""
        edge, shape = self._edge, (self._leading, self._down, self._across)
        if not self._two:
            return self._segments[0].view(*shape, edge, edge, self.shape[-1]).select(1 if axis == ROWS else 2, number)
        tiles = self._across if axis == ROWS else self._down
        band = torch.empty((self._leading, tiles, edge, edge, self.shape[-1]), dtype=self.dtype, device=self.device)
        if read and self._segments:
            there, here = self._pieces(band, number, axis)
            torch._foreach_copy_(here, there, non_blocking=True)
        return band

    def _pieces(self, band: Tensor, number: int, axis: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the pieces of memory, without gaps, in which a band lies in host memory and here, one for one."""
        here = band.view(self._leading, -1, self._slot)
        if axis != ROWS:
            count = self._down * self._across
            slots = [slot for lead in range(self._leading)
                     for slot in self._slots[lead * count + number : (lead + 1) * count : self._across]]  # fmt: skip
            return slots, list(here.flatten(0, 1).unbind())
        there, parts, per = list[Tensor](), list[Tensor](), self._per_segment
        for lead in range(self._leading):
            first = (lead * self._down + number) * self._across
            at, end = first, first + self._across
            while at < end:  # a row of tiles may go on in the next segment
                stop = min(end, (at // per + 1) * per)
                inside = slice(at % per * self._slot, (at % per + stop - at) * self._slot)
                there.append(self._segments[at // per][inside])
                parts.append(here[lead, at - first : stop - first].flatten())
                at = stop
        return there, parts

    def _matching(
        self, band: Tensor, number: int, part: slice, block: Tensor, axis: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of the same numbers, in a band of tiles and in a block [*, i, j, c] of some rows or columns."""
        edge, low = self._edge, number * self._edge
        some = slice(max(part.start, low), min(part.stop, low + edge))
        if axis == ROWS:
            tiles = band[:, :, some.start - low : some.stop - low].transpose(1, 2)  # [*, i, tiles, j, c]
            here, along = block[:, some.start - part.start : some.stop - part.start], 2
        else:
            tiles = band[:, :, :, some.start - low : some.stop - low]  # [*, tiles, i, j, c]
            here, along = block[:, :, some.start - part.start : some.stop - part.start], 1
        full, rest = divmod(here.shape[along], edge)
        if full:
            yield tiles.narrow(along, 0, full), here.narrow(along, 0, full * edge).unflatten(along, (full, edge))
        if rest:  # of the last tile
            yield tiles.select(along, full).narrow(along, 0, rest), here.narrow(along, full * edge, rest)

    def _start(self, part: slice, axis: int) -> Upload:
        """Begin to copy some rows or columns to the device."""
        shape = list(self.shape)
        shape[axis] = part.stop - part.start
        with torch.cuda.stream(self._in):  # nothing without a stream
            block = torch.empty(shape, dtype=self.dtype, device=self.device)
            for number in self._bands(part):
                band = self._band(number, axis)
                for tiles, here in self._matching(band, number, part, block.view(self._leading, *shape[-3:]), axis):
                    here.copy_(tiles)
            return Upload(block, None if self._in is None else self._in.record_event())

    def _bands(self, part: slice) -> range:
        """Return in which bands some rows or columns lie; on "meta" a CPU has none."""
        return range(part.start // self._edge, -(-part.stop // self._edge)) if self._segments or self._two else range(0)

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
        new = new.detach().to(self.dtype).expand(*self.shape[:-3], *new.shape[-3:])
        new = new.reshape(self._leading, *new.shape[-3:])
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            for number in self._bands(part):
                low, high = number * self._edge, min((number + 1) * self._edge, self.shape[axis])
                band = self._band(number, axis, read=part.start > low or part.stop < high)  # where not all of it is new
                for tiles, here in self._matching(band, number, part, new, axis):
                    tiles.copy_(here)
                if self._two and self._segments:
                    there, pieces = self._pieces(band, number, axis)
                    torch._foreach_copy_(there, pieces, non_blocking=True)
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
