"""The building blocks of every layer: Linear with AlphaFold2's initialisations, LayerNorm, and where dropout draws.

Linear and LayerNorm keep their parameters as they are (normally fp32) and compute in the dtype of what arrives, so
that the activations alone decide between fp32, bf16 and fp64, with no autocast context.
"""

import math
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warpfold.ops.linear import layer_norm, norm_linear
from warpfold.ops.noise import Noise
from warpfold.ops.tensors import exact_matmul

Init = Literal["default", "relu", "glorot", "gating", "final"]


class Linear(nn.Linear):
    """y = x W^T + b, computed in the dtype of x.  x [*, c_in] -> [*, c_out].

    `init` (Supp. 1.11.4): "default" LeCun, "relu" He, "glorot" uniform for queries, keys and values, "gating" zero
    weights and a bias of one (a gate that starts open), "final" zeros (a residual update that starts as nothing).
    """

    packed: "PackedOperands | None" = (
        None  # where its weights lie for operations to read (engine/packed.py); None: nowhere
    )

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
        weight, bias = joined(x.dtype, self)
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class AdaptedLinear(Linear):
    """A linear layer whose weight is W + scale B A (Hu et al. 2021, section 4.1; scale is their alpha / r).

    W stays under its usual name, and is not trained; A [rank, c_in] and B [c_out, rank] are.  Whoever asks for the
    weight gets the dense one, of which autograd knows where it came from: no operation, plan or kernel has to know of
    adapters (docs/howto/fine_tune.md).  A layer becomes one by `engine.trainable.freeze`.
    """

    adapter_a: nn.Parameter
    adapter_b: nn.Parameter
    scale: float

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dense weight, in the dtype of the parameters."""
        w = self._parameters["weight"]
        assert w is not None
        return w + self.scale * exact_matmul(self.adapter_b, self.adapter_a)


class LayerNorm(nn.LayerNorm):
    """Layer normalisation over the last axis, eps 1e-5; statistics in fp32 at least, the result in the dtype of x."""

    def __init__(self, c: int) -> None:
        super().__init__(c, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class NoNorm(LayerNorm):
    """No normalisation, where a layer is given what is normalised already: x as it is.  It has no parameters."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def extra_repr(self) -> str:
        return ""


class DrawsNoise(nn.Module):
    """A module with dropout: `noise` is where it draws from, `stream` sets its draws apart from those of others."""

    noise: Noise
    stream: int = 0

    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise()


class PackedOperands(Protocol):
    """The weights of a model as operations read them."""

    def joined(self, dtype: torch.dtype, projections: tuple[Linear, ...]) -> tuple[Tensor, Tensor | None] | None:
        """Return the result of `joined` without a copy; None if the weights do not lie so."""

    def catch_up(self) -> None:
        """Have what a graph reads be what the parameters hold."""


def joined(dtype: torch.dtype, *projections: Linear) -> tuple[Tensor, Tensor | None]:
    """Return the weights of projections of one tensor as one [o, c], and the biases of the first b outputs as one [b].

    Those with a bias had better come first: one without has zeros there.  In `dtype` where they are packed, else in
    that of the parameters: operations take both.
    """
    packed = projections[0].packed
    if packed is not None and not torch.compiler.is_compiling():
        found = packed.joined(dtype, projections)
        if found is not None:
            return found
    if len(projections) == 1:
        return projections[0].weight, projections[0].bias
    weights: list[Tensor] = [p.weight for p in projections]
    biases: list[Tensor | None] = [p.bias for p in projections]
    while biases and biases[-1] is None:
        biases.pop()
    given = [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases)]
    return torch.cat(weights), torch.cat(given) if given else None


def project(x: Tensor, norm: LayerNorm, *projections: Linear, planes: bool = False) -> tuple[Tensor, ...]:
    """Return every projection of the normalised x, made in one pass over it, as views of one tensor.

    As of `joined`.  So no normalised tensor is written to memory, read again and kept for the gradient.  planes: laid
    out one by one, where an operation makes them.
    """
    weight, bias = joined(x.dtype, *projections)
    if isinstance(norm, NoNorm):
        if bias is not None and len(bias) < len(weight):
            bias = F.pad(bias, (0, len(weight) - len(bias)))
        y = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    else:
        y = norm_linear(x, norm.weight, norm.bias, weight, bias, norm.eps, planes)
    if len(projections) == 1:
        return (y,)  # the gradient of a split would be copied
    return y.split([len(projection.weight) for projection in projections], -1)
