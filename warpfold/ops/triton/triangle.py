"""triangle_factor on a GPU: gated, masked and laid out for the product in one pass, by the functions of `gate`."""

from torch import Tensor

from warpfold.ops.tensors import empty_like
from warpfold.ops.triangle import empty_factor
from warpfold.ops.triton.gate import gate_backward_kernel, gate_kernel, run_gate, run_gate_backward
from warpfold.ops.triton.launch import configs, register

# Whole sectors of memory along both axes: the kernel reads along one and writes along the other.
_CANDIDATES = configs(
    "BLOCK_M BLOCK_C", *((m, c, warps, 1) for m in (32, 64, 128) for c in (32, 64) for warps in (4, 8))
)
FORWARD = register("triangle_factor", gate_kernel, _CANDIDATES)
BACKWARD = register("triangle_factor_backward", gate_backward_kernel, _CANDIDATES)


def triangle_factor(y: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    """Compute warpfold::triangle_factor."""
    out = empty_factor(y)
    run_gate(FORWARD, y, g, mask, out.movedim(-3, -1))
    return out


def triangle_factor_backward(grad: Tensor, y: Tensor, g: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute warpfold::triangle_factor_backward."""
    dy, dg = empty_like(y), empty_like(g)
    run_gate_backward(BACKWARD, grad.movedim(-3, -1), y, g, mask, dy, dg)
    return dy, dg
