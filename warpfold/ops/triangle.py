"""Triangle multiplication (Algorithms 11 and 12) as one operation, for a whole pair representation or a slice of it.

triangle_multiplication: from x to the new residual.  x brings its own rows (or columns) of the factor a.  The other
factor, b, is an operand; where it is None, x is the whole pair representation and the operation computes b as well.

triangle_factor: one factor of some rows or columns, which slices and ranks join to the whole b, or exchange.

triangle_product: the sum over the third corner of the triangle, one matrix product per channel.

For the backward pass the operation saves a, b, their product and the statistics of both norms.  The projections, five
times as large as x, are computed again in blocks.
"""

from typing import Any

import torch
from torch import Tensor

from warpfold.ops.dispatch import Operands, backend, empty_like, empty_parameters, faster_on_cpu, register
from warpfold.ops.linear import EPS, ROW, empty_statistics, gate, layer_norm, linear, norm_linear
from warpfold.ops.noise import FACTOR_OPERANDS, Factors

KERNEL_CHANNELS = (256, 128)  # most for x, a factor
# Elements of a slice from which on the CPU path is faster than the definition.
MIN_SLICE = 2**15


def triangle_product(a: Tensor, b: Tensor, outgoing: bool) -> Tensor:
    """Sum over the third corner of the triangle, separately for each channel -> [*, i, j, c].

    outgoing: sum_k a_ik b_jk, of a [*, c, i, k] and b [*, c, j, k];
    incoming: sum_k a_kj b_ki, of a [*, c, k, j] and b [*, c, k, i].

    This is one matrix product per channel.  The operands should be contiguous, and the gradient is made contiguous for
    the backward pass, because torch copies strided matrices and multiplies them one by one.  Without a gradient the
    rows of the product are padded like those of the factors.
    """
    left, right = (a, b.mT) if outgoing else (b.mT, a)
    if torch.is_grad_enabled() or row_pitch(a, right.shape[-1]) == right.shape[-1]:
        x: Tensor = _ContiguousGradient.apply(left @ right)
        return x.movedim(-3, -1)
    product = empty_rows(a, *a.shape[:-2], left.shape[-2], right.shape[-1])
    torch.bmm(left.flatten(0, -3), right.flatten(0, -3), out=product.flatten(0, -3))
    return product.movedim(-3, -1)


