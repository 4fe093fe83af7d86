"""The probe of links: the measured pairs, the resulting cluster, and the links that are reported."""

from dataclasses import replace
from itertools import count, pairwise

import pytest
import torch.distributed as dist

from tests.cluster.wards import quick  # noqa: F401
from tests.ranks import run_ranks
from warpfold.cluster.links import MeasuredLinks, PairLink, measure_cluster, nodes_of
from warpfold.cluster.rules import judge
from warpfold.cluster.subjects import link_subjects
from warpfold.cost.links import Cluster, Link, Placement, collective_seconds
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.team import ProcessInfo, Team


def healthy(nodes: int, per_node: int) -> MeasuredLinks:
    """Return links of 10 µs and 10 GB/s within nodes, and of 30 µs and 2 GB/s between them."""
    there = [list(range(node * per_node, (node + 1) * per_node)) for node in range(nodes)]
    pairs = [PairLink(node[i], node[i + 1], 10e-6, 10e9) for node in there for i in range(per_node - 1)]
    pairs += [PairLink(a, b, 30e-6, 2e9) for left, right in pairwise(there) for a, b in zip(left, right)]
    return MeasuredLinks(there, "cuda", pairs, 10e9, [2e9 * per_node] * nodes if nodes > 1 else [], 80e-6)


def said(links: MeasuredLinks, promised: Link | None = None, *outcomes: str) -> list[str]:
    subjects = {"ranks": [], "gpus": [], **link_subjects(links, promised, ["a", "b", "c", "d"])}
    findings = [finding for finding in judge(subjects) if finding.topic == "links"]
    return [finding.says for finding in findings if finding.outcome in (outcomes or ("wrong", "note"))]


def test_nodes_need_not_have_the_same_size() -> None:
    assert nodes_of([0, 1, 2, 0, 1]) == [[0, 1, 2], [3, 4]]


# ---- the rules


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 2), (1, 8), (2, 1), (2, 2), (3, 1), (4, 8)])
def test_healthy_links_are_green(nodes: int, per_node: int) -> None:
    links = healthy(nodes, per_node)
    assert not said(links)
    if nodes > 1:
        figures = said(links, None, "ok")
        assert any(says.startswith("2 GB/s, latency 30 µs") for says in figures)
        assert f"{2 * per_node} GB/s or more to another node while all ranks send" in figures


def test_a_slow_pair_is_named_with_its_figures() -> None:
    links = healthy(2, 4)
    slow = [replace(pair, bandwidth=6e8) if pair.first == 1 and pair.second == 5 else pair for pair in links.pairs]
    assert said(replace(links, pairs=slow)) == ["ranks 1 and 5: 0.6 GB/s, the median is 2 GB/s"]


def test_a_busy_processor_is_no_broken_link() -> None:
    links = replace(healthy(1, 4), device="cpu")
    slow = [replace(pair, bandwidth=6e8) if pair.first == 1 else pair for pair in links.pairs]
    assert not said(replace(links, pairs=slow))


def test_a_network_that_gives_less_than_promised_is_named() -> None:
    # A node's total is 8 GB/s.
    links = healthy(2, 4)
    assert not said(links, Link(30e-6, 14e9))
    (says,) = said(links, Link(30e-6, 40e9))
    assert says.startswith("node 0 (a), node 1 (b): 8 GB/s to another node")
    assert says.endswith("the network should give 40 GB/s")
    (says,) = said(replace(links, node_bandwidths=[8e9, 1e7]))
    assert says.startswith("node 1 (b): 0.01 GB/s")
    assert says.endswith("slower than Gigabit Ethernet")


# ---- the cluster


def test_the_cluster_is_what_was_measured() -> None:
    cluster = healthy(2, 4).cluster("H100")
    assert cluster is not None
    assert (cluster.ranks, cluster.per_node, cluster.how, cluster.device) == (8, 4, "measured", "H100")
    assert cluster.within == Link(10e-6, 10e9)
    assert cluster.between == Link(30e-6, 8e9), "of a whole node"
    assert cluster.call == pytest.approx(30e-6)
    assert collective_seconds("all_gather", 0.0, Placement(8, 4), cluster) == pytest.approx(80e-6), "as it was measured"
    assert cluster.library == "nccl"
    processors = replace(healthy(2, 4), device="cpu", call=1e-3).cluster("EPYC")
    assert processors is not None
    assert processors.library == "gloo"
    assert collective_seconds("all_gather", 0.0, Placement(8, 4), processors) == pytest.approx(1e-3)
    one_node = healthy(1, 4).cluster("H100")
    assert one_node is not None
    assert one_node.between == one_node.within
    assert replace(healthy(2, 2), nodes=[[0, 1, 2], [3]]).cluster() is None


def probed(per_node: int, slow: int = -1) -> Cluster:
    """Measure with a clock that advances by 1 s with every reading, or by 4 s on one rank, which then appears slow."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    team = Team(ProcessInfo(rank, ranks, ranks_per_node=per_node), make_mesh(data=ranks))
    return measure_cluster(team, "cpu", count(0, 4 if rank == slow else 1).__next__)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("ranks", "per_node", "expected"), [(2, 2, 2), (2, 1, 1), (4, 2, 2), (3, 2, 1), (2, 8, 2)])
def test_all_ranks_find_the_same_cluster(ranks: int, per_node: int, expected: int) -> None:
    clusters = run_ranks(probed, ranks, per_node)
    assert clusters == [clusters[0]] * ranks
    cluster = clusters[0]
    assert (cluster.ranks, cluster.per_node, cluster.how) == (ranks, expected, "measured")
    # The latency is half of the round trip.
    assert cluster.within.latency == cluster.between.latency == 0.5
    assert cluster.call > 0
    # The ranks of a node share its link.
    if 1 < expected < ranks:
        assert cluster.between.bandwidth == pytest.approx(expected * cluster.within.bandwidth, rel=0.01)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("per_node", [4, 1])
def test_the_slowest_rank_counts_as_in_collectives(per_node: int) -> None:
    (even, *_), (uneven, *_) = run_ranks(probed, 4, per_node), run_ranks(probed, 4, per_node, 3)
    assert uneven.between.bandwidth < 0.2 * even.between.bandwidth
    assert uneven.within.bandwidth < 0.2 * even.within.bandwidth
