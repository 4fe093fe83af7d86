"""Scripts that start a command of WarpFold on the nodes of a cluster: for Slurm, Kubernetes, and torchrun alone.

In each of them one torchrun on each node starts the node's ranks, restarts them when one dies, and hands SIGTERM on,
at which `train` saves and ends (docs/parallel.md).  The scripts are templates, which `fill` fills in.
"""

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from warpfold.arguments import runs, writes
from warpfold.errors import UserError

PORT = 29500  # torch's own default
BEFORE_KILL = 30  # seconds that torchrun is given less than the whole, to end after its ranks
THREADS_ON_GPU = 4  # of torch's, where a GPU computes: more cores serve the loaders, which are processes of their own
# Of torchrun; by default a silent node counts as lost after 15 s, and others are waited for 30 s (docs/parallel.md).
SOON = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3"
LABEL = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")  # of a Service (RFC 1035), with room for a pod's number
CLAIM = re.compile(r"([a-z0-9][a-z0-9.-]*):(/.*)")
# What of a doctor's findings may stand in a script.
CURES = re.compile(r"unset [A-Z_0-9]+|export [A-Z_0-9]+=[\w.,:/-]*|ulimit -[a-z] (\d+|unlimited)")
# What Slurm reads after #SBATCH is no shell: no quotes, no spaces.
PLAIN = re.compile(r"[\w.,:/@%=+*\[\]-]+")
TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|(?i:infinite|unlimited)")


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """A command of WarpFold, and what it is to run on: what is annotated is an option of `warpfold launch`.

    command: with its arguments, without "warpfold".  gpus: whether each rank has one.  continues: whether the same
    command goes on where it was stopped.  lines, remarks: of shell, that cure what a doctor found; what else it found.
    """

    command: tuple[str, ...]
    nodes: int = 1
    per_node: int = 1
    gpus: bool = False
    cores: Annotated[int | None, runs("Cores of each node for this job; default: the scheduler's.", min=1)] = None
    memory: Annotated[str | None, runs("Memory of each node for this job, as the scheduler writes it: 64G, 64Gi.")] = (
        None
    )
    time: Annotated[
        str | None, runs("Slurm: at most so long; the job saves before, and is queued again: 24:00:00.")
    ] = None
    grace: Annotated[int, runs("Seconds before that, or before a kill, that ranks get to save.")] = 180
    name: Annotated[str, runs("Of the job.")] = "warpfold"
    partition: Annotated[str | None, runs("Slurm: of these nodes.")] = None
    account: Annotated[str | None, runs("Slurm: account to charge.")] = None
    options: Annotated[
        Sequence[str] | None,
        runs("Slurm: more of its options, without --: qos=high, exclude=node7.", "--option", shell=list[str] | None),
    ] = None
    image: Annotated[
        str | None, runs("Container: with Slurm an Apptainer .sif, or what Pyxis takes; Kubernetes needs one.")
    ] = None
    max_restarts: Annotated[int, runs("How often torchrun starts ranks again after one died.", min=0)] = 3
    logs: Annotated[str, writes("Folder for a log of each rank, as the job will see it.")] = "logs"
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
        named |= {"--memory": self.memory, **{f"--option {one}": one for one in self.options or ()}}
        for option, value in named.items():
            if value is not None and not PLAIN.fullmatch(value):
                raise UserError(
                    f"{option}: {value!r} has characters that a scheduler does not take; use letters and digits"
                )

    @property
    def in_apptainer(self) -> bool:
        """Whether each node's ranks run in an Apptainer image."""
        return self.image is not None and self.image.endswith(".sif")


def has_gpus(device: str) -> bool:
    """Return whether a device's name, as `Cluster` has it, is a GPU's."""
    from warpfold.cost.rates import SHEETS  # loads torch, and the command line declares its options from `LaunchJob`

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


# ---- templates: @name@ is filled in


