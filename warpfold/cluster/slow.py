"""Find what is slow among equals: pairs, ranks and nodes, against what is usual for their kind.

A speed below `WRONG` of what is usual is wrong, one below `NOTE` worth a note.  Where healthy speeds differ by up to
30 % either way, none is below 0.7 / 1.3 = 0.54 of the usual one, so none is called wrong; and what is three times too
slow is below 1.3 / 3 / 0.7 = 0.62, so all of it is named.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warpfold.cluster.rounds import Pair

WRONG, NOTE = 0.5, 0.65


@dataclass(frozen=True)
class Slow:
    """What is slow together: the links of a node, of two nodes, or of a rank; or one pair.

    share: of the usual speed, the least.  rank, nodes: common to all of the pairs.
    """

    pairs: tuple[Pair, ...]
    share: float
    rank: int | None = None
    nodes: tuple[int, ...] = ()


def usual_speed(speeds: Mapping[Pair, float]) -> float:
    """Return the usual speed of pairs of one kind: of each rank the median of its pairs, of these the median.

    Of an even count the higher of the two in the middle: of three ranks with a slow one, two pairs of three are slow.
    """
    of_rank = defaultdict(list)
    for pair, speed in speeds.items():
        for rank in pair:
            of_rank[rank].append(speed)
    return statistics.median_high([statistics.median_high(found) for found in of_rank.values()])


def find_slow(
    speeds: Mapping[Pair, float], node_of: Sequence[int], below: float = WRONG, usual: float | None = None
) -> list[Slow]:
    """Return what is below a share of the usual speed of pairs of one kind, the most pairs first.

    A node is named where most of its pairs are slow; then two nodes, of what is left, and a rank likewise; then single
    pairs.
    """
    if not speeds:
        return []
    usual = usual or usual_speed(speeds)
    slow = {pair: speed / usual for pair, speed in speeds.items() if speed < below * usual}
    ends = {pair: (node_of[pair[0]], node_of[pair[1]]) for pair in speeds}
    across = {pair: both for pair, both in ends.items() if both[0] != both[1]}
    found: list[Slow] = []

    def take(members: Mapping[Pair, Sequence[Any]], least: int) -> Iterator[tuple[Any, tuple[Pair, ...], float]]:
        for one, pairs in culprits(slow, members, least):
            yield one, pairs, min(slow.pop(pair) for pair in pairs)

    if len(set(node_of)) > 2 and across:
        # More than one rank has: its links are named by it.
        found += [
            Slow(pairs, share, nodes=(node,)) for node, pairs, share in take(across, max(Counter(node_of).values()) + 1)
        ]
        both = {pair: (two,) for pair, two in across.items()}
        found += [Slow(pairs, share, nodes=two) for two, pairs, share in take(both, 2)]
    found += [Slow(pairs, share, rank=rank) for rank, pairs, share in take({pair: pair for pair in speeds}, 2)]
    return found + [Slow((pair,), slow[pair]) for pair in sorted(slow, key=slow.__getitem__)]


def culprits(
    slow: Mapping[Pair, float], members: Mapping[Pair, Sequence[Any]], least: int
) -> list[tuple[Any, tuple[Pair, ...]]]:
    """Return who has at least `least` slow pairs, and more than half of its pairs slow; with each pair once.

    members: of every pair, who it belongs to.
    """
    of_all = Counter(one for both in members.values() for one in both)
    left = {pair for pair in slow if pair in members}
    found: list[tuple[Any, tuple[Pair, ...]]] = []
    while True:
        counts = Counter(one for pair in left for one in members[pair])
        worst = max(counts, key=lambda one: (counts[one], counts[one] / of_all[one]), default=None)
        if worst is None or counts[worst] < least or counts[worst] <= of_all[worst] / 2:
            return found
        pairs = tuple(sorted(pair for pair in left if worst in members[pair]))
        found.append((worst, pairs))
        left -= set(pairs)


def stragglers(speeds: Sequence[float], below: float = WRONG) -> dict[int, float]:
    """Return by rank the share of the median speed, of the ranks that are below a share of it."""
    usual = statistics.median_high(speeds)
    return {rank: speed / usual for rank, speed in enumerate(speeds) if speed < below * usual}
