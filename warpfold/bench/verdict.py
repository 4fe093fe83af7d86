"""Say what a machine is good for, in sentences: the last lines of `warpfold doctor`."""

import importlib.util
import os
import shutil
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from warpfold.bench.doctor import Finding
from warpfold.cost.machine import in_gb
from warpfold.memory import free_memory, host_memory
from warpfold.ops.dispatch import TRITON

LITTLE = 4 * 10**9  # bytes of memory below which a full-size model hardly runs
LITTLE_SHARED = 10**9  # bytes of /dev/shm below which torch's own loaders run out
OPTIONAL = {  # package: what it is for, and how to have it
    "openmm": ("relax", "pip install 'warpfold[relax]'"),
    "tensorboard": ("curves in TensorBoard", "pip install 'warpfold[tensorboard]'"),
}


def of_machine(device: torch.device) -> list[str]:
    """Return what a machine is fine for, and what is missing or slow on it and why; the first sentence sums it up."""
    if device.type not in ("cpu", "cuda"):
        return [f"WarpFold is made for CPUs and CUDA GPUs: on {device.type} every operation runs by its definition."]
    free, cores = free_memory(device), os.cpu_count() or 1
    if device.type == "cuda":
        said = [f"This machine is fine for training, fine-tuning and predictions: a GPU with {in_gb(free)} free."]
        if not TRITON:
            said.append(
                "Slow: operations run by their definitions, several times slower, because triton is not installed; "
                "pip install triton"
            )
    else:
        said = [
            f"This machine is fine for the demo, for data (sample, search, pack, score), for small models and short "
            f"proteins: {cores} {'core' if cores == 1 else 'cores'}, {in_gb(free)} free.",
            "Slow: full-size models, because there is no GPU; warpfold plan monomer --residues 300 says how long one "
            "protein takes here",
        ]
    if free < LITTLE:
        said.append(f"Short: {in_gb(free)} of memory is free; warpfold plan says what fits, --memory limits a run")
    if device.type == "cuda" and host_memory() < LITTLE:
        said.append(f"Short: {in_gb(host_memory())} of host memory is free, for the data's processes")
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free < LITTLE_SHARED:
        said.append("Short: /dev/shm has less than 1 GB; WarpFold's loaders do not need it, torch's DataLoader does")
    for package, (purpose, cure) in OPTIONAL.items():
        if importlib.util.find_spec(package) is None:
            said.append(f"Not here: {purpose}, because {package} is not installed; {cure}")
    return said


def of_findings(findings: Sequence[Finding], source: str, device: torch.device) -> list[str]:
    """Return what the check of the operations comes to; the first sentence sums it up."""
    red = [f for f in findings if f.verdict.red]
    if red:
        cure = "use --device cpu" if device.type == "cuda" else "do not trust what is computed here"
        said = [
            f"WRONG: {len(red)} of {len(findings)} operations are not computed as they should be "
            f"({_names(red)}); {cure}, and report it with what warpfold doctor --kernels --json prints"
        ]
    else:
        said = [f"All {len(findings)} operations of {source} are computed as they should be, forward and backward."]
    fine = [f for f in findings if not f.verdict.red]
    fast = [f.speed for f in fine if f.speed is not None and not f.small and not f.verdict.reason]
    if fast:
        said.append(
            f"Ours: {len(fast)} run in WarpFold's own way, {statistics.median(fast):.1f} times as fast as their "
            "definitions in the median, in less memory"
        )
    small = sum(f.small and not f.verdict.reason for f in fine)
    if small:
        said.append(f"As good: {small} are so small in {source} that their definitions are as fast, and are used")
    for reason, some in _by_reason(fine).items():
        said.append(f"Slow: {len(some)} run by their definitions ({_names(some)}), because {reason}")
    return said


def _by_reason(findings: Sequence[Finding]) -> Mapping[str, list[Finding]]:
    found = defaultdict(list)
    for finding in findings:
        if finding.verdict.reason:
            found[finding.verdict.reason].append(finding)
    return found


def _names(findings: Sequence[Finding]) -> str:
    return ", ".join(dict.fromkeys(f.verdict.case.op for f in findings))
