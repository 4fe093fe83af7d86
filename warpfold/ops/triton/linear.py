"""Norms, gates and projections on a GPU, and the functions of a tile that other normalising kernels share.

layer_norm reads x and writes y, [*, c], once each; its backward pass reads grad and x and writes dx once each.

norm_linear computes the norm inside the following projection.  `_norm_linear` holds the normalised channels of its
positions and multiplies them by one tile of the weight after another, so that x is read once, whatever the number of
outputs.  `_norm_linear_wide` is for channels that do not fit.  In fp32, without tensor cores, torch computes the
projections.  With many outputs, the backward pass is a cuBLAS product, dn = dy weight, the backward kernel of
layer_norm, which overwrites dn by the normalised channels n, and another product, dy^T n.  With few outputs or few
channels, one kernel computes everything, since a program's registers hold the gradient of the weight.

gate works element by element on tensors of any strides; triangle_factor uses its kernels to change a layout.  It reads
x and g and writes y; its backward pass reads grad, x and g and writes dx and dg.

gated_linear_residual fuses gate, projection, bias, dropout and residual without an intermediate tensor.  It reads x, o
and g and writes y.  The backward kernel reads grad, o and g and writes the gradients of o and g, the gated h = o *
sigmoid(g) and, with dropout, dz = grad * factors.  The weight's gradient dz^T h is a cuBLAS product.  The kernels'
names in launch tables start with "tail".
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.dispatch import Operands, empty_like, empty_parameters
from warpfold.ops.linear import empty_linear, empty_projected, empty_statistics, padded
from warpfold.ops.triton.launch import configs, register
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
    or_unwanted,
    pointers,
    power_of_two,
    programs_for,
    sum_partials,
)


@triton.jit
def statistics(v: tl.tensor, valid: tl.tensor, eps: tl.tensor, C: tl.constexpr) -> tl.tuple:
    """Compute from channels v [m, c] in fp32 the deviations from the mean [m, c], the mean and 1 / deviation [m].

    v is 0 where it is not valid.  The mean is corrected by the mean of the deviations, because its first rounding error
    would matter for channels around 1e4.
    """
    mean = tl.sum(v, 1) / C
    d = tl.where(valid, v - mean[:, None], 0.0)
    rest = tl.sum(d, 1) / C
    d = tl.where(valid, d - rest[:, None], 0.0)
    return d, mean + rest, tl.rsqrt(tl.sum(d * d, 1) / C + eps)


@triton.jit
def shifted(n: tl.tensor, bias: tl.tensor, c: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Add a norm's bias, if there is one, to n [m, c]."""
    if bias is not None:
        return n + tl.load(bias + c, mask=c < C, other=0).to(tl.float32)[None, :]
    else:  # compiled only without a bias
        return n


@triton.jit
def _masked(y: tl.tensor, mask: tl.tuple, m: tl.tensor, axes: tl.tuple) -> tl.tensor:
    """Multiply y [m, o] by the mask of its positions, if there is one."""
    if mask is not None:
        return y * tl.load(mask.data + offsets(mask, m, axes), mask=m < axes.positions, other=0).to(tl.float32)[:, None]
    else:  # compiled only without a mask
        return y


# Additional columns after the operand of a weight's gradient, of which the first is one, for the gradient of the bias.
# With 8 columns of 16 bits, rows are aligned to wide words, as cuBLAS requires.
ONES = 8


@triton.jit
def store_ones(t: tl.tuple, m: tl.tensor, axes: tl.tuple, FIRST: tl.constexpr, ONES: tl.constexpr) -> None:
    """Store a column of ones followed by zeros, ONES columns in all, in t [m, FIRST + ONES] from column FIRST on."""
    k = tl.arange(0, ONES)
    row = tl.where(k == 0, 1.0, 0.0).to(t.data.dtype.element_ty)
    ones = tl.broadcast_to(row[None, :], [m.shape[0], ONES])
    tl.store(pointers(t, m, FIRST + k, axes), ones, mask=(m < axes.positions)[:, None] & (k < ONES)[None, :])


def matrix(t: Tensor) -> Tensor:
    """View t [*, c] as a matrix [positions, c] with the rows in memory order, or copy it if there is no such view."""
    order = sorted(range(t.dim() - 1), key=t.stride, reverse=True)
    return t.permute(*order, t.dim() - 1).reshape(-1, t.shape[-1])


