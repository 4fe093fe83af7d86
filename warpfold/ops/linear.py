"""layer_norm and gate, alone and fused with the adjacent projection, which avoids the intermediate tensor.

norm_linear projects the input of a layer; gated_linear_residual adds the result of a gated attention to the residual.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.dispatch import (
    accumulation_dtype,
    backend,
    empty_like,
    empty_parameters,
    faster_on_cpu,
    laid_out_as,
    register,
    upcast_half,
)
from warpfold.ops.noise import FACTOR_OPERANDS, Factors

EPS = 1e-5  # AlphaFold2's layer normalisations
# Elements of a memory sector of a GPU in half precision (32 bytes).
ROW = 16
CHANNELS = (16, 1024)  # range of the Triton kernels


def unsupported_channels(x: Tensor) -> str | None:
    """Return the reason why no kernel supports the channels of x, or None."""
    fewest, most = CHANNELS
    if backend(x) == "triton" and not fewest <= x.shape[-1] <= most:
        return f"{x.shape[-1]} channels (kernels are for {fewest} to {most})"
    return None


def exact_on_gpu(x: Tensor) -> bool:
    """Return whether x is on a GPU and has more than 16 bits: without tensor cores, products of torch are as fast."""
    return backend(x) == "triton" and x.element_size() > 2


def empty_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the mean and 1 / deviation of each position, both [*] and contiguous."""
    dtype = accumulation_dtype(x)
    return x.new_empty(x.shape[:-1], dtype=dtype), x.new_empty(x.shape[:-1], dtype=dtype)


def empty_projected(x: Tensor, outputs: int) -> Tensor:
    """Allocate the projections of x, [*, outputs], with the positions in the memory order of x.

    Each position is padded to half a `ROW` or to whole ones, so that kernels can read views (q, k, v ...) in wide
    words.
    """
    order = sorted(range(x.dim() - 1), key=lambda axis: x.stride(axis), reverse=True)
    inverse_order = [order.index(axis) for axis in range(x.dim() - 1)]
    whole = x.new_empty([*(x.shape[axis] for axis in order), padded(outputs)])
    return whole.permute(*inverse_order, x.dim() - 1).narrow(-1, 0, outputs)


