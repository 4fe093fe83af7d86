"""A team that met before its plan was known: other grids, work shared out as it is done, results in pieces."""

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parallel.test_team import FAILED, FINE, Crew, crew  # noqa: F401 (a fixture)
from tests.ranks import run_ranks
from warpfold.errors import UserError
from warpfold.parallel import team as module
from warpfold.parallel.collectives import all_gather, local_shard
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import ProcessInfo, Team, distributed_context


def test_processes_work_alone_and_then_together(crew: Crew) -> None:  # noqa: F811
    def work(team: Team) -> None:
        rank = team.process.rank
        assert (team.is_example_leader, team.mesh.axial.size, team.mesh.data.size) == (True, 1, 4)
        assert team.smallest([5e9, 7e9, 3e9, 4e9][rank], "free memory") == 3e9
        axial = team.broadcast({"axial": 4} if rank == 0 else None, "the plan")
        mesh = team.remesh(Plan(**axial))
        whole = all_gather(torch.full((1,), rank), 0, 4, team.mesh.axial, "x").wait()
        assert whole.tolist() == [0, 1, 2, 3]
        assert team.is_example_leader == (rank == 0)
        team.remesh(Plan(data=2, axial=2))
        whole = all_gather(torch.full((1,), rank), 0, 2, team.mesh.axial, "x").wait()
        assert whole.tolist() == ([0, 1] if rank < 2 else [2, 3])
        with pytest.raises(UserError, match="axial 3 x branch 1 needs 3 processes, there are 4"):
            team.remesh(Plan(axial=3))
        assert team.mesh.axial.size == 2
        assert team.remesh(Plan(axial=4)) is mesh  # its groups are used again

    codes, said = crew.run(work, Plan(data=4))
    assert (codes, said) == ([FINE] * 4, [""] * 4)


def test_work_is_shared_out_as_it_is_done(crew: Crew, tmp_path: Path) -> None:  # noqa: F811
    """Each job is taken once, by all that share an example; at the end they wait longer than the time limit."""

    def work(team: Team) -> None:
        for round in ("first", "second"):
            while (job := team.take(round)) < 6:
                (tmp_path / f"{round}-{job}-{team.process.rank}").touch()
        if team.process.rank == 0:
            time.sleep(6)
        team.wait_for_all("the end of the queries")
        assert team.all_gather_object_of_example(0, "still there") == [0, 0]
        team.remesh(Plan(axial=4))

    codes, said = crew.run(work, Plan(data=2, axial=2, time_limit=4.0))
    assert (codes, said) == ([FINE] * 4, [""] * 4)
    names = [path.name.split("-") for path in tmp_path.glob("*-*-*")]
    for round in ("first", "second"):
        found = {job: sorted(rank for a, b, rank in names if (a, b) == (round, job)) for job in map(str, range(6))}
        assert all(ranks in (["0", "1"], ["2", "3"]) for ranks in found.values()), found


def test_who_waits_for_all_hears_of_a_failure(crew: Crew) -> None:  # noqa: F811
    def fail(team: Team) -> None:
        if team.process.rank == 1:
            raise UserError("bad data")
        team.wait_for_all("the end")

    codes, said = crew.run(fail, Plan(data=2))
    assert codes == [FAILED] * 2
    assert said[0] == "TeamError: rank 1 failed: bad data\n"


def test_alone_there_is_nobody_to_wait_for() -> None:
    with distributed_context(ProcessInfo(), None) as team:
        assert team.mesh.world.size == 1
        assert team.smallest(3, "free memory") == 3
        assert [team.take("queries"), team.take("queries"), team.take("others")] == [0, 1, 0]
        team.wait_for_all("the end")
        assert team.remesh(Plan()).axial.size == 1
        with pytest.raises(UserError, match="there are 1"):
            team.remesh(Plan(axial=2))


@pytest.mark.parametrize(("shape", "axis"), [((7, 3, 2), -3), ((3, 7, 2), -2), ((2, 4), 0), ((7, 0), 0)])
def test_results_come_in_pieces(shape: tuple[int, ...], axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any length, cast piece by piece, also to where they are wanted; nobody holds more than a piece of others."""
    monkeypatch.setattr(module, "PIECE", 16)
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.bfloat16).view(shape)

    def on_a_rank() -> tuple[Tensor | None, Tensor | None, list[int]]:
        mesh = make_mesh(axial=3)
        team = Team(ProcessInfo(mesh.world.rank, 3), mesh)
        shard = local_shard(whole, axis, mesh.axial)
        pieces = [(start, x) for start, x in team.pieces_of_shards(shard, axis, shape[axis], torch.float32)]
        bytes = [x.nbytes for _, x in pieces if x.shape[axis] > 1]
        out = torch.zeros(shape, dtype=torch.float64)
        return (
            team.gather_shards(shard, axis, shape[axis], torch.float32),
            team.gather_shards(shard, axis, shape[axis], out=out),
            bytes,
        )

    (found, found_there, bytes), *others = run_ranks(on_a_rank, 3)
    assert others == [(None, None, []), (None, None, [])]
    assert found is not None
    assert found_there is not None
    assert found.dtype == torch.float32
    assert torch.equal(found, whole.float())
    assert torch.equal(found_there, whole.double())
    assert all(size <= 16 for size in bytes)


def test_one_process_has_the_whole_already() -> None:
    x = torch.arange(6.0).view(3, 2)
    found = Team().gather_shards(x, 0, 3)
    assert found is not None
    assert found.data_ptr() == x.data_ptr()
    assert torch.equal(Team().gather_shards(x.bfloat16(), 0, 3, torch.float32), x)
