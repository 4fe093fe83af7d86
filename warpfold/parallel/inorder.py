"""Calls in a thread of their own: what has to wait and must not hold up the backward pass."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType


class InOrder:
    """Calls made one after another by a thread of their own, which does not keep the process from ending."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        threading.Thread(target=_run, args=(self._calls,), daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Have `call` made after those before it; the future's result raises what it raised."""
        future: Future[None] = Future()
        self._calls.put((future, call))
        return future


@dataclass
class _Outcome:
    """Within it, an error goes into the future, to be raised where its result is asked for."""

    future: Future[None]

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)
        return True


def _run(calls: SimpleQueue[tuple[Future[None], Callable[[], None]] | None]) -> None:
    while (item := calls.get()) is not None:
        future, call = item
        with _Outcome(future):
            call()
        del item, future, call  # nothing is kept alive while there is nothing to do
