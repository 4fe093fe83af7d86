"""A loader for any map-style dataset, whose batches are ready before the step asks for them: docs/howto/kit.md.

Processes that stay make the batches ahead of time, also over the end of an epoch; the examples of a step are shared
over the ranks by their cost; what comes when follows from the seed alone.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from warpfold.data.load.ahead import Ahead, BatchOrder
from warpfold.data.load.workers import Failed, Made, Workers
from warpfold.device import Upload, Uploads
from warpfold.engine.epochs import Epochs
from warpfold.engine.nested import Flattening, unflatten
from warpfold.engine.ready_maker import (
    BatchMaker,
    Costs,
    find_costs,
    kept_random,
    read_batch,
    start_workers,
)
from warpfold.errors import StorageError, UserError
from warpfold.parallel.mesh import world
from warpfold.parallel.messages import all_gather_object

Cost = Callable[[Any], float] | Sequence[float] | np.ndarray | torch.Tensor


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
    order: an object that says what comes next, instead of epochs (`BatchOrder`).  It decides batches and ranks, so
    `batch_size`, `cost`, `shuffle`, `drop_last`, `record`, `rank` and `ranks` are not given with it.  Our own training
    gives one (`data.load.examples.RunOrder`).

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
        order: BatchOrder[Any] | None = None,
    ) -> None:
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.seed, self.shuffle, self.collate_fn, self.num_workers = int(seed), shuffle, collate, workers
        _check(batch_size=(batch_size, 1), workers=(workers, 0), window=(window, 0), ahead=(ahead, 1))
        group = world()
        self._given_ranks = ranks is not None or order is not None
        self.rank = group.rank if rank is None else rank
        self.ranks = (group.size if rank is None else 1) if ranks is None else ranks
        _check(ranks=(self.ranks, 1), rank=(self.rank, 0), ranks_above_rank=(self.ranks - self.rank, 1))
        self._epochs: Epochs | None = None
        if order is None:
            self._size = _size(dataset)
            costs, path = _given_costs(cost, self._size), None if record is None else Path(record)
            shares = self._size, batch_size, self.rank, self.ranks
            order = self._epochs = Epochs(*shares, self.seed, shuffle, drop_last, costs, path)
        elif batch_size != 1 or drop_last or any(one is not None for one in (cost, record, rank, ranks)):
            raise UserError(
                "Ready: order is given with batch_size, cost, drop_last, record, rank or ranks. Leave these out."
            )
        self.order, self._cost = order, cost
        self._window, self._limit = window, max(1, workers * ahead)
        self._moves = device is not None
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._make = BatchMaker(dataset, collate, self.seed, order.refusals)
        self._workers: Workers | None = None
        self._iteration = 0
        self._plan: Iterator[Any] | None = None
        self._ahead: Ahead[Any] = Ahead(None, order.substitute, window)
        self._on_way: tuple[Any, Upload | None, Made] | None = None

    # What comes when, where no order was given

    def _own_order(self) -> Epochs:
        if self._epochs is None:
            raise UserError("Ready: epochs and states are those of the order that was given. Use that object.")
        return self._epochs

    @property
    def epoch(self) -> int:
        """Return the number of the epoch that is under way, or of the next one: where a loop over epochs begins."""
        return self._own_order().epoch

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, the same on every rank."""
        return len(self.order)

    def batches(self, epoch: int) -> list[list[int]]:
        """Return the indices of each batch of this rank in an epoch: also what `DataLoader(batch_sampler=)` takes."""
        return [self._own_order().indices(epoch, 0, step) for step in range(len(self))]

    def state_dict(self) -> dict[str, Any]:
        """Return the examples that this rank has used, JSON-able.  Batches that are ready but unused do not count."""
        return self._own_order().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called; the next iteration yields the rest of that epoch.

        Other numbers of ranks and batches go on with the examples that no rank has used, where none were exchanged
        within a window.  Errors: UserError for the state of another dataset, seed or order.
        """
        self._own_order().load_state_dict(state)
        self._forget()
        self._iteration += 1

    # Iterating

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch: the next one, or after `load_state_dict` the rest of the one under way.

        An iteration that is left early is over: the next one begins the next epoch.
        """
        if not self._given_ranks and world().size > self.ranks:
            raise UserError("Ready: torch.distributed was initialised after this loader was made; make it afterwards")
        if self.order.begin():
            self._forget()
        self._iteration += 1
        self._start()
        return self._iterate(self._iteration)

    def _iterate(self, iteration: int) -> Iterator[Any]:
        while True:
            if iteration != self._iteration:
                raise RuntimeError("a newer iteration of this loader has begun, so that this one is over")
            if self.order.ended:
                break
            yield self._next()
        self.order.end()

    def _next(self) -> Any:
        self._start()
        with ExitStack() as if_it_fails:
            if_it_fails.callback(self.close)
            if self._workers is None:
                planned, batch = self._make_here(self._ahead.first())
            else:
                chosen = self._on_way or self._take(wait=True)
                assert chosen is not None
                planned, upload, made = chosen
                batch = read_batch(made, upload.wait() if upload is not None else None)
            self.order.hand_out(planned)
            self._plan_more()
            self._on_way = self._take(wait=False) if self._moves else None
            if_it_fails.pop_all()
        return batch

    def _start(self) -> None:
        """Start the processes, if there are none yet, and plan the first batches."""
        if self._plan is not None:
            return
        if self._epochs is not None and self._epochs.costs is None and self._cost is not None and self.ranks > 1:
            self._epochs.costs = self._find_costs(cast(Callable[[Any], float], self._cost))
        if self._workers is None and self.num_workers and len(self.order):
            self._uploads = Uploads(_with_index(self._device))
            self._workers = start_workers(self._make, self.num_workers, self._uploads.buffer)
            self._ending = weakref.finalize(self, self._workers.close)
        self._ahead = Ahead(self._workers, self.order.substitute, self._window)
        self._plan = self.order.plan()
        self._plan_more()

    def processes(self) -> list[int]:
        """Return the ids of the processes, for measurements."""
        return self._workers.processes() if self._workers is not None else []

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

    def _plan_more(self) -> None:
        """Plan more batches and submit them, up to the limit."""
        assert self._plan is not None
        while len(self._ahead) < self._limit and (planned := next(self._plan, None)):
            self._ahead.add(planned)

    def _take(self, wait: bool) -> tuple[Any, Upload | None, Made] | None:
        """Start copying the next batch to the device; None if none is ready (yet, unless `wait`)."""
        taken = self._ahead.take(wait)
        if taken is None:
            return None
        planned, made = taken
        self.order.note(planned)
        return planned, self._uploads.start(torch.as_tensor(made.buffer)) if self._moves else None, made

    def _make_here(self, planned: Any) -> tuple[Any, Any]:
        while True:
            try:
                with kept_random():
                    batch = self._make.batch(*planned.job)
                break
            except StorageError:
                raise
            except self.order.refusals as error:
                planned = self.order.substitute(planned, Failed(str(error) or "too little memory"))
        self.order.note(planned)
        flattening = Flattening("Ready: the batch", classes=True)
        tree = flattening.tree(batch)

        def tensor(number: int) -> torch.Tensor:
            return torch.as_tensor(flattening.leaves[number], device=self._device if self._moves else None)

        return planned, unflatten(tree, tensor, lambda number: np.asarray(flattening.leaves[number]), classes=True)

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
