"""The outer product on a CPU in blocks of rows of z, so that the products of channels never leave the cache.

The backward pass recomputes them, because [i, j, c d] would be most of the memory that this layer saves.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from warpfold.ops.cpu.linear import Block, accumulate, examples, norm_linear_backward, put, row_blocks, row_slices, rows
from warpfold.ops.cpu.threads import add_sums, in_threads, summed
from warpfold.ops.dispatch import Operands, accumulation_dtype
from warpfold.ops.linear import empty_statistics
from warpfold.ops.outer import empty_factors, empty_share

PRODUCTS = 2**20  # elements per block
POSITIONS = 2048  # per block of projections


def outer_product(t: Operands) -> tuple[Tensor, Tensor]:
    """Compute warpfold::outer_product."""
    batches, _, i, _ = t.a.shape
    out = t.a.new_empty(batches, i, t.b.shape[2], len(t.weight))
    share = empty_share(t.a, *out.shape[:-1])
    for batch in range(batches):
        of_batch = {name: getattr(t, name)[batch] for name in ("a", "b", "a_mask", "b_mask")}
        _forward(t.but(**of_batch, z=None if t.z is None else t.z[batch]), out[batch], share[batch])
    return out, share


def _forward(t: Operands, out: Tensor, share: Tensor) -> None:
    """Write the result and 1 / count of each pair for factors [s, i, c], [s, j, d] and masks [s, i], [s, j]."""
    a, b = t.a, t.b
    torch.mm(t.a_mask.to(share.dtype).t(), t.b_mask.to(share.dtype), out=share)
    share.add_(t.added).clamp_(min=t.least).reciprocal_()
    w, narrow = t.weight.to(a.dtype).t(), None if t.bias is None else t.bias.to(a.dtype)

    def compute(part: slice) -> None:
        """Compute a block."""
        results = out[part].flatten(0, 1)
        products = _products(a[:, part], b)
        if narrow is None or not t.bias_divided:
            torch.mm(products, w, out=results)
        else:
            torch.addmm(narrow, products, w, out=results)
        results *= share[part].flatten()[:, None].to(a.dtype)
        if narrow is not None and not t.bias_divided:
            results += narrow
        if t.z is not None:
            results += t.z[part].flatten(0, 1)

    in_threads(compute, zip(_blocks(a, b)))


def outer_product_backward(t: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::outer_product_backward."""
    da, db = t.a.new_empty(t.a.shape), t.b.new_empty(t.b.shape)
    sums = _Sums.zeros(t.weight, t.a)
    for batch in range(len(t.a)):
        of_batch = {name: getattr(t, name)[batch] for name in ("grad", "a", "b", "share")}
        _backward(t.but(**of_batch), da[batch], db[batch], sums)
    return da, db, *sums.gradients(t.weight, t.bias)


