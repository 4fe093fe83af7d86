"""What is installed on each rank: versions, driver, launch table and the package itself, the same on all or not."""

import functools
import hashlib
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

import warpfold
from warpfold.cluster.facts import Facts, differences, names_in, of_nodes, on_gpus, sides, text_of, who
from warpfold.cluster.findings import ClusterFinding
from warpfold.cost.machine import name, version
from warpfold.ops.triton.launch import table_for

NO_GPU = "no GPU"
# What is compared, whether only ranks with a GPU have it, and what to do where ranks differ.
COMPARED = {
    "Python": (False, "make the environment anew there with the same Python"),
    "torch": (False, "install the same there: pip install torch==THE_MOST_COMMON"),
    "triton": (False, "install the same there: pip install triton==THE_MOST_COMMON"),
    "warpfold": (False, "install the same there, or start all ranks from one environment on a shared file system"),
    "warpfold's code": (False, "some ranks run other files: start all of them from the same checkout or wheel"),
    "CUDA": (True, "install the same build of torch there: it brings its CUDA"),
    "NCCL": (True, "install the same build of torch there, and look for an NCCL of the system in LD_LIBRARY_PATH"),
    "driver": (True, "have the driver of those nodes brought to the same version, or leave them out (--exclude)"),
    "GPU": (True, "choose nodes of one kind (Slurm: --constraint), or count on the slowest"),
    "launch table": (True, "copy ~/.cache/warpfold/tuned of one node to all, or remove it everywhere"),
}


def software_facts(device: torch.device, root: Path = Path("/")) -> Facts:
    """Return versions, and a checksum of the launch table and of the package, as strings; "" for what is not here.

    device: of this rank.  root: where `/proc` is looked for.
    """
    driver = text_of(root / "proc/driver/nvidia/version").split("Kernel Module")[-1].split()
    found = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "warpfold": warpfold.__version__,
        "warpfold's code": _package(),
        "CUDA": torch.version.cuda or "",
        "NCCL": "",
        "driver": next((word for word in driver if word[0].isdigit()), ""),
        "GPU": name(device) if device.type == "cuda" else "",
        "launch table": "",
        "kernel": platform.release(),
    }
    if device.type == "cuda":
        nccl = torch.cuda.nccl.version()
        found["NCCL"] = ".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl)
        table = table_for(device)[0].path
        found["launch table"] = f"{table.name} {_checksum([table])}"
    return {**found, "GPUs of the driver": len(names_in(root / "proc/driver/nvidia/gpus"))}


@functools.cache
def _package() -> str:
    """Return eight digits of the package's files."""
    return _checksum(sorted(Path(warpfold.__file__).parent.rglob("*.py")))


def _checksum(files: Sequence[Path]) -> str:
    """Return eight digits that are others when a file is."""
    made = hashlib.sha256()
    for file in files:
        made.update(file.name.encode() + b"\0" + file.read_bytes())
    return made.hexdigest()[:8]


def judge_software(facts: Sequence[Facts]) -> list[ClusterFinding]:
    """Return whether all ranks have the same; who differs is named."""
    found = []
    for what, (gpu, cure) in COMPARED.items():
        having = [one for one in facts if one["kind"] == "cuda"] if gpu else list(facts)
        if having:
            found.append(_same(what, having, facts, cure))
    if not on_gpus(facts):
        found.append(ClusterFinding("software", "CUDA, NCCL, driver, launch tables", "not checked", NO_GPU))
    return [*found, *_unused(facts), *_mixed(facts)]


def _same(what: str, having: Sequence[Facts], facts: Sequence[Facts], cure: str) -> ClusterFinding:
    parties = sides(having, lambda one: one["software"][what] or "not known")
    most = str(parties[0][0])
    if len(parties) == 1:
        return ClusterFinding("software", what, "ok", f"{most} on {who(having, facts)}")
    # Another patch of Python, or another kind of GPU, works; of all else ranks may not have different ones.
    patch = what == "Python" and len({str(value).rpartition(".")[0] for value, _ in parties}) == 1
    cure = cure.replace("THE_MOST_COMMON", most)
    outcome = "note" if patch or what == "GPU" else "wrong"
    return ClusterFinding("software", what, outcome, differences(parties, facts), cure)  # type: ignore[arg-type]


def _unused(facts: Sequence[Facts]) -> list[ClusterFinding]:
    """Return a finding where the driver has GPUs and a rank works on the CPU."""
    idle = [one for one in facts if one["kind"] == "cpu" and one["software"]["GPUs of the driver"]]
    if not idle:
        return []
    count = idle[0]["software"]["GPUs of the driver"]
    says = f"{count} GPUs are not used by {who(idle, facts)}, on the CPU"
    cure = (
        "without --device cpu: python -c 'import torch; torch.cuda.init()' says why torch finds none: usually a torch "
        "built for CPUs, or a newer CUDA than the driver's"
    )
    return [ClusterFinding("software", "GPUs in use", "note", says, cure)]


def _mixed(facts: Sequence[Facts]) -> list[ClusterFinding]:
    """Return a finding where some ranks have a GPU and some do not, and a note where nodes' kernels differ."""
    found = []
    kinds = sides(facts, lambda one: one["kind"])
    if len(kinds) > 1:
        cure = "find out why torch sees no GPU on the others (nvidia-smi there), or leave those nodes out"
        found.append(ClusterFinding("software", "device", "wrong", differences(kinds, facts), cure))
    kernels = sides(of_nodes(facts), lambda one: one["software"]["kernel"])
    if len(kernels) > 1:
        cure = "usually harmless; nodes of one image are easier to look after"
        found.append(ClusterFinding("software", "Linux", "note", differences(kernels, facts), cure))
    return found
