"""Products that stay exact whatever the plan allows: `plan.tf32` does not reach them, forward or backward.

TF32 keeps ten bits of a mantissa.  That is enough for activations; a coordinate 100 angstrom from the centre would be
off by 0.05.  The setting is torch's and of the process, and a backward pass reads it when it runs, perhaps in a thread
of autograd: so a product sets it in both passes itself.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.dispatch import exact_products


class _ExactMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, added: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, b)
        with exact_products():
            if added is None:
                return a @ b
            flat = (x.flatten(0, -3) for x in (added, a, b))
            return torch.baddbmm(*flat).view(added.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (a, b), needed = gradients, ctx.saved_tensors, ctx.needs_input_grad
        with exact_products():
            return g @ b.mT if needed[0] else None, a.mT @ g if needed[1] else None, g if needed[2] else None


class _ExactLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        with exact_products():
            return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, weight), needed = gradients, ctx.saved_tensors, ctx.needs_input_grad
        rows = g.flatten(0, -2)
        with exact_products():
            of_x = g @ weight if needed[0] else None
            of_weight = rows.mT @ x.flatten(0, -2) if needed[1] else None
        return of_x, of_weight, rows.sum(0) if needed[2] else None


def exact_matmul(a: Tensor, b: Tensor, added: Tensor | None = None) -> Tensor:
    """Return a @ b, plus `added`: a [*, n, k], b [*, k, m], added [*, n, m], with the same first axes, one at least."""
    product: Tensor = _ExactMatmul.apply(a, b, added)
    return product


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b: x [*, n, c], weight [o, c], bias [o], of one dtype."""
    projected: Tensor = _ExactLinear.apply(x, weight, bias)
    return projected
