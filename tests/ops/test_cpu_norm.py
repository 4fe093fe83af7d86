"""Norms and projections by blocks of positions, against their definitions."""

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from tests.ops.cpu_cases import DTYPES, LAYOUTS, Largest, given, mistakes
from warpfold.ops.cpu import linear
from warpfold.ops.dispatch import implementation
from warpfold.ops.linear import layer_norm, norm_linear

SIZES = st.integers(1, 12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("positions", [64, 2048])
def test_norms_are_their_definitions(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, layout: str, positions: int
) -> None:
    monkeypatch.setattr(linear, "POSITIONS", positions)
    x, weight, bias, wide, shift = given((2, 13, 17, 24), (24,), (24,), (20, 24), (20,))
    x = LAYOUTS[layout](3 * x + 1)
    assert not mistakes(layer_norm, [x, weight, bias], 2, dtype)
    assert not mistakes(norm_linear, [x, weight, bias, wide, shift], 4, dtype)
    assert not mistakes(norm_linear, [x, weight, bias, wide, shift[:7]], 4, dtype)
    assert not mistakes(norm_linear, [x, weight, bias, wide], 3, dtype)
    assert not mistakes(layer_norm, [x, weight, None], 2, dtype)
    assert not mistakes(norm_linear, [x, weight, None, wide, shift[:7]], 4, dtype)


@settings(max_examples=40, deadline=None)
@drawn(st.lists(SIZES, max_size=4), SIZES, SIZES, st.integers(1, 200), st.randoms(use_true_random=False))
def test_whatever_the_sizes_and_strides(lead: list[int], c: int, outputs: int, positions: int, dice: object) -> None:
    x, weight, bias, wide = given((*lead, c + 1), (c + 1,), (c + 1,), (outputs, c + 1))
    order = list(range(len(lead)))
    dice.shuffle(order)  # type: ignore[attr-defined]
    back = [order.index(axis) for axis in range(len(lead))]
    x = x.permute(*order, len(lead)).contiguous().permute(*back, len(lead))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "POSITIONS", positions)
        assert not mistakes(layer_norm, [x, weight, bias], 2, torch.float64)
        assert not mistakes(norm_linear, [x, weight, bias, wide], 3, torch.float64)


def test_the_normalised_tensor_never_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "POSITIONS", 64)
    x, weight, bias, wide = given((32, 32, 40), (40,), (40,), (4, 40))
    with Largest(x) as seen:
        y, mean, scale = implementation("norm_linear", x)(x, weight, bias, wide, None, 1e-5)
    assert y.numel() <= seen.elements < x.numel() / 2
    with Largest(x) as seen:
        implementation("norm_linear_backward", x)(torch.ones_like(y), x, weight, bias, wide, None, mean, scale)
    assert seen.elements == x.numel(), "its gradient"
