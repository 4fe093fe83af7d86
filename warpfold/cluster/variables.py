"""Environment variables of CUDA, NCCL, gloo, OpenMP, torch and Triton that hurt, name what is not there, or differ.

What each does is taken from its maker's documentation: NCCL's user guide ("Environment Variables"), the CUDA C++
programming guide ("CUDA Environment Variables"), PyTorch's pages on CUDA and on torch.distributed, GNU libgomp's manual
and Triton's README.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from warpfold.cluster.facts import (
    Facts,
    cores_of,
    names_in,
    of_nodes,
    on_gpus,
    several_nodes,
    sides,
    text_of,
    who,
)
from warpfold.cluster.findings import ClusterFinding, Outcome

FAMILIES = (
    "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "OMP_", "GOMP_", "MKL_", "KMP_", "TORCH_", "TORCHDYNAMO_", "PYTORCH_",
    "TRITON_", "UCX_",
)  # fmt: skip
# Launchers give each rank its own; which cards and adapters there are may depend on the node.
PER_RANK = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_NUM_THREADS")
PER_NODE = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE")
ON = ("1", "true", "yes", "on")


def is_on(value: str) -> bool:
    """Return whether a variable's value switches it on."""
    return value.strip().lower() in ON


@dataclass(frozen=True)
class VariableRule:
    """A variable, the values of it that hurt, and what they do.

    gpu: it matters to ranks with a GPU only.  cure, line: default, to unset it.
    """

    name: str
    hurts: Callable[[str], bool]
    effect: str
    outcome: Outcome = "wrong"
    gpu: bool = True
    cure: str = ""
    line: str = ""


def _anything(value: str) -> bool:
    return True


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().upper() in values


RULES = (
    VariableRule("CUDA_LAUNCH_BLOCKING", is_on, "the host waits for every kernel"),
    VariableRule("CUDA_DEVICE_MAX_CONNECTIONS", _is("1"), "communication cannot run beside computation", "note"),
    VariableRule("NCCL_P2P_DISABLE", is_on, "GPUs of a node send through the host's memory, not over NVLink or PCIe"),
    VariableRule("NCCL_P2P_LEVEL", _is("LOC", "0"), "GPUs of a node send through the host's memory"),
    VariableRule("NCCL_SHM_DISABLE", is_on, "ranks of a node that have no peer access send over the network"),
    VariableRule(
        "NCCL_DEBUG",
        _is("TRACE"),
        "every call of NCCL writes a line",
        cure="set NCCL_DEBUG=WARN",
        line="export NCCL_DEBUG=WARN",
    ),
    VariableRule("NCCL_DEBUG", _is("INFO"), "every rank writes some hundred lines at the start", "note"),
    VariableRule("NCCL_ALGO", _anything, "NCCL may not choose the algorithm by the message's size", "note"),
    VariableRule("NCCL_PROTO", _anything, "NCCL may not choose the protocol by the message's size", "note"),
    VariableRule(
        "NCCL_NET_GDR_LEVEL", _is("LOC", "0"), "GPU Direct RDMA is off: messages go through the host's memory"
    ),
    VariableRule(
        "NCCL_NET_GDR_READ", _is("0"), "GPUs send through the host's memory (what the default is on PCIe)", "note"
    ),
    VariableRule(
        "TORCH_DISTRIBUTED_DEBUG", _is("DETAIL"), "all ranks meet once more before each collective", gpu=False
    ),
    VariableRule("TORCH_NCCL_BLOCKING_WAIT", is_on, "the host waits for every collective"),
    VariableRule("NCCL_BLOCKING_WAIT", is_on, "the host waits for every collective"),
    VariableRule("TORCH_NCCL_ASYNC_ERROR_HANDLING", _is("0"), "a rank that waits for one that is gone waits for ever"),
    VariableRule("PYTORCH_NO_CUDA_MEMORY_CACHING", _anything, "every tensor is allocated by the driver, which waits"),
    VariableRule("NVIDIA_TF32_OVERRIDE", is_on, "fp32 products are made with 10 bits, whatever a plan says"),
    VariableRule("TRITON_INTERPRET", is_on, "kernels are interpreted, thousands of times slower"),
    VariableRule("TORCHDYNAMO_DISABLE", is_on, "nothing is compiled", "note"),
    VariableRule("MALLOC_CHECK_", _is("1", "2", "3"), "every allocation on the host is checked", "note", gpu=False),
)


