"""Sums over the programs of a kernel, in a fixed order: what kernels do here instead of atomic additions."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.triton.launch import configs, register
from warpfold.ops.triton.positions import programs_for

ONCE, SPANS = 1024, 128  # programs that are summed up at once; sums of spans of programs, where there are more


@triton.jit
def _sum_partials(
    partials: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    programs: tl.tensor,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Sum partials [programs, FIRST + SECOND] in fp32 into first [spans, FIRST], second [SECOND], span by span."""
    WIDTH: tl.constexpr = FIRST + SECOND
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    each = tl.cdiv(programs, tl.num_programs(1))
    begin = tl.program_id(1) * each
    end = min(programs, begin + each)
    acc = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for start in range(begin, end, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        valid = (p < end)[:, None] & (n < WIDTH)[None, :]
        acc += tl.load(partials + p[:, None].to(tl.int64) * WIDTH + n[None, :], mask=valid, other=0)
    sums = tl.sum(acc, 0)
    tl.store(first + tl.program_id(1) * FIRST + n, sums.to(first.dtype.element_ty), mask=n < FIRST)
    if SECOND > 0:
        tl.store(second + (n - FIRST), sums.to(second.dtype.element_ty), mask=(n >= FIRST) & (n < WIDTH))


SUM = register(
    "sum_partials",
    _sum_partials,
    configs("BLOCK_P BLOCK_N", (64, 64, 4, 1), (32, 128, 4, 1), (128, 32, 4, 1), (256, 16, 4, 1)),
)


def sum_partials(partials: Tensor, first: Tensor, second: Tensor) -> None:
    """Sum over programs, partials [programs, n] in fp32, into the n elements of `first` and then `second`."""
    programs, width = partials.shape
    if programs > ONCE:  # too many for one after another: first the sums of so many spans of them
        spans = empty_partials(partials, programs_for(programs, 1, SPANS), width)
        _sum(partials, spans, spans[:, :0])
        partials = spans
    _sum(partials, first, second)


def _sum(partials: Tensor, first: Tensor, second: Tensor) -> None:
    programs, width = partials.shape
    spans = (first.numel() + second.numel()) // width
    kernel = SUM.tiled((programs, width), partials)
    kernel.run(
        (triton.cdiv(width, kernel["BLOCK_N"]), spans),
        partials=partials,
        first=first,
        second=second,
        programs=programs,
        FIRST=first.numel() // spans,
        SECOND=second.numel(),
    )


def empty_partials(x: Tensor, programs: int, width: int) -> Tensor:
    """Return a tensor for what programs sum up, [programs, width] in fp32, to be filled."""
    return x.new_empty(programs, width, dtype=torch.float32)
