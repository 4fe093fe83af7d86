"""Norms, gates and adjacent projections on a CPU in blocks, so that intermediate results stay in cache.

A block is a range of positions of tensors [*, c] in memory order.  The other operations in ops/cpu use blocks too.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from warpfold.ops.cpu import noise
from warpfold.ops.cpu.threads import in_threads, summed
from warpfold.ops.dispatch import Operands, accumulation_dtype, empty_like
from warpfold.ops.linear import empty_linear, empty_statistics

POSITIONS = 2048  # per block
# The index of a block of rows among all rows of all examples.
Block = tuple[int | slice, ...]


def blocks(like: Tensor, *tensors: Tensor, size: int | None = None) -> Iterator[list[Tensor]]:
    """Yield the views of `tensors` for each block; the tensors share all axes except the last.

    A block has at most `size` positions (None: POSITIONS), in the memory order of `like`.
    """
    ones = [axis for axis in range(like.dim() - 1) if like.shape[axis] == 1]
    axes = [axis for axis in range(like.dim() - 1) if like.shape[axis] != 1]
    order = sorted(axes, key=like.stride, reverse=True)
    permuted = [t.permute(*ones, *order, t.dim() - 1)[(0,) * len(ones)] for t in tensors]
    for index in _indices([like.shape[axis] for axis in order], size or POSITIONS):
        yield [t[index] for t in permuted]


def examples(x: Tensor) -> Iterator[tuple[int, ...]]:
    """Yield the index of each example among the leading axes of x [*, rows, length, c]."""
    return itertools.product(*(range(size) for size in x.shape[:-3]))


def row_slices(count: int, length: int, positions: int) -> Iterable[slice]:
    """Split `count` rows of this length into slices with about this number of positions, and at least one row."""
    size = max(1, positions // length)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def row_blocks(x: Tensor, positions: int) -> Iterator[Block]:
    """Split x [*, rows, length, c] into blocks of rows of an example with about this number of positions."""
    for example in examples(x):
        for part in row_slices(x.shape[-3], x.shape[-2], positions):
            yield *example, part


def rows(block: Tensor) -> Tensor:
    """Return a block [*, c] as [positions, c] for reading: a view, or a copy with contiguous channels."""
    flat = block.flatten(0, -2) if block.dim() > 1 else block[None]
    if flat.stride(-1) == 1:
        return flat
    # The first copy reads long runs of memory, and the second transposes them in cache.
    return flat.t().contiguous().t().contiguous()


def writable(block: Tensor) -> Tensor:
    """Return memory for the results of a block, [positions, c].

    This is a view of the block, or a new tensor, which `put` copies to the block, if there is no such view.
    """
    flat = block.flatten(0, -2) if block.dim() > 1 else block[None]
    is_view = flat.data_ptr() == block.data_ptr() and flat.stride(-1) == 1
    return flat if is_view else flat.new_empty(flat.shape)


def gate_values(g: Tensor) -> Tensor:
    """Compute sigmoid(g), contiguous.  Without `out`, torch takes five times as long if g is a slice."""
    return torch.sigmoid(g, out=g.new_empty(g.shape))


def put(block: Tensor, results: Tensor) -> None:
    """Copy results [positions, c] to the block unless `writable` returned a view of it."""
    if results.data_ptr() != block.data_ptr():
        block.copy_(results.view(block.shape))


def standardise(xs: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Compute (xs - mean) scale for xs [positions, c], in the dtype of the statistics."""
    return (xs.to(mean.dtype) - mean.reshape(-1, 1)).mul_(scale.reshape(-1, 1))


def through_norm(dn: Tensor, xs: Tensor, mean: Tensor, scale: Tensor, norm_weight: Tensor) -> Tensor:
    """Compute the gradient of xs from dn, that of its normalised channels, both [positions, c].

    torch would sum the gradients of the norm's parameters in bf16, so it computes none here.
    """
    # torch's kernel ignores strides.
    statistics = mean.reshape(-1, 1).contiguous(), scale.reshape(-1, 1).contiguous()
    dx: Tensor = torch.ops.aten.native_layer_norm_backward(
        dn.contiguous(), xs.contiguous(), [xs.shape[1]], *statistics, norm_weight, norm_weight, [True, False, False]
    )[0]
    return dx


def accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a^T b to `total` in place; `total` may have a wider dtype than a and b."""
    if total.dtype == a.dtype:
        total.addmm_(a.t(), b)
    else:
        total += a.t() @ b


def _indices(shape: list[int], size: int) -> Iterator[tuple[int | slice, ...]]:
    """Yield the indices of the blocks: whole innermost axes and a slice of the next axis."""
    inner = math.prod(shape[1:])
    if not shape or (inner <= size and shape[0] * inner <= size):
        yield ()
    elif inner > size:
        for i in range(shape[0]):
            for inner_indices in _indices(shape[1:], size):
                yield (i, *inner_indices)
    else:
        step = max(1, size // inner)
        for start in range(0, shape[0], step):
            yield (slice(start, start + step),)


def layer_norm(t: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Compute warpfold::layer_norm."""
    x = t.x
    y, (mean, scale) = empty_like(x), empty_statistics(x)
    w, b = t.weight.to(mean.dtype), None if t.bias is None else t.bias.to(mean.dtype)

    def compute(xb: Tensor, yb: Tensor, mb: Tensor, sb: Tensor) -> None:
        n, m, s = torch.native_layer_norm(rows(xb), x.shape[-1:], w, b, t.eps)
        for block, results in ((yb, n), (mb, m), (sb, s)):
            put(block, results)

    in_threads(compute, blocks(x, x, y, mean[..., None], scale[..., None]))
    return y, mean, scale


