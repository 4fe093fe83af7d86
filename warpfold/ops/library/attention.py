"""warpfold::attention, registered; ops/attention.py defines it, ops/cpu and ops/triton compute it.

Inside, everything has five axes, q [B, R, Q, h, d]: batches B, of which each has its own bias, rows R, which share it,
then queries (or keys), heads and width.  All by views: whatever the layer's axis, nothing is copied for it.
"""

import math
from typing import Any

import torch
from torch import Tensor

from warpfold.ops.dispatch import EMPTY, implementation, place, refuses_device, small_on_cpu
from warpfold.ops.precision import wide
from warpfold.ops.shapes import Operand, Shape, refusal, require, shape_of, spreads, together, with_axes

WIDTHS = (8, 16, 32, 64)  # of a head, that the Triton kernels serve


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `ops.attention.attention`."""
    lead = together(tuple(q.shape)[:-3], tuple(k.shape)[:-3], tuple(v.shape)[:-3], tuple(mask.shape)[:-1])
    if lead is None:
        raise ValueError("warpfold::attention: the leading axes of q, k, v and the mask do not broadcast")
    q5, k5, v5, mask3 = _flat(q, lead, 3), _flat(k, lead, 3), _flat(v, lead, 3), _flat(mask, lead, 1)
    out: Tensor = torch.ops.warpfold.attention(q5, k5, v5, mask3, _shared(bias, lead, q, k))[0]
    return out.squeeze(0) if len(lead) == 1 else out.reshape(*lead, *out.shape[2:])


def global_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As `ops.attention.global_attention`: its heads are the queries of one head."""
    return attention(q.unsqueeze(-2), k.unsqueeze(-2), v.unsqueeze(-2), mask).squeeze(-2)


