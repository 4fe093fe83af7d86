"""Measure the links of all ranks: pairs by small and large messages, all ranks sending at once, collectives.

Tensors lie on the ranks' device, so that the same code measures gloo between CPUs and NCCL between GPUs.  All ranks
call each function.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from warpfold.cluster.facts import text_of
from warpfold.cluster.rounds import Pair
from warpfold.cost.links import Cluster, Kind, Placement, collective_seconds
from warpfold.parallel.collectives import all_gather_flat, reduce_scatter_flat
from warpfold.parallel.team import Team
from warpfold.parallel.waits import waiting

Clock = Callable[[], float]

PINGS, PING_SECONDS = 40, 0.4  # of a pair, at most
REPEATS, CARRY = 3, 0.025  # of large messages each way, and how long one should take
AT_ONCE = 0.1  # seconds of a message while all ranks send
LEAST, MOST = 2**18, {"cpu": 2**24, "cuda": 2**27}  # bytes of a large message
STALL = 0.18  # seconds: TCP sends a lost packet again after 0.2 s at the earliest (RFC 6298; Linux's TCP_RTO_MIN)
COLLECTIVES: tuple[Kind, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
COLLECTIVE_REPEATS, COLLECTIVE_SECONDS = 5, 0.06  # and how long one should take
CALLS = 11  # of a collective that carries next to nothing


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

    def better(self, other: "PairLink") -> "PairLink":
        """Return the best of two measurements: noise only adds time."""
        return replace(
            self,
            **{name: min(getattr(self, name), getattr(other, name)) for name in ("latency", "usual", "late")},
            **{name: max(getattr(self, name), getattr(other, name)) for name in ("forth", "back")},
            stalls=self.stalls + other.stalls,
            pings=self.pings + other.pings,
        )


@dataclass(frozen=True)
class CollectiveTime:
    """How long all ranks took for a collective of so many bytes each sends, and what the links should give."""

    kind: Kind
    sent: float
    seconds: float
    expected: float


def measure_pairs(
    rounds: Sequence[Sequence[Pair]], team: Team, device: torch.device, seconds: float, clock: Clock = time.perf_counter
) -> tuple[list[PairLink], int]:
    """Measure pair by pair, round by round, for at most `seconds`; return the pairs of all ranks, and rounds made."""
    team.all_gather_object(None, "the links")
    dist.all_reduce(torch.zeros(1, device=device), group=team.mesh.world.handle)  # NCCL: before messages of some ranks
    rank, end, own, made = team.process.rank, clock() + seconds, [], 0
    for pairs in rounds:
        # All begin a round together: what they measure shares the nodes' links evenly.
        if made and team.smallest(end - clock(), f"round {made + 1} of {len(rounds)} of the links") <= 0:
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


def _send(x: Tensor, other: int) -> None:
    _together(x, [dist.P2POp(dist.isend, x, other)])


def _receive(x: Tensor, other: int) -> None:
    _together(x, [dist.P2POp(dist.irecv, x, other)])


def _together(x: Tensor, operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    _finish(x.device)


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
    rate = _rate(LEAST, took[-1], trips[0])
    size = int(min(MOST[device.type], max(LEAST, rate * max(CARRY, 4 * trips[0]))))
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


def _rate(size: int, seconds: float, latency: float) -> float:
    """Return bytes per second, without the time of an empty message and its answer, or most of it."""
    return size / max(1e-9, 0.1 * seconds, seconds - 2 * latency)


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
        _together(x, [dist.P2POp(dist.isend, word, other), dist.P2POp(dist.irecv, x, other)])
        _send(word, other)


def measure_at_once(
    rings: Sequence[Sequence[int]],
    pairs: Sequence[PairLink],
    team: Team,
    device: torch.device,
    clock: Clock = time.perf_counter,
) -> dict[int, float]:
    """Return the bytes per second that each rank sends to the next of its ring, while all of all rings send.

    So they share what they share in collectives: a node's adapter, or its processors.  A rank that is alone in its ring
    sends nothing and is left out.  pairs: of these links, each measured by itself; the size of messages follows.
    """
    rank = team.process.rank
    beside = {one: (ring[at - 1], ring[at + 1 - len(ring)]) for ring in rings if len(ring) > 1
              for at, one in enumerate(ring)}  # fmt: skip
    latency = statistics.median(pair.latency for pair in pairs)
    slowest = min(max(pair.forth, pair.back) for pair in pairs)
    size = int(min(MOST[device.type], max(LEAST, slowest * max(AT_ONCE, 10 * latency))))
    x = torch.zeros(size, dtype=torch.uint8, device=device)
    found, spent = torch.empty_like(x), []
    for _ in range(REPEATS + 1):
        team.all_gather_object(None, "all ranks sending at once")
        begin = clock()
        if rank in beside:
            before, after = beside[rank]
            with waiting(f"messages from rank {before} and to rank {after}"):
                # The receive first: gloo would else announce it behind all that is sent.
                _together(x, [dist.P2POp(dist.irecv, found, before), dist.P2POp(dist.isend, x, after)])
        spent.append(clock() - begin)
    every = team.all_gather_object(spent[1:], "the time of messages of all ranks at once")  # the first connects them
    seconds = min(zip(*every), key=max)
    return {one: _rate(size, seconds[one], latency) for one in beside}


def measure_call(team: Team, device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Return the seconds of an all-gather of all ranks that carries next to nothing."""
    return _collective("all_gather", team.process.ranks, CALLS, team, device, clock)


