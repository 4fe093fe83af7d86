"""Jobs that are done ahead of time, and taken in their order; or as they are ready, within a window."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from warpfold.data.load.workers import Failed, Made, Outcome, Workers


class WindowPlace(Protocol):
    """A planned job: its place in the order, and a key that all jobs share with which it may exchange places."""

    @property
    def place(self) -> int: ...

    @property
    def kind(self) -> Hashable: ...


P = TypeVar("P", bound=WindowPlace)


class Ahead(Generic[P]):
    """Planned jobs, in the order of their places; workers do them ahead of time.

    workers: None: the caller takes the `first` and does it.  job: the arguments for the workers.  mended: returns what
    to do instead of a job that failed, at its place, or raises; a job whose process was killed is tried once more
    before.  window: how many places a job may be taken earlier or later than planned; only jobs of one kind exchange
    places.
    """

    def __init__(
        self, workers: Workers | None, job: Callable[[P], Sequence[Any]], mended: Callable[[P, Failed], P], window: int
    ) -> None:
        self._workers, self._job, self._mended, self._window = workers, job, mended, window
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
            self._workers.submit(planned.place, self._job(planned))

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
                planned = self._mended(planned, replace(outcome, reason=reason))
            self._submit(planned)