class _ContiguousGradient(torch.autograd.Function):
    """Return the input; make its gradient contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


def row_pitch(x: Tensor, n: int | None = None) -> int:
    """Return the number of elements from one row of a plane to the next: in half precision on a GPU, whole sectors.

    Then a matrix product reads rows of any length in wide words.  n: the elements of a row (None: those of x).
    """
    n = x.shape[-2] if n is None else n
    return -(-n // ROW) * ROW if x.element_size() == 2 and backend(x) == "triton" else n


def empty_rows(like: Tensor, *shape: int) -> Tensor:
    """Allocate planes [*, rows, n], contiguous except for the padding of their rows."""
    *before, n = shape
    pitch = row_pitch(like, n)
    return like.new_empty(*before, pitch).narrow(-1, 0, n) if pitch > n else like.new_empty(shape)


def is_narrow(x: Tensor) -> bool:
    """Return whether x [*, i, k, c] has more rows than columns, like a slice of columns."""
    return x.shape[-3] > x.shape[-2]


def empty_product(x: Tensor, channels: int) -> Tensor:
    """Allocate the product [*, channels, i, k] of x [*, i, k, c], in column-major order if x is narrow.

    So the matrix product has long rows, and the padding is small.
    """
    *leading, i, k, _ = x.shape
    if is_narrow(x):
        return empty_rows(x, *leading, channels, k, i).mT
    return empty_rows(x, *leading, channels, i, k)


def empty_factor(x: Tensor, channels: int) -> Tensor:
    """Allocate a factor [*, channels, i, k] of x [*, i, k, c]: on a GPU like the product, on a CPU contiguous."""
    *leading, i, k, _ = x.shape
    return empty_product(x, channels) if backend(x) == "triton" else x.new_empty(*leading, channels, i, k)


def split_projections(rows: Tensor, hidden: int, fused: bool, axis: int = 0) -> tuple[Tensor, ...]:
    """Split rows of `weight`, or their outputs, into those of a, a's gate, b, b's gate and the gate of the product."""
    first, second, third, fourth, g = rows.split([hidden] * 4 + [rows.shape[axis] - 4 * hidden], axis)
    return (first, third, second, fourth, g) if fused else (first, second, third, fourth, g)


def _unsupported_by_kernels(x: Tensor, hidden: int) -> str | None:
    """Return the reason why no GPU kernel supports x, or None."""
    channels, (most, most_hidden) = x.shape[-1], KERNEL_CHANNELS
    if backend(x) == "cpu":
        return None
    if x.element_size() != 2:
        return "kernels are for 16 bits"
    if channels <= most and hidden <= most_hidden:
        return None
    return f"{channels} channels, {hidden} of a factor (kernels are for {most} and {most_hidden})"


def _is_fp32_on_gpu(x: Tensor) -> bool:
    """Return whether torch's products are as fast as a kernel could be.

    Products without tensor cores need their operands in registers, which cannot hold a whole tile.
    """
    return backend(x) != "cpu" and x.element_size() != 2


def _gated_factor(value: Tensor, gate_logits: Tensor, mask: Tensor) -> Tensor:
    """Compute mask * sigmoid(gate) * value [*, i, k, h], contiguous with the channels in front (lines 2 and 3)."""
    factor = gate.definition(value, gate_logits) * mask[..., None].to(value.dtype)
    return factor.movedim(-1, -3).contiguous()


def factor_channels(weight: Tensor) -> int:
    """Return the number of channels h of a factor for weight [4 h + c, c]."""
    return (weight.shape[0] - weight.shape[1]) // 4


def _misfit_of_factor(t: Any) -> str | None:
    """Describe an operand with a wrong size that `shapes` cannot express, or return None."""
    outputs, c = t.weight.shape
    if outputs < c or (outputs - c) % 4:
        return f"weight is {[outputs, c]}, not [4 h + c, c]"
    # Only the backward operation has a gradient.
    grad = getattr(t, "grad", None)
    if grad is not None and grad.shape[-3] != factor_channels(t.weight):
        return f"grad is {list(grad.shape)}, but weight makes {factor_channels(t.weight)} channels"
    return _long_bias(t)


def _long_bias(t: Any) -> str | None:
    if t.bias is None or t.bias.shape[0] <= t.weight.shape[0]:
        return None
    return f"bias is {list(t.bias.shape)}, longer than the rows of weight, which is {list(t.weight.shape)}"


@register(
    shapes="x [*, i, k, c], mask [*, i, k], norm_weight [c], norm_bias [c], weight [o, c], bias [b], "
    "grad [*, h, i, k], mean [*, i, k], scale [*, i, k]",
    empty=lambda t: (empty_factor(t.x, factor_channels(t.weight)), *empty_statistics(t.x)),
    results="out mean scale",
    keeps="x mask norm_weight norm_bias weight bias mean scale which fused",
    gradients="x norm_weight norm_bias weight bias",
    kept=True,
    misfit=_misfit_of_factor,
    unsupported=lambda t: _unsupported_by_kernels(t.x, factor_channels(t.weight)),
    prefer_definition=lambda t: _is_fp32_on_gpu(t.x) or faster_on_cpu(t.x, t.x.numel(), MIN_SLICE),
)
def triangle_factor(
    x: Tensor,
    mask: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    which: int,
    fused: bool,
    eps: float = EPS,
) -> Tensor:
    """Compute a (which = 0) or b (1) of some rows or columns of x (lines 2 and 3 of Algorithms 11 and 12).

    x [*, i, k, c], mask [*, i, k] -> [*, h, i, k].  The parameters are those of `triangle_multiplication`.
    """
    y = norm_linear.definition(x, norm_weight, norm_bias, weight, bias, eps)
    parts = split_projections(y, factor_channels(weight), fused, axis=-1)
    return _gated_factor(parts[2 * which], parts[2 * which + 1], mask)


def _empty(t: Operands) -> tuple[Tensor, ...]:
    x, hidden = t.x, t.out_weight.shape[1]
    own_b = empty_factor(x, hidden) if t.b is None else x.new_empty(0)
    planes = empty_factor(x, hidden), own_b, empty_product(x, hidden)
    return empty_like(x), *planes, *empty_statistics(x), *empty_statistics(x)


def empty_gradient_of_b(t: Operands) -> Tensor:
    """Allocate the gradient of b with the padding of b, or without elements if b is None."""
    return t.x.new_empty(0) if t.b is None else empty_rows(t.b, *t.b.shape)


def _misfit(t: Any) -> str | None:
    """Describe an operand with a wrong size that `shapes` cannot express, or return None."""
    outputs, (c, hidden) = t.weight.shape[0], t.out_weight.shape
    if outputs != 4 * hidden + c:
        return f"weight is {[outputs, c]}, not [4 h + c, c] = {[4 * hidden + c, c]}, as out_weight is {[c, hidden]}"
    rows, columns = t.x.shape[-3:-1]
    if t.b is None and rows != columns:
        return f"x is {list(t.x.shape)}, not [*, n, n, c], as b is None"
    if t.b is not None and t.b.shape[-1] != (columns if t.outgoing else rows):
        whole = "[*, i, n, c]" if t.outgoing else "[*, n, k, c]"
        return f"x is {list(t.x.shape)}, not {whole} with n = {t.b.shape[-1]}, as b is {list(t.b.shape)}"
    # Only the backward operation has factors. Without b, both are computed from x and have the same shape.
    own_b = getattr(t, "own_b", None)
    right = (0,) if own_b is None or t.b is not None else tuple(t.a.shape)
    if own_b is not None and tuple(own_b.shape) != right:
        return f"own_b is {list(own_b.shape)}, not {list(right)}"
    return _long_bias(t)


def _prefer_definition(t: Any) -> bool:
    """Return whether the definition is faster than a CPU path or a kernel that supports the operands."""
    x, (outputs, _) = t.x, t.weight.shape
    if _is_fp32_on_gpu(x):
        return True
    if t.b is not None:
        return faster_on_cpu(x, x.numel(), MIN_SLICE)
    # The number of projections decides.
    return faster_on_cpu(x, x.numel() // max(1, x.shape[-1]) * outputs, 2**20)


@register(
    shapes="x [*, i, k, c], mask [*, i, k], b [*, h, n, n], norm_weight [c], norm_bias [c], weight [o, c], bias [e], "
    "out_norm_weight [h], out_norm_bias [h], out_weight [c, h], out_bias [c], factors ([*, i, k, c]), key [2], "
    "grad [*, i, k, c], a [*, h, i, k], own_b [...], product [*, h, i, k], mean [*, i, k], scale [*, i, k], "
    "out_mean [*, i, k], out_scale [*, i, k]",
    empty=_empty,
    results="out a own_b product mean scale out_mean out_scale",
    keeps="x mask b norm_weight norm_bias weight bias out_norm_weight out_norm_bias out_weight out_bias a own_b "
    "product mean scale out_mean out_scale factors outgoing fused residual",
    gradients="x b norm_weight norm_bias weight bias out_norm_weight out_norm_bias out_weight out_bias",
    empty_gradients=lambda t: (
        empty_like(t.x),
        empty_gradient_of_b(t),
        *empty_parameters(
            *(t.norm_weight, t.norm_bias, t.weight, t.bias),
            *(t.out_norm_weight, t.out_norm_bias, t.out_weight, t.out_bias),
        ),
    ),
    kept=True,
    expand=FACTOR_OPERANDS,
    misfit=_misfit,
    unsupported=lambda t: _unsupported_by_kernels(t.x, t.out_weight.shape[1]),
    prefer_definition=_prefer_definition,
)
def triangle_multiplication(
    x: Tensor,
    mask: Tensor,
    b: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    out_norm_weight: Tensor,
    out_norm_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    fused: bool,
    outgoing: bool,
    factors: Factors | None = None,
    eps: float = EPS,
    residual: bool = True,
) -> Tensor:
    """Compute x + factors * gate * linear(layer_norm(product)), a product of two factors (Algorithms 11 and 12).

    x: [*, i, k, c], the whole pair representation (b is None), some of its rows (outgoing) or columns (incoming).
    mask: [*, i, k], of a, and of b where b is None.
    b: [*, h, n, n], the factor that every slice shares; None: computed from x.
    norm_weight, norm_bias [c], out_norm_weight, out_norm_bias [h], out_weight [c, h], out_bias [c].
    weight: [4 h + c, c], the rows of a, of its gate, of b, of its gate and of the gate of the product.  fused
    (AlphaFold 2.3): a, b, a's gate, b's gate, gate of the product.  bias: of the first rows of weight.
    factors: dropout factors, with axes of size 1 for shared draws, or None.  residual: whether x is added.

    Returns [*, i, k, c] in the dtype and layout of x.  Parameters may have any float dtype, and each bias may be None.
    outgoing: sum_k a_ik b_jk; incoming: sum_k a_kj b_ki.
    """
    y = norm_linear.definition(x, norm_weight, norm_bias, weight, bias, eps)
    a, a_gate, own_b, b_gate, g = split_projections(y, out_weight.shape[1], fused, axis=-1)
    a = _gated_factor(a, a_gate, mask)
    b = _gated_factor(own_b, b_gate, mask) if b is None else b
    n = layer_norm.definition(triangle_product(a, b, outgoing), out_norm_weight, out_norm_bias, eps)
    dx = gate.definition(linear(n, out_weight, out_bias), g)
    dx = dx if factors is None else dx * factors
    return x + dx if residual else dx