RANKS = r"""
unset OMP_NUM_THREADS  # which nproc would believe
OMP_NUM_THREADS=@threads@
export OMP_NUM_THREADS=$((OMP_NUM_THREADS > 0 ? OMP_NUM_THREADS : 1)) PYTHONUNBUFFERED=1
@elastic@
@cures@
exec @container@@python@ -m torch.distributed.run \
    @meet@ \
    --nproc-per-node @per_node@ --max-restarts @max_restarts@ \
    --shutdown-timeout @shutdown@ \
    @binding@ \
    --log-dir @log_dir@ --redirects 3 --tee 0:3 --local-ranks-filter 0 \
    -m warpfold @command@
"""
ELASTIC = """
# After a lost node: by keep_alive torchrun knows it in 6 s, not 15; by last_call it waits for more nodes, where
# fewer will do, for 5 s, not 30; and with this it tells a node that comes in its place where the ranks meet.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
"""
REMARKS = """
# The doctor found, and a script cannot cure:
#   @remarks@
"""
TORCHRUN = """
#!/bin/bash
# Start it on @nodes@, in the same folder.  Logs of each rank: @logs@/.
# SIGTERM, to this process: all ranks save and end; the same command continues.
@remarks@
set -u
@ranks@
"""
# One task a node, asked to save before the time is over, and queued again.  A signal that has a trap interrupts `wait`.
SLURM = r"""
#!/bin/bash
#SBATCH --job-name=@name@
#SBATCH --nodes=@nodes@
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=@gpus@
#SBATCH --cpus-per-task=@cores@
#SBATCH --mem=@memory@
#SBATCH --time=@time@
#SBATCH --partition=@partition@
#SBATCH --account=@account@
#SBATCH --signal=B:USR1@@signal@
#SBATCH --output=@name@-%j.out
#SBATCH --open-mode=append
#SBATCH --@requeue@
@options@

@remarks@
set -u
# Names of nodes and their addresses, a line each, as names need not be known to all.
addresses='s/^NodeName=\([^ ]*\) .*NodeAddr=\([^ ]*\).*/\1 \2/p'
export WARPFOLD_NODES="$(scontrol -o show node "$SLURM_JOB_NODELIST" | sed -n "$addresses")"
# The nodes meet at the first one; the port and the name are this job's, so that two jobs do not meet.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(sed -n "s/^$first //p" <<< "$WARPFOLD_NODES")
export WARPFOLD_ADDRESS="${address:-$first}:$((@port@ + SLURM_JOB_ID % 10000))"
export WARPFOLD_ATTEMPT="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
export WARPFOLD_LOGS=@logs@/"$WARPFOLD_ATTEMPT"
mkdir -p "$WARPFOLD_LOGS"
echo "$(date -Is) attempt $WARPFOLD_ATTEMPT on $SLURM_JOB_NODELIST; logs of each rank: $WARPFOLD_LOGS"

read -r -d '' on_each_node <<'NODE'
@ranks@
NODE

asked=
save() { asked=1; echo "$(date -Is) asked to save"; scancel --signal=TERM "$SLURM_JOB_ID"; }
trap save USR1
# Since 22.05 srun does not take the number of cores over.
srun --wait=@grace@ --export=ALL ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    @pyxis@ \
    bash -c "$on_each_node" &
step=$!
wait "$step"; code=$?
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done

@again@
exit "$code"
"""
# torchrun ends with 1 at a signal, and with 0 when all is done.
AGAIN = """
if [ -n "$asked" ] && [ "$code" -ne 0 ]; then
    echo "$(date -Is) saved; queued again"
    scontrol requeue "$SLURM_JOB_ID"
fi
"""
# The Job is indexed: its pods are called NAME-0, NAME-1 ..., and the Service, which has no address of its own, makes
# these names known, also before the pods are ready, so that all find NAME-0.
KUBERNETES = """
@remarks@
apiVersion: v1
kind: Service
metadata:
  name: @name@
spec:
  clusterIP: "None"
  publishNotReadyAddresses: true
  selector:
    batch.kubernetes.io/job-name: @name@
  ports:
    - name: rendezvous
      port: @port@
---
apiVersion: batch/v1
kind: Job
metadata:
  name: @name@
spec:
  completionMode: Indexed
  completions: @nodes@
  parallelism: @nodes@
  backoffLimit: @failures@
  podFailurePolicy:
    rules:  # a pod that has to leave its node is made anew, and does not count as a failure
      - action: Ignore
        onPodConditions:
          - type: DisruptionTarget
            status: "True"
  template:
    spec:
      subdomain: @name@
      restartPolicy: Never
      terminationGracePeriodSeconds: @grace@
      containers:
        - name: ranks
          image: @image@
          command:
            - bash
            - -c
            - |-
              set -u
              mkdir -p @logs@
              @ranks@
          ports:
            - containerPort: @port@
          volumeMounts:
            - name: shared-memory
              mountPath: /dev/shm
            @mount@
          @place@
          @limits@
          @locked@
      volumes:
        - name: shared-memory
          emptyDir:
            medium: Memory
            sizeLimit: 16Gi  # at most: memory that is used counts
        @claim@
"""


