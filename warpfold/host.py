"""A pair representation in host memory, of which rows or columns are copied to the device and back.

`fetch`, `store` and `fetch_each` also accept ordinary tensors, without a copy. Callers need not know where z is.
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
# Bytes that are allocated at once: torch rounds pinned memory up to a power of two.
SEGMENT = 2**28


class HostTensor(Tensor):
    """z [*, i, j, c] in host memory, initialised with zeros. Its shape, dtype and device are those of fetched tensors.

    For a CUDA device the memory is pinned, and copies use separate streams. For a CPU it is an unnamed temporary file
    in TMPDIR, which the operating system pages in and out. On "meta" there is only a shape.

    The memory consists of square tiles in row-major order. Copies transfer bands of tiles. A band of rows is
    contiguous, and a band of columns has one contiguous range per tile. Bands are rearranged on the device. Rows and
    columns that fill complete bands are therefore copied at the full bandwidth of the link. Only `fetch` and `store`
    accept a HostTensor, because any other operation would copy all of it to the device.
    Raises UserError if the folder has too little space.
    """

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, tile: int) -> "HostTensor":
        return wrapper_tensor(cls, torch.Size(shape), dtype, device)

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, tile: int) -> None:
        """tile: rows and columns of a tile, and thus of a band."""
        *leading, rows, columns, channels = shape
        # Elements of a tile. The last tiles are padded.
        self._edge, self._slot = tile, tile * tile * channels
        self._leading, self._down, self._across = math.prod(leading), -(-rows // tile), -(-columns // tile)
        # Tiles in a segment.
        self._per_segment = max(1, SEGMENT // max(1, self._slot * dtype.itemsize))
        on_gpu = device.type == "cuda"
        # Whether bands are copied to another device, which may be a GPU that "meta" represents.
        self._two = backend(self) == "triton"
        self._in, self._out = (torch.cuda.Stream(device) if on_gpu else None for _ in range(2))
        self._segments = [] if device.type == "meta" else self._allocate()
        self._slots = [slot for segment in self._segments for slot in segment.split(self._slot)] if self._two else []

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"HostTensor: {func} cannot read z, which is in host memory. Fetch its rows (warpfold/host.py)."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HostTensor({list(self.shape)}, {self.dtype}, for {self.device})"

    def __deepcopy__(self, memo: Any) -> "HostTensor":
        raise RuntimeError("HostTensor: it cannot be copied")

    def _allocate(self) -> list[Tensor]:
        """Allocate memory for all tiles, in segments of complete tiles; for a CPU, in a single segment."""
        numbers, chunk = self._leading * self._down * self._across * self._slot, self._per_segment * self._slot
        if self.device.type != "cuda":
            memory = in_file(numbers, self.dtype, "plan.offload")
            return list(memory.split(max(chunk, 1))) if self._two else [memory]
        sizes = [min(chunk, numbers - start) for start in range(0, numbers, chunk)]
        return [torch.zeros(size, dtype=self.dtype, pin_memory=True) for size in sizes]

    def _band(self, number: int, axis: int, read: bool = True) -> Tensor:
        """Return a band [*, tiles, i, j, c]: a view for a CPU, otherwise a copy on the device.

        read: otherwise the copy is uninitialised.
        """
        edge, shape = self._edge, (self._leading, self._down, self._across)
        if not self._two:
            return self._segments[0].view(*shape, edge, edge, self.shape[-1]).select(1 if axis == ROWS else 2, number)
        tiles = self._across if axis == ROWS else self._down
        band = torch.empty((self._leading, tiles, edge, edge, self.shape[-1]), dtype=self.dtype, device=self.device)
        if read and self._segments:
            host_ranges, device_ranges = self._pieces(band, number, axis)
            torch._foreach_copy_(device_ranges, host_ranges, non_blocking=True)
        return band

    def _pieces(self, band: Tensor, number: int, axis: int) -> tuple[list[Tensor], list[Tensor]]:
        """List the contiguous ranges of a band in host memory, and the corresponding ranges on the device."""
        device_slots = band.view(self._leading, -1, self._slot)
        if axis != ROWS:
            count = self._down * self._across
            slots = [slot for lead in range(self._leading)
                     for slot in self._slots[lead * count + number : (lead + 1) * count : self._across]]  # fmt: skip
            return slots, list(device_slots.flatten(0, 1).unbind())
        host_ranges, parts, per = list[Tensor](), list[Tensor](), self._per_segment
        for lead in range(self._leading):
            first = (lead * self._down + number) * self._across
            at, end = first, first + self._across
            # A row of tiles may continue in the next segment.
            while at < end:
                stop = min(end, (at // per + 1) * per)
                inside = slice(at % per * self._slot, (at % per + stop - at) * self._slot)
                host_ranges.append(self._segments[at // per][inside])
                parts.append(device_slots[lead, at - first : stop - first].flatten())
                at = stop
        return host_ranges, parts

    def _matching(
        self, band: Tensor, number: int, part: slice, block: Tensor, axis: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield corresponding views in a band of tiles and in a block [*, i, j, c] of some rows or columns."""
        edge, low = self._edge, number * self._edge
        overlap = slice(max(part.start, low), min(part.stop, low + edge))
        if axis == ROWS:
            # [*, i, tiles, j, c]
            tiles = band[:, :, overlap.start - low : overlap.stop - low].transpose(1, 2)
            block_part, along = block[:, overlap.start - part.start : overlap.stop - part.start], 2
        else:
            # [*, tiles, i, j, c]
            tiles = band[:, :, :, overlap.start - low : overlap.stop - low]
            block_part, along = block[:, :, overlap.start - part.start : overlap.stop - part.start], 1
        full, remainder = divmod(block_part.shape[along], edge)
        if full:
            yield tiles.narrow(along, 0, full), block_part.narrow(along, 0, full * edge).unflatten(along, (full, edge))
        if remainder:
            # The last tile is not full.
            yield (
                tiles.select(along, full).narrow(along, 0, remainder),
                block_part.narrow(along, full * edge, remainder),
            )

    def _start(self, part: slice, axis: int) -> Upload:
        """Start to copy some rows or columns to the device."""
        shape = list(self.shape)
        shape[axis] = part.stop - part.start
        # No effect without a stream.
        with torch.cuda.stream(self._in):
            block = torch.empty(shape, dtype=self.dtype, device=self.device)
            for number in self._bands(part):
                band = self._band(number, axis)
                for tiles, block_part in self._matching(
                    band, number, part, block.view(self._leading, *shape[-3:]), axis
                ):
                    block_part.copy_(tiles)
            return Upload(block, None if self._in is None else self._in.record_event())

    def _bands(self, part: slice) -> range:
        """Return the indices of the bands that contain some rows or columns; none for a CPU on "meta"."""
        return range(part.start // self._edge, -(-part.stop // self._edge)) if self._segments or self._two else range(0)

    def _settle(self) -> None:
        """Order later fetches after all earlier stores."""
        if self._in is not None and self._out is not None:
            self._in.wait_stream(self._out)

    def fetch(self, part: slice, axis: int = ROWS) -> Tensor:
        """Copy some rows (or columns) to the device."""
        self._settle()
        return self._start(part, axis).wait()

    def fetch_each(self, parts: Sequence[slice], axis: int = ROWS) -> Iterator[tuple[slice, Tensor]]:
        """Yield each part with its copy on the device, while the next part is being copied.

        Within the loop, a part may be stored after it, or a later part, was yielded.
        """
        self._settle()
        ahead: Upload | None = None
        for index, part in enumerate(parts):
            block = (ahead or self._start(part, axis)).wait()
            ahead = None
            if self._two and index + 1 < len(parts):
                ahead = self._start(parts[index + 1], axis)
            yield part, block

    def store(self, part: slice, new: Tensor, axis: int = ROWS) -> None:
        """Write some rows (or columns); on a GPU, asynchronously after the work on the current stream."""
        new = new.detach().to(self.dtype).expand(*self.shape[:-3], *new.shape[-3:])
        new = new.reshape(self._leading, *new.shape[-3:])
        # The kernels that compute `new` are queued on the current stream.
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            for number in self._bands(part):
                low, high = number * self._edge, min((number + 1) * self._edge, self.shape[axis])
                # Read the band first if it is not overwritten completely.
                band = self._band(number, axis, read=part.start > low or part.stop < high)
                for tiles, block_part in self._matching(band, number, part, new, axis):
                    tiles.copy_(block_part)
                if self._two and self._segments:
                    host_ranges, pieces = self._pieces(band, number, axis)
                    torch._foreach_copy_(host_ranges, pieces, non_blocking=True)
        # The memory of `new` must not be reused before the copy is done.
        if self._out is not None:
            new.record_stream(self._out)


def in_file(numbers: int, dtype: torch.dtype, asked_by: str) -> Tensor:
    """Allocate a tensor [numbers] in a temporary file, which exists as long as the tensor.

    asked_by: the setting that requires the file. Raises UserError if the folder has too little space.
    """
    size = max(numbers, 1) * dtype.itemsize
    try:
        with tempfile.TemporaryFile(prefix="warpfold-") as file:
            if hasattr(os, "posix_fallocate"):
                # Reserve the space now: later a full disk would kill the process.
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            memory = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise UserError(
            f"{asked_by}: cannot create a file of {size / 1e9:.1f} GB in {tempfile.gettempdir()} ({error.strerror}). "
            f"Set TMPDIR to a folder with more space, or do without {asked_by}."
        ) from error
    return torch.frombuffer(memory, dtype=dtype)[:numbers]


def fetch(x: Tensor, part: slice, axis: int = ROWS) -> Tensor:
    """Return some rows (or columns) of x on the compute device; a view if x is an ordinary tensor."""
    if isinstance(x, HostTensor):
        return x.fetch(part, axis)
    return x.narrow(axis, part.start, part.stop - part.start)


def fetch_each(x: Tensor, parts: Sequence[slice], axis: int = ROWS) -> Iterator[tuple[slice, Tensor]]:
    """Yield each part of x on the compute device; from host memory, the next part is copied meanwhile."""
    if isinstance(x, HostTensor):
        yield from x.fetch_each(parts, axis)
        return
    for part in parts:
        yield part, fetch(x, part, axis)


def store(x: Tensor, part: slice, new: Tensor, axis: int = ROWS) -> None:
    """Write some rows (or columns) of x; nothing is copied if `new` is already a view of this part of x."""
    if isinstance(x, HostTensor):
        x.store(part, new, axis)
        return
    stored = fetch(x, part, axis)
    same = new.untyped_storage()._cdata == stored.untyped_storage()._cdata
    if not (same and new.storage_offset() == stored.storage_offset() and new.stride() == stored.stride()):
        stored.copy_(new)
