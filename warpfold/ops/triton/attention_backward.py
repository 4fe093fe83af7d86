"""Attention, backward: three kernels, each of which owns what it writes, so that nothing is added up out of order.

With s the logits, p = e^(s - lse) their weights, o the output and do its gradient:

    ds = p (do v^T - delta),  delta = sum do o;   dq = ds k / sqrt(d)   dk = ds^T q / sqrt(d)   dv = p^T do   dbias = ds

dq owns queries of some rows and runs over the keys; dk and dv own keys of some rows and run over the queries, all of it
transposed; dbias owns a tile of queries and keys and runs over the rows.  The weights are computed anew in each.
A query of which no unmasked key counts (all keys are masked, or the others have a bias of -inf) has lse = inf, so that
p = 0.  It weighs its masked keys alike, and its logits have no gradient; without masked keys all of it is NaN.
"""

# mypy: disable-error-code="assignment,attr-defined"
# Triton lets a tuple grow.

import triton
import triton.language as tl

from warpfold.ops.triton.attention_forward import ROW_TILES, ROW_TILES_FP32
from warpfold.ops.triton.attention_tiles import (
    SCAN,
    bias_of,
    exp_shifted,
    first_masked_key,
    load_bias,
    load_mask,
    load_tile,
    mask_of,
    offset,
    padded_width,
    program_tile,
    store_tile,
)
from warpfold.ops.triton.launch import configs, register, register_by_precision


@triton.jit
def _add_dq(
    acc: tl.tuple,
    own: tl.tuple,
    bias: tl.tuple,
    bias_start: tl.tensor,
    k: tl.tuple,
    v: tl.tuple,
    mask: tl.tuple,
    i: tl.tensor,
    where: tl.tuple,
    sizes: tl.tuple,
    begin: tl.tensor,
    end: tl.tensor,
    MASKED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
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
    grad: tl.tuple,
    q: tl.tuple,
    k: tl.tuple,
    v: tl.tuple,
    mask: tl.tuple,
    bias: tl.tuple,
    out: tl.tuple,
    lse: tl.tensor,
    delta: tl.tensor,
    firsts: tl.tensor,
    dq: tl.tuple,
    sizes: tl.tuple,
    WIDTH: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
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
    grad: tl.tuple,
    lse: tl.tensor,
    mask: tl.tuple,
    batch: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_Q: tl.constexpr,
) -> tl.tensor:
    """Return what the queries of a row that weigh its masked keys alike add to dv of each of those, [1, WIDTH]; and how
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
    grad: tl.tuple,
    q: tl.tuple,
    k: tl.tuple,
    v: tl.tuple,
    mask: tl.tuple,
    bias: tl.tuple,
    lse: tl.tensor,
    delta: tl.tensor,
    dk: tl.tuple,
    dv: tl.tuple,
    sizes: tl.tuple,
    WIDTH: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
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
    grad: tl.tuple,
    q: tl.tuple,
    k: tl.tuple,
    v: tl.tuple,
    mask: tl.tuple,
    bias: tl.tuple,
    lse: tl.tensor,
    delta: tl.tensor,
    firsts: tl.tensor,
    dbias: tl.tuple,
    sizes: tl.tuple,
    slab: tl.tensor,
    batches: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
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
    into = lines + j.to(tl.int64)[None, :] * dbias.strides[4]
    tl.store(into, acc.to(dbias.data.dtype.element_ty), mask=(i[:, None] < queries) & (j[None, :] < keys))


@triton.jit
def _attention_slabs(
    parts: tl.tensor,
    dbias: tl.tuple,
    positions: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    slabs: tl.tensor,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store dbias [B, h, Q, K], the sum of parts [slabs, B, h, Q, K], one after another; positions: B Q K.

    All heads of BLOCK positions: in the gradient of a projection they lie side by side.
    """
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    h = tl.arange(0, triton.next_power_of_2(HEADS))
    k, line = index % keys, index // keys
    i, batch = line % queries, line // queries
    valid = (index < positions)[:, None] & (h < HEADS)[None, :]
    image = (batch * HEADS)[:, None] + h[None, :]
    parts += (image * queries + i[:, None]) * keys + k[:, None]
    acc = tl.zeros([BLOCK, triton.next_power_of_2(HEADS)], tl.float32)
    for _ in range(slabs):
        acc += tl.load(parts, mask=valid, other=0.0)
        parts += positions * HEADS
    at = offset(batch, dbias.strides[0], dbias.unit) + offset(i, dbias.strides[2], dbias.unit) + k * dbias.strides[3]
    into = dbias.data + at[:, None] + offset(h, dbias.strides[1], dbias.unit)[None, :]
    tl.store(into, acc.to(dbias.data.dtype.element_ty), mask=valid)


DQ = register_by_precision("attention_dq", _attention_dq, ROW_TILES, ROW_TILES_FP32)
DKDV = register_by_precision(
    "attention_dkdv",
    _attention_dkdv,
    configs(
        "BLOCK_Q BLOCK_K ROWS",
        *((64, 64, 1, 4, 2), (64, 64, 1, 4, 3), (64, 128, 1, 8, 2), (32, 64, 1, 4, 2), (32, 64, 2, 4, 2)),
        *((32, 128, 1, 8, 2), (32, 128, 1, 4, 2), (16, 64, 1, 2, 2), (16, 64, 1, 4, 2), (16, 128, 1, 8, 2)),
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
SLABS = register("attention_slabs", _attention_slabs, configs("BLOCK", (256, 4, 1), (128, 4, 1)))
