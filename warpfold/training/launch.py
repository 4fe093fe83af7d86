"""Scripts that start a command of WarpFold on the nodes of a cluster: for Slurm, and for torchrun alone.

In each of them one torchrun on each node starts the node's ranks, restarts them when one dies, and hands SIGTERM on,
at which `train` saves and ends (docs/parallel.md).  Kubernetes is in `training/launch_kubernetes.py`.
"""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warpfold.cost.rates import SHEETS
from warpfold.errors import UserError

PORT = 29500  # torch's own default
BEFORE_KILL = 30  # seconds that torchrun is given less than the whole, to end after its ranks
THREADS_ON_GPU = 4  # of torch's, where a GPU computes: more cores serve the loaders, which are processes of their own
# Of torchrun; by default a silent node counts as lost after 15 s, and others are waited for 30 s (docs/parallel.md).
SOON = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3"
ELASTIC = (
    "# After a lost node: by keep_alive torchrun knows it in 6 s, not 15; by last_call it waits for more nodes, where",
    "# fewer will do, for 5 s, not 30; and with this it tells a node that comes in its place where the ranks meet.",
    "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
)
# What of a doctor's findings may stand in a script.
CURES = re.compile(r"unset [A-Z_0-9]+|export [A-Z_0-9]+=[\w.,:/-]*|ulimit -[a-z] (\d+|unlimited)")
# What Slurm reads after #SBATCH is no shell: no quotes, no spaces.
PLAIN = re.compile(r"[\w.,:/@%=+*\[\]-]+")
TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|(?i:infinite|unlimited)")


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """A command of WarpFold, and what it is to run on.

    command: with its arguments, without "warpfold".  gpus: whether each rank has one.  cores, memory: of each node.
    grace: seconds that ranks get to save.  continues: whether the same command goes on where it was stopped.
    lines, remarks: of shell, that cure what the doctor found; what else it found.  options: more of the scheduler's.
    """

    command: tuple[str, ...]
    nodes: int = 1
    per_node: int = 1
    gpus: bool = False
    name: str = "warpfold"
    cores: int | None = None
    memory: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    image: str | None = None
    options: tuple[str, ...] = ()
    max_restarts: int = 3
    grace: int = 180
    logs: str = "logs"
    python: str = sys.executable
    continues: bool = True
    lines: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.command or self.command[0].startswith("-"):
            raise UserError("launch: no command; give it after --, as in: -- train monomer --data store --out run")
        if any("\n" in one for one in (*self.command, self.python, self.image or "", self.logs)):
            raise UserError("launch: a line break in the command; a script cannot hold it")
        if self.time is not None and not TIME.fullmatch(self.time):
            raise UserError(f"--time {self.time}: Slurm takes minutes, 24:00:00 or days-hours, as in 2-12")
        if self.grace < 2 * BEFORE_KILL:
            raise UserError(
                f"--grace {self.grace}: give {2 * BEFORE_KILL} seconds or more: ranks have to save a checkpoint"
            )
        named = {"--name": self.name, "--time": self.time, "--partition": self.partition, "--account": self.account}
        named |= {"--memory": self.memory, **{f"--option {one}": one for one in self.options}}
        for option, value in named.items():
            if value is not None and not PLAIN.fullmatch(value):
                raise UserError(
                    f"{option}: {value!r} has characters that a scheduler does not take; use letters and digits"
                )


def has_gpus(device: str) -> bool:
    """Return whether a device's name, as `Cluster` has it, is a GPU's."""
    return any(name.lower() in device.lower() for name in (*SHEETS, "NVIDIA", "cuda"))