def measure_collectives(
    cluster: Cluster, team: Team, device: torch.device, clock: Clock = time.perf_counter
) -> list[CollectiveTime]:
    """Time the collectives of all ranks.  cluster: as measured; it says how large the messages should be."""
    where = Placement(cluster.ranks, min(cluster.ranks, cluster.per_node))
    found = []
    for kind in COLLECTIVES:
        share = (2 if kind == "all_reduce" else 1) * (where.ranks - 1) / where.ranks  # of its bytes that a rank sends
        each = collective_seconds(kind, 1e6, where, cluster) - collective_seconds(kind, 0.0, where, cluster)
        size = COLLECTIVE_SECONDS / max(each, 1e-12) * 1e6 / share
        numbers = -(-int(min(MOST[device.type], max(LEAST, size))) // (4 * where.ranks)) * where.ranks
        taken = _collective(kind, numbers, COLLECTIVE_REPEATS, team, device, clock)
        sent = 4 * numbers * share
        found.append(CollectiveTime(kind, sent, taken, collective_seconds(kind, sent, where, cluster)))
    return found


def _collective(kind: Kind, numbers: int, repeats: int, team: Team, device: torch.device, clock: Clock) -> float:
    """Return the least seconds of a collective on [numbers] fp32; each time counts as its slowest rank's."""
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
            _finish(device)
            begin = clock()
            calls[kind]()
            _finish(device)
            spent.append(clock() - begin)
    every = team.all_gather_object(spent[1:], f"the time of {kind}")  # the first connects them
    return min(map(max, zip(*every)))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_clocks(
    nodes: Sequence[Sequence[int]], team: Team, device: torch.device, clock: Clock = time.time
) -> list[tuple[float, float]]:
    """Return how far each node's clock is ahead of the first node's, in seconds, and how sure that is.

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
# Documentation/ABI/stable/sysfs-class-infiniband, and NVIDIA's list of hw_counters).
PORT = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors")
HARDWARE = ("packet_seq_err", "out_of_sequence", "local_ack_timeout_err", "rnr_nak_retry_err", "implied_nak_seq_err")
CARD = ("rx_errors", "tx_errors", "rx_crc_errors", "tx_carrier_errors")


def read_counters(root: Path = Path("/")) -> dict[str, int]:
    """Return counts by name, as far as they are there: "tcp sent", "tcp lost", "mlx5_0 port 1 symbol_error".

    What TCP sends again has been lost, or was only late: then its receiver says that it had it (RFC 2883).
    """
    found = {}
    if tcp := _tcp(root / "proc/self/net/snmp", "Tcp:"):
        more = _tcp(root / "proc/self/net/netstat", "TcpExt:")
        late = more.get("TCPDSACKRecvSegs", more.get("TCPDSACKRecv", 0))
        found = {"tcp sent": tcp.get("OutSegs", 0), "tcp lost": tcp.get("RetransSegs", 0) - late}
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        for folder, names in (("counters", PORT), ("hw_counters", HARDWARE)):
            for name in names:
                found |= _count(port / folder / name, f"{port.parts[-3]} port {port.name} {name}")
    for card in sorted((root / "sys/class/net").glob("*/statistics")):
        for name in CARD:
            found |= _count(card / name, f"{card.parent.name} {name}")
    return found


def counted(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[tuple[int, int], dict[str, int]]:
    """Return packets sent and lost between two readings, and the errors that counted up."""
    grown = {name: count - before.get(name, count) for name, count in after.items()}
    tcp = grown.pop("tcp sent", 0), max(0, grown.pop("tcp lost", 0))
    return tcp, {name: count for name, count in grown.items() if count > 0}


def _tcp(path: Path, kind: str) -> dict[str, int]:
    """Return what a line of names and a line of counts say, which both begin with the kind."""
    lines = [line.split()[1:] for line in text_of(path).splitlines() if line.startswith(kind)]
    return dict(zip(lines[0], map(int, lines[1]))) if len(lines) == 2 else {}


def _count(path: Path, name: str) -> dict[str, int]:
    text = text_of(path)
    return {name: int(text)} if text.isdigit() else {}
