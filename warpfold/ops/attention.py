"""attention: softmax(q k^T / sqrt(d) + bias) v over the rows of an alignment or a pair representation.

The registered operation has five axes, q [B, R, Q, h, d]: batches B with one bias each, rows R that share the bias of
their batch, then queries (or keys), heads and width.  The tensors of layers are viewed in this form without a copy.
Besides its output the operation returns `lse` [B, R, h, Q], the natural logarithm of the softmax's sum over the
unmasked keys, in fp32 (fp64 for fp64).  lse is inf if there are no unmasked keys or all have a bias of -inf, so that
each key has weight 0.

gated_attention: a whole attention layer as one operation, from the input of its norm to the new residual.

The forward pass computes y = linear(layer_norm(x)) with all projections joined, o = attention of y, and
out = x + factors linear(gate(o)).

A bias that is projected from x is written in planes, one per head.

For the backward pass the operation saves y, the norm's statistics, o, lse and a projected bias besides x.  Saving y
costs no time, because the forward pass on a GPU writes it anyway.  Recomputing it would cost a product (128 to 516
channels at N = 256: 9 GFLOP, and 68 MB written in half precision); on a CPU this was 8 % of the backward pass.  Plans
for little memory recompute whole sublayers.  If no backward pass can follow, nothing is saved, and y need not exist as
a whole.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from warpfold.ops.dispatch import (
    EMPTY,
    Operands,
    Shape,
    Shapes,
    accumulation_dtype,
    backend,
    broadcast_shape,
    empty_like,
    empty_parameters,
    expands_to,
    faster_on_cpu,
    laid_out_as,
    op,
    register,
    upcast_half,
)
from warpfold.ops.linear import (
    EPS,
    empty_linear,
    empty_projected,
    empty_statistics,
    exact_on_gpu,
    gate,
    linear,
    norm_linear,
    padded,
    unsupported_channels,
)
from warpfold.ops.noise import FACTOR_OPERANDS, Factors

WIDTHS = (8, 16, 24, 32, 48, 64)  # head widths with Triton kernels


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    """Allocate the output, [B, R, Q, h, e]: rows and queries have the memory order of q, and h and e are innermost."""
    batches, rows, queries, heads, _ = q.shape
    if q.stride(1) >= q.stride(2):
        return q.new_empty(batches, rows, queries, heads, v.shape[-1])
    return q.new_empty(batches, queries, rows, heads, v.shape[-1]).transpose(1, 2)


def empty_lse(q: Tensor) -> Tensor:
    """Allocate the logarithms, [B, R, h, Q]."""
    batches, rows, queries, heads, _ = q.shape
    return q.new_empty(batches, rows, heads, queries, dtype=accumulation_dtype(q))


def empty_bias(bias: Tensor | None, wanted: bool, q: Tensor) -> Tensor:
    """Allocate the gradient of the bias, contiguous [B, h, Q, K], or without elements if it is not needed."""
    return q.new_empty(0) if bias is None or not wanted else bias.new_empty(bias.shape)


def _misfit_of_values(t: Any) -> str | None:
    """Describe values of another width than keys: the GPU kernels read both in the same way."""
    width = t.k.shape[-1]
    if t.v.shape[-1] != width and backend(t.q) == "triton":
        return f"v is {list(t.v.shape)}, not [B, R, K, h, d] with d = {width}"
    return None


def _with_five_axes(
    registered: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None
) -> Tensor:
    """Call the registered operation: axis B joins all leading axes but the last, which is axis R."""
    leading = broadcast_shape(tuple(q.shape)[:-3], tuple(k.shape)[:-3], tuple(v.shape)[:-3], tuple(mask.shape)[:-1])
    if leading is None:
        raise ValueError("warpfold::attention: the leading axes of q, k, v and the mask do not broadcast")
    shape = q.shape[-2], q.shape[-3], k.shape[-3]
    # The rows share the bias: view [*, 1, h, Q, K] as [B, h, Q, K].
    if bias is not None and not (len(leading) == 1 and tuple(bias.shape) == (1, *shape)):
        bias = bias.expand(*leading[:-1], *([1] if leading else []), *shape).reshape(math.prod(leading[:-1]), *shape)
    q, k, v = _as_rows(q, leading, 3), _as_rows(k, leading, 3), _as_rows(v, leading, 3)
    out = registered(q, k, v, _as_rows(mask, leading, 1), bias)
    return out.squeeze(0) if len(leading) == 1 else out.reshape(*leading, *out.shape[2:])


def _as_rows(t: Tensor, leading: Shape, own: int) -> Tensor:
    """View [*, own axes] as [B, R, own axes]; copy only if several axes have to be merged into B and cannot be."""
    # The usual case, which takes the fastest view.
    if len(leading) == 1 and t.dim() == own + 1 and t.shape[0] == leading[0]:
        return t.unsqueeze(0)
    t = t.expand(*leading, *t.shape[t.dim() - own :])
    return t.reshape(math.prod(leading[:-1]), leading[-1] if leading else 1, *t.shape[len(leading) :])


def unsupported_width(width: int) -> str | None:
    """Return why no kernel serves heads of this width, or None."""
    return None if width in WIDTHS else f"heads {width} wide (kernels are for {', '.join(map(str, WIDTHS))})"


def _misfit_of_attention(t: Any) -> str | None:
    """Describe leading axes that do not broadcast; EMPTY if there is no row, else None."""
    q, k, v, mask, bias = t
    leading = broadcast_shape(*(tuple(x.shape)[:-axes] for x, axes in ((q, 3), (k, 3), (v, 3), (mask, 1))))
    if leading is None:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v), ("mask", mask)))
        return f"the leading axes of {shapes} do not broadcast"
    if bias is not None:
        right = (*leading, q.shape[-2], q.shape[-3], k.shape[-3])
        if not expands_to(tuple(bias.shape), right):
            return f"bias is {list(bias.shape)}, not [*, h, Q, K] = {list(right)} or 1 on an axis"
    return EMPTY if 0 in leading else None


def _unsupported_attention(t: Any) -> str | None:
    q, _, v, _, bias = t
    if bias is not None and bias.dim() > 3 and bias.shape[-4] != 1:
        return "the bias differs from row to row"
    if backend(q) == "triton":
        return unsupported_width(q.shape[-1]) if v.shape[-1] == q.shape[-1] else "values of another width than keys"
    return None


@register(
    shapes="q [B, R, Q, h, d], k [B, R, K, h, d], v [B, R, K, h, e], mask [B, R, K], bias [B, h, Q, K], "
    "grad [B, R, Q, h, e], out [B, R, Q, h, e], lse [B, R, h, Q]",
    empty=lambda t: (empty_out(t.q, t.v), empty_lse(t.q)),
    results="out lse",
    keeps="q k v mask bias out lse bias_wanted",
    gradients="q k v bias",
    empty_gradients=lambda t: (*map(empty_like, (t.q, t.k, t.v)), empty_bias(t.bias, t.bias_wanted, t.q)),
    same_dtype="q k v",
    misfit=_misfit_of_values,
    adapter=_with_five_axes,
    caller_shapes="q [..., Q, h, d], k [..., K, h, d], v [..., K, h, e], mask [..., K], bias ([..., h, Q, K])",
    caller_misfit=_misfit_of_attention,
    unsupported=_unsupported_attention,
    # The number of logits decides.
    prefer_definition=lambda t: faster_on_cpu(t.q, t.q.numel() // max(1, t.q.shape[-1]) * t.k.shape[-3], 2**19),
)
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute multi-head attention with a key mask and an additive bias; softmax in fp32 at least.

    q [*, Q, h, d], k [*, K, h, d], v [*, K, h, e], mask [*, K] (1 = attend), bias [*, h, Q, K] (axes of size 1 are
    shared) -> [*, Q, h, e] in the dtype of q.  A fully masked row attends equally to all its keys, as in the official
    code.  A query with a bias of -inf at every unmasked key attends equally to the masked keys; without masked keys its
    result is NaN.
    """
    # Move the heads to the front and make the tensors contiguous: products of strided matrices are slow on all devices.
    q, k, v = (t.transpose(-2, -3).contiguous() for t in (q * q.shape[-1] ** -0.5, k, v))
    logits = q @ k.mT
    if bias is not None:
        logits = logits + bias
    logits = upcast_half(logits).masked_fill(mask[..., None, None, :] == 0, -1e9)
    return (logits.softmax(-1).to(v.dtype) @ v).transpose(-2, -3)


