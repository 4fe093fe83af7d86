"""attention: softmax(q k^T / sqrt(d) + bias) v over the rows of an alignment or a pair representation.

The registered operation has five axes, q [B, R, Q, h, d]: batches B, each with a bias of its own, rows R, which share
the bias of their batch, then queries (or keys), heads and width.  A layer's tensors are viewed so, not copied.
Beside its output it returns `lse` [B, R, h, Q], the natural logarithm of the softmax's sum over the keys that are not
masked, in fp32 (fp64 for fp64); inf, so that each weighs 0, where there are none or all have a bias of -inf.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from warpfold.ops.dispatch import backend, faster_on_cpu, op
from warpfold.ops.register import register
from warpfold.ops.shapes import EMPTY, Shape, Sizes, broadcast_shape, expands_to
from warpfold.ops.tensors import accumulation_dtype, empty_like, upcast_half

WIDTHS = (8, 16, 24, 32, 48, 64)  # of a head, that the Triton kernels serve


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    """Allocate the output, [B, R, Q, h, e]: rows and queries in memory in the order of q's; h, e innermost."""
    batches, rows, queries, heads, _ = q.shape
    if q.stride(1) >= q.stride(2):
        return q.new_empty(batches, rows, queries, heads, v.shape[-1])
    return q.new_empty(batches, queries, rows, heads, v.shape[-1]).transpose(1, 2)


def empty_lse(q: Tensor) -> Tensor:
    """Allocate the logarithms, [B, R, h, Q]."""
    batches, rows, queries, heads, _ = q.shape
    return q.new_empty(batches, rows, heads, queries, dtype=accumulation_dtype(q))


def empty_bias(bias: Tensor | None, wanted: bool, q: Tensor) -> Tensor:
    """Allocate the gradient of the bias, contiguous [B, h, Q, K]; without elements where it is not wanted."""
    return q.new_empty(0) if bias is None or not wanted else bias.new_empty(bias.shape)


def _check_width(op: str, sizes: Sizes, operands: Mapping[str, Any]) -> None:
    """Raise ValueError where values have another width than keys: kernels read them alike."""
    if sizes["e"] != sizes["d"] and backend(operands["q"]) == "triton":
        raise ValueError(f"{op}: v is {list(operands['v'].shape)}, not [B, R, K, h, d] with d = {sizes['d']}")


def _with_five_axes(
    registered: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None
) -> Tensor:
    """Call the registered operation; its axes B and R are all leading axes but the last, and the last."""
    leading = broadcast_shape(tuple(q.shape)[:-3], tuple(k.shape)[:-3], tuple(v.shape)[:-3], tuple(mask.shape)[:-1])
    if leading is None:
        raise ValueError("warpfold::attention: the leading axes of q, k, v and the mask do not broadcast")
    bias = None if bias is None else _shared_by_rows(bias, leading, (q.shape[-2], q.shape[-3], k.shape[-3]))
    out = registered(
        _batched(q, leading, 3), _batched(k, leading, 3), _batched(v, leading, 3), _batched(mask, leading, 1), bias
    )
    return out.squeeze(0) if len(leading) == 1 else out.reshape(*leading, *out.shape[2:])


def _batched(t: Tensor, leading: Shape, own: int) -> Tensor:
    """View [*, own axes] as [B, R, own axes]; copy only if several axes have to be merged into B and cannot be."""
    if len(leading) == 1 and t.dim() == own + 1 and t.shape[0] == leading[0]:  # as nearly always: the quickest view
        return t.unsqueeze(0)
    t = t.expand(*leading, *t.shape[t.dim() - own :])
    return t.reshape(math.prod(leading[:-1]), leading[-1] if leading else 1, *t.shape[len(leading) :])


def _shared_by_rows(bias: Tensor, leading: Shape, own: Shape) -> Tensor:
    """View a bias [*, 1, h, Q, K] as [B, h, Q, K]; copy it only where it cannot be viewed so."""
    if len(leading) == 1 and tuple(bias.shape) == (1, *own):
        return bias
    outer = (*leading[:-1], 1) if leading else ()
    return bias.expand(*outer, *own).reshape(math.prod(leading[:-1]), *own)


def unsupported_width(width: int) -> str | None:
    """Return why no kernel serves heads of this width, or None."""
    return None if width in WIDTHS else f"heads {width} wide (kernels are for {', '.join(map(str, WIDTHS))})"


