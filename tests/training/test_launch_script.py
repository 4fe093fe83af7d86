"""`warpfold launch`: scripts that say what was asked, survive a shell, save before the time is over, and go on."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

from tests.test_cli import refused, run
from warpfold.cost.links import Cluster, Link
from warpfold.errors import UserError
from warpfold.training.launch import (
    SOON,
    LaunchJob,
    cures_of,
    fill,
    has_gpus,
    kubernetes_manifest,
    slurm_script,
    torchrun_script,
)

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="scripts are bash's, which is not here")
STRANGE = (
    "train",
    "tiny.toml",
    "--data",
    "my store",
    "--out",
    "$(touch hit)`touch hit`",
    "--set",
    "a='\"; touch hit #",
)
JOB = LaunchJob(command=STRANGE, nodes=2, per_node=2, cores=8, time="1:00:00")


def tool(folder: Path, name: str, text: str) -> Path:
    """A program of the scheduler's, or Python, that does what `text` says."""
    file = folder / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)
    return file


def fake_slurm(folder: Path, srun: str) -> tuple[LaunchJob, dict[str, str]]:
    """A job whose Python writes down what it was given, and the variables and programs of a Slurm that is none."""
    told = shutil.which("python3") or sys.executable
    code = "import json,os,sys; json.dump([sys.argv[1:], dict(os.environ)], open('told.json', 'w'))"
    python = tool(folder, "python", f'exec {told} -c "{code}" "$@"')
    nodes = "".join(f"NodeName=node{i} Arch=x86 NodeAddr=10.0.0.{i} Port=1\\n" for i in (2, 1))  # in any order
    names = f'case "$*" in *hostnames*) echo node1;; *"show node node[1-2]"*) printf "{nodes}";;'
    tool(folder, "scontrol", f'{names} requeue*) echo "$2" >> requeued;; esac')
    tool(folder, "srun", srun)
    tool(folder, "scancel", 'echo "$*" > cancelled')
    variables = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
    of_node = {"SLURM_NODEID": "0", "SLURMD_NODENAME": "node1", "SLURM_JOB_NODELIST": "node[1-2]"}
    return replace(JOB, python=str(python)), {**variables, **of_node}


@needs_bash
def test_slurm_starts_what_was_asked_on_each_node(tmp_path: Path) -> None:
    job, variables = fake_slurm(tmp_path, 'printf "%s\\n" "$@" > srun.txt; exec bash -c "${@: -1}"')
    lines = ("unset NCCL_P2P_DISABLE", "export NCCL_IB_GID_INDEX=3", "ulimit -n 100000000000")
    (tmp_path / "job.sh").write_text(slurm_script(replace(job, lines=lines)))
    given = {**variables, "NCCL_P2P_DISABLE": "1", "OMP_NUM_THREADS": "99", "SLURM_CPUS_PER_TASK": "8"}
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    words, environ = json.loads((tmp_path / "told.json").read_text())
    assert tuple(words[words.index("warpfold") + 1 :]) == STRANGE
    assert not (tmp_path / "hit").exists()
    options = dict(itertools.pairwise(words))
    assert options["--rdzv-endpoint"] == "10.0.0.1:29507"
    assert (options["--nnodes"], options["--nproc-per-node"], options["--local-addr"]) == ("2", "2", "10.0.0.1")
    assert options["--rdzv-conf"] == f"is_host=1,{SOON}"
    assert environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert (environ["OMP_NUM_THREADS"], environ["NCCL_IB_GID_INDEX"]) == ("4", "3")
    assert "NCCL_P2P_DISABLE" not in environ
    assert "refused: ulimit -n 100000000000" in done.stderr
    assert "--cpus-per-task=8" in (tmp_path / "srun.txt").read_text()
    assert not (tmp_path / "requeued").exists()  # it is finished


@needs_bash
def test_slurm_saves_before_its_time_is_over_and_is_queued_again(tmp_path: Path) -> None:
    job, variables = fake_slurm(tmp_path, "touch started; until [ -e cancelled ]; do sleep 0.05; done; exit 1")
    (tmp_path / "job.sh").write_text(slurm_script(job))
    with subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=variables, stdout=subprocess.PIPE) as script:
        while not (tmp_path / "started").exists():
            assert script.poll() is None
            time.sleep(0.01)
        script.send_signal(signal.SIGUSR1)
        script.communicate(timeout=120)
    assert (tmp_path / "cancelled").read_text() == "--signal=TERM 7\n"
    assert (tmp_path / "requeued").read_text() == "7\n"


@needs_bash
def test_what_fails_by_itself_is_not_queued_again(tmp_path: Path) -> None:
    job, variables = fake_slurm(tmp_path, "exit 3")
    (tmp_path / "job.sh").write_text(slurm_script(job))
    assert subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=variables, check=False).returncode == 3
    assert not (tmp_path / "requeued").exists()


