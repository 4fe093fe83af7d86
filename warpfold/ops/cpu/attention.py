"""Attention on a CPU, a few rows at a time, so that their logits stay in cache; the backward pass computes them again.

All in powers of two, which cost a third of powers of e: logits and biases are scaled by log2(e) on the way.  Products
are in the dtype of q, everything between them in fp32 (fp64 for fp64).  docs/decisions/0011 has the figures.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from warpfold.ops.attention import empty_bias, empty_lse, empty_out
from warpfold.ops.dispatch import alike
from warpfold.ops.tensors import empty_like

BLOCK = 2**20  # logits of a block: 4 MiB in fp32; the backward pass has two such, of half as many
LOG2E = 1 / math.log(2)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute warpfold::attention."""
    out, lse = empty_out(q, v), empty_lse(q)
    work = _Blocks(q, k, mask, bias, lse.dtype, BLOCK)
    values, o = work.buffer(v), work.buffer(out)
    for batch, rows in alike(work.indices()):
        p = work.logits(batch, rows, None)
        m_i = p.amax(-1, keepdim=True)
        no_key = m_i == float("-inf")
        if work.attend_alike(p, batch, rows, no_key) is not None:
            m_i = p.amax(-1, keepdim=True)
        p.sub_(m_i).exp2_()
        l_i = p.sum(-1, keepdim=True)
        vb = _heads_first(v[batch, rows], values)
        acc = torch.bmm(work.in_dtype_of_q(p), vb, out=o[: len(vb)]).unflatten(0, p.shape[:2])
        torch.div(acc, l_i, out=out[batch, rows].transpose(1, 2))
        torch.add(m_i, l_i.log2_(), out=lse[batch, rows][..., None]).mul_(math.log(2))
        lse[batch, rows].masked_fill_(no_key[..., 0], float("inf"))
    return out, lse


