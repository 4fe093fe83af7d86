"""outer_product: the projected outer product of two tensors, summed over sequences (Algorithm 10, lines 3 and 4).

For the gradient it keeps a and b, and no product.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.dispatch import backend, faster_on_cpu
from warpfold.ops.register import register
from warpfold.ops.tensors import empty_parameters

CHANNELS = 64  # of a factor, at most, that the Triton kernels serve


def _unsupported_channels(a: Tensor, b: Tensor, *_: Any) -> str | None:
    most = max(a.shape[-1], b.shape[-1])
    if backend(a) == "triton" and most > CHANNELS:
        return f"factors of {most} channels (kernels are for {CHANNELS} at most)"
    return None


def _merge_leading_axes(
    registered: Callable[..., Tensor],
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    count: Tensor,
    bias_divided: bool,
) -> Tensor:
    """Call the registered operation, which has one leading axis."""
    leading = a.shape[:-3]
    a, b, count = (t.reshape(math.prod(leading), *t.shape[len(leading) :]) for t in (a, b, count))
    out = registered(a, b, weight, bias, count, bias_divided)
    return out.reshape(*leading, *out.shape[1:])


@register(
    shapes="a [B, s, i, c], b [B, s, j, d], weight [z, c d], bias [z], count [B, i, j, 1], grad [B, i, j, z]",
    empty=lambda a, b, weight, *_: a.new_empty(a.shape[0], a.shape[2], b.shape[2], weight.shape[0]),
    keeps="a b weight bias count bias_divided",
    gradients="a b weight bias",
    empty_gradients=lambda grad, a, b, *kept: (
        a.new_empty(a.shape),
        b.new_empty(b.shape),
        *empty_parameters(*kept[:2]),
    ),
    same_dtype="a b",
    caller_shapes="a [*, s, i, c], b [*, s, j, d], weight [z, c d], bias [z], count [*, i, j, 1]",
    adapter=_merge_leading_axes,
    unsupported_reason=_unsupported_channels,
    # Decided by the products.
    prefer_definition=lambda a, b, weight, bias, count, *_: faster_on_cpu(a, count.numel() * weight.shape[-1], 2**22),
)
def outer_product(
    a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None, count: Tensor, bias_divided: bool = True
) -> Tensor:
    """Return linear(sum over s of a_si x b_sj) / count: a [*, s, i, c], b [*, s, j, d], weight [z, c d], bias [z],
    count [*, i, j, 1], which has no gradient -> [*, i, j, z] in the dtype of a.

    The left channel is outermost in the weight.  The bias may be None.  It is divided by the count too, as in the
    official code; where `bias_divided` is False it is added after the division, as Boltz has it.
    """
    products = torch.einsum("...sic,...sjd->...ijcd", a, b).flatten(-2)
    added = None if bias is None else bias.to(a.dtype)
    projected = F.linear(products, weight.to(a.dtype), added if bias_divided else None) / count.to(a.dtype)
    return projected if bias_divided or added is None else projected + added
