"""What ranks measure of their links when a run begins: the same on all of them, with a clock that is given."""

from itertools import count

import pytest
import torch.distributed as dist

from tests.cluster.wards import quick  # noqa: F401
from tests.ranks import run_ranks
from warpfold.cluster.probe import measure_cluster
from warpfold.cost.links import Cluster
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.team import ProcessInfo, Team

pytestmark = pytest.mark.usefixtures("quick")


def probed(per_node: int, slow: int = -1) -> Cluster:
    """Measure with a clock that moves on by 1 s whenever it is read; of one rank, which seems slow, by 4 s."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    team = Team(ProcessInfo(rank, ranks, ranks_per_node=per_node), make_mesh(data=ranks))
    return measure_cluster(team, "cpu", count(0, 4 if rank == slow else 1).__next__)


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


@pytest.mark.parametrize("per_node", [4, 1])
def test_the_slowest_rank_counts_as_in_collectives(per_node: int) -> None:
    (even, *_), (uneven, *_) = run_ranks(probed, 4, per_node), run_ranks(probed, 4, per_node, 3)
    assert uneven.between.bandwidth < 0.2 * even.between.bandwidth
    assert uneven.within.bandwidth < 0.2 * even.within.bandwidth
