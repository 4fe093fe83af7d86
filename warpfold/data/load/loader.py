"""Make batches on the device from stores, while earlier steps compute: docs/loader.md.

A `Schedule` says which examples this process works on, in which order.  `Workers` make them ahead of time, across
epochs; an example that is ready may overtake a slow one, within a window; the next batch is copied to the device while
the present step computes.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from warpfold.batch import Arrays, Batch, to_tensors
from warpfold.data.features.choose import SampleConfig
from warpfold.data.features.make import few_sizes, make_features, pad_features
from warpfold.data.load.ahead import Ahead
from warpfold.data.load.blocks import Layout, view
from warpfold.data.load.order import Order, SourceEntry
from warpfold.data.load.schedule import Draw, Schedule, State
from warpfold.data.load.workers import Failed, Make, Workers
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import open_entry
from warpfold.device import Upload, Uploads
from warpfold.errors import StorageError, UserError


@dataclass(frozen=True)
class Maker:
    """Make the features of examples: what each worker gets, the stores and settings.

    assemblies: for a model of complexes, to which a chain is an assembly of one (`stored_example.open_entry`).
    sizes: pad each axis to one of so many sizes (`make.few_sizes`); 0: none is padded.
    """

    stores: tuple[Store, ...]
    config: SampleConfig
    seed: int
    train: bool = True
    assemblies: bool = False
    sizes: int = 0

    def __call__(self, source: int, key: str, index: int, passes: int) -> Arrays:
        """Return the features of a store's entry `key`, drawn for example `index`: arrays of the feature table.

        passes: through the trunk.  Errors: UserError for a damaged entry.
        """
        example = open_entry(self.stores[source], key, self.assemblies)
        features = make_features(example, self.config, self.seed, (key, index), passes, self.train)
        if not self.sizes:
            return features
        return pad_features(features, few_sizes(features, self.config, self.sizes))


class Quarantine:
    """The names of entries that could not be used, set aside for the rest of a run.

    limit: how many are allowed.  known: those of earlier sessions of the run.  report: called with the name, the number
    of the example, and the reason, for each new one.
    """

    def __init__(
        self, limit: int, known: Iterable[str] = (), report: Callable[[str, int, str], None] = lambda *_: None
    ) -> None:
        self.limit, self.names, self._report = limit, dict.fromkeys(known), report

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def add(self, name: str, index: int, reason: str) -> None:
        """Set an entry aside.  Errors: UserError if it exceeds the limit."""
        if name not in self.names:
            self.names[name] = None
            self._report(name, index, reason)
        if len(self.names) > self.limit:
            raise UserError(
                f"entries that cannot be used: {len(self.names)}, the last one {name}: {reason}; more than "
                f"{self.limit} stop a run (train.quarantine); see quarantine.jsonl, and mend or pack the data again"
            )


@dataclass(frozen=True)
class Sample:
    """An example, ready to be used; of a loader, with the source and the key of its entry."""

    index: int
    name: str
    features: Batch
    source: int = 0
    key: str = ""


@dataclass(frozen=True)
class _Planned:
    """An example that is being made.  place: its number among this process's, and the ticket of its job."""

    place: int
    draw: Draw
    entry: SourceEntry
    passes: int
    fixed: bool  # must keep its place

    @property
    def kind(self) -> tuple[bool, int]:
        """Return a key that all examples share with which it may exchange places.

        All examples of a step have the step's number of passes, so only examples with the same number may be
        exchanged; otherwise some would lack passes or have too many.
        """
        return (True, self.place) if self.fixed else (False, self.passes)


