"""Assign examples to steps and ranks, as pure functions of their numbers.

The examples of a run are numbered 0, 1, 2 and so on without end. `State` records the numbers that have been used, and
`Schedule` assigns the remaining numbers to steps and ranks.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple


@dataclass(frozen=True)
class State:
    """The set of used examples: all below `first`, and the numbers in `early` above it (ascending)."""

    first: int = 0
    early: tuple[int, ...] = ()

    def remaining(self) -> Iterator[int]:
        """Yield the unused numbers, ascending, without end."""
        early = set(self.early)
        return (index for index in count(self.first) if index not in early)

    def after(self, number: int) -> "State":
        """Return the state after using the next `number` remaining examples."""
        end = self.first + number
        for index in self.early:
            end += index < end
        return State(end, self.early).changed()

    def changed(self, late: Iterable[int] = (), early: Iterable[int] = ()) -> "State":
        """Return the state with the `late` examples marked as unused, and the `early` ones as used."""
        unused = set(late)
        first = min([self.first, *unused])
        used = {*self.early, *early, *range(first, self.first)} - unused
        while first in used:
            first += 1
        return State(first, tuple(sorted(index for index in used if index > first)))


class Draw(NamedTuple):
    """An example as it was used: its number, and how often its entry was replaced because it was unusable."""

    number: int
    again: int = 0


class Schedule:
    """The examples of a rank, step by step. Each step assigns the next examples to the ranks by predicted cost.

    The examples of a step do not depend on the number of ranks.

    start: the examples that have been used before. steps: number of steps. examples: number of examples per step on all
    ranks (see `share_of`). cost: the predicted cost of an example (`costs`), which is balanced over the ranks; by
    default equal. replay: the examples that each rank used at these steps in an earlier run, in order. The steps that
    all ranks completed are repeated first.
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
        shares = [share_of(examples, ranks, other) for other in range(ranks)]
        self.share = shares[rank]  # this rank's examples per step
        self.cost = cost or (lambda index: 1.0)
        self.repeated = min([steps, *(len(draws) // share for draws, share in zip(replay, shares))]) if replay else 0
        self._replay = [list(draws[: self.repeated * share]) for draws, share in zip(replay, shares)]
        self._after_replay = start.changed(early=(draw.number for draws in self._replay for draw in draws))

    def __len__(self) -> int:
        """Return the number of examples of this rank."""
        return self.steps * self.share

    def __iter__(self) -> Iterator[tuple[Draw, bool]]:
        """Yield this rank's examples, and whether each is a repetition, which must not be reordered."""
        if self._replay:
            yield from ((draw, True) for draw in self._replay[self.rank])
        remaining = self._after_replay.remaining()
        for _ in range(self.steps - self.repeated):
            indices = list(islice(remaining, self.examples))
            if self.ranks > 1:
                assigned = deal([self.cost(index) for index in indices], self.ranks)[self.rank]
                indices = [indices[i] for i in assigned]
            yield from ((Draw(index), False) for index in indices)

    def state(self, steps: int, late: Iterable[int] = (), early: Iterable[int] = ()) -> State:
        """Return the set of examples that all ranks have used after `steps` steps.

        late: examples that were planned for these steps but have not been used. early: examples that were planned for
        later steps and have been used.
        """
        if steps <= self.repeated:
            shares = (share_of(self.examples, self.ranks, rank) for rank in range(self.ranks))
            draws = (draw for rank, share in zip(self._replay, shares) for draw in rank[: steps * share])
            state = self.start.changed(early=(draw.number for draw in draws))
        else:
            state = self._after_replay.after((steps - self.repeated) * self.examples)
        return state.changed(late, early)


def share_of(examples: int, ranks: int, rank: int) -> int:
    """Return the number of a step's examples on a rank. The first ranks get one more if they do not divide evenly."""
    return examples // ranks + (rank < examples % ranks)


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Distribute indices 0 .. len(costs) - 1 over ranks by share (ascending), so that the largest total cost is small.

    Graham's LPT rule assigns the most expensive index first, to the rank with the smallest total that is not full. Ties
    go to the first rank, so that every rank computes the same result.
    """
    sizes = [share_of(len(costs), ranks, rank) for rank in range(ranks)]
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    # Totals of the ranks that are not full. Every rank computes this for every step, so a heap is used for thousands of
    # ranks.
    heap = [(0.0, rank) for rank in range(ranks) if sizes[rank]]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        total, rank = heap[0]
        dealt[rank].append(index)
        if len(dealt[rank]) < sizes[rank]:
            heapq.heapreplace(heap, (total + costs[index], rank))
        else:
            heapq.heappop(heap)
    return [sorted(indices) for indices in dealt]
