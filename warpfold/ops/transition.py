"""transition: norm, two-layer perceptron and residual at each position alone (Algorithms 9 and 15).

For the gradient it keeps x alone.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.dispatch import backend, faster_on_cpu
from warpfold.ops.norm import EPS, norm_linear
from warpfold.ops.register import register
from warpfold.ops.tensors import empty_like, empty_parameters


def _on_a_gpu(registered: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call the registered operation; on a GPU, where it has no kernel, its parts one after another."""
    x, norm_weight, norm_bias, up, up_bias, down, down_bias, residual, eps = args
    if backend(x) == "cpu":
        return registered(*args)
    hidden = norm_linear(x, norm_weight, norm_bias, up, up_bias, eps).relu()
    dx = F.linear(hidden, down.to(x.dtype), down_bias.to(x.dtype))
    return x + dx if residual else dx


@register(
    shapes="x [*, c], norm_weight [c], norm_bias [c], up [n, c], up_bias [n], down [c, n], down_bias [c], grad [*, c]",
    empty=lambda x, *_: empty_like(x),
    keeps="x norm_weight norm_bias up up_bias down residual eps",
    gradients="x norm_weight norm_bias up up_bias down down_bias",
    # down_bias is not kept: its gradient is allocated like norm_bias.
    empty_gradients=lambda grad, x, *kept: (empty_like(x), *empty_parameters(*kept[:5], kept[1])),
    adapter=_on_a_gpu,
    # Decided by the hidden layer.
    prefer_definition=lambda x, norm_weight, norm_bias, up, *_: faster_on_cpu(
        x, x.numel() // max(1, x.shape[-1]) * up.shape[0], 2**22
    ),
)
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
    """Return x + linear(relu(linear(layer_norm(x)))), or that without the first x where `residual` is False.

    x [*, c], norm_weight, norm_bias [c], up [n, c], up_bias [n], down [c, n], down_bias [c] -> [*, c] in the dtype of
    x, laid out in memory as x is.  Parameters of any float dtype.
    """
    hidden = norm_linear.definition(x, norm_weight, norm_bias, up, up_bias, eps).relu()
    dx = F.linear(hidden, down.to(x.dtype), down_bias.to(x.dtype))
    return x + dx if residual else dx
