"""Flat buffers to take a step of Adam with, and how far a way to take it may be from the definition."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from warpfold.check.checks import DRAWS, Jitter, compare
from warpfold.ops.adam import adam_step

FACTORS = (0.9, 0.999, 1e-6, 0.99)  # beta1, beta2, eps, decay
NAMES = ("weights", "moment1", "moment2", "average", "packed")


def buffers(n: int, packed: torch.dtype | None, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    """Return weights, gradient, moments, average and packed copy in the middle of a run."""
    draw = torch.Generator().manual_seed(n)
    weights, gradient, moment1, moment2, average = (torch.randn(n, generator=draw).to(dtype) for _ in range(5))
    copy = None if packed is None else weights.to(packed)
    return [weights, gradient, moment1 * 0.1, moment2.square() * 0.01, average, copy]


def numbers(used: bool = True, scale: float = 0.25, rate: float = 1e-2, steps: int = 3) -> tuple[Tensor, ...]:
    """Return the operands that are numbers on the device."""
    return torch.tensor(used), torch.tensor(scale), torch.tensor(rate), torch.tensor(float(steps))


def taken(
    way: Callable[..., None],
    given: Sequence[Tensor | None],
    of: Sequence[Tensor],
    factors: Sequence[float] = FACTORS,
) -> list[Tensor]:
    """Return what is changed: weights, moments, average and packed copy."""
    own = [None if t is None else t.clone() for t in given]
    way(*own, *of, *factors)
    return [t for i, t in enumerate(own) if t is not None and i != 1]


def wrong(
    ours: Sequence[Tensor], given: Sequence[Tensor | None], of: Sequence[Tensor], factors: Sequence[float] = FACTORS
) -> list[str]:
    """Say which results are farther from fp64 than draws of the definition allow (check/checks.py)."""
    exact = taken(adam_step.definition, [None if t is None else t.double() for t in given], of, factors)
    draws = []
    for seed in range(DRAWS):
        with Jitter(seed):
            draws.append(taken(adam_step.definition, given, of, factors))
    found = []
    for i, (x, right) in enumerate(zip(ours, exact, strict=True)):
        off = [(float((d[i] - right).norm()), float((d[i] - right).abs().max())) for d in draws]
        found.append(compare(NAMES[i], x, right, off, draws[0][i].dtype))
    return [str(error) for error in found if error.red]
