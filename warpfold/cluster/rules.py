"""The rules of the cluster doctor: a table of checks with their conditions, messages and remedies.

Effects of variables follow the vendors' documentation: NCCL's user guide ("Environment Variables", "Troubleshooting"),
the CUDA C++ programming guide and PyTorch's pages on torch.distributed. The conditions of GPU Direct RDMA follow
NVIDIA's documentation (nvidia-peermem; dma-buf from Linux 5.12 with the open kernel modules).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from warpfold.cluster.facts import Facts
from warpfold.cluster.subjects import BRIDGE, FAR, UNKNOWN, selected

Topic = Literal["software", "environment", "limits", "rdma", "pci", "links", "folder", "ranks"]
# note: information for the user. not checked: the finding says what is missing.
Outcome = Literal["ok", "note", "wrong", "not checked"]

# Ranks, nodes or devices that a sentence lists at most.
MAX_LISTED = 6
# Fraction of the median bandwidth below which a link is slow. Healthy links differ by up to 30 % in either direction.
SLOW_FRACTION = 0.5
# Gigabit Ethernet. Training on several nodes should not use it, so it indicates the wrong interface.
GIGABIT_BYTES = 125e6
# Least size of /dev/shm: NCCL's user guide recommends --shm-size=1g for containers.
SHARED_BYTES = 10**9
# Two checkpoints of the full model with the state of its optimizer.
FREE_BYTES = 3 * 10**9
# Variables that may differ: launchers set them per rank, and names of cards and adapters may depend on the node.
PER_RANK = (
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_NUM_THREADS",
    "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE",
)  # fmt: skip


@dataclass(frozen=True)
class ClusterFinding:
    """The result of a check.

    check: such as "NCCL". says: a sentence with ranks and figures, such as "2.27.5 on all 4 ranks". cure: the remedy.
    """

    topic: Topic
    check: str
    outcome: Outcome
    says: str
    cure: str = ""


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    of: group of the subjects (subjects.py). is_wrong: whether a subject violates the rule; None if the system does not
    report it. says, cure, ok: format strings with {who} for the subjects, {n} for their number, and {x} for the facts
    of the first one. ok: message if no rule of this check is violated; "" for no message. value: instead of `is_wrong`,
    a value that must be equal for all subjects.
    """

    topic: Topic
    check: str
    of: str
    is_wrong: Callable[[Facts], Any]
    says: str
    cure: str = ""
    outcome: Outcome = "wrong"
    ok: str = ""
    value: Callable[[Facts], Any] | None = None


def _same(topic: Topic, check: str, of: str, value: Callable[[Facts], Any], cure: str, outcome: Outcome = "wrong",
          ok: str = "{x[value]} on {who}") -> Rule:  # fmt: skip
    return Rule(topic, check, of, lambda x: False, "", cure, outcome, ok, value)


def _software(check: str, of: str, cure: str, outcome: Outcome = "wrong") -> Rule:
    return _same("software", check, of, lambda x: x["software"][check], cure, outcome)


def _variable(name: str, values: str, effect: str, outcome: Outcome = "wrong", of: str = "gpus") -> Rule:
    """Create the rule for a variable that is harmful with one of these values, or with any value if none are listed."""

    def is_wrong(x: Facts) -> bool:
        value = x["variables"].get(name)
        return value is not None and (not values or value.strip().upper() in values.split())

    says = f"{name}={{x[variables][{name}]}} on {{who}}: {effect}"
    cure = f"unset {name}, also in ~/.bashrc, in the image and in /etc/nccl.conf"
    return Rule("environment", name, of, is_wrong, says, cure, outcome)


def _interface(name: str, what: str, of: str, exact: bool = False) -> tuple[Rule, Rule]:
    """Create the rules for a variable with network cards or adapters: they must exist and not be the loopback."""

    def is_missing(x: Facts) -> bool:
        value, names = x["variables"].get(name), x[f"{what}s"]
        return bool(value) and not (set(value.split(",")) <= set(names) if exact else selected(value, names))

    def is_loopback(x: Facts) -> bool:
        return bool(x["several nodes"] and x["variables"].get(name, "").removeprefix("=") == "lo")

    says = f"{name}={{x[variables][{name}]}}"
    return (
        Rule("environment", name, of, is_missing, f"{says} is no {what} of {{who}}",
             f"set {name} to an existing {what} ({{x[{what}s words]}}), or unset it"),
        Rule("environment", name, of, is_loopback, f"{says} on {{who}}: the loopback does not reach other nodes",
             f"set {name} to the {what} that joins the nodes"),
    )  # fmt: skip


