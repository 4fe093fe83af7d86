"""`warpfold doctor --cluster`: what it prints, writes, refuses, and what it exits with."""

import json
import os
import platform
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.wards import quick  # noqa: F401
from tests.test_cli import refused, run
from warpfold.cluster import doctor
from warpfold.cluster.direct import free_port
from warpfold.cluster.findings import ClusterFinding
from warpfold.parallel.team import TeamError

CLUSTER = ("doctor", "--cluster", "--device", "cpu")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:  # noqa: F811
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_checks_what_it_can(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, *CLUSTER, "--folder", tmp_path / "runs", "--json")
    held = json.loads(out)
    assert code == int(held["wrong"] > 0)
    assert (held["ranks"], held["cluster"], held["links"]) == (1, None, None)
    not_checked = {one["check"]: one["says"] for one in held["findings"] if one["outcome"] == "not checked"}
    assert "there is one process; start as many as train" in not_checked["links"]
    assert "no store was named" in not_checked["store"]
    assert {"flock", "rename", "ECC errors"} <= set(not_checked)
    assert "checking what each rank can do" in err


def test_what_is_wrong_is_printed_with_its_cure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ill = ClusterFinding("ranks", "memory", "wrong", "rank 0 is slow", "leave it out")
    monkeypatch.setattr(doctor, "judge_ranks", lambda *args: [ill])
    code, out, _ = run(capsys, *CLUSTER)
    assert code == 1
    assert "WRONG       ranks: memory: rank 0 is slow  -> leave it out" in out
    monkeypatch.setattr(doctor, "judge_ranks", lambda *args: [])
    monkeypatch.setattr(doctor, "judge_system", lambda *args: [])
    code, out, _ = run(capsys, *CLUSTER)
    assert code == 0
    assert "0 wrong" in out


def test_a_rank_that_is_lost_is_a_finding(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any) -> None:
        raise TeamError("rank 0 waited for others at 'links'; rank 3 is dead or frozen")

    monkeypatch.setattr(doctor, "measure_ranks", lost)
    code, out, err = run(capsys, *CLUSTER, "--json")
    held = json.loads(out)
    assert code == 1
    (wrong,) = (one for one in held["findings"] if one["check"] == "all ranks answer")
    assert "rank 3 is dead or frozen" in wrong["says"]
    assert held["facts"], "what was known before is kept"
    assert "error: rank 0 waited" in err


def test_who_does_not_come_is_a_finding(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"RANK": 0, "WORLD_SIZE": 66, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**told, "MASTER_PORT": free_port(), "TORCH_GLOO_LAZY_INIT": ""}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    monkeypatch.setattr(doctor, "LIMIT", 0.3)
    monkeypatch.setattr(os, "_exit", sys.exit)
    code, out, err = run(capsys, *CLUSTER, "--json")
    held = json.loads(out)
    assert (code, held["ranks"], held["per_node"]) == (1, 66, 2)
    (wrong,) = held["findings"]
    assert f"no sign of rank 1 ({platform.node()}), 2, 3, 4, 5, 6, 7, 8, 9, 10 and 55 more; others are" in wrong["says"]
    assert "no sign of rank 1" in err
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1", "as in training"


def test_a_doctor_that_has_to_end_says_what_it_knows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(doctor, "measure_ranks", lambda *args: os.kill(os.getpid(), signal.SIGTERM))
    code, out, _ = run(capsys, *CLUSTER, "--json")
    held = json.loads(out)
    (wrong,) = (one for one in held["findings"] if one["outcome"] == "wrong")
    assert (code, wrong["check"]) == (1, "all ranks answer")
    assert "was asked to end (SIGTERM)" in wrong["says"]
    assert held["facts"], "what was known before is kept"
    assert signal.getsignal(signal.SIGTERM) is before


def test_links_are_drawn_and_saved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from tests.cluster.test_measured_links import healthy
    from warpfold.cli.common import show
    from warpfold.cli.doctor import cluster_report
    from warpfold.cluster.judge_links import judge_links
    from warpfold.cluster.links import cluster_of
    from warpfold.cost.links import read_cluster

    links = healthy(2, 4)
    found = doctor.Examined(list(links.nodes), "H100", judge_links(links), links=links,
                            cluster=cluster_of(links, "H100", 1e-4))  # fmt: skip
    show(cluster_report(found, tmp_path / "cluster.toml", tmp_path / "links.svg"), as_json=False)
    out = capsys.readouterr().out
    assert "8 ranks on 2 nodes, H100" in out
    assert "bandwidth from and to ranks, GB/s" in out
    assert "0 wrong" in out
    assert read_cluster(tmp_path / "cluster.toml").between.bandwidth == 8e9
    assert (tmp_path / "links.svg").read_text().startswith("<svg")
    show(cluster_report(found, None, None), as_json=True)
    assert json.loads(capsys.readouterr().out)["cluster"]["per_node"] == 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--link", "token-ring"], "not a network"),
        (["--figure", "links.gif"], "ends in .png or .svg"),
        (["--kernels"], "--cluster goes without --kernels"),
        (["--settings", "tiny"], "--cluster goes without"),
        (["--device", "cuda:77"], "--device"),
    ],
)
def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert says in refused(run(capsys, *CLUSTER, *arguments))


def test_who_mixes_up_the_doctor_and_its_file_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """--cluster is a flag of the doctor, which writes the file, and takes that file elsewhere."""
    for given in (("--cluster", "cluster.toml"), ("cluster.toml",)):
        assert "cluster.toml: the doctor reads no file; doctor --cluster --out" in refused(
            run(capsys, "doctor", *given)
        )
    for command in ("plan", "simulate", "train"):
        said = refused(run(capsys, command, "tiny", "--cluster"))
        assert "'--cluster' requires an argument: " in said
        assert "doctor" in said
        assert f"see warpfold {command} --help" in said


def test_options_of_a_cluster_are_for_a_cluster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "of --cluster; add it" in refused(run(capsys, "doctor", "--data", tmp_path))
    (tmp_path / "cluster.toml").touch()
    assert "exists already" in refused(run(capsys, *CLUSTER, "--out", tmp_path / "cluster.toml"))
