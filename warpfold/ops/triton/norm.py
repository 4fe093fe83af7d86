"""layer_norm on a GPU; norm_linear has a file of its own.

What is read and written, in tensors [*, c]: forward x and y, once each; backward grad, x and dx, once each.
"""

import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.norm import empty_statistics
from warpfold.ops.tensors import empty_like, empty_parameters
from warpfold.ops.triton.launch import configs, register
from warpfold.ops.triton.norm_linear import norm_linear as norm_linear
from warpfold.ops.triton.norm_linear import norm_linear_backward as norm_linear_backward
from warpfold.ops.triton.norm_tiles import shifted, statistics
from warpfold.ops.triton.positions import Positions, contiguous, offsets, pointers, power_of_two, programs_for
from warpfold.ops.triton.sums import Sum, empty_partials, sum_partials

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


_CANDIDATES = configs("BLOCK_M", *((m, warps, 1) for m in (2, 4, 8, 16, 32, 64) for warps in (2, 4, 8)))
FORWARD = register("layer_norm", _layer_norm, _CANDIDATES)
BACKWARD = register("layer_norm_backward", _layer_norm_backward, _CANDIDATES)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute warpfold::layer_norm."""
    c, y, (mean, rstd) = x.shape[-1], empty_like(x), empty_statistics(x)
    p = Positions({"x": x}, writes={"y": y, "mean": mean[..., None]})
    kernel = FORWARD.tiled((c, x.element_size()), x)
    kernel.run(
        (triton.cdiv(p.count, kernel["BLOCK_M"]),),
        **p.arguments,
        weight=weight.contiguous(),
        bias=contiguous(bias),
        rstd=rstd,
        eps=eps,
        C=c,
        BLOCK_C=power_of_two(c),
    )
    p.copy_back()
    return y, mean, rstd


def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute warpfold::layer_norm_backward."""
    c, dx = x.shape[-1], empty_like(x)
    p = Positions({"x": x, "grad": grad, "mean": mean[..., None]}, writes={"dx": dx})
    kernel = BACKWARD.tiled((c, x.element_size()), x)
    programs = programs_for(p.count, kernel["BLOCK_M"], PROGRAMS)
    partials = empty_partials(x, programs, 2 * c)
    kernel.run(
        (programs,),
        **p.arguments,
        weight=weight.contiguous(),
        rstd=rstd,
        partials=partials,
        C=c,
        BLOCK_C=power_of_two(c),
    )
    p.copy_back()
    dweight, dbias = empty_parameters(weight, weight)
    sum_partials(Sum(partials, (dweight, dbias)))
    return dx, dweight, dbias
