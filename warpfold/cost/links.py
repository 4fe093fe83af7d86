"""Devices on nodes, what joins them, and how long a collective of some of them takes.

A `Cluster` is measured by `warpfold doctor --cluster`, or put together from vendor specifications.  Every part of
WarpFold that asks what communication costs asks here.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from warpfold import settings
from warpfold.errors import UserError
from warpfold.files import write_atomically


@dataclass(frozen=True)
class Link:
    """What joins two ranks: a message of x bytes takes latency + x / bandwidth.

    latency: seconds; bandwidth: bytes per second that the sender can send.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency = {self.latency:g}: seconds, from 0 on, are expected")
        if not 0 < self.bandwidth < math.inf:
            raise ValueError(f"bandwidth = {self.bandwidth:g}: bytes per second, above 0, are expected")

    def seconds(self, size: float) -> float:
        """Return how long a message of so many bytes takes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """So many ranks on equal nodes, each with one device, and what joins them; the last node need not be full.

    within: two ranks of a node.  between: two nodes; its bandwidth is that of a whole node, whose ranks share it.
    call: seconds that a collective takes whatever travels: until it is launched and its ranks have met.
    library: whose collectives the ranks run.  device: "H100", or the name of a processor.  how: it is known.
    """

    ranks: int
    per_node: int
    within: Link
    between: Link
    call: float = 15e-6
    library: Literal["nccl", "gloo"] = "nccl"
    device: str = ""
    how: Literal["measured", "modelled", "given"] = "modelled"

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.per_node < 1:
            raise ValueError(f"ranks = {self.ranks}, per_node = {self.per_node}: at least 1 is expected")
        if not 0 <= self.call < math.inf:
            raise ValueError(f"call = {self.call:g}: seconds, from 0 on, are expected")

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return math.ceil(self.ranks / self.per_node)

    def save(self, path: Path) -> None:
        """Write it as TOML, which people may edit.  Errors: UserError where it cannot be written."""
        write_atomically(path, settings.to_toml(self))


# Modelled, not measured: 80 % of what the makers state for a rank and direction, and the usual time of a small message.
# "gloo" was measured, a whole collective of four ranks on two cores, loopback
# (benchmarks/results/cluster-2core-epyc-2026-11-20.json).
LINKS = {
    "NVLink 4": Link(20e-6, 360e9),
    "NVLink 3": Link(20e-6, 240e9),
    "InfiniBand 400 Gb/s": Link(30e-6, 40e9),
    "Ethernet 25 Gb/s": Link(60e-6, 2.5e9),
    "PCIe 4": Link(20e-6, 20e9),
    "gloo": Link(1.7e-3, 0.53e9),
}
# Seconds of a message between nodes, and whether each device usually has an adapter of its own (else each node).
NETWORKS = {"ib": (30e-6, True), "roce": (30e-6, True), "eth": (60e-6, False)}
REACHED = 0.8  # of what a maker states for a link


def one_node(ranks: int) -> Cluster:
    """Return a cluster of which it is only known how many ranks it has."""
    return Cluster(ranks=ranks, per_node=ranks, within=LINKS["gloo"], between=LINKS["gloo"])


def read_cluster(path: Path) -> Cluster:
    """Read what `Cluster.save` wrote.  Errors: UserError for a file that is not there, or holds something else."""
    wrote = "`warpfold doctor --cluster --out FILE` writes one"
    if not path.is_file():
        raise UserError(f"--cluster {path}: there is no such file; {wrote}")
    try:
        return settings.build(Cluster, settings.load(path), str(path))
    except UserError as error:
        raise UserError(f"{error}; {wrote}") from None


def network(text: str, per_node: int) -> Link:
    """Return the link between nodes of "ib400", "roce100", "eth25", "ib200x4": Gb/s, and adapters on each node.

    Without a count InfiniBand and RoCE have one for each device, Ethernet one for each node.
    Errors: UserError for anything else.
    """
    found = re.fullmatch(r"(ib|roce|eth)(\d{1,4})(?:x(\d{1,2}))?", text.lower())
    if found is None or not int(found[2]) or found[3] == "0":
        raise UserError(
            f"{text}: not a network; give ib, roce or eth with its Gb/s, as in ib400, eth25, or ib200x4 for four "
            "adapters on each node"
        )
    latency, each = NETWORKS[found[1]]
    adapters = int(found[3] or (per_node if each else 1))
    return Link(latency, REACHED * adapters * int(found[2]) * 1e9 / 8)


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
    Measured: 2 and 4 ranks, 5 ms apart.
    """
    slowest = cluster.between if where.nodes > 1 else cluster.within
    around = where.ranks - 1
    steps = {"all_gather": around, "all_reduce": 2 * around, "reduce_scatter": 2 * around}
    return 2 * slowest.latency * steps.get(kind, 1)
