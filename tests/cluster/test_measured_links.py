"""Links: schedules of pairs are whole, a bad link of any kind is named, healthy noise is not."""

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations, count
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.wards import quick  # noqa: F401
from tests.ranks import run_ranks
from warpfold.cluster.findings import WRONG, ClusterFinding
from warpfold.cluster.judge_links import draw, find_slow, judge_links, link_rows, matrices
from warpfold.cluster.links import (
    ALL_PAIRS,
    MEETINGS,
    MeasuredLinks,
    Pair,
    PairLink,
    circle,
    cluster_of,
    counted,
    first_rounds,
    measure_cluster,
    nodes_of,
    read_counters,
    rounds,
)
from warpfold.cost.links import Cluster, Link, Placement, collective_seconds
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.team import ProcessInfo, Team

shapes = st.tuples(st.integers(1, 6), st.integers(1, 8))  # nodes, ranks on each


def nodes_like(nodes: int, per_node: int) -> list[list[int]]:
    return [list(range(node * per_node, (node + 1) * per_node)) for node in range(nodes)]


def healthy(nodes: int, per_node: int) -> MeasuredLinks:
    """Links of 10 µs and 10 GB/s within nodes, 30 µs and 2 GB/s between them."""
    names = nodes_like(nodes, per_node)
    node = [number for number, ranks in enumerate(names) for _ in ranks]
    pairs = []
    for a, b in combinations(range(nodes * per_node), 2):
        latency, rate = (10e-6, 10e9) if node[a] == node[b] else (30e-6, 2e9)
        pairs.append(PairLink(a, b, latency, 1.1 * latency, 1.3 * latency, 0, 40, rate, rate))
    between = 2e9 * per_node if nodes > 1 else None
    return MeasuredLinks(names, pairs, "cuda", 3, 3, node_bandwidth=between, clocks=[(0.0, 1e-4)] * nodes,
                    lost=[(10_000, 0)] * nodes, errors=[{}] * nodes)  # fmt: skip


def changed(measured: MeasuredLinks, pairs: set[Pair], **factors: float) -> MeasuredLinks:
    """The same with some quantities of some pairs times a factor."""
    found = [
        replace(one, **{name: getattr(one, name) * factor for name, factor in factors.items()})
        if one.ends in pairs
        else one
        for one in measured.pairs
    ]
    return replace(measured, pairs=found)


def bad(findings: list[ClusterFinding], *outcomes: str) -> list[str]:
    return [one.says for one in findings if one.outcome in (outcomes or ("wrong",))]


# ---- rounds


@given(st.integers(1, 40))
def test_in_a_circle_each_meets_every_other_once(count: int) -> None:
    found = circle(count)
    assert Counter(pair for pairs in found for pair in pairs) == Counter(combinations(range(count), 2))
    assert len(found) == (0 if count == 1 else count - 1 + count % 2)
    assert all(len({one for pair in pairs for one in pair}) == 2 * len(pairs) for pairs in found)


