"""attention on a GPU: which kernels run, over what, and how they are launched.

One family serves every attention of the trunk, at any strides: rows and columns, with a bias or without, few queries or
many.  One query over a handful of keys, the template attention, has a kernel of its own.

gated_attention on a GPU: the kernels of its parts, one after another, over memory that they share.

Forward three: norm and projection, attention, and what ends it.  Backward the same three the other way round, over one
gradient dy of the projection: each writes its part of dy where the projection's own backward pass reads it, so nothing
is joined, copied or filled with zeros, and the last adds the gradient that x has as the residual.

At N = 256 in half precision, 128 channels, 4 heads 32 wide: forward moves x 17 MB, y written and read 2 x 69, o written
and read 2 x 17, x and out 34, in all 223 MB, 67 us at 3.35 TB/s; backward some 480 MB, of which dy, written once and
read twice, is 208.  The parts called one by one join their gradients in between: 138 MB more.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from warpfold.ops.attention import batched, empty_bias, empty_given_bias, empty_layer_lse, empty_lse, empty_out, parts
from warpfold.ops.dispatch import Operands
from warpfold.ops.norm import empty_projected
from warpfold.ops.shapes import Shape
from warpfold.ops.tensors import empty_like
from warpfold.ops.triton import attention_kernels as kernels
from warpfold.ops.triton import gate
from warpfold.ops.triton.launch import ByPrecision, Key, TiledKernel, cores
from warpfold.ops.triton.norm import norm_linear, norm_linear_backward
from warpfold.ops.triton.positions import Strided, cdiv

WARPS = 8  # of the gradient of the bias that a core runs at once: its tiles take most of the registers
MAX_SLABS = 16  # of rows whose gradients of the bias are summed apart


def attention(t: Operands) -> tuple[Tensor, Tensor]:
    """Compute warpfold::attention."""
    out, lse = empty_out(t.q, t.v), empty_lse(t.q)
    _forward(t.but(out=out, lse=lse))
    return out, lse


def _forward(t: Operands) -> None:
    """Write the output of attention, [B, R, Q, h, d], and its logarithms [B, R, h, Q]."""
    vectors = {"q": t.q, "k": t.k, "v": t.v, "out": t.out}
    if kernels.serves_pointwise(t.q, t.k, t.bias):
        kernels.run_pointwise(kernels.POINTWISE_FORWARD, strided(vectors), strided_mask(t.mask), t.lse)
        return
    call = _Call(vectors, t.mask, t.bias)
    kernel = call.tiled(kernels.FORWARD)
    kernel.run(call.row_grid(kernel, "BLOCK_Q"), **call.arguments, lse=t.lse)


def attention_backward(t: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::attention_backward."""
    dq, dk, dv, dbias = empty_like(t.q), empty_like(t.k), empty_like(t.v), empty_bias(t.bias, t.bias_wanted, t.q)
    wanted = {"dq": dq, "dk": dk, "dv": dv}
    written = {name: x if _width_innermost(x) else x.new_empty(x.shape) for name, x in wanted.items()}
    _backward(t.but(**written, dbias=dbias if t.bias_wanted else None))
    for name, x in written.items():
        if x is not wanted[name]:
            wanted[name].copy_(x)
    return dq, dk, dv, dbias


def _backward(t: Operands) -> None:
    """Write the gradients of attention into dq, dk, dv, stride 1 along the width; and dbias [B, h, Q, K], if wanted."""
    vectors = {name: getattr(t, name) for name in ("grad", "q", "k", "v", "out", "dq", "dk", "dv")}
    if kernels.serves_pointwise(t.q, t.k, t.bias):
        kernels.run_pointwise(kernels.POINTWISE_BACKWARD, strided(vectors), strided_mask(t.mask), t.lse)
        return
    call = _Call(vectors, t.mask, t.bias)
    if kernels.serves_short(vectors.values(), t.bias):
        call.run_short(t.lse, t.dbias)
    else:
        call.run_long(t.lse, t.dbias)


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
        self.sizes = kernels.Sizes(rows, queries, vectors["k"].shape[2], heads, bias_keys)
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
        kernel, sizes, wide = kernels.SHORT.tiled(self.key, self.q), self.sizes, kernels.padded_width(self.q.shape[-1])
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
    if (
        bias.stride(-1) != 1
        or keys % kernels.BIAS_UNIT
        or any(s % kernels.BIAS_UNIT for s in _strides(bias.shape, bias.stride()))
    ):
        padded = bias.new_empty(*bias.shape[:-1], cdiv(keys, kernels.BIAS_UNIT) * kernels.BIAS_UNIT)
        padded[..., :keys] = bias
        bias = padded
    batch, head, query = _strides(bias.shape, bias.stride())
    return Strided.of(bias, (0 if shared else batch, head, query), kernels.BIAS_UNIT)


def gated_attention(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::gated_attention."""
    x, inner = t.x, t.out_weight.shape[1]
    y, mean, scale = norm_linear(t.but(bias=t.gate_bias))
    o, lse = empty_projected(x, inner), empty_layer_lse(x, t.heads)
    g, *vectors, bias = parts(y, inner, t.heads, t.bias)
    q, k, v, out = (batched(each, 5) for each in (*vectors, o.unflatten(-1, (t.heads, -1))))
    bias = None if bias is None else batched(bias, 4)
    _forward(Operands(q=q, k=k, v=v, mask=batched(t.mask, 3), bias=bias, out=out, lse=batched(lse, 4)))
    new = gate.gated_linear_residual(t.but(o=o, g=g, weight=t.out_weight, bias=t.out_bias), t.residual)
    if not t.kept:
        return new, *(x.new_empty(0) for _ in range(5))
    return new, y, mean, scale, o, lse


def gated_attention_backward(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::gated_attention_backward."""
    x, inner = t.x, t.out_weight.shape[1]
    given = empty_given_bias(x, t.bias, t.bias_wanted)
    dy, do = empty_projected(x, t.weight.shape[0]), empty_projected(x, inner)
    g, *vectors, bias = parts(t.y, inner, t.heads, t.bias)
    dg, *gradients, dbias = parts(dy, inner, t.heads, given if t.bias_wanted else None)
    of_end = gate.backward(t.but(o=t.attended, g=g, weight=t.out_weight, bias=t.out_bias), do, dg)
    do, o = (each.unflatten(-1, (t.heads, -1)) for each in (do, t.attended))
    do, q, k, v, o, dq, dk, dv = (batched(each, 5) for each in (do, *vectors, o, *gradients))
    bias, dbias = (None if each is None else batched(each, 4) for each in (bias, dbias))
    rows = Operands(q=q, k=k, v=v, mask=batched(t.mask, 3), bias=bias, out=o, lse=batched(t.lse, 4))
    _backward(rows.but(grad=do, dq=dq, dk=dk, dv=dv, dbias=dbias))
    beside = t.grad if t.residual else None
    of_norm = norm_linear_backward(t.but(grad=dy, bias=t.gate_bias), beside, (of_end,))
    return *of_norm, *of_end.results, given
