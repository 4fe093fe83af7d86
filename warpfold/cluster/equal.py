"""Whether nodes are equal: plans take them to be, and the least of them decides for all."""

from collections.abc import Mapping, Sequence

from warpfold.cluster.facts import Facts, of_nodes, sides
from warpfold.cluster.findings import ClusterFinding
from warpfold.cost.machine import in_gb

MEMORY = 0.02  # of a node's memory: what firmware and kernels keep differs by less, a lost module of 32 is more
NAMED = 4  # hosts; of more, how many they are
CURES = {
    "ranks": "start as many on each (--nproc-per-node, --ntasks-per-node): plans and --out take nodes to be equal",
    "GPUs": "nvidia-smi -L there, and dmesg | grep Xid for one that has fallen off the bus; or leave the node out",
    "cores": "ask for as many on each (--cpus-per-task, --exclusive), or choose nodes of one kind (--constraint)",
    "memory": "dmidecode -t memory there, for a module that has failed; or choose nodes of one kind (--constraint)",
}


def judge_equal(facts: Sequence[Facts]) -> list[ClusterFinding]:
    """Return whether nodes have as many ranks, GPUs, and cores that these may use, and as much memory; none of one.

    Ranks that differ are wrong, all else is a note.
    """
    nodes = of_nodes(facts)
    if len(nodes) < 2:
        return []
    cores: dict[int, set[int]] = {}
    for one in facts:
        cores.setdefault(one["node"], set()).update(one["limits"]["cores"])
    most = max(one["limits"]["memory"] for one in nodes)
    figures: dict[str, dict[int, int]] = {what: {} for what in CURES}
    for one in nodes:
        number, memory = one["node"], one["limits"]["memory"]
        figures["ranks"][number] = one["per_node"]
        figures["GPUs"][number] = one["software"]["GPUs of the driver"]
        figures["cores"][number] = len(cores[number])
        figures["memory"][number] = memory if memory < (1 - MEMORY) * most else most
    return [_same(what, of_node, nodes) for what, of_node in figures.items() if any(of_node.values())]


def _same(what: str, of_node: Mapping[int, int], nodes: Sequence[Facts]) -> ClusterFinding:
    def words(value: int) -> str:
        return in_gb(value) if what == "memory" else str(value)

    check, parties = f"{what} of nodes", sides(nodes, lambda one: of_node[one["node"]])
    if len(parties) == 1:
        return ClusterFinding("software", check, "ok", f"{words(parties[0][0])} on each of {len(nodes)}")
    says = ", ".join(f"{words(value)} on {_hosts(having)}" for value, having in parties)
    return ClusterFinding("software", check, "wrong" if what == "ranks" else "note", says, CURES[what])


def _hosts(having: Sequence[Facts]) -> str:
    """Return nodes in words, by the names of their hosts: "node 3 (gpu-d)"; of many how many they are."""
    if len(having) > NAMED:
        return f"{len(having)} nodes"
    return ", ".join(f"node {one['node']} ({one['host']})" for one in having)