def empty_linear(x: Tensor, outputs: int, planes: bool = False) -> Tensor:
    """Allocate the projections of x as `empty_projected` does, or as `planes` [*, outputs, R, K] viewed [*, outputs].

    Rows of planes are padded to multiples of a wide word.
    """
    if not planes:
        return empty_projected(x, outputs)
    *batch, rows, length, _ = x.shape
    whole = x.new_empty(*batch, outputs, rows, -(-length // ROW) * ROW)
    return whole.narrow(-1, 0, length).movedim(-3, -1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x weight^T + bias in the dtype of x, whatever the dtype of the parameters."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def padded(outputs: int) -> int:
    """Return the number of elements that the projections of a position occupy: half a `ROW`, or whole ones."""
    return ROW // 2 if outputs <= ROW // 2 else -(-outputs // ROW) * ROW


@register(
    shapes="x [*, c], weight [c], bias [c], grad [*, c], mean [*], scale [*]",
    empty=lambda t: (empty_like(t.x), *empty_statistics(t.x)),
    results="y mean scale",
    keeps="x weight mean scale",
    gradients="x weight bias",
    # The gradient of the bias has the shape of the weight's.
    empty_gradients=lambda t: (empty_like(t.x), *empty_parameters(t.weight, t.weight)),
    unsupported=lambda t: unsupported_channels(t.x),
    # The definition normalises in fp32, so that it needs no intermediate tensor for x in fp32.
    prefer_definition=lambda t: faster_on_cpu(t.x, t.x.numel(), 2**21 if t.x.dtype.itemsize < 4 else 2**63),
)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = EPS) -> Tensor:
    """Normalise x over its last axis, with statistics in fp32 at least and the result in the dtype of x.

    x [*, c], weight, bias [c] (None: zeros) -> [*, c] in the layout of x.
    """
    full = upcast_half(x)
    shift = None if bias is None else bias.to(full.dtype)
    return F.layer_norm(full, x.shape[-1:], weight.to(full.dtype), shift, eps).to(x.dtype)


def _misfit_of_projection(t: Any) -> str | None:
    if t.bias is not None and t.bias.shape[0] > t.weight.shape[0]:
        return f"bias is {list(t.bias.shape)}, but weight is {list(t.weight.shape)}"
    # The backward operation has no `planes`.
    if getattr(t, "planes", False) and t.x.dim() < 3:
        return f"x is {list(t.x.shape)}, not [*, R, K, c], which planes require"
    return None


def _projection_by_torch(t: Any) -> Tensor | None:
    """Compute the definition in fp32 on a GPU."""
    return norm_linear.definition(*t) if exact_on_gpu(t.x) else None


@register(
    shapes="x [*, c], norm_weight [c], norm_bias [c], weight [o, c], bias [b], grad [*, o], mean [*], scale [*]",
    empty=lambda t: (empty_linear(t.x, t.weight.shape[0], t.planes), *empty_statistics(t.x)),
    results="y mean scale",
    keeps="x norm_weight norm_bias weight bias mean scale",
    gradients="x norm_weight norm_bias weight bias",
    composed=_projection_by_torch,
    misfit=_misfit_of_projection,
    unsupported=lambda t: unsupported_channels(t.x),
    prefer_definition=lambda t: faster_on_cpu(t.x, t.x.numel() // max(1, t.x.shape[-1]) * t.weight.shape[0], 2**21),
)
def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = EPS,
    planes: bool = False,
) -> Tensor:
    """Compute linear(layer_norm(x)).

    x [*, c], norm_weight, norm_bias [c] (None: zeros), weight [o, c], bias [b] of the first b <= o outputs -> [*, o] in
    the dtype of x.  Join the weights of several projections of one tensor, those with a bias first.  Parameters may
    have any float dtype.  planes: write each output of x [*, R, K, c] to its own plane, as attention reads a bias; the
    definition ignores this.
    """
    n = layer_norm.definition(x, norm_weight, norm_bias, eps)
    if bias is not None:
        missing = weight.shape[0] - bias.shape[0]
        if missing < 0:
            raise ValueError(f"norm_linear: bias is {list(bias.shape)}, but weight is {list(weight.shape)}")
        bias = F.pad(bias.to(x.dtype), (0, missing))
    return linear(n, weight, bias)


def _prefer_definition(t: Any) -> bool:
    return faster_on_cpu(t.x, t.x.numel(), 2**21)


@register(
    shapes="x [*, c], g [*, c], grad [*, c]",
    keeps="x g",
    gradients="x g",
    same_dtype="x g",
    prefer_definition=_prefer_definition,
)
def gate(x: Tensor, g: Tensor) -> Tensor:
    """Compute x * sigmoid(g): x, g [*, c] -> [*, c] in the dtype of x."""
    return x * g.sigmoid()


def _misfit_of_factors(t: Any) -> str | None:
    # Only the registered operations have a key and strides.
    if getattr(t, "key", None) is not None and len(t.strides) != t.o.dim():
        return f"the dropout factors have {len(t.strides)} strides, but x has {t.o.dim()} axes"
    return None


def _residual_by_torch(t: Any) -> Tensor | None:
    """Compute the definition in fp32 on a GPU, with the layout of x."""
    return laid_out_as(gated_linear_residual.definition(*t), t.x) if exact_on_gpu(t.x) else None


@register(
    shapes="x [*, c], o [*, i], g [*, i], weight [c, i], bias [c], grad [*, c], factors ([*, c]), key [2]",
    keeps="o g weight bias factors",
    gradients="o g weight bias",
    residual="x",
    same_dtype="x o g",
    misfit=_misfit_of_factors,
    expand=FACTOR_OPERANDS,
    composed=_residual_by_torch,
    prefer_definition=_prefer_definition,
)
def gated_linear_residual(
    x: Tensor, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors | None = None
) -> Tensor:
    """Compute x + factors * linear(gate(o, g)): gate, output projection, shared-axis dropout and residual in one pass.

    x [*, c], o, g [*, i], weight [c, i], bias [c], dropout factors (axes of size 1 are shared; None: ones)
    -> [*, c] in the dtype and layout of x.  Parameters may have any float dtype.  Factors that are not drawn yet
    (`ops.noise.DropoutFactors`) are drawn in the kernels, forward and backward, and are never stored.
    """
    dx = linear(gate.definition(o, g), weight, bias)
    return x + (dx if factors is None else dx * factors)
