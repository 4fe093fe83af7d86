"""Test that progress bars fit a terminal, and that without a terminal progress is printed as lines with the time."""

import io
import re
import time

import pytest
from rich.console import Console
from rich.text import Text

from warpfold.progress import as_time, progress_bar

SAID = "a_prote…, 12 min left, pass 2/4, block 13/52, slice 7/40"  # as `predict`
LONG = f"{SAID} {SAID}"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_bar_fits_the_terminal(width: int) -> None:
    text = io.StringIO()
    with progress_bar(
        console=Console(file=text, force_terminal=True, width=width), transient=False, remaining=False
    ) as move:
        move(1.5, 40, LONG)
        move(1.5, 40, SAID)
    lines = Text.from_ansi(text.getvalue()).plain.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[-1].startswith(SAID if width >= 80 else "a_p")
    assert re.search(r" \S+ +1/40 0:00:00$", lines[-1])


def test_without_a_terminal_lines_come_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    text, began = io.StringIO(), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began)
    with progress_bar(console=Console(file=text), every=30) as move:
        move(0.5, 2, "one")
        monkeypatch.setattr(time, "monotonic", lambda: began + 31)
        move(0.7, 2, LONG)
        move(0.8, 2, "two")
    [line] = text.getvalue().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  0/2  " + re.escape(LONG), line)


def test_durations_are_said_for_people() -> None:
    assert [as_time(seconds) for seconds in (3, 200, 7200)] == ["3 s", "3 min", "2.0 h"]
