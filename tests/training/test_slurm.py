"""Test docs/examples/slurm.sh and `srun` with a real Slurm of two nodes that are emulated on this machine."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.training.runs import equal_tensors, make_store, rows
from tests.training.test_train_ranks import config_for, train_on_ranks
from warpfold import settings
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import ProcessInfo

ROOT = Path(__file__).parents[2]
STEPS = 30
TWO = config_for(Plan(data=2), accumulate=2, steps=STEPS, validate_every=0, save_every=5)
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "srun")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"  # Debian's daemons
missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (Debian: slurmctld slurmd munge)"),
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="slurmd runs as root"),
]

CONF = """ClusterName=two
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
AuthInfo=socket={at}/munge/socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool/%n
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd-%n.pid
SlurmctldLogFile={at}/slurmctld.log
SlurmdLogFile={at}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=1,sched_interval=1
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=node1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=node2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=cpu Nodes=node1,node2 Default=YES State=UP
"""


class Slurm:
    """A private Slurm in a folder, whose daemons end with the test."""

    def __init__(self, at: Path) -> None:
        self.variables = os.environ | {"PATH": PATH, "SLURM_CONF": str(at / "slurm.conf"), "PYTHONPATH": str(ROOT)}
        self.at = at
        for folder in ("munge", "state", "spool/node1", "spool/node2"):
            (at / folder).mkdir(parents=True)
        at.chmod(0o755)
        (at / "munge/key").write_bytes(os.urandom(128))
        (at / "munge/key").chmod(0o400)
        stores = [dist.TCPStore("127.0.0.1", 0, None, True) for _ in range(3)]
        (at / "slurm.conf").write_text(CONF.format(at=at, ports=[store.port for store in stores]))
        del stores  # frees the ports
        munge = [f"--{name}={at}/munge/{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
        self.daemons = [
            self._start("munged", "--foreground", "--force", f"--key-file={at}/munge/key", *munge),
            self._start("slurmctld", "-D", "-c"),
            self._start("slurmd", "-D", "-N", "node1"),
            self._start("slurmd", "-D", "-N", "node2"),
        ]

    def _start(self, *command: str) -> subprocess.Popen:
        with open(self.at / f"{command[0]}-{command[-1]}.said".replace("/", "-"), "w") as said:
            return subprocess.Popen(command, env=self.variables, stdout=said, stderr=said)

    def ask(self, *command: str) -> str:
        """Run one of Slurm's programs."""
        done = subprocess.run(command, cwd=self.at, env=self.variables, capture_output=True, text=True, check=False)
        return done.stdout

    def wait(self, what: Callable[[], bool]) -> None:
        """Wait until a condition holds, and fail if a daemon ends."""
        while not what():
            assert all(daemon.poll() is None for daemon in self.daemons), "a daemon of Slurm's has ended"
            time.sleep(0.2)

    def state(self, job: str) -> str:
        """Return a job's state; "" if it has left the queue."""
        return self.ask("squeue", "--noheader", "--jobs", job, "--format", "%T").strip()

    def end(self) -> None:
        """End all jobs, then all daemons."""
        self.ask("scancel", "--user=root")
        self.wait(lambda: not self.ask("squeue", "--noheader").strip())
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait()


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    made = Slurm(tmp_path)
    try:
        made.wait(lambda: made.ask("sinfo", "--noheader", "--format", "%T %D").strip() == "idle 2")
        yield made
    finally:
        made.end()


