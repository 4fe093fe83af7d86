"""attention on a GPU: which kernels run, over what, and how they are launched.

One family serves every attention of the trunk, at any strides: rows and columns, with a bias or without, few queries or
many.  One query over a handful of keys, the template attention, has a kernel of its own (pointwise.py).
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor

from warpfold.ops.attention import empty_bias, empty_lse, empty_out
from warpfold.ops.tensors import empty_like
from warpfold.ops.triton import attention_backward as kernels
from warpfold.ops.triton import pointwise
from warpfold.ops.triton.attention_forward import FORWARD
from warpfold.ops.triton.attention_tiles import BIAS_UNIT, Sizes
from warpfold.ops.triton.launch import ByPrecision, TiledKernel
from warpfold.ops.triton.positions import Strided

MAX_SLABS = 16  # of rows whose gradients of the bias are summed apart
PROGRAMS = 512  # that the gradient of the bias is cut into, at least, where its rows allow


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute warpfold::attention."""
    out, lse = empty_out(q, v), empty_lse(q)
    vectors = {"q": q, "k": k, "v": v, "out": out}
    if pointwise.serves(q, k, bias):
        pointwise.run(pointwise.FORWARD, strided(vectors), strided_mask(mask), lse)
        return out, lse
    call = _Call(vectors, mask, bias)
    kernel = call.tiled(FORWARD)
    kernel.run(call.row_grid(kernel, "BLOCK_Q"), **call.arguments, lse=lse)
    return out, lse


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    bias_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::attention_backward."""
    dq, dk, dv, dbias = empty_like(q), empty_like(k), empty_like(v), empty_bias(bias, bias_wanted, q)
    wanted = {"dq": dq, "dk": dk, "dv": dv}
    written = {name: t if _width_innermost(t) else t.new_empty(t.shape) for name, t in wanted.items()}
    vectors = {"grad": grad, "q": q, "k": k, "v": v, "out": out, **written}
    if pointwise.serves(q, k, bias):
        pointwise.run(pointwise.BACKWARD, strided(vectors), strided_mask(mask), lse)
    else:
        _run_backward(_Call(vectors, mask, bias), lse, dbias if bias_wanted else None)
    for name, t in written.items():
        if t is not wanted[name]:
            wanted[name].copy_(t)
    return dq, dk, dv, dbias


def _run_backward(call: "_Call", lse: Tensor, dbias: Tensor | None) -> None:
    delta = lse.new_empty(lse.shape)
    firsts = lse.new_empty(lse.shape[:2], dtype=torch.int32)
    rest = dict(call.arguments)
    out, dq, dk, dv = (rest.pop(name) for name in ("out", "dq", "dk", "dv"))
    rest |= {"lse": lse, "delta": delta}
    kernel = call.tiled(kernels.DQ)
    kernel.run(call.row_grid(kernel, "BLOCK_Q"), **rest, out=out, dq=dq, firsts=firsts)
    kernel = call.tiled(kernels.DKDV)
    kernel.run(call.row_grid(kernel, "BLOCK_K"), **rest, dk=dk, dv=dv)
    if dbias is None:
        return
    # Rows are cut into slabs where the tiles of the bias alone are too few to fill a GPU; by the shapes alone.
    sizes, batches = call.sizes, call.batches
    tiles = batches * sizes.heads * triton.cdiv(sizes.queries, 64) * triton.cdiv(sizes.keys, 64)
    slab = triton.cdiv(sizes.rows, max(1, min(MAX_SLABS, sizes.rows // 4, triton.cdiv(PROGRAMS, tiles))))
    slabs = triton.cdiv(sizes.rows, slab)
    parts = dbias if slabs == 1 else lse.new_empty(slabs, *dbias.shape)
    kernel = call.tiled(kernels.DBIAS)
    blocks = triton.cdiv(sizes.queries, kernel["BLOCK_Q"]) * triton.cdiv(sizes.keys, kernel["BLOCK_K"])
    grid = (slabs * batches * sizes.heads * blocks,)
    kernel.run(grid, **rest, firsts=firsts, dbias=parts, slab=slab, batches=batches)
    if slabs > 1:
        kernel = kernels.SLABS.tiled((dbias.numel(),), dbias)
        grid = (triton.cdiv(dbias.numel(), kernel["BLOCK"]),)
        kernel.run(grid, parts=parts, dbias=dbias, count=dbias.numel(), slabs=slabs)


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
        biased = 1 if self.arguments["bias"] is None else 2
        return kernel.tiled((self.q.shape[-1], biased, self.sizes.queries, self.sizes.keys), self.q)

    def row_grid(self, kernel: TiledKernel, block: str) -> tuple[int]:
        """Return the grid of a kernel whose programs each own a block of queries or keys, of some rows."""
        length = self.sizes.queries if block == "BLOCK_Q" else self.sizes.keys
        groups = triton.cdiv(self.sizes.rows, kernel["ROWS"])
        return (triton.cdiv(length, kernel[block]) * self.sizes.heads * groups * self.batches,)


def _width_innermost(t: Tensor) -> bool:
    return t.stride(-1) == 1 or t.shape[-1] == 1


def strided(vectors: dict[str, Tensor]) -> dict[str, Strided]:
    """Return tensors [B, R, Q or K, h, d] as the kernels take them: copied where their last axis has not stride 1."""
    given = {name: t if _width_innermost(t) else t.contiguous() for name, t in vectors.items()}
    # One unit for all: with one for each, dk and dv of heads 64 wide want more registers than sm_80 has.
    unit = math.gcd(16, *(stride for t in given.values() for stride in _strides(t)))
    return {name: Strided.of(t, _strides(t), unit) for name, t in given.items()}


def _strides(t: Tensor) -> tuple[int, ...]:
    """Return the strides of all axes but the last; 0 along axes of one element, whose strides mean nothing."""
    return tuple(0 if size == 1 else stride for size, stride in zip(t.shape[:-1], t.stride()[:-1]))


def strided_mask(mask: Tensor) -> Strided:
    """Return a mask [B, R, K] as the kernels take it: of numbers that Triton can load and compare."""
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    return Strided.of(mask, mask.stride()[:2], 1)


def _strided_bias(bias: Tensor) -> Strided:
    """Return a bias [B, h, Q, K] as the kernels take it.

    It comes from a projection with its heads innermost, so it is laid out anew, with keys padded to where loads of 16
    bytes end: of all that is read here it is the smallest.  What lies in the padding is never used.
    """
    shared = bias.stride(0) == 0
    bias = bias[:1] if shared else bias
    if bias.stride(-1) != 1 or any(s % BIAS_UNIT for s in (*_strides(bias), bias.shape[-1])):
        padded = bias.new_empty(*bias.shape[:-1], triton.cdiv(bias.shape[-1], BIAS_UNIT) * BIAS_UNIT)
        padded[..., : bias.shape[-1]] = bias
        bias = padded
    batch, head, query = _strides(bias)
    return Strided.of(bias, (0 if shared else batch, head, query), BIAS_UNIT)
