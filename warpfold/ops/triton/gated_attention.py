"""gated_attention on a GPU: the kernels of its parts, one after another, over memory that they share.

Forward three: norm and projection, attention, and what ends it.  Backward the same three the other way round, over one
gradient dy of the projection: each writes its part of dy where the projection's own backward pass reads it, so nothing
is joined, copied or filled with zeros, and the last adds the gradient that x has as the residual.

At N = 256 in half precision, 128 channels, 4 heads 32 wide: forward moves x 17 MB, y written and read 2 x 69, o written
and read 2 x 17, x and out 34, in all 223 MB, 67 us at 3.35 TB/s; backward some 480 MB, of which dy, written once and
read twice, is 208.  The parts called one by one join their gradients in between: 138 MB more.
"""

from collections.abc import Sequence

from torch import Tensor

from warpfold.ops.gated_attention import batched, empty_bias, empty_lse, parts
from warpfold.ops.norm import empty_projected
from warpfold.ops.triton import attention, gated_linear_residual
from warpfold.ops.triton.norm_linear import norm_linear, norm_linear_backward


def gated_attention(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    gate_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    mask: Tensor,
    bias: Tensor | None,
    heads: int,
    factors: Tensor | None,
    key: Tensor | None,
    strides: Sequence[int],
    offset: int,
    stream: int,
    rate: float,
    eps: float,
    residual: bool,
    kept: bool,
) -> tuple[Tensor, ...]:
    """Compute warpfold::gated_attention."""
    y, mean, scale = norm_linear(x, norm_weight, norm_bias, weight, gate_bias, eps)
    o, lse = empty_projected(x, out_weight.shape[1]), empty_lse(x, heads)
    g, *vectors, all_bias = parts(y, out_weight.shape[1], heads, bias)
    q, k, v, out = (batched(t, 5) for t in (*vectors, o.unflatten(-1, (heads, -1))))
    all_bias = None if all_bias is None else batched(all_bias, 4)
    attention.forward(q, k, v, batched(mask, 3), all_bias, out, batched(lse, 4))
    end = out_weight, out_bias, factors, key, strides, offset, stream, rate
    new = gated_linear_residual.gated_linear_residual(x, o, g, *end, residual)
    if not kept:
        return new, *(x.new_empty(0) for _ in range(5))
    return new, y, mean, scale, o, lse


def gated_attention_backward(
    grad: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
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
    factors: Tensor | None,
    key: Tensor | None,
    strides: Sequence[int],
    offset: int,
    stream: int,
    rate: float,
    heads: int,
    residual: bool,
    bias_wanted: bool,
) -> tuple[Tensor, ...]:
    """Compute warpfold::gated_attention_backward."""
    inner, given = out_weight.shape[1], empty_bias(x, bias, bias_wanted)
    dy, do = empty_projected(x, weight.shape[0]), empty_projected(x, inner)
    g, *vectors, all_bias = parts(y, inner, heads, bias)
    dg, *gradients, dbias = parts(dy, inner, heads, given if bias_wanted else None)
    end = out_weight, out_bias, factors, key, strides, offset, stream, rate
    of_end = gated_linear_residual.backward(do, dg, grad, attended, g, *end)
    do, o = (t.unflatten(-1, (heads, -1)) for t in (do, attended))
    do, q, k, v, o, dq, dk, dv = (batched(t, 5) for t in (do, *vectors, o, *gradients))
    all_bias, dbias = (None if t is None else batched(t, 4) for t in (all_bias, dbias))
    attention.backward(do, q, k, v, batched(mask, 3), all_bias, o, batched(lse, 4), dq, dk, dv, dbias)
    beside = grad if residual else None
    of_norm = norm_linear_backward(dy, x, norm_weight, norm_bias, weight, gate_bias, mean, scale, beside, (of_end,))
    return *of_norm, *of_end.results, given