def variable_facts(environ: Mapping[str, str], root: Path = Path("/")) -> Facts:
    """Return the variables of `FAMILIES`, this process's threads and cores, and the node's network cards."""
    names = {rule.name for rule in RULES}
    return {
        "set": {name: environ[name] for name in sorted(environ) if name.startswith(FAMILIES) or name in names},
        "threads": torch.get_num_threads(),
        "cores": cores_of(_status(root, "Cpus_allowed_list")),
        "cards": names_in(root / "sys/class/net"),
    }


def _status(root: Path, what: str) -> str:
    lines = text_of(root / "proc/self/status").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{what}:")), "")


def judge_variables(facts: Sequence[Facts]) -> list[ClusterFinding]:
    """Return what hurts, what names cards that are not there, what differs, and how threads share the cores."""
    found = [*_that_hurt(facts), *_infiniband_off(facts), *_names(facts), *_differing(facts)]
    names = {name for one in facts for name in one["variables"]["set"]}
    if not found:
        found = [
            ClusterFinding(
                "software", "variables", "ok", f"of CUDA, NCCL, OpenMP and torch {len(names)} set; none hurts"
            )
        ]
    return [*found, *_devices(facts), *_threads(facts)]


def value_of(one: Facts, name: str) -> str | None:
    """Return a rank's variable, None where it is not set."""
    found: str | None = one["variables"]["set"].get(name)
    return found


def _that_hurt(facts: Sequence[Facts]) -> list[ClusterFinding]:
    found = []
    for rule in RULES:
        able = [one for one in facts if one["kind"] == "cuda" or not rule.gpu]
        having = [one for one in able if rule.hurts(value_of(one, rule.name) or "")] if able else []
        having = [one for one in having if value_of(one, rule.name) is not None]
        if having:
            value = value_of(having[0], rule.name)
            says = f"{rule.name}={value} on {who(having, facts)}: {rule.effect}"
            cure = rule.cure or f"unset {rule.name}, also in ~/.bashrc, in the image and in /etc/nccl.conf"
            found.append(
                ClusterFinding("software", rule.name, rule.outcome, says, cure, rule.line or f"unset {rule.name}")
            )
    return found


def _infiniband_off(facts: Sequence[Facts]) -> list[ClusterFinding]:
    """Judge NCCL_IB_DISABLE, which is right where there is no adapter."""
    having = [one for one in facts if one["kind"] == "cuda" and is_on(value_of(one, "NCCL_IB_DISABLE") or "")]
    with_adapters = {one["node"] for one in of_nodes(facts) if one["rdma"]["adapters"]}
    hurt = [one for one in having if one["node"] in with_adapters]
    if not hurt:
        return []
    says = f"NCCL_IB_DISABLE={value_of(hurt[0], 'NCCL_IB_DISABLE')} on {who(hurt, facts)}, which have adapters: TCP"
    cure = "unset NCCL_IB_DISABLE"
    return [ClusterFinding("software", "NCCL_IB_DISABLE", "wrong", f"{says} is used instead", cure, cure)]


def chosen_of(value: str, names: Sequence[str]) -> list[str]:
    """Return the cards or adapters that NCCL takes: names that begin so, "=" exactly, "^" all others.

    A port ("mlx5_0:1") is not looked at.
    """
    without, rest = value.startswith("^"), value.removeprefix("^")
    exactly, rest = rest.startswith("="), rest.removeprefix("=")
    wanted = [word.strip().partition(":")[0] for word in rest.split(",") if word.strip()]
    fits = {name for name in names for word in wanted if (name == word if exactly else name.startswith(word))}
    return [name for name in names if (name in fits) != without]


