"""Gates, and what ends a gated attention, on a CPU: block by block, so that intermediate results stay in cache."""

import torch
from torch import Tensor

from warpfold.ops.cpu import noise
from warpfold.ops.cpu.blocks import accumulate, blocks, gate_values, put, rows, writable
from warpfold.ops.dispatch import Operands
from warpfold.ops.tensors import accumulation_dtype, empty_like


def gate(t: Operands) -> Tensor:
    """Compute warpfold::gate."""
    y = empty_like(t.x)
    for xb, gb, yb in blocks(t.x, t.x, t.g, y):
        torch.mul(gate_values(gb), xb, out=yb)
    return y


def gate_backward(t: Operands) -> tuple[Tensor, Tensor]:
    """Compute warpfold::gate_backward."""
    dx, dg = empty_like(t.x), empty_like(t.g)
    for xb, gb, db, dxb, dgb in blocks(t.x, t.x, t.g, t.grad, dx, dg):
        s = gate_values(gb)
        torch.mul(db, s, out=dxb)
        # dg = grad x s (1 - s) = dx x (1 - s)
        torch.mul(dxb * xb, s.neg_().add_(1), out=dgb)
    return dx, dg


def gated_linear_residual(t: Operands) -> Tensor:
    """Compute warpfold::gated_linear_residual."""
    x = t.x
    f = drawn_factors(x, t)
    y, w = empty_like(x), t.weight.to(x.dtype).t()
    b = w.new_zeros(w.shape[1]) if t.bias is None else t.bias.to(x.dtype)
    for xb, ob, gb, yb, fb in blocks(x, x, t.o, t.g, y, x if f is None else f):
        gated = gate_values(gb).mul_(ob)
        results = writable(yb)
        if f is None:
            torch.add(rows(xb), b, out=results).addmm_(rows(gated), w)
        else:
            torch.addmm(b, rows(gated), w, out=results)
            results.mul_(rows(fb)).add_(rows(xb))
        put(yb, results)
    return y


def gated_linear_residual_backward(t: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::gated_linear_residual_backward."""
    grad, weight = t.grad, t.weight
    f = drawn_factors(grad, t)
    do, dg, w = empty_like(t.o), empty_like(t.g), weight.to(grad.dtype)
    acc = torch.float64 if weight.dtype == torch.float64 or grad.dtype == torch.float64 else torch.float32
    dweight = weight.new_zeros(weight.shape, dtype=acc)
    dbias = weight.new_zeros(0 if t.bias is None else len(t.bias), dtype=acc)
    for db, ob, gb, dob, dgb, fb in blocks(t.o, grad, t.o, t.g, do, dg, grad if f is None else f):
        dx = rows(db) if f is None else rows(db * fb)
        s, os = gate_values(rows(gb)), rows(ob)
        accumulate(dweight, dx, s * os)
        if t.bias is not None:
            dbias += dx.sum(0, dtype=acc)
        dgated = torch.mm(dx, w)
        put(dob, dgated * s)
        put(dgb, dgated.mul_(os).mul_(s).mul_(s.neg_().add_(1)))
    kept = accumulation_dtype(weight)
    return do, dg, dweight.to(kept), dbias.to(kept)


def drawn_factors(x: Tensor, t: Operands) -> Tensor | None:
    """Return the factors for x, of its shape: those given, or drawn, all at once: most share a draw."""
    factors: Tensor | None = t.factors
    if t.key is not None:
        shape = [1 if stride == 0 else size for size, stride in zip(x.shape, t.strides)]
        factors = noise.dropout_factors(t.but(shape=shape, dtype=x.dtype))
    return None if factors is None else factors.to(x.dtype).expand(x.shape)
