"""How the jobs of a part are done: in this process, in several or on a cluster, so that a job that kills its process
costs what it was to read and nothing else.

Every job is noted in the part before it is tried.  The jobs that were under way when a worker process died, or when
the whole run did, are tried again one at a time in a process apart; what kills that one too is given up.
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
ATTEMPTS = 3  # after so many that the whole run did not outlive, a job is given up untried

Call = tuple[Callable[[Any], Any], Any]  # a function that workers can import, and its argument


@dataclass(frozen=True)
class Task:
    """A job: its names in the journal, and the first call that it takes.  singles: its parts, if it has several."""

    names: tuple[str, ...]
    call: Call
    singles: tuple["Task", ...] = ()


Then = Callable[[Task, Any], Call | None]  # of a task and what its last call returned: the next call, if any


@dataclass(frozen=True)
class Work:
    """Who does the jobs of a part.

    executor: of `bulk.pool`.  ahead: how many jobs are handed out at a time.
    """

    writer: PartWriter
    executor: Executor | None
    ahead: int

    def do(self, tasks: Iterable[Task], then: Then = lambda task, result: None) -> Iterator[tuple[Task, Any]]:
        """Yield each task as it is done, with what its last call returned, or None if its process died of it.

        Tasks of several are yielded as singles if one of them may have killed a process.  Where the workers are a
        cluster's, the cluster itself tries a job again elsewhere.
        """
        suspects: list[Task] = []
        if self.executor is None:
            yield from self._do_here(tasks, then, suspects)
        else:
            yield from self._do_there(self.executor, tasks, then, suspects)
        with IsolatedProcess() as apart:
            for suspect in suspects:
                for single in suspect.singles or [suspect]:
                    yield single, self._do_apart(single, then, apart)

    def _do_here(self, tasks: Iterable[Task], then: Then, suspects: list[Task]) -> Iterator[tuple[Task, Any]]:
        for task in tasks:
            if self._is_suspect(task):
                suspects.append(task)
                continue
            self.writer.begin(task.names)
            yield task, _chain(task, then, lambda function, job: function(job))

    def _do_there(
        self, executor: Executor, tasks: Iterable[Task], then: Then, suspects: list[Task]
    ) -> Iterator[tuple[Task, Any]]:
        queue = iter(tasks)
        waiting: dict[Future[Any], Task] = {}
        while True:
            more = list(islice(queue, max(self.ahead - len(waiting), 0)))
            if not more and not waiting:
                return
            for task in more:
                if isinstance(executor, ProcessPool) and self._is_suspect(task):
                    suspects.append(task)
                    continue
                self.writer.begin(task.names)
                function, job = task.call
                waiting[executor.submit(function, job)] = task
            wait(waiting, return_when=FIRST_COMPLETED)
            for future in [future for future in waiting if future.done()]:
                task = waiting.pop(future)
                try:
                    result = future.result()
                except BrokenProcessPool:
                    suspects.append(task)
                    continue
                except deaths_on_cluster():
                    yield task, None
                    continue
                if call := then(task, result):
                    function, job = call
                    waiting[executor.submit(function, job)] = task
                else:
                    yield task, result

    def _is_suspect(self, task: Task) -> bool:
        return any(self.writer.tried[name] for name in task.names)

    def _do_apart(self, task: Task, then: Then, apart: IsolatedProcess) -> Any:
        if max(self.writer.tried[name] for name in task.names) >= ATTEMPTS:
            return None
        self.writer.begin(task.names)
        try:
            return _chain(task, then, apart)
        except ProcessDied:
            return None


def _chain(task: Task, then: Then, call: Callable[[Callable[[Any], Any], Any], Any]) -> Any:
    """Do the calls of a task one after another."""
    result = call(*task.call)
    while following := then(task, result):
        result = call(*following)
    return result
