"""A step of Adam: the kernel against its definition, what is not used, and what lies behind the buffers."""

import math

import pytest
import torch

from tests.ops.adam_cases import FACTORS, buffers, numbers, taken, wrong
from tests.ops.triton.layouts import exact_bf16
from warpfold.ops.adam import adam_step


@pytest.mark.parametrize("steps", [1, 5, 499, 501, 100_000])
@pytest.mark.parametrize("packed", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factors", [FACTORS, (0.0, 0.0, 1e-6, 0.0)])
def test_the_kernel_is_the_definition(
    monkeypatch: pytest.MonkeyPatch, packed: torch.dtype | None, steps: int, factors: tuple[float, ...]
) -> None:
    given, of = buffers(2500, packed), numbers(steps=steps)
    assert adam_step.unsupported_reason(*given, *of, *factors) is None
    with exact_bf16(monkeypatch):
        ours = taken(adam_step.fast, given, of, factors)
    assert not wrong(ours, given, of, factors)


def test_a_step_that_is_not_used_changes_nothing() -> None:
    given = buffers(50, torch.bfloat16)
    assert given[1] is not None
    given[1][3] = math.nan
    after = taken(adam_step.fast, given, numbers(used=False))
    before = [t for i, t in enumerate(given) if t is not None and i != 1]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_nothing_is_written_behind_the_buffers(default_tiles: None) -> None:
    whole = [torch.full((2000,), 0.5) for _ in range(5)]
    adam_step.fast(*(t[:1500] for t in whole), None, *numbers(), *FACTORS)
    assert all(torch.equal(t[1500:], torch.full((500,), 0.5)) for t in whole)
    assert not torch.equal(whole[0][:1500], whole[0][1500:].repeat(3))


def test_fp64_is_refused() -> None:
    given = buffers(10, None, torch.float64)
    assert adam_step.unsupported_reason(*given, *numbers(), *FACTORS) == "in fp64 no kernel is exact"
