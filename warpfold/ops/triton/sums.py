"""Sums over the programs of a kernel, in a fixed order: what kernels do here instead of atomic additions."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.triton.launch import Kernel, Launch, launch, register
from warpfold.ops.triton.positions import cuts

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
    """partials [programs, FIRST + SECOND] fp32 -> first [spans, FIRST], second [SECOND]: sums of spans of programs."""
    WIDTH: tl.constexpr = FIRST + SECOND
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    each = tl.cdiv(programs, tl.num_programs(1))
    begin = tl.program_id(1) * each
    end = min(programs, begin + each)
    total = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for start in range(begin, end, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        keep = (p < end)[:, None] & (n < WIDTH)[None, :]
        total += tl.load(partials + p[:, None].to(tl.int64) * WIDTH + n[None, :], mask=keep, other=0)
    sums = tl.sum(total, 0)
    tl.store(first + tl.program_id(1) * FIRST + n, sums.to(first.dtype.element_ty), mask=n < FIRST)
    if SECOND > 0:
        tl.store(second + (n - FIRST), sums.to(second.dtype.element_ty), mask=(n >= FIRST) & (n < WIDTH))


SUM = register(
    Kernel(
        "sum_partials",
        _sum_partials,
        candidates=tuple(
            Launch({"BLOCK_P": p, "BLOCK_N": n}, warps, 1)
            for p, n, warps in ((64, 64, 4), (32, 128, 4), (128, 32, 4), (256, 16, 4))
        ),
    )
)


def sum_partials(partials: Tensor, first: Tensor, second: Tensor) -> None:
    """The sums over programs, partials [programs, n] in fp32, into the n elements of `first` and then `second`."""
    programs, width = partials.shape
    if programs > ONCE:  # too many for one after another: first the sums of so many spans of them
        spans = partials_of(partials, cuts(programs, 1, SPANS), width)
        _sum(partials, spans, spans[:, :0])
        partials = spans
    _sum(partials, first, second)


def _sum(partials: Tensor, first: Tensor, second: Tensor) -> None:
    programs, width = partials.shape
    spans = (first.numel() + second.numel()) // width
    choice = launch(SUM.name, (programs, width), partials.device)
    grid = (triton.cdiv(width, choice.sizes["BLOCK_N"]), spans)
    SUM.run(grid, choice, partials, first, second, programs, FIRST=first.numel() // spans, SECOND=second.numel())


def partials_of(x: Tensor, programs: int, width: int) -> Tensor:
    """Where programs leave what they sum up, [programs, width] in fp32."""
    return x.new_empty(programs, width, dtype=torch.float32)
