"""Measured rates: a fit of what was timed, and nothing is timed that nobody asks for."""

import pytest
import torch

from warpfold.check.op_profile import Cost
from warpfold.cost.measured_rates import OUTSIDE, _Timer, fitted, measured
from warpfold.cost.rates import CACHED_BYTES, TORCH, PassName, Rate, RateKey, of_gpu


class FakeClock:
    """A second passes whenever it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_fit_finds_the_rate_that_made_the_points() -> None:
    rate = Rate(call=1e-5, flop=2e-11, exp=1e-9, byte=1e-10, far=3e-10)
    costs = [
        Cost(1e6, 0, 1e3),
        Cost(1e8, 1e5, 1e6),
        Cost(1e7, 1e7, 4 * CACHED_BYTES),
        Cost(0, 1e3, 9 * CACHED_BYTES),
        Cost(0, 0, 0),
    ]
    costs += [Cost(1e9, 1e6, CACHED_BYTES / 2)]
    found = fitted([(cost, rate.seconds(cost), 1) for cost in costs])
    assert vars(found) == pytest.approx(vars(rate), rel=1e-6)


def test_a_fit_is_never_negative() -> None:
    found = fitted([(Cost(1e6, 0, 1e3), 1e-3, 1), (Cost(1e9, 0, 1e6), 1e-4, 1)])
    assert min(vars(found).values()) >= 0


@pytest.mark.parametrize("which", ["forward", "training", "backward"])
def test_what_nobody_asks_for_is_not_measured(which: PassName) -> None:
    said: list[str] = []
    found = measured("cpu", torch.float32, clock=FakeClock(), tell=said.append)
    before = set(found.ops)
    key: RateKey = ("outer_product", which, torch.float32)
    assert found.ops[key].call >= 0
    assert found.ops[key].call >= 0
    assert set(found.ops) - before == {key}
    assert sum("outer_product" in what for what in said) == 1  # before it is measured, not when it is read


@pytest.mark.parametrize("which", ["forward", "training", "backward"])
def test_a_call_of_torch_in_a_model_costs_what_calls_outside_of_the_trunk_do(which: PassName) -> None:
    """In a loop of its own it has no views, no autograd and little Python around it."""
    found = measured("cpu", torch.float32, clock=FakeClock())
    assert found.ops[TORCH, which, torch.float32].call == found.ops[OUTSIDE, which, torch.float32].call > 0


def test_a_rate_is_that_of_the_middle_run() -> None:
    """A run in which others have a core for themselves, or lose it, says nothing of a step, which is a sum."""
    marks = iter([0.0, 1.0, 1.0, 1.5, 2.0, 3.1, 4.0, 13.0])  # runs of 1 (the first), 0.5, 1.1 and 9 seconds
    timer = _Timer(torch.device("cpu"), lambda: next(marks))
    assert timer.seconds(lambda: None) == pytest.approx(1.1)


def test_how_much_runs_of_the_same_differ_is_kept() -> None:
    """But not what others' turns on the core add."""
    marks = iter([0.0, 1.0, 1.0, 2.0, 2.0, 2.9, 3.0, 4.1])  # 1, 0.9 and 1.1 seconds after the first: a tenth
    timer = _Timer(torch.device("cpu"), FakeClock(), busy=lambda: next(marks))
    timer.seconds(lambda: None)
    assert timer.spread == pytest.approx(0.1)
    marks = iter([0.0, 1.0, 1.0, 2.0, 2.0, 2.9, 3.0, 4.1])
    timer = _Timer(torch.device("cpu"), lambda: next(marks), busy=FakeClock())
    timer.seconds(lambda: None)
    assert timer.spread == 0
    assert measured("cpu", torch.float32).spread("transition", "forward", torch.float32) > 0
    assert of_gpu("H100").spread("transition", "forward", torch.float32) == 0
