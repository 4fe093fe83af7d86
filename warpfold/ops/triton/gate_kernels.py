"""The kernels of gate: place by place, whatever the strides; so they also lay a tensor out anew, as a triangle's factor
is, channels in front."""

import triton
import triton.language as tl

from warpfold.ops.triton.launch import Kernel, Launch, register
from warpfold.ops.triton.positions import offsets, tile


@triton.jit
def _gate(
    x: tl.tensor,
    g: tl.tensor,
    mask: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    sizes: tl.tuple,
    x_at: tl.tuple,
    g_at: tl.tuple,
    mask_at: tl.tuple,
    y_at: tl.tuple,
    C: tl.constexpr,
    MASKED: tl.constexpr,
    AXES: tl.constexpr,
    UNIT: tl.constexpr,
    Y_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """y = x * sigmoid(g), times the mask of the position where there is one."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    keep = (m < rows)[:, None] & (c < C)[None, :]
    v = tl.load(x + tile(m, c, sizes, x_at, AXES, UNIT), mask=keep, other=0).to(tl.float32)
    opening = tl.sigmoid(tl.load(g + tile(m, c, sizes, g_at, AXES, UNIT), mask=keep, other=0).to(tl.float32))
    if MASKED:
        kept = tl.load(mask + offsets(m, sizes, mask_at, AXES, 1), mask=m < rows, other=0).to(tl.float32)
        opening = opening * kept[:, None]
    tl.store(y + tile(m, c, sizes, y_at, AXES, Y_UNIT), (v * opening).to(y.dtype.element_ty), mask=keep)


@triton.jit
def _gate_backward(
    grad: tl.tensor,
    x: tl.tensor,
    g: tl.tensor,
    mask: tl.tensor,
    dx: tl.tensor,
    dg: tl.tensor,
    rows: tl.tensor,
    sizes: tl.tuple,
    y_at: tl.tuple,
    x_at: tl.tuple,
    g_at: tl.tuple,
    mask_at: tl.tuple,
    a_at: tl.tuple,
    b_at: tl.tuple,
    C: tl.constexpr,
    MASKED: tl.constexpr,
    AXES: tl.constexpr,
    UNIT: tl.constexpr,
    Y_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """dx = grad * sigmoid(g), dg = grad * x * sigmoid'(g), with the mask; strides of grad (y), dx (a) and dg (b)."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    keep = (m < rows)[:, None] & (c < C)[None, :]
    dy = tl.load(grad + tile(m, c, sizes, y_at, AXES, Y_UNIT), mask=keep, other=0).to(tl.float32)
    if MASKED:
        kept = tl.load(mask + offsets(m, sizes, mask_at, AXES, 1), mask=m < rows, other=0).to(tl.float32)
        dy = dy * kept[:, None]
    v = tl.load(x + tile(m, c, sizes, x_at, AXES, UNIT), mask=keep, other=0).to(tl.float32)
    opening = tl.sigmoid(tl.load(g + tile(m, c, sizes, g_at, AXES, UNIT), mask=keep, other=0).to(tl.float32))
    dv = dy * opening
    tl.store(dx + tile(m, c, sizes, a_at, AXES, UNIT), dv.to(dx.dtype.element_ty), mask=keep)
    tl.store(dg + tile(m, c, sizes, b_at, AXES, UNIT), (dv * v * (1 - opening)).to(dg.dtype.element_ty), mask=keep)


_TILES = tuple(
    Launch({"BLOCK_M": size // c, "BLOCK_C": c}, warps, 1)
    for size, warps in ((1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8))
    for c in (16, 64, 128, 256)
)

# Whole sectors of memory along both axes: what is read along the one is written along the other.
_TURNING = tuple(
    Launch({"BLOCK_M": m, "BLOCK_C": c}, warps, 1) for m in (32, 64, 128) for c in (32, 64) for warps in (4, 8)
)

FORWARD = register(Kernel("gate", _gate, _TILES))
BACKWARD = register(Kernel("gate_backward", _gate_backward, _TILES))
FACTOR = register(Kernel("triangle_factor", _gate, _TURNING))
FACTOR_BACKWARD = register(Kernel("triangle_factor_backward", _gate_backward, _TURNING))
