"""Norms and the projections that follow them, on a CPU."""

import torch
from torch import Tensor

from warpfold.ops.library.norm import empty_statistics


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """warpfold::layer_norm."""
    mean, scale = empty_statistics(x)
    wide = x.to(mean.dtype)
    y, m, s = torch.native_layer_norm(wide, x.shape[-1:], weight.to(wide.dtype), bias.to(wide.dtype), eps)
    return torch.empty_like(x).copy_(y), mean.copy_(m[..., 0]), scale.copy_(s[..., 0])


def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """warpfold::layer_norm_backward."""
    wide, w = x.to(mean.dtype), weight.to(mean.dtype)
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        grad.to(mean.dtype), wide, x.shape[-1:], mean[..., None], scale[..., None], w, w, [True, True, True]
    )
    return torch.empty_like(x).copy_(dx), dweight.to(weight.dtype), dbias.to(weight.dtype)


def norm_linear(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """warpfold::norm_linear."""
    n, mean, scale = layer_norm(x, norm_weight, norm_bias, eps)
    return torch.nn.functional.linear(n, weight.to(x.dtype), None if bias is None else bias.to(x.dtype)), mean, scale


def norm_linear_backward(
    grad: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """warpfold::norm_linear_backward."""
    n = (((x.to(mean.dtype) - mean[..., None]) * scale[..., None]) * norm_weight + norm_bias).to(x.dtype)
    dweight = grad.flatten(0, -2).mT @ n.flatten(0, -2)
    dn = grad @ weight.to(grad.dtype)
    dx, dnorm_weight, dnorm_bias = layer_norm_backward(dn, x, norm_weight, mean, scale)
    dbias = weight.new_empty(0) if bias is None else grad.flatten(0, -2).sum(0).to(bias.dtype)
    return dx, dnorm_weight, dnorm_bias, dweight.to(weight.dtype), dbias
