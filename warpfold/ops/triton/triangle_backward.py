"""Kernels of the backward pass of triangle_multiplication: gradients of its product, of its operand and of norms."""

import triton
import triton.language as tl

from warpfold.ops.triton.gated_linear_residual import dropout_tile
from warpfold.ops.triton.launch import configs, register
from warpfold.ops.triton.noise import SCALARS
from warpfold.ops.triton.positions import offsets, pointers
from warpfold.ops.triton.triangle_tiles import biased, in_memory, load_normed, norm_backward, present_of, rows_of


@triton.jit(do_not_specialize=SCALARS)
def _out_backward(
    grad: tl.tuple,
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
    mean: tl.tuple,
    rstd: tl.tensor,
    out_mean: tl.tensor,
    out_rstd: tl.tensor,
    dproduct: tl.tuple,
    dprojected: tl.tuple,
    dgate: tl.tuple,
    partials: tl.tensor,
    axes: tl.tuple,
    n: tl.tensor,
    number: tl.tensor,
    word: tl.tensor,
    rate: tl.tensor,
    scale: tl.tensor,
    C: tl.constexpr,
    HIDDEN: tl.constexpr,
    BIASED: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
) -> None:
    """Store the gradients of the product, of what it is projected to and of its gate's logits; and partials of the
    second norm's."""
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
    plane: tl.tensor,
    like: tl.tuple,
    n1: tl.tensor,
    kept: tl.tensor,
    value_rows: tl.tensor,
    gate_rows: tl.tensor,
    bias: tl.tensor,
    values: tl.tensor,
    gates: tl.tensor,
    m: tl.tensor,
    o: tl.tensor,
    axes: tl.tuple,
    HIDDEN: tl.constexpr,
    BIASED: tl.constexpr,
) -> tl.tuple:
    """Return the gradients of a factor's projection and of its gate's logits, [m, o] in the dtype of n1.

    plane: where the factor's gradient begins, with the strides of `like`.  value_rows, gate_rows [c, o]: the rows of
    the weight that make these channels, transposed; the first of their kind stand at `values` and `gates`.
    """
    at = offsets(like, m, axes)[:, None] + (o.to(tl.int64) * like.strides[3])[None, :]
    d = tl.load(plane + at, mask=in_memory(m, o, axes, HIDDEN), other=0).to(tl.float32)
    d = tl.where((kept != 0)[:, None], d * kept[:, None], 0.0)  # nobody wrote what pads the rows
    y = biased(tl.dot(n1, value_rows), bias, values, o, HIDDEN, BIASED)
    gate_values = tl.sigmoid(biased(tl.dot(n1, gate_rows), bias, gates, o, HIDDEN, BIASED))
    dy = d * gate_values
    return dy.to(n1.dtype), (dy * y * (1 - gate_values)).to(n1.dtype)


@triton.jit
def _add_factor(
    dn: tl.tensor,
    plane: tl.tensor,
    like: tl.tuple,
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
) -> tl.tensor:
    """Return dn, and what a factor adds to it: the gradient of the normalised x."""
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
    grad: tl.tuple,
    x: tl.tuple,
    mask: tl.tuple,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    mean: tl.tuple,
    rstd: tl.tensor,
    dfactors: tl.tuple,
    dgate: tl.tuple,
    dx: tl.tuple,
    partials: tl.tensor,
    axes: tl.tuple,
    n: tl.tensor,
    apart: tl.tensor,
    C: tl.constexpr,
    HIDDEN: tl.constexpr,
    BIASED: tl.constexpr,
    FUSED: tl.constexpr,
    PADDED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
) -> None:
    """Store dx, with the gradient of the residual if there is one; and partials of the first norm's.

    dfactors: the gradient of a and, `apart` elements on, that of b.
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
    dn = _add_factor(dn, da, dfactors, n1, kept, weight, bias, m, axes, 0, A_GATES, C, HIDDEN, BIASED, BLOCK_C, BLOCK_O)
    dn = _add_factor(
        dn, db, dfactors, n1, kept, weight, bias, m, axes, B, 3 * HIDDEN, C, HIDDEN, BIASED, BLOCK_C, BLOCK_O
    )
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


_CANDIDATES = configs(
    "BLOCK_M BLOCK_O",
    *((m, o, 4, 2) for m in (32, 64) for o in (16, 32)),
    *((m, o, 8, s) for m in (64, 128) for o in (32, 64) for s in (2, 3)),
    (32, 16, 8, 2),  # of 256 channels
)
OUT_BACKWARD = register("triangle_out_backward", _out_backward, _CANDIDATES)
FACTORS_BACKWARD = register("triangle_factors_backward", _factors_backward, _CANDIDATES)
