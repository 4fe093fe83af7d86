"""The outer product on a CPU: a few rows of z at a time, so that the products of all channels never leave the cache.

The backward pass multiplies them again, for [i, j, c d] is most of what this layer would otherwise keep.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from warpfold.ops.cpu.linear import accumulate
from warpfold.ops.dispatch import Operands, accumulation_dtype, uniform_loop

PRODUCTS = 2**21  # numbers of a block


def outer_product(t: Operands) -> Tensor:
    """Compute warpfold::outer_product."""
    a = t.a
    out = a.new_empty(a.shape[0], a.shape[2], t.b.shape[2], t.weight.shape[0])
    w, narrow = t.weight.to(a.dtype).t(), None if t.bias is None else t.bias.to(a.dtype)
    for batch, rows in uniform_loop(_blocks(a, t.b)):
        results = out[batch, rows].flatten(0, 1)
        products = _products(a[batch, :, rows], t.b[batch])
        if narrow is None or not t.bias_divided:
            torch.mm(products, w, out=results)
        else:
            torch.addmm(narrow, products, w, out=results)
        results.div_(t.count[batch, rows].flatten(0, 1).to(a.dtype))
        if narrow is not None and not t.bias_divided:
            results += narrow
    return out


def outer_product_backward(t: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::outer_product_backward."""
    a, b, weight = t.a, t.b, t.weight
    dtype = accumulation_dtype(a)
    da, db = a.new_empty(a.shape), b.new_zeros(b.shape, dtype=dtype)
    dweight, dbias = (weight.new_zeros(shape, dtype=dtype) for shape in (weight.shape, weight.shape[:1]))
    (_, _, _, c), (_, s, j, d) = a.shape, b.shape
    narrow = weight.to(a.dtype)
    for batch, rows in uniform_loop(_blocks(a, b)):
        some = a[batch, :, rows]
        whole = t.grad[batch, rows].flatten(0, 1)
        g = whole / t.count[batch, rows].flatten(0, 1).to(a.dtype)
        accumulate(dweight, g, _products(some, b[batch]))
        dbias += (g if t.bias_divided else whole).sum(0, dtype=dtype)
        # [i j, c d] -> [i c, j d]
        turned = torch.mm(g, narrow).view(-1, j, c, d).transpose(1, 2).reshape(-1, j * d)
        da[batch, :, rows] = (b[batch].flatten(1) @ turned.t()).view(s, -1, c)
        accumulate(db[batch].flatten(1), some.flatten(1).t(), turned)
    of_bias = dbias[:0] if t.bias is None else dbias.to(accumulation_dtype(t.bias))
    return da, db.to(b.dtype), dweight.to(accumulation_dtype(weight)), of_bias


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [s, i, c] by b [s, j, d] -> [i j, c d]."""
    (_, i, c), (_, j, d) = a.shape, b.shape
    return (a.flatten(1).t() @ b.flatten(1)).view(i, c, j, d).transpose(1, 2).reshape(i * j, c * d)


def _blocks(a: Tensor, b: Tensor) -> Iterator[tuple[int, slice]]:
    batches, _, rows, c = a.shape
    size = max(1, PRODUCTS // (c * b.shape[2] * b.shape[3]))
    for batch in range(batches):
        for start in range(0, rows, size):
            yield batch, slice(start, start + size)
