"""Measure how ranks are joined: pairs in rounds, those that seem slow again, all ranks at once, collectives, clocks.

The doctor measures every pair.  A run that is not told its cluster measures each rank with one other of its node and
one of another node, in a second or two.  Tensors lie on the ranks' device, so that the same code measures gloo between
CPUs and NCCL between GPUs.  All ranks call each function that takes their team.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from warpfold.cluster.facts import text_of
from warpfold.cluster.findings import NOTE, Facts
from warpfold.cost.links import Cluster, Kind, Link, Placement, collective_seconds
from warpfold.cost.rates import finish
from warpfold.ops.torch_internals import all_gather_flat, reduce_scatter_flat
from warpfold.parallel.team import Team
from warpfold.parallel.waits import waiting

Clock = Callable[[], float]
Pair = tuple[int, int]
Where = Literal["within", "between"]
Nodes = Sequence[Sequence[int]]  # the ranks of each

ALL_PAIRS = 64  # ranks: of so many all pairs are measured, of more a sample between each two nodes
MEETINGS = 96  # of nodes, at most, where there are more ranks: a second or so for each
TIMES = 8  # that a rank of many is measured with other nodes, at least
LINK_SECONDS, AGAIN_SECONDS = 45.0, 10.0  # for all pairs; for those that seem slow, each time
TRIES = 3  # measurements of what seems slow
PINGS, PING_SECONDS = 40, 0.4  # of a pair, at most
REPEATS, CARRY = 3, 0.025  # of large messages each way, and how long one should take
AT_ONCE = 0.1  # seconds of a message while all ranks send
LEAST, MOST = 2**18, {"cpu": 2**24, "cuda": 2**27}  # bytes of a large message
STALL = 0.18  # seconds: TCP sends a lost packet again after 0.2 s at the earliest (RFC 6298; Linux's TCP_RTO_MIN)
SLACK = {"cpu": 200e-6, "cuda": 20e-6}  # seconds by which latencies may differ whatever their ratio
COLLECTIVES: tuple[Kind, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
COLLECTIVE_REPEATS, COLLECTIVE_SECONDS = 5, 0.06  # and how long one should take
CALLS = 11  # of a collective that carries next to nothing


# ---- who measures with whom


def nodes_of(local_ranks: Sequence[int]) -> list[list[int]]:
    """Group ranks by node, given every rank's number on its node: a node begins where that is 0."""
    nodes: list[list[int]] = []
    for rank, local in enumerate(local_ranks):
        if local == 0 or not nodes:
            nodes.append([])
        nodes[-1].append(rank)
    return nodes


