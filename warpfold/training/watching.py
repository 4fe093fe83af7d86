"""Show a training run while it goes on: two lines that move in a terminal, a line now and then in a file."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from warpfold.engine.watch import Phase, Row, Watcher
from warpfold.progress import are_hidden, as_time

ASKED = "stopping after this step; Ctrl-C again: at once"


class TrainingProgress(Watcher):
    """Shows what a run does, how far it is, its loss, and when it will have ended, validations included.

    In a terminal: two lines, no wider than it.  Elsewhere, such as the log of a batch job: a line with the time every
    `every` seconds, and one for each validation.  In both: each entry that cannot be used; quiet: nothing else.
    """

    def __init__(self, steps: int, console: Console | None = None, every: float = 30.0, quiet: bool = False) -> None:
        self.console, self.quiet = console or Console(stderr=True), quiet
        self.phase, self.every = Phase(name="starting", step=0, steps=steps), every
        self.row: Row = {}  # of the last step
        self.validation: Row = {}
        self.asked = False  # to stop
        self.ended = ""  # how
        self._said = 0.0  # when the last line was printed; 0: none was
        self._ends: float | None = None  # when the run is expected to end

    def on_metrics(self, row: Row) -> None:
        """Keep what is shown, and print a line where it is time for one."""
        if row["kind"] == "quarantine":
            self._print(f"set aside {row['example']}: {row['reason']}")
        elif row["kind"] == "end":
            self._print(f"ends after step {row['step']}: {row['reason']}")
        elif row["kind"] == "validation":
            self.validation = row
            where = "" if row["step"] == self.row.get("step", self.phase.step) else f" after step {row['step']}"
            cut = ""
            if "cut" in row:
                cut = f", {row['cropped']} cut, {row['residues']:,} of {row['whole_residues']:,} residues folded"
            of = row.get("of", len(row["examples"]))
            self._print_line(f"validated {len(row['examples'])} of {of}{where}{cut}")
        elif row["kind"] == "step":
            self.row = row
            if time.monotonic() - self._said >= self.every or not self._said:
                self._said = time.monotonic()
                self._print_line()

    def on_phase(self, phase: Phase) -> None:
        """Show what the run does now; where a signal has come, that is answered at once, wherever the program is."""
        if phase.name == "stopping":
            self.asked = True
            if not self.console.is_terminal:
                with suppress(OSError):
                    os.write(2, f"{ASKED}\n".encode())  # print is not safe here: it may be what was interrupted
            return
        self.phase = phase
        if phase.left is not None:
            self._ends = time.monotonic() + phase.left

    def on_end(self, finished: bool) -> None:
        self.ended, self.asked = "finished" if finished else "stopped", False
        if self.row and not finished:
            self._print_line("stopped")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield two lines that are no wider than the terminal."""
        p, ascii_only = self.phase, options.ascii_only
        name = self.ended or (f"{p.name} {min(p.done + 1, p.total)} of {p.total}" if p.total else p.name)
        end = f"  {p.step:,}/{p.steps:,}  {self._eta()}".rstrip()
        room = options.max_width - max(len(name), 10) - len(end) - 2
        text = Text(f"{name:10}  ", no_wrap=True, overflow="ellipsis")
        if room >= 8:
            full = int(room * p.step / max(p.steps, 1))
            text.append(("#" if ascii_only else "━") * full, "green")
            text.append(("-" if ascii_only else "─") * (room - full), "dim")
        yield text.append(end)
        said, width = ASKED if self.asked else "", options.max_width
        for part in [] if self.asked else self._parts():
            longer = f"{said}  {part}" if said else part
            said = longer if len(longer) <= width else said
        yield Text(said, style="yellow" if self.asked else "", no_wrap=True, overflow="ellipsis")

    def _eta(self) -> str:
        if self.ended:
            return ""
        return "ETA -" if self._ends is None else f"ETA {as_time(max(self._ends - time.monotonic(), 0.0))}"

    def _parts(self) -> Iterator[str]:
        """Yield what is to be said of the last step and validation, the most important first."""
        row, held_out = self.row, self.validation
        if row:
            yield f"loss {row['loss']:.3f}"
        if held_out:
            part = f" ({len(held_out['examples'])} of {held_out['of']})" if "of" in held_out else ""
            yield f"lDDT-Cα {held_out['lddt_ca']:.3f}{part}"
            if "dockq" in held_out:
                yield f"DockQ {held_out['dockq']:.3f}"
        if row:
            rate = row["samples_per_second"]
            yield f"{rate:.3g} samples/s" if rate >= 1 else f"{1 / rate:.3g} s/sample"
            yield f"waiting {row['waiting_so_far']:.1%}"
            yield f"lr {row['learning_rate']:.2g}"

    def _print_line(self, what: str = "") -> None:
        """Print a line for a log, where there is no terminal."""
        if not (self.console.is_terminal or self.quiet):
            step = f"step {self.row.get('step', self.phase.step)}/{self.phase.steps}"
            parts = [time.strftime("%Y-%m-%d %H:%M:%S"), step, what, *self._parts(), self._eta()]
            self._print("  ".join(filter(None, parts)))

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def training_progress(steps: int, console: Console | None = None, every: float = 30.0) -> Iterator[TrainingProgress]:
    """Give a watcher that shows a training run within the context, on stderr unless told otherwise."""
    shown = TrainingProgress(steps, console, every, are_hidden())
    if shown.quiet or not shown.console.is_terminal:
        yield shown
        return
    with Live(shown, console=shown.console, refresh_per_second=5):
        yield shown
