"""Where a kernel finds the numbers of a position: tensors of the same positions, each with strides of its own.

A kernel counts positions in one sequence, in the order in which they lie in memory in the first of its tensors, and
divides the count into at most three axes: all that is left once axes that are one in every tensor are merged.  So
transposed and padded views are read where they lie.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from warpfold.errors import UserError

AXES = 3
CAST_ROWS = 4096  # positions, from which on weights are cast before a kernel
MOST = 2**30  # positions, counted in 32 bits; where they begin is counted in 64
Strides = tuple[int, int, int]
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Positions:
    """count of positions; sizes of the middle and the inner axis; of each tensor its strides, outer axis first."""

    count: int
    axes: int
    sizes: tuple[int, int]
    strides: tuple[Strides, ...]

    def unit(self, *tensors: int) -> int:
        """What divides every stride of these tensors, 8 at most: a kernel that knows it reads in wide words.

        Triton itself asks of a number only whether 16 divides it, and the rows of a projection are 520 apart.
        """
        return math.gcd(8, *(stride for i in tensors for stride in self.strides[i]))

    def of(self, tensor: int, t: Tensor, unit: int = 1) -> tuple[int, int, int, int]:
        """The strides of tensor t, which is this one of those walked: of positions, in units; and of channels."""
        outer, middle, inner = self.strides[tensor]
        return outer // unit, middle // unit, inner // unit, t.stride(-1)


def positions(shape: Sequence[int], *strides: Sequence[int]) -> Positions | None:
    """How to walk axes of this shape, in tensors of these strides; None if more than three cannot be merged.

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
    if len(merged) > AXES:
        return None
    padded = [(1, [0] * len(strides))] * (AXES - len(merged)) + merged
    (_, outer), (middle_size, middle), (inner_size, inner) = padded
    return Positions(count, max(len(merged), 1), (middle_size, inner_size), tuple(zip(outer, middle, inner)))


def walk(inputs: Tensors, outputs: Tensors) -> tuple[Positions, Tensors, Tensors]:
    """How to walk the positions of tensors [*, c], these inputs and these outputs.

    They are the tensors given; or, where their positions together have more than three axes, copies in order of the
    inputs, and empty tensors in order for the outputs: `deliver` then copies those.
    """
    shape = inputs[0].shape[:-1]
    found = positions(shape, *(t.stride()[:-1] for t in inputs + outputs))
    if found is None:
        inputs = tuple(t.contiguous() for t in inputs)
        outputs = tuple(t if t.is_contiguous() else t.new_empty(t.shape) for t in outputs)
        found = positions(shape, *(t.stride()[:-1] for t in inputs + outputs))
    assert found is not None, "tensors in order have one axis"
    return found, inputs, outputs


def deliver(outputs: Tensors, written: Tensors) -> None:
    """Copy what was written elsewhere."""
    for output, t in zip(outputs, written):
        if t is not output:
            output.copy_(t)


def channels_last(t: Tensor) -> Tensor:
    """t [*, c] with the channels of a position side by side: as it is, or a copy."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def cuts(total: int, size: int, most: int) -> int:
    """Into how many programs blocks of `size` out of `total` go: one each, or, where that is too many, several each.

    It depends on shapes alone, and so does the order of every sum.
    """
    blocks = -(-total // size)
    each = -(-blocks // most)
    return -(-blocks // each)


def power(n: int, least: int = 16) -> int:
    """The power of two that holds n, of `least` at least."""
    return max(least, 1 << (n - 1).bit_length())


def operand(weight: Tensor, x: Tensor, rows: int) -> Tensor:
    """A weight as the kernels take it, in order; in the dtype of x where many programs read it.

    They cast it as they read it.  But each reads all of it, from the second cache: of 128 x 520 numbers in fp32, by
    65,536 / 128 programs, 136 MB, more than x and y together.  Cast before, half, and copied past the registers.
    """
    return (weight.to(x.dtype) if rows >= CAST_ROWS else weight).contiguous()


@triton.jit
def offsets(at: tl.tensor, sizes: tl.tuple, strides: tl.tuple, AXES: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """Where positions `at` begin in a tensor: elements, in 64 bits.

    sizes of the middle and the inner axis; strides outer to inner, in units.
    """
    if AXES == 1:
        place = at.to(tl.int64) * strides[2]
    else:
        middle, inner = sizes
        above = at // inner
        place = (at % inner).to(tl.int64) * strides[2]
        if AXES == 2:
            place += above.to(tl.int64) * strides[1]
        else:
            place += (above % middle).to(tl.int64) * strides[1] + (above // middle).to(tl.int64) * strides[0]
    return place * UNIT


@triton.jit
def tile(
    m: tl.tensor, c: tl.tensor, sizes: tl.tuple, strides: tl.tuple, AXES: tl.constexpr, UNIT: tl.constexpr
) -> tl.tensor:
    """Where channels c of positions m are, [m, c].  The fourth of the strides is that of channels, not in units."""
    return offsets(m, sizes, strides, AXES, UNIT)[:, None] + (c.to(tl.int64) * strides[3])[None, :]
