"""gate, gated_linear_residual and triangle_factor on a GPU: Triton kernels against definitions, at true sizes too."""

import pytest
import torch
from torch import Tensor

from tests.ops.triton.gate_cases import FACTORS, GATES, TAILS, factor_case, gate_case, tail_case
from tests.ops.triton.layouts import laid, poisoned, within
from warpfold.check.checks import answer, wrong
from warpfold.ops.dispatch import empty_like
from warpfold.ops.linear import gate, gated_linear_residual
from warpfold.ops.noise import dropout_factors
from warpfold.ops.triangle import triangle_factor

pytestmark = pytest.mark.gpu
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _on_gpu(values: list[Tensor | None], grad: Tensor, dtype: torch.dtype) -> tuple[list[Tensor | None], Tensor]:
    dtypes = (dtype, dtype, dtype, torch.float32, torch.float32, dtype)
    given = [None if v is None else within(v, d, "cuda") for v, d in zip(values, dtypes)]
    if len(given) == 6 and given[5] is not None:
        given[5] = given[5].detach()  # factors have no gradient
    return given, within(grad, dtype, "cuda").detach()


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    given, grad = _on_gpu(*gate_case(name), DTYPES[dtype])
    with poisoned(monkeypatch):
        fast = answer(gate.fast, given, grad)
    assert not wrong(gate.definition, given, grad, fast)
    assert fast[0].stride() == empty_like(given[0].detach()).stride()


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_triangle_factor(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    values, grad = factor_case(name)
    y, g, mask = (within(v, d, "cuda") for v, d in zip(values, (DTYPES[dtype], DTYPES[dtype], torch.float32)))
    mask, grad = mask.detach(), within(grad, DTYPES[dtype], "cuda").detach()
    with poisoned(monkeypatch):
        fast = answer(triangle_factor.fast, [y, g, mask], grad)
    assert not wrong(triangle_factor.definition, [y, g, mask], grad, fast)
    assert fast[0].is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_is_that_of_a_cpu(dtype: str) -> None:
    key = torch.tensor([0xF0E1D2C3, 0xFFFFFFFF + 5 * 0x85EBCA6B])
    for shape, strides, offset in (
        ((1, 250, 128), (32000, 128, 1), 0),
        ((3, 5, 8), (2**33 + 40, 8, 1), 2**40 + 3),
        ((2, 3, 2, 3, 2), (1000, 7, 300, 1, 20), 11),  # axes that cannot be merged
    ):
        draw = (123_000, 0.15, shape, strides, offset, DTYPES[dtype])
        assert torch.equal(dropout_factors.fast(key.cuda(), *draw).cpu(), dropout_factors.definition(key, *draw))


@pytest.mark.parametrize("name", TAILS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tail(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    given, grad = _on_gpu(*tail_case(name), DTYPES[dtype])
    with poisoned(monkeypatch):
        fast = answer(gated_linear_residual.fast, given, grad)
    assert not wrong(gated_linear_residual.definition, given, grad, fast)
    assert fast[0].stride() == empty_like(given[0].detach()).stride()


@pytest.mark.parametrize(("c", "inputs"), [(128, 128), (256, 256), (64, 64)])
@pytest.mark.parametrize("turned", [False, True])
def test_true_sizes(c: int, inputs: int, turned: bool) -> None:
    order, kept = ((1, 0, 2), (250, 1, c)) if turned else (None, (1, 259, c))
    values = [
        laid((250, 259, c), order),
        laid((250, 259, inputs), order),
        laid((250, 259, inputs), order, 3 * inputs + 8),
        laid((c, inputs)) * inputs**-0.5,
        laid((c,)),
        (laid(kept) > -0.5) * 1.25,
    ]
    given, grad = _on_gpu(values, laid((250, 259, c), order), torch.bfloat16)
    fast = answer(gated_linear_residual.fast, given, grad)
    assert not wrong(gated_linear_residual.definition, given, grad, fast)
    assert all(torch.equal(a, b) for a, b in zip(fast, answer(gated_linear_residual.fast, given, grad))), (
        "not the same bit for bit"
    )


def test_past_two_to_the_31_elements() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 40 GB")
    rows = torch.empty(2**24 + 100, 256, dtype=torch.bfloat16, device="cuda").normal_()
    x, g = rows[:, :128], rows[:, 128:]
    weight, bias = torch.eye(128, device="cuda"), torch.ones(128, device="cuda")
    ends = torch.cat([rows[:100], rows[-100:]]).double()
    true = ends[:, :128] * ends[:, 128:].sigmoid()
    with torch.no_grad():
        for got, wanted in (
            (gate.fast(x, g), true),
            (gated_linear_residual.fast(x, x, g, weight, bias), ends[:, :128] + true + 1),
        ):
            found = torch.cat([got[:100], got[-100:]]).double()
            torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-6)
