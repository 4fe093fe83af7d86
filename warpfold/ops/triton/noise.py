"""Dropout factors on a GPU: the hash of ops/noise.py in 32 bits, for kernels that draw as they go, and by itself."""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.noise import kept_factor
from warpfold.ops.triton.launch import configs, register
from warpfold.ops.triton.positions import Strided, coalesce, offsets

SCALARS = ["number", "word", "rate", "scale"]  # they differ from draw to draw: nothing is compiled anew for them


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    """Apply the finaliser after its first shift, on uint32."""
    x = tl.mul(x, 0x7FEB352D, sanitize_overflow=False)  # it is meant to wrap around
    x = tl.mul(x ^ (x >> 15), 0x846CA68B, sanitize_overflow=False)
    return x ^ (x >> 16)


@triton.jit
def drawn(key: tl.tensor, numbers: tl.tensor, word: tl.tensor, rate: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return the factors of the elements of these numbers (int64), in fp32."""
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
    out: tl.tuple,
    numbers: tl.tuple,
    axes: tl.tuple,
    number: tl.tensor,
    word: tl.tensor,
    rate: tl.tensor,
    scale: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Store BLOCK factors; number: that of the tensor's first element."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = drawn(key, number + offsets(numbers, i, axes), word, rate, scale)
    tl.store(out.data + offsets(out, i, axes), kept.to(out.data.dtype.element_ty), mask=i < axes.positions)


KEEP = register("keep", _keep, configs("BLOCK", (1024, 4, 1)))  # too little work for the launch to matter


def scalars(stream: int, rate: float, dtype: torch.dtype) -> tuple[int, float, float]:
    """Return word, rate and scale of a draw, as the kernels take them."""
    word = stream * 0x9E3779B9 & 0xFFFFFFFF
    return word - 2**32 if word >= 2**31 else word, rate, kept_factor(rate, dtype)  # signed, for any stream


def dropout_factors(
    key: Tensor,
    stream: int,
    rate: float,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    dtype: torch.dtype,
) -> Tensor:
    """Compute warpfold::dropout_factors."""
    out = key.new_empty(shape, dtype=dtype)
    fill(out, key, offset, strides, scalars(stream, rate, dtype))
    return out


def fill(out: Tensor, key: Tensor, number: int, strides: Sequence[int], draw: tuple[int, float, float]) -> None:
    """Draw into `out`, whose first element has this number; draw: what `scalars` returned."""
    found = coalesce(out.shape, out.stride(), strides)
    if found is None:  # more than three axes that cannot be coalesced
        for i in range(len(out)):
            fill(out[i], key, number + i * strides[0], strides[1:], draw)
        return
    kernel = KEEP.tiled((math.prod(out.shape), out.element_size()), out)
    kernel.run(
        (triton.cdiv(found.count, kernel["BLOCK"]),),
        key=key,
        out=Strided.of(out, found.strides[0], 1),
        numbers=Strided.of(None, found.strides[1], 1),
        axes=found.argument,
        number=number,
        **dict(zip(SCALARS[1:], draw)),
    )
