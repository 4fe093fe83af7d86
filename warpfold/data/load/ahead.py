"""Jobs that are done ahead of time, and taken in their order; or as they are ready, within a window."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from warpfold.data.load.workers import Failed, Made, Outcome, Workers


class PlannedBatch(Protocol):
    """A planned batch: its place in the order, and a key that all batches share with which it may exchange places."""

    @property
    def place(self) -> int: ...

    @property
    def kind(self) -> Hashable: ...

    @property
    def job(self) -> tuple[int, list[Any]]:
        """Return the epoch and the indices of the examples, as JSON can hold them."""
        ...


P = TypeVar("P", bound=PlannedBatch)


class BatchOrder(Protocol[P]):
    """What a loader yields, and in which order.

    refusals: exceptions by which a dataset says that an example cannot be used, so that another one takes its place.
    """

    refusals: tuple[type[Exception], ...]

    def __len__(self) -> int:
        """Count the batches of a whole iteration."""
        ...

    @property
    def ended(self) -> bool:
        """Return whether every batch of this iteration has been handed out."""
        ...

    def begin(self) -> bool:
        """Begin an iteration.  Returns whether the last one was left early, so that planned batches are dropped."""
        ...

    def end(self) -> None:
        """End an iteration of which every batch has been handed out."""
        ...

    def plan(self) -> Iterator[P]:
        """Yield what comes from now on, also what follows the end of this iteration."""
        ...

    def substitute(self, planned: P, failed: Failed) -> P:
        """Choose a batch that takes the place of one that failed, or raise."""
        ...

    def note(self, planned: P) -> None:
        """Note that a batch is used next, before it is used."""
        ...

    def hand_out(self, planned: P) -> None:
        """Count a batch as used."""
        ...


class Ahead(Generic[P]):
    """Planned batches, in the order of their places; workers make them ahead of time.

    workers: None: the caller takes the `first` and makes it.  substitute: returns what to make instead of a batch that
    failed, at its place, or raises; one whose process was killed is tried once more before.  window: how many places
    a batch may be taken earlier or later than planned; only those of one kind exchange places.
    """

    def __init__(self, workers: Workers | None, substitute: Callable[[P, Failed], P], window: int) -> None:
        self._workers, self._substitute, self._window = workers, substitute, window
        self._planned: dict[int, P] = {}  # by place, ascending: planned, and not taken yet
        self._kinds: deque[Hashable] = deque()  # of the places for which none is taken yet
        self._killed: set[int] = set()  # places of jobs whose process was killed once

    def __len__(self) -> int:
        return len(self._planned)

    def __iter__(self) -> Iterator[P]:
        return iter(self._planned.values())

    def add(self, planned: P) -> None:
        """Plan one more, behind all others."""
        self._kinds.append(planned.kind)
        self._submit(planned)

    def _submit(self, planned: P) -> None:
        self._planned[planned.place] = planned
        if self._workers is not None:
            self._workers.submit(planned.place, planned.job)

    def first(self) -> P:
        """Take the first job, for the caller to do."""
        planned = next(iter(self))
        self._take(planned)
        return planned

    def take(self, wait: bool) -> tuple[P, Made] | None:
        """Take the job for the next place; None if none is ready (yet, unless `wait`)."""
        workers = self._workers
        if not self._kinds or workers is None:
            return None
        with workers.changed:
            while True:
                self._settle(workers.outcomes)
                planned = self._first_ready(workers.outcomes)
                if planned is not None or not wait:
                    break
                workers.wait()
            if planned is None:
                return None
            made = workers.outcomes.pop(planned.place)
        assert isinstance(made, Made)
        self._take(planned)
        return planned, made

    def _take(self, planned: P) -> None:
        self._kinds.popleft()
        del self._planned[planned.place]

    def _first_ready(self, outcomes: Mapping[int, Outcome]) -> P | None:
        """Return the first finished job among those that may take the next place.

        These are at most `window` places behind the oldest that was not taken, so that none comes more than `window`
        places late or early.
        """
        oldest = None
        for planned in self:
            if planned.kind != self._kinds[0]:
                continue
            oldest = planned.place if oldest is None else oldest
            if planned.place > oldest + self._window:
                break
            if planned.place in outcomes:
                return planned
        return None

    def _settle(self, outcomes: dict[int, Outcome]) -> None:
        """Submit failed jobs again, or what is to be done instead."""
        failed = {place: outcome for place, outcome in outcomes.items() if isinstance(outcome, Failed)}
        for place, outcome in failed.items():
            del outcomes[place]
            planned = self._planned[place]
            if outcome.killed and place not in self._killed:
                self._killed.add(place)
            else:
                self._killed.discard(place)
                reason = f"{outcome.reason}, twice" if outcome.killed else outcome.reason
                planned = self._substitute(planned, replace(outcome, reason=reason))
            self._submit(planned)
