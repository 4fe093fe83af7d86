"""Dropout noise from a counter-based generator, which is the same however the work is split.

The draw for element i of a tensor is a hash of (key, stream, i).  The key identifies the training step and the pass and
is the same on every rank; the stream identifies the layer.  So slices, ranks, recomputation and devices all see the
same noise (docs/decisions/0003-keyed-noise.md), and no generator state has to be saved or restored.

A draw depends on its number only, so nothing has to be drawn in advance.  Layers pass `DropoutFactors`, which describe
the draws, and the operation that multiplies by them draws them (`ops.linear.gated_linear_residual`).
"""

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from warpfold.ops.dispatch import EMPTY, Expansion, backend, faster_on_cpu, register
from warpfold.ops.torch_internals import without_modes

LOW = 0xFFFFFFFF
# Odd numbers by which streams and passes shift the second word of the key.
OF_STREAM, OF_PASS = 0x9E3779B9, 0x85EBCA6B


def _unsupported(t: Any) -> str | None:
    if backend(t.key) == "triton" and t.dtype == torch.float64:
        return "in fp64 no kernel is exact"
    return EMPTY if 0 in t.shape else None


@register(
    shapes="key [2]",
    empty=lambda t: t.key.new_empty(t.shape, dtype=t.dtype),
    unsupported=_unsupported,
    prefer_definition=lambda t: faster_on_cpu(t.key, math.prod(t.shape), 2**12),
)
def dropout_factors(
    key: Tensor, stream: int, rate: float, shape: Sequence[int], strides: Sequence[int], offset: int, dtype: torch.dtype
) -> Tensor:
    """Draw dropout factors: 0 with probability `rate`, else 1 / (1 - rate).

    key: int64 [2], with 32 significant bits each.  shape, strides, offset: element [a, b, ...] of the result has the
    number offset + a strides[0] + b strides[1] + ..., which determines its draw.
    """
    numbers = torch.full((1,) * len(shape), offset, dtype=torch.int64, device=key.device)
    for axis, (size, stride) in enumerate(zip(shape, strides)):
        along = torch.arange(size, device=key.device) * stride
        numbers = numbers + along.view(size, *(1,) * (len(shape) - 1 - axis))
    x = _mix(numbers ^ key[0])
    x = _mix((x + key[1] + stream * OF_STREAM) & LOW)
    uniform = (x >> 8).float() * 2.0**-24
    return (uniform >= rate).to(dtype) / (1 - rate)


