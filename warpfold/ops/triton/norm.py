"""Norms on a GPU, and what every kernel that normalises does with a tile of positions.

layer_norm: what is read and written, in tensors [*, c]: forward x and y, once each; backward grad, x and dx, once each.

norm_linear: the norm lives inside the projection that follows it.

`_norm_linear` holds the normalised channels of its positions and multiplies them by one tile of the weight after
another: x is read once, whatever the number of outputs.  `_norm_linear_wide` is for channels that do not fit, and for
fp32, whose products are not made by tensor cores and must be cut into short ones.

The backward pass reads grad and x twice, for the gradient of x and for that of the weight: the two want different sums
(over outputs, over positions), and one program cannot hold both ([o, c] in fp32 is 270 kB for the 520 outputs of 128
channels that a triangle attention has; a program's registers are 256 kB).
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.dispatch import Operands
from warpfold.ops.norm import empty_projected, empty_statistics, padded
from warpfold.ops.tensors import empty_like, empty_parameters
from warpfold.ops.triton.launch import configs, register, register_by_precision
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
    """Return of channels v [m, c] in fp32 the deviations from the mean [m, c], the mean and 1 / deviation [m].

    v is 0 where it is not valid.  The mean is corrected by the mean of the deviations: of channels around 1e4 its first
    rounding would be seen.
    """
    mean = tl.sum(v, 1) / C
    d = tl.where(valid, v - mean[:, None], 0.0)
    rest = tl.sum(d, 1) / C
    d = tl.where(valid, d - rest[:, None], 0.0)
    return d, mean + rest, tl.rsqrt(tl.sum(d * d, 1) / C + eps)


@triton.jit
def shifted(n: tl.tensor, bias: tl.tensor, c: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Return n [m, c] plus a norm's bias, if it has one."""
    if bias is not None:
        return n + tl.load(bias + c, mask=c < C, other=0).to(tl.float32)[None, :]
    else:  # not after the `if`: Triton compiles what follows it
        return n


PROGRAMS = 1024  # at most, of the backward kernel: eight on each core of a large GPU


