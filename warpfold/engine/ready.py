"""A loader for any map-style dataset, whose batches are ready before the step asks for them: docs/kit.md.

Processes that stay make the batches ahead of time, also over the end of an epoch; the examples of a step are shared
over the ranks by their cost; what comes when follows from the seed alone.
"""

import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from warpfold.data.load.ahead import Ahead
from warpfold.data.load.schedule import State, deal
from warpfold.data.load.workers import Failed, Made, Workers
from warpfold.device import Upload, Uploads
from warpfold.engine.checkpoint import AppendedFile
from warpfold.engine.nested import Flattening, unflatten
from warpfold.engine.ready_maker import (
    BatchMaker,
    Costs,
    ReadyError,
    find_costs,
    kept_random,
    read_batch,
    start_workers,
)
from warpfold.errors import UserError
from warpfold.keyed import keyed_rng
from warpfold.parallel.mesh import world
from warpfold.parallel.messages import all_gather_object


class OrderRecord:
    """A file with a line "EPOCH STEP" for each batch before it is used; its first line says of which loader.

    A run that was killed finds what it had used after its checkpoint, and follows that.
    """

    def __init__(self, path: Path, identity: Mapping[str, int]) -> None:
        """Open the file, or make it.  Errors: UserError for one of another loader, or one that is none."""
        header = json.dumps(dict(identity))
        self._file = AppendedFile(path, header + "\n")
        self._steps: dict[int, dict[int, None]] = {}
        first, *lines = path.read_text(encoding="utf-8").splitlines()
        if first != header:
            raise UserError(f"{path}: is the record of another loader ({first[:80]}); remove it, or name another file")
        for line in lines:
            try:
                epoch, step = map(int, line.split())
            except ValueError:
                raise UserError(f"{path}: has a line {line[:40]!r}; remove the file, or put back a copy") from None
            self._steps.setdefault(epoch, {})[step] = None

    def steps(self, epoch: int) -> list[int]:
        """Return the steps of an epoch in the order in which their batches were used, as far as they were."""
        return list(self._steps.get(epoch, ()))

    def add(self, epoch: int, step: int) -> None:
        """Note that a batch is used next, unless it is known already.  Errors: UserError when the disk is full."""
        known = self._steps.setdefault(epoch, {})
        if step not in known:
            known[step] = None
            self._file.write(f"{epoch} {step}\n")


Cost = Callable[[Any], float] | Sequence[float] | np.ndarray | torch.Tensor


@dataclass(frozen=True)
class _PlannedBatch:
    """A batch that is being made.  place: its number since this iteration began, and the ticket of its job."""

    place: int
    epoch: int
    step: int
    indices: list[int]
    fixed: bool  # the record says that it comes here

    @property
    def kind(self) -> tuple[bool, int]:
        """Return a key that all batches share with which it may exchange places: those of its epoch."""
        return (True, self.place) if self.fixed else (False, self.epoch)