def _mix(x: Tensor) -> Tensor:
    """Mix 32 bits in int64 lanes; shifts and factors: C. Wellons, "Prospecting for Hash Functions", 2018."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & LOW
    x = (x ^ (x >> 15)) * 0x846CA68B & LOW
    return x ^ (x >> 16)


@functools.cache
def kept_factor(rate: float, dtype: torch.dtype) -> float:
    """Return the factor of elements that are not dropped, 1 / (1 - rate), rounded as in the definition."""
    # The cached value must be a number even if the first call is made under fake tensors (cost/fake.py).
    return without_modes(lambda: float(torch.ones((), dtype=dtype, device="cpu") / (1 - rate)))


@dataclass(frozen=True)
class DropoutFactors:
    """Dropout factors of a tensor or a slice that are not drawn yet, with the methods of tensors that layers call.

    shape, strides, offset: the numbers of the elements in the whole tensor, as in `dropout_factors`.
    """

    key: Tensor
    stream: int
    rate: float
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def device(self) -> torch.device:
        """The device of the key, on which the factors are drawn."""
        return self.key.device

    def narrow(self, axis: int, start: int, length: int) -> "DropoutFactors":
        """Return a slice along an axis, like `Tensor.narrow`."""
        axis %= len(self.shape)
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        return replace(self, shape=shape, offset=self.offset + start * self.strides[axis])

    def transpose(self, a: int, b: int) -> "DropoutFactors":
        """Exchange two axes, like `Tensor.transpose`."""
        order = list(range(len(self.shape)))
        order[a], order[b] = order[b], order[a]
        shape, strides = (tuple(t[axis] for axis in order) for t in (self.shape, self.strides))
        return replace(self, shape=shape, strides=strides)

    def draw(self) -> Tensor:
        """Draw the factors."""
        return dropout_factors(self.key, self.stream, self.rate, self.shape, self.strides, self.offset, self.dtype)

    def __rmul__(self, x: Tensor) -> Tensor:
        return x * self.draw()


Factors = Tensor | DropoutFactors


def _split(factors: Factors | None, x: Tensor) -> tuple[Any, ...]:
    """Return the operands for the dropout factors of x: a tensor, the numbers to draw from, or neither for None."""
    if not isinstance(factors, DropoutFactors):
        return factors, None, [], 0, 0, 0.0
    if factors.dtype != x.dtype:
        return factors.draw(), None, [], 0, 0, 0.0
    strides = [0] * (x.dim() - len(factors.shape))
    strides += [0 if size == 1 else stride for size, stride in zip(factors.shape, factors.strides)]
    return None, factors.key, strides, factors.offset, factors.stream, factors.rate


# strides: one per axis of x, 0 where the whole axis shares a draw.
FACTOR_OPERANDS = Expansion(
    {
        "factors": Tensor | None,
        "key": Tensor | None,
        "strides": Sequence[int],
        "offset": int,
        "stream": int,
        "rate": float,
    },
    _split,
)


class Noise(nn.Module):
    """The source of dropout for the layers of one model.  Without a seed it uses torch's generator (ordinary dropout).

    The key is a buffer: it moves with the model, is written without waiting for the device, and a new key recompiles
    no graph.  The buffer is replaced and never overwritten, because a backward pass may still need the old key.  A
    captured CUDA graph has the key of its pass among its inputs.
    In a batch each example has its own key and draws the same as alone; shapes then start with the batch axis.

    words: the key of the first pass [2], or one per example of a batch [examples, 2].
    key: the key of the current pass.
    """

    words: Tensor
    key: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.seeded = False
        self.register_buffer("words", torch.zeros(2, dtype=torch.int64), persistent=False)
        self.register_buffer("key", self.words, persistent=False)

    def seed(self, *parts: int) -> None:
        """Derive the key of the first pass from `parts`, for example (run seed, example)."""
        self._write(torch.empty(2, dtype=torch.int64, device=self.words.device), [parts])

    def seed_batch(self, examples: Sequence[Sequence[int]]) -> None:
        """Derive the key of the first pass for each example of a batch from its parts."""
        self._write(torch.empty(len(examples), 2, dtype=torch.int64, device=self.words.device), examples)

    def _write(self, words: Tensor, examples: Sequence[Sequence[int]]) -> None:
        for row, parts in zip(words.view(-1, 2), examples):
            digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
            # `fill_` passes a number to the device. A copy from the host would wait for the device.
            for i in range(2):
                row[i].fill_(int.from_bytes(digest[4 * i : 4 * i + 4], "little"))
        self.words = self.key = words
        self.seeded = True

    def at_pass(self, index: int) -> None:
        """Derive the keys of a pass through the trunk, so that each pass draws differently."""
        if self.seeded:
            key = self.words.clone()
            key[..., 1].add_(index * OF_PASS)
            self.key = key

    def factors(self, shape: Sequence[int], rate: float, stream: int, like: Tensor) -> Factors:
        """Make dropout factors of `shape` in the dtype of `like`: 0 with probability `rate`, else 1 / (1 - rate)."""
        if not self.seeded:
            is_kept = torch.rand(*shape, device=like.device) >= rate
            return is_kept.to(like.dtype) / (1 - rate)
        if self.key.dim() == 1:
            return _contiguous(self.key, stream, rate, like.dtype, shape)
        if shape[0] not in (1, len(self.key)):
            raise ValueError(f"dropout shape {tuple(shape)} does not start with the batch of {len(self.key)} examples")
        return torch.stack([_contiguous(key, stream, rate, like.dtype, shape[1:]).draw() for key in self.key])


def _contiguous(key: Tensor, stream: int, rate: float, dtype: torch.dtype, shape: Sequence[int]) -> DropoutFactors:
    """Make the dropout factors of a whole tensor, numbered in row-major order."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return DropoutFactors(key, stream, rate, dtype, tuple(shape), tuple(strides))


def dropout(x: Tensor, rate: float, noise: Noise, stream: int, training: bool) -> Tensor:
    """Apply dropout to x at `rate`, with a draw for each element (Supp. 1.11.6)."""
    if not training or rate == 0:
        return x
    return x * noise.factors(x.shape, rate, stream, x)
