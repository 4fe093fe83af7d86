"""outer_product: the projected outer product of two tensors, summed over sequences (Algorithm 10, lines 3 and 4).

For the gradient it keeps a and b, and no product.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.dispatch import backend, empty_parameters, faster_on_cpu, register

CHANNELS = 64  # of a factor, at most, that the Triton kernels serve


def _unsupported_channels(t: Any) -> str | None:
    most = max(t.a.shape[-1], t.b.shape[-1])
    if backend(t.a) == "triton" and most > CHANNELS:
        return f"factors of {most} channels (kernels are for {CHANNELS} at most)"
    return None


def _merge_leading_axes(registered: Callable[..., Tensor], t: Any) -> Tensor:
    """Call the registered operation, which has one leading axis."""
    leading = t.a.shape[:-3]
    a, b, count = (x.reshape(math.prod(leading), *x.shape[len(leading) :]) for x in (t.a, t.b, t.count))
    out = registered(a, b, t.weight, t.bias, count, t.bias_divided)
    return out.reshape(*leading, *out.shape[1:])


@register(
    shapes="a [B, s, i, c], b [B, s, j, d], weight [z, c d], bias [z], count [B, i, j, 1], grad [B, i, j, z]",
    empty=lambda t: t.a.new_empty(t.a.shape[0], t.a.shape[2], t.b.shape[2], t.weight.shape[0]),
    keeps="a b weight bias count bias_divided",
    gradients="a b weight bias",
    empty_gradients=lambda t: (
        t.a.new_empty(t.a.shape),
        t.b.new_empty(t.b.shape),
        *empty_parameters(t.weight, t.bias),
    ),
    same_dtype="a b",
    caller_shapes="a [*, s, i, c], b [*, s, j, d], weight [z, c d], bias [z], count [*, i, j, 1]",
    adapter=_merge_leading_axes,
    unsupported=_unsupported_channels,
    # Decided by the products.
    prefer_definition=lambda t: faster_on_cpu(t.a, t.count.numel() * t.weight.shape[-1], 2**22),
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
