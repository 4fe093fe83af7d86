"""Dropout factors on a CPU in blocks, so that the rounds of the hash stay in cache."""

import math

import torch
from torch import Tensor

from warpfold.ops.dispatch import Operands, uniform_loop
from warpfold.ops.noise import LOW, OF_STREAM, kept_factor

BLOCK = 2**14  # elements


def dropout_factors(t: Operands) -> Tensor:
    """Compute warpfold::dropout_factors."""
    shape = t.shape
    first, second = t.key.cpu().tolist()
    numbers = torch.full((1,) * len(shape), t.offset, dtype=torch.int64)
    for axis, (size, stride) in enumerate(zip(shape, t.strides)):
        along = torch.arange(0, size * stride, stride) if stride else torch.zeros(size, dtype=torch.int64)
        numbers = numbers + along.view(size, *(1,) * (len(shape) - 1 - axis))
    # A new tensor, which may be overwritten.
    flat = numbers.reshape(-1)
    out = torch.empty(flat.shape, dtype=t.dtype)
    scratch = torch.empty(min(BLOCK, flat.numel()), dtype=torch.int64)
    # Compare uniform >= rate in integers: a uniform number is 24 bits times 2^-24, and the comparison is in fp32.
    least = math.ceil(float(torch.tensor(t.rate, dtype=torch.float32)) * 2**24) << 8
    word = second + t.stream * OF_STREAM
    for start in uniform_loop(range(0, flat.numel(), BLOCK)):
        x = flat[start : start + BLOCK]
        spare = scratch[: x.numel()]
        _mix(x.bitwise_xor_(first), spare)
        _mix(x.add_(word).bitwise_and_(LOW), spare)
        out[start : start + BLOCK].copy_(x >= least)
    return out.mul_(kept_factor(t.rate, t.dtype)).view(list(shape))


def _mix(x: Tensor, spare: Tensor) -> None:
    """Mix 32 bits as ops/noise.py does, in place."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        torch.bitwise_right_shift(x, shift, out=spare)
        x.bitwise_xor_(spare).mul_(factor).bitwise_and_(LOW)
    torch.bitwise_right_shift(x, 16, out=spare)
    x.bitwise_xor_(spare)
