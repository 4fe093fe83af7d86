"""transition on a GPU: the hidden layer stays in registers, tile by tile, forward and backward.

Forward, a program owns BLOCK_M positions: their normalised channels, and the sums of all outputs.  It runs over the
hidden layer, BLOCK_H numbers at a time, whose weights it reads from the second cache: BLOCK_M multiplications for each
number read, so with 16 bits 2 BLOCK_M operations a byte: at 128 positions as much as tensor cores and cache have.

The backward pass is two kernels, since the gradient of x is a sum over the hidden layer, that of the weights one over
positions, and neither fits beside the other.  Each computes the hidden layer and its gradient again: two products of
seven (five are the least).  Kept from one to the other they would be written and read, eight times the bytes of x and
more; products that take less than that.  What the first one does leave is the normalised x, so that the second, which
reads it once for every tile of the hidden layer, has nothing but products to do.
"""

import triton
from torch import Tensor

from warpfold.ops.tensors import empty_like, empty_parameters
from warpfold.ops.triton.positions import (
    Positions,
    cast_weight,
    channels_last,
    contiguous,
    power_of_two,
    programs_for,
)
from warpfold.ops.triton.sums import Sum, empty_partials, or_unwanted, sum_partials
from warpfold.ops.triton.transition_kernels import BACKWARD, FORWARD, WEIGHT

TILES = 256  # programs of the gradient of the weights: as in `norm_linear`


def transition(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    residual: bool,
    eps: float,
    activation: str,
) -> Tensor:
    """Compute warpfold::transition."""
    y = empty_like(x)
    p = Positions({"x": x}, writes={"y": y})
    key, sizes = _sizes(x, down, activation)
    kernel = FORWARD.tiled(key, x)
    kernel.run(
        (triton.cdiv(p.count, kernel["BLOCK_M"]),),
        **p.arguments,
        **_parameters(x, p.count, norm_weight, norm_bias, up, up_bias, down),
        down_bias=contiguous(down_bias),
        eps=eps,
        RESIDUAL=residual,
        **sizes,
    )
    p.copy_back()
    return y


def transition_backward(
    grad: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    residual: bool,
    eps: float,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::transition_backward."""
    grad = channels_last(grad)
    key, sizes = _sizes(x, down, activation)
    c, hidden, halves = key
    parameters = _parameters(x, x.numel() // c, norm_weight, norm_bias, up, up_bias, down)
    dx, normalised = empty_like(x), empty_like(grad)
    gradients = empty_parameters(norm_weight, norm_bias, up, up_bias, down, down_bias)
    dnorm_weight, dnorm_bias, dup, dup_bias, ddown, ddown_bias = gradients
    p = Positions({"x": x, "grad": grad}, writes={"dx": dx, "normalised": normalised})
    kernel = BACKWARD.tiled(key, x)
    programs = triton.cdiv(p.count, kernel["BLOCK_M"])
    partials = empty_partials(x, programs, 3 * c)
    kernel.run((programs,), **p.arguments, **parameters, partials=partials, eps=eps, RESIDUAL=residual, **sizes)
    p.copy_back()
    biases = or_unwanted(dnorm_bias, partials, c), or_unwanted(ddown_bias, partials, c)
    rows = Sum(partials, (dnorm_weight, *biases))
    p = Positions({"normalised": normalised, "grad": grad}, writes={})
    kernel = WEIGHT.tiled(key, x)
    tiles = triton.cdiv(hidden, kernel["BLOCK_H"])
    programs = programs_for(p.count, kernel["BLOCK_M"], max(1, TILES // tiles))
    partials = empty_partials(x, programs, halves * hidden * (c + 1) + c * hidden)
    del parameters["norm_weight"], parameters["norm_bias"]
    kernel.run((tiles, programs), **p.arguments, **parameters, partials=partials, **sizes)
    sum_partials(rows, Sum(partials, (dup, or_unwanted(dup_bias, partials, halves * hidden), ddown)))
    return dx, dnorm_weight, dnorm_bias, dup, dup_bias, ddown, ddown_bias


def _sizes(x: Tensor, down: Tensor, activation: str) -> tuple[tuple[int, int, int], dict[str, int]]:
    """Return the key of the kernels' launches, and their constants."""
    (c, hidden), gated = down.shape, activation == "swiglu"
    sizes = {"C": c, "HIDDEN": hidden, "GATED": int(gated), "BLOCK_C": power_of_two(c)}
    if x.element_size() == 2:
        sizes["BLOCK_K"] = 0  # all channels at once
    return (c, hidden, 1 + gated), sizes


def _parameters(
    x: Tensor,
    positions: int,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
) -> dict[str, Tensor | None]:
    """Return the parameters as the kernels take them, by the names of their arguments."""
    return {
        "norm_weight": norm_weight.contiguous(),
        "norm_bias": contiguous(norm_bias),
        "up": cast_weight(up, x, positions),
        "up_bias": contiguous(up_bias),
        "down": cast_weight(down, x, positions),
    }