def ranks_of(store: Path) -> list[int]:
    """List the processes that train from a store, without those of torchrun and Slurm."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(store).encode() in words and b"torch.distributed.run" not in words:
            found.append(int(entry.parent.name))
    return found


def test_killed_submitted_again_and_queued_again_it_ends_the_same_to_the_bit(slurm: Slurm, tmp_path: Path) -> None:
    store, out = make_store(tmp_path / "my store", proteins=7), tmp_path / "run"
    train_on_ranks(TWO, store, tmp_path / "unbroken")
    (tmp_path / "tiny.toml").write_text(settings.to_toml(TWO))
    command = ["train", "tiny.toml", "--data", str(store.path), "--out", "run", "--device", "cpu"]
    text = (ROOT / "docs" / "examples" / "slurm.sh").read_text(encoding="utf-8")
    for before, after in {
        "--ntasks-per-node=8": "--ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8\n": "",
        "--cpus-per-task=8": "--cpus-per-task=1",
        "OMP_NUM_THREADS=4": "OMP_NUM_THREADS=1",
        # Only Slurm can resolve the names of the nodes.
        "asked=\n": "asked=\nexport MASTER_ADDR=127.0.0.1\n",
        "warpfold train monomer --data store --out run": shlex.join([sys.executable, "-m", "warpfold", *command]),
    }.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (tmp_path / "job.sh").write_text(text)

    def submit() -> str:
        return slurm.ask("sbatch", "--parsable", "job.sh").strip()

    def output(job: str) -> str:
        return (tmp_path / f"warpfold-{job}.out").read_text()

    def has(job: str, steps: int) -> bool:
        assert slurm.state(job), output(job)
        return (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_bytes().count(b"\n") >= steps

    killed = submit()
    slurm.wait(lambda: has(killed, 6))
    os.kill(ranks_of(store.path)[0], signal.SIGKILL)
    slurm.wait(lambda: not slurm.state(killed))  # not requeued
    job = submit()
    slurm.wait(lambda: has(job, 12))
    # Slurm sends this signal before the time limit.
    slurm.ask("scancel", "--batch", "--signal=USR1", job)
    slurm.wait(lambda: slurm.state(job) == "PENDING")
    assert len(rows(out)) < STEPS
    # slurmd rejects a job credential from the second in which the job was requeued.
    time.sleep(3)
    # Otherwise the job would start after two minutes.
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    slurm.wait(lambda: not slurm.state(job) or slurm.state(job) == "COMPLETED")
    assert rows(out) == rows(tmp_path / "unbroken"), output(job)
    assert equal_tensors(out / "params.safetensors", tmp_path / "unbroken/params.safetensors")


def test_tasks_of_srun_are_ranks_and_a_shell_is_none(slurm: Slurm, tmp_path: Path) -> None:
    """In the shell of a batch job with two tasks a command runs alone.  With srun its two tasks are ranks."""
    code = "import os; from warpfold.parallel.team import ProcessInfo as P; print(P.from_environment(os.environ))"
    (tmp_path / "who.sh").write_text(f"#!/bin/bash\nexec {sys.executable} -c '{code}'\n")
    doctor = f"{sys.executable} -m warpfold doctor --cluster --device cpu --folder runs --json"
    # Only Slurm can resolve the names of the nodes.
    lines = ["bash who.sh > shell", "srun --ntasks=1 --nodes=1 bash who.sh > one", "export MASTER_ADDR=127.0.0.1",
             "srun --label bash who.sh > ranks", f"srun {doctor} > report"]  # fmt: skip
    (tmp_path / "job.sh").write_text("\n".join(["#!/bin/bash", "#SBATCH --nodes=2 --ntasks-per-node=1", *lines]))
    job = slurm.ask("sbatch", "--parsable", "job.sh").strip()
    slurm.wait(lambda: not slurm.state(job))
    said = (tmp_path / f"slurm-{job}.out").read_text()
    assert (tmp_path / "shell").read_text() == (tmp_path / "one").read_text() == f"{ProcessInfo()}\n", said
    ranks = sorted((tmp_path / "ranks").read_text().splitlines())
    assert len({line.partition("port=")[2] for line in ranks}) == 1
    for rank, line in enumerate(ranks):
        assert line.startswith(f"{rank}: ProcessInfo(rank={rank}, ranks=2, local_rank=0, ranks_per_node=1, "), said
    report = json.loads((tmp_path / "report").read_text())
    assert (report["ranks"], report["per_node"], len(report["links"]["pairs"])) == (2, 1, 1), said
