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

    @property
    def call(self) -> float:
        """The bytes that could travel in the time that a message costs whatever its size."""
        return self.latency * self.bandwidth


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
