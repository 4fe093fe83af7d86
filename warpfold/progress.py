"""Show the progress of long commands: the function that they call, and the progress bar."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# Arguments: finished items (1.5 is an item and a half), total, name of the current item.
Progress = Callable[[float, int, str], None]


def no_progress(done: float, total: int, what: str) -> None:
    """Report nothing."""


def within(tell: Progress, done: float, total: int, about: str = "") -> Progress:
    """Convert the progress of one item to that of the whole command.

    done, total: the items before this one, and all items.
    about: a prefix for the name of the current step.
    """
    return lambda part, parts, what: tell(done + part / max(1, parts), total, about + what)


def as_time(seconds: float) -> str:
    """Format a duration: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def format_gb(size: float) -> str:
    """Format bytes as "3.1 GB", or in MB below 1 GB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.0f} MB"


_hidden = False


@contextmanager
def no_bars() -> Iterator[None]:
    """Hide progress bars within the context."""
    global _hidden
    before, _hidden = _hidden, True
    try:
        yield
    finally:
        _hidden = before


def are_hidden() -> bool:
    """Return whether progress bars are hidden."""
    return _hidden


@contextmanager
def progress_bar(
    narrate: bool = False,
    console: "Console | None" = None,
    transient: bool = True,
    remaining: bool = True,
    every: float | None = None,
) -> Iterator[Progress]:
    """Show a progress bar of at most 80 columns on a terminal, and yield the function that updates it.

    narrate: without a terminal, print a line when the current item changes.
    console: default: stderr.
    transient: remove the bar at the end.
    remaining: show an estimate of the remaining time, assuming that all items take equally long.
    every: without a terminal, print a line with the time at this interval, seconds.
    """
    if _hidden:
        yield no_progress
        return
    from rich import progress as bars
    from rich.console import Console
    from rich.table import Column

    console = console or Console(stderr=True)
    columns: tuple[bars.ProgressColumn, ...] = (
        bars.TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        bars.BarColumn(bar_width=max(8, min(console.width // 10, 40))),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        *([bars.TimeRemainingColumn()] if remaining else []),
    )
    with bars.Progress(
        *columns, console=console, disable=not console.is_terminal, transient=transient, expand=True
    ) as bar:
        task = bar.add_task("", total=None)
        last, printed_at = "", time.monotonic()

        def move(done: float, total: int, what: str) -> None:
            """Move the bar, or print a line."""
            nonlocal last, printed_at
            bar.update(task, completed=done, total=total, description=what)
            if console.is_terminal:
                return
            if narrate and what != last:
                console.print(f"[{int(done):3d}/{total}] {what}", markup=False, highlight=False, soft_wrap=True)
            elif every is not None and time.monotonic() - printed_at >= every:
                now, printed_at = time.strftime("%Y-%m-%d %H:%M:%S"), time.monotonic()
                console.print(f"{now}  {int(done)}/{total}  {what}", markup=False, highlight=False, soft_wrap=True)
            last = what

        yield move