def small(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None = None) -> bool:
    """Whether a CPU computes the definition sooner: decided by the logits."""
    return small_on_cpu(q, q.numel() // max(1, q.shape[-1]) * k.shape[-3], 2**19)


def small_global(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> bool:
    """Whether a CPU computes the definition sooner."""
    return small_on_cpu(q, q.numel() // max(1, q.shape[-1]) * k.shape[-2], 2**19)


def refuses(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None = None) -> str | None:
    """Why the fast way does not take these, or None."""
    if reason := refuses_device(q, k, v, mask, bias):
        return reason
    of_q, of_k, of_v, of_mask = tuple(q.shape), tuple(k.shape), tuple(v.shape), tuple(mask.shape)
    if reason := refusal(*_operands(of_q, of_k, of_v, of_mask)):
        return reason
    lead = together(of_q[:-3], of_k[:-3], of_v[:-3], of_mask[:-1])
    if lead is None:
        return "the leading axes of q, k, v and mask do not broadcast"
    queries, heads, width = of_q[-3:]
    if bias is not None:
        of_bias = tuple(bias.shape)
        if len(of_bias) > 3 and of_bias[-4] != 1:
            return "the bias differs from row to row"
        if not spreads(of_bias, (*lead, heads, queries, of_k[-3])):
            return "bias is not [*, h, Q, K] beside the others"
    if not (q.dtype == k.dtype == v.dtype):
        return "q, k and v differ in dtype"
    if place(q) == "triton" and not (width in WIDTHS and of_v[-1] == width):
        return f"heads {width} wide (kernels are for {', '.join(map(str, WIDTHS))})"
    return EMPTY if 0 in lead or 0 in of_q or 0 in of_k or 0 in of_v else None


def refuses_global(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> str | None:
    """Why the fast way does not take these, or None."""
    if 0 in (q.dim(), k.dim(), v.dim()):
        return "q, k or v has no axes"
    return refuses(q.unsqueeze(-2), k.unsqueeze(-2), v.unsqueeze(-2), mask)


def _operands(q: Shape, k: Shape, v: Shape, mask: Shape) -> tuple[Operand, ...]:
    """q [*, Q, h, d], k [*, K, h, d], v [*, K, h, e], mask [*, K]; what their leading axes are is not said here."""
    heads, keys = q[-2:-1], k[-3:-2]
    return (
        ("q", "[*, Q, h, d]", q, with_axes(q, 3)),
        ("k", "[*, K, h, d]", k, k[:-2] + q[-2:]),
        ("v", "[*, K, h, e]", v, v[:-3] + keys + heads + v[-1:]),
        ("mask", "[*, K]", mask, mask[:-1] + keys),
    )


def _require(op: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None) -> None:
    """As `_operands`, with the leading axes [B, R], a bias [B, h, Q, K], and e = d where kernels read them alike."""
    of_q, of_k, of_v = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    lead, heads, keys = of_q[:2], of_q[3:4], of_k[2:3]
    width = of_q[4:] if place(q) == "triton" else of_v[-1:]
    require(
        op,
        ("q", "[B, R, Q, h, d]", of_q, with_axes(of_q, 5)),
        ("k", "[B, R, K, h, d]", of_k, lead + keys + of_q[3:]),
        ("v", "[B, R, K, h, e]", of_v, lead + keys + heads + width),
        ("mask", "[B, R, K]", tuple(mask.shape), lead + keys),
        ("bias", "[B, h, Q, K]", shape_of(bias), of_q[:1] + heads + of_q[2:3] + keys),
    )


def _flat(t: Tensor, lead: Shape, own: int) -> Tensor:
    """[*, own axes] -> [B, R, own axes]: a view, but where more than one axis of B has to be merged and cannot."""
    if len(lead) == 1 and t.dim() == own + 1 and t.shape[0] == lead[0]:  # as nearly always: the quickest of the views
        return t.unsqueeze(0)
    wide = t.expand(*lead, *t.shape[t.dim() - own :])
    return wide.reshape(math.prod(lead[:-1]), lead[-1] if lead else 1, *wide.shape[len(lead) :])


def _shared(bias: Tensor | None, lead: Shape, q: Tensor, k: Tensor) -> Tensor | None:
    """[*, 1, h, Q, K] -> [B, h, Q, K], a view where it can be."""
    if bias is None:
        return None
    own = (q.shape[-2], q.shape[-3], k.shape[-3])
    if len(lead) == 1 and tuple(bias.shape) == (1, *own):
        return bias
    outer = (*lead[:-1], 1) if lead else ()
    return bias.expand(*outer, *own).reshape(math.prod(lead[:-1]), *own)


@torch.library.custom_op("warpfold::attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """q [B, R, Q, h, d], k [B, R, K, h, d], v [B, R, K, h, e], mask [B, R, K], bias [B, h, Q, K]
    -> out [B, R, Q, h, e], and the logarithm of the softmax's sum, [B, R, h, Q] in fp32 (fp64 of fp64): natural,
    over the keys that are not masked; inf, so that each weighs 0, where there are none or all have a bias of -inf."""
    _require("warpfold::attention", q, k, v, mask, bias)
    out, lse = implementation("attention", q).attention(q, k, v, mask, bias)
    return out, lse


@torch.library.custom_op("warpfold::attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    bias_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> the gradients of q, k, v and the bias; the last without elements where it is not wanted."""
    _require("warpfold::attention_backward", q, k, v, mask, bias)
    of_q, of_out = tuple(q.shape), tuple(q.shape)[:4] + tuple(v.shape)[4:]
    require(
        "warpfold::attention_backward",
        ("grad", "[B, R, Q, h, e]", tuple(grad.shape), of_out),
        ("out", "[B, R, Q, h, e]", tuple(out.shape), of_out),
        ("lse", "[B, R, h, Q]", tuple(lse.shape), of_q[:2] + of_q[3:4] + of_q[2:3]),
    )
    dq, dk, dv, dbias = implementation("attention", q).attention_backward(
        grad, q, k, v, mask, bias, out, lse, bias_wanted
    )
    return dq, dk, dv, dbias


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return empty_out(q, v), empty_lse(q)


@_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    bias_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_like(q), empty_like(k), empty_like(v), empty_bias(bias, bias_wanted, q)


def empty_like(x: Tensor) -> Tensor:
    """A gradient of x to be filled: dense, its axes in memory in the order of x's."""
    order = sorted(range(x.dim()), key=lambda axis: x.stride(axis), reverse=True)
    back = [order.index(axis) for axis in range(x.dim())]
    return x.new_empty([x.shape[axis] for axis in order]).permute(back)


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    """The output to be filled, [B, R, Q, h, e]: rows and queries in memory in the order of q's; h, e innermost."""
    batches, rows, queries, heads, _ = q.shape
    if q.stride(1) >= q.stride(2):
        return q.new_empty(batches, rows, queries, heads, v.shape[-1])
    return q.new_empty(batches, queries, rows, heads, v.shape[-1]).transpose(1, 2)


def empty_lse(q: Tensor) -> Tensor:
    """The logarithms to be filled, [B, R, h, Q]."""
    batches, rows, queries, heads, _ = q.shape
    return q.new_empty(batches, rows, heads, queries, dtype=wide(q))


def empty_bias(bias: Tensor | None, wanted: bool, q: Tensor) -> Tensor:
    """The gradient of the bias to be filled: in order, [B, h, Q, K]; without elements where it is not wanted."""
    return q.new_empty(0) if bias is None or not wanted else bias.new_empty(bias.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    *inputs, out, lse = ctx.saved_tensors
    bias_wanted = inputs[4] is not None and ctx.needs_input_grad[4]
    dq, dk, dv, dbias = torch.ops.warpfold.attention_backward(grad, *inputs, out, lse, bias_wanted)
    return dq, dk, dv, None, dbias if bias_wanted else None


_forward.register_autograd(_gradients, setup_context=_save)
