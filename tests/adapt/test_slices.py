"""Swapped layers in slices of the size that the caller chose or that fits into the free memory."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import warpfold
from tests.adapt.stand_in import KNOWN, TheirModel, inputs
from warpfold.adapt import accelerate as subject
from warpfold.adapt import slices
from warpfold.adapt.adapter import Adapter
from warpfold.cost.memory import most_allocated
from warpfold.memory import memory_in_use

CPU = torch.device("cpu")
N = 96


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "adapters", lambda: KNOWN)
    monkeypatch.setattr(subject, "keep_memory", lambda: None)


def passes(model: TheirModel, x: Tensor, mask: Tensor) -> dict[str, Callable[[], Any]]:
    def forward() -> Any:
        with torch.no_grad():
            return model(x, mask)

    def both() -> Any:
        return torch.autograd.grad(model(x, mask).square().mean(), list(model.parameters()))

    return {"forward": forward, "both": both}


@pytest.mark.parametrize("which", ["forward", "both"])
def test_a_model_runs_within_half_of_what_it_needs(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of half the memory, the peak of torch's allocator is below it, and results agree to rounding."""
    torch.manual_seed(0)
    model = TheirModel(blocks=2, c=16, heads=4, hidden=16)
    x, mask = inputs(N)
    need = most_allocated(passes(model, x, mask)[which])
    want = passes(model, x, mask)[which]()
    model = warpfold.accelerate(model, memory="24GB")
    limited = [m._warpfold_layer.execution for m in model.modules() if "_warpfold_layer" in vars(m)]
    held = {"most": 0}
    for execution in limited:
        execution.limit = need // 2
    # The process also holds z, and in the backward pass its gradient.
    z = N * N * 16 * 4
    monkeypatch.setattr(slices, "memory_in_use", lambda device: 2 * z)
    held["most"] = most_allocated(passes(model, x, mask)[which])
    assert held["most"] <= need / 2
    got = passes(model, x, mask)[which]()
    for a, b in zip(want, got):
        assert (a - b).abs().max() <= 1e-4 * max(float(a.abs().max()), 1e-6)


def test_what_a_layer_needs_is_what_it_takes() -> None:
    """The bytes recorded on meta tensors equal the measured bytes of a call, in slices and at once."""
    model = warpfold.accelerate(TheirModel(blocks=1, c=32, heads=4, hidden=32), memory="24GB")
    z, mask = torch.randn(1, 64, 64, 32), torch.ones(1, 64, 64)
    for module in (model.blocks[0].attention, model.blocks[0].product):
        layer = module._warpfold_layer
        for rows in (None, 8):
            with torch.no_grad():
                said = layer.execution.needed(z, mask, None, False, rows)
                took = most_allocated(lambda: slices._run(layer, z, mask, None, False, rows))  # noqa: B023
            assert said == pytest.approx(took, rel=0.05), (type(layer).__name__, rows)


def test_less_memory_means_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = warpfold.accelerate(TheirModel(), memory="24GB")
    execution = model.blocks[0].attention._warpfold_layer.execution
    z, mask = torch.randn(1, 24, 24, 16), torch.ones(1, 24, 24)
    found = []
    with torch.no_grad():
        for limit in (1 << 30, 100_000, 80_000, 1):
            execution.limit = limit
            monkeypatch.setattr(slices, "memory_in_use", lambda device: 0)
            found.append(execution.rows_that_fit(z, mask, None, False, None))
    assert found[0] is None
    assert found[-1] == 1
    assert found[1:] == sorted(found[1:], reverse=True)
    assert execution.rows_that_fit(z, mask, None, False, 4) <= 4


def test_rows_that_a_caller_chooses_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = warpfold.accelerate(TheirModel())
    seen: list[int] = []
    real = slices.layer_in_slices

    def counted(layer: Any, x: Tensor, mask: Any, other: Any, most: int, **how: Any) -> Any:
        seen.append(most * x.shape[-2] // x.numel())
        return real(layer, x, mask, other, most, **how)

    monkeypatch.setattr(slices, "layer_in_slices", counted)
    x, mask = inputs()
    whole = model(x, mask)
    assert not seen
    assert (model(x, mask, 4) - whole).abs().max() < 1e-5
    assert seen == [4, 4]
    model(x, mask, 1000)  # more rows than exist, as EsmFold's default for most proteins
    assert seen == [4, 4]


def test_a_layer_that_adds_x_itself_has_the_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = warpfold.accelerate(TheirModel(), memory="24GB")
    module = model.blocks[0].attention
    layer, x, mask = module._warpfold_layer, torch.randn(1, 9, 9, 16), torch.ones(1, 9, 9)
    asked: list[int | None] = []
    monkeypatch.setattr(layer.execution, "rows_that_fit", lambda *given: asked.append(given[-1]) or 2)
    new = Adapter.add_update(layer, x, mask)
    assert asked == [None]
    assert (new - x - module(x, mask)).abs().max() < 1e-5


def test_copies_and_restoring_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TheirModel()
    x, mask = inputs()
    y = model(x, mask)
    warpfold.accelerate(model, memory="1 MB")
    with torch.no_grad():
        assert (copy.deepcopy(model)(x, mask) - y).abs().max() < 1e-5
    warpfold.restore(model)
    assert torch.equal(model(x, mask), y)


def test_memory_in_use_grows_with_tensors() -> None:
    before = memory_in_use("cpu")
    kept = torch.ones(2**24)
    assert 2**25 < memory_in_use("cpu") - before < 2**28
    del kept