ON = "1 TRUE YES ON"
CABLE = "check the cable, port and adapter (ethtool -S, ibstat, nvidia-smi topo -m), or leave the node out"
INTERFACE = "let the ranks use the fast adapter: NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GLOO_SOCKET_IFNAME"
LOCKS = "mount it with locks (Lustre: -o flock; NFS: version 4, or local_lock=none); else start no run twice"

RULES = (
    # ---- software must be equal on all ranks
    _software("Python", "ranks", "start all ranks from one environment", "note"),
    _software("torch", "ranks", "install the same torch everywhere"),
    _software("triton", "ranks", "install the same triton everywhere"),
    _software("warpfold", "ranks", "start all ranks from the same checkout or wheel: the files of the package differ"),
    _software("CUDA", "gpus", "install the same build of torch everywhere: it brings its CUDA"),
    _software("NCCL", "gpus", "install the same build of torch, and look for the system's NCCL in LD_LIBRARY_PATH"),
    _software("driver", "gpus", "update the driver of those nodes, or leave them out (--exclude)"),
    _software("GPU", "gpus", "choose nodes of one kind (Slurm: --constraint): the slowest GPU decides", "note"),
    _software("launch table", "gpus", "copy ~/.cache/warpfold/tuned of one node to all, or remove it everywhere"),
    _same("software", "device", "ranks", lambda x: x["kind"],
          "see why torch finds no GPU on the others (nvidia-smi there), or leave those nodes out", ok=""),
    _same("software", "ranks of nodes", "nodes", lambda x: x["per_node"],
          "start equally many on each node (--nproc-per-node, --ntasks-per-node): plans expect equal nodes", ok=""),
    Rule("software", "a GPU for each rank", "gpus", lambda x: x["sharing"] > 1,
         "{who} share a GPU, {x[gpu][address]} (CUDA_VISIBLE_DEVICES={x[visible]})",
         "let every rank see all GPUs of its node: srun --gpus-per-node, not --gpus-per-task; unset the variable",
         ok="{n} ranks, {n} GPUs"),
    # ---- the environment of NCCL, torch.distributed and CUDA
    _variable("NCCL_P2P_DISABLE", ON, "GPUs of a node send through host memory, not over NVLink or PCIe"),
    _variable("NCCL_P2P_LEVEL", "LOC 0", "GPUs of a node send through host memory"),
    _variable("NCCL_SHM_DISABLE", ON, "ranks of a node without peer access send over the network"),
    _variable("NCCL_NET_GDR_LEVEL", "LOC 0", "GPU Direct RDMA is off: messages go through host memory"),
    _variable("NCCL_NET_GDR_READ", "0", "GPUs send through host memory (the default on PCIe)", "note"),
    Rule("environment", "NCCL_IB_DISABLE", "wired gpus",
         lambda x: x["variables"].get("NCCL_IB_DISABLE", "").upper() in ON.split(),
         "NCCL_IB_DISABLE={x[variables][NCCL_IB_DISABLE]} on {who}, which have adapters: NCCL uses TCP",
         "unset NCCL_IB_DISABLE"),
    _variable("NCCL_DEBUG", "TRACE", "every call of NCCL writes a line"),
    _variable("NCCL_DEBUG", "INFO", "every rank writes some hundred lines at the start", "note"),
    _variable("NCCL_ALGO", "", "NCCL may not choose the algorithm by the message size", "note"),
    _variable("NCCL_PROTO", "", "NCCL may not choose the protocol by the message size", "note"),
    _variable("NCCL_BLOCKING_WAIT", ON, "the host waits for every collective"),
    _variable("TORCH_NCCL_BLOCKING_WAIT", ON, "the host waits for every collective"),
    _variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "a rank waits for a dead one for ever"),
    _variable("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "all ranks synchronise before each collective", of="ranks"),
    _variable("CUDA_LAUNCH_BLOCKING", ON, "the host waits for every kernel"),
    _variable("CUDA_DEVICE_MAX_CONNECTIONS", "1", "communication cannot overlap with computation", "note"),
    *_interface("NCCL_SOCKET_IFNAME", "network card", "gpus"),
    *_interface("GLOO_SOCKET_IFNAME", "network card", "ranks", exact=True),
    *_interface("NCCL_IB_HCA", "adapter", "gpus"),
    # ---- limits of the system
    # An adapter accesses registered memory, which must be locked.
    Rule("limits", "locked memory", "ranks", lambda x: x["adapters"] and x["locked"] is not None and not x["can lock"],
         "{who} may lock {x[locked words]}: NCCL cannot register memory with the adapter",
         "ulimit -l unlimited: memlock in /etc/security/limits.conf; LimitMEMLOCK=infinity in slurmd's unit; for a "
         "container --ulimit memlock=-1 or --cap-add=IPC_LOCK; for one Python: setcap cap_ipc_lock+ep on it",
         ok="unlimited, or CAP_IPC_LOCK, wherever there are adapters"),
    # With NCCL, the ranks of a node send through shared memory. Our loaders and gloo do not use it.
    Rule("limits", "shared memory", "gpus", lambda x: x["per_node"] > 1 and x["shared"] < SHARED_BYTES,
         "/dev/shm of {who} has {x[shared words]}: NCCL may fail with a bus error",
         "docker run --shm-size=16g, or --ipc=host; Kubernetes: an emptyDir with medium: Memory at /dev/shm",
         ok="/dev/shm is large enough"),
    Rule("limits", "open files", "ranks", lambda x: (x["open files"] or x["files needed"]) < x["files needed"],
         "{who} may open {x[open files]} files; a run needs up to {x[files needed]}, as each rank holds sockets to all",
         "ulimit -n {x[files needed]} in the job's script; where that is refused: nofile in /etc/security/limits.conf, "
         "LimitNOFILE= in slurmd's unit, --ulimit nofile= of a container", ok="{x[files needed]} suffice"),
    Rule("limits", "threads", "ranks", lambda x: x["threads of node"] > max(x["cores of node"], x["per_node"]) > 1,
         "{who}: {x[threads of node]} threads of torch on {x[cores of node]} cores",
         "set OMP_NUM_THREADS={x[threads wanted]}", ok="at most one for each core"),
    Rule("limits", "NUMA of GPU and cores", "gpus",
         lambda x: not set(x["gpu"]["cores"]) & set(x["cores"]) if x["gpu"] and x["gpu"]["cores"] else None,
         "{who} may not use the cores next to their GPUs",
         "srun --gpu-bind=closest (or --gres-flags=enforce-binding); else bind by rank: numactl --cpunodebind",
         ok="every rank may use cores of its GPU's NUMA node"),
    # ---- network adapters and GPU Direct RDMA
    _same("rdma", "network adapters", "wired nodes", lambda x: ", ".join(x["adapters"]) or "none",
          "look at lspci and dmesg of the nodes that lack one, or drain them"),
    Rule("rdma", "network adapters", "unwired gpus", lambda x: x["several nodes"],
         "{who} have no InfiniBand or RoCE adapter: NCCL uses TCP",
         "load the driver of the adapters (MLNX_OFED, rdma-core), and give containers /dev/infiniband", "note",
         ok="none, and none is needed on one node"),
    Rule("rdma", "link state", "adapters", lambda x: not x["is up"] and x["is up elsewhere"], "{who}: {x[state]}",
         "look at the cable, the switch's port and the subnet manager (ibstat, ibdiagnet), or drain the node",
         ok="a port of each adapter is active"),
    Rule("rdma", "link state", "adapters", lambda x: not x["is up"], "{who}: {x[state]}", "", "note"),
    Rule("rdma", "RoCE", "ethernet ports", lambda x: not x["v2"], "{who}: no GID of RoCE v2",
         "give the card an IPv4 address, and cma_roce_mode RoCE v2 (show_gids lists them)",
         ok="every port has a GID of RoCE v2"),
    Rule("rdma", "RoCE", "ethernet ports", lambda x: x["index"] and "v2" not in x["gids"].get(x["index"], ""),
         "{who}: NCCL_IB_GID_INDEX={x[index]} is not RoCE v2",
         "set NCCL_IB_GID_INDEX={x[v2]}, or unset it with NCCL 2.21 or newer"),
    Rule("rdma", "RoCE", "ethernet ports", lambda x: not x["index"] and x["old NCCL"],
         "{who}: without NCCL_IB_GID_INDEX this NCCL takes GID 0, which is RoCE v1 and is not routed",
         "set NCCL_IB_GID_INDEX={x[v2]}"),
    Rule("rdma", "kernel module", "wired gpu nodes", lambda x: not (x["peer memory"] or x["dma-buf"]),
         "neither nvidia_peermem nor dma-buf on {who}: GPUs send through host memory",
         "modprobe nvidia-peermem, and its name into /etc/modules-load.d/; or the open modules and Linux 5.12",
         ok="nvidia_peermem or dma-buf on every node"),
    Rule("rdma", "PCIe switch", "wired gpus", lambda x: None if x["distance"] == UNKNOWN else x["distance"] == FAR,
         "the nearest adapter of {who} is at another host bridge or processor: no GPU Direct RDMA",
         "choose nodes with an adapter at each GPU's switch; NCCL_IB_HCA may exclude it",
         ok="every GPU has an adapter at its switch"),
    Rule("rdma", "PCIe switch", "wired gpus", lambda x: None if x["distance"] == UNKNOWN else x["distance"] == BRIDGE,
         "GPU and adapter of {who} meet at the host bridge, not at a switch",
         "NCCL_NET_GDR_LEVEL=PHB makes NCCL use GPU Direct RDMA there: compare the speed", "note"),
    Rule("rdma", "relaxed ordering", "gpu adapters", lambda x: None if x["relaxed"] is None else not x["relaxed"],
         "{who}: off, so writes to GPUs wait for each other",
         "mlxconfig -d {x[address]} set PCI_WR_ORDERING=1 and a cold boot, or the BIOS' relaxed ordering",
         ok="on for every adapter"),
    # These two also slow down or stop transfers between the GPUs of a node.
    Rule("pci", "ACS", "bridges", lambda x: x["redirects"], "{who}: ACS sends transfers between devices up to the root",
         "switch ACS off in the BIOS, or as root for each bridge at every boot: setpci -s ADDRESS ECAP_ACS+6.w=0000",
         ok="no bridge above GPUs and adapters redirects"),
    Rule("pci", "IOMMU", "pci devices", lambda x: not x["virtual"] and x["iommu"].startswith("DMA"),
         "{who}: an IOMMU translates every transfer between devices, which is slow, or never ends",
         "boot with iommu=pt (intel_iommu=on iommu=pt), or switch VT-d / AMD-Vi off in the BIOS; until then "
         "NCCL_P2P_DISABLE=1 lets GPUs of a node send through host memory", ok="off, or pt"),
    # ---- measured links
    *(Rule("links", f"bandwidth {words}", f"pairs {where}",
           lambda x: x["is wire"] and x["rate"] < SLOW_FRACTION * x["median"],
           "{who}: {x[words]}", CABLE, ok="{x[median words]}")
      for where, words in (("within", "within a node"), ("between", "between nodes"))),
    Rule("links", "bandwidth of a node", "linked nodes", lambda x: x["rate"] < GIGABIT_BYTES,
         "{who}: {x[words]}, slower than Gigabit Ethernet", INTERFACE,
         ok="{x[least words]} or more to another node while all ranks send"),
    Rule("links", "bandwidth of a node", "linked nodes", lambda x: x["rate"] < SLOW_FRACTION * x["promised"],
         "{who}: {x[words]}; the network should give {x[promised words]}", INTERFACE),
    # ---- the folder of the run
    Rule("folder", "folder", "folder", lambda x: x["error"], "{who} cannot use {x[folder]}: {x[error]}",
         "name a folder that all ranks may write to"),
    Rule("folder", "folder", "folder", lambda x: not x["sees"], "{who} do not see what rank 0 writes to {x[folder]}",
         "name a folder on a file system that all nodes share, under one path", ok="all ranks see a new file"),
    Rule("folder", "rename", "folder readers", lambda x: x["torn"],
         "{who} found a file missing or half written while it was replaced ({x[torn]} of {x[reads]} reads)",
         "choose a file system whose rename is atomic (no object store behind FUSE)",
         ok="a file that is replaced is old or new in every read"),
    Rule("folder", "locks", "folder", lambda x: x["no locks"], "there are no locks: {x[no locks]}", LOCKS, "note"),
    Rule("folder", "locks", "folder readers", lambda x: x["excluded"] is False,
         "{who} got a lock that rank 0 held: two runs could write to one folder", LOCKS,
         ok="a lock of rank 0 excludes all other ranks"),
    Rule("folder", "free space", "folder", lambda x: x["free"] is not None and x["free"] < FREE_BYTES,
         "{x[folder]}: {x[free words]}, less than two checkpoints of the full model need", "free some space",
         ok="{x[free words]}"),
)  # fmt: skip
# Reasons why a check was not made, by the group that has no subjects.
MISSING = {
    "gpus": "no GPU", "wired gpus": "no GPU with a network adapter", "wired gpu nodes": "no GPU with a network adapter",
    "gpu adapters": "no GPU with a network adapter", "pci devices": "no GPU",
    "bridges": "no GPU, or no PCI bridge above it",
    "pairs within": "each node has one rank", "pairs between": "there is one node", "linked nodes": "there is one node",
    "folder": "no folder was given; --folder DIR, where runs will be",
    "folder readers": "no other rank sees a folder",
}  # fmt: skip
UNREADABLE = "the system does not report it; only root may read the configuration of PCI devices"


