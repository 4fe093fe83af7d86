"""Watching a training run: the rows of metrics.jsonl, a progress bar for people, TensorBoard for who wants it.

A watcher is a function of one row; `run.train.train` calls it with each.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from warpfold.engine.checkpoint import RunFolder
from warpfold.errors import UserError

Row = dict[str, Any]
Watcher = Callable[[Row], None]


class Clock:
    """How long steps take, and how much of that they wait for their examples: the last one, and all since the start."""

    def __init__(self) -> None:
        self._seconds = self._waited = 0.0  # of the steps before
        self.began, self.waited = time.perf_counter(), 0.0

    def begin(self) -> None:
        """A step begins; what was since the end of the one before is nobody's."""
        self.began, self.waited = time.perf_counter(), 0.0

    def end(self) -> tuple[float, float, float]:
        """A step ends: its seconds, the share of them that it waited, and that share since the start."""
        seconds = time.perf_counter() - self.began
        self._seconds += seconds
        self._waited += self.waited
        return seconds, self.waited / seconds, self._waited / self._seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began


@dataclass(frozen=True)
class Seen:
    """What one example of a step came to."""

    key: str
    length: int
    loss: float
    norm: float  # of its gradient, before clipping
    lddt_ca: float
    terms: dict[str, float]
    index: int = 0  # its number among the run's examples

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


def step_row(step: int, seen: Sequence[Seen], rate: float, recycles: int, clock: Clock) -> Row:
    """The row of a training step: means over its examples that were finite."""
    seconds, waiting, waiting_so_far = clock.end()
    finite = [example for example in seen if example.finite]
    names = finite[0].terms if finite else {}
    return {
        "kind": "step",
        "step": step,
        "loss": _mean([example.loss for example in finite]),
        "lddt_ca": _mean([example.lddt_ca for example in finite]),
        "terms": {name: _mean([example.terms[name] for example in finite]) for name in names},
        "grad_norm": _mean([example.norm for example in finite]),
        "learning_rate": rate,
        "recycles": recycles,
        "examples": [example.key for example in seen],
        "lengths": [example.length for example in seen],
        "skipped": len(seen) - len(finite),
        "samples_per_second": len(seen) / seconds,
        "waiting": waiting,
        "waiting_so_far": waiting_so_far,
    }


def validation_row(step: int, lddt_ca: Mapping[str, float]) -> Row:
    """The row of a validation: each example's lDDT-Ca, and their mean."""
    return {"kind": "validation", "step": step, "lddt_ca": _mean(list(lddt_ca.values())), "examples": dict(lddt_ca)}


def _mean(values: Sequence[float]) -> float:
    """The mean of those that are numbers; NaN if none is."""
    numbers = [value for value in values if not math.isnan(value)]
    return float(np.mean(numbers)) if numbers else float("nan")


class Log:
    """Where rows go: metrics.jsonl, open after `step`, and the watchers.

    run: None in a process that writes nothing; it remembers what a run has to know of its rows all the same.
    """

    def __init__(self, run: RunFolder | None, step: int, validation: Row | None, watchers: Sequence[Watcher]) -> None:
        self.run, self.watchers = run, watchers
        self.validation = validation  # the last one: its step and its mean
        self.step = step  # steps done

    @property
    def lddt_ca(self) -> float | None:
        return self.validation["lddt_ca"] if self.validation else None

    def __call__(self, row: Row) -> None:
        if self.run is not None:
            self.run.log(row)
        self.step = row["step"]
        if row["kind"] == "validation":
            self.validation = {name: row[name] for name in ("step", "lddt_ca")}
        for watch in self.watchers:
            watch(row)


@contextmanager
def progress_bar(steps: int, console: Console | None = None) -> Iterator[Watcher]:
    """A bar with the loss, the held-out lDDT-Ca, the speed, and the share of the time that steps wait for data.

    Where the console is not a terminal, it only says which entries cannot be used.
    """
    console = console or Console(stderr=True)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}  lDDT-Cα {task.fields[lddt]}  {task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=steps, loss="-", lddt="-", speed="")

        def watch(row: Row) -> None:
            """Show a row."""
            if row["kind"] == "quarantine":
                console.print(
                    f"set aside {row['example']}: {row['reason']}", markup=False, highlight=False, soft_wrap=True
                )
            elif row["kind"] == "validation":
                progress.update(task, completed=row["step"], lddt=f"{row['lddt_ca']:.3f}")
            else:
                speed = f"{row['samples_per_second']:.2g} samples/s, {row['waiting_so_far']:.1%} waiting"
                progress.update(task, completed=row["step"], loss=f"{row['loss']:.3f}", speed=speed)

        yield watch


def tensorboard(folder: Path, step: int) -> Watcher:
    """Write every number of a row as a curve into `folder`, those of a resumed run from `step` on.

    Errors: UserError where the package is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError("train.tensorboard: the package is missing; pip install 'warpfold[tensorboard]'") from error
    writer = SummaryWriter(str(folder), purge_step=step + 1)

    def watch(row: Row) -> None:
        for name, value in [*row.items(), *row.get("terms", {}).items()]:
            if isinstance(value, int | float) and name != "step":
                writer.add_scalar(f"{row['kind']}/{name}", value, row["step"])
        writer.flush()

    return watch
