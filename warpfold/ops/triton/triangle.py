"""Triangle multiplication on a GPU, for 16 bits.

The forward pass consists of two kernels and a product, the backward pass of four kernels and two products.

Positions are counted along rows with the padding of the planes, so that 16 bytes of a plane hold one channel of
adjacent positions.  Tiles [positions, channels] of x are read and written along the channels, tiles of a plane along
the positions.  They are transposed in shared memory.

The joined weight has the rows of a, a's gate, b, b's gate and the product's gate; with FUSED (AlphaFold 2.3) it has the
rows of a, b, a's gate, b's gate and the product's gate.

Forward kernels compute the factors, and the output from their product.  Backward kernels compute the gradients of the
product, of x with the norms, and of the two weights with their biases.  A program of the weights' kernels owns some
channels and iterates over a span of positions; for the weight of the factors it recomputes the projections.
Its partial sums have a row for each span.  They belong to the rows of the joined weight for the factors and their
biases, or to the rows for the product's gate, their biases, the output's weight and its bias.

A plane is [*, h, n, n] with the channels in front.  Its rows are padded to full memory sectors, so that any n is read
in wide words, and multiplied by the fast cuBLAS products, which need rows of 16 bytes.

Memory traffic, in tensors of the size of x (T: 16.8 MB for 256 residues, 128 channels, bf16), and matrix products in
GFLOP:

    forward   factors: x -> a, b                                            3 T    8.6
              product: a, b -> product                                      3 T    4.3
              out: x, product -> y (the gate's logits are recomputed,
                  since x is read for the residual anyway)                  3 T    4.3
    backward  out: grad, x, product -> dproduct, dprojected, dgate          6 T    6.4
              products: dproduct, b -> da; a, dproduct -> db                6 T    8.6
              out's weights: x, product, dprojected, dgate                  4 T    4.3
              factors' weights: x, da, db                                   3 T   17.2
              factors: grad, x, da, db, dgate -> dx                         6 T   19.3

This is 9 T (151 MB) forward and 25 T (419 MB) backward, plus 2 T of partial sums; concurrent programs share x in the L2
cache.  Modelled, not measured, for an H100 with 3 TB/s and 600 TFLOP/s in products: 50 us forward (products: 29), 150
us backward (products: 93).  As separate operations (norm_linear, two of triangle_factor, the product, norm_linear,
gate, dropout, residual) the layer moved 25 T forward: 140 us.

The gradients of the projections of a and b (4 T, written once and read twice, 70 us) never exist in memory.  The two
kernels that need them recompute the projections, at 8.6 GFLOP or 14 us each.  a, b and their product are saved (3 T).
Recomputing a and b would cost 3 T and 8.6 GFLOP more, some 20 us of 200.  Plans with less memory recompute the whole
layer.

For a slice, x and the whole b are given.  Then the same kernels compute a only, and the gradient of b is that of an
operand.  A single factor (`triangle_factor`) uses the first kernel, and the last two of the backward pass.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.dispatch import Operands, empty_like, empty_parameters
from warpfold.ops.linear import empty_statistics
from warpfold.ops.triangle import (
    empty_factor,
    empty_gradient_of_b,
    empty_product,
    empty_rows,
    factor_channels,
    is_narrow,
    row_pitch,
)
from warpfold.ops.triton.launch import Kernel, TiledKernel, configs, register
from warpfold.ops.triton.linear import shifted, statistics
from warpfold.ops.triton.noise import SCALARS, DropoutOperands, dropout_tile
from warpfold.ops.triton.positions import (
    Axes,
    Strided,
    Sum,
    cast_weight,
    cdiv,
    coalesce,
    contiguous,
    empty_partials,
    offsets,
    or_unwanted,
    pointers,
    power_of_two,
    programs_for,
    span,
    sum_partials,
)


@triton.jit
def present_of(m: tl.tensor, axes: tl.tuple, n: tl.tensor, PADDED: tl.constexpr) -> tl.tensor:
    """Return the mask of real positions: neither after the last, nor in the padding of a row of n."""
    present = m < axes.positions
    if PADDED:
        present = present & (m % axes.inner < n)
    return present


@triton.jit
def in_memory(m: tl.tensor, c: tl.tensor, axes: tl.tuple, C: tl.constexpr) -> tl.tensor:
    """Return the mask of elements in the memory of a plane, including the padding of rows, for wide words."""
    return (m < axes.positions)[:, None] & (c < C)[None, :]


@triton.jit
def load_normed(
    x: tl.tuple, readable: tl.tensor, norm_weight: tl.tensor, norm_bias: tl.tensor, mean: tl.tensor, rstd: tl.tensor,
    at: tl.tensor, m: tl.tensor, present: tl.tensor, axes: tl.tuple,
    C: tl.constexpr, BLOCK_C: tl.constexpr, AGAIN: tl.constexpr = False,
) -> tl.tuple:  # fmt: skip
    """Load and normalise the channels of positions [m, c]: fp32 without weight and bias, and the dtype of x with them.

    at: the offsets of the statistics.  readable: the mask of elements of x that may be read.  AGAIN: x was read before,
    and must not stay in registers since; a different kind of load prevents the compiler from keeping it there.
    """
    c = tl.arange(0, BLOCK_C)
    once: tl.constexpr = "evict_first" if AGAIN else ""
    v = tl.load(pointers(x, m, c, axes), mask=readable, other=0, eviction_policy=once).to(tl.float32)
    mu = tl.load(mean + at, mask=present, other=0)
    r = tl.load(rstd + at, mask=present, other=0)
    x_hat = tl.where(present[:, None] & (c < C)[None, :], (v - mu[:, None]) * r[:, None], 0.0)
    w = tl.load(norm_weight + c, mask=c < C, other=0).to(tl.float32)
    return x_hat, shifted(x_hat * w[None, :], norm_bias, c, C).to(x.data.dtype.element_ty)


@triton.jit
def rows_of(
    weight: tl.tensor, first: tl.tensor, o: tl.tensor, c: tl.tensor,
    dtype: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load rows first + o, where o < ROWS, of a weight [., C], transposed: [c, o]."""
    known = (c < C)[:, None] & (o < ROWS)[None, :]
    return tl.load(weight + first * C + o[None, :] * C + c[:, None], mask=known, other=0).to(dtype)


