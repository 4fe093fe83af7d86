"""Attention on a GPU: the kernels, followed by the code that selects and launches them.

q, k, v, the output and their gradients are `Strided` with strides (batch, row, query or key, head), and stride 1 along
the width; a mask has strides (batch, row), and a bias has strides (batch, head, query).

Forward pass.  A program owns a tile of queries of one head, for some rows that share one tile of the bias.  An online
softmax runs over the tiles of keys.  For each query it has the maximum m_i so far, the sum l_i of the weights and the
sum acc of weighted values; the sums are rescaled by alpha when the maximum grows.  A logit costs one fused
multiply-add, s = q k^T / sqrt(d) + bias, and its weight another one and one exp2, 2^(log2(e) s - log2(e) max).

Backward pass.  Each of three kernels owns the tensor that it writes, so that all sums have a fixed order.  With the
logits s, their weights p = e^(s - lse), the output o and its gradient do:

    ds = p (do v^T - delta),  delta = sum do o;   dq = ds k / sqrt(d)   dk = ds^T q / sqrt(d)   dv = p^T do   dbias = ds

A program of dq owns queries of some rows and iterates over the keys.  A program of dk and dv owns keys of some rows and
iterates over the queries, with transposed tiles.  A program of dbias owns a tile of queries and keys and iterates over
the rows.  Each kernel recomputes the weights.
A query without unmasked keys (all keys are masked, or the others have a bias of -inf) has lse = inf, so that p = 0.  It
has uniform weights over its masked keys, and its logits have no gradient.  Without masked keys its result is NaN.

Backward pass of short rows.  The kernels above compute each weight twice, for queries and for keys.  Here one program
computes dq, dk and dv of a head of a row.  It iterates over all tiles of keys, and for each over all queries, so that a
weight is computed once, with five products instead of seven.  dk and dv of a tile are complete after its iteration.  dq
is accumulated in order from one tile of keys to the next, in fp32, in memory that only this program uses and that stays
in the cache; a single tile needs no accumulation.

One family of kernels serves every attention of the trunk, at any strides: rows and columns, with and without a bias,
few or many queries, and also the templates' features of each pair (one query over a few keys).

gated_attention launches the kernels of its steps one after another on shared memory.

The forward pass has three steps: norm and projection, attention, output.  The backward pass has the same steps in
reverse order, with one gradient dy of the projection.  Each step writes its columns of dy where the projection's
backward pass reads them, so that nothing is joined, copied or filled with zeros.  The last step adds the gradient of x
as the residual.

At N = 256 in half precision with 128 channels and 4 heads of width 32, the forward pass moves 17 MB for x, 2 x 69 MB to
write and read y, 2 x 17 MB to write and read o, and 34 MB for x and out: 223 MB in all, 67 us at 3.35 TB/s.  The
backward pass moves some 480 MB, of which dy, written once and read twice, takes 208 MB.  Separate calls of the steps
would join their gradients, which moves 138 MB more.
"""

# mypy: disable-error-code="assignment,attr-defined"
# Triton allows tuples to grow.

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.attention import (
    batched,
    empty_bias,
    empty_layer_lse,
    empty_lse,
    empty_out,
    empty_own_bias,
    split_projections,
)
from warpfold.ops.dispatch import Operands, Shape, empty_like
from warpfold.ops.linear import empty_projected, empty_statistics
from warpfold.ops.triton.launch import (
    Key,
    TiledKernel,
    configs,
    cores,
    register,
    register_by_precision,
)
from warpfold.ops.triton.linear import (
    Planes,
    gated_linear_residual,
    gated_linear_residual_gradients,
    norm_linear_backward,
    project,
)
from warpfold.ops.triton.positions import Strided, Sum, cdiv, strided_by_length, sum_partials

LOG2E = tl.constexpr(1.4426950408889634)
# Groups of rows that run at the same time, so that their keys and values stay in the cache while they read the bias.
NEIGHBOURS = tl.constexpr(8)
# Strides of a bias are multiples of this.
BIAS_UNIT = 16
# Entries of a mask that are read at a time.
SCAN = tl.constexpr(512)


class Sizes(NamedTuple):
    """The sizes of a call as a kernel argument; bias_keys: the keys of the bias including padding."""

    rows: int
    queries: int
    keys: int
    heads: int
    bias_keys: int


@triton.constexpr_function
def padded_width(width: int) -> int:
    """Return the width of a tile of vectors, a power of two that tensor cores support."""
    return max(16, 1 << (int(width) - 1).bit_length())


@triton.jit
def offset(index: tl.tensor, stride: tl.tensor, unit: tl.constexpr) -> tl.tensor:
    """Return a 64-bit offset.  Strides are divided by `unit`, so that the compiler knows a divisor of each address."""
    return index.to(tl.int64) * stride * unit


@triton.jit
def vectors_of(x: tl.tuple, batch: tl.tensor, row: tl.tensor, head: tl.tensor) -> tl.tensor:
    """Return the pointer to the vectors of one head of one row."""
    start = x.data + offset(batch, x.strides[0], x.unit)
    return start + offset(row, x.strides[1], x.unit) + offset(head, x.strides[3], x.unit)


@triton.jit
def program_tile(tiles: tl.tensor, heads: tl.tensor, groups: tl.tensor) -> tl.tensor:
    """Return this program's tile, head, group of rows and batch; concurrent programs share keys, values and bias."""
    program = tl.program_id(0)
    each = groups * heads * tiles
    batch = program // each
    program = program % each
    block = NEIGHBOURS * heads * tiles
    first = program // block * NEIGHBOURS
    program = program % block
    size = tl.minimum(groups - first, NEIGHBOURS)
    group = first + program % size
    program = program // size
    return program % tiles, program // tiles, group, batch


@triton.jit
def load_tile(
    x: tl.tuple, batch: tl.tensor, row: tl.tensor, head: tl.tensor, index: tl.tensor, count: tl.tensor,
    WIDTH: tl.constexpr, WHOLE: tl.constexpr = False,
) -> tl.tensor:  # fmt: skip
    """Load vectors [index, WIDTH] with zeros from index `count` on (WHOLE: there are no such indices)."""
    start = vectors_of(x, batch, row, head)
    across = tl.arange(0, padded_width(WIDTH))
    pointers = start + offset(index[:, None], x.strides[2], x.unit) + across[None, :]
    if WHOLE and padded_width(WIDTH) == WIDTH:
        return tl.load(pointers)
    valid = across[None, :] < WIDTH
    if not WHOLE:
        valid = valid & (index[:, None] < count)
    return tl.load(pointers, mask=valid, other=0.0)


