"""The surroundings of a training loop: its timer, its log, its stop signals."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from warpfold.engine.checkpoint import RunFolder
from warpfold.engine.watch import Phase, PhaseName, Row, Watcher


class StepTimer:
    """Measure how long steps take, and how much of that they wait: the last one, and all since the start."""

    def __init__(self) -> None:
        self.seconds = self._waited = 0.0  # of the steps before
        self.count, self.first = 0, 0.0  # of these steps; seconds of the first, in which much is made for the others
        self.began, self.waited = time.perf_counter(), 0.0

    def begin(self) -> None:
        """Begin a step; the time since the end of the previous one is not counted."""
        self.began, self.waited = time.perf_counter(), 0.0

    def end(self) -> tuple[float, float, float]:
        """End a step; return its seconds, the share of them that it waited, and that share since the start."""
        seconds = time.perf_counter() - self.began
        self.seconds, self.count = self.seconds + seconds, self.count + 1
        self.first = self.first or seconds
        self._waited += self.waited
        return seconds, self.waited / seconds, self._waited / self.seconds

    @property
    def mean(self) -> float:
        """Return the mean seconds of a step, the first apart as long as there are others; 0 before it."""
        return (self.seconds - self.first) / (self.count - 1) if self.count > 1 else self.seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began


class Log:
    """Send rows to metrics.jsonl and rows and phases to the watchers; remember the last step and validation.

    run: None in a process that writes nothing.  step: the steps done so far, of `steps`.  Within its context the
    watchers watch.
    """

    def __init__(
        self, run: RunFolder | None, step: int, steps: int, validation: Row | None, watchers: Sequence[Watcher]
    ) -> None:
        self.run, self.watchers = run, watchers
        self.validation = validation  # the last one
        self.step, self.steps = step, steps  # done, and of the whole run
        self.finished = False  # whether the watchers are to be told so at the end
        self.on_all = False  # whether others than rank 0 have watchers, so that all ranks need whole rows

    def __enter__(self) -> "Log":
        for watcher in self.watchers:
            watcher.on_begin(self.step)
        return self

    def __exit__(self, *_: object) -> None:
        for watcher in self.watchers:
            watcher.on_end(self.finished)

    def __call__(self, row: Row) -> None:
        row = {**row, "time": round(time.time(), 3)}
        if self.run is not None:
            self.run.log(row)
        self.step = row["step"]
        if row["kind"] == "validation":
            self.validation = row
        for watcher in self.watchers:
            watcher.on_metrics(row)

    def phase(self, name: PhaseName, done: int = 0, total: int = 0, left: float | None = None) -> None:
        """Tell the watchers what the run does now.  left: seconds until it ends."""
        found = Phase(name=name, step=self.step, steps=self.steps, done=done, total=total, left=left)
        for watcher in self.watchers:
            watcher.on_phase(found)


class StopSignals:
    """Let a step finish: within this context the first SIGINT or SIGTERM is only recorded, in `received`.

    A second SIGINT interrupts as usual.  Outside the main thread, where Python cannot catch signals, it does nothing.
    answer: called at once with the first one, wherever the program is.
    """

    def __init__(self, answer: Callable[[], object] = lambda: None) -> None:
        self.received = 0  # the signal's number; 0: none
        self.answer = answer
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
        first, self.received = not self.received, self.received or number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if first:
            self.answer()
