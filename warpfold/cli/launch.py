"""`warpfold launch`."""

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer

from warpfold.arguments import argument, decides, reads, runs, writes
from warpfold.cli.common import CONTINUE, app, command
from warpfold.errors import UserError
from warpfold.files import check_new, write_atomically

Command = Annotated[
    list[str] | None, argument("The command to start, behind --: train monomer --data store ...", show_default=False)
]
Slurm = Annotated[bool, decides("A batch script for sbatch.", "--slurm")]
Torchrun = Annotated[bool, decides("A script to be started on each node.", "--torchrun")]
Kubernetes = Annotated[bool, decides("A Job and a Service, as YAML for kubectl.", "--kubernetes")]
ClusterFile = Annotated[
    Path | None, reads("Nodes, ranks and device, as `warpfold doctor --cluster --out` or you wrote them.", "--cluster")
]
Findings = Annotated[
    Path | None, reads("What `warpfold doctor --cluster --json` printed: the script cures what a script can.")
]
Nodes = Annotated[int | None, runs("Nodes; default: of --cluster, else 1.", min=1)]
PerNode = Annotated[int | None, runs("Ranks on each node; default: of --cluster, else 1.", "--per-node", min=1)]
Gpus = Annotated[bool | None, runs("A GPU for each rank, or none; default: by --cluster.", "--gpus/--no-gpus")]
Cores = Annotated[int | None, runs("Cores of each node for this job; default: the scheduler's.", min=1)]
OfNode = Annotated[str | None, runs("Memory of each node for this job, as the scheduler writes it: 64G, 64Gi.")]
Time = Annotated[str | None, runs("Slurm: at most so long; the job saves before, and is queued again: 24:00:00.")]
Grace = Annotated[int, runs("Seconds before that, or before a kill, that ranks get to save.")]
Image = Annotated[
    str | None, runs("Container: with Slurm an Apptainer .sif, or what Pyxis takes; Kubernetes needs one.")
]
Claim = Annotated[str | None, runs("Kubernetes: a PersistentVolumeClaim and where it is mounted: data:/data.")]
Address = Annotated[str | None, runs("Torchrun on several nodes: the first one's name or address.")]
Options = Annotated[
    list[str] | None, runs("Slurm: more of its options, without --: qos=high, exclude=node7.", "--option")
]
Restarts = Annotated[int, runs("How often torchrun starts ranks again after one died.", "--max-restarts", min=0)]
Logs = Annotated[str, writes("Folder for a log of each rank, as the job will see it.")]
Out = Annotated[Path | None, writes("File for the script, a new one; default: print it.", "--out", "-o")]
Submit = Annotated[bool, runs("Also start it: sbatch, kubectl apply, or bash; needs --out.", "--submit")]


@command(
    context_settings={"allow_interspersed_args": False},  # what follows the command's name is the command's, -- or not
    example="Example:  warpfold launch --slurm --cluster cluster.toml --time 24:00:00 --out train.sh -- "
    "train monomer --data store --out run",
)
def launch(
    command: Command = None,
    slurm: Slurm = False,
    torchrun: Torchrun = False,
    kubernetes: Kubernetes = False,
    cluster: ClusterFile = None,
    findings: Findings = None,
    nodes: Nodes = None,
    per_node: PerNode = None,
    gpus: Gpus = None,
    cores: Cores = None,
    memory: OfNode = None,
    time: Time = None,
    grace: Grace = 180,
    name: Annotated[str, runs("Of the job.")] = "warpfold",
    partition: Annotated[str | None, runs("Slurm: of these nodes.")] = None,
    account: Annotated[str | None, runs("Slurm: account to charge.")] = None,
    option: Options = None,
    image: Image = None,
    claim: Claim = None,
    address: Address = None,
    max_restarts: Restarts = 3,
    logs: Logs = "logs",
    out: Out = None,
    submit: Submit = False,
) -> None:
    """Write the script that starts a command on the nodes of a cluster; nothing is started unless asked."""
    from warpfold.training.launch import LaunchJob, kubernetes_manifest, slurm_script, torchrun_script

    if slurm + torchrun + kubernetes != 1:
        raise UserError("launch: give one of --slurm, --torchrun and --kubernetes")
    if submit and out is None:
        raise UserError("--submit: name a file for the script, too: --out FILE")
    words = command or []
    words = words[1:] if words[:1] == ["warpfold"] else words
    job = LaunchJob(
        command=tuple(words), name=name, cores=cores, memory=memory, time=time, partition=partition, account=account,
        image=image, options=tuple(option or ()), max_restarts=max_restarts, grace=grace, logs=logs,
        continues=words[:1] != [] and words[0] in CONTINUE, **_place(cluster, findings, nodes, per_node, gpus),
    )  # fmt: skip
    _check_command(words, elsewhere=image is not None)
    if slurm:
        script, start = slurm_script(job), ["sbatch"]
    elif torchrun:
        script, start = torchrun_script(job, address), ["bash"]
    else:
        script, start = kubernetes_manifest(job, claim), ["kubectl", "apply", "-f"]
    if out is None:
        typer.echo(script, nl=False)
        return
    check_new(out)
    write_atomically(out, script)
    start = [*start, str(out)]
    if not submit:
        typer.echo(f"{out}; start it: {shlex.join(start)}")
        return
    if shutil.which(start[0]) is None:
        raise UserError(f"{start[0]}: not found here; {out} is written: start it where {start[0]} is")
    raise typer.Exit(subprocess.run(start, check=False).returncode)


def _check_command(words: list[str], elsewhere: bool) -> None:
    """Refuse a command that would only fail when the job begins; elsewhere: another warpfold may know other options."""
    commands = getattr(typer.main.get_command(app), "commands", {})
    if words[0] not in commands:
        raise UserError(f"{words[0]}: not a command of warpfold; those are {', '.join(commands)}")
    if not elsewhere:
        commands[words[0]].make_context(f"warpfold {words[0]}", words[1:])


def _place(
    cluster: Path | None, findings: Path | None, nodes: int | None, per_node: int | None, gpus: bool | None
) -> dict[str, Any]:
    """Return nodes, ranks and devices, and what the doctor says, as fields of a `LaunchJob`."""
    from warpfold.cost.links import read_cluster
    from warpfold.training.launch import cures_of, has_gpus

    known = read_cluster(cluster) if cluster is not None else None
    found: dict[str, Any] = {
        "nodes": nodes or (known.nodes if known else 1),
        "per_node": per_node or (min(known.per_node, known.ranks) if known else 1),
        "gpus": gpus if gpus is not None else known is not None and has_gpus(known.device),
    }
    if findings is not None:
        try:
            report = json.loads(findings.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{findings}: cannot be read as JSON ({error}); doctor --cluster --json prints it"
            ) from None
        found["lines"], found["remarks"] = cures_of(report, str(findings))
    return found
