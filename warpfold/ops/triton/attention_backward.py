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

from warpfold.ops.triton.attention_tiles import (
    BIAS_UNIT,
    SCAN,
    at,
    first_masked,
    load_bias,
    load_keep,
    load_tile,
    place,
    power,
    row_of,
    store_tile,
)


@triton.jit
def _sweep_keys(
    sums: tl.tuple,
    own: tl.tuple,
    k: tl.tensor,
    v: tl.tensor,
    mask: tl.tensor,
    bias: tl.tensor,
    k_at: tl.tuple,
    v_at: tl.tuple,
    mask_at: tl.tuple,
    bias_stride: tl.tensor,
    i: tl.tensor,
    at_head: tl.tuple,
    sizes: tl.tuple,
    begin: tl.tensor,
    end: tl.tensor,
    MASKED: tl.constexpr,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """sums (ds k of each row) after the keys from begin to end; own: q, do, lse and delta of each row.

    at_head: batch, first row, head; sizes: rows, queries, keys, keys of the bias as it lies in memory.
    """
    batch, first_row, head = at_head
    rows, queries, keys, bias_keys = sizes
    EXACT: tl.constexpr = k.dtype.element_ty == tl.float32
    q_tiles, do_tiles, logs, deltas = own
    for start in range(begin, end, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        if BIASED:
            b = load_bias(bias, bias_stride, i[:, None], j[None, :], queries, bias_keys).to(tl.float32)
        new_sums = ()
        for n in tl.static_range(ROWS):
            row = tl.minimum(first_row + n, rows - 1)
            k_tile = load_tile(row_of(k, k_at, batch, row, head, UNIT), j, k_at[2], keys, WIDTH, UNIT, not MASKED)
            v_tile = load_tile(row_of(v, v_at, batch, row, head, UNIT), j, v_at[2], keys, WIDTH, UNIT, not MASKED)
            s = tl.dot(q_tiles[n], tl.trans(k_tile), input_precision="ieee") * WIDTH**-0.5
            if BIASED:
                s += b
            p = power(s, logs[n][:, None], EXACT)
            ds = p * (tl.dot(do_tiles[n], tl.trans(v_tile), input_precision="ieee") - deltas[n][:, None])
            if MASKED:
                ds = tl.where(load_keep(mask, mask_at, batch, row, j, keys)[None, :], ds, 0.0)
            new_sums = new_sums + (tl.dot(ds.to(k_tile.dtype), k_tile, acc=sums[n], input_precision="ieee"),)
        sums = new_sums
    return sums


@triton.jit
def attention_dq(
    grad: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    mask: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    firsts: tl.tensor,
    dq: tl.tensor,
    grad_at: tl.tuple,
    q_at: tl.tuple,
    k_at: tl.tuple,
    v_at: tl.tuple,
    mask_at: tl.tuple,
    bias_at: tl.tuple,
    out_at: tl.tuple,
    dq_at: tl.tuple,
    rows: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    heads: tl.tensor,
    bias_keys: tl.tensor,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """dq, and what the other two need: delta [B, R, h, Q], and the first masked key of each row, firsts [B, R].

    Strides are (batch, row, query or key, head), of the bias (batch, head, query), all divided by their unit.
    """
    tile, head, group, batch = place(tl.cdiv(queries, BLOCK_Q), heads, tl.cdiv(rows, ROWS))
    first_row = group * ROWS
    i = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    bias += at(batch, bias_at[0], BIAS_UNIT) + at(head, bias_at[1], BIAS_UNIT)
    q_tiles, do_tiles, logs, deltas, sums = (), (), (), (), ()
    clear = keys
    for n in tl.static_range(ROWS):
        row = tl.minimum(first_row + n, rows - 1)  # past the last: as the last, and not stored
        limit = tl.where(first_row + n < rows, queries, 0)
        line = (batch.to(tl.int64) * rows + row) * heads + head
        do_tile = load_tile(row_of(grad, grad_at, batch, row, head, UNIT), i, grad_at[2], queries, WIDTH, UNIT)
        o_tile = load_tile(row_of(out, out_at, batch, row, head, UNIT), i, out_at[2], queries, WIDTH, UNIT)
        q_tiles = q_tiles + (load_tile(row_of(q, q_at, batch, row, head, UNIT), i, q_at[2], queries, WIDTH, UNIT),)
        d = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
        tl.store(delta + line * queries + i, d, mask=i < limit)
        do_tiles = do_tiles + (do_tile,)
        deltas = deltas + (d,)
        logs = logs + (tl.load(lse + line * queries + i, mask=i < queries, other=0.0),)
        sums = sums + (tl.zeros([BLOCK_Q, WIDTH if WIDTH > 16 else 16], tl.float32),)
        first = first_masked(mask, mask_at, batch, row, rows, keys, 1)
        tl.store(firsts + batch.to(tl.int64) * rows + row, first, mask=(tile == 0) & (head == 0))
        clear = tl.minimum(clear, first)

    clear = clear // BLOCK_K * BLOCK_K
    for masked in tl.static_range(2):  # first whole tiles without a masked key
        sums = _sweep_keys(
            sums,
            (q_tiles, do_tiles, logs, deltas),
            *(k, v, mask, bias, k_at, v_at, mask_at, bias_at[2], i),
            (batch, first_row, head),
            (rows, queries, keys, bias_keys),
            *(clear if masked == 1 else 0, keys if masked == 1 else clear, masked == 1),
            *(WIDTH, BIASED, UNIT, BLOCK_K // 2 if masked == 1 else BLOCK_K, ROWS),
        )
    for n in tl.static_range(ROWS):
        limit = tl.where(first_row + n < rows, queries, 0)
        dq_row = row_of(dq, dq_at, batch, first_row + n, head, UNIT)
        store_tile(dq_row, sums[n] * WIDTH**-0.5, i, dq_at[2], limit, WIDTH, UNIT)


@triton.jit
def _some_lost(lse: tl.tensor, queries: tl.tensor) -> tl.tensor:
    """Whether some query of a row weighs masked keys alone."""
    most = tl.full([SCAN], float("-inf"), tl.float32)
    for start in range(0, queries, SCAN):
        i = start + tl.arange(0, SCAN)
        most = tl.maximum(most, tl.load(lse + i, mask=i < queries, other=float("-inf")))
    return tl.max(most, 0) == float("inf")


@triton.jit
def _alike(
    grad: tl.tensor,
    stride: tl.tensor,
    lse: tl.tensor,
    mask: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
) -> tl.tensor:
    """What the queries of a row that weigh its masked keys alike add to dv of each of those, [1, WIDTH]; and how many
    masked keys there are."""
    hidden = tl.zeros([SCAN], tl.int32)
    for start in range(0, keys, SCAN):
        j = start + tl.arange(0, SCAN)
        hidden += tl.where((j < keys) & (tl.load(mask + j, j < keys, 0) == 0), 1, 0)
    count = tl.sum(hidden, 0)
    total = tl.zeros([WIDTH if WIDTH > 16 else 16], tl.float32)
    for start in range(0, queries, BLOCK_Q):
        i = start + tl.arange(0, BLOCK_Q)
        lost = tl.load(lse + i, mask=i < queries, other=0.0) == float("inf")
        do_tile = load_tile(grad, i, stride, queries, WIDTH, UNIT).to(tl.float32)
        total += tl.sum(tl.where(lost[:, None], do_tile, 0.0), 0)
    return (total / count)[None, :], count


@triton.jit
def attention_dkdv(
    grad: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    mask: tl.tensor,
    bias: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    grad_at: tl.tuple,
    q_at: tl.tuple,
    k_at: tl.tuple,
    v_at: tl.tuple,
    mask_at: tl.tuple,
    bias_at: tl.tuple,
    dk_at: tl.tuple,
    dv_at: tl.tuple,
    rows: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    heads: tl.tensor,
    bias_keys: tl.tensor,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """dk and dv of a tile of keys.  Masked keys are computed like others and set right at the end."""
    tile, head, group, batch = place(tl.cdiv(keys, BLOCK_K), heads, tl.cdiv(rows, ROWS))
    first_row = group * ROWS
    j = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    bias += at(batch, bias_at[0], BIAS_UNIT) + at(head, bias_at[1], BIAS_UNIT)
    EXACT: tl.constexpr = k.dtype.element_ty == tl.float32
    k_tiles, v_tiles, dk_sums, dv_sums = (), (), (), ()
    for n in tl.static_range(ROWS):
        row = tl.minimum(first_row + n, rows - 1)  # past the last: as the last, and not stored
        k_tiles = k_tiles + (load_tile(row_of(k, k_at, batch, row, head, UNIT), j, k_at[2], keys, WIDTH, UNIT),)
        v_tiles = v_tiles + (load_tile(row_of(v, v_at, batch, row, head, UNIT), j, v_at[2], keys, WIDTH, UNIT),)
        dk_sums = dk_sums + (tl.zeros([BLOCK_K, WIDTH if WIDTH > 16 else 16], tl.float32),)
        dv_sums = dv_sums + (tl.zeros([BLOCK_K, WIDTH if WIDTH > 16 else 16], tl.float32),)

    for start in range(0, queries, BLOCK_Q):
        i = start + tl.arange(0, BLOCK_Q)
        if BIASED:
            b = load_bias(bias, bias_at[2], i[None, :], j[:, None], queries, bias_keys).to(tl.float32)
        new_dk, new_dv = (), ()
        for n in tl.static_range(ROWS):
            row = tl.minimum(first_row + n, rows - 1)
            line = ((batch.to(tl.int64) * rows + row) * heads + head) * queries
            q_tile = load_tile(row_of(q, q_at, batch, row, head, UNIT), i, q_at[2], queries, WIDTH, UNIT)
            do_tile = load_tile(row_of(grad, grad_at, batch, row, head, UNIT), i, grad_at[2], queries, WIDTH, UNIT)
            logs = tl.load(lse + line + i, mask=i < queries, other=float("inf"))
            d = tl.load(delta + line + i, mask=i < queries, other=0.0)
            s = tl.dot(k_tiles[n], tl.trans(q_tile), input_precision="ieee") * WIDTH**-0.5
            if BIASED:
                s += b
            p = power(s, logs[None, :], EXACT)
            dv_sum = tl.dot(p.to(do_tile.dtype), do_tile, acc=dv_sums[n], input_precision="ieee")
            ds = p * (tl.dot(v_tiles[n], tl.trans(do_tile), input_precision="ieee") - d[None, :])
            new_dk = new_dk + (tl.dot(ds.to(q_tile.dtype), q_tile, acc=dk_sums[n], input_precision="ieee"),)
            new_dv = new_dv + (dv_sum,)
        dk_sums, dv_sums = new_dk, new_dv

    for n in tl.static_range(ROWS):
        limit = tl.where(first_row + n < rows, keys, 0)
        row = tl.minimum(first_row + n, rows - 1)
        keep = load_keep(mask, mask_at, batch, row, j, keys)[:, None]
        dk_row = row_of(dk, dk_at, batch, first_row + n, head, UNIT)
        dv_row = row_of(dv, dv_at, batch, first_row + n, head, UNIT)
        store_tile(dk_row, tl.where(keep, dk_sums[n], 0.0) * WIDTH**-0.5, j, dk_at[2], limit, WIDTH, UNIT)
        dv_tile = tl.where(keep, dv_sums[n], 0.0)
        lines = lse + ((batch.to(tl.int64) * rows + row) * heads + head) * queries
        if _some_lost(lines, queries):
            each, hidden = _alike(
                *(row_of(grad, grad_at, batch, row, head, UNIT), grad_at[2], lines),
                *(mask + at(batch, mask_at[0], 1) + at(row, mask_at[1], 1), queries, keys, WIDTH, UNIT, BLOCK_Q),
            )
            dv_tile = tl.where(keep, tl.where(hidden == 0, float("nan"), dv_tile), each)
        store_tile(dv_row, dv_tile, j, dv_at[2], limit, WIDTH, UNIT)


@triton.jit
def attention_dbias(
    grad: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    mask: tl.tensor,
    bias: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    firsts: tl.tensor,
    dbias: tl.tensor,
    grad_at: tl.tuple,
    q_at: tl.tuple,
    k_at: tl.tuple,
    v_at: tl.tuple,
    mask_at: tl.tuple,
    bias_at: tl.tuple,
    rows: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    heads: tl.tensor,
    bias_keys: tl.tensor,
    slab: tl.tensor,
    batches: tl.tensor,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """The gradient of the bias over the rows of one slab, `slab` of them: dbias [slabs, B, h, Q, K], dense."""
    program = tl.program_id(0)
    across, down = tl.cdiv(keys, BLOCK_K), tl.cdiv(queries, BLOCK_Q)
    j = program % across * BLOCK_K + tl.arange(0, BLOCK_K)
    i = program // across % down * BLOCK_Q + tl.arange(0, BLOCK_Q)
    image = program // (across * down)  # (slab, batch, head)
    head = image % heads
    batch = image // heads % batches
    first_row = image // (heads * batches) * slab
    last_key = program % across * BLOCK_K + BLOCK_K

    bias += at(batch, bias_at[0], BIAS_UNIT) + at(head, bias_at[1], BIAS_UNIT)
    b = load_bias(bias, bias_at[2], i[:, None], j[None, :], queries, bias_keys).to(tl.float32)
    EXACT: tl.constexpr = k.dtype.element_ty == tl.float32
    total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for n in range(tl.minimum(slab, rows - first_row)):
        row = first_row + n
        line = ((batch.to(tl.int64) * rows + row) * heads + head) * queries
        q_tile = load_tile(row_of(q, q_at, batch, row, head, UNIT), i, q_at[2], queries, WIDTH, UNIT)
        k_tile = load_tile(row_of(k, k_at, batch, row, head, UNIT), j, k_at[2], keys, WIDTH, UNIT)
        v_tile = load_tile(row_of(v, v_at, batch, row, head, UNIT), j, v_at[2], keys, WIDTH, UNIT)
        do_tile = load_tile(row_of(grad, grad_at, batch, row, head, UNIT), i, grad_at[2], queries, WIDTH, UNIT)
        logs = tl.load(lse + line + i, mask=i < queries, other=float("inf"))
        d = tl.load(delta + line + i, mask=i < queries, other=0.0)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * WIDTH**-0.5 + b
        p = power(s, logs[:, None], EXACT)
        ds = p * (tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee") - d[:, None])
        if tl.load(firsts + batch.to(tl.int64) * rows + row) < last_key:
            ds = tl.where(load_keep(mask, mask_at, batch, row, j, keys)[None, :], ds, 0.0)
        total += ds
    into = dbias + (image.to(tl.int64) * queries + i[:, None]) * keys + j[None, :]
    tl.store(into, total.to(dbias.dtype.element_ty), mask=(i[:, None] < queries) & (j[None, :] < keys))


@triton.jit
def attention_slabs(
    parts: tl.tensor, dbias: tl.tensor, count: tl.tensor, slabs: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """dbias [count] is the sum of parts [slabs, count], one after another."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    parts += index
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(slabs):
        total += tl.load(parts, mask=index < count, other=0.0)
        parts += count
    tl.store(dbias + index, total.to(dbias.dtype.element_ty), mask=index < count)
