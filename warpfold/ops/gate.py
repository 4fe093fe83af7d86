"""gate, and gated_linear_residual: how the result of a gated attention gets back into the representation."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.dispatch import Operands, faster_on_cpu
from warpfold.ops.noise import FACTOR_OPERANDS, Factors
from warpfold.ops.register import register
from warpfold.ops.shapes import Sizes


def _prefer_definition(t: Any) -> bool:
    return faster_on_cpu(t.x, t.x.numel(), 2**21)


@register(
    shapes="x [*, c], g [*, c], grad [*, c]",
    keeps="x g",
    gradients="x g",
    same_dtype="x g",
    prefer_definition=_prefer_definition,
)
def gate(x: Tensor, g: Tensor) -> Tensor:
    """Return the gated x, x * sigmoid(g): x, g [*, c] -> [*, c] in the dtype of x."""
    return x * g.sigmoid()


def _check_strides(op: str, sizes: Sizes, t: Operands) -> None:
    axes = len(sizes["*"]) + 1
    if t.key is not None and len(t.strides) != axes:
        raise ValueError(f"{op}: {len(t.strides)} strides of the elements drawn for, but x has {axes} axes")


@register(
    shapes="x [*, c], o [*, i], g [*, i], weight [c, i], bias [c], grad [*, c], factors ([*, c]), key [2]",
    keeps="o g weight bias factors",
    gradients="o g weight bias",
    residual="x",
    same_dtype="x o g",
    check=_check_strides,
    expand=FACTOR_OPERANDS,
    prefer_definition=_prefer_definition,
)
def gated_linear_residual(
    x: Tensor, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors | None = None
) -> Tensor:
    """Return x + factors * linear(gate(o, g)): gate, output projection, shared-axis dropout and residual in one pass.

    x [*, c], o, g [*, i], weight [c, i], bias [c], factors (of dropout; axes of size 1 are shared; None: ones)
    -> [*, c] in the dtype of x, laid out in memory as x is.  Parameters of any float dtype.  Factors that are not drawn
    yet (`ops.noise.DropoutFactors`) are drawn on the way, forward and backward, and never stored.
    """
    dx = F.linear(gate.definition(o, g), weight.to(o.dtype), None if bias is None else bias.to(o.dtype))
    return x + (dx if factors is None else dx * factors)
