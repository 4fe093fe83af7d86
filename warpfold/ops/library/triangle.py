"""warpfold::triangle_factor, registered; ops/triangle.py defines it."""

from typing import Any

import torch
from torch import Tensor

from warpfold.ops.dispatch import EMPTY, implementation, refuses_device, small_on_cpu
from warpfold.ops.library.attention import empty_like
from warpfold.ops.shapes import Operand, refusal, require, with_axes


def triangle_factor(y: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    """As `ops.triangle.triangle_factor`."""
    factor: Tensor = torch.ops.warpfold.triangle_factor(y, g, mask)
    return factor


def small(y: Tensor, g: Tensor, mask: Tensor) -> bool:
    """Whether a CPU computes the definition sooner."""
    return small_on_cpu(y, y.numel(), 2**17)


def refuses(y: Tensor, g: Tensor, mask: Tensor) -> str | None:
    """Why the fast way does not take these, or None."""
    if reason := refuses_device(y, g, mask) or refusal(*_operands(y, g, mask)):
        return reason
    if y.dtype != g.dtype:
        return "y and g differ in dtype"
    return EMPTY if y.numel() == 0 else None


def _operands(y: Tensor, g: Tensor, mask: Tensor) -> tuple[Operand, ...]:
    of_y = tuple(y.shape)
    return (
        ("y", "[*, i, k, c]", of_y, with_axes(of_y, 3)),
        ("g", "[*, i, k, c]", tuple(g.shape), of_y),
        ("mask", "[*, i, k]", tuple(mask.shape), of_y[:-1]),
    )


@torch.library.custom_op("warpfold::triangle_factor", mutates_args=())
def _forward(y: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    require("warpfold::triangle_factor", *_operands(y, g, mask))
    factor: Tensor = implementation("triangle", y).triangle_factor(y, g, mask)
    return factor


@torch.library.custom_op("warpfold::triangle_factor_backward", mutates_args=())
def _backward(grad: Tensor, y: Tensor, g: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """-> the gradients of y and g."""
    of_y = tuple(y.shape)
    of_grad = ("grad", "[*, c, i, k]", tuple(grad.shape), of_y[:-3] + of_y[-1:] + of_y[-3:-1])
    require("warpfold::triangle_factor_backward", *_operands(y, g, mask), of_grad)
    dy, dg = implementation("triangle", y).triangle_factor_backward(grad, y, g, mask)
    return dy, dg


@_forward.register_fake
def _(y: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    return empty_factor(y)


@_backward.register_fake
def _(grad: Tensor, y: Tensor, g: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return empty_like(y), empty_like(g)


def empty_factor(y: Tensor) -> Tensor:
    """The factor to be filled, [*, c, i, k] in order."""
    *lead, i, k, c = y.shape
    return y.new_empty(*lead, c, i, k)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *torch.ops.warpfold.triangle_factor_backward(grad, *ctx.saved_tensors), None


_forward.register_autograd(_gradients, setup_context=_save)
