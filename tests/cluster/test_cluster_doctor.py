"""The doctor on real ranks: it measures all, agrees, names what is ill, and does not hang with a rank that does."""

import fcntl
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.wards import examine, quick  # noqa: F401
from warpfold.cluster import doctor, files
from warpfold.cluster.doctor import Asked, examine_cluster
from warpfold.cluster.files import judge_folder, try_folder
from warpfold.cost.links import read_cluster
from warpfold.parallel.team import Team

CPU = torch.device("cpu")
NODES = [[0, 1], [2, 3]]
pytestmark = pytest.mark.usefixtures("quick")


def whole(asked: Asked, ill: Callable[[int], dict[str, Any]] = lambda rank: {}) -> Callable[[Team], Any]:
    """A function that examines everything; ill: keywords of a rank."""

    def run(team: Team) -> Any:
        return examine_cluster(team, CPU, {}, asked, **ill(team.process.rank)).as_json()

    return run


def said(report: dict[str, Any], *outcomes: str) -> dict[str, str]:
    """What a report says, by check."""
    return {one["check"]: one["says"] for one in report["findings"] if one["outcome"] in outcomes}


def test_all_is_measured_and_all_ranks_agree(tmp_path: Path) -> None:
    def run(team: Team) -> Any:
        found = examine_cluster(team, CPU, {}, Asked(folder=tmp_path / "runs"))
        if team.is_rank_zero and found.cluster:
            found.cluster.save(tmp_path / "cluster.toml")
        return found.as_json()

    reports = examine(run)
    first = reports[0]
    assert [one["findings"] for one in reports] == [first["findings"]] * 4
    assert (first["ranks"], first["per_node"]) == (4, 2)
    assert {one["topic"] for one in first["findings"]} == {"software", "rdma", "links", "ranks", "files"}
    assert sorted((one["first"], one["second"]) for one in first["links"]["pairs"]) == [
        (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)
    ]  # fmt: skip
    assert len(first["rates"]) == len(first["facts"]) == 4
    assert said(first, "not checked")["ECC errors"] == "no GPU"
    assert said(first, "ok")["flock"] == "a lock of rank 0 keeps out ranks 1 to 3"
    found = read_cluster(tmp_path / "cluster.toml")
    assert (found.ranks, found.per_node, found.how) == (4, 2, "measured")
    assert found.within.bandwidth > 0 < found.between.latency
    assert not (tmp_path / "runs").exists(), "nothing stays behind"


def test_a_slow_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before, rank_of = doctor.measure_rates, dict[str, int]()

    def measured(*args: Any) -> Any:
        found = before(*args)
        share = 0.2 if rank_of["rank"] == 2 else 1.0
        used = found["processors"] | {"own": 0.9 * share, "threads": 1, "held": 0.0}
        return {**found, "matrix": {"fp32": 1e10 * share, "bf16": 1e10 * share}, "memory": 1e10, "processors": used}

    monkeypatch.setattr(doctor, "measure_rates", measured)

    def run(team: Team) -> Any:
        rank_of["rank"] = team.process.rank
        return examine_cluster(team, CPU, {}, Asked()).as_json()

    for report in examine(run):
        wrong = said(report, "wrong")
        assert wrong["products in fp32"].startswith("rank 2 reaches 2 GFLOP/s, 0.20 of the median")
        assert "had its processor 18% of the time" in wrong["products in bf16"]
        assert report["wrong"] >= 2


def test_nodes_that_are_not_equal_are_named() -> None:
    reports = examine(whole(Asked()), sizes=(2, 1))
    assert [one["findings"] for one in reports] == [reports[0]["findings"]] * 3
    assert said(reports[0], "wrong")["ranks of nodes"].startswith("2 on node 0 (")
    assert reports[0]["cluster"] is None
    assert [one["node"] for one in reports[0]["facts"]] == [0, 0, 1]


