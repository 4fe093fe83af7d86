"""`warpfold watch`."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from warpfold.arguments import argument, runs, writes
from warpfold.cli.common import command


@command(example="Example:  warpfold watch run\n\nTwo of them, in a browser:  warpfold watch a b --html runs.html")
def watch(
    folders: Annotated[list[Path], argument("Folders of `warpfold train`, its --out; several are compared.")],
    html: Annotated[
        Path | None, writes("Draw the curves in an HTML page, which reloads itself; open it in a browser.")
    ] = None,
    once: Annotated[bool, runs("Show it once and end; so it does where there is no terminal.", "--once")] = False,
    every: Annotated[float, runs("Seconds between two looks.", min=0.5)] = 5.0,
) -> None:
    """Show how training runs stand while they go on: loss, held-out lDDT-Cα, speed, what is left; curves with --html.

    It changes nothing in their folders, and ends when they have finished, or with Ctrl-C.
    """
    from rich.live import Live
    from rich.text import Text

    from warpfold.report.curves import as_text, open_runs, write_page

    logs = open_runs(folders)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # that is how one leaves: nothing is to be said

    def news() -> Iterator[None]:
        """Wait for what is new, again and again, until all runs have finished."""
        while not all(log.is_finished for log in logs):
            time.sleep(every)
            for log in logs:
                log.read()
            yield

    with suppress(KeyboardInterrupt):
        if html is not None:
            write_page(html, logs, every)
            ends = once or all(log.is_finished for log in logs)
            typer.echo(f"{html}: open it in a browser{'' if ends else '; Ctrl-C ends'}")
            for _ in () if once else news():
                write_page(html, logs, every)
        elif once or not sys.stdout.isatty():
            typer.echo(as_text(logs))
        else:
            with Live(Text(as_text(logs)), auto_refresh=False) as live:
                for _ in news():
                    live.update(Text(as_text(logs)), refresh=True)
