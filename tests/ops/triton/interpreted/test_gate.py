"""gate, gated_linear_residual and triangle_factor: the Triton kernels, interpreted, against the definitions."""

import pytest
import torch

from tests.ops.triton.gate_cases import FACTORS, GATES, TAILS, factor_case, gate_case, tail_case
from tests.ops.triton.layouts import exact_bf16, poisoned, within
from warpfold.check.checks import answer, wrong
from warpfold.ops.dispatch import empty_like
from warpfold.ops.linear import gate, gated_linear_residual
from warpfold.ops.triangle import triangle_factor
from warpfold.ops.triton import linear as launchers
from warpfold.ops.triton import positions as sums

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few programs that each has several blocks of positions, and so few sums at once that there are two rounds."""
    monkeypatch.setattr(launchers, "TILES", 2)
    monkeypatch.setattr(sums, "ONCE", 1)
    monkeypatch.setattr(sums, "SPANS", 2)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    values, grad = gate_case(name)
    x, g = (within(v, DTYPES[dtype]) for v in values)
    grad = within(grad, DTYPES[dtype]).detach()
    assert gate.unsupported_reason(x, g) is None
    with poisoned(monkeypatch), exact_bf16(monkeypatch):
        fast = answer(gate.fast, [x, g], grad)
    assert not wrong(gate.definition, [x, g], grad, fast)
    wanted = [empty_like(t.detach()).stride() for t in (x, x, g)]
    assert [t.stride() for t in fast] == wanted


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("default_tiles")
def test_triangle_factor(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    values, grad = factor_case(name)
    y, g, mask = (within(v, d) for v, d in zip(values, (DTYPES[dtype], DTYPES[dtype], torch.float32)))
    mask, grad = mask.detach(), within(grad, DTYPES[dtype]).detach()
    assert triangle_factor.unsupported_reason(y, g, mask) is None
    with poisoned(monkeypatch), exact_bf16(monkeypatch):
        fast = answer(triangle_factor.fast, [y, g, mask], grad)
    assert not wrong(triangle_factor.definition, [y, g, mask], grad, fast)
    assert fast[0].is_contiguous()


def _tail(name: str, dtype: torch.dtype, factors: torch.dtype) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    values, grad = tail_case(name)
    dtypes = (dtype, dtype, dtype, torch.float32, torch.float32, factors)
    given = [None if v is None else within(v, d) for v, d in zip(values, dtypes)]
    if given[5] is not None:
        given[5] = given[5].detach()
    return given, within(grad, dtype).detach()


@pytest.mark.parametrize("name", TAILS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_tail(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    given, grad = _tail(name, DTYPES[dtype], DTYPES[dtype])
    assert gated_linear_residual.unsupported_reason(*given) is None
    with poisoned(monkeypatch):
        fast = answer(gated_linear_residual.fast, given, grad)
    assert not wrong(gated_linear_residual.definition, given, grad, fast)
    wanted = [empty_like(given[i].detach()).stride() for i in (0, 1, 2)]
    assert [fast[0].stride(), fast[2].stride(), fast[3].stride()] == wanted


@pytest.mark.parametrize("name", ["ending node", "odd"])
@pytest.mark.usefixtures("default_tiles")
def test_tail_in_bf16(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    given, grad = _tail(name, torch.bfloat16, torch.bfloat16)
    with poisoned(monkeypatch), exact_bf16(monkeypatch):
        fast = answer(gated_linear_residual.fast, given, grad)
    assert not wrong(gated_linear_residual.definition, given, grad, fast)


def test_factors_may_be_wider_than_the_rest() -> None:
    given, grad = _tail("starting node", torch.float16, torch.float32)
    out = gated_linear_residual.fast(*given)
    with torch.no_grad():
        narrow = gated_linear_residual.fast(*given[:5], given[5].half())
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, narrow)  # 0 and 1.25 are the same in both
    assert all(t.isfinite().all() for t in torch.autograd.grad(out, given[:5], grad))
