"""layer_norm, and norm_linear: the projection that follows a norm, without the normalised tensor in between."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.dispatch import Operands, backend, faster_on_cpu
from warpfold.ops.register import register
from warpfold.ops.shapes import Sizes
from warpfold.ops.tensors import accumulation_dtype, empty_like, empty_parameters, upcast_half

EPS = 1e-5  # of every layer normalisation in AlphaFold2
ROW = 16  # elements: in half precision 32 bytes, what a GPU's memory hands over at once
CHANNELS = (16, 1024)  # the fewest and the most that the Triton kernels serve


def unsupported_channels(x: Tensor) -> str | None:
    """Return why no kernel serves the channels of x, or None."""
    fewest, most = CHANNELS
    if backend(x) == "triton" and not fewest <= x.shape[-1] <= most:
        return f"{x.shape[-1]} channels (kernels are for {fewest} to {most})"
    return None


def empty_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the mean and 1 / deviation of each position, [*] in order."""
    dtype = accumulation_dtype(x)
    return x.new_empty(x.shape[:-1], dtype=dtype), x.new_empty(x.shape[:-1], dtype=dtype)


def empty_projected(x: Tensor, outputs: int) -> Tensor:
    """Allocate the projections of x, [*, outputs], their positions in memory in the order of x's.

    Each position takes half a `ROW` or whole ones, so that views (q, k, v ...) can be read in wide words.
    """
    order = sorted(range(x.dim() - 1), key=lambda axis: x.stride(axis), reverse=True)
    back = [order.index(axis) for axis in range(x.dim() - 1)]
    whole = x.new_empty([*(x.shape[axis] for axis in order), padded(outputs)])
    return whole.permute(*back, x.dim() - 1).narrow(-1, 0, outputs)


def padded(outputs: int) -> int:
    """Return how many elements a position's projections take in memory: half a row, or whole ones."""
    return ROW // 2 if outputs <= ROW // 2 else -(-outputs // ROW) * ROW


@register(
    shapes="x [*, c], weight [c], bias [c], grad [*, c], mean [*], scale [*]",
    empty=lambda t: (empty_like(t.x), *empty_statistics(t.x)),
    results="y mean scale",
    keeps="x weight mean scale",
    gradients="x weight bias",
    empty_gradients=lambda t: (empty_like(t.x), *empty_parameters(t.weight, t.weight)),  # the bias's alike
    unsupported=lambda t: unsupported_channels(t.x),
    # The definition normalises in fp32: for x in that dtype it needs nothing in between.
    prefer_definition=lambda t: faster_on_cpu(t.x, t.x.numel(), 2**21 if t.x.dtype.itemsize < 4 else 2**63),
)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = EPS) -> Tensor:
    """Normalise x over its last axis; statistics in fp32 at least, the result in the dtype of x.

    x [*, c], weight, bias [c] (None: zeros) -> [*, c], laid out in memory as x is.
    """
    full = upcast_half(x)
    shift = None if bias is None else bias.to(full.dtype)
    return F.layer_norm(full, x.shape[-1:], weight.to(full.dtype), shift, eps).to(x.dtype)


def _check_bias(op: str, sizes: Sizes, t: Operands) -> None:
    """Raise ValueError for more biases than outputs."""
    if t.bias is not None and sizes["b"] > sizes["o"]:
        raise ValueError(f"{op}: bias is [{sizes['b']}], but there are {sizes['o']} outputs")


def _unsupported_projection(t: Any) -> str | None:
    if t.bias is not None and t.bias.shape[0] > t.weight.shape[0]:
        return "bias is longer than the outputs"
    return unsupported_channels(t.x)


@register(
    shapes="x [*, c], norm_weight [c], norm_bias [c], weight [o, c], bias [b], grad [*, o], mean [*], scale [*]",
    empty=lambda t: (empty_projected(t.x, t.weight.shape[0]), *empty_statistics(t.x)),
    results="y mean scale",
    keeps="x norm_weight norm_bias weight bias mean scale",
    gradients="x norm_weight norm_bias weight bias",
    check=_check_bias,
    unsupported=_unsupported_projection,
    prefer_definition=lambda t: faster_on_cpu(t.x, t.x.numel() // max(1, t.x.shape[-1]) * t.weight.shape[0], 2**21),
)
def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """Return linear(layer_norm(x)): x [*, c], norm_weight, norm_bias [c] (None: zeros), weight [o, c], bias [b] of the
    first b <= o outputs -> [*, o] in the dtype of x.

    Several projections of one tensor are one call, their weights joined, those with a bias first.  Parameters of any
    float dtype.
    """
    n = layer_norm.definition(x, norm_weight, norm_bias, eps)
    if bias is not None:
        missing = weight.shape[0] - bias.shape[0]
        if missing < 0:
            raise ValueError(f"norm_linear: bias is {list(bias.shape)}, but weight is {list(weight.shape)}")
        bias = F.pad(bias.to(x.dtype), (0, missing))
    return F.linear(n, weight.to(x.dtype), bias)
