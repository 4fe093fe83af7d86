"""Say what measured links are worth: what is wrong with them, and matrices and tables of them."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from warpfold.cluster.findings import NOTE, SAID, WRONG, ClusterFinding, Facts, Fault, Fine, graded, judge, of_ranks
from warpfold.cluster.links import SLACK, MeasuredLinks, Pair, PairLink, Where
from warpfold.cost.links import Link

FAR, DISTANT = 2e-3, 0.5e-3  # seconds between nodes beyond those within: not a local network; perhaps not
THIN = 125e6  # bytes per second of a node: Gigabit Ethernet, which no training of several nodes should run over
LOST, LOST_SOME, LEAST_LOST = 0.003, 0.001, 50  # share of packets that are lost, and how many at least
STALLED = 0.1  # of pings that took as long as TCP waits for a lost packet: wrong; of fewer: a note
OFTEN = 3.0  # times the usual spread of latencies
# Times as long as the links should take: wrong; a note.  Between processors the ranks share them, and copy and add.
TOO_LONG = {"cpu": (40.0, 20.0), "cuda": (5.0, 2.5)}
APART, SOMEWHAT = 1.0, 0.1  # seconds between clocks
KINDS: dict[Where, str] = {"within": "within a node", "between": "between nodes"}

SEND = "check its cable, port and adapter (ethtool -S, ibstat, nvidia-smi topo -m), or leave its node out"
BUSY = "see what else runs on its cores (top); between processes of one machine there is no wire"
NETWORK = "see that the ranks use the fast adapter: NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GLOO_SOCKET_IFNAME"


def in_words(value: float, what: str = "bandwidth") -> str:
    """Write seconds as "12 µs" or "1.7 ms", bytes per second as "0.53 GB/s"."""
    if what != "latency":
        return f"{value / 1e9:.3g} GB/s"
    return f"{value * 1e6:.3g} µs" if value < 1e-3 else f"{value * 1e3:.3g} ms"


# ---- who is slow


@dataclass(frozen=True)
class Slow:
    """Links that are slow together, the slowest first: of a node, of two nodes, of a rank; or one pair."""

    name: str
    pairs: tuple[Pair, ...]


def find_slow(shares: Mapping[Pair, float], measured: MeasuredLinks, one_way: bool = False) -> list[Slow]:
    """Name what slow links have in common; shares: of every link of a kind its share of the usual speed.

    A node is named where more than half of its links are slow, and at least so many; then two nodes, of what is left,
    and a rank likewise; then single pairs.  one_way: links are from the first rank to the second.
    """
    node, ranks = measured.node_of, measured.ranks
    across = {pair: (node[pair[0]], node[pair[1]]) for pair in shares if node[pair[0]] != node[pair[1]]}
    both: dict[Pair, tuple[Any, ...]] = {pair: (two,) for pair, two in across.items()}
    single: dict[Pair, tuple[Any, ...]] = {pair: (pair,) for pair in shares}
    # What is named, whom each link belongs to, and how many slow links one must have to be named.
    groups: list[tuple[str, Mapping[Pair, tuple[Any, ...]], int]]
    if one_way:
        groups = [
            ("from node {0[0]} to node {0[1]}", both, 2),
            ("from rank {0}", {pair: pair[:1] for pair in shares}, 2),
            ("to rank {0}", {pair: pair[1:] for pair in shares}, 2),
            ("from rank {0[0]} to rank {0[1]}", single, 1),
        ]
    else:
        groups = [
            ("rank {0} with {others}", {pair: pair for pair in shares}, 2),
            ("ranks {0[0]} and {0[1]}", single, 1),
        ]
        if len(measured.nodes) > 2:  # a node has more slow links than a rank has, which is named by itself
            groups[:0] = [("node {0}", across, max(Counter(node).values()) + 1), ("nodes {0[0]} and {0[1]}", both, 2)]
    left = dict(sorted(((pair, share) for pair, share in shares.items() if share < NOTE), key=lambda one: one[1]))
    found = []
    for name, members, least in groups:
        of_all = Counter(one for ones in members.values() for one in ones)
        while True:
            counts = Counter(one for pair in left for one in members.get(pair, ()))
            worst = max(counts, key=lambda one: (counts[one], counts[one] / of_all[one]), default=None)
            if worst is None or counts[worst] < least or counts[worst] <= of_all[worst] / 2:
                break
            pairs = tuple(pair for pair in left if worst in members.get(pair, ()))
            others = of_ranks((one for pair in pairs for one in pair if one != worst), ranks) if "{o" in name else ""
            found.append(Slow(name.format(worst, others=others), pairs))
            for pair in pairs:
                del left[pair]
    return found


def _figure(pair: PairLink, what: str) -> float:
    return pair.latency if what == "latency" else max(pair.forth, pair.back)


def _judge_pairs(measured: MeasuredLinks) -> Iterator[ClusterFinding]:
    """Judge latency and bandwidth of pairs among their like, and each way by the other."""
    by_pair = {one.ends: one for one in measured.pairs}
    rates = {one.ends: one.forth for one in measured.pairs} | {one.ends[::-1]: one.back for one in measured.pairs}
    cut = "" if measured.rounds == measured.all_rounds else f", {measured.rounds} of {measured.all_rounds} rounds"
    count = f"{len(by_pair)} of {measured.ranks * (measured.ranks - 1) // 2} pairs measured{cut}"
    ways: list[Slow] = []
    checked = False
    for where, place in KINDS.items():
        if not (pairs := measured.of_kind(where)):
            continue
        wire = measured.is_wire(where)
        for what, shares in measured.speeds(where).items():
            check, slow = f"{what} {place}", find_slow(shares, measured, what == "one way")
            if what == "one way":
                check, ways, checked = what, [*ways, *slow], True
            for one in slow[:SAID]:
                if what == "one way":
                    low, high = rates[one.pairs[0]], rates[one.pairs[0][::-1]]
                    says = f"{one.name}: {in_words(low)}, the other way {in_words(high)}"
                else:
                    worst = in_words(_figure(by_pair[one.pairs[0]], what), what)
                    usual = in_words(statistics.median(_figure(pair, what) for pair in pairs), what)
                    says = f"{one.name}: {worst}, usual is {usual}"
                is_wrong = wire and shares[one.pairs[0]] < WRONG
                yield ClusterFinding("links", check, "wrong" if is_wrong else "note", says, SEND if wire else BUSY)
            if len(slow) > SAID:
                says = f"{len(slow) - SAID} more are slower than {NOTE:g} of the usual (--json has all)"
                yield ClusterFinding("links", check, "note", says)
            if not slow and what != "one way":
                figures = sorted(_figure(pair, what) for pair in pairs)
                usual, low_words, high_words = (
                    in_words(figure, what) for figure in (statistics.median(figures), figures[0], figures[-1])
                )
                says = f"{usual}, from {low_words} to {high_words}; {count}"
                yield ClusterFinding("links", check, "ok", says)
    if checked and not ways:
        yield ClusterFinding("links", "one way", "ok", "links are as fast one way as the other")


# ---- all of it


def _pair(x: Facts) -> tuple[int, int]:
    return x["first"], x["second"]


def _node(x: Facts) -> int:
    return x["node"]


TRIPS = (
    "ranks {x[first]} and {x[second]}: {x[stalls]} of {x[pings]} round trips took as long as TCP waits for a lost "
    "packet"
)
FAULTS = (
    Fault("jitter", "wires", lambda x: x["often"] and x["alone"], TRIPS,
          "look for lost packets: ethtool -S, ip -s link; a switch or a cable", each=_pair),
    Fault("jitter", "wires", lambda x: x["stalls"] and not (x["often"] and x["alone"]), TRIPS, "", "note", each=_pair,
          also=True),
    Fault("jitter", "wires", lambda x: x["is late"] and not x["stalls"],
          "ranks {x[first]} and {x[second]}: one in ten messages takes more than {x[late words]}, the quickest "
          "{x[latency words]}",
          "", "note", each=_pair, also=True),
    *graded("distance of nodes", "network", lambda x: x["beyond"], FAR, DISTANT,
           "{x[latency words]}, {x[beyond words]} more than within a node", f"take nodes under one switch; {NETWORK}"),
    Fault("bandwidth of a node", "network", lambda x: x["rate"] < THIN,
          "{x[rate words]}: slower than Gigabit Ethernet", NETWORK),
    *graded("bandwidth of a node", "promised", lambda x: x["short of"], 1 / WRONG, 1 / NOTE,
            "{x[rate words]}", NETWORK),
    *graded("lost packets", "losing", lambda x: x["share"], LOST, LOST_SOME,
           "node {x[node]}: {x[lost]} of {x[sent]} packets ({x[share]:.1%}) were lost and sent again",
           "look for where they are lost: ethtool -S, ip -s link; a cable, a port, a switch that is too busy",
           each=_node),
    Fault("errors of adapters", "counters", lambda x: x["count"],
          "node {x[node]}: {x[name]} counted {x[count]} while the links were measured", SEND, "note",
          each=lambda x: (x["node"], x["name"])),
    *graded("clocks of nodes", "clocks", lambda x: x["surely off"], APART, SOMEWHAT,
           "node {x[node]}'s is {x[off]:.3g} s {x[word]} the others", "start chronyd or ntpd on it (chronyc makestep)",
           each=_node),
)  # fmt: skip
FINE = (
    Fine("jitter", "wires", "nine in ten messages take at most {x[usual words]} longer than the quickest"),
    Fine("bandwidth of a node", "network", "{x[rate words]}"),
    Fine("lost packets", "sound", "{x[lost]} of {x[sent]} packets"),
    Fine("clocks of nodes", "clocks", "at most {x[worst]:.3g} ms apart"),
)
COLLECTIVE = "{x[rate words]} of each rank, {x[share]:.0%} of what the measured links should give"
RINGS = "set NCCL_DEBUG=INFO to see which rings and adapters are used; see that no other job shares them"


def judge_links(measured: MeasuredLinks, promised: Link | None = None) -> list[ClusterFinding]:
    """Say what is wrong with the links; promised: what the network between nodes should give.

    Between processes of one machine there is nothing that could be broken: what is slow there has a busy processor, and
    is a note.
    """
    wires = [asdict(pair) for where in KINDS if measured.is_wire(where) for pair in measured.of_kind(where)]
    usual = statistics.median(x["late"] - x["latency"] for x in wires) if wires else 0.0
    alone = sum(x["stalls"] > 0 for x in wires) <= len(wires) / 2
    for x in wires:
        x["often"], x["alone"] = x["stalls"] >= 3 and x["stalls"] > STALLED * x["pings"], alone
        x["is late"] = x["late"] - x["latency"] > max(OFTEN * usual, 5 * SLACK[measured.device])
        x["late words"], x["latency words"] = in_words(x["late"], "latency"), in_words(x["latency"], "latency")
        x["usual words"] = in_words(usual, "latency")
    network: list[Facts] = []
    found, inside = measured.of_kind("between"), measured.of_kind("within")
    if found and (rate := measured.node_bandwidth) is not None:  # it has no other to be compared with
        latency = statistics.median(pair.latency for pair in found)
        beyond = latency - (statistics.median(pair.latency for pair in inside) if inside else 0.0)
        words = f"a node sends {in_words(rate)} or more to another when all ranks send at once"
        if promised is not None:
            words += f"; the network should give {in_words(promised.bandwidth)}"
        network = [{"rate": rate, "rate words": words, "beyond": beyond, "beyond words": in_words(beyond, "latency")}]
        network[0] |= {"latency words": in_words(latency, "latency")}
        network[0] |= {"short of": promised.bandwidth / rate if promised else 0.0}
    packets = [
        {"node": node, "sent": sent, "lost": lost, "share": lost / max(1, sent)}
        for node, (sent, lost) in enumerate(measured.lost if len(measured.nodes) > 1 else ())
    ]
    errors = [{"node": node, "name": name, "count": count} for node, of_node in enumerate(measured.errors)
              for name, count in of_node.items()]  # fmt: skip
    middle = statistics.median_low([ahead for ahead, _ in measured.clocks]) if measured.clocks else 0.0
    clocks = [
        {"node": node, "off": abs(ahead - middle), "surely off": abs(ahead - middle) - sure}
        | {"word": "ahead of" if ahead > middle else "behind"}
        | {"worst": 1e3 * max(abs(one - middle) for one, _ in measured.clocks)}
        for node, (ahead, sure) in enumerate(measured.clocks if len(measured.clocks) > 1 else ())
    ]
    losing = [x for x in packets if x["lost"] >= LEAST_LOST]
    whole = {"sent": sum(x["sent"] for x in packets), "lost": sum(x["lost"] for x in packets)}
    known = {
        "wires": wires, "network": network, "losing": losing, "counters": errors, "clocks": clocks,
        "promised": [x for x in network if x["rate"] >= THIN], "sound": [whole] if packets and not errors else [],
    }  # fmt: skip
    wrong, note = TOO_LONG[measured.device]
    of_collectives: list[ClusterFinding] = []
    for one in measured.collectives:
        check, share = f"{one['kind'].replace('_', '-')} of all ranks", one["expected"] / one["seconds"]
        x = {"times": 1 / share, "share": share, "rate words": in_words(one["sent"] / one["seconds"])}
        table = graded(check, "collective", lambda x: x["times"], wrong, note, COLLECTIVE, RINGS)
        of_collectives += judge("links", {"collective": [x]}, table, [Fine(check, "collective", COLLECTIVE)])
    return [*_judge_pairs(measured), *judge("links", known, FAULTS, FINE), *of_collectives]


# ---- matrices and tables

SHADES = " ░▒▓█"
NUMBERED, WIDEST = 8, 64  # ranks whose figures are written; rows of a matrix, at most


@dataclass(frozen=True)
class Matrix:
    """One quantity of each two ranks, or of each two nodes: [from, to]; NaN where it was not measured.

    unit: of the values.  shares: of each value, its speed as a share of the usual one of its kind, within nodes or
    between them.  slow_is_large: as of latencies.
    """

    title: str
    unit: str
    names: list[str]
    values: list[list[float]]
    shares: list[list[float]]
    slow_is_large: bool


def matrices(measured: MeasuredLinks) -> list[Matrix]:
    """Make matrices of bandwidth and latency of all pairs; of more ranks than `WIDEST` medians of each two nodes."""
    many, node_of = measured.ranks > WIDEST, measured.node_of
    count = len(measured.nodes) if many else measured.ranks
    of = "nodes" if many else "ranks"
    found = []
    for title, unit in (("bandwidth", "GB/s"), ("latency", "µs")):
        cells: dict[Pair, list[float]] = {}
        for one in measured.pairs:
            for a, b, rate in ((one.first, one.second, one.forth), (one.second, one.first, one.back)):
                cell = (node_of[a], node_of[b]) if many else (a, b)
                cells.setdefault(cell, []).append(rate / 1e9 if title == "bandwidth" else one.latency * 1e6)
        shown = {cell: statistics.median(figures) for cell, figures in cells.items()}
        kinds = {(a, b): a == b if many else node_of[a] == node_of[b] for a, b in shown}
        usual = {kind: statistics.median(shown[cell] for cell in shown if kinds[cell] == kind)
                 for kind in set(kinds.values())}  # fmt: skip
        large = title == "latency"
        speeds = {
            cell: (usual[kinds[cell]] / figure) if large else (figure / usual[kinds[cell]])
            for cell, figure in shown.items()
        }
        values, shares = (
            [[known.get((a, b), math.nan) for b in range(count)] for a in range(count)] for known in (shown, speeds)
        )
        names = [str(number) for number in range(count)]
        found.append(Matrix(f"{title} from and to {of}, {unit}", unit, names, values, shares, large))
    return found


def draw(matrix: Matrix) -> list[str]:
    """Draw lines of text: a cell for each pair, with its figure where there are few, darker where it is slower.

    What is as fast as usual for its kind, or faster, is blank; what is half as fast or slower is black.
    """

    def cell(value: float, share: float) -> str:
        figure = f"{value:.3g}" if value < 1e5 else f"{value:.0e}"
        if math.isnan(share):
            figure, shade = "", "·"
        else:
            shade = SHADES[min(len(SHADES) - 1, max(0, int((1 / share - 1) * len(SHADES))))]
        return f"{figure:>{width - 1}}{shade}" if numbered else shade

    numbered = len(matrix.names) <= NUMBERED
    width = 7 if numbered else 1
    heads = "".join(f"{name:>{width - 1}} " if numbered else name[-1] for name in matrix.names)
    margin = max(map(len, matrix.names)) + 1
    lines = [matrix.title, f"{'':{margin}}{heads}".rstrip()]
    for name, row, shares in zip(matrix.names, matrix.values, matrix.shares):
        lines.append(f"{name:>{margin - 1}} {''.join(map(cell, row, shares))}".rstrip())
    scale = "blank: as usual for its kind, or faster; black: half as fast, or slower; dot: itself, or not measured"
    return lines if numbered else [*lines, " " * margin + scale]


def link_rows(measured: MeasuredLinks) -> list[list[str]]:
    """Make a row for each kind of link and each collective: what, how many, usual, worst."""
    rows = []
    for where, place in KINDS.items():
        if pairs := measured.of_kind(where):
            figures: Sequence[tuple[str, list[float], Any]] = (
                ("latency", [one.latency for one in pairs], max),
                ("bandwidth", [min(one.forth, one.back) for one in pairs], min),
            )
            for what, found, worst in figures:
                usual = in_words(statistics.median(found), what)
                rows.append([f"{what} {place}", f"{len(pairs)} pairs", usual, in_words(worst(found), what)])
    if (rate := measured.node_bandwidth) is not None:
        rows.append(["bandwidth of a whole node", f"{len(measured.nodes)} nodes", in_words(rate), ""])
    for one in measured.collectives:
        share = f"{one['expected'] / one['seconds']:.0%} of what links give"
        kind, sent = one["kind"].replace("_", "-"), f"{one['sent'] / 1e6:.3g} MB sent"
        rows.append([kind, sent, in_words(one["sent"] / one["seconds"]), share])
    return rows
