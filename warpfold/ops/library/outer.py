"""warpfold::outer_product, registered; ops/outer.py defines it.  It keeps a and b for the gradient, no product."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.dispatch import EMPTY, implementation, place, refuses_device, small_on_cpu
from warpfold.ops.shapes import Operand, refusal, require, shape_of, with_axes


def outer_product(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, count: Tensor) -> Tensor:
    """As `ops.outer.outer_product`.  On a GPU it is its parts, one after another."""
    if place(a) == "triton":
        products = torch.einsum("...sic,...sjd->...ijcd", a, b).flatten(-2)
        return F.linear(products, weight.to(a.dtype), bias.to(a.dtype)) / count.to(a.dtype)
    lead = a.shape[:-3]
    flat = [t.reshape(math.prod(lead), *t.shape[len(lead) :]) for t in (a, b, count)]
    out: Tensor = torch.ops.warpfold.outer_product(flat[0], flat[1], weight, bias, flat[2])
    return out.reshape(*lead, *out.shape[1:])


def small(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, count: Tensor) -> bool:
    """Whether a CPU computes the definition sooner: decided by the products."""
    return small_on_cpu(a, count.numel() * weight.shape[-1], 2**22)


def refuses(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, count: Tensor) -> str | None:
    """Why the fast way does not take these, or None."""
    if reason := refuses_device(a, b, weight, bias, count) or refusal(*_operands(a, b, weight, bias, count)):
        return reason
    if a.dtype != b.dtype:
        return "a and b differ in dtype"
    return EMPTY if 0 in (*a.shape, *b.shape, *bias.shape) else None


def _operands(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, count: Tensor) -> tuple[Operand, ...]:
    of_a, of_b, of_weight = tuple(a.shape), tuple(b.shape), tuple(weight.shape)
    z, products = of_weight[:1], math.prod(of_a[-1:] + of_b[-1:])
    return (
        ("a", "[*, s, i, c]", of_a, with_axes(of_a, 3)),
        ("b", "[*, s, j, d]", of_b, of_a[:-2] + of_b[-2:]),
        ("weight", "[z, c d]", of_weight, (*z, products)),
        ("bias", "[z]", tuple(bias.shape), z),
        ("count", "[*, i, j, 1]", tuple(count.shape), (*of_a[:-3], *of_a[-2:-1], *of_b[-2:-1], 1)),
    )


def _require(
    op: str, a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, count: Tensor, grad: Tensor | None = None
) -> None:
    """As `_operands`, with one leading axis."""
    of_a, of_out = tuple(a.shape), tuple(count.shape)[:-1] + tuple(weight.shape)[:1]
    out = ("grad", "[B, i, j, z]", shape_of(grad), of_out)
    require(op, ("a", "[B, s, i, c]", of_a, with_axes(of_a, 4)), *_operands(a, b, weight, bias, count), out)


@torch.library.custom_op("warpfold::outer_product", mutates_args=())
def _forward(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, count: Tensor) -> Tensor:
    """a [B, s, i, c], b [B, s, j, d], count [B, i, j, 1] -> [B, i, j, z]."""
    _require("warpfold::outer_product", a, b, weight, bias, count)
    out: Tensor = implementation("outer", a).forward(a, b, weight, bias, count)
    return out


@torch.library.custom_op("warpfold::outer_product_backward", mutates_args=())
def _backward(
    grad: Tensor, a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, count: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> the gradients of a, b, weight and bias."""
    _require("warpfold::outer_product_backward", a, b, weight, bias, count, grad)
    da, db, dweight, dbias = implementation("outer", a).backward(grad, a, b, weight, bias, count)
    return da, db, dweight, dbias


@_forward.register_fake
def _(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, count: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[2], b.shape[2], weight.shape[0])


@_backward.register_fake
def _(
    grad: Tensor, a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, count: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return a.new_empty(a.shape), b.new_empty(b.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *torch.ops.warpfold.outer_product_backward(grad, *ctx.saved_tensors), None


_forward.register_autograd(_gradients, setup_context=_save)