class Ready:
    """The batches of a map-style dataset, an epoch for each iteration, made ahead by processes that stay.

    dataset: has `__len__` and `__getitem__` (or `__getitems__`); multiprocessing pickles it once for each process.
    batch_size: examples of a batch of this rank.
    workers: processes; with 0 this one makes each batch when it is needed.
    cost: what is balanced over the ranks in each step: a number per example, in the order of the dataset; or a function
    of an example, such as `len`, for which every example is made once before the first batch (only with several ranks).
    shuffle: a new permutation in each epoch, of `seed` and the epoch's number.
    collate: makes a batch of a list of examples, in the worker.
    drop_last: leave out the last batch of an epoch where it is smaller; otherwise examples from the epoch's beginning
    fill it up to equally many on each rank.
    window: how many places a batch that is ready may overtake a slow one; 0: all come as planned.
    record: a file that says in which order batches were used where `window` allows others, and that a run which
    continues follows; with several ranks one each.
    rank, ranks: by default those of torch.distributed.
    device: where tensors go, copied while the step before computes; None: host memory, pinned where there is a GPU.
    ahead: how many batches per worker are made ahead at most.

    Before an example is made, the random numbers of Python, NumPy and torch are seeded by `seed`, epoch and index: they
    depend neither on workers nor on ranks (with `__getitems__`, by the first index of the batch).
    Errors: UserError for bad input; while iterating, ReadyError for an example that cannot be made.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        workers: int = 8,
        cost: Cost | None = None,
        seed: int = 0,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] = default_collate,
        drop_last: bool = False,
        window: int = 0,
        record: Path | str | None = None,
        rank: int | None = None,
        ranks: int | None = None,
        device: torch.device | str | None = None,
        ahead: int = 4,
    ) -> None:
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.seed, self.shuffle, self.collate_fn, self.num_workers = int(seed), shuffle, collate, workers
        self._size = _size(dataset)
        self._given_ranks = ranks is not None
        group = world()
        self.rank = group.rank if rank is None else rank
        self.ranks = (group.size if rank is None else 1) if ranks is None else ranks
        _check(batch_size=(batch_size, 1), workers=(workers, 0), window=(window, 0), ahead=(ahead, 1))
        _check(ranks=(self.ranks, 1), rank=(self.rank, 0), ranks_above_rank=(self.ranks - self.rank, 1))
        self._cost, self._costs = cost, _given_costs(cost, self._size)
        self._window, self._limit = window, max(1, workers * ahead)
        self._moves = device is not None
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._permutation = lru_cache(2)(self._permuted)
        self._make = BatchMaker(dataset, collate, self.seed)
        self._workers: Workers | None = None
        self._file = None if record is None else Path(record)
        if self._file is not None and self.ranks > 1:
            self._file = self._file.with_name(f"{self._file.stem}-{self.rank}-of-{self.ranks}{self._file.suffix}")
        self._record: OrderRecord | None = None
        self._epoch, self._before, self._used = 0, 0, State()  # examples used before `_used`, which counts batches
        self._begun, self._iteration = False, 0  # whether this iteration has given a batch
        self._plan: Iterator[_PlannedBatch] | None = None
        self._ahead: Ahead[_PlannedBatch] = Ahead(None, self._job, self._mended, window)
        self._on_way: tuple[_PlannedBatch, Upload | None, Made] | None = None

    # What comes when

    @property
    def epoch(self) -> int:
        """Return the number of the epoch that is under way, or of the next one: where a loop over epochs begins."""
        return self._epoch

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, the same on every rank."""
        return self._steps(0)

    def batches(self, epoch: int) -> list[list[int]]:
        """Return the indices of each batch of this rank in an epoch: also what `DataLoader(batch_sampler=)` takes."""
        return [self._indices(epoch, 0, step) for step in range(len(self))]

    def _permuted(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self._size)
        return keyed_rng(self.seed, "ready", epoch).permutation(self._size)

    def _steps(self, before: int) -> int:
        """Return the steps left in an epoch once `before` of its examples have been used."""
        whole = self.batch_size * self.ranks
        return (self._size - before) // whole if self.drop_last else -(-(self._size - before) // whole)

    def _indices(self, epoch: int, before: int, step: int) -> list[int]:
        """Return the examples of this rank at a step, in the order of the epoch."""
        order = self._permutation(epoch)
        begin = before + step * self.batch_size * self.ranks
        part = order[begin : begin + self.batch_size * self.ranks]
        if missing := -len(part) % self.ranks:
            part = np.concatenate([part, np.resize(order, missing)])
        if self._costs is None or self.ranks == 1:
            return part[self.rank :: self.ranks].tolist()
        return part[deal(self._costs[part].tolist(), self.ranks)[self.rank]].tolist()

    # Iterating

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch: the next one, or after `load_state_dict` the rest of the one under way.

        An iteration that is left early is over: the next one begins the next epoch.
        """
        if not self._given_ranks and world().size > self.ranks:
            raise UserError("Ready: torch.distributed was initialised after this loader was made; make it afterwards")
        if self._begun:
            if self._used.first < self._steps(self._before):
                self._forget()
            self._begin_epoch(self._epoch + 1)
        self._iteration += 1
        self._start()
        return self._iterate(self._iteration)

    def _iterate(self, iteration: int) -> Iterator[Any]:
        while True:
            if iteration != self._iteration:
                raise RuntimeError("a newer iteration of this loader has begun, so that this one is over")
            if self._used.first >= self._steps(self._before):
                break
            yield self._next()
        self._begin_epoch(self._epoch + 1)

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._before, self._used, self._begun = epoch, 0, State(), False

    def _next(self) -> Any:
        self._start()
        with ExitStack() as if_it_fails:
            if_it_fails.callback(self.close)
            if self._workers is None:
                planned = self._ahead.first()
                self._note(planned)
                batch = self._make_here(planned)
            else:
                chosen = self._on_way or self._take(wait=True)
                assert chosen is not None
                planned, upload, made = chosen
                batch = read_batch(made, upload.wait() if upload is not None else None)
            self._used = self._used.changed(early=[planned.step])
            self._begun = True
            self._plan_more()
            self._on_way = self._take(wait=False) if self._moves else None
            if_it_fails.pop_all()
        return batch

    def _start(self) -> None:
        """Start the processes, if there are none yet, and plan the first batches."""
        if self._plan is not None:
            return
        if self._costs is None and self._cost is not None and self.ranks > 1:
            self._costs = self._find_costs(cast(Callable[[Any], float], self._cost))
        if self._file is not None and self._record is None:
            self._record = OrderRecord(self._file, {**self._identity(), "rank": self.rank})
        if self._workers is None and self.num_workers:
            self._uploads = Uploads(_with_index(self._device))
            self._workers = start_workers(self._make, self.num_workers, self._uploads.buffer)
            self._ending = weakref.finalize(self, self._workers.close)
        self._ahead = Ahead(self._workers, self._job, self._mended, self._window)
        self._plan = self._planned()
        self._plan_more()

    def close(self) -> None:
        """End the processes; another iteration starts them again."""
        if self._workers is not None:
            self._ending()
        self._workers = self._plan = self._on_way = None

    def __enter__(self) -> "Ready":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget(self) -> None:
        """Drop what was planned."""
        self._plan = self._on_way = None
        if self._workers is not None:
            self._workers.drop()

    def _planned(self) -> Iterator[_PlannedBatch]:
        """Yield what comes from now on, over the ends of epochs."""
        epoch, before, used, place = self._epoch, self._before, self._used, 0
        while (steps := self._steps(before)) or before:
            early = set(used.early)
            remaining = [step for step in range(used.first, steps) if step not in early]
            known = self._record.steps(epoch) if self._record is not None else []
            fixed = [step for step in known if step in set(remaining)]
            late = set(fixed)
            for step in (*fixed, *(step for step in remaining if step not in late)):
                yield _PlannedBatch(place, epoch, step, self._indices(epoch, before, step), step in late)
                place += 1
            epoch, before, used = epoch + 1, 0, State()

    def _plan_more(self) -> None:
        """Plan more batches and submit them, up to the limit."""
        assert self._plan is not None
        while len(self._ahead) < self._limit and (planned := next(self._plan, None)):
            self._ahead.add(planned)

    def _job(self, planned: _PlannedBatch) -> tuple[int, list[int]]:
        return planned.epoch, planned.indices

    def _mended(self, planned: _PlannedBatch, failed: Failed) -> _PlannedBatch:
        """Raise what a failure is: nothing is made instead of a batch."""
        if failed.killed:
            raise ReadyError(f"examples {planned.indices} of the dataset: {failed.reason}")
        raise UserError(failed.reason)

    def _take(self, wait: bool) -> tuple[_PlannedBatch, Upload | None, Made] | None:
        """Start copying the next batch to the device; None if none is ready (yet, unless `wait`)."""
        taken = self._ahead.take(wait)
        if taken is None:
            return None
        planned, made = taken
        self._note(planned)
        return planned, self._uploads.start(torch.as_tensor(made.buffer)) if self._moves else None, made

    def _note(self, planned: _PlannedBatch) -> None:
        if self._record is not None:
            self._record.add(planned.epoch, planned.step)

    def _make_here(self, planned: _PlannedBatch) -> Any:
        with kept_random():
            batch = self._make.batch(*self._job(planned))
        flattening = Flattening("Ready: the batch", classes=True)
        tree = flattening.tree(batch)

        def tensor(number: int) -> torch.Tensor:
            return torch.as_tensor(flattening.leaves[number], device=self._device if self._moves else None)

        return unflatten(tree, tensor, lambda number: np.asarray(flattening.leaves[number]), classes=True)

    def _find_costs(self, cost: Callable[[Any], float]) -> np.ndarray:
        """Return the cost of each example: each rank makes its share of them, once."""
        group = world()
        shared = group.size == self.ranks
        own = range(self._size)[self.rank :: self.ranks] if shared else range(self._size)
        found = find_costs(BatchMaker(Costs(self.dataset, cost), np.array, self.seed), own, self.num_workers)
        if not shared:
            return found
        costs = np.empty(self._size)
        for rank, part in enumerate(all_gather_object(found.tolist(), group, "the costs of examples")):
            costs[rank :: self.ranks] = part
        return costs

    # Going on

    def _identity(self) -> dict[str, int]:
        return {
            "examples": self._size,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "batch_size": self.batch_size,
            "ranks": self.ranks,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the examples that this rank has used, JSON-able.  Batches that are ready but unused do not count."""
        used = {"epoch": self._epoch, "before": self._before, "first": self._used.first, "early": [*self._used.early]}
        return {**self._identity(), "rank": self.rank, **used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called; the next iteration yields the rest of that epoch.

        Other numbers of ranks and batches go on with the examples that no rank has used, where none were exchanged
        within a window.  Errors: UserError for the state of another dataset, seed or order.
        """
        own = self._identity()
        if missing := sorted({*own, "rank", "epoch", "before", "first", "early"} - {*state}):
            raise UserError(f"Ready: the state lacks {missing[0]}; give what state_dict() of a Ready returned")
        for name in ("examples", "seed", "shuffle"):
            if state[name] != own[name]:
                raise UserError(
                    f"Ready: the state is of {name} = {state[name]}, this loader has {own[name]}; make it as it was"
                )
        alike = all(state[name] == own[name] for name in own)
        if state["early"] and not (alike and state["rank"] == self.rank):
            raise UserError(
                f"Ready: the state is of rank {state['rank']} of {state['ranks']}, which used batches before their "
                "places; go on with as many ranks, batches as large, and each rank's own state"
            )
        used = State(state["first"], tuple(state["early"]))
        before = state["before"]
        if not alike:
            before = min(self._size, before + used.first * state["batch_size"] * state["ranks"])
            used = State()
        self._forget()
        self._begin_epoch(state["epoch"])
        self._before, self._used = before, used
        self._iteration += 1


def _size(dataset: Any) -> int:
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UserError(
            f"Ready: a {type(dataset).__name__} is no map-style dataset; give one with __len__ and __getitem__"
        )
    if not (size := len(dataset)):
        raise UserError("Ready: the dataset is empty; give one with examples")
    return size


def _given_costs(cost: Cost | None, size: int) -> np.ndarray | None:
    if cost is None or callable(cost):
        return None
    costs = np.asarray(cost, np.float64)
    if costs.shape != (size,) or not np.isfinite(costs).all():
        raise UserError(f"Ready: cost has shape {costs.shape} for {size} examples; give a finite number for each")
    return costs


def _check(**settings: tuple[int, int]) -> None:
    for name, (value, least) in settings.items():
        if not isinstance(value, int) or value < least:
            raise UserError(f"Ready: {name} = {value}; give a whole number of at least {least}")


def _with_index(device: torch.device) -> torch.device:
    """Return the device by its number: the current one of another thread may be another."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
