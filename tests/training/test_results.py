"""The rows of a run's log."""

import math

from tests.training.runs import scored
from warpfold.engine.loop import StepTimer
from warpfold.training.results import ExampleResult, step_row, validation_row


def result(loss: float, lddt: float = 0.5) -> ExampleResult:
    return ExampleResult("a", 10, loss, norm=1.0, lddt_ca=lddt, terms={"fape": loss / 2})


def test_a_row_averages_what_was_finite() -> None:
    row = step_row(3, [result(1.0), result(float("nan")), result(3.0, lddt=float("nan"))], 0.1, 2, StepTimer())
    assert (row["loss"], row["lddt_ca"], row["terms"]["fape"], row["skipped"]) == (2.0, 0.5, 1.0, 1)
    nothing = step_row(3, [result(float("inf"))], 0.1, 2, StepTimer())
    assert math.isnan(nothing["loss"])
    assert nothing["terms"] == {}


def test_a_validation_leaves_out_what_has_no_score() -> None:
    scores = {"a": scored(0.4), "b": scored(float("nan")), "c": scored(0.6)}
    assert validation_row(0, scores)["lddt_ca"] == 0.5


def test_the_timer_knows_how_long_was_waited() -> None:
    timer = StepTimer()
    with timer.waiting():
        pass
    assert 0 < timer.waited < 1
    assert 0 < step_row(1, [result(1.0)], 0.1, 0, timer)["waiting"] < 1


def test_the_share_of_waiting_is_of_the_step_and_of_all_steps_so_far() -> None:
    timer = StepTimer()
    for waited in (0.0, 1.0):
        timer.begin()
        timer.began -= 2.0  # two seconds ago
        timer.waited = waited
        row = step_row(1, [result(1.0)], 0.1, 0, timer)
    assert (round(row["waiting"], 2), round(row["waiting_so_far"], 2)) == (0.5, 0.25)
