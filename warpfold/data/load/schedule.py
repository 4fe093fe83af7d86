"""Which example comes at which step and on which rank: pure functions of numbers, for any data.

A run's examples are numbered 0, 1, 2 ... without end.  `State` says which numbers have been used, and `Schedule` deals
the others to steps and ranks.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple


@dataclass(frozen=True)
class State:
    """Which examples have been used: all below `first`, and those `early` ones above it (ascending)."""

    first: int = 0
    early: tuple[int, ...] = ()

    def remaining(self) -> Iterator[int]:
        """Yield the numbers that have not been used, ascending, without end."""
        early = set(self.early)
        return (index for index in count(self.first) if index not in early)

    def after(self, number: int) -> "State":
        """Return the state after the next `number` remaining examples have been used."""
        end = self.first + number
        for index in self.early:
            end += index < end
        return State(end, tuple(index for index in self.early if index >= end)).changed()

    def changed(self, late: Iterable[int] = (), early: Iterable[int] = ()) -> "State":
        """Return the state with the `late` examples not used after all, and the `early` ones used."""
        back = set(late)
        first = min([self.first, *back])
        used = {*self.early, *early, *range(first, self.first)} - back
        while first in used:
            used.remove(first)
            first += 1
        return State(first, tuple(sorted(index for index in used if index > first)))


class Draw(NamedTuple):
    """An example as it was used: its number, and how often its entry was redrawn because it could not be used."""

    number: int
    again: int = 0


class Schedule:
    """The examples of one rank, step after step: each step deals the next ones to the ranks, by predicted cost.

    start: what has been used before.  steps: how many follow.  examples: of a step, on all ranks (`share_of`).
    cost: an example's predicted cost (`costs`), which is balanced over the ranks; by default all cost the same.
    replay: for each rank what it used at these steps in an earlier run, in that order; the steps that all ranks
    completed are repeated before others are dealt.
    The examples of a step are the same for any number of ranks.
    """

    def __init__(
        self,
        start: State,
        steps: int,
        examples: int = 1,
        rank: int = 0,
        ranks: int = 1,
        cost: Callable[[int], float] | None = None,
        replay: Sequence[Sequence[Draw]] = (),
    ) -> None:
        self.start, self.steps, self.examples, self.rank, self.ranks = start, steps, examples, rank, ranks
        shares = [share_of(examples, ranks, each) for each in range(ranks)]
        self.share = shares[rank]  # examples of this rank in a step
        self.cost = cost or (lambda index: 1.0)
        self.repeated = min([steps, *(len(draws) // share for draws, share in zip(replay, shares))]) if replay else 0
        self._replay = [list(draws[: self.repeated * share]) for draws, share in zip(replay, shares)]
        self._then = start.changed(early=(draw.number for draws in self._replay for draw in draws))

    def __len__(self) -> int:
        """Return the number of examples of this rank."""
        return self.steps * self.share

    def __iter__(self) -> Iterator[tuple[Draw, bool]]:
        """Yield this rank's examples, and whether each is a repetition, which must keep its place."""
        if self._replay:
            yield from ((draw, True) for draw in self._replay[self.rank])
        remaining = self._then.remaining()
        for _ in range(self.steps - self.repeated):
            indices = list(islice(remaining, self.examples))
            if self.ranks > 1:
                own = deal([self.cost(index) for index in indices], self.ranks)[self.rank]
                indices = [indices[place] for place in own]
            yield from ((Draw(index), False) for index in indices)

    def state(self, steps: int, late: Iterable[int] = (), early: Iterable[int] = ()) -> State:
        """Return the examples that all ranks have used after `steps` steps.

        late: examples that were planned for these steps and have not been used by any rank.  early: examples that were
        planned for later steps and have been used.
        """
        if steps <= self.repeated:
            shares = (share_of(self.examples, self.ranks, rank) for rank in range(self.ranks))
            draws = (draw for rank, share in zip(self._replay, shares) for draw in rank[: steps * share])
            state = self.start.changed(early=(draw.number for draw in draws))
        else:
            state = self._then.after((steps - self.repeated) * self.examples)
        return state.changed(late, early)


def share_of(examples: int, ranks: int, rank: int) -> int:
    """Return how many of a step's examples a rank has: as many as the others, or the first ranks one more."""
    return examples // ranks + (rank < examples % ranks)


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Deal indices 0 .. len(costs) - 1 to ranks, to each its share (ascending), so that the largest sum is small.

    Graham's LPT rule: the most expensive first, each to the rank with the smallest sum that is not full.  Ties go to
    the first, so that every rank computes the same result.
    """
    sizes = [share_of(len(costs), ranks, rank) for rank in range(ranks)]
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    # Sums of the ranks that are not full: every rank deals every step, so a heap, for thousands of ranks.
    heap = [(0.0, rank) for rank in range(ranks) if sizes[rank]]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        total, rank = heap[0]
        dealt[rank].append(index)
        if len(dealt[rank]) < sizes[rank]:
            heapq.heapreplace(heap, (total + costs[index], rank))
        else:
            heapq.heappop(heap)
    return [sorted(indices) for indices in dealt]
