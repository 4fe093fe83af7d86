"""layer_norm and norm_linear on a GPU: the Triton kernels against the definitions, at true sizes too."""

import pytest
import torch
from torch import Tensor

from tests.ops.triton.layouts import laid, poisoned, within
from tests.ops.triton.norm_cases import LINEARS, NORMS, linear_case, norm_case, of_dtype
from warpfold.check.checks import answer, wrong
from warpfold.ops.dispatch import empty_like
from warpfold.ops.linear import empty_projected, layer_norm, norm_linear

pytestmark = pytest.mark.gpu
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _on_gpu(values: list[Tensor | None], grad: Tensor, dtype: torch.dtype) -> tuple[list[Tensor | None], Tensor]:
    given = [None if v is None else within(v, d, "cuda") for v, d in zip(values, of_dtype(values, dtype))]
    return given, within(grad, dtype, "cuda").detach()


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    given, grad = _on_gpu(*norm_case(name), DTYPES[dtype])
    with poisoned(monkeypatch):
        fast = answer(layer_norm.fast, given, grad)
    assert not wrong(layer_norm.definition, given, grad, fast)
    assert fast[0].stride() == empty_like(given[0].detach()).stride()


@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_linear(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    given, grad = _on_gpu(*linear_case(name), DTYPES[dtype])
    with poisoned(monkeypatch):
        fast = answer(norm_linear.fast, given, grad)
    assert not wrong(norm_linear.definition, given, grad, fast)
    assert fast[0].stride() == empty_projected(given[0].detach(), fast[0].shape[-1]).stride()


@pytest.mark.parametrize(("c", "outputs"), [(128, 520), (256, 1024), (64, 260), (128, 4)])
@pytest.mark.parametrize("turned", [False, True])
def test_true_sizes(c: int, outputs: int, turned: bool) -> None:
    order = (1, 0, 2) if turned else None
    values = [
        laid((250, 259, c), order),
        1 + 0.1 * laid((c,)),
        laid((c,)),
        laid((outputs, c)) * c**-0.5,
        laid((outputs,)),
    ]
    given, grad = _on_gpu(values, laid((250, 259, outputs)), torch.bfloat16)
    fast = answer(norm_linear.fast, given, grad)
    assert not wrong(norm_linear.definition, given, grad, fast)
    again = answer(norm_linear.fast, given, grad)
    assert all(torch.equal(a, b) for a, b in zip(fast, again)), "not the same bit for bit"


@pytest.mark.parametrize("c", [128, 256, 1024])
def test_layer_norm_repeats_bit_for_bit(c: int) -> None:
    given, grad = _on_gpu([laid((250, 259, c)), laid((c,)), laid((c,), pad=1)], laid((250, 259, c)), torch.bfloat16)
    fast = answer(layer_norm.fast, given, grad)
    assert not wrong(layer_norm.definition, given, grad, fast)
    assert all(torch.equal(a, b) for a, b in zip(fast, answer(layer_norm.fast, given, grad)))


@pytest.mark.parametrize("name", ["128", "200", "1024"])
def test_channels_around_ten_thousand(name: str) -> None:
    given, grad = _on_gpu(*norm_case(name, mean=1e4), torch.float32)
    fast = answer(layer_norm.fast, given, grad)
    assert not wrong(layer_norm.definition, given, grad, fast)


def test_past_two_to_the_31_elements() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 40 GB")
    x = torch.empty(2**24 + 100, 130, dtype=torch.bfloat16, device="cuda")[:, :128].normal_()
    weight, bias = torch.ones(128, device="cuda"), torch.zeros(128, device="cuda")
    matrix = torch.eye(8, 128, device="cuda")
    with torch.no_grad():
        y, z = layer_norm.fast(x, weight, bias), norm_linear.fast(x, weight, bias, matrix)
        ends = torch.cat([x[:100], x[-100:]])
        true = layer_norm.definition(ends.double(), weight.double(), bias.double())
    for got, wanted in ((y, true), (z, true[:, :8])):
        found = torch.cat([got[:100], got[-100:]]).double()
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-7)
