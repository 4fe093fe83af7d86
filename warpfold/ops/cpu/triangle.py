"""The factors of the triangle products on a CPU: gated, masked and transposed block by block, within the cache."""

from torch import Tensor

from warpfold.ops.cpu.blocks import blocks, gate_values, put, rows
from warpfold.ops.tensors import empty_like
from warpfold.ops.triangle import empty_factor


def triangle_factor(y: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    """Compute warpfold::triangle_factor."""
    result = empty_factor(y)
    for yb, gb, mb, fb in blocks(result.movedim(-3, -1), y, g, mask.to(y.dtype)[..., None], result.movedim(-3, -1)):
        fb.copy_(gate_values(gb).mul_(yb).mul_(mb))
    return result


def triangle_factor_backward(grad: Tensor, y: Tensor, g: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute warpfold::triangle_factor_backward."""
    dy, dg = empty_like(y), empty_like(g)
    wanted = grad.movedim(-3, -1), y, g, mask.to(y.dtype)[..., None], dy, dg
    for db, yb, gb, mb, dyb, dgb in blocks(y, *wanted):
        s = gate_values(rows(gb))
        d = rows(db).mul(rows(mb)).mul_(s)
        put(dyb, d)
        put(dgb, d.mul_(rows(yb)).mul_(s.neg_().add_(1)))
    return dy, dg
