"""Triangle multiplication on a CPU, block by block, so that what lies between stays in cache.

The projections are made with their channels in front, [output, positions], by one product: so the factors are gated and
masked where they lie and written in long runs, the product's norm runs over the first axis, and nothing is turned.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.cpu.blocks import accumulate, gate_values, put, rows, writable
from warpfold.ops.cpu.gate import drawn_factors
from warpfold.ops.cpu.norm import Projected, parameter_gradients
from warpfold.ops.dispatch import alike
from warpfold.ops.norm import empty_statistics
from warpfold.ops.tensors import accumulation_dtype, empty_like
from warpfold.ops.triangle_multiplication import empty_planes, split_projections

POSITIONS = 1024  # of a block, at least a row


def triangle_multiplication(
    x: Tensor,
    mask: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    out_norm_weight: Tensor,
    out_norm_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    outgoing: bool,
    fused: bool,
    *more: Any,
) -> tuple[Tensor, ...]:
    """Compute warpfold::triangle_multiplication."""
    *factor_operands, eps, residual, kept = more
    into, out_of = (norm_weight, norm_bias, weight, bias), (out_norm_weight, out_norm_bias, out_weight, out_bias)
    of = _Parameters(x, into, out_of, fused)
    factors = drawn_factors(x, *factor_operands)
    f = None if factors is None else factors.to(x.dtype).expand(x.shape)
    length, out, logits = x.shape[-2], empty_like(x), x.new_empty(x.shape)  # logits: of the product's gate
    a, b, product = (empty_planes(x, of.hidden) for _ in range(3))
    mean, scale, out_mean, out_scale = (*empty_statistics(x), *empty_statistics(x))
    for at in examples(x):
        for some in row_slices(x):
            xs, shape = rows(x[at][some]), x[at][some].shape
            normed, m, s = torch.native_layer_norm(xs, [xs.shape[1]], of.norm_weight, of.norm_bias, eps)
            y = of.factors(normed)
            masked = mask[at][some].reshape(1, -1).to(x.dtype)
            for factor, logit, value in ((a, y[0], y[1]), (b, y[2], y[3])):
                torch.mul(torch.sigmoid(logit).mul_(masked), value, out=factor[at][:, some].flatten(1))
            torch.mm(normed, of.gate_weight.t(), out=logits[at][some].flatten(0, 1))
            if of.gate_bias is not None:
                logits[at][some] += of.gate_bias
            mean[at][some], scale[at][some] = m.view(shape[:2]), s.view(shape[:2])
        left, right = (a[at], b[at].mT) if outgoing else (b[at].mT, a[at])
        torch.bmm(left, right, out=product[at])
        for some in row_slices(x):
            standard, m, s = standardised(product[at][:, some].flatten(1), eps)
            out_mean[at][some], out_scale[at][some] = m.view(-1, length), s.view(-1, length)
            dx = of.project(standard.to(x.dtype)).mul_(gate_values(logits[at][some].flatten(0, 1)))
            if f is not None:
                dx.mul_(rows(f[at][some]))
            results = writable(out[at][some]) if residual else dx
            if residual:
                torch.add(dx, rows(x[at][some]), out=results)
            put(out[at][some], results)
    if not kept:
        return out, *(x.new_empty(0) for _ in range(7))
    return out, a, b, product, mean, scale, out_mean, out_scale


def triangle_multiplication_backward(
    grad: Tensor,
    x: Tensor,
    mask: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    out_norm_weight: Tensor,
    out_norm_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    product: Tensor,
    mean: Tensor,
    scale: Tensor,
    out_mean: Tensor,
    out_scale: Tensor,
    *more: Any,
) -> tuple[Tensor, ...]:
    """Compute warpfold::triangle_multiplication_backward; the gradients of both norms from products, as in norm.py."""
    *factor_operands, outgoing, fused, residual = more
    into, out_of = (norm_weight, norm_bias, weight, bias), (out_norm_weight, out_norm_bias, out_weight, out_bias)
    of = _Parameters(x, into, out_of, fused)
    factors = drawn_factors(grad, *factor_operands)
    f = None if factors is None else factors.to(grad.dtype).expand(grad.shape)
    length, sums, dx = x.shape[-2], _Sums(of), empty_like(x)
    # The gradients of the product and of its gate's logits, and then those of the factors.
    dproduct, dlogits = empty_planes(x[(0,) * (x.dim() - 3)], of.hidden), x.new_empty(x.shape[-3:])
    da, db = torch.empty_like(dproduct), torch.empty_like(dproduct)
    for at in examples(x):
        for some in row_slices(x):
            before = _of_norm(rows(x[at][some]), mean[at][some], scale[at][some])
            normed = of.weighed(before).to(x.dtype)
            p, m, s = product[at][:, some].flatten(1), out_mean[at][some].reshape(-1), out_scale[at][some].reshape(-1)
            g = rows(grad[at][some] if f is None else grad[at][some] * f[at][some])
            dp, dgate = _backward_output(g, normed, (p.to(m.dtype) - m).mul_(s), s, of, sums)
            dproduct[:, some], dlogits[some] = dp.view(of.hidden, -1, length), dgate.view(-1, *x.shape[-2:])
        if outgoing:
            torch.bmm(dproduct, b[at], out=da)
            torch.bmm(dproduct.mT, a[at], out=db)
        else:
            torch.bmm(b[at], dproduct, out=da)
            torch.bmm(a[at], dproduct.mT, out=db)
        for some in row_slices(x):
            dfactors, of_gate = (da[:, some], db[:, some]), dlogits[some].flatten(0, 1)
            statistics = mean[at][some], scale[at][some]
            beside = grad[at][some] if residual else None
            _backward_input(beside, x[at][some], mask[at][some], statistics, dfactors, of_gate, dx[at][some], of, sums)
    return dx, *sums.gradients()


def _backward_output(
    g: Tensor, normed: Tensor, standard: Tensor, scale: Tensor, of: "_Parameters", sums: "_Sums"
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a block of the product [h, positions] and of its gate's logits [positions, c].

    g, normed [positions, c]: the gradient of the update, the normalised x; standard: the product, of mean 0 and
    deviation 1 after it was multiplied by `scale`.
    """
    logits, narrow = torch.mm(normed, of.gate_weight.t()), standard.to(g.dtype)
    if of.gate_bias is not None:
        logits += of.gate_bias
    values = gate_values(logits)
    dprojected = g * values
    dgate = of.project(narrow).mul_(dprojected).mul_(values.neg_().add_(1))
    sums.of_output(dprojected, narrow)
    dn = torch.mm(of.out_folded.t(), dprojected.t()).to(standard.dtype)
    return _through_norm(dn, standard, scale), dgate


