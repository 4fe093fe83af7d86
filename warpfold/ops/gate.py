"""gate, and tail: how the result of a gated attention gets back into the representation."""

import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.dispatch import op
from warpfold.ops.library import gate as library
from warpfold.ops.noise import Factors


@op(library.gate, refuses=library.refuses_gate, small=library.small_gate)
def gate(x: Tensor, g: Tensor) -> Tensor:
    """x as far as the gate is open, x * sigmoid(g): x, g [*] -> [*] in the dtype of x."""
    return x * g.sigmoid()


@op(library.tail, refuses=library.refuses_tail, small=library.small_tail)
def tail(x: Tensor, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor, factors: Factors | None = None) -> Tensor:
    """x + factors * linear(gate(o, g)): output projection, bias, gate, shared-axis dropout and residual in one pass.

    x [*, c], o, g [*, i], weight [c, i], bias [c], factors (of dropout; axes of size 1 are shared; None: ones)
    -> [*, c] in the dtype of x, laid out in memory as x is.  Parameters of any float dtype.  Factors that are not drawn
    yet (`ops.noise.DropoutFactors`) are drawn on the way, forward and backward, and never stored.
    """
    dx = F.linear(gate.definition(o, g), weight.to(o.dtype), bias.to(o.dtype))
    return x + (dx if factors is None else dx * factors)
