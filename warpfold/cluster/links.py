"""Measure the links between ranks: a sample of pairs, then all ranks at once, then a small collective.

The doctor, and a run without a cluster file, measure their links in one or two seconds. Tensors are on the ranks'
device, so the same code measures gloo between CPUs and NCCL between GPUs. All ranks must call the functions with a
parameter `team`.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from warpfold.cost.links import Cluster, Link, Placement, collective_seconds
from warpfold.cost.rates import finish
from warpfold.ops.torch_internals import all_gather_flat
from warpfold.parallel.team import Team
from warpfold.parallel.waits import waiting

T = TypeVar("T")
Clock = Callable[[], float]
Pair = tuple[int, int]
Where = Literal["within", "between"]
# The ranks of each node.
Nodes = Sequence[Sequence[int]]

PINGS, PING_BYTES = 20, 8
# Repetitions of large messages after a first one, which makes the connection.
REPEATS = 3
# Seconds that a large message should take, and limits of its size.
PAIR_SECONDS, RING_SECONDS = 0.025, 0.1
MIN_BYTES, MAX_BYTES = 2**18, {"cpu": 2**24, "cuda": 2**27}
# Repetitions of the small collective.
CALLS = 11


@dataclass(frozen=True)
class PairLink:
    """The measured link of two ranks (mean of both directions): latency in seconds, bandwidth in bytes per second."""

    first: int
    second: int
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class MeasuredLinks:
    """Measurements of the links of all ranks.

    device: "cpu" or "cuda". ring: bytes per second that a rank sends to the next one of its node while all ranks send;
    None if each rank is alone on its node. node_bandwidths: bytes per second that each node sends to the next while all
    ranks send; empty for a single node. call: seconds of a tiny all-gather of all ranks.
    """

    nodes: Nodes
    device: str
    pairs: Sequence[PairLink]
    ring: float | None
    node_bandwidths: Sequence[float]
    call: float

    def pairs_of(self, where: Where) -> list[PairLink]:
        """Select the pairs within nodes, or between them."""
        node_of = {rank: number for number, node in enumerate(self.nodes) for rank in node}
        wants_within = where == "within"
        return [pair for pair in self.pairs if (node_of[pair.first] == node_of[pair.second]) == wants_within]

    def cluster(self, name: str = "") -> Cluster | None:
        """Build the cluster for planning; returns None if the nodes differ in size. name: of the device.

        If all ranks are on a single node, or each is alone on its node, both kinds of links are equal.
        """
        sizes = {len(node) for node in self.nodes}
        if len(sizes) != 1 or not self.pairs:
            return None
        links: dict[Where, Link] = {}
        if pairs_within := self.pairs_of("within"):
            rate = statistics.median(pair.bandwidth for pair in pairs_within)
            links["within"] = _rounded(pairs_within, min(rate, self.ring or rate))
        if pairs_between := self.pairs_of("between"):
            links["between"] = _rounded(pairs_between, min(self.node_bandwidths))
        any_link = next(iter(links.values()))
        cluster = Cluster(
            ranks=sum(map(len, self.nodes)), per_node=sizes.pop(), call=0.0, device=name, how="measured",
            within=links.get("within", any_link), between=links.get("between", any_link),
            library="gloo" if self.device == "cpu" else "nccl",
        )  # fmt: skip
        # The measured call includes the hops of an all-gather, which `collective_seconds` adds itself.
        hops = collective_seconds("all_gather", 0.0, Placement(cluster.ranks, cluster.per_node), cluster)
        return replace(cluster, call=float(f"{max(self.call - hops, 0.01 * self.call):.3g}"))


def _rounded(pairs: Sequence[PairLink], bandwidth: float) -> Link:
    latency = statistics.median(pair.latency for pair in pairs)
    return Link(float(f"{latency:.3g}"), float(f"{bandwidth:.3g}"))


def nodes_of(local_ranks: Sequence[int]) -> list[list[int]]:
    """Group ranks by node, given the local rank of every rank: a node begins at local rank 0."""
    nodes: list[list[int]] = []
    for rank, local in enumerate(local_ranks):
        if local == 0 or not nodes:
            nodes.append([])
        nodes[-1].append(rank)
    return nodes


def measure_cluster(team: Team, device: torch.device | str, clock: Clock = time.perf_counter) -> Cluster:
    """Measure the cluster of a run; all ranks return the same.

    Ranks must be numbered node by node, as by torchrun. If the last node would not be full, each rank counts as a node.
    """
    ranks, per_node = team.process.ranks, max(1, team.process.ranks_per_node)
    per_node = per_node if ranks % per_node == 0 else ranks if ranks < per_node else 1
    nodes = [list(range(first, first + per_node)) for first in range(0, ranks, per_node)]
    cluster = measure_links(nodes, team, torch.device(device), clock).cluster()
    assert cluster is not None, "all nodes have the same size"
    return cluster


def measure_links(nodes: Nodes, team: Team, device: torch.device, clock: Clock = time.perf_counter) -> MeasuredLinks:
    """Measure each rank with one rank of its node, then with one of another node, then all ranks at once.

    The first rank or node is paired with the last, the second with the last but one. The middle one of an odd number is
    only measured with all ranks at once.
    """
    # NCCL needs a collective of all ranks before point-to-point messages.
    with waiting("the links"):
        dist.all_reduce(torch.zeros(1, device=device), group=team.mesh.world.handle)
    pairs_within = _measure_pairs([pair for node in nodes for pair in _fold(node)], team, device, clock)
    facing = [pair for first, second in _fold(nodes) for pair in zip(first, second)]
    pairs_between = _measure_pairs(facing, team, device, clock)
    ring, node_bandwidths = None, list[float]()
    if pairs_within:
        ring = min(_measure_rings(nodes, pairs_within, team, device, clock).values())
    if pairs_between:
        # The i-th ranks of all nodes form a ring, so that all ranks of a node share its link to the next node.
        rings = [[node[i] for node in nodes if i < len(node)] for i in range(max(map(len, nodes)))]
        rates = _measure_rings(rings, pairs_between, team, device, clock)
        node_rates = ([rates[rank] for rank in node if rank in rates] for node in nodes)
        node_bandwidths = [len(sent) * min(sent) for sent in node_rates]
    call = _measure_call(team, device, clock)
    return MeasuredLinks(nodes, device.type, [*pairs_within, *pairs_between], ring, node_bandwidths, call)


def _fold(items: Sequence[T]) -> list[tuple[T, T]]:
    return [(items[i], items[-1 - i]) for i in range(len(items) // 2)]


def _measure_pairs(pairs: Sequence[Pair], team: Team, device: torch.device, clock: Clock) -> list[PairLink]:
    """Measure disjoint pairs of ranks at the same time, so that they share the links of their nodes as in training."""
    if not pairs:
        return []
    rank = team.process.rank
    pair = next((pair for pair in pairs if rank in pair), None)

    def one_way(size: int, repeats: int) -> list[float]:
        """Time messages back and forth; returns half of the least seconds of each pair."""
        message, trips = torch.zeros(size, dtype=torch.uint8, device=device), []
        # Barrier: all pairs start together.
        team.all_gather_object(None, "the links")
        for _ in range((repeats + 1) if pair else 0):
            first, second = pair or (0, 0)
            with waiting(f"the link of ranks {first} and {second}"):
                begin = clock()
                for sender in (first, second):
                    exchange = dist.isend if rank == sender else dist.irecv
                    _finish([dist.P2POp(exchange, message, second if rank == first else first)], device)
                trips.append(clock() - begin)
        # The first message makes the connection and does not count.
        times_by_rank = team.all_gather_object(min(trips[1:], default=0.0), "the links that all ranks measured")
        return [times_by_rank[first] / 2 for first, _ in pairs]

    latencies = one_way(PING_BYTES, PINGS)
    # The time of medium messages determines the size of large ones, whose latency must be negligible.
    rough = map(_rate, [MIN_BYTES] * len(pairs), one_way(MIN_BYTES, 2), latencies)
    size = _size(statistics.median(rough) * max(PAIR_SECONDS, 4 * statistics.median(latencies)), device)
    seconds = one_way(size, REPEATS)
    return [
        PairLink(*ends, late, _rate(size, pair_seconds, late))
        for ends, pair_seconds, late in zip(pairs, seconds, latencies)
    ]


def _measure_rings(
    rings: Nodes, pairs: Sequence[PairLink], team: Team, device: torch.device, clock: Clock
) -> dict[int, float]:
    """Measure the bytes per second that each rank sends to the next one of its ring while all ranks of all rings send.

    The ranks share the adapter or the processors of a node, as in a collective. A rank alone in its ring is left out.
    pairs: measured links of these ranks, which determine the size of the messages.
    """
    neighbours = {rank: (ring[i - 1], ring[(i + 1) % len(ring)]) for ring in rings if len(ring) > 1
                  for i, rank in enumerate(ring)}  # fmt: skip
    latency = statistics.median(pair.latency for pair in pairs)
    size = _size(min(pair.bandwidth for pair in pairs) * max(RING_SECONDS, 10 * latency), device)
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    received, seconds = torch.empty_like(sent), []
    for _ in range(REPEATS + 1):
        # Barrier: all ranks start together.
        team.all_gather_object(None, "all ranks sending at once")
        begin = clock()
        if team.process.rank in neighbours:
            before, after = neighbours[team.process.rank]
            with waiting(f"messages from rank {before} and to rank {after}"):
                # The receive comes first, because gloo announces it only after earlier sends.
                _finish([dist.P2POp(dist.irecv, received, before), dist.P2POp(dist.isend, sent, after)], device)
        seconds.append(clock() - begin)
    times_by_rank = team.all_gather_object(seconds[1:], "the time of messages of all ranks at once")
    # The result is the fastest repetition, whose time is that of the slowest rank, as in a collective.
    fastest = min(zip(*times_by_rank), key=max)
    return {rank: _rate(size, fastest[rank], latency) for rank in neighbours}


def _measure_call(team: Team, device: torch.device, clock: Clock) -> float:
    """Measure the seconds of a tiny all-gather of all ranks; the slowest rank counts."""
    group = team.mesh.world
    shard, whole = torch.ones(1, device=device), torch.empty(group.size, device=device)
    seconds = []
    for _ in range(CALLS + 1):
        with waiting("the all-gather that is timed"):
            # Barrier: the all-gather must not include the wait for late ranks.
            dist.all_reduce(shard, group=group.handle)
            finish(device)
            begin = clock()
            all_gather_flat(whole, shard, group=group.handle)
            finish(device)
            seconds.append(clock() - begin)
    return min(map(max, zip(*team.all_gather_object(seconds[1:], "the time of an all-gather"))))


def _finish(operations: Sequence[dist.P2POp], device: torch.device) -> None:
    """Send and receive at the same time, and wait for the end."""
    for work in dist.batch_isend_irecv(list(operations)):
        work.wait()
    finish(device)


def _rate(size: int, seconds: float, latency: float) -> float:
    """Compute bytes per second without the latency, of which at most 90 % of the time is subtracted."""
    return size / max(1e-9, 0.1 * seconds, seconds - latency)


def _size(wanted: float, device: torch.device) -> int:
    return int(min(MAX_BYTES[device.type], max(MIN_BYTES, wanted)))
