"""What ranks measure of their links when a run begins: the same on all of them, with a clock that is given."""

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.team import ProcessInfo, Team
from warpfold.tune.cluster.links import Cluster
from warpfold.tune.cluster.probe import measure_cluster


def probed(per_node: int) -> Cluster:
    ranks, now = dist.get_world_size(), iter(range(10**6))
    team = Team(ProcessInfo(dist.get_rank(), ranks, ranks_per_node=per_node), make_mesh(data=ranks))
    return measure_cluster(team, "cpu", lambda: next(now))


@pytest.mark.parametrize(("ranks", "per_node", "expected"), [(2, 2, 2), (2, 1, 1), (4, 2, 2), (3, 2, 1), (2, 8, 2)])
def test_all_ranks_find_the_same_cluster(ranks: int, per_node: int, expected: int) -> None:
    found = run_ranks(probed, ranks, per_node)
    assert found == [found[0]] * ranks
    cluster = found[0]
    assert (cluster.ranks, cluster.per_node, cluster.how) == (ranks, expected, "measured")
    assert cluster.within.latency == cluster.between.latency == 1.0  # each message takes a tick
    assert cluster.call > 0
    if 1 < expected < ranks:  # the ranks of a node share what joins it to others
        assert cluster.between.bandwidth == expected * cluster.within.bandwidth
