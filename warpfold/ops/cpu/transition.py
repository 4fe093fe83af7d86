"""The transition on a CPU: block by block, so that the hidden layer never leaves the cache.

The backward pass computes the hidden layer again: one product more than five, and a quarter of the block's memory less.
"""

import torch
from torch import Tensor

from warpfold.ops.cpu.blocks import accumulate, blocks, put, rows, writable
from warpfold.ops.tensors import accumulation_dtype, empty_like

HIDDEN = 2**20  # numbers of the hidden layer in a block


def transition(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    up: Tensor,
    up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    residual: bool,
    eps: float,
) -> Tensor:
    """Compute warpfold::transition."""
    y, dtype = empty_like(x), accumulation_dtype(x)
    nw, nb = norm_weight.to(dtype), norm_bias.to(dtype)
    w1, b1, w2, b2 = up.to(x.dtype).t(), up_bias.to(x.dtype), down.to(x.dtype).t(), down_bias.to(x.dtype)
    for xb, yb in blocks(x, x, y, size=_size(up)):
        xs, results = rows(xb), writable(yb)
        n, _, _ = torch.native_layer_norm(xs, x.shape[-1:], nw, nb, eps)
        hidden = torch.addmm(b1, n, w1).relu_()
        if residual:
            torch.add(xs, b2, out=results).addmm_(hidden, w2)
        else:
            torch.addmm(b2, hidden, w2, out=results)
        put(yb, results)
    return y


def transition_backward(
    grad: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    up: Tensor,
    up_bias: Tensor,
    down: Tensor,
    residual: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::transition_backward; the gradients of up and of the norm from one product, as in norm.py."""
    dx, dtype, c = empty_like(x), accumulation_dtype(x), x.shape[-1]
    nw, nb, w = norm_weight.to(dtype), norm_bias.to(dtype), up.to(dtype)
    one, narrow1, narrow2, b1 = torch.ones_like(nw), up.to(x.dtype), down.to(x.dtype), up_bias.to(x.dtype)
    product, ddown = torch.zeros_like(w), torch.zeros_like(down, dtype=dtype)
    dup_bias, ddown_bias = w.new_zeros(len(w)), w.new_zeros(c)
    for xb, gb, dxb in blocks(x, x, grad, dx, size=_size(up)):
        xs, g = rows(xb), rows(gb)
        n, mean, scale = torch.native_layer_norm(xs, [c], nw, nb, eps)
        hidden = torch.addmm(b1, n, narrow1.t()).relu_()
        accumulate(ddown, g, hidden)
        ddown_bias += g.sum(0, dtype=dtype)
        dhidden = torch.mm(g, narrow2).mul_(hidden.sign_())
        dup_bias += dhidden.sum(0, dtype=dtype)
        accumulate(product, dhidden, (xs.to(dtype) - mean).mul_(scale).to(x.dtype))
        dn = torch.mm(dhidden, narrow1)
        dxs, _, _ = torch.ops.aten.native_layer_norm_backward(dn, xs, [c], mean, scale, nw, one, [True, False, False])
        put(dxb, dxs.add_(g) if residual else dxs)
    dnorm_weight, dnorm_bias = (product * w).sum(0), dup_bias @ w
    dup = product * nw + dup_bias[:, None] * nb
    wholes = (dnorm_weight, norm_weight), (dnorm_bias, norm_bias), (dup, up), (dup_bias, up_bias), (ddown, down)
    return dx, *(d.to(accumulation_dtype(p)) for d, p in wholes), ddown_bias.to(accumulation_dtype(norm_bias))  # type: ignore[return-value]


def _size(up: Tensor) -> int:
    return max(1, HIDDEN // len(up))