def test_a_clock_that_is_apart_is_named(tmp_path: Path) -> None:
    def ill(rank: int) -> dict[str, Any]:
        return {"clock": lambda: time.time() + 3600 * (rank >= 2)}

    wrong = said(examine(whole(Asked(folder=tmp_path), ill))[0], "wrong")
    assert wrong["clocks of nodes"].startswith("node 1's is 3.6e+03 s ahead of the others")
    assert "s behind rank" in wrong["clock of the file server"]
    assert wrong["clock of the file server"].endswith("ranks 2 and 3")


# ---- files


def tried(
    place: Callable[[int], Path], prepare: Callable[[int], None] = lambda rank: None
) -> dict[str, tuple[str, str]]:
    """What is said of a folder: outcome and words by check."""

    def run(team: Team) -> Any:
        prepare(team.process.rank)
        trials = try_folder(place(team.process.rank), NODES, team, patience=0.3)
        return [[one.check, one.outcome, one.says] for one in judge_folder(place(0), trials)]

    return {check: (outcome, says) for check, outcome, says in examine(run)[0]}


def test_a_folder_that_is_not_shared_is_named(tmp_path: Path) -> None:
    for node in (0, 1):
        (tmp_path / str(node)).mkdir()
    found = tried(lambda rank: tmp_path / str(rank // 2))
    assert found["folder"] == ("wrong", "ranks 2 and 3 do not see there what rank 0 writes")
    assert list((tmp_path / "0").iterdir()) == []


def test_locks_that_do_not_hold_are_named(tmp_path: Path) -> None:
    def no_locks_on_the_second_node(rank: int) -> None:
        if rank >= 2:
            fcntl.flock = lambda file, how: None

    outcome, says = tried(lambda rank: tmp_path, no_locks_on_the_second_node)["flock"]
    assert (outcome, says) == ("wrong", "ranks 2 and 3 got a lock that rank 0 held: two runs could write to one folder")


def test_a_file_system_without_locks_is_noted(tmp_path: Path) -> None:
    def none(rank: int) -> None:
        def refuse(file: int, how: int) -> None:
            raise OSError(37, "No locks available")

        fcntl.flock = refuse

    assert tried(lambda rank: tmp_path, none)["flock"] == ("note", "there are no locks: No locks available")


def test_a_rename_that_is_not_atomic_is_named(tmp_path: Path) -> None:
    def by_halves(rank: int) -> None:
        """Have this rank find the first half of the file, as while another one copies it."""
        before = Path.read_bytes
        Path.read_bytes = lambda path: before(path)[: files.LENGTH // 2]  # type: ignore[method-assign]

    outcome, says = tried(lambda rank: tmp_path, by_halves)["rename"]
    assert outcome == "wrong"
    assert "missing or half written" in says


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot write there" in tried(lambda rank: tmp_path / "file" / "runs")["folder"][1]


def test_a_store_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = files.read_store(tmp_path / "none", 0.1, 0)
    assert "not a store" in found["error"]


# ---- ranks that do not answer


def test_a_rank_that_dies_is_named() -> None:
    def run(team: Team) -> Any:
        if team.process.rank == 3:

            def die(*args: Any) -> None:
                os._exit(1)

            doctor.measure_rates = die
        return examine_cluster(team, CPU, {}, Asked()).as_json()

    for answer in examine(run, lost=(3,))[:3]:
        assert isinstance(answer, str)
        assert "rank 3" in answer


@pytest.mark.slow
def test_a_rank_that_freezes_is_named_within_the_limit() -> None:
    def run(team: Team) -> Any:
        if team.process.rank == 1:

            def freeze(*args: Any) -> None:
                os.kill(os.getpid(), signal.SIGSTOP)

            doctor.measure_rates = freeze
        return examine_cluster(team, CPU, {}, Asked()).as_json()

    for rank, answer in enumerate(examine(run, limit=3.0, lost=(1,))):
        assert rank == 1 or "rank 1 is dead or frozen" in answer or "rank 1 did not arrive" in answer
