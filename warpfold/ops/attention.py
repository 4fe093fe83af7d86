"""attention: softmax(q k^T / sqrt(d) + bias) v over the rows of an alignment or a pair representation."""

import torch
from torch import Tensor

from warpfold.ops.dispatch import op
from warpfold.ops.library import attention as library
from warpfold.ops.precision import island


@op(library.attention, refuses=library.refuses, small=library.small)
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multi-head attention with a key mask and an additive bias; softmax in fp32 at least.

    q [*, Q, h, d], k [*, K, h, d], v [*, K, h, e], mask [*, K] (1 = attend), bias [*, h, Q, K] (axes of size 1 are
    shared) -> [*, Q, h, e] in the dtype of q.  A fully masked row attends to all its keys alike, as the official code.
    So does a query with a bias of -inf at every unmasked key, to its masked ones; it is NaN if there are none.
    """
    # Heads to the front, laid out in order: products of strided matrices are slow on every device.
    q, k, v = (t.transpose(-2, -3).contiguous() for t in (q * q.shape[-1] ** -0.5, k, v))
    logits = q @ k.mT
    if bias is not None:
        logits = logits + bias
    logits = island(logits).masked_fill(mask[..., None, None, :] == 0, -1e9)
    return (logits.softmax(-1).to(v.dtype) @ v).transpose(-2, -3)


@op(library.global_attention, refuses=library.refuses_global, small=library.small_global)
def global_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One query per column, the same keys and values for every head (Algorithm 19, lines 5 and 6).

    q [*, h, d], k [*, K, d], v [*, K, e], mask [*, K] -> [*, h, e].
    """
    logits = island(torch.einsum("...hd,...kd->...hk", q * q.shape[-1] ** -0.5, k))
    weights = logits.masked_fill(mask[..., None, :] == 0, -1e9).softmax(-1)
    return torch.einsum("...hk,...ke->...he", weights.to(v.dtype), v)


def masked_mean(x: Tensor, mask: Tensor, axis: int, eps: float = 1e-10) -> Tensor:
    """Mean of x over `axis` where mask, broadcast against x, is 1; 0 where it is 0 throughout."""
    wide, mask = island(x), mask.to(island(x).dtype)
    return ((wide * mask).sum(axis) / (mask.sum(axis) + eps)).to(x.dtype)
