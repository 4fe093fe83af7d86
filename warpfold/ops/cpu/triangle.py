"""Triangle multiplication and its parts on a CPU, block by block, so that what lies between stays in cache.

The projections are made with their channels in front, [output, positions], by one product: so the factors are gated and
masked where they lie and written in long runs, the product's norm runs over the first axis, and nothing is turned.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.cpu.linear import (
    accumulate,
    blocks,
    drawn_factors,
    examples,
    gate_values,
    parameter_gradients,
    parts_of,
    put,
    row_slices,
    rows,
    writable,
)
from warpfold.ops.cpu.threads import in_threads, summed
from warpfold.ops.dispatch import Operands, accumulation_dtype, empty_like
from warpfold.ops.linear import empty_statistics
from warpfold.ops.triangle import empty_factor, empty_planes, split_projections

POSITIONS = 1024  # of a block, at least a row
PLANES = 4  # channels that are multiplied at a time


def triangle_factor(t: Operands) -> Tensor:
    """Compute warpfold::triangle_factor."""
    result = empty_factor(t.y)
    positions = result.movedim(-3, -1)

    def compute(yb: Tensor, gb: Tensor, mb: Tensor, fb: Tensor) -> None:
        fb.copy_(gate_values(gb).mul_(yb).mul_(mb))

    in_threads(compute, blocks(positions, t.y, t.g, t.mask.to(t.y.dtype)[..., None], positions))
    return result


def triangle_factor_backward(t: Operands) -> tuple[Tensor, Tensor]:
    """Compute warpfold::triangle_factor_backward."""
    y = t.y
    dy, dg = empty_like(y), empty_like(t.g)

    def compute(db: Tensor, yb: Tensor, gb: Tensor, mb: Tensor, dyb: Tensor, dgb: Tensor) -> None:
        s = gate_values(rows(gb))
        d = rows(db).mul(rows(mb)).mul_(s)
        put(dyb, d)
        put(dgb, d.mul_(rows(yb)).mul_(s.neg_().add_(1)))

    in_threads(compute, blocks(y, t.grad.movedim(-3, -1), y, t.g, t.mask.to(y.dtype)[..., None], dy, dg))
    return dy, dg


def triangle_multiplication(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::triangle_multiplication."""
    x = t.x
    of = _Parameters(t)
    f = drawn_factors(x, t)
    length, out, logits = x.shape[-2], empty_like(x), x.new_empty(x.shape)  # logits: of the product's gate
    a, b, product = (empty_planes(x, of.hidden) for _ in range(3))
    mean, scale, out_mean, out_scale = (*empty_statistics(x), *empty_statistics(x))

    def factors(at: tuple[int, ...], some: slice) -> None:
        """Make both factors of one part, and the logits of the product's gate."""
        xs, shape = rows(x[at][some]), x[at][some].shape
        normed, m, s = torch.native_layer_norm(xs, [xs.shape[1]], of.norm_weight, of.norm_bias, t.eps)
        y = of.factors(normed)
        masked = t.mask[at][some].reshape(1, -1).to(x.dtype)
        for factor, logit, value in ((a, y[0], y[1]), (b, y[2], y[3])):
            torch.mul(torch.sigmoid(logit).mul_(masked), value, out=factor[at][:, some].flatten(1))
        torch.mm(normed, of.gate_weight.t(), out=logits[at][some].flatten(0, 1))
        if of.gate_bias is not None:
            logits[at][some] += of.gate_bias
        mean[at][some], scale[at][some] = m.view(shape[:2]), s.view(shape[:2])

    def output(at: tuple[int, ...], some: slice) -> None:
        """Write one part of the result from the product."""
        standard, m, s = standardised(product[at][:, some].flatten(1), t.eps)
        out_mean[at][some], out_scale[at][some] = m.view(-1, length), s.view(-1, length)
        dx = of.project(standard.to(x.dtype)).mul_(gate_values(logits[at][some].flatten(0, 1)))
        if f is not None:
            dx.mul_(rows(f[at][some]))
        results = writable(out[at][some]) if t.residual else dx
        if t.residual:
            torch.add(dx, rows(x[at][some]), out=results)
        put(out[at][some], results)

    in_threads(factors, parts_of(x, POSITIONS))
    left, right = (a, b.mT) if t.outgoing else (b.mT, a)
    multiply((left, right, product))
    in_threads(output, parts_of(x, POSITIONS))
    if not t.kept:
        return out, *(x.new_empty(0) for _ in range(7))
    return out, a, b, product, mean, scale, out_mean, out_scale


