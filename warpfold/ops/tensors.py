"""Helpers for layers and losses: large matrices in blocks, table lookups with deterministic gradients, exact products.

TF32 has a mantissa of ten bits.  This is enough for activations, but it would move a coordinate 100 angstrom from the
centre by 0.05 angstrom.  torch's setting is global to the process, and a backward pass reads it when it runs, perhaps
in a thread of autograd.  Therefore an exact product, which `plan.tf32` must not affect, sets it in both passes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from warpfold.ops.dispatch import accumulation_dtype, exact_products

PAIRS = 1 << 27  # entries per block (`in_blocks`)
ONES = 1 << 25  # one-hot entries per block (`sums_by_row`)


def one_hot(codes: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Encode codes [*] as one-hot vectors [*, classes]; codes out of range become zeros.

    torch's one_hot validates the codes on the host and returns 8-byte integers.
    """
    return (codes[..., None] == torch.arange(classes, device=codes.device)).to(dtype)


def in_blocks(of_rows: Callable[[slice], tuple[Tensor, ...]], rows: int, columns: int) -> list[tuple[Tensor, ...]]:
    """Apply `of_rows` to a matrix in blocks of rows with at most `PAIRS` entries each.

    If there are several blocks, the backward pass recomputes each, so that only one is in memory at a time.
    """
    size = max(PAIRS // max(columns, 1), 1)
    if rows <= size:
        return [of_rows(slice(0, rows))]
    blocks = (slice(start, start + size) for start in range(0, rows, size))
    return [checkpoint(of_rows, block, use_reentrant=False, preserve_rng_state=False) for block in blocks]


def take_rows(table: Tensor, index: Tensor) -> Tensor:
    """Return table[index] with a deterministic gradient on every device: table [K, c], index int64 [*] -> [*, c]."""
    selected: Tensor = _TakeRows.apply(table, index)
    return selected


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
        # index_add_ on a CPU adds in order and is faster than a product.
        if grad.device.type == "cpu":
            sums = torch.zeros(ctx.rows, flat.shape[-1], dtype=accumulation_dtype(grad))
            return sums.index_add_(0, index, flat.to(sums.dtype)).to(grad.dtype), None
        return sums_by_row(flat, index, ctx.rows).to(grad.dtype), None


def sums_by_row(x: Tensor, index: Tensor, rows: int) -> Tensor:
    """Sum rows of x [n, c] by index int64 [n] deterministically: [rows, c], in fp32 at least.

    This multiplies by blocks of a one-hot matrix, because index_add_ on a GPU has no fixed order or sorts the indices.
    """
    row_numbers = torch.arange(rows, device=x.device)[:, None]
    sums = x.new_zeros(rows, x.shape[-1], dtype=accumulation_dtype(x))
    for part, at in zip(x.split(max(ONES // rows, 1)), index.split(max(ONES // rows, 1))):
        sums.addmm_((at == row_numbers).to(sums.dtype), part.to(sums.dtype))
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
    """Compute a @ b + added without TF32: a [*, n, k], b [*, k, m], added [*, n, m] or None.

    With `added`, the leading axes of all three must be equal, and there must be at least one.
    """
    product: Tensor = _ExactMatmul.apply(a, b, added)
    return product


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W^T + b without TF32: x [*, n, c], weight [o, c], bias [o], all of one dtype."""
    projected: Tensor = _ExactLinear.apply(x, weight, bias)
    return projected