@needs_bash
@pytest.mark.parametrize("nodes", [1, 3])
def test_torchrun_alone(tmp_path: Path, nodes: int) -> None:
    job, variables = fake_slurm(tmp_path, "")
    (tmp_path / "job.sh").write_text(torchrun_script(replace(job, nodes=nodes), "first"))
    subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=variables, check=True)
    words, environ = json.loads((tmp_path / "told.json").read_text())
    assert tuple(words[-len(STRANGE) :]) == STRANGE
    options = dict(itertools.pairwise(words))
    assert ("--standalone" in words) == (nodes == 1)
    assert options.get("--rdzv-endpoint") == (None if nodes == 1 else "first:29500")
    # What makes the end of one node short: measured in docs/parallel.md.
    assert options.get("--rdzv-conf") == (None if nodes == 1 else SOON)
    assert environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == (None if nodes == 1 else "1")


def test_torchrun_understands_what_is_to_be_soon() -> None:
    """It takes a word that it does not know without complaint."""
    given = RendezvousParameters("c10d", "here", "name", 1, 2, "here", **_parse_rendezvous_config(SOON))
    settings = create_handler(HashStore(), Mock(), given).settings
    silent = settings.keep_alive_interval * settings.keep_alive_max_attempt
    assert (silent, settings.timeout.last_call) == (timedelta(seconds=6), timedelta(seconds=5))


def test_slurms_options() -> None:
    script = slurm_script(
        replace(JOB, gpus=True, partition="gpu", account="bio", memory="64G", options=("qos=high",), grace=300)
    )
    asked = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"nodes=2", "ntasks-per-node=1", "gpus-per-node=2", "cpus-per-task=8", "mem=64G", "time=1:00:00"} <= set(
        asked
    )
    assert {"partition=gpu", "account=bio", "qos=high", "signal=B:USR1@300", "requeue", "open-mode=append"} <= set(
        asked
    )
    assert "--numa-binding node" in script
    assert "#SBATCH --no-requeue" in slurm_script(replace(JOB, command=("doctor", "--cluster"), continues=False))
    assert "exec apptainer exec 'a b.sif' python3" in slurm_script(replace(JOB, image="a b.sif"))
    assert "--container-image=r/i:1" in slurm_script(replace(JOB, image="r/i:1"))


def finding(**more: str) -> dict[str, str]:
    return {"check": "x", "outcome": "wrong", "says": "bad\nline", "cure": "do", "line": "", **more}


def test_findings_become_lines_and_remarks() -> None:
    found = [finding(line="unset NCCL_P2P_DISABLE"), finding(), finding(outcome="ok", line="ulimit -n 5"), finding()]
    assert cures_of({"findings": found}, "r.json") == (("unset NCCL_P2P_DISABLE",), ("x: bad line; do",))
    assert "#   x: bad line; do" in slurm_script(replace(JOB, remarks=("x: bad line; do",)))
    for report, says in (
        ({"findings": [finding(line="unset X; rm -rf /")]}, "no line that a doctor writes"),
        ({"findings": [finding(line="export A=$(id)")]}, "no line that a doctor writes"),
        ({"findings": [{"outcome": "wrong"}]}, "r.json: not what"),
        ([], "r.json: not what"),
    ):
        with pytest.raises(UserError, match=says):
            cures_of(report, "r.json")  # type: ignore[arg-type]


def test_a_device_is_a_gpu_by_its_name() -> None:
    assert all(map(has_gpus, ("NVIDIA H100 80GB HBM3", "A100", "RTX 4090")))
    assert not any(map(has_gpus, ("AMD EPYC 7763, 64 cores", "")))


# ---- Kubernetes


IN_PODS = replace(JOB, gpus=True, image="registry/warpfold:1", memory="64Gi", logs="/data/logs")


def test_kubernetes_parses_and_holds_the_command() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML reads what was written")
    service, batch = yaml.safe_load_all(kubernetes_manifest(replace(IN_PODS, remarks=("x: y",)), "store:/data"))
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    spec = batch["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    pod = spec["template"]["spec"]
    assert (pod["subdomain"], pod["restartPolicy"]) == (service["metadata"]["name"], "Never")
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "2"}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/dev/shm", "/data"}
    assert "--rdzv-endpoint warpfold-0.warpfold:29500" in container["command"][2]


