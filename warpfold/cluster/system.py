"""What is read of each rank's system, in one message, and what all ranks' messages together say."""

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from warpfold.cluster.equal import judge_equal
from warpfold.cluster.facts import Facts
from warpfold.cluster.findings import ClusterFinding
from warpfold.cluster.limits import judge_limits, limit_facts
from warpfold.cluster.rdma import judge_rdma, rdma_facts
from warpfold.cluster.software import judge_software, software_facts
from warpfold.cluster.variables import judge_variables, variable_facts
from warpfold.parallel.team import ProcessInfo


def system_facts(
    process: ProcessInfo,
    device: torch.device,
    environ: Mapping[str, str],
    nodes: Sequence[Sequence[int]],
    root: Path = Path("/"),
) -> Facts:
    """Return what this rank's system says of itself, JSON-able, for `judge_system`; a few kilobytes.

    What belongs to a node is read by its first rank alone.  environ: this process's variables.
    nodes: the ranks of each.  root: where `/proc`, `/sys` and `/dev` are.
    """
    node = next(number for number, ranks in enumerate(nodes) if process.rank in ranks)
    return {
        "rank": process.rank,
        "local_rank": process.local_rank,
        "per_node": len(nodes[node]),
        "node": node,
        "host": platform.node(),
        "kind": "cuda" if device.type == "cuda" else "cpu",
        "software": software_facts(device, root),
        "variables": variable_facts(environ, root),
        "limits": limit_facts(root),
        "rdma": rdma_facts(pci_address(device), root, whole_node=process.local_rank == 0),
    }


def pci_address(device: torch.device) -> str | None:
    """Return a GPU's PCI address as `/sys` writes it, "0000:17:00.0"; None for a CPU."""
    if device.type != "cuda":
        return None
    of = torch.cuda.get_device_properties(device)
    return f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"  # type: ignore[attr-defined]


def judge_system(facts: Sequence[Facts]) -> list[ClusterFinding]:
    """Return what is right and wrong with software, limits, variables, GPU Direct RDMA, and where nodes are unequal.

    facts: of all ranks, in their order.
    """
    judges = (judge_software, judge_equal, judge_variables, judge_limits, judge_rdma)
    return [finding for judge in judges for finding in judge(facts)]
