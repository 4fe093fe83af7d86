"""The kernels of layer_norm: a program owns some positions, whose channels it holds in registers."""

import triton
import triton.language as tl

from warpfold.ops.triton.launch import Kernel, Launch, register
from warpfold.ops.triton.positions import offsets, tile


@triton.jit
def statistics(v: tl.tensor, keep: tl.tensor, eps: tl.tensor, C: tl.constexpr) -> tl.tuple:
    """Of channels v [m, c] in fp32, 0 where not to keep: deviations from the mean [m, c], mean and 1 / deviation [m].

    The mean is corrected by the mean of the deviations: of channels around 1e4 its first rounding would be seen.
    """
    mean = tl.sum(v, 1) / C
    d = tl.where(keep, v - mean[:, None], 0.0)
    rest = tl.sum(d, 1) / C
    d = tl.where(keep, d - rest[:, None], 0.0)
    return d, mean + rest, tl.rsqrt(tl.sum(d * d, 1) / C + eps)


@triton.jit
def _layer_norm(
    x: tl.tensor,
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
    AXES: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    """y = layer_norm(x) * weight + bias, and the statistics of the positions."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    keep = (m < rows)[:, None] & (c < C)[None, :]
    v = tl.load(x + tile(m, c, sizes, x_at, AXES, UNIT), mask=keep, other=0).to(tl.float32)
    w = tl.load(weight + c, mask=c < C, other=0).to(tl.float32)
    b = tl.load(bias + c, mask=c < C, other=0).to(tl.float32)
    d, centre, s = statistics(v, keep, eps, C)
    n = d * s[:, None] * w[None, :] + b[None, :]
    tl.store(y + tile(m, c, sizes, y_at, AXES, UNIT), n.to(y.dtype.element_ty), mask=keep)
    at = offsets(m, sizes, s_at, AXES, 1)
    tl.store(mean + at, centre, mask=m < rows)
    tl.store(scale + at, s, mask=m < rows)


@triton.jit
def _layer_norm_backward(
    grad: tl.tensor,
    x: tl.tensor,
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
    AXES: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    """dx; and into partials [programs, 2 C] what this program's positions add to the gradients of weight and bias."""
    c = tl.arange(0, BLOCK_C)
    w = tl.load(weight + c, mask=c < C, other=0).to(tl.float32)
    dw = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    db = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        m = block * BLOCK_M + tl.arange(0, BLOCK_M)
        keep = (m < rows)[:, None] & (c < C)[None, :]
        dy = tl.load(grad + tile(m, c, sizes, g_at, AXES, UNIT), mask=keep, other=0).to(tl.float32)
        v = tl.load(x + tile(m, c, sizes, x_at, AXES, UNIT), mask=keep, other=0).to(tl.float32)
        at = offsets(m, sizes, s_at, AXES, 1)
        centre = tl.load(mean + at, mask=m < rows, other=0)
        s = tl.load(scale + at, mask=m < rows, other=0)
        n = tl.where(keep, (v - centre[:, None]) * s[:, None], 0.0)
        dw += dy * n
        db += dy
        dn = dy * w[None, :]
        along = tl.sum(dn * n, 1) / C
        level = tl.sum(dn, 1) / C
        out = (dn - level[:, None] - n * along[:, None]) * s[:, None]
        tl.store(dx + tile(m, c, sizes, d_at, AXES, UNIT), out.to(dx.dtype.element_ty), mask=keep)
    place = partials + tl.program_id(0).to(tl.int64) * (2 * C) + c
    tl.store(place, tl.sum(dw, 0), mask=c < C)
    tl.store(place + C, tl.sum(db, 0), mask=c < C)


_TILES = tuple(Launch({"BLOCK_M": m}, warps, 1) for m in (4, 8, 16, 32, 64) for warps in (2, 4, 8))

FORWARD = register(Kernel("layer_norm", _layer_norm, _TILES))
BACKWARD = register(Kernel("layer_norm_backward", _layer_norm_backward, _TILES))