def attention_backward(
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
    """Compute warpfold::attention_backward."""
    dq, dk, dv, dbias = empty_like(q), empty_like(k), empty_like(v), empty_bias(bias, bias_wanted, q)
    dbias_acc = torch.zeros_like(dbias, dtype=lse.dtype)
    scale = q.shape[-1] ** -0.5
    work = _Blocks(q, k, mask, bias, lse.dtype, BLOCK // 2)
    values, douts, dps = work.buffer(v), work.buffer(out), work.logits_buffer()
    dqs, dks, dvs = work.buffer(q), work.buffer(k), work.buffer(v)
    for batch, rows in alike(work.indices()):
        no_key = (lse[batch, rows] == float("inf"))[..., None]
        p = work.logits(batch, rows, lse)
        same = work.attend_alike(p, batch, rows, no_key)
        p.exp2_()
        # `lse` was rounded, so the weights do not quite add up to 1: divide by their sum, in the gradient.
        total = p.sum(-1, keepdim=True).transpose(1, 2)
        db = grad[batch, rows] / total
        vb, do = _heads_first(v[batch, rows], values), _heads_first(db, douts)
        qb, kb, n = work.queries[: len(do)], work.keys[: len(do)], p.shape[:2]
        dvb = torch.bmm(work.in_dtype_of_q(p).mT, do, out=dvs[: len(do)])
        dv[batch, rows].transpose(1, 2).copy_(dvb.unflatten(0, n))
        delta = (db * out[batch, rows]).sum(-1).transpose(1, 2)[..., None]
        ds = work.product(do, vb.mT, dps).unflatten(0, n).sub_(delta).mul_(p)
        if same is not None:
            ds.masked_fill_(same, 0)
        if bias_wanted:
            for row in ds:
                dbias_acc[batch] += row
        ds = work.in_dtype_of_q(ds)
        dqb = dqs[: len(do)].baddbmm_(ds, kb, beta=0, alpha=scale)
        dq[batch, rows].transpose(1, 2).copy_(dqb.unflatten(0, n))
        dkb = dks[: len(do)].baddbmm_(ds.mT, qb, beta=0, alpha=scale)
        dk[batch, rows].transpose(1, 2).copy_(dkb.unflatten(0, n))
    return dq, dk, dv, dbias.copy_(dbias_acc)


class _Blocks:
    """Blocks of rows, and the memory that all of them use in turn."""

    def __init__(self, q: Tensor, k: Tensor, mask: Tensor, bias: Tensor | None, acc: torch.dtype, logits: int) -> None:
        self.q, self.k, self.dtype = q, k, acc
        _, rows, queries, heads, _ = q.shape
        self.size = min(rows, max(1, logits // (queries * heads * k.shape[2])))
        self.masked_keys = mask == 0
        self.any_masked = bool(self.masked_keys.any())
        self.bias = None if bias is None else (bias.to(acc) * LOG2E).contiguous()
        self.queries, self.keys, self.full = self.buffer(q), self.buffer(k), self.logits_buffer()
        self.half = self.full if q.dtype == acc else torch.empty_like(self.full, dtype=q.dtype)

    def indices(self) -> Iterator[tuple[int, slice]]:
        """Yield each block of rows of each batch."""
        batches, rows = self.q.shape[:2]
        for batch in range(batches):
            for start in range(0, rows, self.size):
                yield batch, slice(start, start + self.size)

    def buffer(self, like: Tensor) -> Tensor:
        """Allocate a block of q, k, v or out, heads in front: [rows h, Q, d]."""
        _, _, length, heads, width = like.shape
        return like.new_empty(self.size * heads, length, width)

    def logits_buffer(self) -> Tensor:
        """Allocate as many numbers as a block has logits: [rows h, Q, K]."""
        heads, queries, keys = self.q.shape[3], self.q.shape[2], self.k.shape[2]
        return self.q.new_empty(self.size * heads, queries, keys, dtype=self.dtype)

    def in_dtype_of_q(self, x: Tensor) -> Tensor:
        """Return a block of the size of the logits, [rows, h, Q, K], as [rows h, Q, K] in the dtype of q."""
        x = x.flatten(0, 1)
        return x if self.half is self.full else self.half[: len(x)].copy_(x)

    def product(self, a: Tensor, b: Tensor, into: Tensor, alpha: float = 1.0) -> Tensor:
        """Write alpha a b over `into`."""
        if self.half is self.full:
            return into[: len(a)].baddbmm_(a, b, beta=0, alpha=alpha)
        return into[: len(a)].copy_(self.half[: len(a)].baddbmm_(a, b, beta=0, alpha=alpha))

    def attend_alike(self, logits: Tensor, batch: int, rows: slice, no_key: Tensor) -> Tensor | None:
        """Set the logits of masked keys to 0 for queries that have no other: all are masked, or a bias of -inf says so.

        no_key [rows, h, Q, 1]: which queries those are.  Returns which logits were set, or None for none at all.
        """
        if not bool(no_key.any()):
            return None
        no_key = no_key if self.bias is not None else no_key[:, :1, :1]  # without a bias whole rows are
        alike = no_key & self.masked_keys[batch, rows][:, None, None]
        logits.masked_fill_(alike, 0)
        return alike

    def logits(self, batch: int, rows: slice, lse: Tensor | None) -> Tensor:
        """Compute those of one block, [rows, h, Q, K], times log2(e) and less `lse` where finite; -inf where masked."""
        q, k = _heads_first(self.q[batch, rows], self.queries), _heads_first(self.k[batch, rows], self.keys)
        n = (len(q) // self.q.shape[3], self.q.shape[3])
        alpha = self.q.shape[-1] ** -0.5 * LOG2E
        bias = None if self.bias is None else self.bias[batch]
        less = None
        if lse is not None:
            less = lse[batch, rows]
            less = (less.masked_fill(less == float("inf"), 0) * LOG2E)[..., None]
        logits = self.full[: len(q)].unflatten(0, n)
        if self.half is self.full and (bias is not None or less is not None):
            # Write bias - lse first and add the product to it: one pass over the block less.
            if less is None or bias is None:
                logits.copy_(bias if less is None else -less)
            else:
                torch.sub(bias, less, out=logits)
            self.full[: len(q)].baddbmm_(q, k.mT, alpha=alpha)
        else:
            self.product(q, k.mT, self.full, alpha)
            if bias is not None:
                logits.add_(bias)
            if less is not None:
                logits.sub_(less)
        if self.any_masked:
            logits.masked_fill_(self.masked_keys[batch, rows][:, None, None], float("-inf"))
        return logits


def _heads_first(x: Tensor, into: Tensor) -> Tensor:
    """Write [rows, Q, h, d] over `into` as [rows h, Q, d]."""
    rows, _, heads, _ = x.shape
    part = into[: rows * heads]
    part.unflatten(0, (rows, heads)).copy_(x.transpose(1, 2))
    return part
