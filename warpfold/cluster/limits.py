"""What the system lets a rank have: open files, shared and locked memory, huge pages, swap, cores near its GPU."""

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from warpfold.cluster.facts import Facts, as_cores, cores_of, names_in, number_of, of_nodes, sides, text_of, who
from warpfold.cluster.findings import ClusterFinding
from warpfold.cost.machine import in_gb

IPC_LOCK = 14  # the bit of this capability: capabilities(7)
NCCL_SHARED = 10**9  # bytes of /dev/shm: NCCL's user guide asks containers for --shm-size=1g
# Open files beside sockets: libraries, stores, logs; and for each other rank at most three sockets (a connection for
# each of three groups: docs/parallel.md).
FILES, FILES_EACH = 400, 3
USED_SWAP = 0.01  # of the memory: more of it in use means that memory is, or was, short
NEVER = "never"


def limit_facts(root: Path = Path("/"), disk: Callable[[Path], int] | None = None) -> Facts:
    """Return the limits of this process, and what its node's memory and cores are like.

    root: where `/proc` and `/sys` are.  disk: returns the bytes of the file system at a path.
    """
    limits = text_of(root / "proc/self/limits").splitlines()
    status = dict(line.split(":", 1) for line in text_of(root / "proc/self/status").splitlines() if ":" in line)
    memory = dict(line.split(":", 1) for line in text_of(root / "proc/meminfo").splitlines() if ":" in line)
    nodes = root / "sys/devices/system/node"
    size = disk or (lambda path: shutil.disk_usage(path).total)
    return {
        "files": _limit(limits, "Max open files"),
        "locked": _limit(limits, "Max locked memory"),
        "may lock": bool(int(status.get("CapEff", "0").strip() or "0", 16) >> IPC_LOCK & 1),
        "shared": size(root / "dev/shm") if (root / "dev/shm").is_dir() else None,
        "huge pages": _chosen(text_of(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        "compacts": _chosen(text_of(root / "sys/kernel/mm/transparent_hugepage/defrag")),
        "memory": _bytes(memory, "MemTotal"),
        "swap used": _bytes(memory, "SwapTotal") - _bytes(memory, "SwapFree"),
        "swappiness": number_of(text_of(root / "proc/sys/vm/swappiness")),
        "balancing": text_of(root / "proc/sys/kernel/numa_balancing") not in ("", "0"),
        "cores": cores_of(status.get("Cpus_allowed_list", "").strip()),
        "numa": {
            str(number_of(name)): as_cores(cores_of(text_of(nodes / name / "cpulist")))
            for name in names_in(nodes)
            if re.fullmatch(r"node\d+", name)
        },
    }


def _limit(lines: Sequence[str], name: str) -> list[int | None] | None:
    """Return the soft and the hard limit, each None where unlimited; None where the kernel does not say."""
    for line in lines:
        if line.startswith(name):
            soft, hard = line[len(name) :].split()[:2]
            return [None if value == "unlimited" else int(value) for value in (soft, hard)]
    return None


def _bytes(memory: Mapping[str, str], name: str) -> int:
    return 1024 * (number_of(memory.get(name, "")) or 0)


def _chosen(text: str) -> str:
    """Return which of "always [madvise] never" is in brackets."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else ""


def judge_limits(facts: Sequence[Facts]) -> list[ClusterFinding]:
    """Return what is too little, or set so that it hurts, on which ranks."""
    return [
        _files(facts),
        _locked(facts),
        _shared(facts),
        _huge_pages(facts),
        _swap(facts),
        *_cores_of_their_own(facts),
        *_near_the_gpu(facts),
    ]


def _files(facts: Sequence[Facts]) -> ClusterFinding:
    check, needed = "open files", FILES + FILES_EACH * (len(facts) - 1)
    known = [one for one in facts if one["limits"]["files"]]
    if not known:
        return ClusterFinding("software", check, "not checked", "the kernel does not say the limit")
    short = [one for one in known if (one["limits"]["files"][0] or needed) < needed]
    least = min((one["limits"]["files"][0] for one in known if one["limits"]["files"][0] is not None), default=None)
    if not short:
        return ClusterFinding("software", check, "ok", f"{least or 'any number of'} may be open; {needed} suffice")
    low = min(one["limits"]["files"][0] for one in short)
    says = f"{who(short, facts)} may open {low}; {len(facts)} ranks need up to {needed}, as each holds a socket to each"
    line = f"ulimit -n {max(65536, needed)}"
    cure = f"{line} in the job's script; where that is refused: nofile in "
    cure += "/etc/security/limits.conf, LimitNOFILE= of slurmd's unit, --ulimit nofile= of a container"
    return ClusterFinding("software", check, "wrong", says, cure, line)


def _locked(facts: Sequence[Facts]) -> ClusterFinding:
    """Judge locked memory: an adapter reads and writes registered memory, which must be locked."""
    check = "locked memory"
    nodes = {one["node"] for one in of_nodes(facts) if one["rdma"]["adapters"]}
    need = [one for one in facts if one["node"] in nodes]
    if not need:
        return ClusterFinding("software", check, "ok", "nothing here needs it: no InfiniBand or RoCE adapter")
    short = [one for one in need if one["limits"]["locked"] and one["limits"]["locked"][0] is not None]
    short = [one for one in short if not one["limits"]["may lock"]]
    if not short:
        return ClusterFinding("software", check, "ok", "unlimited, or CAP_IPC_LOCK, wherever there are adapters")
    low = min(one["limits"]["locked"][0] for one in short)
    says = f"{who(short, facts)} may lock {in_gb(low)}, so that NCCL cannot register memory with the adapter"
    cure = (
        "ulimit -l unlimited: memlock in /etc/security/limits.conf; LimitMEMLOCK=infinity of slurmd's unit; of a "
        "container --ulimit memlock=-1 or --cap-add=IPC_LOCK; one Python alone: setcap cap_ipc_lock+ep on it"
    )
    return ClusterFinding("software", check, "wrong", says, cure, "ulimit -l unlimited")


def _shared(facts: Sequence[Facts]) -> ClusterFinding:
    """Judge /dev/shm, through which NCCL's ranks of a node send; WarpFold's loaders and gloo do not use it."""
    check = "shared memory"
    need = [one for one in facts if one["kind"] == "cuda" and one["per_node"] > 1]
    if not need:
        return ClusterFinding("software", check, "ok", "nothing here needs it: no two GPUs on a node")
    short = [one for one in need if (one["limits"]["shared"] or 0) < NCCL_SHARED]
    if not short:
        least = min(one["limits"]["shared"] for one in need)
        return ClusterFinding("software", check, "ok", f"/dev/shm has {in_gb(least)} or more on all nodes")
    says = f"/dev/shm of {who(short, facts)} has {in_gb(min(one['limits']['shared'] or 0 for one in short))}: "
    cure = "docker run --shm-size=16g, or --ipc=host; Kubernetes: an emptyDir with medium: Memory at /dev/shm"
    return ClusterFinding("software", check, "wrong", f"{says}NCCL may fail with a bus error", cure)


def _huge_pages(facts: Sequence[Facts]) -> ClusterFinding:
    check, nodes = "huge pages", of_nodes(facts)
    never = [one for one in nodes if one["limits"]["huge pages"] == NEVER]
    if never:
        cure = (
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root; it stays by a unit or tuned's profile"
        )
        says = f"transparent huge pages are off for {who(never, nodes)}: large arrays on the host take more time"
        return ClusterFinding("software", check, "note", says, cure)
    stalls = [one for one in nodes if one["limits"]["compacts"] == "always"]
    if stalls:
        cure = "echo madvise > /sys/kernel/mm/transparent_hugepage/defrag, as root"
        says = f'defrag is "always" for {who(stalls, nodes)}: a process may wait while memory is compacted'
        return ClusterFinding("software", check, "note", says, cure)
    if not all(one["limits"]["huge pages"] for one in nodes):
        return ClusterFinding("software", check, "not checked", "the kernel does not say")
    return ClusterFinding("software", check, "ok", f"{sides(nodes, lambda one: one['limits']['huge pages'])[0][0]}")


def _swap(facts: Sequence[Facts]) -> ClusterFinding:
    nodes = of_nodes(facts)
    full = [one for one in nodes if one["limits"]["swap used"] > USED_SWAP * (one["limits"]["memory"] or 1)]
    if not full:
        return ClusterFinding("software", "swap", "ok", "none in use")
    most = max(one["limits"]["swap used"] for one in full)
    says = f"{in_gb(most)} of memory lies on disk at {who(full, nodes)}, whose ranks will wait for it"
    cure = "end what else runs there, then swapoff -a && swapon -a; vm.swappiness=1 where training is all that runs"
    return ClusterFinding("software", "swap", "wrong", says, cure)


def _cores_of_their_own(facts: Sequence[Facts]) -> list[ClusterFinding]:
    """Judge whether ranks that are pinned are pinned to cores of their own."""
    for _, ranks in sides(facts, lambda one: one["node"]):
        all_cores = {core for cores in ranks[0]["limits"]["numa"].values() for core in cores_of(cores)}
        pinned = [one for one in ranks if one["limits"]["cores"] and set(one["limits"]["cores"]) < all_cores]
        for cores, having in sides(pinned, lambda one: as_cores(one["limits"]["cores"])):
            if len(having) > max(1, len(cores_of(cores))):
                says = f"{who(having, facts)} are all pinned to cores {cores}"
                cure = (
                    "srun --cpus-per-task=N --cpu-bind=cores; mpirun --bind-to none; unset GOMP_CPU_AFFINITY and "
                    "OMP_PLACES; or more cores for the job"
                )
                return [ClusterFinding("software", "pinning", "wrong", says, cure)]
    return []


def _near_the_gpu(facts: Sequence[Facts]) -> list[ClusterFinding]:
    """Judge whether ranks run on cores of the NUMA node that their GPU is joined to."""
    check = "NUMA of GPU and cores"
    gpus = [one for one in facts if one["kind"] == "cuda"]
    if not gpus:
        return [ClusterFinding("software", check, "not checked", "no GPU")]
    found, known = [], [one for one in gpus if _home(one)]
    far = [one for one in known if not set(one["limits"]["cores"]) & set(_home(one))]
    near = [one for one in known if set(one["limits"]["cores"]) & set(_home(one))]
    if far:
        one = far[0]
        says = f"{who(far, facts)} may not use the cores next to their GPUs: rank {one['rank']} has cores "
        says += f"{as_cores(one['limits']['cores'])}, its GPU's are {as_cores(_home(one))}"
        cure = "srun --gpu-bind=closest (or --gres-flags=enforce-binding); else bind by rank: numactl --cpunodebind"
        found.append(ClusterFinding("software", check, "wrong", says, cure))
    anywhere = [one for one in near if set(one["limits"]["cores"]) - set(_home(one))]
    if anywhere:
        says = f"{who(anywhere, facts)} may also run on cores far from their GPUs"
        cure = "pin each rank to its GPU's NUMA node: numactl --cpunodebind=NODE"
        found.append(ClusterFinding("software", check, "note", says, cure))
    moving = [one for one in of_nodes(facts) if one["limits"]["balancing"] and len(one["limits"]["numa"]) > 1]
    if moving:
        says = (
            f"kernel.numa_balancing is on for {who(moving, facts)}: pages move between processors while they are used"
        )
        found.append(
            ClusterFinding("software", check, "note", says, "sysctl kernel.numa_balancing=0 on nodes that train")
        )
    if found:
        return found
    if len(known) < len(gpus):
        return [ClusterFinding("software", check, "not checked", "the system does not say which cores are near a GPU")]
    return [ClusterFinding("software", check, "ok", "every rank runs on cores of its GPU's NUMA node")]


def _home(one: Facts) -> list[int]:
    """Return the cores of the NUMA node of a rank's GPU; none where it is not known."""
    numa = one["rdma"]["gpu numa"]
    return cores_of(one["limits"]["numa"].get(str(numa), "")) if numa is not None else []
