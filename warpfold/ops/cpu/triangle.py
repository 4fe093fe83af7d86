"""Triangle multiplication and its factors on a CPU in blocks, so that intermediate results stay in cache.

One product computes all projections with their channels in front, [output, positions].  So the factors are gated and
masked in place and written in long runs, the product's norm runs over the first axis, and nothing is transposed.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.cpu.linear import (
    Block,
    accumulate,
    drawn_factors,
    examples,
    gate_values,
    parameter_gradients,
    put,
    row_blocks,
    row_slices,
    rows,
    standardise,
    through_norm,
    writable,
)
from warpfold.ops.cpu.threads import add_sums, in_threads, summed
from warpfold.ops.dispatch import Operands, accumulation_dtype, empty_like
from warpfold.ops.linear import empty_statistics
from warpfold.ops.triangle import (
    empty_factor,
    empty_gradient_of_b,
    empty_product,
    factor_channels,
    is_narrow,
    split_projections,
)

POSITIONS = 1024  # per block of rows
PLANES = 4  # channels per batched product


def triangle_factor(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::triangle_factor."""
    params, (mean, scale) = _Input(t, (t.which,), gated=False), empty_statistics(t.x)
    out = empty_factor(t.x, params.hidden)
    _write_factors(t, params, (out,), mean, scale)
    return out, mean, scale


