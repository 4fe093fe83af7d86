"""Who folds the groups of a run: this process, ranks that each take some, processes of their own, or a Dask cluster."""

import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from warpfold.bulk import JobPart, in_order, pool, require_dask, worker_number
from warpfold.errors import UserError
from warpfold.files import file_name
from warpfold.ops.dispatch import refusals
from warpfold.parallel.team import Team
from warpfold.prediction.entries import write_prediction
from warpfold.prediction.fold_options import PredictOptions
from warpfold.prediction.folder import PredictionFolder
from warpfold.prediction.folding import (
    Asked,
    Clock,
    FoldItem,
    FoldOutcome,
    Follow,
    Group,
    Write,
    cost_of,
    fold_groups,
    taken,
)
from warpfold.prediction.journal import WHOLE, Journal
from warpfold.prediction.outputs import Prediction
from warpfold.prediction.params import Params
from warpfold.prediction.predictor import Predictor, load
from warpfold.progress import Progress, as_time
from warpfold.training.passes import PassPlace

JOBS = 16  # of each worker: so many that all end at about one time, so few that starting one costs nothing


@dataclass(frozen=True, kw_only=True)
class Share:
    """Who folds: a part of the predictions, on several processes of this machine, or on a Dask cluster."""

    part: JobPart = WHOLE
    workers: int = 1
    cluster: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether this process folds itself."""
        return self.workers == 1 and self.cluster is None

    def check(self, team: Team, device: str | None) -> None:
        """Raise UserError where torchrun's processes would start others, or for more processes than GPUs."""
        if self.is_here:
            return
        if team.process.ranks > 1:
            raise UserError("--workers and --cluster start processes of their own: use them without torchrun")
        if self.cluster is not None:
            require_dask(self.cluster)  # before a folder is begun
        if self.cluster is None and device is not None and device.startswith("cuda"):
            gpus = 1 if ":" in device else torch.cuda.device_count()
            if self.workers > gpus:
                raise UserError(f"--workers {self.workers}: more than --device {device} has GPUs ({gpus}); give {gpus}")


class ModelInMemory:
    """The model that folds: the parameters of one are given up before those of the next are loaded."""

    def __init__(self, options: PredictOptions, team: Team) -> None:
        self.options, self.team = options, team
        self._name: str | None = None
        self._predictor: Predictor | None = None

    def load(self, params: Params) -> Predictor:
        """Return the predictor of a model.  Errors: UserError as in `prediction.predictor.load`."""
        if self._predictor is None or self._name != params.name:
            self._predictor = None
            o, sample = self.options, params.sample
            self._predictor = load(
                params.path, o.device, o.chunk, o.precision, sample, self.team, o.kernels, o.offload, o.memory,
                max_msa=o.max_msa, max_extra=o.max_extra, dropout=o.dropout,
            )  # fmt: skip
            self._predictor.recycling = o.recycling
            self._name = params.name
        return self._predictor

    def fold(
        self, groups: Iterable[Group], write: Write, record: Callable[[FoldOutcome], None], follow: Follow | None = None
    ) -> Clock:
        """Fold groups as `fold_groups` does."""
        asked = Asked(self.options.recycles, self.options.ensemble, self.options.kept)
        return fold_groups(self.load, asked, self.team, groups, write, record, follow)


@dataclass(frozen=True)
class FoldJob:
    """Groups that a worker folds, and how."""

    groups: Sequence[Group]
    out: Path
    run: str
    part: JobPart
    several: bool
    options: PredictOptions
    workers: int  # of this machine; 0: of a cluster


def fold_shared(
    memory: ModelInMemory,
    groups: Sequence[Group],
    folder: PredictionFolder,
    share: Share,
    tell: Progress,
) -> tuple[Clock, dict[str, int]]:
    """Fold groups; return the seconds of all who did, and why fast operations were not used.

    Errors: UserError for parameters that do not fit, or a cluster that is not there; TeamError.
    """
    bar, team, refused_before = _Bar(tell, len(folder.items), groups), memory.team, refusals()
    if not share.is_here:
        return _fold_with_workers(groups, folder, share, memory.options, bar)
    if folder.journal is None and team.is_example_leader and team.mesh.data.size > 1:
        folder.journal = Journal(folder.out, folder.run, folder.part, f"rank{team.process.rank}")

    def record(outcome: FoldOutcome) -> None:
        folder.record(outcome)
        bar.move([outcome.item])

    write = _writer(folder.out, folder.is_several)
    clock = memory.fold(taken(groups, team) if team.mesh.data.size > 1 else groups, write, record, bar.follow)
    if team.mesh.data.size > 1:
        team.wait_for_all("the end of the predictions")
    return clock, refusals(refused_before)


