"""The kernels of tail: output projection, bias, gate, shared-axis dropout and residual without a tensor in between."""

import triton
import triton.language as tl

from warpfold.ops.triton.noise import SCALARS, drawn
from warpfold.ops.triton.norm_linear_kernels import by_precision, launches
from warpfold.ops.triton.positions import offsets, tile


@triton.jit
def _kept(
    factors: tl.tensor,
    at: tl.tensor,
    keep: tl.tensor,
    number: tl.tensor,
    word: tl.tensor,
    rate: tl.tensor,
    scale: tl.tensor,
    DRAWN: tl.constexpr,
) -> tl.tensor:
    """Dropout factors in fp32: loaded from `at`, or drawn for the elements number + at; `factors` is the key then."""
    if DRAWN:
        return drawn(factors, number + at, word, rate, scale)
    return tl.load(factors + at, mask=keep, other=0).to(tl.float32)


@triton.jit(do_not_specialize=SCALARS)
def _tail(
    x: tl.tensor,
    o: tl.tensor,
    g: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    factors: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    sizes: tl.tuple,
    x_at: tl.tuple,
    o_at: tl.tuple,
    g_at: tl.tuple,
    f_at: tl.tuple,
    y_at: tl.tuple,
    number: tl.tensor,
    word: tl.tensor,
    rate: tl.tensor,
    scale: tl.tensor,
    C: tl.constexpr,
    INPUTS: tl.constexpr,
    FACTORS: tl.constexpr,
    DRAWN: tl.constexpr,
    AXES: tl.constexpr,
    UNIT: tl.constexpr,
    F_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """y = x + factors * ((o * sigmoid(g)) weight^T + bias): BLOCK_C channels of BLOCK_M positions."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = (m < rows)[:, None]
    from_o = o + offsets(m, sizes, o_at, AXES, UNIT)[:, None]
    from_g = g + offsets(m, sizes, g_at, AXES, UNIT)[:, None]
    out = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        keep = real & (k < INPUTS)[None, :]
        opening = tl.sigmoid(tl.load(from_g + k[None, :], mask=keep, other=0).to(tl.float32))
        h = tl.load(from_o + k[None, :], mask=keep, other=0).to(tl.float32) * opening
        wt = tl.load(weight + c[None, :] * INPUTS + k[:, None], mask=(c < C)[None, :] & (k < INPUTS)[:, None], other=0)
        out = tl.dot(h.to(y.dtype.element_ty), wt.to(y.dtype.element_ty), out, input_precision="ieee")
    out += tl.load(bias + c, mask=c < C, other=0).to(tl.float32)[None, :]
    keep = real & (c < C)[None, :]
    if FACTORS:
        out *= _kept(factors, tile(m, c, sizes, f_at, AXES, F_UNIT), keep, number, word, rate, scale, DRAWN)
    out += tl.load(x + tile(m, c, sizes, x_at, AXES, UNIT), mask=keep, other=0).to(tl.float32)
    tl.store(y + tile(m, c, sizes, y_at, AXES, UNIT), out.to(y.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=SCALARS)
def _tail_backward(
    grad: tl.tensor,
    o: tl.tensor,
    g: tl.tensor,
    weight: tl.tensor,
    factors: tl.tensor,
    do: tl.tensor,
    dg: tl.tensor,
    rows: tl.tensor,
    sizes: tl.tuple,
    y_at: tl.tuple,
    o_at: tl.tuple,
    g_at: tl.tuple,
    f_at: tl.tuple,
    a_at: tl.tuple,
    b_at: tl.tuple,
    number: tl.tensor,
    word: tl.tensor,
    rate: tl.tensor,
    scale: tl.tensor,
    C: tl.constexpr,
    INPUTS: tl.constexpr,
    FACTORS: tl.constexpr,
    DRAWN: tl.constexpr,
    AXES: tl.constexpr,
    UNIT: tl.constexpr,
    F_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """do and dg (strides a, b), from dh = (grad * factors) weight: BLOCK_I inputs of BLOCK_M positions."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    real = (m < rows)[:, None]
    from_grad = grad + offsets(m, sizes, y_at, AXES, UNIT)[:, None]
    of_factors = offsets(m, sizes, f_at, AXES, F_UNIT)[:, None]
    dh = tl.zeros([BLOCK_M, BLOCK_I], tl.float32)
    for start in range(0, C, BLOCK_K):
        c = start + tl.arange(0, BLOCK_K)
        keep = real & (c < C)[None, :]
        dz = tl.load(from_grad + c[None, :], mask=keep, other=0)
        if FACTORS:
            at = of_factors + (c.to(tl.int64) * f_at[3])[None, :]
            kept = _kept(factors, at, keep, number, word, rate, scale, DRAWN)
            dz = (dz.to(tl.float32) * kept).to(dz.dtype)
        wt = tl.load(weight + c[:, None] * INPUTS + i[None, :], mask=(c < C)[:, None] & (i < INPUTS)[None, :], other=0)
        dh = tl.dot(dz, wt.to(dz.dtype), dh, input_precision="ieee")
    keep = real & (i < INPUTS)[None, :]
    at = offsets(m, sizes, o_at, AXES, UNIT)[:, None]
    v = tl.load(o + at + i[None, :], mask=keep, other=0).to(tl.float32)
    at = offsets(m, sizes, g_at, AXES, UNIT)[:, None]
    opening = tl.sigmoid(tl.load(g + at + i[None, :], mask=keep, other=0).to(tl.float32))
    dv = dh * opening
    tl.store(do + tile(m, i, sizes, a_at, AXES, UNIT), dv.to(do.dtype.element_ty), mask=keep)
    tl.store(dg + tile(m, i, sizes, b_at, AXES, UNIT), (dv * v * (1 - opening)).to(dg.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=SCALARS)
def _tail_weight(
    grad: tl.tensor,
    o: tl.tensor,
    g: tl.tensor,
    factors: tl.tensor,
    partials: tl.tensor,
    rows: tl.tensor,
    sizes: tl.tuple,
    y_at: tl.tuple,
    o_at: tl.tuple,
    g_at: tl.tuple,
    f_at: tl.tuple,
    number: tl.tensor,
    word: tl.tensor,
    rate: tl.tensor,
    scale: tl.tensor,
    C: tl.constexpr,
    INPUTS: tl.constexpr,
    FACTORS: tl.constexpr,
    DRAWN: tl.constexpr,
    AXES: tl.constexpr,
    UNIT: tl.constexpr,
    F_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_I: tl.constexpr,
) -> None:
    """Into partials [programs, C INPUTS + C]: a tile of dz^T h, and of the sum of dz, of a span of positions."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    each = tl.cdiv(tl.cdiv(rows, BLOCK_M), tl.num_programs(2))
    first = tl.program_id(2) * each * BLOCK_M
    last = min(rows, first + each * BLOCK_M)
    dw = tl.zeros([BLOCK_C, BLOCK_I], tl.float32)
    db = tl.zeros([BLOCK_C], tl.float32)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        keep = (m < rows)[:, None] & (c < C)[None, :]
        at = offsets(m, sizes, y_at, AXES, UNIT)[:, None]
        dz = tl.load(grad + at + c[None, :], mask=keep, other=0)
        if FACTORS:
            kept = _kept(factors, tile(m, c, sizes, f_at, AXES, F_UNIT), keep, number, word, rate, scale, DRAWN)
            dz = (dz.to(tl.float32) * kept).to(dz.dtype)
        keep = (m < rows)[:, None] & (i < INPUTS)[None, :]
        at = offsets(m, sizes, o_at, AXES, UNIT)[:, None]
        v = tl.load(o + at + i[None, :], mask=keep, other=0).to(tl.float32)
        at = offsets(m, sizes, g_at, AXES, UNIT)[:, None]
        h = v * tl.sigmoid(tl.load(g + at + i[None, :], mask=keep, other=0).to(tl.float32))
        dw = tl.dot(tl.trans(dz), h.to(dz.dtype), dw, input_precision="ieee")
        db += tl.sum(dz.to(tl.float32), 0)
    place = partials + tl.program_id(2).to(tl.int64) * (C * INPUTS + C)
    tl.store(place + c[:, None] * INPUTS + i[None, :], dw, mask=(c < C)[:, None] & (i < INPUTS)[None, :])
    if tl.program_id(1) == 0:
        tl.store(place + C * INPUTS + c, db, mask=c < C)


_TILES = (
    *((64, 64, k, 4, s) for k in (32, 64) for s in (2, 3)),
    *((64, 128, k, w, s) for k in (32, 64) for w in (4, 8) for s in (2, 3)),
    *((64, 256, k, 8, s) for k in (32, 64) for s in (2, 3)),
    *((128, 128, k, 8, s) for k in (32, 64) for s in (2, 3)),
)
_FP32 = ((32, 64, 16, 4, 1), (64, 64, 16, 8, 1))

FORWARD = by_precision("tail", _tail, launches("MCK", *_TILES), launches("MCK", *_FP32))
BACKWARD = by_precision("tail_backward", _tail_backward, launches("MIK", *_TILES), launches("MIK", *_FP32))
WEIGHT = by_precision(
    "tail_weight",
    _tail_weight,
    launches(
        "MCI",
        *((m, 64, 128, 4, s) for m in (32, 64) for s in (2, 3)),
        *((m, 64, 64, 4, s) for m in (32, 64) for s in (2, 3)),
        *((m, 128, 128, 8, s) for m in (32, 64) for s in (2, 3)),
    ),
    launches("MCI", (16, 32, 64, 4, 1), (32, 32, 64, 4, 1), (16, 64, 64, 8, 1), (16, 64, 64, 4, 1)),
)