def cures_of(report: Mapping[str, Any], where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the lines of shell that cure what a doctor found wrong, and remarks on what a script cannot cure.

    report: what `warpfold doctor --cluster --json` printed.  Errors: UserError where it is something else.
    """
    try:
        wrong = [one for one in report["findings"] if one["outcome"] == "wrong"]
        lines = [str(one["line"]) for one in wrong if one.get("line")]
        others = [
            " ".join(f"{one['check']}: {one['says']}; {one['cure']}".split()) for one in wrong if not one.get("line")
        ]
    except (KeyError, TypeError) as error:
        raise UserError(f"{where}: not what `warpfold doctor --cluster --json` printed: no {error}") from None
    for line in lines:
        if not CURES.fullmatch(line):
            raise UserError(f"{where}: {line!r} is no line that a doctor writes; make the report again")
    return tuple(dict.fromkeys(lines)), tuple(dict.fromkeys(others))


def meeting_options(nodes: str, name: str, endpoint: str, is_first: str = "", own: str = "") -> list[str]:
    """Return torchrun's options of where nodes meet, all of them shell.

    nodes: how many.  name: of this meeting.  endpoint: of the first node.  is_first: "1" on it, "0" on others; by
    default torchrun compares names.  own: this node's address, as others reach it; by default its host's name.
    """
    settings = f'"is_host={is_first},{SOON}"' if is_first else SOON
    return [
        f"--nnodes {nodes} --rdzv-backend c10d --rdzv-id {name} --rdzv-endpoint {endpoint}",
        f"--rdzv-conf {settings}",
        *([f"--local-addr {own}"] if own else []),
    ]


def torchrun_lines(job: LaunchJob, meet: Sequence[str], logs: str) -> list[str]:
    """Return the lines of shell that a node runs: limits, variables, threads, and torchrun in the shell's place.

    meet: torchrun's options of where the nodes meet, as shell.  logs: a folder, as shell.
    """
    threads = f"$(($(nproc) / {job.per_node}))" if job.cores is None else str(max(1, job.cores // job.per_node))
    if job.gpus and job.cores is not None:
        threads = str(min(THREADS_ON_GPU, int(threads)))
    elif job.gpus:
        threads = f"$(($(nproc) / {job.per_node} < {THREADS_ON_GPU} ? $(nproc) / {job.per_node} : {THREADS_ON_GPU}))"
    options = [
        f"--nproc-per-node {job.per_node} --max-restarts {job.max_restarts}",
        f"--shutdown-timeout {job.grace - BEFORE_KILL}",
        *(["--numa-binding node"] if job.gpus else []),  # each rank on the cores next to its GPU
        f"--log-dir {logs} --redirects 3 --tee 0:3 --local-ranks-filter 0",
    ]
    python = "python3" if job.image else shlex.quote(job.python)
    return [
        "unset OMP_NUM_THREADS  # which nproc would believe",
        f"OMP_NUM_THREADS={threads}",
        "export OMP_NUM_THREADS=$((OMP_NUM_THREADS > 0 ? OMP_NUM_THREADS : 1)) PYTHONUNBUFFERED=1",
        *(ELASTIC if job.nodes > 1 else ()),
        *(f"{line} || echo 'refused: {line}' >&2" for line in job.lines),
        f"exec {contained(job)}{python} -m torch.distributed.run \\",
        *(f"    {option} \\" for option in [*meet, *options]),
        f"    -m warpfold {shlex.join(job.command)}",
    ]


def contained(job: LaunchJob) -> str:
    """Return what stands before a command that runs in an Apptainer image (.sif); nothing without one."""
    if job.image is None or not job.image.endswith(".sif"):
        return ""
    return f"apptainer exec {'--nv ' if job.gpus else ''}{shlex.quote(job.image)} "


def remarks(job: LaunchJob) -> list[str]:
    """Return what the doctor found and no script can cure, as comments."""
    return (
        ["# The doctor found, and a script cannot cure:", *(f"#   {one}" for one in job.remarks)] if job.remarks else []
    )


def torchrun_script(job: LaunchJob, address: str | None = None) -> str:
    """Return a script to be started on each node alike.  address: of the first node, which all reach.

    Errors: UserError for several nodes without one.
    """
    if job.nodes > 1 and not address:
        raise UserError(f"--torchrun: {job.nodes} nodes have to meet; name the first: --address node1")
    if job.nodes > 1:
        where = str(address) if ":" in str(address) else f"{address}:{PORT}"
        meet = meeting_options(str(job.nodes), shlex.quote(job.name), shlex.quote(where))
    else:
        meet = ["--standalone"]
    logs = f"{shlex.quote(job.logs)}/$(hostname)"
    head = [
        "#!/bin/bash",
        f"# Start it on {'each of ' if job.nodes > 1 else ''}{job.nodes} node{'s' if job.nodes > 1 else ''}, in the "
        f"same folder.  Logs of each rank: {one_line(job.logs)}/.",
        "# SIGTERM, to this process: all ranks save and end; the same command continues.",
    ]
    return "\n".join([*head, *remarks(job), "set -u", *torchrun_lines(job, meet, logs)]) + "\n"


def one_line(text: str) -> str:
    """Return a text without line breaks, for a comment."""
    return " ".join(text.split())


def slurm_script(job: LaunchJob) -> str:
    """Return a batch script for sbatch: one task a node, asked to save before the time is over, and queued again."""
    options = {
        "--job-name": job.name,
        "--nodes": job.nodes,
        "--ntasks-per-node": 1,
        "--gpus-per-node": job.per_node if job.gpus else None,
        "--cpus-per-task": job.cores,
        "--mem": job.memory,
        "--time": job.time,
        "--partition": job.partition,
        "--account": job.account,
        "--signal": f"B:USR1@{job.grace}" if job.continues and job.time else None,
        "--output": f"{job.name}-%j.out",
        "--open-mode": "append",
    }
    head = ["#!/bin/bash", *(f"#SBATCH {name}={value}" for name, value in options.items() if value is not None)]
    head += ["#SBATCH --requeue" if job.continues else "#SBATCH --no-requeue", *(f"#SBATCH --{o}" for o in job.options)]
    own = '"$(sed -n "s/^$SLURMD_NODENAME //p" <<< "$WARPFOLD_NODES")"'
    meet = meeting_options(
        '"$SLURM_NNODES"', '"$WARPFOLD_ATTEMPT"', '"$WARPFOLD_ADDRESS"', "$((SLURM_NODEID == 0))", own
    )
    before = [
        "set -u",
        "# Names of nodes and their addresses, a line each, as names need not be known to all.",
        r"addresses='s/^NodeName=\([^ ]*\) .*NodeAddr=\([^ ]*\).*/\1 \2/p'",
        'export WARPFOLD_NODES="$(scontrol -o show node "$SLURM_JOB_NODELIST" | sed -n "$addresses")"',
        "# The nodes meet at the first one; the port and the name are this job's, so that two jobs do not meet.",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        'address=$(sed -n "s/^$first //p" <<< "$WARPFOLD_NODES")',
        f'export WARPFOLD_ADDRESS="${{address:-$first}}:$(({PORT} + SLURM_JOB_ID % 10000))"',
        'export WARPFOLD_ATTEMPT="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        f'export WARPFOLD_LOGS={shlex.quote(job.logs)}/"$WARPFOLD_ATTEMPT"',
        'mkdir -p "$WARPFOLD_LOGS"',
        'echo "$(date -Is) attempt $WARPFOLD_ATTEMPT on $SLURM_JOB_NODELIST; logs of each rank: $WARPFOLD_LOGS"',
    ]
    node = torchrun_lines(job, meet, '"$WARPFOLD_LOGS/node-$SLURM_NODEID"')
    started = ["read -r -d '' on_each_node <<'NODE'", *node, "NODE"]
    body = [*head, "", *remarks(job), *before, "", *started, "", *_step(job), "", *_ending(job)]
    return "\n".join(body) + "\n"


def _step(job: LaunchJob) -> list[str]:
    """Return the lines that start the ranks and wait for them.

    A signal that has a trap interrupts `wait`.
    """
    run = ["srun", f"--wait={job.grace}", "--export=ALL"]
    # Since 22.05 srun does not take it over.
    run += ['${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}']
    if job.image is not None and not contained(job):
        run += [
            f"--container-image={shlex.quote(job.image)}",
            '--container-mounts="$PWD:$PWD" --container-workdir="$PWD"',
        ]
    return [
        "asked=",
        'save() { asked=1; echo "$(date -Is) asked to save"; scancel --signal=TERM "$SLURM_JOB_ID"; }',
        "trap save USR1",
        f'{" ".join(run)} bash -c "$on_each_node" &',
        "step=$!",
        'wait "$step"; code=$?',
        'while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done',
    ]


def _ending(job: LaunchJob) -> list[str]:
    """Return the lines that queue the job again where it was asked to save, and has not finished."""
    if not job.continues:
        return ['exit "$code"']
    return [
        "# torchrun ends with 1 at a signal, and with 0 when all is done.",
        'if [ -n "$asked" ] && [ "$code" -ne 0 ]; then',
        '    echo "$(date -Is) saved; queued again"',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
