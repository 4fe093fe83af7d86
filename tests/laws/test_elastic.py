"""Elastic runs: a run with several processes can lose any of them at any time, and continue with others."""

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import descendants
from tests.training.runs import equal_tensors, make_store, rows
from tests.training.test_train_ranks import assert_alike, config_for, train_on_ranks
from warpfold import settings
from warpfold.data.store.store import Store
from warpfold.parallel.plan import Plan
from warpfold.training.config import RunConfig
from warpfold.training.train import train

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="the processes of a run are found in /proc, which is not here"
)
ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / "docs" / "examples" / "torchrun.sh").read_text(encoding="utf-8")
(RDZV_CONF,) = re.findall(r"--rdzv-conf (\S+)", SCRIPT)
STEPS = 16
TWO = config_for(Plan(data=2), accumulate=4, steps=STEPS, validate_every=0)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SINGLE = ["--standalone", "--nproc-per-node", "2"]


def begin(
    config: RunConfig, store: Store, out: Path, log: Path, *options: str, single: bool = True, text: str = ""
) -> subprocess.Popen:
    """Start torchrun with two training processes, or if not `single`, with the number that the options specify.

    text: the settings file, if it is not `config`.
    """
    file = log.with_suffix(".toml")
    file.write_text(text or settings.to_toml(config))
    command = ["-m", "warpfold", "train", file, "--data", store.path, "--out", out, "--device", "cpu"]
    with open(log, "w") as said:
        return subprocess.Popen(
            [*TORCHRUN, *(SINGLE if single else []), *options, *map(str, command)],
            cwd=ROOT,
            stdout=said,
            stderr=said,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )


def ranks_of(torchrun: subprocess.Popen, out: Path, rows_then: int) -> list[int]:
    """Return the processes of a run as soon as its log has this number of rows."""
    log = out / "metrics.jsonl"
    while torchrun.poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < rows_then):
        time.sleep(0.01)
    assert torchrun.poll() is None, "it ended too early"
    return [int(entry.name) for entry in descendants(torchrun.pid) if b"\0train\0" in (entry / "cmdline").read_bytes()]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("elastic") / "store", proteins=7)


