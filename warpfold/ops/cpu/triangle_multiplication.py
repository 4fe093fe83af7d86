"""Triangle multiplication on a CPU."""

from typing import Any

import torch
from torch import Tensor

from warpfold.ops.cpu.gate import _factors, gate, gate_backward
from warpfold.ops.cpu.norm import norm_linear, norm_linear_backward
from warpfold.ops.cpu.triangle import triangle_factor, triangle_factor_backward
from warpfold.ops.norm import empty_projected
from warpfold.ops.tensors import accumulation_dtype
from warpfold.ops.triangle_multiplication import split_projections


def triangle_multiplication(
    x: Tensor,
    mask: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_norm_weight: Tensor,
    out_norm_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor | None,
    outgoing: bool,
    fused: bool,
    *more: Any,
) -> tuple[Tensor, ...]:
    """Compute warpfold::triangle_multiplication."""
    *factor_operands, eps, kept = more
    y, mean, scale = norm_linear(x, norm_weight, norm_bias, weight, bias, eps)
    ya, ga, yb, gb, g = split_projections(y, out_weight.shape[1], fused)
    a, b = triangle_factor(ya, ga, mask), triangle_factor(yb, gb, mask)
    product = a @ b.mT if outgoing else b.mT @ a
    n, out_mean, out_scale = norm_linear(
        product.movedim(-3, -1), out_norm_weight, out_norm_bias, out_weight, out_bias, eps
    )
    dx = gate(n, g)
    factors = _factors(x, *factor_operands)
    if factors is not None:
        dx = dx * factors
    out = torch.empty_like(x).copy_(x + dx)
    if not kept:
        return out, *(x.new_empty(0) for _ in range(7))
    return out, a, b, product, mean, scale, out_mean, out_scale


def triangle_multiplication_backward(
    grad: Tensor,
    x: Tensor,
    mask: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_norm_weight: Tensor,
    out_norm_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    product: Tensor,
    mean: Tensor,
    scale: Tensor,
    out_mean: Tensor,
    out_scale: Tensor,
    *more: Any,
) -> tuple[Tensor, ...]:
    """Compute warpfold::triangle_multiplication_backward."""
    *factor_operands, outgoing, fused = more
    y, _, _ = norm_linear(x, norm_weight, norm_bias, weight, bias, 1e-5)
    ya, ga, yb, gb, g = split_projections(y, out_weight.shape[1], fused)
    p = product.movedim(-3, -1)
    n, _, _ = norm_linear(p, out_norm_weight, out_norm_bias, out_weight, out_bias, 1e-5)
    factors = _factors(grad, *factor_operands)
    dn, dg = gate_backward(grad if factors is None else grad * factors, n, g)
    dp, *of_out = norm_linear_backward(dn, p, out_norm_weight, out_norm_bias, out_weight, out_bias, out_mean, out_scale)
    dp = dp.movedim(-1, -3).contiguous()
    da, db = (dp @ b, dp.mT @ a) if outgoing else (b @ dp, a @ dp.mT)
    dya, dga = triangle_factor_backward(da, ya, ga, mask)
    dyb, dgb = triangle_factor_backward(db, yb, gb, mask)
    dy = empty_projected(x, weight.shape[0])
    torch.cat([dya, dyb, dga, dgb, dg] if fused else [dya, dga, dyb, dgb, dg], -1, out=dy)
    dx, *of_in = norm_linear_backward(dy, x, norm_weight, norm_bias, weight, bias, mean, scale)
    return dx.add_(grad), *(t.to(accumulation_dtype(t)) for t in (*of_in, *of_out))
