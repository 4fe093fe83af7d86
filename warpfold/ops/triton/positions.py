"""Tensors of the same positions, each with strides of its own: how kernels are given them and find a number in them.

A kernel counts positions in one sequence, in the order in which they lie in memory in the first of its tensors, and
divides the count into at most three axes: all that is left once axes that are one in every tensor are coalesced.  So
transposed and padded views are read where they lie.

Sums over the programs of a kernel, in a fixed order: what kernels do here instead of atomic additions.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from warpfold.errors import UserError
from warpfold.ops.triton.launch import configs, register

MAX_AXES = 3
CAST_ROWS = 4096  # positions, from which on weights are cast before a kernel
MOST = 2**30  # positions, counted in 32 bits; where they begin is counted in 64


class Strided(NamedTuple):
    """A tensor as a kernel is given it.

    strides: those of the axes that the kernel walks, divided by `unit`, a constant for the compiler: a kernel that
    knows what divides every stride reads in wide words.  Triton itself asks of a number only whether 16 divides it, and
    the rows of a projection are 520 apart.  For positions these are the outer, middle and inner axis; the stride of the
    channels follows, not divided.
    """

    data: Tensor | None
    strides: tuple[int, ...]
    unit: Any

    @staticmethod
    def of(t: Tensor | None, strides: Sequence[int], most: int, *rest: int) -> "Strided":
        """Divide the strides by their greatest common divisor with `most`; rest: strides that follow as they are."""
        unit = math.gcd(most, *strides)
        return Strided(t, (*(s // unit for s in strides), *rest), tl.constexpr(unit))


def strided_by_length(t: Tensor | None, strides: Sequence[int]) -> Strided:
    """Return a tensor whose rows are as long as the protein, as a kernel is given it: divided by what divides them all.

    Strides that 16 divides are not divided, because Triton specialises for these itself.  Their sixteenths would be
    multiples of 16 for some lengths and not for others, and each kind would be compiled.
    """
    return Strided.of(t, strides, 8 if math.gcd(16, *strides) < 16 else 1)


class Axes(NamedTuple):
    """The axes of positions as a kernel is given them: all positions, sizes of the middle and the inner axis."""

    positions: int
    middle: int
    inner: int
    number: Any  # of axes, a constant


@dataclass(frozen=True)
class Coalesced:
    """Axes that are left, and for each tensor its strides along the outer, the middle and the inner one."""

    count: int
    axes: int
    sizes: tuple[int, int]
    strides: tuple[tuple[int, int, int], ...]

    @property
    def argument(self) -> Axes:
        """The axes, for a kernel."""
        return Axes(self.count, *self.sizes, tl.constexpr(self.axes))


def coalesce(shape: Sequence[int], *strides: Sequence[int]) -> Coalesced | None:
    """Coalesce axes of this shape, in tensors of these strides; None if more than three are left.

    Errors: UserError for more positions than the kernels count.
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
        raise UserError(f"{count} positions of a tensor are more than the kernels count (2^30); cut it along an axis")
    if len(merged) > MAX_AXES:
        return None
    padded = [(1, [0] * len(strides))] * (MAX_AXES - len(merged)) + merged
    (_, outer), (middle_size, middle), (inner_size, inner) = padded
    return Coalesced(count, max(len(merged), 1), (middle_size, inner_size), tuple(zip(outer, middle, inner)))


class Positions:
    """Tensors [*, c] that a kernel reads and writes position by position, by the names of its arguments.

        p = Positions({"x": x, "g": g}, writes={"y": out})
        kernel.run((triton.cdiv(p.count, kernel["BLOCK_M"]),), **p.arguments, C=c)
        p.copy_back()

    arguments: each tensor, `Strided`, and "axes"; a tensor that is None stays None.
    """

    def __init__(self, reads: Mapping[str, Tensor | None], writes: Mapping[str, Tensor]) -> None:
        found = _found(reads, writes)
        self._wanted, self._written = writes, dict(writes)
        if found is None:  # copy everything to row-major order, which is one axis; `copy_back` copies the results
            reads = {name: None if t is None else t.contiguous() for name, t in reads.items()}
            self._written = {n: t if t.is_contiguous() else t.new_empty(t.shape) for n, t in writes.items()}
            found = _found(reads, self._written)
            assert found is not None
        self.count, axes, layouts = found
        self.arguments: dict[str, Any] = {**reads, **self._written, "axes": axes}
        of_tensors = iter(layouts)
        for name, t in self.arguments.items():
            if isinstance(t, Tensor):
                self.arguments[name] = Strided(t, *next(of_tensors))

    def writes_in_place(self, name: str) -> bool:
        """Return whether the kernel writes this tensor itself, so that `copy_back` need not copy it."""
        return self._written[name] is self._wanted[name]

    def copy_back(self) -> None:
        """Copy the results that were written to other memory."""
        for name, t in self._written.items():
            if not self.writes_in_place(name):
                self._wanted[name].copy_(t)


