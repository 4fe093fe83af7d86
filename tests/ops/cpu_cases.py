"""What the tests of the CPU's fast ways share: layouts, and a way against its definition in fp64."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from warpfold.check.checks import answer, wrong

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "in order": lambda t: t,
    "turned": lambda t: t.transpose(-3, -2).contiguous().transpose(-3, -2),
    "channels in front": lambda t: t.movedim(-1, -3).contiguous().movedim(-3, -1),
    "a slice of columns": lambda t: torch.cat([t, t], -2)[..., t.shape[-2] :, :],
    "a slice of channels": lambda t: torch.cat([t, t], -1)[..., t.shape[-1] :],
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def given(*shapes: Sequence[int], seed: int = 0) -> list[Tensor]:
    """Random tensors in fp64."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def mistakes(
    op: Any, arguments: Sequence[Tensor | None], parameters: int, dtype: torch.dtype, **fixed: object
) -> list[str]:
    """What is wrong (check/checks.py) with the output of the fast way, or with a gradient.

    The last `parameters` arguments stay in fp32 where the others are in bf16.
    """
    keep = torch.float64 if dtype == torch.float64 else torch.float32
    first = len(arguments) - parameters
    dtypes = [dtype] * first + [keep] * parameters
    leaves = [None if t is None else t.detach().to(d).requires_grad_() for t, d in zip(arguments, dtypes)]
    definition, fast = partial(op.definition, **fixed), partial(op.fast, **fixed)
    grad = given(definition(*leaves).shape, seed=1)[0].to(dtype)
    return wrong(definition, leaves, grad, answer(fast, leaves, grad))


class Largest(TorchDispatchMode):
    """Notes how many elements the largest storage has that any torch operation returns, views of `inputs` apart."""

    elements = 0

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self._inputs = {t.untyped_storage().data_ptr() for t in inputs}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = function(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in self._inputs:
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return out