def layer_norm_backward(t: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Compute warpfold::layer_norm_backward."""
    x = t.x
    dx, w = empty_like(x), t.weight.to(t.mean.dtype)

    def compute(sums: Sequence[Tensor], xb: Tensor, dxb: Tensor, gb: Tensor, mb: Tensor, sb: Tensor) -> None:
        """Compute the gradients of a block, and add to the sums."""
        dweight, dbias = sums
        g, xs = rows(gb), rows(xb)
        put(dxb, through_norm(g, xs, mb, sb, w))
        dweight += standardise(xs, mb, sb).mul_(g).sum(0)
        dbias += g.sum(0, dtype=w.dtype)

    parts = blocks(x, x, dx, t.grad, t.mean[..., None], t.scale[..., None])
    sums = summed(compute, parts, lambda: (torch.zeros_like(w), torch.zeros_like(w)))
    return dx, *(total.to(accumulation_dtype(t.weight)) for total in sums)  # type: ignore[return-value]


def norm_linear(t: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Compute warpfold::norm_linear."""
    x = t.x
    y, (mean, scale) = empty_linear(x, t.weight.shape[0], t.planes), empty_statistics(x)
    nw, nb = t.norm_weight.to(mean.dtype), None if t.norm_bias is None else t.norm_bias.to(mean.dtype)
    w, b = t.weight.to(x.dtype).t(), None if t.bias is None else t.bias.to(x.dtype)

    def compute(xb: Tensor, yb: Tensor, mb: Tensor, sb: Tensor) -> None:
        """Compute a block."""
        n, m, s = torch.native_layer_norm(rows(xb), x.shape[-1:], nw, nb, t.eps)
        results = writable(yb)
        if b is not None and len(b) == w.shape[1]:
            torch.addmm(b, n, w, out=results)
        else:
            torch.mm(n, w, out=results)
            if b is not None:
                results[:, : len(b)] += b
        for block, values in ((yb, results), (mb, m), (sb, s)):
            put(block, values)

    in_threads(compute, blocks(x, x, y, mean[..., None], scale[..., None]))
    return y, mean, scale


def norm_linear_backward(t: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::norm_linear_backward.

    With h = (x - mean) * scale, the gradients of all parameters follow from grad^T h and from the sum of grad.
    """
    x, weight = t.x, t.weight
    dx, narrow = empty_like(x), weight.to(x.dtype)
    nw, w = t.norm_weight.to(t.mean.dtype), weight.to(t.mean.dtype)

    def compute(sums: Sequence[Tensor], xb: Tensor, dxb: Tensor, gb: Tensor, mb: Tensor, sb: Tensor) -> None:
        """Compute the gradients of a block, and add to the sums."""
        product, total = sums
        g, xs = rows(gb).contiguous(), rows(xb)
        accumulate(product, g, standardise(xs, mb, sb).to(x.dtype))
        total += g.sum(0, dtype=total.dtype)
        put(dxb, through_norm(torch.mm(g, narrow), xs, mb, sb, nw))

    parts = blocks(x, x, dx, t.grad, t.mean[..., None], t.scale[..., None])
    product, total = summed(compute, parts, lambda: (torch.zeros_like(w), w.new_zeros(len(w))))
    return dx, *parameter_gradients(product, total, t.norm_weight, t.norm_bias, weight, t.bias)  # type: ignore[return-value]


def parameter_gradients(
    product: Tensor, total: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute the gradients of the parameters of a norm and its projection from grad^T h and the sum of grad.

    h is the normalised operand with mean 0 and deviation 1.  A bias that is None gets a gradient without elements.
    """
    w, nw = weight.to(product.dtype), norm_weight.to(product.dtype)
    dweight = product * nw if norm_bias is None else product * nw + total[:, None] * norm_bias.to(product.dtype)
    gradients = (product * w).sum(0), total @ w, dweight, total
    parameters = norm_weight, norm_bias, weight, bias
    return tuple(
        norm_weight.new_empty(0, dtype=accumulation_dtype(norm_weight))
        if p is None
        else gradient[: len(p)].to(accumulation_dtype(p))
        for gradient, p in zip(gradients, parameters)
    )


def gate(t: Operands) -> Tensor:
    """Compute warpfold::gate."""
    y = empty_like(t.x)

    def compute(xb: Tensor, gb: Tensor, yb: Tensor) -> None:
        torch.mul(gate_values(gb), xb, out=yb)

    in_threads(compute, blocks(t.x, t.x, t.g, y))
    return y


def gate_backward(t: Operands) -> tuple[Tensor, Tensor]:
    """Compute warpfold::gate_backward."""
    dx, dg = empty_like(t.x), empty_like(t.g)

    def compute(xb: Tensor, gb: Tensor, db: Tensor, dxb: Tensor, dgb: Tensor) -> None:
        s = gate_values(gb)
        torch.mul(db, s, out=dxb)
        # dg = grad x s (1 - s) = dx x (1 - s)
        torch.mul(dxb * xb, s.neg_().add_(1), out=dgb)

    in_threads(compute, blocks(t.x, t.x, t.g, t.grad, dx, dg))
    return dx, dg


def gated_linear_residual(t: Operands) -> Tensor:
    """Compute warpfold::gated_linear_residual."""
    x = t.x
    f = drawn_factors(x, t)
    y, w = empty_like(x), t.weight.to(x.dtype).t()
    b = w.new_zeros(w.shape[1]) if t.bias is None else t.bias.to(x.dtype)

    def compute(xb: Tensor, ob: Tensor, gb: Tensor, yb: Tensor, fb: Tensor) -> None:
        """Compute a block."""
        gated = gate_values(gb).mul_(ob)
        results = writable(yb)
        if f is None:
            torch.add(rows(xb), b, out=results).addmm_(rows(gated), w)
        else:
            torch.addmm(b, rows(gated), w, out=results)
            results.mul_(rows(fb)).add_(rows(xb))
        put(yb, results)

    in_threads(compute, blocks(x, x, t.o, t.g, y, x if f is None else f))
    return y


def gated_linear_residual_backward(t: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::gated_linear_residual_backward."""
    grad, weight = t.grad, t.weight
    f = drawn_factors(grad, t)
    do, dg, w = empty_like(t.o), empty_like(t.g), weight.to(grad.dtype)
    acc = torch.float64 if weight.dtype == torch.float64 or grad.dtype == torch.float64 else torch.float32
    outputs = 0 if t.bias is None else len(t.bias)

    def compute(
        sums: Sequence[Tensor], db: Tensor, ob: Tensor, gb: Tensor, dob: Tensor, dgb: Tensor, fb: Tensor
    ) -> None:
        """Compute the gradients of a block, and add to the sums."""
        dweight, dbias = sums
        dx = rows(db) if f is None else rows(db * fb)
        s, os = gate_values(rows(gb)), rows(ob)
        accumulate(dweight, dx, s * os)
        if t.bias is not None:
            dbias += dx.sum(0, dtype=acc)
        dgated = torch.mm(dx, w)
        put(dob, dgated * s)
        put(dgb, dgated.mul_(os).mul_(s).mul_(s.neg_().add_(1)))

    parts = blocks(t.o, grad, t.o, t.g, do, dg, grad if f is None else f)
    dweight, dbias = summed(
        compute, parts, lambda: (weight.new_zeros(weight.shape, dtype=acc), weight.new_zeros(outputs, dtype=acc))
    )
    dtype = accumulation_dtype(weight)
    return do, dg, dweight.to(dtype), dbias.to(dtype)


def drawn_factors(x: Tensor, t: Operands) -> Tensor | None:
    """Return the dropout factors expanded to the shape of x.  They are drawn all at once, because most share a draw."""
    factors: Tensor | None = t.factors
    if t.key is not None:
        shape = [1 if stride == 0 else size for size, stride in zip(x.shape, t.strides)]
        factors = noise.dropout_factors(t.but(shape=shape, dtype=x.dtype))
    return None if factors is None else factors.to(x.dtype).expand(x.shape)
