"""Measure the links between ranks: a sample of pairs, then all ranks at once, then the time of a small collective.

A run that is not given a cluster file measures its links this way in a second or two, and so does the doctor.  Tensors
are on the ranks' device, so the same code measures gloo between CPUs and NCCL between GPUs.  All ranks call each
function that takes their team.
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
Nodes = Sequence[Sequence[int]]  # the ranks of each

PINGS, PING_BYTES = 20, 8
REPEATS = 3  # of large messages, after one that makes the connection
PAIR_SECONDS, RING_SECONDS = 0.025, 0.1  # that a large message should take
MIN_BYTES, MAX_BYTES = 2**18, {"cpu": 2**24, "cuda": 2**27}  # of a large message
CALLS = 11  # of a collective that carries next to nothing


@dataclass(frozen=True)
class PairLink:
    """The measured link of two ranks: latency in seconds, bandwidth in bytes per second, mean of both directions."""

    first: int
    second: int
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class MeasuredLinks:
    """Measurements of the links of all ranks.

    ring: bytes per second that a rank sends to the next one of its node while all ranks send; None where each rank is
    alone on its node.  node_bandwidths: bytes per second that each node sends to the next while all ranks send; empty
    for one node.  call: seconds of an all-gather of all ranks that carries next to nothing.
    """

    nodes: Nodes
    device: str  # "cpu" or "cuda"
    pairs: Sequence[PairLink]
    ring: float | None
    node_bandwidths: Sequence[float]
    call: float

    def pairs_of(self, where: Where) -> list[PairLink]:
        """Select the pairs within nodes, or between them."""
        node_of = {rank: number for number, node in enumerate(self.nodes) for rank in node}
        within = where == "within"
        return [pair for pair in self.pairs if (node_of[pair.first] == node_of[pair.second]) == within]

    def cluster(self, name: str = "") -> Cluster | None:
        """Build the cluster that planning uses; None where the nodes differ in size.  name: of the device.

        Where all ranks are on one node, or each is alone on its node, both kinds of links are the same.
        """
        sizes = {len(node) for node in self.nodes}
        if len(sizes) != 1 or not self.pairs:
            return None
        links: dict[Where, Link] = {}
        if within := self.pairs_of("within"):
            rate = statistics.median(pair.bandwidth for pair in within)
            links["within"] = _rounded(within, min(rate, self.ring or rate))
        if between := self.pairs_of("between"):
            links["between"] = _rounded(between, min(self.node_bandwidths))
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
    """Group ranks by node, given every rank's number on its node: a node begins where that is 0."""
    nodes: list[list[int]] = []
    for rank, local in enumerate(local_ranks):
        if local == 0 or not nodes:
            nodes.append([])
        nodes[-1].append(rank)
    return nodes


def measure_cluster(team: Team, device: torch.device | str, clock: Clock = time.perf_counter) -> Cluster:
    """Measure the cluster of a run; all ranks return the same.

    Ranks are numbered node by node, as torchrun numbers them.  Where the last node would not be full, each rank counts
    as a node.
    """
    ranks, per_node = team.process.ranks, max(1, team.process.ranks_per_node)
    per_node = per_node if ranks % per_node == 0 else ranks if ranks < per_node else 1
    nodes = [list(range(first, first + per_node)) for first in range(0, ranks, per_node)]
    cluster = measure_links(nodes, team, torch.device(device), clock).cluster()
    assert cluster is not None, "all nodes have the same size"
    return cluster


def measure_links(nodes: Nodes, team: Team, device: torch.device, clock: Clock = time.perf_counter) -> MeasuredLinks:
    """Measure each rank with one rank of its node, then with one of another node, then all ranks at once.

    The first of an odd number of ranks or nodes is paired with the last, the second with the last but one; the one in
    the middle is only measured with all ranks at once.
    """
    # NCCL needs a collective of all ranks before messages of some of them.
    with waiting("the links"):
        dist.all_reduce(torch.zeros(1, device=device), group=team.mesh.world.handle)
    within = _measure_pairs([pair for node in nodes for pair in _fold(node)], team, device, clock)
    facing = [pair for first, second in _fold(nodes) for pair in zip(first, second)]
    between = _measure_pairs(facing, team, device, clock)
    ring, node_bandwidths = None, list[float]()
    if within:
        ring = min(_measure_rings(nodes, within, team, device, clock).values())
    if between:
        # The i-th ranks of all nodes form a ring, so that all ranks of a node share what joins it to the next.
        rings = [[node[i] for node in nodes if i < len(node)] for i in range(max(map(len, nodes)))]
        rates = _measure_rings(rings, between, team, device, clock)
        of_nodes = ([rates[rank] for rank in node if rank in rates] for node in nodes)
        node_bandwidths = [len(sent) * min(sent) for sent in of_nodes]
    call = _measure_call(team, device, clock)
    return MeasuredLinks(nodes, device.type, [*within, *between], ring, node_bandwidths, call)


