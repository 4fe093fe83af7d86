"""Attention on a CPU, a few rows after another, whose logits stay in cache; the backward pass computes them again.

All in powers of two, which cost a third of powers of e: logits and biases are scaled by log2(e) on the way.  Products
are in the dtype of q, all between them in fp32 (fp64 of fp64).  docs/decisions/0011 has the figures.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from warpfold.ops.library.attention import empty_bias, empty_like, empty_lse, empty_out

BLOCK = 2**20  # logits of a block: 4 MiB in fp32; the backward pass has two such, of half as many
LOG2E = 1 / math.log(2)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """warpfold::attention."""
    out, lse = empty_out(q, v), empty_lse(q)
    work = _Rows(q, k, mask, bias, lse.dtype, BLOCK)
    values, o = work.buffer(v), work.buffer(out)
    for batch, rows in work.blocks():
        wide = work.logits(batch, rows, None)
        top = wide.amax(-1, keepdim=True)
        lost = top == float("-inf")
        if work.alike(wide, batch, rows, lost) is not None:
            top = wide.amax(-1, keepdim=True)
        wide.sub_(top).exp2_()
        sums = wide.sum(-1, keepdim=True)
        vb = _heads_first(v[batch, rows], values)
        ob = torch.bmm(work.narrow(wide), vb, out=o[: len(vb)]).unflatten(0, wide.shape[:2])
        torch.div(ob, sums, out=out[batch, rows].transpose(1, 2))
        torch.add(top, sums.log2_(), out=lse[batch, rows][..., None]).mul_(math.log(2))
        lse[batch, rows].masked_fill_(lost[..., 0], float("inf"))
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
    """warpfold::attention_backward."""
    dq, dk, dv, dbias = empty_like(q), empty_like(k), empty_like(v), empty_bias(bias, bias_wanted, q)
    total = torch.zeros_like(dbias, dtype=lse.dtype)
    scale = q.shape[-1] ** -0.5
    work = _Rows(q, k, mask, bias, lse.dtype, BLOCK // 2)
    values, outward, slopes = work.buffer(v), work.buffer(out), work.buffer_of_logits()
    dqs, dks, dvs = work.buffer(q), work.buffer(k), work.buffer(v)
    for batch, rows in work.blocks():
        lost = (lse[batch, rows] == float("inf"))[..., None]
        weights = work.logits(batch, rows, lse)
        alike = work.alike(weights, batch, rows, lost)
        weights.exp2_()
        # What `lse` lost in rounding: the weights' sum is not quite 1.  It is the gradient that is divided by it.
        one = weights.sum(-1, keepdim=True).transpose(1, 2)
        db = grad[batch, rows] / one
        vb, do = _heads_first(v[batch, rows], values), _heads_first(db, outward)
        qb, kb, n = work.queries[: len(do)], work.keys[: len(do)], weights.shape[:2]
        dvb = torch.bmm(work.narrow(weights).mT, do, out=dvs[: len(do)])
        dv[batch, rows].transpose(1, 2).copy_(dvb.unflatten(0, n))
        delta = (db * out[batch, rows]).sum(-1).transpose(1, 2)[..., None]
        ds = work.product(do, vb.mT, slopes).unflatten(0, n).sub_(delta).mul_(weights)
        if alike is not None:
            ds.masked_fill_(alike, 0)
        if bias_wanted:
            for row in ds:
                total[batch] += row
        thin = work.narrow(ds)
        dqb = dqs[: len(do)].baddbmm_(thin, kb, beta=0, alpha=scale)
        dq[batch, rows].transpose(1, 2).copy_(dqb.unflatten(0, n))
        dkb = dks[: len(do)].baddbmm_(thin.mT, qb, beta=0, alpha=scale)
        dk[batch, rows].transpose(1, 2).copy_(dkb.unflatten(0, n))
    return dq, dk, dv, dbias.copy_(total)


class _Rows:
    """Blocks of rows, and the memory that all of them use in turn."""

    def __init__(self, q: Tensor, k: Tensor, mask: Tensor, bias: Tensor | None, wide: torch.dtype, logits: int) -> None:
        self.q, self.k, self.dtype = q, k, wide
        _, rows, queries, heads, _ = q.shape
        self.size = min(rows, max(1, logits // (queries * heads * k.shape[2])))
        self.hidden = mask == 0
        self.masked = bool(self.hidden.any())
        self.bias = None if bias is None else torch.mul(bias, LOG2E) if bias.dtype == wide else bias.to(wide) * LOG2E
        if self.bias is not None:
            self.bias = self.bias.contiguous()
        self.queries, self.keys, self.wide = self.buffer(q), self.buffer(k), self.buffer_of_logits()
        self.thin = self.wide if q.dtype == wide else torch.empty_like(self.wide, dtype=q.dtype)

    def blocks(self) -> Iterator[tuple[int, slice]]:
        """Of each batch, each block of rows."""
        batches, rows = self.q.shape[:2]
        for batch in range(batches):
            for start in range(0, rows, self.size):
                yield batch, slice(start, start + self.size)

    def buffer(self, like: Tensor) -> Tensor:
        """Memory for a block of q, k, v or out, heads in front: [rows h, Q, d]."""
        _, _, length, heads, width = like.shape
        return like.new_empty(self.size * heads, length, width)

    def buffer_of_logits(self) -> Tensor:
        """Memory for as many numbers as a block has logits: [rows h, Q, K]."""
        heads, queries, keys = self.q.shape[3], self.q.shape[2], self.k.shape[2]
        return self.q.new_empty(self.size * heads, queries, keys, dtype=self.dtype)

    def narrow(self, x: Tensor) -> Tensor:
        """A block of logits' size in the dtype of q: [rows h, Q, K]."""
        x = x.flatten(0, 1)
        return x if self.thin is self.wide else self.thin[: len(x)].copy_(x)

    def product(self, a: Tensor, b: Tensor, into: Tensor, alpha: float = 1.0) -> Tensor:
        """alpha a b, written over `into`."""
        if self.thin is self.wide:
            return into[: len(a)].baddbmm_(a, b, beta=0, alpha=alpha)
        return into[: len(a)].copy_(self.thin[: len(a)].baddbmm_(a, b, beta=0, alpha=alpha))

    def alike(self, wide: Tensor, batch: int, rows: slice, lost: Tensor) -> Tensor | None:
        """Set the logits of masked keys to 0 for queries that have no other: all are masked, or a bias of -inf says so.

        lost [rows, h, Q, 1]: which queries those are.  Returns which logits were set, or None for none at all.
        """
        if not bool(lost.any()):
            return None
        lost = lost if self.bias is not None else lost[:, :1, :1]  # without a bias whole rows are
        even = lost & self.hidden[batch, rows][:, None, None]
        wide.masked_fill_(even, 0)
        return even

    def logits(self, batch: int, rows: slice, lse: Tensor | None) -> Tensor:
        """Of one block, [rows, h, Q, K], times log2(e) and less `lse` where that is finite; -inf for masked keys."""
        q, k = _heads_first(self.q[batch, rows], self.queries), _heads_first(self.k[batch, rows], self.keys)
        n = (len(q) // self.q.shape[3], self.q.shape[3])
        alpha = self.q.shape[-1] ** -0.5 * LOG2E
        bias = None if self.bias is None else self.bias[batch]
        less = None
        if lse is not None:
            less = lse[batch, rows]
            less = (less.masked_fill(less == float("inf"), 0) * LOG2E)[..., None]
        start = self.wide[: len(q)].unflatten(0, n)
        if self.thin is self.wide and (bias is not None or less is not None):
            # The product is added to what the block begins with.
            if less is None or bias is None:
                start.copy_(bias if less is None else -less)
            else:
                torch.sub(bias, less, out=start)
            self.wide[: len(q)].baddbmm_(q, k.mT, alpha=alpha)
            wide = start
        else:
            wide = self.product(q, k.mT, self.wide, alpha).unflatten(0, n)
            if bias is not None:
                wide.add_(bias)
            if less is not None:
                wide.sub_(less)
        if self.masked:
            wide.masked_fill_(self.hidden[batch, rows][:, None, None], float("-inf"))
        return wide


def _heads_first(x: Tensor, into: Tensor) -> Tensor:
    """[rows, Q, h, d] -> [rows h, Q, d], in order, written over `into`."""
    rows, _, heads, _ = x.shape
    part = into[: rows * heads]
    part.unflatten(0, (rows, heads)).copy_(x.transpose(1, 2))
    return part
