"""warpfold::gate and warpfold::tail, registered; ops/gate.py defines them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from warpfold.ops.dispatch import EMPTY, implementation, refuses_device, small_on_cpu
from warpfold.ops.library.attention import empty_like
from warpfold.ops.noise import DropoutFactors, Factors
from warpfold.ops.shapes import Operand, refusal, require, shape_of, spreads, with_axes


def gate(x: Tensor, g: Tensor) -> Tensor:
    """As `ops.gate.gate`."""
    y: Tensor = torch.ops.warpfold.gate(x, g)
    return y


def tail(x: Tensor, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor, factors: Factors | None = None) -> Tensor:
    """As `ops.gate.tail`."""
    drawn: tuple[Any, ...] = (None, [], 0, 0, 0.0)
    if isinstance(factors, DropoutFactors):
        if factors.dtype == x.dtype:
            strides = [0] * (x.dim() - len(factors.shape))
            strides += [0 if size == 1 else stride for size, stride in zip(factors.shape, factors.strides)]
            drawn = (factors.key, strides, factors.offset, factors.stream, factors.rate)
            factors = None
        else:
            factors = factors.draw()
    y: Tensor = torch.ops.warpfold.tail(x, o, g, weight, bias, factors, *drawn)
    return y


def small_gate(x: Tensor, g: Tensor) -> bool:
    """Whether a CPU computes the definition sooner."""
    return small_on_cpu(x, x.numel(), 2**21)


def small_tail(x: Tensor, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor, factors: Factors | None = None) -> bool:
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
    of_x = tuple(x.shape)
    return ("x", "[*, c]", of_x, with_axes(of_x, 1)), ("g", "[*, c]", tuple(g.shape), of_x)


def refuses_tail(
    x: Tensor, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor, factors: Factors | None = None
) -> str | None:
    """Why the fast way does not take these, or None."""
    kept = factors.key if isinstance(factors, DropoutFactors) else factors
    if reason := refuses_device(x, o, g, weight, bias, kept) or refusal(*_of_tail(x, o, g, weight, bias)):
        return reason
    if not (x.dtype == o.dtype == g.dtype):
        return "x, o and g differ in dtype"
    if factors is not None and not spreads(tuple(factors.shape), tuple(x.shape)):
        return "the factors are not [*, c] beside the others, or 1 on an axis"
    return EMPTY if 0 in (*x.shape, *o.shape) else None


def _of_tail(x: Tensor, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor) -> tuple[Operand, ...]:
    of_x, of_o = tuple(x.shape), tuple(o.shape)
    c, inputs = of_x[-1:], of_o[-1:]
    return (
        ("x", "[*, c]", of_x, with_axes(of_x, 1)),
        ("o", "[*, i]", of_o, of_x[:-1] + inputs if inputs else None),
        ("g", "[*, i]", tuple(g.shape), of_o),
        ("weight", "[c, i]", tuple(weight.shape), c + inputs),
        ("bias", "[c]", tuple(bias.shape), c),
    )


def _check_tail(
    op: str,
    x: Tensor,
    o: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor,
    factors: Tensor | None,
    key: Tensor | None,
    strides: Sequence[int],
) -> None:
    """Raise ValueError for operands of other sizes; x: or its gradient."""
    require(op, *_of_tail(x, o, g, weight, bias), ("key", "[2]", shape_of(key), (2,)))
    if factors is not None and not spreads(tuple(factors.shape), tuple(x.shape)):
        raise ValueError(f"{op}: factors is {list(factors.shape)}, not [*, c] = {list(x.shape)} or 1 on an axis")
    if key is not None and len(strides) != x.dim():
        raise ValueError(f"{op}: {len(strides)} strides of the numbers drawn for, but x has {x.dim()} axes")


@torch.library.custom_op("warpfold::gate", mutates_args=())
def _gate(x: Tensor, g: Tensor) -> Tensor:
    require("warpfold::gate", *_of_gate(x, g))
    y: Tensor = implementation("gate", x).gate(x, g)
    return y


@torch.library.custom_op("warpfold::gate_backward", mutates_args=())
def _gate_backward(grad: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """-> the gradients of x and g."""
    require("warpfold::gate_backward", ("grad", "[*, c]", tuple(grad.shape), tuple(x.shape)), *_of_gate(x, g))
    dx, dg = implementation("gate", x).gate_backward(grad, x, g)
    return dx, dg


@torch.library.custom_op("warpfold::tail", mutates_args=())
def _tail(
    x: Tensor,
    o: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor,
    factors: Tensor | None,
    key: Tensor | None,
    strides: Sequence[int],
    offset: int,
    stream: int,
    rate: float,
) -> Tensor:
    """factors: drawn already; key, strides, offset, stream, rate: to be drawn, as by `ops.noise.keep`, where there is
    a key.  A stride of 0 shares a draw."""
    _check_tail("warpfold::tail", x, o, g, weight, bias, factors, key, strides)
    y: Tensor = implementation("gate", x).gated_linear_residual(
        x, o, g, weight, bias, factors, key, strides, offset, stream, rate
    )
    return y


@torch.library.custom_op("warpfold::tail_backward", mutates_args=())
def _tail_backward(
    grad: Tensor,
    o: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor,
    factors: Tensor | None,
    key: Tensor | None,
    strides: Sequence[int],
    offset: int,
    stream: int,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> the gradients of o, g, weight and bias; that of x is `grad` itself, and factors have none."""
    _check_tail("warpfold::tail_backward", grad, o, g, weight, bias, factors, key, strides)
    do, dg, dweight, dbias = implementation("gate", grad).gated_linear_residual_backward(
        grad, o, g, weight, bias, factors, key, strides, offset, stream, rate
    )
    return do, dg, dweight, dbias


@_gate.register_fake
def _(x: Tensor, g: Tensor) -> Tensor:
    return empty_like(x)


@_gate_backward.register_fake
def _(grad: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return empty_like(x), empty_like(g)


@_tail.register_fake
def _(
    x: Tensor,
    o: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor,
    factors: Tensor | None,
    key: Tensor | None,
    strides: Sequence[int],
    offset: int,
    stream: int,
    rate: float,
) -> Tensor:
    return empty_like(x)


@_tail_backward.register_fake
def _(
    grad: Tensor,
    o: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor,
    factors: Tensor | None,
    key: Tensor | None,
    strides: Sequence[int],
    offset: int,
    stream: int,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_like(o), empty_like(g), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


def _save_gate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gate_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    dx, dg = torch.ops.warpfold.gate_backward(grad, *ctx.saved_tensors)
    return dx, dg


def _save_tail(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:7])
    ctx.draw = inputs[7:]


def _tail_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad, *torch.ops.warpfold.tail_backward(grad, *ctx.saved_tensors, *ctx.draw), *(None,) * 6


_gate.register_autograd(_gate_gradients, setup_context=_save_gate)
_tail.register_autograd(_tail_gradients, setup_context=_save_tail)
