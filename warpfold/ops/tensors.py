"""What operations ask of a tensor besides its shape: the dtype to compute in, the layout of what they return,
and how much of it is computed at a time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

PAIRS = 1 << 27  # entries of a matrix of pairs that are computed at a time (`in_blocks`)
ONES = 1 << 25  # entries of a one-hot matrix that exist at a time (`sums_by_row`)


def upcast_half(x: Tensor) -> Tensor:
    """Return x in fp32 if it has 16 bits, else x itself: for norms, softmax, frames, losses and logits."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over x, of its statistics and its logits: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def one_hot(codes: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Return codes [*] as one-hot vectors [*, classes]; zeros for a code that is none of them.

    Not torch's one_hot, which on a CPU reads the codes on the host, and makes integers of eight bytes.
    """
    return (codes[..., None] == torch.arange(classes, device=codes.device)).to(dtype)


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


def take_rows(table: Tensor, index: Tensor) -> Tensor:
    """Return table[index]: table [K, c], index int64 [*] -> [*, c]; its gradient repeats bit for bit on any device."""
    taken: Tensor = _TakeRows.apply(table, index)
    return taken


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(table)
        return torch.nn.functional.embedding(index, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        flat, index = grad.flatten(0, -2), index.flatten()
        if grad.device.type == "cpu":  # it adds in order, and faster than a product
            sums = torch.zeros(ctx.rows, flat.shape[-1], dtype=accumulation_dtype(grad))
            return sums.index_add_(0, index, flat.to(sums.dtype)).to(grad.dtype), None
        return sums_by_row(flat, index, ctx.rows).to(grad.dtype), None


def sums_by_row(x: Tensor, index: Tensor, rows: int) -> Tensor:
    """Return of x [n, c] the sums of those with each index int64 [n]: [rows, c], fp32 at least.

    As the product with a one-hot matrix, some of it at a time: a GPU adds to indices in no fixed order, or sorts them.
    """
    every = torch.arange(rows, device=x.device)[:, None]
    sums = x.new_zeros(rows, x.shape[-1], dtype=accumulation_dtype(x))
    for part, at in zip(x.split(max(ONES // rows, 1)), index.split(max(ONES // rows, 1))):
        sums.addmm_((at == every).to(sums.dtype), part.to(sums.dtype))
    return sums
