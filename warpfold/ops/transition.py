"""transition: norm, two-layer perceptron and residual at each position alone (Algorithms 9 and 15)."""

import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.dispatch import op
from warpfold.ops.library import transition as library
from warpfold.ops.norm import EPS, norm_linear


@op(library.transition, refuses=library.refuses, small=library.small)
def transition(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    up: Tensor,
    up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    residual: bool = True,
    eps: float = EPS,
) -> Tensor:
    """x + linear(relu(linear(layer_norm(x)))), or without the first x where `residual` is False.

    x [*, c], norm_weight, norm_bias [c], up [n, c], up_bias [n], down [c, n], down_bias [c] -> [*, c] in the dtype of
    x, laid out in memory as x is.  Parameters of any float dtype.
    """
    hidden = norm_linear.definition(x, norm_weight, norm_bias, up, up_bias, eps).relu()
    dx = F.linear(hidden, down.to(x.dtype), down_bias.to(x.dtype))
    return x + dx if residual else dx
