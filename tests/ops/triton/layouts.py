"""What tests of the kernels of norms and gates share: tensors laid out as the model's are, in buffers of NaN."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

GUARD = 64  # numbers before and after a tensor that nobody may read or write


def laid(shape: Sequence[int], order: Sequence[int] | None = None, pad: int = 0, mean: float = 0.0) -> Tensor:
    """Random numbers in fp64, as `within` will lay them out: axes in memory in this order, the innermost padded."""
    order = range(len(shape)) if order is None else order
    sizes = [shape[axis] for axis in order]
    sizes[-1] += pad
    back = [list(order).index(axis) for axis in range(len(shape))]
    seed = sum(size * 7**axis for axis, size in enumerate(shape)) + pad
    values = torch.randn(sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + mean
    return values[..., : sizes[-1] - pad].permute(back)


def within(values: Tensor, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """The values in another dtype, strides as they are, in a buffer of NaN; a leaf that wants a gradient."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, values.stride()))
    buffer = torch.full((GUARD + span + GUARD,), math.nan, dtype=dtype, device=device)
    t = buffer.as_strided(values.shape, values.stride(), GUARD)
    t.copy_(values)
    return t.detach().requires_grad_()


@contextmanager
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it, new tensors are full of NaN, in larger buffers of NaN which must be so still at the end."""
    buffers: list[tuple[Tensor, int]] = []
    plain = Tensor.new_empty

    def new_empty(self: Tensor, *size: int | Sequence[int], **options: torch.dtype) -> Tensor:
        t = plain(self, *size, **options)
        if not t.is_floating_point() or t.device.type == "meta":
            return t
        count = t.numel()
        buffer = torch.full((GUARD + count + GUARD,), math.nan, dtype=t.dtype, device=t.device)
        buffers.append((buffer, count))
        return buffer[GUARD : GUARD + count].view(t.shape)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "new_empty", new_empty)
        yield
    assert buffers, "no kernel ran"
    for buffer, count in buffers:
        assert buffer[:GUARD].isnan().all(), "written before the beginning of a tensor"
        assert buffer[GUARD + count :].isnan().all(), "written past the end of a tensor"


@contextmanager
def exact_bf16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's interpreter multiplies the raw bits of bf16, and cuts off fp32 to it: within it, as a GPU does."""
    from triton.runtime import interpreter

    builder, tl = interpreter.InterpreterBuilder, interpreter.tl
    dot, cast = builder.create_dot, builder.cast_impl

    def wide(t: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if t.dtype.scalar != tl.bfloat16:
            return t
        return interpreter.TensorHandle((t.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: object, a: object, b: object, *rest: object) -> object:
        return dot(self, wide(a), wide(b), *rest)

    def cast_impl(self: object, source: interpreter.TensorHandle, to: object) -> object:
        if source.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cast(self, source, to)
        bits = np.ascontiguousarray(source.data).view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # ties to even; NaN stays one: its low bits are 0
        return interpreter.TensorHandle(nearest.astype(np.uint16), tl.bfloat16)

    with monkeypatch.context() as patch:
        patch.setattr(builder, "create_dot", create_dot)
        patch.setattr(builder, "cast_impl", cast_impl)
        yield