@triton.jit
def biased(
    y: tl.tensor, bias: tl.tensor, first: tl.tensor, o: tl.tensor,
    ROWS: tl.constexpr, BIASED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add elements first + o of a bias to y [m, o]; BIASED outputs have a bias."""
    if bias is not None:
        known = (o < ROWS) & (first + o < BIASED)
        return y + tl.load(bias + first + o, mask=known, other=0).to(tl.float32)[None, :]
    else:
        return y


@triton.jit
def norm_backward(
    dn: tl.tensor, x_hat: tl.tensor, norm_weight: tl.tensor, r: tl.tensor, partials: tl.tensor,
    C: tl.constexpr, BLOCK_C: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Compute the gradient of the input of a norm from that of its result, and store this program's partials.

    partials: [programs, 2 C], for the norm's weight and its bias.
    """
    c = tl.arange(0, BLOCK_C)
    mine = partials + tl.program_id(0).to(tl.int64) * (2 * C) + c
    tl.store(mine, tl.sum(dn * x_hat, 0), mask=c < C)
    tl.store(mine + C, tl.sum(dn, 0), mask=c < C)
    dn = dn * tl.load(norm_weight + c, mask=c < C, other=0).to(tl.float32)[None, :]
    c1 = tl.sum(dn * x_hat, 1) / C
    c2 = tl.sum(dn, 1) / C
    return (dn - c2[:, None] - x_hat * c1[:, None]) * r[:, None]


@triton.jit
def _store_factor(
    plane: tl.tuple, n1: tl.tensor, kept: tl.tensor, weight: tl.tensor, bias: tl.tensor, m: tl.tensor, axes: tl.tuple,
    VALUES: tl.constexpr, GATES: tl.constexpr, C: tl.constexpr, HIDDEN: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_O: tl.constexpr,
) -> None:  # fmt: skip
    """Store a factor; its rows of the weight start at VALUES, those of its gate at GATES."""
    c = tl.arange(0, BLOCK_C)
    for start in range(0, HIDDEN, BLOCK_O):
        o = start + tl.arange(0, BLOCK_O)
        y = tl.dot(n1, rows_of(weight, VALUES, o, c, n1.dtype, HIDDEN, C))
        g = tl.dot(n1, rows_of(weight, GATES, o, c, n1.dtype, HIDDEN, C))
        y = biased(y, bias, VALUES, o, HIDDEN, BIASED)
        y = y * tl.sigmoid(biased(g, bias, GATES, o, HIDDEN, BIASED)) * kept[:, None]
        # The padding of the plane's rows is written, too.
        tl.store(pointers(plane, m, o, axes), y.to(plane.data.dtype.element_ty), mask=in_memory(m, o, axes, HIDDEN))


@triton.jit
def _factors_forward(
    x: tl.tuple, mask: tl.tuple, norm_weight: tl.tensor, norm_bias: tl.tensor, weight: tl.tensor, bias: tl.tensor,
    a: tl.tuple, b: tl.tuple, mean: tl.tuple, rstd: tl.tensor, axes: tl.tuple, n: tl.tensor, eps: tl.tensor,
    C: tl.constexpr, HIDDEN: tl.constexpr, BIASED: tl.constexpr, FUSED: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr,
) -> None:  # fmt: skip
    """Store the factors and the statistics of x: all channels of BLOCK_M positions.  a or b may be None."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    present = present_of(m, axes, n, PADDED)
    valid = present[:, None] & (c < C)[None, :]
    v = tl.load(pointers(x, m, c, axes), mask=valid, other=0).to(tl.float32)
    d, mu, r = statistics(v, valid, eps, C)
    w = tl.load(norm_weight + c, mask=c < C, other=0).to(tl.float32)
    n1 = shifted(d * r[:, None] * w[None, :], norm_bias, c, C).to(x.data.dtype.element_ty)
    at = offsets(mean, m, axes)
    tl.store(mean.data + at, mu, mask=present)
    tl.store(rstd + at, r, mask=present)
    kept = tl.load(mask.data + offsets(mask, m, axes), mask=present, other=0).to(tl.float32)
    B: tl.constexpr = HIDDEN if FUSED else 2 * HIDDEN
    A_GATES: tl.constexpr = 2 * HIDDEN if FUSED else HIDDEN
    if a is not None:
        _store_factor(a, n1, kept, weight, bias, m, axes, 0, A_GATES, C, HIDDEN, BIASED, BLOCK_C, BLOCK_O)
    if b is not None:
        _store_factor(b, n1, kept, weight, bias, m, axes, B, 3 * HIDDEN, C, HIDDEN, BIASED, BLOCK_C, BLOCK_O)


@triton.jit(do_not_specialize=SCALARS)
def _out_forward(
    x: tl.tuple, product: tl.tuple, norm_weight: tl.tensor, norm_bias: tl.tensor, weight: tl.tensor, bias: tl.tensor,
    out_norm_weight: tl.tensor, out_norm_bias: tl.tensor, out_weight: tl.tensor, out_bias: tl.tensor, factors: tl.tuple,
    key: tl.tensor, y: tl.tuple, mean: tl.tuple, rstd: tl.tensor, out_mean: tl.tensor, out_rstd: tl.tensor,
    axes: tl.tuple, n: tl.tensor, eps: tl.tensor, number: tl.tensor, word: tl.tensor, rate: tl.tensor, scale: tl.tensor,
    C: tl.constexpr, HIDDEN: tl.constexpr, BIASED: tl.constexpr, PADDED: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr,
) -> None:  # fmt: skip
    """Store y = x + factors * (linear(norm(product)) * sigmoid(gate of x)), and the statistics of the product.

    RESIDUAL: whether x is added.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c, h = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_H)
    present = present_of(m, axes, n, PADDED)
    known = present[:, None] & (h < HIDDEN)[None, :]
    v = tl.load(pointers(product, m, h, axes), mask=in_memory(m, h, axes, HIDDEN), other=0).to(tl.float32)
    if PADDED:
        # The padding of the product's rows is uninitialised.
        v = tl.where(known, v, 0.0)
    d, mu, r = statistics(v, known, eps, HIDDEN)
    w = tl.load(out_norm_weight + h, mask=h < HIDDEN, other=0).to(tl.float32)
    n2 = shifted(d * r[:, None] * w[None, :], out_norm_bias, h, HIDDEN).to(x.data.dtype.element_ty)
    at = offsets(mean, m, axes)
    tl.store(out_mean + at, mu, mask=present)
    tl.store(out_rstd + at, r, mask=present)
    valid = present[:, None] & (c < C)[None, :]
    _, n1 = load_normed(x, valid, norm_weight, norm_bias, mean.data, rstd, at, m, present, axes, C, BLOCK_C)
    GATES: tl.constexpr = 4 * HIDDEN
    for start in range(0, C, BLOCK_O):
        o = start + tl.arange(0, BLOCK_O)
        g = tl.dot(n1, rows_of(weight, GATES, o, c, n1.dtype, C, C))
        u = tl.dot(n2, rows_of(out_weight, 0, o, h, n1.dtype, C, HIDDEN))
        u = biased(u, out_bias, 0, o, C, C) * tl.sigmoid(biased(g, bias, GATES, o, C, BIASED))
        shown = present[:, None] & (o < C)[None, :]
        if factors is not None:
            drawn = offsets(factors, m, axes)[:, None] + (o.to(tl.int64) * factors.strides[3])[None, :]
            u *= dropout_tile(factors, drawn, shown, key, number, word, rate, scale)
        if RESIDUAL:
            u += tl.load(pointers(x, m, o, axes), mask=shown, other=0).to(tl.float32)
        tl.store(pointers(y, m, o, axes), u.to(y.data.dtype.element_ty), mask=shown)


