"""transition on a GPU: the hidden layer stays in registers, tile by tile, forward and backward.

Forward, a program owns BLOCK_M positions: their normalised channels, and the sums of all outputs.  It runs over the
hidden layer, BLOCK_H numbers at a time, whose weights it reads from the second cache: BLOCK_M multiplications for each
number read, so with 16 bits 2 BLOCK_M operations a byte: at 128 positions as much as tensor cores and cache have.

The backward pass is two kernels, since the gradient of x is a sum over the hidden layer, that of the weights one over
positions, and neither fits beside the other.  Of each number of the hidden layer the first costs 6 C operations, 2 C a
product, and the second, which makes the number and its gradient again, 8 C.  Or the first writes both (4 bytes), and
the second reads them: 4 C.  Modelled, for 790 TFLOP/s and 3 TB/s, in ps: at 128 channels 1.0 + 1.3 made again, 1.3 +
1.4 kept; at 256 channels 1.9 + 2.6, and 1.9 + 1.4.  So of more than 128 channels they are kept; and with SwiGLU, of
which the second kernel would hold three sums: beside them no tile that suits tensor cores fits the registers.  The
first leaves the normalised x in any case, so that the second has nothing but products to do.

A tile of normalised channels goes through memory: made some rows at a time, then read as it lies, in 16 bits, it leaves
the registers to the sums.  The gradient of the norm is made likewise.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.dispatch import Operands, empty_like, empty_parameters
from warpfold.ops.transition import HALVES
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
RECOMPUTED = 128  # channels up to which the hidden layer is made again for it


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
    parameters = _parameters(t, x.numel() // c)
    dx, normalised = empty_like(x), empty_like(grad)
    kept = c > RECOMPUTED or halves > 1
    inner = {"inner": x.new_empty(*x.shape[:-1], (halves + 1) * hidden)} if kept else {}
    gradients = empty_parameters(t.norm_weight, t.norm_bias, t.up, t.up_bias, t.down, t.down_bias)
    dnorm_weight, dnorm_bias, dup, dup_bias, ddown, ddown_bias = gradients
    p = Positions({"x": x, "grad": grad}, writes={"dx": dx, "normalised": normalised, **inner})
    kernel = BACKWARD.tiled(key, x)
    programs = triton.cdiv(p.count, kernel["BLOCK_M"])
    partials = empty_partials(x, programs, 3 * c)
    arguments = {"inner": None, **p.arguments, **parameters, **sizes, "GATED": halves > 1}
    kernel.run((programs,), **arguments, partials=partials, eps=t.eps, RESIDUAL=t.residual)
    p.copy_back()
    biases = or_unwanted(dnorm_bias, partials, c), or_unwanted(ddown_bias, partials, c)
    rows = Sum(partials, (dnorm_weight, *biases))
    outputs = halves * hidden
    p = Positions({"normalised": normalised, "grad": grad, **inner}, writes={})
    if kept:
        kernel = WEIGHT_KEPT.tiled(key, x)
        of_up, of_down = (triton.cdiv(n, kernel["BLOCK_O"]) for n in (outputs, hidden))
        tiles: tuple[int, ...] = of_up + of_down, triton.cdiv(c, kernel["BLOCK_C"])
        most, arguments = TILES // 2, {"C": c, "HIDDEN": hidden, "OUTPUTS": outputs}  # a program takes a core
    else:
        kernel = WEIGHT.tiled(key, x)
        tiles = (triton.cdiv(hidden, kernel["BLOCK_H"]),)
        most, arguments = TILES, {name: parameters[name] for name in ("up", "up_bias", "down")} | sizes
    programs = programs_for(p.count, kernel["BLOCK_M"], max(1, most // math.prod(tiles)))
    partials = empty_partials(x, programs, outputs * (c + 1) + c * hidden)
    kernel.run((*tiles, programs), **p.arguments, **arguments, partials=partials)
    sum_partials(rows, Sum(partials, (dup, or_unwanted(dup_bias, partials, outputs), ddown)))
    return dx, dnorm_weight, dnorm_bias, dup, dup_bias, ddown, ddown_bias


def _sizes(t: Operands) -> tuple[tuple[int, int, int], dict[str, int]]:
    """Return the key of the kernels' launches, and their constants."""
    c, hidden = t.down.shape
    sizes = {"C": c, "HIDDEN": hidden, "BLOCK_C": power_of_two(c)}
    if t.x.element_size() == 2:
        sizes["BLOCK_K"] = 0  # all channels at once
    return (c, hidden, HALVES[t.activation]), sizes


