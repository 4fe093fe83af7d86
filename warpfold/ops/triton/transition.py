"""transition on a GPU: the hidden layer stays in registers, tile by tile, forward and backward.

In the forward pass a program owns BLOCK_M positions: their normalised channels, and the sums of all outputs.  It
iterates over BLOCK_H hidden units at a time, and reads their weights from the L2 cache.  Each weight is used for
BLOCK_M multiplications, so with 16 bits there are 2 BLOCK_M operations per byte; at 128 positions this balances tensor
cores and cache.

The backward pass of ReLU with at most 128 channels in 16 bits consists of two kernels, because the gradient of x is a
sum over the hidden layer, that of the weights is a sum over positions, and both do not fit the registers.  For each
hidden activation the first kernel costs 6 C operations, 2 C per product.  The second kernel recomputes the activation
and its gradient and costs 8 C.  The first kernel stores the normalised x, so that the second only multiplies.

With more channels, for SwiGLU, and in fp32, torch (cuBLAS) computes the products.  They run on so many positions at a
time that the hidden layer and its gradient stay in the L2 cache: `_by_products`.

A tile of normalised channels passes through memory: it is written a few rows at a time and read as a whole in 16 bits,
which leaves the registers to the sums.  The gradient of the norm is computed in the same way.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.dispatch import Operands, empty_like, empty_parameters
from warpfold.ops.transition import HALVES
from warpfold.ops.triton.launch import configs, register, register_by_precision
from warpfold.ops.triton.linear import layer_norm, shifted, statistics
from warpfold.ops.triton.positions import (
    Positions,
    Sum,
    cast_weight,
    cdiv,
    channels_last,
    chunks_of,
    contiguous,
    empty_partials,
    fp32_product,
    or_unwanted,
    pointers,
    power_of_two,
    programs_for,
    span,
    sum_partials,
)

TILES = 256  # programs for weight gradients
FUSED = 128  # most channels of the fused ReLU backward
# Bytes of the outputs of `up` and of the hidden layer's gradient in a chunk, 8,192 positions with 256 channels.  They
# must stay in the 50 MB of an H100's L2 cache between the products that write and read them.
CHUNK_BYTES = 2**25
# Spans of the positions of a chunk, with separate sums for the bias of `up`.
SPANS = 64


def transition(t: Operands) -> Tensor:
    """Compute warpfold::transition."""
    x = t.x
    y = empty_like(x)
    p = Positions({"x": x}, writes={"y": y})
    key, sizes = _sizes(t)
    kernel = FORWARD.tiled(key, x)
    kernel.run(
        (cdiv(p.count, kernel["BLOCK_M"]),),
        **p.arguments,
        **_parameters(t, p.count),
        down_bias=contiguous(t.down_bias),
        eps=t.eps,
        GATED=key[-1] > 1,
        RESIDUAL=t.residual,
        **sizes,
    )
    p.copy_back()
    return y


def transition_backward(t: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::transition_backward."""
    grad, x = channels_last(t.grad), t.x
    key, sizes = _sizes(t)
    c, hidden, halves = key
    if c > FUSED or halves > 1 or x.element_size() > 2:
        return _by_products(t.but(grad=grad))
    parameters = _parameters(t, x.numel() // c)
    dx, normalised = empty_like(x), empty_like(grad)
    gradients = empty_parameters(t.norm_weight, t.norm_bias, t.up, t.up_bias, t.down, t.down_bias)
    dnorm_weight, dnorm_bias, dup, dup_bias, ddown, ddown_bias = gradients
    p = Positions({"x": x, "grad": grad}, writes={"dx": dx, "normalised": normalised})
    kernel = BACKWARD.tiled(key, x)
    programs = cdiv(p.count, kernel["BLOCK_M"])
    partials = empty_partials(x, programs, 3 * c)
    kernel.run((programs,), **p.arguments, **parameters, **sizes, partials=partials, eps=t.eps, RESIDUAL=t.residual)
    p.copy_back()
    biases = or_unwanted(dnorm_bias, partials, c), or_unwanted(ddown_bias, partials, c)
    rows = Sum(partials, (dnorm_weight, *biases))
    p = Positions({"normalised": normalised, "grad": grad}, writes={})
    kernel = WEIGHT.tiled(key, x)
    tiles = cdiv(hidden, kernel["BLOCK_H"])
    programs = programs_for(p.count, kernel["BLOCK_M"], max(1, TILES // tiles))
    partials = empty_partials(x, programs, hidden * (c + 1) + c * hidden)
    arguments = {name: parameters[name] for name in ("up", "up_bias", "down")} | sizes
    kernel.run((tiles, programs), **p.arguments, **arguments, partials=partials)
    sum_partials(rows, Sum(partials, (dup, or_unwanted(dup_bias, partials, hidden), ddown)))
    return dx, dnorm_weight, dnorm_bias, dup, dup_bias, ddown, ddown_bias


def _by_products(t: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients by torch's products, around a kernel for the activation and one for the norm."""
    x, grad, (c, hidden) = t.x, t.grad, t.down.shape
    halves, dx = HALVES[t.activation], empty_like(x)
    outputs = halves * hidden
    # dx replaces the gradient of the normalised x in memory, if the channels of a position are contiguous there.
    written = dx if dx.stride(-1) == 1 else x.new_empty(x.shape)
    order = sorted(range(x.dim() - 1), key=written.stride, reverse=True)
    normalised, *_ = layer_norm(Operands(x=x, weight=t.norm_weight, bias=t.norm_bias, eps=t.eps))
    n, g, dn = (some.permute(*order, -1).reshape(-1, c) for some in (normalised, grad, written))
    up, down = t.up.to(x.dtype), t.down.to(x.dtype)
    gradients = empty_parameters(t.norm_weight, t.norm_bias, t.up, t.up_bias, t.down, t.down_bias)
    dnorm_weight, dnorm_bias, dup, dup_bias, ddown, ddown_bias = gradients

    count = len(n)
    at_once = min(count, max(1, CHUNK_BYTES // ((outputs + hidden) * x.element_size())))
    chunks = cdiv(count, at_once)
    kernel = ACTIVATION.tiled((hidden, halves), x)
    programs = programs_for(at_once, kernel["BLOCK_M"], SPANS)
    weights = empty_partials(x, chunks, (outputs + hidden) * c)
    biases = empty_partials(x, chunks * programs, outputs)
    pre, inner = x.new_empty(at_once, outputs), x.new_empty(at_once, hidden)
    for number, first, end in chunks_of(count, at_once, x):
        some_n, some_g = n[first:end], g[first:end]
        of_up, of_hidden = pre[: len(some_n)], inner[: len(some_n)]
        torch.mm(some_n, up.t(), out=of_up)
        torch.mm(some_g, down, out=of_hidden)
        kernel.run(
            (cdiv(hidden, kernel["BLOCK_H"]), programs),
            pre=of_up,
            inner=of_hidden,
            bias=contiguous(t.up_bias),
            partials=biases[number * programs :],
            rows=len(some_n),
            HIDDEN=hidden,
            GATED=halves > 1,
        )
        torch.mm(of_up, up, out=dn[first:end])
        own_up, own_down = weights[number].split([outputs * c, c * hidden])
        fp32_product(of_up.t(), some_n, own_up.view(outputs, c))
        fp32_product(some_g.t(), of_hidden, own_down.view(c, hidden))

    p = Positions({"x": x, "grad": grad, "dnormed": written}, writes={"dx": dx})
    kernel = NORM_BACKWARD.tiled((c,), x)
    programs = cdiv(p.count, kernel["BLOCK_M"])
    partials = empty_partials(x, programs, 3 * c)
    kernel.run(
        (programs,),
        **p.arguments,
        norm_weight=t.norm_weight.contiguous(),
        partials=partials,
        eps=t.eps,
        C=c,
        RESIDUAL=t.residual,
        BLOCK_C=power_of_two(c),
    )
    p.copy_back()
    of_rows = dnorm_weight, or_unwanted(dnorm_bias, partials, c), or_unwanted(ddown_bias, partials, c)
    of_weights = Sum(weights, (dup, ddown))
    sum_partials(Sum(partials, of_rows), of_weights, Sum(biases, (or_unwanted(dup_bias, partials, outputs),)))
    return dx, dnorm_weight, dnorm_bias, dup, dup_bias, ddown, ddown_bias


def _sizes(t: Operands) -> tuple[tuple[int, int, int], dict[str, int]]:
    """Return the key of the kernels' launch configurations, and their constants."""
    c, hidden = t.down.shape
    sizes = {"C": c, "HIDDEN": hidden, "BLOCK_C": power_of_two(c)}
    if t.x.element_size() == 2:
        sizes["BLOCK_K"] = 0  # all channels at once
    return (c, hidden, HALVES[t.activation]), sizes


def _parameters(t: Operands, positions: int) -> dict[str, Tensor | None]:
    """Return the kernels' arguments for the parameters, by name."""
    whole = {name: contiguous(getattr(t, name)) for name in ("norm_weight", "norm_bias", "up_bias")}
    return whole | {name: cast_weight(getattr(t, name), t.x, positions) for name in ("up", "down")}


@triton.constexpr_function
def rows_at_once(rows: int, channels: int) -> int:
    """Return the number of rows of a tile to process at a time if registers are scarce: 16 elements per thread."""
    return min(int(rows), 4096 // int(channels))


@triton.jit
def _normalise(
    x: tl.tuple, norm_weight: tl.tensor, norm_bias: tl.tensor, n: tl.tuple, axes: tl.tuple, eps: tl.tensor,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr,
) -> None:  # fmt: skip
    """Store the normalised x of BLOCK_M positions in n, and wait until all threads of the program can read it.

    Some positions are processed at a time, because a whole tile in fp32 would not fit the registers.
    """
    BLOCK_R: tl.constexpr = rows_at_once(BLOCK_M, BLOCK_C)
    c = tl.arange(0, BLOCK_C)
    w = tl.load(norm_weight + c, mask=c < C, other=0).to(tl.float32)
    for start in range(0, BLOCK_M, BLOCK_R):
        m = tl.program_id(0) * BLOCK_M + start + tl.arange(0, BLOCK_R)
        valid = (m < axes.positions)[:, None] & (c < C)[None, :]
        v = tl.load(pointers(x, m, c, axes), mask=valid, other=0).to(tl.float32)
        d, _, r = statistics(v, valid, eps, C)
        out = shifted(d * r[:, None] * w[None, :], norm_bias, c, C)
        tl.store(pointers(n, m, c, axes), out.to(n.data.dtype.element_ty), mask=valid)
    tl.debug_barrier()


@triton.jit
def _load_whole(x: tl.tuple, m: tl.tensor, axes: tl.tuple, C: tl.constexpr, BLOCK_C: tl.constexpr) -> tl.tensor:
    """Load all channels of positions m, clamped to the last one: a mask would occupy registers for long."""
    c = tl.arange(0, BLOCK_C)
    return tl.load(pointers(x, tl.minimum(m, axes.positions - 1), c, axes), mask=(c < C)[None, :], other=0)


@triton.jit
def _up(
    n: tl.tensor, weight: tl.tensor, normalised: tl.tuple, up: tl.tensor, up_bias: tl.tensor, m: tl.tensor,
    o: tl.tensor, known: tl.tensor, axes: tl.tuple, C: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Compute the outputs o of `up` in fp32, [m, o], from normalised channels n [m, c] and weights [o, c].

    With BLOCK_K, this many channels at a time are loaded: products without tensor cores must be short.
    """
    if BLOCK_K == 0:
        pre = tl.dot(n, tl.trans(weight))
    else:
        pre = tl.zeros([m.shape[0], o.shape[0]], tl.float32)
        for start in range(0, C, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            valid = (m < axes.positions)[:, None] & (k < C)[None, :]
            some = tl.load(pointers(normalised, m, k, axes), mask=valid, other=0)
            w = tl.load(up + o[None, :] * C + k[:, None], mask=known[None, :] & (k < C)[:, None], other=0)
            pre = tl.dot(some, w.to(some.dtype), pre)
    if up_bias is not None:
        pre += tl.load(up_bias + o, mask=known, other=0).to(tl.float32)[None, :]
    return pre


@triton.jit
def _of_up(
    up: tl.tensor, o: tl.tensor, known: tl.tensor, dtype: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr
) -> tl.tensor:
    """Load the weights of outputs o of `up`, [o, c]."""
    c = tl.arange(0, BLOCK_C)
    return tl.load(up + o[:, None] * C + c[None, :], mask=known[:, None] & (c < C)[None, :], other=0).to(dtype)


@triton.jit
def _transition(
    x: tl.tuple, norm_weight: tl.tensor, norm_bias: tl.tensor, up: tl.tensor, up_bias: tl.tensor, down: tl.tensor,
    down_bias: tl.tensor, y: tl.tuple, axes: tl.tuple, eps: tl.tensor,
    C: tl.constexpr, HIDDEN: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Store y of BLOCK_M positions; GATED: silu of one half of `up`'s outputs times the other, otherwise their relu."""
    _normalise(x, norm_weight, norm_bias, y, axes, eps, C, BLOCK_C, BLOCK_M)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    dtype = y.data.dtype.element_ty
    n = _load_whole(y, m, axes, C, BLOCK_C)
    # In 16 bits the sum starts with x, since adding x last takes 80 registers more.  In fp32 this would lose digits.
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    if RESIDUAL and BLOCK_K == 0:
        acc = _load_whole(x, m, axes, C, BLOCK_C).to(tl.float32)
    for start in range(0, HIDDEN, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        known = h < HIDDEN
        weight = _of_up(up, h, known, dtype, C, BLOCK_C)
        hidden = _up(n, weight, y, up, up_bias, m, h, known, axes, C, BLOCK_K)
        if GATED:
            o = HIDDEN + h
            values = _of_up(up, o, known, dtype, C, BLOCK_C)
            value = _up(n, values, y, up, up_bias, m, o, known, axes, C, BLOCK_K)
            hidden = hidden * tl.sigmoid(hidden) * value
        else:
            hidden = tl.maximum(hidden, 0.0)
        w = tl.load(down + c[None, :] * HIDDEN + h[:, None], mask=known[:, None] & (c < C)[None, :], other=0)
        acc = tl.dot(hidden.to(dtype), w.to(dtype), acc)
    if down_bias is not None:
        acc += tl.load(down_bias + c, mask=c < C, other=0).to(tl.float32)[None, :]
    valid = (m < axes.positions)[:, None] & (c < C)[None, :]
    if BLOCK_K > 0:
        # The normalised x is in y, and other threads may read it until here.
        tl.debug_barrier()
    if RESIDUAL and BLOCK_K > 0:
        acc += tl.load(pointers(x, m, c, axes), mask=valid, other=0).to(tl.float32)
    tl.store(pointers(y, m, c, axes), acc.to(dtype), mask=valid)


@triton.jit
def _through_norm(
    grad: tl.tuple, x: tl.tuple, norm_weight: tl.tensor, dnormed: tl.tuple, dx: tl.tuple, partials: tl.tensor,
    axes: tl.tuple, eps: tl.tensor,
    C: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr,
) -> None:  # fmt: skip
    """Store dx and the partials of BLOCK_M positions from the gradient of the normalised x, which may be in dx.

    This is `_layer_norm_backward` for some positions at a time, as in `_normalise`.
    """
    BLOCK_R: tl.constexpr = rows_at_once(BLOCK_M, BLOCK_C)
    c = tl.arange(0, BLOCK_C)
    w = tl.load(norm_weight + c, mask=c < C, other=0).to(tl.float32)
    dw = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    db = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    dys = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for start in range(0, BLOCK_M, BLOCK_R):
        m = tl.program_id(0) * BLOCK_M + start + tl.arange(0, BLOCK_R)
        valid = (m < axes.positions)[:, None] & (c < C)[None, :]
        v = tl.load(pointers(x, m, c, axes), mask=valid, other=0).to(tl.float32)
        d, _, r = statistics(v, valid, eps, C)
        x_hat = d * r[:, None]
        dn = tl.load(pointers(dnormed, m, c, axes), mask=valid, other=0).to(tl.float32)
        dy = tl.load(pointers(grad, m, c, axes), mask=valid, other=0).to(tl.float32)
        dw += dn * x_hat
        db += dn
        dys += dy
        dn = dn * w[None, :]
        c1 = tl.sum(dn * x_hat, 1) / C
        c2 = tl.sum(dn, 1) / C
        out = (dn - c2[:, None] - x_hat * c1[:, None]) * r[:, None]
        if RESIDUAL:
            out += dy
        tl.store(pointers(dx, m, c, axes), out.to(dx.data.dtype.element_ty), mask=valid)
    mine = partials + tl.program_id(0).to(tl.int64) * (3 * C) + c
    tl.store(mine, tl.sum(dw, 0), mask=c < C)
    tl.store(mine + C, tl.sum(db, 0), mask=c < C)
    tl.store(mine + 2 * C, tl.sum(dys, 0), mask=c < C)


@triton.jit
def _transition_backward(
    grad: tl.tuple, x: tl.tuple, norm_weight: tl.tensor, norm_bias: tl.tensor, up: tl.tensor, up_bias: tl.tensor,
    down: tl.tensor, dx: tl.tuple, normalised: tl.tuple, partials: tl.tensor, axes: tl.tuple, eps: tl.tensor,
    C: tl.constexpr, HIDDEN: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Store dx and the normalised x of BLOCK_M positions, and their partial gradients, for ReLU.

    partials [programs, 3 C]: for the norm's weight and bias, as in `_layer_norm_backward`, and the bias of `down`.
    """
    _normalise(x, norm_weight, norm_bias, normalised, axes, eps, C, BLOCK_C, BLOCK_M)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    dtype = dx.data.dtype.element_ty
    n = _load_whole(normalised, m, axes, C, BLOCK_C)
    g = _load_whole(grad, m, axes, C, BLOCK_C)
    dn = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for start in range(0, HIDDEN, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        known = h < HIDDEN
        w = tl.load(down + c[:, None] * HIDDEN + h[None, :], mask=(c < C)[:, None] & known[None, :], other=0)
        dh = tl.dot(g, w.to(dtype))
        weight = _of_up(up, h, known, dtype, C, BLOCK_C)
        pre = _up(n, weight, normalised, up, up_bias, m, h, known, axes, C, BLOCK_K)
        dpre = tl.where(pre > 0, dh, 0.0).to(dtype)
        dn = tl.dot(dpre, weight, dn)
    # It passes through memory, rounded like the gradient of a separate layer, and the norm reads a few rows at a time.
    tl.store(pointers(dx, m, c, axes), dn.to(dtype), mask=(m < axes.positions)[:, None] & (c < C)[None, :])
    tl.debug_barrier()
    _through_norm(grad, x, norm_weight, dx, dx, partials, axes, eps, C, RESIDUAL, BLOCK_C, BLOCK_M)


@triton.jit
def _transition_activation(
    pre: tl.tensor, inner: tl.tensor, bias: tl.tensor, partials: tl.tensor, rows: tl.tensor,
    HIDDEN: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
) -> None:  # fmt: skip
    """Replace pre and inner in place, and store the partial gradients of the bias of `up`.

    pre [rows, outputs]: the outputs of `up` without their bias; replaced by their gradient.
    inner [rows, HIDDEN]: the gradient of the hidden layer; replaced by the layer.
    partials [programs, outputs]: the sums of the bias's gradient over a span of the rows.
    """
    OUTPUTS: tl.constexpr = HIDDEN * (1 + GATED)
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    known = h < HIDDEN
    dtype = pre.dtype.element_ty
    first, last = span(rows, BLOCK_M)
    sums = tl.zeros([BLOCK_H], tl.float32)
    value_sums = tl.zeros([BLOCK_H], tl.float32)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        valid = (m < last)[:, None] & known[None, :]
        at = m[:, None].to(tl.int64) * OUTPUTS + h[None, :]
        at_inner = m[:, None].to(tl.int64) * HIDDEN + h[None, :]
        x = tl.load(pre + at, mask=valid, other=0).to(tl.float32)
        dh = tl.load(inner + at_inner, mask=valid, other=0).to(tl.float32)
        if bias is not None:
            x += tl.load(bias + h, mask=known, other=0).to(tl.float32)[None, :]
        if GATED:
            value = tl.load(pre + at + HIDDEN, mask=valid, other=0).to(tl.float32)
            if bias is not None:
                value += tl.load(bias + HIDDEN + h, mask=known, other=0).to(tl.float32)[None, :]
            share = tl.sigmoid(x)
            silu = x * share
            hidden = silu * value
            dvalue = (dh * silu).to(dtype)
            dpre = (dh * value * (share + silu * (1 - share))).to(dtype)
            tl.store(pre + at + HIDDEN, dvalue, mask=valid)
            value_sums += tl.sum(dvalue.to(tl.float32), 0)
        else:
            hidden = tl.maximum(x, 0.0)
            dpre = tl.where(x > 0, dh, 0.0).to(dtype)
        tl.store(pre + at, dpre, mask=valid)
        tl.store(inner + at_inner, hidden.to(dtype), mask=valid)
        sums += tl.sum(dpre.to(tl.float32), 0)
    mine = partials + tl.program_id(1).to(tl.int64) * OUTPUTS + h
    tl.store(mine, sums, mask=known)
    if GATED:
        tl.store(mine + HIDDEN, value_sums, mask=known)


@triton.jit
def _transition_weight(
    normalised: tl.tuple, grad: tl.tuple, up: tl.tensor, up_bias: tl.tensor, down: tl.tensor, partials: tl.tensor,
    axes: tl.tuple,
    C: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Store the partial gradients for BLOCK_H hidden units and a span of positions, for ReLU.

    partials [programs, ...] has `up` [HIDDEN, C], its bias [HIDDEN] and `down` [C, HIDDEN] one after another.  The
    hidden layer and its gradient are recomputed.
    """
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    known = h < HIDDEN
    c = tl.arange(0, BLOCK_C)
    dtype = normalised.data.dtype.element_ty
    writable = known[:, None] & (c < C)[None, :]
    weight = _of_up(up, h, known, dtype, C, BLOCK_C)
    across = tl.load(down + c[None, :] * HIDDEN + h[:, None], mask=writable, other=0).to(dtype)
    first, last = span(axes.positions, BLOCK_M)
    dup = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    dup_bias = tl.zeros([BLOCK_H], tl.float32)
    ddown = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        valid = (m < axes.positions)[:, None] & (c < C)[None, :]
        n = tl.load(pointers(normalised, m, c, axes), mask=valid, other=0)
        g = tl.load(pointers(grad, m, c, axes), mask=valid, other=0)
        # Hidden units are along the rows, so that products need the registers as the product before leaves them.
        pre = tl.dot(weight, tl.trans(n))
        if up_bias is not None:
            pre += tl.load(up_bias + h, mask=known, other=0).to(tl.float32)[:, None]
        dh = tl.dot(across, tl.trans(g))
        dpre = tl.where(pre > 0, dh, 0.0)
        dup = tl.dot(dpre.to(dtype), n, dup)
        dup_bias += tl.sum(dpre, 1)
        ddown = tl.dot(tl.maximum(pre, 0.0).to(dtype), g, ddown)
    mine = partials + tl.program_id(1).to(tl.int64) * (HIDDEN * (C + 1) + C * HIDDEN)
    tl.store(mine + h[:, None] * C + c[None, :], dup, mask=writable)
    mine += HIDDEN * C
    tl.store(mine + h, dup_bias, mask=known)
    mine += HIDDEN
    tl.store(mine + c[None, :] * HIDDEN + h[:, None], ddown, mask=writable)


FORWARD = register_by_precision(
    "transition",
    _transition,
    configs(
        "BLOCK_M BLOCK_H",
        *((128, h, 8, s) for h in (32, 64) for s in (2, 3)),
        *((64, h, w, s) for h in (32, 64) for w in (4, 8) for s in (2, 3)),
        *((32, 32, w, 2) for w in (4, 8)),
    ),
    configs("BLOCK_M BLOCK_H BLOCK_K", *((m, 16, 16, w, 1) for m in (16, 32) for w in (4, 8))),
)
BACKWARD = register(
    "transition_backward",
    _transition_backward,
    configs(
        "BLOCK_M BLOCK_H",
        *((128, h, 8, 2) for h in (16, 32, 64)),
        *((64, h, w, s) for h in (32, 64) for w in (4, 8) for s in (1, 2)),
        *((32, h, w, 2) for h in (16, 32) for w in (4, 8)),
    ),
)
WEIGHT = register(
    "transition_weight",
    _transition_weight,
    configs(
        "BLOCK_M BLOCK_H",
        *((m, 64, w, s) for m in (32, 64) for w in (4, 8) for s in (2, 3)),
        (32, 128, 8, 2),
        *((m, 32, 4, 2) for m in (32, 64)),
    ),
)
ACTIVATION = register(
    "transition_activation",
    _transition_activation,
    configs("BLOCK_M BLOCK_H", *((m, h, w, 1) for m in (16, 32) for h in (64, 128) for w in (4, 8))),
)
NORM_BACKWARD = register(
    "transition_norm_backward",
    _through_norm,
    configs("BLOCK_M", *((m, w, 1) for m in (16, 32, 64, 128) for w in (4, 8))),
)