_FORWARD = configs(
    "BLOCK_M BLOCK_O",
    *((64, o, w, s) for o in (32, 64) for w in (4, 8) for s in (2, 3)),
    *((128, o, 8, s) for o in (32, 64) for s in (2, 3)),
    (64, 16, 8, 2),  # 256 channels
)
FACTORS = register("triangle_factors", _factors_forward, _FORWARD)
OUT = register("triangle_out", _out_forward, _FORWARD)


@triton.jit(do_not_specialize=SCALARS)
def _out_backward(
    grad: tl.tuple, x: tl.tuple, product: tl.tuple, norm_weight: tl.tensor, norm_bias: tl.tensor, weight: tl.tensor,
    bias: tl.tensor, out_norm_weight: tl.tensor, out_norm_bias: tl.tensor, out_weight: tl.tensor, out_bias: tl.tensor,
    factors: tl.tuple, key: tl.tensor, mean: tl.tuple, rstd: tl.tensor, out_mean: tl.tensor, out_rstd: tl.tensor,
    dproduct: tl.tuple, dprojected: tl.tuple, dgate: tl.tuple, partials: tl.tensor, axes: tl.tuple, n: tl.tensor,
    number: tl.tensor, word: tl.tensor, rate: tl.tensor, scale: tl.tensor,
    C: tl.constexpr, HIDDEN: tl.constexpr, BIASED: tl.constexpr, PADDED: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr,
) -> None:  # fmt: skip
    """Store the gradients of the product, its projection and its gate's logits, and partials of the second norm."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c, h = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_H)
    present = present_of(m, axes, n, PADDED)
    at = offsets(mean, m, axes)
    valid, plane = present[:, None] & (c < C)[None, :], in_memory(m, h, axes, HIDDEN)
    _, n1 = load_normed(x, valid, norm_weight, norm_bias, mean.data, rstd, at, m, present, axes, C, BLOCK_C)
    _, n2 = load_normed(
        product, plane, out_norm_weight, out_norm_bias, out_mean, out_rstd, at, m, present, axes, HIDDEN, BLOCK_H
    )
    dn = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    GATES: tl.constexpr = 4 * HIDDEN
    for start in range(0, C, BLOCK_O):
        o = start + tl.arange(0, BLOCK_O)
        gate_rows = rows_of(weight, GATES, o, c, n1.dtype, C, C)
        out_rows = rows_of(out_weight, 0, o, h, n1.dtype, C, HIDDEN)
        shown = present[:, None] & (o < C)[None, :]
        dz = tl.load(pointers(grad, m, o, axes), mask=shown, other=0).to(tl.float32)
        if factors is not None:
            drawn = offsets(factors, m, axes)[:, None] + (o.to(tl.int64) * factors.strides[3])[None, :]
            dz = dz * dropout_tile(factors, drawn, shown, key, number, word, rate, scale)
        g = biased(tl.dot(n1, gate_rows), bias, GATES, o, C, BIASED)
        u = biased(tl.dot(n2, out_rows), out_bias, 0, o, C, C)
        gate_values = tl.sigmoid(g)
        dz = dz * gate_values
        dg = dz * u * (1 - gate_values)
        du = dz.to(n1.dtype)
        tl.store(pointers(dgate, m, o, axes), dg.to(n1.dtype), mask=shown)
        tl.store(pointers(dprojected, m, o, axes), du, mask=shown)
        dn = tl.dot(du, tl.trans(out_rows), dn)
    x_hat, _ = load_normed(
        product, plane, out_norm_weight, out_norm_bias, out_mean, out_rstd, at, m, present, axes, HIDDEN, BLOCK_H,
        AGAIN=True,
    )  # fmt: skip
    r = tl.load(out_rstd + at, mask=present, other=0)
    out = norm_backward(dn, x_hat, out_norm_weight, r, partials, HIDDEN, BLOCK_H)
    tl.store(pointers(dproduct, m, h, axes), out.to(dproduct.data.dtype.element_ty), mask=plane)


@triton.jit
def of_factor(
    plane: tl.tensor, like: tl.tuple, n1: tl.tensor, kept: tl.tensor, value_rows: tl.tensor, gate_rows: tl.tensor,
    bias: tl.tensor, values: tl.tensor, gates: tl.tensor, m: tl.tensor, o: tl.tensor, axes: tl.tuple,
    HIDDEN: tl.constexpr, BIASED: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Compute the gradients of a factor's projection and of its gate's logits, [m, o] in the dtype of n1.

    plane: the start of the factor's gradient, which has the strides of `like`.  value_rows, gate_rows [c, o]: the
    transposed rows of the weight for these channels; the first rows for the factor and its gate are `values` and
    `gates`.
    """
    at = offsets(like, m, axes)[:, None] + (o.to(tl.int64) * like.strides[3])[None, :]
    d = tl.load(plane + at, mask=in_memory(m, o, axes, HIDDEN), other=0).to(tl.float32)
    # The padding of the rows is uninitialised.
    d = tl.where((kept != 0)[:, None], d * kept[:, None], 0.0)
    y = biased(tl.dot(n1, value_rows), bias, values, o, HIDDEN, BIASED)
    gate_values = tl.sigmoid(biased(tl.dot(n1, gate_rows), bias, gates, o, HIDDEN, BIASED))
    dy = d * gate_values
    return dy.to(n1.dtype), (dy * y * (1 - gate_values)).to(n1.dtype)


