"""Attention on a GPU: the kernels, and below them which of them run, over what, and how they are launched.

q, k, v, the output and their gradients are `Strided` with strides (batch, row, query or key, head), and stride 1 along
the width; a mask has strides (batch, row), a bias (batch, head, query).

Attention, forward: a program owns a tile of queries of one head, for some rows that share one tile of the bias.

Online softmax runs over the keys, tile by tile: of each query the maximum m_i so far, the sum l_i of the weights and
the sum acc of weighted values, both rescaled by alpha where the maximum grows.  A logit costs one fused multiply-add,
s = q k^T / sqrt(d) + bias, and its weight another and one exp2, 2^(log2(e) s - log2(e) max).

Attention, backward: three kernels, each of which owns what it writes, so that nothing is added up out of order.

With s the logits, p = e^(s - lse) their weights, o the output and do its gradient:

    ds = p (do v^T - delta),  delta = sum do o;   dq = ds k / sqrt(d)   dk = ds^T q / sqrt(d)   dv = p^T do   dbias = ds

dq owns queries of some rows and runs over the keys; dk and dv own keys of some rows and run over the queries, all of it
transposed; dbias owns a tile of queries and keys and runs over the rows.  The weights are computed anew in each.
A query of which no unmasked key counts (all keys are masked, or the others have a bias of -inf) has lse = inf, so that
p = 0.  It weighs its masked keys alike, and its logits have no gradient; without masked keys all of it is NaN.

Attention, backward, of short rows: one program makes dq, dk and dv of a head of a row.

The general kernels compute each weight twice, once where queries are owned and once where keys are.  Here a program
runs over all tiles of keys, and for each over all queries: a weight is computed once, with five products instead of
seven.  dk and dv of a tile are done with when it is; dq is added up in fp32, in memory that no other program sees and
that stays in the cache, from one tile of keys to the next: in order, and not at all where one tile has all keys.

One family of kernels serves every attention of the trunk, at any strides: rows and columns, with a bias or without,
few queries or many, the templates' features of each pair (one query over a handful of keys) among them.

gated_attention on a GPU: the kernels of its parts, one after another, over memory that they share.

Forward three: norm and projection, attention, and what ends it.  Backward the same three the other way round, over one
gradient dy of the projection: each writes its part of dy where the projection's own backward pass reads it, so nothing
is joined, copied or filled with zeros, and the last adds the gradient that x has as the residual.

At N = 256 in half precision, 128 channels, 4 heads 32 wide: forward moves x 17 MB, y written and read 2 x 69, o written
and read 2 x 17, x and out 34, in all 223 MB, 67 us at 3.35 TB/s; backward some 480 MB, of which dy, written once and
read twice, is 208.  The parts called one by one join their gradients in between: 138 MB more.
"""

