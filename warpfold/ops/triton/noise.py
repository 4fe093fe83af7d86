"""Dropout factors on a GPU: the hash of ops/noise.py in 32 bits, drawn in other kernels or in a separate one."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.dispatch import Operands
from warpfold.ops.noise import kept_factor
from warpfold.ops.triton.launch import configs, register
from warpfold.ops.triton.positions import Positions, Strided, cdiv, coalesce, offsets

# These differ between draws, so kernels are not specialised for them.
SCALARS = ["number", "word", "rate", "scale"]


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    """Apply the finaliser after its first shift, on uint32."""
    # The multiplication shall wrap around.
    x = tl.mul(x, 0x7FEB352D, sanitize_overflow=False)
    x = tl.mul(x ^ (x >> 15), 0x846CA68B, sanitize_overflow=False)
    return x ^ (x >> 16)


@triton.jit
def drawn(key: tl.tensor, numbers: tl.tensor, word: tl.tensor, rate: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Compute the dropout factors in fp32 of the elements with these numbers (int64)."""
    first, second = tl.load(key), tl.load(key + 1)
    x = numbers ^ first
    x = _mix((x ^ (x >> 16)).to(tl.uint32))
    shift = tl.add(second.to(tl.uint32), word.to(tl.uint32), sanitize_overflow=False)
    x = tl.add(x, shift, sanitize_overflow=False)
    x = _mix(x ^ (x >> 16))
    uniform = (x >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    return tl.where(uniform >= rate, scale, 0.0)


@triton.jit
def dropout_tile(
    factors: tl.tuple, at: tl.tensor, valid: tl.tensor, key: tl.tensor, number: tl.tensor, word: tl.tensor,
    rate: tl.tensor, scale: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return dropout factors in fp32, loaded at these offsets or, with a key, drawn for the elements number + at."""
    if key is not None:
        return drawn(key, number + at, word, rate, scale)
    else:  # compiled only without a key
        return tl.load(factors.data + at, mask=valid, other=0).to(tl.float32)


@triton.jit(do_not_specialize=SCALARS)
def _keep(
    key: tl.tensor, out: tl.tuple, numbers: tl.tuple, axes: tl.tuple, number: tl.tensor, word: tl.tensor,
    rate: tl.tensor, scale: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store BLOCK factors; number: that of the tensor's first element."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = drawn(key, number + offsets(numbers, i, axes), word, rate, scale)
    tl.store(out.data + offsets(out, i, axes), kept.to(out.data.dtype.element_ty), mask=i < axes.positions)


# The kernel has so little work that one configuration suffices.
KEEP = register("keep", _keep, configs("BLOCK", (1024, 4, 1)))


def scalars(stream: int, rate: float, dtype: torch.dtype) -> tuple[int, float, float]:
    """Return the kernels' arguments word, rate and scale of a draw."""
    word = stream * 0x9E3779B9 & 0xFFFFFFFF
    # The word is signed, so that its type is the same for every stream.
    return word - 2**32 if word >= 2**31 else word, rate, kept_factor(rate, dtype)


def dropout_factors(t: Operands) -> Tensor:
    """Compute warpfold::dropout_factors."""
    out = t.key.new_empty(t.shape, dtype=t.dtype)
    fill(out, t.key, t.offset, t.strides, scalars(t.stream, t.rate, t.dtype))
    return out


def fill(out: Tensor, key: Tensor, number: int, strides: Sequence[int], draw: tuple[int, float, float]) -> None:
    """Draw into `out`, whose first element has this number; draw: the result of `scalars`."""
    coalesced = coalesce(out.shape, out.stride(), strides)
    # More than three axes remain after coalescing.
    if coalesced is None:
        for i in range(len(out)):
            fill(out[i], key, number + i * strides[0], strides[1:], draw)
        return
    kernel = KEEP.tiled((math.prod(out.shape), out.element_size()), out)
    kernel.run(
        (cdiv(coalesced.count, kernel["BLOCK"]),),
        key=key,
        out=Strided.of(out, coalesced.strides[0], 1),
        numbers=Strided.of(None, coalesced.strides[1], 1),
        axes=coalesced.argument,
        number=number,
        **dict(zip(SCALARS[1:], draw)),
    )


class DropoutOperands:
    """Dropout factors as kernel arguments: a tensor, numbers to draw from, or none.

    of: the factors [*, c].  If they are to be drawn, this is a meta tensor with the strides of the element numbers.
    """

    def __init__(self, x: Tensor, t: Operands) -> None:
        self.key, self.number, self.draw = t.key, t.offset, (0, 0.0, 0.0)
        self.of = None if t.factors is None else t.factors.expand(x.shape)
        if t.key is not None:
            self.of = torch.empty_strided(x.shape, tuple(t.strides), device="meta")
            self.draw = scalars(t.stream, t.rate, x.dtype)

    def walked_with(
        self, reads: dict[str, Tensor | None], writes: dict[str, Tensor]
    ) -> tuple[Positions, dict[str, Any]]:
        """Return the positions of these tensors and the factors, and the kernel's arguments for all of them."""
        if self.of is not None and self.key is not None:
            walked = [t for t in (*reads.values(), self.of, *writes.values()) if t is not None]
            if coalesce(self.of.shape[:-1], *(t.stride()[:-1] for t in walked)) is None:
                # Contiguous copies are needed, and meta tensors have no values.
                self.draw_distinct(walked[0])
        p = Positions({**reads, "factors": self.of}, writes)
        if self.key is not None:
            # Only the strides are used. Triton 3.6 cannot tell whether a tuple with None is None, so the key replaces
            # the tensor.
            p.arguments["factors"] = p.arguments["factors"]._replace(data=self.key)
        return p, p.arguments | self.arguments

    def draw_distinct(self, like: Tensor) -> None:
        """Draw the distinct elements into memory, for kernels that cannot number the positions; like: their dtype."""
        assert self.of is not None
        assert self.key is not None
        factors = like.new_empty([1 if stride == 0 else n for n, stride in zip(self.of.shape, self.of.stride())])
        fill(factors, self.key, self.number, self.of.stride(), self.draw)
        self.of, self.key = factors.expand(self.of.shape), None

    @property
    def arguments(self) -> dict[str, Any]:
        """The kernel's arguments besides the factors."""
        return {"key": self.key, "number": self.number, **dict(zip(SCALARS[1:], self.draw))}
