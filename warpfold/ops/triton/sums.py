"""Sums over the programs of a kernel, in a fixed order: what kernels do here instead of atomic additions."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.triton.launch import configs, register
from warpfold.ops.triton.positions import programs_for

ONCE, SPANS = 1024, 128  # programs that are summed up at once; sums of spans of programs, where there are more


class Part(NamedTuple):
    """Some of the sums, and the tensor that they are written to: from which one on, and how many."""

    data: Tensor
    begin: int
    size: int


@triton.jit
def _sum_partials(
    partials: tl.tensor,
    parts: tl.tuple,
    programs: tl.tensor,
    width: tl.tensor,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Sum partials [programs, width] in fp32 into the parts, one after another; of several spans each has its own."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    each = tl.cdiv(programs, tl.num_programs(1))
    begin = tl.program_id(1) * each
    end = min(programs, begin + each)
    acc = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for start in range(begin, end, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        valid = (p < end)[:, None] & (n < width)[None, :]
        acc += tl.load(partials + p[:, None].to(tl.int64) * width + n[None, :], mask=valid, other=0)
    sums = tl.sum(acc, 0)
    for i in tl.static_range(len(parts)):
        part = parts[i]
        at = part.data + tl.program_id(1).to(tl.int64) * part.size + (n - part.begin)
        mine = (n >= part.begin) & (n < part.begin + part.size)
        tl.store(at, sums.to(part.data.dtype.element_ty), mask=mine)


SUM = register(
    "sum_partials",
    _sum_partials,
    configs("BLOCK_P BLOCK_N", (64, 64, 4, 1), (32, 128, 4, 1), (128, 32, 4, 1), (256, 16, 4, 1)),
)


def sum_partials(partials: Tensor, *results: Tensor) -> None:
    """Sum over programs, partials [programs, n] in fp32, into the n elements of the results, one after another."""
    programs, width = partials.shape
    if programs > ONCE:  # too many for one after another: first the sums of so many spans of them
        spans = empty_partials(partials, programs_for(programs, 1, SPANS), width)
        _sum(partials, len(spans), [Part(spans, 0, width)])
        partials = spans
    parts, begin = [], 0
    for result in results:
        if result.numel():
            parts.append(Part(result, begin, result.numel()))
            begin += result.numel()
    assert begin == width
    _sum(partials, 1, parts)


def _sum(partials: Tensor, spans: int, parts: Sequence[Part]) -> None:
    programs, width = partials.shape
    kernel = SUM.tiled((programs, width), partials)
    grid = triton.cdiv(width, kernel["BLOCK_N"]), spans
    kernel.run(grid, partials=partials, parts=tuple(parts), programs=programs, width=width)


def empty_partials(x: Tensor, programs: int, width: int) -> Tensor:
    """Return a tensor for what programs sum up, [programs, width] in fp32, to be filled."""
    return x.new_empty(programs, width, dtype=torch.float32)
