"""The step timer, the log and the stop signals of a training loop."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from warpfold.engine.checkpoint import RunFolder
from warpfold.engine.watch import Phase, PhaseName, Row, Watcher


class StepTimer:
    """Measure the time of steps and the share of it that they wait for examples, for the last step and for all."""

    def __init__(self) -> None:
        self.seconds = self._waited = 0.0  # of completed steps
        self.count = 0
        # The first step takes longer, since it compiles and allocates.
        self.first = 0.0
        self.began, self.waited = time.perf_counter(), 0.0

    def begin(self) -> None:
        """Begin a step.  The time since the end of the previous step is not counted."""
        self.began, self.waited = time.perf_counter(), 0.0

    def end(self) -> tuple[float, float, float]:
        """End a step; return its seconds, the share of them spent waiting, and that share of all steps."""
        seconds = time.perf_counter() - self.began
        self.seconds, self.count = self.seconds + seconds, self.count + 1
        self.first = self.first or seconds
        self._waited += self.waited
        return seconds, self.waited / seconds, self._waited / self.seconds

    @property
    def mean(self) -> float:
        """The mean seconds of a step, without the first if there are others; 0 before the first."""
        return (self.seconds - self.first) / (self.count - 1) if self.count > 1 else self.seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began


class Log:
    """Write rows to metrics.jsonl, and send rows and phases to the watchers, which are active within the context.

    run: None in a process that writes nothing.
    step: the number of steps done before, out of `steps`.
    validation: the row of the last validation, if there is one.
    """

    def __init__(
        self, run: RunFolder | None, step: int, steps: int, validation: Row | None, watchers: Sequence[Watcher]
    ) -> None:
        self.run, self.watchers = run, watchers
        self.validation = validation
        self.step, self.steps = step, steps
        self.finished = False  # passed to the watchers
        self.on_all = False  # all ranks need whole rows

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
        """Send the watchers the current phase.  left: seconds until the run ends."""
        phase = Phase(name=name, step=self.step, steps=self.steps, done=done, total=total, left=left)
        for watcher in self.watchers:
            watcher.on_phase(phase)


class StopSignals:
    """Record the first SIGINT or SIGTERM in `received` within this context, so that a step can finish.

    A second SIGINT interrupts as usual.  Outside the main thread Python cannot catch signals, and nothing is recorded.
    answer: called by the handler of the first signal, wherever the program is.
    """

    def __init__(self, answer: Callable[[], object] = lambda: None) -> None:
        self.received = 0  # signal number; 0: none
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