# mypy: disable-error-code="assignment,attr-defined"
# Triton lets a tuple grow.

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.attention import batched, empty_bias, empty_layer_lse, empty_lse, empty_out, empty_own_bias, parts
from warpfold.ops.dispatch import Operands, Shape, empty_like
from warpfold.ops.linear import empty_projected, empty_statistics
from warpfold.ops.triton.launch import (
    ByPrecision,
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
NEIGHBOURS = tl.constexpr(8)  # groups of rows whose keys and values stay in the cache while the bias passes by
BIAS_UNIT = 16  # divides the strides of a bias as the kernels are given it
SCAN = tl.constexpr(512)  # entries of a mask looked at together


class Sizes(NamedTuple):
    """Sizes of one call, as the kernels are given them; bias_keys: keys of the bias as it lies in memory."""

    rows: int
    queries: int
    keys: int
    heads: int
    bias_keys: int


@triton.constexpr_function
def padded_width(width: int) -> int:
    """Return how wide a tile of vectors is: a power of two that tensor cores take."""
    return max(16, 1 << (int(width) - 1).bit_length())


@triton.jit
def offset(index: tl.tensor, stride: tl.tensor, unit: tl.constexpr) -> tl.tensor:
    """Return an offset in 64 bits.  Strides come divided by `unit`: the compiler knows then what divides an address."""
    return index.to(tl.int64) * stride * unit


@triton.jit
def vectors_of(x: tl.tuple, batch: tl.tensor, row: tl.tensor, head: tl.tensor) -> tl.tensor:
    """Return where the vectors of one head of one row begin."""
    start = x.data + offset(batch, x.strides[0], x.unit)
    return start + offset(row, x.strides[1], x.unit) + offset(head, x.strides[3], x.unit)


@triton.jit
def program_tile(tiles: tl.tensor, heads: tl.tensor, groups: tl.tensor) -> tl.tensor:
    """Return this program's tile, head, group of rows and batch; neighbours in time share keys, values and bias."""
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
    """Load vectors [index, WIDTH], of which there are `count` (WHOLE: no index is past them), padded with 0."""
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
    """Store vectors, as `load_tile` loads them."""
    start = vectors_of(x, batch, row, head)
    across = tl.arange(0, padded_width(WIDTH))
    valid = (across[None, :] < WIDTH) & (index[:, None] < count)
    pointers = start + offset(index[:, None], x.strides[2], x.unit) + across[None, :]
    tl.store(pointers, tile.to(x.data.dtype.element_ty), mask=valid)


@triton.jit
def bias_of(bias: tl.tuple, batch: tl.tensor, head: tl.tensor) -> tl.tensor:
    """Return where the bias of one head begins."""
    return bias.data + (offset(batch, bias.strides[0], bias.unit) + offset(head, bias.strides[1], bias.unit))


@triton.jit
def load_bias(
    bias: tl.tuple, start: tl.tensor, i: tl.tensor, j: tl.tensor, queries: tl.tensor, bias_keys: tl.tensor
) -> tl.tensor:
    """Load the bias of queries i and keys j, of which one is a column and the other a row, in fp32."""
    valid = (i < queries) & (j < bias_keys)
    return tl.load(start + offset(i, bias.strides[2], bias.unit) + j, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def exp_shifted(s: tl.tensor, shift: tl.tensor, EXACT: tl.constexpr) -> tl.tensor:
    """Return e^(s - shift) by one fused multiply-add and one exp2; EXACT, for fp32, subtracts before it multiplies."""
    if EXACT:
        return tl.math.exp2((s - shift) * LOG2E)
    return tl.math.exp2(s * LOG2E - shift * LOG2E)


@triton.jit
def mask_of(mask: tl.tuple, batch: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Return where the mask of one row begins."""
    return mask.data + offset(batch, mask.strides[0], mask.unit) + offset(row, mask.strides[1], mask.unit)


@triton.jit
def load_mask(mask: tl.tuple, batch: tl.tensor, row: tl.tensor, j: tl.tensor, keys: tl.tensor) -> tl.tensor:
    """Return which of the keys j one row attends to."""
    return tl.load(mask_of(mask, batch, row) + j, j < keys, 0) != 0


@triton.jit
def first_masked_key(
    mask: tl.tuple, batch: tl.tensor, first_row: tl.tensor, rows: tl.tensor, keys: tl.tensor, ROWS: tl.constexpr
) -> tl.tensor:
    """Return the first key that some of the rows masks; `keys` if none does."""
    firsts = tl.zeros([SCAN], tl.int32) + keys
    for start in range(0, keys, SCAN):
        j = start + tl.arange(0, SCAN)
        for n in tl.static_range(ROWS):
            row = tl.minimum(first_row + n, rows - 1)
            attended = tl.load(mask_of(mask, batch, row) + j, j < keys, 1)
            firsts = tl.minimum(firsts, tl.where(attended != 0, keys, j))
    return tl.min(firsts, 0)


# A masked logit.  A power of two, so that log2(e) times it is exact: where nothing else counts (all keys are masked, or
# the others have a bias of -inf), masked keys weigh 1 each.
NEVER = tl.constexpr(-(2.0**60))
# Where the running maximum begins: below every logit that counts, and finite, so that a logit of -inf weighs nothing
# beside it, and not NaN.  In half precision log2(e) times it must be finite too.
LOWEST = tl.constexpr(-(2.0**126))
LOWEST_FP32 = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _attend(
    state: tl.tuple, q_tiles: tl.tuple, bias: tl.tuple, bias_start: tl.tensor, k: tl.tuple, v: tl.tuple, mask: tl.tuple,
    i: tl.tensor, where: tl.tuple, sizes: tl.tuple, begin: tl.tensor, end: tl.tensor,
    MASKED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the state, m_i, l_i and acc of each row, after the keys from begin to end.

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
    """Store the output and lse of BLOCK_Q queries; where: the first of them, batch, first row, head."""
    rows, queries, keys, heads, _ = sizes
    first, batch, first_row, head = where
    i = first + tl.arange(0, BLOCK_Q)
    bias_start = bias_of(bias, batch, head) if bias is not None else None
    q_tiles, m_i, l_i, acc = (), (), (), ()
    LEAST: tl.constexpr = LOWEST_FP32 if k.data.dtype.element_ty == tl.float32 else LOWEST
    for n in tl.static_range(ROWS):
        row = tl.minimum(first_row + n, rows - 1)  # past the last: as the last, and not stored
        q_tiles = q_tiles + (load_tile(q, batch, row, head, i, queries, WIDTH),)
        m_i = m_i + (tl.full([BLOCK_Q], LEAST, tl.float32),)
        l_i = l_i + (tl.zeros([BLOCK_Q], tl.float32),)
        acc = acc + (tl.zeros([BLOCK_Q, padded_width(WIDTH)], tl.float32),)

    # Up to the first key that is masked, whole tiles need no look at the mask: most often that is all of them.  The
    # rest goes by half tiles, or it would want more registers than the others have left.
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
    """Store the output, and the logarithm lse [B, R, h, Q] of each query's sum of weights.

    TAIL_Q: queries of the last tile, where they are that few; else 0.
    """
    rows, queries, _, heads, _ = sizes
    tile, head, group, batch = program_tile(tl.cdiv(queries, BLOCK_Q), heads, tl.cdiv(rows, ROWS))
    where = (tile * BLOCK_Q, batch, group * ROWS, head)
    if TAIL_Q > 0 and tile == queries // BLOCK_Q:
        _forward_tile(q, k, v, mask, bias, out, lse, sizes, where, WIDTH, TAIL_Q, BLOCK_K, ROWS)
    else:
        _forward_tile(q, k, v, mask, bias, out, lse, sizes, where, WIDTH, BLOCK_Q, BLOCK_K, ROWS)


# Half precision uses tensor cores; fp32, exact and without them, wants smaller tiles.  dq's loop has the same shape.
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
    """Return acc (ds k of each row) after the keys from begin to end.

    own: q, do, lse and delta of each row; where: batch, first row, head.
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
    """Store dq, and what the other two need: delta [B, R, h, Q]; firsts [B, R], the first masked key of each row."""
    rows, queries, keys, heads, _ = sizes
    tile, head, group, batch = program_tile(tl.cdiv(queries, BLOCK_Q), heads, tl.cdiv(rows, ROWS))
    first_row = group * ROWS
    i = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    bias_start = bias_of(bias, batch, head) if bias is not None else None
    q_tiles, do_tiles, lse_tiles, deltas, acc = (), (), (), (), ()
    clear = keys
    for n in tl.static_range(ROWS):
        row = tl.minimum(first_row + n, rows - 1)  # past the last: as the last, and not stored
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
    """Return whether some query of a row weighs masked keys alone."""
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
    """Return the part of dv of each masked key from queries that weigh a row's masked keys alike, [1, WIDTH]; and how
    many masked keys there are."""
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
    """Store dk and dv of a tile of keys.  Masked keys are computed like others and set right at the end."""
    rows, queries, keys, heads, bias_keys = sizes
    tile, head, group, batch = program_tile(tl.cdiv(keys, BLOCK_K), heads, tl.cdiv(rows, ROWS))
    first_row = group * ROWS
    j = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    bias_start = bias_of(bias, batch, head) if bias is not None else None
    EXACT: tl.constexpr = k.data.dtype.element_ty == tl.float32
    k_tiles, v_tiles, dk_acc, dv_acc = (), (), (), ()
    for n in tl.static_range(ROWS):
        row = tl.minimum(first_row + n, rows - 1)  # past the last: as the last, and not stored
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
    """Store the gradient of the bias over the rows of one slab, `slab` of them: dbias [slabs, B, h, Q, K]."""
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


LONGEST = 384  # queries, and keys, of a row
NEAR = 2**31  # numbers between the vectors of a row, at most: their offsets have 32 bits


@triton.jit
def _near(x: tl.tuple, start: tl.tensor, index: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return pointers to the vectors of one head of one row, by offsets of 32 bits: half the registers."""
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
    """Store dk and dv of BLOCK_K keys from `first` on, and add to dq of all queries what they make of it.

    tensors, starts, where: as `_attention_short` has them; hidden_dv: dv of masked keys, and what is added to others.
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
        limit = tl.where(first + BLOCK_K < keys, 0, queries)  # dq is whole after the last tile of keys
        if partial is not None:
            at = line * WIDE + i[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
            known = (i < queries)[:, None]
            dq_tile += tl.load(partial + at, mask=known & (first > 0), other=0.0)
            # not a block & a scalar: of that Triton's interpreter makes integers, which its 3.9 refuses as a mask
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
    """Store dq, dk and dv of one head of one row; and delta and, unless it is None, firsts as `_attention_dq` does.

    partial [programs, Q, padded WIDTH], in fp32: for dq, where there are several tiles of keys; else None.
    TAIL_K: keys of the last tile, where they are that few; else 0.
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
    alike = tl.zeros([1, WIDE], tl.float32)  # dv of masked keys: from queries that attend to nothing else
    spoiled = 0.0  # NaN where such a query has no masked key either
    if some_fully_masked(lse, queries):
        alike, hidden = uniform_dv(grad, lse, mask, batch, row, head, queries, keys, WIDTH, BLOCK_Q)
        spoiled = tl.where(hidden == 0, float("nan"), 0.0)

    tensors, starts = (grad, q, k, v, mask, lse, delta, dq, dk, dv), (grad_start, q_start)
    where, hidden_dv = (batch, row, head, line), (alike, spoiled)
    whole = keys // BLOCK_K * BLOCK_K if TAIL_K > 0 else keys
    for first in range(0, whole, BLOCK_K):
        _short_tile(first, tensors, bias, bias_start, partial, starts, where, hidden_dv, sizes, WIDTH, BLOCK_Q, BLOCK_K)
    if TAIL_K > 0:
        tl.debug_barrier()  # the parts of dq of a smaller tile may lie with other threads
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
    """Return whether the kernel is for vectors [B, R, Q or K, h, d]: short ones of 16 bits, for tensor cores."""
    return all(
        t.element_size() == 2 and t.shape[2] <= LONGEST and t.shape[2] * t.stride(2) < NEAR for t in vectors
    ) and (bias is None or bias.shape[2] * bias.stride(2) < NEAR)


WARPS = 8  # of the gradient of the bias that a core runs at once: its tiles take most of the registers
LEAST = 16  # queries, or keys, of a tile
MAX_SLABS = 16  # of rows whose gradients of the bias are summed apart


def attention(t: Operands) -> tuple[Tensor, Tensor]:
    """Compute warpfold::attention."""
    out, lse = empty_out(t.q, t.v), empty_lse(t.q)
    _forward(t.but(out=out, lse=lse))
    return out, lse


def _forward(t: Operands) -> None:
    """Write the output of attention, [B, R, Q, h, d], and its logarithms [B, R, h, Q]."""
    vectors = {"q": t.q, "k": t.k, "v": t.v, "out": t.out}
    call = _Call(vectors, t.mask, t.bias)
    kernel = call.tiled(FORWARD)
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
    """Write the gradients of attention into dq, dk, dv, stride 1 along the width; and into dbias [B, h, Q, K], if that
    is wanted, or return the slabs [slabs, B, h, Q, K] of which it is the sum, where dbias is None or there are several.
    """
    vectors = {name: getattr(t, name) for name in ("grad", "q", "k", "v", "out", "dq", "dk", "dv")}
    call = _Call(vectors, t.mask, t.bias)
    run = call.run_short if serves_short(vectors.values(), t.bias) else call.run_long
    between = run(t.lse, t.bias_wanted)
    return call.run_bias(t.dbias, **between) if t.bias_wanted else None


def least_tail(length: int, block: int, x: Tensor) -> int:
    """Return how long a last tile of its own is, the shortest that tensor cores take; 0 where the last is as others."""
    return LEAST if x.element_size() == 2 and block < length and 0 < length % block <= LEAST < block else 0


@functools.cache
def slabs_for(rows: int, tiles: int, programs: int) -> tuple[int, int]:
    """Return how many rows a slab of the bias's gradient has, and how many slabs there are.

    tiles: programs of one slab; programs: that run at once.  The slabs take as many turns as there are waves of
    programs, each of all rows of a slab; the last wave should be full.  In the time in which a program is done with a
    row, memory takes or gives back some twenty tiles: what each slab beside the first costs.
    """
    most = max(1, min(MAX_SLABS, rows // 4))

    def turns(slabs: int) -> float:
        moved = slabs * tiles / 20 if slabs > 1 else 0.0
        return cdiv(slabs * tiles, programs) * cdiv(rows, slabs) + moved

    slab = cdiv(rows, min(range(1, most + 1), key=turns))
    return slab, cdiv(rows, slab)


class _Call:
    """The arguments that the kernels of one call share.

    vectors: by name all that lies as q does, [B, R, Q or K, h, d]; mask [B, R, K]; bias [B, h, Q, K].
    """

    def __init__(self, vectors: dict[str, Tensor], mask: Tensor, bias: Tensor | None) -> None:
        self.q = vectors["q"]
        self.batches, rows, queries, heads, width = self.q.shape
        laid_out = None if bias is None else _strided_bias(bias)
        bias_keys = 0 if laid_out is None or laid_out.data is None else laid_out.data.shape[-1]
        self.sizes = Sizes(rows, queries, vectors["k"].shape[2], heads, bias_keys)
        self.arguments: dict[str, Any] = {
            **strided(vectors),
            "mask": strided_mask(mask),
            "bias": laid_out,
            "sizes": self.sizes,
            "WIDTH": width,
        }

    def tiled(self, kernel: ByPrecision) -> TiledKernel:
        """Return a kernel with its configuration for these sizes."""
        return kernel.tiled(self.key, self.q)

    @property
    def key(self) -> Key:
        """What the configurations of the kernels depend on: width, 2 with a bias, queries, keys."""
        biased = 1 if self.arguments["bias"] is None else 2
        return self.q.shape[-1], biased, self.sizes.queries, self.sizes.keys

    def row_grid(self, kernel: TiledKernel, block: str) -> tuple[int]:
        """Return the grid of a kernel whose programs each own a block of queries or keys, of some rows."""
        length = self.sizes.queries if block == "BLOCK_Q" else self.sizes.keys
        groups = cdiv(self.sizes.rows, kernel["ROWS"])
        return (cdiv(length, kernel[block]) * self.sizes.heads * groups * self.batches,)

    def run_long(self, lse: Tensor, bias_wanted: bool) -> dict[str, Any]:
        """Compute the gradients of rows of any length but for that of the bias; return what that one reads too."""
        delta, firsts = self._between(lse)
        rest = dict(self.arguments)
        out, dq, dk, dv = (rest.pop(name) for name in ("out", "dq", "dk", "dv"))
        rest |= {"lse": lse, "delta": delta}
        kernel = self.tiled(DQ)
        kernel.run(self.row_grid(kernel, "BLOCK_Q"), **rest, out=out, dq=dq, firsts=firsts)
        kernel = self.tiled(DKDV)
        kernel.run(self.row_grid(kernel, "BLOCK_K"), **rest, dk=dk, dv=dv)
        return {"lse": lse, "delta": delta, "firsts": firsts}

    def run_short(self, lse: Tensor, bias_wanted: bool) -> dict[str, Any]:
        """Compute those of rows that `attention_short` serves."""
        delta, firsts = self._between(lse)
        kernel, sizes, wide = SHORT.tiled(self.key, self.q), self.sizes, padded_width(self.q.shape[-1])
        several = sizes.keys > kernel["BLOCK_K"]
        kernel.run(
            (self.batches * sizes.rows * sizes.heads,),
            **self.arguments,
            lse=lse,
            delta=delta,
            firsts=firsts if bias_wanted else None,
            partial=lse.new_empty(*lse.shape, wide) if several else None,
            TAIL_K=least_tail(sizes.keys, kernel["BLOCK_K"], self.q),
        )
        return {"lse": lse, "delta": delta, "firsts": firsts}

    def _between(self, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Allocate what one kernel leaves for the others: delta and firsts."""
        return lse.new_empty(lse.shape), lse.new_empty(lse.shape[:2], dtype=torch.int32)

    def run_bias(self, dbias: Tensor | None, **between: Tensor) -> Tensor | None:
        """Compute the gradient of the bias, as `_backward` returns it."""
        sizes, batches = self.sizes, self.batches
        kernel = self.tiled(DBIAS)
        blocks = cdiv(sizes.queries, kernel["BLOCK_Q"]) * cdiv(sizes.keys, kernel["BLOCK_K"])
        tiles = batches * sizes.heads * blocks
        slab, slabs = slabs_for(sizes.rows, tiles, cores(self.q.device) * max(1, WARPS // kernel.config.warps))
        shape = slabs, batches, sizes.heads, sizes.queries, sizes.keys
        whole = None if dbias is None or slabs > 1 else dbias[None]
        into = self.q.new_empty(shape, dtype=torch.float32) if whole is None else whole
        rest = {name: given for name, given in self.arguments.items() if name not in ("out", "dq", "dk", "dv")}
        given = strided_by_length(into, into.stride()[:4])
        kernel.run((slabs * tiles,), **rest, **between, dbias=given, slab=slab, batches=batches)
        return into if whole is None else None


def _width_innermost(t: Tensor) -> bool:
    return t.stride(-1) == 1 or t.shape[-1] == 1


def strided(vectors: dict[str, Tensor]) -> dict[str, Strided]:
    """Return tensors [B, R, Q or K, h, d] as the kernels take them: copied where their last axis has not stride 1."""
    given = {name: t if _width_innermost(t) else t.contiguous() for name, t in vectors.items()}
    is_half = all(t.element_size() == 2 for t in given.values())
    layouts = _layouts(tuple([(t.shape, t.stride()) for t in given.values()]), is_half)
    return {name: Strided(t, *layout) for (name, t), layout in zip(given.items(), layouts)}


@functools.lru_cache(maxsize=4096)  # as in positions.py
def _layouts(tensors: tuple[tuple[Shape, Shape], ...], is_half: bool) -> list[tuple[Shape, Any]]:
    """Return strides and unit of each tensor, given by shape and strides.

    One unit for all: with one for each, dk and dv of heads 64 wide want more registers than sm_80 has.  In 16 bits,
    strides that 16 divides are not divided, as by `strided_by_length`: rows and columns of all lengths are then of one
    kind.  In fp32 this would spill registers.
    """
    strides = [_strides(*each) for each in tensors]
    unit = math.gcd(16, *(stride for each in strides for stride in each))
    unit = 1 if unit == 16 and is_half else unit
    return [(found.strides, found.unit) for found in (Strided.of(None, each, unit) for each in strides)]


def _strides(shape: Shape, strides: Shape) -> Shape:
    """Return the strides of all axes but the last; 0 along axes of one element, whose strides mean nothing."""
    return tuple([0 if size == 1 else stride for size, stride in zip(shape[:-1], strides[:-1])])


def strided_mask(mask: Tensor) -> Strided:
    """Return a mask [B, R, K] as the kernels take it: of numbers that Triton can load and compare."""
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    return Strided.of(mask, mask.stride()[:2], 1)


def _strided_bias(bias: Tensor) -> Strided:
    """Return a bias [B, h, Q, K] as the kernels take it: keys to where loads of 16 bytes end.

    One that does not lie so is laid out anew: of all that is read here it is the smallest.  What lies in the padding is
    never used.
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
    g, *vectors, bias = parts(y, inner, t.heads, own if makes_bias else t.bias)
    q, k, v, out = (batched(each, 5) for each in (*vectors, o.unflatten(-1, (t.heads, -1))))
    bias = None if bias is None else batched(bias, 4)
    _forward(Operands(q=q, k=k, v=v, mask=batched(t.mask, 3), bias=bias, out=out, lse=batched(lse, 4)))
    new = gated_linear_residual(t.but(o=o, g=g, weight=t.out_weight, bias=t.out_bias), t.residual)
    if not t.kept:
        return new, *(x.new_empty(0) for _ in range(6))
    return new, y, mean, scale, o, lse, own


def gated_attention_backward(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::gated_attention_backward."""
    x, inner, heads = t.x, t.out_weight.shape[1], t.heads
    makes_bias = t.weight.shape[0] > 4 * inner
    given = empty_bias(t.bias, t.bias_wanted, x)
    dy, do = empty_projected(x, t.weight.shape[0]), empty_projected(x, inner)
    g, *vectors, bias = parts(t.y, inner, heads, t.own if makes_bias else t.bias)
    dg, *gradients, _ = parts(dy, inner, heads, None)
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
