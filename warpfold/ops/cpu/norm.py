"""Norms and the projections that follow them, on a CPU: block by block, so that the normalised rows stay in cache."""

import torch
from torch import Tensor

from warpfold.ops.cpu.blocks import accumulate, blocks, put, rows, writable
from warpfold.ops.dispatch import Operands
from warpfold.ops.norm import empty_projected, empty_statistics
from warpfold.ops.tensors import accumulation_dtype, empty_like

Projected = tuple[Tensor, Tensor | None, Tensor, Tensor | None]  # weight and bias of a norm and of its projection


def layer_norm(t: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Compute warpfold::layer_norm."""
    x = t.x
    y, (mean, scale) = empty_like(x), empty_statistics(x)
    w, b = t.weight.to(mean.dtype), None if t.bias is None else t.bias.to(mean.dtype)
    for xb, yb, mb, sb in blocks(x, x, y, mean[..., None], scale[..., None]):
        n, m, s = torch.native_layer_norm(rows(xb), x.shape[-1:], w, b, t.eps)
        for block, results in ((yb, n), (mb, m), (sb, s)):
            put(block, results)
    return y, mean, scale


def layer_norm_backward(t: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Compute warpfold::layer_norm_backward."""
    x = t.x
    dx, w = empty_like(x), t.weight.to(t.mean.dtype)
    dweight, dbias = torch.zeros_like(w), torch.zeros_like(w)
    for xb, dxb, gb, mb, sb in blocks(x, x, dx, t.grad, t.mean[..., None], t.scale[..., None]):
        g, xs, m, s = (rows(t).contiguous() for t in (gb, xb, mb, sb))  # torch's kernel reads past strides
        dxs, _, _ = torch.ops.aten.native_layer_norm_backward(g, xs, x.shape[-1:], m, s, w, w, [True, False, False])
        put(dxb, dxs)
        # Not by native_layer_norm_backward, which sums gradients of bf16 in bf16.
        dweight += (xs.to(m.dtype) - m).mul_(s).mul_(g).sum(0)
        dbias += g.sum(0, dtype=w.dtype)
    return dx, *(total.to(accumulation_dtype(t.weight)) for total in (dweight, dbias))  # type: ignore[return-value]


def norm_linear(t: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Compute warpfold::norm_linear."""
    x = t.x
    y, (mean, scale) = empty_projected(x, t.weight.shape[0]), empty_statistics(x)
    nw, nb = t.norm_weight.to(mean.dtype), None if t.norm_bias is None else t.norm_bias.to(mean.dtype)
    w, b = t.weight.to(x.dtype).t(), None if t.bias is None else t.bias.to(x.dtype)
    for xb, yb, mb, sb in blocks(x, x, y, mean[..., None], scale[..., None]):
        n, m, s = torch.native_layer_norm(rows(xb), x.shape[-1:], nw, nb, t.eps)
        results = writable(yb)
        if b is not None and len(b) == w.shape[1]:
            torch.addmm(b, n, w, out=results)
        else:
            torch.mm(n, w, out=results)
            if b is not None:
                results[:, : len(b)] += b
        for block, values in ((yb, results), (mb, m), (sb, s)):
            put(block, values)
    return y, mean, scale


def norm_linear_backward(t: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::norm_linear_backward.

    With h = (x - mean) * scale, the gradients of all parameters follow from grad^T h and from the sum of grad.
    """
    x, weight = t.x, t.weight
    dx, (outputs, c) = empty_like(x), weight.shape
    nw, w = t.norm_weight.to(t.mean.dtype), weight.to(t.mean.dtype)
    narrow, one = weight.to(x.dtype), torch.ones_like(nw)
    product, total = w.new_zeros(outputs, c), w.new_zeros(outputs)
    for xb, dxb, gb, mb, sb in blocks(x, x, dx, t.grad, t.mean[..., None], t.scale[..., None]):
        g, xs, m, s = (rows(t).contiguous() for t in (gb, xb, mb, sb))  # torch's kernel reads past strides
        h = (xs.to(m.dtype) - m).mul_(s).to(x.dtype)
        accumulate(product, g, h)
        total += g.sum(0, dtype=total.dtype)
        dn = torch.mm(g, narrow)
        dxs, _, _ = torch.ops.aten.native_layer_norm_backward(dn, xs, [c], m, s, nw, one, [True, False, False])
        put(dxb, dxs)
    return dx, *parameter_gradients(product, total, t.norm_weight, t.norm_bias, weight, t.bias)  # type: ignore[return-value]


def parameter_gradients(
    product: Tensor, total: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the gradients of a norm's and its projection's parameters, given grad^T h and the sum of grad.

    h: the operand of mean 0 and deviation 1.  Without elements for a bias that is None.
    """
    w, nw = weight.to(product.dtype), norm_weight.to(product.dtype)
    dweight = product * nw if norm_bias is None else product * nw + total[:, None] * norm_bias.to(product.dtype)
    made = (product * w).sum(0), total @ w, dweight, total
    parameters = norm_weight, norm_bias, weight, bias
    return tuple(
        norm_weight.new_empty(0, dtype=accumulation_dtype(norm_weight))
        if p is None
        else gradient[: len(p)].to(accumulation_dtype(p))
        for gradient, p in zip(made, parameters)
    )