def weight_gradients(dy: Tensor, h: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the gradient of a weight, dy^T h, in fp32, and the gradient of a bias of the first outputs.

    dy: [P, o]; h: [P, c], or with a bias [P, c + ONES], where column c is one.
    Returns [o, c] and [b]; without a bias the latter has no elements.
    """
    dy = dy.t()
    if dy.device.type == "cpu" or torch.version.hip is not None:
        # torch supports fp32 products of 16-bit matrices on NVIDIA GPUs only.
        product = torch.mm(dy.float(), h.float())
    else:
        product = torch.mm(dy, h, out_dtype=torch.float32)
    if bias is None:
        return product, product.new_empty(0)
    c = h.shape[1] - ONES
    dweight, dbias = product.new_empty(len(product), c), product.new_empty(len(bias))
    dweight.copy_(product[:, :c])
    dbias.copy_(product[: len(bias), c])
    return dweight, dbias


# The largest number of programs of the backward kernel: eight per core of a large GPU.
PROGRAMS = 1024


@triton.jit
def _layer_norm(
    x: tl.tuple, weight: tl.tensor, bias: tl.tensor, y: tl.tuple, mean: tl.tuple, rstd: tl.tensor, axes: tl.tuple,
    eps: tl.tensor,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr,
) -> None:  # fmt: skip
    """Store y = layer_norm(x) * weight + bias, and the statistics of the positions."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    valid = (m < axes.positions)[:, None] & (c < C)[None, :]
    v = tl.load(pointers(x, m, c, axes), mask=valid, other=0).to(tl.float32)
    w = tl.load(weight + c, mask=c < C, other=0).to(tl.float32)
    d, mu, r = statistics(v, valid, eps, C)
    n = shifted(d * r[:, None] * w[None, :], bias, c, C)
    tl.store(pointers(y, m, c, axes), n.to(y.data.dtype.element_ty), mask=valid)
    at = offsets(mean, m, axes)
    tl.store(mean.data + at, mu, mask=m < axes.positions)
    tl.store(rstd + at, r, mask=m < axes.positions)


@triton.jit
def _layer_norm_backward(
    grad: tl.tuple, x: tl.tuple, weight: tl.tensor, bias: tl.tensor, mean: tl.tuple, rstd: tl.tensor,
    residual: tl.tuple, dx: tl.tuple, normed: tl.tuple, partials: tl.tensor, axes: tl.tuple,
    C: tl.constexpr, ONES: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr,
) -> None:  # fmt: skip
    """Store dx, and in partials [programs, 2 C] the partial gradients of weight and bias over this program's positions.

    With x_hat the normalised channels and dn = dy weight: dx = (dn - c2 - x_hat c1) rstd, c1 and c2 the means over the
    channels of dn x_hat and of dn.

    residual: a summand of dx, or None.  normed: memory for x_hat * weight + bias, followed by ONES columns as in
    `store_ones`, or None.  It may share the memory of grad.
    """
    c = tl.arange(0, BLOCK_C)
    w = tl.load(weight + c, mask=c < C, other=0).to(tl.float32)
    dw = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    db = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(axes.positions, BLOCK_M), tl.num_programs(0)):
        m = block * BLOCK_M + tl.arange(0, BLOCK_M)
        valid = (m < axes.positions)[:, None] & (c < C)[None, :]
        dy = tl.load(pointers(grad, m, c, axes), mask=valid, other=0).to(tl.float32)
        v = tl.load(pointers(x, m, c, axes), mask=valid, other=0).to(tl.float32)
        at = offsets(mean, m, axes)
        mu = tl.load(mean.data + at, mask=m < axes.positions, other=0)
        r = tl.load(rstd + at, mask=m < axes.positions, other=0)
        x_hat = tl.where(valid, (v - mu[:, None]) * r[:, None], 0.0)
        dw += dy * x_hat
        db += dy
        dn = dy * w[None, :]
        c1 = tl.sum(dn * x_hat, 1) / C
        c2 = tl.sum(dn, 1) / C
        out = (dn - c2[:, None] - x_hat * c1[:, None]) * r[:, None]
        if residual is not None:
            out += tl.load(pointers(residual, m, c, axes), mask=valid, other=0).to(tl.float32)
        tl.store(pointers(dx, m, c, axes), out.to(dx.data.dtype.element_ty), mask=valid)
        if normed is not None:
            # No thread may overwrite a gradient before all other threads have read it.
            tl.debug_barrier()
            n = shifted(x_hat * w[None, :], bias, c, C)
            tl.store(pointers(normed, m, c, axes), n.to(normed.data.dtype.element_ty), mask=valid)
            if ONES > 0:
                store_ones(normed, m, axes, C, ONES)
    mine = partials + tl.program_id(0).to(tl.int64) * (2 * C) + c
    tl.store(mine, tl.sum(dw, 0), mask=c < C)
    tl.store(mine + C, tl.sum(db, 0), mask=c < C)


_NORMS = configs("BLOCK_M", *((m, warps, 1) for m in (2, 4, 8, 16, 32, 64) for warps in (2, 4, 8)))
NORM = register("layer_norm", _layer_norm, _NORMS)
NORM_BACKWARD = register("layer_norm_backward", _layer_norm_backward, _NORMS)


