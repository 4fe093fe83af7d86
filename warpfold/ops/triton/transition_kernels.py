"""The kernels of transition; transition.py says how they divide the work, and launches them."""

import triton
import triton.language as tl

from warpfold.ops.triton.launch import configs, register_by_precision
from warpfold.ops.triton.norm_tiles import shifted, statistics
from warpfold.ops.triton.positions import pointers


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
    """Return what `_up` does, [o, m]: products with it need it so, and as a product leaves it in registers."""
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
