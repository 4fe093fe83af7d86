"""Nodes, links and the times of collectives.

A `Cluster` is measured by `warpfold doctor --cluster`, or assembled from vendor specifications. All estimates of
communication in WarpFold use this module.
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
    """A link between two ranks. A message of x bytes takes latency + x / bandwidth.

    latency: seconds. bandwidth: bytes per second that the sender can send.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency = {self.latency:g}: it must be seconds, at least 0")
        if not 0 < self.bandwidth < math.inf:
            raise ValueError(f"bandwidth = {self.bandwidth:g}: it must be bytes per second, above 0")

    def seconds(self, size: float) -> float:
        """Compute the seconds of a message of a number of bytes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks on equal nodes, one device each, with their links. The last node may be smaller.

    within: link between two ranks of a node. between: link between two nodes, shared by the ranks of a node.
    call: fixed seconds of a collective, until it is launched and its ranks have met.
    library: implementation of the collectives. device: "H100", or the name of a processor. how: source of the values.
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
            raise ValueError(f"ranks = {self.ranks}, per_node = {self.per_node}: they must be at least 1")
        if not 0 <= self.call < math.inf:
            raise ValueError(f"call = {self.call:g}: it must be seconds, at least 0")

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return math.ceil(self.ranks / self.per_node)

    def save(self, path: Path) -> None:
        """Write the cluster as an editable TOML file. Raises UserError if it cannot be written."""
        write_atomically(path, settings.to_toml(self))


# Modelled: 80 % of the vendors' bandwidth per rank and direction, and usual latencies of small messages. "gloo" was
# measured as a whole collective of four ranks on two cores over the loopback device
# (benchmarks/results/cluster-2core-epyc-2026-11-20.json).
LINKS = {
    "NVLink 4": Link(20e-6, 360e9),
    "NVLink 3": Link(20e-6, 240e9),
    "InfiniBand 400 Gb/s": Link(30e-6, 40e9),
    "Ethernet 25 Gb/s": Link(60e-6, 2.5e9),
    "PCIe 4": Link(20e-6, 20e9),
    "gloo": Link(1.7e-3, 0.53e9),
}
# Latency between nodes in seconds, and whether each device usually has its own adapter (otherwise each node has one).
NETWORKS = {"ib": (30e-6, True), "roce": (30e-6, True), "eth": (60e-6, False)}
# Fraction of a link's nominal bandwidth that is reached.
REACHED = 0.8


def one_node(ranks: int) -> Cluster:
    """Return a cluster of a number of ranks without further information."""
    return Cluster(ranks=ranks, per_node=ranks, within=LINKS["gloo"], between=LINKS["gloo"])


def read_cluster(path: Path) -> Cluster:
    """Read a file that `Cluster.save` has written. Raises UserError for a missing or wrong file."""
    remedy = "Write one by `warpfold doctor --cluster --out FILE`."
    if not path.is_file():
        raise UserError(f"--cluster {path}: no such file. {remedy}")
    try:
        return settings.build(Cluster, settings.load(path), str(path))
    except UserError as error:
        raise UserError(f"{error}. {remedy}") from None


def network(text: str, per_node: int) -> Link:
    """Parse a network between nodes: "ib400", "roce100", "eth25" (Gb/s), or "ib200x4" with 4 adapters per node.

    By default InfiniBand and RoCE have one adapter per device, and Ethernet has one per node.
    Raises UserError for any other text.
    """
    match = re.fullmatch(r"(ib|roce|eth)(\d{1,4})(?:x(\d{1,2}))?", text.lower())
    if match is None or not int(match[2]) or match[3] == "0":
        raise UserError(
            f"{text}: not a network. Pass ib, roce or eth with its Gb/s, as in ib400, eth25, or ib200x4 for four "
            "adapters on each node."
        )
    latency, per_device = NETWORKS[match[1]]
    adapters = int(match[3] or (per_node if per_device else 1))
    return Link(latency, REACHED * adapters * int(match[2]) * 1e9 / 8)


Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "sendrecv", "broadcast"]
# "node" and "nodes" are the two groups of hierarchical sums.
GroupName = Literal["data", "axial", "branch", "model", "world", "node", "nodes"]
# Collectives in which each rank sends directly to the others.
SWAPS = ("all_to_all", "sendrecv")


@dataclass(frozen=True)
class Placement:
    """Placement of a group's ranks on nodes.

    on_node: ranks of the group on each of its nodes. sharing: groups that share a node's link to other nodes.
    """

    ranks: int
    on_node: int
    sharing: int = 1

    @property
    def nodes(self) -> int:
        """Number of nodes over which the group extends."""
        return math.ceil(self.ranks / self.on_node)


def place(cluster: Cluster, data: int, axial: int, branch: int, group: GroupName) -> Placement:
    """Compute the placement of a group of the grid data x axial x branch, with branch innermost (parallel/mesh.py)."""
    if group in ("node", "nodes"):
        data_ranks = max(1, cluster.per_node // (axial * branch))
        if group == "node":
            return Placement(data_ranks, data_ranks)
        return Placement(data // data_ranks, 1, cluster.per_node)
    size, stride = {
        "branch": (branch, 1),
        "axial": (axial, branch),
        "data": (data, axial * branch),
        "model": (axial * branch, 1),
        "world": (data * axial * branch, 1),
    }[group]
    on_node = max(1, min(size, cluster.per_node // stride))
    ranks_on_node = min(cluster.per_node, data * axial * branch)
    return Placement(size, on_node, max(1, ranks_on_node // on_node))


def collective_seconds(kind: Kind, sent: float, where: Placement, cluster: Cluster) -> float:
    """Compute the seconds of a collective in which each rank of a group sends `sent` bytes to others."""
    if where.ranks == 1:
        return 0.0
    k, n, g = where.ranks, where.nodes, where.on_node
    if cluster.library == "gloo":
        # gloo has only rings, all of whose steps are as slow as the slowest link. Each step goes there and back,
        # because a rank sends when the receiver has reported that it waits. A reduce_scatter is an all_reduce.
        # Confirmed by measurements of 2 and 4 ranks with 5 ms between them.
        steps = {"all_gather": k - 1, "all_reduce": 2 * (k - 1), "reduce_scatter": 2 * (k - 1)}.get(kind, 1)
        latency = 2 * (cluster.between if n > 1 else cluster.within).latency * steps
        sent *= 2 if kind == "reduce_scatter" else 1
    elif kind in SWAPS:
        latency = cluster.between.latency if n > 1 else cluster.within.latency
    else:
        # NCCL chooses the one of ring and tree with fewer hops.
        latency = cluster.within.latency * min(g - 1, math.log2(g)) if g > 1 else 0.0
        latency += cluster.between.latency * math.ceil(math.log2(n)) if n > 1 else 0.0
        latency *= 2 if kind == "all_reduce" else 1
    # A ring (all_reduce, all_gather, reduce_scatter) leaves a node once per group, however many ranks the group has
    # there. In an all-to-all each rank sends to all others itself.
    crossing, inside = sent * where.sharing, sent if g > 1 else 0.0
    if kind in SWAPS:
        outside = (k - g) / (k - 1)
        crossing, inside = crossing * outside * g, sent * (1 - outside)
    transfer = max(crossing / cluster.between.bandwidth if n > 1 else 0.0, inside / cluster.within.bandwidth)
    return cluster.call + latency + transfer