def circle(count: int) -> list[list[Pair]]:
    """Make rounds in which each of `count` meets every other once: the circle method of tournaments.

    The first keeps its seat and the others move on by one; where `count` is odd, one rests in each round.
    """
    seats = count + count % 2
    found = []
    for turn in range(seats - 1):
        table = [0, *((turn + i) % (seats - 1) + 1 for i in range(seats - 1))]
        facing = ((table[i], table[seats - 1 - i]) for i in range(seats // 2))
        found.append([(min(pair), max(pair)) for pair in facing if max(pair) < count])
    return [pairs for pairs in found if pairs]


def rounds(nodes: Nodes) -> list[list[Pair]]:
    """Make rounds of disjoint pairs of ranks: first within nodes, then between them.

    In a round between nodes all ranks of two nodes are paired, so that every link between nodes carries as much as the
    others, and what is measured can be compared.  Up to `ALL_PAIRS` ranks every pair is measured once; of more, ranks
    of each two nodes in some of the ways to pair them, and of very many nodes some pairs of nodes.
    """
    width, ranks = max(map(len, nodes)), sum(map(len, nodes))
    within = [[[(node[a], node[b]) for a, b in pairs] for pairs in circle(len(node))] for node in nodes]
    turns = range(max(map(len, within), default=0))
    found = [[pair for node in within if turn < len(node) for pair in node[turn]] for turn in turns]
    meetings = circle(len(nodes))
    every = 1 if ranks <= ALL_PAIRS else max(1, -(-len(meetings) // MEETINGS))
    meetings = meetings[::every]
    ways = width if ranks <= ALL_PAIRS else min(width, -(-TIMES // max(1, len(meetings))))
    for number, meeting in enumerate(meetings):
        for way in range(number * ways, (number + 1) * ways):
            pairs = []
            for first, second in meeting:
                met = ((i, (i + way) % width) for i in range(width))
                pairs += [(nodes[first][i], nodes[second][j]) for i, j in met
                          if i < len(nodes[first]) and j < len(nodes[second])]  # fmt: skip
            found.append([(min(pair), max(pair)) for pair in pairs])
    return [pairs for pairs in found if pairs]


def first_rounds(nodes: Nodes) -> list[list[Pair]]:
    """Take the first round within nodes and the first between them, as far as there are such."""
    node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
    found: dict[bool, list[Pair]] = {}
    for pairs in rounds(nodes):
        first, second = pairs[0]
        found.setdefault(node_of[first] == node_of[second], pairs)
    return list(found.values())


# ---- what is measured


@dataclass(frozen=True)
class PairLink:
    """What two ranks measured of their link: half of round trips, in seconds, and bytes per second each way.

    latency: the least.  usual, late: median and 90th percentile.  stalls: round trips as long as TCP waits for a lost
    packet, of so many pings.  forth: from the first rank, which is the smaller, to the second.
    """

    first: int
    second: int
    latency: float
    usual: float
    late: float
    stalls: int
    pings: int
    forth: float
    back: float

    @property
    def ends(self) -> Pair:
        """Both ranks."""
        return self.first, self.second

    def better(self, other: "PairLink") -> "PairLink":
        """Take the best of two measurements: noise only adds time."""
        return replace(
            self,
            **{name: min(getattr(self, name), getattr(other, name)) for name in ("latency", "usual", "late")},
            **{name: max(getattr(self, name), getattr(other, name)) for name in ("forth", "back")},
            stalls=self.stalls + other.stalls,
            pings=self.pings + other.pings,
        )


@dataclass(frozen=True)
class MeasuredLinks:
    """What was measured of all links.

    node_bandwidth: bytes per second that a node sends to the next when all ranks send, None where there is one node.
    shared: that a rank sends to one of its node when all ranks do; None where each is alone on its own.
    collectives: of each kind the bytes that a rank sends, the seconds, and those that the links should take.
    lost: of each node, packets sent and packets lost meanwhile.  errors: of each node, what counted up at its adapters.
    clocks: of each node, seconds ahead of the first, and how sure.
    """

    nodes: Nodes
    pairs: Sequence[PairLink]
    device: str  # "cpu" or "cuda"
    rounds: int
    all_rounds: int
    node_bandwidth: float | None = None
    shared: float | None = None
    collectives: Sequence[Facts] = ()
    lost: Sequence[tuple[int, int]] = ()
    errors: Sequence[Mapping[str, int]] = ()
    clocks: Sequence[tuple[float, float]] = ()

    @property
    def ranks(self) -> int:
        return sum(map(len, self.nodes))

    @property
    def node_of(self) -> list[int]:
        return [number for number, node in enumerate(self.nodes) for _ in node]

    def of_kind(self, where: Where) -> list[PairLink]:
        """Select the pairs within nodes, or between them."""
        node = self.node_of
        return [pair for pair in self.pairs if (node[pair.first] == node[pair.second]) == (where == "within")]

    def is_wire(self, where: Where) -> bool:
        """Tell whether links of a kind could be broken: between processes of one machine there is no wire."""
        return where == "between" or self.device != "cpu"

    def speeds(self, where: Where) -> dict[str, dict[Pair, float]]:
        """Compare the pairs of a kind: by what is measured the speed of each pair, as a share of what is usual.

        Of latencies the slack is added before they turn.  "one way": of each two ranks, the one way of the other.
        """
        pairs, slack = self.of_kind(where), SLACK[self.device]
        found = {
            "latency": {one.ends: 1 / (one.latency + slack) for one in pairs},
            "bandwidth": {one.ends: max(one.forth, one.back) for one in pairs},
        }
        shares = {what: {pair: one / _usual(speeds) for pair, one in speeds.items()} for what, speeds in found.items()}
        if self.is_wire(where):
            forth = {one.ends: one.forth / one.back for one in pairs}
            shares["one way"] = forth | {(b, a): 1 / share for (a, b), share in forth.items()}
        return shares

    @property
    def suspects(self) -> set[Pair]:
        """The pairs that seem slow, to be measured again before anything is said of them."""
        kinds: tuple[Where, ...] = ("within", "between")
        shares = [found.items() for where in kinds for found in self.speeds(where).values()]
        return {(min(pair), max(pair)) for found in shares for pair, share in found if share < NOTE}


def _usual(speeds: Mapping[Pair, float]) -> float:
    """Take the usual speed of pairs of one kind: of each rank the median of its pairs, of these the median.

    Of an even count the higher of the two in the middle: of three ranks with a slow one, two pairs of three are slow.
    """
    of_rank: dict[int, list[float]] = {}
    for pair, speed in speeds.items():
        for rank in pair:
            of_rank.setdefault(rank, []).append(speed)
    return statistics.median_high([statistics.median_high(found) for found in of_rank.values()])


def cluster_of(measured: MeasuredLinks, device: str, call: float) -> Cluster | None:
    """Make the cluster that was measured; None where nodes are not equal.

    call: seconds of an all-gather of all ranks that carries next to nothing; what its hops take is subtracted.
    Where all ranks are on one node, or each on one of its own, the link that is not there is as the one that is.
    """
    sizes = {len(node) for node in measured.nodes}
    if len(sizes) != 1 or not measured.pairs:
        return None
    links: dict[Where, Link] = {}
    kinds: tuple[Where, ...] = ("within", "between")
    for where in kinds:
        if found := measured.of_kind(where):
            rate = statistics.median(rate for pair in found for rate in (pair.forth, pair.back))
            if where == "between":
                rate = measured.node_bandwidth or rate
            elif measured.shared:
                rate = min(rate, measured.shared)
            latency = statistics.median(pair.latency for pair in found)
            links[where] = Link(float(f"{latency:.3g}"), float(f"{rate:.3g}"))
    within, between = (links.get(where) or next(iter(links.values())) for where in kinds)
    cluster = Cluster(
        ranks=measured.ranks, per_node=sizes.pop(), within=within, between=between, call=0.0,
        library="gloo" if measured.device == "cpu" else "nccl", device=device, how="measured",
    )  # fmt: skip
    hops = collective_seconds("all_gather", 0.0, Placement(cluster.ranks, cluster.per_node), cluster)
    return replace(cluster, call=float(f"{max(call - hops, 0.01 * call):.3g}"))


# ---- all of it


def measure_cluster(team: Team, device: torch.device | str, clock: Clock = time.perf_counter) -> Cluster:
    """Measure how all ranks are joined; the same is returned on each.

    A rank's node is that of its number, as `torchrun` gives numbers; where nodes are not full, each rank is one.
    """
    ranks, each = team.process.ranks, max(1, team.process.ranks_per_node)
    each = each if ranks % each == 0 else ranks if ranks < each else 1
    nodes, device = [list(range(first, first + each)) for first in range(0, ranks, each)], torch.device(device)
    measured = measure_rounds(nodes, first_rounds(nodes), team, device, clock)
    cluster = cluster_of(measured, "", _call_seconds(team, device, clock))
    assert cluster is not None, "nodes are equal"
    return cluster


def measure_links(
    nodes: Nodes, team: Team, device: torch.device, name: str, time_of_day: Clock
) -> tuple[MeasuredLinks, Cluster | None]:
    """Measure all links, collectives and clocks; return them and the cluster they make.  name: of the device."""
    before = read_counters()
    measured = measure_rounds(nodes, rounds(nodes), team, device)
    after = team.all_gather_object(counted(before, read_counters()), "what the network counted")
    measured = replace(
        measured,
        lost=[(sent, lost) for (sent, lost), _ in (after[node[0]] for node in nodes)],
        errors=[after[node[0]][1] for node in nodes],
        clocks=measure_clocks(nodes, team, device, time_of_day),
    )
    cluster = cluster_of(measured, name, _call_seconds(team, device, time.perf_counter))
    if cluster is not None:
        measured = replace(measured, collectives=measure_collectives(cluster, team, device))
    return measured, cluster


def measure_rounds(
    nodes: Nodes, schedule: Sequence[Sequence[Pair]], team: Team, device: torch.device, clock: Clock = time.perf_counter
) -> MeasuredLinks:
    """Measure the pairs of a schedule's rounds, then what is left to each rank and node when all send at once.

    A pair that seems slow is measured again in its round, under the same load, and the best counts: what is slow by
    chance is not slow three times.  Of all at once the slowest counts, as in collectives.
    """
    pairs, made = measure_pairs(schedule, team, device, LINK_SECONDS, clock)
    measured = MeasuredLinks(nodes, pairs, device.type, made, len(schedule))
    for _ in range(TRIES - 1):
        odd = measured.suspects
        again = [one for one in schedule[:made] if odd & set(one)]
        if not again:
            break
        new = {one.ends: one for one in measure_pairs(again, team, device, AGAIN_SECONDS, clock)[0]}
        pairs = [one.better(new[one.ends]) if one.ends in new else one for one in measured.pairs]
        measured = replace(measured, pairs=pairs)
    if within := measured.of_kind("within"):
        rates = measure_at_once(nodes, within, team, device, clock)
        measured = replace(measured, shared=min(rates.values()))
    if between := measured.of_kind("between"):
        rings = [[node[at] for node in nodes if at < len(node)] for at in range(max(map(len, nodes)))]
        rates = measure_at_once(rings, between, team, device, clock)
        of_nodes = ([rates[rank] for rank in node if rank in rates] for node in nodes)
        measured = replace(measured, node_bandwidth=min(len(own) * min(own) for own in of_nodes))
    return measured


# ---- pairs


def measure_pairs(
    schedule: Sequence[Sequence[Pair]], team: Team, device: torch.device, seconds: float, clock: Clock
) -> tuple[list[PairLink], int]:
    """Measure pair by pair, round by round, for at most `seconds`; return the pairs of all ranks, and rounds made."""
    team.all_gather_object(None, "the links")
    dist.all_reduce(torch.zeros(1, device=device), group=team.mesh.world.handle)  # NCCL: before messages of some ranks
    rank, end, own, made = team.process.rank, clock() + seconds, [], 0
    for pairs in schedule:
        # All begin a round together: what they measure shares the nodes' links evenly.
        if made and team.smallest(end - clock(), f"round {made + 1} of {len(schedule)} of the links") <= 0:
            break
        made += 1
        for first, second in pairs:
            with waiting(f"the link of ranks {first} and {second}"):
                if rank == first:
                    own.append(_lead(rank, second, device, clock))
                elif rank == second:
                    _follow(first, device, clock)
    every = team.all_gather_object([astuple(pair) for pair in own], "the links that all ranks measured")
    return [PairLink(*pair) for found in every for pair in found], made


def _together(x: Tensor, *operations: tuple[Callable[..., object], Tensor, int]) -> None:
    """Send and receive at once, and wait for the end; each: `dist.isend` or `irecv`, a tensor, the other rank."""
    for work in dist.batch_isend_irecv([dist.P2POp(*one) for one in operations]):
        work.wait()
    finish(x.device)


def _send(x: Tensor, other: int) -> None:
    _together(x, (dist.isend, x, other))


def _receive(x: Tensor, other: int) -> None:
    _together(x, (dist.irecv, x, other))


def _lead(rank: int, other: int, device: torch.device, clock: Clock) -> PairLink:
    """Ping the other rank, then send it large messages, then receive as many."""
    word, end = torch.ones(1, dtype=torch.int64, device=device), clock() + PING_SECONDS
    trips: list[float] = []
    while int(word) == 1:
        word.fill_(1 if len(trips) < 2 or (len(trips) < PINGS and clock() < end) else 0)
        begin = clock()
        _send(word, other)
        _receive(word, other)
        trips.append((clock() - begin) / 2)
    trips = sorted(trips[2:]) or trips  # the first make the connection
    took = _give(LEAST, 2, other, device, clock)  # that one too, for large messages
    size = _size(_rate(LEAST, took[-1], trips[0]) * max(CARRY, 4 * trips[0]), device)
    _send(word.fill_(size), other)
    forth = _give(size, REPEATS, other, device, clock)
    _take(size, REPEATS, other, device)
    back = torch.zeros(REPEATS, dtype=torch.float64, device=device)
    _receive(back, other)
    rates = [_rate(size, min(spent), trips[0]) for spent in (forth, back.tolist())]
    return PairLink(
        rank, other, trips[0], statistics.median(trips), trips[int(0.9 * (len(trips) - 1))],
        sum(2 * trip > STALL for trip in trips), len(trips), *rates,
    )  # fmt: skip


def _follow(leader: int, device: torch.device, clock: Clock) -> None:
    """Do with the leader of a pair what `_lead` does."""
    word = torch.ones(1, dtype=torch.int64, device=device)
    while int(word) == 1:
        _receive(word, leader)
        _send(word, leader)
    _take(LEAST, 2, leader, device)
    _receive(word, leader)
    size = int(word)
    _take(size, REPEATS, leader, device)
    _send(torch.tensor(_give(size, REPEATS, leader, device, clock), dtype=torch.float64, device=device), leader)


def _give(size: int, times: int, other: int, device: torch.device, clock: Clock) -> list[float]:
    """Send so many bytes some times; return the seconds until the other rank has said that it has them."""
    x, word = torch.zeros(size, dtype=torch.uint8, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    spent = []
    for _ in range(times):
        _receive(word, other)  # it waits for the bytes already
        begin = clock()
        _send(x, other)
        _receive(word, other)
        spent.append(clock() - begin)
    return spent


def _take(size: int, times: int, other: int, device: torch.device) -> None:
    """Receive what `_give` sends."""
    x, word = torch.zeros(size, dtype=torch.uint8, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(times):
        _together(x, (dist.isend, word, other), (dist.irecv, x, other))
        _send(word, other)


def _rate(size: int, seconds: float, latency: float) -> float:
    """Count bytes per second, without the time of an empty message and its answer, or most of it."""
    return size / max(1e-9, 0.1 * seconds, seconds - 2 * latency)


def _size(wanted: float, device: torch.device) -> int:
    return int(min(MOST[device.type], max(LEAST, wanted)))


# ---- all ranks


def measure_at_once(
    rings: Nodes, pairs: Sequence[PairLink], team: Team, device: torch.device, clock: Clock
) -> dict[int, float]:
    """Measure the bytes per second that each rank sends to the next of its ring, while all of all rings send.

    So they share what they share in collectives: a node's adapter, or its processors.  A rank that is alone in its ring
    sends nothing and is left out.  pairs: of these links, each measured by itself; the size of messages follows.
    """
    rank = team.process.rank
    beside = {one: (ring[at - 1], ring[at + 1 - len(ring)]) for ring in rings if len(ring) > 1
              for at, one in enumerate(ring)}  # fmt: skip
    latency = statistics.median(pair.latency for pair in pairs)
    size = _size(min(max(pair.forth, pair.back) for pair in pairs) * max(AT_ONCE, 10 * latency), device)
    x = torch.zeros(size, dtype=torch.uint8, device=device)
    found, spent = torch.empty_like(x), []
    for _ in range(REPEATS + 1):
        team.all_gather_object(None, "all ranks sending at once")
        begin = clock()
        if rank in beside:
            before, after = beside[rank]
            with waiting(f"messages from rank {before} and to rank {after}"):
                # The receive first: gloo would else announce it behind all that is sent.
                _together(x, (dist.irecv, found, before), (dist.isend, x, after))
        spent.append(clock() - begin)
    every = team.all_gather_object(spent[1:], "the time of messages of all ranks at once")  # the first connects them
    seconds = min(zip(*every), key=max)
    return {one: _rate(size, seconds[one], latency) for one in beside}


def measure_collectives(cluster: Cluster, team: Team, device: torch.device) -> list[Facts]:
    """Time the collectives of all ranks.  cluster: as measured; it says how large the messages should be."""
    where = Placement(cluster.ranks, min(cluster.ranks, cluster.per_node))
    found = []
    for kind in COLLECTIVES:
        share = (2 if kind == "all_reduce" else 1) * (where.ranks - 1) / where.ranks  # of its bytes that a rank sends
        each = collective_seconds(kind, 1e6, where, cluster) - collective_seconds(kind, 0.0, where, cluster)
        size = _size(COLLECTIVE_SECONDS / max(each, 1e-12) * 1e6 / share, device)
        numbers = -(-size // (4 * where.ranks)) * where.ranks
        seconds = _collective(kind, numbers, COLLECTIVE_REPEATS, team, device, time.perf_counter)
        sent = 4 * numbers * share
        expected = collective_seconds(kind, sent, where, cluster)
        found.append({"kind": kind, "sent": sent, "seconds": seconds, "expected": expected})
    return found


def _call_seconds(team: Team, device: torch.device, clock: Clock) -> float:
    """Time an all-gather of all ranks that carries next to nothing."""
    return _collective("all_gather", team.process.ranks, CALLS, team, device, clock)


def _collective(kind: Kind, numbers: int, repeats: int, team: Team, device: torch.device, clock: Clock) -> float:
    """Take the least seconds of a collective on [numbers] fp32; each time counts as its slowest rank's."""
    group, x, together = team.mesh.world, torch.ones(numbers, device=device), torch.zeros(1, device=device)
    shard, whole = x[: numbers // group.size].clone(), torch.empty_like(x)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole.fill_(1), group=group.handle),
        "reduce_scatter": lambda: reduce_scatter_flat(shard, x, group=group.handle),
        "all_gather": lambda: all_gather_flat(whole, shard, group=group.handle),
        "all_to_all": lambda: dist.all_to_all_single(whole, x, group=group.handle),
    }
    spent = []
    for _ in range(repeats + 1):
        with waiting(f"the {kind} that is timed"):
            dist.all_reduce(together, group=group.handle)
            finish(device)
            begin = clock()
            calls[kind]()
            finish(device)
            spent.append(clock() - begin)
    every = team.all_gather_object(spent[1:], f"the time of {kind}")  # the first connects them
    return min(map(max, zip(*every)))


def measure_clocks(nodes: Nodes, team: Team, device: torch.device, clock: Clock) -> list[tuple[float, float]]:
    """Measure how far each node's clock is ahead of the first node's, in seconds, and how sure that is.

    The first rank of each node answers pings of rank 0 with its time; of several the quickest counts.
    """
    rank, found = team.process.rank, [(0.0, 0.0)]
    said, mine = (torch.zeros(1, dtype=torch.float64, device=device) for _ in range(2))
    for node in nodes[1:]:
        best = (0.0, float("inf"))
        with waiting(f"the clock of rank {node[0]}"):
            for _ in range(8):
                if rank == 0:
                    begin = clock()
                    _send(mine, node[0])
                    _receive(said, node[0])
                    end = clock()
                    best = min(best, (float(said) - (begin + end) / 2, (end - begin) / 2), key=lambda one: one[1])
                elif rank == node[0]:
                    _receive(mine, 0)
                    _send(said.fill_(clock()), 0)
        found.append(best)
    return [(ahead, sure) for ahead, sure in team.broadcast(found, "the clocks of all nodes")]


# ---- what Linux counts meanwhile: packets lost, and errors of adapters

# Of InfiniBand and RoCE ports: errors of the wire, and packets that came twice, late or not at all (Linux's
# Documentation/ABI/stable/sysfs-class-infiniband, and NVIDIA's list of hw_counters); and of network cards.
COUNTS = {
    "sys/class/infiniband/*/ports/*/counters": (
        "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors",
    ),
    "sys/class/infiniband/*/ports/*/hw_counters": (
        "packet_seq_err", "out_of_sequence", "local_ack_timeout_err", "rnr_nak_retry_err", "implied_nak_seq_err",
    ),
    "sys/class/net/*/statistics": ("rx_errors", "tx_errors", "rx_crc_errors", "tx_carrier_errors"),
}  # fmt: skip


def read_counters(root: Path = Path("/")) -> dict[str, int]:
    """Read counts by name, as far as they are there: "tcp sent", "tcp lost", "mlx5_0 port 1 symbol_error".

    What TCP sends again has been lost, or was only late: then its receiver says that it had it (RFC 2883).
    """
    found, tcp = dict[str, int](), dict[str, int]()
    for file, kind in (("snmp", "Tcp:"), ("netstat", "TcpExt:")):  # a line of names, and a line of counts
        lines = [line.split() for line in text_of(root / "proc/self/net" / file).splitlines() if line.startswith(kind)]
        tcp |= dict(zip(lines[0][1:], map(int, lines[1][1:]))) if len(lines) == 2 else {}
    if "OutSegs" in tcp:
        late = tcp.get("TCPDSACKRecvSegs", tcp.get("TCPDSACKRecv", 0))
        found = {"tcp sent": tcp["OutSegs"], "tcp lost": tcp.get("RetransSegs", 0) - late}
    for pattern, names in COUNTS.items():
        for folder in sorted(root.glob(pattern)):
            port = f"{folder.parts[-4]} port {folder.parts[-2]}" if folder.parts[-3] == "ports" else folder.parts[-2]
            for name in names:
                if (text := text_of(folder / name)).isdigit():
                    found[f"{port} {name}"] = int(text)
    return found


def counted(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[tuple[int, int], dict[str, int]]:
    """Compare two readings: packets sent and lost between them, and the errors that counted up."""
    grown = {name: count - before.get(name, count) for name, count in after.items()}
    tcp = grown.pop("tcp sent", 0), max(0, grown.pop("tcp lost", 0))
    return tcp, {name: count for name, count in grown.items() if count > 0}
