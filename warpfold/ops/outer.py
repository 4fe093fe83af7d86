"""The outer product mean (Algorithm 10), as a whole and from precomputed factors.

outer_product_mean: from the alignment to the new pair representation.  outer_product: lines 3 and 4 for two factors
that may belong to different residues, as slices and shards require.

For the gradient they save the factors, but no products of their channels.  Without a gradient nothing is saved.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from warpfold.ops.dispatch import (
    Operands,
    accumulation_dtype,
    backend,
    empty_parameters,
    faster_on_cpu,
    register,
)
from warpfold.ops.linear import EPS, empty_statistics, exact_on_gpu, linear, norm_linear, padded, unsupported_channels

CHANNELS = 64  # most channels of a factor
ADDED = 1e-3  # added to sequence counts


def _unsupported_width(like: Tensor, most: int) -> str | None:
    if backend(like) == "triton" and most > CHANNELS:
        return f"factors of {most} channels (kernels are for {CHANNELS} at most)"
    return None


def _other_dtype(pair: Tensor | None, like: Tensor) -> str | None:
    return None if pair is None or pair.dtype == like.dtype else "z and the factors differ in dtype"


def _merge_leading_axes(
    registered: Callable[..., Tensor],
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a_mask: Tensor,
    b_mask: Tensor,
    z: Tensor | None,
    *numbers: float,
) -> Tensor:
    """Call the registered operation, which has a single leading axis."""
    leading = a.shape[:-3]

    def merge(x: Tensor) -> Tensor:
        return x.reshape(math.prod(leading), *x.shape[len(leading) :])

    z = None if z is None else merge(z)
    out = registered(merge(a), merge(b), weight, bias, merge(a_mask), merge(b_mask), z, *numbers)
    return out.reshape(*leading, *out.shape[1:])


def _product_by_torch(t: Any) -> Tensor | None:
    """Compute the definition in fp32 on a GPU."""
    return outer_product.definition(*t) if exact_on_gpu(t.a) else None


def empty_share(like: Tensor, *shape: int) -> Tensor:
    """Allocate the factor of the products of each pair of residues, 1 / count, in fp32 (fp64 for fp64)."""
    return like.new_empty(shape, dtype=accumulation_dtype(like))


def _empty_product(t: Operands) -> tuple[Tensor, Tensor]:
    pairs = t.a.shape[0], t.a.shape[2], t.b.shape[2]
    return t.a.new_empty(*pairs, t.weight.shape[0]), empty_share(t.a, *pairs)


@register(
    shapes="a [B, s, i, c], b [B, s, j, d], weight [p, c d], bias [p], a_mask [B, s, i], b_mask [B, s, j], "
    "z [B, i, j, p], grad [B, i, j, p], share [B, i, j]",
    empty=_empty_product,
    results="out share",
    keeps="a b weight bias share bias_divided",
    gradients="a b weight bias",
    residual="z",
    empty_gradients=lambda t: (t.a.new_empty(t.a.shape), t.b.new_empty(t.b.shape), *empty_parameters(t.weight, t.bias)),
    same_dtype="a b",
    caller_shapes="a [*, s, i, c], b [*, s, j, d], weight [p, c d], bias [p], a_mask [*, s, i], b_mask [*, s, j], "
    "z [*, i, j, p]",
    adapter=_merge_leading_axes,
    composed=_product_by_torch,
    unsupported=lambda t: _unsupported_width(t.a, max(t.a.shape[-1], t.b.shape[-1])) or _other_dtype(t.z, t.a),
    # The number of products decides.
    prefer_definition=lambda t: faster_on_cpu(
        t.a, t.a_mask.numel() * t.b_mask.shape[-1] // max(1, t.a_mask.shape[-2]) * t.weight.shape[-1], 2**22
    ),
)
def outer_product(
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a_mask: Tensor,
    b_mask: Tensor,
    z: Tensor | None = None,
    added: float = ADDED,
    least: float = 0.0,
    bias_divided: bool = True,
) -> Tensor:
    """Compute z + linear(sum over s of a_si x b_sj) / count, without z if it is None (lines 3 and 4 of Algorithm 10).

    a [*, s, i, c], b [*, s, j, d], which must be 0 where a_mask [*, s, i] and b_mask [*, s, j] are 0, weight [p, c d],
    bias [p], z [*, i, j, p] -> [*, i, j, p] in the dtype of a.  The count is the number of sequences in both masks,
    plus `added`, and at least `least`.  It has no gradient.

    The left channel is outermost in the weight.  The bias may be None.  It is divided by the count too, as in the
    official code.  If `bias_divided` is False it is added after the division, as in Boltz.
    """
    products = torch.einsum("...sic,...sjd->...ijcd", a, b).flatten(-2)
    wide = accumulation_dtype(a)
    count = (torch.einsum("...si,...sj->...ij", a_mask.to(wide), b_mask.to(wide)) + added).clamp(min=least)
    new = linear(products, weight, bias if bias_divided else None) / count[..., None].to(a.dtype)
    new = new if bias_divided or bias is None else new + bias.to(a.dtype)
    return new if z is None else z + new


def empty_factors(x: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Allocate both factors of x [*, s, r, c], [*, s, r, h] each; on a GPU b has the channels before the residues."""
    *batch, s, r, _ = x.shape
    if backend(x) == "triton":
        a = x.new_empty(*batch, s, r, padded(channels)).narrow(-1, 0, channels)
        return a, x.new_empty(*batch, s, channels, r).mT
    return x.new_empty(*batch, s, r, channels), x.new_empty(*batch, s, r, channels)