def _fold_with_workers(
    groups: Sequence[Group],
    folder: PredictionFolder,
    share: Share,
    options: PredictOptions,
    bar: "_Bar",
) -> tuple[Clock, dict[str, int]]:
    clock, refused = Clock(), dict[str, int]()
    workers = 0 if share.cluster else share.workers
    jobs = [
        FoldJob(some, folder.out.absolute(), folder.run, folder.part, folder.is_several, options, workers)
        for some in in_jobs(groups, JOBS * share.workers)
    ]
    with pool(share.workers, share.cluster) as executor:
        for job, (seconds, refusals_of_job) in zip(jobs, in_order(fold_job, jobs, executor)):
            clock.add(seconds)
            for reason, count in refusals_of_job.items():
                refused[reason] = refused.get(reason, 0) + count
            bar.move([item for group in job.groups for item in group])
    return clock, refused


def in_jobs(groups: Sequence[Group], count: int) -> Iterator[list[Group]]:
    """Yield runs of neighbouring groups of one model, of a cost of about 1 / count of all together."""
    most, some = cost_of(groups) / count, list[Group]()
    for group in groups:
        if some and (cost_of([*some, group]) > most or group[0].model != some[0][0].model):
            yield some
            some = []
        some = [*some, group]
    if some:
        yield some


def fold_job(job: FoldJob) -> tuple[Clock, dict[str, int]]:
    """Fold groups in a worker process, which keeps its model from job to job; return what `fold_shared` does.

    It writes the files and a journal.
    """
    refused_before, number = refusals(), worker_number()
    options = replace(job.options, device=_device(job.options.device, number))
    if options.device == "cpu" and job.workers:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.workers))
    name = file_name(f"{platform.node()}-{os.getpid()}")
    with closing(Journal(job.out, job.run, job.part, name)) as journal:

        def record(outcome: FoldOutcome) -> None:
            journal.add(outcome.item.key, outcome.entry, outcome.error)

        write = _writer(job.out, job.several)
        clock = _memory_of(options).fold(job.groups, write, record)
    return clock, refusals(refused_before)


@lru_cache(maxsize=1)
def _memory_of(options: PredictOptions) -> ModelInMemory:
    """Return the worker's model, which stays."""
    return ModelInMemory(options, Team())


def _device(name: str | None, worker: int | None) -> str:
    """Return a worker's device; of several GPUs, the one with its number."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    several = name == "cuda" and worker is not None and torch.cuda.device_count() > 1
    return f"cuda:{(worker or 0) % torch.cuda.device_count()}" if several else name


def _writer(out: Path, several: bool) -> Callable[[FoldItem, Prediction], dict[str, Any]]:
    def write(item: FoldItem, prediction: Prediction) -> dict[str, Any]:
        outcomes = [asdict(outcome) for outcome in item.query.outcomes]
        below = item.below if several else ""
        return write_prediction(replace(prediction, templates=outcomes), out, below, item.query.notices)

    return write


class _Bar:
    """Tells how many predictions there are, where the model is in one, and the time that is left by what they cost.

    One thread folds while another writes what was folded before, and both tell: the number never falls.
    """

    def __init__(self, tell: Progress, total: int, groups: Sequence[Group]) -> None:
        self._tell, self._total = tell, total
        self._done = total - sum(map(len, groups))  # by an earlier run, or by others
        self._cost, self._left, self._start = 0.0, cost_of(groups), time.perf_counter()
        self._shown: float = self._done
        self._lock = threading.Lock()
        tell(self._done, total, groups[0][0].query.name if groups else "")

    def follow(self, group: Group, place: PassPlace) -> None:
        """Show where the model is in a group that it folds; what has been folded may still be being written."""
        cost = place.share * cost_of([group])
        name = group[0].query.name if len(group) == 1 else f"{len(group)} together"
        short = name if len(name) <= 8 else f"{name[:7]}…"  # all of it fits a terminal of 80 columns
        self._show(place.share * len(group), f"{short}{self._time_left(cost)}, {place}")

    def move(self, items: Sequence[FoldItem]) -> None:
        self._done += len(items)
        for item in items:
            self._cost, self._left = self._cost + item.cost, self._left - item.cost
        self._show(0, f"{items[-1].query.name}{self._time_left()}")

    def _show(self, more: float, what: str) -> None:
        with self._lock:
            self._shown = max(self._shown, min(self._done + more, self._total))
            self._tell(self._shown, self._total, what)

    def _time_left(self, cost: float = 0.0) -> str:
        """Return the words for the time that is left, where so much of what is being folded is done; or none."""
        done, left = self._cost + cost, self._left - cost
        seconds = (time.perf_counter() - self._start) * left / done if done else 0.0
        return f", {as_time(seconds)} left" if left > 0 and seconds >= 1 else ""