@pytest.fixture(scope="module")
def unbroken(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("elastic") / "unbroken"
    train_on_ranks(TWO, store, out)
    return out


def test_a_process_is_killed_and_the_job_restarts_the_same_to_the_bit(
    store: Store, unbroken: Path, tmp_path: Path
) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    moment, seconds, which = random.randrange(4, 9), random.uniform(0, 0.2), random.randrange(2)
    # Shown if the test fails
    print(f"killed process {which}, {seconds} s after row {moment}")
    torchrun = begin(TWO, store, out, log, "--max-restarts", "2")
    ranks = ranks_of(torchrun, out, moment)
    time.sleep(seconds)
    os.kill(ranks[which], signal.SIGKILL)
    assert torchrun.wait() == 0, log.read_text()
    assert "SIGTERM" in log.read_text(), "it ended before it could be killed"
    assert rows(out) == rows(unbroken)
    for name in ("params.safetensors", f"checkpoints/step-{STEPS:08d}/state.safetensors"):
        assert equal_tensors(out / name, unbroken / name), name


@pytest.mark.slow
def test_a_process_of_another_machine_is_killed(store: Store, unbroken: Path, tmp_path: Path) -> None:
    """Two torchruns, as on two machines, count restarts separately, and their processes still connect to each other."""
    out, logs = tmp_path / "run", [tmp_path / "first", tmp_path / "second"]
    # Free again immediately
    port = dist.TCPStore("127.0.0.1", 0, None, True).port
    options = f"--nnodes 2 --nproc-per-node 1 --max-restarts 2 --rdzv-id 1 --rdzv-endpoint 127.0.0.1:{port}".split()
    machines = [begin(TWO, store, out, log, *options, "--rdzv-backend", "c10d", single=False) for log in logs]
    [killed] = ranks_of(machines[1], out, 5)
    os.kill(killed, signal.SIGKILL)
    assert [machine.wait(200) for machine in machines] == [0, 0], [log.read_text() for log in logs]
    assert rows(out) == rows(unbroken)


@pytest.mark.parametrize("receiver", ["one process", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_sigterm_saves_and_others_go_on(store: Store, unbroken: Path, tmp_path: Path, receiver: str) -> None:
    """After a checkpoint, all processes exit with 0. One device continues, and then two that share each protein."""
    out, log = tmp_path / "run", tmp_path / "log"
    torchrun = begin(TWO, store, out, log)
    ranks = ranks_of(torchrun, out, 4)
    os.kill(ranks[1] if receiver == "one process" else torchrun.pid, signal.SIGTERM)
    code = torchrun.wait(200)
    [steps] = map(int, re.findall(r"stopped after (\d+) steps; the same command continues", log.read_text()))
    assert 3 <= steps < STEPS
    assert (out / f"checkpoints/step-{steps:08d}").is_dir()
    # torchrun itself always exits with 1 after a signal
    if receiver == "one process":
        assert code == 0, log.read_text()
    assert "exitcode" not in log.read_text(), "a process did not exit with 0"

    config = config_for(Plan(), accumulate=4, steps=min(max(steps + 2, STEPS - 3), STEPS - 1), validate_every=0)
    train(config, store, out)
    train_on_ranks(replace(TWO, plan=Plan(axial=2)), store, out)
    assert_alike(out, unbroken, kinds=("step",))


@pytest.mark.slow
def test_a_machine_is_lost_for_good_and_the_others_go_on(store: Store, tmp_path: Path) -> None:
    """With `--nnodes 1:2`, torchrun continues with one machine and a new plan, and each step has all its examples."""
    out, logs = tmp_path / "run", [tmp_path / "first", tmp_path / "second"]
    # Free again immediately
    port = dist.TCPStore("127.0.0.1", 0, None, True).port
    options = f"--nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-id 1 --rdzv-endpoint 127.0.0.1:{port}".split()
    config = replace(TWO, train=replace(TWO.train, save_every=2))
    # The settings specify no plan
    text = re.sub(r"(?ms)^\[plan.*?(?=^\[(?!plan)|\Z)", "", settings.to_toml(config))
    machines = []
    for host, log in enumerate(logs):
        more = ["--rdzv-backend", "c10d", "--rdzv-conf", f"is_host={1 - host},{RDZV_CONF}"]
        machines.append(begin(config, store, out, log, *options, *more, single=False, text=text))
    [lost] = ranks_of(machines[1], out, 5)
    # Not the machine that runs torchrun's store
    for process in (machines[1].pid, lost):
        os.kill(process, signal.SIGKILL)
    assert machines[0].wait(300) == 0, logs[0].read_text()
    machines[1].wait()
    assert sorted(path.name for path in out.glob("order*")) == ["order-0-of-2.txt", "order-1-of-2.txt", "order.txt"]
    alone = tmp_path / "alone"
    train(replace(config, plan=Plan()), store, alone)
    assert_alike(out, alone, kinds=("step",))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="scripts are bash's, which is not here")
def test_another_machine_takes_the_place_of_a_lost_one(store: Store, unbroken: Path, tmp_path: Path) -> None:
    """docs/examples/torchrun.sh starts each machine, here with another command, and without GPUs."""
    out, file, script = tmp_path / "run", tmp_path / "two.toml", tmp_path / "job.sh"
    file.write_text(settings.to_toml(TWO))
    # Free again immediately
    port = dist.TCPStore("127.0.0.1", 0, None, True).port
    command = ("train", str(file), "--data", str(store.path), "--out", str(out), "--device", "cpu")
    text = SCRIPT
    for before, after in {
        "RANKS_PER_NODE=8": "RANKS_PER_NODE=1",
        "FIRST=node1:29500": f"FIRST=127.0.0.1:{port}",
        "OMP_NUM_THREADS=4": "OMP_NUM_THREADS=1",
        "exec torchrun ": f"exec {shlex.join(TORCHRUN)} ",
        "    --numa-binding node \\\n": "",
        "logs/$(hostname)": str(tmp_path / "logs"),
        "train monomer --data store --out run": shlex.join(command),
    }.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    script.write_text(text)

    def start() -> subprocess.Popen:
        return subprocess.Popen(["bash", script], cwd=ROOT, env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"})

    first = start()
    # The first machine runs torchrun's store
    dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    second = start()
    [lost] = ranks_of(second, out, 5)
    for process in (second.pid, lost):
        os.kill(process, signal.SIGKILL)
    second.wait()
    third = start()
    assert [machine.wait(200) for machine in (first, third)] == [0, 0]
    assert rows(out) == rows(unbroken)
