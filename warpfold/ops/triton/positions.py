"""Kernel arguments for tensors of the same positions with different strides, and deterministic sums over programs.

A kernel numbers the positions in the memory order of its first tensor.  It splits this number into at most three axes,
which remain after axes that are contiguous in every tensor are coalesced.  So kernels read transposed and padded views
without a copy.

Sums over the programs of a kernel have a fixed order.  Kernels use them instead of atomic additions.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from warpfold.errors import UserError
from warpfold.ops.triton.launch import configs, register

MAX_AXES = 3
# From this number of positions on, weights are cast before a kernel.
CAST_ROWS = 4096
# Positions have 32-bit numbers. Their offsets have 64 bits.
MOST = 2**30


class Strided(NamedTuple):
    """A tensor as a kernel argument.

    strides: the strides of the axes that the kernel iterates over, divided by `unit`, a compile-time constant.  A
    kernel that knows a common divisor of all strides reads in wide words.  Triton itself specialises only for
    multiples of 16, but the rows of a projection are 520 elements apart.  For positions the axes are outer, middle and
    inner; the stride of the channels follows undivided.
    """

    data: Tensor | None
    strides: tuple[int, ...]
    unit: Any

    @staticmethod
    def of(t: Tensor | None, strides: Sequence[int], most: int, *rest: int) -> "Strided":
        """Divide the strides by their greatest common divisor with `most`, and append the strides `rest` undivided."""
        unit = math.gcd(most, *strides)
        return Strided(t, (*(s // unit for s in strides), *rest), tl.constexpr(unit))


def strided_by_length(t: Tensor | None, strides: Sequence[int]) -> Strided:
    """Make the kernel argument for a tensor whose rows are as long as the protein.

    Multiples of 16 are not divided, because Triton specialises for them itself.  After a division by 16, strides would
    be multiples of 16 for some lengths only, and Triton would compile both variants.
    """
    return Strided.of(t, strides, 8 if math.gcd(16, *strides) < 16 else 1)


class Axes(NamedTuple):
    """The axes of positions as a kernel argument.

    positions: the number of positions.  middle, inner: sizes of these axes.  number: the number of axes, a constant.
    """

    positions: int
    middle: int
    inner: int
    number: Any


@dataclass(frozen=True)
class Coalesced:
    """Coalesced axes: number of positions, number of axes, sizes of the middle and inner axis, and each tensor's
    strides along the outer, middle and inner axis.
    """

    count: int
    axes: int
    sizes: tuple[int, int]
    strides: tuple[tuple[int, int, int], ...]

    @property
    def argument(self) -> Axes:
        """The axes as a kernel argument."""
        return Axes(self.count, *self.sizes, tl.constexpr(self.axes))


def coalesce(shape: Sequence[int], *strides: Sequence[int]) -> Coalesced | None:
    """Coalesce the axes of a shape in tensors with these strides; None if more than three axes remain.

    Raises UserError for more positions than kernels can number.
    """
    axes = [axis for axis in range(len(shape)) if shape[axis] != 1]
    merged: list[tuple[int, list[int]]] = []
    for axis in sorted(axes, key=strides[0].__getitem__, reverse=True):
        size, steps = shape[axis], [s[axis] for s in strides]
        if merged and merged[-1][1] == [step * size for step in steps]:
            merged[-1] = (merged[-1][0] * size, steps)
        else:
            merged.append((size, steps))
    count = math.prod(shape)
    if count >= MOST:
        raise UserError(f"a tensor has {count} positions: kernels number at most 2^30. Split the tensor along an axis.")
    if len(merged) > MAX_AXES:
        return None
    padded = [(1, [0] * len(strides))] * (MAX_AXES - len(merged)) + merged
    (_, outer), (middle_size, middle), (inner_size, inner) = padded
    return Coalesced(count, max(len(merged), 1), (middle_size, inner_size), tuple(zip(outer, middle, inner)))


class Positions:
    """Tensors [*, c] that a kernel reads and writes position by position, by the names of the kernel's arguments.

        p = Positions({"x": x, "g": g}, writes={"y": out})
        kernel.run((cdiv(p.count, kernel["BLOCK_M"]),), **p.arguments, C=c)
        p.copy_back()

    arguments: each tensor as `Strided`, or None for None, and "axes".
    """

    def __init__(self, reads: Mapping[str, Tensor | None], writes: Mapping[str, Tensor]) -> None:
        layout = _layout(reads, writes)
        self._targets, self._written = writes, dict(writes)
        if layout is None:
            # Copy everything to row-major order, which is one axis. `copy_back` copies the results.
            reads = {name: None if t is None else t.contiguous() for name, t in reads.items()}
            self._written = {n: t if t.is_contiguous() else t.new_empty(t.shape) for n, t in writes.items()}
            layout = _layout(reads, self._written)
            assert layout is not None
        self.count, axes, layouts = layout
        self.arguments: dict[str, Any] = {**reads, **self._written, "axes": axes}
        of_tensors = iter(layouts)
        for name, t in self.arguments.items():
            if isinstance(t, Tensor):
                self.arguments[name] = Strided(t, *next(of_tensors))

    def writes_in_place(self, name: str) -> bool:
        """Return whether the kernel writes this tensor directly, so that `copy_back` does not copy it."""
        return self._written[name] is self._targets[name]

    def copy_back(self) -> None:
        """Copy the results that the kernel wrote to temporary memory."""
        for name, t in self._written.items():
            if not self.writes_in_place(name):
                self._targets[name].copy_(t)


Layout = tuple[tuple[int, ...], Any]  # `Strided`: strides, unit


def _layout(
    reads: Mapping[str, Tensor | None], writes: Mapping[str, Tensor]
) -> tuple[int, Axes, tuple[Layout, ...]] | None:
    tensors = [t for t in (*reads.values(), *writes.values()) if t is not None]
    return _layouts(tensors[0].shape, tuple([t.stride() for t in tensors]))


# Models have few shapes, and a lookup takes a tenth of the time of computing the layout.
@functools.lru_cache(maxsize=4096)
def _layouts(
    shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...]
) -> tuple[int, Axes, tuple[Layout, ...]] | None:
    """Compute the number of positions, the axes and the layouts of tensors [*, c] with these strides.

    Returns None if too many axes remain.  Raises UserError as `coalesce` does.
    """
    coalesced = coalesce(shape[:-1], *(each[:-1] for each in strides))
    if coalesced is None:
        return None
    tensors = (Strided.of(None, steps, 8, each[-1]) for steps, each in zip(coalesced.strides, strides))
    return coalesced.count, coalesced.argument, tuple((t.strides, t.unit) for t in tensors)


def channels_last(t: Tensor) -> Tensor:
    """Return t [*, c] with the channels of a position contiguous: t itself, or a copy."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def contiguous(t: Tensor | None) -> Tensor | None:
    """Return a contiguous t, or None for None."""
    return None if t is None else t.contiguous()