def _backward_input(
    beside: Tensor | None,
    x: Tensor,
    mask: Tensor,
    statistics: tuple[Tensor, Tensor],
    dfactors: tuple[Tensor, Tensor],
    dlogits: Tensor,
    dx: Tensor,
    of: "_Parameters",
    sums: "_Sums",
) -> None:
    """Write the gradient of a block of x, given those of its factors and of the product's gate, plus `beside`."""
    xs = rows(x).contiguous()
    standard = _of_norm(xs, *statistics)
    normed, masked = of.weighed(standard).to(x.dtype), mask.reshape(1, -1).to(x.dtype)
    y, dy = of.factors(normed), x.new_empty(4, of.hidden, len(xs))
    for first, d in zip((0, 2), dfactors):
        logit, value = y[first], y[first + 1]
        s = torch.sigmoid(logit)
        dvalue = torch.mul(d.flatten(1), masked, out=dy[first + 1]).mul_(s)
        torch.mul(dvalue, value, out=dy[first]).mul_(s.neg_().add_(1))
    dy = dy.flatten(0, 1)
    sums.of_input(dy, dlogits, standard.to(x.dtype))
    dn = torch.mm(dy.t(), of.factor_weight).addmm_(dlogits, of.gate_weight)
    mean, scale = (rows(t[..., None]).contiguous() for t in statistics)
    one = torch.ones_like(of.norm_weight)
    found, _, _ = torch.ops.aten.native_layer_norm_backward(
        dn, xs, [xs.shape[1]], mean, scale, of.norm_weight, one, [True, False, False]
    )
    if beside is None:
        dx.copy_(found.view(dx.shape))
    else:
        torch.add(beside, found.view(dx.shape), out=dx)


class _Parameters:
    """The parameters, in the dtype in which products are made; the norms' in that of statistics.

    factor_weight [4 h, c]: of a's gate, a, b's gate and b.  out_folded: with the weight of the product's norm in it.
    """

    def __init__(
        self,
        x: Tensor,
        into: Projected,
        out_of: Projected,
        fused: bool,
    ) -> None:
        acc, self.into, self.out_of, self.fused = accumulation_dtype(x), into, out_of, fused
        (norm_weight, norm_bias, weight, bias), (out_norm_weight, out_norm_bias, out_weight, out_bias) = into, out_of
        self.norm_weight, self.hidden = norm_weight.to(acc), out_weight.shape[1]
        self.norm_bias = None if norm_bias is None else norm_bias.to(acc)
        a, a_gate, b, b_gate, gate = split_projections(weight.to(x.dtype).t(), self.hidden, fused)
        self.factor_weight, self.gate_weight = torch.cat([a_gate, a, b_gate, b], 1).t().contiguous(), gate.t()
        self.factor_bias = self.gate_bias = None
        if bias is not None:
            whole = F.pad(bias.to(x.dtype), (0, len(weight) - len(bias)))
            a, a_gate, b, b_gate, self.gate_bias = split_projections(whole, self.hidden, fused)
            self.factor_bias = torch.cat([a_gate, a, b_gate, b])
        self.out_folded, self.out_shift = folded(x, out_norm_weight, out_norm_bias, out_weight, out_bias)

    def weighed(self, standard: Tensor) -> Tensor:
        """Return the normalised x, of [positions, c] with mean 0 and deviation 1."""
        if self.norm_bias is None:
            return standard * self.norm_weight
        return torch.addcmul(self.norm_bias, standard, self.norm_weight)

    def factors(self, normed: Tensor) -> Tensor:
        """Return the logits of a's gate, a, the logits of b's gate, and b: [4, h, positions]."""
        y = torch.mm(self.factor_weight, normed.t())
        if self.factor_bias is not None:
            y += self.factor_bias[:, None]
        return y.view(4, self.hidden, -1)

    def project(self, standard: Tensor) -> Tensor:
        """Return the output projection [positions, c] of the product [h, positions], mean 0 and deviation 1."""
        return linear(standard.t(), self.out_folded.t(), self.out_shift)


