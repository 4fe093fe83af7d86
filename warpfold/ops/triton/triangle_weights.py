"""Kernels of the backward pass of triangle_multiplication: the gradients of its two weights and their biases.

Each program owns some channels and runs over a span of positions; for those of a factor it makes the projections again.
What it adds up lies in partials, a row for each span: of the rows of the joined weight that make the factors, and of
their biases; of those that make the product's gate, and of their biases, then of the output's weight and of its bias.
"""

import triton
import triton.language as tl

from warpfold.ops.triton.launch import configs, register
from warpfold.ops.triton.positions import offsets, pointers
from warpfold.ops.triton.triangle_tiles import in_memory, load_normed, present_of, rows_of


@triton.jit
def _span(axes: tl.tuple, BLOCK_M: tl.constexpr) -> tl.tuple:
    """Return the first position of this program's span, and the first that is past it."""
    each = tl.cdiv(tl.cdiv(axes.positions, BLOCK_M), tl.num_programs(1)) * BLOCK_M
    first = tl.program_id(1) * each
    return first, min(axes.positions, first + each)


@triton.jit
def _factors_weight(
    x: tl.tuple,
    mask: tl.tuple,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    mean: tl.tuple,
    rstd: tl.tensor,
    dfactors: tl.tuple,
    partials: tl.tensor,
    axes: tl.tuple,
    n: tl.tensor,
    apart: tl.tensor,
    C: tl.constexpr,
    HIDDEN: tl.constexpr,
    BIASED: tl.constexpr,
    FUSED: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
) -> None:
    """Store what a span adds to the gradients of BLOCK_O channels of a factor and of their gates."""
    CHUNKS: tl.constexpr = (HIDDEN + BLOCK_O - 1) // BLOCK_O
    half = tl.program_id(0) // CHUNKS  # of a, or of b
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
    plane = dfactors.data + half * apart.to(tl.int64) + (o.to(tl.int64) * dfactors.strides[3])[:, None]
    dvalues = tl.zeros([BLOCK_O, BLOCK_C], tl.float32)
    dgates = tl.zeros([BLOCK_O, BLOCK_C], tl.float32)
    value_sums = tl.zeros([BLOCK_O], tl.float32)
    gate_sums = tl.zeros([BLOCK_O], tl.float32)
    first, last = _span(axes, BLOCK_M)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        present = present_of(m, axes, n, PADDED)
        at = offsets(mean, m, axes)
        valid = present[:, None] & (c < C)[None, :]
        _, n1 = load_normed(x, valid, norm_weight, norm_bias, mean.data, rstd, at, m, present, axes, C, BLOCK_C)
        kept = tl.load(mask.data + offsets(mask, m, axes), mask=present, other=0).to(tl.float32)
        # Channels along the rows here, as they lie in a plane: so n1 is an operand from shared memory alone.
        there = (m < axes.positions)[None, :] & (o < HIDDEN)[:, None]
        d = tl.load(plane + offsets(dfactors, m, axes)[None, :], mask=there, other=0).to(tl.float32)
        d = tl.where((kept != 0)[None, :], d * kept[None, :], 0.0)  # nobody wrote what pads the rows
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
    x: tl.tuple,
    product: tl.tuple,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    out_norm_weight: tl.tensor,
    out_norm_bias: tl.tensor,
    out_bias: tl.tensor,
    mean: tl.tuple,
    rstd: tl.tensor,
    out_mean: tl.tensor,
    out_rstd: tl.tensor,
    dprojected: tl.tuple,
    dgate: tl.tuple,
    partials: tl.tensor,
    axes: tl.tuple,
    n: tl.tensor,
    C: tl.constexpr,
    HIDDEN: tl.constexpr,
    BIASED: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
) -> None:
    """Store what a span adds to the gradients of BLOCK_O channels of the output and of their gates."""
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    c, h = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_H)
    dgates = tl.zeros([BLOCK_O, BLOCK_C], tl.float32)
    dout = tl.zeros([BLOCK_O, BLOCK_H], tl.float32)
    gate_sums = tl.zeros([BLOCK_O], tl.float32)
    out_sums = tl.zeros([BLOCK_O], tl.float32)
    first, last = _span(axes, BLOCK_M)
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


_CANDIDATES = configs(
    "BLOCK_M BLOCK_O",
    *((m, o, 4, 2) for m in (32, 64) for o in (16, 32)),
    *((m, o, 8, s) for m in (32, 64, 128) for o in (32, 64) for s in (2, 3)),
    (32, 16, 8, 2),  # of 256 channels
)
FACTORS_WEIGHT = register("triangle_factors_weight", _factors_weight, _CANDIDATES)
OUT_WEIGHT = register("triangle_out_weight", _out_weight, _CANDIDATES)
