"""What layers and losses ask of torch beyond it: parts of a large matrix, rows of a table, products that stay exact.

TF32 keeps ten bits of a mantissa.  That is enough for activations; a coordinate 100 angstrom from the centre would be
off by 0.05.  The setting is torch's and of the process, and a backward pass reads it when it runs, perhaps in a thread
of autograd: so an exact product, which `plan.tf32` does not reach, sets it in both passes itself.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from warpfold.ops.dispatch import accumulation_dtype, exact_products

PAIRS = 1 << 27  # entries of a matrix of pairs that are computed at a time (`in_blocks`)
ONES = 1 << 25  # entries of a one-hot matrix that exist at a time (`sums_by_row`)


def one_hot(codes: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Return codes [*] as one-hot vectors [*, classes]; zeros for a code that is none of them.

    Not torch's one_hot, which on a CPU reads the codes on the host, and makes integers of eight bytes.
    """
    return (codes[..., None] == torch.arange(classes, device=codes.device)).to(dtype)


def in_blocks(of_rows: Callable[[slice], tuple[Tensor, ...]], rows: int, columns: int) -> list[tuple[Tensor, ...]]:
    """Apply `of_rows` to a matrix, in blocks of rows that have at most `PAIRS` entries each.

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


class _ExactMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, added: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, b)
        with exact_products():
            if added is None:
                return a @ b
            flat = (x.flatten(0, -3) for x in (added, a, b))
            return torch.baddbmm(*flat).view(added.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (a, b), needed = gradients, ctx.saved_tensors, ctx.needs_input_grad
        with exact_products():
            return g @ b.mT if needed[0] else None, a.mT @ g if needed[1] else None, g if needed[2] else None


class _ExactLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        with exact_products():
            return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, weight), needed = gradients, ctx.saved_tensors, ctx.needs_input_grad
        rows = g.flatten(0, -2)
        with exact_products():
            of_x = g @ weight if needed[0] else None
            of_weight = rows.mT @ x.flatten(0, -2) if needed[1] else None
        return of_x, of_weight, rows.sum(0) if needed[2] else None


def exact_matmul(a: Tensor, b: Tensor, added: Tensor | None = None) -> Tensor:
    """Return a @ b, plus `added`: a [*, n, k], b [*, k, m], added [*, n, m], with the same first axes, one at least."""
    product: Tensor = _ExactMatmul.apply(a, b, added)
    return product


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b: x [*, n, c], weight [o, c], bias [o], of one dtype."""
    projected: Tensor = _ExactLinear.apply(x, weight, bias)
    return projected
