"""Gates, and the tail of a gated attention, on a CPU."""

import torch.nn.functional as F
from torch import Tensor


def gate(x: Tensor, g: Tensor) -> Tensor:
    """warpfold::gate."""
    return x * g.sigmoid()


def gate_backward(grad: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """warpfold::gate_backward."""
    opening = g.sigmoid()
    return grad * opening, grad * x * opening * (1 - opening)


def tail(x: Tensor, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor, factors: Tensor | None) -> Tensor:
    """warpfold::tail."""
    dx = F.linear(gate(o, g), weight.to(o.dtype), bias.to(o.dtype))
    return x + (dx if factors is None else dx * factors)


def tail_backward(
    grad: Tensor, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor, factors: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """warpfold::tail_backward."""
    dx = grad if factors is None else grad * factors
    dweight = dx.flatten(0, -2).mT @ gate(o, g).flatten(0, -2)
    do, dg = gate_backward(dx @ weight.to(dx.dtype), o, g)
    return do, dg, dweight.to(weight.dtype), dx.flatten(0, -2).sum(0).to(bias.dtype)
