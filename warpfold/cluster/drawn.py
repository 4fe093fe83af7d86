"""Draw links as text: a matrix of pairs, dark where they are slow, and tables of what was measured."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from warpfold.cluster.judge_links import MeasuredLinks, in_words
from warpfold.cluster.ranks import RankRates, speeds_of
from warpfold.cluster.rounds import Pair

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
    """Return bandwidth and latency of all pairs; of more ranks than `WIDEST` medians of each two nodes."""
    bandwidth, latency = dict[Pair, float](), dict[Pair, float]()
    for pair in measured.pairs:
        for a, b, rate in ((pair.first, pair.second, pair.forth), (pair.second, pair.first, pair.back)):
            bandwidth[a, b], latency[a, b] = rate / 1e9, pair.latency * 1e6
    many = measured.ranks > WIDEST
    names = [str(number) for number in range(len(measured.nodes) if many else measured.ranks)]
    of = "nodes" if many else "ranks"
    node = list(range(len(names))) if many else measured.node_of
    found = []
    for title, unit, figures in (("bandwidth", "GB/s", bandwidth), ("latency", "µs", latency)):
        shown = _by_nodes(figures, measured.node_of) if many else figures
        kinds = defaultdict(list)
        for (a, b), figure in shown.items():
            kinds[node[a] == node[b]].append(figure)
        usual = {kind: statistics.median(several) for kind, several in kinds.items()}
        large = title == "latency"
        speeds = {
            (a, b): (usual[node[a] == node[b]] / figure) ** (1 if large else -1) for (a, b), figure in shown.items()
        }
        values, shares = (
            [[known.get((a, b), math.nan) for b in range(len(names))] for a in range(len(names))]
            for known in (shown, speeds)
        )
        found.append(Matrix(f"{title} from and to {of}, {unit}", unit, names, values, shares, large))
    return found


def _by_nodes(figures: Mapping[Pair, float], node_of: Sequence[int]) -> dict[Pair, float]:
    found = defaultdict(list)
    for (a, b), figure in figures.items():
        found[node_of[a], node_of[b]].append(figure)
    return {pair: statistics.median(several) for pair, several in found.items()}


def draw(matrix: Matrix) -> list[str]:
    """Return lines of text: a cell for each pair, with its figure where there are few, darker where it is slower.

    What is as fast as usual for its kind, or faster, is blank; what is half as fast or slower is black.
    """
    numbered = len(matrix.names) <= NUMBERED
    width = 7 if numbered else 1
    heads = "".join(f"{name:>{width - 1}} " if numbered else name[-1] for name in matrix.names)
    margin = max(map(len, matrix.names)) + 1
    lines = [matrix.title, f"{'':{margin}}{heads}".rstrip()]
    for name, row, shares in zip(matrix.names, matrix.values, matrix.shares):
        cells = (
            f"{_figure(value):>{width - 1}}{_shade(share)}" if numbered else _shade(share)
            for value, share in zip(row, shares)
        )
        lines.append(f"{name:>{margin - 1}} {''.join(cells)}".rstrip())
    scale = "blank: as usual for its kind, or faster; black: half as fast, or slower; dot: itself, or not measured"
    return lines if numbered else [*lines, " " * margin + scale]


def _figure(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3g}" if value < 1e5 else f"{value:.0e}"


def _shade(share: float) -> str:
    if math.isnan(share):
        return "·"
    return SHADES[min(len(SHADES) - 1, max(0, int((1 / share - 1) * len(SHADES))))]


def link_rows(measured: MeasuredLinks) -> list[list[str]]:
    """Return a row for each kind of link and each collective: what, how many, usual, worst."""
    rows = []
    for where, name in (("within", "within a node"), ("between", "between nodes")):
        pairs = measured.of_kind(where)  # type: ignore[arg-type]
        if pairs:
            latencies, rates = [one.latency for one in pairs], [min(one.forth, one.back) for one in pairs]
            for what, figures, worst in (("latency", latencies, max(latencies)), ("bandwidth", rates, min(rates))):
                usual = in_words(statistics.median(figures), what)
                rows.append([f"{what} {name}", f"{len(pairs)} pairs", usual, in_words(worst, what)])
    if measured.node_bandwidth is not None:
        rows.append(
            ["bandwidth of a whole node", f"{len(measured.nodes)} nodes", in_words(measured.node_bandwidth, ""), ""]
        )
    for one in measured.collectives:
        share = f"{one.expected / one.seconds:.0%} of what links give"
        rows.append(
            [one.kind.replace("_", "-"), f"{one.sent / 1e6:.3g} MB sent", in_words(one.sent / one.seconds, ""), share]
        )
    return rows


def rank_table(rates: Sequence[RankRates], nodes: Sequence[Sequence[int]]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of what ranks can do; of more ranks than `WIDEST`, the slowest of each node."""
    speeds = speeds_of(rates)
    heads = ["rank", "node", *speeds]
    rows = []
    for number, node in enumerate(nodes):
        if len(rates) <= WIDEST:
            rows += [[str(rank), str(number), *(f"{found[rank]:,.3g}" for found in speeds.values())] for rank in node]
        else:
            least = (f"{min(found[rank] for rank in node):,.3g}" for found in speeds.values())
            rows.append([f"{node[0]} to {node[-1]}", str(number), *least])
    return heads, rows
