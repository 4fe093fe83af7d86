"""warpfold::attention on a GPU: which kernels run, over what, and how they are launched.

One family serves every attention of the trunk, at any strides: rows and columns, with a bias or without, few queries or
many.  One query over a handful of keys, the template attention, has a kernel of its own (pointwise.py).
"""

import math

import torch
import triton
from torch import Tensor

from warpfold.ops.attention import empty_bias, empty_lse, empty_out
from warpfold.ops.tensors import empty_like
from warpfold.ops.triton import attention_backward as backward_kernels
from warpfold.ops.triton import attention_forward as forward_kernels
from warpfold.ops.triton import attention_tiles, pointwise
from warpfold.ops.triton.launch import KERNELS, Kernel, Launch, launch, register

SLABS = 16  # at most, of rows whose gradients of the bias are summed apart
PROGRAMS = 512  # that the gradient of the bias is cut into, at least, where its rows allow


def _launches(*of: tuple[int, ...]) -> tuple[Launch, ...]:
    """From (queries, keys, rows, warps, stages), without rows where four are given."""
    return tuple(
        Launch({"BLOCK_Q": q, "BLOCK_K": k} | ({"ROWS": rows[0]} if rows else {}), warps, stages)
        for q, k, *rows, warps, stages in of
    )


# Half precision uses tensor cores; fp32, exact and without them, wants smaller tiles.
_ROWS = _launches(
    *((64, 64, rows, 4, stages) for rows in (1, 2) for stages in (2, 3)),
    *((64, 32, rows, 4, stages) for rows in (1, 2) for stages in (2, 3)),
    *((128, keys, 1, 8, stages) for keys in (32, 64) for stages in (2, 3)),
    *((128, 32, 2, 8, 2), (64, 128, 1, 4, 2)),
    *((16, 64, 1, 1, 3), (16, 128, 1, 2, 3), (32, 64, 1, 2, 3)),
)
_ROWS_FP32 = _launches((32, 32, 1, 4, 2), (64, 32, 1, 8, 2), (16, 32, 1, 2, 2), (16, 64, 1, 4, 2))
_KEYS = _launches(
    *((64, 64, 1, 4, 2), (64, 64, 1, 4, 3), (64, 128, 1, 8, 2), (32, 64, 1, 4, 2), (32, 64, 2, 4, 2)),
    *((32, 128, 1, 8, 2), (32, 128, 1, 4, 2), (16, 64, 1, 2, 2), (16, 64, 1, 4, 2), (16, 128, 1, 8, 2)),
)
_KEYS_FP32 = _launches((32, 32, 1, 4, 2), (32, 64, 1, 8, 2), (16, 32, 1, 4, 2), (16, 64, 1, 8, 2))
_TILES = _launches(
    *((64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 2), (64, 32, 4, 3), (32, 64, 4, 3)),
    *((128, 64, 8, 2), (128, 64, 8, 3), (64, 128, 8, 2), (128, 32, 8, 3)),
)
_TILES_FP32 = _launches((32, 32, 4, 2), (32, 64, 8, 2), (32, 32, 8, 2))


for _name, _function, _half, _fp32 in (
    ("attention_forward", forward_kernels.attention_forward, _ROWS, _ROWS_FP32),
    ("attention_dq", backward_kernels.attention_dq, _ROWS, _ROWS_FP32),
    ("attention_dkdv", backward_kernels.attention_dkdv, _KEYS, _KEYS_FP32),
    ("attention_dbias", backward_kernels.attention_dbias, _TILES, _TILES_FP32),
):
    register(Kernel(_name, _function, _half))
    register(Kernel(f"{_name}_fp32", _function, _fp32))
