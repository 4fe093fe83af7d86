"""Run the jobs of a part in this process, in worker processes or on a cluster. Each attempt is recorded in the part.

A job that kills its process loses only its own files. The jobs that were running when a worker process or the whole run
died are retried one at a time in a separate process. A job that kills that process too is given up.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from typing import Any

from warpfold.bulk import IsolatedProcess, ProcessDied, ProcessPool, deaths_on_cluster
from warpfold.data.pack.part import PartWriter

DIED = "the process that read it was killed or crashed, most likely for lack of memory"
# A job that was running in this number of runs that died is given up without another attempt.
MAX_ATTEMPTS = 3

# A function that workers can import, and its argument.
Call = tuple[Callable[[Any], Any], Any]


@dataclass(frozen=True)
class PackJob:
    """A job. name: of its result. call: its first call. singles: a job for each item, if it has several."""

    name: str
    call: Call
    singles: tuple["PackJob", ...] = ()


# Takes a job and the result of its last call, and returns the next call, if any.
NextCall = Callable[[PackJob, Any], Call | None]


class _InProcess(Executor):
    """An executor that runs each call immediately in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class JobRunner:
    """Run the jobs of the part that `writer` writes.

    executor: from `bulk.pool`. ahead: number of jobs that are submitted at a time.
    """

    def __init__(self, writer: PartWriter, executor: Executor | None, ahead: int) -> None:
        self.writer = writer
        self._executor, self._ahead = (_InProcess(), 1) if executor is None else (executor, ahead)

    def run(self, jobs: Iterable[PackJob], then: NextCall = lambda job, result: None) -> Iterator[tuple[PackJob, Any]]:
        """Yield each finished job with the result of its last call, or None if it killed its process.

        A job of several items is yielded as its `singles` if one of them may have killed a process. A cluster retries
        jobs itself.
        """
        retries_itself = not isinstance(self._executor, _InProcess | ProcessPool)
        suspects: list[PackJob] = []
        queue = iter(jobs)
        running: dict[Future[Any], PackJob] = {}

        def start(job: PackJob, call: Call) -> None:
            function, argument = call
            running[self._executor.submit(function, argument)] = job

        while (more := list(islice(queue, max(self._ahead - len(running), 0)))) or running:
            for job in more:
                if not retries_itself and self.writer.tried[job.name]:
                    suspects.append(job)
                    continue
                self.writer.begin(job.name)
                start(job, job.call)
            wait(running, return_when=FIRST_COMPLETED)
            for future in [future for future in running if future.done()]:
                job = running.pop(future)
                try:
                    result = future.result()
                except BrokenProcessPool:
                    suspects.append(job)
                except deaths_on_cluster():
                    yield job, None
                else:
                    if call := then(job, result):
                        start(job, call)
                    else:
                        yield job, result
        with IsolatedProcess() as process:
            for suspect in suspects:
                for single in suspect.singles or [suspect]:
                    yield single, self._run_isolated(single, then, process)

    def _run_isolated(self, job: PackJob, then: NextCall, process: IsolatedProcess) -> Any:
        """Run a job in a separate process; returns its last result, or None if its process died now or too often."""
        if self.writer.tried[job.name] >= MAX_ATTEMPTS:
            return None
        # Starting takes longer than most jobs. A kill during the start must not count as an attempt.
        process.start(job.call[0])
        self.writer.begin(job.name)
        call: Call | None = job.call
        result = None
        try:
            while call:
                result = process(*call)
                call = then(job, result)
        except ProcessDied:
            return None
        return result
