"""Blocks of positions: tensors [*, c] piece by piece, each small enough to stay in cache, in the order of memory."""

import itertools
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from warpfold.ops.dispatch import alike

POSITIONS = 2048  # of a block


def blocks(like: Tensor, *tensors: Tensor, size: int | None = None) -> Iterator[list[Tensor]]:
    """Yield the views of `tensors` for each block; the tensors share all axes but the last.

    A block has `size` positions (None: POSITIONS) or fewer, in the order in which those of `like` lie in memory.
    """
    ones = [axis for axis in range(like.dim() - 1) if like.shape[axis] == 1]
    axes = [axis for axis in range(like.dim() - 1) if like.shape[axis] != 1]
    order = sorted(axes, key=like.stride, reverse=True)
    turned = [t.permute(*ones, *order, t.dim() - 1)[(0,) * len(ones)] for t in tensors]
    for index in alike(_indices([like.shape[axis] for axis in order], size or POSITIONS)):
        yield [t[index] for t in turned]


def examples(x: Tensor) -> Iterator[tuple[int, ...]]:
    """Yield the index of each example among the leading axes of x [*, rows, length, c]."""
    return itertools.product(*(range(size) for size in x.shape[:-3]))


def row_slices(count: int, length: int, positions: int) -> Iterable[slice]:
    """Yield slices of `count` rows of this length that have about so many positions, or a row each."""
    size = max(1, positions // length)
    return alike(slice(start, min(start + size, count)) for start in range(0, count, size))


def rows(block: Tensor) -> Tensor:
    """Return a block [*, c] as [positions, c], to be read: a view, or a copy whose channels are contiguous."""
    flat = block.flatten(0, -2) if block.dim() > 1 else block[None]
    if flat.stride(-1) == 1:
        return flat
    # Two copies: the first reads long runs of memory, the second turns them round within the cache.
    return flat.t().contiguous().t().contiguous()


def writable(block: Tensor) -> Tensor:
    """Return memory for the results of a block, [positions, c]: the block itself if it lies so, else a new tensor that
    `put` copies to it."""
    flat = block.flatten(0, -2) if block.dim() > 1 else block[None]
    here = flat.data_ptr() == block.data_ptr() and flat.stride(-1) == 1
    return flat if here else flat.new_empty(flat.shape)


def gate_values(g: Tensor) -> Tensor:
    """Return sigmoid(g), contiguous.  Without `out`, torch takes five times as long where g is a slice."""
    return torch.sigmoid(g, out=g.new_empty(g.shape))


def put(block: Tensor, results: Tensor) -> None:
    """Write [positions, c] to the block, if `writable` did not give the block itself."""
    if results.data_ptr() != block.data_ptr():
        block.copy_(results.view(block.shape))


def accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a^T b to `total`, in place; `total` may have a wider dtype than a and b."""
    if total.dtype == a.dtype:
        total.addmm_(a.t(), b)
    else:
        total += a.t() @ b


def _indices(shape: list[int], size: int) -> Iterator[tuple[int | slice, ...]]:
    """Yield the indices of the blocks: the innermost axes whole, then a slice of the next."""
    inner = math.prod(shape[1:])
    if not shape or (inner <= size and shape[0] * inner <= size):
        yield ()
    elif inner > size:
        for i in range(shape[0]):
            for rest in _indices(shape[1:], size):
                yield (i, *rest)
    else:
        step = max(1, size // inner)
        for start in range(0, shape[0], step):
            yield (slice(start, start + step),)