@needs_bash
def test_a_pod_starts_what_was_asked(tmp_path: Path) -> None:
    """The same without PyYAML: the script is what stands below its key, less the indentation."""
    job, variables = fake_slurm(tmp_path, "")
    lines = kubernetes_manifest(replace(IN_PODS, python=job.python, logs="logs", command=STRANGE)).splitlines()
    start = next(number for number, line in enumerate(lines) if line.endswith("|-"))
    indent = len(lines[start + 1]) - len(lines[start + 1].lstrip())
    end = next(n for n, line in enumerate(lines) if n > start and line and not line.startswith(" " * indent))
    tool(tmp_path, "python3", f'exec {tmp_path / "bin/python"} "$@"')
    script = "\n".join(line[indent:] for line in lines[start + 1 : end])
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env={**variables, "JOB_COMPLETION_INDEX": "1"}, check=True)
    words, environ = json.loads((tmp_path / "told.json").read_text())
    assert tuple(words[-len(STRANGE) :]) == STRANGE
    options = dict(itertools.pairwise(words))
    assert options["--rdzv-conf"] == f"is_host=0,{SOON}"
    assert options["--local-addr"] == "warpfold-1.warpfold"
    assert environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_a_template_drops_what_is_not_given_and_indents_what_is() -> None:
    assert fill("a @x@\n  @y@\n@z@\n", x="$1 @y@", y="1\n2", z=None) == "a $1 @y@\n  1\n  2"


REFUSED = [
    (LaunchJob, {"command": ()}, "no command"),
    (LaunchJob, {"command": ("train", "a\nNODE\nb")}, "a line break"),
    (LaunchJob, {"grace": 10}, "--grace 10"),
    (LaunchJob, {"time": "24h"}, "--time 24h: Slurm takes minutes, 24:00:00"),
    (LaunchJob, {"partition": "gpu nodes"}, "--partition: 'gpu nodes'"),
    (LaunchJob, {"options": ("qos=a\n#SBATCH --x",)}, "--option"),
    (kubernetes_manifest, {"image": None}, "need an image"),
    (kubernetes_manifest, {"name": "My_Job"}, "--name My_Job"),
    (partial(kubernetes_manifest, claim="data"), {}, "--claim data"),
    (torchrun_script, {"nodes": 3}, "--address"),
]


@pytest.mark.parametrize(("make", "changes", "says"), REFUSED)
def test_what_no_script_can_hold_is_refused(make: Any, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make(replace(IN_PODS, **changes)) if make is not LaunchJob else replace(JOB, **changes)


# ---- the command


def test_the_command_reads_the_cluster_and_starts_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    link = Link(1e-5, 1e10)
    Cluster(ranks=16, per_node=8, within=link, between=link, device="NVIDIA H100").save(tmp_path / "cluster.toml")
    (tmp_path / "report.json").write_text(json.dumps({"findings": [finding(line="unset NCCL_ALGO")]}))
    given = ("--cluster", tmp_path / "cluster.toml", "--findings", tmp_path / "report.json")
    command = ("--", "warpfold", "train", "monomer", "--data", "store", "--out", "run")
    code, script, _ = run(capsys, "launch", "--slurm", *given, *command)
    assert code == 0
    assert "#SBATCH --nodes=2\n" in script
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert "unset NCCL_ALGO || " in script
    assert "    -m warpfold train monomer --data store --out run\n" in script
    code, said, _ = run(capsys, "launch", "--slurm", *given, "--out", tmp_path / "job.sh", *command)
    assert (code, (tmp_path / "job.sh").read_text()) == (0, script)
    assert said == f"{tmp_path / 'job.sh'}; start it: sbatch {tmp_path / 'job.sh'}\n"
    assert "exists already" in refused(run(capsys, "launch", "--slurm", "--out", tmp_path / "job.sh", *command))


def test_it_is_started_when_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job.sh"
    asked = ("launch", "--slurm", "--submit", "--out", job, *["--", "train", "tiny", "--data", "s", "--out", "r"])
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert "sbatch: not found here" in refused(run(capsys, *asked))
    (tmp_path / "job.sh").unlink()
    tool(tmp_path, "sbatch", f'echo "$1" > {tmp_path / "submitted"}')
    assert run(capsys, *asked)[0] == 0
    assert (tmp_path / "submitted").read_text() == f"{tmp_path / 'job.sh'}\n"


def test_a_command_stands_behind_dashes_or_not_and_an_image_may_have_another_warpfold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ("train", "tiny", "--data", "store", "--out", "run")
    assert run(capsys, "launch", "--slurm", *command) == run(capsys, "launch", "--slurm", "--", *command)
    code, script, _ = run(capsys, "launch", "--slurm", "--image", "w.sif", "--", "train", "tiny", "--newer")
    assert code == 0
    assert "-m warpfold train tiny --newer" in script


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("-- train tiny", "one of --slurm"),
        ("--slurm --torchrun -- train tiny", "one of --slurm"),
        ("--slurm --submit -- train tiny", "--out FILE"),
        ("--torchrun --nodes 2 -- train tiny --data s --out r", "--address"),
        ("--slurm --cluster no.toml -- train tiny", "--cluster no.toml: there is no such file; `warp"),
        ("--slurm --findings no.json -- train tiny", "no.json"),
        ("--slurm -- trian tiny", "trian: not a command of warpfold; those are demo, sample"),
        ("--slurm -- train tiny --dat s", "No such option: --dat"),
        ("--slurm -- train", "see warpfold train --help"),
        ("--slurm", "no command; give it after --"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], line: str, says: str) -> None:
    assert says in refused(run(capsys, "launch", *line.split()))
