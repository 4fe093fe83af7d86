"""triangle_factor on a GPU: gated, masked and laid out for the product in one pass, by the kernels of `gate`."""

from torch import Tensor

from warpfold.ops.tensors import empty_like
from warpfold.ops.triangle import empty_factor
from warpfold.ops.triton import gate_kernels
from warpfold.ops.triton.gate import gated, gated_backward


def triangle_factor(y: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    """warpfold::triangle_factor."""
    out = empty_factor(y)
    gated(gate_kernels.FACTOR, y, g, out.movedim(-3, -1), mask)
    return out


def triangle_factor_backward(grad: Tensor, y: Tensor, g: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """warpfold::triangle_factor_backward."""
    out = empty_like(y), empty_like(g)
    gated_backward(gate_kernels.FACTOR_BACKWARD, grad.movedim(-3, -1), y, g, out, mask)
    return out
