"""Test that the scripts for Slurm, torchrun and Kubernetes in docs/examples parse and have valid commands."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import typer
import yaml
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
from torch.distributed.run import get_args_parser

from warpfold.cli import app

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
NAMES = ("slurm.sh", "torchrun.sh", "kubernetes.yaml")
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="bash, which runs the scripts, is not installed")


def pods() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the Service, the Job, and the container of the Job's pods."""
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8"))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return service, job, container


def script(name: str) -> str:
    """Return the shell script of an example."""
    if name.endswith(".yaml"):
        shell, option, text = pods()[2]["command"]
        assert (shell, option) == ("bash", "-c")
        return str(text)
    return (EXAMPLES / name).read_text(encoding="utf-8")


def words_after(name: str, word: str) -> list[str]:
    """Return the words that follow the last occurrence of a word in the command of an example."""
    lines = [line for line in script(name).replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#")]
    (line,) = (line for line in lines if word in shlex.split(line, comments=True))
    words = shlex.split(line, comments=True)
    words = words[len(words) - words[::-1].index(word) :]
    return words[: words.index("&")] if "&" in words else words


@needs_bash
@pytest.mark.parametrize("name", NAMES)
def test_the_script_parses(name: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script(name), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_accepts_the_command(name: str) -> None:
    command, *arguments = words_after(name, "warpfold")
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    context = commands[command].make_context(f"warpfold {command}", arguments)
    assert {"settings": "monomer", "data": ["store"]}.items() <= context.params.items()
    assert context.params["out"] == Path("run")


@pytest.mark.parametrize("name", ["torchrun.sh", "kubernetes.yaml"])
def test_torchrun_accepts_its_options(name: str) -> None:
    words = [re.sub(r"\$\{?\w+\}?", "2", word) for word in words_after(name, "torchrun")]
    found = get_args_parser().parse_args(words)
    assert (found.training_script, found.module, found.nnodes) == ("warpfold", True, "2")
    assert found.rdzv_endpoint


@pytest.mark.parametrize("name", ["torchrun.sh", "kubernetes.yaml"])
def test_torchrun_understands_the_rendezvous_settings(name: str) -> None:
    """torchrun ignores unknown settings, so a misspelt name would have no effect."""
    (conf,) = re.findall(r"last_call_timeout=[\w=,]+", script(name))
    given = RendezvousParameters("c10d", "here", "name", 1, 2, "here", **_parse_rendezvous_config(conf))
    settings = create_handler(HashStore(), Mock(), given).settings
    silent = settings.keep_alive_interval * settings.keep_alive_max_attempt
    assert (silent, settings.timeout.last_call) == (timedelta(seconds=6), timedelta(seconds=5))


@pytest.mark.parametrize("name", NAMES)
def test_the_scripts_set_what_the_doctor_recommends(name: str) -> None:
    rules = (ROOT / "warpfold" / "cluster" / "rules.py").read_text(encoding="utf-8")
    unset = [word for line in re.findall(r"^\s*unset (.*)", script(name), re.M) for word in line.split()]
    assert "NCCL_P2P_DISABLE" in unset
    assert all(variable in rules for variable in unset)
    assert "export OMP_NUM_THREADS=" in script(name)
    assert "ulimit -n " in script(name)
    if name.endswith(".yaml"):
        assert pods()[2]["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    else:
        assert "ulimit -l unlimited" in script(name)


def test_pods_find_the_first_one() -> None:
    service, job, container = pods()
    spec = job["spec"]
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    pod = spec["template"]["spec"]
    assert (pod["subdomain"], pod["restartPolicy"]) == (service["metadata"]["name"], "Never")
    port = service["spec"]["ports"][0]["port"]
    assert f"--rdzv-endpoint {job['metadata']['name']}-0.{pod['subdomain']}:{port}" in script("kubernetes.yaml")
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"shared-memory": "/dev/shm", "data": "/data"}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)


# ---- slurm.sh, with stand-ins for Slurm's programs


def start(folder: Path, srun: str) -> subprocess.Popen[str]:
    """Start slurm.sh with programs that record their arguments.  srun: an additional command of `srun`."""
    programs = {
        "srun": f'printf "%s\\n" "$@" "OMP_NUM_THREADS=$OMP_NUM_THREADS" "P2P=$NCCL_P2P_DISABLE" > srun.txt\n{srun}',
        "scancel": 'echo "$*" > cancelled',
        "scontrol": 'echo "$*" > requeued',
    }
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    variables = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "NCCL_P2P_DISABLE": "1"}
    return subprocess.Popen(
        ["bash", EXAMPLES / "slurm.sh"],
        cwd=folder,
        env=variables | {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8"},
        stdout=subprocess.PIPE,
        text=True,
    )


@needs_bash
def test_slurm_starts_the_command_and_is_not_queued_again(tmp_path: Path) -> None:
    with start(tmp_path, "exit 0") as job:
        assert job.wait(60) == 0
    words = (tmp_path / "srun.txt").read_text().splitlines()
    assert words[words.index("warpfold") :] == [
        *["warpfold", "train", "monomer", "--data", "store", "--out", "run"],
        "OMP_NUM_THREADS=4",
        "P2P=",
    ]
    assert not (tmp_path / "requeued").exists()


@needs_bash
def test_slurm_saves_before_its_time_is_over_and_is_queued_again(tmp_path: Path) -> None:
    with start(tmp_path, "touch started; until [ -e cancelled ]; do sleep 0.05; done") as job:
        while not (tmp_path / "started").exists():
            assert job.poll() is None
            time.sleep(0.01)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(60) == 0
    assert (tmp_path / "cancelled").read_text() == "--signal=TERM 7\n"
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


@needs_bash
def test_a_training_that_fails_is_not_queued_again(tmp_path: Path) -> None:
    with start(tmp_path, "exit 3") as job:
        assert job.wait(60) == 3
    assert not (tmp_path / "requeued").exists()
