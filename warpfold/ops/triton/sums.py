"""Sums over the programs of a kernel, in a fixed order: what kernels do here instead of atomic additions."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.triton.launch import configs, register
from warpfold.ops.triton.positions import cdiv, programs_for

ONCE, SPANS = 1024, 128  # programs that are summed up at once; sums of spans of programs, where there are more


class Sum(NamedTuple):
    """Partials [programs, n] in fp32, and the tensors that their sums over programs are written to, one after another:
    n elements together."""

    partials: Tensor
    results: tuple[Tensor, ...]


class Part(NamedTuple):
    """Some of the sums, and the tensor that they are written to: from which one on, and how many."""

    data: Tensor
    begin: int
    size: int


class SumJob(NamedTuple):
    """Partials [programs, width] as the kernel is given them, to be summed span by span.

    begin: the first program of the launch that works on it; blocks: programs of a span.
    """

    partials: Tensor
    parts: tuple[Part, ...]
    programs: int
    width: int
    spans: int
    blocks: int
    begin: int


@triton.jit
def _sum_partials(jobs: tl.tuple, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr) -> None:
    """Sum the partials of every job in fp32 into its parts, one after another; of several spans each has its own."""
    for which in tl.static_range(len(jobs)):
        job = jobs[which]
        program = tl.program_id(0) - job.begin
        if (program >= 0) & (program < job.spans * job.blocks):
            n = program % job.blocks * BLOCK_N + tl.arange(0, BLOCK_N)
            span = program // job.blocks
            each = tl.cdiv(job.programs, job.spans)
            begin = span * each
            end = min(job.programs, begin + each)
            acc = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
            for start in range(begin, end, BLOCK_P):
                p = start + tl.arange(0, BLOCK_P)
                valid = (p < end)[:, None] & (n < job.width)[None, :]
                acc += tl.load(job.partials + p[:, None].to(tl.int64) * job.width + n[None, :], mask=valid, other=0)
            sums = tl.sum(acc, 0)
            for i in tl.static_range(len(job.parts)):
                part = job.parts[i]
                at = part.data + span.to(tl.int64) * part.size + (n - part.begin)
                mine = (n >= part.begin) & (n < part.begin + part.size)
                tl.store(at, sums.to(part.data.dtype.element_ty), mask=mine)


SUM = register(
    "sum_partials",
    _sum_partials,
    configs("BLOCK_P BLOCK_N", (64, 64, 4, 1), (32, 128, 4, 1), (128, 32, 4, 1), (256, 16, 4, 1)),
)


def or_unwanted(gradient: Tensor, partials: Tensor, size: int) -> Tensor:
    """Return the gradient of a bias, or, where there is no bias, memory for the sums that nobody wants."""
    return gradient if gradient.numel() else partials.new_empty(size)


def sum_partials(*sums: Sum) -> None:
    """Sum over programs, all of these in one launch; in two where some have more than `ONCE` programs."""
    spans, last = [], []
    for partials, results in sums:
        programs, width = partials.shape
        assert width == sum(result.numel() for result in results)
        if programs > ONCE:  # too many for one after another: first the sums of so many spans of them
            shorter = empty_partials(partials, programs_for(programs, 1, SPANS), width)
            spans.append((partials, (shorter,), len(shorter)))
            partials = shorter
        last.append((partials, results, 1))
    if spans:
        _launch(spans)
    _launch(last)


def _launch(sums: Sequence[tuple[Tensor, tuple[Tensor, ...], int]]) -> None:
    """Launch the kernel on partials, results and the number of spans of each sum."""
    most, widest = (max(partials.shape[axis] for partials, _, _ in sums) for axis in (0, 1))
    kernel = SUM.tiled((most, widest), sums[0][0])
    jobs, begin = [], 0
    for partials, results, spans in sums:
        programs, width = partials.shape
        job = SumJob(partials, _parts(results, spans), programs, width, spans, cdiv(width, kernel["BLOCK_N"]), begin)
        begin += job.spans * job.blocks
        jobs.append(job)
    kernel.run((begin,), jobs=tuple(jobs))


def _parts(results: Sequence[Tensor], spans: int) -> tuple[Part, ...]:
    """Return where the sums go: of every span to the next row of what results there are."""
    parts, begin = [], 0
    for result in results:
        if result.numel():
            parts.append(Part(result, begin, result.numel() // spans))
            begin += result.numel() // spans
    return tuple(parts)


def empty_partials(x: Tensor, programs: int, width: int) -> Tensor:
    """Return a tensor for what programs sum up, [programs, width] in fp32, to be filled."""
    return x.new_empty(programs, width, dtype=torch.float32)
