"""Run worker processes that compute examples ahead of time. They live for the whole run and are replaced if they die.

Arrays are passed in shared memory (data/load/blocks.py). Neither pickle nor /dev/shm is used, which has only 64 MB in
most containers. The pipe carries these messages:

    job        JSON: [released blocks, arguments of `make`]
    answer     JSON: {"written": `Written`}, followed by the descriptor of a new block; or {"refused": reason};
               {"ready": true} at the start of the process; {"unreachable": reason} if the data cannot be accessed;
               {"failed": traceback} if a bug ends the process
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
from warpfold.data.load.blocks import BlockReader, BlockWriter, Layout, receive, send
from warpfold.errors import StorageError, UserError

Make = Callable[..., Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Made:
    """A finished job: a buffer, and the layout of the arrays in it."""

    layout: Layout
    buffer: Any


@dataclass(frozen=True)
class Failed:
    """A failed job, for example of a damaged entry.

    killed: its process was killed: out of memory, by a segmentation fault, or by a user.
    """

    reason: str
    killed: bool = False


Outcome = Made | Failed


@dataclass
class _Worker:
    """A worker process. job: ticket (None if the job was dropped) and arguments of the running job."""

    process: BaseProcess
    pipe: Connection
    ready: bool = False
    job: tuple[int | None, Sequence[Any]] | None = None
    blocks: BlockReader = field(default_factory=BlockReader)


class Workers:
    """A pool of `count` processes that call `make` with the arguments of each job.

    make: a picklable callable that returns arrays by name. Its UserError or MemoryError becomes the job's outcome.
    `StorageError`, and other exceptions, which are bugs, are raised in the caller. buffer: allocates a buffer of a
    given size, which NumPy can view, to which the arrays are copied. By default they remain in the memory shared with
    the worker, which reuses it when no view of them is left. preload: modules that the fork server imports in addition
    to that of `make`.

    The condition `changed` is notified of new outcomes, and must be held to access `outcomes`.
    """

    def __init__(
        self, make: Make, count: int, buffer: Callable[[int], Any] | None = None, preload: Sequence[str] = ()
    ) -> None:
        # By ticket. The caller removes them.
        self.outcomes: dict[int, Outcome] = {}
        self.changed = threading.Condition()
        self._make, self._buffer = make, buffer
        self._waiting: deque[tuple[int, Sequence[Any]]] = deque()
        # Number of consecutive processes that died at their start.
        self._failed_starts = 0
        # A fork server imports the libraries once and shares their memory. A worker then needs 4 MB instead of 140 MB
        # and starts immediately (docs/explanation/parallel_training.md).
        self._context: ForkServerContext | SpawnContext = get_context("spawn")
        if "forkserver" in get_all_start_methods():
            self._context = get_context("forkserver")
            self._context.set_forkserver_preload([make.__module__, *preload])
        self._workers = [self._start() for _ in range(count)]
        self._wake, self._woken = self._context.Pipe()
        self._closing = False
        # The error that ended the receiving thread.
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, ticket: int, job: Sequence[Any]) -> None:
        """Queue a job for the next free process. Its outcome will be in `outcomes[ticket]`."""
        with self.changed:
            self._waiting.append((ticket, job))
            self._hand_out()

    def drop(self) -> None:
        """Drop all jobs and outcomes. The results of running jobs will be discarded."""
        with self.changed:
            self._waiting.clear()
            self.outcomes.clear()
            for worker in self._workers:
                if worker.job is not None:
                    worker.job = None, worker.job[1]

    def wait(self) -> None:
        """Wait for a new outcome while holding `changed`. Raises the error that ended the receiving thread, if any."""
        if self._error is None:
            self.changed.wait()
        if self._error is not None:
            raise self._error

    def processes(self) -> list[int]:
        """Return the process ids (for measurements)."""
        with self.changed:
            return [worker.process.pid or 0 for worker in self._workers]

    def close(self) -> None:
        """Kill the processes, which hold no state."""
        self._closing = True
        self._wake.close()
        with self.changed:
            for worker in self._workers:
                worker.process.kill()
        self._thread.join()
        for worker in self._workers:
            # `_serve` may have started another process in the meantime.
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self._woken.close()

    def _start(self) -> _Worker:
        """Start a worker process."""
        own_end, worker_end = self._context.Pipe()
        process = self._context.Process(target=_work, args=(_Environment(), worker_end, self._make), daemon=True)
        with device.one_thread():
            process.start()
        worker_end.close()
        return _Worker(process, own_end)

    def _hand_out(self) -> None:
        """Send waiting jobs to idle processes."""
        for worker in self._workers:
            if self._waiting and worker.ready and worker.job is None:
                worker.job = self._waiting.popleft()
                # `_serve` notices if the process has just died.
                with contextlib.suppress(ConnectionError):
                    worker.pipe.send_bytes(json.dumps([worker.blocks.returned(), worker.job[1]]).encode())

    def _run(self) -> None:
        """Run the receiving thread. An error that ends it is passed to the waiting thread."""

        def ended(kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
            with self.changed:
                self._error = error
                self.changed.notify_all()
            return True

        with contextlib.ExitStack() as stack:
            stack.push(ended)
            self._serve()

    def _serve(self) -> None:
        """Receive answers, keep all processes busy, and replace processes that die."""
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
                    # This may be the last reference to a block.
                    outcome = None
                    self._hand_out()
                    self.changed.notify_all()

    def _receive(self, worker: _Worker) -> Outcome | None:
        """Receive an answer of a process. Returns the outcome of its job, or None if it has just started."""
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
        written = receive(worker.pipe, answer["written"])
        shared = worker.blocks.read(written)
        if self._buffer is None:
            return Made(written.layout, shared)
        buffer = self._buffer(written.size)
        np.copyto(np.asarray(buffer), shared)
        return Made(written.layout, buffer)

    def _replace_dead(self, worker: _Worker) -> Outcome:
        """Replace a process that died; returns the outcome of its job."""
        worker.process.join()
        code = worker.process.exitcode or 0
        if code == 1:
            raise RuntimeError(
                "a loader process could not start because of the error that it has printed; a script that uses workers "
                "needs `if __name__ == '__main__':` around its main code"
            )
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        cause += " (too little memory?)" if code == -signal.SIGKILL else ""
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts > len(self._workers):
                raise UserError(f"each loader process {cause} when it started. Use fewer workers.")
        worker.pipe.close()
        with self.changed:
            self._workers[self._workers.index(worker)] = self._start()
        return Failed(f"the process that made it {cause}", killed=True)


class _Environment:
    """Copy the environment variables of this process to the one that unpickles this. A fork server has old values."""

    def __reduce__(self) -> tuple[Callable[[dict[str, str]], None], tuple[dict[str, str]]]:
        return _set_environment, (dict(os.environ),)


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def _work(_: None, pipe: Connection, make: Make) -> None:
    """Run a worker process, which computes examples until the parent process ends."""
    # Ctrl-C and SIGTERM are meant only for the training process, which ends its workers itself.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    # These exceptions mean that the parent process has ended.
    with contextlib.suppress(EOFError, ConnectionError), contextlib.ExitStack() as stack:
        stack.push(lambda kind, error, trace: _report(pipe, error))
        _send_answer(pipe, ready=True)
        blocks = BlockWriter()
        while True:
            returned, job = json.loads(pipe.recv_bytes())
            blocks.returned(returned)
            try:
                arrays = make(*job)
            except StorageError as error:
                _send_answer(pipe, unreachable=str(error))
            except (UserError, MemoryError) as error:
                _send_answer(pipe, refused=str(error) or "too little memory")
            else:
                send(pipe, blocks.write(arrays))


def _report(pipe: Connection, error: BaseException | None) -> bool:
    """Send the traceback of a bug to the parent, which raises it. Returns True to suppress its output here."""
    if error is None or isinstance(error, EOFError | ConnectionError):
        return False
    _send_answer(pipe, failed="".join(traceback.format_exception(error)))
    return True


def _send_answer(pipe: Connection, **answer: Any) -> None:
    """Send an answer as JSON."""
    pipe.send_bytes(json.dumps(answer).encode())
