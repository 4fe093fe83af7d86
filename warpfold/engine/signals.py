"""Stopping in good order: Ctrl-C and SIGTERM let the work at hand finish."""

import signal
import threading
from types import FrameType, TracebackType


class StopSignals:
    """Within it, the first SIGINT or SIGTERM is only noted, as `came`; a second SIGINT interrupts as usual.

    In a thread other than the main one, where signals cannot be caught, none is noted.
    """

    def __init__(self) -> None:
        self.came = 0  # the signal's number; 0: none came
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.came = self.came or number
        signal.signal(signal.SIGINT, signal.default_int_handler)
