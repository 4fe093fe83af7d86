"""Gates, and the tail of a gated attention, on a CPU: block by block, so that what lies between stays in cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from warpfold.ops.cpu import noise
from warpfold.ops.cpu.blocks import blocks, opening, put, room, rows
from warpfold.ops.cpu.norm import accumulate
from warpfold.ops.library.attention import empty_like


def gate(x: Tensor, g: Tensor) -> Tensor:
    """warpfold::gate."""
    y = empty_like(x)
    for xb, gb, yb in blocks(x, x, g, y):
        torch.mul(opening(gb), xb, out=yb)
    return y


def gate_backward(grad: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """warpfold::gate_backward."""
    dx, dg = empty_like(x), empty_like(g)
    for xb, gb, db, dxb, dgb in blocks(x, x, g, grad, dx, dg):
        s = opening(gb)
        torch.mul(db, s, out=dxb)
        # dg = grad x s (1 - s) = dx x (1 - s)
        torch.mul(dxb * xb, s.neg_().add_(1), out=dgb)
    return dx, dg


def gated_linear_residual(
    x: Tensor,
    o: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor,
    factors: Tensor | None,
    key: Tensor | None,
    strides: Sequence[int],
    offset: int,
    stream: int,
    rate: float,
) -> Tensor:
    """warpfold::tail."""
    if key is not None:
        factors = _draw(x, key, strides, offset, stream, rate)
    y, w, b = empty_like(x), weight.to(x.dtype).t(), bias.to(x.dtype)
    f = x if factors is None else factors.to(x.dtype).expand(x.shape)
    for xb, ob, gb, yb, fb in blocks(x, x, o, g, y, f):
        gated = opening(gb).mul_(ob)
        results = room(yb)
        if factors is None:
            torch.add(rows(xb), b, out=results).addmm_(rows(gated), w)
        else:
            torch.addmm(b, rows(gated), w, out=results)
            results.mul_(rows(fb)).add_(rows(xb))
        put(yb, results)
    return y


def gated_linear_residual_backward(
    grad: Tensor,
    o: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor,
    factors: Tensor | None,
    key: Tensor | None,
    strides: Sequence[int],
    offset: int,
    stream: int,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """warpfold::tail_backward."""
    if key is not None:
        factors = _draw(grad, key, strides, offset, stream, rate)
    do, dg, narrow = empty_like(o), empty_like(g), weight.to(grad.dtype)
    wide = torch.float64 if weight.dtype == torch.float64 or grad.dtype == torch.float64 else torch.float32
    dweight, dbias = weight.new_zeros(weight.shape, dtype=wide), bias.new_zeros(bias.shape, dtype=wide)
    f = grad if factors is None else factors.to(grad.dtype).expand(grad.shape)
    for db, ob, gb, dob, dgb, fb in blocks(o, grad, o, g, do, dg, f):
        dx = rows(db) if factors is None else rows(db * fb)
        s, os = opening(rows(gb)), rows(ob)
        accumulate(dweight, dx, s * os)
        dbias += dx.sum(0, dtype=wide)
        dgated = torch.mm(dx, narrow)
        put(dob, dgated * s)
        put(dgb, dgated.mul_(os).mul_(s).mul_(s.neg_().add_(1)))
    return do, dg, dweight.to(weight.dtype), dbias.to(bias.dtype)


def _draw(x: Tensor, key: Tensor, strides: Sequence[int], offset: int, stream: int, rate: float) -> Tensor:
    """The factors for x, of size 1 where a draw is shared: so few beside x that they are drawn all at once."""
    shape = [1 if stride == 0 else size for size, stride in zip(x.shape, strides)]
    return noise.dropout_factors(key, stream, rate, shape, strides, offset, x.dtype)
