"""Waits for collectives, recorded while they last so that a watchdog can end them, and events for observers.

Any error that is raised while this process waits for others becomes a `LostError`. The place of the error decides,
never its message.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from types import TracebackType
from typing import Literal

import torch.distributed as dist

from warpfold.errors import LostError


@dataclass(frozen=True)
class Wait:
    """A wait of this process that lasts now. began: in seconds of time.monotonic."""

    name: str
    began: float


_numbers = count()
_now: dict[int, Wait] = {}
_saving: set[int] = set()


def now() -> dict[int, Wait]:
    """Return the present waits of this process, by their unique numbers."""
    return dict(_now)


@contextmanager
def waiting(name: str) -> Iterator[None]:
    """Record that this thread waits for other processes. Raises LostError from any RuntimeError that ends the wait."""
    number, wait = next(_numbers), Wait(name, time.monotonic())
    _now[number] = wait
    try:
        yield
    except LostError:
        raise
    except RuntimeError as error:
        raise LostError(name, time.monotonic() - wait.began, error) from error
    finally:
        del _now[number]


@contextmanager
def saving() -> Iterator[None]:
    """Record that this thread writes a checkpoint, so that the watchdog postpones ending the process."""
    number = next(_numbers)
    _saving.add(number)
    try:
        yield
    finally:
        _saving.remove(number)


def is_saving() -> bool:
    """Return whether a thread of this process is writing a checkpoint."""
    return bool(_saving)


@dataclass(frozen=True)
class Work:
    """A collective in flight; work is None if it has already ended."""

    work: dist.Work | None
    name: str

    def wait(self) -> None:
        """Wait for the collective. On a GPU, the current stream waits instead of the host."""
        if self.work is not None:
            with waiting(self.name):
                self.work.wait()


@dataclass(frozen=True)
class Event:
    """The start of a collective, or the wait for it. Collectives of gradients report only starts, without a number.

    name: the layer and tensor. kind: "all_gather", "reduce_scatter", "all_to_all", "sendrecv", "all_reduce" or
    "broadcast". bytes: sent by this rank to others.
    number: counts collectives in the order in which they start, equally on every rank.
    carries: shards of an example ("slices"), or gradients or weights ("gradients").
    """

    what: Literal["start", "wait"]
    name: str
    kind: str
    bytes: int
    number: int = -1
    backward: bool = False
    carries: Literal["slices", "gradients"] = "slices"

    @property
    def title(self) -> str:
        """Name of the collective in messages."""
        return f"{self.kind} of {self.name}{' (backward)' if self.backward else ''}"


_watchers: list[Callable[[Event], None]] = []


@contextmanager
def watched(watcher: Callable[[Event], None]) -> Iterator[None]:
    """Call `watcher` with every event of this process within the context."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def tell(event: Event) -> None:
    """Call every watcher with an event."""
    for watcher in _watchers:
        watcher(event)


class SerialThread:
    """A thread that runs blocking calls one after another, so that they do not delay the backward pass.

    Unlike the thread of an executor, it does not keep the process alive while it waits for lost ranks.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        threading.Thread(target=_run, args=(self._calls,), daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Run `call` after all earlier calls. The result of the future raises the error of the call."""
        future: Future[None] = Future()
        self._calls.put((future, call))
        return future


@dataclass
class _Outcome:
    """Store an error of the block in the future, which raises it when its result is requested."""

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
        # Keep nothing alive while the thread is idle.
        del item, future, call
