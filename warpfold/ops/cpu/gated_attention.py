"""Gated attention on a CPU, a few rows at a time, from the norm to the new residual: what lies between stays in cache.

Forward: torch's fused kernel makes the attention of a block of rows in one parallel region.  Backward: a row's
projections are turned once, to [output, position]; then q, k, v, the gate and their gradients are matrices that lie one
behind the other, products write them where the projection's backward pass reads them, and no head is copied.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from warpfold.ops.cpu.blocks import accumulate, gate_values, put, rows, writable
from warpfold.ops.cpu.gate import drawn_factors
from warpfold.ops.cpu.norm import Projected, parameter_gradients
from warpfold.ops.dispatch import alike
from warpfold.ops.gated_attention import empty_bias, empty_lse, empty_rows
from warpfold.ops.norm import empty_statistics
from warpfold.ops.tensors import accumulation_dtype, empty_like

FORWARD, BACKWARD = 1024, 512  # positions of a block, at least a row
LOGITS = 2**18  # that the backward pass computes at a time: 1 MiB in fp32, twice
LOG2E = 1 / math.log(2)
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


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
    *more: Any,
) -> tuple[Tensor, ...]:
    """Compute warpfold::gated_attention; of the projections nothing is kept."""
    *factor_operands, eps, residual, kept = more
    out, factors = empty_like(x), drawn_factors(x, *factor_operands)
    saved: tuple[Tensor, ...] = tuple(x.new_empty(0) for _ in range(5))
    if kept:
        projected, attended = (empty_rows(x, channels) for channels in (len(weight), out_weight.shape[1]))
        saved = (projected, *empty_statistics(x), attended, empty_lse(x, heads))
    f = None if factors is None else factors.to(x.dtype).expand(x.shape)
    parameters = _Parameters(x, norm_weight, norm_bias, weight, gate_bias, out_weight, out_bias, heads)
    for at in _examples(x):
        own = parameters.bias_of(x[at], eps) if parameters.makes_bias else None
        keys = _Keys(mask[at], own if bias is None else bias[at], accumulation_dtype(x))
        for some in _slices(x.shape[-3], x.shape[-2], FORWARD):
            kept_here = tuple(t[at][some] for t in saved) if kept else None
            fb = None if f is None else f[at][some]
            _forward_block(x[at][some], out[at][some], fb, parameters, keys, some, eps, residual, kept_here)
    return out, *saved


def _forward_block(
    xb: Tensor,
    yb: Tensor,
    fb: Tensor | None,
    of: "_Parameters",
    keys: "_Keys",
    some: slice,
    eps: float,
    residual: bool,
    kept: tuple[Tensor, ...] | None,
) -> None:
    """Write the new rows, and what is kept of them."""
    (n, k_len, c), i = xb.shape, of.inner
    xs = rows(xb)
    normed, mean, scale = torch.native_layer_norm(xs, [c], of.norm_weight, of.norm_bias, eps)
    # What is kept of the projections is made where it is kept; else without the bias, which was made before.
    y = torch.mm(normed, of.weight[: 4 * i].t()) if kept is None else kept[0].flatten(0, 1)
    if kept is not None:
        torch.mm(normed, of.weight.t(), out=y)
    if of.gate_bias is not None:
        y[:, : len(of.gate_bias)] += of.gate_bias[: y.shape[1]]
    q, k, v = (y[:, j * i : (j + 1) * i].view(n, k_len, of.heads, -1).transpose(1, 2) for j in (1, 2, 3))
    added, no_key = keys.added(some, of.heads)
    o, lse = flash(q, k, v, 0.0, False, attn_mask=added)
    if no_key is not None:
        alike = keys.masked[some].to(v.dtype)
        mean_v = (alike[:, None, None] / alike.sum(-1)[:, None, None, None]) @ v  # [n, h, 1, d]
        o, lse = torch.where(no_key, mean_v, o), lse.masked_fill(no_key[..., 0], float("inf"))
    o = o.transpose(1, 2).reshape(n * k_len, i)
    gated = gate_values(y[:, :i]).mul_(o)
    results = writable(yb)
    if fb is None and residual:
        torch.addmm(xs if of.out_bias is None else xs + of.out_bias, gated, of.out_weight.t(), out=results)
    else:
        torch.mm(gated, of.out_weight.t(), out=results)
        if of.out_bias is not None:
            results += of.out_bias
        if fb is not None:
            results.mul_(rows(fb))
        if residual:
            results += xs
    put(yb, results)
    if kept is not None:
        for block, values in zip(kept[1:], (mean, scale, o, lse)):
            block.copy_(values.view(block.shape))


def gated_attention_backward(
    grad: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    gate_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    mask: Tensor,
    bias: Tensor | None,
    y: Tensor,
    mean: Tensor,
    scale: Tensor,
    attended: Tensor,
    lse: Tensor,
    *more: Any,
) -> tuple[Tensor, ...]:
    """Compute warpfold::gated_attention_backward; the gradients of the norm from one product, as in norm.py."""
    *factor_operands, heads, residual, bias_wanted = more
    factors = drawn_factors(grad, *factor_operands)
    f = None if factors is None else factors.to(grad.dtype).expand(grad.shape)
    parameters = _Parameters(x, norm_weight, norm_bias, weight, gate_bias, out_weight, out_bias, heads)
    sums, dx = _Sums(parameters), empty_like(x)
    dbias = empty_bias(x, bias, bias_wanted)
    for at in _examples(x):
        f_at, bias_at = None if f is None else f[at], None if bias is None else bias[at]
        kept = y[at], mean[at], scale[at], attended[at], lse[at]
        dbias_of = _backward_example(
            grad[at], x[at], f_at, mask[at], bias_at, kept, dx[at], parameters, sums, residual, bias_wanted
        )
        if bias is not None and bias_wanted:
            assert dbias_of is not None
            dbias[at] = dbias_of
    return dx, *sums.gradients((norm_weight, norm_bias, weight, gate_bias), out_weight, out_bias), dbias


def _backward_example(
    grad: Tensor,
    x: Tensor,
    factors: Tensor | None,
    mask: Tensor,
    bias: Tensor | None,
    kept: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    dx: Tensor,
    of: "_Parameters",
    sums: "_Sums",
    residual: bool,
    bias_wanted: bool,
) -> Tensor | None:
    """Write the gradient of x, add to the sums, and return the bias' gradient, to which every row adds."""
    (y, mean, scale, attended, lse), length, own = kept, x.shape[-2], of.makes_bias
    keys = _Keys(mask, y[..., 4 * of.inner :].movedim(-1, 0) if own else bias, lse.dtype)
    heads = _HeadsBackward(keys, of, length, own or bias_wanted)
    beside = grad if residual else None
    for some in _slices(x.shape[0], length, BACKWARD):
        g = grad[some] if factors is None else grad[some] * factors[some]
        xs = rows(x[some]).contiguous()
        h = of.standard(xs, mean[some], scale[some]).to(x.dtype)
        dn = heads.backward(h, g, y[some], attended[some], lse[some], some.start, sums)
        if own:  # the norm waits until the bias' gradient is known
            dx[some] = dn.view(g.shape)
        else:
            _through_norm(dn, xs, mean[some], scale[some], beside, some, dx, of)
    if own:
        assert heads.dbias is not None
        outputs = slice(4 * of.inner, None)
        for some in _slices(x.shape[0], length, FORWARD):
            xs, db = rows(x[some]).contiguous(), heads.dbias[:, some].flatten(1).to(x.dtype)  # [h, positions]
            accumulate(sums.product[outputs], db.t(), of.standard(xs, mean[some], scale[some]).to(x.dtype))
            sums.total[outputs] += db.sum(1, dtype=sums.total.dtype)
            dn = torch.addmm(rows(dx[some]), db.t(), of.weight[outputs])
            _through_norm(dn, xs, mean[some], scale[some], beside, some, dx, of)
    return heads.dbias


