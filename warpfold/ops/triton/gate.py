"""gate on a GPU, element by element, for tensors of any strides; triangle_factor uses its kernels to change a layout.

Forward it reads x and g and writes y; backward it reads grad, x, g and writes dx, dg.

gated_linear_residual on a GPU: projection, bias, gate, dropout and residual without a tensor in between.

Forward it reads x, o, g and writes y.  Backward it reads grad, o, g twice, for the gradients of o and g and for that of
the weight, as in `norm_linear`.  One pass for both was tried, for weights of 128 x 128: compiled for sm_80, sm_90 and
gfx942 its registers are spilled.  The kernels' names in launch tables begin with "tail", as the operation was called.
"""

import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.dispatch import Operands
from warpfold.ops.tensors import empty_like, empty_parameters
from warpfold.ops.triton.launch import Kernel, configs, register, register_by_precision
from warpfold.ops.triton.noise import SCALARS, DropoutOperands, dropout_tile
from warpfold.ops.triton.positions import (
    Positions,
    Sum,
    cast_weight,
    cdiv,
    channels_last,
    contiguous,
    empty_partials,
    offsets,
    pointers,
    programs_for,
    sum_partials,
)


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


_GATES = configs(
    "BLOCK_M BLOCK_C",
    *(
        (size // c, c, warps, 1)
        for size, warps in ((1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8))
        for c in (16, 64, 128, 256)
    ),
)
GATE = register("gate", gate_kernel, _GATES)
GATE_BACKWARD = register("gate_backward", gate_backward_kernel, _GATES)


def gate(t: Operands) -> Tensor:
    """Compute warpfold::gate."""
    x, g = t.x, t.g
    out = empty_like(x)
    x, g, y = _innermost_last(x, g, out)
    run_gate(GATE, x, g, None, y)
    return out


def gate_backward(t: Operands) -> tuple[Tensor, Tensor]:
    """Compute warpfold::gate_backward."""
    grad, x, g = t.grad, t.x, t.g
    out = empty_like(x), empty_like(g)
    x, g, grad, dx, dg = _innermost_last(x, g, grad, *out)
    run_gate_backward(GATE_BACKWARD, grad, x, g, None, dx, dg)
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


TILES = 256  # of the gradient of the weight: as in `norm_linear`


@triton.jit(do_not_specialize=SCALARS)
def _gated_linear_residual(
    x: tl.tuple,
    o: tl.tuple,
    g: tl.tuple,
    weight: tl.tensor,
    bias: tl.tensor,
    factors: tl.tuple,
    key: tl.tensor,
    y: tl.tuple,
    axes: tl.tuple,
    number: tl.tensor,
    word: tl.tensor,
    rate: tl.tensor,
    scale: tl.tensor,
    C: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Store y = x + factors * ((o * sigmoid(g)) weight^T + bias): BLOCK_C channels of BLOCK_M positions.

    x: None, of an update alone.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = (m < axes.positions)[:, None]
    o_rows = o.data + offsets(o, m, axes)[:, None]
    g_rows = g.data + offsets(g, m, axes)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        valid = real & (k < INPUTS)[None, :]
        gate_values = tl.sigmoid(tl.load(g_rows + k[None, :], mask=valid, other=0).to(tl.float32))
        h = tl.load(o_rows + k[None, :], mask=valid, other=0).to(tl.float32) * gate_values
        wt = tl.load(weight + c[None, :] * INPUTS + k[:, None], mask=(c < C)[None, :] & (k < INPUTS)[:, None], other=0)
        acc = tl.dot(h.to(y.data.dtype.element_ty), wt.to(y.data.dtype.element_ty), acc)
    if bias is not None:
        acc += tl.load(bias + c, mask=c < C, other=0).to(tl.float32)[None, :]
    valid = real & (c < C)[None, :]
    if factors is not None:
        at = offsets(factors, m, axes)[:, None] + (c.to(tl.int64) * factors.strides[3])[None, :]
        acc *= dropout_tile(factors, at, valid, key, number, word, rate, scale)
    if x is not None:
        acc += tl.load(pointers(x, m, c, axes), mask=valid, other=0).to(tl.float32)
    tl.store(pointers(y, m, c, axes), acc.to(y.data.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=SCALARS)
def _gated_linear_residual_backward(
    grad: tl.tuple,
    o: tl.tuple,
    g: tl.tuple,
    weight: tl.tensor,
    factors: tl.tuple,
    key: tl.tensor,
    do: tl.tuple,
    dg: tl.tuple,
    axes: tl.tuple,
    number: tl.tensor,
    word: tl.tensor,
    rate: tl.tensor,
    scale: tl.tensor,
    C: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Store do and dg, from dh = (grad * factors) weight: BLOCK_I inputs of BLOCK_M positions."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    real = (m < axes.positions)[:, None]
    grad_rows = grad.data + offsets(grad, m, axes)[:, None]
    if factors is not None:
        factor_rows = offsets(factors, m, axes)[:, None]
    dh = tl.zeros([BLOCK_M, BLOCK_I], tl.float32)
    for start in range(0, C, BLOCK_K):
        c = start + tl.arange(0, BLOCK_K)
        valid = real & (c < C)[None, :]
        dz = tl.load(grad_rows + c[None, :], mask=valid, other=0)
        if factors is not None:
            at = factor_rows + (c.to(tl.int64) * factors.strides[3])[None, :]
            dz = (dz.to(tl.float32) * dropout_tile(factors, at, valid, key, number, word, rate, scale)).to(dz.dtype)
        wt = tl.load(weight + c[:, None] * INPUTS + i[None, :], mask=(c < C)[:, None] & (i < INPUTS)[None, :], other=0)
        dh = tl.dot(dz, wt.to(dz.dtype), dh)
    valid = real & (i < INPUTS)[None, :]
    at = offsets(o, m, axes)[:, None]
    v = tl.load(o.data + at + i[None, :], mask=valid, other=0).to(tl.float32)
    at = offsets(g, m, axes)[:, None]
    gate_values = tl.sigmoid(tl.load(g.data + at + i[None, :], mask=valid, other=0).to(tl.float32))
    dv = dh * gate_values
    tl.store(pointers(do, m, i, axes), dv.to(do.data.dtype.element_ty), mask=valid)
    tl.store(pointers(dg, m, i, axes), (dv * v * (1 - gate_values)).to(dg.data.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=SCALARS)
def _gated_linear_residual_weight(
    grad: tl.tuple,
    o: tl.tuple,
    g: tl.tuple,
    factors: tl.tuple,
    key: tl.tensor,
    partials: tl.tensor,
    axes: tl.tuple,
    number: tl.tensor,
    word: tl.tensor,
    rate: tl.tensor,
    scale: tl.tensor,
    C: tl.constexpr,
    INPUTS: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_I: tl.constexpr,
) -> None:
    """Store in partials [programs, C INPUTS + BIASED] a tile of dz^T h, and of the sum of dz, of a span of positions.

    BIASED: C, or 0 without a bias.
    """
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    each = tl.cdiv(tl.cdiv(axes.positions, BLOCK_M), tl.num_programs(2))
    first = tl.program_id(2) * each * BLOCK_M
    last = min(axes.positions, first + each * BLOCK_M)
    dw = tl.zeros([BLOCK_C, BLOCK_I], tl.float32)
    db = tl.zeros([BLOCK_C], tl.float32)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        valid = (m < axes.positions)[:, None] & (c < C)[None, :]
        at = offsets(grad, m, axes)[:, None]
        dz = tl.load(grad.data + at + c[None, :], mask=valid, other=0)
        if factors is not None:
            at = offsets(factors, m, axes)[:, None] + (c.to(tl.int64) * factors.strides[3])[None, :]
            dz = (dz.to(tl.float32) * dropout_tile(factors, at, valid, key, number, word, rate, scale)).to(dz.dtype)
        valid = (m < axes.positions)[:, None] & (i < INPUTS)[None, :]
        at = offsets(o, m, axes)[:, None]
        v = tl.load(o.data + at + i[None, :], mask=valid, other=0).to(tl.float32)
        at = offsets(g, m, axes)[:, None]
        h = v * tl.sigmoid(tl.load(g.data + at + i[None, :], mask=valid, other=0).to(tl.float32))
        dw = tl.dot(tl.trans(dz), h.to(dz.dtype), dw)
        if BIASED > 0:
            db += tl.sum(dz.to(tl.float32), 0)
    mine = partials + tl.program_id(2).to(tl.int64) * (C * INPUTS + BIASED)
    tl.store(mine + c[:, None] * INPUTS + i[None, :], dw, mask=(c < C)[:, None] & (i < INPUTS)[None, :])
    if BIASED > 0 and tl.program_id(1) == 0:
        tl.store(mine + C * INPUTS + c, db, mask=c < C)


_TILES = (
    *((64, 64, k, 4, s) for k in (32, 64) for s in (2, 3)),
    *((64, 128, k, w, s) for k in (32, 64) for w in (4, 8) for s in (2, 3)),
    *((64, 256, k, 8, s) for k in (32, 64) for s in (2, 3)),
    *((128, 128, k, 8, s) for k in (32, 64) for s in (2, 3)),
)
_FP32 = ((32, 64, 16, 4, 1), (64, 64, 16, 8, 1))

FORWARD = register_by_precision(
    "tail",
    _gated_linear_residual,
    configs("BLOCK_M BLOCK_C BLOCK_K", *_TILES),
    configs("BLOCK_M BLOCK_C BLOCK_K", *_FP32),
)
BACKWARD = register_by_precision(
    "tail_backward",
    _gated_linear_residual_backward,
    configs("BLOCK_M BLOCK_I BLOCK_K", *_TILES),
    configs("BLOCK_M BLOCK_I BLOCK_K", *_FP32),
)
WEIGHT = register_by_precision(
    "tail_weight",
    _gated_linear_residual_weight,
    configs(
        "BLOCK_M BLOCK_C BLOCK_I",
        *((m, 64, i, 4, s) for i in (128, 64) for m in (32, 64) for s in (2, 3)),
        *((m, 128, 128, 8, s) for m in (32, 64) for s in (2, 3)),
        (64, 64, 64, 8, 2),
    ),
    configs("BLOCK_M BLOCK_C BLOCK_I", (16, 32, 64, 4, 1), (32, 32, 64, 4, 1), (16, 64, 64, 8, 1), (16, 64, 64, 4, 1)),
)


def gated_linear_residual(t: Operands, residual: bool = True) -> Tensor:
    """Compute warpfold::gated_linear_residual; or, where `residual` is False, that without x, but laid out as x is."""
    x = t.x
    c, inputs, y = x.shape[-1], t.o.shape[-1], empty_like(x)
    reads = {"x": x if residual else None, "o": channels_last(t.o), "g": channels_last(t.g)}
    p, arguments = DropoutOperands(x, t).walked_with(reads, writes={"y": y})
    kernel = FORWARD.tiled((c, inputs), x)
    kernel.run(
        (cdiv(p.count, kernel["BLOCK_M"]), cdiv(c, kernel["BLOCK_C"])),
        **arguments,
        weight=cast_weight(t.weight, x, p.count),
        bias=contiguous(t.bias),
        C=c,
        INPUTS=inputs,
    )
    p.copy_back()
    return y


def gated_linear_residual_backward(t: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::gated_linear_residual_backward."""
    do, dg = empty_like(channels_last(t.o)), empty_like(channels_last(t.g))
    sums = backward(t, do, dg)
    sum_partials(sums)
    dweight, dbias = sums.results
    return do, dg, dweight, dbias


def backward(t: Operands, do: Tensor, dg: Tensor) -> Sum:
    """Write the gradients of o and g into do and dg, and return what is to be summed for those of weight and bias."""
    o, dropout = t.o, DropoutOperands(t.grad, t)
    reads: dict[str, Tensor | None] = {name: channels_last(getattr(t, name)) for name in ("grad", "o", "g")}
    c, inputs = t.grad.shape[-1], o.shape[-1]
    biased = 0 if t.bias is None else c
    p, arguments = dropout.walked_with(reads, writes={"do": do, "dg": dg})
    kernel = BACKWARD.tiled((inputs, c), o)
    kernel.run(
        (cdiv(p.count, kernel["BLOCK_M"]), cdiv(inputs, kernel["BLOCK_I"])),
        **arguments,
        weight=cast_weight(t.weight, o, p.count),
        C=c,
        INPUTS=inputs,
    )
    p.copy_back()
    p, arguments = dropout.walked_with(reads, writes={})
    kernel = WEIGHT.tiled((c, inputs), o)
    tiles = cdiv(c, kernel["BLOCK_C"]), cdiv(inputs, kernel["BLOCK_I"])
    programs = programs_for(p.count, kernel["BLOCK_M"], max(1, TILES // (tiles[0] * tiles[1])))
    partials = empty_partials(o, programs, c * inputs + biased)
    kernel.run((*tiles, programs), **arguments, partials=partials, C=c, INPUTS=inputs, BIASED=biased)
    return Sum(partials, empty_parameters(t.weight, t.bias))
