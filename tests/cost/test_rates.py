"""Measured rates: they are a fit of the measured times, and only requested rates are measured."""

import pytest
import torch

from warpfold.check.op_profile import Cost
from warpfold.cost.measured_rates import OUTSIDE, _Timer, fitted, measured
from warpfold.cost.rates import CACHED_BYTES, TORCH, PassName, Rate, RateKey, of_gpu


class FakeClock:
    """A clock that advances by one second with every reading."""

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
    # The message is printed before the measurement, and not on later reads.
    assert sum("outer_product" in what for what in said) == 1


@pytest.mark.parametrize("which", ["forward", "training", "backward"])
def test_a_call_of_torch_in_a_model_costs_what_calls_outside_of_the_trunk_do(which: PassName) -> None:
    """A call of torch inside a model is as expensive as calls outside of the trunk.

    In a loop of its own, a call would have no views, no autograd and little Python code around it.
    """
    found = measured("cpu", torch.float32, clock=FakeClock())
    assert found.ops[TORCH, which, torch.float32].call == found.ops[OUTSIDE, which, torch.float32].call > 0


def test_a_rate_is_that_of_the_middle_run() -> None:
    """The rate is the median of the runs.

    A run that is disturbed by other processes, or happens to be undisturbed, does not represent a step, which is a sum.
    """
    # Durations: 1 s (the first run), 0.5, 1.1 and 9 s
    marks = iter([0.0, 1.0, 1.0, 1.5, 2.0, 3.1, 4.0, 13.0])
    timer = _Timer(torch.device("cpu"), lambda: next(marks))
    assert timer.seconds(lambda: None) == pytest.approx(1.1)


def test_how_much_runs_of_the_same_differ_is_kept() -> None:
    """The spread of repeated runs is stored, without the time in which other processes used the core."""
    # Durations: 1 s, 0.9 s and 1.1 s after the first run, which is a spread of a tenth
    marks = iter([0.0, 1.0, 1.0, 2.0, 2.0, 2.9, 3.0, 4.1])
    timer = _Timer(torch.device("cpu"), FakeClock(), busy=lambda: next(marks))
    timer.seconds(lambda: None)
    assert timer.spread == pytest.approx(0.1)
    marks = iter([0.0, 1.0, 1.0, 2.0, 2.0, 2.9, 3.0, 4.1])
    timer = _Timer(torch.device("cpu"), lambda: next(marks), busy=FakeClock())
    timer.seconds(lambda: None)
    assert timer.spread == 0
    assert measured("cpu", torch.float32).spread("transition", "forward", torch.float32) > 0
    assert of_gpu("H100").spread("transition", "forward", torch.float32) == 0
