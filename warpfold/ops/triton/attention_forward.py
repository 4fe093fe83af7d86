"""Attention, forward: a program owns a tile of queries of one head, for some rows that share one tile of the bias.

Softmax runs over the keys, tile by tile.  A logit costs one fused multiply-add, s = q k^T / sqrt(d) + bias, and its
weight another and one exp2, 2^(log2(e) s - log2(e) max).
"""

# mypy: disable-error-code="assignment,attr-defined"
# Triton lets a tuple grow.

import triton
import triton.language as tl

from warpfold.ops.triton.attention_tiles import (
    BIAS_UNIT,
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

# A masked logit.  A power of two, so that log2(e) times it is exact: where nothing else counts (all keys are masked, or
# the others have a bias of -inf), masked keys weigh 1 each.
NEVER = tl.constexpr(-(2.0**60))
# Where the running maximum begins: below every logit that counts, and finite, so that a logit of -inf weighs nothing
# beside it, and not NaN.  In half precision log2(e) times it must be finite too.
LOWEST = tl.constexpr(-(2.0**126))
LOWEST_FP32 = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _sweep(
    state: tl.tuple,
    q_tiles: tl.tuple,
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
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """The state (maxima, sums of weights, weighted sums of values, of each row) after the keys from begin to end.

    at_head: batch, first row, head; sizes: rows, queries, keys, keys of the bias as it lies in memory.
    """
    batch, first_row, head = at_head
    rows, queries, keys, bias_keys = sizes
    EXACT: tl.constexpr = k.dtype.element_ty == tl.float32
    best, total, sums = state
    for start in range(begin, end, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        if BIASED:
            b = load_bias(bias, bias_stride, i[:, None], j[None, :], queries, bias_keys).to(tl.float32)
        new_best, new_total, new_sums = (), (), ()
        for n in tl.static_range(ROWS):
            row = tl.minimum(first_row + n, rows - 1)
            k_tile = load_tile(row_of(k, k_at, batch, row, head, UNIT), j, k_at[2], keys, WIDTH, UNIT, not MASKED)
            s = tl.dot(q_tiles[n], tl.trans(k_tile), input_precision="ieee") * WIDTH**-0.5
            if BIASED:
                s += b
            if MASKED:
                never = tl.where(j < keys, NEVER, float("-inf"))
                s = tl.where(load_keep(mask, mask_at, batch, row, j, keys)[None, :], s, never[None, :])
            top = tl.maximum(best[n], tl.max(s, 1))
            p = power(s, top[:, None], EXACT)
            fade = power(best[n] - top, 0.0, EXACT)
            v_tile = load_tile(row_of(v, v_at, batch, row, head, UNIT), j, v_at[2], keys, WIDTH, UNIT, not MASKED)
            new_best = new_best + (top,)
            new_total = new_total + (total[n] * fade + tl.sum(p, 1),)
            faded = sums[n] * fade[:, None]
            new_sums = new_sums + (tl.dot(p.to(v_tile.dtype), v_tile, acc=faded, input_precision="ieee"),)
        best, total, sums = new_best, new_total, new_sums
    return best, total, sums


@triton.jit
def attention_forward(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    mask: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    q_at: tl.tuple,
    k_at: tl.tuple,
    v_at: tl.tuple,
    mask_at: tl.tuple,
    bias_at: tl.tuple,
    out_at: tl.tuple,
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
    """Strides are (batch, row, query or key, head), of the bias (batch, head, query), all divided by their unit."""
    tile, head, group, batch = place(tl.cdiv(queries, BLOCK_Q), heads, tl.cdiv(rows, ROWS))
    first_row = group * ROWS
    i = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    bias += at(batch, bias_at[0], BIAS_UNIT) + at(head, bias_at[1], BIAS_UNIT)
    q_tiles, best, total, sums = (), (), (), ()
    LEAST: tl.constexpr = LOWEST_FP32 if k.dtype.element_ty == tl.float32 else LOWEST
    for n in tl.static_range(ROWS):
        row = tl.minimum(first_row + n, rows - 1)  # past the last: as the last, and not stored
        q_tiles = q_tiles + (load_tile(row_of(q, q_at, batch, row, head, UNIT), i, q_at[2], queries, WIDTH, UNIT),)
        best = best + (tl.full([BLOCK_Q], LEAST, tl.float32),)
        total = total + (tl.zeros([BLOCK_Q], tl.float32),)
        sums = sums + (tl.zeros([BLOCK_Q, WIDTH if WIDTH > 16 else 16], tl.float32),)

    # Up to the first key that is masked, whole tiles need no look at the mask: most often that is all of them.  The
    # rest goes by half tiles, or it would want more registers than the others have left.
    clear = first_masked(mask, mask_at, batch, first_row, rows, keys, ROWS) // BLOCK_K * BLOCK_K
    for masked in tl.static_range(2):
        best, total, sums = _sweep(
            (best, total, sums),
            q_tiles,
            *(k, v, mask, bias, k_at, v_at, mask_at, bias_at[2], i),
            (batch, first_row, head),
            (rows, queries, keys, bias_keys),
            *(clear if masked == 1 else 0, keys if masked == 1 else clear, masked == 1),
            *(WIDTH, BIASED, UNIT, BLOCK_Q, BLOCK_K // 2 if masked == 1 else BLOCK_K, ROWS),
        )

    for n in tl.static_range(ROWS):
        limit = tl.where(first_row + n < rows, queries, 0)
        out_row = row_of(out, out_at, batch, first_row + n, head, UNIT)
        store_tile(out_row, sums[n] / total[n][:, None], i, out_at[2], limit, WIDTH, UNIT)
        logs = tl.where((best[n] == NEVER) | (total[n] == 0), float("inf"), best[n] + tl.log(total[n]))
        lse_row = lse + ((batch.to(tl.int64) * rows + first_row + n) * heads + head) * queries
        tl.store(lse_row + i, logs, mask=i < limit)
