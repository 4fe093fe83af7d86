"""triangle_factor and triangle_product: what the triangle multiplications contract, and how (Algorithms 11 and 12).

triangle_multiplication: a whole layer as one operation, from what its norm reads to the new residual.

For the backward pass it keeps a, b and their product, channels in front, and the statistics of both norms, beside x:
all written on the way anyway.  Not the projections: five times the size of x, and one product to make again, in blocks.

A triangle multiplication in parts: one factor of a slice, and a slice of the layer where the other factor is given.

Without gradients, for layers that run in slices; else these are other operations, one after another.
"""

from collections.abc import Callable
from typing import Any, ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.dispatch import (
    EMPTY,
    Op,
    Operands,
    Sizes,
    backend,
    empty_like,
    faster_on_cpu,
    implementation,
    laid_out_as,
    modules,
    register,
    unsupported_device,
)
from warpfold.ops.linear import EPS, ROW, empty_statistics, gate, layer_norm, norm_linear
from warpfold.ops.noise import FACTOR_OPERANDS, Factors


def empty_factor(y: Tensor) -> Tensor:
    """Allocate the factor, [*, c, i, k] in order, but for what pads the rows."""
    *leading, i, k, c = y.shape
    return empty_rows(y, *leading, c, i, k)


@register(
    shapes="y [*, i, k, c], g [*, i, k, c], mask [*, i, k], grad [*, c, i, k]",
    empty=lambda t: empty_factor(t.y),
    keeps="y g mask",
    gradients="y g",
    same_dtype="y g",
    prefer_definition=lambda t: faster_on_cpu(t.y, t.y.numel(), 2**17),
)
def triangle_factor(y: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    """Return one factor of the product, gated and masked (lines 2 and 3), its channels in front.

    y, g [*, i, k, c], mask [*, i, k] -> [*, c, i, k], in order.
    """
    factor = gate.definition(y, g) * mask[..., None].to(y.dtype)
    return factor.movedim(-1, -3).contiguous()


def triangle_product(a: Tensor, b: Tensor, outgoing: bool) -> Tensor:
    """Sum over the third corner of the triangle, for each channel alone -> [*, i, j, c].

    outgoing: sum_k a_ik b_jk, of a [*, c, i, k] and b [*, c, j, k];
    incoming: sum_k a_kj b_ki, of a [*, c, k, j] and b [*, c, k, i].

    One matrix product per channel.  The operands should be contiguous, and the gradient is made so before the backward
    pass: products of strided matrices are copied and multiplied one by one (docs/decisions/0004).  Without a gradient
    the rows of the product are padded as the factors' are.
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


KERNEL_CHANNELS = (256, 128)  # of x and of a factor, at most, that a GPU's kernels take


def row_pitch(x: Tensor, n: int | None = None) -> int:
    """Return how many elements a row of a plane takes in memory: in half precision whole sectors of a GPU's.

    So that a matrix product reads rows of any length in wide words.  n: numbers of a row; None: as x has rows.
    """
    n = x.shape[-2] if n is None else n
    return -(-n // ROW) * ROW if x.element_size() == 2 and backend(x) == "triton" else n


def empty_rows(like: Tensor, *shape: int) -> Tensor:
    """Allocate planes [*, rows, n] in order, but for what pads the rows."""
    *before, n = shape
    pitch = row_pitch(like, n)
    return like.new_empty(*before, pitch).narrow(-1, 0, n) if pitch > n else like.new_empty(shape)


def empty_planes(x: Tensor, channels: int) -> Tensor:
    """Allocate a factor or the product, [*, channels, n, n] in order, but for what pads the rows."""
    *leading, n, _, _ = x.shape
    return empty_rows(x, *leading, channels, n, n)


def split_projections(y: Tensor, hidden: int, fused: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return a, its gate, b, its gate and the gate of the product, of what `weight` makes."""
    first, second, third, fourth, g = y.split([hidden] * 4 + [y.shape[-1] - 4 * hidden], -1)
    return (first, third, second, fourth, g) if fused else (first, second, third, fourth, g)


def _empty(t: Operands) -> tuple[Tensor, ...]:
    x = t.x
    if not t.kept:
        return empty_like(x), *(x.new_empty(0) for _ in range(7))
    planes = (empty_planes(x, t.out_norm_weight.shape[0]) for _ in range(3))
    return empty_like(x), *planes, *empty_statistics(x), *empty_statistics(x)


def _wrong_sizes(t: Any) -> str | None:
    """Return the reason to refuse sizes that shapes cannot describe, or None."""
    outputs, (c, hidden) = t.weight.shape[0], t.out_weight.shape
    if outputs != 4 * hidden + c:
        return "weight is not [4 h + c, c]"
    return "bias is longer than the outputs" if t.bias is not None and t.bias.shape[0] > outputs else None


def _check(op: str, sizes: Sizes, t: Operands) -> None:
    if wrong := _wrong_sizes(t):
        raise ValueError(f"{op}: {wrong}")


def served_by_kernels(x: Tensor, hidden: int) -> bool:
    """Return whether a GPU's kernels take this x: 16 bits, at most so many channels.

    Products of fp32 are made without tensor cores, of operands in registers, which whole tiles do not fit.
    """
    return x.element_size() == 2 and all(n <= most for n, most in zip((x.shape[-1], hidden), KERNEL_CHANNELS))


def _composed(registered: Callable[..., Tensor], t: Any) -> Tensor:
    """Call the registered operation; on a GPU whose kernels do not take x, its parts one after another."""
    x, hidden = t.x, t.out_weight.shape[1]
    if backend(x) == "cpu" or served_by_kernels(x, hidden):
        return registered(*t)
    y = norm_linear(x, t.norm_weight, t.norm_bias, t.weight, t.bias, t.eps)
    a, a_gate, b, b_gate, g = split_projections(y, hidden, t.fused)
    product = triangle_product(triangle_factor(a, a_gate, t.mask), triangle_factor(b, b_gate, t.mask), t.outgoing)
    dx = gate(norm_linear(product, t.out_norm_weight, t.out_norm_bias, t.out_weight, t.out_bias, t.eps), g)
    dx = dx if t.factors is None else dx * t.factors
    return x + dx if t.residual else laid_out_as(dx, x)


@register(
    shapes="x [*, n, n, c], mask [*, n, n], norm_weight [c], norm_bias [c], weight [o, c], bias [b], "
    "out_norm_weight [h], out_norm_bias [h], out_weight [c, h], out_bias [c], factors ([*, n, n, c]), key [2], "
    "grad [*, n, n, c], a [*, h, n, n], b [*, h, n, n], product [*, h, n, n], mean [*, n, n], scale [*, n, n], "
    "out_mean [*, n, n], out_scale [*, n, n]",
    empty=_empty,
    results="out a b product mean scale out_mean out_scale",
    keeps="x mask norm_weight norm_bias weight bias out_norm_weight out_norm_bias out_weight out_bias a b product mean "
    "scale out_mean out_scale factors outgoing fused residual",
    gradients="x norm_weight norm_bias weight bias out_norm_weight out_norm_bias out_weight out_bias",
    kept=True,
    check=_check,
    expand=FACTOR_OPERANDS,
    adapter=_composed,
    unsupported=_wrong_sizes,
    # Decided by the projections.
    prefer_definition=lambda t: faster_on_cpu(t.x, t.x.numel() // max(1, t.x.shape[-1]) * t.weight.shape[0], 2**20),
)
def triangle_multiplication(
    x: Tensor,
    mask: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    out_norm_weight: Tensor,
    out_norm_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    outgoing: bool,
    fused: bool,
    factors: Factors | None = None,
    eps: float = EPS,
    residual: bool = True,
) -> Tensor:
    """Return x + factors * gate(linear(layer_norm(product))), a product of two factors of x (Algorithms 11 and 12); or
    that without the first x where `residual` is False.

    x [*, n, n, c], mask [*, n, n] of a and b, norm_weight, norm_bias [c], out_norm_weight, out_norm_bias [h],
    out_weight [c, h], out_bias [c], factors of dropout (axes of size 1 are shared; None: ones) -> [*, n, n, c] in the
    dtype of x, laid out in memory as x is.  Parameters of any float dtype; any bias may be None.

    weight [4 h + c, c] makes a, its gate, b, its gate, and the gate of the product, one below the other; fused
    (AlphaFold 2.3): a, b, a's gate, b's gate, the product's.  bias [b] belongs to its first b outputs.
    outgoing: sum_k a_ik b_jk; incoming: sum_k a_kj b_ki.
    """
    y = norm_linear.definition(x, norm_weight, norm_bias, weight, bias, eps)
    a, a_gate, b, b_gate, g = split_projections(y, out_weight.shape[1], fused)
    a, b = triangle_factor.definition(a, a_gate, mask), triangle_factor.definition(b, b_gate, mask)
    n = layer_norm.definition(triangle_product(a, b, outgoing), out_norm_weight, out_norm_bias, eps)
    dx = gate.definition(F.linear(n, out_weight.to(x.dtype), None if out_bias is None else out_bias.to(x.dtype)), g)
    dx = dx if factors is None else dx * factors
    return x + dx if residual else dx


P = ParamSpec("P")
LEAST = 2**15  # numbers of a slice that are worth blocks
Norm = tuple[Tensor, Tensor | None]  # weight and bias [c]
Projections = tuple[Tensor, Tensor | None]  # weight [o, c], bias of the first outputs


def _on_slices(definition: Callable[P, Tensor]) -> Op[P, Tensor]:
    """Make an `Op` of a definition that calls other operations: they compute it for a gradient, and on a GPU."""
    name = definition.__name__

    def needs_parts(t: Any) -> str | None:
        return EMPTY if torch.is_grad_enabled() or backend(t.x) != "cpu" or unsupported_device([t.x]) else None

    found = Op(
        definition,
        lambda t: implementation(name, t.x)(*t),
        needs_parts,
        lambda t: faster_on_cpu(t.x, t.x.numel(), LEAST),
    )
    modules[name] = "triangle", found.arguments._fields
    return found


@_on_slices
def projected_factor(x: Tensor, mask: Tensor, norm: Norm, into: Projections, eps: float = EPS) -> Tensor:
    """Return a factor of the normalised x, gated and masked (lines 2 and 3 of Algorithms 11 and 12).

    x [*, i, k, c], mask [*, i, k], into: of the factor and, below it, of its gate, [2 h, c] -> [*, h, i, k], in order.
    """
    y, g = norm_linear(x, *norm, *into, eps).chunk(2, -1)
    return triangle_factor(y, g, mask)


@_on_slices
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
