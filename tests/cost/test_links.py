"""Clusters: their files, the location of the ranks of a grid, and invariants of the times of collectives."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpfold.cost.links import (
    Cluster,
    GroupName,
    Kind,
    Link,
    Placement,
    collective_seconds,
    network,
    place,
    read_cluster,
)
from warpfold.errors import UserError
from warpfold.parallel.mesh import coordinates

KINDS: tuple[Kind, ...] = get_args(Kind)
LIBRARIES = st.sampled_from(["nccl", "gloo"])
FAST, SLOW = Link(1e-6, 1e11), Link(1e-5, 1e9)
TWO_NODES = Cluster(ranks=8, per_node=4, within=FAST, between=SLOW)


def test_a_cluster_is_read_as_it_was_saved(tmp_path: Path) -> None:
    TWO_NODES.save(tmp_path / "cluster.toml")
    assert read_cluster(tmp_path / "cluster.toml") == TWO_NODES


def test_what_is_no_cluster_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("rank = 3\n")
    with pytest.raises(UserError, match="rank"):
        read_cluster(tmp_path / "other.toml")
    with pytest.raises(ValueError, match="at least 1"):
        Cluster(ranks=9, per_node=0, within=FAST, between=SLOW)
    assert Cluster(ranks=9, per_node=4, within=FAST, between=SLOW).nodes == 3


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("call", "-1e-05", "settings: call = -1e-05: it must be seconds"),
        ("within.bandwidth", "0.0", "within: bandwidth = 0: it must be bytes"),
        ("between.bandwidth", "-1e9", "between: bandwidth = -1e\\+09"),
        ("between.latency", "-1e-3", "between: latency = -0.001"),
        ("within.latency", "nan", "within.latency = nan: a finite number"),
    ],
)
def test_links_that_cannot_be_are_refused_by_key(tmp_path: Path, key: str, value: str, says: str) -> None:
    """Earlier, these values led to tracebacks, or were accepted."""
    values = {"ranks": "8", "per_node": "4", "call": "1e-05"}
    links = {f"{where}.{what}": "1e-05" for where in ("within", "between") for what in ("latency", "bandwidth")}
    text = "".join(f"{name} = {x}\n" for name, x in (values | links | {key: value}).items())
    (tmp_path / "cluster.toml").write_text(text)
    with pytest.raises(UserError, match=f"cluster.toml: {says}") as error:
        read_cluster(tmp_path / "cluster.toml")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "gigabits"), [("ib400", 8 * 400), ("IB200x4", 800), ("eth25", 25), ("roce100x2", 200), ("eth100x8", 800)]
)
def test_networks_by_name(text: str, gigabits: int) -> None:
    assert network(text, 8).bandwidth == pytest.approx(0.8 * gigabits * 1e9 / 8)


@given(*[st.sampled_from([1, 2, 4, 8])] * 2, st.sampled_from([1, 2]), st.sampled_from([1, 2, 4, 8]))
def test_groups_lie_where_the_mesh_puts_them(data: int, axial: int, branch: int, per_node: int) -> None:
    ranks = data * axial * branch
    cluster = Cluster(ranks=max(ranks, per_node), per_node=per_node, within=FAST, between=SLOW)
    varies = {"data": (0,), "axial": (1,), "branch": (2,), "model": (1, 2), "world": (0, 1, 2)}
    groups: tuple[GroupName, ...] = ("data", "axial", "branch", "model", "world")
    for name in groups:
        where = place(cluster, data, axial, branch, name)
        fixed = [i for i in range(3) if i not in varies[name]]
        own = [r for r in range(ranks) if all(coordinates(r, data, axial, branch)[i] == 0 for i in fixed)]
        on_nodes = Counter(rank // per_node for rank in own)
        assert (where.ranks, where.nodes, where.on_node) == (len(own), len(on_nodes), max(on_nodes.values()))
        there = {tuple(coordinates(r, data, axial, branch)[i] for i in fixed) for r in range(min(per_node, ranks))}
        assert where.sharing == len(there)


@given(st.sampled_from(KINDS), LIBRARIES, st.floats(0, 1e12), st.floats(1, 4))
def test_more_bytes_or_slower_links_never_take_less(
    kind: Kind, library: Literal["nccl", "gloo"], sent: float, factor: float
) -> None:
    where, cluster = Placement(ranks=8, on_node=4), replace(TWO_NODES, library=library)
    time = collective_seconds(kind, sent, where, cluster)
    slower = replace(cluster, between=Link(SLOW.latency * factor, SLOW.bandwidth / factor))
    assert time <= collective_seconds(kind, sent * factor, where, cluster)
    assert time <= collective_seconds(kind, sent, where, slower)
    assert time <= collective_seconds(kind, sent, Placement(8, 4, sharing=4), cluster)
    assert time >= cluster.call
    assert collective_seconds(kind, sent, Placement(1, 1), cluster) == 0


@given(
    st.sampled_from(KINDS), LIBRARIES, st.floats(0, 1e12), *[st.integers(1, 8)] * 4, st.integers(1, 4),
    st.tuples(st.floats(1e-7, 1e-3), st.floats(1e8, 1e12)), st.floats(1, 100), st.floats(0.001, 0.5),
)  # fmt: skip
def test_at_equal_bytes_each_more_ranks_never_take_less(
    kind: Kind, library: Literal["nccl", "gloo"], sent: float, nodes: int, each: int, more_nodes: int, more_each: int,
    beside: int, within: tuple[float, float], later: float, share: float,
) -> None:  # fmt: skip
    """More ranks on each node, or more equally full nodes, never reduce the time.

    The link between nodes is at most as fast as the link within one, and a rank's share of it is at most half of the
    bandwidth that the rank has within the node. Without the latter, an all-to-all on more nodes would move bytes from
    one link to the other, and two equally fast links together really are faster than one.
    """
    latency, bandwidth = within
    between = Link(later * latency, share * bandwidth * each * beside)
    most = (nodes + more_nodes) * (each + more_each)
    cluster = Cluster(ranks=most, per_node=each + more_each, within=Link(*within), between=between, library=library)
    few = Placement(nodes * each, each, beside)
    for many in (
        Placement(nodes * (each + more_each), each + more_each, beside),
        Placement((nodes + more_nodes) * each, each, beside),
        Placement(most, each + more_each, beside),
    ):
        time = collective_seconds(kind, sent, many, cluster)
        assert collective_seconds(kind, sent, few, cluster) <= time * (1 + 1e-9)


@pytest.mark.parametrize(
    ("ranks", "measured"),
    [
        (2, {"all_gather": 11.05, "reduce_scatter": 21.84, "all_reduce": 21.78, "all_to_all": 10.74}),
        (4, {"all_gather": 32.16, "reduce_scatter": 65.23, "all_reduce": 63.6, "all_to_all": 11.25}),
    ],
)
def test_small_collectives_of_gloo_take_what_they_took(ranks: int, measured: dict[Kind, float]) -> None:
    """Compare with milliseconds of gloo (torch 2.13) on two emulated nodes 5 ms apart; a message takes 5.35 ms."""
    cluster = Cluster(
        ranks=ranks, per_node=ranks // 2, within=Link(1e-4, 1e9), between=Link(5.35e-3, 1e8), call=2e-4, library="gloo"
    )
    for kind, milliseconds in measured.items():
        seconds = collective_seconds(kind, 4096.0, Placement(ranks, ranks // 2), cluster)
        assert seconds == pytest.approx(1e-3 * milliseconds, rel=0.05), kind


def test_a_reduce_scatter_of_gloo_sends_what_an_all_reduce_does() -> None:
    gloo, where = replace(TWO_NODES, library="gloo"), Placement(8, 4)
    scattered, reduced, gathered = (
        collective_seconds(kind, sent, where, gloo)
        for kind, sent in (("reduce_scatter", 1e10), ("all_reduce", 2e10), ("all_gather", 1e10))
    )
    assert scattered == reduced == pytest.approx(2 * gathered, rel=0.01)


def test_large_messages_take_what_their_slowest_link_takes() -> None:
    sent = 1e10
    within, across = Placement(4, 4), Placement(8, 4)
    assert collective_seconds("all_reduce", sent, within, TWO_NODES) == pytest.approx(sent / FAST.bandwidth, rel=0.01)
    assert collective_seconds("all_reduce", sent, across, TWO_NODES) == pytest.approx(sent / SLOW.bandwidth, rel=0.01)
    # Each of the four ranks of a node sends 4 of its 7 parts to the other node.
    crossing = 4 * sent * 4 / 7
    assert collective_seconds("all_to_all", sent, across, TWO_NODES) == pytest.approx(crossing / 1e9, rel=0.01)
