"""outer_product on a GPU: products of two positions' channels are made, projected and forgotten, in registers.

What decides the shape of the kernels is what a tile of positions (i, j) reads from the second cache.  With c = d = 32
channels, z = 128 and s sequences, forward, of a tile of 16 x 8 positions:

    the projection's weight, once                   2 z c d                                   262 kB
    a and b, once for every TILE_C left channels    2 s (16 TILE_C + 8 d) c / TILE_C          655 kB

with s = 128 and TILE_C = 4, for 2 x 128 c d (s + z) = 67 million operations: 73 a byte.  All left channels at once
would read less, but their products alone, 512 x 256 numbers in fp32, are two register files.  With TILE_C = 4 they are
a quarter of one, and the sums of 128 positions by 128 channels another.  Between its two matrix products a program
changes the order of the products, (c, i), (j, d) to (i, j), (c, d); no [i, j, c d] is ever in memory.

The backward pass multiplies again.  `_factor` makes the gradient of one factor, a program for TILE_C of its channels:
it runs over the other factor's positions, turns a tile of the gradient into that of the products, and multiplies by the
other factor.  The same kernel makes both, with a and b exchanged.  `_weight` makes the weight's, with the products as
forward.  Together they multiply six times what one forward product costs; five is the least, without products kept.
"""

import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.dispatch import Operands, empty_parameters
from warpfold.ops.triton.launch import configs, register_by_precision
from warpfold.ops.triton.positions import (
    Sum,
    cast_weight,
    contiguous,
    empty_partials,
    or_unwanted,
    power_of_two,
    programs_for,
    sum_partials,
)

TILES = 256  # programs of the gradient of the weight: as in `norm_linear`


