"""The kernels of norm_linear: the norm lives inside the projection that follows it.

`_norm_linear` holds the normalised channels of its positions and multiplies them by one tile of the weight after
another: x is read once, whatever the number of outputs.  `_norm_linear_wide` is for channels that do not fit, and for
fp32, whose products are not made by tensor cores and must be cut into short ones.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.triton.launch import Kernel, Launch, register
from warpfold.ops.triton.norm_kernels import statistics
from warpfold.ops.triton.positions import offsets, tile


@triton.jit
def _norm_linear(
    x: tl.tensor,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    mean: tl.tensor,
    scale: tl.tensor,
    rows: tl.tensor,
    sizes: tl.tuple,
    x_at: tl.tuple,
    y_at: tl.tuple,
    s_at: tl.tuple,
    eps: tl.tensor,
    C: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PADDED: tl.constexpr,
    BIAS: tl.constexpr,
    AXES: tl.constexpr,
    X_UNIT: tl.constexpr,
    Y_UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
) -> None:
    """y = layer_norm(x) weight^T + bias, and the statistics: all outputs of BLOCK_M positions."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    keep = (m < rows)[:, None] & (c < C)[None, :]
    v = tl.load(x + tile(m, c, sizes, x_at, AXES, X_UNIT), mask=keep, other=0).to(tl.float32)
    w = tl.load(norm_weight + c, mask=c < C, other=0).to(tl.float32)
    b = tl.load(norm_bias + c, mask=c < C, other=0).to(tl.float32)
    d, centre, s = statistics(v, keep, eps, C)
    n = (d * s[:, None] * w[None, :] + b[None, :]).to(y.dtype.element_ty)
    at = offsets(m, sizes, s_at, AXES, 1)
    tl.store(mean + at, centre, mask=m < rows)
    tl.store(scale + at, s, mask=m < rows)
    place = y + offsets(m, sizes, y_at, AXES, Y_UNIT)[:, None]
    # What pads a position's outputs to a multiple of eight is ours too: written, so that every word is a wide one.
    for start in range(0, OUTPUTS, BLOCK_O):
        o = start + tl.arange(0, BLOCK_O)
        wt = tl.load(weight + o[None, :] * C + c[:, None], mask=(o < OUTPUTS)[None, :] & (c < C)[:, None], other=0)
        out = tl.dot(n, wt.to(n.dtype), input_precision="ieee")
        if BIAS:
            out += tl.load(bias + o, mask=o < OUTPUTS, other=0).to(tl.float32)[None, :]
        tl.store(place + o[None, :], out.to(y.dtype.element_ty), mask=(m < rows)[:, None] & (o < PADDED)[None, :])


