"""Prefetch planned batches in worker processes, and take them in order or, within a window, as they are ready."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from warpfold.data.load.workers import Failed, Made, Outcome, Workers


class PlannedBatch(Protocol):
    """A planned batch. place: its index in the order. kind: batches of equal kind may be reordered."""

    @property
    def place(self) -> int: ...

    @property
    def kind(self) -> Hashable: ...

    @property
    def job(self) -> tuple[int, list[Any]]:
        """Return the epoch and the indices of the examples; must be JSON-serialisable."""
        ...


P = TypeVar("P", bound=PlannedBatch)


class BatchOrder(Protocol[P]):
    """The order of a loader's batches.

    refusals: exceptions by which a dataset refuses an example, which is then replaced.
    """

    refusals: tuple[type[Exception], ...]

    def __len__(self) -> int:
        """Return the number of batches of an iteration."""
        ...

    @property
    def ended(self) -> bool:
        """Return whether all batches of this iteration have been handed out."""
        ...

    def begin(self) -> bool:
        """Begin an iteration. Returns True if the previous one was left early; its planned batches are then dropped."""
        ...

    def end(self) -> None:
        """End an iteration after all its batches have been handed out."""
        ...

    def plan(self) -> Iterator[P]:
        """Yield the batches from now on, including those of the following iterations."""
        ...

    def substitute(self, planned: P, failed: Failed) -> P:
        """Choose a replacement for a batch that failed, or raise an error."""
        ...

    def note(self, planned: P) -> None:
        """Record that a batch is used next. Called before its use."""
        ...

    def hand_out(self, planned: P) -> None:
        """Count a batch as used."""
        ...


class Ahead(Generic[P]):
    """A queue of planned batches, which worker processes compute ahead of time.

    workers: None if the caller takes the `first` batch and computes it. substitute: returns a replacement for a batch
    that failed, or raises. A batch is retried once if its process was killed. window: number of places by which a batch
    may be taken earlier or later than planned. Only batches of one kind are reordered.
    """

    def __init__(self, workers: Workers | None, substitute: Callable[[P, Failed], P], window: int) -> None:
        self._workers, self._substitute, self._window = workers, substitute, window
        # Batches that have not been taken, by ascending place.
        self._planned: dict[int, P] = {}
        # The kinds of the places that have not been filled.
        self._kinds: deque[Hashable] = deque()
        # Places of batches that have been retried after their process was killed.
        self._killed: set[int] = set()

    def __len__(self) -> int:
        return len(self._planned)

    def __iter__(self) -> Iterator[P]:
        return iter(self._planned.values())

    def add(self, planned: P) -> None:
        """Append a batch."""
        self._kinds.append(planned.kind)
        self._submit(planned)

    def _submit(self, planned: P) -> None:
        self._planned[planned.place] = planned
        if self._workers is not None:
            self._workers.submit(planned.place, planned.job)

    def first(self) -> P:
        """Take the first batch, which the caller computes."""
        planned = next(iter(self))
        self._take(planned)
        return planned

    def take(self, wait: bool) -> tuple[P, Made] | None:
        """Take the batch for the next place; with `wait`, wait for it. Returns None if no batch is ready or planned."""
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
            outcome = workers.outcomes.pop(planned.place)
        assert isinstance(outcome, Made)
        self._take(planned)
        return planned, outcome

    def _take(self, planned: P) -> None:
        self._kinds.popleft()
        del self._planned[planned.place]

    def _first_ready(self, outcomes: Mapping[int, Outcome]) -> P | None:
        """Return the first finished batch that may take the next place.

        It must be at most `window` places after the oldest batch of its kind that has not been taken. Thus no batch is
        more than `window` places late or early.
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
        """Resubmit failed batches, or their replacements."""
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