register(Kernel("attention_slabs", backward_kernels.attention_slabs, (Launch({"BLOCK": 1024}, 4, 1),)))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """warpfold::attention."""
    out, lse = empty_out(q, v), empty_lse(q)
    if pointwise.serves(q, k, bias):
        q, k, v = _vectors(q, k, v)
        pointwise.forward(q, k, v, _mask(mask), out, lse)
        return out, lse
    p = _Problem(_vectors(q, k, v, out), mask, bias)
    kernel, choice = p.kernel("attention_forward")
    kernel.run(
        p.grid(p.queries, choice.sizes["BLOCK_Q"], choice.sizes["ROWS"]),
        choice,
        *(*p.vectors[:3], p.mask, p.bias, out, lse),
        *(*p.strides[:3], p.mask_strides, p.bias_strides, p.strides[3]),
        *p.sizes,
        **p.constants,
    )
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
    """warpfold::attention_backward."""
    dq, dk, dv, dbias = empty_like(q), empty_like(k), empty_like(v), empty_bias(bias, bias_wanted, q)
    into = tuple(t if _is_vectors(t) else t.new_empty(t.shape) for t in (dq, dk, dv))
    if pointwise.serves(q, k, bias):
        grad, q, k, v, out = _vectors(grad, q, k, v, out)
        pointwise.backward((grad, q, k, v), _mask(mask), out, lse, into)
    else:
        _backward(_Problem(_vectors(grad, q, k, v, out) + into, mask, bias), lse, dbias if bias_wanted else None)
    for gradient, filled in zip((dq, dk, dv), into):
        if filled is not gradient:
            gradient.copy_(filled)
    return dq, dk, dv, dbias


def _backward(p: "_Problem", lse: Tensor, dbias: Tensor | None) -> None:
    grad, q, k, v, out, dq, dk, dv = p.vectors
    delta = lse.new_empty(lse.shape)
    firsts = lse.new_empty(lse.shape[:2], dtype=torch.int32)
    kernel, choice = p.kernel("attention_dq")
    kernel.run(
        p.grid(p.queries, choice.sizes["BLOCK_Q"], choice.sizes["ROWS"]),
        choice,
        *(grad, q, k, v, p.mask, p.bias, out, lse, delta, firsts, dq),
        *(*p.strides[:4], p.mask_strides, p.bias_strides, *p.strides[4:6]),
        *p.sizes,
        **p.constants,
    )
    kernel, choice = p.kernel("attention_dkdv")
    kernel.run(
        p.grid(p.keys, choice.sizes["BLOCK_K"], choice.sizes["ROWS"]),
        choice,
        *(grad, q, k, v, p.mask, p.bias, lse, delta, dk, dv),
        *(*p.strides[:4], p.mask_strides, p.bias_strides, *p.strides[6:]),
        *p.sizes,
        **p.constants,
    )
    if dbias is not None:
        _bias_gradient(p, lse, delta, firsts, dbias)


