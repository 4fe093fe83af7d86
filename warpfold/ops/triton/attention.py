"""attention on a GPU: which kernels run, over what, and how they are launched.

One family serves every attention of the trunk, at any strides: rows and columns, with a bias or without, few queries or
many.  One query over a handful of keys, the template attention, has a kernel of its own (pointwise.py).
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from warpfold.ops.attention import empty_bias, empty_lse, empty_out
from warpfold.ops.shapes import Shape
from warpfold.ops.tensors import empty_like
from warpfold.ops.triton import attention_backward as kernels
from warpfold.ops.triton import attention_short as short
from warpfold.ops.triton import pointwise
from warpfold.ops.triton.attention_forward import FORWARD
from warpfold.ops.triton.attention_tiles import BIAS_UNIT, Sizes
from warpfold.ops.triton.launch import ByPrecision, Key, TiledKernel, cores
from warpfold.ops.triton.positions import Strided, cdiv

WARPS = 8  # of the gradient of the bias that a core runs at once: its tiles take most of the registers
MAX_SLABS = 16  # of rows whose gradients of the bias are summed apart


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute warpfold::attention."""
    out, lse = empty_out(q, v), empty_lse(q)
    forward(q, k, v, mask, bias, out, lse)
    return out, lse


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """Write the output of attention, [B, R, Q, h, d], and its logarithms [B, R, h, Q]."""
    vectors = {"q": q, "k": k, "v": v, "out": out}
    if pointwise.serves(q, k, bias):
        pointwise.run(pointwise.FORWARD, strided(vectors), strided_mask(mask), lse)
        return
    call = _Call(vectors, mask, bias)
    kernel = call.tiled(FORWARD)
    kernel.run(call.row_grid(kernel, "BLOCK_Q"), **call.arguments, lse=lse)


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
    backward(grad, q, k, v, mask, bias, out, lse, **written, dbias=dbias if bias_wanted else None)
    for name, t in written.items():
        if t is not wanted[name]:
            wanted[name].copy_(t)
    return dq, dk, dv, dbias


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dbias: Tensor | None,
) -> None:
    """Write the gradients of attention into dq, dk, dv, stride 1 along the width; and dbias [B, h, Q, K], if wanted."""
    vectors = {"grad": grad, "q": q, "k": k, "v": v, "out": out, "dq": dq, "dk": dk, "dv": dv}
    if pointwise.serves(q, k, bias):
        pointwise.run(pointwise.BACKWARD, strided(vectors), strided_mask(mask), lse)
        return
    call = _Call(vectors, mask, bias)
    if short.serves(vectors.values(), bias):
        call.run_short(lse, dbias)
    else:
        call.run_long(lse, dbias)


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

    def run_long(self, lse: Tensor, dbias: Tensor | None) -> None:
        """Compute the gradients of rows of any length."""
        delta, firsts = self._between(lse)
        rest = dict(self.arguments)
        out, dq, dk, dv = (rest.pop(name) for name in ("out", "dq", "dk", "dv"))
        rest |= {"lse": lse, "delta": delta}
        kernel = self.tiled(kernels.DQ)
        kernel.run(self.row_grid(kernel, "BLOCK_Q"), **rest, out=out, dq=dq, firsts=firsts)
        kernel = self.tiled(kernels.DKDV)
        kernel.run(self.row_grid(kernel, "BLOCK_K"), **rest, dk=dk, dv=dv)
        if dbias is not None:
            self._run_bias(rest, firsts, dbias)

    def run_short(self, lse: Tensor, dbias: Tensor | None) -> None:
        """Compute the gradients of rows that `attention_short` serves."""
        delta, firsts = self._between(lse)
        kernel, sizes, wide = short.SHORT.tiled(self.key, self.q), self.sizes, short.padded_width(self.q.shape[-1])
        several = sizes.keys > kernel["BLOCK_K"]
        kernel.run(
            (self.batches * sizes.rows * sizes.heads,),
            **self.arguments,
            lse=lse,
            delta=delta,
            firsts=None if dbias is None else firsts,
            partial=lse.new_empty(*lse.shape, wide) if several else None,
        )
        if dbias is not None:
            rest = {name: given for name, given in self.arguments.items() if name not in ("out", "dq", "dk", "dv")}
            self._run_bias(rest | {"lse": lse, "delta": delta}, firsts, dbias)

    def _between(self, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Allocate what one kernel leaves for the others: delta and firsts."""
        return lse.new_empty(lse.shape), lse.new_empty(lse.shape[:2], dtype=torch.int32)

    def _run_bias(self, rest: dict[str, Any], firsts: Tensor, dbias: Tensor) -> None:
        sizes, batches = self.sizes, self.batches
        kernel = self.tiled(kernels.DBIAS)
        blocks = cdiv(sizes.queries, kernel["BLOCK_Q"]) * cdiv(sizes.keys, kernel["BLOCK_K"])
        tiles = batches * sizes.heads * blocks
        slab, slabs = slabs_for(sizes.rows, tiles, cores(dbias.device) * max(1, WARPS // kernel.config.warps))
        parts = dbias[None] if slabs == 1 else dbias.new_empty(slabs, *dbias.shape, dtype=torch.float32)
        into = Strided.of(parts, parts.stride()[:4], 16, parts.stride(4))
        kernel.run((slabs * tiles,), **rest, firsts=firsts, dbias=into, slab=slab, batches=batches)
        if slabs > 1:
            kernel = kernels.SLABS.tiled((dbias.numel(),), dbias)
            positions = batches * sizes.queries * sizes.keys
            kernel.run(
                (cdiv(positions, kernel["BLOCK"]),),
                parts=parts,
                dbias=Strided.of(dbias, dbias.stride()[:3], 16, dbias.stride(3)),
                positions=positions,
                queries=sizes.queries,
                keys=sizes.keys,
                slabs=slabs,
                HEADS=sizes.heads,
            )


def _width_innermost(t: Tensor) -> bool:
    return t.stride(-1) == 1 or t.shape[-1] == 1


def strided(vectors: dict[str, Tensor]) -> dict[str, Strided]:
    """Return tensors [B, R, Q or K, h, d] as the kernels take them: copied where their last axis has not stride 1."""
    given = {name: t if _width_innermost(t) else t.contiguous() for name, t in vectors.items()}
    layouts = _layouts(tuple([(t.shape, t.stride()) for t in given.values()]))
    return {name: Strided(t, *layout) for (name, t), layout in zip(given.items(), layouts)}


@functools.lru_cache(maxsize=4096)  # as in positions.py
def _layouts(tensors: tuple[tuple[Shape, Shape], ...]) -> list[tuple[Shape, Any]]:
    """Return strides and unit of each tensor, given by shape and strides.

    One unit for all: with one for each, dk and dv of heads 64 wide want more registers than sm_80 has.
    """
    strides = [_strides(*each) for each in tensors]
    unit = math.gcd(16, *(stride for each in strides for stride in each))
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
    """Return a bias [B, h, Q, K] as the kernels take it.

    It comes from a projection with its heads innermost, so it is laid out anew, with keys padded to where loads of 16
    bytes end: of all that is read here it is the smallest.  What lies in the padding is never used.
    """
    shared = bias.stride(0) == 0
    bias = bias[:1] if shared else bias
    keys = bias.shape[-1]
    if bias.stride(-1) != 1 or keys % BIAS_UNIT or any(s % BIAS_UNIT for s in _strides(bias.shape, bias.stride())):
        padded = bias.new_empty(*bias.shape[:-1], cdiv(keys, BIAS_UNIT) * BIAS_UNIT)
        padded[..., :keys] = bias
        bias = padded
    batch, head, query = _strides(bias.shape, bias.stride())
    return Strided.of(bias, (0 if shared else batch, head, query), BIAS_UNIT)
