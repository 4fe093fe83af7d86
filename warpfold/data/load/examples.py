"""Define the dataset of a run and its order, for `engine.ready.Ready` (docs/explanation/parallel_training.md).

`ExampleDataset` is the map-style dataset. `RunOrder` yields the examples of this process, those of a `Schedule`, as
indices of the dataset.
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
    """Compute the features of examples in a worker process.

    assemblies: read every entry as an assembly, for a multimer model (`stored_example.open_entry`). sizes: number of
    different sizes of each axis, 0 for any. multiple: pad to a multiple of this number (see `make.padded_shape`).
    """

    stores: tuple[Store, ...]
    config: SampleConfig
    seed: int
    train: bool = True
    assemblies: bool = False
    sizes: int = 0
    multiple: int = 1

    def __call__(self, source: int, key: str, index: int, passes: int) -> Arrays:
        """Compute the features of entry `key` of a store for example `index`: arrays of the feature table.

        passes: number of passes through the trunk. Raises UserError for a damaged entry.
        """
        example = open_entry(self.stores[source], key, self.assemblies)
        features = make_features(example, self.config, self.seed, (key, index), passes, self.train)
        return pad_features(features, padded_shape(features, self.multiple, self.config, self.sizes))


class Quarantine:
    """The names of unusable entries, which are skipped for the rest of a run.

    limit: allowed number of entries. known: entries of earlier sessions of the run. report: called for each new entry
    with its name, the number of the example, and the reason.
    """

    def __init__(
        self, limit: int, known: Iterable[str] = (), report: Callable[[str, int, str], None] = lambda *_: None
    ) -> None:
        self.limit, self.names, self._report = limit, dict.fromkeys(known), report

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def add(self, name: str, index: int, reason: str) -> None:
        """Add an entry. Raises UserError if this exceeds the limit."""
        if name not in self.names:
            self.names[name] = None
            self._report(name, index, reason)
        if len(self.names) > self.limit:
            raise UserError(
                f"entries that cannot be used: {len(self.names)}, the last one {name}: {reason.rstrip('.')}; more than "
                f"{self.limit} stop a run (train.quarantine). See quarantine.jsonl, and repair or pack the data again."
            )


@dataclass(frozen=True)
class Sample:
    """A loaded example, with the source and the key of its entry.

    features: in the narrow types of `make_features`, which `batch.to_tensors` converts.
    """

    index: int
    name: str
    features: Batch
    source: int = 0
    key: str = ""


class ExampleDataset:
    """A map-style dataset of the entries of stores. An index is an element of `PlannedExample.job`.

    make: called with source, key, number and passes (a `Maker`).
    """

    def __init__(self, make: Make) -> None:
        self.make = make

    def __getitem__(self, index: Sequence[Any]) -> Sample:
        source, key, name, number, passes = index
        features: dict[str, Any] = dict(self.make(source, key, number, passes))
        return Sample(number, name, features, source, key)


def only(examples: Sequence[Sample]) -> Sample:
    """Return the only example of a batch, as a collate function."""
    (example,) = examples
    return example


@dataclass(frozen=True)
class PlannedExample:
    """A planned example.

    place: its number among the examples of this process, and the ticket of its job. fixed: it must not be reordered.
    """

    place: int
    draw: Draw
    entry: SourceEntry
    passes: int
    fixed: bool

    @property
    def kind(self) -> tuple[bool, int]:
        """Return a key that is equal for examples that may be reordered.

        All examples of a step have the same number of passes, so only examples with equal numbers may be exchanged.
        """
        return (True, self.place) if self.fixed else (False, self.passes)

    @property
    def job(self) -> tuple[int, list[Any]]:
        """Return the epoch (a run has a single epoch) and the indices of a batch of one example."""
        return 0, [[self.entry.source, self.entry.key, self.entry.name, self.draw.number, self.passes]]


class RunOrder:
    """The order of this rank's examples in a run: those of a `Schedule`, in batches of one (`BatchOrder`).

    An unusable entry is added to the quarantine and replaced by another entry of its source.
    passes: returns the number of passes of a step of the schedule. used: called with each example before its use.
    Iteration raises UserError from `quarantine`, or if a source has no usable entry left.
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
        # Examples that have not been handed out, by place.
        self._planned: dict[int, PlannedExample] = {}
        # Numbers of examples that were handed out early, by place.
        self._early: dict[int, int] = {}
        # Number of examples that have been handed out.
        self._count = 0

    def __len__(self) -> int:
        return len(self.schedule)

    @property
    def ended(self) -> bool:
        return self._count == len(self.schedule)

    def begin(self) -> bool:
        return False

    def end(self) -> None: ...

    def plan(self) -> Iterator[PlannedExample]:
        """Yield the examples of the schedule, with replacements for entries in quarantine."""
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
        """Return the examples that this rank has not used although they were due, and those that it has used early."""
        late = [planned.draw.number for place, planned in self._planned.items() if place < self._count]
        return late, list(self._early.values())

    def state(self, exchanged: Iterable[tuple[list[int], list[int]]] = ()) -> State:
        """Return the set of used examples at the end of a step. exchanged: the result of `exchanged` on every rank."""
        steps, remainder = divmod(self._count, self.schedule.share)
        assert not remainder, "in the middle of a step"
        exchanges = list(exchanged) or [self.exchanged()]
        late, early = ([index for lists in exchanges for index in lists[which]] for which in (0, 1))
        return self.schedule.state(steps, late, early)

    def _redrawn(self, planned: PlannedExample) -> PlannedExample:
        """Replace the entry by another one of the same source that is not in quarantine."""
        number = planned.entry.source
        source = self.order.sources[number]
        if all(self.order.at(number, place).name in self.quarantine for place in range(len(source.keys))):
            raise UserError(f"{source.store.path}: none of its entries can be used")
        draw, entry = planned.draw, planned.entry
        while entry.name in self.quarantine:
            draw = Draw(draw.number, draw.again + 1)
            entry = self.order.entry(*draw)
        return replace(planned, draw=draw, entry=entry)