@triton.jit
def _norm_linear_wide(
    x: tl.tensor,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    mean: tl.tensor,
    scale: tl.tensor,
    rows: tl.tensor,
    sizes: tl.tuple,
    x_at: tl.tuple,
    y_at: tl.tuple,
    s_at: tl.tuple,
    eps: tl.tensor,
    C: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PADDED: tl.constexpr,
    BIAS: tl.constexpr,
    AXES: tl.constexpr,
    X_UNIT: tl.constexpr,
    Y_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """The same, BLOCK_O outputs of BLOCK_M positions; BLOCK_K channels at a time, first for the statistics."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    k = tl.arange(0, BLOCK_K)
    place = x + offsets(m, sizes, x_at, AXES, X_UNIT)[:, None]
    centre = tl.zeros([BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, C, BLOCK_K):
        keep = (m < rows)[:, None] & (start + k < C)[None, :]
        v = tl.load(place + ((start + k).to(tl.int64) * x_at[3])[None, :], mask=keep, other=0).to(tl.float32)
        # Of this block by itself, then joined with those before: no difference of large numbers (Chan et al., 1979).
        size = tl.sum(tl.where(start + k < C, 1.0, 0.0), 0)
        level = tl.sum(v, 1) / size
        d = tl.where(keep, v - level[:, None], 0.0)
        rest = tl.sum(d, 1) / size
        d = tl.where(keep, d - rest[:, None], 0.0)
        apart = level - centre + rest
        share = size / (size + start)
        centre += apart * share
        squares += tl.sum(d * d, 1) + apart * apart * (share * start)
    s = tl.rsqrt(squares / C + eps)
    out = tl.zeros([BLOCK_M, BLOCK_O], tl.float32)
    for start in range(0, C, BLOCK_K):
        c = start + k
        keep = (m < rows)[:, None] & (c < C)[None, :]
        v = tl.load(place + (c.to(tl.int64) * x_at[3])[None, :], mask=keep, other=0).to(tl.float32)
        w = tl.load(norm_weight + c, mask=c < C, other=0).to(tl.float32)
        b = tl.load(norm_bias + c, mask=c < C, other=0).to(tl.float32)
        n = ((v - centre[:, None]) * s[:, None] * w[None, :] + b[None, :]).to(y.dtype.element_ty)
        wt = tl.load(weight + o[None, :] * C + c[:, None], mask=(o < OUTPUTS)[None, :] & (c < C)[:, None], other=0)
        out = tl.dot(n, wt.to(n.dtype), out, input_precision="ieee")
    if BIAS:
        out += tl.load(bias + o, mask=o < OUTPUTS, other=0).to(tl.float32)[None, :]
    place = y + offsets(m, sizes, y_at, AXES, Y_UNIT)[:, None]
    tl.store(place + o[None, :], out.to(y.dtype.element_ty), mask=(m < rows)[:, None] & (o < PADDED)[None, :])
    if tl.program_id(1) == 0:
        at = offsets(m, sizes, s_at, AXES, 1)
        tl.store(mean + at, centre, mask=m < rows)
        tl.store(scale + at, s, mask=m < rows)


@triton.jit
def _norm_linear_backward(
    grad: tl.tensor,
    x: tl.tensor,
    norm_weight: tl.tensor,
    weight: tl.tensor,
    mean: tl.tensor,
    scale: tl.tensor,
    dx: tl.tensor,
    partials: tl.tensor,
    rows: tl.tensor,
    sizes: tl.tuple,
    g_at: tl.tuple,
    x_at: tl.tuple,
    d_at: tl.tuple,
    s_at: tl.tuple,
    C: tl.constexpr,
    OUTPUTS: tl.constexpr,
    AXES: tl.constexpr,
    G_UNIT: tl.constexpr,
    X_UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
) -> None:
    """dx, through the projection and then the norm; partials [programs, 2 C] as of `layer_norm`'s backward kernel.

    One block of positions a program: a loop over blocks costs 60 registers, and with them half of the warps.
    """
    c = tl.arange(0, BLOCK_C)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    place = grad + offsets(m, sizes, g_at, AXES, G_UNIT)[:, None]
    dn = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for start in range(0, OUTPUTS, BLOCK_O):
        o = start + tl.arange(0, BLOCK_O)
        dy = tl.load(place + o[None, :], mask=(m < rows)[:, None] & (o < OUTPUTS)[None, :], other=0)
        wt = tl.load(weight + o[:, None] * C + c[None, :], mask=(o < OUTPUTS)[:, None] & (c < C)[None, :], other=0)
        dn = tl.dot(dy, wt.to(dy.dtype), dn, input_precision="ieee")
    keep = (m < rows)[:, None] & (c < C)[None, :]
    v = tl.load(x + tile(m, c, sizes, x_at, AXES, X_UNIT), mask=keep, other=0).to(tl.float32)
    at = offsets(m, sizes, s_at, AXES, 1)
    centre = tl.load(mean + at, mask=m < rows, other=0)
    s = tl.load(scale + at, mask=m < rows, other=0)
    n = tl.where(keep, (v - centre[:, None]) * s[:, None], 0.0)
    dw = tl.sum(dn * n, 0)
    db = tl.sum(dn, 0)
    w = tl.load(norm_weight + c, mask=c < C, other=0).to(tl.float32)
    dn = dn * w[None, :]
    along = tl.sum(dn * n, 1) / C
    level = tl.sum(dn, 1) / C
    out = (dn - level[:, None] - n * along[:, None]) * s[:, None]
    tl.store(dx + tile(m, c, sizes, d_at, AXES, X_UNIT), out.to(dx.dtype.element_ty), mask=keep)
    place = partials + tl.program_id(0).to(tl.int64) * (2 * C) + c
    tl.store(place, dw, mask=c < C)
    tl.store(place + C, db, mask=c < C)


@triton.jit
def _norm_linear_weight(
    grad: tl.tensor,
    x: tl.tensor,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    mean: tl.tensor,
    scale: tl.tensor,
    partials: tl.tensor,
    rows: tl.tensor,
    sizes: tl.tuple,
    g_at: tl.tuple,
    x_at: tl.tuple,
    s_at: tl.tuple,
    C: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    AXES: tl.constexpr,
    G_UNIT: tl.constexpr,
    X_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Into partials [programs, OUTPUTS (C + BIAS)]: a tile of dy^T layer_norm(x), and of the sum of dy, of a span."""
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    w = tl.load(norm_weight + c, mask=c < C, other=0).to(tl.float32)
    b = tl.load(norm_bias + c, mask=c < C, other=0).to(tl.float32)
    each = tl.cdiv(tl.cdiv(rows, BLOCK_M), tl.num_programs(2))
    first = tl.program_id(2) * each * BLOCK_M
    last = min(rows, first + each * BLOCK_M)
    dw = tl.zeros([BLOCK_O, BLOCK_C], tl.float32)
    db = tl.zeros([BLOCK_O], tl.float32)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        at = offsets(m, sizes, g_at, AXES, G_UNIT)
        dy = tl.load(grad + at[:, None] + o[None, :], mask=(m < rows)[:, None] & (o < OUTPUTS)[None, :], other=0)
        keep = (m < rows)[:, None] & (c < C)[None, :]
        v = tl.load(x + tile(m, c, sizes, x_at, AXES, X_UNIT), mask=keep, other=0).to(tl.float32)
        at = offsets(m, sizes, s_at, AXES, 1)
        centre = tl.load(mean + at, mask=m < rows, other=0)
        s = tl.load(scale + at, mask=m < rows, other=0)
        n = (v - centre[:, None]) * s[:, None] * w[None, :] + b[None, :]
        dw = tl.dot(tl.trans(dy), n.to(dy.dtype), dw, input_precision="ieee")
        if BIAS:
            db += tl.sum(dy.to(tl.float32), 0)
    place = partials + tl.program_id(2).to(tl.int64) * (OUTPUTS * (C + BIAS))
    tl.store(place + o[:, None] * C + c[None, :], dw, mask=(o < OUTPUTS)[:, None] & (c < C)[None, :])
    if BIAS and tl.program_id(1) == 0:
        tl.store(place + OUTPUTS * C + o, db, mask=o < OUTPUTS)


def launches(names: str, *tiles: tuple[int, ...]) -> tuple[Launch, ...]:
    """One launch of each tile: its sizes in the order of their names (BLOCK_ and a letter), then warps and stages."""
    return tuple(Launch(dict(zip((f"BLOCK_{n}" for n in names), t)), t[-2], t[-1]) for t in tiles)


@dataclass(frozen=True)
class ByPrecision:
    """A kernel with launches for 16 bits, and, by another name, for fp32: products without tensor cores are made of
    operands in registers, and tiles that suit the one do not run with the other."""

    narrow: Kernel
    fp32: Kernel

    def of(self, x: Tensor) -> Kernel:
        """The one for tensors of the dtype of x."""
        return self.narrow if x.element_size() == 2 else self.fp32


def by_precision(name: str, function: Any, narrow: tuple[Launch, ...], fp32: tuple[Launch, ...]) -> ByPrecision:
    """Both, registered."""
    return ByPrecision(register(Kernel(name, function, narrow)), register(Kernel(f"{name}_fp32", function, fp32)))


FORWARD = register(
    Kernel(
        "norm_linear",
        _norm_linear,
        launches("MO", *((m, o, w, s) for m, w in ((64, 4), (64, 8), (128, 8)) for o in (16, 64, 128) for s in (2, 3))),
    )
)
WIDE = by_precision(
    "norm_linear_wide",
    _norm_linear_wide,
    launches("MOK", *((m, 64, k, w, s) for m, w in ((64, 4), (128, 8)) for k in (32, 64) for s in (2, 3))),
    launches("MOK", (32, 32, 32, 4, 1), (64, 64, 16, 8, 1), (64, 32, 16, 4, 1)),
)
BACKWARD = by_precision(
    "norm_linear_backward",
    _norm_linear_backward,
    launches(
        "MO",
        *((m, o, 8, s) for m in (16, 32, 64) for o in (16, 32, 64) for s in (2, 3)),
        *((m, o, 4, 2) for m in (16, 32, 64) for o in (16, 32)),
        *((128, o, 16, 2) for o in (32, 64)),
    ),
    launches("MO", (16, 16, 4, 1), (16, 16, 8, 1), (32, 16, 8, 1)),
)
WEIGHT = by_precision(
    "norm_linear_weight",
    _norm_linear_weight,
    launches(
        "MOC",
        *((m, 128, 128, 8, s) for m in (32, 64) for s in (2, 3)),
        *((m, 64, 128, w, s) for m in (32, 64) for w in (4, 8) for s in (2, 3)),
        *((64, o, 64, w, s) for o, w in ((64, 4), (128, 8)) for s in (2, 3)),
        *((64, 16, c, 4, 2) for c in (64, 128)),
    ),
    launches("MOC", (16, 64, 64, 4, 1), (32, 64, 64, 8, 1), (16, 16, 64, 4, 1)),
)