def triangle_factor_backward(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::triangle_factor_backward."""
    x, params, dx = t.x, _Input(t, (t.which,), gated=False), empty_like(t.x)

    def compute(sums: _InputSums, block: Block) -> None:
        """Propagate the gradient from some rows of the factor to those of x."""
        no_gate = x.new_empty(x[block].shape[:-1].numel(), 0)
        dx_rows = _back_to_x(t, params, sums, block, [t.grad[_of_planes(block)]], no_gate)
        dx[block].copy_(dx_rows.view(dx[block].shape))

    return dx, *params.gradients(summed(compute, zip(row_blocks(x, POSITIONS)), params.zeros))


def triangle_multiplication(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::triangle_multiplication."""
    x = t.x
    params, out_params = _Input(t, (0, 1) if t.b is None else (0,)), _Output(t)
    f, out = drawn_factors(x, t), empty_like(x)
    made_factors, product = [empty_factor(x, params.hidden) for _ in params.which], empty_product(x, params.hidden)
    mean, scale, out_mean, out_scale = (*empty_statistics(x), *empty_statistics(x))

    def output(block: Block) -> None:
        """Compute some rows of the result from the product; the gate's logits exist for one block at a time."""
        xs, results = rows(x[block]), writable(out[block])
        shape = x[block].shape[:-1]
        # The norm of the product runs over the first axis.
        wide = product[_of_planes(block)].flatten(1).to(out_mean.dtype)
        m = wide.mean(0)
        standard = wide - m
        s = standard.square().mean(0).add_(t.eps).rsqrt_()
        standard.mul_(s)
        out_mean[block], out_scale[block] = m.view(shape), s.view(shape)
        dx = torch.mul(
            out_params.project(standard.to(x.dtype)), gate_values(params.gate(params.normed(xs, t.eps)[0])), out=results
        )
        if f is not None:
            dx.mul_(rows(f[block]))
        if t.residual:
            dx.add_(xs)
        put(out[block], dx)

    _write_factors(t, params, made_factors, mean, scale)
    a, b = made_factors if t.b is None else (made_factors[0], t.b)
    left, right, destination = (a, b.mT, product) if t.outgoing else (b.mT, a, product)
    multiply((right.mT, left.mT, destination.mT) if is_narrow(x) else (left, right, destination))
    in_threads(output, zip(row_blocks(x, POSITIONS)))
    own_b = b if t.b is None else x.new_empty(0)
    return out, a, own_b, product, mean, scale, out_mean, out_scale


def triangle_multiplication_backward(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::triangle_multiplication_backward; the norms' gradients are computed as in linear.py."""
    grad, x = t.grad, t.x
    params, out_params = _Input(t, (0, 1) if t.b is None else (0,)), _Output(t)
    f, dx, dgiven = drawn_factors(grad, t), empty_like(x), empty_gradient_of_b(t)
    sums, out_sums = params.zeros(), out_params.zeros()
    # First the gradients of the product and of its gate's logits, then those of the factors.
    i, k = x.shape[-3:-1]
    dproduct, da = x.new_empty(params.hidden, i, k), x.new_empty(params.hidden, i, k)
    dlogits, own_db = x.new_empty(x.shape[-3:]), torch.empty_like(da) if t.b is None else None

    def through_output(sums: tuple[Tensor, Tensor], block: Block) -> None:
        """Propagate the gradient from some rows of the result to the product and its gate's logits."""
        (out, total), part = sums, block[-1]
        before = standardise(rows(x[block]), t.mean[block], t.scale[block])
        m, s = t.out_mean[block].reshape(-1), t.out_scale[block].reshape(-1)
        g = rows(grad[block] if f is None else grad[block] * f[block])
        standard = (t.product[_of_planes(block)].flatten(1).to(m.dtype) - m).mul_(s)
        narrow = standard.to(g.dtype)
        values = gate_values(params.gate(params.weighed(before).to(x.dtype)))
        dprojected = g * values
        dgate = out_params.project(narrow).mul_(dprojected).mul_(values.neg_().add_(1))
        accumulate(out, dprojected, narrow.t())
        total.add_(dprojected.sum(0, dtype=total.dtype))
        dn = torch.mm(out_params.folded.t(), dprojected.t()).to(standard.dtype)
        along = (dn * standard).mean(0)
        dn = dn.sub_(dn.mean(0)).sub_(standard * along).mul_(s)  # through the product's norm
        dproduct[:, part], dlogits[part] = dn.view(params.hidden, -1, k), dgate.view(-1, *x.shape[-2:])

    def through_input(sums: _InputSums, block: Block) -> None:
        """Propagate the gradient from some rows of the factors and the logits to those of x."""
        part = block[-1]
        planes = [da[:, part]] if own_db is None else [da[:, part], own_db[:, part]]
        dx_rows = _back_to_x(t, params, sums, block, planes, dlogits[part].flatten(0, 1)).view(dx[block].shape)
        if t.residual:
            torch.add(grad[block], dx_rows, out=dx[block])
        else:
            dx[block].copy_(dx_rows)

    for example in examples(x):
        blocks = [(*example, part) for part in row_slices(i, k, POSITIONS)]
        add_sums(out_sums, summed(through_output, zip(blocks), out_params.zeros))
        b, db = (t.own_b[example], own_db) if own_db is not None else (t.b[example], dgiven[example])
        if t.outgoing:
            multiply((dproduct, b, da), (dproduct.mT, t.a[example], db))
        else:
            multiply((b, dproduct, da), (t.a[example], dproduct.mT, db))
        add_sums(sums, summed(through_input, zip(blocks), params.zeros))
    return dx, dgiven, *params.gradients(sums), *parameter_gradients(*out_sums, *out_params.parameters)


def _of_planes(block: Block) -> Block:
    """Return the index of a block's rows in planes [*, channels, rows, length]."""
    return *block[:-1], slice(None), block[-1]


def multiply(*products: tuple[Tensor, Tensor, Tensor]) -> None:
    """Multiply matrices [*, i, k] by [*, k, j] into [*, i, j], for each triple (left, right, out)."""

    def parts() -> Iterator[list[Tensor]]:
        for product in products:
            left, right, out = (t.flatten(0, -3) for t in product)
            # A slice has small planes, so more of them are multiplied at a time, as much work as `PLANES` whole planes.
            several = PLANES * max(1, max(left[0].numel(), right[0].numel()) // out[0].numel())
            for start in range(0, len(out), several):
                yield [t[start : start + several] for t in (left, right, out)]

    def compute(left: Tensor, right: Tensor, out: Tensor) -> None:
        torch.bmm(left, right, out=out)

    in_threads(compute, parts())


def _write_factors(t: Operands, params: "_Input", made: Sequence[Tensor], mean: Tensor, scale: Tensor) -> None:
    """Compute the factors of x and the statistics of its norm."""
    x = t.x

    def compute(block: Block) -> None:
        normed, m, s = params.normed(rows(x[block]), t.eps)
        y, masked = params.factors(normed), t.mask[block].reshape(1, -1).to(x.dtype)
        for factor, (value, logit) in zip(made, y):
            torch.mul(torch.sigmoid(logit).mul_(masked), value, out=factor[_of_planes(block)].flatten(1))
        mean[block], scale[block] = m.view(mean[block].shape), s.view(mean[block].shape)

    in_threads(compute, zip(row_blocks(x, POSITIONS)))


def _back_to_x(
    t: Operands, params: "_Input", sums: "_InputSums", block: Block, planes: Sequence[Tensor], of_gate: Tensor
) -> Tensor:
    """Compute the gradient [positions, c] of some rows of x, and add to the sums of the parameters' gradients.

    planes: the gradients of the factors, [h, rows, k] each.
    of_gate: the gradient of the gate's logits, [positions, outputs].
    """
    x = t.x
    xs, m, s = rows(x[block]).contiguous(), t.mean[block], t.scale[block]
    before, masked = standardise(xs, m, s), t.mask[block].reshape(1, -1).to(x.dtype)
    y = params.factors(params.weighed(before).to(x.dtype))
    dy = torch.empty_like(y)
    for (value, logit), (dvalue, dlogit), d in zip(y, dy, planes):
        gates = torch.sigmoid(logit)
        torch.mul(d.flatten(1), masked, out=dvalue).mul_(gates)
        torch.mul(dvalue, value, out=dlogit).mul_(gates.neg_().add_(1))
    dy = dy.flatten(0, 2)
    standard = before.to(x.dtype)
    accumulate(sums.factors, dy.t(), standard)
    accumulate(sums.gate, of_gate, standard)
    sums.factors_total.add_(dy.sum(1, dtype=sums.gate_total.dtype))
    sums.gate_total.add_(of_gate.sum(0, dtype=sums.gate_total.dtype))
    dn = torch.mm(dy.t(), params.factor_weight).addmm_(of_gate, params.gate_weight)
    return through_norm(dn, xs, m, s, params.norm_weight)


class _InputSums(NamedTuple):
    """Sums over positions of the gradients of `_Input`'s projections, times the normalised x and without it."""

    factors: Tensor
    gate: Tensor
    factors_total: Tensor
    gate_total: Tensor


class _Input:
    """The parameters of some factors and of the product's gate, in the dtype of the products.

    which: 0 for a, 1 for b.  gated: whether the product's gate is computed; otherwise its weight has no rows.
    factor_weight [2 h each, c]: the rows of each factor, followed by those of its gate.
    """

    def __init__(self, t: Operands, which: Sequence[int], gated: bool = True) -> None:
        x, weight, bias = t.x, t.weight, t.bias
        self.parameters = t.norm_weight, t.norm_bias, weight, bias
        self.which, self.gated, self.fused, self.hidden = which, gated, t.fused, factor_channels(weight)
        acc = accumulation_dtype(x)
        self.norm_weight = t.norm_weight.to(acc)
        self.norm_bias = None if t.norm_bias is None else t.norm_bias.to(acc)
        self.factor_weight, self.gate_weight = self._chosen(weight.to(x.dtype))
        self.factor_bias = self.gate_bias = None
        if bias is not None:
            whole = F.pad(bias.to(x.dtype), (0, len(weight) - len(bias)))
            self.factor_bias, self.gate_bias = self._chosen(whole)

    def _chosen(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        """Select the rows of [4 h + c, *] that are computed: each factor with its gate, and the product's gate."""
        h, (first, *_) = self.hidden, self.which
        gate = joined[4 * h :] if self.gated else joined[:0]
        # Without `fused` the rows have this order already.
        if not self.fused:
            return joined[2 * h * first : 2 * h * (first + len(self.which))], gate
        *parts, _ = split_projections(joined, h, fused=True)
        return torch.cat([part for w in self.which for part in parts[2 * w : 2 * w + 2]]), gate

    def normed(self, xs: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise xs [positions, c], and return the mean and 1 / deviation of each position, too."""
        normed: tuple[Tensor, Tensor, Tensor] = torch.native_layer_norm(
            xs, [xs.shape[1]], self.norm_weight, self.norm_bias, eps
        )
        return normed

    def weighed(self, standard: Tensor) -> Tensor:
        """Apply the norm's weight and bias to [positions, c] with mean 0 and deviation 1."""
        if self.norm_bias is None:
            return standard * self.norm_weight
        return torch.addcmul(self.norm_bias, standard, self.norm_weight)

    def factors(self, normed: Tensor) -> Tensor:
        """Compute each factor and the logits of its gate: [factors, 2, h, positions]."""
        y = torch.mm(self.factor_weight, normed.t())
        if self.factor_bias is not None:
            y += self.factor_bias[:, None]
        return y.view(len(self.which), 2, self.hidden, -1)

    def gate(self, normed: Tensor) -> Tensor:
        """Compute the logits of the product's gate."""
        logits = torch.mm(normed, self.gate_weight.t())
        return logits if self.gate_bias is None else logits.add_(self.gate_bias)

    def zeros(self) -> _InputSums:
        """Make sums that are zero."""
        like, (factors, gate) = self.norm_weight, (self.factor_weight.shape, self.gate_weight.shape)
        return _InputSums(*(like.new_zeros(shape) for shape in (factors, gate, factors[:1], gate[:1])))

    def gradients(self, sums: _InputSums) -> tuple[Tensor, ...]:
        """Compute the gradients of the norm's and the projection's parameters, as linear.py does."""
        product, total = self.whole(sums.factors, sums.gate), self.whole(sums.factors_total, sums.gate_total)
        return parameter_gradients(product, total, *self.parameters)

    def whole(self, factors: Tensor, gate: Tensor) -> Tensor:
        """Put the selected rows back into [4 h + c, *], with zeros for the others."""
        whole = factors.new_zeros(len(self.parameters[2]), *factors.shape[1:])
        *parts, of_gate = split_projections(whole, self.hidden, self.fused)
        for part, w in zip(factors.split(2 * self.hidden), self.which):
            parts[2 * w][:], parts[2 * w + 1][:] = part.chunk(2)
        of_gate[: len(gate)] = gate
        return whole


class _Output:
    """The output projection and its bias, with the norm's parameters folded in, in the dtype of x."""

    def __init__(self, t: Operands) -> None:
        self.parameters = t.out_norm_weight, t.out_norm_bias, t.out_weight, t.out_bias
        norm_weight, norm_bias, weight, bias = self.parameters
        wide = weight.to(accumulation_dtype(t.x))
        shift = None if norm_bias is None else wide @ norm_bias.to(wide.dtype)
        if bias is not None:
            shift = bias.to(wide.dtype) if shift is None else shift + bias.to(wide.dtype)
        self.folded = (wide * norm_weight.to(wide.dtype)).to(t.x.dtype)
        self.shift = None if shift is None else shift.to(t.x.dtype)

    def project(self, standard: Tensor) -> Tensor:
        """Project the product [h, positions] with mean 0 and deviation 1: [positions, c]."""
        x, weight = standard.t(), self.folded.t()
        return torch.mm(x, weight) if self.shift is None else torch.addmm(self.shift, x, weight)

    def zeros(self) -> tuple[Tensor, Tensor]:
        """Make sums over positions of the projection's gradient: times the normalised product, and without it."""
        acc = accumulation_dtype(self.folded)
        return self.folded.new_zeros(self.folded.shape, dtype=acc), self.folded.new_zeros(len(self.folded), dtype=acc)