@triton.jit
def _layer_norm(
    x: tl.tuple,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tuple,
    mean: tl.tuple,
    rstd: tl.tensor,
    axes: tl.tuple,
    eps: tl.tensor,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
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
    grad: tl.tuple,
    x: tl.tuple,
    weight: tl.tensor,
    mean: tl.tuple,
    rstd: tl.tensor,
    dx: tl.tuple,
    partials: tl.tensor,
    axes: tl.tuple,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    """Store dx; and in partials [programs, 2 C] what this program's positions add to the gradients of weight and bias.

    With x_hat the normalised channels and dn = dy weight: dx = (dn - c2 - x_hat c1) rstd, c1 and c2 the means over the
    channels of dn x_hat and of dn.
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
        tl.store(pointers(dx, m, c, axes), out.to(dx.data.dtype.element_ty), mask=valid)
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
        (triton.cdiv(p.count, kernel["BLOCK_M"]),),
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
    x = t.x
    c, dx = x.shape[-1], empty_like(x)
    p = Positions({"x": x, "grad": t.grad, "mean": t.mean[..., None]}, writes={"dx": dx})
    kernel = NORM_BACKWARD.tiled((c, x.element_size()), x)
    programs = programs_for(p.count, kernel["BLOCK_M"], PROGRAMS)
    partials = empty_partials(x, programs, 2 * c)
    kernel.run(
        (programs,),
        **p.arguments,
        weight=t.weight.contiguous(),
        rstd=t.scale,
        partials=partials,
        C=c,
        BLOCK_C=power_of_two(c),
    )
    p.copy_back()
    dweight, dbias = empty_parameters(t.weight, t.weight)
    sum_partials(Sum(partials, (dweight, dbias)))
    return dx, dweight, dbias


TILES = 256  # of the gradient of the weight, where there are positions enough: two on each core of a large GPU
WIDEST = 256  # channels of 16 bits that a program of the projection holds


@triton.jit
def _norm_linear(
    x: tl.tuple,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tuple,
    mean: tl.tuple,
    rstd: tl.tensor,
    axes: tl.tuple,
    eps: tl.tensor,
    C: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BIASED: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
) -> None:
    """Store y = layer_norm(x) weight^T + bias, and the statistics: all outputs of BLOCK_M positions."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    valid = (m < axes.positions)[:, None] & (c < C)[None, :]
    v = tl.load(pointers(x, m, c, axes), mask=valid, other=0).to(tl.float32)
    w = tl.load(norm_weight + c, mask=c < C, other=0).to(tl.float32)
    d, mu, r = statistics(v, valid, eps, C)
    n = shifted(d * r[:, None] * w[None, :], norm_bias, c, C).to(y.data.dtype.element_ty)
    at = offsets(mean, m, axes)
    tl.store(mean.data + at, mu, mask=m < axes.positions)
    tl.store(rstd + at, r, mask=m < axes.positions)
    y_rows = y.data + offsets(y, m, axes)[:, None]
    # What pads a position's outputs to whole rows is ours too: written, so that every word is a wide one.
    for start in range(0, OUTPUTS, BLOCK_O):
        o = start + tl.arange(0, BLOCK_O)
        wt = tl.load(weight + o[None, :] * C + c[:, None], mask=(o < OUTPUTS)[None, :] & (c < C)[:, None], other=0)
        out = tl.dot(n, wt.to(n.dtype))
        if bias is not None:
            out += tl.load(bias + o, mask=o < BIASED, other=0).to(tl.float32)[None, :]
        writable = (m < axes.positions)[:, None] & (o < PADDED)[None, :]
        tl.store(y_rows + o[None, :], out.to(y.data.dtype.element_ty), mask=writable)


@triton.jit
def _norm_linear_wide(
    x: tl.tuple,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tuple,
    mean: tl.tuple,
    rstd: tl.tensor,
    axes: tl.tuple,
    eps: tl.tensor,
    C: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BIASED: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Store the same, BLOCK_O outputs of BLOCK_M positions; BLOCK_K channels at a time, first for the statistics."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    k = tl.arange(0, BLOCK_K)
    x_rows = x.data + offsets(x, m, axes)[:, None]
    mu = tl.zeros([BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, C, BLOCK_K):
        valid = (m < axes.positions)[:, None] & (start + k < C)[None, :]
        v = tl.load(x_rows + ((start + k).to(tl.int64) * x.strides[3])[None, :], mask=valid, other=0).to(tl.float32)
        # Of this block by itself, then joined with those before: no difference of large numbers (Chan et al., 1979).
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
        n = shifted((v - mu[:, None]) * r[:, None] * w[None, :], norm_bias, c, C).to(y.data.dtype.element_ty)
        wt = tl.load(weight + o[None, :] * C + c[:, None], mask=(o < OUTPUTS)[None, :] & (c < C)[:, None], other=0)
        acc = tl.dot(n, wt.to(n.dtype), acc)
    if bias is not None:
        acc += tl.load(bias + o, mask=o < BIASED, other=0).to(tl.float32)[None, :]
    y_rows = y.data + offsets(y, m, axes)[:, None]
    writable = (m < axes.positions)[:, None] & (o < PADDED)[None, :]
    tl.store(y_rows + o[None, :], acc.to(y.data.dtype.element_ty), mask=writable)
    if tl.program_id(1) == 0:
        at = offsets(mean, m, axes)
        tl.store(mean.data + at, mu, mask=m < axes.positions)
        tl.store(rstd + at, r, mask=m < axes.positions)


@triton.jit
def _norm_linear_backward(
    grad: tl.tuple,
    x: tl.tuple,
    norm_weight: tl.tensor,
    weight: tl.tensor,
    mean: tl.tuple,
    rstd: tl.tensor,
    residual: tl.tuple,
    dx: tl.tuple,
    partials: tl.tensor,
    axes: tl.tuple,
    C: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
) -> None:
    """Store dx, through the projection and then the norm, plus residual if there is one; and partials [programs, 2 C].

    Both as `_layer_norm_backward`.  One block of positions a program: a loop over blocks costs 60 registers, and with
    them half of the warps.
    """
    c = tl.arange(0, BLOCK_C)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    grad_rows = grad.data + offsets(grad, m, axes)[:, None]
    dn = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for start in range(0, OUTPUTS, BLOCK_O):
        o = start + tl.arange(0, BLOCK_O)
        dy = tl.load(grad_rows + o[None, :], mask=(m < axes.positions)[:, None] & (o < OUTPUTS)[None, :], other=0)
        wt = tl.load(weight + o[:, None] * C + c[None, :], mask=(o < OUTPUTS)[:, None] & (c < C)[None, :], other=0)
        dn = tl.dot(dy, wt.to(dy.dtype), dn)
    valid = (m < axes.positions)[:, None] & (c < C)[None, :]
    v = tl.load(pointers(x, m, c, axes), mask=valid, other=0).to(tl.float32)
    at = offsets(mean, m, axes)
    mu = tl.load(mean.data + at, mask=m < axes.positions, other=0)
    r = tl.load(rstd + at, mask=m < axes.positions, other=0)
    x_hat = tl.where(valid, (v - mu[:, None]) * r[:, None], 0.0)
    dw = tl.sum(dn * x_hat, 0)
    db = tl.sum(dn, 0)
    w = tl.load(norm_weight + c, mask=c < C, other=0).to(tl.float32)
    dn = dn * w[None, :]
    c1 = tl.sum(dn * x_hat, 1) / C
    c2 = tl.sum(dn, 1) / C
    out = (dn - c2[:, None] - x_hat * c1[:, None]) * r[:, None]
    if residual is not None:
        out += tl.load(pointers(residual, m, c, axes), mask=valid, other=0).to(tl.float32)
    tl.store(pointers(dx, m, c, axes), out.to(dx.data.dtype.element_ty), mask=valid)
    mine = partials + tl.program_id(0).to(tl.int64) * (2 * C) + c
    tl.store(mine, dw, mask=c < C)
    tl.store(mine + C, db, mask=c < C)


@triton.jit
def _norm_linear_weight(
    grad: tl.tuple,
    x: tl.tuple,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    mean: tl.tuple,
    rstd: tl.tensor,
    partials: tl.tensor,
    axes: tl.tuple,
    C: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Store in partials [programs, OUTPUTS C + BIASED] a tile of dy^T layer_norm(x), and the sum of dy, of a span."""
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    w = tl.load(norm_weight + c, mask=c < C, other=0).to(tl.float32)
    if norm_bias is not None:
        b = tl.load(norm_bias + c, mask=c < C, other=0).to(tl.float32)
    each = tl.cdiv(tl.cdiv(axes.positions, BLOCK_M), tl.num_programs(2))
    first = tl.program_id(2) * each * BLOCK_M
    last = min(axes.positions, first + each * BLOCK_M)
    dw = tl.zeros([BLOCK_O, BLOCK_C], tl.float32)
    db = tl.zeros([BLOCK_O], tl.float32)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        at = offsets(grad, m, axes)
        known = (m < axes.positions)[:, None] & (o < OUTPUTS)[None, :]
        dy = tl.load(grad.data + at[:, None] + o[None, :], mask=known, other=0)
        valid = (m < axes.positions)[:, None] & (c < C)[None, :]
        v = tl.load(pointers(x, m, c, axes), mask=valid, other=0).to(tl.float32)
        at = offsets(mean, m, axes)
        mu = tl.load(mean.data + at, mask=m < axes.positions, other=0)
        r = tl.load(rstd + at, mask=m < axes.positions, other=0)
        n = (v - mu[:, None]) * r[:, None] * w[None, :]
        if norm_bias is not None:
            n += b[None, :]
        dw = tl.dot(tl.trans(dy), n.to(dy.dtype), dw)
        if BIASED > 0:
            db += tl.sum(dy.to(tl.float32), 0)
    mine = partials + tl.program_id(2).to(tl.int64) * (OUTPUTS * C + BIASED)
    tl.store(mine + o[:, None] * C + c[None, :], dw, mask=(o < OUTPUTS)[:, None] & (c < C)[None, :])
    if BIASED > 0 and tl.program_id(1) == 0:
        tl.store(mine + OUTPUTS * C + o, db, mask=o < BIASED)


FORWARD = register(
    "norm_linear",
    _norm_linear,
    configs(
        "BLOCK_M BLOCK_O",
        *((m, o, w, s) for m, w in ((64, 4), (64, 8), (128, 8)) for o in (16, 64, 128) for s in (2, 3)),
    ),
)
WIDE = register_by_precision(
    "norm_linear_wide",
    _norm_linear_wide,
    configs(
        "BLOCK_M BLOCK_O BLOCK_K", *((m, 64, k, w, s) for m, w in ((64, 4), (128, 8)) for k in (32, 64) for s in (2, 3))
    ),
    configs("BLOCK_M BLOCK_O BLOCK_K", (32, 32, 32, 4, 1), (64, 64, 16, 8, 1), (64, 32, 16, 4, 1)),
)
BACKWARD = register_by_precision(
    "norm_linear_backward",
    _norm_linear_backward,
    configs(
        "BLOCK_M BLOCK_O",
        *((m, o, 8, s) for m in (16, 32, 64) for o in (16, 32, 64) for s in (2, 3)),
        *((m, o, 4, 2) for m in (16, 32, 64) for o in (16, 32)),
        *((128, o, 16, 2) for o in (32, 64)),
    ),
    configs("BLOCK_M BLOCK_O", (16, 16, 4, 1), (16, 16, 8, 1), (32, 16, 8, 1)),
)
WEIGHT = register_by_precision(
    "norm_linear_weight",
    _norm_linear_weight,
    configs(
        "BLOCK_M BLOCK_O BLOCK_C",
        *((m, 128, 128, 8, s) for m in (32, 64) for s in (2, 3)),
        *((m, 64, 128, w, s) for m in (32, 64) for w in (4, 8) for s in (2, 3)),
        *((64, o, 64, w, s) for o, w in ((64, 4), (128, 8)) for s in (2, 3)),
        *((64, 16, c, 4, 2) for c in (64, 128)),
    ),
    configs("BLOCK_M BLOCK_O BLOCK_C", (16, 64, 64, 4, 1), (32, 64, 64, 8, 1), (16, 16, 64, 4, 1)),
)


def norm_linear(t: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Compute warpfold::norm_linear."""
    x = t.x
    c, outputs = x.shape[-1], t.weight.shape[0]
    y, (mean, rstd) = empty_projected(x, outputs), empty_statistics(x)
    p = Positions({"x": x}, writes={"y": y, "mean": mean[..., None]})
    wide = c > WIDEST or x.element_size() > 2
    kernel = (WIDE if wide else FORWARD).tiled((c, outputs), x)
    rows = cdiv(p.count, kernel["BLOCK_M"])
    kernel.run(
        (rows, cdiv(outputs, kernel["BLOCK_O"])) if wide else (rows,),
        **p.arguments,
        norm_weight=t.norm_weight.contiguous(),
        norm_bias=contiguous(t.norm_bias),
        weight=cast_weight(t.weight, x, p.count),
        bias=contiguous(t.bias),
        rstd=rstd,
        eps=t.eps,
        C=c,
        OUTPUTS=outputs,
        BIASED=0 if t.bias is None else len(t.bias),
        PADDED=padded(outputs) if p.writes_in_place("y") else outputs,
        **({} if wide else {"BLOCK_C": power_of_two(c)}),
    )
    p.copy_back()
    return y, mean, rstd


def norm_linear_backward(
    t: Operands, residual: Tensor | None = None, beside: Sequence[Sum] = ()
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::norm_linear_backward; residual [*, c]: added to the gradient of x; beside: sums to make too."""
    grad, x = channels_last(t.grad), t.x
    norm_weight, norm_bias = t.norm_weight.contiguous(), contiguous(t.norm_bias)
    c, outputs, dx = x.shape[-1], t.weight.shape[0], empty_like(x)
    p = Positions({"x": x, "grad": grad, "mean": t.mean[..., None], "residual": residual}, writes={"dx": dx})
    kernel = BACKWARD.tiled((c, outputs), x)
    programs = cdiv(p.count, kernel["BLOCK_M"])
    partials = empty_partials(x, programs, 2 * c)
    kernel.run(
        (programs,),
        **p.arguments,
        norm_weight=norm_weight,
        weight=cast_weight(t.weight, x, p.count),
        rstd=t.scale,
        partials=partials,
        C=c,
        OUTPUTS=outputs,
        BLOCK_C=power_of_two(c),
    )
    p.copy_back()
    dnorm_weight, dnorm_bias, dweight, dbias = empty_parameters(norm_weight, norm_bias, t.weight, t.bias)
    biased = 0 if t.bias is None else len(t.bias)
    of_norm = Sum(partials, (dnorm_weight, or_unwanted(dnorm_bias, partials, c)))
    # The weight's, by a kernel of our own and not torch.mm: that would want the normalised tensor written and read
    # (twice c numbers of a position), grad read once more for the bias, and its sums rounded to the dtype of x.
    p = Positions({"x": x, "grad": grad, "mean": t.mean[..., None]}, writes={})
    kernel = WEIGHT.tiled((c, outputs), x)
    tiles = cdiv(outputs, kernel["BLOCK_O"]), cdiv(c, kernel["BLOCK_C"])
    programs = programs_for(p.count, kernel["BLOCK_M"], max(1, TILES // (tiles[0] * tiles[1])))
    of_weight = empty_partials(x, programs, outputs * c + biased)
    kernel.run(
        (*tiles, programs),
        **p.arguments,
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        rstd=t.scale,
        partials=of_weight,
        C=c,
        OUTPUTS=outputs,
        BIASED=biased,
    )
    sum_partials(of_norm, Sum(of_weight, (dweight, dbias)), *beside)
    return dx, dnorm_weight, dnorm_bias, dweight, dbias
