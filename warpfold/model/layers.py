"""The building blocks of every layer: Linear with AlphaFold2's initialisations, LayerNorm, and the source of dropout.

Linear and LayerNorm store their parameters in one dtype (normally fp32) and compute in the dtype of their input. The
activations alone thus select fp32, bf16 or fp64, without an autocast context.
"""

import math
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warpfold.ops.linear import layer_norm, norm_linear
from warpfold.ops.noise import Noise
from warpfold.ops.tensors import exact_matmul

Init = Literal["default", "relu", "glorot", "gating", "final"]


class Linear(nn.Linear):
    """y = x W^T + b, computed in the dtype of x: [*, c_in] -> [*, c_out].

    `init` (Supp. 1.11.4): "default" LeCun; "relu" He; "glorot" Glorot uniform, for queries, keys and values; "gating"
    zero weights and a bias of one, so that gates start open; "final" zeros, so that residual updates start at zero.
    """

    # The packed copy of its weights that operations read (engine/packed.py), if there is one.
    packed: "PackedOperands | None" = None

    def __init__(self, c_in: int, c_out: int, bias: bool = True, init: Init = "default") -> None:
        self.init = init
        super().__init__(c_in, c_out, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the parameters from the distribution that `init` names."""
        if self.bias is not None:
            nn.init.constant_(self.bias, 1.0 if self.init == "gating" else 0.0)
        if self.init in ("gating", "final"):
            nn.init.zeros_(self.weight)
        elif self.init == "glorot":
            nn.init.xavier_uniform_(self.weight)
        else:
            # The standard deviation of a normal distribution truncated at two standard deviations is 0.8796.
            scale = 2.0 if self.init == "relu" else 1.0
            std = math.sqrt(scale / self.in_features) / 0.87962566103423978
            nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = joined(x.dtype, self)
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class AdaptedLinear(Linear):
    """A linear layer with a low-rank adapter: its weight is W + scale B A (Hu et al. 2021, section 4.1).

    scale is their alpha / r. A [rank, c_in] and B [c_out, rank] are trained. W keeps its usual name and is not trained.
    The attribute `weight` is the dense weight, through which autograd reaches A and B, so operations, plans and kernels
    need no case for adapters (docs/howto/fine_tune.md). `engine.trainable.freeze` converts a layer to this class.
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
    """Layer normalisation over the last axis, eps 1e-5, with statistics in fp32 or wider; the result has x's dtype."""

    def __init__(self, c: int) -> None:
        super().__init__(c, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class NoNorm(LayerNorm):
    """The identity without parameters, for layers whose input is normalised already."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def extra_repr(self) -> str:
        return ""


class DrawsNoise(nn.Module):
    """A module with dropout. It draws from the stream `stream` of the source `noise`."""

    noise: Noise
    stream: int = 0

    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise()


class PackedOperands(Protocol):
    """The weights of a model, packed in the layout that operations read."""

    def joined(self, dtype: torch.dtype, projections: tuple[Linear, ...]) -> tuple[Tensor, Tensor | None] | None:
        """Return the result of `joined` as views of the packed weights; None if these are not adjacent."""

    def gathered(self, layer: Any, dtype: torch.dtype, variant: bool) -> Any:
        """Return `layer.gather_weights(dtype, variant)`, and the same record again until one of its tensors changes."""

    def catch_up(self) -> None:
        """Update the tensors that captured graphs read to the values of the parameters."""


def joined(dtype: torch.dtype, *projections: Linear) -> tuple[Tensor, Tensor | None]:
    """Concatenate the weights of projections of one tensor to [o, c], and the biases of the first b outputs to [b].

    Pass projections with a bias first: a projection without one gets zeros if a later one has a bias. The result is in
    `dtype` if the weights are packed, else in the parameters' dtype. Operations accept both.
    """
    packed = projections[0].packed
    if packed is not None and not torch.compiler.is_dynamo_compiling():
        views = packed.joined(dtype, projections)
        if views is not None:
            return views
    if len(projections) == 1:
        return projections[0].weight, projections[0].bias
    weights: list[Tensor] = [p.weight for p in projections]
    biases: list[Tensor | None] = [p.bias for p in projections]
    while biases and biases[-1] is None:
        biases.pop()
    padded_biases = [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases)]
    return torch.cat(weights), torch.cat(padded_biases) if padded_biases else None


def project(x: Tensor, norm: LayerNorm, *projections: Linear, planes: bool = False) -> tuple[Tensor, ...]:
    """Normalise x and compute all projections in one pass over it, as views of one tensor.

    The normalised tensor is neither written to memory nor saved for the gradient. For the order of projections see
    `joined`. planes: lay out each output channel as a contiguous plane (only with a norm).
    """
    weight, bias = joined(x.dtype, *projections)
    if isinstance(norm, NoNorm):
        if bias is not None and len(bias) < len(weight):
            bias = F.pad(bias, (0, len(weight) - len(bias)))
        y = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    else:
        y = norm_linear(x, norm.weight, norm.bias, weight, bias, norm.eps, planes)
    if len(projections) == 1:
        # No split, because the gradient of a split is copied.
        return (y,)
    return y.split([len(projection.weight) for projection in projections], -1)
