"""Collectives under way, and waiting for them: noted as long as it lasts, so that a watchdog can end a wait.

Whatever fails while this process waits for others is a `LostError`: what counts is where it was raised, never what its
message says.
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
    """Something that this process waits for now."""

    name: str
    began: float  # time.monotonic


_numbers = count()
_now: dict[int, Wait] = {}
_saving: set[int] = set()


def now() -> dict[int, Wait]:
    """Return the waits of this process at this moment, by a number that is never used again."""
    return dict(_now)


@contextmanager
def waiting(name: str) -> Iterator[None]:
    """Note that this thread waits for others.

    Errors: LostError for any RuntimeError that ends the wait, which is its cause.
    """
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
    """Note that this thread writes what would be lost with the process: a checkpoint."""
    number = next(_numbers)
    _saving.add(number)
    try:
        yield
    finally:
        _saving.remove(number)


def is_saving() -> bool:
    """Return whether a thread of this process writes a checkpoint at this moment."""
    return bool(_saving)


@dataclass(frozen=True)
class Work:
    """A collective under way; None: one that has ended already."""

    work: dist.Work | None
    name: str

    def wait(self) -> None:
        """Wait until it has ended; on a GPU, have the current stream wait."""
        if self.work is not None:
            with waiting(self.name):
                self.work.wait()


@dataclass(frozen=True)
class Event:
    """The start of a collective, or the wait for it.  Of gradients only starts are told, without a number."""

    what: Literal["start", "wait"]
    name: str  # which tensor of which layer
    kind: str  # "all_gather", "reduce_scatter", "all_to_all", "sendrecv", "all_reduce"
    bytes: int  # that this rank sends to others
    number: int = -1  # counts collectives in the order in which they start; the same on every rank
    backward: bool = False
    carries: Literal["slices", "gradients"] = "slices"  # of an example; or gradients or weights

    @property
    def title(self) -> str:
        """What to call it in a message."""
        return f"{self.kind} of {self.name}{' (backward)' if self.backward else ''}"


_watchers: list[Callable[[Event], None]] = []


@contextmanager
def watched(watcher: Callable[[Event], None]) -> Iterator[None]:
    """Call `watcher` with every event of this process, as long as the context lasts."""
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
    """A thread that makes calls one after another: those that wait, and must not hold up the backward pass.

    Unlike an executor's, it does not keep the process from ending while it waits for ranks that are gone.
    """

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
    """Put what the block raises into the future, to be raised where its result is asked for."""

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
        del item, future, call  # so that nothing is kept alive while the thread is idle
