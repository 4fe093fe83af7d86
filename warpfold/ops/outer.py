"""outer_product: the projected outer product of two tensors, summed over sequences (Algorithm 10, lines 3 and 4).

For the gradient it keeps a and b, and no product.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.dispatch import backend, faster_on_cpu
from warpfold.ops.register import register
from warpfold.ops.tensors import empty_parameters


def _merge_leading_axes(
    registered: Callable[..., Tensor], a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, count: Tensor
) -> Tensor:
    """Call the registered operation, which has one leading axis; on a GPU, where it has no kernel, the definition."""
    if backend(a) == "triton":
        return outer_product.definition(a, b, weight, bias, count)
    leading = a.shape[:-3]
    a, b, count = (t.reshape(math.prod(leading), *t.shape[len(leading) :]) for t in (a, b, count))
    out = registered(a, b, weight, bias, count)
    return out.reshape(*leading, *out.shape[1:])


@register(
    shapes="a [B, s, i, c], b [B, s, j, d], weight [z, c d], bias [z], count [B, i, j, 1], grad [B, i, j, z]",
    empty=lambda a, b, weight, *_: a.new_empty(a.shape[0], a.shape[2], b.shape[2], weight.shape[0]),
    keeps="a b weight bias count",
    gradients="a b weight bias",
    empty_gradients=lambda grad, a, b, *kept: (
        a.new_empty(a.shape),
        b.new_empty(b.shape),
        *empty_parameters(*kept[:2]),
    ),
    same_dtype="a b",
    caller_shapes="a [*, s, i, c], b [*, s, j, d], weight [z, c d], bias [z], count [*, i, j, 1]",
    adapter=_merge_leading_axes,
    # Decided by the products.
    prefer_definition=lambda a, b, weight, bias, count: faster_on_cpu(a, count.numel() * weight.shape[-1], 2**22),
)
def outer_product(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, count: Tensor) -> Tensor:
    """Return linear(sum over s of a_si x b_sj) / count: a [*, s, i, c], b [*, s, j, d], weight [z, c d], bias [z],
    count [*, i, j, 1], which has no gradient -> [*, i, j, z] in the dtype of a.

    The left channel is outermost in the weight.  The bias is divided too, as in the official code.
    """
    products = torch.einsum("...sic,...sjd->...ijcd", a, b).flatten(-2)
    return F.linear(products, weight.to(a.dtype), bias.to(a.dtype)) / count.to(a.dtype)
