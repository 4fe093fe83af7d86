"""A step of Adam on flat buffers equals the definition on a CPU, and an unused step changes nothing."""

import math
from collections.abc import Callable, Sequence

import pytest
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
    """Return the scalar operands on the device."""
    return torch.tensor(used), torch.tensor(scale), torch.tensor(rate), torch.tensor(float(steps))


def taken(
    way: Callable[..., None],
    given: Sequence[Tensor | None],
    of: Sequence[Tensor],
    factors: Sequence[float] = FACTORS,
) -> list[Tensor]:
    """Return the tensors that a step changes: weights, moments, average and packed copy."""
    own = [None if t is None else t.clone() for t in given]
    way(*own, *of, *factors)
    return [t for i, t in enumerate(own) if t is not None and i != 1]


def wrong(
    ours: Sequence[Tensor], given: Sequence[Tensor | None], of: Sequence[Tensor], factors: Sequence[float] = FACTORS
) -> list[str]:
    """List results with a larger error against fp64 than the definition's (check/checks.py)."""
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


WAYS = {"fast": adam_step.fast, "definition": adam_step.definition}


@pytest.mark.parametrize("steps", [1, 3, 100_000])
@pytest.mark.parametrize("packed", [None, torch.bfloat16, torch.float16, torch.float32])
def test_the_fast_way_is_the_definition(packed: torch.dtype | None, steps: int) -> None:
    given, of = buffers(1000, packed), numbers(steps=steps)
    assert adam_step.unsupported_reason(*given, *of, *FACTORS) is None
    assert not wrong(taken(adam_step.fast, given, of), given, of)


def test_in_fp64_too() -> None:
    given, of = buffers(100, None, torch.float64), [t if t.dtype == torch.bool else t.double() for t in numbers()]
    for ours, right in zip(taken(adam_step.fast, given, of), taken(adam_step.definition, given, of), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("poison", [1.0, math.nan, math.inf])
def test_a_step_that_is_not_used_changes_nothing(way: str, poison: float) -> None:
    given = buffers(50, torch.bfloat16)
    assert given[1] is not None
    given[1][3] = poison
    for scale in (0.5, math.nan):
        after = taken(WAYS[way], given, numbers(used=False, scale=scale))
        before = [t for i, t in enumerate(given) if t is not None and i != 1]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_the_packed_copy_is_the_new_weights_rounded(way: str) -> None:
    weights, *_, packed = taken(WAYS[way], buffers(50, torch.bfloat16), numbers())
    assert torch.equal(packed, weights.bfloat16())


def test_torch_finds_the_schema_in_order() -> None:
    for packed in (None, torch.bfloat16):
        given = (*buffers(10, packed), *numbers(), *FACTORS)
        checked = torch.library.opcheck(torch.ops.warpfold.adam_step.default, given)
        assert set(checked.values()) == {"SUCCESS"}


def test_buffers_of_other_lengths_are_refused() -> None:
    given, of = buffers(10, None), numbers()
    assert given[4] is not None
    given[4] = given[4][:9]
    wrong = r"adam_step: average is \[9\], not \[n\] = \[10\], as weights is \[10\]"
    for way in (adam_step, adam_step.fast):
        with pytest.raises(ValueError, match=wrong):
            way(*given, *of, *FACTORS)
