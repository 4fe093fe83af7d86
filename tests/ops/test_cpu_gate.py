"""Gates, tails and factors of triangle products by blocks of positions, against their definitions."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.ops.cpu_cases import DTYPES, LAYOUTS, given, mistakes
from warpfold.ops.cpu import linear
from warpfold.ops.linear import gate, gated_linear_residual
from warpfold.ops.triangle import triangle_factor

TAIL = SimpleNamespace(
    definition=lambda *a, factors=None: gated_linear_residual.definition(
        *a, None if factors is None else factors.to(a[0].dtype)
    ),
    fast=lambda *a, factors=None: gated_linear_residual.fast(*a, None if factors is None else factors.to(a[0].dtype)),
    unsupported_reason=lambda *_, **__: None,
)


@pytest.fixture(params=[64, 2048], autouse=True)
def positions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "POSITIONS", request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gate_is_its_definition(dtype: torch.dtype, layout: str) -> None:
    x, g = given((2, 13, 17, 24), (2, 13, 17, 24))
    assert not mistakes(gate, [LAYOUTS[layout](x), g], 0, dtype)
    assert not mistakes(gate, [x, LAYOUTS[layout](g)], 0, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kept", [None, (2, 1, 17, 24), (2, 13, 1, 24), (1,)])
def test_tail_is_its_definition(dtype: torch.dtype, layout: str, kept: tuple[int, ...] | None) -> None:
    x, o, g, weight, bias = given((2, 13, 17, 24), (2, 13, 17, 12), (2, 13, 17, 12), (24, 12), (24,))
    factors: Tensor | None = None if kept is None else (given(kept, seed=9)[0] > 0).double() / 0.75
    arranged = [LAYOUTS[layout](x), LAYOUTS[layout](o), LAYOUTS["a slice of channels"](g), weight, bias]
    assert not mistakes(TAIL, arranged, 2, dtype, factors=factors)
    assert not mistakes(TAIL, [x, *arranged[1:]], 2, dtype, factors=factors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_factor_is_its_definition_in_order(dtype: torch.dtype, layout: str) -> None:
    y, g = (LAYOUTS[layout](t) for t in given((2, 13, 17, 24), (2, 13, 17, 24)))
    mask = (given((2, 13, 17), seed=4)[0] > -0.5).double()
    assert not mistakes(triangle_factor, [y, g], 0, dtype, mask=mask)
    assert triangle_factor.fast(y, g, mask).is_contiguous()
