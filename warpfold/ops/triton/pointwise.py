"""Attention of one query over a handful of keys, for very many rows: the templates' features of each pair.

A program owns a tile of (batch, row, head), each with its one query, and runs over the keys one after another.  Tensor
cores would find nothing to multiply; what counts is that each vector is read once.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.triton.attention_tiles import LOG2E, at
from warpfold.ops.triton.launch import KERNELS, Kernel, Launch, launch, register

KEYS = 32  # at most; with more, a tile of keys at a time is faster


@triton.jit
def _vectors(
    base: tl.tensor, strides: tl.tuple, where: tl.tuple, j: tl.tensor, WIDTH: tl.constexpr, UNIT: tl.constexpr
) -> tl.tensor:
    """Pointers to the j-th vectors of a tile of (batch, row, head)."""
    batch, row, head = where
    items = at(batch, strides[0], UNIT) + at(row, strides[1], UNIT) + at(head, strides[3], UNIT)
    return base + (items + at(j, strides[2], UNIT))[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def pointwise_forward(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    mask: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    q_at: tl.tuple,
    k_at: tl.tuple,
    v_at: tl.tuple,
    mask_at: tl.tuple,
    out_at: tl.tuple,
    rows: tl.tensor,
    keys: tl.tensor,
    heads: tl.tensor,
    count: tl.tensor,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """count: of (batch, row, head).  Strides are (batch, row, query or key, head), divided by UNIT."""
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = item < count
    line = item // heads
    where = (line // rows, line % rows, item % heads)
    zero = tl.zeros([BLOCK], tl.int64)
    scale: tl.constexpr = WIDTH**-0.5
    q_tile = tl.load(_vectors(q, q_at, where, zero, WIDTH, UNIT), mask=known[:, None], other=0.0).to(tl.float32) * scale
    mask += at(where[0], mask_at[0], 1) + at(where[1], mask_at[1], 1)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK, WIDTH], tl.float32)
    plain = tl.zeros([BLOCK, WIDTH], tl.float32)  # of all values alike, for what is fully masked
    for j in range(keys):
        keep = tl.load(mask + j, mask=known, other=0) != 0
        k_tile = tl.load(_vectors(k, k_at, where, zero + j, WIDTH, UNIT), mask=known[:, None], other=0.0)
        v_tile = tl.load(_vectors(v, v_at, where, zero + j, WIDTH, UNIT), mask=known[:, None], other=0.0).to(tl.float32)
        s = tl.where(keep, tl.sum(q_tile * k_tile.to(tl.float32), 1), float("-inf"))
        top = tl.maximum(best, s)
        base = tl.where(top == float("-inf"), 0.0, top)
        p = tl.math.exp2((s - base) * LOG2E)
        fade = tl.math.exp2((best - base) * LOG2E)
        total = total * fade + p
        sums = sums * fade[:, None] + p[:, None] * v_tile
        plain += v_tile
        best = top
    dead = best == float("-inf")
    sums = tl.where(dead[:, None], plain, sums) / tl.where(dead, keys, total)[:, None]
    into = _vectors(out, out_at, where, zero, WIDTH, UNIT)
    tl.store(into, sums.to(out.dtype.element_ty), mask=known[:, None])
    tl.store(lse + item, tl.where(dead, float("inf"), best + tl.log(tl.where(dead, 1.0, total))), mask=known)


@triton.jit
def pointwise_backward(
    grad: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    mask: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    dq: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    grad_at: tl.tuple,
    q_at: tl.tuple,
    k_at: tl.tuple,
    v_at: tl.tuple,
    mask_at: tl.tuple,
    out_at: tl.tuple,
    dq_at: tl.tuple,
    dk_at: tl.tuple,
    dv_at: tl.tuple,
    rows: tl.tensor,
    keys: tl.tensor,
    heads: tl.tensor,
    count: tl.tensor,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """As `pointwise_forward`; each (batch, row, head) has its own keys, so every gradient is written once."""
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = item < count
    line = item // heads
    where = (line // rows, line % rows, item % heads)
    zero = tl.zeros([BLOCK], tl.int64)
    scale: tl.constexpr = WIDTH**-0.5
    q_tile = tl.load(_vectors(q, q_at, where, zero, WIDTH, UNIT), mask=known[:, None], other=0.0).to(tl.float32) * scale
    do_tile = tl.load(_vectors(grad, grad_at, where, zero, WIDTH, UNIT), mask=known[:, None], other=0.0).to(tl.float32)
    o_tile = tl.load(_vectors(out, out_at, where, zero, WIDTH, UNIT), mask=known[:, None], other=0.0).to(tl.float32)
    delta = tl.sum(do_tile * o_tile, 1)
    logs = tl.load(lse + item, mask=known, other=0.0)
    dead = logs == float("inf")
    mask += at(where[0], mask_at[0], 1) + at(where[1], mask_at[1], 1)
    dq_sum = tl.zeros([BLOCK, WIDTH], tl.float32)
    for j in range(keys):
        keep = tl.load(mask + j, mask=known, other=0) != 0
        k_tile = tl.load(_vectors(k, k_at, where, zero + j, WIDTH, UNIT), mask=known[:, None], other=0.0).to(tl.float32)
        v_tile = tl.load(_vectors(v, v_at, where, zero + j, WIDTH, UNIT), mask=known[:, None], other=0.0).to(tl.float32)
        p = tl.math.exp2((tl.sum(q_tile * k_tile, 1) - tl.where(dead, 0.0, logs)) * LOG2E)
        ds = tl.where(keep, p * (tl.sum(do_tile * v_tile, 1) - delta), 0.0)
        p = tl.where(keep, p, tl.where(dead, 1.0 / keys, 0.0))
        dq_sum += ds[:, None] * k_tile
        into = _vectors(dk, dk_at, where, zero + j, WIDTH, UNIT)
        tl.store(into, (ds[:, None] * q_tile).to(dk.dtype.element_ty), mask=known[:, None])
        into = _vectors(dv, dv_at, where, zero + j, WIDTH, UNIT)
        tl.store(into, (p[:, None] * do_tile).to(dv.dtype.element_ty), mask=known[:, None])
    into = _vectors(dq, dq_at, where, zero, WIDTH, UNIT)
    tl.store(into, (dq_sum * scale).to(dq.dtype.element_ty), mask=known[:, None])


_CANDIDATES = tuple(Launch({"BLOCK": block}, warps, 1) for block in (32, 64, 128, 256) for warps in (2, 4, 8))
register(Kernel("pointwise_forward", pointwise_forward, _CANDIDATES))
register(Kernel("pointwise_backward", pointwise_backward, _CANDIDATES))


def serves(q: Tensor, k: Tensor, bias: Tensor | None) -> bool:
    """Whether these kernels are for such tensors, [B, R, Q or K, h, d]."""
    return bias is None and q.shape[2] == 1 and k.shape[2] <= KEYS


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, out: Tensor, lse: Tensor) -> None:
    """Fills out and lse; the last axis of each tensor has stride 1."""
    _run("pointwise_forward", (q, k, v), mask, out, lse, ())


def backward(given: tuple[Tensor, ...], mask: Tensor, out: Tensor, lse: Tensor, gradients: tuple[Tensor, ...]) -> None:
    """given: grad, q, k and v.  Fills the gradients of q, k and v; the last axis of each tensor has stride 1."""
    _run("pointwise_backward", given, mask, out, lse, gradients)


def _run(
    name: str, given: tuple[Tensor, ...], mask: Tensor, out: Tensor, lse: Tensor, gradients: tuple[Tensor, ...]
) -> None:
    _, rows, keys, heads, width = given[-1].shape
    vectors = (*given, out, *gradients)
    every = [[0 if n == 1 else s for n, s in zip(t.shape[:-1], t.stride()[:-1])] for t in vectors]
    unit = math.gcd(16, *(s for strides in every for s in strides))
    strides = [tuple(s // unit for s in each) for each in every]
    choice = launch(name, (width, out.element_size()), out.device)
    KERNELS[name].run(
        (triton.cdiv(lse.numel(), choice.sizes["BLOCK"]),),
        choice,
        *(*given, mask, out, lse, *gradients),
        *(*strides[: len(given)], tuple(mask.stride()[:2]), *strides[len(given) :]),
        *(rows, keys, heads, lse.numel()),
        WIDTH=width,
        UNIT=unit,
    )
