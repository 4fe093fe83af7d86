"""Show the progress of long commands: the function that they call, and the bar that its calls move."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[int, int, str], None]  # done, total, the current item


def no_progress(done: int, total: int, what: str) -> None:
    """Report nothing."""


_hidden = False


@contextmanager
def no_bars() -> Iterator[None]:
    """Have `progress_bar` show nothing within the context."""
    global _hidden
    before, _hidden = _hidden, True
    try:
        yield
    finally:
        _hidden = before


@contextmanager
def progress_bar(
    narrate: bool = False, console: "Console | None" = None, transient: bool = True, remaining: bool = True
) -> Iterator[Progress]:
    """Show a bar on a terminal, moved by calls of (done, total, what).

    console: by default stderr.  transient: the bar vanishes at the end.  narrate: without a terminal, print a line
    whenever `what` changes; otherwise nothing is shown there.  remaining: show the time that is left, if all items take
    the same; without, the caller says it.
    """
    if _hidden:
        yield no_progress
        return
    from rich import progress as bars
    from rich.console import Console

    console = console or Console(stderr=True)
    columns: tuple[bars.ProgressColumn, ...] = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        *([bars.TimeRemainingColumn()] if remaining else []),
    )
    with bars.Progress(*columns, console=console, disable=not console.is_terminal, transient=transient) as bar:
        task = bar.add_task("", total=None)
        last = ""

        def move(done: int, total: int, what: str) -> None:
            nonlocal last
            bar.update(task, completed=done, total=total, description=what)
            if narrate and not console.is_terminal and what != last:
                console.print(f"[{done:3d}/{total}] {what}", markup=False, highlight=False, soft_wrap=True)
            last = what

        yield move
