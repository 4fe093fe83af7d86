"""warpfold::layer_norm and warpfold::norm_linear, registered; ops/norm.py defines them."""

from typing import Any

import torch
from torch import Tensor

from warpfold.ops.dispatch import EMPTY, implementation, place, refuses_device, small_on_cpu
from warpfold.ops.library.attention import empty_like
from warpfold.ops.precision import wide
from warpfold.ops.shapes import Operand, Shape, refusal, require, shape_of, with_axes

CHANNELS = (16, 1024)  # the fewest and the most that the Triton kernels serve


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """As `ops.norm.layer_norm`."""
    y: Tensor = torch.ops.warpfold.layer_norm(x, weight, bias, eps)[0]
    return y


def norm_linear(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """As `ops.norm.norm_linear`."""
    y: Tensor = torch.ops.warpfold.norm_linear(x, norm_weight, norm_bias, weight, bias, eps)[0]
    return y


def small_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> bool:
    """Whether a CPU computes the definition sooner: always, where the norm is in the dtype of x."""
    return small_on_cpu(x, x.numel(), 2**21 if x.dtype.itemsize < 4 else 2**63)


def small_norm_linear(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> bool:
    """Whether a CPU computes the definition sooner: decided by the outputs."""
    return small_on_cpu(x, x.numel() // max(1, x.shape[-1]) * weight.shape[0], 2**21)


def refuses_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> str | None:
    """Why the fast way does not take these, or None."""
    return refuses_device(x, weight, bias) or refusal(*_of_norm(x, weight, bias)) or _refuses_channels(x)


def refuses_norm_linear(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> str | None:
    """Why the fast way does not take these, or None."""
    if reason := refuses_device(x, norm_weight, norm_bias, weight, bias):
        return reason
    if reason := refusal(*_of_norm(x, norm_weight, norm_bias), *_of_linear(x, weight, bias)):
        return reason
    return EMPTY if weight.shape[0] == 0 else _refuses_channels(x)


def _refuses_channels(x: Tensor) -> str | None:
    fewest, most = CHANNELS
    if place(x) == "triton" and not fewest <= x.shape[-1] <= most:
        return f"{x.shape[-1]} channels (kernels are for {fewest} to {most})"
    return EMPTY if x.numel() == 0 else None


def _of_norm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Operand, ...]:
    of_x = tuple(x.shape)
    c = of_x[-1:]
    return (
        ("x", "[*, c]", of_x, with_axes(of_x, 1)),
        ("norm's weight", "[c]", tuple(weight.shape), c),
        ("norm's bias", "[c]", tuple(bias.shape), c),
    )


def _of_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Operand, ...]:
    of_weight = tuple(weight.shape)
    o = of_weight[:1]
    return ("weight", "[o, c]", of_weight, o + tuple(x.shape)[-1:]), ("bias", "[o]", shape_of(bias), o)


def _of_backward(grad: Tensor, x: Tensor, outputs: Shape, mean: Tensor, scale: Tensor) -> tuple[Operand, ...]:
    at = tuple(x.shape)[:-1]
    return (
        ("grad", "[*, o]", tuple(grad.shape), at + outputs),
        ("mean", "[*]", tuple(mean.shape), at),
        ("scale", "[*]", tuple(scale.shape), at),
    )


@torch.library.custom_op("warpfold::layer_norm", mutates_args=())
def _norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """-> y, and the mean and 1 / deviation of each position, [*] in fp32 (fp64 of fp64)."""
    require("warpfold::layer_norm", *_of_norm(x, weight, bias))
    y, mean, scale = implementation("norm", x).layer_norm(x, weight, bias, eps)
    return y, mean, scale


@torch.library.custom_op("warpfold::layer_norm_backward", mutates_args=())
def _norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-> the gradients of x, weight and bias."""
    of_norm = _of_norm(x, weight, weight)
    require("warpfold::layer_norm_backward", *of_norm, *_of_backward(grad, x, tuple(x.shape)[-1:], mean, scale))
    dx, dweight, dbias = implementation("norm", x).layer_norm_backward(grad, x, weight, mean, scale)
    return dx, dweight, dbias


@torch.library.custom_op("warpfold::norm_linear", mutates_args=())
def _linear(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-> y, mean and 1 / deviation, as `layer_norm`."""
    require("warpfold::norm_linear", *_of_norm(x, norm_weight, norm_bias), *_of_linear(x, weight, bias))
    y, mean, scale = implementation("norm", x).norm_linear(x, norm_weight, norm_bias, weight, bias, eps)
    return y, mean, scale


@torch.library.custom_op("warpfold::norm_linear_backward", mutates_args=())
def _linear_backward(
    grad: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> the gradients of x, norm_weight, norm_bias, weight and bias; the last without elements where there is none."""
    of_forward = *_of_norm(x, norm_weight, norm_bias), *_of_linear(x, weight, bias)
    require("warpfold::norm_linear_backward", *of_forward, *_of_backward(grad, x, tuple(weight.shape)[:1], mean, scale))
    dx, dnorm_weight, dnorm_bias, dweight, dbias = implementation("norm", x).norm_linear_backward(
        grad, x, norm_weight, norm_bias, weight, bias, mean, scale
    )
    return dx, dnorm_weight, dnorm_bias, dweight, dbias


def empty_projected(x: Tensor, outputs: int) -> Tensor:
    """The projections of x to be filled, [*, outputs], positions in memory in the order of x's.

    A position's numbers begin at a multiple of eight, so that views of them (q, k, v ...) can be read in wide words.
    """
    order = sorted(range(x.dim() - 1), key=lambda axis: x.stride(axis), reverse=True)
    back = [order.index(axis) for axis in range(x.dim() - 1)]
    padded = -(-outputs // 8) * 8
    return x.new_empty([*(x.shape[axis] for axis in order), padded]).permute(*back, x.dim() - 1).narrow(-1, 0, outputs)


def empty_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and 1 / deviation to be filled, each [*] in order."""
    return x.new_empty(x.shape[:-1], dtype=wide(x)), x.new_empty(x.shape[:-1], dtype=wide(x))


@_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(x), *empty_statistics(x)


@_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(x), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


@_linear.register_fake
def _(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_projected(x, weight.shape[0]), *empty_statistics(x)


@_linear_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    parameters = (norm_weight, norm_bias, weight)
    dbias = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    dnorm_weight, dnorm_bias, dweight = (p.new_empty(p.shape) for p in parameters)
    return empty_like(x), dnorm_weight, dnorm_bias, dweight, dbias


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, _ = inputs
    ctx.save_for_backward(x, weight, *output[1:])
    ctx.set_materialize_grads(False)


def _norm_gradients(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 4
    return *torch.ops.warpfold.layer_norm_backward(grad, *ctx.saved_tensors), None


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:5], *output[1:])
    ctx.set_materialize_grads(False)


def _linear_gradients(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    *grads, dbias = torch.ops.warpfold.norm_linear_backward(grad, *ctx.saved_tensors)
    return *grads, dbias if ctx.needs_input_grad[4] else None, None


_norm.register_autograd(_norm_gradients, setup_context=_save_norm)
_linear.register_autograd(_linear_gradients, setup_context=_save_linear)
