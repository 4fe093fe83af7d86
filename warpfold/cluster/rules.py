"""Judge what is read of a cluster: tables of what must be the same, and of what hurts.

A row says what is looked at, what is wrong with it, how bad that is, and the cure; the facts are those that ranks read
(facts.py), with what follows from them (`_known`).  What variables do is taken from their makers' documentation: NCCL's
user guide ("Environment Variables", "Troubleshooting"), the CUDA C++ programming guide, PyTorch's pages on CUDA and on
torch.distributed, GNU libgomp's manual and Triton's README; GPU Direct RDMA from NVIDIA's documentation of it
(nvidia-peermem; dma-buf from Linux 5.12 with the open modules).
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warpfold.cluster.facts import as_cores, cores_of
from warpfold.cluster.findings import ClusterFinding, Facts, Fault, Fine, Outcome, Topic, judge, who
from warpfold.cost.machine import in_gb

MEMORY = 0.02  # of a node's memory: what firmware and kernels keep differs by less, a lost module of 32 is more
NCCL_SHARED = 10**9  # bytes of /dev/shm: NCCL's user guide asks containers for --shm-size=1g
# Open files beside sockets: libraries, stores, logs; and for each other rank at most three sockets (a connection for
# each of three groups: docs/parallel.md).
FILES, FILES_EACH = 400, 3
USED_SWAP = 0.01  # of the memory: more of it in use means that memory is, or was, short
DMA_BUF_LINUX = (5, 12)
CHOOSES_GID = (2, 21)  # from this NCCL on it takes the GID of RoCE v2 by itself
ROCE_MTU = 4200  # bytes of a card's MTU that RoCE's packets of 4096 bytes need
# How near a GPU and an adapter are, from near to far.
SWITCH, BRIDGE, FAR, UNKNOWN = range(4)
# Launchers give each rank its own; which cards and adapters there are may depend on the node.
OWN = (
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_NUM_THREADS",
    "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE",
)  # fmt: skip
NO_GPU = "no GPU"
AS_ROOT = "configuration: run doctor as root once"


# ---- what must be the same


@dataclass(frozen=True)
class Same:
    """What ranks (or nodes, GPUs) must have alike.  else_: how bad another one is.  ok: whether to say that all agree.

    value: of one; "" where it is not known.
    """

    check: str
    of: str
    value: Callable[[Facts], Any]
    cure: str  # THE_MOST_COMMON in it is what most have
    else_: Outcome = "wrong"
    ok: bool = True
    topic: Topic = "software"


def _software(what: str) -> Callable[[Facts], Any]:
    return lambda x: x["software"][what]


SAME = (
    Same("Python", "ranks", _software("Python"), "make the environment anew there with the same Python"),
    Same("torch", "ranks", _software("torch"), "install the same there: pip install torch==THE_MOST_COMMON"),
    Same("triton", "ranks", _software("triton"), "install the same there: pip install triton==THE_MOST_COMMON"),
    Same("warpfold", "ranks", _software("warpfold"),
         "install the same there, or start all ranks from one environment on a shared file system"),
    Same("warpfold's code", "ranks", _software("warpfold's code"),
         "some ranks run other files: start all of them from the same checkout or wheel"),
    Same("CUDA", "gpus", _software("CUDA"), "install the same build of torch there: it brings its CUDA"),
    Same("NCCL", "gpus", _software("NCCL"),
         "install the same build of torch there, and look for an NCCL of the system in LD_LIBRARY_PATH"),
    Same("driver", "gpus", _software("driver"),
         "have the driver of those nodes brought to the same version, or leave them out (--exclude)"),
    Same("GPU", "gpus", _software("GPU"),
         "choose nodes of one kind (Slurm: --constraint), or count on the slowest", "note"),
    Same("launch table", "gpus", _software("launch table"),
         "copy ~/.cache/warpfold/tuned of one node to all, or remove it everywhere"),
    Same("device", "ranks", lambda x: x["kind"],
         "find out why torch sees no GPU on the others (nvidia-smi there), or leave those nodes out", ok=False),
    Same("Linux", "nodes", _software("kernel"), "usually harmless; nodes of one image are easier to look after",
         "note", ok=False),
    Same("ranks of nodes", "nodes", lambda x: x["per_node"],
         "start as many on each (--nproc-per-node, --ntasks-per-node): plans and --out take nodes to be equal"),
    Same("GPUs of nodes", "nodes", _software("GPUs of the driver"),
         "nvidia-smi -L there, and dmesg | grep Xid for one that has fallen off the bus; or leave the node out",
         "note"),
    Same("cores of nodes", "nodes", lambda x: x["cores of node"],
         "ask for as many on each (--cpus-per-task, --exclusive), or choose nodes of one kind (--constraint)", "note"),
    Same("memory of nodes", "nodes", lambda x: x["memory of node"],
         "dmidecode -t memory there, for a module that has failed; or choose nodes of one kind (--constraint)", "note"),
    Same("network adapters", "wired nodes", lambda x: ", ".join(x["names"]) or "none",
         "look at lspci and dmesg of the nodes that lack one, or drain them", topic="rdma"),
)  # fmt: skip


# ---- what hurts


def _set_to(name: str, *values: str) -> Callable[[Facts], bool]:
    """Tell whether a variable has one of these values; without any, whether it is set."""
    return lambda x: name in x["set"] and (not values or x["set"][name].strip().upper() in values)


def _variable(
    name: str, values: tuple[str, ...], effect: str, outcome: Outcome = "wrong", of: str = "gpus", instead: str = ""
) -> Fault:
    """Make the fault of a variable that hurts if it has such a value.  instead: what to set it to."""
    cure = (
        f"set {name}={instead}" if instead else f"unset {name}, also in ~/.bashrc, in the image and in /etc/nccl.conf"
    )
    line = f"export {name}={instead}" if instead else f"unset {name}"
    says = f"{name}={{x[set][{name}]}} on {{who}}: {effect}"
    return Fault(name, of, _set_to(name, *values), says, cure, outcome, line)


def _lost(name: str, what: str, of: str, here: str, exact: bool = False) -> tuple[Fault, Fault]:
    """Make the faults of a variable that names a network card or an adapter: one that is not there, the loopback."""

    def is_lost(x: Facts) -> bool:
        value = x["set"].get(name)
        if not value:
            return False
        return not set(value.split(",")) <= set(x[here]) if exact else not chosen_of(value, x[here])

    def is_loop(x: Facts) -> bool:
        return bool(x["several nodes"] and x["set"].get(name, "").removeprefix("=") == "lo")

    says = f"{name}={{x[set][{name}]}}"
    return (
        Fault(name, of, is_lost, f"{says} is no {what} of {{who}}",
              f"name one that is there ({{x[{here} words]}}), or unset {name}", line=f"unset {name}"),
        Fault(name, of, is_loop, f"{says} on {{who}}: the loopback does not reach other nodes",
              "name the card that joins the nodes", also=True),
    )  # fmt: skip


ON = ("1", "TRUE", "YES", "ON")
VARIABLES = (
    _variable("CUDA_LAUNCH_BLOCKING", ON, "the host waits for every kernel"),
    _variable("CUDA_DEVICE_MAX_CONNECTIONS", ("1",), "communication cannot run beside computation", "note"),
    _variable("NCCL_P2P_DISABLE", ON, "GPUs of a node send through the host's memory, not over NVLink or PCIe"),
    _variable("NCCL_P2P_LEVEL", ("LOC", "0"), "GPUs of a node send through the host's memory"),
    _variable("NCCL_SHM_DISABLE", ON, "ranks of a node that have no peer access send over the network"),
    _variable("NCCL_DEBUG", ("TRACE",), "every call of NCCL writes a line", instead="WARN"),
    _variable("NCCL_DEBUG", ("INFO",), "every rank writes some hundred lines at the start", "note"),
    _variable("NCCL_ALGO", (), "NCCL may not choose the algorithm by the message's size", "note"),
    _variable("NCCL_PROTO", (), "NCCL may not choose the protocol by the message's size", "note"),
    _variable("NCCL_NET_GDR_LEVEL", ("LOC", "0"), "GPU Direct RDMA is off: messages go through the host's memory"),
    _variable("NCCL_NET_GDR_READ", ("0",), "GPUs send through the host's memory (what the default is on PCIe)", "note"),
    _variable("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "all ranks meet once more before each collective", of="ranks"),
    _variable("TORCH_NCCL_BLOCKING_WAIT", ON, "the host waits for every collective"),
    _variable("NCCL_BLOCKING_WAIT", ON, "the host waits for every collective"),
    _variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", ("0",), "a rank that waits for one that is gone waits for ever"),
    _variable("PYTORCH_NO_CUDA_MEMORY_CACHING", (), "every tensor is allocated by the driver, which waits"),
    _variable("NVIDIA_TF32_OVERRIDE", ON, "fp32 products are made with 10 bits, whatever a plan says"),
    _variable("TRITON_INTERPRET", ON, "kernels are interpreted, thousands of times slower"),
    _variable("TORCHDYNAMO_DISABLE", ON, "nothing is compiled", "note"),
    _variable("MALLOC_CHECK_", ("1", "2", "3"), "every allocation on the host is checked", "note", "ranks"),
    Fault("NCCL_IB_DISABLE", "gpus", lambda x: x["names"] and _set_to("NCCL_IB_DISABLE", *ON)(x),
          "NCCL_IB_DISABLE={x[set][NCCL_IB_DISABLE]} on {who}, which have adapters: TCP is used instead",
          "unset NCCL_IB_DISABLE", line="unset NCCL_IB_DISABLE"),
    *_lost("NCCL_SOCKET_IFNAME", "network card", "gpus", "cards"),
    *_lost("GLOO_SOCKET_IFNAME", "network card", "ranks", "cards", exact=True),
    *_lost("NCCL_IB_HCA", "adapter", "gpus", "names"),
)  # fmt: skip
SYSTEM = (
    Fault("GPUs in use", "ranks", lambda x: x["kind"] == "cpu" and x["software"]["GPUs of the driver"],
          "{x[software][GPUs of the driver]} GPUs are not used by {who}, on the CPU",
          "without --device cpu: python -c 'import torch; torch.cuda.init()' says why torch finds none: usually a "
          "torch built for CPUs, or a newer CUDA than the driver's", "note"),
    Fault("a GPU for each rank", "gpus", lambda x: x["sharing its GPU"] > 1,
          "{who} have the same GPU, {x[rdma][gpu]} (CUDA_VISIBLE_DEVICES={x[devices]})",
          "let every rank see all GPUs of its node: srun --gpus-per-node, not --gpus-per-task; unset the variable",
          each=lambda x: (x["node"], x["rdma"]["gpu"])),
    Fault("threads", "ranks", lambda x: x["threads of node"] > max(x["cores of node"], x["per_node"]),
          "{who}: {x[threads of node]} threads of torch's on {x[cores of node]} cores",
          "set OMP_NUM_THREADS={x[right threads]}", line="export OMP_NUM_THREADS={x[right threads]}"),
    Fault("threads", "ranks", lambda x: x["threads of node"] > x["cores of node"],
          "{who}: {x[threads of node]} threads of torch's on {x[cores of node]} cores, which they share",
          "start fewer ranks on a node, or ask for more cores (Slurm: --cpus-per-task)", "note"),
    Fault("threads", "ranks", lambda x: x["kind"] == "cpu" and x["variables"]["threads"] < x["right threads"],
          "{who}: {x[threads of node]} threads of torch's on {x[cores of node]} cores: some are idle",
          "set OMP_NUM_THREADS={x[right threads]} (torchrun sets 1 unless it is set)", "note"),
    Fault("open files", "ranks", lambda x: (x["files"] or x["needed files"]) < x["needed files"],
          "{who} may open {x[files]}; the ranks need up to {x[needed files]}, as each holds a socket to each",
          "ulimit -n {x[file limit]} in the job's script; where that is refused: nofile in "
          "/etc/security/limits.conf, LimitNOFILE= of slurmd's unit, --ulimit nofile= of a container",
          line="ulimit -n {x[file limit]}", worst=lambda x: x["files"]),
    Fault("locked memory", "ranks",  # an adapter reads and writes registered memory, which must be locked
          lambda x: x["names"] and x["locked"] is not None and not x["limits"]["may lock"],
          "{who} may lock {x[locked words]}, so that NCCL cannot register memory with the adapter",
          "ulimit -l unlimited: memlock in /etc/security/limits.conf; LimitMEMLOCK=infinity of slurmd's unit; of a "
          "container --ulimit memlock=-1 or --cap-add=IPC_LOCK; one Python alone: setcap cap_ipc_lock+ep on it",
          line="ulimit -l unlimited", worst=lambda x: x["locked"]),
    Fault("shared memory", "gpus",  # NCCL's ranks of a node send through it; WarpFold's loaders and gloo do not use it
          lambda x: x["per_node"] > 1 and (x["limits"]["shared"] or 0) < NCCL_SHARED,
          "/dev/shm of {who} has {x[shared words]}: NCCL may fail with a bus error",
          "docker run --shm-size=16g, or --ipc=host; Kubernetes: an emptyDir with medium: Memory at /dev/shm",
          worst=lambda x: x["limits"]["shared"] or 0),
    Fault("huge pages", "nodes", lambda x: x["limits"]["huge pages"] == "never",
          "transparent huge pages are off for {who}: large arrays on the host take more time",
          "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root; it stays by a unit or tuned's profile",
          "note"),
    Fault("huge pages", "nodes", lambda x: x["limits"]["compacts"] == "always",
          'defrag is "always" for {who}: a process may wait while memory is compacted',
          "echo madvise > /sys/kernel/mm/transparent_hugepage/defrag, as root", "note"),
    Fault("swap", "nodes", lambda x: x["limits"]["swap used"] > USED_SWAP * (x["limits"]["memory"] or 1),
          "{x[swap words]} of memory lies on disk at {who}, whose ranks will wait for it",
          "end what else runs there, then swapoff -a && swapon -a; vm.swappiness=1 where training is all that runs",
          worst=lambda x: -x["limits"]["swap used"]),
    Fault("pinning", "ranks", lambda x: x["sharing its cores"] > max(1, len(x["limits"]["cores"])),
          "{who} are all pinned to cores {x[cores words]}",
          "srun --cpus-per-task=N --cpu-bind=cores; mpirun --bind-to none; unset GOMP_CPU_AFFINITY and OMP_PLACES; or "
          "more cores for the job", each=lambda x: (x["node"], x["cores words"])),
    Fault("NUMA of GPU and cores", "gpus", lambda x: x["home"] and not set(x["home"]) & set(x["limits"]["cores"]),
          "{who} may not use the cores next to their GPUs: rank {x[rank]} has cores {x[cores words]}, its GPU's are "
          "{x[home words]}",
          "srun --gpu-bind=closest (or --gres-flags=enforce-binding); else bind by rank: numactl --cpunodebind"),
    Fault("NUMA of GPU and cores", "gpus",
          lambda x: set(x["home"]) & set(x["limits"]["cores"]) and set(x["limits"]["cores"]) - set(x["home"]),
          "{who} may also run on cores far from their GPUs",
          "pin each rank to its GPU's NUMA node: numactl --cpunodebind=NODE", "note", also=True),
    Fault("NUMA of GPU and cores", "nodes",
          lambda x: x["kind"] == "cuda" and x["limits"]["balancing"] and len(x["limits"]["numa"]) > 1,
          "kernel.numa_balancing is on for {who}: pages move between processors while they are used",
          "sysctl kernel.numa_balancing=0 on nodes that train", "note", also=True),
)  # fmt: skip
WIRES = (
    Fault("link state", "adapters", lambda x: not x["up"] and x["should be up"],
          "{x[name]} is {x[state]} at {at}",
          "look at the cable, the switch's port and the subnet manager (ibstat, ibdiagnet); until then drain the node",
          each=lambda x: x["name"]),
    Fault("link state", "adapters", lambda x: not x["up"] and not x["should be up"],
          "{x[name]} is {x[state]} at {at}", outcome="note", each=lambda x: x["name"], also=True),
    Fault("link rate", "ports", lambda x: x["rate"] and x["rate"] < x["best rate"],
          "{x[name]} runs at {x[rate]:g} Gb/s at {at}, elsewhere at {x[best rate]:g}",
          "reseat or exchange the cable or transceiver, and look at the switch's port (iblinkinfo, mlxlink)",
          worst=lambda x: x["rate"], each=lambda x: x["name"]),
    Fault("RoCE", "ethernet", lambda x: not x["v2"], "{x[name]} of {at} has no GID of RoCE v2",
          "give the card an IPv4 address, and cma_roce_mode or the driver's default RoCE v2 (show_gids lists them)"),
    Fault("RoCE", "ethernet", lambda x: x["index"] and "v2" not in x["gids"].get(x["index"], ""),
          "NCCL_IB_GID_INDEX={x[index]} is {x[gid]} of {x[name]} at {at}",
          "set NCCL_IB_GID_INDEX={x[v2]}, or unset it with NCCL 2.21 or newer",
          line="export NCCL_IB_GID_INDEX={x[v2]}"),
    Fault("RoCE", "ethernet", lambda x: not x["index"] and x["old NCCL"],
          "this NCCL takes GID 0 unless NCCL_IB_GID_INDEX is set, which is RoCE v1 and is not routed",
          "set NCCL_IB_GID_INDEX={x[v2]}", line="export NCCL_IB_GID_INDEX={x[v2]}"),
    Fault("RoCE's MTU", "ethernet", lambda x: x["mtu"] and x["mtu"] < x["largest mtu"],
          "the MTU is {x[mtu]} at {at}, elsewhere {x[largest mtu]}: large packets are lost",
          "ip link set CARD mtu 9000 on all nodes, and on the switches", worst=lambda x: x["mtu"]),
    Fault("RoCE's MTU", "ethernet", lambda x: x["mtu"] and x["mtu"] < ROCE_MTU,
          "the MTU is {x[mtu]} everywhere: RoCE sends packets of 1,024 bytes",
          "where the switches allow it: ip link set CARD mtu 9000 on all nodes, for packets of 4,096", "note"),
    Fault("PCIe lanes", "devices", lambda x: x["width"] and x["widest"] and x["width"] < x["widest"],
          "{x[name]} ({x[address]}) at {x[host]} has {x[width]} of {x[widest]} PCIe lanes",
          "reseat it or move it to another slot; look at the slot's lanes and bifurcation in the BIOS",
          each=lambda x: (x["host"], x["address"])),
    Fault("PCIe lanes", "devices",  # an idle GPU's lanes slow down
          lambda x: x["name"] != "the GPU" and x["speed"] and x["speed"] != x["fastest"],
          "{x[name]} ({x[address]}) at {x[host]} has PCIe lanes of {x[speed]}, not {x[fastest]}",
          "reseat it or move it to another slot; look at the slot's lanes and bifurcation in the BIOS",
          each=lambda x: (x["host"], x["address"]), also=True),
    Fault("kernel module", "wired gpu nodes", lambda x: not x["reads GPUs"],
          "neither nvidia_peermem nor dma-buf at {at}: GPUs send through the host's memory",
          "modprobe nvidia-peermem, and its name into /etc/modules-load.d/; or the open modules and Linux 5.12"),
    Fault("PCIe switch", "wired gpus", lambda x: x["distance"] == FAR,
          "the nearest adapter of {who} is at another host bridge or processor: no GPU Direct RDMA",
          "choose nodes with an adapter at each GPU's switch, or use only GPUs that have one; NCCL_IB_HCA may hide it"),
    Fault("PCIe switch", "wired gpus", lambda x: x["distance"] == BRIDGE,
          "GPU and adapter of {who} meet at the host bridge, not at a switch",
          "measure it: with NCCL_NET_GDR_LEVEL=PHB NCCL uses GPU Direct RDMA there too; move the adapter if it may be",
          "note"),
    Fault("ACS", "bridges", lambda x: x["redirects"], "{n} bridges at {at} (first {x[address]}) redirect to the root",
          "switch ACS off in the BIOS, or as root for each bridge at every boot: setpci -s ADDRESS ECAP_ACS+6.w=0000"),
    Fault("relaxed ordering", "gpu adapters", lambda x: x["pci"]["relaxed"] is False,
          "off for {n} adapters, first {x[name]} at {x[host]}: writes to GPUs wait for each other",
          "mlxconfig -d {x[pci][address]} set PCI_WR_ORDERING=1 and a cold boot, or the BIOS' relaxed ordering"),
    Fault("IOMMU", "gpu adapters", lambda x: not x["virtual"] and str(x["pci"]["iommu"]).startswith("DMA"),
          "an IOMMU translates every transfer between devices at {at}",
          "boot with iommu=pt (intel_iommu=on iommu=pt), or switch VT-d / AMD-Vi off in the BIOS"),
    Fault("network adapters", "unwired gpus", lambda x: x["several nodes"],
          "no InfiniBand or RoCE adapter: NCCL sends by TCP",
          "load the adapters' driver (MLNX_OFED, rdma-core), and give containers /dev/infiniband", "note"),
)  # fmt: skip
FINE = (
    Fine("variables", "undisturbed", "of CUDA, NCCL, OpenMP and torch {x[set]} set; none hurts"),
    Fine("a GPU for each rank", "gpus", "{n} ranks, {n} GPUs"),
    Fine("threads", "ranks", "a core for each", lambda x: not x["cores of node"],
         "the kernel does not say which cores a rank has"),
    Fine("open files", "ranks", "{x[needed files]} suffice", lambda x: x["limits"]["files"] is None,
         "the kernel does not say the limit"),
    Fine("locked memory", "ranks", "unlimited, or CAP_IPC_LOCK, wherever there are adapters"),
    Fine("shared memory", "ranks", "/dev/shm is large enough wherever GPUs of a node need it"),
    Fine("huge pages", "nodes", "{x[limits][huge pages]}", lambda x: not x["limits"]["huge pages"],
         "the kernel does not say"),
    Fine("swap", "nodes", "none in use"),
    Fine("NUMA of GPU and cores", "gpus", "every rank runs on cores of its GPU's NUMA node", lambda x: not x["home"],
         "the system does not say which cores are near a GPU"),
    *(Fine(check, "without GPUs", "", bool, NO_GPU)
      for check in ("CUDA, NCCL, driver, launch tables", "NUMA of GPU and cores")),
)  # fmt: skip
FINE_WIRES = (
    Fine("link state", "adapters", "a port of each adapter is active"),
    Fine("link rate", "ports", "{x[best rate]:g} Gb/s", lambda x: not x["rate"], "the system does not say"),
    Fine("RoCE", "ethernet", "every port has a GID of v2"),
    Fine("PCIe lanes", "devices", "as many and as fast as GPUs and adapters can have"),
    Fine("kernel module", "wired gpu nodes", "{x[reads GPUs]}"),
    Fine("PCIe switch", "wired gpus", "every GPU has an adapter at its own switch",
         lambda x: x["distance"] == UNKNOWN, "the system does not say where GPUs and adapters are"),
    Fine("ACS", "bridges", "no bridge above GPUs and adapters redirects", lambda x: x["redirects"] is None,
         f"a virtual machine, whose host's bridges are not visible, or only root may read their {AS_ROOT}"),
    Fine("relaxed ordering", "gpu adapters", "on for every adapter", lambda x: x["pci"]["relaxed"] is None,
         f"only root may read the adapters' {AS_ROOT}"),
    Fine("adapter of each rank", "wired gpus", "{x[users]}", lambda x: not x["users"],
         "the system does not say where GPUs and adapters are"),
    Fine("network adapters", "unwired gpus", "none, and none is needed on one node"),
    Fine("network adapters", "unwired without GPUs", "", bool, NO_GPU),
    *(Fine(check, "without GPUs", "", bool, NO_GPU)
      for check in ("kernel module", "PCIe switch", "ACS", "relaxed ordering", "adapter of each rank")),
)  # fmt: skip


# ---- the loop over them


def judge_system(facts: Sequence[Facts]) -> list[ClusterFinding]:
    """Say what is right and wrong with software, limits, variables, GPU Direct RDMA, and where nodes are unequal.

    facts: of all ranks, in their order.
    """
    known = _known(facts)
    names = sorted({name for x in known["ranks"] for name in x["set"]})
    # NCCL's must be the same, or ranks choose other algorithms and wait for ever.
    differing = [
        Same(name, "ranks", lambda x, name=name: x["set"].get(name, "not set"),  # type: ignore[misc]
             f"export {name} to all ranks (srun --export=ALL; torchrun: on every node), or to none",
             "wrong" if name.startswith("NCCL_") and known["gpus"] else "note", ok=False)
        for name in names if name not in OWN
    ]  # fmt: skip
    variables = [*judge("software", known, VARIABLES), *_same(differing, known)]
    known["undisturbed"] = [] if variables else [{"set": len(names)}]
    return [
        *_same(SAME, known),
        *variables,
        *judge("software", known, SYSTEM, FINE),
        *judge("rdma", known, WIRES, FINE_WIRES),
    ]


def _same(table: Sequence[Same], known: Mapping[str, list[Facts]]) -> list[ClusterFinding]:
    """Say whether all have the same; who differs is named."""
    found = []
    for same in table:
        some, of_nodes, by_value = known[same.of], same.of.endswith("nodes"), dict[Any, list[Facts]]()
        for x in some:
            value = same.value(x)
            by_value.setdefault("not known" if value in ("", None) else value, []).append(x)
        if not some or (of_nodes and len(known["nodes"]) < 2 and same.topic == "software"):
            continue
        parties = sorted(by_value.items(), key=lambda one: -len(one[1]))  # of equals what the lowest rank has
        most = str(parties[0][0])
        if len(parties) == 1 and same.ok and most != "0":
            where = "on every node" if of_nodes else f"on {who(some, known['ranks'])}"
            found.append(ClusterFinding(same.topic, same.check, "ok", f"{most} {where}"))
        elif len(parties) > 1:
            # Another patch of Python works; of most else ranks may not have different ones.
            patch = same.check == "Python" and len({str(value).rpartition(".")[0] for value, _ in parties}) == 1
            words = _nodes if of_nodes else lambda having: who(having, known["ranks"])
            says = ", ".join(f"{value} on {words(having)}" for value, having in parties)
            cure = same.cure.replace("THE_MOST_COMMON", most)
            found.append(ClusterFinding(same.topic, same.check, "note" if patch else same.else_, says, cure))
    return found


def _nodes(having: Sequence[Facts]) -> str:
    """Name nodes in words, by the names of their hosts: "node 3 (gpu-d)"; of many how many they are."""
    if len(having) > 4:
        return f"{len(having)} nodes"
    return ", ".join(f"node {x['node']} ({x['host']})" for x in having)


# ---- what follows from the facts


def _known(facts: Sequence[Facts]) -> dict[str, list[Facts]]:
    """Group by kind those that are judged: ranks, nodes, GPUs, adapters, ports ...; each has its rank's facts, too."""
    several = len({one["node"] for one in facts}) > 1
    first = {one["node"]: one for one in facts if one["local_rank"] == 0}
    needed, most = FILES + FILES_EACH * (len(facts) - 1), max(one["limits"]["memory"] for one in facts)
    on_node: dict[int, list[Facts]] = {}
    for one in facts:
        on_node.setdefault(one["node"], []).append(one)
    of_gpu = Counter((one["node"], one["rdma"]["gpu"]) for one in facts)
    of_cores = Counter((one["node"], as_cores(one["limits"]["cores"])) for one in facts if _is_pinned(one))
    ranks = []
    for one in facts:
        limits, rdma, here = one["limits"], one["rdma"], on_node[one["node"]]
        adapters = first[one["node"]]["rdma"]["adapters"] if one["node"] in first else []
        cores = {core for other in here for core in other["limits"]["cores"]}
        home = cores_of(limits["numa"].get(str(rdma["gpu numa"]), "")) if rdma["gpu numa"] is not None else []
        locked, names = (limits["locked"] or [None])[0], [a["name"] for a in adapters]
        x = {
            **one,
            "set": one["variables"]["set"],
            "several nodes": several,
            "cards": one["variables"]["cards"],
            "cards words": ", ".join(one["variables"]["cards"][:8]) or "none",
            "names": names,
            "names words": ", ".join(names[:8]) or "none",
            "devices": one["variables"]["set"].get("CUDA_VISIBLE_DEVICES", "not set"),
            "sharing its GPU": of_gpu[one["node"], rdma["gpu"]] if rdma["gpu"] else 1,
            "threads of node": sum(other["variables"]["threads"] for other in here) if cores else 0,
            "cores of node": len(cores),
            "right threads": max(1, len(cores) // len(here)),
            "files": (limits["files"] or [None])[0],
            "needed files": needed,
            "file limit": max(65536, needed),
            "locked": locked,
            "locked words": in_gb(locked or 0),
            "shared words": in_gb(limits["shared"] or 0),
            "swap words": in_gb(limits["swap used"]),
            "memory of node": in_gb(most if limits["memory"] >= (1 - MEMORY) * most else limits["memory"]),
            "cores words": as_cores(limits["cores"]),
            "sharing its cores": of_cores[one["node"], as_cores(limits["cores"])],
            "home": home,
            "home words": as_cores(home),
        }
        x["adapter"], x["distance"] = _nearest(x, adapters)
        ranks.append(x)
    nodes, gpus = [x for x in ranks if x["local_rank"] == 0], [x for x in ranks if x["kind"] == "cuda"]
    for x in nodes:
        linux = tuple(map(int, re.findall(r"\d+", x["rdma"]["linux"])[:2]))
        loaded = {"nvidia_peermem", "nv_peer_mem"} & set(x["rdma"]["modules"])
        dma_buf = "nvidia-open" in x["rdma"]["modules"] and linux >= DMA_BUF_LINUX
        how = "nvidia_peermem is loaded" if loaded else "dma-buf: open modules, and a Linux that has it"
        x["reads GPUs"] = how if loaded or dma_buf else ""
    adapters = [{**x, **a, "virtual": x["rdma"]["virtual"]} for x in nodes for a in x["rdma"]["adapters"]]
    for a in adapters:
        states = [port["state"] for port in a["ports"]]
        a["up"], a["state"] = "ACTIVE" in states, (states or ["without ports"])[0] or "not known"
    up = {a["name"] for a in adapters if a["up"]}
    ports = [{**a, **port} for a in adapters for port in a["ports"] if port["state"] == "ACTIVE"]
    index = next((v for x in ranks if (v := x["set"].get("NCCL_IB_GID_INDEX")) not in (None, "", "-1")), "")
    versions = [tuple(map(int, re.findall(r"\d+", str(x["software"]["NCCL"]))[:2])) for x in ranks]
    for a in adapters:
        a["should be up"] = not up or a["name"] in up
    best, largest = dict[str, float](), max((port["mtu"] or 0 for port in ports), default=0)
    for port in ports:
        best[port["name"]] = max(best.get(port["name"], 0.0), port["rate"] or 0.0)
    for port in ports:
        port["best rate"], port["largest mtu"] = best[port["name"]], largest
        port["v2"] = next((number for number, kind in port["gids"].items() if "v2" in kind), "")
        port["index"], port["gid"] = index, port["gids"].get(index, "no GID")
        port["old NCCL"] = any(number < CHOOSES_GID for number in versions if number)
    wired, users = bool(adapters), dict[str, set[int]]()
    for x in gpus:
        if x["adapter"]:
            users.setdefault(x["adapter"], set()).add(x["local_rank"])
    words = [f"{name}: local ranks {', '.join(map(str, sorted(some)))}" for name, some in sorted(users.items())]
    for x in gpus:
        x["users"] = "; ".join(words)
    cards = [{**x, **x["rdma"]["card"], "name": "the GPU"} for x in ranks if x["rdma"]["card"] and wired]
    bridges = {(x["host"], address): {**x, "address": address, "redirects": on and bool(on) if on is not None else None}
               for x in gpus for address, on in sorted(x["rdma"]["bridges"].items())}  # fmt: skip
    return {
        "ranks": ranks,
        "nodes": nodes,
        "gpus": gpus,
        "wired nodes": nodes if wired else [],
        "wired gpus": [x for x in gpus if wired],
        "wired gpu nodes": nodes if wired and gpus else [],
        "adapters": adapters,
        "gpu adapters": adapters if gpus else [],
        "ports": ports,
        "ethernet": [port for port in ports if port["layer"] == "Ethernet"],
        "devices": [*cards, *({**a, **a["pci"]} for a in adapters)],
        "bridges": list(bridges.values()) if wired else [],
        "unwired gpus": [] if wired else gpus[:1],
        "without GPUs": [] if gpus else ranks[:1],
        "unwired without GPUs": [] if gpus or wired else ranks[:1],
    }


def _is_pinned(one: Facts) -> bool:
    """Tell whether a rank may use some of its node's cores only."""
    every = {core for cores in one["limits"]["numa"].values() for core in cores_of(cores)}
    return bool(one["limits"]["cores"]) and set(one["limits"]["cores"]) < every


def _nearest(x: Facts, adapters: Sequence[Facts]) -> tuple[str, int]:
    """Choose the adapter that a rank will use, and how far it is: the nearest that is up; of equals ranks take turns.

    NCCL looks at rates too, and may use several: NCCL_DEBUG=INFO prints its choice.
    """
    names = [a["name"] for a in adapters if any(port["state"] == "ACTIVE" for port in a["ports"])]
    wanted = chosen_of(x["set"]["NCCL_IB_HCA"], names) if x["set"].get("NCCL_IB_HCA") else names
    card, able = x["rdma"]["card"], [a for a in adapters if a["name"] in wanted]
    if not able or card is None:
        return "", UNKNOWN
    far = {a["name"]: _distance(card, a["pci"]) for a in able}
    near = [name for name, steps in far.items() if steps == min(far.values())]
    return near[x["local_rank"] % len(near)], min(FAR, *far.values())


def _distance(a: Facts, b: Facts) -> int:
    """Tell how near two PCI devices are: at one switch, one host bridge, one NUMA node, or beyond."""
    if any(one == other for one, other in zip(a["path"][:-1], b["path"][:-1])):
        return SWITCH
    if a["bridge"] and a["bridge"] == b["bridge"]:
        return BRIDGE
    return FAR if a["numa"] is not None and a["numa"] == b["numa"] else FAR + 1


def chosen_of(value: str, names: Sequence[str]) -> list[str]:
    """Select the cards or adapters that NCCL takes: names that begin so, "=" exactly, "^" all others.

    A port ("mlx5_0:1") is not looked at.
    """
    without, rest = value.startswith("^"), value.removeprefix("^")
    exactly, rest = rest.startswith("="), rest.removeprefix("=")
    wanted = [word.strip().partition(":")[0] for word in rest.split(",") if word.strip()]
    fits = {name for name in names for word in wanted if (name == word if exactly else name.startswith(word))}
    return [name for name in names if (name in fits) != without]
