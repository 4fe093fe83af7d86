"""Calls that are repeated by a recipe with other tensors give bitwise the same results as normal calls."""

import pytest
import torch
from torch import Tensor

from tests.ops.cases import CASES, FEW, REPEATED, case, differentiable, operations
from warpfold.ops import dispatch
from warpfold.ops.triton import launch

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # padding of rows
NAMES = [name for name in (*FEW, "gated_attention 2") if differentiable(operations()[CASES[name][0]]) != [""]]
LAST = {CASES[name][0]: name for name in NAMES if name in REPEATED and CASES[name][0] in dispatch.recipes}
WITH_GRADIENT = [*LAST.values(), "triangle_multiplication 0"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_repeated_is_what_was_worked_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(launch, "state", lambda: 0)  # forced tiles stay the same
    first, second = case(name, torch.bfloat16), case(name, torch.bfloat16)
    recipes = first.op._recipes
    recipes.clear()
    with torch.no_grad():
        right = first.op(**first.given).clone()
        for t in first.given.values():
            if isinstance(t, Tensor):
                t.zero_()  # reveals reads of old tensors
        found = first.op(**second.given)
    assert torch.equal(found.nan_to_num(), right.nan_to_num())
    assert any(recipe is not None for recipe in recipes.values()) == (name in REPEATED)
    # Without a recipe for the public function, the registered operation is looked up too.
    assert len(recipes) <= (1 if name in REPEATED else 2)
    recipes.clear()


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_what_is_repeated_with_a_gradient_is_what_was_worked_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(launch, "state", lambda: 0)
    first, second = case(name, torch.bfloat16), case(name, torch.bfloat16)
    both = [dispatch.recipes[each] for each in (first.op.name, f"{first.op.name}_backward")]
    for known in both:
        known.clear()
    right = {of: (t.clone(), t.stride()) for of, t in first.answers(first.op.fast).items()}
    with torch.no_grad():
        for t in (first.grad, *first.given.values()):
            if isinstance(t, Tensor):
                t.zero_()
    found = second.answers(second.op.fast)
    for of, (t, stride) in right.items():
        assert torch.equal(found[of].nan_to_num(), t.nan_to_num()), of
        assert found[of].stride() == stride
    for known in both:
        assert [recipe is not None for recipe in known.values()] == [True]
        known.clear()


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_a_call_past_the_dispatcher_has_the_same_gradients(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(launch, "state", lambda: 0)
    first, second = case(name, torch.bfloat16), case(name, torch.bfloat16)
    recipes = dispatch.recipes[first.op.name]
    right = first.answers(first.op.fast)
    recipes.clear()
    with dispatch.always_fast():
        noted = first.answers(first.op)
        assert [recipe is not None for recipe in recipes.values()] == [True]
        found = second.answers(first.op)
    assert len(recipes) == 1
    for of, t in right.items():
        for each in (noted, found):
            assert torch.equal(each[of].nan_to_num(), t.nan_to_num()), of
            assert each[of].stride() == t.stride()
    recipes.clear()
