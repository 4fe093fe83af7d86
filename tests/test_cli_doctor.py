"""Test `warpfold doctor` and `warpfold bench --op`: output, files, errors, exit codes; wrong results are not timed."""

import csv
import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.wards import quick  # noqa: F401
from tests.test_cli import run
from warpfold.check import cases
from warpfold.cli import bench
from warpfold.cluster import doctor
from warpfold.cluster.rules import ClusterFinding
from warpfold.ops.attention import attention
from warpfold.ops.linear import gate
from warpfold.parallel.team import TeamError, free_port

# Machines that only compute may lack these packages.
PARSERS = ("gemmi", "pyhmmer", "zstandard")
CLUSTER = ("doctor", "--cluster", "--device", "cpu")
QUICK = ("--device", "cpu", "--repeats", "1", "--ways", "definition,ours")


def test_doctor_alone_says_what_is_here_and_what_it_could_do(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "doctor", "--device", "cpu")
    assert (code, err) == (0, "")
    assert torch.__version__ in out
    assert "warpfold doctor --kernels" in out
    held = json.loads(run(capsys, "doctor", "--device", "cpu", "--json")[1])
    assert held["machine"]["torch"] == torch.__version__


def test_help_names_every_operation() -> None:
    assert (bench.BENCHED, bench.TUNED) == (cases.BENCHED, cases.TUNED)


