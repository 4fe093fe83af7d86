"""gated_attention: a whole attention layer as one operation, from what its norm reads to the new residual.

Forward: y = linear(layer_norm(x)), all projections joined; o = attention of y; out = x + factors linear(gate(o)).

For the backward pass it keeps y, the norm's statistics, o and lse beside x.  Keeping y costs no time: the forward pass
of a GPU writes it anyway, and making it again would cost a product (128 to 516 channels at N = 256: 9 GFLOP and 68 MB
written in half precision); on a CPU making it again was 8 % of the backward pass.  Where memory is short, a plan
computes sublayers again.  Where no backward pass can follow, nothing is kept, and y need not exist whole.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.attention import attention, unsupported_width
from warpfold.ops.dispatch import backend, faster_on_cpu
from warpfold.ops.gate import gate
from warpfold.ops.noise import FACTOR_OPERANDS, Factors
from warpfold.ops.norm import EPS, empty_projected, empty_statistics, norm_linear, padded, unsupported_channels
from warpfold.ops.register import register
from warpfold.ops.shapes import Sizes
from warpfold.ops.tensors import accumulation_dtype, empty_like, empty_parameters


def empty_rows(x: Tensor, channels: int) -> Tensor:
    """Allocate [*, R, K, channels]: on a CPU row by row, as it is computed; on a GPU in the order of x."""
    if backend(x) == "triton":
        return empty_projected(x, channels)
    return x.new_empty(*x.shape[:-1], padded(channels))[..., :channels]


def empty_lse(x: Tensor, heads: int) -> Tensor:
    """Allocate the logarithms of the softmax's sums, [*, R, h, K]: see ops/attention.py."""
    return x.new_empty(*x.shape[:-2], heads, x.shape[-2], dtype=accumulation_dtype(x))


def empty_bias(x: Tensor, bias: Tensor | None, wanted: bool) -> Tensor:
    """Allocate the gradient of a given bias, [*, h, K, K]: heads innermost, where those of the bias are.

    So the projection that made it reads it where it lies.  Without elements where there is none, or it is not wanted.
    """
    if bias is None or not wanted:
        return x.new_empty(0)
    *batch, heads, queries, keys = bias.shape
    if bias.stride(-3) != 1:
        return bias.new_empty(bias.shape)
    return bias.new_empty(*batch, queries, keys, heads).movedim(-1, -3)


def _empty(
    x: Tensor, _nw: Tensor, _nb: Any, weight: Tensor, _gb: Tensor | None, out_weight: Tensor, *more: Any
) -> tuple[Tensor, ...]:
    _, _, _, heads, *_, kept = more
    if not kept:
        return empty_like(x), *(x.new_empty(0) for _ in range(5))
    y, o = empty_rows(x, weight.shape[0]), empty_rows(x, out_weight.shape[1])
    return empty_like(x), y, *empty_statistics(x), o, empty_lse(x, heads)


def _empty_gradients(grad: Tensor, x: Tensor, *kept: Any) -> tuple[Tensor, ...]:
    parameters, bias, bias_wanted = kept[:6], kept[7], kept[-1]
    return empty_like(x), *empty_parameters(*parameters), empty_bias(x, bias, bias_wanted)


def _wrong_sizes(weight: Tensor, gate_bias: Tensor | None, out_weight: Tensor, bias: Any, heads: int, x: Any) -> str:
    """Return what is wrong with the sizes that shapes cannot describe, or nothing."""
    (outputs, _), inner = weight.shape, out_weight.shape[1]
    if heads < 1 or inner % heads:
        return f"{inner} channels are not {heads} heads"
    if gate_bias is not None and gate_bias.shape[0] > outputs:
        return "gate_bias is longer than the outputs"
    if bias is not None and bias.shape[-3] != heads:
        return f"the bias is of {bias.shape[-3]} heads, not {heads}"
    if outputs == 4 * inner:
        return ""
    if outputs != 4 * inner + heads:
        return "weight is neither [4 i, c] nor [4 i + heads, c]"
    if bias is not None:
        return "the bias is given, but weight makes one"
    return "" if x.shape[-3] == x.shape[-2] else "weight makes a bias, but x is not square"


def _check(op: str, sizes: Sizes, operands: Mapping[str, Any]) -> None:
    names = ("weight", "gate_bias", "out_weight", "bias", "heads", "x")
    if wrong := _wrong_sizes(*(operands[name] for name in names)):
        raise ValueError(f"{op}: {wrong}")


