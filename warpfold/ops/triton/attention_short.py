"""Attention, backward, of short rows: one program makes dq, dk and dv of a head of a row.

The general kernels compute each weight twice, once where queries are owned and once where keys are.  Here a program
runs over all tiles of keys, and for each over all queries: a weight is computed once, with five products instead of
seven.  dk and dv of a tile are done with when it is; dq is added up in fp32, in memory that no other program sees and
that stays in the cache, from one tile of keys to the next: in order, and not at all where one tile has all keys.
The names are those of attention_backward.py.
"""

# mypy: disable-error-code="assignment,attr-defined"
# Triton lets a tuple grow.

from collections.abc import Iterable

import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.triton.attention_backward import some_fully_masked, uniform_dv
from warpfold.ops.triton.attention_tiles import (
    bias_of,
    exp_shifted,
    first_masked_key,
    load_mask,
    padded_width,
    program_tile,
    vectors_of,
)
from warpfold.ops.triton.launch import configs, register

LONGEST = 384  # queries, and keys, of a row
NEAR = 2**31  # numbers between the vectors of a row, at most: their offsets have 32 bits


@triton.jit
def _near(x: tl.tuple, start: tl.tensor, index: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return pointers to the vectors of one head of one row, by offsets of 32 bits: half the registers."""
    return start + (index[:, None] * (x.strides[2] * x.unit) + tl.arange(0, padded_width(WIDTH))[None, :])


@triton.jit
def _load(x: tl.tuple, start: tl.tensor, index: tl.tensor, count: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    valid = (tl.arange(0, padded_width(WIDTH)) < WIDTH)[None, :] & (index < count)[:, None]
    return tl.load(_near(x, start, index, WIDTH), mask=valid, other=0.0)


@triton.jit
def _store(
    x: tl.tuple, start: tl.tensor, tile: tl.tensor, index: tl.tensor, count: tl.tensor, WIDTH: tl.constexpr
) -> None:
    valid = (tl.arange(0, padded_width(WIDTH)) < WIDTH)[None, :] & (index < count)[:, None]
    tl.store(_near(x, start, index, WIDTH), tile.to(x.data.dtype.element_ty), mask=valid)


@triton.jit
def _store_deltas(
    grad: tl.tuple,
    grad_start: tl.tensor,
    out: tl.tuple,
    out_start: tl.tensor,
    delta: tl.tensor,
    queries: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_Q: tl.constexpr,
) -> None:
    """Store delta of every query of a row, and wait until all threads of the program can read it."""
    for start in range(0, queries, BLOCK_Q):
        i = start + tl.arange(0, BLOCK_Q)
        do_tile = _load(grad, grad_start, i, queries, WIDTH).to(tl.float32)
        o_tile = _load(out, out_start, i, queries, WIDTH).to(tl.float32)
        tl.store(delta + i, tl.sum(do_tile * o_tile, 1), mask=i < queries)
    tl.debug_barrier()


@triton.jit
def _attention_short(
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
    partial: tl.tensor,
    dq: tl.tuple,
    dk: tl.tuple,
    dv: tl.tuple,
    sizes: tl.tuple,
    WIDTH: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Store dq, dk and dv of one head of one row; and delta and, unless it is None, firsts as `_attention_dq` does.

    partial [programs, Q, padded WIDTH], in fp32: for dq, where there are several tiles of keys; else None.
    """
    rows, queries, keys, heads, bias_keys = sizes
    _, head, row, batch = program_tile(1, heads, rows)
    line = ((batch.to(tl.int64) * rows + row) * heads + head) * queries
    lse += line
    delta += line
    if firsts is not None:  # noqa: SIM102  (the one is a constant, the other is not)
        if head == 0:
            first = first_masked_key(mask, batch, row, rows, keys, 1)
            tl.store(firsts + batch.to(tl.int64) * rows + row, first)
    EXACT: tl.constexpr = k.data.dtype.element_ty == tl.float32
    WIDE: tl.constexpr = padded_width(WIDTH)
    bias_start = bias_of(bias, batch, head) if bias is not None else None
    grad_start, q_start = vectors_of(grad, batch, row, head), vectors_of(q, batch, row, head)
    _store_deltas(grad, grad_start, out, vectors_of(out, batch, row, head), delta, queries, WIDTH, BLOCK_Q)
    alike = tl.zeros([1, WIDE], tl.float32)  # dv of masked keys: from queries that attend to nothing else
    spoiled = 0.0  # NaN where such a query has no masked key either
    if some_fully_masked(lse, queries):
        alike, hidden = uniform_dv(grad, lse, mask, batch, row, head, queries, keys, WIDTH, BLOCK_Q)
        spoiled = tl.where(hidden == 0, float("nan"), 0.0)

    for first in range(0, keys, BLOCK_K):
        j = first + tl.arange(0, BLOCK_K)
        k_tile = _load(k, vectors_of(k, batch, row, head), j, keys, WIDTH)
        v_tile = _load(v, vectors_of(v, batch, row, head), j, keys, WIDTH)
        attended = load_mask(mask, batch, row, j, keys)[:, None]
        dk_tile = tl.zeros([BLOCK_K, WIDE], tl.float32)
        dv_tile = tl.zeros([BLOCK_K, WIDE], tl.float32)
        for start in range(0, queries, BLOCK_Q):
            i = start + tl.arange(0, BLOCK_Q)
            q_tile = _load(q, q_start, i, queries, WIDTH)
            do_tile = _load(grad, grad_start, i, queries, WIDTH)
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
            if partial is not None:
                at = line * WIDE + i[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
                known = (i < queries)[:, None]
                dq_tile += tl.load(partial + at, mask=known & (first > 0), other=0.0)
                tl.store(partial + at, dq_tile, mask=known & (first + BLOCK_K < keys))
            limit = tl.where(first + BLOCK_K < keys, 0, queries)
            _store(dq, vectors_of(dq, batch, row, head), dq_tile * WIDTH**-0.5, i, limit, WIDTH)
        dv_tile = tl.where(attended, dv_tile + spoiled, alike)
        _store(dk, vectors_of(dk, batch, row, head), dk_tile * WIDTH**-0.5, j, keys, WIDTH)
        _store(dv, vectors_of(dv, batch, row, head), dv_tile, j, keys, WIDTH)


SHORT = register(
    "attention_short",
    _attention_short,
    configs(
        "BLOCK_Q BLOCK_K",
        *((32, keys, warps, stages) for keys, warps in ((64, 4), (128, 8)) for stages in (1, 2)),
        *((16, 64, 4, 1), (16, 128, 8, 1), (64, 64, 4, 1), (64, 128, 8, 1), (32, 256, 8, 1)),
    ),
)


def serves(vectors: Iterable[Tensor], bias: Tensor | None) -> bool:
    """Return whether the kernel is for vectors [B, R, Q or K, h, d]: short ones of 16 bits, for tensor cores."""
    return all(
        t.element_size() == 2 and t.shape[2] <= LONGEST and t.shape[2] * t.stride(2) < NEAR for t in vectors
    ) and (bias is None or bias.shape[2] * bias.stride(2) < NEAR)
