"""layer_norm and norm_linear: the Triton kernels, interpreted, against the definitions."""

import pytest
import torch

from tests.ops.triton.layouts import exact_bf16, laid, poisoned, within
from tests.ops.triton.norm_cases import LINEARS, NORMS, linear_case, norm_case, of_dtype
from warpfold.check.checks import answer, wrong
from warpfold.ops.dispatch import empty_like
from warpfold.ops.linear import empty_projected, layer_norm, norm_linear
from warpfold.ops.triton import linear as launchers
from warpfold.ops.triton import positions as sums

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few programs that each has several blocks of positions, and so few sums at once that there are two rounds."""
    monkeypatch.setattr(launchers, "TILES", 2)
    monkeypatch.setattr(launchers, "PROGRAMS", 2)
    monkeypatch.setattr(sums, "ONCE", 1)
    monkeypatch.setattr(sums, "SPANS", 2)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    values, grad = norm_case(name)
    arguments = [None if v is None else within(v, d) for v, d in zip(values, of_dtype(values, DTYPES[dtype]))]
    grad = within(grad, DTYPES[dtype]).detach()
    assert layer_norm.unsupported_reason(*arguments) is None
    with poisoned(monkeypatch), exact_bf16(monkeypatch):
        fast = answer(layer_norm.fast, arguments, grad)
    assert not wrong(layer_norm.definition, arguments, grad, fast)
    x = arguments[0].detach()
    assert [t.stride() for t in fast[:2]] == [empty_like(x).stride()] * 2


@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_norm_linear(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    values, grad = linear_case(name)
    given = [None if v is None else within(v, d) for v, d in zip(values, of_dtype(values, DTYPES[dtype]))]
    grad = within(grad, DTYPES[dtype]).detach()
    assert norm_linear.unsupported_reason(*given) is None
    with poisoned(monkeypatch):
        fast = answer(norm_linear.fast, given, grad)
    assert not wrong(norm_linear.definition, given, grad, fast)
    x = given[0].detach()
    assert fast[0].stride() == empty_projected(x, fast[0].shape[-1]).stride()
    assert fast[1].stride() == empty_like(x).stride()


@pytest.mark.parametrize("name", ["128 to 132", "200 to 130", "384 to 100"])
@pytest.mark.usefixtures("default_tiles")
def test_norm_linear_in_bf16(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    values, grad = linear_case(name)
    given = [None if v is None else within(v, d) for v, d in zip(values, of_dtype(values, torch.bfloat16))]
    grad = within(grad, torch.bfloat16).detach()
    with poisoned(monkeypatch), exact_bf16(monkeypatch):
        fast = answer(norm_linear.fast, given, grad)
    assert not wrong(norm_linear.definition, given, grad, fast)


@pytest.mark.parametrize("name", ["128", "200", "1024"])
@pytest.mark.usefixtures("default_tiles")
def test_channels_around_ten_thousand(name: str) -> None:
    values, grad = norm_case(name, mean=1e4)
    arguments = [within(v, torch.float32) for v in values]
    grad = within(grad, torch.float32).detach()
    fast = answer(layer_norm.fast, arguments, grad)
    assert not wrong(layer_norm.definition, arguments, grad, fast)


@pytest.mark.parametrize("c", [128, 200])
def test_the_mean_is_not_rounded_before_it_is_subtracted(c: int) -> None:
    x = laid((3, 3, c), mean=1e6).float()  # a mean has steps of 1/16 there
    weight, bias = torch.ones(c), torch.zeros(c)
    apart = layer_norm.fast(x, weight, bias) - layer_norm.definition(x.double(), weight.double(), bias.double())
    assert apart.abs().max() < 1e-5


@pytest.mark.parametrize("name", ["128 to 132", "384 to 100"])
def test_projected_channels_around_ten_thousand(name: str) -> None:
    values, grad = linear_case(name, mean=1e4)
    given = [None if v is None else within(v, torch.float32) for v in values]
    grad = within(grad, torch.float32).detach()
    fast = answer(norm_linear.fast, given, grad)
    assert not wrong(norm_linear.definition, given, grad, fast)
