"""A loader for any map-style dataset that prepares batches before a step needs them: docs/howto/kit.md.

Persistent worker processes make batches ahead of time, also across the end of an epoch.  The examples of a step are
balanced over the ranks by their cost.  The order is a function of the seed.
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
from warpfold.engine.ready_maker import BatchMaker, Costs, find_costs, kept_random, read_batch, start_workers
from warpfold.errors import StorageError, UserError
from warpfold.parallel.mesh import world
from warpfold.parallel.messages import all_gather_object

Cost = Callable[[Any], float] | Sequence[float] | np.ndarray | torch.Tensor


class Ready:
    """Load the batches of a map-style dataset, one epoch per iteration, with persistent worker processes.

    dataset: has `__len__` and `__getitem__` (or `__getitems__`).  multiprocessing pickles it once for each process.
    batch_size: examples per batch of this rank.
    workers: number of processes.  With 0 the calling process makes each batch when it is needed.
    cost: balanced over the ranks in each step.  Either a number per example, in the order of the dataset, or a function
        of an example, such as `len`.  With several ranks a function is called once for every example before the first
        batch.
    seed: of the permutations, and of the random numbers of the dataset.
    shuffle: a new permutation in each epoch.
    collate: makes a batch from a list of examples, in the worker.
    drop_last: leave out a smaller last batch of an epoch.  Otherwise examples from the beginning of the epoch fill it
        up, so that all ranks have equal numbers.
    window: number of places by which a ready batch may overtake a slow one.  0: strictly in order.
    record: a file that records the order of the batches if `window` allows several.  A resumed run follows it.  With
        several ranks each has its own file.
    rank, ranks: by default those of torch.distributed.
    device: of the tensors, which are copied during the previous step.  None: host memory, pinned if there is a GPU.
    ahead: maximum number of batches per worker that are made ahead.
    order: an object that decides the batches instead of epochs (`BatchOrder`).  It excludes `batch_size`, `cost`,
        `shuffle`, `drop_last`, `record`, `rank` and `ranks`.  WarpFold's training passes `data.load.examples.RunOrder`.

    Before an example is made, the random numbers of Python, NumPy and torch are seeded by `seed`, epoch and index, so
    that they do not depend on workers or ranks.  With `__getitems__` the first index of the batch is used.
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
            has_methods = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
            if isinstance(dataset, IterableDataset) or not has_methods:
                raise UserError(
                    f"Ready: a {type(dataset).__name__} is no map-style dataset. Pass one with __len__ and __getitem__."
                )
            self._size = len(dataset)
            if not self._size:
                raise UserError("Ready: the dataset is empty. Pass one with examples.")
            costs = None
            if cost is not None and not callable(cost):
                costs = np.asarray(cost, np.float64)
                if costs.shape != (self._size,) or not np.isfinite(costs).all():
                    raise UserError(
                        f"Ready: cost has shape {costs.shape} for {self._size} examples. Pass a finite number for each."
                    )
            order = self._epochs = Epochs(
                size=self._size,
                batch_size=batch_size,
                rank=self.rank,
                ranks=self.ranks,
                seed=self.seed,
                shuffle=shuffle,
                drop_last=drop_last,
                costs=costs,
                record=None if record is None else Path(record),
            )
        elif batch_size != 1 or drop_last or any(value is not None for value in (cost, record, rank, ranks)):
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

    # The order of epochs, without `order`

    def _own_order(self) -> Epochs:
        if self._epochs is None:
            raise UserError("Ready: epochs and states are those of the order that was given. Use that object.")
        return self._epochs

    @property
    def epoch(self) -> int:
        """The number of the current epoch, or of the next one between epochs."""
        return self._own_order().epoch

    def __len__(self) -> int:
        """Count the batches of a whole epoch; the number is equal on all ranks."""
        return len(self.order)

    def batches(self, epoch: int) -> list[list[int]]:
        """Return the indices of each batch of this rank in an epoch, as `DataLoader(batch_sampler=)` takes them."""
        return [self._own_order().indices(epoch, 0, step) for step in range(len(self))]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this rank, JSON-able.  Batches that are ready but unused do not count."""
        return self._own_order().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called: the next iteration yields the remaining batches of that epoch.

        With another batch size or number of ranks, the examples that no rank has used are left.  This needs a state in
        which no batches were exchanged within a window.
        Errors: UserError for the state of another dataset, seed or order.
        """
        self._own_order().load_state_dict(state)
        self._forget()
        self._iteration += 1

    # Iterating

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch, or after `load_state_dict` the remaining batches of the current one.

        After an iteration that was left early, the next iteration begins the next epoch.
        """
        if not self._given_ranks and world().size > self.ranks:
            raise UserError("Ready: torch.distributed was initialised after this loader was made. Initialise it first.")
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
        """Return the next batch. Its buffer in host memory is freed before the caller uses the batch on the device."""
        self._start()
        # The processes end if a batch fails.
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            if self._workers is None:
                planned, batch = self._make_here(self._ahead.first())
            else:
                next_batch = self._on_way or self._take(wait=True)
                assert next_batch is not None
                planned, upload, made_batch = next_batch
                batch = read_batch(made_batch, upload.wait() if upload is not None else None)
            self.order.hand_out(planned)
            self._plan_more()
            # The copy of the next batch to the device overlaps with the step on this one.
            self._on_way = self._take(wait=False) if self._moves else None
            on_failure.pop_all()
        return batch

    def _start(self) -> None:
        """Start the processes unless they run, and plan the first batches."""
        if self._plan is not None:
            return
        if self._epochs is not None and self._epochs.costs is None and self._cost is not None and self.ranks > 1:
            self._epochs.costs = self._find_costs(cast(Callable[[Any], float], self._cost))
        if self._workers is None and self.num_workers and len(self.order):
            device = self._device
            if device.type == "cuda" and device.index is None:
                # The current device differs between threads.
                device = torch.device("cuda", torch.cuda.current_device())
            self._uploads = Uploads(device)
            self._workers = start_workers(self._make, self.num_workers, self._uploads.buffer)
            self._ending = weakref.finalize(self, self._workers.close)
        self._ahead = Ahead(self._workers, self.order.substitute, self._window)
        self._plan = self.order.plan()
        self._plan_more()

    def processes(self) -> list[int]:
        """Return the ids of the processes, for measurements."""
        return self._workers.processes() if self._workers is not None else []

    def close(self) -> None:
        """End the processes.  Another iteration starts them again."""
        if self._workers is not None:
            self._ending()
        self._workers = self._plan = self._on_way = None

    def __enter__(self) -> "Ready":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget(self) -> None:
        """Drop the planned batches."""
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
        ready_batch = self._ahead.take(wait)
        if ready_batch is None:
            return None
        planned, made_batch = ready_batch
        self.order.note(planned)
        return planned, self._uploads.start(torch.as_tensor(made_batch.buffer)) if self._moves else None, made_batch

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
        """Compute the cost of each example.  Each rank makes its share of the examples once."""
        group = world()
        # If `ranks` is not the number of processes, the others cannot take a share.
        is_shared = group.size == self.ranks
        indices = range(self._size)[self.rank :: self.ranks] if is_shared else range(self._size)
        own_costs = find_costs(BatchMaker(Costs(self.dataset, cost), np.array, self.seed), indices, self.num_workers)
        if not is_shared:
            return own_costs
        costs = np.empty(self._size)
        for rank, rank_costs in enumerate(all_gather_object(own_costs.tolist(), group, "the costs of examples")):
            costs[rank :: self.ranks] = rank_costs
        return costs


def _check(**settings: tuple[int, int]) -> None:
    for name, (value, least) in settings.items():
        if not isinstance(value, int) or value < least:
            raise UserError(f"Ready: {name} = {value}. Pass an integer of at least {least}.")
