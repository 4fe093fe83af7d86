"""adam_step: a step of Adam on flat buffers, in place and in one pass, with moving average and packed copy."""

from typing import Any

import torch
from torch import Tensor

from warpfold.ops.dispatch import backend, register, widen

FLAT = ("weights", "gradient", "moment1", "moment2", "average")


def _unsupported(t: Any) -> str | None:
    if any(x is not None and not x.is_contiguous() for x in (*(getattr(t, name) for name in FLAT), t.packed)):
        return "its buffers are not contiguous"
    if backend(t.weights) == "triton" and t.weights.dtype != torch.float32:
        return "its weights are not in fp32"
    return None


@register(
    shapes=(
        "weights [n], gradient [n], moment1 [n], moment2 [n], average [n], packed [n], "
        "used [], scale [], rate [], steps []"
    ),
    mutates="weights gradient moment1 moment2 average packed",
    same_dtype=" ".join(FLAT),
    unsupported=_unsupported,
)
def adam_step(
    weights: Tensor,
    gradient: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    average: Tensor,
    packed: Tensor | None,
    used: Tensor,
    scale: Tensor,
    rate: Tensor,
    steps: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> None:
    """Take a step of Adam (Kingma and Ba 2015, algorithm 1) with the gradient times `scale`, in place.

    Flat buffers [n]: weights; gradient, which a fast path may overwrite; both moments; average, the moving average of
    the weights with this `decay`; packed, a copy of the weights in any float dtype, or None.  Scalars on the device []:
    used, bool: if False nothing changes, even if the gradient is not finite; scale and rate in the dtype of the
    weights; steps, float32, the number of steps including this one.
    """
    g = gradient * scale
    m = moment1.lerp(g, 1 - beta1)
    v = beta2 * moment2 + (1 - beta2) * g.square()
    time = widen(steps)
    unbiased1, unbiased2 = m / (1 - beta1**time), v / (1 - beta2**time)
    w = weights - rate * unbiased1 / (unbiased2.sqrt() + eps)
    new = [(weights, w), (moment1, m), (moment2, v), (average, average.lerp(w, 1 - decay))]
    if packed is not None:
        new.append((packed, w.to(packed.dtype)))
    for tensor, value in new:
        tensor.copy_(torch.where(used, value, tensor))
