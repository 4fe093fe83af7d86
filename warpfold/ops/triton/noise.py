"""Dropout factors on a GPU: the hash of ops/noise.py in 32 bits, for kernels that draw as they go, and by itself."""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.noise import kept_factor
from warpfold.ops.triton.launch import Kernel, Launch, launch, register
from warpfold.ops.triton.positions import offsets, positions

SCALARS = ["number", "word", "rate", "scale"]  # they differ from draw to draw: nothing is compiled anew for them


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    """The finaliser after its first shift, on uint32."""
    x = tl.mul(x, 0x7FEB352D, sanitize_overflow=False)  # it is meant to wrap around
    x = tl.mul(x ^ (x >> 15), 0x846CA68B, sanitize_overflow=False)
    return x ^ (x >> 16)


@triton.jit
def drawn(key: tl.tensor, numbers: tl.tensor, word: tl.tensor, rate: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """The factors of the elements of these numbers (int64), in fp32."""
    first, second = tl.load(key), tl.load(key + 1)
    x = numbers ^ first
    x = _mix((x ^ (x >> 16)).to(tl.uint32))
    shift = tl.add(second.to(tl.uint32), word.to(tl.uint32), sanitize_overflow=False)
    x = tl.add(x, shift, sanitize_overflow=False)
    x = _mix(x ^ (x >> 16))
    uniform = (x >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    return tl.where(uniform >= rate, scale, 0.0)


@triton.jit(do_not_specialize=SCALARS)
def _keep(
    key: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    sizes: tl.tuple,
    out_at: tl.tuple,
    numbers_at: tl.tuple,
    number: tl.tensor,
    word: tl.tensor,
    rate: tl.tensor,
    scale: tl.tensor,
    AXES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK factors; number: that of the tensor's first element."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = drawn(key, number + offsets(i, sizes, numbers_at, AXES, 1), word, rate, scale)
    tl.store(out + offsets(i, sizes, out_at, AXES, 1), kept.to(out.dtype.element_ty), mask=i < count)


KEEP = register(
    Kernel(
        "keep",
        _keep,
        (Launch({"BLOCK": 1024}, 4, 1),),  # too little work for the launch to matter
    )
)


def scalars(stream: int, rate: float, dtype: torch.dtype) -> tuple[int, float, float]:
    """word, rate and scale of a draw, as the kernels take them."""
    word = stream * 0x9E3779B9 & 0xFFFFFFFF
    signed = word - 2**32 if word >= 2**31 else word  # 32 bits, for any stream
    return signed, rate, kept_factor(rate, dtype)


def dropout_factors(
    key: Tensor,
    stream: int,
    rate: float,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    dtype: torch.dtype,
) -> Tensor:
    """warpfold::dropout_factors."""
    out = key.new_empty(shape, dtype=dtype)
    fill(out, key, offset, strides, scalars(stream, rate, dtype))
    return out


def fill(out: Tensor, key: Tensor, number: int, strides: Sequence[int], draw: tuple[int, float, float]) -> None:
    """Draw into `out`, whose first element has this number; draw: what `scalars` returned."""
    p = positions(out.shape, out.stride(), strides)
    if p is None:  # more than three axes that cannot be merged
        for i in range(len(out)):
            fill(out[i], key, number + i * strides[0], strides[1:], draw)
        return
    choice = launch(KEEP.name, (math.prod(out.shape), out.element_size()), out.device)
    KEEP.run(
        (triton.cdiv(p.count, choice.sizes["BLOCK"]),),
        choice,
        *(key, out, p.count, p.sizes, p.strides[0], p.strides[1], number, *draw),
        AXES=p.axes,
    )
