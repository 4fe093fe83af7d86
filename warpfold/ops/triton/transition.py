"""transition on a GPU: the hidden layer stays in registers, tile by tile, forward and backward.

Forward, a program owns BLOCK_M positions: their normalised channels, and the sums of all outputs.  It runs over the
hidden layer, BLOCK_H numbers at a time, whose weights it reads from the second cache: BLOCK_M multiplications for each
number read, so with 16 bits 2 BLOCK_M operations a byte: at 128 positions as much as tensor cores and cache have.

The backward pass is two kernels, since the gradient of x is a sum over the hidden layer, that of the weights one over
positions, and neither fits beside the other.  Each computes the hidden layer and its gradient again: two products of
seven (five are the least).  Kept from one to the other they would be written and read, eight times the bytes of x and
more; products that take less than that.  What the first one does leave is the normalised x, so that the second, which
reads it once for every tile of the hidden layer, has nothing but products to do.
"""

import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.dispatch import Operands, empty_like, empty_parameters
from warpfold.ops.triton.launch import configs, register_by_precision
from warpfold.ops.triton.linear import shifted, statistics
from warpfold.ops.triton.positions import (
    Positions,
    Sum,
    cast_weight,
    channels_last,
    contiguous,
    empty_partials,
    or_unwanted,
    pointers,
    power_of_two,
    programs_for,
    sum_partials,
)

TILES = 256  # programs of the gradient of the weights: as in `norm_linear`