class Loader:
    """The examples of `schedule`, in the order of their use: an iterator, and a context that ends its workers.

    make: called with source, key, index, passes (a `Maker`).  passes: the number of passes of step 0, 1, ... of the
    schedule.  workers: processes; with 0 this process makes each example when it is needed.  ahead: how many examples
    per worker are made ahead at most.  window: how many places an example may come earlier or later than planned; with
    0, or without workers, all come as planned.  used: called with each example before it is used.
    Without a window the order does not depend on the number of workers.
    Errors while iterating: UserError from `quarantine`, or if a source has no usable entry left.
    """

    def __init__(
        self,
        order: Order,
        make: Make,
        schedule: Schedule,
        quarantine: Quarantine,
        *,
        passes: Callable[[int], int] = lambda step: 1,
        workers: int = 0,
        ahead: int = 4,
        window: int = 0,
        device: torch.device | str = "cpu",
        used: Callable[[Draw], None] = lambda draw: None,
    ) -> None:
        self.order, self.schedule, self.quarantine = order, schedule, quarantine
        self._make, self._passes, self._used = make, passes, used
        self._limit = max(1, workers * ahead)
        self._queue = enumerate(schedule)
        self._next: tuple[_Planned, Upload, Layout] | None = None  # chosen, and on its way to the device
        self._given = 0  # examples given out
        self._early: dict[int, int] = {}  # place and number of given ones that were planned for later
        self._device, self._uploads = device, Uploads(device)
        self.workers = Workers(make, workers, self._uploads.buffer) if workers > 0 and len(schedule) else None
        self._ahead: Ahead[_Planned] = Ahead(self.workers, self._job, self._mended, window)
        with ExitStack() as unless_begun:
            unless_begun.callback(self.close)
            self._plan()
            unless_begun.pop_all()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        if self.workers is not None:
            self.workers.close()

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __len__(self) -> int:
        return len(self.schedule)

    def __next__(self) -> Sample:
        if self._given == len(self.schedule):
            raise StopIteration
        if self.workers is None:
            planned, features = self._make_here(self._ahead.first())
            self._used(planned.draw)
        else:
            chosen = self._next or self._take(wait=True)
            assert chosen is not None
            planned, upload, layout = chosen
            buffer = upload.wait()
            features = to_tensors({name: view(buffer, kind, shape, at) for name, kind, shape, at in layout})
        if planned.place > self._given:
            self._early[planned.place] = planned.draw.number
        self._early.pop(self._given, None)
        self._given += 1
        self._plan()
        if self.workers is not None:
            self._next = self._take(wait=False)
        entry = planned.entry
        return Sample(planned.draw.number, entry.name, features, entry.source, entry.key)

    def exchanged(self) -> tuple[list[int], list[int]]:
        """Return the examples that this rank was to have used by now and has not, and those that it has used early."""
        waiting = [*self._ahead, *([self._next[0]] if self._next else [])]
        return [p.draw.number for p in waiting if p.place < self._given], list(self._early.values())

    def state(self, exchanged: Iterable[tuple[list[int], list[int]]] = ()) -> State:
        """Return which examples have been used, at the end of a step.  exchanged: of every rank."""
        steps, rest = divmod(self._given, self.schedule.share)
        assert not rest, "in the middle of a step"
        every = list(exchanged) or [self.exchanged()]
        late, early = ([index for lists in every for index in lists[which]] for which in (0, 1))
        return self.schedule.state(steps, late, early)

    def _plan(self) -> None:
        """Plan more examples and submit them, up to the limit."""
        while len(self._ahead) < self._limit and (item := next(self._queue, None)):
            place, (draw, fixed) = item
            passes = self._passes(place // self.schedule.share)
            planned = _Planned(place, draw, self.order.entry(*draw), passes, fixed)
            if not fixed and planned.entry.name in self.quarantine:
                planned = self._redrawn(planned)
            self._ahead.add(planned)

    def _job(self, planned: _Planned) -> tuple[int, str, int, int]:
        return planned.entry.source, planned.entry.key, planned.draw.number, planned.passes

    def _redrawn(self, planned: _Planned) -> _Planned:
        """Return the plan with another entry of the same source that is not in quarantine."""
        number = planned.entry.source
        source = self.order.sources[number]
        if all(self.order.at(number, place).name in self.quarantine for place in range(len(source.keys))):
            raise UserError(f"{source.store.path}: none of its entries can be used")
        draw, entry = planned.draw, planned.entry
        while entry.name in self.quarantine:
            draw = Draw(draw.number, draw.again + 1)
            entry = self.order.entry(*draw)
        return replace(planned, draw=draw, entry=entry)

    def _take(self, wait: bool) -> tuple[_Planned, Upload, Layout] | None:
        """Start copying the example for the next place to the device; None if none is ready (yet, unless `wait`)."""
        taken = self._ahead.take(wait)
        if taken is None:
            return None
        planned, made = taken
        self._used(planned.draw)
        return planned, self._uploads.start(torch.as_tensor(made.buffer)), made.layout

    def _mended(self, planned: _Planned, failed: Failed) -> _Planned:
        """Set an entry aside, and return what to make instead."""
        self.quarantine.add(planned.entry.name, planned.draw.number, failed.reason)
        return self._redrawn(planned)

    def _make_here(self, planned: _Planned) -> tuple[_Planned, Batch]:
        while True:
            try:
                arrays = self._make(*self._job(planned))
            except StorageError:
                raise
            except (UserError, MemoryError) as error:
                planned = self._mended(planned, Failed(str(error) or "too little memory"))
            else:
                return planned, to_tensors(arrays, self._device)
