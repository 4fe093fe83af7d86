"""transition: norm, two-layer perceptron and residual at each position alone (Algorithms 9 and 15).

For the gradient it keeps x alone.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.dispatch import Operands, Sizes, backend, faster_on_cpu, register, upcast_half
from warpfold.ops.linear import EPS

# relu: of each output of `up` (AlphaFold2).  swiglu: silu of the first half of them, times the second half (Shazeer,
# 2020; AlphaFold3, Algorithm 11).
Activation = Literal["relu", "swiglu"]
CHANNELS = 512  # at most, that the Triton kernels serve
# At most, in 16 bits: beside two halves of the weights nothing fits the registers.  The layers so wide are of single
# representations, of few positions.
GATED_CHANNELS = 256
HALVES: Mapping[str, int] = {"relu": 1, "swiglu": 2}  # how many outputs of `up` make one number of the hidden layer


def _check_hidden(op: str, sizes: Sizes, t: Operands) -> None:
    halves, hidden = HALVES.get(t.activation), t.down.shape[1]
    if halves is None:
        raise ValueError(f"{op}: activation is {t.activation!r}, not one of {', '.join(HALVES)}")
    if sizes["u"] != halves * hidden:
        raise ValueError(f"{op}: up is {list(t.up.shape)}, not [u, c] = {[halves * hidden, sizes['c']]}")


def _unsupported_sizes(t: Any) -> str | None:
    if t.activation not in HALVES or t.up.shape[0] != HALVES[t.activation] * t.down.shape[1]:
        return "up and down do not fit together"
    gated = t.activation == "swiglu" and t.x.element_size() == 2
    most = GATED_CHANNELS if gated else CHANNELS
    if backend(t.x) == "triton" and t.x.shape[-1] > most:
        return f"{t.x.shape[-1]} channels{', SwiGLU' if gated else ''} (kernels are for {most} at most)"
    return None


@register(
    shapes="x [*, c], norm_weight [c], norm_bias [c], up [u, c], up_bias [u], down [c, n], down_bias [c], grad [*, c]",
    keeps="x norm_weight norm_bias up up_bias down down_bias residual eps activation",
    gradients="x norm_weight norm_bias up up_bias down down_bias",
    check=_check_hidden,
    unsupported=_unsupported_sizes,
    # Decided by the hidden layer.
    prefer_definition=lambda t: faster_on_cpu(t.x, t.x.numel() // max(1, t.x.shape[-1]) * t.up.shape[0], 2**22),
)
def transition(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    residual: bool = True,
    eps: float = EPS,
    activation: str = "relu",
) -> Tensor:
    """Return x + linear(activation(linear(layer_norm(x)))), or that without the first x where `residual` is False.

    x [*, c], norm_weight, norm_bias [c], up [u, c], up_bias [u], down [c, n], down_bias [c] -> [*, c] in the dtype of
    x, laid out in memory as x is.  u is n for "relu" and 2 n for "swiglu" (`Activation`).  Parameters of any float
    dtype; any bias may be None.
    """
    full, bias = upcast_half(x), norm_bias
    bias = None if bias is None else bias.to(full.dtype)
    n = F.layer_norm(full, x.shape[-1:], norm_weight.to(full.dtype), bias, eps).to(x.dtype)
    pre = F.linear(n, up.to(x.dtype), None if up_bias is None else up_bias.to(x.dtype))
    dx = F.linear(_activated(pre, activation), down.to(x.dtype), None if down_bias is None else down_bias.to(x.dtype))
    return x + dx if residual else dx


def _activated(pre: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return pre.relu()
    if activation == "swiglu":
        gate, value = pre.chunk(2, -1)
        return F.silu(gate) * value
    raise ValueError(f"activation is {activation!r}, not one of {', '.join(HALVES)}")
