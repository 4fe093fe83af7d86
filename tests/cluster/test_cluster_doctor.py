"""The doctor on real ranks: all agree, faults of folders are reported, and a rank that ends does not block others."""

import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cluster.wards import examine, quick  # noqa: F401
from warpfold.cluster import doctor, folder
from warpfold.cluster.doctor import examine_cluster
from warpfold.cluster.folder import try_folder
from warpfold.cluster.rules import judge
from warpfold.cluster.subjects import folder_subjects
from warpfold.cost.links import read_cluster
from warpfold.parallel.team import Team

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("quick")


def said(report: dict[str, Any], *outcomes: str) -> dict[str, str]:
    """Return the finding of each check in a report."""
    return {one["check"]: one["says"] for one in report["findings"] if one["outcome"] in outcomes}


def test_all_is_checked_and_all_ranks_agree(tmp_path: Path) -> None:
    def run(team: Team) -> Any:
        examined = examine_cluster(team, CPU, {}, tmp_path / "runs", "eth1")
        if team.is_rank_zero and examined.cluster:
            examined.cluster.save(tmp_path / "cluster.toml")
        return examined.as_json()

    reports = examine(run)
    first = reports[0]
    assert [one["findings"] for one in reports] == [first["findings"]] * 4
    assert (first["ranks"], first["per_node"], len(first["facts"])) == (4, 2, 4)
    assert {one["topic"] for one in first["findings"]} == {
        "software", "environment", "limits", "rdma", "pci", "links", "folder"
    }  # fmt: skip
    assert sorted((one["first"], one["second"]) for one in first["links"]["pairs"]) == [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert said(first, "not checked")["IOMMU"] == "no GPU"
    assert said(first, "ok")["locks"] == "a lock of rank 0 excludes all other ranks"
    cluster = read_cluster(tmp_path / "cluster.toml")
    assert (cluster.ranks, cluster.per_node, cluster.how) == (4, 2, "measured")
    assert cluster.within.bandwidth > 0 < cluster.between.latency
    assert not (tmp_path / "runs").exists(), "nothing stays behind"


def test_nodes_that_differ_in_size_are_named() -> None:
    reports = examine(lambda team: examine_cluster(team, CPU, {}).as_json(), nodes=(2, 1))
    assert [one["findings"] for one in reports] == [reports[0]["findings"]] * 3
    assert said(reports[0], "wrong")["ranks of nodes"].startswith("2 on node 0 (")
    assert reports[0]["cluster"] is None
    assert [one["node"] for one in reports[0]["facts"]] == [0, 0, 1]


# ---- the folder of the run


def tried(
    place: Callable[[int], Path], prepare: Callable[[int], None] = lambda rank: None
) -> dict[str, tuple[str, str]]:
    """Check a folder with four ranks, and return the outcome and the text by check."""

    def run(team: Team) -> Any:
        prepare(team.process.rank)
        subjects = {"ranks": [], "gpus": [], **folder_subjects(try_folder(place(team.process.rank), team))}
        return [[one.check, one.outcome, one.says] for one in judge(subjects) if one.topic == "folder"]

    return {check: (outcome, says) for check, outcome, says in examine(run)[0]}


def test_a_folder_that_is_not_shared_is_named(tmp_path: Path) -> None:
    for node in (0, 1):
        (tmp_path / str(node)).mkdir()
    checks = tried(lambda rank: tmp_path / str(rank // 2))
    assert checks["folder"] == ("wrong", f"ranks 2 and 3 do not see what rank 0 writes to {tmp_path / '1'}")
    assert list((tmp_path / "0").iterdir()) == []


def test_locks_that_do_not_hold_are_named(tmp_path: Path) -> None:
    def no_locks_on_the_second_node(rank: int) -> None:
        if rank >= 2:
            fcntl.flock = lambda file, how: None

    outcome, says = tried(lambda rank: tmp_path, no_locks_on_the_second_node)["locks"]
    assert (outcome, says) == ("wrong", "ranks 2 and 3 got a lock that rank 0 held: two runs could write to one folder")


def test_a_file_system_without_locks_is_noted(tmp_path: Path) -> None:
    def none(rank: int) -> None:
        def refuse(file: int, how: int) -> None:
            raise OSError(37, "No locks available")

        fcntl.flock = refuse

    assert tried(lambda rank: tmp_path, none)["locks"] == ("note", "there are no locks: No locks available")


def test_a_rename_that_is_not_atomic_is_named(tmp_path: Path) -> None:
    def by_halves(rank: int) -> None:
        """Make this rank read only the first half of the file, as if another process were still copying it."""
        before = Path.read_bytes
        Path.read_bytes = lambda path: before(path)[: folder.FILE_BYTES // 2]  # type: ignore[method-assign]

    outcome, says = tried(lambda rank: tmp_path, by_halves)["rename"]
    assert outcome == "wrong"
    assert says.startswith("ranks 1 to 3 found a file missing or half written")


def test_a_disk_that_is_almost_full_is_named(tmp_path: Path) -> None:
    def full(rank: int) -> None:
        folder.shutil.disk_usage = lambda path: SimpleNamespace(free=10**9)  # type: ignore[assignment]

    outcome, says = tried(lambda rank: tmp_path, full)["free space"]
    assert (outcome, says) == ("wrong", f"{tmp_path}: 1.0 GB free, less than two checkpoints of the full model need")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome, says = tried(lambda rank: tmp_path / "file" / "runs")["folder"]
    assert (outcome, says) == ("wrong", f"ranks 0 to 3 cannot use {tmp_path / 'file' / 'runs'}: Not a directory")


# ---- ranks that do not answer


def test_a_rank_that_dies_is_named() -> None:
    def run(team: Team) -> Any:
        if team.process.rank == 3:

            def die(*args: Any) -> None:
                os._exit(1)

            doctor.measure_links = die
        return examine_cluster(team, CPU, {}).as_json()

    for answer in examine(run, lost=(3,))[:3]:
        assert isinstance(answer, str)
        assert "rank 3" in answer


@pytest.mark.slow
def test_a_rank_that_freezes_is_named_within_the_limit() -> None:
    def run(team: Team) -> Any:
        if team.process.rank == 1:

            def freeze(*args: Any) -> None:
                os.kill(os.getpid(), signal.SIGSTOP)

            doctor.measure_links = freeze
        return examine_cluster(team, CPU, {}).as_json()

    for rank, answer in enumerate(examine(run, limit=3.0, lost=(1,))):
        assert rank == 1 or "rank 1 is dead or frozen" in answer or "rank 1 did not arrive" in answer
