"""Attention on a CPU, a block of rows after another; the backward pass computes the weights again."""

import torch
from torch import Tensor

from warpfold.ops.library.attention import empty_bias, empty_like, empty_lse, empty_out

BLOCK = 2**20  # logits of a block


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """warpfold::attention."""
    out, lse = empty_out(q, v), empty_lse(q)
    for batch, rows in _blocks(q, k):
        logits, dead = _logits(q[batch, rows], k[batch, rows], mask[batch, rows], None if bias is None else bias[batch])
        sums = logits.logsumexp(-1)
        weights = (logits - sums[..., None]).exp_()
        out[batch, rows] = (weights.to(v.dtype) @ v[batch, rows].transpose(1, 2)).transpose(1, 2)
        lse[batch, rows] = sums.masked_fill(dead[:, None, None], float("-inf"))
    return out, lse


def backward(
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
    """warpfold::attention_backward."""
    dq, dk, dv, dbias = empty_like(q), empty_like(k), empty_like(v), empty_bias(bias, bias_wanted, q)
    total = torch.zeros_like(dbias, dtype=lse.dtype)
    scale = q.shape[-1] ** -0.5
    for batch, rows in _blocks(q, k):
        logits, _ = _logits(q[batch, rows], k[batch, rows], mask[batch, rows], None if bias is None else bias[batch])
        weights = logits.softmax(-1).to(q.dtype)
        do = grad[batch, rows].transpose(1, 2)
        dv[batch, rows] = (weights.mT @ do).transpose(1, 2)
        delta = (do.to(lse.dtype) * out[batch, rows].transpose(1, 2)).sum(-1, keepdim=True)
        ds = weights * ((do @ v[batch, rows].transpose(1, 2).mT).to(lse.dtype) - delta)
        ds = ds.masked_fill_((mask[batch, rows] == 0)[:, None, None], 0)
        if bias_wanted:
            total[batch] += ds.sum(0)
        ds = ds.to(q.dtype)
        dq[batch, rows] = (ds @ k[batch, rows].transpose(1, 2)).transpose(1, 2) * scale
        dk[batch, rows] = (ds.mT @ q[batch, rows].transpose(1, 2)).transpose(1, 2) * scale
    return dq, dk, dv, dbias.copy_(total)


def _blocks(q: Tensor, k: Tensor) -> list[tuple[int, slice]]:
    batches, rows, queries, heads, _ = q.shape
    size = max(1, BLOCK // (queries * heads * k.shape[2]))
    return [(b, slice(start, start + size)) for b in range(batches) for start in range(0, rows, size)]


def _logits(q: Tensor, k: Tensor, mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of one block, [rows, h, Q, K], in fp32 at least; and which rows are masked throughout."""
    logits = (q * q.shape[-1] ** -0.5).transpose(1, 2) @ k.transpose(1, 2).mT
    wide = logits.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    if bias is not None:
        wide = wide + bias
    hidden = mask == 0
    return wide.masked_fill_(hidden[:, None, None], -1e9), hidden.all(-1)