@triton.jit
def store_tile(
    x: tl.tuple, batch: tl.tensor, row: tl.tensor, head: tl.tensor, tile: tl.tensor, index: tl.tensor, count: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Store vectors in the form in which `load_tile` loads them."""
    start = vectors_of(x, batch, row, head)
    across = tl.arange(0, padded_width(WIDTH))
    valid = (across[None, :] < WIDTH) & (index[:, None] < count)
    pointers = start + offset(index[:, None], x.strides[2], x.unit) + across[None, :]
    tl.store(pointers, tile.to(x.data.dtype.element_ty), mask=valid)


@triton.jit
def bias_of(bias: tl.tuple, batch: tl.tensor, head: tl.tensor) -> tl.tensor:
    """Return the pointer to the bias of one head."""
    return bias.data + (offset(batch, bias.strides[0], bias.unit) + offset(head, bias.strides[1], bias.unit))


@triton.jit
def load_bias(
    bias: tl.tuple, start: tl.tensor, i: tl.tensor, j: tl.tensor, queries: tl.tensor, bias_keys: tl.tensor
) -> tl.tensor:
    """Load the bias of queries i and keys j in fp32; one of them is a column and the other a row."""
    valid = (i < queries) & (j < bias_keys)
    return tl.load(start + offset(i, bias.strides[2], bias.unit) + j, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def exp_shifted(s: tl.tensor, shift: tl.tensor, EXACT: tl.constexpr) -> tl.tensor:
    """Compute e^(s - shift) by a fused multiply-add and an exp2; EXACT, for fp32, subtracts before it multiplies."""
    if EXACT:
        return tl.math.exp2((s - shift) * LOG2E)
    return tl.math.exp2(s * LOG2E - shift * LOG2E)


@triton.jit
def mask_of(mask: tl.tuple, batch: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Return the pointer to the mask of one row."""
    return mask.data + offset(batch, mask.strides[0], mask.unit) + offset(row, mask.strides[1], mask.unit)


@triton.jit
def load_mask(mask: tl.tuple, batch: tl.tensor, row: tl.tensor, j: tl.tensor, keys: tl.tensor) -> tl.tensor:
    """Load the mask of one row at keys j."""
    return tl.load(mask_of(mask, batch, row) + j, j < keys, 0) != 0


@triton.jit
def first_masked_key(
    mask: tl.tuple, batch: tl.tensor, first_row: tl.tensor, rows: tl.tensor, keys: tl.tensor, ROWS: tl.constexpr
) -> tl.tensor:
    """Return the first key that is masked in any of the rows, or `keys` if there is none."""
    firsts = tl.zeros([SCAN], tl.int32) + keys
    for start in range(0, keys, SCAN):
        j = start + tl.arange(0, SCAN)
        for n in tl.static_range(ROWS):
            row = tl.minimum(first_row + n, rows - 1)
            attended = tl.load(mask_of(mask, batch, row) + j, j < keys, 1)
            firsts = tl.minimum(firsts, tl.where(attended != 0, keys, j))
    return tl.min(firsts, 0)


# The logit of a masked key.  It is a power of two, so that its product with log2(e) is exact.  If there are no unmasked
# keys (all are masked, or the others have a bias of -inf), each masked key has weight 1.
NEVER = tl.constexpr(-(2.0**60))
# The initial running maximum.  It is below every relevant logit, and finite, so that a logit of -inf has weight 0 and
# not NaN.  In half precision its product with log2(e) must be finite, too.
LOWEST = tl.constexpr(-(2.0**126))
LOWEST_FP32 = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _attend(
    state: tl.tuple, q_tiles: tl.tuple, bias: tl.tuple, bias_start: tl.tensor, k: tl.tuple, v: tl.tuple, mask: tl.tuple,
    i: tl.tensor, where: tl.tuple, sizes: tl.tuple, begin: tl.tensor, end: tl.tensor,
    MASKED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the state, m_i, l_i and acc of each row, after processing the keys from begin to end.

    where: batch, first row, head.
    """
    batch, first_row, head = where
    EXACT: tl.constexpr = k.data.dtype.element_ty == tl.float32
    m_i, l_i, acc = state
    for start in range(begin, end, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        if bias is not None:
            b = load_bias(bias, bias_start, i[:, None], j[None, :], sizes.queries, sizes.bias_keys)
        # Tuples cannot be assigned to by index: the state of all rows is built anew for each tile of keys.
        new_m, new_l, new_acc = (), (), ()
        for n in tl.static_range(ROWS):
            row = tl.minimum(first_row + n, sizes.rows - 1)
            k_tile = load_tile(k, batch, row, head, j, sizes.keys, WIDTH, not MASKED)
            s = tl.dot(q_tiles[n], tl.trans(k_tile)) * WIDTH**-0.5
            if bias is not None:
                s += b
            if MASKED:
                never = tl.where(j < sizes.keys, NEVER, float("-inf"))
                s = tl.where(load_mask(mask, batch, row, j, sizes.keys)[None, :], s, never[None, :])
            m_ij = tl.maximum(m_i[n], tl.max(s, 1))
            p = exp_shifted(s, m_ij[:, None], EXACT)
            alpha = exp_shifted(m_i[n] - m_ij, 0.0, EXACT)
            v_tile = load_tile(v, batch, row, head, j, sizes.keys, WIDTH, not MASKED)
            new_m = new_m + (m_ij,)
            new_l = new_l + (l_i[n] * alpha + tl.sum(p, 1),)
            rescaled = acc[n] * alpha[:, None]
            new_acc = new_acc + (tl.dot(p.to(v_tile.dtype), v_tile, acc=rescaled),)
        m_i, l_i, acc = new_m, new_l, new_acc
    return m_i, l_i, acc


@triton.jit
def _forward_tile(
    q: tl.tuple, k: tl.tuple, v: tl.tuple, mask: tl.tuple, bias: tl.tuple, out: tl.tuple, lse: tl.tensor,
    sizes: tl.tuple, where: tl.tuple,
    WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Store the output and lse of BLOCK_Q queries; where: first query, batch, first row, head."""
    rows, queries, keys, heads, _ = sizes
    first, batch, first_row, head = where
    i = first + tl.arange(0, BLOCK_Q)
    bias_start = bias_of(bias, batch, head) if bias is not None else None
    q_tiles, m_i, l_i, acc = (), (), (), ()
    LEAST: tl.constexpr = LOWEST_FP32 if k.data.dtype.element_ty == tl.float32 else LOWEST
    for n in tl.static_range(ROWS):
        row = tl.minimum(first_row + n, rows - 1)  # clamped, not stored
        q_tiles = q_tiles + (load_tile(q, batch, row, head, i, queries, WIDTH),)
        m_i = m_i + (tl.full([BLOCK_Q], LEAST, tl.float32),)
        l_i = l_i + (tl.zeros([BLOCK_Q], tl.float32),)
        acc = acc + (tl.zeros([BLOCK_Q, padded_width(WIDTH)], tl.float32),)

    # Whole tiles before the first masked key, usually all tiles, do not read the mask.  The remaining ones are half
    # tiles, because whole tiles with the mask would need too many registers.
    clear = first_masked_key(mask, batch, first_row, rows, keys, ROWS) // BLOCK_K * BLOCK_K
    for masked in tl.static_range(2):
        m_i, l_i, acc = _attend(
            (m_i, l_i, acc),
            q_tiles,
            bias,
            bias_start,
            *(k, v, mask, i, (batch, first_row, head), sizes),
            *(clear if masked == 1 else 0, keys if masked == 1 else clear, masked == 1),
            *(WIDTH, BLOCK_K // 2 if masked == 1 else BLOCK_K, ROWS),
        )

    for n in tl.static_range(ROWS):
        limit = tl.where(first_row + n < rows, queries, 0)
        store_tile(out, batch, first_row + n, head, acc[n] / l_i[n][:, None], i, limit, WIDTH)
        logs = tl.where((m_i[n] == NEVER) | (l_i[n] == 0), float("inf"), m_i[n] + tl.log(l_i[n]))
        lse_row = lse + ((batch.to(tl.int64) * rows + first_row + n) * heads + head) * queries
        tl.store(lse_row + i, logs, mask=i < limit)


@triton.jit
def _attention_forward(
    q: tl.tuple, k: tl.tuple, v: tl.tuple, mask: tl.tuple, bias: tl.tuple, out: tl.tuple, lse: tl.tensor,
    sizes: tl.tuple,
    WIDTH: tl.constexpr, TAIL_Q: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Store the output and lse [B, R, h, Q], the logarithm of each query's sum of weights.

    TAIL_Q: the size of a smaller last tile of queries, or 0.
    """
    rows, queries, _, heads, _ = sizes
    tile, head, group, batch = program_tile(tl.cdiv(queries, BLOCK_Q), heads, tl.cdiv(rows, ROWS))
    where = (tile * BLOCK_Q, batch, group * ROWS, head)
    if TAIL_Q > 0 and tile == queries // BLOCK_Q:
        _forward_tile(q, k, v, mask, bias, out, lse, sizes, where, WIDTH, TAIL_Q, BLOCK_K, ROWS)
    else:
        _forward_tile(q, k, v, mask, bias, out, lse, sizes, where, WIDTH, BLOCK_Q, BLOCK_K, ROWS)


# fp32 without tensor cores needs smaller tiles than half precision.  The loop of dq has the same shape.
ROW_TILES = configs(
    "BLOCK_Q BLOCK_K ROWS",
    *((64, 64, rows, 4, stages) for rows in (1, 2) for stages in (2, 3)),
    *((64, 32, rows, 4, stages) for rows in (1, 2) for stages in (2, 3)),
    *((128, keys, 1, 8, stages) for keys in (32, 64) for stages in (2, 3)),
    *((128, 32, 2, 8, 2), (64, 128, 1, 4, 2)),
    *((16, 64, 1, 1, 3), (16, 128, 1, 2, 3), (32, 64, 1, 2, 3), *((16, 32, 2, 1, s) for s in (2, 3))),
)
ROW_TILES_FP32 = configs(
    "BLOCK_Q BLOCK_K ROWS",
    (32, 32, 1, 4, 2),
    (64, 32, 1, 8, 2),
    (16, 32, 1, 2, 2),
    (16, 32, 1, 4, 2),
    (16, 64, 1, 4, 2),
)
FORWARD = register_by_precision("attention_forward", _attention_forward, ROW_TILES, ROW_TILES_FP32)


@triton.jit
def _add_dq(
    acc: tl.tuple, own: tl.tuple, bias: tl.tuple, bias_start: tl.tensor, k: tl.tuple, v: tl.tuple, mask: tl.tuple,
    i: tl.tensor, where: tl.tuple, sizes: tl.tuple, begin: tl.tensor, end: tl.tensor,
    MASKED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return acc, ds k of each row, after processing the keys from begin to end.

    own: q, do, lse and delta of each row.  where: batch, first row, head.
    """
    batch, first_row, head = where
    EXACT: tl.constexpr = k.data.dtype.element_ty == tl.float32
    q_tiles, do_tiles, lse_tiles, deltas = own
    for start in range(begin, end, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        if bias is not None:
            b = load_bias(bias, bias_start, i[:, None], j[None, :], sizes.queries, sizes.bias_keys)
        new_acc = ()
        for n in tl.static_range(ROWS):
            row = tl.minimum(first_row + n, sizes.rows - 1)
            k_tile = load_tile(k, batch, row, head, j, sizes.keys, WIDTH, not MASKED)
            v_tile = load_tile(v, batch, row, head, j, sizes.keys, WIDTH, not MASKED)
            s = tl.dot(q_tiles[n], tl.trans(k_tile)) * WIDTH**-0.5
            if bias is not None:
                s += b
            p = exp_shifted(s, lse_tiles[n][:, None], EXACT)
            ds = p * (tl.dot(do_tiles[n], tl.trans(v_tile)) - deltas[n][:, None])
            if MASKED:
                ds = tl.where(load_mask(mask, batch, row, j, sizes.keys)[None, :], ds, 0.0)
            new_acc = new_acc + (tl.dot(ds.to(k_tile.dtype), k_tile, acc=acc[n]),)
        acc = new_acc
    return acc


@triton.jit
def _attention_dq(
    grad: tl.tuple, q: tl.tuple, k: tl.tuple, v: tl.tuple, mask: tl.tuple, bias: tl.tuple, out: tl.tuple,
    lse: tl.tensor, delta: tl.tensor, firsts: tl.tensor, dq: tl.tuple, sizes: tl.tuple,
    WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Store dq, and for the other two kernels delta [B, R, h, Q] and firsts [B, R], each row's first masked key."""
    rows, queries, keys, heads, _ = sizes
    tile, head, group, batch = program_tile(tl.cdiv(queries, BLOCK_Q), heads, tl.cdiv(rows, ROWS))
    first_row = group * ROWS
    i = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    bias_start = bias_of(bias, batch, head) if bias is not None else None
    q_tiles, do_tiles, lse_tiles, deltas, acc = (), (), (), (), ()
    clear = keys
    for n in tl.static_range(ROWS):
        row = tl.minimum(first_row + n, rows - 1)  # clamped, not stored
        limit = tl.where(first_row + n < rows, queries, 0)
        line = (batch.to(tl.int64) * rows + row) * heads + head
        do_tile = load_tile(grad, batch, row, head, i, queries, WIDTH)
        o_tile = load_tile(out, batch, row, head, i, queries, WIDTH)
        q_tiles = q_tiles + (load_tile(q, batch, row, head, i, queries, WIDTH),)
        d = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
        tl.store(delta + line * queries + i, d, mask=i < limit)
        do_tiles = do_tiles + (do_tile,)
        deltas = deltas + (d,)
        lse_tiles = lse_tiles + (tl.load(lse + line * queries + i, mask=i < queries, other=0.0),)
        acc = acc + (tl.zeros([BLOCK_Q, padded_width(WIDTH)], tl.float32),)
        first = first_masked_key(mask, batch, row, rows, keys, 1)
        tl.store(firsts + batch.to(tl.int64) * rows + row, first, mask=(tile == 0) & (head == 0))
        clear = tl.minimum(clear, first)

    clear = clear // BLOCK_K * BLOCK_K
    for masked in tl.static_range(2):  # first whole tiles without a masked key
        acc = _add_dq(
            acc,
            (q_tiles, do_tiles, lse_tiles, deltas),
            bias,
            bias_start,
            *(k, v, mask, i, (batch, first_row, head), sizes),
            *(clear if masked == 1 else 0, keys if masked == 1 else clear, masked == 1),
            *(WIDTH, BLOCK_K // 2 if masked == 1 else BLOCK_K, ROWS),
        )
    for n in tl.static_range(ROWS):
        limit = tl.where(first_row + n < rows, queries, 0)
        store_tile(dq, batch, first_row + n, head, acc[n] * WIDTH**-0.5, i, limit, WIDTH)


@triton.jit
def some_fully_masked(lse: tl.tensor, queries: tl.tensor) -> tl.tensor:
    """Return whether any query of a row attends to masked keys only."""
    most = tl.full([SCAN], float("-inf"), tl.float32)
    for start in range(0, queries, SCAN):
        i = start + tl.arange(0, SCAN)
        most = tl.maximum(most, tl.load(lse + i, mask=i < queries, other=float("-inf")))
    return tl.max(most, 0) == float("inf")


@triton.jit
def uniform_dv(
    grad: tl.tuple, lse: tl.tensor, mask: tl.tuple, batch: tl.tensor, row: tl.tensor, head: tl.tensor,
    queries: tl.tensor, keys: tl.tensor,
    WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Compute the contribution to dv [1, WIDTH] of each masked key of a row, and the number of masked keys.

    The contribution is that of queries with uniform weights over the masked keys.
    """
    hidden = tl.zeros([SCAN], tl.int32)
    for start in range(0, keys, SCAN):
        j = start + tl.arange(0, SCAN)
        hidden += tl.where((j < keys) & (tl.load(mask_of(mask, batch, row) + j, j < keys, 0) == 0), 1, 0)
    count = tl.sum(hidden, 0)
    acc = tl.zeros([padded_width(WIDTH)], tl.float32)
    for start in range(0, queries, BLOCK_Q):
        i = start + tl.arange(0, BLOCK_Q)
        fully_masked = tl.load(lse + i, mask=i < queries, other=0.0) == float("inf")
        do_tile = load_tile(grad, batch, row, head, i, queries, WIDTH).to(tl.float32)
        acc += tl.sum(tl.where(fully_masked[:, None], do_tile, 0.0), 0)
    return (acc / count)[None, :], count


@triton.jit
def _attention_dkdv(
    grad: tl.tuple, q: tl.tuple, k: tl.tuple, v: tl.tuple, mask: tl.tuple, bias: tl.tuple, lse: tl.tensor,
    delta: tl.tensor, dk: tl.tuple, dv: tl.tuple, sizes: tl.tuple,
    WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Store dk and dv of a tile of keys.  Masked keys are computed like others and corrected at the end."""
    rows, queries, keys, heads, bias_keys = sizes
    tile, head, group, batch = program_tile(tl.cdiv(keys, BLOCK_K), heads, tl.cdiv(rows, ROWS))
    first_row = group * ROWS
    j = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    bias_start = bias_of(bias, batch, head) if bias is not None else None
    EXACT: tl.constexpr = k.data.dtype.element_ty == tl.float32
    k_tiles, v_tiles, dk_acc, dv_acc = (), (), (), ()
    for n in tl.static_range(ROWS):
        row = tl.minimum(first_row + n, rows - 1)  # clamped, not stored
        k_tiles = k_tiles + (load_tile(k, batch, row, head, j, keys, WIDTH),)
        v_tiles = v_tiles + (load_tile(v, batch, row, head, j, keys, WIDTH),)
        dk_acc = dk_acc + (tl.zeros([BLOCK_K, padded_width(WIDTH)], tl.float32),)
        dv_acc = dv_acc + (tl.zeros([BLOCK_K, padded_width(WIDTH)], tl.float32),)

    for start in range(0, queries, BLOCK_Q):
        i = start + tl.arange(0, BLOCK_Q)
        if bias is not None:
            b = load_bias(bias, bias_start, i[None, :], j[:, None], queries, bias_keys)
        new_dk, new_dv = (), ()
        for n in tl.static_range(ROWS):
            row = tl.minimum(first_row + n, rows - 1)
            line = ((batch.to(tl.int64) * rows + row) * heads + head) * queries
            q_tile = load_tile(q, batch, row, head, i, queries, WIDTH)
            do_tile = load_tile(grad, batch, row, head, i, queries, WIDTH)
            lse_tile = tl.load(lse + line + i, mask=i < queries, other=float("inf"))
            d = tl.load(delta + line + i, mask=i < queries, other=0.0)
            s = tl.dot(k_tiles[n], tl.trans(q_tile)) * WIDTH**-0.5
            if bias is not None:
                s += b
            p = exp_shifted(s, lse_tile[None, :], EXACT)
            dv_new = tl.dot(p.to(do_tile.dtype), do_tile, acc=dv_acc[n])
            ds = p * (tl.dot(v_tiles[n], tl.trans(do_tile)) - d[None, :])
            new_dk = new_dk + (tl.dot(ds.to(q_tile.dtype), q_tile, acc=dk_acc[n]),)
            new_dv = new_dv + (dv_new,)
        dk_acc, dv_acc = new_dk, new_dv

    for n in tl.static_range(ROWS):
        limit = tl.where(first_row + n < rows, keys, 0)
        row = tl.minimum(first_row + n, rows - 1)
        attended = load_mask(mask, batch, row, j, keys)[:, None]
        dk_tile = tl.where(attended, dk_acc[n], 0.0) * WIDTH**-0.5
        store_tile(dk, batch, first_row + n, head, dk_tile, j, limit, WIDTH)
        dv_tile = tl.where(attended, dv_acc[n], 0.0)
        lse_row = lse + ((batch.to(tl.int64) * rows + row) * heads + head) * queries
        if some_fully_masked(lse_row, queries):
            each, hidden = uniform_dv(grad, lse_row, mask, batch, row, head, queries, keys, WIDTH, BLOCK_Q)
            dv_tile = tl.where(attended, tl.where(hidden == 0, float("nan"), dv_tile), each)
        store_tile(dv, batch, first_row + n, head, dv_tile, j, limit, WIDTH)


@triton.jit
def _attention_dbias(
    grad: tl.tuple, q: tl.tuple, k: tl.tuple, v: tl.tuple, mask: tl.tuple, bias: tl.tuple, lse: tl.tensor,
    delta: tl.tensor, firsts: tl.tensor, dbias: tl.tuple, sizes: tl.tuple, slab: tl.tensor, batches: tl.tensor,
    WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Store the gradient of the bias over the `slab` rows of one slab: dbias [slabs, B, h, Q, K]."""
    rows, queries, keys, heads, bias_keys = sizes
    program = tl.program_id(0)
    across, down = tl.cdiv(keys, BLOCK_K), tl.cdiv(queries, BLOCK_Q)
    j = program % across * BLOCK_K + tl.arange(0, BLOCK_K)
    i = program // across % down * BLOCK_Q + tl.arange(0, BLOCK_Q)
    image = program // (across * down)  # (slab, batch, head)
    head = image % heads
    batch = image // heads % batches
    number = image // (heads * batches)
    first_row = number * slab
    last_key = program % across * BLOCK_K + BLOCK_K

    b = load_bias(bias, bias_of(bias, batch, head), i[:, None], j[None, :], queries, bias_keys)
    EXACT: tl.constexpr = k.data.dtype.element_ty == tl.float32
    acc = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for n in range(tl.minimum(slab, rows - first_row)):
        row = first_row + n
        line = ((batch.to(tl.int64) * rows + row) * heads + head) * queries
        q_tile = load_tile(q, batch, row, head, i, queries, WIDTH)
        k_tile = load_tile(k, batch, row, head, j, keys, WIDTH)
        v_tile = load_tile(v, batch, row, head, j, keys, WIDTH)
        do_tile = load_tile(grad, batch, row, head, i, queries, WIDTH)
        lse_tile = tl.load(lse + line + i, mask=i < queries, other=float("inf"))
        d = tl.load(delta + line + i, mask=i < queries, other=0.0)
        s = tl.dot(q_tile, tl.trans(k_tile)) * WIDTH**-0.5 + b
        p = exp_shifted(s, lse_tile[:, None], EXACT)
        ds = p * (tl.dot(do_tile, tl.trans(v_tile)) - d[:, None])
        if tl.load(firsts + batch.to(tl.int64) * rows + row) < last_key:
            ds = tl.where(load_mask(mask, batch, row, j, keys)[None, :], ds, 0.0)
        acc += ds
    start = dbias.data + offset(number, dbias.strides[0], dbias.unit) + offset(batch, dbias.strides[1], dbias.unit)
    lines = start + offset(head, dbias.strides[2], dbias.unit) + offset(i, dbias.strides[3], dbias.unit)[:, None]
    tl.store(lines + j[None, :], acc.to(dbias.data.dtype.element_ty), mask=(i[:, None] < queries) & (j[None, :] < keys))


DQ = register_by_precision("attention_dq", _attention_dq, ROW_TILES, ROW_TILES_FP32)
DKDV = register_by_precision(
    "attention_dkdv",
    _attention_dkdv,
    configs(
        "BLOCK_Q BLOCK_K ROWS",
        *((64, 64, 1, 4, 2), (64, 64, 1, 4, 3), (64, 128, 1, 8, 2), (32, 64, 1, 4, 2), (32, 64, 2, 4, 2)),
        *((32, 128, 1, 8, 2), (32, 128, 1, 4, 2), (16, 64, 1, 2, 2), (16, 64, 1, 4, 2), (16, 128, 1, 8, 2)),
        (16, 16, 2, 2, 2),
    ),
    configs("BLOCK_Q BLOCK_K ROWS", (32, 32, 1, 4, 2), (32, 64, 1, 8, 2), (16, 32, 1, 4, 2), (16, 64, 1, 8, 2)),
)
DBIAS = register_by_precision(
    "attention_dbias",
    _attention_dbias,
    configs(
        "BLOCK_Q BLOCK_K",
        *((64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 2), (64, 32, 4, 3), (32, 64, 4, 3)),
        *((128, 64, 8, 2), (128, 64, 8, 3), (64, 128, 8, 2), (128, 32, 8, 3)),
    ),
    configs("BLOCK_Q BLOCK_K", (32, 32, 4, 2), (32, 64, 8, 2), (32, 32, 8, 2)),
)


LONGEST = 384  # most queries or keys
# Offsets between the vectors of a row have 32 bits.
NEAR = 2**31


@triton.jit
def _near(x: tl.tuple, start: tl.tensor, index: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return pointers to the vectors of one head of one row, with 32-bit offsets, which take half the registers."""
    return start + (index[:, None] * (x.strides[2] * x.unit) + tl.arange(0, padded_width(WIDTH))[None, :])


@triton.jit
def _load_near(x: tl.tuple, start: tl.tensor, index: tl.tensor, count: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    valid = (tl.arange(0, padded_width(WIDTH)) < WIDTH)[None, :] & (index < count)[:, None]
    return tl.load(_near(x, start, index, WIDTH), mask=valid, other=0.0)


@triton.jit
def _store_near(
    x: tl.tuple, start: tl.tensor, tile: tl.tensor, index: tl.tensor, count: tl.tensor, WIDTH: tl.constexpr
) -> None:
    valid = (tl.arange(0, padded_width(WIDTH)) < WIDTH)[None, :] & (index < count)[:, None]
    tl.store(_near(x, start, index, WIDTH), tile.to(x.data.dtype.element_ty), mask=valid)


@triton.jit
def _store_deltas(
    grad: tl.tuple, grad_start: tl.tensor, out: tl.tuple, out_start: tl.tensor, delta: tl.tensor, queries: tl.tensor,
    WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr,
) -> None:  # fmt: skip
    """Store delta of every query of a row, and wait until all threads of the program can read it."""
    for start in range(0, queries, BLOCK_Q):
        i = start + tl.arange(0, BLOCK_Q)
        do_tile = _load_near(grad, grad_start, i, queries, WIDTH).to(tl.float32)
        o_tile = _load_near(out, out_start, i, queries, WIDTH).to(tl.float32)
        tl.store(delta + i, tl.sum(do_tile * o_tile, 1), mask=i < queries)
    tl.debug_barrier()


@triton.jit
def _short_tile(
    first: tl.tensor, tensors: tl.tuple, bias: tl.tuple, bias_start: tl.tensor, partial: tl.tensor, starts: tl.tuple,
    where: tl.tuple, hidden_dv: tl.tuple, sizes: tl.tuple,
    WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Store dk and dv of BLOCK_K keys from `first` on, and add their contributions to dq of all queries.

    tensors, starts, where: those of `_attention_short`.  hidden_dv: dv of masked keys, and the summand of other keys.
    """
    grad, q, k, v, mask, lse, delta, dq, dk, dv = tensors
    grad_start, q_start = starts
    batch, row, head, line = where
    alike, spoiled = hidden_dv
    _, queries, keys, _, bias_keys = sizes
    EXACT: tl.constexpr = k.data.dtype.element_ty == tl.float32
    WIDE: tl.constexpr = padded_width(WIDTH)
    j = first + tl.arange(0, BLOCK_K)
    k_tile = _load_near(k, vectors_of(k, batch, row, head), j, keys, WIDTH)
    v_tile = _load_near(v, vectors_of(v, batch, row, head), j, keys, WIDTH)
    attended = load_mask(mask, batch, row, j, keys)[:, None]
    dk_tile = tl.zeros([BLOCK_K, WIDE], tl.float32)
    dv_tile = tl.zeros([BLOCK_K, WIDE], tl.float32)
    for start in range(0, queries, BLOCK_Q):
        i = start + tl.arange(0, BLOCK_Q)
        q_tile = _load_near(q, q_start, i, queries, WIDTH)
        do_tile = _load_near(grad, grad_start, i, queries, WIDTH)
        lse_tile = tl.load(lse + i, mask=i < queries, other=float("inf"))
        d = tl.load(delta + i, mask=i < queries, other=0.0)
        s = tl.dot(k_tile, tl.trans(q_tile)) * WIDTH**-0.5
        if bias is not None:
            at = i[None, :] * (bias.strides[2] * bias.unit) + j[:, None]
            valid = (i < queries)[None, :] & (j < bias_keys)[:, None]
            s += tl.load(bias_start + at, mask=valid, other=0.0).to(tl.float32)
        p = tl.where(attended, exp_shifted(s, lse_tile[None, :], EXACT), 0.0)
        dv_tile = tl.dot(p.to(do_tile.dtype), do_tile, acc=dv_tile)
        dp = tl.dot(v_tile, tl.trans(do_tile))
        ds = (p * (dp - d[None, :])).to(k_tile.dtype)
        dk_tile = tl.dot(ds, q_tile, acc=dk_tile)
        dq_tile = tl.dot(tl.trans(ds), k_tile)
        # dq is complete after the last tile of keys.
        limit = tl.where(first + BLOCK_K < keys, 0, queries)
        if partial is not None:
            at = line * WIDE + i[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
            known = (i < queries)[:, None]
            dq_tile += tl.load(partial + at, mask=known & (first > 0), other=0.0)
            # Not block & scalar: Triton's interpreter turns that into integers, which Triton 3.9 rejects as a mask.
            tl.store(partial + at, dq_tile, mask=(i >= limit)[:, None] & known)
        _store_near(dq, vectors_of(dq, batch, row, head), dq_tile * WIDTH**-0.5, i, limit, WIDTH)
    dv_tile = tl.where(attended, dv_tile + spoiled, alike)
    _store_near(dk, vectors_of(dk, batch, row, head), dk_tile * WIDTH**-0.5, j, keys, WIDTH)
    _store_near(dv, vectors_of(dv, batch, row, head), dv_tile, j, keys, WIDTH)


@triton.jit
def _attention_short(
    grad: tl.tuple, q: tl.tuple, k: tl.tuple, v: tl.tuple, mask: tl.tuple, bias: tl.tuple, out: tl.tuple,
    lse: tl.tensor, delta: tl.tensor, firsts: tl.tensor, partial: tl.tensor, dq: tl.tuple, dk: tl.tuple, dv: tl.tuple,
    sizes: tl.tuple,
    WIDTH: tl.constexpr, TAIL_K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Store dq, dk, dv and delta of one head of one row, and firsts, unless it is None, like `_attention_dq`.

    partial [programs, Q, padded WIDTH]: accumulators of dq in fp32, or None if there is a single tile of keys.
    TAIL_K: the size of a smaller last tile of keys, or 0.
    """
    rows, queries, keys, heads, _ = sizes
    _, head, row, batch = program_tile(1, heads, rows)
    line = ((batch.to(tl.int64) * rows + row) * heads + head) * queries
    lse += line
    delta += line
    if firsts is not None:  # noqa: SIM102  (the one is a constant, the other is not)
        if head == 0:
            first = first_masked_key(mask, batch, row, rows, keys, 1)
            tl.store(firsts + batch.to(tl.int64) * rows + row, first)
    WIDE: tl.constexpr = padded_width(WIDTH)
    bias_start = bias_of(bias, batch, head) if bias is not None else None
    grad_start, q_start = vectors_of(grad, batch, row, head), vectors_of(q, batch, row, head)
    _store_deltas(grad, grad_start, out, vectors_of(out, batch, row, head), delta, queries, WIDTH, BLOCK_Q)
    # dv of masked keys, from queries that attend to masked keys only.
    alike = tl.zeros([1, WIDE], tl.float32)
    # NaN if such a query has no masked keys either.
    spoiled = 0.0
    if some_fully_masked(lse, queries):
        alike, hidden = uniform_dv(grad, lse, mask, batch, row, head, queries, keys, WIDTH, BLOCK_Q)
        spoiled = tl.where(hidden == 0, float("nan"), 0.0)

    tensors, starts = (grad, q, k, v, mask, lse, delta, dq, dk, dv), (grad_start, q_start)
    where, hidden_dv = (batch, row, head, line), (alike, spoiled)
    whole = keys // BLOCK_K * BLOCK_K if TAIL_K > 0 else keys
    for first in range(0, whole, BLOCK_K):
        _short_tile(first, tensors, bias, bias_start, partial, starts, where, hidden_dv, sizes, WIDTH, BLOCK_Q, BLOCK_K)
    if TAIL_K > 0:
        # In a smaller tile, other threads may own the elements of dq.
        tl.debug_barrier()
        _short_tile(whole, tensors, bias, bias_start, partial, starts, where, hidden_dv, sizes, WIDTH, BLOCK_Q, TAIL_K)


SHORT = register(
    "attention_short",
    _attention_short,
    configs(
        "BLOCK_Q BLOCK_K",
        *((32, keys, warps, stages) for keys, warps in ((64, 4), (128, 8)) for stages in (1, 2)),
        *((16, 64, 4, 1), (16, 128, 8, 1), (64, 64, 4, 1), (64, 128, 8, 1), (32, 256, 8, 1), (16, 16, 1, 1)),
    ),
)


def serves_short(vectors: Iterable[Tensor], bias: Tensor | None) -> bool:
    """Return whether the kernel for short rows supports vectors [B, R, Q or K, h, d]: short, and of 16 bits."""
    return all(
        t.element_size() == 2 and t.shape[2] <= LONGEST and t.shape[2] * t.stride(2) < NEAR for t in vectors
    ) and (bias is None or bias.shape[2] * bias.stride(2) < NEAR)


# Warps of the bias gradient that a core runs at the same time. Its tiles take most of the registers.
WARPS = 8
LEAST = 16  # fewest queries or keys per tile
MAX_SLABS = 16  # slabs of rows with separate bias gradients


def attention(t: Operands) -> tuple[Tensor, Tensor]:
    """Compute warpfold::attention."""
    out, lse = empty_out(t.q, t.v), empty_lse(t.q)
    _forward(t.but(out=out, lse=lse))
    return out, lse


def _forward(t: Operands) -> None:
    """Write the output of attention, [B, R, Q, h, d], and lse [B, R, h, Q]."""
    call = _Call({"q": t.q, "k": t.k, "v": t.v, "out": t.out}, t.mask, t.bias)
    kernel = FORWARD.tiled(call.key, t.q)
    tail = least_tail(call.sizes.queries, kernel["BLOCK_Q"], t.q)
    kernel.run(call.row_grid(kernel, "BLOCK_Q"), **call.arguments, lse=t.lse, TAIL_Q=tail)


def attention_backward(t: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::attention_backward."""
    dq, dk, dv, dbias = empty_like(t.q), empty_like(t.k), empty_like(t.v), empty_bias(t.bias, t.bias_wanted, t.q)
    wanted = {"dq": dq, "dk": dk, "dv": dv}
    written = {name: x if _width_innermost(x) else x.new_empty(x.shape) for name, x in wanted.items()}
    slabs = _backward(t.but(**written, dbias=dbias))
    if slabs is not None:
        sum_partials(Sum(slabs.flatten(1), (dbias,)))
    for name, x in written.items():
        if x is not wanted[name]:
            wanted[name].copy_(x)
    return dq, dk, dv, dbias


def _backward(t: Operands) -> Tensor | None:
    """Write the gradients of attention to dq, dk and dv, with stride 1 along the width, and to dbias [B, h, Q, K].

    dbias is computed if it is needed.  If dbias is None or there are several slabs, return the slabs [slabs, B, h, Q,
    K], whose sum is the gradient.
    """
    vectors = {name: getattr(t, name) for name in ("grad", "q", "k", "v", "out", "dq", "dk", "dv")}
    call, lse = _Call(vectors, t.mask, t.bias), t.lse
    batches, sizes = len(t.q), call.sizes
    # One kernel writes both for the others.
    delta, firsts = lse.new_empty(lse.shape), lse.new_empty(lse.shape[:2], dtype=torch.int32)
    shared = {name: given for name, given in call.arguments.items() if name not in ("out", "dq", "dk", "dv")}
    shared |= {"lse": lse, "delta": delta}
    if serves_short(vectors.values(), t.bias):
        kernel, wide = SHORT.tiled(call.key, t.q), padded_width(t.q.shape[-1])
        kernel.run(
            (batches * sizes.rows * sizes.heads,),
            **call.arguments,
            lse=lse,
            delta=delta,
            firsts=firsts if t.bias_wanted else None,
            partial=lse.new_empty(*lse.shape, wide) if sizes.keys > kernel["BLOCK_K"] else None,
            TAIL_K=least_tail(sizes.keys, kernel["BLOCK_K"], t.q),
        )
    else:
        out, dq, dk, dv = (call.arguments[name] for name in ("out", "dq", "dk", "dv"))
        kernel = DQ.tiled(call.key, t.q)
        kernel.run(call.row_grid(kernel, "BLOCK_Q"), **shared, out=out, dq=dq, firsts=firsts)
        kernel = DKDV.tiled(call.key, t.q)
        kernel.run(call.row_grid(kernel, "BLOCK_K"), **shared, dk=dk, dv=dv)
    if not t.bias_wanted:
        return None
    kernel = DBIAS.tiled(call.key, t.q)
    tiles = batches * sizes.heads * cdiv(sizes.queries, kernel["BLOCK_Q"]) * cdiv(sizes.keys, kernel["BLOCK_K"])
    slab, slabs = slabs_for(sizes.rows, tiles, cores(t.q.device) * max(1, WARPS // kernel.config.warps))
    whole = None if t.dbias is None or slabs > 1 else t.dbias[None]
    into = whole
    if into is None:
        into = t.q.new_empty(slabs, batches, sizes.heads, sizes.queries, sizes.keys, dtype=torch.float32)
    dbias = strided_by_length(into, into.stride()[:4])
    kernel.run((slabs * tiles,), **shared, firsts=firsts, dbias=dbias, slab=slab, batches=batches)
    return into if whole is None else None


def least_tail(length: int, block: int, x: Tensor) -> int:
    """Return the length of a smaller last tile, the shortest for tensor cores; 0 if the last is like the others."""
    return LEAST if x.element_size() == 2 and block < length and 0 < length % block <= LEAST < block else 0


@functools.cache
def slabs_for(rows: int, tiles: int, programs: int) -> tuple[int, int]:
    """Choose the number of rows per slab of the bias gradient, and the number of slabs.

    tiles: programs per slab.  programs: programs that run at the same time.  The time is that of the waves of programs,
    each of which processes all rows of a slab, so the last wave should be full.  Each slab after the first costs a
    write and a read of its tiles: memory moves some twenty tiles in the time that a program needs for a row.
    """
    most = max(1, min(MAX_SLABS, rows // 4))

    def turns(slabs: int) -> float:
        moved = slabs * tiles / 20 if slabs > 1 else 0.0
        return cdiv(slabs * tiles, programs) * cdiv(rows, slabs) + moved

    slab = cdiv(rows, min(range(1, most + 1), key=turns))
    return slab, cdiv(rows, slab)


class _Call:
    """The arguments that the kernels of a call share.

    vectors: all tensors with the axes of q, [B, R, Q or K, h, d], by name.  mask: [B, R, K].  bias: [B, h, Q, K].
    key: the key of the configurations: width, 2 with a bias (otherwise 1), queries, keys.
    """

    def __init__(self, vectors: dict[str, Tensor], mask: Tensor, bias: Tensor | None) -> None:
        self.batches, rows, queries, heads, width = vectors["q"].shape
        laid_out = None if bias is None else _strided_bias(bias)
        bias_keys = 0 if laid_out is None or laid_out.data is None else laid_out.data.shape[-1]
        self.sizes = Sizes(rows, queries, vectors["k"].shape[2], heads, bias_keys)
        self.key: Key = width, 1 if bias is None else 2, queries, self.sizes.keys
        # Triton can load and compare uint8, but not bool.
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        self.arguments: dict[str, Any] = {
            **strided(vectors),
            "mask": Strided.of(mask, mask.stride()[:2], 1),
            "bias": laid_out,
            "sizes": self.sizes,
            "WIDTH": width,
        }

    def row_grid(self, kernel: TiledKernel, block: str) -> tuple[int]:
        """Return the grid of a kernel whose programs each own a block of queries or keys of some rows."""
        length = self.sizes.queries if block == "BLOCK_Q" else self.sizes.keys
        groups = cdiv(self.sizes.rows, kernel["ROWS"])
        return (cdiv(length, kernel[block]) * self.sizes.heads * groups * self.batches,)


def _width_innermost(t: Tensor) -> bool:
    return t.stride(-1) == 1 or t.shape[-1] == 1


def strided(vectors: dict[str, Tensor]) -> dict[str, Strided]:
    """Make kernel arguments from tensors [B, R, Q or K, h, d], with a copy if the last axis does not have stride 1."""
    vectors = {name: t if _width_innermost(t) else t.contiguous() for name, t in vectors.items()}
    is_half = all(t.element_size() == 2 for t in vectors.values())
    layouts = _layouts(tuple([(t.shape, t.stride()) for t in vectors.values()]), is_half)
    return {name: Strided(t, *layout) for (name, t), layout in zip(vectors.items(), layouts)}


@functools.lru_cache(maxsize=4096)
def _layouts(tensors: tuple[tuple[Shape, Shape], ...], is_half: bool) -> list[tuple[Shape, Any]]:
    """Compute the strides and the unit of each tensor from shapes and strides.

    All tensors share one unit, because with separate units dk and dv of heads of width 64 need more registers than
    sm_80 has.  For 16 bits, multiples of 16 are not divided, as in `strided_by_length`, so that one variant serves rows
    and columns of all lengths.  In fp32 this would spill registers.
    """
    strides = [_strides(*each) for each in tensors]
    unit = math.gcd(16, *(stride for each in strides for stride in each))
    unit = 1 if unit == 16 and is_half else unit
    return [(t.strides, t.unit) for t in (Strided.of(None, each, unit) for each in strides)]


def _strides(shape: Shape, strides: Shape) -> Shape:
    """Return the strides of all axes except the last, with 0 for axes of size 1, whose strides are arbitrary."""
    return tuple([0 if size == 1 else stride for size, stride in zip(shape[:-1], strides[:-1])])


def _strided_bias(bias: Tensor) -> Strided:
    """Make the kernel argument for a bias [B, h, Q, K], with rows padded to full 16-byte loads.

    If its memory does not allow this, the bias, which is the smallest of the operands, is copied.  The padding is never
    used.
    """
    shared = bias.stride(0) == 0
    bias = bias[:1] if shared else bias
    keys, strides = bias.shape[-1], _strides(bias.shape, bias.stride())
    wide = cdiv(keys, BIAS_UNIT) * BIAS_UNIT
    end = bias.storage_offset() + sum((n - 1) * stride for n, stride in zip(bias.shape, strides)) + wide
    within = end * bias.element_size() <= bias.untyped_storage().nbytes()
    if bias.stride(-1) == 1 and within and not any(stride % BIAS_UNIT for stride in strides):
        bias = bias.as_strided((*bias.shape[:-1], wide), bias.stride())
    else:
        padded = bias.new_empty(*bias.shape[:-1], wide)
        padded[..., :keys] = bias
        bias = padded
    batch, head, query = _strides(bias.shape, bias.stride())
    return strided_by_length(bias, (0 if shared else batch, head, query))


def gated_attention(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::gated_attention."""
    x, inner = t.x, t.out_weight.shape[1]
    y, (mean, scale), own = empty_projected(x, 4 * inner), empty_statistics(x), empty_own_bias(x, t)
    makes_bias = own.numel() > 0
    planes = Planes(own.movedim(-3, -1), 4 * inner) if makes_bias else None
    project(t.but(bias=t.gate_bias, mean=mean, scale=scale), y, planes)
    o, lse = empty_projected(x, inner), empty_layer_lse(x, t.heads)
    g, *vectors, bias = split_projections(y, inner, t.heads, own if makes_bias else t.bias)
    q, k, v, out = (batched(each, 5) for each in (*vectors, o.unflatten(-1, (t.heads, -1))))
    bias = None if bias is None else batched(bias, 4)
    _forward(Operands(q=q, k=k, v=v, mask=batched(t.mask, 3), bias=bias, out=out, lse=batched(lse, 4)))
    new = gated_linear_residual(t.but(o=o, g=g, weight=t.out_weight, bias=t.out_bias), t.residual)
    return new, y, mean, scale, o, lse, own


def gated_attention_backward(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::gated_attention_backward."""
    x, inner, heads = t.x, t.out_weight.shape[1], t.heads
    makes_bias = t.weight.shape[0] > 4 * inner
    given = empty_bias(t.bias, t.bias_wanted, x)
    dy, do = empty_projected(x, t.weight.shape[0]), empty_projected(x, inner)
    g, *vectors, bias = split_projections(t.y, inner, heads, t.own if makes_bias else t.bias)
    dg, *gradients, _ = split_projections(dy, inner, heads, None)
    of_end = gated_linear_residual_gradients(t.but(o=t.attended, g=g, weight=t.out_weight, bias=t.out_bias), do, dg)
    do, o = (each.unflatten(-1, (heads, -1)) for each in (do, t.attended))
    do, q, k, v, o, dq, dk, dv = (batched(each, 5) for each in (do, *vectors, o, *gradients))
    bias, dbias = (None if each is None else batched(each, 4) for each in (bias, None if makes_bias else given))
    rows = Operands(q=q, k=k, v=v, mask=batched(t.mask, 3), bias=bias, out=o, lse=batched(t.lse, 4))
    wanted = makes_bias or t.bias_wanted
    slabs = _backward(rows.but(grad=do, dq=dq, dk=dk, dv=dv, dbias=dbias, bias_wanted=wanted))
    sums, own = list[Sum](), None
    if slabs is not None and makes_bias:
        own = slabs.view(-1, *x.shape[:-3], heads, *x.shape[-3:-1]).movedim(-3, -1)
    elif slabs is not None:
        sums.append(Sum(slabs.flatten(1), (given,)))
    of_norm = norm_linear_backward(t.but(grad=dy, bias=t.gate_bias), t.grad if t.residual else None, sums, own)
    return *of_norm, *of_end, given