def layer_norm(t: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Compute warpfold::layer_norm."""
    x = t.x
    c, y, (mean, rstd) = x.shape[-1], empty_like(x), empty_statistics(x)
    p = Positions({"x": x}, writes={"y": y, "mean": mean[..., None]})
    kernel = NORM.tiled((c, x.element_size()), x)
    kernel.run(
        (cdiv(p.count, kernel["BLOCK_M"]),),
        **p.arguments,
        weight=t.weight.contiguous(),
        bias=contiguous(t.bias),
        rstd=rstd,
        eps=t.eps,
        C=c,
        BLOCK_C=power_of_two(c),
    )
    p.copy_back()
    return y, mean, rstd


def layer_norm_backward(t: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Compute warpfold::layer_norm_backward."""
    dx = empty_like(t.x)
    sums = _launch_layer_norm_backward(t.but(bias=None), t.grad, dx)
    dweight, dbias = empty_parameters(t.weight, t.weight)
    sum_partials(Sum(sums, (dweight, dbias)))
    return dx, dweight, dbias


def _launch_layer_norm_backward(
    t: Operands, grad: Tensor, dx: Tensor, residual: Tensor | None = None, normed: Tensor | None = None
) -> Tensor:
    """Compute dx and, optionally, the normalised channels; return the parameters' partial sums, [programs, 2 C]."""
    x, c = t.x, t.x.shape[-1]
    wanted = {"dx": dx, "normed": normed}
    p = Positions(
        {"x": x, "grad": grad, "mean": t.mean[..., None], "residual": residual},
        writes={name: tensor for name, tensor in wanted.items() if tensor is not None},
    )
    kernel = NORM_BACKWARD.tiled((c, x.element_size()), x)
    programs = programs_for(p.count, kernel["BLOCK_M"], PROGRAMS)
    partials = empty_partials(x, programs, 2 * c)
    kernel.run(
        (programs,),
        **{"normed": None} | p.arguments,
        weight=t.weight.contiguous(),
        bias=contiguous(t.bias),
        rstd=t.scale,
        partials=partials,
        C=c,
        ONES=0 if normed is None else normed.shape[-1] - c,
        BLOCK_C=power_of_two(c),
    )
    p.copy_back()
    return partials


# The narrow backward kernel has at least this many programs, if there are enough positions.
TILES = 128
# It has more programs than TILES as long as their partial sums have at most this many elements.
PARTIALS = 2**21
# The largest weight whose gradient a program of this kernel holds in registers.
NARROW = 64 * 256
# The most outputs or channels of this kernel. With 128 by 128 weights its registers spill.
FEW = 64
# The most 16-bit channels that a program of the projection holds.
WIDEST = 256


@triton.jit
def _norm_linear(
    x: tl.tuple, norm_weight: tl.tensor, norm_bias: tl.tensor, weight: tl.tensor, bias: tl.tensor, mask: tl.tuple,
    y: tl.tuple, planes: tl.tuple, mean: tl.tuple, rstd: tl.tensor, axes: tl.tuple, eps: tl.tensor,
    C: tl.constexpr, OUTPUTS: tl.constexpr, BIASED: tl.constexpr, PADDED: tl.constexpr, FIRST_PLANE: tl.constexpr,
    PLANES: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr,
) -> None:  # fmt: skip
    """Store y = layer_norm(x) weight^T + bias, times an optional mask, and the statistics.

    A program owns BLOCK_M positions and computes the first OUTPUTS.
    planes: memory for PLANES outputs from FIRST_PLANE on as separate planes, or None.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    valid = (m < axes.positions)[:, None] & (c < C)[None, :]
    v = tl.load(pointers(x, m, c, axes), mask=valid, other=0).to(tl.float32)
    w = tl.load(norm_weight + c, mask=c < C, other=0).to(tl.float32)
    d, mu, r = statistics(v, valid, eps, C)
    n = shifted(d * r[:, None] * w[None, :], norm_bias, c, C).to(x.data.dtype.element_ty)
    at = offsets(mean, m, axes)
    tl.store(mean.data + at, mu, mask=m < axes.positions)
    tl.store(rstd + at, r, mask=m < axes.positions)
    if y is not None:
        y_rows = y.data + offsets(y, m, axes)[:, None]
        # The padding of a position's outputs is written, too, so that every store is a wide word.
        for start in range(0, OUTPUTS, BLOCK_O):
            o = start + tl.arange(0, BLOCK_O)
            wt = tl.load(weight + o[None, :] * C + c[:, None], mask=(o < OUTPUTS)[None, :] & (c < C)[:, None], other=0)
            out = tl.dot(n, wt.to(n.dtype))
            if bias is not None:
                out += tl.load(bias + o, mask=o < BIASED, other=0).to(tl.float32)[None, :]
            out = _masked(out, mask, m, axes)
            writable = (m < axes.positions)[:, None] & (o < PADDED)[None, :]
            tl.store(y_rows + o[None, :], out.to(y.data.dtype.element_ty), mask=writable)
    # These are few outputs. Those that y has as well are computed twice.
    if planes is not None:
        p = tl.arange(0, BLOCK_P)
        o = FIRST_PLANE + p
        wt = tl.load(weight + o[None, :] * C + c[:, None], mask=(p < PLANES)[None, :] & (c < C)[:, None], other=0)
        out = tl.dot(n, wt.to(n.dtype))
        if bias is not None:
            out += tl.load(bias + o, mask=(p < PLANES) & (o < BIASED), other=0).to(tl.float32)[None, :]
        out = _masked(out, mask, m, axes)
        writable = (m < axes.positions)[:, None] & (p < PLANES)[None, :]
        tl.store(pointers(planes, m, p, axes), out.to(planes.data.dtype.element_ty), mask=writable)


@triton.jit
def _norm_linear_wide(
    x: tl.tuple, norm_weight: tl.tensor, norm_bias: tl.tensor, weight: tl.tensor, bias: tl.tensor, mask: tl.tuple,
    y: tl.tuple, planes: tl.tuple, mean: tl.tuple, rstd: tl.tensor, axes: tl.tuple, eps: tl.tensor,
    C: tl.constexpr, OUTPUTS: tl.constexpr, BIASED: tl.constexpr, PADDED: tl.constexpr, FIRST_PLANE: tl.constexpr,
    PLANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Store the same as `_norm_linear`, for BLOCK_O of all outputs and BLOCK_M positions.

    BLOCK_K channels are loaded at a time, first for the statistics.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    k = tl.arange(0, BLOCK_K)
    x_rows = x.data + offsets(x, m, axes)[:, None]
    mu = tl.zeros([BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, C, BLOCK_K):
        valid = (m < axes.positions)[:, None] & (start + k < C)[None, :]
        v = tl.load(x_rows + ((start + k).to(tl.int64) * x.strides[3])[None, :], mask=valid, other=0).to(tl.float32)
        # Merge the statistics of the blocks without a difference of large numbers (Chan et al., 1979).
        size = tl.sum(tl.where(start + k < C, 1.0, 0.0), 0)
        level = tl.sum(v, 1) / size
        d = tl.where(valid, v - level[:, None], 0.0)
        rest = tl.sum(d, 1) / size
        d = tl.where(valid, d - rest[:, None], 0.0)
        apart = level - mu + rest
        share = size / (size + start)
        mu += apart * share
        squares += tl.sum(d * d, 1) + apart * apart * (share * start)
    r = tl.rsqrt(squares / C + eps)
    acc = tl.zeros([BLOCK_M, BLOCK_O], tl.float32)
    for start in range(0, C, BLOCK_K):
        c = start + k
        valid = (m < axes.positions)[:, None] & (c < C)[None, :]
        v = tl.load(x_rows + (c.to(tl.int64) * x.strides[3])[None, :], mask=valid, other=0).to(tl.float32)
        w = tl.load(norm_weight + c, mask=c < C, other=0).to(tl.float32)
        n = shifted((v - mu[:, None]) * r[:, None] * w[None, :], norm_bias, c, C).to(x.data.dtype.element_ty)
        wt = tl.load(weight + o[None, :] * C + c[:, None], mask=(o < OUTPUTS)[None, :] & (c < C)[:, None], other=0)
        acc = tl.dot(n, wt.to(n.dtype), acc)
    if bias is not None:
        acc += tl.load(bias + o, mask=o < BIASED, other=0).to(tl.float32)[None, :]
    acc = _masked(acc, mask, m, axes)
    if y is not None:
        y_rows = y.data + offsets(y, m, axes)[:, None]
        writable = (m < axes.positions)[:, None] & (o < PADDED)[None, :]
        tl.store(y_rows + o[None, :], acc.to(y.data.dtype.element_ty), mask=writable)
    if planes is not None:
        p = o - FIRST_PLANE
        writable = (m < axes.positions)[:, None] & ((p >= 0) & (p < PLANES))[None, :]
        tl.store(pointers(planes, m, p, axes), acc.to(planes.data.dtype.element_ty), mask=writable)
    if tl.program_id(1) == 0:
        at = offsets(mean, m, axes)
        tl.store(mean.data + at, mu, mask=m < axes.positions)
        tl.store(rstd + at, r, mask=m < axes.positions)


@triton.jit
def _norm_linear_backward(
    grad: tl.tuple, x: tl.tuple, norm_weight: tl.tensor, norm_bias: tl.tensor, weight: tl.tensor, mean: tl.tuple,
    rstd: tl.tensor, residual: tl.tuple, dx: tl.tuple, partials: tl.tensor, axes: tl.tuple,
    C: tl.constexpr, OUTPUTS: tl.constexpr, BIASED: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:  # fmt: skip
    """Store dx, through the projection and then the norm, plus an optional residual, and partial gradients.

    partials [programs, OUTPUTS C + BIASED + 2 C]: for weight, bias, norm_weight and norm_bias.  BLOCK_C and BLOCK_O
    hold all channels and outputs.
    """
    c, o = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_O)
    w = tl.load(norm_weight + c, mask=c < C, other=0).to(tl.float32)
    part = (o < OUTPUTS)[:, None] & (c < C)[None, :]
    wt = tl.load(weight + o[:, None] * C + c[None, :], mask=part, other=0).to(x.data.dtype.element_ty)
    dw = tl.zeros([BLOCK_O, BLOCK_C], tl.float32)
    db = tl.zeros([BLOCK_O], tl.float32)
    dnorm_weight = tl.zeros([BLOCK_C], tl.float32)
    dnorm_bias = tl.zeros([BLOCK_C], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(axes.positions, BLOCK_M), tl.num_programs(0)):
        m = block * BLOCK_M + tl.arange(0, BLOCK_M)
        known = (m < axes.positions)[:, None] & (o < OUTPUTS)[None, :]
        dy = tl.load(pointers(grad, m, o, axes), mask=known, other=0)
        dn = tl.dot(dy, wt)
        valid = (m < axes.positions)[:, None] & (c < C)[None, :]
        v = tl.load(pointers(x, m, c, axes), mask=valid, other=0).to(tl.float32)
        at = offsets(mean, m, axes)
        mu = tl.load(mean.data + at, mask=m < axes.positions, other=0)
        r = tl.load(rstd + at, mask=m < axes.positions, other=0)
        x_hat = tl.where(valid, (v - mu[:, None]) * r[:, None], 0.0)
        n = shifted(x_hat * w[None, :], norm_bias, c, C)
        dw = tl.dot(tl.trans(dy), n.to(dy.dtype), dw)
        db += tl.sum(dy.to(tl.float32), 0)
        dnorm_weight += tl.sum(dn * x_hat, 0)
        dnorm_bias += tl.sum(dn, 0)
        dn = dn * w[None, :]
        c1 = tl.sum(dn * x_hat, 1) / C
        c2 = tl.sum(dn, 1) / C
        out = (dn - c2[:, None] - x_hat * c1[:, None]) * r[:, None]
        if residual is not None:
            out += tl.load(pointers(residual, m, c, axes), mask=valid, other=0).to(tl.float32)
        tl.store(pointers(dx, m, c, axes), out.to(dx.data.dtype.element_ty), mask=valid)
    mine = partials + tl.program_id(0).to(tl.int64) * (OUTPUTS * C + BIASED + 2 * C)
    tl.store(mine + o[:, None] * C + c[None, :], dw, mask=part)
    mine += OUTPUTS * C
    if BIASED > 0:
        tl.store(mine + o, db, mask=o < BIASED)
    mine += BIASED
    tl.store(mine + c, dnorm_weight, mask=c < C)
    tl.store(mine + C + c, dnorm_bias, mask=c < C)


PROJECTION = register(
    "norm_linear",
    _norm_linear,
    configs(
        "BLOCK_M BLOCK_O",
        *((m, o, w, s) for m, w in ((64, 4), (64, 8), (128, 8)) for o in (16, 64, 128) for s in (2, 3)),
    ),
)
WIDE = register(
    "norm_linear_wide",
    _norm_linear_wide,
    configs(
        "BLOCK_M BLOCK_O BLOCK_K", *((m, 64, k, w, s) for m, w in ((64, 4), (128, 8)) for k in (32, 64) for s in (2, 3))
    ),
)
PROJECTION_BACKWARD = register(
    "norm_linear_backward",
    _norm_linear_backward,
    configs("BLOCK_M", *((m, w, s) for m in (16, 32, 64) for w in (4, 8) for s in (1, 2))),
)


class Planes(NamedTuple):
    """Memory [*, p] for some outputs of a projection as separate planes; begin: the first output."""

    data: Tensor
    begin: int


def norm_linear(t: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Compute warpfold::norm_linear."""
    y, (mean, scale) = empty_linear(t.x, t.weight.shape[0], t.planes), empty_statistics(t.x)
    project(t.but(mean=mean, scale=scale), *((None, Planes(y, 0)) if t.planes else (y,)))
    return y, mean, scale


def project(t: Operands, y: Tensor | None, planes: Planes | None = None, mask: Tensor | None = None) -> None:
    """Write linear(layer_norm(x)) to y, with the padded rows of `empty_projected`, and the statistics of x.

    y: the first outputs, including at least all that are not in `planes`.  mask: [*], multiplies all outputs.
    """
    x, (outputs, c) = t.x, t.weight.shape
    kept, dense = None if mask is None else mask[..., None], 0 if y is None else y.shape[-1]
    wanted = {"y": y, "mean": t.mean[..., None], "planes": None if planes is None else planes.data}
    p = Positions({"x": x, "mask": kept}, writes={name: t for name, t in wanted.items() if t is not None})
    wide, many = c > WIDEST, 0 if planes is None else planes.data.shape[-1]
    kernel = (WIDE if wide else PROJECTION).tiled((c, outputs), x)
    rows = cdiv(p.count, kernel["BLOCK_M"])
    kernel.run(
        (rows, cdiv(outputs, kernel["BLOCK_O"])) if wide else (rows,),
        **{"y": None, "planes": None} | p.arguments,
        norm_weight=t.norm_weight.contiguous(),
        norm_bias=contiguous(t.norm_bias),
        weight=cast_weight(t.weight, x, p.count),
        bias=contiguous(t.bias),
        rstd=t.scale,
        eps=t.eps,
        C=c,
        OUTPUTS=outputs if wide else dense,
        BIASED=0 if t.bias is None else len(t.bias),
        PADDED=padded(dense) if y is not None and p.writes_in_place("y") else dense,
        FIRST_PLANE=0 if planes is None else planes.begin,
        PLANES=many,
        **({} if wide else {"BLOCK_C": power_of_two(c), "BLOCK_P": power_of_two(many)}),
    )
    p.copy_back()


def norm_linear_backward(
    t: Operands, residual: Tensor | None = None, beside: Sequence[Sum] = (), slabs: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::norm_linear_backward.

    residual [*, c]: is added to the gradient of x.  beside: further sums to compute in the same launch.
    slabs [slabs, *, p] in fp32: their sum is the gradient of the last outputs, which is written to t.grad first.
    """
    if slabs is not None:
        t.grad[..., -slabs.shape[-1] :].copy_(slabs.sum(0))
    outputs, c = t.weight.shape
    few = min(outputs, c) <= FEW and power_of_two(outputs) * power_of_two(c) <= NARROW
    backward = _backward_of_few if few else _backward_of_many
    return backward(t, residual, beside)


def _backward_of_many(
    t: Operands, residual: Tensor | None, beside: Sequence[Sum]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients by two torch products, with a kernel between them.

    The kernel reads dn, the gradient of the norm's result, and overwrites it by the normalised channels.
    """
    grad, x, c = t.grad, t.x, t.x.shape[-1]
    dy, dx = matrix(grad), empty_like(x)
    normed = empty_projected(grad, c + (0 if t.bias is None else ONES))
    n = matrix(normed)
    torch.mm(dy, t.weight.to(x.dtype), out=n[:, :c])
    norm = t.but(weight=t.norm_weight, bias=t.norm_bias)
    partials = _launch_layer_norm_backward(norm, normed[..., :c], dx, residual, normed)
    dnorm_weight, dnorm_bias = empty_parameters(t.norm_weight, t.norm_bias)
    sum_partials(Sum(partials, (dnorm_weight, or_unwanted(dnorm_bias, partials, c))), *beside)
    return dx, dnorm_weight, dnorm_bias, *weight_gradients(dy, n, t.bias)


def _backward_of_few(
    t: Operands, residual: Tensor | None, beside: Sequence[Sum]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients by one kernel.  With few outputs, torch products would move more bytes."""
    x, (outputs, c) = t.x, t.weight.shape
    dx, biased = empty_like(x), 0 if t.bias is None else len(t.bias)
    p = Positions({"x": x, "grad": t.grad, "mean": t.mean[..., None], "residual": residual}, writes={"dx": dx})
    kernel, width = PROJECTION_BACKWARD.tiled((c, outputs), x), outputs * c + biased + 2 * c
    programs = programs_for(p.count, kernel["BLOCK_M"], min(PROGRAMS, max(TILES, PARTIALS // width)))
    partials = empty_partials(x, programs, width)
    kernel.run(
        (programs,),
        **p.arguments,
        norm_weight=t.norm_weight.contiguous(),
        norm_bias=contiguous(t.norm_bias),
        weight=t.weight.contiguous(),
        rstd=t.scale,
        partials=partials,
        C=c,
        OUTPUTS=outputs,
        BIASED=biased,
        BLOCK_C=power_of_two(c),
        BLOCK_O=power_of_two(outputs),
    )
    p.copy_back()
    dnorm_weight, dnorm_bias, dweight, dbias = empty_parameters(t.norm_weight, t.norm_bias, t.weight, t.bias)
    unwanted = or_unwanted(dnorm_bias, partials, c)
    sum_partials(Sum(partials, (dweight, dbias, dnorm_weight, unwanted)), *beside)
    return dx, dnorm_weight, dnorm_bias, dweight, dbias


@triton.jit
def gate_kernel(
    x: tl.tuple, g: tl.tuple, y: tl.tuple, axes: tl.tuple,
    C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    """Store y = x * sigmoid(g)."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid = (m < axes.positions)[:, None] & (c < C)[None, :]
    v = tl.load(pointers(x, m, c, axes), mask=valid, other=0).to(tl.float32)
    gate_values = tl.sigmoid(tl.load(pointers(g, m, c, axes), mask=valid, other=0).to(tl.float32))
    tl.store(pointers(y, m, c, axes), (v * gate_values).to(y.data.dtype.element_ty), mask=valid)


@triton.jit
def gate_backward_kernel(
    grad: tl.tuple, x: tl.tuple, g: tl.tuple, dx: tl.tuple, dg: tl.tuple, axes: tl.tuple,
    C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    """Store dx = grad * sigmoid(g) and dg = grad * x * sigmoid'(g)."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid = (m < axes.positions)[:, None] & (c < C)[None, :]
    dy = tl.load(pointers(grad, m, c, axes), mask=valid, other=0).to(tl.float32)
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
    c = x.shape[-1]
    p = Positions({"x": x, "g": g}, writes={"y": y})
    kernel = GATE.tiled((c, x.element_size()), x)
    kernel.run((cdiv(p.count, kernel["BLOCK_M"]), cdiv(c, kernel["BLOCK_C"])), **p.arguments, C=c)
    p.copy_back()
    return out


def gate_backward(t: Operands) -> tuple[Tensor, Tensor]:
    """Compute warpfold::gate_backward."""
    grad, x, g = t.grad, t.x, t.g
    out = empty_like(x), empty_like(g)
    x, g, grad, dx, dg = _innermost_last(x, g, grad, *out)
    c = x.shape[-1]
    p = Positions({"x": x, "g": g, "grad": grad}, writes={"dx": dx, "dg": dg})
    kernel = GATE_BACKWARD.tiled((c, x.element_size()), x)
    kernel.run((cdiv(p.count, kernel["BLOCK_M"]), cdiv(c, kernel["BLOCK_C"])), **p.arguments, C=c)
    p.copy_back()
    return out


def _innermost_last(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Permute tensors such that the last axis is the innermost in memory for the first tensor."""
    x = tensors[0]
    axes = [axis for axis in range(x.dim()) if x.shape[axis] != 1] or [x.dim() - 1]
    inner = min(reversed(axes), key=x.stride)
    return tuple(t.transpose(inner, -1) for t in tensors)


@triton.jit(do_not_specialize=SCALARS)
def _gated_linear_residual(
    x: tl.tuple, o: tl.tuple, g: tl.tuple, weight: tl.tensor, bias: tl.tensor, factors: tl.tuple, key: tl.tensor,
    y: tl.tuple, axes: tl.tuple, number: tl.tensor, word: tl.tensor, rate: tl.tensor, scale: tl.tensor,
    C: tl.constexpr, INPUTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Store y = x + factors * ((o * sigmoid(g)) weight^T + bias) for BLOCK_C channels of BLOCK_M positions.

    x: None to store the update without x.
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
    grad: tl.tuple, o: tl.tuple, g: tl.tuple, weight: tl.tensor, factors: tl.tuple, key: tl.tensor, do: tl.tuple,
    dg: tl.tuple, h: tl.tuple, dz: tl.tuple, axes: tl.tuple, number: tl.tensor, word: tl.tensor, rate: tl.tensor,
    scale: tl.tensor,
    C: tl.constexpr, INPUTS: tl.constexpr, ONES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Store do and dg, from dh = (grad * factors) weight, and the gated h for BLOCK_I inputs of BLOCK_M positions.

    ONES: the number of columns after h, of which the first gets ones and the others zeros, or 0.
    dz: memory for grad * factors, or None without factors.
    """
    # Consecutive programs read the same positions of grad, so that all but the first find them in the L2 cache.
    tiles: tl.constexpr = tl.cdiv(INPUTS, BLOCK_I)
    tile = tl.program_id(0) % tiles
    m = (tl.program_id(0) // tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tile * BLOCK_I + tl.arange(0, BLOCK_I)
    real = (m < axes.positions)[:, None]
    grad_rows = grad.data + offsets(grad, m, axes)[:, None]
    if factors is not None:
        factor_rows = offsets(factors, m, axes)[:, None]
    dh = tl.zeros([BLOCK_M, BLOCK_I], tl.float32)
    for start in range(0, C, BLOCK_K):
        c = start + tl.arange(0, BLOCK_K)
        valid = real & (c < C)[None, :]
        of_grad = tl.load(grad_rows + c[None, :], mask=valid, other=0)
        if factors is not None:
            at = factor_rows + (c.to(tl.int64) * factors.strides[3])[None, :]
            drop = dropout_tile(factors, at, valid, key, number, word, rate, scale)
            of_grad = (of_grad.to(tl.float32) * drop).to(of_grad.dtype)
            if tile == 0:
                tl.store(pointers(dz, m, c, axes), of_grad, mask=valid)
        wt = tl.load(weight + c[:, None] * INPUTS + i[None, :], mask=(c < C)[:, None] & (i < INPUTS)[None, :], other=0)
        dh = tl.dot(of_grad, wt.to(of_grad.dtype), dh)
    valid = real & (i < INPUTS)[None, :]
    at = offsets(o, m, axes)[:, None]
    v = tl.load(o.data + at + i[None, :], mask=valid, other=0).to(tl.float32)
    at = offsets(g, m, axes)[:, None]
    gate_values = tl.sigmoid(tl.load(g.data + at + i[None, :], mask=valid, other=0).to(tl.float32))
    dv = dh * gate_values
    tl.store(pointers(do, m, i, axes), dv.to(do.data.dtype.element_ty), mask=valid)
    tl.store(pointers(dg, m, i, axes), (dv * v * (1 - gate_values)).to(dg.data.dtype.element_ty), mask=valid)
    tl.store(pointers(h, m, i, axes), (v * gate_values).to(h.data.dtype.element_ty), mask=valid)
    if ONES > 0 and tile == 0:
        store_ones(h, m, axes, INPUTS, ONES)


_TILES = (
    *((64, 64, k, 4, s) for k in (32, 64) for s in (2, 3)),
    *((64, 128, k, w, s) for k in (32, 64) for w in (4, 8) for s in (2, 3)),
    *((64, 256, k, 8, s) for k in (32, 64) for s in (2, 3)),
    *((128, 128, k, 8, s) for k in (32, 64) for s in (2, 3)),
)

RESIDUAL_FORWARD = register("tail", _gated_linear_residual, configs("BLOCK_M BLOCK_C BLOCK_K", *_TILES))
RESIDUAL_BACKWARD = register(
    "tail_backward",
    _gated_linear_residual_backward,
    # Wider tiles spill, because a program holds dh, the gates and o at the same time.
    configs(
        "BLOCK_M BLOCK_I BLOCK_K",
        *((64, 64, k, w, s) for k in (32, 64) for w in (4, 8) for s in (2, 3)),
        *((64, 128, k, 8, s) for k in (32, 64) for s in (2, 3)),
    ),
)


def gated_linear_residual(t: Operands, residual: bool = True) -> Tensor:
    """Compute warpfold::gated_linear_residual; without `residual`, x is not added, but determines the layout."""
    x = t.x
    c, inputs, y = x.shape[-1], t.o.shape[-1], empty_like(x)
    reads = {"x": x if residual else None, "o": channels_last(t.o), "g": channels_last(t.g)}
    p, arguments = DropoutOperands(x, t).walked_with(reads, writes={"y": y})
    kernel = RESIDUAL_FORWARD.tiled((c, inputs), x)
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
    return do, dg, *gated_linear_residual_gradients(t, do, dg)


def gated_linear_residual_gradients(t: Operands, do: Tensor, dg: Tensor) -> tuple[Tensor, Tensor]:
    """Write the gradients of o and g to do and dg, and return the gradients of weight and bias."""
    o, dropout = t.o, DropoutOperands(t.grad, t)
    reads: dict[str, Tensor | None] = {name: channels_last(getattr(t, name)) for name in ("grad", "o", "g")}
    dz, c, inputs = reads["grad"], t.grad.shape[-1], o.shape[-1]
    assert dz is not None
    writes = {"do": do, "dg": dg, "h": empty_projected(dz, inputs + (0 if t.bias is None else ONES))}
    if dropout.of is not None:
        dz = writes["dz"] = empty_projected(dz, c)
    p, arguments = dropout.walked_with(reads, writes)
    kernel = RESIDUAL_BACKWARD.tiled((inputs, c), o)
    kernel.run(
        (cdiv(p.count, kernel["BLOCK_M"]) * cdiv(inputs, kernel["BLOCK_I"]),),
        **{"dz": None} | arguments,
        weight=cast_weight(t.weight, o, p.count),
        C=c,
        INPUTS=inputs,
        ONES=0 if t.bias is None else ONES,
    )
    p.copy_back()
    return weight_gradients(matrix(dz), matrix(writes["h"]), t.bias)
