"""Attention on a CPU in blocks of rows, whose logits stay in cache; the backward pass recomputes them.

Softmax uses powers of two, which cost a third of powers of e, so logits and biases are scaled by log2(e).  Products are
computed in the dtype of q and everything between them in fp32 (fp64 for fp64).  docs/benchmarks.md has the times.

Gated attention processes blocks of rows from the norm to the new residual, so that intermediate results stay in cache.
In the forward pass torch's fused kernel computes the attention of a block of rows in one parallel region.  The backward
pass transposes a row's projections once, to [output, position].  Then q, k, v, the gate and their gradients are
adjacent matrices, products write them directly where the projection's backward pass reads them, and no head is copied.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from warpfold.ops.attention import empty_bias, empty_layer_lse, empty_lse, empty_out, empty_own_bias, empty_saved_rows
from warpfold.ops.cpu.linear import (
    Block,
    accumulate,
    drawn_factors,
    examples,
    gate_values,
    parameter_gradients,
    put,
    row_slices,
    rows,
    standardise,
    through_norm,
    writable,
)
from warpfold.ops.cpu.threads import add_sums, in_threads, summed
from warpfold.ops.dispatch import Operands, accumulation_dtype, empty_like, uniform_loop
from warpfold.ops.linear import empty_statistics
from warpfold.ops.torch_internals import flash_attention_cpu

# Logits per block, 4 MiB in fp32. The backward pass has two buffers of half this size.
BLOCK_LOGITS = 2**20
LOG2E = 1 / math.log(2)
# Positions per block of gated_attention. A block has at least one row.
FORWARD_POSITIONS, BACKWARD_POSITIONS = 1024, 512
# Logits that the backward pass of gated_attention computes at a time, in two buffers of 1 MiB in fp32.
LOGITS = 2**18


def attention(t: Operands) -> tuple[Tensor, Tensor]:
    """Compute `attention` (ops/attention.py): the output and the logsumexp of each query."""
    out, lse = empty_out(t.q, t.v), empty_lse(t.q)
    work = _Blocks(t, lse.dtype, BLOCK_LOGITS)
    values, o = work.buffer(t.v), work.buffer(out)
    for batch, part in uniform_loop(work.indices()):
        p = work.logits(batch, part, None)
        m_i = p.amax(-1, keepdim=True)
        no_key = m_i == float("-inf")
        if work.attend_uniformly(p, batch, part, no_key) is not None:
            m_i = p.amax(-1, keepdim=True)
        p.sub_(m_i).exp2_()
        l_i = p.sum(-1, keepdim=True)
        vb = _heads_first(t.v[batch, part], values)
        acc = torch.bmm(work.in_dtype_of_q(p), vb, out=o[: len(vb)]).unflatten(0, p.shape[:2])
        torch.div(acc, l_i, out=out[batch, part].transpose(1, 2))
        torch.add(m_i, l_i.log2_(), out=lse[batch, part][..., None]).mul_(math.log(2))
        lse[batch, part].masked_fill_(no_key[..., 0], float("inf"))
    return out, lse


def attention_backward(t: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v and the bias."""
    q, v, lse = t.q, t.v, t.lse
    dq, dk, dv, dbias = empty_like(q), empty_like(t.k), empty_like(v), empty_bias(t.bias, t.bias_wanted, q)
    dbias_acc = torch.zeros_like(dbias, dtype=lse.dtype)
    scale = q.shape[-1] ** -0.5
    work = _Blocks(t, lse.dtype, BLOCK_LOGITS // 2)
    values, douts, dps = work.buffer(v), work.buffer(t.out), work.logits_buffer()
    dqs, dks, dvs = work.buffer(q), work.buffer(t.k), work.buffer(v)
    for batch, part in uniform_loop(work.indices()):
        no_key = (lse[batch, part] == float("inf"))[..., None]
        p = work.logits(batch, part, lse)
        uniform = work.attend_uniformly(p, batch, part, no_key)
        p.exp2_()
        # `lse` is rounded, so the sum of the weights is not exactly 1. Divide the gradient by it.
        total = p.sum(-1, keepdim=True).transpose(1, 2)
        db = t.grad[batch, part] / total
        vb, do = _heads_first(v[batch, part], values), _heads_first(db, douts)
        qb, kb, n = work.queries[: len(do)], work.keys[: len(do)], p.shape[:2]
        dvb = torch.bmm(work.in_dtype_of_q(p).mT, do, out=dvs[: len(do)])
        dv[batch, part].transpose(1, 2).copy_(dvb.unflatten(0, n))
        delta = (db * t.out[batch, part]).sum(-1).transpose(1, 2)[..., None]
        ds = work.product(do, vb.mT, dps).unflatten(0, n).sub_(delta).mul_(p)
        if uniform is not None:
            ds.masked_fill_(uniform, 0)
        if t.bias_wanted:
            for row in ds:
                dbias_acc[batch] += row
        ds = work.in_dtype_of_q(ds)
        dqb = dqs[: len(do)].baddbmm_(ds, kb, beta=0, alpha=scale)
        dq[batch, part].transpose(1, 2).copy_(dqb.unflatten(0, n))
        dkb = dks[: len(do)].baddbmm_(ds.mT, qb, beta=0, alpha=scale)
        dk[batch, part].transpose(1, 2).copy_(dkb.unflatten(0, n))
    return dq, dk, dv, dbias.copy_(dbias_acc)


class _Blocks:
    """Blocks of rows, and the buffers that they share."""

    def __init__(self, t: Operands, acc: torch.dtype, logits: int) -> None:
        q, k = self.q, self.k = t.q, t.k
        self.dtype = acc
        _, rows, queries, heads, _ = q.shape
        self.size = min(rows, max(1, logits // (queries * heads * k.shape[2])))
        self.masked_keys = t.mask == 0
        self.any_masked = bool(self.masked_keys.any())
        self.bias = None if t.bias is None else (t.bias.to(acc) * LOG2E).contiguous()
        self.queries, self.keys, self.full = self.buffer(q), self.buffer(k), self.logits_buffer()
        self.half = self.full if q.dtype == acc else torch.empty_like(self.full, dtype=q.dtype)

    def indices(self) -> Iterator[tuple[int, slice]]:
        """Yield each block of rows of each batch."""
        batches, rows = self.q.shape[:2]
        for batch in range(batches):
            for start in range(0, rows, self.size):
                yield batch, slice(start, start + self.size)

    def buffer(self, like: Tensor) -> Tensor:
        """Allocate a block of q, k, v or out with the heads in front: [rows h, Q, d]."""
        _, _, length, heads, width = like.shape
        return like.new_empty(self.size * heads, length, width)

    def logits_buffer(self) -> Tensor:
        """Allocate a block of logits: [rows h, Q, K]."""
        heads, queries, keys = self.q.shape[3], self.q.shape[2], self.k.shape[2]
        return self.q.new_empty(self.size * heads, queries, keys, dtype=self.dtype)

    def in_dtype_of_q(self, x: Tensor) -> Tensor:
        """Convert a block with the size of the logits, [rows, h, Q, K], to [rows h, Q, K] in the dtype of q."""
        x = x.flatten(0, 1)
        return x if self.half is self.full else self.half[: len(x)].copy_(x)

    def product(self, a: Tensor, b: Tensor, into: Tensor, alpha: float = 1.0) -> Tensor:
        """Write alpha a b into `into`."""
        if self.half is self.full:
            return into[: len(a)].baddbmm_(a, b, beta=0, alpha=alpha)
        return into[: len(a)].copy_(self.half[: len(a)].baddbmm_(a, b, beta=0, alpha=alpha))

    def attend_uniformly(self, logits: Tensor, batch: int, rows: slice, no_key: Tensor) -> Tensor | None:
        """Set the logits of masked keys to 0 for queries without other keys: all are masked or have a bias of -inf.

        no_key [rows, h, Q, 1]: marks these queries.  Returns the mask of the changed logits, or None if there are none.
        """
        if not bool(no_key.any()):
            return None
        # Without a bias, all queries and heads of a row are equal.
        no_key = no_key if self.bias is not None else no_key[:, :1, :1]
        uniform = no_key & self.masked_keys[batch, rows][:, None, None]
        logits.masked_fill_(uniform, 0)
        return uniform

    def logits(self, batch: int, rows: slice, lse: Tensor | None) -> Tensor:
        """Compute the logits of a block, [rows, h, Q, K], times log2(e) and minus finite `lse`; -inf where masked."""
        q, k = _heads_first(self.q[batch, rows], self.queries), _heads_first(self.k[batch, rows], self.keys)
        n = (len(q) // self.q.shape[3], self.q.shape[3])
        alpha = self.q.shape[-1] ** -0.5 * LOG2E
        bias = None if self.bias is None else self.bias[batch]
        if lse is not None:
            lse = lse[batch, rows]
            lse = (lse.masked_fill(lse == float("inf"), 0) * LOG2E)[..., None]
        logits = self.full[: len(q)].unflatten(0, n)
        if self.half is self.full and (bias is not None or lse is not None):
            # Writing bias - lse first and adding the product to it saves a pass over the block.
            if lse is None or bias is None:
                logits.copy_(bias if lse is None else -lse)
            else:
                torch.sub(bias, lse, out=logits)
            self.full[: len(q)].baddbmm_(q, k.mT, alpha=alpha)
        else:
            self.product(q, k.mT, self.full, alpha)
            if bias is not None:
                logits.add_(bias)
            if lse is not None:
                logits.sub_(lse)
        if self.any_masked:
            logits.masked_fill_(self.masked_keys[batch, rows][:, None, None], float("-inf"))
        return logits


def _heads_first(x: Tensor, into: Tensor) -> Tensor:
    """Write [rows, Q, h, d] into `into` as [rows h, Q, d]."""
    rows, _, heads, _ = x.shape
    part = into[: rows * heads]
    part.unflatten(0, (rows, heads)).copy_(x.transpose(1, 2))
    return part


def gated_attention(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::gated_attention; without `kept`, no projections are saved."""
    x = t.x
    out, f = empty_like(x), drawn_factors(x, t)
    params, own_bias = _Parameters(t), None
    saved: tuple[Tensor, ...] = tuple(x.new_empty(0) for _ in range(6))
    if t.kept:
        projected, attended = empty_saved_rows(x, 4 * params.inner), empty_saved_rows(x, params.inner)
        saved = (projected, *empty_statistics(x), attended, empty_layer_lse(x, t.heads), empty_own_bias(x, t))

    def compute(example: tuple[int, ...], keys: _Keys, part: slice) -> None:
        """Compute some rows."""
        block: Block = (*example, part)
        saved_here = [tensor[block] for tensor in saved[:-1]] if t.kept else []
        xb, yb, fb = x[block], out[block], None if f is None else f[block]
        (n, k_len, c), i = xb.shape, params.inner
        xs = rows(xb)
        normed, mean, scale = torch.native_layer_norm(xs, [c], params.norm_weight, params.norm_bias, t.eps)
        # Saved projections are computed directly in their memory. The bias was computed before.
        y = saved_here[0].flatten(0, 1) if t.kept else normed.new_empty(n * k_len, 4 * i)
        torch.mm(normed, params.weight[: 4 * i].t(), out=y)
        if params.gate_bias is not None:
            y[:, : len(params.gate_bias)] += params.gate_bias[: 4 * i]
        q, k, v = (y[:, j * i : (j + 1) * i].view(n, k_len, params.heads, -1).transpose(1, 2) for j in (1, 2, 3))
        added, no_key = keys.added(part, params.heads)
        o, lse = flash_attention_cpu(q, k, v, 0.0, False, attn_mask=added)
        if no_key is not None:
            masked = keys.masked[part].to(v.dtype)
            mean_v = (masked[:, None, None] / masked.sum(-1)[:, None, None, None]) @ v  # [n, h, 1, d]
            o, lse = torch.where(no_key, mean_v, o), lse.masked_fill(no_key[..., 0], float("inf"))
        o = o.transpose(1, 2).reshape(n * k_len, i)
        gated = gate_values(y[:, :i]).mul_(o)
        results = writable(yb)
        if fb is None and t.residual:
            added = xs if params.out_bias is None else xs + params.out_bias
            torch.addmm(added, gated, params.out_weight.t(), out=results)
        else:
            torch.mm(gated, params.out_weight.t(), out=results)
            if params.out_bias is not None:
                results += params.out_bias
            if fb is not None:
                results.mul_(rows(fb))
            if t.residual:
                results += xs
        put(yb, results)
        if t.kept:
            for target, values in zip(saved_here[1:], (mean, scale, o, lse)):
                target.copy_(values.view(target.shape))

    def project_bias(example: tuple[int, ...], bias: Tensor, part: slice) -> None:
        """Project some queries of the bias [h, K, K]."""
        xs, first = rows(x[(*example, part)]), 4 * params.inner
        normed, _, _ = torch.native_layer_norm(xs, x.shape[-1:], params.norm_weight, params.norm_bias, t.eps)
        projected = torch.mm(params.weight[first:], normed.t())
        if params.gate_bias is not None and len(params.gate_bias) > first:
            projected[: len(params.gate_bias) - first] += params.gate_bias[first:, None]
        bias[:, part] = projected.view(params.heads, -1, x.shape[-2])

    for example in examples(x):
        parts = list(row_slices(x.shape[-3], x.shape[-2], FORWARD_POSITIONS))
        if params.makes_bias:
            own_bias = saved[-1][example] if t.kept else empty_own_bias(x[example], t)
            in_threads(project_bias, ((example, own_bias, part) for part in parts))
        keys = _Keys(t.mask[example], own_bias if t.bias is None else t.bias[example], accumulation_dtype(x))
        in_threads(compute, ((example, keys, part) for part in parts))
    return out, *saved


class _Sums(NamedTuple):
    """Sums over all positions for the gradients; bias is [h, K, K], or [0] if it is not needed."""

    product: Tensor
    total: Tensor
    out_product: Tensor
    out_total: Tensor
    bias: Tensor


def gated_attention_backward(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::gated_attention_backward; one product gives the norm's gradients, as in linear.py."""
    f = drawn_factors(t.grad, t)
    params, dx, length = _Parameters(t), empty_like(t.x), t.x.shape[-2]
    makes_bias, dbias = params.makes_bias, empty_bias(t.bias, t.bias_wanted, t.x)
    wanted_shape = (params.heads, length, length) if makes_bias or t.bias_wanted else (0,)

    def zeros(bias: tuple[int, ...] = (0,)) -> _Sums:
        weight, out_weight = params.weight.shape, params.out_weight.shape
        shapes = weight, weight[:1], out_weight, out_weight[:1], bias
        return _Sums(*(params.norm_weight.new_zeros(shape) for shape in shapes))

    def write_dx(dn: Tensor, xs: Tensor, block: Block) -> None:
        """Write the gradient of some rows, xs [positions, c], through their norm, plus that of the residual."""
        through = through_norm(dn, xs, t.mean[block], t.scale[block], params.norm_weight).view(dx[block].shape)
        if t.residual:
            torch.add(t.grad[block], through, out=dx[block])
        else:
            dx[block].copy_(through)

    def through_rows(sums: _Sums, example: tuple[int, ...], heads: _HeadsBackward, part: slice) -> None:
        """Propagate the gradient through the attention of some rows and their projections."""
        block: Block = (*example, part)
        xs, g = rows(t.x[block]).contiguous(), t.grad[block] if f is None else t.grad[block] * f[block]
        h = standardise(xs, t.mean[block], t.scale[block]).to(xs.dtype)
        dn = heads.backward(h, g, t.y[block], t.attended[block], t.lse[block], part.start, sums)
        # A projected bias adds to the gradient before the norm.
        if makes_bias:
            dx[block] = dn.view(g.shape)
        else:
            write_dx(dn, xs, block)

    def through_bias(sums: _Sums, example: tuple[int, ...], dbias: Tensor, part: slice) -> None:
        """Propagate the gradient of some queries of the bias to its projection, and that of the rows to x."""
        block: Block = (*example, part)
        outputs = slice(4 * params.inner, None)
        xs, db = rows(t.x[block]).contiguous(), dbias[:, part].flatten(1).to(t.x.dtype)  # [h, positions]
        h = standardise(xs, t.mean[block], t.scale[block]).to(xs.dtype)
        accumulate(sums.product[outputs], db.t(), h)
        sums.total[outputs] += db.sum(1, dtype=sums.total.dtype)
        write_dx(torch.addmm(rows(dx[block]), db.t(), params.weight[outputs]), xs, block)

    sums = zeros()
    for example in examples(t.x):
        bias = t.own[example] if makes_bias else None if t.bias is None else t.bias[example]
        heads = _HeadsBackward(_Keys(t.mask[example], bias, t.lse.dtype), params, length)
        parts = ((example, heads, part) for part in row_slices(t.x.shape[-3], length, BACKWARD_POSITIONS))
        of_rows = summed(through_rows, parts, lambda: zeros(wanted_shape))
        # The gradient of the bias belongs to one example.
        add_sums(sums[:-1], of_rows[:-1])
        if makes_bias:
            of_bias = ((example, of_rows.bias, part) for part in row_slices(t.x.shape[-3], length, FORWARD_POSITIONS))
            add_sums(sums, summed(through_bias, of_bias, zeros))
        if t.bias is not None and t.bias_wanted:
            dbias[example] = of_rows.bias
    of_norm = parameter_gradients(sums.product, sums.total, t.norm_weight, t.norm_bias, t.weight, t.gate_bias)
    dout_weight = sums.out_product.to(accumulation_dtype(t.out_weight))
    # A bias that is None gets a gradient without elements.
    dout_bias = sums.out_total[:0].to(accumulation_dtype(t.norm_weight))
    if t.out_bias is not None:
        dout_bias = sums.out_total.to(accumulation_dtype(t.out_bias))
    return dx, *of_norm, dout_weight, dout_bias, dbias


class _Parameters:
    """The parameters in the dtype of the products; those of the norm in the dtype of its statistics."""

    def __init__(self, t: Operands) -> None:
        acc, dtype, self.heads, self.inner = accumulation_dtype(t.x), t.x.dtype, t.heads, t.out_weight.shape[1]
        self.norm_weight, self.norm_bias = t.norm_weight.to(acc), None if t.norm_bias is None else t.norm_bias.to(acc)
        self.weight, self.out_weight = t.weight.to(dtype), t.out_weight.to(dtype)
        self.gate_bias, self.out_bias = (None if b is None else b.to(dtype) for b in (t.gate_bias, t.out_bias))
        self.makes_bias = len(t.weight) > 4 * self.inner


class _Keys:
    """The mask [R, K] and the bias [h, K, K] of the keys of one example."""

    def __init__(self, mask: Tensor, bias: Tensor | None, acc: torch.dtype) -> None:
        self.masked = mask == 0
        # `cpu` lets meta tensors, which have no values, pass.
        self.rows_masked: list[bool] = self.masked.any(-1).cpu().tolist()
        self.bias = None if bias is None else bias.to(acc).contiguous()
        self.mask_bias = torch.zeros(mask.shape, dtype=acc).masked_fill_(self.masked, float("-inf"))
        # Whether a query may have no key although its row has some.
        self.infinite = any(self.rows_masked) and bias is not None and bool((bias == float("-inf")).any())

    def added(self, part: slice, heads: int) -> tuple[Tensor | None, Tensor | None]:
        """Compute the summand of the logits [n, h, Q, K] and the mask of queries without keys [n, h, Q, 1]."""
        n, length = self.masked[part].shape
        shape = n, heads, length, length
        if not any(self.rows_masked[part]):
            return None if self.bias is None else self.bias.expand(shape), None
        mask_bias = self.mask_bias[part][:, None, None]
        added = mask_bias if self.bias is None else self.bias + mask_bias
        no_key = self.masked[part].all(-1)[:, None, None, None]
        if self.infinite:
            no_key = added.amax(-1, keepdim=True) == float("-inf")
        return added.expand(shape), no_key if bool(no_key.any()) else None


class _HeadsBackward:
    """The backward pass of the attention of each row, for some rows and heads at a time."""

    def __init__(self, keys: _Keys, params: _Parameters, length: int) -> None:
        self.keys, self.params = keys, params
        self.heads = max(1, min(params.heads, LOGITS // length**2))
        # More than one row only if all heads are computed at once.
        self.rows = max(1, min(BACKWARD_POSITIONS // length, LOGITS // (params.heads * length**2)))
        self.bias = None if keys.bias is None else keys.bias * LOG2E

    def backward(
        self, h: Tensor, g: Tensor, y: Tensor, attended: Tensor, lse: Tensor, first: int, sums: _Sums
    ) -> Tensor:
        """Compute the gradient of a block of normalised rows, [n K, c], without the contribution of a projected bias.

        h [n K, c]: the normalised rows before the norm's weight.
        g [n, K, c]: the gradient of the output projection.
        first: the number of the first row.
        """
        params, keys, (n, length, i), acc, g = self.params, self.keys, attended.shape, lse.dtype, rows(g)
        projected = y[..., : 4 * i].flatten(0, 1).t().contiguous()  # [4 i, positions]
        o, s = attended.flatten(0, 1).t().contiguous().to(acc), torch.sigmoid(projected[:i].to(acc))
        do = torch.mm(params.out_weight.t(), g.t()).to(acc).mul_(s)
        accumulate(sums.out_product, g, (s * o).to(g.dtype).t())
        sums.out_total.add_(g.sum(0, dtype=acc))
        through = o.mul_(do)
        delta = through.unflatten(0, (params.heads, -1)).sum(1, keepdim=True)
        dy = torch.empty_like(projected)
        dy[:i] = through.mul_(s.neg_().add_(1))
        transposed = [t.view(params.heads, -1, n, length).transpose(0, 2) for t in (*projected[i:].chunk(3), do, delta)]
        gradients = dy[i:].view(3, params.heads, -1, n, length).transpose(1, 3)  # each [n, d, h, K]

        # The buffers of some rows and heads: weights, gradients of logits, either in the dtype of the products, and
        # gradients of q, k and v.
        weights = y.new_empty(self.rows * self.heads, length, length, dtype=acc)
        dlogits = torch.empty_like(weights)
        narrow = None if y.dtype == acc else torch.empty_like(weights, dtype=y.dtype)
        dqkv, scale = y.new_empty(3, self.rows, params.heads, i // params.heads, length), (i // params.heads) ** -0.5
        for group in row_slices(n, length, length * self.rows):
            count, numbers = group.stop - group.start, slice(first + group.start, first + group.stop)
            rows_of_group = [t[group].transpose(1, 2) for t in transposed]  # [rows, h, d, K]
            masked = any(keys.rows_masked[numbers])
            for start in range(0, params.heads, self.heads):
                heads = slice(start, start + self.heads)
                # These are views for a single row.
                q, k, v, do, delta = (t[:, heads].flatten(0, 1) for t in rows_of_group)
                dq, dk, dv = (t[:count, heads].flatten(0, 1) for t in dqkv)
                p, ds, lse2, uniform = weights[: len(q)], dlogits[: len(q)], lse[group, heads, :, None] * LOG2E, None
                by_row = p.unflatten(0, lse2.shape[:2])
                no_key = lse2 == float("inf")
                if masked:
                    lse2 = lse2.masked_fill(no_key, 0)
                # Writing bias - lse first and adding the product to it saves a pass over the block.
                if self.bias is None:
                    by_row.copy_(-lse2)
                else:
                    torch.sub(self.bias[heads], lse2, out=by_row)
                p.baddbmm_(q.to(acc).mT, k.to(acc), alpha=scale * LOG2E)
                if masked:
                    by_row.add_(keys.mask_bias[numbers][:, None, None])
                    if bool(no_key.any()):
                        uniform = (no_key & keys.masked[numbers][:, None, None]).flatten(0, 1)
                        p.masked_fill_(uniform, 0)
                p.exp2_()
                # `lse` is rounded, so the sum of the weights is not exactly 1. Divide the gradient by it.
                total = p.sum(-1)[:, None]
                do = do.div(total).to(q.dtype)
                torch.bmm(do, p if narrow is None else narrow[: len(p)].copy_(p), out=dv)
                if narrow is None:
                    torch.bmm(do.mT, v, out=ds)
                else:
                    ds.copy_(torch.bmm(do.mT, v, out=narrow[: len(p)]))
                ds.sub_(delta.div(total).mT).mul_(p)
                if uniform is not None:
                    ds.masked_fill_(uniform, 0)
                if sums.bias.numel():
                    sums.bias[heads] += ds if count == 1 else ds.unflatten(0, (count, -1)).sum(0)
                ds = ds if narrow is None else narrow[: len(p)].copy_(ds)
                dq.baddbmm_(k, ds.mT, beta=0, alpha=scale)
                dk.baddbmm_(q, ds, beta=0, alpha=scale)
            gradients[:, group] = dqkv[:, :count].transpose(2, 3)
        sums.total[: 4 * i] += dy.sum(1, dtype=acc)
        accumulate(sums.product[: 4 * i], dy.t(), h)
        return torch.mm(dy.t(), params.weight[: 4 * i])
