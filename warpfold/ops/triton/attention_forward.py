"""Attention, forward: a program owns a tile of queries of one head, for some rows that share one tile of the bias.

Online softmax runs over the keys, tile by tile: of each query the maximum m_i so far, the sum l_i of the weights and
the sum acc of weighted values, both rescaled by alpha where the maximum grows.  A logit costs one fused multiply-add,
s = q k^T / sqrt(d) + bias, and its weight another and one exp2, 2^(log2(e) s - log2(e) max).
"""

# mypy: disable-error-code="assignment,attr-defined"
# Triton lets a tuple grow.

import triton
import triton.language as tl

from warpfold.ops.triton.attention_tiles import (
    bias_of,
    exp_shifted,
    first_masked_key,
    load_bias,
    load_mask,
    load_tile,
    padded_width,
    program_tile,
    store_tile,
)
from warpfold.ops.triton.launch import configs, register_by_precision

# A masked logit.  A power of two, so that log2(e) times it is exact: where nothing else counts (all keys are masked, or
# the others have a bias of -inf), masked keys weigh 1 each.
NEVER = tl.constexpr(-(2.0**60))
# Where the running maximum begins: below every logit that counts, and finite, so that a logit of -inf weighs nothing
# beside it, and not NaN.  In half precision log2(e) times it must be finite too.
LOWEST = tl.constexpr(-(2.0**126))
LOWEST_FP32 = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _attend(
    state: tl.tuple,
    q_tiles: tl.tuple,
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
def _attention_forward(
    q: tl.tuple,
    k: tl.tuple,
    v: tl.tuple,
    mask: tl.tuple,
    bias: tl.tuple,
    out: tl.tuple,
    lse: tl.tensor,
    sizes: tl.tuple,
    WIDTH: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Store the output, and the logarithm lse [B, R, h, Q] of each query's sum of weights."""
    rows, queries, keys, heads, _ = sizes
    tile, head, group, batch = program_tile(tl.cdiv(queries, BLOCK_Q), heads, tl.cdiv(rows, ROWS))
    first_row = group * ROWS
    i = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
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


# Half precision uses tensor cores; fp32, exact and without them, wants smaller tiles.  dq's loop has the same shape.
ROW_TILES = configs(
    "BLOCK_Q BLOCK_K ROWS",
    *((64, 64, rows, 4, stages) for rows in (1, 2) for stages in (2, 3)),
    *((64, 32, rows, 4, stages) for rows in (1, 2) for stages in (2, 3)),
    *((128, keys, 1, 8, stages) for keys in (32, 64) for stages in (2, 3)),
    *((128, 32, 2, 8, 2), (64, 128, 1, 4, 2)),
    *((16, 64, 1, 1, 3), (16, 128, 1, 2, 3), (32, 64, 1, 2, 3)),
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
