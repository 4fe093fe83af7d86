"""Kernels of the forward pass of triangle_multiplication: its factors, and what follows their product."""

import triton
import triton.language as tl

from warpfold.ops.triton.gated_linear_residual import dropout_tile
from warpfold.ops.triton.launch import configs, register
from warpfold.ops.triton.noise import SCALARS
from warpfold.ops.triton.norm_tiles import shifted, statistics
from warpfold.ops.triton.positions import offsets, pointers
from warpfold.ops.triton.triangle_tiles import biased, in_memory, load_normed, present_of, rows_of


@triton.jit
def _store_factor(
    plane: tl.tuple,
    n1: tl.tensor,
    kept: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    m: tl.tensor,
    axes: tl.tuple,
    VALUES: tl.constexpr,
    GATES: tl.constexpr,
    C: tl.constexpr,
    HIDDEN: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_O: tl.constexpr,
) -> None:
    """Store a factor; the rows of the weight that make it begin at VALUES, those that make its gate at GATES."""
    c = tl.arange(0, BLOCK_C)
    for start in range(0, HIDDEN, BLOCK_O):
        o = start + tl.arange(0, BLOCK_O)
        y = tl.dot(n1, rows_of(weight, VALUES, o, c, n1.dtype, HIDDEN, C))
        g = tl.dot(n1, rows_of(weight, GATES, o, c, n1.dtype, HIDDEN, C))
        y = biased(y, bias, VALUES, o, HIDDEN, BIASED)
        y = y * tl.sigmoid(biased(g, bias, GATES, o, HIDDEN, BIASED)) * kept[:, None]
        # What pads a row of the plane is written too.
        tl.store(pointers(plane, m, o, axes), y.to(plane.data.dtype.element_ty), mask=in_memory(m, o, axes, HIDDEN))


@triton.jit
def _factors_forward(
    x: tl.tuple,
    mask: tl.tuple,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    a: tl.tuple,
    b: tl.tuple,
    mean: tl.tuple,
    rstd: tl.tensor,
    axes: tl.tuple,
    n: tl.tensor,
    eps: tl.tensor,
    C: tl.constexpr,
    HIDDEN: tl.constexpr,
    BIASED: tl.constexpr,
    FUSED: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
) -> None:
    """Store both factors and the statistics of x: all channels of BLOCK_M positions."""
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
    _store_factor(a, n1, kept, weight, bias, m, axes, 0, A_GATES, C, HIDDEN, BIASED, BLOCK_C, BLOCK_O)
    _store_factor(b, n1, kept, weight, bias, m, axes, B, 3 * HIDDEN, C, HIDDEN, BIASED, BLOCK_C, BLOCK_O)


@triton.jit(do_not_specialize=SCALARS)
def _out_forward(
    x: tl.tuple,
    product: tl.tuple,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out_norm_weight: tl.tensor,
    out_norm_bias: tl.tensor,
    out_weight: tl.tensor,
    out_bias: tl.tensor,
    factors: tl.tuple,
    key: tl.tensor,
    y: tl.tuple,
    mean: tl.tuple,
    rstd: tl.tensor,
    out_mean: tl.tensor,
    out_rstd: tl.tensor,
    axes: tl.tuple,
    n: tl.tensor,
    eps: tl.tensor,
    number: tl.tensor,
    word: tl.tensor,
    rate: tl.tensor,
    scale: tl.tensor,
    C: tl.constexpr,
    HIDDEN: tl.constexpr,
    BIASED: tl.constexpr,
    PADDED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
) -> None:
    """Store y = x + factors * (linear(norm(product)) * sigmoid(gate of x)), and the statistics of the product.

    RESIDUAL: with x, or without it.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c, h = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_H)
    present = present_of(m, axes, n, PADDED)
    known = present[:, None] & (h < HIDDEN)[None, :]
    v = tl.load(pointers(product, m, h, axes), mask=in_memory(m, h, axes, HIDDEN), other=0).to(tl.float32)
    if PADDED:
        v = tl.where(known, v, 0.0)  # nobody wrote what pads the product's rows
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


_CANDIDATES = configs(
    "BLOCK_M BLOCK_O",
    *((64, o, w, s) for o in (32, 64) for w in (4, 8) for s in (2, 3)),
    *((128, o, 8, s) for o in (32, 64) for s in (2, 3)),
    (64, 16, 8, 2),  # of 256 channels
)
FACTORS = register("triangle_factors", _factors_forward, _CANDIDATES)
OUT = register("triangle_out", _out_forward, _CANDIDATES)
