"""Bulk work through `concurrent.futures.Executor`: in this process, in worker processes, or on a Dask cluster.

A job is a picklable argument of a module-level function that returns plain data, the same on every call.  Results come
in the order of the jobs, so that the files made from them have the same bytes for any number of workers.

A `WorkerPool`, which `pool` chooses, runs the jobs.  The future of `submit` has the result, or raises
`BrokenProcessPool` or one of `deaths_on_cluster()` if the worker died.  A task of a job array runs a `JobPart` of the
jobs in any of these ways.
"""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from warpfold import __version__
from warpfold.errors import UserError

if TYPE_CHECKING:
    from distributed import Client

DEATHS = 3  # consecutive deaths of local processes before a run gives up
# Jobs submitted at a time, including finished ones that wait for a slow one before them.
AHEAD = 64
SHOWN = 3  # last lines of a failed program's output

Job = TypeVar("Job")
Result = TypeVar("Result")


class WorkerPool(Executor):
    """An executor with the number of jobs that it runs at a time, `size`; on a cluster, the number at the start."""

    size: int


@contextmanager
def pool(workers: int = 1, cluster: str | None = None) -> Iterator[WorkerPool | None]:
    """Yield an executor of processes or of a cluster, or None if this process runs the jobs (one worker).

    cluster: the address of a Dask scheduler, "tcp://host:8786"; `workers` is then ignored.
    Each process of this machine chooses its own GPU (`worker_number`).  The user assigns GPUs to Dask's workers.
    An exception drops the jobs that are still waiting.
    Errors: UserError if the cluster cannot be reached or its package is not installed, or if a worker process died.
    """
    if cluster is not None:
        with _dask(cluster) as executor:
            yield executor
    elif workers <= 1:
        yield None
    else:
        executor = ProcessPool(workers)
        try:
            yield executor
        except BrokenProcessPool:
            raise UserError(
                "worker processes died repeatedly, most likely for lack of memory; use fewer workers"
            ) from None
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


