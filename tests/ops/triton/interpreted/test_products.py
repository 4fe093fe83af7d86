"""transition and outer_product: the Triton kernels, interpreted, against the definitions."""

from functools import partial

import pytest
import torch

from tests.ops.triton.layouts import exact_bf16, poisoned, within
from tests.ops.triton.product_cases import OUTERS, TRANSITIONS, dtypes, outer_case, transition_case
from warpfold.check.checks import answer, wrong
from warpfold.ops.dispatch import empty_like
from warpfold.ops.outer import outer_product
from warpfold.ops.transition import transition
from warpfold.ops.triton import outer as outer_launcher
from warpfold.ops.triton import positions as sums
from warpfold.ops.triton import transition as transition_launcher

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few programs that each has several blocks of positions, and so few sums at once that there are two rounds."""
    monkeypatch.setattr(transition_launcher, "TILES", 2)
    monkeypatch.setattr(outer_launcher, "TILES", 2)
    monkeypatch.setattr(sums, "ONCE", 1)
    monkeypatch.setattr(sums, "SPANS", 2)


def _mistakes_of_transition(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> list[str]:
    """Say what is wrong with the result, with a gradient, or with how they lie in memory."""
    values, grad, residual, activation = transition_case(name)
    given = [None if v is None else within(v, d) for v, d in zip(values, dtypes(values, 1, DTYPES[dtype]))]
    grad = within(grad, DTYPES[dtype]).detach()
    options = {"residual": residual, "activation": activation}
    assert transition.unsupported_reason(*given, **options) is None
    with poisoned(monkeypatch), exact_bf16(monkeypatch):
        fast = answer(partial(transition.fast, **options), given, grad)
    assert given[0] is not None
    right = empty_like(given[0].detach()).stride()
    strides = [f"strides {t.stride()}, not {right}" for t in fast[:2] if t.stride() != right]
    return strides + wrong(partial(transition.definition, **options), given, grad, fast)


@pytest.mark.parametrize("name", TRANSITIONS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_transition(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    assert not _mistakes_of_transition(monkeypatch, name, dtype)


@pytest.mark.usefixtures("default_tiles")
def test_transition_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _mistakes_of_transition(monkeypatch, "24, turned", "bf16")


def _mistakes_of_outer(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> list[str]:
    values, grad = outer_case(name)
    given = [None if v is None else within(v, d) for v, d in zip(values, dtypes(values, 2, DTYPES[dtype]))]
    assert given[4] is not None
    given[4] = given[4].detach()
    grad = within(grad, DTYPES[dtype]).detach()
    assert outer_product.unsupported_reason(*given) is None
    options = {"bias_divided": "added last" not in name}
    with poisoned(monkeypatch), exact_bf16(monkeypatch):
        fast = answer(partial(outer_product.fast, **options), given, grad)
    return wrong(partial(outer_product.definition, **options), given, grad, fast)


@pytest.mark.parametrize("name", OUTERS)
def test_outer_product(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert not _mistakes_of_outer(monkeypatch, name, "fp32")


@pytest.mark.parametrize("name", ["as the model's", "many outputs", "odd, added last"])
def test_outer_product_in_16_bits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert not _mistakes_of_outer(monkeypatch, name, "fp16")


@pytest.mark.usefixtures("default_tiles")
def test_outer_product_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _mistakes_of_outer(monkeypatch, "odd", "bf16")


def test_what_the_kernels_do_not_serve_is_refused() -> None:
    a, count = torch.ones(1, 2, 3, 65), torch.ones(1, 3, 3, 1)
    reason = outer_product.unsupported_reason(a, a, torch.ones(4, 65 * 65), None, count)
    assert reason == "factors of 65 channels (kernels are for 64 at most)"
    x, row, matrix = torch.ones(2, 513), torch.ones(513), torch.ones(513, 513)
    reason = transition.unsupported_reason(x, row, row, matrix, row, matrix, row)
    assert reason == "513 channels (kernels are for 512 at most)"
    x, row, matrix = torch.ones(2, 384), torch.ones(384), torch.ones(384, 384)
    given = x, row, None, torch.cat([matrix, matrix]), None, matrix, None
    assert transition.unsupported_reason(*given, activation="swiglu") is None
    reason = transition.unsupported_reason(x.half(), *given[1:], activation="swiglu")
    assert reason == "384 channels, SwiGLU (kernels are for 256 at most)"