def _unsupported(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None) -> str | None:
    of_q, of_k, of_v = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    leading = broadcast_shape(of_q[:-3], of_k[:-3], of_v[:-3], tuple(mask.shape)[:-1])
    if leading is None:
        return "the leading axes of q, k, v and mask do not broadcast"
    queries, heads, width = of_q[-3:]
    if bias is not None:
        of_bias = tuple(bias.shape)
        if len(of_bias) > 3 and of_bias[-4] != 1:
            return "the bias differs from row to row"
        if not expands_to(of_bias, (*leading, heads, queries, of_k[-3])):
            return "bias is not [*, h, Q, K] beside the others"
    if backend(q) == "triton":
        reason = unsupported_width(width) if of_v[-1] == width else "values of another width than keys"
        if reason is not None:
            return reason
    return EMPTY if 0 in leading else None


@register(
    shapes="q [B, R, Q, h, d], k [B, R, K, h, d], v [B, R, K, h, e], mask [B, R, K], bias [B, h, Q, K], "
    "grad [B, R, Q, h, e], out [B, R, Q, h, e], lse [B, R, h, Q]",
    empty=lambda q, k, v, mask, bias: (empty_out(q, v), empty_lse(q)),
    results="out lse",
    keeps="q k v mask bias out lse bias_wanted",
    gradients="q k v bias",
    empty_gradients=lambda grad, q, k, v, mask, bias, out, lse, bias_wanted: (
        *(empty_like(t) for t in (q, k, v)),
        empty_bias(bias, bias_wanted, q),
    ),
    same_dtype="q k v",
    check=_check_width,
    caller_shapes="q [..., Q, h, d], k [..., K, h, d], v [..., K, h, e], mask [..., K], bias ([..., h, Q, K])",
    adapter=_with_five_axes,
    unsupported_reason=_unsupported,
    # Decided by the logits.
    prefer_definition=lambda q, k, *_: faster_on_cpu(q, q.numel() // max(1, q.shape[-1]) * k.shape[-3], 2**19),
)
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute multi-head attention with a key mask and an additive bias; softmax in fp32 at least.

    q [*, Q, h, d], k [*, K, h, d], v [*, K, h, e], mask [*, K] (1 = attend), bias [*, h, Q, K] (axes of size 1 are
    shared) -> [*, Q, h, e] in the dtype of q.  A fully masked row attends to all its keys alike, as the official code.
    So does a query with a bias of -inf at every unmasked key, to its masked ones; it is NaN if there are none.
    """
    # Contiguous, with the heads in front: products of strided matrices are slow on every device.
    q, k, v = (t.transpose(-2, -3).contiguous() for t in (q * q.shape[-1] ** -0.5, k, v))
    logits = q @ k.mT
    if bias is not None:
        logits = logits + bias
    logits = upcast_half(logits).masked_fill(mask[..., None, None, :] == 0, -1e9)
    return (logits.softmax(-1).to(v.dtype) @ v).transpose(-2, -3)


def _global_fast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Call `attention`: the heads are the queries of one head."""
    return attention.fast(q.unsqueeze(-2), k.unsqueeze(-2), v.unsqueeze(-2), mask).squeeze(-2)


def _global_unsupported(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> str | None:
    if 0 in (q.dim(), k.dim(), v.dim()):
        return "q, k or v has no axes"
    return attention.unsupported_reason(q.unsqueeze(-2), k.unsqueeze(-2), v.unsqueeze(-2), mask)


def _global_prefers_definition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> bool:
    return faster_on_cpu(q, q.numel() // max(1, q.shape[-1]) * k.shape[-2], 2**19)


@op(_global_fast, _global_unsupported, _global_prefers_definition)
def global_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Let one query per column attend, with the same keys and values for every head (Algorithm 19, lines 5 and 6).

    q [*, h, d], k [*, K, d], v [*, K, e], mask [*, K] -> [*, h, e].
    """
    logits = upcast_half(torch.einsum("...hd,...kd->...hk", q * q.shape[-1] ** -0.5, k))
    weights = logits.masked_fill(mask[..., None, :] == 0, -1e9).softmax(-1)
    return torch.einsum("...hk,...ke->...he", weights.to(v.dtype), v)


def masked_mean(x: Tensor, mask: Tensor, axis: int, eps: float = 1e-10) -> Tensor:
    """Return the mean of x over `axis` where mask, broadcast against x, is 1; 0 where it is 0 throughout."""
    full = upcast_half(x)
    mask = mask.to(full.dtype)
    return ((full * mask).sum(axis) / (mask.sum(axis) + eps)).to(x.dtype)
