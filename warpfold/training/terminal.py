"""Show the progress of a training run: two live lines in a terminal, or a line every few seconds in a file."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from warpfold.engine.watch import Phase, Row, Watcher
from warpfold.progress import are_hidden, as_time

STOP_NOTICE = "stopping after this step; Ctrl-C again: at once"


class TrainingProgress(Watcher):
    """Show the phase of a run, its progress and loss, and the time left, validations included.

    A terminal shows two lines, no wider than it is.  Other outputs, such as the log of a batch job, get a line with the
    time every `every` seconds and one for each validation.  Both show each entry that cannot be used.
    quiet: show nothing but these entries and an early end.
    """

    def __init__(self, steps: int, console: Console | None = None, every: float = 30.0, quiet: bool = False) -> None:
        self.console, self.quiet = console or Console(stderr=True), quiet
        self.phase, self.every = Phase(name="starting", step=0, steps=steps), every
        self.row: Row = {}  # of the last step
        self.validation: Row = {}
        self.stopping = False
        self.outcome = ""  # "finished" or "stopped"
        self._last_line = 0.0  # time of the last line; 0: none
        self._expected_end: float | None = None

    def on_metrics(self, row: Row) -> None:
        """Store the row, and print a line if one is due."""
        if row["kind"] == "quarantine":
            self._print(f"set aside {row['example']}: {row['reason']}")
        elif row["kind"] == "end":
            self._print(f"ends after step {row['step']}: {row['reason']}")
        elif row["kind"] == "validation":
            self.validation = row
            step_text = "" if row["step"] == self.row.get("step", self.phase.step) else f" after step {row['step']}"
            cut = ""
            if "cut" in row:
                cut = f", {row['cropped']} cut, {row['residues']:,} of {row['whole_residues']:,} residues folded"
            total = row.get("of", len(row["examples"]))
            self._print_line(f"validated {len(row['examples'])} of {total}{step_text}{cut}")
        elif row["kind"] == "step":
            self.row = row
            if time.monotonic() - self._last_line >= self.every or not self._last_line:
                self._last_line = time.monotonic()
                self._print_line()

    def on_phase(self, phase: Phase) -> None:
        """Show the phase.  A signal is acknowledged at once, wherever the program is."""
        if phase.name == "stopping":
            self.stopping = True
            if not self.console.is_terminal:
                # A signal handler must not print, since it may have interrupted a print.
                with suppress(OSError):
                    os.write(2, f"{STOP_NOTICE}\n".encode())
            return
        self.phase = phase
        if phase.left is not None:
            self._expected_end = time.monotonic() + phase.left

    def on_end(self, finished: bool) -> None:
        self.outcome, self.stopping = "finished" if finished else "stopped", False
        if self.row and not finished:
            self._print_line("stopped")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield two lines that are no wider than the terminal."""
        p, ascii_only = self.phase, options.ascii_only
        name = self.outcome or (f"{p.name} {min(p.done + 1, p.total)} of {p.total}" if p.total else p.name)
        end = f"  {p.step:,}/{p.steps:,}  {self._eta()}".rstrip()
        room = options.max_width - max(len(name), 10) - len(end) - 2
        text = Text(f"{name:10}  ", no_wrap=True, overflow="ellipsis")
        if room >= 8:
            full = int(room * p.step / max(p.steps, 1))
            text.append(("#" if ascii_only else "━") * full, "green")
            text.append(("-" if ascii_only else "─") * (room - full), "dim")
        yield text.append(end)
        line, width = STOP_NOTICE if self.stopping else "", options.max_width
        for number in [] if self.stopping else self._numbers():
            longer = f"{line}  {number}" if line else number
            line = longer if len(longer) <= width else line
        yield Text(line, style="yellow" if self.stopping else "", no_wrap=True, overflow="ellipsis")

    def _eta(self) -> str:
        if self.outcome:
            return ""
        if self._expected_end is None:
            return "ETA -"
        return f"ETA {as_time(max(self._expected_end - time.monotonic(), 0.0))}"

    def _numbers(self) -> Iterator[str]:
        """Yield the numbers of the last step and validation in words, the most important first."""
        row, held_out = self.row, self.validation
        if row:
            yield f"loss {row['loss']:.3f}"
        if held_out:
            share = f" ({len(held_out['examples'])} of {held_out['of']})" if "of" in held_out else ""
            yield f"lDDT-Cα {held_out['lddt_ca']:.3f}{share}"
            if "dockq" in held_out:
                yield f"DockQ {held_out['dockq']:.3f}"
        if row:
            rate = row["samples_per_second"]
            yield f"{rate:.3g} samples/s" if rate >= 1 else f"{1 / rate:.3g} s/sample"
            yield f"waiting {row['waiting_so_far']:.1%}"
            yield f"lr {row['learning_rate']:.2g}"

    def _print_line(self, what: str = "") -> None:
        """Print a line, unless a terminal shows the run live."""
        if not (self.console.is_terminal or self.quiet):
            step = f"step {self.row.get('step', self.phase.step)}/{self.phase.steps}"
            parts = [time.strftime("%Y-%m-%d %H:%M:%S"), step, what, *self._numbers(), self._eta()]
            self._print("  ".join(filter(None, parts)))

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def training_progress(steps: int, console: Console | None = None, every: float = 30.0) -> Iterator[TrainingProgress]:
    """Yield a watcher that shows a training run within the context, by default on stderr."""
    shown = TrainingProgress(steps, console, every, are_hidden())
    if shown.quiet or not shown.console.is_terminal:
        yield shown
        return
    with Live(shown, console=shown.console, refresh_per_second=5):
        yield shown