def _unsupported(x: Tensor, _nw: Tensor, _nb: Any, weight: Tensor, gate_bias: Tensor | None, *more: Any) -> str | None:
    out_weight, _, _, bias, heads, *_ = more
    if wrong := _wrong_sizes(weight, gate_bias, out_weight, bias, heads, x):
        return wrong
    if backend(x) == "cpu":
        return None
    inner, batch = out_weight.shape[1], range(1, x.dim() - 3)
    if any(x.stride(axis - 1) != x.shape[axis] * x.stride(axis) for axis in batch):
        return "the batch axes of x are not one"
    return unsupported_channels(x) or unsupported_width(inner // heads)


def parts(
    y: Tensor, inner: int, heads: int, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gate's logits [*, R, K, i], q, k and v [*, R, K, h, d], and the bias [*, h, K, K], all of them views.

    y [*, R, K, o] is the projection, or its gradient; bias: that which is given.
    """
    g, q, k, v, own = y.split([inner] * 4 + [y.shape[-1] - 4 * inner], -1)
    if own.shape[-1]:
        bias = own.movedim(-1, -3)
    return g, *(t.unflatten(-1, (heads, -1)) for t in (q, k, v)), bias


def batched(t: Tensor, axes: int) -> Tensor:
    """Return t [*, ...] as [B, ...], of so many axes: a view where the batch axes of x are one."""
    if t.dim() == axes:
        return t
    return t.unsqueeze(0) if t.dim() < axes else t.flatten(0, t.dim() - axes)


@register(
    shapes="x [*, R, K, c], norm_weight [c], norm_bias [c], weight [o, c], gate_bias [b], out_weight [c, i], "
    "out_bias [c], mask [*, R, K], bias [*, h, K, K], factors ([*, R, K, c]), key [2], grad [*, R, K, c], "
    "y [*, R, K, o], mean [*, R, K], scale [*, R, K], attended [*, R, K, i], lse [*, R, h, K]",
    empty=_empty,
    results="out y mean scale attended lse",
    keeps="x norm_weight norm_bias weight gate_bias out_weight out_bias mask bias y mean scale attended lse factors "
    "heads residual bias_wanted",
    gradients="x norm_weight norm_bias weight gate_bias out_weight out_bias bias",
    empty_gradients=_empty_gradients,
    kept=True,
    check=_check,
    expand=FACTOR_OPERANDS,
    unsupported_reason=_unsupported,
    # Decided by the projections; the backward pass has more to do for each row.
    prefer_definition=lambda x, norm_weight, norm_bias, weight, *_: faster_on_cpu(
        x, x.numel() // max(1, x.shape[-1]) * weight.shape[0], 3 * 2**20 if torch.is_grad_enabled() else 2**19
    ),
)
def gated_attention(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    gate_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    mask: Tensor,
    bias: Tensor | None,
    heads: int,
    factors: Factors | None = None,
    eps: float = EPS,
    residual: bool = True,
) -> Tensor:
    """Return x + factors * linear(gate(attention)) of the normalised x, within each row (Algorithms 7, 8, 13 and 14);
    or that without the first x where `residual` is False.

    x [*, R, K, c], norm_weight, norm_bias [c], out_weight [c, i] (i = heads x width), out_bias [c], mask [*, R, K] (1:
    attend), bias [*, h, K, K] of the logits, the same for all rows, factors of dropout (axes of size 1 are shared;
    None: ones) -> [*, R, K, c] in the dtype of x, laid out in memory as x is.  Parameters of any float dtype; any bias
    may be None.

    weight [4 i, c] makes the gate, q, k and v, one below the other; gate_bias [b] belongs to its first b <= o outputs.
    weight [4 i + heads, c] makes the bias as well, of x itself, where R = K: logits [q, k] have that of x[q, k].
    """
    if bias is not None and len(weight) > 4 * out_weight.shape[1]:
        raise ValueError("gated_attention: the bias is given, but weight makes one")
    y = norm_linear.definition(x, norm_weight, norm_bias, weight, gate_bias, eps)
    g, q, k, v, bias = parts(y, out_weight.shape[1], heads, bias)
    bias = None if bias is None else bias[..., None, :, :, :]  # the same for every row
    o = gate.definition(attention.definition(q, k, v, mask, bias).flatten(-2), g)
    dx = F.linear(o, out_weight.to(x.dtype), None if out_bias is None else out_bias.to(x.dtype))
    dx = dx if factors is None else dx * factors
    return x + dx if residual else dx
