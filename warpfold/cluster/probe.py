"""Measure how ranks are joined: pairs in rounds, those that seem slow again, then all ranks at once.

The doctor measures every pair.  A run that is not told its cluster measures each rank with one other of its node and
one of another node, in a second or two.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from warpfold.cluster.judge_links import MeasuredLinks, cluster_of, suspects
from warpfold.cluster.measure_links import Clock, PairLink, measure_at_once, measure_call, measure_pairs
from warpfold.cluster.rounds import Pair, first_rounds
from warpfold.cost.links import Cluster
from warpfold.parallel.team import Team

LINK_SECONDS, AGAIN_SECONDS = 45.0, 10.0  # for all pairs; for those that seem slow, each time
TRIES = 3  # measurements of what seems slow


def measure_cluster(team: Team, device: torch.device | str, clock: Clock = time.perf_counter) -> Cluster:
    """Return how all ranks are joined, the same on each.  All ranks call it.

    A rank's node is that of its number, as `torchrun` gives numbers; where nodes are not full, each rank is one.
    """
    ranks, each = team.process.ranks, max(1, team.process.ranks_per_node)
    each = each if ranks % each == 0 else ranks if ranks < each else 1
    nodes, device = [list(range(first, first + each)) for first in range(0, ranks, each)], torch.device(device)
    measured = measure_rounds(nodes, first_rounds(nodes), team, device, clock)
    cluster = cluster_of(measured, "", measure_call(team, device, clock))
    assert cluster is not None, "nodes are equal"
    return cluster


def measure_rounds(
    nodes: Sequence[Sequence[int]],
    schedule: Sequence[Sequence[Pair]],
    team: Team,
    device: torch.device,
    clock: Clock = time.perf_counter,
) -> MeasuredLinks:
    """Measure the pairs of a schedule's rounds, then what is left to each rank and node when all send at once.

    A pair that seems slow is measured again in its round, under the same load, and the best counts: what is slow by
    chance is not slow three times.  Of all at once the slowest counts, as in collectives.
    """
    pairs, made = measure_pairs(schedule, team, device, LINK_SECONDS, clock)
    measured = MeasuredLinks(nodes, pairs, device.type, made, len(schedule))
    for _ in range(TRIES - 1):
        odd = suspects(measured)
        again = [one for one in schedule[:made] if odd & set(one)]
        if not again:
            break
        better, _ = measure_pairs(again, team, device, AGAIN_SECONDS, clock)
        measured = replace(measured, pairs=_merged(measured.pairs, better))
    if within := measured.of_kind("within"):
        rates = measure_at_once(nodes, within, team, device, clock)
        measured = replace(measured, shared=min(rates.values()))
    if between := measured.of_kind("between"):
        rings = [[node[at] for node in nodes if at < len(node)] for at in range(max(map(len, nodes)))]
        rates = measure_at_once(rings, between, team, device, clock)
        of_nodes = ([rates[rank] for rank in node if rank in rates] for node in nodes)
        measured = replace(measured, node_bandwidth=min(len(own) * min(own) for own in of_nodes))
    return measured


def _merged(pairs: Sequence[PairLink], again: Sequence[PairLink]) -> list[PairLink]:
    """Return pairs, the better of two measurements of those that were measured again."""
    by_pair: dict[Pair, PairLink] = {(one.first, one.second): one for one in again}
    return [one.better(by_pair[one.first, one.second]) if (one.first, one.second) in by_pair else one for one in pairs]
