"""`warpfold launch`."""

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from warpfold.arguments import argument, decides, reads, runs, writes
from warpfold.cli.common import CONTINUE, app, command
from warpfold.errors import UserError
from warpfold.files import check_new, write_atomically
from warpfold.training.launch import LaunchJob


@command(
    LaunchJob,
    cls=TyperCommand,
    context_settings={"allow_interspersed_args": False},  # what follows the command's name is the command's, -- or not
    example="Example:  warpfold launch --slurm --cluster cluster.toml --time 24:00:00 --out train.sh -- "
    "train monomer --data store --out run",
)
def launch(
    given: dict[str, Any],
    command: Annotated[
        list[str] | None,
        argument("The command to start, behind --: train monomer --data store ...", show_default=False),
    ] = None,
    slurm: Annotated[bool, decides("A batch script for sbatch.")] = False,
    torchrun: Annotated[bool, decides("A script to be started on each node.")] = False,
    kubernetes: Annotated[bool, decides("A Job and a Service, as YAML for kubectl.")] = False,
    cluster: Annotated[
        Path | None, reads("Nodes, ranks and device, as `warpfold doctor --cluster --out` or you wrote them.")
    ] = None,
    findings: Annotated[
        Path | None, reads("What `warpfold doctor --cluster --json` printed: the script cures what a script can.")
    ] = None,
    nodes: Annotated[int | None, runs("Nodes; default: of --cluster, else 1.", min=1)] = None,
    per_node: Annotated[int | None, runs("Ranks on each node; default: of --cluster, else 1.", min=1)] = None,
    gpus: Annotated[
        bool | None, runs("A GPU for each rank, or none; default: by --cluster.", "--gpus/--no-gpus")
    ] = None,
    claim: Annotated[
        str | None, runs("Kubernetes: a PersistentVolumeClaim and where it is mounted: data:/data.")
    ] = None,
    address: Annotated[str | None, runs("Torchrun on several nodes: the first one's name or address.")] = None,
    out: Annotated[Path | None, writes("File for the script, a new one; default: print it.")] = None,
    submit: Annotated[bool, runs("Also start it: sbatch, kubectl apply, or bash; needs --out.")] = False,
) -> None:
    """Write the script that starts a command on the nodes of a cluster; nothing is started unless asked."""
    from warpfold.cost.links import read_cluster
    from warpfold.training.launch import cures_of, has_gpus, kubernetes_manifest, slurm_script, torchrun_script

    if slurm + torchrun + kubernetes != 1:
        raise UserError("launch: give one of --slurm, --torchrun and --kubernetes")
    if submit and out is None:
        raise UserError("--submit: name a file for the script, too: --out FILE")
    words = command or []
    words = words[1:] if words[:1] == ["warpfold"] else words
    known = read_cluster(cluster) if cluster is not None else None
    if findings is not None:
        try:
            report = json.loads(findings.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{findings}: cannot be read as JSON ({error}); doctor --cluster --json prints it"
            ) from None
        given["lines"], given["remarks"] = cures_of(report, str(findings))
    job = LaunchJob(
        command=tuple(words),
        nodes=nodes or (known.nodes if known else 1),
        per_node=per_node or (min(known.per_node, known.ranks) if known else 1),
        gpus=gpus if gpus is not None else known is not None and has_gpus(known.device),
        continues=words[:1] != [] and words[0] in CONTINUE,
        **given,
    )
    commands = getattr(typer.main.get_command(app), "commands", {})
    if words[0] not in commands:
        raise UserError(f"{words[0]}: not a command of warpfold; those are {', '.join(commands)}")
    if job.image is None:  # refuse what would only fail when the job begins; an image may have another warpfold
        commands[words[0]].make_context(f"warpfold {words[0]}", words[1:])
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