@triton.jit
def _add_factor(
    dn: tl.tensor, plane: tl.tensor, like: tl.tuple, n1: tl.tensor, kept: tl.tensor, weight: tl.tensor, bias: tl.tensor,
    m: tl.tensor, axes: tl.tuple,
    VALUES: tl.constexpr, GATES: tl.constexpr, C: tl.constexpr, HIDDEN: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_O: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add the contribution of a factor to dn, the gradient of the normalised x."""
    c = tl.arange(0, BLOCK_C)
    for start in range(0, HIDDEN, BLOCK_O):
        o = start + tl.arange(0, BLOCK_O)
        value_rows = rows_of(weight, VALUES, o, c, n1.dtype, HIDDEN, C)
        gate_rows = rows_of(weight, GATES, o, c, n1.dtype, HIDDEN, C)
        dy, dg = of_factor(
            plane, like, n1, kept, value_rows, gate_rows, bias, VALUES, GATES, m, o, axes, HIDDEN, BIASED
        )
        dn = tl.dot(dy, tl.trans(value_rows), dn)
        dn = tl.dot(dg, tl.trans(gate_rows), dn)
    return dn


@triton.jit
def _factors_backward(
    grad: tl.tuple, x: tl.tuple, mask: tl.tuple, norm_weight: tl.tensor, norm_bias: tl.tensor, weight: tl.tensor,
    bias: tl.tensor, mean: tl.tuple, rstd: tl.tensor, dfactors: tl.tuple, dgate: tl.tuple, dx: tl.tuple,
    partials: tl.tensor, axes: tl.tuple, n: tl.tensor, apart: tl.tensor,
    C: tl.constexpr, HIDDEN: tl.constexpr, BIASED: tl.constexpr, FUSED: tl.constexpr, PADDED: tl.constexpr,
    RESIDUAL: tl.constexpr, FACTORS: tl.constexpr, FIRST: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
) -> None:  # fmt: skip
    """Store dx, including the gradient of the residual if there is one, and partials of the first norm.

    dfactors: the gradient of a (FIRST = 0) or b (1), and `apart` elements later that of b if there are two FACTORS.
    dgate: the gradient of the gate's logits, or None if there is no product.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    present = present_of(m, axes, n, PADDED)
    at = offsets(mean, m, axes)
    valid = present[:, None] & (c < C)[None, :]
    _, n1 = load_normed(x, valid, norm_weight, norm_bias, mean.data, rstd, at, m, present, axes, C, BLOCK_C)
    kept = tl.load(mask.data + offsets(mask, m, axes), mask=present, other=0).to(tl.float32)
    dn = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    B: tl.constexpr = HIDDEN if FUSED else 2 * HIDDEN
    A_GATES: tl.constexpr = 2 * HIDDEN if FUSED else HIDDEN
    da, db = dfactors.data, dfactors.data + apart.to(tl.int64)
    if FIRST == 0:
        dn = _add_factor(
            dn, da, dfactors, n1, kept, weight, bias, m, axes, 0, A_GATES, C, HIDDEN, BIASED, BLOCK_C, BLOCK_O
        )
    if FIRST + FACTORS == 2:
        dn = _add_factor(
            dn, db, dfactors, n1, kept, weight, bias, m, axes, B, 3 * HIDDEN, C, HIDDEN, BIASED, BLOCK_C, BLOCK_O
        )
    if dgate is not None:
        for start in range(0, C, BLOCK_O):
            o = start + tl.arange(0, BLOCK_O)
            dg = tl.load(pointers(dgate, m, o, axes), mask=present[:, None] & (o < C)[None, :], other=0)
            rows = rows_of(weight, 4 * HIDDEN, o, c, n1.dtype, C, C)
            dn = tl.dot(dg, tl.trans(rows), dn)
    x_hat, _ = load_normed(
        x, valid, norm_weight, norm_bias, mean.data, rstd, at, m, present, axes, C, BLOCK_C, AGAIN=True
    )
    r = tl.load(rstd + at, mask=present, other=0)
    out = norm_backward(dn, x_hat, norm_weight, r, partials, C, BLOCK_C)
    if RESIDUAL:
        out += tl.load(pointers(grad, m, c, axes), mask=valid, other=0).to(tl.float32)
    tl.store(pointers(dx, m, c, axes), out.to(dx.data.dtype.element_ty), mask=valid)


_BACKWARD = configs(
    "BLOCK_M BLOCK_O",
    *((m, o, 4, 2) for m in (32, 64) for o in (16, 32)),
    *((m, o, 8, s) for m in (64, 128) for o in (32, 64) for s in (2, 3)),
    (32, 16, 8, 2),  # 256 channels
)
OUT_BACKWARD = register("triangle_out_backward", _out_backward, _BACKWARD)
FACTORS_BACKWARD = register("triangle_factors_backward", _factors_backward, _BACKWARD)


@triton.jit
def _factors_weight(
    x: tl.tuple, mask: tl.tuple, norm_weight: tl.tensor, norm_bias: tl.tensor, weight: tl.tensor, bias: tl.tensor,
    mean: tl.tuple, rstd: tl.tensor, dfactors: tl.tuple, partials: tl.tensor, axes: tl.tuple, n: tl.tensor,
    apart: tl.tensor,
    C: tl.constexpr, HIDDEN: tl.constexpr, BIASED: tl.constexpr, FUSED: tl.constexpr, PADDED: tl.constexpr,
    FIRST: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr,
) -> None:  # fmt: skip
    """Store a span's partial gradients of the weight for BLOCK_O channels of a factor and their gates.

    dfactors: see `_factors_backward`.
    """
    CHUNKS: tl.constexpr = (HIDDEN + BLOCK_O - 1) // BLOCK_O
    half = FIRST + tl.program_id(0) // CHUNKS  # of a, or of b
    o = tl.program_id(0) % CHUNKS * BLOCK_O + tl.arange(0, BLOCK_O)
    c = tl.arange(0, BLOCK_C)
    values = half * (HIDDEN if FUSED else 2 * HIDDEN)
    gates = (2 * HIDDEN if FUSED else HIDDEN) + half * (HIDDEN if FUSED else 2 * HIDDEN)
    value_rows = tl.trans(rows_of(weight, values, o, c, x.data.dtype.element_ty, HIDDEN, C))
    gate_rows = tl.trans(rows_of(weight, gates, o, c, x.data.dtype.element_ty, HIDDEN, C))
    value_bias = tl.zeros([BLOCK_O], tl.float32)
    gate_bias = tl.zeros([BLOCK_O], tl.float32)
    if BIASED > 0:
        value_bias += tl.load(bias + values + o, mask=(o < HIDDEN) & (values + o < BIASED), other=0).to(tl.float32)
        gate_bias += tl.load(bias + gates + o, mask=(o < HIDDEN) & (gates + o < BIASED), other=0).to(tl.float32)
    plane = dfactors.data + (half - FIRST) * apart.to(tl.int64) + (o.to(tl.int64) * dfactors.strides[3])[:, None]
    dvalues = tl.zeros([BLOCK_O, BLOCK_C], tl.float32)
    dgates = tl.zeros([BLOCK_O, BLOCK_C], tl.float32)
    value_sums = tl.zeros([BLOCK_O], tl.float32)
    gate_sums = tl.zeros([BLOCK_O], tl.float32)
    first, last = span(axes.positions, BLOCK_M)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        present = present_of(m, axes, n, PADDED)
        at = offsets(mean, m, axes)
        valid = present[:, None] & (c < C)[None, :]
        _, n1 = load_normed(x, valid, norm_weight, norm_bias, mean.data, rstd, at, m, present, axes, C, BLOCK_C)
        kept = tl.load(mask.data + offsets(mask, m, axes), mask=present, other=0).to(tl.float32)
        # Tiles have the channels along the rows, as planes have, so that only shared memory holds n1 as an operand.
        there = (m < axes.positions)[None, :] & (o < HIDDEN)[:, None]
        d = tl.load(plane + offsets(dfactors, m, axes)[None, :], mask=there, other=0).to(tl.float32)
        # The padding of the rows is uninitialised.
        d = tl.where((kept != 0)[None, :], d * kept[None, :], 0.0)
        turned = tl.trans(n1)
        y = tl.dot(value_rows, turned) + value_bias[:, None]
        gate_values = tl.sigmoid(tl.dot(gate_rows, turned) + gate_bias[:, None])
        dy = d * gate_values
        dg = dy * y * (1 - gate_values)
        dvalues = tl.dot(dy.to(n1.dtype), n1, dvalues)
        dgates = tl.dot(dg.to(n1.dtype), n1, dgates)
        if BIASED > 0:
            value_sums += tl.sum(dy, 1)
            gate_sums += tl.sum(dg, 1)
    ROWS: tl.constexpr = 4 * HIDDEN
    SUMS: tl.constexpr = ROWS if BIASED > ROWS else BIASED
    mine = partials + tl.program_id(1).to(tl.int64) * (ROWS * C + SUMS)
    known = (o < HIDDEN)[:, None] & (c < C)[None, :]
    tl.store(mine + (values + o)[:, None] * C + c[None, :], dvalues, mask=known)
    tl.store(mine + (gates + o)[:, None] * C + c[None, :], dgates, mask=known)
    if BIASED > 0:
        sums = mine + ROWS * C
        tl.store(sums + values + o, value_sums, mask=(o < HIDDEN) & (values + o < BIASED))
        tl.store(sums + gates + o, gate_sums, mask=(o < HIDDEN) & (gates + o < BIASED))


@triton.jit
def _out_weight(
    x: tl.tuple, product: tl.tuple, norm_weight: tl.tensor, norm_bias: tl.tensor, out_norm_weight: tl.tensor,
    out_norm_bias: tl.tensor, out_bias: tl.tensor, mean: tl.tuple, rstd: tl.tensor, out_mean: tl.tensor,
    out_rstd: tl.tensor, dprojected: tl.tuple, dgate: tl.tuple, partials: tl.tensor, axes: tl.tuple, n: tl.tensor,
    C: tl.constexpr, HIDDEN: tl.constexpr, BIASED: tl.constexpr, PADDED: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr,
) -> None:  # fmt: skip
    """Store a span's partial gradients of the weights for BLOCK_O channels of the output and their gates."""
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    c, h = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_H)
    dgates = tl.zeros([BLOCK_O, BLOCK_C], tl.float32)
    dout = tl.zeros([BLOCK_O, BLOCK_H], tl.float32)
    gate_sums = tl.zeros([BLOCK_O], tl.float32)
    out_sums = tl.zeros([BLOCK_O], tl.float32)
    first, last = span(axes.positions, BLOCK_M)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        present = present_of(m, axes, n, PADDED)
        at = offsets(mean, m, axes)
        valid, plane = present[:, None] & (c < C)[None, :], in_memory(m, h, axes, HIDDEN)
        known = present[:, None] & (o < C)[None, :]
        _, n1 = load_normed(x, valid, norm_weight, norm_bias, mean.data, rstd, at, m, present, axes, C, BLOCK_C)
        dg = tl.load(pointers(dgate, m, o, axes), mask=known, other=0)
        dgates = tl.dot(tl.trans(dg), n1, dgates)
        gate_sums += tl.sum(dg.to(tl.float32), 0)
        _, n2 = load_normed(
            product, plane, out_norm_weight, out_norm_bias, out_mean, out_rstd, at, m, present, axes, HIDDEN, BLOCK_H
        )
        du = tl.load(pointers(dprojected, m, o, axes), mask=known, other=0)
        dout = tl.dot(tl.trans(du), n2, dout)
        out_sums += tl.sum(du.to(tl.float32), 0)
    SUMS: tl.constexpr = BIASED - 4 * HIDDEN if BIASED > 4 * HIDDEN else 0  # gates with a bias
    OUT_SUMS: tl.constexpr = 0 if out_bias is None else C
    mine = partials + tl.program_id(1).to(tl.int64) * (C * C + SUMS + C * HIDDEN + OUT_SUMS)
    tl.store(mine + o[:, None] * C + c[None, :], dgates, mask=(o < C)[:, None] & (c < C)[None, :])
    mine += C * C
    if SUMS > 0:
        tl.store(mine + o, gate_sums, mask=o < SUMS)
    mine += SUMS
    tl.store(mine + o[:, None] * HIDDEN + h[None, :], dout, mask=(o < C)[:, None] & (h < HIDDEN)[None, :])
    if OUT_SUMS > 0:
        tl.store(mine + C * HIDDEN + o, out_sums, mask=o < C)


