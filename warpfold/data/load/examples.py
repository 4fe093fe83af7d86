"""The examples of a run and their order, for `engine.ready.Ready` (docs/explanation/parallel_training.md).

`ExampleDataset` is the map-style dataset of a run.  `RunOrder` says which examples this process works on: those of a
`Schedule`, each as an index of the dataset.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from warpfold.batch import Arrays, Batch
from warpfold.data.features.choose import SampleConfig
from warpfold.data.features.make import make_features, pad_features, padded_shape
from warpfold.data.load.order import Order, SourceEntry
from warpfold.data.load.schedule import Draw, Schedule, State
from warpfold.data.load.workers import Failed, Make
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import open_entry
from warpfold.errors import UserError


@dataclass(frozen=True)
class Maker:
    """Make the features of examples: what each worker gets, the stores and settings.

    assemblies: for a model of complexes, to which a chain is an assembly of one (`stored_example.open_entry`).
    sizes, multiple: pad each axis to one of so many sizes, and to a multiple of a number (`make.padded_shape`).
    """

    stores: tuple[Store, ...]
    config: SampleConfig
    seed: int
    train: bool = True
    assemblies: bool = False
    sizes: int = 0
    multiple: int = 1

    def __call__(self, source: int, key: str, index: int, passes: int) -> Arrays:
        """Return the features of a store's entry `key`, drawn for example `index`: arrays of the feature table.

        passes: through the trunk.  Errors: UserError for a damaged entry.
        """
        example = open_entry(self.stores[source], key, self.assemblies)
        features = make_features(example, self.config, self.seed, (key, index), passes, self.train)
        return pad_features(features, padded_shape(features, self.multiple, self.config, self.sizes))


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
                f"{self.limit} stop a run (train.quarantine). See quarantine.jsonl, and mend or pack the data again"
            )


@dataclass(frozen=True)
class Sample:
    """An example, ready to be used; of a loader, with the source and the key of its entry."""

    index: int
    name: str
    features: Batch  # as a loader yields them, in the narrow types of `make_features`: see `batch.to_tensors`
    source: int = 0
    key: str = ""


class ExampleDataset:
    """A map-style dataset of the entries of stores; an index is that of a `PlannedExample`.

    make: called with source, key, number, passes (a `Maker`).
    """

    def __init__(self, make: Make) -> None:
        self.make = make

    def __getitem__(self, index: Sequence[Any]) -> Sample:
        source, key, name, number, passes = index
        features: dict[str, Any] = dict(self.make(source, key, number, passes))
        return Sample(number, name, features, source, key)


def only(examples: Sequence[Sample]) -> Sample:
    """Collate a batch of one example."""
    (example,) = examples
    return example


@dataclass(frozen=True)
class PlannedExample:
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

    @property
    def job(self) -> tuple[int, list[Any]]:
        """Return the epoch, of which a run has one, and the indices of its batch of one."""
        return 0, [[self.entry.source, self.entry.key, self.entry.name, self.draw.number, self.passes]]


class RunOrder:
    """The order of this rank's examples of a run: those of a `Schedule`, each by itself (`BatchOrder`).

    An entry that cannot be used is set aside, and another one of its source takes its place.
    passes: the number of passes of step 0, 1, ... of the schedule.  used: called with each example before it is used.
    Errors while iterating: UserError from `quarantine`, or if a source has no usable entry left.
    """

    refusals: tuple[type[Exception], ...] = (UserError, MemoryError)

    def __init__(
        self,
        order: Order,
        schedule: Schedule,
        quarantine: Quarantine,
        passes: Callable[[int], int] = lambda step: 1,
        used: Callable[[Draw], None] = lambda draw: None,
    ) -> None:
        self.order, self.schedule, self.quarantine = order, schedule, quarantine
        self._passes, self._used = passes, used
        self._planned: dict[int, PlannedExample] = {}  # by place: planned, and not handed out
        self._early: dict[int, int] = {}  # place and number of examples that were handed out early
        self._count = 0  # examples handed out

    def __len__(self) -> int:
        return len(self.schedule)

    @property
    def ended(self) -> bool:
        return self._count == len(self.schedule)

    def begin(self) -> bool:
        return False

    def end(self) -> None: ...

    def plan(self) -> Iterator[PlannedExample]:
        """Yield the examples of the schedule, with substitutes for entries in quarantine."""
        for place, (draw, fixed) in enumerate(self.schedule):
            passes = self._passes(place // self.schedule.share)
            planned = PlannedExample(place, draw, self.order.entry(*draw), passes, fixed)
            if not fixed and planned.entry.name in self.quarantine:
                planned = self._redrawn(planned)
            self._planned[place] = planned
            yield planned

    def substitute(self, planned: PlannedExample, failed: Failed) -> PlannedExample:
        self.quarantine.add(planned.entry.name, planned.draw.number, failed.reason)
        planned = self._planned[planned.place] = self._redrawn(planned)
        return planned

    def note(self, planned: PlannedExample) -> None:
        self._used(planned.draw)

    def hand_out(self, planned: PlannedExample) -> None:
        del self._planned[planned.place]
        if planned.place > self._count:
            self._early[planned.place] = planned.draw.number
        self._early.pop(self._count, None)
        self._count += 1

    def exchanged(self) -> tuple[list[int], list[int]]:
        """Return the examples that this rank was to have used by now and has not, and those that it has used early."""
        late = [planned.draw.number for place, planned in self._planned.items() if place < self._count]
        return late, list(self._early.values())

    def state(self, exchanged: Iterable[tuple[list[int], list[int]]] = ()) -> State:
        """Return which examples have been used, at the end of a step.  exchanged: of every rank."""
        steps, remainder = divmod(self._count, self.schedule.share)
        assert not remainder, "in the middle of a step"
        every = list(exchanged) or [self.exchanged()]
        late, early = ([index for lists in every for index in lists[which]] for which in (0, 1))
        return self.schedule.state(steps, late, early)

    def _redrawn(self, planned: PlannedExample) -> PlannedExample:
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