def transition(t: Operands) -> Tensor:
    """Compute warpfold::transition."""
    x = t.x
    y = empty_like(x)
    p = Positions({"x": x}, writes={"y": y})
    key, sizes = _sizes(t)
    kernel = FORWARD.tiled(key, x)
    kernel.run(
        (triton.cdiv(p.count, kernel["BLOCK_M"]),),
        **p.arguments,
        **_parameters(t, p.count),
        down_bias=contiguous(t.down_bias),
        eps=t.eps,
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
    parameters = _parameters(t, x.numel() // c)
    dx, normalised = empty_like(x), empty_like(grad)
    gradients = empty_parameters(t.norm_weight, t.norm_bias, t.up, t.up_bias, t.down, t.down_bias)
    dnorm_weight, dnorm_bias, dup, dup_bias, ddown, ddown_bias = gradients
    p = Positions({"x": x, "grad": grad}, writes={"dx": dx, "normalised": normalised})
    kernel = BACKWARD.tiled(key, x)
    programs = triton.cdiv(p.count, kernel["BLOCK_M"])
    partials = empty_partials(x, programs, 3 * c)
    kernel.run((programs,), **p.arguments, **parameters, partials=partials, eps=t.eps, RESIDUAL=t.residual, **sizes)
    p.copy_back()
    biases = or_unwanted(dnorm_bias, partials, c), or_unwanted(ddown_bias, partials, c)
    rows = Sum(partials, (dnorm_weight, *biases))
    p = Positions({"normalised": normalised, "grad": grad}, writes={})
    kernel = WEIGHT.tiled(key, x)
    tiles = triton.cdiv(hidden, kernel["BLOCK_H"])
    programs = programs_for(p.count, kernel["BLOCK_M"], max(1, TILES // tiles))
    partials = empty_partials(x, programs, halves * hidden * (c + 1) + c * hidden)
    del parameters["norm_weight"], parameters["norm_bias"]
    kernel.run((tiles, programs), **p.arguments, **parameters, partials=partials, **sizes)
    sum_partials(rows, Sum(partials, (dup, or_unwanted(dup_bias, partials, halves * hidden), ddown)))
    return dx, dnorm_weight, dnorm_bias, dup, dup_bias, ddown, ddown_bias


def _sizes(t: Operands) -> tuple[tuple[int, int, int], dict[str, int]]:
    """Return the key of the kernels' launches, and their constants."""
    (c, hidden), gated = t.down.shape, t.activation == "swiglu"
    sizes = {"C": c, "HIDDEN": hidden, "GATED": int(gated), "BLOCK_C": power_of_two(c)}
    if t.x.element_size() == 2:
        sizes["BLOCK_K"] = 0  # all channels at once
    return (c, hidden, 1 + gated), sizes


def _parameters(t: Operands, positions: int) -> dict[str, Tensor | None]:
    """Return the parameters as the kernels take them, by the names of their arguments."""
    whole = {name: contiguous(getattr(t, name)) for name in ("norm_weight", "norm_bias", "up_bias")}
    return whole | {name: cast_weight(getattr(t, name), t.x, positions) for name in ("up", "down")}


@triton.jit
def _normalised(
    d: tl.tensor, r: tl.tensor, norm_weight: tl.tensor, norm_bias: tl.tensor, c: tl.tensor, C: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Return channels c in fp32, normalised, given their deviations from the mean, d [m, c]."""
    n = d * r[:, None] * tl.load(norm_weight + c, mask=c < C, other=0).to(tl.float32)[None, :]
    return shifted(n, norm_bias, c, C)


@triton.jit
def _up(
    n: tl.tensor, weight: tl.tensor, x: tl.tuple, norm: tl.tuple, norm_weight: tl.tensor, norm_bias: tl.tensor,
    up: tl.tensor, up_bias: tl.tensor, m: tl.tensor, o: tl.tensor, known: tl.tensor, axes: tl.tuple,
    C: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the outputs o of `up` in fp32, [m, o], of normalised channels n [m, c] and weights [o, c].

    With BLOCK_K, of the channels of x, so many at a time: products without tensor cores must be short.  norm: mean
    and 1 / deviation; None if x is normalised.
    """
    if BLOCK_K == 0:
        pre = tl.dot(n, tl.trans(weight))
    else:
        pre = tl.zeros([m.shape[0], o.shape[0]], tl.float32)
        for start in range(0, C, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            some = tl.load(pointers(x, m, k, axes), mask=(m < axes.positions)[:, None] & (k < C)[None, :], other=0)
            if norm is not None:
                some = _normalised(some - norm[0][:, None], norm[1], norm_weight, norm_bias, k, C)
            w = tl.load(up + o[None, :] * C + k[:, None], mask=known[None, :] & (k < C)[:, None], other=0)
            pre = tl.dot(some, w.to(some.dtype), pre)
    if up_bias is not None:
        pre += tl.load(up_bias + o, mask=known, other=0).to(tl.float32)[None, :]
    return pre


@triton.jit
def _dhidden(
    g: tl.tensor, grad: tl.tuple, down: tl.tensor, m: tl.tensor, h: tl.tensor, axes: tl.tuple,
    C: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the gradient of numbers h of the hidden layer in fp32, [m, h], given that of the output, g [m, c].

    With BLOCK_K, from so many channels of it at a time.
    """
    if BLOCK_K == 0:
        c = tl.arange(0, BLOCK_C)
        w = tl.load(down + c[:, None] * HIDDEN + h[None, :], mask=(c < C)[:, None] & (h < HIDDEN)[None, :], other=0)
        dh = tl.dot(g, w.to(g.dtype))
    else:
        dh = tl.zeros([m.shape[0], h.shape[0]], tl.float32)
        for start in range(0, C, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            some = tl.load(pointers(grad, m, k, axes), mask=(m < axes.positions)[:, None] & (k < C)[None, :], other=0)
            w = tl.load(down + k[:, None] * HIDDEN + h[None, :], mask=(k < C)[:, None] & (h < HIDDEN)[None, :], other=0)
            dh = tl.dot(some, w.to(some.dtype), dh)
    return dh


@triton.jit
def _of_up(
    up: tl.tensor, o: tl.tensor, known: tl.tensor, dtype: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr
) -> tl.tensor:
    """Load the weights of the outputs o of `up`, [o, c]."""
    c = tl.arange(0, BLOCK_C)
    return tl.load(up + o[:, None] * C + c[None, :], mask=known[:, None] & (c < C)[None, :], other=0).to(dtype)


@triton.jit
def _transition(
    x: tl.tuple,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    up: tl.tensor,
    up_bias: tl.tensor,
    down: tl.tensor,
    down_bias: tl.tensor,
    y: tl.tuple,
    axes: tl.tuple,
    eps: tl.tensor,
    C: tl.constexpr,
    HIDDEN: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Store y of BLOCK_M positions; GATED: silu of one half of the outputs of `up` times the other, else their relu."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    valid = (m < axes.positions)[:, None] & (c < C)[None, :]
    dtype = y.data.dtype.element_ty
    v = tl.load(pointers(x, m, c, axes), mask=valid, other=0).to(tl.float32)
    d, mu, r = statistics(v, valid, eps, C)
    n = _normalised(d, r, norm_weight, norm_bias, c, C).to(dtype)
    norm = (mu, r)
    # In 16 bits the sum begins with x: added last, it costs 80 registers more.  In fp32 the sum's roundings would show.
    acc = v if RESIDUAL and BLOCK_K == 0 else tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for start in range(0, HIDDEN, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        known = h < HIDDEN
        weight = _of_up(up, h, known, dtype, C, BLOCK_C)
        hidden = _up(n, weight, x, norm, norm_weight, norm_bias, up, up_bias, m, h, known, axes, C, BLOCK_K)
        if GATED:
            o = HIDDEN + h
            values = _of_up(up, o, known, dtype, C, BLOCK_C)
            value = _up(n, values, x, norm, norm_weight, norm_bias, up, up_bias, m, o, known, axes, C, BLOCK_K)
            hidden = hidden * tl.sigmoid(hidden) * value
        else:
            hidden = tl.maximum(hidden, 0.0)
        w = tl.load(down + c[None, :] * HIDDEN + h[:, None], mask=known[:, None] & (c < C)[None, :], other=0)
        acc = tl.dot(hidden.to(dtype), w.to(dtype), acc)
    if down_bias is not None:
        acc += tl.load(down_bias + c, mask=c < C, other=0).to(tl.float32)[None, :]
    if RESIDUAL and BLOCK_K > 0:
        acc += tl.load(pointers(x, m, c, axes), mask=valid, other=0).to(tl.float32)
    tl.store(pointers(y, m, c, axes), acc.to(dtype), mask=valid)


@triton.jit
def _transition_backward(
    grad: tl.tuple,
    x: tl.tuple,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    up: tl.tensor,
    up_bias: tl.tensor,
    down: tl.tensor,
    dx: tl.tuple,
    normalised: tl.tuple,
    partials: tl.tensor,
    axes: tl.tuple,
    eps: tl.tensor,
    C: tl.constexpr,
    HIDDEN: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Store dx and the normalised x of BLOCK_M positions; and in partials [programs, 3 C] what they add to the
    gradients of the norm's weight and bias, as in `_layer_norm_backward`, and of the bias of `down`."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    valid = (m < axes.positions)[:, None] & (c < C)[None, :]
    dtype = dx.data.dtype.element_ty
    v = tl.load(pointers(x, m, c, axes), mask=valid, other=0).to(tl.float32)
    d, mu, r = statistics(v, valid, eps, C)
    n = _normalised(d, r, norm_weight, norm_bias, c, C).to(dtype)
    tl.store(pointers(normalised, m, c, axes), n, mask=valid)
    g = tl.load(pointers(grad, m, c, axes), mask=valid, other=0)
    norm = (mu, r)
    dn = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for start in range(0, HIDDEN, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        known = h < HIDDEN
        dh = _dhidden(g, grad, down, m, h, axes, C, HIDDEN, BLOCK_C, BLOCK_K)
        weight = _of_up(up, h, known, dtype, C, BLOCK_C)
        pre = _up(n, weight, x, norm, norm_weight, norm_bias, up, up_bias, m, h, known, axes, C, BLOCK_K)
        if GATED:
            o = HIDDEN + h
            values = _of_up(up, o, known, dtype, C, BLOCK_C)
            value = _up(n, values, x, norm, norm_weight, norm_bias, up, up_bias, m, o, known, axes, C, BLOCK_K)
            share = tl.sigmoid(pre)
            silu = pre * share
            dn = tl.dot((dh * silu).to(dtype), values, dn)
            dpre = dh * value * (share + silu * (1 - share))
        else:
            dpre = tl.where(pre > 0, dh, 0.0)
        dn = tl.dot(dpre.to(dtype), weight, dn)
    # From here on as `_norm_linear_backward`.  x and grad are read once more: kept, they would cost registers.
    v = tl.load(pointers(x, m, c, axes), mask=valid, other=0).to(tl.float32)
    x_hat = tl.where(valid, (v - mu[:, None]) * r[:, None], 0.0)
    mine = partials + tl.program_id(0).to(tl.int64) * (3 * C) + c
    tl.store(mine, tl.sum(dn * x_hat, 0), mask=c < C)
    tl.store(mine + C, tl.sum(dn, 0), mask=c < C)
    dn = dn * tl.load(norm_weight + c, mask=c < C, other=0).to(tl.float32)[None, :]
    c1 = tl.sum(dn * x_hat, 1) / C
    c2 = tl.sum(dn, 1) / C
    out = (dn - c2[:, None] - x_hat * c1[:, None]) * r[:, None]
    dy = tl.load(pointers(grad, m, c, axes), mask=valid, other=0).to(tl.float32)
    tl.store(mine + 2 * C, tl.sum(dy, 0), mask=c < C)
    if RESIDUAL:
        out += dy
    tl.store(pointers(dx, m, c, axes), out.to(dtype), mask=valid)


@triton.jit
def _up_across(
    weight: tl.tensor, n: tl.tensor, normalised: tl.tuple, up: tl.tensor, up_bias: tl.tensor, m: tl.tensor,
    o: tl.tensor, known: tl.tensor, axes: tl.tuple, C: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the result of `_up` as [o, m]: products with it need it so, as a product leaves it in registers."""
    if BLOCK_K == 0:
        pre = tl.dot(weight, tl.trans(n))
        if up_bias is not None:
            pre += tl.load(up_bias + o, mask=known, other=0).to(tl.float32)[:, None]
    else:
        pre = tl.trans(_up(n, weight, normalised, None, None, None, up, up_bias, m, o, known, axes, C, BLOCK_K))
    return pre


@triton.jit
def _transition_weight(
    normalised: tl.tuple,
    grad: tl.tuple,
    up: tl.tensor,
    up_bias: tl.tensor,
    down: tl.tensor,
    partials: tl.tensor,
    axes: tl.tuple,
    C: tl.constexpr,
    HIDDEN: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Store in partials [programs, ...], of BLOCK_H numbers of the hidden layer and a span of positions, what is added
    to the gradients of `up` [OUTPUTS, C], of its bias [OUTPUTS] and of `down` [C, HIDDEN], which follow each other."""
    OUTPUTS: tl.constexpr = HIDDEN * (1 + GATED)
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    known = h < HIDDEN
    o = HIDDEN + h
    c = tl.arange(0, BLOCK_C)
    dtype = normalised.data.dtype.element_ty
    writable = known[:, None] & (c < C)[None, :]
    weight = _of_up(up, h, known, dtype, C, BLOCK_C)
    across = tl.load(down + c[None, :] * HIDDEN + h[:, None], mask=writable, other=0).to(dtype)
    each = tl.cdiv(tl.cdiv(axes.positions, BLOCK_M), tl.num_programs(1))
    first = tl.program_id(1) * each * BLOCK_M
    last = min(axes.positions, first + each * BLOCK_M)
    dup = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    dup_bias = tl.zeros([BLOCK_H], tl.float32)
    ddown = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    if GATED:
        values = _of_up(up, o, known, dtype, C, BLOCK_C)
        dvalues = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
        dvalues_bias = tl.zeros([BLOCK_H], tl.float32)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        valid = (m < axes.positions)[:, None] & (c < C)[None, :]
        n = tl.load(pointers(normalised, m, c, axes), mask=valid, other=0)
        g = tl.load(pointers(grad, m, c, axes), mask=valid, other=0)
        pre = _up_across(weight, n, normalised, up, up_bias, m, h, known, axes, C, BLOCK_K)
        if BLOCK_K == 0:
            dh = tl.dot(across, tl.trans(g))
        else:
            dh = tl.trans(_dhidden(g, grad, down, m, h, axes, C, HIDDEN, BLOCK_C, BLOCK_K))
        if GATED:
            value = _up_across(values, n, normalised, up, up_bias, m, o, known, axes, C, BLOCK_K)
            share = tl.sigmoid(pre)
            silu = pre * share
            dvalue = dh * silu
            dvalues = tl.dot(dvalue.to(dtype), n, dvalues)
            dvalues_bias += tl.sum(dvalue, 1)
            hidden = silu * value
            dpre = dh * value * (share + silu * (1 - share))
        else:
            hidden = tl.maximum(pre, 0.0)
            dpre = tl.where(pre > 0, dh, 0.0)
        dup = tl.dot(dpre.to(dtype), n, dup)
        dup_bias += tl.sum(dpre, 1)
        ddown = tl.dot(hidden.to(dtype), g, ddown)
    mine = partials + tl.program_id(1).to(tl.int64) * (OUTPUTS * (C + 1) + C * HIDDEN)
    tl.store(mine + h[:, None] * C + c[None, :], dup, mask=writable)
    if GATED:
        tl.store(mine + o[:, None] * C + c[None, :], dvalues, mask=writable)
    mine += OUTPUTS * C
    tl.store(mine + h, dup_bias, mask=known)
    if GATED:
        tl.store(mine + o, dvalues_bias, mask=known)
    mine += OUTPUTS
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
    configs("BLOCK_M BLOCK_H BLOCK_K", (32, 16, 16, 4, 1), (32, 16, 16, 8, 1), (16, 16, 16, 8, 1)),
)
BACKWARD = register_by_precision(
    "transition_backward",
    _transition_backward,
    configs(
        "BLOCK_M BLOCK_H",
        (128, 32, 8, 2),
        *((64, h, 8, s) for h in (32, 64) for s in (1, 2)),
        *((m, 32, w, s) for m in (32, 64) for w in (4, 8) for s in (1, 2)),
        (32, 16, 8, 2),
        (16, 16, 4, 1),
    ),
    configs("BLOCK_M BLOCK_H BLOCK_K", (32, 16, 16, 4, 1), (16, 16, 16, 4, 1), (16, 16, 16, 8, 1)),
)
WEIGHT = register_by_precision(
    "transition_weight",
    _transition_weight,
    configs(
        "BLOCK_M BLOCK_H",
        *((m, 64, 8, s) for m in (32, 64) for s in (2, 3)),
        (32, 64, 8, 1),
        *((m, 32, w, s) for m in (32, 64) for w in (4, 8) for s in (1, 2)),
        *((32, 16, w, s) for w, s in ((4, 1), (8, 2))),
        (16, 16, 4, 2),
    ),
    configs("BLOCK_M BLOCK_H BLOCK_K", (16, 16, 16, 4, 1), (16, 16, 16, 8, 1)),
)
