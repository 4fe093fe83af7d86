"""transition and outer_product on a GPU: the Triton kernels against the definitions, at true sizes too."""

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.ops.triton.layouts import laid, poisoned, within
from tests.ops.triton.product_cases import OUTERS, TRANSITIONS, dtypes, outer_case, transition_case
from warpfold.check.checks import answer, wrong
from warpfold.ops.dispatch import empty_like
from warpfold.ops.outer import outer_product
from warpfold.ops.transition import HALVES, transition

pytestmark = pytest.mark.gpu
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _on_gpu(values: list[Tensor | None], first: int, dtype: torch.dtype) -> list[Tensor | None]:
    return [None if v is None else within(v, d, "cuda") for v, d in zip(values, dtypes(values, first, dtype))]


@pytest.mark.parametrize("name", TRANSITIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_transition(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    values, grad, residual, activation = transition_case(name)
    given, grad = _on_gpu(values, 1, DTYPES[dtype]), within(grad, DTYPES[dtype], "cuda").detach()
    options = {"residual": residual, "activation": activation}
    with poisoned(monkeypatch):
        fast = answer(partial(transition.fast, **options), given, grad)
    assert not wrong(partial(transition.definition, **options), given, grad, fast)
    assert given[0] is not None
    assert [t.stride() for t in fast[:2]] == [empty_like(given[0].detach()).stride()] * 2


@pytest.mark.parametrize("name", OUTERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_outer_product(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    values, grad = outer_case(name)
    given, grad = _on_gpu(values, 2, DTYPES[dtype]), within(grad, DTYPES[dtype], "cuda").detach()
    assert given[4] is not None
    given[4] = given[4].detach()
    with poisoned(monkeypatch):
        fast = answer(outer_product.fast, given, grad)
    assert not wrong(outer_product.definition, given, grad, fast)


@pytest.mark.parametrize("activation", HALVES)
@pytest.mark.parametrize("c", [64, 128, 256, 512])
def test_a_transition_of_true_size(c: int, activation: str) -> None:
    """The same bit for bit, too; the hidden layer, four times as large, never exists."""
    u = 4 * c * HALVES[activation]
    values = [laid((130, 131, c)), 1 + 0.1 * laid((c,)), laid((c,)), laid((u, c)) * c**-0.5, laid((u,))]
    given = _on_gpu([*values, laid((c, 4 * c)) * c**-0.5 / 2, laid((c,))], 1, torch.bfloat16)
    grad = within(laid((130, 131, c)), torch.bfloat16, "cuda").detach()
    fast = partial(transition.fast, activation=activation)
    found = answer(fast, given, grad)
    assert not wrong(partial(transition.definition, activation=activation), given, grad, found)
    assert all(torch.equal(a, b) for a, b in zip(found, answer(fast, given, grad))), "not the same bit for bit"
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        fast(*given)
    weights = sum(t.numel() for t in given[1:] if t is not None)
    assert torch.cuda.max_memory_allocated() - before < 2 * (1.1 * 130 * 131 * c + weights)


@pytest.mark.parametrize(("s", "c", "z"), [(100, 32, 128), (300, 32, 256), (40, 64, 128), (70, 8, 64)])
def test_an_outer_product_of_true_size(s: int, c: int, z: int) -> None:
    """The same bit for bit, too; the products never exist."""
    values = [laid((1, s, 100, c)), laid((1, s, 90, c)), laid((z, c * c)) / c, laid((z,))]
    given = [*_on_gpu(values, 2, torch.bfloat16), torch.full((1, 100, 90, 1), s + 1e-3, device="cuda")]
    grad = within(laid((1, 100, 90, z)), torch.bfloat16, "cuda").detach()
    found = answer(outer_product.fast, given, grad)
    assert not wrong(outer_product.definition, given, grad, found)
    assert all(torch.equal(a, b) for a, b in zip(found, answer(outer_product.fast, given, grad)))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        outer_product.fast(*given)
    assert torch.cuda.max_memory_allocated() - before < 2 * (1.2 * 9000 * z + s * 190 * c + z * c * c)
