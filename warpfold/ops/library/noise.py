"""warpfold::keep, registered; ops/noise.py defines it."""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from warpfold.ops.dispatch import EMPTY, implementation, place, refuses_device, small_on_cpu


def keep(
    key: Tensor,
    stream: int,
    rate: float,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    dtype: torch.dtype,
) -> Tensor:
    """As `ops.noise.keep`."""
    y: Tensor = torch.ops.warpfold.keep(key, stream, rate, shape, strides, offset, dtype)
    return y


def small_keep(
    key: Tensor,
    stream: int,
    rate: float,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    dtype: torch.dtype,
) -> bool:
    """Whether a CPU computes the definition sooner."""
    return small_on_cpu(key, math.prod(shape), 2**12)


def refuses_keep(
    key: Tensor,
    stream: int,
    rate: float,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    dtype: torch.dtype,
) -> str | None:
    """Why the fast way does not take these, or None."""
    if reason := refuses_device(key):
        return reason
    if place(key) == "triton" and dtype == torch.float64:
        return "in fp64 no kernel is exact"
    return EMPTY if 0 in shape else None


@functools.cache
def scale(rate: float, dtype: torch.dtype) -> float:
    """The factor of what is kept, 1 / (1 - rate), rounded as the definition rounds it."""
    return float(torch.ones((), dtype=dtype, device="cpu") / (1 - rate))


@torch.library.custom_op("warpfold::keep", mutates_args=())
def _keep(
    key: Tensor,
    stream: int,
    rate: float,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    dtype: torch.dtype,
) -> Tensor:
    y: Tensor = implementation("noise", key).dropout_factors(key, stream, rate, shape, strides, offset, dtype)
    return y


@_keep.register_fake
def _(
    key: Tensor,
    stream: int,
    rate: float,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    dtype: torch.dtype,
) -> Tensor:
    return key.new_empty(shape, dtype=dtype)
