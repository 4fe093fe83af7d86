"""The surroundings of a training loop: its timer, its log with its watchers, its stop signals."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from warpfold.engine.checkpoint import RunFolder
from warpfold.errors import UserError

Row = dict[str, Any]  # of metrics.jsonl; it has a "kind" and a "step"
Watcher = Callable[[Row], None]


class StepTimer:
    """Measure how long steps take, and how much of that they wait: the last one, and all since the start."""

    def __init__(self) -> None:
        self._seconds = self._waited = 0.0  # of the steps before
        self.began, self.waited = time.perf_counter(), 0.0

    def begin(self) -> None:
        """Begin a step; the time since the end of the previous one is not counted."""
        self.began, self.waited = time.perf_counter(), 0.0

    def end(self) -> tuple[float, float, float]:
        """End a step; return its seconds, the share of them that it waited, and that share since the start."""
        seconds = time.perf_counter() - self.began
        self._seconds += seconds
        self._waited += self.waited
        return seconds, self.waited / seconds, self._waited / self._seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began


class Log:
    """Send rows to metrics.jsonl and to the watchers, and remember the last step and validation.

    run: None in a process that writes nothing.  step: the steps done so far.
    """

    def __init__(self, run: RunFolder | None, step: int, validation: Row | None, watchers: Sequence[Watcher]) -> None:
        self.run, self.watchers = run, watchers
        self.validation = validation  # the last one
        self.step = step  # steps done

    def __call__(self, row: Row) -> None:
        if self.run is not None:
            self.run.log(row)
        self.step = row["step"]
        if row["kind"] == "validation":
            self.validation = row
        for watch in self.watchers:
            watch(row)


def tensorboard(folder: Path, step: int) -> Watcher:
    """Return a watcher that writes every number of a row as a curve into `folder`, replacing what follows `step`.

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


class StopSignals:
    """Let a step finish: within this context the first SIGINT or SIGTERM is only recorded, in `received`.

    A second SIGINT interrupts as usual.  Outside the main thread, where Python cannot catch signals, it does nothing.
    """

    def __init__(self) -> None:
        self.received = 0  # the signal's number; 0: none
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        signal.signal(signal.SIGINT, signal.default_int_handler)
