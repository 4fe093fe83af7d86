"""warpfold::gate and warpfold::tail, registered; ops/gate.py defines them."""

from typing import Any

import torch
from torch import Tensor

from warpfold.ops.dispatch import EMPTY, implementation, refuses_device, small_on_cpu
from warpfold.ops.library.attention import empty_like
from warpfold.ops.shapes import Operand, refusal, require, with_axes


def gate(x: Tensor, g: Tensor) -> Tensor:
    """As `ops.gate.gate`."""
    y: Tensor = torch.ops.warpfold.gate(x, g)
    return y


def tail(x: Tensor, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor, factors: Tensor | None = None) -> Tensor:
    """As `ops.gate.tail`."""
    y: Tensor = torch.ops.warpfold.tail(x, o, g, weight, bias, factors)
    return y


def small_gate(x: Tensor, g: Tensor) -> bool:
    """Whether a CPU computes the definition sooner."""
    return small_on_cpu(x, x.numel(), 2**21)


def small_tail(x: Tensor, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor, factors: Tensor | None = None) -> bool:
    """Whether a CPU computes the definition sooner."""
    return small_on_cpu(x, x.numel(), 2**21)


def refuses_gate(x: Tensor, g: Tensor) -> str | None:
    """Why the fast way does not take these, or None."""
    if reason := refuses_device(x, g) or refusal(*_of_gate(x, g)):
        return reason
    if x.dtype != g.dtype:
        return "x and g differ in dtype"
    return EMPTY if x.numel() == 0 else None


def _of_gate(x: Tensor, g: Tensor) -> tuple[Operand, ...]:
    return ("x", "[*, c]", x, with_axes(x, 1)), ("g", "[*, c]", g, x.shape)


def refuses_tail(
    x: Tensor, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor, factors: Tensor | None = None
) -> str | None:
    """Why the fast way does not take these, or None."""
    if reason := refuses_device(x, o, g, weight, bias, factors):
        return reason
    if o.shape != g.shape or not (x.dtype == o.dtype == g.dtype):
        return "o and g differ in shape, or x from them in dtype"
    return EMPTY if 0 in (*x.shape, *o.shape) else None


@torch.library.custom_op("warpfold::gate", mutates_args=())
def _gate(x: Tensor, g: Tensor) -> Tensor:
    require("warpfold::gate", *_of_gate(x, g))
    y: Tensor = implementation("gate", x).gate(x, g)
    return y


@torch.library.custom_op("warpfold::gate_backward", mutates_args=())
def _gate_backward(grad: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """-> the gradients of x and g."""
    require("warpfold::gate_backward", ("grad", "[*, c]", grad, x.shape), *_of_gate(x, g))
    dx, dg = implementation("gate", x).gate_backward(grad, x, g)
    return dx, dg


@torch.library.custom_op("warpfold::tail", mutates_args=())
def _tail(x: Tensor, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor, factors: Tensor | None) -> Tensor:
    y: Tensor = implementation("gate", x).tail(x, o, g, weight, bias, factors)
    return y


@torch.library.custom_op("warpfold::tail_backward", mutates_args=())
def _tail_backward(
    grad: Tensor, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor, factors: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> the gradients of o, g, weight and bias; that of x is `grad` itself, and factors have none."""
    do, dg, dweight, dbias = implementation("gate", grad).tail_backward(grad, o, g, weight, bias, factors)
    return do, dg, dweight, dbias


@_gate.register_fake
def _(x: Tensor, g: Tensor) -> Tensor:
    return empty_like(x)


@_gate_backward.register_fake
def _(grad: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return empty_like(x), empty_like(g)


@_tail.register_fake
def _(x: Tensor, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor, factors: Tensor | None) -> Tensor:
    return empty_like(x)


@_tail_backward.register_fake
def _(
    grad: Tensor, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor, factors: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_like(o), empty_like(g), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


def _save_gate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gate_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    dx, dg = torch.ops.warpfold.gate_backward(grad, *ctx.saved_tensors)
    return dx, dg


def _save_tail(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _tail_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad, *torch.ops.warpfold.tail_backward(grad, *ctx.saved_tensors), None


_gate.register_autograd(_gate_gradients, setup_context=_save_gate)
_tail.register_autograd(_tail_gradients, setup_context=_save_tail)
