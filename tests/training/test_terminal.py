"""Test the progress of a training run: two lines in a terminal, or lines with the time in a file."""

import io
import re
import time

import pytest
from rich.console import Console
from rich.text import Text

from tests.training.runs import scored
from warpfold.engine.loop import StepTimer
from warpfold.engine.watch import Phase
from warpfold.progress import no_bars
from warpfold.training.terminal import TrainingProgress, training_progress
from warpfold.training.train import ExampleResult, step_row
from warpfold.training.validation import validation_row

ROW = step_row(4, [ExampleResult("a", 10, 1.25, 1.0, 0.5, {"fape": 0.5})], 0.001, 0, StepTimer())


def shown(progress: TrainingProgress, width: int) -> list[str]:
    """Return the lines on a terminal."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    console.print(progress)
    text = Text.from_ansi(console.file.getvalue()).plain  # type: ignore[attr-defined]
    return text.rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_two_lines_fit_any_terminal(width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    progress = TrainingProgress(1_000_000, console)
    progress.on_metrics(ROW)
    progress.on_metrics(validation_row(4, ["a"], {"a": scored(0.625)}))
    progress.on_phase(Phase(name="validating", step=123_456, steps=1_000_000, done=2, total=12, left=7200.0))
    lines = shown(progress, width)
    assert len(lines) == 2
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("validating 3 of 12")
    if width >= 80:
        assert "123,456/1,000,000  ETA 2.0 h" in lines[0]
        assert lines[1].startswith("loss 1.250  lDDT-Cα 0.625")
    progress.on_phase(Phase(name="stopping", step=4, steps=10))
    assert shown(progress, width)[1].startswith("stopping after this step; Ctrl-C again")


def test_a_part_of_the_held_out_examples_is_said_to_be_one() -> None:
    progress = TrainingProgress(10, Console(file=io.StringIO(), force_terminal=True, width=80))
    progress.on_metrics({**validation_row(4, ["a"], {"a": scored(0.625)}), "of": 12})
    assert shown(progress, 80)[1] == "lDDT-Cα 0.625 (1 of 12)"


def test_without_a_terminal_there_are_lines_with_the_time() -> None:
    text = io.StringIO()
    with training_progress(10, Console(file=text), every=1e9) as progress:
        progress.on_phase(Phase(name="training", step=3, steps=10, left=60.0))
        # The first row is shown, and then one every `every` seconds.
        for _ in range(3):
            progress.on_metrics(ROW)
        progress.on_metrics(validation_row(4, ["a"], {"a": scored(0.625)}))
        progress.on_metrics({"kind": "quarantine", "step": 3, "example": "1abc_A", "reason": "store: [damaged]"})
        progress.on_end(False)
    first, validated, aside, stopped = text.getvalue().splitlines()
    assert re.match(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  step 4/10  loss 1\.250  .*waiting .*  lr 0\.001  ETA 60 s$", first
    )
    assert "validated 1 of 1" in validated
    assert "lDDT-Cα 0.625" in validated
    assert aside == "set aside 1abc_A: store: [damaged]"
    assert "step 4/10  stopped  loss" in stopped


def test_lines_come_every_so_many_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    progress = TrainingProgress(10, Console(file=text), every=30)
    for now, count in ((100.0, 1), (129.0, 1), (131.0, 2)):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        progress.on_metrics(ROW)
        assert text.getvalue().count("step 4/10") == count


def test_a_signal_is_answered_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    progress = TrainingProgress(10, Console(file=io.StringIO()))
    progress.on_phase(Phase(name="stopping", step=4, steps=10))
    assert capfd.readouterr().err == "stopping after this step; Ctrl-C again: at once\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_it_shows_what_cannot_be_used_alone(terminal: bool) -> None:
    text = io.StringIO()
    with no_bars(), training_progress(10, Console(file=text, force_terminal=terminal, width=200)) as progress:
        progress.on_metrics(ROW)
        progress.on_metrics({"kind": "quarantine", "step": 3, "example": "1abc_A", "reason": "damaged"})
        progress.on_end(False)
    assert text.getvalue() == "set aside 1abc_A: damaged\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_what_cannot_be_used_is_said_on_any_console(terminal: bool) -> None:
    text = io.StringIO()
    with training_progress(10, Console(file=text, force_terminal=terminal, width=200)) as progress:
        progress.on_metrics({"kind": "quarantine", "step": 3, "example": "1abc_A", "reason": "store: [damaged]"})
    assert "set aside 1abc_A: store: [damaged]" in text.getvalue()