def judge(subjects: Mapping[str, Sequence[Facts]]) -> list[ClusterFinding]:
    """Apply all rules to the subjects of each group.

    The rules of a check are consecutive. A subject that violates one of them is not judged by the following ones.
    """
    ranks = len(subjects["ranks"])
    names = sorted({name for x in subjects["ranks"] for name in x["variables"]} - set(PER_RANK))
    # NCCL's variables must be equal. Otherwise ranks choose different algorithms and deadlock.
    equal = [
        _same("environment", name, "ranks", lambda x, name=name: x["variables"].get(name, "not set"),  # type: ignore[misc]
              f"export {name} to all ranks (srun --export=ALL; torchrun: on every node), or to none",
              "wrong" if name.startswith("NCCL_") and subjects["gpus"] else "note", ok="")
        for name in names
    ]  # fmt: skip
    findings: list[ClusterFinding] = []
    for (topic, check), rows in groupby([*RULES, *equal], key=lambda rule: (rule.topic, rule.check)):
        rules, before, is_unknown = list(rows), len(findings), False
        judged: set[int] = set()
        for rule in rules:
            subject_facts = subjects.get(rule.of, ())
            if rule.value is not None:
                findings += _differences(rule, subject_facts)
                continue
            verdicts = [(x, rule.is_wrong(x)) for x in subject_facts if id(x) not in judged]
            is_unknown |= any(verdict is None for _, verdict in verdicts)
            if violating := [x for x, verdict in verdicts if verdict]:
                judged |= {id(x) for x in violating}
                says, cure = (_filled(text, violating, ranks) for text in (rule.says, rule.cure))
                findings.append(ClusterFinding(topic, check, rule.outcome, says, cure))
        if len(findings) > before or not (stating := [rule for rule in rules if rule.ok]):
            continue
        passed = next((rule for rule in stating if subjects.get(rule.of)), None)
        if passed is None:
            says = next((MISSING[rule.of] for rule in stating if rule.of in MISSING), "")
        else:
            subject_facts = subjects[passed.of]
            value = passed.value(subject_facts[0]) or "unknown" if passed.value else ""
            says = UNREADABLE if is_unknown else _filled(passed.ok, subject_facts, ranks, value=value)
        if says:
            findings.append(ClusterFinding(topic, check, "not checked" if passed is None or is_unknown else "ok", says))
    if not any(finding.topic == "environment" for finding in findings):
        says = "no variable of NCCL, torch.distributed and CUDA does harm"
        findings.append(ClusterFinding("environment", "variables", "ok", says))
    return findings