Layout = tuple[tuple[int, ...], Any]  # of a `Strided`: strides and unit


def _found(
    reads: Mapping[str, Tensor | None], writes: Mapping[str, Tensor]
) -> tuple[int, Axes, tuple[Layout, ...]] | None:
    given = [t for t in (*reads.values(), *writes.values()) if t is not None]
    return _layouts(given[0].shape, tuple([t.stride() for t in given]))


@functools.lru_cache(maxsize=4096)  # models have few shapes, and looking one up takes a tenth of working it out
def _layouts(
    shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...]
) -> tuple[int, Axes, tuple[Layout, ...]] | None:
    """Return how many positions tensors [*, c] of these strides have, and axes and layouts for a kernel.

    None where too many axes are left.  Errors: as `coalesce`.
    """
    found = coalesce(shape[:-1], *(each[:-1] for each in strides))
    if found is None:
        return None
    laid = (Strided.of(None, own, 8, each[-1]) for own, each in zip(found.strides, strides))
    return found.count, found.argument, tuple((one.strides, one.unit) for one in laid)


def channels_last(t: Tensor) -> Tensor:
    """Return t [*, c] with the channels of a position side by side: as it is, or a copy."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def contiguous(t: Tensor | None) -> Tensor | None:
    """Return t in order, if there is one."""
    return None if t is None else t.contiguous()


def programs_for(total: int, block: int, most: int) -> int:
    """Return how many programs share the blocks of `total`: one for each, or, where that is too many, for several.

    It depends on shapes alone, and so does the order of every sum.
    """
    blocks = -(-total // block)
    each = -(-blocks // most)
    return -(-blocks // each)


def chunks_of(total: int, size: int, x: Tensor) -> list[tuple[int, int, int]]:
    """Return number, begin and end of each chunk of `total`.

    Where tensors have no memory ("meta") and there are many chunks, the first two and the last stand for all of them.
    """
    chunks = [(number, first, min(total, first + size)) for number, first in enumerate(range(0, total, size))]
    return [*chunks[:2], chunks[-1]] if x.is_meta and len(chunks) > 64 else chunks


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up: as triton.cdiv, which takes longer than what it is asked for by."""
    return -(-a // b)


def power_of_two(n: int, least: int = 16) -> int:
    """Return the smallest power of two that is at least n and at least `least`."""
    return max(least, 1 << (n - 1).bit_length())


def cast_weight(weight: Tensor, x: Tensor, rows: int) -> Tensor:
    """Return a weight as the kernels take it, in order; in the dtype of x where many programs read it.

    They cast it as they read it.  But each reads all of it, from the second cache: of 128 x 520 numbers in fp32, by
    65,536 / 128 programs, 136 MB, more than x and y together.  Cast before, half, and copied past the registers.
    """
    return (weight.to(x.dtype) if rows >= CAST_ROWS else weight).contiguous()


def fp32_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write the product of two matrices into `out`, in fp32 also where they have 16 bits."""
    if left.element_size() == 2 and left.device.type != "cpu" and torch.version.hip is None:
        torch.mm(left, right, out_dtype=torch.float32, out=out)
    else:
        # torch multiplies 16 bits into fp32 on NVIDIA's GPUs alone.
        torch.mm(left.float(), right.float(), out=out)


@triton.jit
def offsets(x: tl.tuple, m: tl.tensor, axes: tl.tuple) -> tl.tensor:
    """Return where positions m begin in a `Strided`: elements, in 64 bits."""
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
    """Return pointers to the channels c of positions m, [m, c]."""
    return x.data + (offsets(x, m, axes)[:, None] + (c.to(tl.int64) * x.strides[3])[None, :])


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
    """Partials [programs, width] as the kernel is given them, to be summed span by span, a tile at a time.

    begin: the first program of the launch that works on it; blocks: programs of a span; rows, columns: of a tile,
    constants.
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
    """Sum the partials of every job in fp32 into its parts, one after another; of several spans each has its own."""
    for which in tl.static_range(len(jobs)):
        job = jobs[which]  # in which constants are none any more
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
        rows = min(kernel["BLOCK_P"], power_of_two(programs, 1))  # few programs have wide tiles
        columns = kernel["BLOCK_P"] * kernel["BLOCK_N"] // rows
        tile = tl.constexpr(rows), tl.constexpr(columns)
        job = SumJob(partials, _parts(results, spans), programs, width, spans, cdiv(width, columns), begin, *tile)
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
