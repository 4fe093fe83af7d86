"""Ranks in a grid: who speaks to whom."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from warpfold.errors import UserError
from warpfold.parallel.mesh import Mesh, make_mesh, place

GROUPS = ("data", "axial", "branch", "model", "world")


def test_alone_every_group_has_one_member() -> None:
    mesh = make_mesh()
    assert mesh == Mesh()
    assert all(getattr(mesh, name).size == 1 for name in GROUPS)


def test_branch_ranks_are_neighbours_then_axial_then_data() -> None:
    assert [place(rank, 2, 2, 2) for rank in (0, 1, 2, 4)] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 3, 2), (3, 1, 1)])
def test_groups_are_the_lines_of_the_grid(sizes: tuple[int, int, int]) -> None:
    data, axial, branch = sizes

    def on_a_rank() -> dict[str, tuple[int, ...]]:
        mesh, found = make_mesh(*sizes), {}
        for name in GROUPS:
            group = getattr(mesh, name)
            assert (group.name, group.size) == (name, len(group.ranks))
            assert group.ranks[group.rank] == dist.get_rank()
            assert (group.handle is None) == (group.size == 1)
            if group.handle:  # they do speak to each other, and to nobody else
                total = torch.tensor(2 ** dist.get_rank())
                dist.all_reduce(total, group=group.handle)
                assert total == sum(2**rank for rank in group.ranks)
            found[name] = group.ranks
        return found

    for rank, found in enumerate(run_ranks(on_a_rank, data * axial * branch)):
        d, a, b = place(rank, *sizes)
        number = {place(other, *sizes): other for other in range(data * axial * branch)}
        assert found == {
            "data": tuple(number[i, a, b] for i in range(data)),
            "axial": tuple(number[d, i, b] for i in range(axial)),
            "branch": tuple(number[d, a, i] for i in range(branch)),
            "model": tuple(number[d, i, j] for i in range(axial) for j in range(branch)),
            "world": tuple(range(data * axial * branch)),
        }


@pytest.mark.parametrize(("sizes", "says"), [((1, 3, 1), "torchrun --nproc-per-node 3"), ((8, 4, 2), "64 processes")])
def test_a_grid_that_the_processes_do_not_fill_is_refused(sizes: tuple[int, int, int], says: str) -> None:
    with pytest.raises(UserError, match=says) as refusal:
        make_mesh(*sizes)
    assert "there are 1" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_so_is_one_that_is_too_small_for_them() -> None:
    def on_a_rank() -> None:
        with pytest.raises(UserError, match="needs 1 processes, there are 2"):
            make_mesh()

    run_ranks(on_a_rank, 2)