def _parameters(t: Operands, positions: int) -> dict[str, Tensor | None]:
    """Return the parameters as the kernels take them, by the names of their arguments."""
    whole = {name: contiguous(getattr(t, name)) for name in ("norm_weight", "norm_bias", "up_bias")}
    return whole | {name: cast_weight(getattr(t, name), t.x, positions) for name in ("up", "down")}


@triton.constexpr_function
def rows_at_once(rows: int, channels: int) -> int:
    """Return how many rows of a tile are worked on at once where registers are few: of 16 numbers for each thread."""
    return min(int(rows), 4096 // int(channels))


@triton.jit
def _normalise(
    x: tl.tuple, norm_weight: tl.tensor, norm_bias: tl.tensor, n: tl.tuple, axes: tl.tuple, eps: tl.tensor,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr,
) -> None:  # fmt: skip
    """Store in n the normalised x of BLOCK_M positions, and wait until all threads of the program can read it.

    Some positions at a time: a whole tile in fp32, with what is wanted beside it, would not fit the registers.
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
    """Load all channels of positions m, past the last those of the last: without a mask that would be held for long."""
    c = tl.arange(0, BLOCK_C)
    return tl.load(pointers(x, tl.minimum(m, axes.positions - 1), c, axes), mask=(c < C)[None, :], other=0)


@triton.jit
def _up(
    n: tl.tensor, weight: tl.tensor, normalised: tl.tuple, up: tl.tensor, up_bias: tl.tensor, m: tl.tensor,
    o: tl.tensor, known: tl.tensor, axes: tl.tuple, C: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the outputs o of `up` in fp32, [m, o], of normalised channels n [m, c] and weights [o, c].

    With BLOCK_K, of so many channels at a time, from memory: products without tensor cores must be short.
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
    x: tl.tuple, norm_weight: tl.tensor, norm_bias: tl.tensor, up: tl.tensor, up_bias: tl.tensor, down: tl.tensor,
    down_bias: tl.tensor, y: tl.tuple, axes: tl.tuple, eps: tl.tensor,
    C: tl.constexpr, HIDDEN: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Store y of BLOCK_M positions; GATED: silu of one half of the outputs of `up` times the other, else their relu."""
    _normalise(x, norm_weight, norm_bias, y, axes, eps, C, BLOCK_C, BLOCK_M)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    dtype = y.data.dtype.element_ty
    n = _load_whole(y, m, axes, C, BLOCK_C)
    # In 16 bits the sum begins with x: added last, it costs 80 registers more.  In fp32 the sum's roundings would show.
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
        tl.debug_barrier()  # the normalised x is in y, and other threads may read it until here
    if RESIDUAL and BLOCK_K > 0:
        acc += tl.load(pointers(x, m, c, axes), mask=valid, other=0).to(tl.float32)
    tl.store(pointers(y, m, c, axes), acc.to(dtype), mask=valid)


@triton.jit
def _through_norm(
    grad: tl.tuple, x: tl.tuple, norm_weight: tl.tensor, dx: tl.tuple, partials: tl.tensor, axes: tl.tuple,
    eps: tl.tensor,
    C: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr,
) -> None:  # fmt: skip
    """Replace dx, which is the gradient of the normalised x at BLOCK_M positions, by that of x; and store the partials.

    As `_layer_norm_backward`, some positions at a time, as `_normalise`.
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
        dn = tl.load(pointers(dx, m, c, axes), mask=valid, other=0).to(tl.float32)
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
    down: tl.tensor, dx: tl.tuple, normalised: tl.tuple, inner: tl.tuple, partials: tl.tensor, axes: tl.tuple,
    eps: tl.tensor,
    C: tl.constexpr, HIDDEN: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Store dx and the normalised x of BLOCK_M positions; and in partials [programs, 3 C] what they add to the
    gradients of the norm's weight and bias, as in `_layer_norm_backward`, and of the bias of `down`.

    inner: None, or where to the gradient of the outputs of `up` goes, and behind it the hidden layer.
    """
    OUTPUTS: tl.constexpr = HIDDEN * (1 + GATED)
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
        dh = _dhidden(g, grad, down, m, h, axes, C, HIDDEN, BLOCK_C, BLOCK_K)
        weight = _of_up(up, h, known, dtype, C, BLOCK_C)
        pre = _up(n, weight, normalised, up, up_bias, m, h, known, axes, C, BLOCK_K)
        if GATED:
            o = HIDDEN + h
            values = _of_up(up, o, known, dtype, C, BLOCK_C)
            value = _up(n, values, normalised, up, up_bias, m, o, known, axes, C, BLOCK_K)
            share = tl.sigmoid(pre)
            silu = pre * share
            dvalue = (dh * silu).to(dtype)
            dn = tl.dot(dvalue, values, dn)
            dpre = (dh * value * (share + silu * (1 - share))).to(dtype)
        else:
            dpre = tl.where(pre > 0, dh, 0.0).to(dtype)
        dn = tl.dot(dpre, weight, dn)
        if inner is not None:
            writable = (m < axes.positions)[:, None] & known[None, :]
            tl.store(pointers(inner, m, h, axes), dpre, mask=writable)
            if GATED:
                tl.store(pointers(inner, m, HIDDEN + h, axes), dvalue, mask=writable)
                hidden = silu * value
            else:
                hidden = tl.maximum(pre, 0.0)
            tl.store(pointers(inner, m, OUTPUTS + h, axes), hidden.to(dtype), mask=writable)
    # Through memory, rounded as the gradient of a layer apart would be: for the norm it is read some rows at a time.
    tl.store(pointers(dx, m, c, axes), dn.to(dtype), mask=(m < axes.positions)[:, None] & (c < C)[None, :])
    tl.debug_barrier()
    _through_norm(grad, x, norm_weight, dx, partials, axes, eps, C, RESIDUAL, BLOCK_C, BLOCK_M)


@triton.jit
def _span(axes: tl.tuple, along: tl.constexpr, BLOCK_M: tl.constexpr) -> tl.tuple:
    """Return the first position of this program's span, of as many as there are programs `along` an axis of the grid;
    and the first that is past it."""
    each = tl.cdiv(tl.cdiv(axes.positions, BLOCK_M), tl.num_programs(along)) * BLOCK_M
    first = tl.program_id(along) * each
    return first, min(axes.positions, first + each)


@triton.jit
def _transition_weight(
    normalised: tl.tuple, grad: tl.tuple, up: tl.tensor, up_bias: tl.tensor, down: tl.tensor, partials: tl.tensor,
    axes: tl.tuple,
    C: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Store in partials [programs, ...], of BLOCK_H numbers of the hidden layer and a span of positions, what is added
    to the gradients of `up` [HIDDEN, C], of its bias [HIDDEN] and of `down` [C, HIDDEN], which follow each other.

    Of relu, the hidden layer and its gradient made again.
    """
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    known = h < HIDDEN
    c = tl.arange(0, BLOCK_C)
    dtype = normalised.data.dtype.element_ty
    writable = known[:, None] & (c < C)[None, :]
    weight = _of_up(up, h, known, dtype, C, BLOCK_C)
    across = tl.load(down + c[None, :] * HIDDEN + h[:, None], mask=writable, other=0).to(dtype)
    first, last = _span(axes, 1, BLOCK_M)
    dup = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    dup_bias = tl.zeros([BLOCK_H], tl.float32)
    ddown = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        valid = (m < axes.positions)[:, None] & (c < C)[None, :]
        n = tl.load(pointers(normalised, m, c, axes), mask=valid, other=0)
        g = tl.load(pointers(grad, m, c, axes), mask=valid, other=0)
        # Channels of the hidden layer along the rows: as a product leaves them in registers the next ones want them.
        if BLOCK_K == 0:
            pre = tl.dot(weight, tl.trans(n))
            if up_bias is not None:
                pre += tl.load(up_bias + h, mask=known, other=0).to(tl.float32)[:, None]
            dh = tl.dot(across, tl.trans(g))
        else:
            pre = tl.trans(_up(n, weight, normalised, up, up_bias, m, h, known, axes, C, BLOCK_K))
            dh = tl.trans(_dhidden(g, grad, down, m, h, axes, C, HIDDEN, BLOCK_C, BLOCK_K))
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


@triton.jit
def _product_over_positions(
    left: tl.tuple, right: tl.tuple, o: tl.tensor, c: tl.tensor, first: tl.tensor, last: tl.tensor, axes: tl.tuple,
    ROWS: tl.constexpr, C: tl.constexpr, BLOCK_M: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Return left^T right of positions from first to last, [o, c] of channels o of left and c of right, in fp32; and
    the sums of left [o]."""
    acc = tl.zeros([o.shape[0], c.shape[0]], tl.float32)
    sums = tl.zeros([o.shape[0]], tl.float32)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        present = (m < axes.positions)[:, None]
        some = tl.load(pointers(left, m, o, axes), mask=present & (o < ROWS)[None, :], other=0)
        others = tl.load(pointers(right, m, c, axes), mask=present & (c < C)[None, :], other=0)
        acc = tl.dot(tl.trans(some), others, acc)
        sums += tl.sum(some.to(tl.float32), 0)
    return acc, sums


@triton.jit
def _transition_weight_kept(
    normalised: tl.tuple, grad: tl.tuple, inner: tl.tuple, partials: tl.tensor, axes: tl.tuple,
    C: tl.constexpr, HIDDEN: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    """Store the same as `_transition_weight`, of BLOCK_O outputs of `up` or numbers of the hidden layer and BLOCK_C
    channels, from the hidden layer and its gradient as `_transition_backward` stored them."""
    tile = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    first, last = _span(axes, 2, BLOCK_M)
    mine = partials + tl.program_id(2).to(tl.int64) * (OUTPUTS * (C + 1) + C * HIDDEN)
    OF_UP: tl.constexpr = (OUTPUTS + BLOCK_O - 1) // BLOCK_O
    if tile < OF_UP:
        o = tile * BLOCK_O + tl.arange(0, BLOCK_O)
        acc, sums = _product_over_positions(inner, normalised, o, c, first, last, axes, OUTPUTS, C, BLOCK_M)
        tl.store(mine + o[:, None] * C + c[None, :], acc, mask=(o < OUTPUTS)[:, None] & (c < C)[None, :])
        if tl.program_id(1) == 0:
            tl.store(mine + OUTPUTS * C + o, sums, mask=o < OUTPUTS)
    else:
        h = (tile - OF_UP) * BLOCK_O + tl.arange(0, BLOCK_O)
        o = OUTPUTS + h
        acc, sums = _product_over_positions(inner, grad, o, c, first, last, axes, OUTPUTS + HIDDEN, C, BLOCK_M)
        mine += OUTPUTS * (C + 1)
        tl.store(mine + c[None, :] * HIDDEN + h[:, None], acc, mask=(h < HIDDEN)[:, None] & (c < C)[None, :])


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
BACKWARD = register_by_precision(
    "transition_backward",
    _transition_backward,
    configs(
        "BLOCK_M BLOCK_H",
        *((128, h, 8, 2) for h in (16, 32, 64)),
        *((64, h, w, s) for h in (32, 64) for w in (4, 8) for s in (1, 2)),
        *((32, h, w, 2) for h in (16, 32) for w in (4, 8)),
    ),
    configs("BLOCK_M BLOCK_H BLOCK_K", (32, 16, 16, 4, 1), (16, 16, 16, 4, 1), (16, 16, 16, 8, 1)),
)
WEIGHT = register_by_precision(
    "transition_weight",
    _transition_weight,
    configs(
        "BLOCK_M BLOCK_H",
        *((m, 64, w, s) for m in (32, 64) for w in (4, 8) for s in (2, 3)),
        (32, 128, 8, 2),
        *((m, 32, 4, 2) for m in (32, 64)),
    ),
    configs("BLOCK_M BLOCK_H BLOCK_K", (16, 16, 16, 4, 1), (16, 16, 16, 8, 1)),
)
WEIGHT_KEPT = register_by_precision(
    "transition_weight_kept",
    _transition_weight_kept,
    configs(
        "BLOCK_M BLOCK_O BLOCK_C",
        *((64, 128, c, 8, s) for c in (128, 256) for s in (2, 3, 4)),
        *((64, 64, c, 4, s) for c in (64, 128) for s in (2, 3)),
    ),
    configs("BLOCK_M BLOCK_O BLOCK_C", (16, 64, 64, 4, 1), (32, 64, 64, 8, 1)),
)