def _through_norm(
    dn: Tensor,
    xs: Tensor,
    mean: Tensor,
    scale: Tensor,
    beside: Tensor | None,
    some: slice,
    dx: Tensor,
    of: "_Parameters",
) -> None:
    """Write some rows of dx: the gradient that reaches x through its norm, plus `beside`; dn, xs [positions, c]."""
    statistics = rows(mean[..., None]).contiguous(), rows(scale[..., None]).contiguous()
    one = torch.ones_like(of.norm_weight)
    found, _, _ = torch.ops.aten.native_layer_norm_backward(
        dn, xs, [xs.shape[-1]], *statistics, of.norm_weight, one, [True, False, False]
    )
    found = found.view(dx[some].shape)
    if beside is None:
        dx[some] = found
    else:
        torch.add(beside[some], found, out=dx[some])


class _Parameters:
    """The parameters, in the dtype in which the products are made; the norm's in that of its statistics."""

    def __init__(
        self,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor,
        gate_bias: Tensor | None,
        out_weight: Tensor,
        out_bias: Tensor | None,
        heads: int,
    ) -> None:
        acc, self.heads, self.inner = accumulation_dtype(x), heads, out_weight.shape[1]
        self.norm_weight, self.norm_bias = norm_weight.to(acc), None if norm_bias is None else norm_bias.to(acc)
        self.weight, self.out_weight = weight.to(x.dtype), out_weight.to(x.dtype)
        self.gate_bias = None if gate_bias is None else gate_bias.to(x.dtype)
        self.out_bias = None if out_bias is None else out_bias.to(x.dtype)
        self.makes_bias = len(weight) > 4 * self.inner

    def standard(self, xs: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        """Return (xs - mean) scale, of [positions, c], in the dtype of the statistics."""
        return (xs.to(mean.dtype) - mean.reshape(-1, 1)).mul_(scale.reshape(-1, 1))

    def bias_of(self, x: Tensor, eps: float) -> Tensor:
        """Return the bias that the weight makes of x [K, K, c], [h, K, K]."""
        (r, length, c), first = x.shape, 4 * self.inner
        bias = x.new_empty(self.heads, r, length)
        for some in _slices(r, length, FORWARD):
            normed, _, _ = torch.native_layer_norm(rows(x[some]), [c], self.norm_weight, self.norm_bias, eps)
            made = torch.mm(self.weight[first:], normed.t())
            if self.gate_bias is not None and len(self.gate_bias) > first:
                made[: len(self.gate_bias) - first] += self.gate_bias[first:, None]
            bias[:, some] = made.view(self.heads, -1, length)
        return bias


class _Sums:
    """The sums over all positions that the gradients of the parameters are made of."""

    def __init__(self, of: _Parameters) -> None:
        self.of, like = of, of.norm_weight
        self.product, self.out_product = like.new_zeros(of.weight.shape), like.new_zeros(of.out_weight.shape)
        self.total, self.out_total = like.new_zeros(len(of.weight)), like.new_zeros(len(of.out_weight))

    def gradients(self, into: Projected, out_weight: Tensor, out_bias: Tensor | None) -> tuple[Tensor, ...]:
        """Return those of norm_weight, norm_bias, weight and gate_bias, and of out_weight and out_bias."""
        of_bias = self.out_total[:0] if out_bias is None else self.out_total
        of_out = zip((self.out_product, of_bias), (out_weight, into[0] if out_bias is None else out_bias))
        of_norm = parameter_gradients(self.product, self.total, *into)
        return *of_norm, *(t.to(accumulation_dtype(p)) for t, p in of_out)


class _Keys:
    """Which keys a query attends to, and its bias: mask [R, K], bias [h, K, K] of one example."""

    def __init__(self, mask: Tensor, bias: Tensor | None, acc: torch.dtype) -> None:
        self.masked = mask == 0
        self.rows_masked: list[bool] = (
            self.masked.any(-1).cpu().tolist()
        )  # to the host: of tensors without memory nothing is read
        self.bias = None if bias is None else bias.to(acc).contiguous()
        self.less = torch.zeros(mask.shape, dtype=acc).masked_fill_(self.masked, float("-inf"))
        # Whether a query may have no key though its row has some.
        self.infinite = any(self.rows_masked) and bias is not None and bool((bias == float("-inf")).any())

    def added(self, some: slice, heads: int) -> tuple[Tensor | None, Tensor | None]:
        """Return what is added to the logits [n, h, Q, K], and which queries have no key to attend to [n, h, Q, 1]."""
        n, length = self.masked[some].shape
        shape = n, heads, length, length
        if not any(self.rows_masked[some]):
            return None if self.bias is None else self.bias.expand(shape), None
        less = self.less[some][:, None, None]
        added = less if self.bias is None else self.bias + less
        no_key = self.masked[some].all(-1)[:, None, None, None]
        if self.infinite:
            no_key = added.amax(-1, keepdim=True) == float("-inf")
        return added.expand(shape), no_key if bool(no_key.any()) else None


class _HeadsBackward:
    """The backward pass of the attention of each row, and the memory that rows use in turn."""

    def __init__(self, keys: _Keys, of: _Parameters, length: int, bias_wanted: bool) -> None:
        like, self.keys, self.of, self.heads = keys.less, keys, of, of.heads
        self.at_a_time = max(1, min(of.heads, LOGITS // length**2))
        # One, unless all of its heads are computed at once.
        self.rows = max(1, min(BACKWARD // length, LOGITS // (of.heads * length**2)))
        self.p, self.ds = (like.new_empty(self.rows * self.at_a_time, length, length) for _ in range(2))
        narrow = of.weight.dtype
        self.half = None if narrow == like.dtype else torch.empty_like(self.p, dtype=narrow)
        width = of.inner // of.heads
        self.gradients = like.new_empty(3, self.rows, of.heads, width, length, dtype=narrow)  # of q, k and v
        self.bias = None if keys.bias is None else keys.bias * LOG2E
        self.dbias = like.new_zeros(of.heads, length, length) if bias_wanted else None

    def backward(
        self, h: Tensor, g: Tensor, y: Tensor, attended: Tensor, lse: Tensor, first: int, sums: "_Sums"
    ) -> Tensor:
        """Return the gradient of a block of normalised rows, [n K, c], but for what their bias brings.

        h [n K, c]: the rows before the norm's weight; g [n, K, c]: the gradient of the output projection; first: the
        number of the first row.
        """
        of, (n, length, i), acc, g = self.of, attended.shape, lse.dtype, rows(g)
        projected = y[..., : 4 * i].flatten(0, 1).t().contiguous()  # [4 i, positions]
        o, s = attended.flatten(0, 1).t().contiguous().to(acc), torch.sigmoid(projected[:i].to(acc))
        do = torch.mm(of.out_weight.t(), g.t()).to(acc).mul_(s)
        accumulate(sums.out_product, g, (s * o).to(g.dtype).t())
        sums.out_total += g.sum(0, dtype=acc)
        through = o.mul_(do)
        delta = through.unflatten(0, (self.heads, -1)).sum(1, keepdim=True)
        dy = torch.empty_like(projected)
        dy[:i] = through.mul_(s.neg_().add_(1))
        turned = [t.view(self.heads, -1, n, length).transpose(0, 2) for t in (*projected[i:].chunk(3), do, delta)]
        gradients = dy[i:].view(3, self.heads, -1, n, length).transpose(1, 3)  # each of these [n, d, h, K]
        for some in _slices(n, length, length * self.rows):
            q, k, v, do, d = (t[some].transpose(1, 2) for t in turned)  # [rows, h, d, K]
            self.group(q, k, v, do, d, lse[some], first + some.start)
            gradients[:, some] = self.gradients[:, : some.stop - some.start].transpose(2, 3)
        sums.total[: 4 * i] += dy.sum(1, dtype=acc)
        accumulate(sums.product[: 4 * i], dy.t(), h)
        return torch.mm(dy.t(), of.weight[: 4 * i])

    def group(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, delta: Tensor, lse: Tensor, first: int) -> None:
        """Compute `gradients` of some rows and add to that of the bias.

        q, k, v, do [n, h, d, K], delta [n, h, 1, K], lse [n, h, K]; do and delta: of the attention's output.
        """
        n, scale, lse = len(q), q.shape[2] ** -0.5, lse[..., None]
        for start in range(0, self.heads, self.at_a_time):
            some = slice(start, start + self.at_a_time)
            qs, ks, vs = (t[:, some].flatten(0, 1) for t in (q, k, v))  # views, for one row
            dq, dk, dv = (t[:n, some].flatten(0, 1) for t in self.gradients)
            p, alike = self._weights(slice(first, first + n), qs, ks, lse[:, some], some)
            # `lse` was rounded, so the weights do not quite add up to 1: divide by their sum, in the gradient.
            total = p.sum(-1)[:, None]
            do_ = do[:, some].flatten(0, 1).div(total).to(q.dtype)
            torch.bmm(do_, self._narrow(p), out=dv)
            ds = self.ds[: len(p)]
            if self.half is None:
                torch.bmm(do_.mT, vs, out=ds)
            else:
                ds.copy_(torch.bmm(do_.mT, vs, out=self.half[: len(p)]))
            ds.sub_(delta[:, some].flatten(0, 1).div(total).mT).mul_(p)
            if alike is not None:
                ds.masked_fill_(alike, 0)
            if self.dbias is not None:
                self.dbias[some] += ds if n == 1 else ds.unflatten(0, (n, -1)).sum(0)
            ds = self._narrow(ds)
            dq.baddbmm_(ks, ds.mT, beta=0, alpha=scale)
            dk.baddbmm_(qs, ds, beta=0, alpha=scale)

    def _narrow(self, x: Tensor) -> Tensor:
        """Return a block of the size of the logits in the dtype of the products."""
        return x if self.half is None else self.half[: len(x)].copy_(x)

    def _weights(self, group: slice, q: Tensor, k: Tensor, lse: Tensor, some: slice) -> tuple[Tensor, Tensor | None]:
        """Return the weights of some rows, not yet divided by their sum, and which of them depend on no logit."""
        keys, alike, no_key, less = self.keys, None, None, lse * LOG2E
        p = self.p[: len(q)]
        by_row = p.unflatten(0, less.shape[:2])
        masked = any(keys.rows_masked[group])
        if masked:
            no_key = less == float("inf")
            less = less.masked_fill(no_key, 0)
        # Write bias - lse first and add the product to it: one pass over the block less.
        if self.bias is None:
            by_row.copy_(-less)
        else:
            torch.sub(self.bias[some], less, out=by_row)
        p.baddbmm_(q.to(p.dtype).mT, k.to(p.dtype), alpha=q.shape[1] ** -0.5 * LOG2E)
        if masked:
            assert no_key is not None
            by_row.add_(keys.less[group][:, None, None])
            if bool(no_key.any()):
                alike = (no_key & keys.masked[group][:, None, None]).flatten(0, 1)
                p.masked_fill_(alike, 0)
        return p.exp2_(), alike


def _examples(x: Tensor) -> Iterator[tuple[int, ...]]:
    """Yield the index of each example among the leading axes."""
    return itertools.product(*(range(size) for size in x.shape[:-3]))


def _slices(count: int, length: int, positions: int) -> Iterable[slice]:
    """Yield slices of rows of this length that have so many positions, or a row each."""
    size = max(1, positions // length)
    return alike(slice(start, min(start + size, count)) for start in range(0, count, size))