def _names(facts: Sequence[Facts]) -> list[ClusterFinding]:
    """Judge the variables that name network cards and adapters of each node."""
    found = []
    nodes, cards = {one["node"]: one for one in of_nodes(facts)}, lambda one: one["variables"]["cards"]
    kinds = {
        "NCCL_SOCKET_IFNAME": ("network card", cards, True),
        "GLOO_SOCKET_IFNAME": ("network card", cards, False),
        "NCCL_IB_HCA": ("adapter", lambda one: [a["name"] for a in nodes[one["node"]]["rdma"]["adapters"]], True),
    }
    for name, (what, here, gpu) in kinds.items():
        having = [one for one in facts if value_of(one, name) and (one["kind"] == "cuda" or not gpu)]
        if gpu:
            lost = [one for one in having if not chosen_of(value_of(one, name) or "", here(one))]
        else:  # gloo takes exact names
            lost = [one for one in having if not set((value_of(one, name) or "").split(",")) <= set(here(one))]
        if lost:
            says = f"{name}={value_of(lost[0], name)} is no {what} of {who(lost, facts)}"
            there = ", ".join(here(lost[0])[:8]) or "none"
            cure = f"name one that is there ({there}), or unset {name}"
            found.append(ClusterFinding("software", name, "wrong", says, cure, f"unset {name}"))
        loop = [one for one in having if (value_of(one, name) or "").removeprefix("=") == "lo"]
        if loop and several_nodes(facts):
            says = f"{name}=lo on {who(loop, facts)}: the loopback does not reach other nodes"
            found.append(ClusterFinding("software", name, "wrong", says, "name the card that joins the nodes"))
    return found


def _differing(facts: Sequence[Facts]) -> list[ClusterFinding]:
    """Judge variables that are not the same on all ranks."""
    found = []
    for name in sorted({name for one in facts for name in one["variables"]["set"]} - {*PER_RANK, *PER_NODE}):
        parties = sides(facts, functools.partial(value_of, name=name))
        if len(parties) < 2:
            continue
        says = ", ".join(
            f"{'not set' if value is None else value} on {who(having, facts)}" for value, having in parties
        )
        # NCCL's must be the same, or ranks choose other algorithms and wait for ever.
        outcome: Outcome = "wrong" if name.startswith("NCCL_") and on_gpus(facts) else "note"
        cure = f"export {name} to all ranks (srun --export=ALL; torchrun: on every node), or to none"
        found.append(ClusterFinding("software", name, outcome, says, cure))
    return found


def _devices(facts: Sequence[Facts]) -> list[ClusterFinding]:
    """Judge whether each rank has a GPU of its own."""
    gpus = [one for one in facts if one["kind"] == "cuda"]
    shared = [
        having
        for (_, gpu), having in sides(gpus, lambda one: (one["node"], one["rdma"]["gpu"]))
        if gpu and len(having) > 1
    ]
    if shared:
        having = shared[0]
        value = value_of(having[0], "CUDA_VISIBLE_DEVICES")
        says = f"{who(having, facts)} have the same GPU, {having[0]['rdma']['gpu']}"
        says += "" if value is None else f" (CUDA_VISIBLE_DEVICES={value})"
        cure = "let every rank see all GPUs of its node: srun --gpus-per-node, not --gpus-per-task; unset the variable"
        return [ClusterFinding("software", "a GPU for each rank", "wrong", says, cure)]
    if gpus:
        return [ClusterFinding("software", "a GPU for each rank", "ok", f"{len(gpus)} ranks, {len(gpus)} GPUs")]
    return []


def _threads(facts: Sequence[Facts]) -> list[ClusterFinding]:
    """Judge how the threads of a node's ranks share the cores that these may use."""
    check = "threads"
    for _, ranks in sides(facts, lambda one: one["node"]):
        cores = len({core for one in ranks for core in one["variables"]["cores"]})
        threads = sum(one["variables"]["threads"] for one in ranks)
        if not cores:
            return [ClusterFinding("software", check, "not checked", "the kernel does not say which cores a rank has")]
        each, right = ranks[0]["variables"]["threads"], max(1, cores // len(ranks))
        says = f"{who(ranks, facts)}: {threads} threads of torch's on {cores} cores"
        if threads > cores and threads > len(ranks):
            line = f"export OMP_NUM_THREADS={right}"
            return [ClusterFinding("software", check, "wrong", says, f"set OMP_NUM_THREADS={right}", line)]
        if threads > cores:
            cure = "start fewer ranks on a node, or ask for more cores (Slurm: --cpus-per-task)"
            return [ClusterFinding("software", check, "note", f"{says}, which they share", cure)]
        if ranks[0]["kind"] == "cpu" and each < right:
            cure = f"set OMP_NUM_THREADS={right} (torchrun sets 1 unless it is set)"
            return [ClusterFinding("software", check, "note", f"{says}: some are idle", cure)]
    most = max(one["variables"]["threads"] for one in facts)
    return [ClusterFinding("software", check, "ok", f"at most {most} on each rank, and a core for each")]