def test_it_needs_no_parser() -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({PARSERS}))\n"
    code += "from warpfold import cli, settings\nfrom warpfold.bench import doctor, ops\n"
    code += "assert doctor.cases_of(settings.load('monomer'), 'monomer')\n"
    code += "cli.main(['doctor', '--kernels', '--settings', 'nowhere'])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stderr.startswith("error: nowhere: no such settings file")
    assert ended.returncode == 2


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Write the settings of a model with few and small operations."""
    path = tmp_path / "small.toml"
    path.write_text(
        "[model]\nc_m = 16\nc_z = 8\nextra_blocks = 0\n[model.evoformer]\nheads = 2\n"
        "[model.evoformer.pair]\nheads = 2\nc_triangle = 8\n[model.templates]\nenabled = false\n"
        "[data]\ncrop = 9\nmax_msa = 4\n"
    )
    return path


def test_doctor_of_sound_kernels(capsys: pytest.CaptureFixture[str], small: Path) -> None:
    code, out, err = run(capsys, "doctor", "--kernels", "--settings", small, "--device", "cpu", "--json")
    held = json.loads(out)
    wrong = [op for op in held["ops"] if op["verdict"] == "RED"]
    assert (code, err, wrong) == (0, "", [])
    assert {op["dtype"] for op in held["ops"]} == {"fp32", "bf16"}
    assert {op["where"] for op in held["ops"]} >= {"msa row", "msa column", "triangle starting", "triangle ending"}


def test_doctor_of_a_broken_kernel(
    capsys: pytest.CaptureFixture[str], small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "fast", lambda x, g: gate.definition(x, g) * 1.5)
    code, out, err = run(capsys, "doctor", "--kernels", "--settings", small, "--device", "cpu")
    assert code == 1
    assert "RED" in out
    assert "No GPU is checked" in out
    assert "red: gate" in err
    assert all(line.startswith("red: ") and "from fp64" in line for line in err.splitlines())


def test_bench_of_an_operation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "bench", "--op", "gate", "--op", "tail", "--shapes", "pair:8", *QUICK, "--json")
    assert (code, {row["op"] for row in json.loads(out)["rows"]}) == (0, {"gate", "tail"})
    files = ("--csv", tmp_path / "f.csv", "--plot", tmp_path / "f.png")
    code, out, _ = run(capsys, "bench", "--op", "gate,layer_norm", "--shapes", "pair:8", *QUICK, *files)
    assert code == 0
    assert "gate" in out
    assert "TFLOP/s" in out
    with (tmp_path / "f.csv").open() as file:
        assert {line["way"] for line in csv.DictReader(file)} == {"definition", "ours"}
    assert (tmp_path / "f.png").stat().st_size > 1000


def test_bench_times_nothing_that_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(attention, "fast", lambda *args: attention.definition(*args) * 1.5)
    files = ("--csv", tmp_path / "f.csv")
    code, out, err = run(capsys, "bench", "--op", "attention", "--shapes", "starting:12", *QUICK, *files)
    assert code == 1
    assert out == ""
    assert all(line.startswith(("red: attention", "red: global_attention")) for line in err.splitlines())
    assert list(tmp_path.iterdir()) == []


# ---- doctor --cluster


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:  # noqa: F811
    """Run one process, and shorten the measurements of clusters."""
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("alone")
def test_one_process_checks_what_it_can(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, *CLUSTER, "--folder", tmp_path / "runs", "--json")
    held = json.loads(out)
    assert code == int(held["wrong"] > 0)
    assert (held["ranks"], held["cluster"], held["links"]) == (1, None, None)
    not_checked = {one["check"]: one["says"] for one in held["findings"] if one["outcome"] == "not checked"}
    assert not_checked["bandwidth of a node"] == "there is one node"
    assert {"locks", "rename", "ACS"} <= set(not_checked)
    assert "checking folder" in err


@pytest.mark.usefixtures("alone")
def test_what_is_wrong_is_printed_with_its_cure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ill = ClusterFinding("limits", "threads", "wrong", "rank 0 has too many", "set OMP_NUM_THREADS=1")
    missing = [ClusterFinding("rdma", check, "not checked", "no GPU") for check in ("ACS", "IOMMU")]
    monkeypatch.setattr(doctor, "judge", lambda *args: [*missing, ill])
    code, out, _ = run(capsys, *CLUSTER)
    assert code == 1
    assert "WRONG limits: threads: rank 0 has too many  -> set OMP_NUM_THREADS=1" in out
    assert "not checked: ACS, IOMMU: no GPU\n" in out
    monkeypatch.setattr(doctor, "judge", lambda *args: [])
    code, out, _ = run(capsys, *CLUSTER)
    assert code == 0
    assert "0 wrong" in out
    assert "start the command on all processes" in out


@pytest.mark.usefixtures("alone")
def test_a_rank_that_is_lost_is_a_finding(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any) -> None:
        raise TeamError("rank 0 waited for others at 'links'; rank 3 is dead or frozen")

    monkeypatch.setattr(doctor, "try_folder", lost)
    code, out, err = run(capsys, *CLUSTER, "--folder", ".", "--json")
    held = json.loads(out)
    assert code == 1
    (wrong,) = (one for one in held["findings"] if one["check"] == "all ranks answer")
    assert "rank 3 is dead or frozen" in wrong["says"]
    assert held["facts"], "what was known before is kept"
    assert "error: rank 0 waited" in err


@pytest.mark.usefixtures("alone")
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


@pytest.mark.usefixtures("alone")
def test_a_doctor_that_has_to_end_says_what_it_knows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(doctor, "try_folder", lambda *args: os.kill(os.getpid(), signal.SIGTERM))
    code, out, _ = run(capsys, *CLUSTER, "--folder", ".", "--json")
    held = json.loads(out)
    (wrong,) = (one for one in held["findings"] if one["outcome"] == "wrong")
    assert (code, wrong["check"]) == (1, "all ranks answer")
    assert "was asked to end (SIGTERM)" in wrong["says"]
    assert held["facts"], "what was known before is kept"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("alone")
def test_links_are_saved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from tests.cluster.test_cluster_links import healthy
    from warpfold.cli.common import show
    from warpfold.cli.doctor import cluster_report, save_links
    from warpfold.cost.links import read_cluster

    links = healthy(2, 4)
    examined = doctor.Examined([[0, 1, 2, 3], [4, 5, 6, 7]], "H100", links=links, cluster=links.cluster("H100"))
    save_links(examined, tmp_path / "cluster.toml")
    show(cluster_report(examined, tmp_path / "cluster.toml"), as_json=False)
    out = capsys.readouterr().out
    assert "8 ranks on 2 nodes, H100" in out
    assert "0 wrong" in out
    assert read_cluster(tmp_path / "cluster.toml").between.bandwidth == 8e9
    show(cluster_report(examined, None), as_json=True)
    assert json.loads(capsys.readouterr().out)["cluster"]["per_node"] == 4