def fill(template: str, **values: Any) -> str:
    """Fill in a template: a line with a name that is None goes; each line of a value has the indentation of its own."""
    filled = []
    for line in template.strip("\n").split("\n"):
        names = re.findall(r"@(\w+)@", line)
        if all(values[name] is not None for name in names):
            before = line[: len(line) - len(line.lstrip(" #"))]
            parts = re.split(r"@(\w+)@", line)
            parts[1::2] = [str(values[name]).replace("\n", "\n" + before) for name in names]
            filled.append("".join(parts))
    return "\n".join(filled)


def _remarks(job: LaunchJob) -> str | None:
    return fill(REMARKS, remarks="\n".join(job.remarks)) if job.remarks else None


def _ranks(job: LaunchJob, meet: str, log_dir: str) -> str:
    """Return the shell script that a node runs.  meet: torchrun's rendezvous options.  log_dir: as shell."""
    threads = f"$(($(nproc) / {job.per_node}))" if job.cores is None else str(max(1, job.cores // job.per_node))
    if job.gpus and job.cores is not None:
        threads = str(min(THREADS_ON_GPU, int(threads)))
    elif job.gpus:
        threads = f"$(($(nproc) / {job.per_node} < {THREADS_ON_GPU} ? $(nproc) / {job.per_node} : {THREADS_ON_GPU}))"
    nvidia = "--nv " if job.gpus else ""
    return fill(
        RANKS,
        threads=threads,
        elastic=ELASTIC.strip() if job.nodes > 1 else None,
        cures="\n".join(f"{line} || echo 'refused: {line}' >&2" for line in job.lines) or None,
        container=f"apptainer exec {nvidia}{shlex.quote(str(job.image))} " if job.in_apptainer else "",
        python="python3" if job.image else shlex.quote(job.python),
        meet=meet,
        per_node=job.per_node,
        max_restarts=job.max_restarts,
        shutdown=job.grace - BEFORE_KILL,
        binding="--numa-binding node" if job.gpus else None,  # each rank on the cores next to its GPU
        log_dir=log_dir,
        command=shlex.join(job.command),
    )


def _meeting(nodes: str, name: str, endpoint: str, is_first: str = "", own: str = "") -> str:
    """Return torchrun's options of where nodes meet, all of them shell.

    nodes: how many.  name: of this meeting.  endpoint: of the first node.  is_first: "1" on it, "0" on others; by
    default torchrun compares names.  own: this node's address, as others reach it; by default its host's name.
    """
    conf = f'"is_host={is_first},{SOON}"' if is_first else SOON
    address = f" --local-addr {own}" if own else ""
    where = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-id {name} --rdzv-endpoint {endpoint}"
    return f"{where} \\\n--rdzv-conf {conf}{address}"


def torchrun_script(job: LaunchJob, address: str | None = None) -> str:
    """Return a script to be started on each node alike.  address: of the first node, which all reach.

    Errors: UserError for several nodes without one.
    """
    if job.nodes > 1 and not address:
        raise UserError(f"--torchrun: {job.nodes} nodes have to meet; name the first: --address node1")
    where = str(address) if ":" in str(address) else f"{address}:{PORT}"
    meet = _meeting(str(job.nodes), shlex.quote(job.name), shlex.quote(where)) if job.nodes > 1 else "--standalone"
    return (
        fill(
            TORCHRUN,
            nodes=f"each of {job.nodes} nodes" if job.nodes > 1 else "1 node",
            logs=" ".join(job.logs.split()),
            remarks=_remarks(job),
            ranks=_ranks(job, meet, f"{shlex.quote(job.logs)}/$(hostname)"),
        )
        + "\n"
    )


def slurm_script(job: LaunchJob) -> str:
    """Return a batch script for sbatch."""
    own = '"$(sed -n "s/^$SLURMD_NODENAME //p" <<< "$WARPFOLD_NODES")"'
    first = "$((SLURM_NODEID == 0))"
    meet = _meeting('"$SLURM_NNODES"', '"$WARPFOLD_ATTEMPT"', '"$WARPFOLD_ADDRESS"', first, own)
    pyxis = f'--container-image={shlex.quote(str(job.image))} --container-mounts="$PWD:$PWD" --container-workdir="$PWD"'
    return (
        fill(
            SLURM,
            name=job.name,
            nodes=job.nodes,
            gpus=job.per_node if job.gpus else None,
            cores=job.cores,
            memory=job.memory,
            time=job.time,
            partition=job.partition,
            account=job.account,
            signal=job.grace if job.continues and job.time else None,
            requeue="requeue" if job.continues else "no-requeue",
            options="\n".join(f"#SBATCH --{one}" for one in job.options or ()) or None,
            remarks=_remarks(job),
            port=PORT,
            logs=shlex.quote(job.logs),
            ranks=_ranks(job, meet, '"$WARPFOLD_LOGS/node-$SLURM_NODEID"'),
            grace=job.grace,
            pyxis=pyxis if job.image is not None and not job.in_apptainer else None,
            again=AGAIN.strip() if job.continues else None,
        )
        + "\n"
    )


def kubernetes_manifest(job: LaunchJob, claim: str | None = None) -> str:
    """Return the YAML of a Service and a Job; no operator is needed.

    claim: "NAME:/PATH", a PersistentVolumeClaim with the store and the run, and where pods see it.
    Errors: UserError for names that Kubernetes does not take, and without an image.
    """
    if job.image is None:
        raise UserError("--kubernetes: pods need an image in which warpfold is installed; --image REGISTRY/IMAGE:TAG")
    if not LABEL.fullmatch(job.name):
        raise UserError(f"--name {job.name}: Kubernetes takes small letters, digits and -, beginning with a letter")
    held = CLAIM.fullmatch(claim) if claim is not None else None
    if claim is not None and held is None:
        raise UserError(f"--claim {claim}: give a claim and where it is mounted, as in data:/data")
    own = f'{job.name}-"$JOB_COMPLETION_INDEX".{job.name}'
    first = "$((JOB_COMPLETION_INDEX == 0))"
    meet = _meeting(str(job.nodes), job.name, f"{job.name}-0.{job.name}:{PORT}", first, own)
    path, logs = json.dumps(held[2]) if held else None, shlex.quote(job.logs)
    needs = {"cpu": job.cores, "memory": job.memory, "nvidia.com/gpu": job.per_node if job.gpus else None}
    limits = [f'  {name}: "{value}"' for name, value in needs.items() if value]
    return (
        fill(
            KUBERNETES,
            remarks=_remarks(job),
            name=json.dumps(job.name),
            port=PORT,
            nodes=job.nodes,
            failures=job.max_restarts * job.nodes,
            grace=job.grace,
            image=json.dumps(job.image),
            logs=logs,
            ranks=_ranks(job, meet, f'{logs}/"node-$JOB_COMPLETION_INDEX"'),
            mount=f"- name: data\n  mountPath: {path}" if held else None,
            place=f"workingDir: {path}" if held else None,
            limits="\n".join(["resources:", "  limits:", *(f"  {one}" for one in limits)]) if limits else None,
            # Adapters read and write memory that must be locked.
            locked='securityContext:\n  capabilities:\n    add: ["IPC_LOCK"]' if job.gpus else None,
            claim=f'- name: data\n  persistentVolumeClaim:\n    claimName: "{held[1]}"' if held else None,
        )
        + "\n"
    )
