"""Watching a run: rows, bar, TensorBoard."""

import importlib.util
import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from warpfold.engine.loop import StepTimer, tensorboard
from warpfold.errors import UserError
from warpfold.run.results import ExampleResult, step_row, training_bar, validation_row


def result(loss: float, lddt: float = 0.5) -> ExampleResult:
    return ExampleResult("a", 10, loss, norm=1.0, lddt_ca=lddt, terms={"fape": loss / 2})


def test_a_row_averages_what_was_finite() -> None:
    row = step_row(3, [result(1.0), result(float("nan")), result(3.0, lddt=float("nan"))], 0.1, 2, StepTimer())
    assert (row["loss"], row["lddt_ca"], row["terms"]["fape"], row["skipped"]) == (2.0, 0.5, 1.0, 1)
    nothing = step_row(3, [result(float("inf"))], 0.1, 2, StepTimer())
    assert math.isnan(nothing["loss"])
    assert nothing["terms"] == {}


def test_a_validation_leaves_out_what_has_no_score() -> None:
    assert validation_row(0, {"a": 0.4, "b": float("nan"), "c": 0.6})["lddt_ca"] == 0.5


def test_the_timer_knows_how_long_was_waited() -> None:
    timer = StepTimer()
    with timer.waiting():
        pass
    assert 0 < timer.waited < 1
    assert 0 < step_row(1, [result(1.0)], 0.1, 0, timer)["waiting"] < 1


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_shows_loss_and_lddt_on_a_terminal_only(terminal: bool) -> None:
    text = io.StringIO()
    with training_bar(10, Console(file=text, force_terminal=terminal, width=120)) as watch:
        watch(step_row(4, [result(1.25)], 0.1, 0, StepTimer()))
        watch(validation_row(4, {"a": 0.625}))
    shown = text.getvalue()
    assert ("4/10" in shown, "1.250" in shown, "0.625" in shown) == (terminal,) * 3


def test_the_share_of_waiting_is_of_the_step_and_of_all_steps_so_far() -> None:
    timer = StepTimer()
    for waited in (0.0, 1.0):
        timer.begin()
        timer.began -= 2.0  # two seconds ago
        timer.waited = waited
        row = step_row(1, [result(1.0)], 0.1, 0, timer)
    assert (round(row["waiting"], 2), round(row["waiting_so_far"], 2)) == (0.5, 0.25)


@pytest.mark.parametrize("terminal", [True, False])
def test_what_cannot_be_used_is_said_on_any_console(terminal: bool) -> None:
    text = io.StringIO()
    with training_bar(10, Console(file=text, force_terminal=terminal, width=200)) as watch:
        watch({"kind": "quarantine", "step": 3, "example": "1abc_A", "reason": "store: [damaged]"})
    assert "set aside 1abc_A: store: [damaged]" in text.getvalue()


def test_tensorboard_is_optional(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(UserError, match=r"pip install 'warpfold\[tensorboard\]'"):
            tensorboard(tmp_path, 0)
    else:
        tensorboard(tmp_path, 0)(step_row(1, [result(1.0)], 0.1, 0, StepTimer()))
        assert any(tmp_path.iterdir())
