"""How long a collective takes on a cluster: rings within and between nodes, or all pairs at once, by where ranks are.

A rank's bytes are those that it sends to others, as events and `tune/traffic.py` count them.
"""

import math
from dataclasses import dataclass
from typing import Literal

from warpfold.tune.cluster.links import Cluster

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "sendrecv", "broadcast"]
GroupName = Literal["data", "axial", "branch", "model", "world"]


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
    it has there; in an all-to-all each rank sends to all others by itself.  Of a ring and a tree the one with fewer
    hops counts, as libraries choose.
    """
    k, n, g = where.ranks, where.nodes, where.on_node
    if k == 1:
        return 0.0
    within, between = cluster.within, cluster.between
    if kind in ("all_to_all", "sendrecv"):
        outside = (k - g) / (k - 1)
        crossing = sent * outside * g * where.beside / between.bandwidth if n > 1 else 0.0
        inside = sent * (1 - outside) / within.bandwidth
        hop = between.latency if n > 1 else within.latency
        return cluster.call + hop + max(crossing, inside)
    rounds = 2 if kind == "all_reduce" else 1
    latency = within.latency * min(g - 1, math.log2(g)) if g > 1 else 0.0
    latency += between.latency * math.ceil(math.log2(n)) if n > 1 else 0.0
    crossing = sent * where.beside / between.bandwidth if n > 1 else 0.0
    inside = sent / within.bandwidth if g > 1 else 0.0
    return cluster.call + rounds * latency + max(crossing, inside)
