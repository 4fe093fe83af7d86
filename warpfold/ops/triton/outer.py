"""The outer product mean on a GPU: products of two positions' channels are made, projected and forgotten, in registers.

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

As a whole layer, outer_product_mean, it is two kernels forward: `norm_linear` masks both factors as it writes them,
side by side, and the left one a second time, turned; and `_outer_product`, which counts sequences and adds what is
there already.  Backward five and the sums: each factor's gradient is masked and written where the projection's backward
pass reads it.
"""

import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.attention import batched
from warpfold.ops.dispatch import Operands, empty_parameters
from warpfold.ops.linear import empty_statistics, padded
from warpfold.ops.outer import empty_factors, empty_share, empty_turned
from warpfold.ops.triton.launch import configs, register_by_precision
from warpfold.ops.triton.linear import Planes, norm_linear_backward, project
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
LEAST = 16  # sequences of a tile, as tensor cores want them


@triton.jit
def _products(
    a: tl.tensor, b: tl.tensor, pitch: tl.tensor, i: tl.tensor, j: tl.tensor, first: tl.tensor,
    S: tl.tensor, I: tl.tensor, J: tl.tensor, C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE_I: tl.constexpr, TILE_J: tl.constexpr, TILE_C: tl.constexpr, BLOCK_S: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return [(i, j), (c, d)], the products from left channel `first` on, of positions from i and j on.

    a [s, c, i] and b [s, j, d] of one batch; pitch: from one position of b to the next.
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
    b_at = at_j * pitch + d
    products = tl.zeros([TILE_C * TILE_I, TILE_J * BLOCK_D], tl.float32)
    for start in range(0, S, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        some_a = tl.load(
            a + s[:, None].to(tl.int64) * (C * I) + a_at[None, :], mask=(s < S)[:, None] & a_known[None, :], other=0
        )
        some_b = tl.load(
            b + s[:, None].to(tl.int64) * (J * pitch) + b_at[None, :], mask=(s < S)[:, None] & b_known[None, :], other=0
        )
        products = tl.dot(tl.trans(some_a), some_b, products)
    turned = tl.reshape(products.to(a.dtype.element_ty), [TILE_C, TILE_I, TILE_J, BLOCK_D])
    return tl.reshape(tl.permute(turned, (1, 2, 0, 3)), [TILE_I * TILE_J, TILE_C * BLOCK_D])


@triton.jit
def _shares(
    a_mask: tl.tensor, b_mask: tl.tensor, i: tl.tensor, j: tl.tensor, added: tl.tensor, least: tl.tensor,
    S: tl.tensor, I: tl.tensor, J: tl.tensor, TILE_I: tl.constexpr, TILE_J: tl.constexpr, BLOCK_S: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return 1 / count [(i, j)] of positions from i and j on, of masks [s, i] and [s, j] of one batch."""
    at_i, at_j = i + tl.arange(0, TILE_I), j + tl.arange(0, TILE_J)
    both = tl.zeros([BLOCK_S, TILE_I, TILE_J], tl.float32)
    for start in range(0, S, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        of_i = tl.load(a_mask + s[:, None] * I + at_i[None, :], mask=(s < S)[:, None] & (at_i < I)[None, :], other=0)
        of_j = tl.load(b_mask + s[:, None] * J + at_j[None, :], mask=(s < S)[:, None] & (at_j < J)[None, :], other=0)
        both += of_i.to(tl.float32)[:, :, None] * of_j.to(tl.float32)[:, None, :]
    count = tl.maximum(tl.sum(both, 0) + added, least)
    return tl.reshape(1 / count, [TILE_I * TILE_J])


@triton.jit
def _outer_product(
    a: tl.tensor, b: tl.tensor, weight: tl.tensor, bias: tl.tensor, a_mask: tl.tensor, b_mask: tl.tensor,
    pair: tl.tensor, out: tl.tensor, share: tl.tensor, pitch: tl.tensor, added: tl.tensor, least: tl.tensor,
    S: tl.tensor, I: tl.tensor, J: tl.tensor,
    C: tl.constexpr, D: tl.constexpr, Z: tl.constexpr, BIAS_DIVIDED: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE_I: tl.constexpr, TILE_J: tl.constexpr, TILE_C: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_Z: tl.constexpr,
) -> None:  # fmt: skip
    """Store BLOCK_Z channels of TILE_I x TILE_J positions of out [batch, i, j, z], and their share.

    BIAS_DIVIDED: the bias is added before the division by the count, else after it.  pair: what is added last, or None.
    """
    across, down = tl.cdiv(J, TILE_J), tl.cdiv(I, TILE_I)
    tile = tl.program_id(0)
    j = tile % across * TILE_J
    i = tile // across % down * TILE_I
    batch = (tile // (across * down)).to(tl.int64)
    a += batch * S * (C * I)
    b += batch * S * (J * pitch)
    z = tl.program_id(1) * BLOCK_Z + tl.arange(0, BLOCK_Z)
    k = tl.arange(0, TILE_C * BLOCK_D)
    acc = tl.zeros([TILE_I * TILE_J, BLOCK_Z], tl.float32)
    for first in range(0, C, TILE_C):
        products = _products(a, b, pitch, i, j, first, S, I, J, C, D, BLOCK_D, TILE_I, TILE_J, TILE_C, BLOCK_S)
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
    each = _shares(a_mask + batch * S * I, b_mask + batch * S * J, i, j, added, least, S, I, J, TILE_I, TILE_J, BLOCK_S)
    acc *= each[:, None]
    if bias is not None and not BIAS_DIVIDED:
        acc += tl.load(bias + z, mask=z < Z, other=0).to(tl.float32)[None, :]
    at, valid = position[:, None] * Z + z[None, :], real[:, None] & (z < Z)[None, :]
    if pair is not None:
        acc += tl.load(pair + at, mask=valid, other=0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=valid)
    if tl.program_id(1) == 0:
        tl.store(share + position, each, mask=real)


@triton.jit
def _gradient(
    grad: tl.tensor, share: tl.tensor, position: tl.tensor, real: tl.tensor, z: tl.tensor, Z: tl.constexpr
) -> tl.tensor:
    """Return the gradient of the projection at positions, [position, z]: that of the result, divided by the count."""
    g = tl.load(grad + position[:, None] * Z + z[None, :], mask=real[:, None] & (z < Z)[None, :], other=0)
    return (g.to(tl.float32) * tl.load(share + position, mask=real, other=0)[:, None]).to(g.dtype)


@triton.jit
def _factor(
    grad: tl.tensor, share: tl.tensor, weight: tl.tensor, other: tl.tensor, mask: tl.tensor, result: tl.tensor,
    pitch: tl.tensor, result_pitch: tl.tensor, S: tl.tensor, I: tl.tensor, J: tl.tensor, stride_i: tl.tensor,
    stride_j: tl.tensor, stride_c: tl.tensor, stride_d: tl.tensor,
    C: tl.constexpr, D: tl.constexpr, Z: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_S: tl.constexpr,
    TILE_I: tl.constexpr, TILE_J: tl.constexpr, TILE_C: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_Z: tl.constexpr,
) -> None:  # fmt: skip
    """Store TILE_C channels of the gradient of a factor, result [batch, s, i, c], at BLOCK_S x TILE_I positions.

    TAIL_S: where so few sequences are left over, the last program takes them too, as a tile beside its own: a program
    for them alone would make all products again.  0: there are none, or they are as a block of others.

    other [batch, s, j, d] is the other factor; the pitches are from one position of it, and of the result, to the next.
    Strides: of positions of grad and share, and of the weight's channels.  mask [batch, s, i]: of the factor, or None.
    """
    down, chunks = tl.cdiv(I, TILE_I), tl.cdiv(C, TILE_C)
    tile = tl.program_id(0)
    first = tile % chunks * TILE_C
    i = tile // chunks % down * TILE_I
    batch = (tile // (chunks * down)).to(tl.int64)
    other += batch * S * (J * pitch)
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
    if TAIL_S > 0:
        last = tl.num_programs(1) * BLOCK_S + tl.arange(0, TAIL_S)
        rest = tl.zeros([TAIL_S, TILE_I * TILE_C], tl.float32)
    for j in range(0, J, TILE_J):
        at_i, at_j = i + m // TILE_J, j + m % TILE_J
        real = (at_i < I) & (at_j < J)
        position = batch * I * J + at_i.to(tl.int64) * stride_i + at_j.to(tl.int64) * stride_j
        if BLOCK_Z >= Z:
            products = tl.dot(_gradient(grad, share, position, real, z, Z), w)
        else:
            products = tl.zeros([TILE_I * TILE_J, TILE_C * BLOCK_D], tl.float32)
            for start in range(0, Z, BLOCK_Z):
                at_z = start + z
                of_z = (at_z < Z)[:, None] & known[None, :]
                some = tl.load(weight + at_z[:, None] * (C * D) + w_at, mask=of_z, other=0).to(dtype)
                g = _gradient(grad, share, position, real, at_z, Z)
                products = tl.dot(g, some, products)
        turned = tl.reshape(products.to(dtype), [TILE_I, TILE_J, TILE_C, BLOCK_D])
        turned = tl.reshape(tl.permute(turned, (1, 3, 0, 2)), [TILE_J * BLOCK_D, TILE_I * TILE_C])
        to_j, of_d = j + column // BLOCK_D, column % BLOCK_D
        at, readable = to_j * pitch + of_d, (to_j < J) & (of_d < D)
        acc = tl.dot(_others(other, s, S, J * pitch, at, readable), turned, acc)
        if TAIL_S > 0:
            rest = tl.dot(_others(other, last, S, J * pitch, at, readable), turned, rest)
    _store_factor(acc, result, mask, batch, s, i, first, result_pitch, S, I, C, TILE_I, TILE_C)
    if TAIL_S > 0 and tl.program_id(1) == tl.num_programs(1) - 1:
        _store_factor(rest, result, mask, batch, last, i, first, result_pitch, S, I, C, TILE_I, TILE_C)


@triton.jit
def _others(
    other: tl.tensor, s: tl.tensor, S: tl.tensor, apart: tl.tensor, at: tl.tensor, readable: tl.tensor
) -> tl.tensor:
    """Load the columns `at` of the other factor, where they are readable, in sequences s, `apart` from each other."""
    valid = (s < S)[:, None] & readable[None, :]
    return tl.load(other + (s[:, None].to(tl.int64) * apart + at[None, :]), mask=valid, other=0)


@triton.jit
def _store_factor(
    acc: tl.tensor, result: tl.tensor, mask: tl.tensor, batch: tl.tensor, s: tl.tensor, i: tl.tensor, first: tl.tensor,
    pitch: tl.tensor, S: tl.tensor, I: tl.tensor, C: tl.constexpr, TILE_I: tl.constexpr, TILE_C: tl.constexpr,
) -> None:  # fmt: skip
    """Store acc [s, (i, c)], times the mask of its positions, from i and channel `first` on."""
    column = tl.arange(0, TILE_I * TILE_C)
    at_i, c = i + column // TILE_C, first + column % TILE_C
    line = (batch * S + s.to(tl.int64))[:, None] * I
    writable = (s < S)[:, None] & ((at_i < I) & (c < C))[None, :]
    if mask is not None:
        acc *= tl.load(mask + line + at_i[None, :], mask=writable, other=0).to(tl.float32)
    rows = result + line * pitch
    tl.store(rows + (at_i * pitch + c)[None, :], acc.to(result.dtype.element_ty), mask=writable)


@triton.jit
def _weight(
    grad: tl.tensor, share: tl.tensor, a: tl.tensor, b: tl.tensor, partials: tl.tensor, pitch: tl.tensor,
    tiles: tl.tensor, S: tl.tensor, I: tl.tensor, J: tl.tensor,
    C: tl.constexpr, D: tl.constexpr, Z: tl.constexpr, BIAS_DIVIDED: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE_I: tl.constexpr, TILE_J: tl.constexpr, TILE_C: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_Z: tl.constexpr,
) -> None:  # fmt: skip
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
        of_a, of_b = a + batch * S * (C * I), b + batch * S * (J * pitch)
        products = _products(of_a, of_b, pitch, i, j, first, S, I, J, C, D, BLOCK_D, TILE_I, TILE_J, TILE_C, BLOCK_S)
        at_i, at_j = i + m // TILE_J, j + m % TILE_J
        position, real = (batch * I + at_i) * J + at_j, (at_i < I) & (at_j < J)
        g = _gradient(grad, share, position, real, z, Z)
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
        *((16, 2, 4, n, 128, 8, 2) for n in (64, 128)),
        (16, 4, 4, 256, 128, 8, 2),  # of many sequences
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


def outer_product(t: Operands) -> tuple[Tensor, Tensor]:
    """Compute warpfold::outer_product."""
    out = t.a.new_empty(t.a.shape[0], t.a.shape[2], t.b.shape[2], len(t.weight))
    share = empty_share(t.a, *out.shape[:-1])
    _forward(t.but(turned=_turned(t.a), b=t.b.contiguous()), t.b.shape[-1], out, share)
    return out, share


def outer_product_backward(t: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::outer_product_backward."""
    a, b = t.a.contiguous(), t.b.contiguous()
    da, db = a.new_empty(a.shape), b.new_empty(b.shape)
    of_weight = empty_parameters(t.weight, t.bias)
    pitches = a.shape[-1], b.shape[-1]
    sum_partials(_backward(t.but(a=a, b=b, turned=_turned(a)), pitches, da, db, None, of_weight))
    return da, db, *of_weight


def outer_product_mean(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::outer_product_mean."""
    x, h, mask = t.x, len(t.weight) // 2, t.mask.contiguous()
    *batch, _, r, _ = x.shape
    out, share = x.new_empty(*batch, r, r, len(t.out_weight)), empty_share(x, *batch, r, r)
    factors, turned, (mean, scale) = empty_factors(x, h), empty_turned(x, h), empty_statistics(x)
    project(t.but(mean=mean, scale=scale), _joined(factors), Planes(turned.mT, 0), mask)
    left, b, masks = batched(turned, 4), batched(factors.select(-4, 1), 4), batched(mask, 3)
    of_factors = t.but(turned=left, b=b, a_mask=masks, b_mask=masks, weight=t.out_weight, bias=t.out_bias)
    _forward(of_factors, padded(2 * h), batched(out, 4), batched(share, 3))
    if not t.kept:
        return out, *(x.new_empty(0) for _ in range(5))
    return out, factors, turned, mean, scale, share


def outer_product_mean_backward(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::outer_product_mean_backward."""
    h, mask = len(t.weight) // 2, t.mask.contiguous()
    dfactors, of_weight = empty_factors(t.x, h), empty_parameters(t.out_weight, t.out_bias)
    a, b, da, db = (batched(each, 4) for each in (*t.factors.unbind(-4), *dfactors.unbind(-4)))
    of_factors = t.but(grad=batched(t.grad, 4), share=batched(t.share, 3), turned=batched(t.turned, 4), a=a, b=b)
    pitches = padded(2 * h), padded(2 * h)
    sums = _backward(of_factors.but(weight=t.out_weight), pitches, da, db, batched(mask, 3), of_weight)
    return *norm_linear_backward(t.but(grad=_joined(dfactors)), None, (sums,)), *of_weight


def _turned(a: Tensor) -> Tensor:
    """Return a [batch, s, i, c] as [batch, s, c, i]: a program reads few channels of many positions."""
    return a.mT.contiguous()


def _joined(factors: Tensor) -> Tensor:
    """Return both factors [*, 2, s, r, h] as one projection [*, s, r, 2 h], as which they lie."""
    return factors.movedim(-4, -2).flatten(-2)


def _forward(t: Operands, pitch: int, out: Tensor, share: Tensor) -> None:
    """Write the result [B, i, j, z] and the share of each pair, of factors turned [B, s, c, i] and b [B, s, j, d].

    pitch: numbers from one position of b to the next.
    """
    (batches, s, c, i), (_, _, j, d), z = t.turned.shape, t.b.shape, len(t.weight)
    kernel = FORWARD.tiled((s, c, z), t.b)
    tiles = batches * triton.cdiv(i, kernel["TILE_I"]) * triton.cdiv(j, kernel["TILE_J"])
    kernel.run(
        (tiles, triton.cdiv(z, kernel["BLOCK_Z"])),
        a=t.turned,
        b=t.b,
        weight=cast_weight(t.weight, t.b, batches * i * j),
        bias=contiguous(t.bias),
        a_mask=t.a_mask.contiguous(),
        b_mask=t.b_mask.contiguous(),
        pair=contiguous(t.z),
        out=out,
        share=share,
        pitch=pitch,
        added=t.added,
        least=t.least,
        BIAS_DIVIDED=t.bias_divided,
        **_sizes(s, i, j, c, d, z),
    )


def _backward(
    t: Operands, pitches: tuple[int, int], da: Tensor, db: Tensor, mask: Tensor | None, of_weight: tuple[Tensor, ...]
) -> Sum:
    """Write the gradients of the factors, times a mask [B, s, i] of both; return the sums that make those `of_weight`.

    Factors and their gradients [B, s, i, c] and [B, s, j, d]: numbers from one position to the next are `pitches`.
    """
    grad, weight, (dweight, dbias) = t.grad.contiguous(), t.weight, of_weight
    (batches, s, i, c), (_, _, j, d), z = t.a.shape, t.b.shape, len(weight)
    w = cast_weight(weight, t.a, batches * i * j)
    of_a, of_b = pitches
    for other, pitch, result, result_pitch, strides in (
        (t.b, of_b, da, of_a, (j, 1, d, 1)),
        (t.a, of_a, db, of_b, (1, j, 1, d)),
    ):
        (_, _, m, own), (_, _, n, others) = result.shape, other.shape
        kernel = FACTOR.tiled((s, max(own, others), z), other)
        parts = batches * triton.cdiv(m, kernel["TILE_I"]) * triton.cdiv(own, kernel["TILE_C"])
        whole, rest = divmod(s, kernel["BLOCK_S"])
        tail = whole > 0 and 0 < rest <= LEAST < kernel["BLOCK_S"]
        kernel.run(
            (parts, whole if tail else triton.cdiv(s, kernel["BLOCK_S"])),
            grad=grad,
            share=t.share,
            weight=w,
            other=other,
            mask=mask,
            result=result,
            pitch=pitch,
            result_pitch=result_pitch,
            TAIL_S=LEAST if tail else 0,
            **dict(zip(("stride_i", "stride_j", "stride_c", "stride_d"), strides)),
            **_sizes(s, m, n, own, others, z),
        )
    kernel = WEIGHT.tiled((s, c, z), t.a)
    tiles = batches * triton.cdiv(i, kernel["TILE_I"]) * triton.cdiv(j, kernel["TILE_J"])
    chunks = triton.cdiv(c, kernel["TILE_C"]), triton.cdiv(z, kernel["BLOCK_Z"])
    programs = programs_for(tiles, 1, max(1, TILES // (chunks[0] * chunks[1])))
    partials = empty_partials(t.a, programs, z * c * d + z)
    kernel.run(
        (*chunks, programs),
        grad=grad,
        share=t.share,
        a=t.turned,
        b=t.b,
        partials=partials,
        pitch=of_b,
        tiles=tiles,
        BIAS_DIVIDED=t.bias_divided,
        **_sizes(s, i, j, c, d, z),
    )
    return Sum(partials, (dweight, or_unwanted(dbias, partials, z)))


def _sizes(s: int, i: int, j: int, c: int, d: int, z: int) -> dict[str, int]:
    """Return the sizes as the kernels take them."""
    return {"S": s, "I": i, "J": j, "C": c, "D": d, "Z": z, "BLOCK_D": power_of_two(d)}
