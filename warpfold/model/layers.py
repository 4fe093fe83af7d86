"""The two parametrised building blocks of every layer: Linear with AlphaFold2's initialisations, and LayerNorm.

Both keep their parameters as they are (normally fp32) and compute in the dtype of what arrives, so that the activations
alone decide between fp32, bf16 and fp64, with no autocast context.
"""

import math
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from warpfold.ops.precision import island

Init = Literal["default", "relu", "glorot", "gating", "final"]


class Linear(nn.Linear):
    """y = x W^T + b, computed in the dtype of x.  x [*, c_in] -> [*, c_out].

    `init` (Supp. 1.11.4): "default" LeCun, "relu" He, "glorot" uniform for queries, keys and values, "gating" zero
    weights and a bias of one (a gate that starts open), "final" zeros (a residual update that starts as nothing).
    """

    def __init__(self, c_in: int, c_out: int, bias: bool = True, init: Init = "default") -> None:
        self.init = init
        super().__init__(c_in, c_out, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as `init` says."""
        if self.bias is not None:
            nn.init.constant_(self.bias, 1.0 if self.init == "gating" else 0.0)
        if self.init in ("gating", "final"):
            nn.init.zeros_(self.weight)
        elif self.init == "glorot":
            nn.init.xavier_uniform_(self.weight)
        else:
            # A normal truncated at two standard deviations keeps 0.8796 of its deviation.
            scale = 2.0 if self.init == "relu" else 1.0
            std = math.sqrt(scale / self.in_features) / 0.87962566103423978
            nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class LayerNorm(nn.LayerNorm):
    """Layer normalisation over the last axis, eps 1e-5; statistics in fp32 at least, the result in the dtype of x."""

    def __init__(self, c: int) -> None:
        super().__init__(c, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        wide = island(x)
        weight, bias = self.weight.to(wide.dtype), self.bias.to(wide.dtype)
        return F.layer_norm(wide, self.normalized_shape, weight, bias, self.eps).to(x.dtype)
