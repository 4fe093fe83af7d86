"""Say what measured links are worth: the cluster that they make, and what is wrong with them."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from warpfold.cluster.findings import ClusterFinding, of_ranks
from warpfold.cluster.measure_links import CollectiveTime, PairLink
from warpfold.cluster.rounds import Pair, all_pairs
from warpfold.cluster.slow import NOTE, WRONG, Slow, culprits, find_slow
from warpfold.cost.links import Cluster, Link, Placement, collective_seconds

Where = Literal["within", "between"]

SLACK = {"cpu": 200e-6, "cuda": 20e-6}  # seconds by which latencies may differ whatever their ratio
FAR, DISTANT = 2e-3, 0.5e-3  # seconds between nodes beyond those within: not a local network; perhaps not
THIN = 125e6  # bytes per second of a node: Gigabit Ethernet, which no training of several nodes should run over
LOST, LOST_SOME, LEAST_LOST = 0.003, 0.001, 50  # share of packets that are lost, and how many at least
STALLED = 0.1  # of pings that took as long as TCP waits for a lost packet: wrong; of fewer: a note
OFTEN = 3.0  # times the usual spread of latencies
# Times as long as the links should take: wrong; a note.  Between processors the ranks share them, and copy and add.
TOO_LONG = {"cpu": (40.0, 20.0), "cuda": (5.0, 2.5)}
APART, SOMEWHAT = 1.0, 0.1  # seconds between clocks
SAID = 8  # of a kind, at most; a table and --json have the rest

SEND = "check its cable, port and adapter (ethtool -S, ibstat, nvidia-smi topo -m), or leave its node out"
BUSY = "see what else runs on its cores (top); between processes of one machine there is no wire"
NETWORK = "see that the ranks use the fast adapter: NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class MeasuredLinks:
    """What was measured of all links.

    node_bandwidth: bytes per second that a node sends to the next when all ranks send, None where there is one node.
    shared: that a rank sends to one of its node when all ranks do; None where each is alone on its own.  lost: of
    each node, packets sent and packets lost meanwhile.  errors: of each node, what counted up at its adapters.
    clocks: of each node, seconds ahead of the first, and how sure.
    """

    nodes: Sequence[Sequence[int]]
    pairs: Sequence[PairLink]
    device: str  # "cpu" or "cuda"
    rounds: int
    all_rounds: int
    node_bandwidth: float | None = None
    shared: float | None = None
    collectives: Sequence[CollectiveTime] = ()
    lost: Sequence[tuple[int, int]] = ()
    errors: Sequence[Mapping[str, int]] = ()
    clocks: Sequence[tuple[float, float]] = ()

    @property
    def ranks(self) -> int:
        """How many there are."""
        return sum(map(len, self.nodes))

    @property
    def node_of(self) -> list[int]:
        """The node of each rank."""
        return [number for number, node in enumerate(self.nodes) for _ in node]

    def of_kind(self, where: Where) -> list[PairLink]:
        """Return the pairs within nodes, or between them."""
        node = self.node_of
        return [pair for pair in self.pairs if (node[pair.first] == node[pair.second]) == (where == "within")]


def cluster_of(measured: MeasuredLinks, device: str, call: float) -> Cluster | None:
    """Return the cluster that was measured; None where nodes are not equal.

    call: seconds of an all-gather of all ranks that carries next to nothing; what its hops take is subtracted.
    Where all ranks are on one node, or each on one of its own, the link that is not there is as the one that is.
    """
    sizes = {len(node) for node in measured.nodes}
    if len(sizes) != 1 or not measured.pairs:
        return None
    links = {}
    for where in ("within", "between"):
        if found := measured.of_kind(where):
            bandwidths = [rate for pair in found for rate in (pair.forth, pair.back)]
            links[where] = Link(statistics.median(pair.latency for pair in found), statistics.median(bandwidths))
    if "between" in links and measured.node_bandwidth:
        links["between"] = Link(links["between"].latency, measured.node_bandwidth)
    if "within" in links and measured.shared:
        links["within"] = Link(links["within"].latency, min(links["within"].bandwidth, measured.shared))
    within, between = (links.get(where) or next(iter(links.values())) for where in ("within", "between"))
    cluster = Cluster(
        ranks=measured.ranks, per_node=sizes.pop(), within=_rounded(within), between=_rounded(between), call=0.0,
        library="gloo" if measured.device == "cpu" else "nccl", device=device, how="measured",
    )  # fmt: skip
    hops = collective_seconds("all_gather", 0.0, Placement(cluster.ranks, cluster.per_node), cluster)
    return replace(cluster, call=float(f"{max(call - hops, 0.01 * call):.3g}"))


def _rounded(link: Link) -> Link:
    return Link(float(f"{link.latency:.3g}"), float(f"{link.bandwidth:.3g}"))


def suspects(measured: MeasuredLinks) -> set[Pair]:
    """Return the pairs that seem slow or late, to be measured again before anything is said of them."""
    found = set[Pair]()
    for where in ("within", "between"):
        for speeds in _speeds(measured, where).values():
            found |= {pair for one in find_slow(speeds, measured.node_of, NOTE) for pair in one.pairs}
        if _is_wire(measured, where):
            odd = (one for one in measured.of_kind(where) if min(one.forth, one.back) < NOTE * max(one.forth, one.back))
            found |= {(one.first, one.second) for one in odd}
    return found


def judge_links(measured: MeasuredLinks, promised: Link | None = None) -> list[ClusterFinding]:
    """Return what is wrong with the links; promised: what the network between nodes should give.

    Between processes of one machine there is nothing that could be broken: what is slow there has a busy processor, and
    is a note.
    """
    return [
        *_judge_pairs(measured),
        *_judge_one_way(measured),
        *_judge_jitter(measured),
        *_judge_between(measured, promised),
        *_judge_loss(measured),
        *_judge_collectives(measured.collectives, measured.device),
        *_judge_clocks(measured),
    ]


def _speeds(measured: MeasuredLinks, where: Where) -> dict[str, dict[Pair, float]]:
    """Return by what is measured the speed of each pair of a kind; the slack is added to latencies before they turn."""
    pairs, slack = measured.of_kind(where), SLACK[measured.device]
    return {
        "latency": {(pair.first, pair.second): 1 / (pair.latency + slack) for pair in pairs},
        "bandwidth": {(pair.first, pair.second): max(pair.forth, pair.back) for pair in pairs},
    }


def _judge_pairs(measured: MeasuredLinks) -> Iterator[ClusterFinding]:
    by_pair = {(pair.first, pair.second): pair for pair in measured.pairs}
    cut = "" if measured.rounds == measured.all_rounds else f", {measured.rounds} of {measured.all_rounds} rounds"
    count = f"{len(by_pair)} of {all_pairs(measured.nodes)} pairs measured{cut}"
    for where in ("within", "between"):
        found = measured.of_kind(where)
        if not found:
            continue
        node = "nodes" if where == "between" else "a node"
        for what, speeds in _speeds(measured, where).items():
            check = f"{what} {where} {node}"
            usual = statistics.median(_figure(pair, what) for pair in found)
            slow = find_slow(speeds, measured.node_of, NOTE)
            for one in slow[:SAID]:
                worst = in_words(_figure(by_pair[min(one.pairs, key=speeds.__getitem__)], what), what)
                says = f"{_name(one, measured.ranks)}: {worst}, usual is {in_words(usual, what)}"
                wire = _is_wire(measured, where)
                yield ClusterFinding("links", check, _outcome(one.share < WRONG and wire), says, SEND if wire else BUSY)
            if len(slow) > SAID:
                says = f"{len(slow) - SAID} more pairs are slower than {NOTE:g} of the usual (--json has all)"
                yield ClusterFinding("links", check, "note", says)
            if not slow:
                spread = [in_words(figure, what) for figure in sorted(_figure(pair, what) for pair in found)]
                says = f"{in_words(usual, what)}, from {spread[0]} to {spread[-1]}; {count}"
                yield ClusterFinding("links", check, "ok", says)


def _judge_one_way(measured: MeasuredLinks) -> Iterator[ClusterFinding]:
    """Judge pairs of which one way is slower than the other; what many have in common is said once."""
    node, said, checked = measured.node_of, list[ClusterFinding](), False
    for where in ("within", "between"):
        if not _is_wire(measured, where):
            continue
        rates = {(one.first, one.second): (one.forth, one.back) for one in measured.of_kind(where)}
        rates |= {(b, a): (back, forth) for (a, b), (forth, back) in rates.items()}
        slow, checked = {ends: here / back for ends, (here, back) in rates.items() if here < NOTE * back}, bool(rates)
        groups: list[tuple[str, dict[Pair, tuple[Any, ...]], int]] = [
            ("from rank {0}", {ends: (ends[0],) for ends in rates}, 2),
            ("to rank {0}", {ends: (ends[1],) for ends in rates}, 2),
            ("from rank {0[0]} to rank {0[1]}", {ends: (ends,) for ends in rates}, 1),
        ]
        if where == "between":
            both = {ends: ((node[ends[0]], node[ends[1]]),) for ends in rates}
            groups.insert(0, ("from node {0[0]} to node {0[1]}", dict(both), 2))
        for text, members, least in groups:
            for who, ones in culprits(slow, members, least):
                low, high = rates[min(ones, key=slow.__getitem__)]
                says = f"{text.format(who)}: {in_words(low, 'bandwidth')}, the other way {in_words(high, 'bandwidth')}"
                said.append(ClusterFinding("links", "one way", _outcome(low < WRONG * high), says, SEND))
                for ends in ones:
                    del slow[ends]
    yield from said[:SAID]
    if checked and not said:
        yield ClusterFinding("links", "one way", "ok", "links are as fast one way as the other")


def _is_wire(measured: MeasuredLinks, where: Where) -> bool:
    return where == "between" or measured.device != "cpu"


def _outcome(wrong: bool) -> Literal["wrong", "note"]:
    return "wrong" if wrong else "note"


def _name(slow: Slow, ranks: int) -> str:
    """Name what is common to slow pairs."""
    if slow.rank is not None:
        others = (one for pair in slow.pairs for one in pair if one != slow.rank)
        return f"rank {slow.rank} with {of_ranks(others, ranks)}"
    if slow.nodes:
        return f"node{'s' if len(slow.nodes) > 1 else ''} {' and '.join(map(str, slow.nodes))}"
    return f"ranks {slow.pairs[0][0]} and {slow.pairs[0][1]}"


def _figure(pair: PairLink, what: str) -> float:
    return pair.latency if what == "latency" else max(pair.forth, pair.back)


def in_words(value: float, what: str) -> str:
    """Return seconds as "12 µs" or "1.7 ms", bytes per second as "0.53 GB/s"."""
    if what != "latency":
        return f"{value / 1e9:.3g} GB/s"
    return f"{value * 1e6:.3g} µs" if value < 1e-3 else f"{value * 1e3:.3g} ms"


def _judge_jitter(measured: MeasuredLinks) -> Iterator[ClusterFinding]:
    kinds: tuple[Where, ...] = ("within", "between")
    pairs = [pair for where in kinds if _is_wire(measured, where) for pair in measured.of_kind(where)]
    stalled = [pair for pair in pairs if pair.stalls]
    for pair in stalled[:SAID]:
        often = pair.stalls >= 3 and pair.stalls > STALLED * pair.pings
        alone = len(stalled) <= len(pairs) / 2
        says = (
            f"ranks {pair.first} and {pair.second}: {pair.stalls} of {pair.pings} round trips took as long as TCP "
            "waits for a lost packet"
        )
        cure = "look for lost packets: ethtool -S, ip -s link; a switch or a cable" if often else ""
        yield ClusterFinding("links", "jitter", "wrong" if often and alone else "note", says, cure)
    usual = statistics.median(pair.late - pair.latency for pair in pairs) if pairs else 0.0
    least = 5 * SLACK[measured.device]
    late = [pair for pair in pairs if pair.late - pair.latency > max(OFTEN * usual, least) and not pair.stalls]
    for pair in late[:SAID]:
        says = (
            f"ranks {pair.first} and {pair.second}: one in ten messages takes more than "
            f"{in_words(pair.late, 'latency')}, the quickest {in_words(pair.latency, 'latency')}"
        )
        yield ClusterFinding("links", "jitter", "note", says)
    if not stalled and not late and pairs:
        says = f"nine in ten messages take at most {in_words(usual, 'latency')} longer than the quickest"
        yield ClusterFinding("links", "jitter", "ok", says)


def _judge_between(measured: MeasuredLinks, promised: Link | None) -> Iterator[ClusterFinding]:
    """Judge the network between nodes as a whole, which has no other to be compared with."""
    found, inside = measured.of_kind("between"), measured.of_kind("within")
    if not found or measured.node_bandwidth is None:
        return
    latency = statistics.median(pair.latency for pair in found)
    beyond = latency - (statistics.median(pair.latency for pair in inside) if inside else 0.0)
    if beyond > DISTANT:
        says = f"{in_words(latency, 'latency')}, {in_words(beyond, 'latency')} more than within a node"
        outcome = _outcome(beyond > FAR)
        yield ClusterFinding("links", "distance of nodes", outcome, says, f"take nodes under one switch; {NETWORK}")
    rate = measured.node_bandwidth
    says = f"a node sends {in_words(rate, 'bandwidth')} or more to another when all ranks send at once"
    if promised is not None:
        says += f"; the network should give {in_words(promised.bandwidth, 'bandwidth')}"
    if rate < THIN or (promised and rate < WRONG * promised.bandwidth):
        slower = "" if rate >= THIN else ": slower than Gigabit Ethernet"
        yield ClusterFinding("links", "bandwidth of a node", "wrong", says + slower, NETWORK)
    elif promised and rate < NOTE * promised.bandwidth:
        yield ClusterFinding("links", "bandwidth of a node", "note", says, NETWORK)
    else:
        yield ClusterFinding("links", "bandwidth of a node", "ok", says)


def _judge_loss(measured: MeasuredLinks) -> Iterator[ClusterFinding]:
    lossy = False
    for node, (sent, lost) in enumerate(measured.lost if len(measured.nodes) > 1 else ()):
        if lost >= LEAST_LOST and lost > LOST_SOME * sent:
            lossy = True
            says = f"node {node}: {lost} of {sent} packets ({lost / sent:.1%}) were lost and sent again"
            cure = "look for where they are lost: ethtool -S, ip -s link; a cable, a port, a switch that is too busy"
            yield ClusterFinding("links", "lost packets", "wrong" if lost > LOST * sent else "note", says, cure)
    for node, counted in enumerate(measured.errors):
        for name, count in counted.items():
            lossy = True
            says = f"node {node}: {name} counted {count} while the links were measured"
            yield ClusterFinding("links", "errors of adapters", "note", says, SEND)
    if len(measured.lost) > 1 and not lossy:
        says = f"{sum(lost for _, lost in measured.lost)} of {sum(sent for sent, _ in measured.lost)} packets"
        yield ClusterFinding("links", "lost packets", "ok", says)


def _judge_collectives(collectives: Sequence[CollectiveTime], device: str) -> Iterator[ClusterFinding]:
    bad, odd = TOO_LONG[device]
    for one in collectives:
        times, rate = one.seconds / one.expected, one.sent / one.seconds
        says = (
            f"{in_words(rate, 'bandwidth')} of each rank, {one.expected / one.seconds:.0%} of what the measured links "
            "should give"
        )
        check = f"{one.kind.replace('_', '-')} of all ranks"
        if times > odd:
            cure = "set NCCL_DEBUG=INFO to see which rings and adapters are used; see that no other job shares them"
            yield ClusterFinding("links", check, "wrong" if times > bad else "note", says, cure)
        else:
            yield ClusterFinding("links", check, "ok", says)


def _judge_clocks(measured: MeasuredLinks) -> Iterator[ClusterFinding]:
    if len(measured.clocks) < 2:
        return
    middle = statistics.median_low([ahead for ahead, _ in measured.clocks])
    worst, off = 0.0, False
    for node, (ahead, sure) in enumerate(measured.clocks):
        away = abs(ahead - middle) - sure
        worst = max(worst, abs(ahead - middle))
        if away > SOMEWHAT:
            off = True
            says = (
                f"node {node}'s is {abs(ahead - middle):.3g} s {'ahead of' if ahead > middle else 'behind'} the others"
            )
            outcome = _outcome(away > APART)
            yield ClusterFinding(
                "links", "clocks of nodes", outcome, says, "start chronyd or ntpd on it (chronyc makestep)"
            )
    if not off:
        yield ClusterFinding("links", "clocks of nodes", "ok", f"at most {worst * 1e3:.3g} ms apart")
