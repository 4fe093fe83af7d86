"""Run the jobs of a part in this process, in several or on a cluster; each is noted in the part before it is tried.

A job that kills its process costs only the files that it was to read: the jobs that were running when a worker process
or the whole run died are tried again one at a time, in a process of their own, and one that kills that process too is
given up.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from typing import Any

from warpfold.bulk import IsolatedProcess, ProcessDied, ProcessPool, deaths_on_cluster
from warpfold.data.pack.part import PartWriter

DIED = "the process that read it was killed or crashed, most likely for want of memory"
ATTEMPTS = 3  # a job that was running in as many runs that died is given up without another try

Call = tuple[Callable[[Any], Any], Any]  # a function that workers can import, and its argument


@dataclass(frozen=True)
class PackJob:
    """A job: the name of its result, and its first call.  singles: its pieces, if it has several."""

    name: str
    call: Call
    singles: tuple["PackJob", ...] = ()


NextCall = Callable[[PackJob, Any], Call | None]  # takes a job and what its last call returned


class _InProcess(Executor):
    """An executor that makes a call as soon as it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class JobRunner:
    """Do the jobs of the part that `writer` writes.

    executor: of `bulk.pool`.  ahead: how many jobs are handed out at a time.
    """

    def __init__(self, writer: PartWriter, executor: Executor | None, ahead: int) -> None:
        self.writer = writer
        self._executor, self._ahead = (_InProcess(), 1) if executor is None else (executor, ahead)

    def run(self, jobs: Iterable[PackJob], then: NextCall = lambda job, result: None) -> Iterator[tuple[PackJob, Any]]:
        """Yield each job as it is done, with the result of its last call, or None if it killed its process.

        A job of several pieces is yielded as its `singles` if one of them may have killed a process.  Where the workers
        are a cluster's, the cluster itself tries a job again elsewhere.
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
        with IsolatedProcess() as apart:
            for suspect in suspects:
                for single in suspect.singles or [suspect]:
                    yield single, self._run_apart(single, then, apart)

    def _run_apart(self, job: PackJob, then: NextCall, apart: IsolatedProcess) -> Any:
        """Return the result of a job's last call; None if its process died, now or often enough before."""
        if self.writer.tried[job.name] >= ATTEMPTS:
            return None
        apart.start(job.call[0])  # takes longer than most jobs: a kill meanwhile blames none
        self.writer.begin(job.name)
        call: Call | None = job.call
        result = None
        try:
            while call:
                result = apart(*call)
                call = then(job, result)
        except ProcessDied:
            return None
        return result