def _differences(rule: Rule, some: Sequence[Facts]) -> list[ClusterFinding]:
    """Report the subjects by their values if the values differ."""
    assert rule.value is not None
    by_value: dict[Any, list[Facts]] = {}
    for x in some:
        by_value.setdefault(rule.value(x) or "unknown", []).append(x)
    if len(by_value) < 2:
        return []
    parties = sorted(by_value.items(), key=lambda party: -len(party[1]))
    says = ", ".join(f"{value} on {in_words(having, len(some))}" for value, having in parties)
    return [ClusterFinding(rule.topic, rule.check, rule.outcome, says, rule.cure)]


def _filled(text: str, some: Sequence[Facts], ranks: int, **more: Any) -> str:
    return text.format(x=some[0] | more, n=len(some), who=in_words(some, ranks))


def in_words(some: Sequence[Facts], ranks: int) -> str:
    """Format subjects by their labels, or ranks as "rank 3 (gpu-b)", "ranks 0, 2 and 4 to 7", "all 16 ranks"."""
    if "label" in some[0]:
        labels = [x["label"] for x in some]
        more = f" and {len(labels) - MAX_LISTED} more" if len(labels) > MAX_LISTED else ""
        return ", ".join(labels[:MAX_LISTED]) + more
    numbers = [x["rank"] for x in some]
    if len(numbers) == ranks > 1:
        return f"all {ranks} ranks"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words: list[str] = []
    for run in runs:
        words += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    words = [*words[:MAX_LISTED], f"{len(words) - MAX_LISTED} more"] if len(words) > MAX_LISTED else words
    joined = " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
    hosts = sorted({str(x["host"]) for x in some if "host" in x})
    at = f" ({', '.join(hosts[:MAX_LISTED])})" if hosts else ""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {joined}{at}"
