"""warpfold::transition, registered; ops/transition.py defines it.  It keeps x alone for the gradient."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.dispatch import EMPTY, implementation, place, refuses_device, small_on_cpu
from warpfold.ops.library.attention import empty_like
from warpfold.ops.norm import norm_linear
from warpfold.ops.shapes import Operand, refusal, require, with_axes


def transition(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    up: Tensor,
    up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    residual: bool = True,
    eps: float = 1e-5,
) -> Tensor:
    """As `ops.transition.transition`.  On a GPU it is its parts, one after another."""
    if place(x) == "triton":
        hidden = norm_linear(x, norm_weight, norm_bias, up, up_bias, eps).relu()
        dx = F.linear(hidden, down.to(x.dtype), down_bias.to(x.dtype))
        return x + dx if residual else dx
    y: Tensor = torch.ops.warpfold.transition(x, norm_weight, norm_bias, up, up_bias, down, down_bias, residual, eps)
    return y


def small(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    up: Tensor,
    up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    residual: bool = True,
    eps: float = 1e-5,
) -> bool:
    """Whether a CPU computes the definition sooner: decided by the hidden layer."""
    return small_on_cpu(x, x.numel() // max(1, x.shape[-1]) * up.shape[0], 2**22)


def refuses(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    up: Tensor,
    up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    residual: bool = True,
    eps: float = 1e-5,
) -> str | None:
    """Why the fast way does not take these, or None."""
    parameters = norm_weight, norm_bias, up, up_bias, down, down_bias
    if reason := refuses_device(x, *parameters) or refusal(*_operands(x, *parameters)):
        return reason
    return EMPTY if 0 in (*x.shape, *up_bias.shape) else None


def _operands(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor
) -> tuple[Operand, ...]:
    of_x, of_up = tuple(x.shape), tuple(up.shape)
    c, n = of_x[-1:], of_up[:1]
    return (
        ("x", "[*, c]", of_x, with_axes(of_x, 1)),
        ("norm's weight", "[c]", tuple(norm_weight.shape), c),
        ("norm's bias", "[c]", tuple(norm_bias.shape), c),
        ("up", "[n, c]", of_up, n + c),
        ("up's bias", "[n]", tuple(up_bias.shape), n),
        ("down", "[c, n]", tuple(down.shape), c + n),
        ("down's bias", "[c]", tuple(down_bias.shape), c),
    )


@torch.library.custom_op("warpfold::transition", mutates_args=())
def _forward(
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
    require("warpfold::transition", *_operands(x, norm_weight, norm_bias, up, up_bias, down, down_bias))
    y: Tensor = implementation("transition", x).forward(
        x, norm_weight, norm_bias, up, up_bias, down, down_bias, residual, eps
    )
    return y


@torch.library.custom_op("warpfold::transition_backward", mutates_args=())
def _backward(
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
    """-> the gradients of x, norm_weight, norm_bias, up, up_bias, down and down_bias; the last as `norm_bias` is."""
    of_forward = _operands(x, norm_weight, norm_bias, up, up_bias, down, norm_bias)
    require("warpfold::transition_backward", *of_forward, ("grad", "[*, c]", tuple(grad.shape), tuple(x.shape)))
    dx, dnw, dnb, dup, dup_bias, ddown, ddown_bias = implementation("transition", x).backward(
        grad, x, norm_weight, norm_bias, up, up_bias, down, residual, eps
    )
    return dx, dnw, dnb, dup, dup_bias, ddown, ddown_bias


@_forward.register_fake
def _(
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
    return empty_like(x)


@_backward.register_fake
def _(
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
    parameters = norm_weight, norm_bias, up, up_bias, down, norm_bias
    dnw, dnb, dup, dup_bias, ddown, ddown_bias = (p.new_empty(p.shape) for p in parameters)
    return empty_like(x), dnw, dnb, dup, dup_bias, ddown, ddown_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.residual, ctx.eps = inputs[7:]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.warpfold.transition_backward(grad, *ctx.saved_tensors, ctx.residual, ctx.eps)
    return *grads, None, None


_forward.register_autograd(_gradients, setup_context=_save)
