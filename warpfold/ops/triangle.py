"""triangle_factor and triangle_product: what the triangle multiplications contract, and how (Algorithms 11 and 12)."""

from typing import Any

import torch
from torch import Tensor

from warpfold.ops.dispatch import op
from warpfold.ops.gate import gate
from warpfold.ops.library import triangle as library


@op(library.triangle_factor, refuses=library.refuses, small=library.small)
def triangle_factor(y: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    """One factor of the product, gated and masked (lines 2 and 3), its channels in front.

    y, g [*, i, k, c], mask [*, i, k] -> [*, c, i, k], in order.
    """
    factor = gate.definition(y, g) * mask[..., None].to(y.dtype)
    return factor.movedim(-1, -3).contiguous()


def triangle_product(a: Tensor, b: Tensor, outgoing: bool) -> Tensor:
    """The sum over the third corner of the triangle, for each channel alone -> [*, i, j, c].

    outgoing: sum_k a_ik b_jk, of a [*, c, i, k] and b [*, c, j, k];
    incoming: sum_k a_kj b_ki, of a [*, c, k, j] and b [*, c, k, i].

    One matrix product per channel.  The operands should lie in order, and the gradient is put in order before the
    backward pass: products of strided matrices are copied and multiplied one by one (docs/decisions/0004).
    """
    product = a @ b.mT if outgoing else b.mT @ a
    x: Tensor = _ContiguousGradient.apply(product)
    return x.movedim(-3, -1)


class _ContiguousGradient(torch.autograd.Function):
    """The identity; its gradient is laid out in order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()