class ProcessPool(WorkerPool):
    """Worker processes of this machine, replaced when they die.

    When one dies, all jobs that wait or run fail with `BrokenProcessPool`; later ones get new processes.
    """

    def __init__(self, workers: int) -> None:
        self.size = workers
        self._executor = self._start()

    def _start(self) -> ProcessPoolExecutor:
        context = get_context("spawn")
        return ProcessPoolExecutor(
            self.size, mp_context=context, initializer=_begin_worker, initargs=(context.Value("i", 0),)
        )

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """Submit a job."""
        try:
            return self._executor.submit(fn, *args, **kwargs)
        except BrokenProcessPool:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = self._start()
            return self._executor.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes."""
        self._executor.shutdown(wait=wait, cancel_futures=cancel_futures)


_number: int | None = None


def _begin_worker(counter: Any) -> None:
    global _number
    with counter.get_lock():
        _number, counter.value = counter.value, counter.value + 1
    end_with_parent()


def worker_number() -> int | None:
    """Return the number of this process in its pool, from 0, which selects its GPU; None outside a pool."""
    return _number


class ProcessDied(Exception):
    """A job killed the process that ran it."""


class IsolatedProcess:
    """A process for jobs that may kill it, one at a time; after a death the next job gets a new process.

    Use as a context manager.
    """

    def __init__(self) -> None:
        self._process: ProcessPool | None = None

    def start(self, function: Callable[..., Any]) -> ProcessPool:
        """Start the process and import the module of a function, so that no job is blamed for a failure of that.

        Errors: UserError if the process cannot be started.
        """
        if self._process is None:
            self._process = ProcessPool(1)
        try:
            self._process.submit(_name_of, function).result()
        except BrokenProcessPool:
            raise UserError("worker processes cannot be started; a script needs `if __name__ == '__main__'`") from None
        return self._process

    def __call__(self, function: Callable[[Job], Result], job: Job) -> Result:
        """Return `function(job)`.  Errors: `ProcessDied` if the process died; as in `start`."""
        process = self.start(function)
        try:
            return process.submit(function, job).result()
        except BrokenProcessPool:
            raise ProcessDied from None

    def __enter__(self) -> "IsolatedProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.shutdown(wait=True, cancel_futures=True)


def deaths_on_cluster() -> tuple[type[Exception], ...]:
    """Return the exceptions that a job's future raises after the job has killed several workers of a cluster.

    A cluster tries a job again itself.  In a process pool, all waiting and running futures fail with
    `BrokenProcessPool`.
    """
    dask = sys.modules.get("distributed.scheduler")
    return (dask.KilledWorker,) if dask else ()


def end_with_parent() -> None:
    """End this child process as soon as its parent has ended, even if the parent is killed."""
    parent = parent_process()

    def wait_and_end() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    Thread(target=wait_and_end, daemon=True).start()


def require_cluster(address: str) -> None:
    """Raise UserError if Dask is not installed."""
    try:
        import distributed.scheduler  # noqa: F401
    except ImportError:
        raise UserError(f"--cluster {address}: needs Dask; pip install '.[cluster]'") from None


class DaskPool(WorkerPool):
    """The workers of a Dask cluster, which runs a job again if its worker died."""

    def __init__(self, client: "Client") -> None:
        self.size = max(1, sum(client.nthreads().values()))
        self._executor = client.get_executor(pure=False)

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """Submit a job."""
        future: Future[Result] = self._executor.submit(fn, *args, **kwargs)
        return future


@contextmanager
def _dask(address: str) -> Iterator[WorkerPool]:
    require_cluster(address)
    from distributed import Client
    from distributed.scheduler import KilledWorker

    try:
        client = Client(address, timeout="15s", set_as_default=False)
    except (OSError, ValueError) as error:
        raise UserError(f"--cluster {address}: no Dask scheduler answers there ({_reason(error)})") from None
    with client:
        _check_versions(address, _versions_on_dask(client))
        try:
            yield DaskPool(client)
        except KilledWorker as error:
            raise UserError(f"--cluster {address}: the workers of a job died repeatedly ({_reason(error)})") from None


def _versions_on_dask(client: "Client") -> Iterator[tuple[str, object]]:
    """Yield the WarpFold versions of a scheduler and its current workers, or the errors."""
    try:
        yield "its scheduler", client.run_on_scheduler(_version)
    except (ImportError, AttributeError) as error:
        yield "its scheduler", error
    yield from client.run(_version, on_error="return").items()


def _check_versions(address: str, found: Iterable[tuple[str, object]]) -> None:
    """Raise UserError unless all of them run this version of WarpFold."""
    for node, version in found:
        if version != __version__:
            raise UserError(f"--cluster {address}: {node} has no WarpFold {__version__} ({version}); install it there")


def _reason(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _version() -> str:
    return __version__


def _name_of(function: Callable[..., Any]) -> str:
    """Return a function's name.  The process that runs this has imported the function's module."""
    return function.__name__


def run_program(command: Sequence[str]) -> str:
    """Run a program and return its output; an exception ends the program and its children.

    Errors: UserError, with its last lines, if it fails, or if it is not installed.
    """
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
    except FileNotFoundError:
        raise UserError(f"`{command[0]}` is not on PATH of the machine that does this job; install it there") from None
    with process:
        try:
            output, errors = process.communicate()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        words = [line.strip() for line in (errors.strip() or output.strip()).splitlines() if line.strip()]
        name = " ".join([Path(command[0]).name, *command[1:2]])
        raise UserError(f"`{name}` failed ({process.returncode}): {' / '.join(words[-SHOWN:]) or 'no output'}")
    return output


def in_order(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    executor: Executor | None,
    ahead: int | None = None,
    again: Callable[[list[Job]], list[Job]] = list,
) -> Iterator[Result]:
    """Yield `function` of each job, in the order of the jobs.

    ahead: the largest number of submitted jobs, whose results may be in memory; None: `AHEAD`, or twice the size of a
    larger pool.
    Jobs whose process died, and jobs that waited for one, run again.  again: returns the rest of each of these jobs.
    Errors: exceptions of `function`; `BrokenProcessPool` if `DEATHS` processes die one after another.
    """
    if executor is None:
        yield from map(function, jobs)
        return
    if ahead is None:
        ahead = max(AHEAD, 2 * executor.size) if isinstance(executor, WorkerPool) else AHEAD
    waiting: deque[tuple[Job, Future[Result]]] = deque()
    queue = iter(jobs)
    for _ in jobs:
        waiting.extend((job, executor.submit(function, job)) for job in islice(queue, ahead - len(waiting)))
        for death in range(1, DEATHS + 1):
            try:
                result = waiting[0][1].result()
                break
            except BrokenProcessPool:
                if death == DEATHS:
                    raise
                # When this returns, all processes of the broken pool have ended.
                executor.submit(_version)
                ended = [index for index, (_, future) in enumerate(waiting) if future.done()]
                died = [index for index in ended if isinstance(waiting[index][1].exception(), BrokenProcessPool)]
                for index, job in zip(died, again([waiting[index][0] for index in died])):
                    waiting[index] = job, executor.submit(function, job)
        waiting.popleft()
        yield result


@dataclass(frozen=True)
class JobPart:
    """One of `count` parts of a list of jobs, numbered from 1, for a task of a job array."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "JobPart":
        """Parse "3/8", the third of eight.  Errors: UserError for anything else."""
        number, slash, count = text.partition("/")
        whole = slash and number.isdecimal() and count.isdecimal() and len(text) < 40
        if not (whole and 1 <= int(number) <= int(count)):
            raise UserError(f"--shard {text}: expected I/N with I from 1 to N, for example 3/8")
        return cls(int(number), int(count))

    def of(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Return this part's jobs: every `count`-th, so that neighbours, which are similar, are in different parts."""
        return jobs[self.number - 1 :: self.count]

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"
