"""triangle_factor and triangle_product: what the triangle multiplications contract, and how (Algorithms 11 and 12)."""

from typing import Any

import torch
from torch import Tensor

from warpfold.ops.dispatch import faster_on_cpu
from warpfold.ops.gate import gate
from warpfold.ops.register import register
from warpfold.ops.tensors import empty_like


def empty_factor(y: Tensor) -> Tensor:
    """Allocate the factor, [*, c, i, k] in order."""
    *leading, i, k, c = y.shape
    return y.new_empty(*leading, c, i, k)


@register(
    shapes="y [*, i, k, c], g [*, i, k, c], mask [*, i, k], grad [*, c, i, k]",
    empty=lambda y, g, mask: empty_factor(y),
    keeps="y g mask",
    gradients="y g",
    empty_gradients=lambda grad, y, g, mask: (empty_like(y), empty_like(g)),
    same_dtype="y g",
    prefer_definition=lambda y, g, mask: faster_on_cpu(y, y.numel(), 2**17),
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
    pass: products of strided matrices are copied and multiplied one by one (docs/decisions/0004).
    """
    product = a @ b.mT if outgoing else b.mT @ a
    x: Tensor = _ContiguousGradient.apply(product)
    return x.movedim(-3, -1)


class _ContiguousGradient(torch.autograd.Function):
    """Return the input; make its gradient contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()
