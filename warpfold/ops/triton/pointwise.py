"""Attention of one query over a handful of keys, for very many rows: the templates' features of each pair.

A program owns a tile of (batch, row, head), each with its one query, and runs over the keys one after another.  It has
no matrix product for tensor cores; each vector is read once.
"""

import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.triton.attention_tiles import LOG2E, mask_of, offset, padded_width
from warpfold.ops.triton.launch import Kernel, configs, register
from warpfold.ops.triton.positions import Strided

KEYS = 32  # at most; with more, a tile of keys at a time is faster


@triton.jit
def _pointers(x: tl.tuple, where: tl.tuple, j: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return pointers to the j-th vectors of a tile of (batch, row, head)."""
    batch, row, head = where
    starts = (
        offset(batch, x.strides[0], x.unit) + offset(row, x.strides[1], x.unit) + offset(head, x.strides[3], x.unit)
    )
    return x.data + (starts + offset(j, x.strides[2], x.unit))[:, None] + tl.arange(0, padded_width(WIDTH))[None, :]


@triton.jit
def _real(valid: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return which numbers of a tile of vectors there are, of those (batch, row, head) that are valid."""
    return valid[:, None] & (tl.arange(0, padded_width(WIDTH)) < WIDTH)[None, :]


@triton.jit
def _load(x: tl.tuple, where: tl.tuple, j: tl.tensor, valid: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Load the j-th vectors of a tile of (batch, row, head), in fp32, padded with 0."""
    return tl.load(_pointers(x, where, j, WIDTH), mask=_real(valid, WIDTH), other=0.0).to(tl.float32)


@triton.jit
def _store(
    x: tl.tuple, where: tl.tuple, j: tl.tensor, vectors: tl.tensor, valid: tl.tensor, WIDTH: tl.constexpr
) -> None:
    """Store the j-th vectors of a tile of (batch, row, head)."""
    tl.store(_pointers(x, where, j, WIDTH), vectors.to(x.data.dtype.element_ty), mask=_real(valid, WIDTH))


@triton.jit
def _forward(
    q: tl.tuple,
    k: tl.tuple,
    v: tl.tuple,
    mask: tl.tuple,
    out: tl.tuple,
    lse: tl.tensor,
    rows: tl.tensor,
    keys: tl.tensor,
    heads: tl.tensor,
    count: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store the output and lse; count: of (batch, row, head).  Strides are (batch, row, query or key, head)."""
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = item < count
    line = item // heads
    where = (line // rows, line % rows, item % heads)
    zero = tl.zeros([BLOCK], tl.int64)
    scale: tl.constexpr = WIDTH**-0.5
    q_tile = _load(q, where, zero, valid, WIDTH) * scale
    mask_start = mask_of(mask, where[0], where[1])
    m_i = tl.full([BLOCK], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, padded_width(WIDTH)], tl.float32)
    unweighted = tl.zeros([BLOCK, padded_width(WIDTH)], tl.float32)  # the sum of all values, for what is fully masked
    for j in range(keys):
        attended = tl.load(mask_start + j, mask=valid, other=0) != 0
        k_tile = _load(k, where, zero + j, valid, WIDTH)
        v_tile = _load(v, where, zero + j, valid, WIDTH)
        s = tl.where(attended, tl.sum(q_tile * k_tile, 1), float("-inf"))
        m_ij = tl.maximum(m_i, s)
        base = tl.where(m_ij == float("-inf"), 0.0, m_ij)
        p = tl.math.exp2((s - base) * LOG2E)
        alpha = tl.math.exp2((m_i - base) * LOG2E)
        l_i = l_i * alpha + p
        acc = acc * alpha[:, None] + p[:, None] * v_tile
        unweighted += v_tile
        m_i = m_ij
    dead = m_i == float("-inf")
    result = tl.where(dead[:, None], unweighted, acc) / tl.where(dead, keys, l_i)[:, None]
    _store(out, where, zero, result, valid, WIDTH)
    tl.store(lse + item, tl.where(dead, float("inf"), m_i + tl.log(tl.where(dead, 1.0, l_i))), mask=valid)


@triton.jit
def _backward(
    grad: tl.tuple,
    q: tl.tuple,
    k: tl.tuple,
    v: tl.tuple,
    mask: tl.tuple,
    out: tl.tuple,
    lse: tl.tensor,
    dq: tl.tuple,
    dk: tl.tuple,
    dv: tl.tuple,
    rows: tl.tensor,
    keys: tl.tensor,
    heads: tl.tensor,
    count: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store dq, dk and dv; each (batch, row, head) has its own keys, so every gradient is written once."""
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = item < count
    line = item // heads
    where = (line // rows, line % rows, item % heads)
    zero = tl.zeros([BLOCK], tl.int64)
    scale: tl.constexpr = WIDTH**-0.5
    q_tile = _load(q, where, zero, valid, WIDTH) * scale
    do_tile = _load(grad, where, zero, valid, WIDTH)
    o_tile = _load(out, where, zero, valid, WIDTH)
    delta = tl.sum(do_tile * o_tile, 1)
    lse_tile = tl.load(lse + item, mask=valid, other=0.0)
    dead = lse_tile == float("inf")
    mask_start = mask_of(mask, where[0], where[1])
    acc = tl.zeros([BLOCK, padded_width(WIDTH)], tl.float32)
    for j in range(keys):
        attended = tl.load(mask_start + j, mask=valid, other=0) != 0
        k_tile = _load(k, where, zero + j, valid, WIDTH)
        v_tile = _load(v, where, zero + j, valid, WIDTH)
        p = tl.math.exp2((tl.sum(q_tile * k_tile, 1) - tl.where(dead, 0.0, lse_tile)) * LOG2E)
        ds = tl.where(attended, p * (tl.sum(do_tile * v_tile, 1) - delta), 0.0)
        p = tl.where(attended, p, tl.where(dead, 1.0 / keys, 0.0))
        acc += ds[:, None] * k_tile
        _store(dk, where, zero + j, ds[:, None] * q_tile, valid, WIDTH)
        _store(dv, where, zero + j, p[:, None] * do_tile, valid, WIDTH)
    _store(dq, where, zero, acc * scale, valid, WIDTH)


_CANDIDATES = configs("BLOCK", *((block, warps, 1) for block in (32, 64, 128, 256) for warps in (2, 4, 8)))
FORWARD = register("pointwise_forward", _forward, _CANDIDATES)
BACKWARD = register("pointwise_backward", _backward, _CANDIDATES)


def serves(q: Tensor, k: Tensor, bias: Tensor | None) -> bool:
    """Return whether these kernels are for such tensors, [B, R, Q or K, h, d]."""
    return bias is None and q.shape[2] == 1 and k.shape[2] <= KEYS


def run(of: Kernel, vectors: dict[str, Strided], mask: Strided, lse: Tensor) -> None:
    """Run a kernel over vectors [B, R, Q or K, h, d], by the names of its arguments, and the mask."""
    k = vectors["k"].data
    assert k is not None
    _, rows, keys, heads, width = k.shape
    kernel = of.tiled((width, k.element_size()), k)
    kernel.run(
        (triton.cdiv(lse.numel(), kernel["BLOCK"]),),
        **vectors,
        mask=mask,
        lse=lse,
        rows=rows,
        keys=keys,
        heads=heads,
        count=lse.numel(),
        WIDTH=width,
    )
