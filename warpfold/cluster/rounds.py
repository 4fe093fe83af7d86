"""Who measures with whom: rounds of disjoint pairs, so that half as many pairs as ranks are measured at a time."""

from collections.abc import Sequence

Pair = tuple[int, int]

ALL_PAIRS = 64  # ranks: of so many all pairs are measured, of more a sample between each two nodes
MEETINGS = 96  # of nodes, at most, where there are more ranks: a second or so for each
TIMES = 8  # that a rank of many is measured with other nodes, at least


def nodes_of(local_ranks: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each node, given every rank's number on its node: a node begins where that is 0."""
    nodes: list[list[int]] = []
    for rank, local in enumerate(local_ranks):
        if local == 0 or not nodes:
            nodes.append([])
        nodes[-1].append(rank)
    return nodes


def circle(count: int) -> list[list[Pair]]:
    """Return rounds in which each of `count` meets every other once: the circle method of tournaments.

    The first keeps its seat and the others move on by one; where `count` is odd, one rests in each round.
    """
    seats = count + count % 2
    found = []
    for turn in range(seats - 1):
        table = [0, *((turn + i) % (seats - 1) + 1 for i in range(seats - 1))]
        facing = ((table[i], table[seats - 1 - i]) for i in range(seats // 2))
        found.append([(min(pair), max(pair)) for pair in facing if max(pair) < count])
    return [pairs for pairs in found if pairs]


def rounds(nodes: Sequence[Sequence[int]]) -> list[list[Pair]]:
    """Return rounds of disjoint pairs of ranks: first within nodes, then between them.

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


def first_rounds(nodes: Sequence[Sequence[int]]) -> list[list[Pair]]:
    """Return the first round within nodes and the first between them, as far as there are such."""
    node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
    found: dict[bool, list[Pair]] = {}
    for pairs in rounds(nodes):
        first, second = pairs[0]
        found.setdefault(node_of[first] == node_of[second], pairs)
    return list(found.values())


def all_pairs(nodes: Sequence[Sequence[int]]) -> int:
    """Return how many pairs there are."""
    ranks = sum(map(len, nodes))
    return ranks * (ranks - 1) // 2
