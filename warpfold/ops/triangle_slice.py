"""A triangle multiplication in parts: one factor of a slice, and a slice of the layer where the other factor is given.

Without gradients, for layers that run in slices; else these are other operations, one after another.
"""

from typing import Any

import torch
from torch import Tensor

from warpfold.ops.dispatch import backend, faster_on_cpu, implementation, modules, op, unsupported_device
from warpfold.ops.gate import gate
from warpfold.ops.noise import Factors
from warpfold.ops.norm import EPS, norm_linear
from warpfold.ops.shapes import EMPTY
from warpfold.ops.triangle import triangle_factor, triangle_product

modules |= dict.fromkeys(("projected_factor", "triangle_slice"), "triangle_slice")
LEAST = 2**15  # numbers of a slice that are worth blocks
Norm = tuple[Tensor, Tensor | None]  # weight and bias [c]
Projections = tuple[Tensor, Tensor | None]  # weight [o, c], bias of the first outputs


def _needs_parts(x: Tensor, *_: Any, **__: Any) -> str | None:
    """Return EMPTY where other operations compute it: for a gradient, and on a GPU."""
    return EMPTY if torch.is_grad_enabled() or backend(x) != "cpu" or unsupported_device([x]) else None


def _prefers_parts(x: Tensor, *_: Any, **__: Any) -> bool:
    return faster_on_cpu(x, x.numel(), LEAST)


@op(lambda *args: implementation("projected_factor", args[0])(*args), _needs_parts, _prefers_parts)
def projected_factor(x: Tensor, mask: Tensor, norm: Norm, into: Projections, eps: float = EPS) -> Tensor:
    """Return a factor of the normalised x, gated and masked (lines 2 and 3 of Algorithms 11 and 12).

    x [*, i, k, c], mask [*, i, k], into: of the factor and, below it, of its gate, [2 h, c] -> [*, h, i, k], in order.
    """
    y, g = norm_linear(x, *norm, *into, eps).chunk(2, -1)
    return triangle_factor(y, g, mask)


@op(lambda *args: implementation("triangle_slice", args[0])(*args), _needs_parts, _prefers_parts)
def triangle_slice(
    x: Tensor,
    mask: Tensor,
    b: Tensor,
    norm: Norm,
    into: Projections,
    of_gate: Projections,
    norm_out: Norm,
    out_of: Projections,
    outgoing: bool,
    factors: Factors | None = None,
    eps: float = EPS,
    residual: bool = True,
) -> Tensor:
    """Return rows (outgoing) or columns of x + factors * gate(linear(layer_norm(product))) (Algorithms 11 and 12); or
    that without the first x where `residual` is False.

    x [*, i, k, c] of some rows i, or columns k, mask [*, i, k], b: the factor [*, h, n, n] of all of them; into: as of
    `projected_factor`; of_gate: of the gate of the product; factors of dropout -> [*, i, k, c].
    """
    product = triangle_product(projected_factor(x, mask, norm, into, eps), b, outgoing)
    dx = norm_linear(product, *norm_out, *out_of, eps)
    del product
    dx = gate(dx, norm_linear(x, *norm, *of_gate, eps))
    dx = dx if factors is None else dx * factors
    return x + dx if residual else dx