@triton.jit
def _products(
    a: tl.tensor, b: tl.tensor, i: tl.tensor, j: tl.tensor, first: tl.tensor, S: tl.tensor, I: tl.tensor, J: tl.tensor,
    C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE_I: tl.constexpr, TILE_J: tl.constexpr, TILE_C: tl.constexpr, BLOCK_S: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return [(i, j), (c, d)], the products from left channel `first` on, of positions from i and j on.

    a [s, c, i] and b [s, j, d] of one batch.
    """
    row = tl.arange(0, TILE_C * TILE_I)
    column = tl.arange(0, TILE_J * BLOCK_D)
    c = first + row // TILE_I
    at_i = i + row % TILE_I
    at_j = j + column // BLOCK_D
    d = column % BLOCK_D
    a_known = (c < C) & (at_i < I)
    b_known = (at_j < J) & (d < D)
    a_at = c * I + at_i
    b_at = at_j * D + d
    products = tl.zeros([TILE_C * TILE_I, TILE_J * BLOCK_D], tl.float32)
    for start in range(0, S, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        some_a = tl.load(
            a + s[:, None].to(tl.int64) * (C * I) + a_at[None, :], mask=(s < S)[:, None] & a_known[None, :], other=0
        )
        some_b = tl.load(
            b + s[:, None].to(tl.int64) * (J * D) + b_at[None, :], mask=(s < S)[:, None] & b_known[None, :], other=0
        )
        products = tl.dot(tl.trans(some_a), some_b, products)
    turned = tl.reshape(products.to(a.dtype.element_ty), [TILE_C, TILE_I, TILE_J, BLOCK_D])
    return tl.reshape(tl.permute(turned, (1, 2, 0, 3)), [TILE_I * TILE_J, TILE_C * BLOCK_D])


@triton.jit
def _outer_product(
    a: tl.tensor,
    b: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    count: tl.tensor,
    out: tl.tensor,
    S: tl.tensor,
    I: tl.tensor,
    J: tl.tensor,
    C: tl.constexpr,
    D: tl.constexpr,
    Z: tl.constexpr,
    BIAS_DIVIDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_I: tl.constexpr,
    TILE_J: tl.constexpr,
    TILE_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_Z: tl.constexpr,
) -> None:
    """Store BLOCK_Z channels of TILE_I x TILE_J positions of out [batch, i, j, z].

    BIAS_DIVIDED: the bias is added before the division by the count, else after it.
    """
    across, down = tl.cdiv(J, TILE_J), tl.cdiv(I, TILE_I)
    tile = tl.program_id(0)
    j = tile % across * TILE_J
    i = tile // across % down * TILE_I
    batch = (tile // (across * down)).to(tl.int64)
    a += batch * S * (C * I)
    b += batch * S * (J * D)
    z = tl.program_id(1) * BLOCK_Z + tl.arange(0, BLOCK_Z)
    k = tl.arange(0, TILE_C * BLOCK_D)
    acc = tl.zeros([TILE_I * TILE_J, BLOCK_Z], tl.float32)
    for first in range(0, C, TILE_C):
        products = _products(a, b, i, j, first, S, I, J, C, D, BLOCK_D, TILE_I, TILE_J, TILE_C, BLOCK_S)
        c, d = first + k // BLOCK_D, k % BLOCK_D
        known = (z < Z)[:, None] & ((c < C) & (d < D))[None, :]
        w = tl.load(weight + z[:, None] * (C * D) + (c * D + d)[None, :], mask=known, other=0)
        acc = tl.dot(products, tl.trans(w.to(products.dtype)), acc)
    if bias is not None and BIAS_DIVIDED:
        acc += tl.load(bias + z, mask=z < Z, other=0).to(tl.float32)[None, :]
    m = tl.arange(0, TILE_I * TILE_J)
    at_i, at_j = i + m // TILE_J, j + m % TILE_J
    real = (at_i < I) & (at_j < J)
    position = (batch * I + at_i) * J + at_j
    acc = acc / tl.load(count + position, mask=real, other=1).to(tl.float32)[:, None]
    if bias is not None and not BIAS_DIVIDED:
        acc += tl.load(bias + z, mask=z < Z, other=0).to(tl.float32)[None, :]
    tl.store(
        out + position[:, None] * Z + z[None, :], acc.to(out.dtype.element_ty), mask=real[:, None] & (z < Z)[None, :]
    )


@triton.jit
def _gradient(
    grad: tl.tensor, count: tl.tensor, position: tl.tensor, real: tl.tensor, z: tl.tensor, Z: tl.constexpr
) -> tl.tensor:
    """Return the gradient of the projection at positions, [position, z]: that of the result, divided by the count."""
    g = tl.load(grad + position[:, None] * Z + z[None, :], mask=real[:, None] & (z < Z)[None, :], other=0)
    return (g.to(tl.float32) / tl.load(count + position, mask=real, other=1).to(tl.float32)[:, None]).to(g.dtype)


@triton.jit
def _factor(
    grad: tl.tensor,
    count: tl.tensor,
    weight: tl.tensor,
    other: tl.tensor,
    result: tl.tensor,
    S: tl.tensor,
    I: tl.tensor,
    J: tl.tensor,
    stride_i: tl.tensor,
    stride_j: tl.tensor,
    stride_c: tl.tensor,
    stride_d: tl.tensor,
    C: tl.constexpr,
    D: tl.constexpr,
    Z: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_I: tl.constexpr,
    TILE_J: tl.constexpr,
    TILE_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_Z: tl.constexpr,
) -> None:
    """Store TILE_C channels of the gradient of a factor, result [batch, s, i, c], at BLOCK_S x TILE_I positions.

    other [batch, s, j, d] is the other factor.  Strides: of positions of grad and count, and of the weight's channels.
    """
    down, chunks = tl.cdiv(I, TILE_I), tl.cdiv(C, TILE_C)
    tile = tl.program_id(0)
    first = tile % chunks * TILE_C
    i = tile // chunks % down * TILE_I
    batch = (tile // (chunks * down)).to(tl.int64)
    other += batch * S * (J * D)
    s = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    m = tl.arange(0, TILE_I * TILE_J)
    k = tl.arange(0, TILE_C * BLOCK_D)
    c, d = first + k // BLOCK_D, k % BLOCK_D
    column = tl.arange(0, TILE_J * BLOCK_D)
    z = tl.arange(0, BLOCK_Z)
    known = (c < C) & (d < D)
    w_at = (c * stride_c + d * stride_d)[None, :]
    dtype = grad.dtype.element_ty
    if BLOCK_Z >= Z:
        w = tl.load(weight + z[:, None] * (C * D) + w_at, mask=(z < Z)[:, None] & known[None, :], other=0).to(dtype)
    acc = tl.zeros([BLOCK_S, TILE_I * TILE_C], tl.float32)
    for j in range(0, J, TILE_J):
        at_i, at_j = i + m // TILE_J, j + m % TILE_J
        real = (at_i < I) & (at_j < J)
        position = batch * I * J + at_i.to(tl.int64) * stride_i + at_j.to(tl.int64) * stride_j
        if BLOCK_Z >= Z:
            products = tl.dot(_gradient(grad, count, position, real, z, Z), w)
        else:
            products = tl.zeros([TILE_I * TILE_J, TILE_C * BLOCK_D], tl.float32)
            for start in range(0, Z, BLOCK_Z):
                at_z = start + z
                of_z = (at_z < Z)[:, None] & known[None, :]
                some = tl.load(weight + at_z[:, None] * (C * D) + w_at, mask=of_z, other=0).to(dtype)
                g = _gradient(grad, count, position, real, at_z, Z)
                products = tl.dot(g, some, products)
        turned = tl.reshape(products.to(dtype), [TILE_I, TILE_J, TILE_C, BLOCK_D])
        turned = tl.reshape(tl.permute(turned, (1, 3, 0, 2)), [TILE_J * BLOCK_D, TILE_I * TILE_C])
        to_j, of_d = j + column // BLOCK_D, column % BLOCK_D
        readable = (s < S)[:, None] & ((to_j < J) & (of_d < D))[None, :]
        others = tl.load(other + s[:, None].to(tl.int64) * (J * D) + (to_j * D + of_d)[None, :], mask=readable, other=0)
        acc = tl.dot(others, turned, acc)
    column = tl.arange(0, TILE_I * TILE_C)
    at_i, c = i + column // TILE_C, first + column % TILE_C
    rows = result + (batch * S + s.to(tl.int64))[:, None] * (I * C)
    writable = (s < S)[:, None] & ((at_i < I) & (c < C))[None, :]
    tl.store(rows + (at_i * C + c)[None, :], acc.to(result.dtype.element_ty), mask=writable)


@triton.jit
def _weight(
    grad: tl.tensor,
    count: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    partials: tl.tensor,
    tiles: tl.tensor,
    S: tl.tensor,
    I: tl.tensor,
    J: tl.tensor,
    C: tl.constexpr,
    D: tl.constexpr,
    Z: tl.constexpr,
    BIAS_DIVIDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_I: tl.constexpr,
    TILE_J: tl.constexpr,
    TILE_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_Z: tl.constexpr,
) -> None:
    """Store in partials [programs, Z C D + Z] a part of the gradients of weight and bias, from a span of the tiles."""
    first = tl.program_id(0) * TILE_C
    z = tl.program_id(1) * BLOCK_Z + tl.arange(0, BLOCK_Z)
    across, down = tl.cdiv(J, TILE_J), tl.cdiv(I, TILE_I)
    m = tl.arange(0, TILE_I * TILE_J)
    each = tl.cdiv(tiles, tl.num_programs(2))
    begin = tl.program_id(2) * each
    dw = tl.zeros([BLOCK_Z, TILE_C * BLOCK_D], tl.float32)
    db = tl.zeros([BLOCK_Z], tl.float32)
    for tile in range(begin, min(tiles, begin + each)):
        j = tile % across * TILE_J
        i = tile // across % down * TILE_I
        batch = (tile // (across * down)).to(tl.int64)
        of_a, of_b = a + batch * S * (C * I), b + batch * S * (J * D)
        products = _products(of_a, of_b, i, j, first, S, I, J, C, D, BLOCK_D, TILE_I, TILE_J, TILE_C, BLOCK_S)
        at_i, at_j = i + m // TILE_J, j + m % TILE_J
        position, real = (batch * I + at_i) * J + at_j, (at_i < I) & (at_j < J)
        g = _gradient(grad, count, position, real, z, Z)
        dw = tl.dot(tl.trans(g), products, dw)
        if BIAS_DIVIDED:
            db += tl.sum(g.to(tl.float32), 0)
        else:
            whole = tl.load(grad + position[:, None] * Z + z[None, :], mask=real[:, None] & (z < Z)[None, :], other=0)
            db += tl.sum(whole.to(tl.float32), 0)
    mine = partials + tl.program_id(2).to(tl.int64) * (Z * C * D + Z)
    k = tl.arange(0, TILE_C * BLOCK_D)
    c, d = first + k // BLOCK_D, k % BLOCK_D
    known = (z < Z)[:, None] & ((c < C) & (d < D))[None, :]
    tl.store(mine + z[:, None] * (C * D) + (c * D + d)[None, :], dw, mask=known)
    if tl.program_id(0) == 0:
        tl.store(mine + Z * C * D + z, db, mask=z < Z)


_NAMES = "TILE_I TILE_J TILE_C BLOCK_S BLOCK_Z"
FORWARD = register_by_precision(
    "outer_product",
    _outer_product,
    configs(
        _NAMES,
        *((16, 8, 4, n, 128, 8, s) for n in (32, 64) for s in (2, 3)),
        *((16, 8, 8, n, 128, 8, 2) for n in (32, 64)),
        *((16, 4, 4, n, 128, w, 2) for n, w in ((32, 8), (64, 4))),
    ),
    configs(_NAMES, (16, 2, 1, 16, 64, 4, 1), (16, 1, 1, 16, 64, 4, 1)),
)
FACTOR = register_by_precision(
    "outer_product_factor",
    _factor,
    configs(
        _NAMES,
        *((16, 4, 4, n, 128, 8, s) for n in (64, 128) for s in (1, 2)),
        *((16, 8, 4, 64, 128, 8, s) for s in (1, 2)),
        (16, 2, 4, 64, 128, 8, 2),
    ),
    configs(_NAMES, (16, 1, 4, 16, 16, 4, 1), (16, 1, 4, 32, 16, 4, 1)),
)
WEIGHT = register_by_precision(
    "outer_product_weight",
    _weight,
    configs(
        _NAMES,
        *((16, 4, 4, n, 128, 8, s) for n in (32, 64) for s in (2, 3)),
        *((16, 8, 4, n, 128, 8, 2) for n in (32, 64)),
        *((t, u, 4, 32, 128, 8, 2) for t, u in ((8, 8), (16, 2))),
    ),
    configs(_NAMES, (16, 1, 1, 16, 64, 4, 1), (16, 1, 1, 16, 32, 4, 1)),
)


def outer_product(t: Operands) -> Tensor:
    """Compute warpfold::outer_product."""
    a, weight = t.a, t.weight
    batches, s, i, c = a.shape
    _, _, j, d = t.b.shape
    out = a.new_empty(batches, i, j, weight.shape[0])
    kernel = FORWARD.tiled((s, c, len(weight)), a)
    tiles = batches * triton.cdiv(i, kernel["TILE_I"]) * triton.cdiv(j, kernel["TILE_J"])
    kernel.run(
        (tiles, triton.cdiv(len(weight), kernel["BLOCK_Z"])),
        a=_channels_before_positions(a),
        b=t.b.contiguous(),
        weight=cast_weight(weight, a, batches * i * j),
        bias=contiguous(t.bias),
        count=t.count.contiguous(),
        out=out,
        BIAS_DIVIDED=t.bias_divided,
        **_sizes(s, i, j, c, d, len(weight)),
    )
    return out


def outer_product_backward(t: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::outer_product_backward."""
    grad, a, b, count = (each.contiguous() for each in (t.grad, t.a, t.b, t.count))
    (batches, s, i, c), (_, _, j, d), z = a.shape, b.shape, len(t.weight)
    da, db, (dweight, dbias) = a.new_empty(a.shape), b.new_empty(b.shape), empty_parameters(t.weight, t.bias)
    w = cast_weight(t.weight, a, batches * i * j)
    for other, result, strides in ((b, da, (j, 1, d, 1)), (a, db, (1, j, 1, d))):
        (_, _, m, own), (_, _, n, others) = result.shape, other.shape
        kernel = FACTOR.tiled((s, own, z), other)
        parts = batches * triton.cdiv(m, kernel["TILE_I"]) * triton.cdiv(own, kernel["TILE_C"])
        kernel.run(
            (parts, triton.cdiv(s, kernel["BLOCK_S"])),
            grad=grad,
            count=count,
            weight=w,
            other=other,
            result=result,
            **dict(zip(("stride_i", "stride_j", "stride_c", "stride_d"), strides)),
            **_sizes(s, m, n, own, others, z),
        )
    kernel = WEIGHT.tiled((s, c, z), a)
    tiles = batches * triton.cdiv(i, kernel["TILE_I"]) * triton.cdiv(j, kernel["TILE_J"])
    chunks = triton.cdiv(c, kernel["TILE_C"]), triton.cdiv(z, kernel["BLOCK_Z"])
    programs = programs_for(tiles, 1, max(1, TILES // (chunks[0] * chunks[1])))
    partials = empty_partials(a, programs, z * c * d + z)
    kernel.run(
        (*chunks, programs),
        grad=grad,
        count=count,
        a=_channels_before_positions(a),
        b=b,
        partials=partials,
        tiles=tiles,
        BIAS_DIVIDED=t.bias_divided,
        **_sizes(s, i, j, c, d, z),
    )
    sum_partials(Sum(partials, (dweight, or_unwanted(dbias, partials, z))))
    return da, db, dweight, dbias


def _channels_before_positions(a: Tensor) -> Tensor:
    """Return a [batch, s, i, c] as [batch, s, c, i]: a program reads few channels of many positions."""
    return a.transpose(-2, -1).contiguous()


def _sizes(s: int, i: int, j: int, c: int, d: int, z: int) -> dict[str, int]:
    """Return the sizes as the kernels take them."""
    return {"S": s, "I": i, "J": j, "C": c, "D": d, "Z": z, "BLOCK_D": power_of_two(d)}
