"""Show the progress of long commands: the function that they call, and the bar that its calls move."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[float, int, str], None]  # done (1.5: an item and a half), total, the current item


def no_progress(done: float, total: int, what: str) -> None:
    """Report nothing."""


def within(tell: Progress, done: float, total: int, about: str = "") -> Progress:
    """Return the progress of one item of a longer command, `done` of whose `total` came before; about: comes first."""
    return lambda part, parts, what: tell(done + part / max(1, parts), total, about + what)


def as_time(seconds: float) -> str:
    """Return a duration for people: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


_hidden = False


@contextmanager
def no_bars() -> Iterator[None]:
    """Have `progress_bar` show nothing within the context, and `are_hidden` say so."""
    global _hidden
    before, _hidden = _hidden, True
    try:
        yield
    finally:
        _hidden = before


def are_hidden() -> bool:
    """Return whether no progress is to be shown."""
    return _hidden


@contextmanager
def progress_bar(
    narrate: bool = False,
    console: "Console | None" = None,
    transient: bool = True,
    remaining: bool = True,
    every: float | None = None,
) -> Iterator[Progress]:
    """Show a bar on a terminal, moved by calls of (done, total, what); it fits 80 columns, whatever `what` is.

    console: by default stderr.  transient: the bar vanishes at the end.  narrate: without a terminal, print a line
    whenever `what` changes; every: print one with the time, at most every so many seconds; otherwise nothing is shown
    there.  remaining: show the time that is left, if all items take the same; without, the caller says it.
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
        last, said = "", time.monotonic()

        def move(done: float, total: int, what: str) -> None:
            """Move the bar, or print a line."""
            nonlocal last, said
            bar.update(task, completed=done, total=total, description=what)
            if console.is_terminal:
                return
            if narrate and what != last:
                console.print(f"[{int(done):3d}/{total}] {what}", markup=False, highlight=False, soft_wrap=True)
            elif every is not None and time.monotonic() - said >= every:
                now, said = time.strftime("%Y-%m-%d %H:%M:%S"), time.monotonic()
                console.print(f"{now}  {int(done)}/{total}  {what}", markup=False, highlight=False, soft_wrap=True)
            last = what

        yield move