@given(shapes)
def test_rounds_are_of_disjoint_pairs_and_hold_every_pair_once(shape: tuple[int, int]) -> None:
    nodes = nodes_like(*shape)
    found = rounds(nodes)
    ranks = shape[0] * shape[1]
    assert Counter(pair for pairs in found for pair in pairs) == Counter(combinations(range(ranks), 2))
    for pairs in found:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)
        assert len({a // shape[1] == b // shape[1] for a, b in pairs}) == 1, "links within and between share nothing"
    if not (shape[0] % 2 or shape[1] % 2):
        assert len(found) == ranks - 1


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 40), (9, 8), (256, 8), (100, 1)])
def test_of_many_ranks_a_sample_meets_every_rank_and_node(nodes: int, per_node: int) -> None:
    there = nodes_like(nodes, per_node)
    found = rounds(there)
    assert nodes * per_node > ALL_PAIRS
    assert len(found) <= per_node + MEETINGS + 8
    between = [pair for pairs in found for pair in pairs if pair[0] // per_node != pair[1] // per_node]
    assert 2 * len(between) < nodes * nodes * per_node * per_node
    assert min(Counter(rank for pair in between for rank in pair).values()) >= 2
    if nodes <= MEETINGS:
        both = {(a // per_node, b // per_node) for a, b in between}
        assert both == set(combinations(range(nodes), 2)), "a slow link between any two nodes is met"


@given(shapes)
def test_the_first_rounds_meet_a_rank_of_the_node_and_one_of_another(shape: tuple[int, int]) -> None:
    found = first_rounds(nodes_like(*shape))
    kinds = [{a // shape[1] == b // shape[1] for a, b in pairs} for pairs in found]
    assert kinds == [{True}] * (shape[1] > 1) + [{False}] * (shape[0] > 1)
    if not (shape[0] % 2 or shape[1] % 2):
        assert all(2 * len(pairs) == shape[0] * shape[1] for pairs in found), "every rank is in each"


def test_nodes_need_not_be_equal() -> None:
    nodes = nodes_of([0, 1, 2, 0, 1])
    assert nodes == [[0, 1, 2], [3, 4]]
    assert Counter(pair for pairs in rounds(nodes) for pair in pairs) == Counter(combinations(range(5), 2))


# ---- slow ones


@given(st.data(), st.integers(3, 9))
def test_any_slow_pair_is_found_and_nothing_else_is_wrong(data: st.DataObject, ranks: int) -> None:
    pairs, measured = list(combinations(range(ranks), 2)), healthy(1, ranks)

    def of_usual(speeds: dict[Pair, float]) -> dict[Pair, float]:
        links = [replace(one, forth=speeds[one.ends], back=speeds[one.ends]) for one in measured.pairs]
        return replace(measured, pairs=links).speeds("within")["bandwidth"]

    speeds = {pair: data.draw(st.floats(0.7, 1.3)) for pair in pairs}
    assert min(of_usual(speeds).values()) >= WRONG
    odd = data.draw(st.sampled_from(pairs))
    shares = of_usual({**speeds, odd: speeds[odd] / 3})
    assert odd in {pair for one in find_slow(shares, measured) for pair in one.pairs}
    assert {pair for pair, share in shares.items() if share < WRONG} <= {odd}
    together = data.draw(st.integers(0, ranks - 1))
    even = {pair: data.draw(st.floats(0.85, 1.15)) / (3 if together in pair else 1) for pair in pairs}
    (one,) = find_slow(of_usual(even), measured)
    assert one.name.startswith(f"rank {together} with ")
    assert len(one.pairs) == ranks - 1


@pytest.mark.parametrize(("odd", "name", "links"), [({2}, "node 2", 12), ({1, 3}, "nodes 1 and 3", 4)])
def test_slow_nodes_are_named_by_node(odd: set[int], name: str, links: int) -> None:
    measured = healthy(4, 2)
    node = measured.node_of
    both = {(a, b): {node[a], node[b]} for a, b in combinations(range(8), 2) if node[a] != node[b]}
    (one,) = find_slow({pair: 0.2 if odd <= nodes else 1.0 for pair, nodes in both.items()}, measured)
    assert (one.name, len(one.pairs)) == (name, links)


# ---- what is said


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 2), (1, 8), (2, 1), (2, 2), (3, 1), (4, 8)])
def test_healthy_links_are_green(nodes: int, per_node: int) -> None:
    measured = healthy(nodes, per_node)
    found = judge_links(measured)
    assert not bad(found, "wrong", "note")
    assert not measured.suspects
    assert all(one.topic == "links" for one in found)


@given(st.data())
def test_healthy_noise_is_not_wrong(data: st.DataObject) -> None:
    measured = healthy(2, 2)
    noise = st.floats(0.7, 1.3)
    pairs = [
        replace(one, latency=one.latency * data.draw(noise), forth=one.forth * data.draw(noise),
                back=one.back * data.draw(noise))
        for one in measured.pairs
    ]  # fmt: skip
    pairs = [replace(one, usual=2 * one.latency, late=3 * one.latency) for one in pairs]
    assert not bad(judge_links(replace(measured, pairs=pairs)))


def test_a_slow_pair_is_named_with_its_figures() -> None:
    measured = changed(healthy(2, 4), {(1, 6)}, forth=0.3, back=0.3)
    assert measured.suspects == {(1, 6)}
    (says,) = bad(judge_links(measured))
    assert says == "ranks 1 and 6: 0.6 GB/s, usual is 2 GB/s"


def test_a_late_rank_is_named() -> None:
    mine = {pair for pair in combinations(range(8), 2) if 5 in pair}
    (says,) = bad(judge_links(changed(healthy(1, 8), mine, latency=20, usual=20, late=20)))
    assert says.startswith("rank 5 with ranks 0 to 4, 6 and 7: 200 µs, usual is 10 µs")


def test_a_slow_direction_is_named() -> None:
    one_pair = changed(healthy(1, 4), {(0, 2)}, back=0.2)
    assert bad(judge_links(one_pair)) == ["from rank 2 to rank 0: 2 GB/s, the other way 10 GB/s"]
    assert one_pair.suspects == {(0, 2)}
    away = {pair for pair in combinations(range(4), 2) if pair[0] < 2 <= pair[1]}
    nodes = changed(healthy(2, 2), away, forth=0.2)
    assert bad(judge_links(nodes)) == ["from node 0 to node 1: 0.4 GB/s, the other way 2 GB/s"]
    sends = changed(changed(healthy(1, 4), {(1, 2), (1, 3)}, forth=0.2), {(0, 1)}, back=0.2)
    assert bad(judge_links(sends)) == ["from rank 1: 2 GB/s, the other way 10 GB/s"]


def test_lost_packets_are_named() -> None:
    found = judge_links(replace(healthy(2, 2), lost=[(10_000, 0), (10_000, 300)]))
    assert bad(found) == ["node 1: 300 of 10000 packets (3.0%) were lost and sent again"]
    found = judge_links(replace(healthy(1, 2), lost=[(10_000, 300)]))
    assert not bad(found, "wrong", "note"), "nothing gets lost within a node"
    found = judge_links(replace(healthy(2, 2), errors=[{}, {"mlx5_0 port 1 symbol_error": 12}]))
    assert "symbol_error counted 12" in bad(found, "note")[0]


def test_stalls_are_named() -> None:
    measured = healthy(2, 2)
    stalled = replace(measured, pairs=[replace(measured.pairs[0], stalls=8), *measured.pairs[1:]])
    assert "8 of 40 round trips" in bad(judge_links(stalled))[0]
    everywhere = replace(measured, pairs=[replace(one, stalls=8) for one in measured.pairs])
    assert not bad(judge_links(everywhere)), "a machine that is busy stops all of its ranks"


def test_one_in_ten_that_is_late_is_a_note() -> None:
    found = judge_links(changed(healthy(1, 4), {(0, 1)}, late=100))
    assert not bad(found)
    assert "one in ten messages takes more than 1.3 ms" in bad(found, "note")[0]


@pytest.mark.parametrize(("latency", "outcome"), [(5e-3, "wrong"), (1e-3, "note"), (3e-4, "")])
def test_nodes_that_are_far_apart(latency: float, outcome: str) -> None:
    measured = healthy(2, 2)
    between = {(one.first, one.second) for one in measured.of_kind("between")}
    found = [replace(one, latency=latency, usual=latency, late=latency) if (one.first, one.second) in between else one
             for one in measured.pairs]  # fmt: skip
    said = [one.outcome for one in judge_links(replace(measured, pairs=found)) if one.check == "distance of nodes"]
    assert said == [outcome] * bool(outcome)


def test_a_network_that_does_not_give_what_it_promises() -> None:
    measured = healthy(2, 4)  # 8 GB/s of a node
    assert not bad(judge_links(measured, Link(30e-6, 10e9)), "wrong", "note")
    assert "should give 14 GB/s" in bad(judge_links(measured, Link(30e-6, 14e9)), "note")[0]
    assert "should give 40 GB/s" in bad(judge_links(measured, Link(30e-6, 40e9)))[0]
    assert "slower than Gigabit Ethernet" in bad(judge_links(replace(measured, node_bandwidth=1e7)))[0]


def test_collectives_are_held_against_links() -> None:
    def said(device: str, times: float) -> str:
        one = {"kind": "all_to_all", "sent": 1e9, "seconds": times, "expected": 1.0}
        found = judge_links(replace(healthy(1, 4), device=device, collectives=[one]))
        return next(one.outcome for one in found if one.check == "all-to-all of all ranks")

    assert [said("cuda", times) for times in (1.0, 3.0, 10.0)] == ["ok", "note", "wrong"]
    assert said("cpu", 10.0) == "ok", "processors that share their cores are slower than a pair of them"


@pytest.mark.parametrize(("ahead", "outcome"), [(35.0, "wrong"), (-35.0, "wrong"), (0.4, "note"), (0.01, "ok")])
def test_clocks_that_are_apart(ahead: float, outcome: str) -> None:
    found = judge_links(replace(healthy(3, 1), clocks=[(0.0, 0.0), (0.001, 1e-3), (ahead, 1e-3)]))
    (one,) = (one for one in found if one.check == "clocks of nodes")
    assert one.outcome == outcome
    if outcome != "ok":
        assert one.says.startswith("node 2's is")
        assert ("ahead of" if ahead > 0 else "behind") in one.says


def test_the_cluster_is_what_was_measured() -> None:
    found = cluster_of(healthy(2, 4), "H100", call=80e-6)
    assert found is not None
    assert (found.ranks, found.per_node, found.how, found.device) == (8, 4, "measured", "H100")
    assert found.within == Link(10e-6, 10e9)
    assert found.between == Link(30e-6, 8e9), "of a whole node"
    assert found.call == pytest.approx(30e-6)
    assert collective_seconds("all_gather", 0.0, Placement(8, 4), found) == pytest.approx(80e-6), "as it was measured"
    assert found.library == "nccl"
    processors = cluster_of(replace(healthy(2, 4), device="cpu"), "EPYC", call=1e-3)
    assert processors is not None
    assert processors.library == "gloo"
    assert collective_seconds("all_gather", 0.0, Placement(8, 4), processors) == pytest.approx(1e-3)
    alone = cluster_of(healthy(1, 4), "H100", 1e-3)
    assert alone is not None
    assert alone.between == alone.within
    assert cluster_of(replace(healthy(2, 2), nodes=[[0, 1, 2], [3]]), "", 1e-3) is None


def test_many_slow_pairs_are_not_all_said() -> None:
    measured = healthy(1, 32)
    odd = {(a, b) for a, b in combinations(range(32), 2) if (a * b) % 5 == 1}
    said = [
        one for one in judge_links(changed(measured, odd, forth=0.3, back=0.3)) if one.check.startswith("bandwidth")
    ]
    assert len(said) == 9
    assert f"{len(odd) - 8} more are slower" in said[-1].says


# ---- drawn


def test_few_links_are_drawn_with_figures_and_many_as_shades() -> None:
    bandwidth, latency = matrices(changed(healthy(2, 2), {(0, 1)}, forth=0.3))
    assert bandwidth.values[0][1] == pytest.approx(3.0)
    assert bandwidth.values[1][0] == pytest.approx(10.0)
    assert math.isnan(latency.values[2][2])
    lines = draw(bandwidth)
    assert "0      1      2      3" in lines[1]
    assert "3█" in lines[2]
    shades = draw(matrices(healthy(2, 16))[0])
    assert len(shades) == 2 + 32 + 1
    assert (shades[2 + 5].index("·"), shades[2 + 20].index("·")) == (3 + 5, 3 + 20)
    by_node = matrices(healthy(20, 4))[0]
    assert len(by_node.names) == 20
    assert "nodes" in by_node.title
    assert by_node.values[0][1] == pytest.approx(2.0)


def test_the_table_has_each_kind_of_link() -> None:
    rows = link_rows(healthy(2, 2))
    assert [row[0] for row in rows] == [
        "latency within a node", "bandwidth within a node", "latency between nodes", "bandwidth between nodes",
        "bandwidth of a whole node",
    ]  # fmt: skip


def test_the_picture_is_an_svg_or_a_png() -> None:
    from warpfold.report.figures import draw_links

    shown = matrices(healthy(2, 2))
    assert draw_links(shown).startswith(b"<svg")
    assert draw_links(shown, "png").startswith(b"\x89PNG")


# ---- counters


def fake_root(root: Path, sent: int, again: int, late: int, symbol_errors: int) -> Path:
    for file, text in {
        "proc/self/net/snmp": f"Tcp: OutSegs RetransSegs\nTcp: {sent} {again}\nUdp: InErrors\nUdp: 0\n",
        "proc/self/net/netstat": f"TcpExt: TCPDSACKRecv TCPDSACKRecvSegs\nTcpExt: 3 {late}\nIpExt: A\nIpExt: 0\n",
        "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error": f"{symbol_errors}\n",
        "sys/class/net/eth0/statistics/rx_crc_errors": "0\n",
    }.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    return root


def test_counters_are_read_and_compared(tmp_path: Path) -> None:
    before = read_counters(fake_root(tmp_path, 100, 1, 0, 7))
    after = read_counters(fake_root(tmp_path, 1100, 231, 200, 9))
    assert counted(before, after) == ((1000, 30), {"mlx5_0 port 1 symbol_error": 2}), "what was late is not lost"
    assert counted(after, read_counters(fake_root(tmp_path, 1200, 231, 210, 9))) == ((100, 0), {})
    (tmp_path / "proc/self/net/netstat").unlink()
    assert read_counters(tmp_path)["tcp lost"] == 231
    assert read_counters(tmp_path / "nowhere") == {}


# ---- what a run measures when it begins


def probed(per_node: int, slow: int = -1) -> Cluster:
    """Measure with a clock that moves on by 1 s whenever it is read; of one rank, which seems slow, by 4 s."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    team = Team(ProcessInfo(rank, ranks, ranks_per_node=per_node), make_mesh(data=ranks))
    return measure_cluster(team, "cpu", count(0, 4 if rank == slow else 1).__next__)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("ranks", "per_node", "expected"), [(2, 2, 2), (2, 1, 1), (4, 2, 2), (3, 2, 1), (2, 8, 2)])
def test_all_ranks_find_the_same_cluster(ranks: int, per_node: int, expected: int) -> None:
    found = run_ranks(probed, ranks, per_node)
    assert found == [found[0]] * ranks
    cluster = found[0]
    assert (cluster.ranks, cluster.per_node, cluster.how) == (ranks, expected, "measured")
    assert cluster.within.latency == cluster.between.latency == 0.5  # half of a round trip
    assert cluster.call > 0
    if 1 < expected < ranks:  # the ranks of a node share what joins it to others
        assert cluster.between.bandwidth == pytest.approx(expected * cluster.within.bandwidth, rel=0.01)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("per_node", [4, 1])
def test_the_slowest_rank_counts_as_in_collectives(per_node: int) -> None:
    (even, *_), (uneven, *_) = run_ranks(probed, 4, per_node), run_ranks(probed, 4, per_node, 3)
    assert uneven.between.bandwidth < 0.2 * even.between.bandwidth
    assert uneven.within.bandwidth < 0.2 * even.within.bandwidth
