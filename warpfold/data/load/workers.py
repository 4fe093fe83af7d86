"""Processes that make examples ahead of time: kept for the whole run, replaced when they die.

Arrays lie in memory that both processes have (data/load/blocks.py): no pickle, and no /dev/shm, which is 64 MB in most
containers.  Through a pipe go

    job        JSON: [blocks that may be used again, arguments of `make`]
    answer     JSON: {"written": `Written`}, and then the descriptor of a new block; or {"refused": reason};
               {"ready": true} when the process begins, {"unreachable": reason} when the data are not there,
               {"failed": traceback} when a bug ends it
"""

import contextlib
import json
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import numpy as np

from warpfold import device
from warpfold.bulk import end_with_parent
from warpfold.data.load.blocks import BlockReader, BlockWriter, Layout, received, send
from warpfold.errors import StorageError, UserError

Make = Callable[..., Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Made:
    """A finished job: a buffer, and where the arrays lie in it."""

    layout: Layout
    buffer: Any


@dataclass(frozen=True)
class Failed:
    """A job that cannot be done, for a damaged entry say.

    killed: its process was killed, by the kernel for lack of memory, by a fault, or by someone.
    """

    reason: str
    killed: bool = False


Outcome = Made | Failed


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    ready: bool = False
    job: tuple[int | None, Sequence[Any]] | None = None  # ticket (None: dropped), arguments
    blocks: BlockReader = field(default_factory=BlockReader)


class Workers:
    """`count` processes that each call `make` with the arguments of one job after another.

    make: a picklable callable that returns arrays by name.  Its UserError or MemoryError is the job's outcome;
    `StorageError`, and other exceptions, which are bugs, are raised in the caller.  buffer: makes a buffer of a given
    size to copy arrays into, anything that NumPy can view; by default they stay in the memory shared with the worker,
    which uses it again when no view of them is left.  preload: modules that the fork server loads, besides that of
    `make`.
    `changed` is notified of new outcomes, and must be held while `outcomes` is touched.
    """

    def __init__(
        self, make: Make, count: int, buffer: Callable[[int], Any] | None = None, preload: Sequence[str] = ()
    ) -> None:
        self.outcomes: dict[int, Outcome] = {}  # by ticket; the caller removes them
        self.changed = threading.Condition()
        self._make, self._buffer = make, buffer
        self._waiting: deque[tuple[int, Sequence[Any]]] = deque()
        self._failed_starts = 0  # processes that died when they started, in a row
        # A fork server loads the libraries once and shares their memory: a worker costs 4 MB of its own instead of
        # 140, and starts at once (docs/explanation/parallel_training.md).
        self._context: ForkServerContext | SpawnContext = get_context("spawn")
        if "forkserver" in get_all_start_methods():
            self._context = get_context("forkserver")
            self._context.set_forkserver_preload([make.__module__, *preload])
        self._workers = [self._start() for _ in range(count)]
        self._wake, self._woken = self._context.Pipe()
        self._closing = False
        self._error: BaseException | None = None  # what ended the receiving thread
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, ticket: int, job: Sequence[Any]) -> None:
        """Queue a job for the next free process; its outcome will be `outcomes[ticket]`."""
        with self.changed:
            self._waiting.append((ticket, job))
            self._hand_out()

    def drop(self) -> None:
        """Drop all jobs and outcomes.  Results of jobs that are running now are discarded."""
        with self.changed:
            self._waiting.clear()
            self.outcomes.clear()
            for worker in self._workers:
                if worker.job is not None:
                    worker.job = None, worker.job[1]

    def wait(self) -> None:
        """Wait, holding `changed`, for news; raise the error that ended the receiving thread, if one did."""
        if self._error is None:
            self.changed.wait()
        if self._error is not None:
            raise self._error

    def processes(self) -> list[int]:
        """Return the process ids, for measurements."""
        with self.changed:
            return [worker.process.pid or 0 for worker in self._workers]

    def close(self) -> None:
        """Kill the processes: they hold nothing worth keeping."""
        self._closing = True
        self._wake.close()
        with self.changed:
            for worker in self._workers:
                worker.process.kill()
        self._thread.join()
        for worker in self._workers:
            worker.process.kill()  # also one that `_serve` started in the meantime
            worker.process.join()
            worker.pipe.close()
        self._woken.close()

    def _start(self) -> _Worker:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_work, args=(_Environment(), there, self._make), daemon=True)
        with device.one_thread():
            process.start()
        there.close()
        return _Worker(process, here)

    def _hand_out(self) -> None:
        for worker in self._workers:
            if self._waiting and worker.ready and worker.job is None:
                worker.job = self._waiting.popleft()
                with contextlib.suppress(ConnectionError):  # it has just died, and `_serve` will notice
                    worker.pipe.send_bytes(json.dumps([worker.blocks.returned(), worker.job[1]]).encode())

    def _run(self) -> None:
        """Run the receiving thread; if an error ends it, hand the error to the waiting thread."""

        def ended(kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
            with self.changed:
                self._error = error
                self.changed.notify_all()
            return True

        with contextlib.ExitStack() as stack:
            stack.push(ended)
            self._serve()

    def _serve(self) -> None:
        """Receive answers as they come, keep every process busy, and replace those that die."""
        while True:
            by_pipe = {worker.pipe: worker for worker in self._workers}
            for pipe in wait([self._woken, *by_pipe]):
                if self._closing:
                    return
                worker = by_pipe[pipe]  # type: ignore[index]
                try:
                    outcome = self._receive(worker)
                except (EOFError, ConnectionError):
                    if self._closing:
                        return
                    outcome = self._replace_dead(worker)
                with self.changed:
                    if worker.job is not None and outcome is not None:
                        ticket, worker.job = worker.job[0], None
                        if ticket is not None:
                            self.outcomes[ticket] = outcome
                    outcome = None  # it may be the last that holds a block
                    self._hand_out()
                    self.changed.notify_all()

    def _receive(self, worker: _Worker) -> Outcome | None:
        answer = json.loads(worker.pipe.recv_bytes())
        if "ready" in answer:
            worker.ready, self._failed_starts = True, 0
            return None
        if "refused" in answer:
            return Failed(answer["refused"])
        if "unreachable" in answer:
            raise StorageError(answer["unreachable"])
        if "failed" in answer:
            raise RuntimeError(f"a loader process failed:\n{answer['failed']}")
        written = received(worker.pipe, answer["written"])
        shared = worker.blocks.read(written)
        if self._buffer is None:
            return Made(written.layout, shared)
        buffer = self._buffer(written.size)
        np.copyto(np.asarray(buffer), shared)
        return Made(written.layout, buffer)

    def _replace_dead(self, worker: _Worker) -> Outcome:
        """Replace a process that died, and return the outcome of its job."""
        worker.process.join()
        code = worker.process.exitcode or 0
        if code == 1:
            raise RuntimeError(
                "a loader process could not start, by an error that it has printed; a script that has workers needs "
                "`if __name__ == '__main__':` around what it does"
            )
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        how += " (too little memory?)" if code == -signal.SIGKILL else ""
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts > len(self._workers):
                raise UserError(f"each loader process {how} when it started. Use fewer workers")
        worker.pipe.close()
        with self.changed:
            self._workers[self._workers.index(worker)] = self._start()
        return Failed(f"the process that made it {how}", killed=True)


class _Environment:
    """The variables of this process's environment, which another has when it reads this: a fork server has old ones."""

    def __reduce__(self) -> tuple[Callable[[dict[str, str]], None], tuple[dict[str, str]]]:
        return _set_environment, (dict(os.environ),)


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def _work(_: None, pipe: Connection, make: Make) -> None:
    """Run a worker process: make examples until the parent is gone."""
    # Ctrl-C and SIGTERM are meant for the training process alone, which ends its workers itself.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    with contextlib.suppress(EOFError, ConnectionError), contextlib.ExitStack() as stack:  # until the parent is gone
        stack.push(lambda kind, error, trace: _report(pipe, error))
        _tell(pipe, ready=True)
        blocks = BlockWriter()
        while True:
            returned, job = json.loads(pipe.recv_bytes())
            blocks.returned(returned)
            try:
                arrays = make(*job)
            except StorageError as error:
                _tell(pipe, unreachable=str(error))
            except (UserError, MemoryError) as error:
                _tell(pipe, refused=str(error) or "too little memory")
            else:
                send(pipe, blocks.write(arrays))


def _report(pipe: Connection, error: BaseException | None) -> bool:
    """Send the parent the traceback of a bug, to raise it there; return True so that this process prints no other."""
    if error is None or isinstance(error, EOFError | ConnectionError):
        return False
    _tell(pipe, failed="".join(traceback.format_exception(error)))
    return True


def _tell(pipe: Connection, **answer: Any) -> None:
    pipe.send_bytes(json.dumps(answer).encode())