def _bias_gradient(p: "_Problem", lse: Tensor, delta: Tensor, firsts: Tensor, dbias: Tensor) -> None:
    """Rows are cut into slabs where the tiles of the bias alone are too few to fill a GPU; by the shapes alone."""
    tiles = p.batches * p.heads * triton.cdiv(p.queries, 64) * triton.cdiv(p.keys, 64)
    slab = triton.cdiv(p.rows, max(1, min(SLABS, p.rows // 4, triton.cdiv(PROGRAMS, tiles))))
    slabs = triton.cdiv(p.rows, slab)
    into = dbias if slabs == 1 else lse.new_empty(slabs, *dbias.shape)
    kernel, choice = p.kernel("attention_dbias")
    blocks = triton.cdiv(p.queries, choice.sizes["BLOCK_Q"]) * triton.cdiv(p.keys, choice.sizes["BLOCK_K"])
    kernel.run(
        (slabs * p.batches * p.heads * blocks,),
        choice,
        *(*p.vectors[:4], p.mask, p.bias, lse, delta, firsts, into),
        *(*p.strides[:4], p.mask_strides, p.bias_strides),
        *(*p.sizes, slab, p.batches),
        WIDTH=p.constants["WIDTH"],
        UNIT=p.constants["UNIT"],
    )
    if slabs > 1:
        choice = launch("attention_slabs", (dbias.numel(),), dbias.device)
        grid = (triton.cdiv(dbias.numel(), choice.sizes["BLOCK"]),)
        KERNELS["attention_slabs"].run(grid, choice, into, dbias, dbias.numel(), slabs)


class _Problem:
    """The tensors of one call as the kernels want them: their strides, divided by what divides them all, and sizes.

    vectors: all that lies as q does, [B, R, Q or K, h, d], the last axis of stride 1.  With the gradient of the output
    first there are more than four.
    """

    def __init__(self, vectors: tuple[Tensor, ...], mask: Tensor, bias: Tensor | None) -> None:
        self.vectors = vectors
        q, k = vectors[:2] if len(vectors) == 4 else vectors[1:3]
        self.batches, self.rows, self.queries, self.heads, width = q.shape
        self.keys = k.shape[2]
        every = [_strides(t) for t in vectors]
        unit = math.gcd(16, *(s for strides in every for s in strides))
        self.strides = [tuple(s // unit for s in strides) for strides in every]
        self.mask = _mask(mask)
        self.mask_strides = self.mask.stride()[:2]
        self.biased = bias is not None
        self.bias, self.bias_strides, bias_keys = (q, (0, 0, 0), 0) if bias is None else _bias(bias)
        self.sizes = (self.rows, self.queries, self.keys, self.heads, bias_keys)
        self.constants = {"WIDTH": width, "BIASED": self.biased, "UNIT": unit}

    def kernel(self, name: str) -> tuple[Kernel, Launch]:
        """The kernel of that name for this dtype, and its launch."""
        q = self.vectors[0]
        name = f"{name}_fp32" if q.dtype == torch.float32 else name
        key = (self.constants["WIDTH"], 2 if self.biased else 1, self.queries, self.keys)
        return KERNELS[name], launch(name, key, q.device)

    def grid(self, length: int, block: int, rows: int) -> tuple[int]:
        """Of programs that each own a block of queries or keys, of some rows."""
        return (triton.cdiv(length, block) * self.heads * triton.cdiv(self.rows, rows) * self.batches,)


def _is_vectors(t: Tensor) -> bool:
    return t.stride(-1) == 1 or t.shape[-1] == 1


def _vectors(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The last axis of each with stride 1; nothing is copied that has it."""
    return tuple(t if _is_vectors(t) else t.contiguous() for t in tensors)


def _strides(t: Tensor) -> tuple[int, ...]:
    """Of all axes but the last; 0 along axes of one element, whose strides mean nothing."""
    return tuple(0 if size == 1 else stride for size, stride in zip(t.shape[:-1], t.stride()[:-1]))


def _mask(mask: Tensor) -> Tensor:
    """Its last axis with stride 1, of numbers that Triton can load and compare."""
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return mask if mask.stride(-1) == 1 else mask.contiguous()


def _bias(bias: Tensor) -> tuple[Tensor, tuple[int, ...], int]:
    """[B, h, Q, K] as the kernels read it, its strides over `BIAS_UNIT`, and the keys that may be read of it.

    It comes from a projection with its heads innermost, so it is laid out anew, with keys padded to where loads of 16
    bytes end: of all that is read here it is the smallest.  What lies in the padding is never used.
    """
    unit = int(attention_tiles.BIAS_UNIT)
    shared = bias.stride(0) == 0
    bias = bias[:1] if shared else bias
    if bias.stride(-1) != 1 or any(s % unit for s in (*_strides(bias), bias.shape[-1])):
        padded = bias.new_empty(*bias.shape[:-1], triton.cdiv(bias.shape[-1], unit) * unit)
        padded[..., : bias.shape[-1]] = bias
        bias = padded
    batch, head, query = (s // unit for s in _strides(bias))
    return bias, (0 if shared else batch, head, query), bias.shape[-1]