_WEIGHTS = configs(
    "BLOCK_M BLOCK_O",
    *((m, o, 4, 2) for m in (32, 64) for o in (16, 32)),
    *((m, o, 8, s) for m in (32, 64, 128) for o in (32, 64) for s in (2, 3)),
    (32, 16, 8, 2),  # 256 channels
    *((64, 64, 4, 2), (32, 128, 8, 2), (32, 128, 8, 3)),  # for wgmma, whose tiles have 64 rows: BLOCK_O of a product
)
FACTORS_WEIGHT = register("triangle_factors_weight", _factors_weight, _WEIGHTS)
OUT_WEIGHT = register("triangle_out_weight", _out_weight, _WEIGHTS)


# Programs of four warps for a weight's gradient, if there are enough positions: two per core of a large GPU.
PROGRAMS = 256
# The arguments of kernels that may be None.
OPTIONAL = "factors", "a", "b", "grad", "dgate"


def triangle_factor(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::triangle_factor."""
    x = t.x
    out, (mean, scale) = empty_factor(x, factor_channels(t.weight)), empty_statistics(x)
    call = _Call(t.but(mean=mean, scale=scale), t.which, 1)
    call.write_factors({"ab"[t.which]: out}, t.eps)
    return out, mean, scale


def triangle_factor_backward(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::triangle_factor_backward."""
    x, call, grad = t.x, _Call(t, t.which, 1), t.grad
    # The kernels also read the padding of rows.
    if call.pitch != call.n:
        grad = empty_factor(x, call.hidden).copy_(grad)
    gradients = empty_parameters(t.norm_weight, t.norm_bias, t.weight, t.bias)
    dnorm, dnorm_bias, dweight, dbias = gradients
    for gradient in (dweight, dbias):
        gradient[4 * call.hidden :].zero_()
    of_weight = call.factor_sums(grad, 0, (dweight, dbias))
    dx, partials = call.write_dx(grad, 0)
    sum_partials(of_weight, Sum(partials, (dnorm, or_unwanted(dnorm_bias, partials, call.channels))))
    return dx, *gradients


def triangle_multiplication(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::triangle_multiplication."""
    x, hidden = t.x, t.out_weight.shape[1]
    (mean, scale), (out_mean, out_scale) = empty_statistics(x), empty_statistics(x)
    statistics = t.but(mean=mean, scale=scale, out_mean=out_mean, out_scale=out_scale)
    call = _Call(statistics, 0, 2 if t.b is None else 1)
    a, product = empty_factor(x, hidden), empty_product(x, hidden)
    b = empty_factor(x, hidden) if t.b is None else t.b
    call.write_factors({"a": a, "b": b} if t.b is None else {"a": a}, t.eps)
    left, right = (a, b.mT) if t.outgoing else (b.mT, a)
    _multiply(left, right, product)
    out, kernel = empty_like(x), call.tiled(OUT)
    with call.written(out) as y:
        call.launch(kernel, (call.blocks(kernel),), {"product": call.plane(product), "y": y}, eps=t.eps)
    return out, a, b if t.b is None else x.new_empty(0), product, mean, scale, out_mean, out_scale


def triangle_multiplication_backward(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::triangle_multiplication_backward."""
    x, call = t.x, _Call(t, 0, 2 if t.b is None else 1)
    into = t.norm_weight, t.norm_bias, t.weight, t.bias
    out_of = t.out_norm_weight, t.out_norm_bias, t.out_weight, t.out_bias
    gradients = empty_parameters(*into, *out_of)
    dnorm, dnorm_bias, dweight, dbias, dout_norm, dout_norm_bias, dout_weight, dout_bias = gradients
    dproduct, dprojected, dgate = empty_product(x, call.hidden), x.new_empty(x.shape), x.new_empty(x.shape)
    read = {"product": call.plane(t.product), "dprojected": call.turned(dprojected), "dgate": call.turned(dgate)}

    kernel = call.tiled(OUT_BACKWARD)
    partials = empty_partials(x, call.blocks(kernel), 2 * call.hidden)
    tensors = read | {"grad": call.turned(t.grad), "dproduct": call.plane(dproduct)}
    call.launch(kernel, (call.blocks(kernel),), tensors, partials=partials)
    sums = [Sum(partials, (dout_norm, or_unwanted(dout_norm_bias, partials, call.hidden)))]

    # The gradients of both factors are adjacent.
    if t.b is None:
        both = empty_rows(x, 2, *t.a.shape)
        b, da, db, dgiven, apart = t.own_b, both[0], both[1], x.new_empty(0), both.stride(0)
    else:
        b, da, dgiven, apart = t.b, empty_factor(x, call.hidden), empty_gradient_of_b(t), 0
        db = dgiven
    if t.outgoing:
        _multiply(dproduct, b, da)
        _multiply(dproduct.mT, t.a, db)
    else:
        _multiply(b, dproduct, da)
        _multiply(t.a, dproduct.mT, db)

    # Rows of the weight for a, b and their gates. The rest are for the product's gate.
    rows = 4 * call.hidden
    of_out = dweight[rows:], dbias[rows:], dout_weight, dout_bias
    kernel = call.tiled(OUT_WEIGHT)
    chunks = cdiv(call.channels, kernel["BLOCK_O"])
    partials = call.span_partials(kernel, chunks, of_out)
    call.launch(kernel, (chunks, len(partials)), read, partials=partials)
    sums += [Sum(partials, of_out), call.factor_sums(da, apart, (dweight, dbias))]
    dx, partials = call.write_dx(da, apart, grad=call.turned(t.grad), dgate=read["dgate"])
    sum_partials(*sums, Sum(partials, (dnorm, or_unwanted(dnorm_bias, partials, call.channels))))
    return dx, dgiven, *gradients


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Multiply matrices [*, i, k] by [*, k, j] and write the products directly to out [*, i, j]."""
    # A column-major result is the transpose of the product of transposes.
    if out.stride(-1) != 1:
        left, right, out = right.mT, left.mT, out.mT
    torch.bmm(left.flatten(0, -3), right.flatten(0, -3), out=out.flatten(0, -3))


class _Call:
    """The arguments of the kernels of a call by name; each kernel uses some of them.

    first, count: the factors that are computed from x: a (0) and b (1), or one of them.
    If x is narrow, kernels see it with rows and columns exchanged, because long rows have little padding.
    """

    def __init__(self, t: Operands, first: int, count: int) -> None:
        self.narrow, self.out = is_narrow(t.x), t.x
        if self.narrow and getattr(t, "factors", None) is not None:
            t = t.but(factors=t.factors.expand(t.x.shape).transpose(-3, -2))
        elif self.narrow and getattr(t, "strides", None):
            *leading, i, k, c = t.strides
            t = t.but(strides=[*leading, k, i, c])
        x = self.x = self.turned(t.x)
        *_, self.rows, self.n, self.channels = x.shape
        self.hidden, self.count, self.pitch = factor_channels(t.weight), count, row_pitch(x)
        self.batches = x.numel() // (self.rows * self.n * self.channels)
        self.positions = self.batches * self.rows * self.pitch
        self.tensors = {"x": x, "mask": self.turned(t.mask[..., None]), "mean": self.turned(t.mean[..., None])}
        whole = "norm_weight", "norm_bias", "bias", "out_norm_weight", "out_norm_bias", "out_bias"
        self.arguments: dict[str, Any] = {
            **{name: contiguous(getattr(t, name)) for name in whole if hasattr(t, name)},
            "weight": cast_weight(t.weight, x, self.positions),
            "rstd": t.scale,
            "n": self.n,
            "C": self.channels,
            "HIDDEN": self.hidden,
            "BIASED": 0 if t.bias is None else len(t.bias),
            "FUSED": t.fused,
            "FIRST": first,
            "FACTORS": count,
            "RESIDUAL": getattr(t, "residual", False),
            "PADDED": self.pitch != self.n,
            "BLOCK_C": power_of_two(self.channels),
            "BLOCK_H": power_of_two(self.hidden),
        }
        if hasattr(t, "out_weight"):
            dropout = DropoutOperands(x, t)
            if dropout.of is not None and dropout.key is not None and not _one_axis(dropout.of):
                # Kernels iterate over a single leading axis.
                dropout.draw_distinct(x)
            if dropout.of is not None:
                self.tensors["factors"] = dropout.of
            self.arguments |= {
                "out_weight": cast_weight(t.out_weight, x, self.positions),
                "out_mean": t.out_mean,
                "out_rstd": t.out_scale,
                **dropout.arguments,
            }

    def turned(self, t: Tensor) -> Tensor:
        """View t [*, i, k, .] as the kernels see it."""
        return t.transpose(-3, -2) if self.narrow else t

    def plane(self, t: Tensor) -> Tensor:
        """View planes [*, h, i, k] as the kernels see them, [*, i, k, h]."""
        return self.turned(t.movedim(-3, -1))

    def tiled(self, kernel: Kernel) -> TiledKernel:
        """Return a kernel with its configuration for the channels of the call."""
        return kernel.tiled((power_of_two(max(self.channels, self.hidden)),), self.x)

    def blocks(self, kernel: TiledKernel) -> int:
        """Return the number of blocks of positions."""
        return cdiv(self.positions, kernel["BLOCK_M"])

    def write_factors(self, planes: dict[str, Tensor], eps: float) -> None:
        """Compute the factors, given by name, and the statistics of x."""
        kernel = self.tiled(FACTORS)
        self.launch(kernel, (self.blocks(kernel),), {name: self.plane(t) for name, t in planes.items()}, eps=eps)

    def write_dx(self, dfactors: Tensor, apart: int, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradient of x, and partials for its norm.

        dfactors: the gradient of the first factor; `apart` elements later starts that of the second.
        tensors: the gradients of the output and of the gate's logits, if there is a product.
        """
        dx, kernel = empty_like(self.out), self.tiled(FACTORS_BACKWARD)
        partials = empty_partials(self.x, self.blocks(kernel), 2 * self.channels)
        with self.written(dx) as y:
            given = {**tensors, "dx": y, "dfactors": self.plane(dfactors)}
            self.launch(kernel, (self.blocks(kernel),), given, partials=partials, apart=apart)
        return dx, partials

    def factor_sums(self, dfactors: Tensor, apart: int, gradients: Sequence[Tensor]) -> Sum:
        """Compute partial sums for the gradients of the rows of weight and bias for factors and their gates.

        dfactors, apart: see `write_dx`.
        """
        wanted = tuple([gradient[: 4 * self.hidden] for gradient in gradients])
        kernel = self.tiled(FACTORS_WEIGHT)
        chunks = self.count * cdiv(self.hidden, kernel["BLOCK_O"])
        partials = self.span_partials(kernel, chunks, wanted)
        # The kernel omits the rows of the other factor.
        if self.count == 1:
            partials.zero_()
        self.launch(kernel, (chunks, len(partials)), {"dfactors": self.plane(dfactors)}, partials=partials, apart=apart)
        return Sum(partials, wanted)

    def span_partials(self, kernel: TiledKernel, chunks: int, sums: Sequence[Tensor]) -> Tensor:
        """Allocate the partial sums of programs: a row for each span of positions, which `chunks` programs share."""
        # A program of eight warps occupies a whole core, because its sums fill the registers.
        programs = PROGRAMS * 4 // kernel.config.warps
        spans = programs_for(self.positions, kernel["BLOCK_M"], max(1, programs // chunks))
        return empty_partials(self.x, spans, sum(t.numel() for t in sums))

    def launch(self, kernel: TiledKernel, grid: tuple[int, ...], tensors: dict[str, Tensor], **more: Any) -> None:
        """Launch a kernel over tensors [*, rows, n, .], including those of the layer."""
        names = kernel.kernel.function.arg_names
        walked = {name: self.flat(t) for name, t in (self.tensors | tensors).items() if name in names}
        strides = tuple([t.stride() for t in walked.values()])
        axes, layouts = _walk(self.batches, self.rows, self.pitch, strides)
        strided = {name: Strided(t, *layout) for (name, t), layout in zip(walked.items(), layouts)}
        key = self.arguments.get("key")
        # As in `DropoutOperands.walked_with`.
        if key is not None and "factors" in strided:
            strided["factors"] = strided["factors"]._replace(data=key)
        arguments = {**dict.fromkeys(OPTIONAL), **self.arguments, **strided, "axes": axes, **more}
        kernel.run(grid, **{name: arguments[name] for name in names if name in arguments})

    def flat(self, t: Tensor) -> Tensor:
        """Return t [*, rows, n, .] with a single leading axis: a view, or a copy."""
        return t.reshape(self.batches, *t.shape[-3:])

    @contextmanager
    def written(self, out: Tensor) -> Iterator[Tensor]:
        """Yield a writable view [., rows, n, c] of `out`, or a staging buffer that is copied back on exit."""
        out = self.turned(out)
        if _one_axis(out):
            yield self.flat(out)
            return
        apart = out.new_empty(self.batches, *out.shape[-3:])
        yield apart
        out.copy_(apart.view(out.shape))


@functools.lru_cache(maxsize=4096)
def _walk(
    batches: int, rows: int, pitch: int, strides: tuple[tuple[int, ...], ...]
) -> tuple[Axes, tuple[tuple[tuple[int, ...], Any], ...]]:
    """Compute the axes of positions, and the strides and unit of a `Strided` for tensors [., rows, n, .].

    Positions are in the order of rows with the padding of planes; without padding they may be one axis.
    """
    coalesced = coalesce((batches, rows, pitch), (rows * pitch, pitch, 1), *(stride[:3] for stride in strides))
    assert coalesced is not None  # at most three axes
    laid = (Strided.of(None, steps, 8, stride[3]) for steps, stride in zip(coalesced.strides[1:], strides))
    return coalesced.argument, tuple((strided.strides, strided.unit) for strided in laid)


def _one_axis(t: Tensor) -> bool:
    """Return whether the leading axes of t [*, n, n, c] are contiguous; otherwise `_Call.flat` copies t."""
    leading = [(size, stride) for size, stride in zip(t.shape[:-3], t.stride()) if size != 1]
    return all(outer == size * inner for (_, outer), (size, inner) in pairwise(leading))
