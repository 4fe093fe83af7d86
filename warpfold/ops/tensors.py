"""What operations ask of a tensor besides its shape: the dtype to compute in, the layout of what they return,
and how much of it is computed at a time."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

PAIRS = 1 << 27  # entries of a matrix of pairs that are computed at a time (`in_blocks`)


def upcast_half(x: Tensor) -> Tensor:
    """Return x in fp32 if it has 16 bits, else x itself: for norms, softmax, frames, losses and logits."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over x, of its statistics and its logits: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def empty_like(x: Tensor) -> Tensor:
    """Allocate a dense tensor of x's shape whose axes lie in memory in the order of x's.

    Not torch.empty_like, which makes a tensor in row-major order of one that is expanded or a slice.
    """
    order = sorted(range(x.dim()), key=lambda axis: x.stride(axis), reverse=True)
    back = [order.index(axis) for axis in range(x.dim())]
    return x.new_empty([x.shape[axis] for axis in order]).permute(back)


def empty_parameters(*parameters: Tensor | None) -> tuple[Tensor, ...]:
    """Allocate a contiguous tensor for the gradient of each of these, in fp32 at least: sums over all positions.

    For None, which is no parameter, one without numbers.
    """
    some = next(p for p in parameters if p is not None)
    given = (some.new_empty(0) if p is None else p for p in parameters)
    return tuple(p.new_empty(p.shape, dtype=accumulation_dtype(p)) for p in given)


def in_blocks(of_rows: Callable[[slice], tuple[Tensor, ...]], rows: int, columns: int) -> list[tuple[Tensor, ...]]:
    """Return what `of_rows` computes of a matrix, for blocks of its rows that have at most `PAIRS` entries each.

    Where there are several, the gradient computes each block again, so that no more than one is in memory.
    """
    size = max(PAIRS // max(columns, 1), 1)
    if rows <= size:
        return [of_rows(slice(0, rows))]
    blocks = (slice(start, start + size) for start in range(0, rows, size))
    return [checkpoint(of_rows, block, use_reentrant=False, preserve_rng_state=False) for block in blocks]
