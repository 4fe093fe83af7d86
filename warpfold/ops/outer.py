"""outer_product: the projected outer product of two tensors, summed over sequences (Algorithm 10, lines 3 and 4)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.dispatch import op
from warpfold.ops.library import outer as library


@op(library.outer_product, refuses=library.refuses, small=library.small)
def outer_product(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, count: Tensor) -> Tensor:
    """linear(sum over s of a_si x b_sj) / count: a [*, s, i, c], b [*, s, j, d], weight [z, c d], bias [z],
    count [*, i, j, 1], which has no gradient -> [*, i, j, z] in the dtype of a.

    The left channel is outermost in the weight.  The bias is divided too, as in the official code.
    """
    products = torch.einsum("...sic,...sjd->...ijcd", a, b).flatten(-2)
    return F.linear(products, weight.to(a.dtype), bias.to(a.dtype)) / count.to(a.dtype)
