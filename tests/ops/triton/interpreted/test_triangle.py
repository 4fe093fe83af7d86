"""triangle_multiplication: the Triton kernels, interpreted, against the definition."""

import pytest
import torch

from tests.ops.triton.layouts import exact_bf16, poisoned
from tests.ops.triton.triangle_cases import MULTIPLICATIONS, multiplication_case
from warpfold.check.checks import answer, truth, wrong
from warpfold.ops.dispatch import empty_like
from warpfold.ops.noise import Noise
from warpfold.ops.triangle import triangle_multiplication
from warpfold.ops.triton import positions as sums
from warpfold.ops.triton import triangle as launchers

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few programs that each has several blocks of positions, and so few sums at once that there are two rounds."""
    monkeypatch.setattr(launchers, "PROGRAMS", 2)
    monkeypatch.setattr(sums, "ONCE", 1)
    monkeypatch.setattr(sums, "SPANS", 2)


@pytest.mark.parametrize("name", MULTIPLICATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of what pads rows, where it is dropped
def test_triangle_multiplication(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    given, grad = multiplication_case(name, DTYPES[dtype])
    assert triangle_multiplication.unsupported_reason(*given) is None
    with poisoned(monkeypatch), exact_bf16(monkeypatch):
        fast = answer(triangle_multiplication.fast, given, grad)
    assert not wrong(triangle_multiplication.definition, given, grad, fast)
    assert [t.stride() for t in fast[:2]] == [empty_like(given[0].detach()).stride()] * 2


@pytest.mark.usefixtures("default_tiles")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_in_the_tiles_that_a_gpu_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    given, grad = multiplication_case("incoming, rows that are padded", torch.float16)
    with poisoned(monkeypatch):
        fast = answer(triangle_multiplication.fast, given, grad)
    assert not wrong(triangle_multiplication.definition, given, grad, fast)


@pytest.mark.parametrize("name", ["outgoing", "fused, incoming, in two batches"])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_dropout_is_drawn_on_the_way(name: str) -> None:
    """What the kernels draw is what is drawn ahead, also where leading axes are not one: forward and backward."""
    (*given, _), grad = multiplication_case(name, torch.float16)
    x = given[0]
    noise = Noise()
    noise.seed(1)
    factors = noise.factors((*x.shape[:-3], 1, *x.shape[-2:]), 0.25, 3, x)
    drawn = answer(triangle_multiplication.fast, [*given, factors], grad)
    ahead = answer(triangle_multiplication.fast, [*given, factors.draw()], grad)
    assert all(torch.equal(a, b) for a, b in zip(drawn, ahead))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_nothing_is_kept_where_no_gradient_follows() -> None:
    given, _ = multiplication_case("outgoing", torch.float16)
    plain = triangle_multiplication.fast(*given)
    with torch.no_grad():
        assert torch.equal(triangle_multiplication.fast(*given), plain)


def test_in_fp32_it_is_composed_of_operations() -> None:
    given, grad = multiplication_case("incoming, rows that are padded", torch.float32)
    true = truth(triangle_multiplication.definition, given, grad)
    assert not [e for e in true.errors(answer(triangle_multiplication.fast, given, grad)) if e.red]