_GLOBAL = Shapes("q [..., h, d], k [..., K, d], v [..., K, e], mask [..., K]", ("q", "k", "v", "mask"))


def _misfit_of_global(t: Any) -> str | None:
    problem = _GLOBAL.misfit(t)
    if problem:
        return problem
    leading = broadcast_shape(*(tuple(x.shape)[:-axes] for x, axes in zip(t, (2, 2, 2, 1))))
    if leading is None:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in zip(("q", "k", "v", "mask"), t))
        return f"the leading axes of {shapes} do not broadcast"
    return EMPTY if 0 in leading else problem


# The fast path is that of `attention`, with the heads as the queries of a single head.
@op(
    lambda t: attention.fast(t.q.unsqueeze(-2), t.k.unsqueeze(-2), t.v.unsqueeze(-2), t.mask).squeeze(-2),
    lambda t: attention.unsupported_reason(t.q.unsqueeze(-2), t.k.unsqueeze(-2), t.v.unsqueeze(-2), t.mask),
    lambda t: faster_on_cpu(t.q, t.q.numel() // max(1, t.q.shape[-1]) * t.k.shape[-2], 2**19),
    _misfit_of_global,
)
def global_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Let one query per column attend, with the same keys and values for every head (Algorithm 19, lines 5 and 6).

    q [*, h, d], k [*, K, d], v [*, K, e], mask [*, K] -> [*, h, e].
    """
    logits = upcast_half(torch.einsum("...hd,...kd->...hk", q * q.shape[-1] ** -0.5, k))
    weights = logits.masked_fill(mask[..., None, :] == 0, -1e9).softmax(-1)
    return torch.einsum("...hk,...ke->...he", weights.to(v.dtype), v)


def masked_mean(x: Tensor, mask: Tensor, axis: int) -> Tensor:
    """Compute the mean of x over the positions of `axis` whose mask is 1, or 0 if there are none.

    The mask is broadcast against x.
    """
    full = upcast_half(x)
    mask = mask.to(full.dtype)
    return ((full * mask).sum(axis) / (mask.sum(axis) + 1e-10)).to(x.dtype)


def empty_saved_rows(x: Tensor, channels: int) -> Tensor:
    """Allocate [*, R, K, channels]: row-major on a CPU, which computes it by rows, and in the order of x on a GPU."""
    if backend(x) == "triton":
        return empty_projected(x, channels)
    return x.new_empty(*x.shape[:-1], padded(channels))[..., :channels]


def empty_layer_lse(x: Tensor, heads: int) -> Tensor:
    """Allocate the logarithms of the softmax's sums, [*, R, h, K]."""
    return x.new_empty(*x.shape[:-2], heads, x.shape[-2], dtype=accumulation_dtype(x))


def empty_own_bias(x: Tensor, t: Operands) -> Tensor:
    """Allocate the bias that `weight` projects from x, [*, h, K, K], or a tensor without elements if there is none."""
    makes_bias = t.weight.shape[0] > 4 * t.out_weight.shape[1]
    return empty_linear(x, t.heads, planes=True).movedim(-1, -3) if makes_bias else x.new_empty(0)


def _empty_layer(t: Operands) -> tuple[Tensor, ...]:
    x, inner = t.x, t.out_weight.shape[1]
    y, o = empty_saved_rows(x, 4 * inner), empty_saved_rows(x, inner)
    return empty_like(x), y, *empty_statistics(x), o, empty_layer_lse(x, t.heads), empty_own_bias(x, t)


def _misfit_of_layer(t: Any) -> str | None:
    """Describe an operand with a wrong size that `shapes` cannot express, or return None."""
    (outputs, c), inner = t.weight.shape, t.out_weight.shape[1]
    if t.heads < 1 or inner % t.heads:
        return f"out_weight is {list(t.out_weight.shape)}: {inner} channels cannot be split into {t.heads} heads"
    if t.gate_bias is not None and t.gate_bias.shape[0] > outputs:
        return f"gate_bias is {list(t.gate_bias.shape)}, longer than the rows of weight, which is {[outputs, c]}"
    if t.bias is not None and t.bias.shape[-3] != t.heads:
        return f"bias is {list(t.bias.shape)}, not [*, h, K, K] with h = {t.heads}"
    # Only the backward operation has lse and its own bias.
    if hasattr(t, "lse"):
        if t.lse.shape[-2] != t.heads:
            return f"lse is of {t.lse.shape[-2]} heads, not {t.heads}"
        right = (*t.lse.shape[:-3], t.heads, t.lse.shape[-1], t.lse.shape[-1])
        if outputs > 4 * inner and t.own.shape != right:
            return f"own is {list(t.own.shape)}, not [*, h, K, K] = {list(right)}"
    if outputs == 4 * inner:
        return None
    if outputs != 4 * inner + t.heads:
        return f"weight is {[outputs, c]}, neither [4 i, c] nor [4 i + heads, c] with i = {inner}"
    if t.bias is not None:
        return f"bias is {list(t.bias.shape)}, but weight, which is {[outputs, c]}, makes one"
    square = t.x.shape[-3] == t.x.shape[-2]
    return (
        None if square else f"x is {list(t.x.shape)}, not [*, K, K, c], but weight, {[outputs, c]}, makes a bias of it"
    )


def _unsupported_layer(t: Any) -> str | None:
    if backend(t.x) == "cpu":
        return None
    inner, batch = t.out_weight.shape[1], range(1, t.x.dim() - 3)
    if any(t.x.stride(axis - 1) != t.x.shape[axis] * t.x.stride(axis) for axis in batch):
        return "the batch axes of x are not one"
    return unsupported_channels(t.x) or unsupported_width(inner // t.heads)


def split_projections(
    y: Tensor, inner: int, heads: int, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Split the projections y [*, R, K, o], or their gradient, into views.

    Returns the gate's logits [*, R, K, i], q, k and v [*, R, K, h, d], and the bias [*, h, K, K]: that in y if y has
    one, otherwise `bias`.
    """
    g, q, k, v, own_bias = y.split([inner] * 4 + [y.shape[-1] - 4 * inner], -1)
    if own_bias.shape[-1]:
        bias = own_bias.movedim(-1, -3)
    return g, *(t.unflatten(-1, (heads, -1)) for t in (q, k, v)), bias


def batched(t: Tensor, axes: int) -> Tensor:
    """View t [*, ...] as [B, ...] with this number of axes; several batch axes are merged, with a copy if necessary."""
    if t.dim() == axes:
        return t
    return t.unsqueeze(0) if t.dim() < axes else t.flatten(0, t.dim() - axes)


def _layer_by_parts(t: Any) -> Tensor | None:
    """Compute the layer's operations one after another in fp32 on a GPU, where only attention has a kernel."""
    x = t.x
    if not exact_on_gpu(x):
        return None
    y = norm_linear(x, t.norm_weight, t.norm_bias, t.weight, t.gate_bias, t.eps)
    g, q, k, v, bias = split_projections(y, t.out_weight.shape[1], t.heads, t.bias)
    bias = None if bias is None else bias[..., None, :, :, :]
    dx = linear(gate(attention(q, k, v, t.mask, bias).flatten(-2), g), t.out_weight, t.out_bias)
    dx = dx if t.factors is None else dx * t.factors
    return laid_out_as(x + dx if t.residual else dx, x)


@register(
    shapes="x [*, R, K, c], norm_weight [c], norm_bias [c], weight [o, c], gate_bias [b], out_weight [c, i], "
    "out_bias [c], mask [*, R, K], bias [*, h, K, K], factors ([*, R, K, c]), key [2], grad [*, R, K, c], "
    "y [*, R, K, 4 i], mean [*, R, K], scale [*, R, K], attended [*, R, K, i], lse [*, R, h, K], own [...]",
    empty=_empty_layer,
    results="out y mean scale attended lse own",
    keeps="x norm_weight norm_bias weight gate_bias out_weight out_bias mask bias y mean scale attended lse own "
    "factors heads residual bias_wanted",
    gradients="x norm_weight norm_bias weight gate_bias out_weight out_bias bias",
    empty_gradients=lambda t: (
        empty_like(t.x),
        *empty_parameters(t.norm_weight, t.norm_bias, t.weight, t.gate_bias, t.out_weight, t.out_bias),
        empty_bias(t.bias, t.bias_wanted, t.x),
    ),
    kept=True,
    misfit=_misfit_of_layer,
    expand=FACTOR_OPERANDS,
    composed=_layer_by_parts,
    unsupported=_unsupported_layer,
    # The number of projections decides. With a gradient, the backward pass adds more work per row.
    prefer_definition=lambda t: faster_on_cpu(
        t.x, t.x.numel() // max(1, t.x.shape[-1]) * t.weight.shape[0], 3 * 2**20 if torch.is_grad_enabled() else 2**19
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
    """Compute x + factors * linear(gate(attention)) of the normalised x, within each row (Algorithms 7, 8, 13 and 14).

    Without `residual`, x is not added.
    x [*, R, K, c], norm_weight, norm_bias [c], out_weight [c, i] (i = heads x width), out_bias [c], mask [*, R, K] (1:
    attend), bias [*, h, K, K] of the logits, the same for all rows, dropout factors (axes of size 1 are shared; None:
    ones) -> [*, R, K, c] in the dtype and layout of x.  Parameters may have any float dtype, and each bias may be None.

    weight [4 i, c] has the rows of the gate, q, k and v in this order; gate_bias [b] belongs to its first b <= o
    outputs.  weight [4 i + heads, c] also projects the bias from x, if R = K: logits [q, k] have the bias of x[q, k].
    """
    if bias is not None and weight.shape[0] > 4 * out_weight.shape[1]:
        raise ValueError("gated_attention: weight projects a bias. Omit `bias`, or pass weight [4 i, c].")
    y = norm_linear.definition(x, norm_weight, norm_bias, weight, gate_bias, eps)
    g, q, k, v, bias = split_projections(y, out_weight.shape[1], heads, bias)
    # All rows share the bias.
    bias = None if bias is None else bias[..., None, :, :, :]
    o = gate.definition(attention.definition(q, k, v, mask, bias).flatten(-2), g)
    dx = linear(o, out_weight, out_bias)
    dx = dx if factors is None else dx * factors
    return x + dx if residual else dx