def triangle_multiplication_backward(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::triangle_multiplication_backward; the norms as in linear.py."""
    grad, x = t.grad, t.x
    of = _Parameters(t)
    f = drawn_factors(grad, t)
    length, sums, dx = x.shape[-2], _Sums.zeros(of), empty_like(x)
    # The gradients of the product and of its gate's logits, and then those of the factors.
    dproduct, dlogits = empty_planes(x[(0,) * (x.dim() - 3)], of.hidden), x.new_empty(x.shape[-3:])
    da, db, one = torch.empty_like(dproduct), torch.empty_like(dproduct), torch.ones_like(of.norm_weight)

    def through_output(sums: _Sums, at: tuple[int, ...], some: slice) -> None:
        """Go back from one part of the result to the product and to the logits of its gate."""
        before = _of_norm(rows(x[at][some]), t.mean[at][some], t.scale[at][some])
        normed = of.weighed(before).to(x.dtype)
        m, s = t.out_mean[at][some].reshape(-1), t.out_scale[at][some].reshape(-1)
        g = rows(grad[at][some] if f is None else grad[at][some] * f[at][some])
        standard = (t.product[at][:, some].flatten(1).to(m.dtype) - m).mul_(s)  # the product, normalised
        logits, narrow = torch.mm(normed, of.gate_weight.t()), standard.to(g.dtype)
        if of.gate_bias is not None:
            logits += of.gate_bias
        values = gate_values(logits)
        dprojected = g * values
        dgate = of.project(narrow).mul_(dprojected).mul_(values.neg_().add_(1))
        sums.of_output(dprojected, narrow)
        dn = torch.mm(of.out_folded.t(), dprojected.t()).to(standard.dtype)
        along = (dn * standard).mean(0)
        dn = dn.sub_(dn.mean(0)).sub_(standard * along).mul_(s)  # through the product's norm
        dproduct[:, some], dlogits[some] = dn.view(of.hidden, -1, length), dgate.view(-1, *x.shape[-2:])

    def through_input(sums: _Sums, at: tuple[int, ...], some: slice) -> None:
        """Go back from one part of the factors and of the logits to x."""
        xs, of_gate = rows(x[at][some]).contiguous(), dlogits[some].flatten(0, 1)
        m, s = t.mean[at][some], t.scale[at][some]
        before = _of_norm(xs, m, s)
        normed, masked = of.weighed(before).to(x.dtype), t.mask[at][some].reshape(1, -1).to(x.dtype)
        y, dy = of.factors(normed), x.new_empty(4, of.hidden, len(xs))
        for first, d in ((0, da[:, some]), (2, db[:, some])):
            logit, value = y[first], y[first + 1]
            gates = torch.sigmoid(logit)
            dvalue = torch.mul(d.flatten(1), masked, out=dy[first + 1]).mul_(gates)
            torch.mul(dvalue, value, out=dy[first]).mul_(gates.neg_().add_(1))
        dy = dy.flatten(0, 1)
        sums.of_input(dy, of_gate, before.to(x.dtype))
        dn = torch.mm(dy.t(), of.factor_weight).addmm_(of_gate, of.gate_weight)
        statistics = (rows(each[..., None]).contiguous() for each in (m, s))
        found, _, _ = torch.ops.aten.native_layer_norm_backward(
            dn, xs, [xs.shape[1]], *statistics, of.norm_weight, one, [True, False, False]
        )
        if t.residual:
            torch.add(grad[at][some], found.view(dx[at][some].shape), out=dx[at][some])
        else:
            dx[at][some].copy_(found.view(dx[at][some].shape))

    for at in examples(x):
        parts = [(at, some) for some in row_slices(x.shape[-3], x.shape[-2], POSITIONS)]
        sums.add(summed(through_output, parts, lambda: _Sums.zeros(of)))
        if t.outgoing:
            multiply((dproduct, t.b[at], da), (dproduct.mT, t.a[at], db))
        else:
            multiply((t.b[at], dproduct, da), (t.a[at], dproduct.mT, db))
        sums.add(summed(through_input, parts, lambda: _Sums.zeros(of)))
    return dx, *sums.gradients(of)


def multiply(*products: tuple[Tensor, Tensor, Tensor]) -> None:
    """Write the products of matrices [*, i, k] and [*, k, j] over [*, i, j]; of each product the three."""

    def compute(left: Tensor, right: Tensor, out: Tensor) -> None:
        torch.bmm(left, right, out=out)

    flat = [[each.flatten(0, -3) for each in one] for one in products]
    in_threads(
        compute,
        ([each[start : start + PLANES] for each in one] for one in flat for start in range(0, len(one[0]), PLANES)),
    )


class _Parameters:
    """The parameters, in the dtype in which products are made; the norms' in that of statistics.

    factor_weight [4 h, c]: of a's gate, a, b's gate and b.  out_folded: with the weight of the product's norm in it.
    """

    def __init__(self, t: Operands) -> None:
        x, weight, bias, norm_bias, self.fused = t.x, t.weight, t.bias, t.norm_bias, t.fused
        self.into = t.norm_weight, norm_bias, weight, bias
        self.out_of = t.out_norm_weight, t.out_norm_bias, t.out_weight, t.out_bias
        acc = accumulation_dtype(x)
        self.norm_weight, self.hidden = t.norm_weight.to(acc), t.out_weight.shape[1]
        self.norm_bias = None if norm_bias is None else norm_bias.to(acc)
        a, a_gate, b, b_gate, gate = split_projections(weight.to(x.dtype).t(), self.hidden, t.fused)
        self.factor_weight, self.gate_weight = torch.cat([a_gate, a, b_gate, b], 1).t().contiguous(), gate.t()
        self.factor_bias = self.gate_bias = None
        if bias is not None:
            whole = F.pad(bias.to(x.dtype), (0, len(weight) - len(bias)))
            a, a_gate, b, b_gate, self.gate_bias = split_projections(whole, self.hidden, t.fused)
            self.factor_bias = torch.cat([a_gate, a, b_gate, b])
        self.out_folded, self.out_shift = folded(x, *self.out_of)

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


class _Sums(NamedTuple):
    """The sums over all positions that the gradients of the parameters are made of."""

    factors: Tensor
    factors_total: Tensor
    gate: Tensor
    gate_total: Tensor
    out: Tensor
    out_total: Tensor

    @classmethod
    def zeros(cls, of: _Parameters) -> "_Sums":
        """Make sums of nothing yet."""
        like, outputs = of.norm_weight, len(of.gate_weight)
        shapes = of.factor_weight.shape, (4 * of.hidden,), of.gate_weight.shape, (outputs,)
        return cls(*(like.new_zeros(shape) for shape in (*shapes, of.out_folded.shape, (outputs,))))

    def add(self, others: "_Sums") -> None:
        """Add those over other positions."""
        for total, other in zip(self, others, strict=True):
            total += other

    def of_output(self, grad: Tensor, standard: Tensor) -> None:
        """Add what a block brings: grad [positions, c] of the output projection, standard [h, positions]."""
        accumulate(self.out, grad, standard.t())
        self.out_total.add_(grad.sum(0, dtype=self.out_total.dtype))

    def of_input(self, factors: Tensor, gate: Tensor, standard: Tensor) -> None:
        """Add what a block brings: the gradients of `_Parameters.factors` [4 h, positions] and of the gate's logits."""
        accumulate(self.factors, factors.t(), standard)
        accumulate(self.gate, gate, standard)
        self.factors_total.add_(factors.sum(1, dtype=self.gate_total.dtype))
        self.gate_total.add_(gate.sum(0, dtype=self.gate_total.dtype))

    def gradients(self, of: _Parameters) -> list[Tensor]:
        """Return those of the parameters of the input's norm and projection, and of the output's: see linear.py."""
        (a_gate, a, b_gate, b), fused = self.factors.chunk(4), of.fused
        product = torch.cat([a, b, a_gate, b_gate, self.gate] if fused else [a, a_gate, b, b_gate, self.gate])
        a_gate, a, b_gate, b = self.factors_total.chunk(4)
        total = torch.cat([a, b, a_gate, b_gate, self.gate_total] if fused else [a, a_gate, b, b_gate, self.gate_total])
        of_out = parameter_gradients(self.out, self.out_total, *of.out_of)
        return [*parameter_gradients(product, total, *of.into), *of_out]


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


def projected_factor(t: Operands) -> Tensor:
    """Compute `projected_factor`."""
    x, (weight, bias) = t.x, t.into
    weight, half = weight.to(x.dtype), len(weight) // 2
    if bias is not None:
        bias = F.pad(bias.to(x.dtype), (0, len(weight) - len(bias)))[:, None]
    factor, of_norm = empty_factor(x[..., :1].expand(*x.shape[:-1], half)), _cast_norm(x, t.norm)

    def compute(at: tuple[int, ...], some: slice) -> None:
        y = torch.mm(weight, _normed(rows(x[at][some]), of_norm, t.eps).t())
        if bias is not None:
            y += bias
        masked = t.mask[at][some].reshape(1, -1).to(x.dtype)
        made = torch.sigmoid(y[half:]).mul_(masked).mul_(y[:half])
        factor[at][:, some] = made.view(half, -1, x.shape[-2])

    in_threads(compute, parts_of(x, POSITIONS))
    return factor


def triangle_slice(t: Operands) -> Tensor:
    """Compute `triangle_slice`; the slice is normalised twice, so that its gate exists for a block alone."""
    x, a = t.x, projected_factor(t)
    product = a @ t.b.mT if t.outgoing else (a.mT @ t.b).mT  # b.mT @ a, up to four times as fast where columns are few
    del a
    out, of_norm = empty_like(x), _cast_norm(x, t.norm)
    gate_weight, gate_bias = t.of_gate[0].to(x.dtype).t(), t.of_gate[1]
    weight, shift = folded(x, *t.norm_out, *t.out_of)
    f = None if t.factors is None else (x.new_ones(()) * t.factors).expand(x.shape)

    def compute(at: tuple[int, ...], some: slice) -> None:
        """Compute one part."""
        xs, results = rows(x[at][some]), writable(out[at][some])
        standard, _, _ = standardised(product[at][:, some].flatten(1), t.eps)
        logits = torch.mm(_normed(xs, of_norm, t.eps), gate_weight)
        if gate_bias is not None:
            logits += gate_bias.to(x.dtype)
        dx = linear(standard.to(x.dtype).t(), weight.t(), shift)
        torch.mul(dx, gate_values(logits), out=results)
        if f is not None:
            results *= rows(f[at][some])
        if t.residual:
            results += xs
        put(out[at][some], results)

    in_threads(compute, parts_of(x, POSITIONS))
    return out


def _cast_norm(x: Tensor, norm: Any) -> tuple[Tensor, Tensor | None]:
    weight, bias = norm
    return weight.to(accumulation_dtype(x)), None if bias is None else bias.to(accumulation_dtype(x))


def _normed(xs: Tensor, norm: tuple[Tensor, Tensor | None], eps: float) -> Tensor:
    weight, bias = norm
    return torch.native_layer_norm(xs, [xs.shape[1]], weight, bias, eps)[0]
