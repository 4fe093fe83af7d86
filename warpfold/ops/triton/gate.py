"""gate on a GPU, element by element, for tensors of any strides; triangle_factor uses its kernels to change a layout.

Forward it reads x and g and writes y; backward it reads grad, x, g and writes dx, dg.  gated_linear_residual has a file
of its own.
"""

import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.tensors import empty_like
from warpfold.ops.triton.gated_linear_residual import gated_linear_residual as gated_linear_residual
from warpfold.ops.triton.gated_linear_residual import gated_linear_residual_backward as gated_linear_residual_backward
from warpfold.ops.triton.launch import Kernel, configs, register
from warpfold.ops.triton.positions import Positions, offsets, pointers


@triton.jit
def gate_kernel(
    x: tl.tuple,
    g: tl.tuple,
    mask: tl.tuple,
    y: tl.tuple,
    axes: tl.tuple,
    C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Store y = x * sigmoid(g), times the mask of the position where there is one."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid = (m < axes.positions)[:, None] & (c < C)[None, :]
    v = tl.load(pointers(x, m, c, axes), mask=valid, other=0).to(tl.float32)
    gate_values = tl.sigmoid(tl.load(pointers(g, m, c, axes), mask=valid, other=0).to(tl.float32))
    if mask is not None:
        kept = tl.load(mask.data + offsets(mask, m, axes), mask=m < axes.positions, other=0).to(tl.float32)
        gate_values = gate_values * kept[:, None]
    tl.store(pointers(y, m, c, axes), (v * gate_values).to(y.data.dtype.element_ty), mask=valid)


@triton.jit
def gate_backward_kernel(
    grad: tl.tuple,
    x: tl.tuple,
    g: tl.tuple,
    mask: tl.tuple,
    dx: tl.tuple,
    dg: tl.tuple,
    axes: tl.tuple,
    C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Store dx = grad * sigmoid(g) and dg = grad * x * sigmoid'(g), with the mask where there is one."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid = (m < axes.positions)[:, None] & (c < C)[None, :]
    dy = tl.load(pointers(grad, m, c, axes), mask=valid, other=0).to(tl.float32)
    if mask is not None:
        kept = tl.load(mask.data + offsets(mask, m, axes), mask=m < axes.positions, other=0).to(tl.float32)
        dy = dy * kept[:, None]
    v = tl.load(pointers(x, m, c, axes), mask=valid, other=0).to(tl.float32)
    gate_values = tl.sigmoid(tl.load(pointers(g, m, c, axes), mask=valid, other=0).to(tl.float32))
    dv = dy * gate_values
    tl.store(pointers(dx, m, c, axes), dv.to(dx.data.dtype.element_ty), mask=valid)
    tl.store(pointers(dg, m, c, axes), (dv * v * (1 - gate_values)).to(dg.data.dtype.element_ty), mask=valid)


_CANDIDATES = configs(
    "BLOCK_M BLOCK_C",
    *(
        (size // c, c, warps, 1)
        for size, warps in ((1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8))
        for c in (16, 64, 128, 256)
    ),
)
FORWARD = register("gate", gate_kernel, _CANDIDATES)
BACKWARD = register("gate_backward", gate_backward_kernel, _CANDIDATES)


def gate(x: Tensor, g: Tensor) -> Tensor:
    """Compute warpfold::gate."""
    out = empty_like(x)
    x, g, y = _innermost_last(x, g, out)
    run_gate(FORWARD, x, g, None, y)
    return out


def gate_backward(grad: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Compute warpfold::gate_backward."""
    out = empty_like(x), empty_like(g)
    x, g, grad, dx, dg = _innermost_last(x, g, grad, *out)
    run_gate_backward(BACKWARD, grad, x, g, None, dx, dg)
    return out


def run_gate(of: Kernel, x: Tensor, g: Tensor, mask: Tensor | None, y: Tensor) -> None:
    """Write x * sigmoid(g) into y, all [*, c] of any strides, times the mask [*]."""
    c, kept = x.shape[-1], None if mask is None else mask[..., None]
    p = Positions({"x": x, "g": g, "mask": kept}, writes={"y": y})
    kernel = of.tiled((c, x.element_size()), x)
    kernel.run((triton.cdiv(p.count, kernel["BLOCK_M"]), triton.cdiv(c, kernel["BLOCK_C"])), **p.arguments, C=c)
    p.copy_back()


def run_gate_backward(
    of: Kernel, grad: Tensor, x: Tensor, g: Tensor, mask: Tensor | None, dx: Tensor, dg: Tensor
) -> None:
    """Write the gradients of x and g into dx and dg, given that of the output of `run_gate`."""
    c, kept = x.shape[-1], None if mask is None else mask[..., None]
    p = Positions({"x": x, "g": g, "grad": grad, "mask": kept}, writes={"dx": dx, "dg": dg})
    kernel = of.tiled((c, x.element_size()), x)
    kernel.run((triton.cdiv(p.count, kernel["BLOCK_M"]), triton.cdiv(c, kernel["BLOCK_C"])), **p.arguments, C=c)
    p.copy_back()


def _innermost_last(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return views whose last axis is the one that lies innermost in memory in the first of them."""
    x = tensors[0]
    axes = [axis for axis in range(x.dim()) if x.shape[axis] != 1] or [x.dim() - 1]
    inner = min(reversed(axes), key=x.stride)
    return tuple(t.transpose(inner, -1) for t in tensors)