def programs_for(total: int, block: int, most: int) -> int:
    """Return the number of programs that share the blocks of `total`: one per block, but at most `most`.

    The number depends on shapes alone, and so does the order of every sum.
    """
    blocks = cdiv(total, block)
    return cdiv(blocks, cdiv(blocks, most))


def chunks_of(total: int, size: int, x: Tensor) -> list[tuple[int, int, int]]:
    """Return number, begin and end of each chunk of `total`.

    If x is a meta tensor and there are more than 64 chunks, only the first two and the last are returned.
    """
    chunks = [(number, first, min(total, first + size)) for number, first in enumerate(range(0, total, size))]
    return [*chunks[:2], chunks[-1]] if x.is_meta and len(chunks) > 64 else chunks


def cdiv(a: int, b: int) -> int:
    """Divide and round up.  triton.cdiv does the same, but takes longer on the host."""
    return -(-a // b)


def power_of_two(n: int, least: int = 16) -> int:
    """Return the smallest power of two that is at least n and `least`."""
    return max(least, 1 << (n - 1).bit_length())


def cast_weight(weight: Tensor, x: Tensor, rows: int) -> Tensor:
    """Return a contiguous weight for a kernel, cast to the dtype of x if many programs read it.

    Kernels can cast a weight as they read it.  But each program reads the whole weight from the L2 cache: 65,536 / 128
    programs read 128 x 520 elements in fp32 each, 136 MB in all, which is more than x and y together.  Casting first
    halves this, and 16-bit weights are copied without passing through registers.
    """
    return (weight.to(x.dtype) if rows >= CAST_ROWS else weight).contiguous()


def fp32_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write the product of two matrices into `out` in fp32, even if the matrices have 16 bits."""
    if left.element_size() == 2 and left.device.type != "cpu" and torch.version.hip is None:
        torch.mm(left, right, out_dtype=torch.float32, out=out)
    else:
        # torch supports fp32 products of 16-bit matrices on NVIDIA GPUs only.
        torch.mm(left.float(), right.float(), out=out)


@triton.jit
def offsets(x: tl.tuple, m: tl.tensor, axes: tl.tuple) -> tl.tensor:
    """Compute the 64-bit offsets of positions m in a `Strided`, in elements."""
    if axes.number == 1:
        offset = m.to(tl.int64) * x.strides[2]
    else:
        above = m // axes.inner
        offset = (m % axes.inner).to(tl.int64) * x.strides[2]
        if axes.number == 2:
            offset += above.to(tl.int64) * x.strides[1]
        else:
            middle, outer = above % axes.middle, above // axes.middle
            offset += middle.to(tl.int64) * x.strides[1] + outer.to(tl.int64) * x.strides[0]
    return offset * x.unit


@triton.jit
def pointers(x: tl.tuple, m: tl.tensor, c: tl.tensor, axes: tl.tuple) -> tl.tensor:
    """Compute pointers to the channels c of positions m, [m, c]."""
    return x.data + (offsets(x, m, axes)[:, None] + (c.to(tl.int64) * x.strides[3])[None, :])


@triton.jit
def span(positions: tl.tensor, BLOCK_M: tl.constexpr) -> tl.tuple:
    """Return the first position of this program's span, and the first after it: a span for each program of axis 1."""
    each = tl.cdiv(tl.cdiv(positions, BLOCK_M), tl.num_programs(1)) * BLOCK_M
    first = tl.program_id(1) * each
    return first, min(positions, first + each)


# Partials of up to ONCE programs are summed in one launch. Partials of more programs are first summed in SPANS spans.
ONCE, SPANS = 1024, 128


class Sum(NamedTuple):
    """Partials [programs, n] in fp32, and the tensors for their sums over programs, n elements together, in order."""

    partials: Tensor
    results: tuple[Tensor, ...]


class Part(NamedTuple):
    """A range of the sums, and the tensor that receives it: index of the first sum, number of sums."""

    data: Tensor
    begin: int
    size: int


class SumJob(NamedTuple):
    """Partials [programs, width] as the kernel's argument, to be summed span by span in tiles.

    begin: the first program of the launch that works on this job.
    blocks: the number of programs of a span.
    rows, columns: the size of a tile, constants.
    """

    partials: Tensor
    parts: tuple[Part, ...]
    programs: int
    width: int
    spans: int
    blocks: int
    begin: int
    rows: Any
    columns: Any


@triton.jit
def _sum_partials(jobs: tl.tuple, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr) -> None:
    """Sum the partials of every job in fp32, in order, into its parts; each of several spans has its own row."""
    for which in tl.static_range(len(jobs)):
        # Constants are no longer constants in `job`, so they are read from `jobs[which]`.
        job = jobs[which]
        program = tl.program_id(0) - job.begin
        if (program >= 0) & (program < job.spans * job.blocks):
            n = (program % job.blocks).to(tl.int64) * jobs[which].columns + tl.arange(0, jobs[which].columns)
            span = program // job.blocks
            each = tl.cdiv(job.programs, job.spans)
            begin = span * each
            end = min(job.programs, begin + each)
            acc = tl.zeros([jobs[which].rows, jobs[which].columns], tl.float32)
            for start in range(begin, end, jobs[which].rows):
                p = start + tl.arange(0, jobs[which].rows)
                valid = (p < end)[:, None] & (n < job.width)[None, :]
                acc += tl.load(job.partials + p[:, None].to(tl.int64) * job.width + n[None, :], mask=valid, other=0)
            sums = tl.sum(acc, 0)
            for i in tl.static_range(len(job.parts)):
                part = job.parts[i]
                at = part.data + (span.to(tl.int64) * part.size + n - part.begin)
                mine = (n >= part.begin) & (n < part.begin + part.size)
                tl.store(at, sums.to(part.data.dtype.element_ty), mask=mine)


SUM = register(
    "sum_partials",
    _sum_partials,
    configs("BLOCK_P BLOCK_N", (64, 64, 4, 1), (32, 128, 4, 1), (128, 32, 4, 1), (256, 16, 4, 1)),
)


def or_unwanted(gradient: Tensor, partials: Tensor, size: int) -> Tensor:
    """Return the gradient of a bias, or scratch memory for its sums if there is no bias."""
    return gradient if gradient.numel() else partials.new_empty(size)


def sum_partials(*sums: Sum) -> None:
    """Sum partials over programs, all in one launch, or in two if some have more than `ONCE` programs."""
    spans, last = [], []
    for partials, results in sums:
        programs, width = partials.shape
        assert width == sum(result.numel() for result in results)
        # Summing so many in sequence would take too long, so spans of them are summed first.
        if programs > ONCE:
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
        # Few programs have wide tiles.
        rows = min(kernel["BLOCK_P"], power_of_two(programs, 1))
        columns = kernel["BLOCK_P"] * kernel["BLOCK_N"] // rows
        tile = tl.constexpr(rows), tl.constexpr(columns)
        # Each span has its own row of every result.
        ends = list(accumulate((result.numel() // spans for result in results), initial=0))
        parts = tuple([Part(result, at, end - at) for result, at, end in zip(results, ends, ends[1:]) if end > at])
        job = SumJob(partials, parts, programs, width, spans, cdiv(width, columns), begin, *tile)
        begin += job.spans * job.blocks
        jobs.append(job)
    kernel.run((begin,), jobs=tuple(jobs))


def empty_partials(x: Tensor, programs: int, width: int) -> Tensor:
    """Allocate partials [programs, width] in fp32."""
    return x.new_empty(programs, width, dtype=torch.float32)