def _fold(items: Sequence[T]) -> list[tuple[T, T]]:
    return [(items[i], items[-1 - i]) for i in range(len(items) // 2)]


def _measure_pairs(pairs: Sequence[Pair], team: Team, device: torch.device, clock: Clock) -> list[PairLink]:
    """Measure disjoint pairs of ranks, all at the same time: they share the links of their nodes, as in training."""
    if not pairs:
        return []
    rank = team.process.rank
    pair = next((pair for pair in pairs if rank in pair), None)

    def one_way(size: int, repeats: int) -> list[float]:
        """Time messages back and forth; return half of the least seconds of each pair."""
        message, trips = torch.zeros(size, dtype=torch.uint8, device=device), []
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
        every = team.all_gather_object(min(trips[1:], default=0.0), "the links that all ranks measured")
        return [every[first] / 2 for first, _ in pairs]

    latencies = one_way(PING_BYTES, PINGS)
    # Medium messages say how large a message has to be: latency must count for little.
    rough = map(_rate, [MIN_BYTES] * len(pairs), one_way(MIN_BYTES, 2), latencies)
    size = _size(statistics.median(rough) * max(PAIR_SECONDS, 4 * statistics.median(latencies)), device)
    seconds = one_way(size, REPEATS)
    return [PairLink(*ends, late, _rate(size, each, late)) for ends, each, late in zip(pairs, seconds, latencies)]


def _measure_rings(
    rings: Nodes, pairs: Sequence[PairLink], team: Team, device: torch.device, clock: Clock
) -> dict[int, float]:
    """Measure the bytes per second that each rank sends to the next one of its ring while all ranks of all rings send.

    The ranks share the same links as in a collective: the adapter of a node, or its processors.  A rank that is alone
    in its ring is left out.  pairs: the measured links of these ranks, which determine the size of the messages.
    """
    neighbours = {rank: (ring[i - 1], ring[(i + 1) % len(ring)]) for ring in rings if len(ring) > 1
                  for i, rank in enumerate(ring)}  # fmt: skip
    latency = statistics.median(pair.latency for pair in pairs)
    size = _size(min(pair.bandwidth for pair in pairs) * max(RING_SECONDS, 10 * latency), device)
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    received, seconds = torch.empty_like(sent), []
    for _ in range(REPEATS + 1):
        team.all_gather_object(None, "all ranks sending at once")
        begin = clock()
        if team.process.rank in neighbours:
            before, after = neighbours[team.process.rank]
            with waiting(f"messages from rank {before} and to rank {after}"):
                # gloo announces a receive only after the sends before it: the receive comes first.
                _finish([dist.P2POp(dist.irecv, received, before), dist.P2POp(dist.isend, sent, after)], device)
        seconds.append(clock() - begin)
    every = team.all_gather_object(seconds[1:], "the time of messages of all ranks at once")
    # Of several repeats the fastest counts, and of each repeat the slowest rank, as in a collective.
    fastest = min(zip(*every), key=max)
    return {rank: _rate(size, fastest[rank], latency) for rank in neighbours}


def _measure_call(team: Team, device: torch.device, clock: Clock) -> float:
    """Measure the seconds of an all-gather of all ranks that carries next to nothing; the slowest rank counts."""
    group = team.mesh.world
    shard, whole = torch.ones(1, device=device), torch.empty(group.size, device=device)
    seconds = []
    for _ in range(CALLS + 1):
        with waiting("the all-gather that is timed"):
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
    """Compute bytes per second without the latency, of which at most nine tenths of the time are subtracted."""
    return size / max(1e-9, 0.1 * seconds, seconds - latency)


def _size(wanted: float, device: torch.device) -> int:
    return int(min(MAX_BYTES[device.type], max(MIN_BYTES, wanted)))
