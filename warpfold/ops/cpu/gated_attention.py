"""Gated attention on a CPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from warpfold.ops.cpu.attention import attention, attention_backward
from warpfold.ops.cpu.gate import gated_linear_residual, gated_linear_residual_backward
from warpfold.ops.cpu.norm import norm_linear, norm_linear_backward
from warpfold.ops.norm import empty_projected
from warpfold.ops.tensors import accumulation_dtype


def gated_attention(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    gate_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    mask: Tensor,
    bias: Tensor | None,
    heads: int,
    *more: Any,
) -> tuple[Tensor, ...]:
    """Compute warpfold::gated_attention."""
    *factor_operands, eps, kept = more
    y, mean, scale = norm_linear(x, norm_weight, norm_bias, weight, gate_bias, eps)
    inner = out_weight.shape[1]
    o, (g, q, k, v, bias) = empty_projected(x, inner), _parts(y, inner, heads, bias)
    attended, lse = attention(_five(q, 3), _five(k, 3), _five(v, 3), _five(mask, 1), bias)
    o.copy_(attended.flatten(-2).view(o.shape))
    zeros = out_weight.new_zeros(out_weight.shape[0]) if out_bias is None else out_bias
    out = gated_linear_residual(x, o, g, out_weight, zeros, *factor_operands)
    if not kept:
        return out, *(x.new_empty(0) for _ in range(5))
    return out, y, mean, scale, o, lse.view(*x.shape[:-2], heads, x.shape[-2])


def gated_attention_backward(
    grad: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    gate_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    mask: Tensor,
    bias: Tensor | None,
    y: Tensor,
    mean: Tensor,
    scale: Tensor,
    attended: Tensor,
    lse: Tensor,
    *more: Any,
) -> tuple[Tensor, ...]:
    """Compute warpfold::gated_attention_backward."""
    *factor_operands, heads, bias_wanted = more
    inner = out_weight.shape[1]
    zeros = out_weight.new_zeros(out_weight.shape[0]) if out_bias is None else out_bias
    g, q, k, v, all_bias = _parts(y, inner, heads, bias)
    do, dg, dout_weight, dout_bias = gated_linear_residual_backward(
        grad, attended, g, out_weight, zeros, *factor_operands
    )
    dy = empty_projected(x, weight.shape[0])
    own = all_bias is not None and bias is None
    dq, dk, dv, dbias = attention_backward(
        _five(do.unflatten(-1, (heads, -1)), 3),
        _five(q, 3),
        _five(k, 3),
        _five(v, 3),
        _five(mask, 1),
        all_bias,
        _five(attended.unflatten(-1, (heads, -1)), 3),
        lse.reshape(-1, *lse.shape[-3:]),
        own or bias_wanted,
    )
    parts = [dg, *(t.flatten(-2).view(g.shape) for t in (dq, dk, dv))]
    if own:
        parts.append(dbias.movedim(1, -1).view(*x.shape[:-1], heads))
    torch.cat(parts, -1, out=dy)
    dx, dnw, dnb, dw, dgb = norm_linear_backward(dy, x, norm_weight, norm_bias, weight, gate_bias, mean, scale)
    bias_out = x.new_empty(0) if bias is None or not bias_wanted else dbias.view(bias.shape)
    results = dnw, dnb, dw, dgb, dout_weight, x.new_empty(0) if out_bias is None else dout_bias
    return dx.add_(grad), *(t.to(accumulation_dtype(t)) for t in results), bias_out


def _parts(y: Tensor, inner: int, heads: int, bias: Tensor | None) -> Any:
    g, q, k, v, own = y.split([inner] * 4 + [y.shape[-1] - 4 * inner], -1)
    bias = own.movedim(-1, -3) if own.shape[-1] else bias
    return (
        g,
        *(t.unflatten(-1, (heads, -1)) for t in (q, k, v)),
        None if bias is None else bias.reshape(-1, *bias.shape[-3:]),
    )


def _five(t: Tensor, own: int) -> Tensor:
    leading = t.shape[: t.dim() - own]
    return t.reshape(-1, leading[-1], *t.shape[len(leading) :])


_ = Sequence