class _Sums:
    """The sums over all positions that the gradients of the parameters are made of."""

    def __init__(self, of: _Parameters) -> None:
        self.of, like = of, of.norm_weight
        self.factors, self.gate = like.new_zeros(of.factor_weight.shape), like.new_zeros(of.gate_weight.shape)
        self.factors_total, self.gate_total = like.new_zeros(4 * of.hidden), like.new_zeros(len(self.gate))
        self.out, self.out_total = like.new_zeros(of.out_folded.shape), like.new_zeros(len(self.gate))

    def of_output(self, grad: Tensor, standard: Tensor) -> None:
        """Add what a block brings: grad [positions, c] of the output projection, standard [h, positions]."""
        accumulate(self.out, grad, standard.t())
        self.out_total += grad.sum(0, dtype=self.out_total.dtype)

    def of_input(self, factors: Tensor, gate: Tensor, standard: Tensor) -> None:
        """Add what a block brings: the gradients of `_Parameters.factors` [4 h, positions] and of the gate's logits."""
        accumulate(self.factors, factors.t(), standard)
        accumulate(self.gate, gate, standard)
        self.factors_total += factors.sum(1, dtype=self.gate_total.dtype)
        self.gate_total += gate.sum(0, dtype=self.gate_total.dtype)

    def gradients(self) -> list[Tensor]:
        """Return those of the parameters of the input's norm and projection, and of the output's: see norm.py."""
        (a_gate, a, b_gate, b), fused = self.factors.chunk(4), self.of.fused
        product = torch.cat([a, b, a_gate, b_gate, self.gate] if fused else [a, a_gate, b, b_gate, self.gate])
        a_gate, a, b_gate, b = self.factors_total.chunk(4)
        total = torch.cat([a, b, a_gate, b_gate, self.gate_total] if fused else [a, a_gate, b, b_gate, self.gate_total])
        into, out_of = (
            parameter_gradients(product, total, *self.of.into),
            parameter_gradients(self.out, self.out_total, *self.of.out_of),
        )
        return [*into, *out_of]


def folded(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return a projection's weight with that of the norm before it in it, and what it adds, in the dtype of x."""
    wide = weight.to(accumulation_dtype(x))
    shift = None if norm_bias is None else wide @ norm_bias.to(wide.dtype)
    if bias is not None:
        shift = bias.to(wide.dtype) if shift is None else shift + bias.to(wide.dtype)
    return (wide * norm_weight.to(wide.dtype)).to(x.dtype), None if shift is None else shift.to(x.dtype)


def linear(x: Tensor, weight: Tensor, added: Tensor | None) -> Tensor:
    """Return x weight + added, of matrices."""
    return torch.mm(x, weight) if added is None else torch.addmm(added, x, weight)


def _of_norm(xs: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Return (xs - mean) scale of [positions, c], in the dtype of the statistics."""
    return (xs.to(mean.dtype) - mean.reshape(-1, 1)).mul_(scale.reshape(-1, 1))


def standardised(product: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block of the product [h, positions] with mean 0 and deviation 1, its mean and 1 / deviation."""
    wide = product.to(accumulation_dtype(product))
    mean = wide.mean(0)
    standard = wide - mean
    scale = standard.square().mean(0).add_(eps).rsqrt_()
    return standard.mul_(scale), mean, scale


def _through_norm(dn: Tensor, standard: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of the product, of that of its standardised values; [h, positions], written over dn."""
    along = (dn * standard).mean(0)
    return dn.sub_(dn.mean(0)).sub_(standard * along).mul_(scale.reshape(-1))


def examples(x: Tensor) -> Iterator[tuple[int, ...]]:
    """Yield the index of each example among the leading axes."""
    return itertools.product(*(range(size) for size in x.shape[:-3]))


def row_slices(x: Tensor) -> Iterable[slice]:
    """Yield slices of the rows of x that have about so many positions, or a row each."""
    count, length, _ = x.shape[-3:]
    size = max(1, POSITIONS // length)
    return alike(slice(start, min(start + size, count)) for start in range(0, count, size))
