"""Gates, and what ends a gated attention, on a CPU: block by block, so that intermediate results stay in cache."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from warpfold.ops.cpu import noise
from warpfold.ops.cpu.blocks import accumulate, blocks, gate_values, put, rows, writable
from warpfold.ops.tensors import accumulation_dtype, empty_like


def gate(x: Tensor, g: Tensor) -> Tensor:
    """Compute warpfold::gate."""
    y = empty_like(x)
    for xb, gb, yb in blocks(x, x, g, y):
        torch.mul(gate_values(gb), xb, out=yb)
    return y


def gate_backward(grad: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Compute warpfold::gate_backward."""
    dx, dg = empty_like(x), empty_like(g)
    for xb, gb, db, dxb, dgb in blocks(x, x, g, grad, dx, dg):
        s = gate_values(gb)
        torch.mul(db, s, out=dxb)
        # dg = grad x s (1 - s) = dx x (1 - s)
        torch.mul(dxb * xb, s.neg_().add_(1), out=dgb)
    return dx, dg


def gated_linear_residual(
    x: Tensor, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None, *factor_operands: Any
) -> Tensor:
    """Compute warpfold::gated_linear_residual."""
    factors = drawn_factors(x, *factor_operands)
    y, w = empty_like(x), weight.to(x.dtype).t()
    b = w.new_zeros(w.shape[1]) if bias is None else bias.to(x.dtype)
    f = x if factors is None else factors.to(x.dtype).expand(x.shape)
    for xb, ob, gb, yb, fb in blocks(x, x, o, g, y, f):
        gated = gate_values(gb).mul_(ob)
        results = writable(yb)
        if factors is None:
            torch.add(rows(xb), b, out=results).addmm_(rows(gated), w)
        else:
            torch.addmm(b, rows(gated), w, out=results)
            results.mul_(rows(fb)).add_(rows(xb))
        put(yb, results)
    return y


def gated_linear_residual_backward(
    grad: Tensor, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None, *factor_operands: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::gated_linear_residual_backward."""
    factors = drawn_factors(grad, *factor_operands)
    do, dg, w = empty_like(o), empty_like(g), weight.to(grad.dtype)
    acc = torch.float64 if weight.dtype == torch.float64 or grad.dtype == torch.float64 else torch.float32
    dweight = weight.new_zeros(weight.shape, dtype=acc)
    dbias = weight.new_zeros(0 if bias is None else len(bias), dtype=acc)
    f = grad if factors is None else factors.to(grad.dtype).expand(grad.shape)
    for db, ob, gb, dob, dgb, fb in blocks(o, grad, o, g, do, dg, f):
        dx = rows(db) if factors is None else rows(db * fb)
        s, os = gate_values(rows(gb)), rows(ob)
        accumulate(dweight, dx, s * os)
        if bias is not None:
            dbias += dx.sum(0, dtype=acc)
        dgated = torch.mm(dx, w)
        put(dob, dgated * s)
        put(dgb, dgated.mul_(os).mul_(s).mul_(s.neg_().add_(1)))
    kept = accumulation_dtype(weight)
    return do, dg, dweight.to(kept), dbias.to(kept)


def drawn_factors(
    x: Tensor,
    factors: Tensor | None,
    key: Tensor | None,
    strides: Sequence[int],
    offset: int,
    stream: int,
    rate: float,
) -> Tensor | None:
    """Return the factors for x: those given, or drawn, of size 1 where a draw is shared: few enough to draw at once."""
    if key is None:
        return factors
    shape = [1 if stride == 0 else size for size, stride in zip(x.shape, strides)]
    return noise.dropout_factors(key, stream, rate, shape, strides, offset, x.dtype)
