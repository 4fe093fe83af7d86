"""A Job and a Service of Kubernetes that start a command of WarpFold on several nodes; no operator is needed.

The Job is indexed: its pods are called NAME-0, NAME-1 ..., and the Service, which has no address of its own, makes
these names known, so that all find NAME-0.
"""

import json
import re
import shlex
from typing import Any

from warpfold.errors import UserError
from warpfold.training.launch import PORT, LaunchJob, meeting_options, remarks, torchrun_lines

LABEL = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")  # of a Service (RFC 1035), with room for a pod's number
CLAIM = re.compile(r"([a-z0-9][a-z0-9.-]*):(/.*)")
SHARED = "16Gi"  # of /dev/shm, at most: memory that is used counts


def kubernetes_manifest(job: LaunchJob, claim: str | None = None) -> str:
    """Return the YAML of a Service and a Job.

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
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        # Pods have to find each other before they are ready.
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": job.name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }
    batch = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name},
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            "backoffLimit": job.max_restarts * job.nodes,
            # A pod that has to leave its node is made anew, and does not count as a failure.
            "podFailurePolicy": {
                "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
            },
            "template": {"spec": _pod(job, (held[1], held[2]) if held else None)},
        },
    }
    parts = ["\n".join(remarks(job)), "\n".join(to_yaml(service)), "---", "\n".join(to_yaml(batch))]
    return "\n".join(part for part in parts if part) + "\n"


def _pod(job: LaunchJob, claim: tuple[str, str] | None) -> dict[str, Any]:
    name = shlex.quote(job.name)
    meet = meeting_options(
        str(job.nodes), name, f"{name}-0.{name}:{PORT}", "$((JOB_COMPLETION_INDEX == 0))",
        f'{name}-"$JOB_COMPLETION_INDEX".{name}',
    )  # fmt: skip
    logs = f'{shlex.quote(job.logs)}/"node-$JOB_COMPLETION_INDEX"'
    needs = {"cpu": str(job.cores) if job.cores else None, "memory": job.memory}
    if job.gpus:
        needs["nvidia.com/gpu"] = str(job.per_node)
    script = ["set -u", f"mkdir -p {shlex.quote(job.logs)}", *torchrun_lines(job, meet, logs)]
    container: dict[str, Any] = {
        "name": "ranks",
        "image": job.image,
        "command": ["bash", "-c", "\n".join(script)],
        "ports": [{"containerPort": PORT}],
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    if limits := {name: value for name, value in needs.items() if value}:
        container["resources"] = {"limits": limits}
    if job.gpus:  # adapters read and write memory that must be locked
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    volumes: list[dict[str, Any]] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED}},
    ]
    if claim is not None:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": claim[0]}})
        container["volumeMounts"].append({"name": "data", "mountPath": claim[1]})
        container["workingDir"] = claim[1]
    return {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace,
        "containers": [container],
        "volumes": volumes,
    }


def to_yaml(value: Any, indent: int = 0) -> list[str]:
    """Return mappings and lists as lines of YAML; texts in quotes as JSON has them, long ones in lines."""
    space, lines = " " * indent, []
    items = value.items() if isinstance(value, dict) else [("-", item) for item in value]
    for key, item in items:
        head = f"{space}-" if isinstance(value, list) else f"{space}{key}:"
        if isinstance(item, str) and "\n" in item:
            lines += [f"{head} |-", *(f"{space}  {line}".rstrip() for line in item.split("\n"))]
        elif isinstance(item, dict | list):
            inner = to_yaml(item, indent + 2)
            if isinstance(value, list):  # "- name: x", and the rest below "name"
                lines += [f"{head} {inner[0].lstrip()}", *inner[1:]]
            else:
                lines += [head, *inner]
        else:
            lines.append(f"{head} {json.dumps(item)}")
    return lines
