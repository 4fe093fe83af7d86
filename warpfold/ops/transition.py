"""transition: norm, two-layer MLP and residual at each position (Algorithms 9 and 15).

For the gradient it saves only x.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.dispatch import backend, faster_on_cpu, laid_out_as, register
from warpfold.ops.linear import EPS, layer_norm, linear

# relu: applied to each output of `up` (AlphaFold2).  swiglu: silu of the first half of the outputs times the second
# half (Shazeer, 2020; AlphaFold3, Algorithm 11).
Activation = Literal["relu", "swiglu"]
# Most channels of the Triton kernels.  With more, a program has so few positions that it reads the weights too often:
# for 512 channels, cuBLAS products with the hidden layer in memory take half the time (modelled).
KERNEL_CHANNELS = 256
# Outputs of `up` per hidden unit.
HALVES: Mapping[str, int] = {"relu": 1, "swiglu": 2}


def _misfit(t: Any) -> str | None:
    """Describe a wrong argument that `shapes` cannot express, or return None."""
    halves, (c, hidden) = HALVES.get(t.activation), t.down.shape
    if halves is None:
        return f"activation is {t.activation!r}, not one of {', '.join(HALVES)}"
    if t.up.shape[0] != halves * hidden:
        return f"up is {list(t.up.shape)}, not [u, c] = {[halves * hidden, c]}, as down is {[c, hidden]}"
    return None


def _composed(t: Any) -> Tensor | None:
    """Compute norm and MLP one after another on a GPU, for more channels than the kernels support."""
    x = t.x
    if backend(x) == "cpu" or x.shape[-1] <= KERNEL_CHANNELS:
        return None
    n = layer_norm(x, t.norm_weight, t.norm_bias, t.eps)
    dx = _perceptron(n, t.up, t.up_bias, t.down, t.down_bias, t.activation)
    return x + dx if t.residual else laid_out_as(dx, x)


@register(
    shapes="x [*, c], norm_weight [c], norm_bias [c], up [u, c], up_bias [u], down [c, n], down_bias [c], grad [*, c]",
    keeps="x norm_weight norm_bias up up_bias down down_bias residual eps activation",
    gradients="x norm_weight norm_bias up up_bias down down_bias",
    composed=_composed,
    misfit=_misfit,
    # The size of the hidden layer decides.
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
    """Compute x + linear(activation(linear(layer_norm(x)))); without `residual`, x is not added.

    x [*, c], norm_weight, norm_bias [c], up [u, c], up_bias [u], down [c, n], down_bias [c] -> [*, c] in the dtype and
    layout of x.  u is n for "relu" and 2 n for "swiglu" (`Activation`).  Parameters may have any float dtype, and each
    bias may be None.
    """
    n = layer_norm.definition(x, norm_weight, norm_bias, eps)
    dx = _perceptron(n, up, up_bias, down, down_bias, activation)
    return x + dx if residual else dx


def _perceptron(
    n: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None, activation: str
) -> Tensor:
    """Compute linear(activation(linear(n))) in the dtype of n."""
    pre = linear(n, up, up_bias)
    if activation == "relu":
        hidden = pre.relu()
    elif activation == "swiglu":
        gate, value = pre.chunk(2, -1)
        hidden = F.silu(gate) * value
    else:
        raise ValueError(f"activation is {activation!r}, not one of {', '.join(HALVES)}")
    return linear(hidden, down, down_bias)
