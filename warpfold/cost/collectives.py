"""How long a collective takes on a cluster: rings within and between nodes, or all pairs at once, by where ranks are.

A rank's bytes are those that it sends to others, as events and `cost/traffic.py` count them.
"""

import math
from dataclasses import dataclass
from typing import Literal

from warpfold.cost.links import Cluster

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "sendrecv", "broadcast"]
GroupName = Literal["data", "axial", "branch", "model", "world"]
SWAPS = ("all_to_all", "sendrecv")  # in which ranks send to each other at once


@dataclass(frozen=True)
class Placement:
    """Say where the ranks of a group are, and how many groups like it use the links of a node at the same time."""

    ranks: int
    on_node: int  # of the group's ranks, on each node that has any
    beside: int = 1  # groups that a node's link between nodes serves at once

    @property
    def nodes(self) -> int:
        """Over how many nodes the group reaches."""
        return math.ceil(self.ranks / self.on_node)


def place(cluster: Cluster, data: int, axial: int, branch: int, group: GroupName) -> Placement:
    """Return where a group of the grid data x axial x branch is: branch innermost, as `parallel/mesh.py` has it."""
    size, stride = {
        "branch": (branch, 1),
        "axial": (axial, branch),
        "data": (data, axial * branch),
        "model": (axial * branch, 1),
        "world": (data * axial * branch, 1),
    }[group]
    on_node = max(1, min(size, cluster.per_node // stride))
    there = min(cluster.per_node, data * axial * branch)
    return Placement(size, on_node, max(1, there // on_node))


def collective_seconds(kind: Kind, sent: float, where: Placement, cluster: Cluster) -> float:
    """Return how long all ranks of a group take that each send `sent` bytes to others.

    Rings (all_reduce, all_gather, reduce_scatter) cross to another node once for each node and group, whatever ranks
    it has there; in an all-to-all each rank sends to all others by itself.
    """
    if where.ranks == 1:
        return 0.0
    if cluster.library == "gloo":
        latency = _latency_of_gloo(kind, where, cluster)
        sent *= 2 if kind == "reduce_scatter" else 1
    else:
        latency = _latency(kind, where, cluster)
    return cluster.call + latency + _travelling(kind, sent, where, cluster)


def _travelling(kind: Kind, sent: float, where: Placement, cluster: Cluster) -> float:
    """Return how long the bytes take."""
    k, n, g = where.ranks, where.nodes, where.on_node
    crossing, inside = sent * where.beside, sent if g > 1 else 0.0
    if kind in SWAPS:
        outside = (k - g) / (k - 1)
        crossing, inside = crossing * outside * g, sent * (1 - outside)
    return max(crossing / cluster.between.bandwidth if n > 1 else 0.0, inside / cluster.within.bandwidth)


def _latency(kind: Kind, where: Placement, cluster: Cluster) -> float:
    """Return how long the hops take: of a ring and a tree the one with fewer counts, as NCCL chooses."""
    n, g = where.nodes, where.on_node
    if kind in SWAPS:
        return cluster.between.latency if n > 1 else cluster.within.latency
    once = cluster.within.latency * min(g - 1, math.log2(g)) if g > 1 else 0.0
    once += cluster.between.latency * math.ceil(math.log2(n)) if n > 1 else 0.0
    return once * (2 if kind == "all_reduce" else 1)


def _latency_of_gloo(kind: Kind, where: Placement, cluster: Cluster) -> float:
    """Return how long the steps take, each there and back: a rank sends when the other has said that it is waiting.

    gloo has rings alone, none of whose steps is faster than the slowest, and its reduce_scatter is an all_reduce.
    Measured: 2 and 4 ranks, 5 ms apart (docs/scale.md).
    """
    slowest = cluster.between if where.nodes > 1 else cluster.within
    around = where.ranks - 1
    steps = {"all_gather": around, "all_reduce": 2 * around, "reduce_scatter": 2 * around}
    return 2 * slowest.latency * steps.get(kind, 1)