class _Sums(NamedTuple):
    """The sums over blocks, in fp32 at least: gradients of the weight, of the bias and of b."""

    weight: Tensor
    bias: Tensor
    b: Tensor

    @classmethod
    def zeros(cls, weight: Tensor, a: Tensor, b: tuple[int, ...] = (0,)) -> "_Sums":
        """Make sums that are zero.  b: the shape of b if its gradient is summed."""
        return cls(*(weight.new_zeros(s, dtype=accumulation_dtype(a)) for s in (weight.shape, weight.shape[:1], b)))

    def gradients(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the gradients of the weight and the bias; a bias that is None gets no elements."""
        of_bias = self.bias[:0] if bias is None else self.bias.to(accumulation_dtype(bias))
        return self.weight.to(accumulation_dtype(weight)), of_bias


def _backward(t: Operands, da: Tensor, db: Tensor, sums: _Sums) -> None:
    """Write the gradients of factors a [s, i, c] and b [s, j, d], and add to the parameters' gradients."""
    a, b, weight = t.a, t.b, t.weight
    (_, _, c), (s, j, d) = a.shape, b.shape
    narrow = weight.to(a.dtype)

    def compute(sums: _Sums, part: slice) -> None:
        """Compute the gradients of a block, and add to the sums."""
        whole = t.grad[part].flatten(0, 1)
        g = whole * t.share[part].flatten()[:, None].to(a.dtype)
        accumulate(sums.weight, g, _products(a[:, part], b))
        sums.bias.add_((g if t.bias_divided else whole).sum(0, dtype=sums.bias.dtype))
        # [i j, c d] -> [i c, j d]
        transposed = torch.mm(g, narrow).view(-1, j, c, d).transpose(1, 2).reshape(-1, j * d)
        da[:, part] = (b.flatten(1) @ transposed.t()).view(s, -1, c)
        accumulate(sums.b.flatten(1), a[:, part].flatten(1).t(), transposed)

    total = summed(compute, zip(_blocks(a, b)), lambda: _Sums.zeros(weight, a, tuple(b.shape)))
    add_sums(sums[:2], total[:2])
    db.copy_(total.b)


def outer_product_mean(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::outer_product_mean.  Both factors exist as a whole, because every pair reads them."""
    x, h = t.x, len(t.weight) // 2
    *batch, _, r, c = x.shape
    out, share = x.new_empty(*batch, r, r, len(t.out_weight)), empty_share(x, *batch, r, r)
    (a, b), (mean, scale) = empty_factors(x, h), empty_statistics(x)
    nw, nb = t.norm_weight.to(mean.dtype), None if t.norm_bias is None else t.norm_bias.to(mean.dtype)
    w, shift, masks = t.weight.to(x.dtype).t(), None if t.bias is None else t.bias.to(x.dtype), t.mask.to(x.dtype)

    def project(block: Block) -> None:
        """Compute both factors of a block."""
        n, of_mean, of_scale = torch.native_layer_norm(rows(x[block]), [c], nw, nb, t.eps)
        if shift is not None and len(shift) == 2 * h:
            y = torch.addmm(shift, n, w)
        else:
            y = torch.mm(n, w)
            if shift is not None:
                y[:, : len(shift)] += shift
        for factor, values in zip((a, b), y.view(-1, r, 2, h).unbind(2)):
            torch.mul(values, masks[block][..., None], out=factor[block])
        put(mean[block], of_mean.flatten())
        put(scale[block], of_scale.flatten())

    in_threads(project, zip(row_blocks(x, POSITIONS)))
    for example in examples(x):
        of_example = t.but(
            a=a[example],
            b=b[example],
            weight=t.out_weight,
            bias=t.out_bias,
            a_mask=t.mask[example],
            b_mask=t.mask[example],
        )
        _forward(of_example.but(z=None if t.z is None else t.z[example]), out[example], share[example])
    return out, a, b, mean, scale, share


def outer_product_mean_backward(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::outer_product_mean_backward."""
    sums = _Sums.zeros(t.out_weight, t.x)
    dy = t.x.new_empty(*t.x.shape[:-1], len(t.weight))
    for example in examples(t.x):
        a, b = t.a[example], t.b[example]
        da, db = torch.empty_like(a), torch.empty_like(b)
        _backward(t.but(grad=t.grad[example], a=a, b=b, share=t.share[example], weight=t.out_weight), da, db, sums)
        torch.cat((da, db), -1, out=dy[example]).mul_(t.mask[example][..., None].to(dy.dtype))
    return *norm_linear_backward(t.but(grad=dy)), *sums.gradients(t.out_weight, t.out_bias)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [s, i, c] by b [s, j, d] -> [i j, c d]."""
    (_, i, c), (_, j, d) = a.shape, b.shape
    return (a.flatten(1).t() @ b.flatten(1)).view(i, c, j, d).transpose(1, 2).reshape(i * j, c * d)


def _blocks(a: Tensor, b: Tensor) -> Iterable[slice]:
    """Split the rows of z into slices of about `PRODUCTS` products."""
    return row_slices(a.shape[1], b.shape[1], PRODUCTS // (a.shape[2] * b.shape[2]))
