"""The grid of ranks and its groups."""

import math
import os
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from warpfold.errors import UserError
from warpfold.parallel import heartbeat
from warpfold.parallel.exchange import make_hierarchical
from warpfold.parallel.mesh import NCCL_WATCHDOG_DELAY, Mesh, coordinates, make_mesh, set_timeouts

GROUPS = ("data", "axial", "branch", "model", "world")


def test_branch_ranks_are_neighbours_then_axial_then_data() -> None:
    assert [coordinates(rank, 2, 2, 2) for rank in (0, 1, 2, 4)] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 3, 2), (3, 1, 1)])
def test_groups_are_the_lines_of_the_grid(sizes: tuple[int, int, int]) -> None:
    data, axial, branch = sizes

    def on_a_rank() -> dict[str, tuple[int, ...]]:
        first, all_reduce = list[dist.ProcessGroup](), dist.all_reduce

        def spy(x: torch.Tensor, group: dist.ProcessGroup) -> None:
            first.append(group)
            all_reduce(x, group=group)

        dist.all_reduce = spy
        mesh, found = make_mesh(*sizes), {}
        # Each group has run its first collective in a common order before any backward pass. Otherwise NCCL would
        # create a communicator while collectives of other groups are in flight.
        assert {id(one) for one in first} == {id(getattr(mesh, name).handle) for name in GROUPS} - {id(None)}
        found["first"] = tuple(len(dist.get_process_group_ranks(group)) for group in first)
        for name in GROUPS:
            group = getattr(mesh, name)
            assert (group.name, group.size) == (name, len(group.ranks))
            assert group.ranks[group.rank] == dist.get_rank()
            assert (group.handle is None) == (group.size == 1)
            # Ranks of a group communicate with each other, and with no other rank.
            if group.handle:
                total = torch.tensor(2 ** dist.get_rank())
                dist.all_reduce(total, group=group.handle)
                assert total == sum(2**rank for rank in group.ranks)
            found[name] = group.ranks
        return found

    every = run_ranks(on_a_rank, data * axial * branch)
    assert len({found.pop("first") for found in every}) == 1
    for rank, found in enumerate(every):
        d, a, b = coordinates(rank, *sizes)
        number = {coordinates(other, *sizes): other for other in range(data * axial * branch)}
        assert found == {
            "data": tuple(number[i, a, b] for i in range(data)),
            "axial": tuple(number[d, i, b] for i in range(axial)),
            "branch": tuple(number[d, a, i] for i in range(branch)),
            "model": tuple(number[d, i, j] for i in range(axial) for j in range(branch)),
            "world": tuple(range(data * axial * branch)),
        }


def sockets() -> int:
    """Return the open connections of this process."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith("socket:") for link in links if link.is_symlink())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open connections are counted in /proc")
@pytest.mark.parametrize(
    ("sizes", "groups", "peers"),
    [
        # data = world = torch's initial group: no further connections.
        ((3, 1, 1), 1, 0),
        # Slices and gradients use separate groups.
        ((1, 3, 1), 2, 2),
        ((2, 2, 1), 4, 3),  # world, data, model, axial
        ((1, 2, 2), 3, 2),  # world = model, axial, branch
    ],
)
def test_groups_of_the_same_ranks_share_their_connections(sizes: tuple[int, int, int], groups: int, peers: int) -> None:
    def opened() -> tuple[int, int, list[bool]]:
        before = sockets()
        mesh = make_mesh(*sizes)
        same = [mesh.data.handle is mesh.world.handle, mesh.model.handle is mesh.world.handle]
        return len(dist.distributed_c10d._world.pg_map), sockets() - before, same

    for made, connections, same in run_ranks(opened, math.prod(sizes)):
        assert made == groups
        # One to each other rank, and one to listen.
        assert connections == peers + groups - 1
        assert same == [sizes[1] * sizes[2] == 1, sizes[0] == 1]


@pytest.mark.parametrize("nccl", [False, True])
def test_a_group_gives_up_in_time_and_nccl_s_watchdog_comes_after(nccl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the time-outs set in torch: the plan's for gloo, also if it serves GPUs, and a longer one for NCCL."""
    gloo = Mock()
    backends = {"cpu": gloo, "cuda": Mock() if nccl else gloo}
    config = "cpu:gloo,cuda:nccl" if nccl else "cpu:gloo,cuda:gloo"
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    handle = Mock()
    handle._get_backend.side_effect = lambda device: backends[device.type]
    set_timeouts(handle, 5.0)
    assert backends["cpu"].set_timeout.call_args == call(timedelta(seconds=5))
    if nccl:
        assert backends["cuda"].set_timeout.call_args == call(timedelta(seconds=5 + NCCL_WATCHDOG_DELAY))
        assert heartbeat.GRACE * 2 < NCCL_WATCHDOG_DELAY


def test_every_group_gives_up_after_the_limit_of_the_mesh() -> None:
    """Including torch's initial group, and the groups of hierarchical sums."""

    def seconds() -> dict[str, float]:
        mesh = make_mesh(4, limit=0.5)
        made = make_hierarchical(mesh, 2)
        groups = {"world": mesh.world, "node": made.within.wire.group, "nodes": made.between.wire.group}
        found = {}
        for name, group in groups.items():
            if group.rank == 0:  # the others never arrive
                began = time.monotonic()
                with pytest.raises(RuntimeError):
                    dist.all_reduce(torch.ones(1), group=group.handle)
                found[name] = time.monotonic() - began
        return found

    found = run_ranks(seconds, 4)[0]
    assert found.keys() == {"world", "node", "nodes"}
    assert all(0.4 < each < 5 for each in found.values()), found  # 5: a busy machine


@pytest.mark.parametrize(("sizes", "says"), [((1, 3, 1), "torchrun --nproc-per-node 3"), ((8, 4, 2), "64 processes")])
def test_a_grid_that_the_processes_do_not_fill_is_refused(sizes: tuple[int, int, int], says: str) -> None:
    with pytest.raises(UserError, match=says) as refusal:
        make_mesh(*sizes)
    assert "there are 1" in str(refusal.value)
    assert make_mesh() == Mesh()
    assert "\n" not in str(refusal.value)