def _empty_mean(t: Operands) -> tuple[Tensor, ...]:
    x, h = t.x, t.weight.shape[0] // 2
    *batch, _, r, _ = x.shape
    out = x.new_empty(*batch, r, r, t.out_weight.shape[0])
    return out, *empty_factors(x, h), *empty_statistics(x), empty_share(x, *batch, r, r)


def _misfit_of_mean(t: Any) -> str | None:
    """Describe an operand with a wrong size that `shapes` cannot express, or return None."""
    outputs, products = t.weight.shape[0], t.out_weight.shape[1]
    if 4 * products != outputs**2:
        return f"weight is {list(t.weight.shape)}, not [2 h, c], as out_weight is {list(t.out_weight.shape)}, [p, h h]"
    if t.bias is not None and t.bias.shape[0] > outputs:
        return f"bias is {list(t.bias.shape)}, longer than the rows of weight, which is {list(t.weight.shape)}"
    # Only the backward operation has factors.
    a = getattr(t, "a", None)
    if a is not None and 2 * a.shape[-1] != outputs:
        return f"a is {list(a.shape)}, but weight makes {outputs} channels of both factors"
    return None


def _mean_by_torch(t: Any) -> Tensor | None:
    """Compute the definition in fp32 on a GPU."""
    return outer_product_mean.definition(*t) if exact_on_gpu(t.x) else None


def _unsupported_mean(t: Any) -> str | None:
    reason = _other_dtype(t.z, t.x) or _unsupported_width(t.x, t.weight.shape[0] // 2)
    return reason or unsupported_channels(t.x)


@register(
    shapes="x [*, s, r, c], norm_weight [c], norm_bias [c], weight [o, c], bias [b], out_weight [p, q], out_bias [p], "
    "mask [*, s, r], z [*, r, r, p], grad [*, r, r, p], a [*, s, r, h], b [*, s, r, h], mean [*, s, r], "
    "scale [*, s, r], share [*, r, r]",
    empty=_empty_mean,
    results="out a b mean scale share",
    keeps="x norm_weight norm_bias weight bias out_weight out_bias mask a b mean scale share bias_divided",
    gradients="x norm_weight norm_bias weight bias out_weight out_bias",
    residual="z",
    kept=True,
    composed=_mean_by_torch,
    misfit=_misfit_of_mean,
    unsupported=_unsupported_mean,
    # The number of products decides.
    prefer_definition=lambda t: faster_on_cpu(
        t.x, t.mask.numel() * t.mask.shape[-1] // max(1, t.mask.shape[-2]) * t.out_weight.shape[-1], 2**22
    ),
)
def outer_product_mean(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    mask: Tensor,
    z: Tensor | None = None,
    added: float = ADDED,
    least: float = 0.0,
    bias_divided: bool = True,
    eps: float = EPS,
) -> Tensor:
    """Compute the outer product mean of x (Algorithm 10): z + linear(sum over s of a_si x b_sj) / count.

    a and b are masked projections of the normalised x.  Without z, nothing is added.
    x [*, s, r, c], norm_weight, norm_bias [c], weight [2 h, c] (a, then b), bias [b] of the first b outputs, out_weight
    [p, h h], out_bias [p], mask [*, s, r], z [*, r, r, p] -> [*, r, r, p] in the dtype of x.  The other arguments are
    those of `outer_product`.
    """
    y = norm_linear.definition(x, norm_weight, norm_bias, weight, bias, eps)
    a, b = (y * mask[..., None].to(y.dtype)).chunk(2, -1)
    return outer_product.definition(a, b, out_weight, out_bias, mask, mask, z, added, least, bias_divided)
