"""Read what each rank's system says of itself: versions, variables, limits, PCI devices, network adapters.

A rank's facts are one message of a few kilobytes.  Offsets and bits of PCI's configuration spaces are those of the PCI
Express base specification: the header (status, capability list), the PCI Express capability (0x10), and the extended
capability Access Control Services (0x000D).
"""

import functools
import hashlib
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import warpfold
from warpfold.cluster.findings import Facts, runs
from warpfold.cost.machine import name, version
from warpfold.ops.triton.launch import table_for
from warpfold.parallel.team import ProcessInfo

FAMILIES = (  # of the variables that are read
    "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "OMP_", "GOMP_", "MKL_", "KMP_", "TORCH_", "TORCHDYNAMO_", "PYTORCH_",
    "TRITON_", "UCX_", "MALLOC_CHECK_",
)  # fmt: skip
IPC_LOCK = 14  # the bit of this capability: capabilities(7)
NO_GID = {"", "0000:0000:0000:0000:0000:0000:0000:0000", "fe80:0000:0000:0000:0000:0000:0000:0000"}
ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
HEADER = 64  # bytes of a configuration space that everybody may read
CAPABILITY_LIST, EXPRESS, EXPRESS_CONTROL, RELAXED = 0x34, 0x10, 8, 1 << 4
EXTENDED, ACS, ACS_CONTROL = 0x100, 0x000D, 6
REDIRECTS = 1 << 2 | 1 << 3 | 1 << 4  # P2P request redirect, P2P completion redirect, upstream forwarding


def system_facts(
    process: ProcessInfo,
    device: torch.device,
    environ: Mapping[str, str],
    nodes: Sequence[Sequence[int]],
    root: Path = Path("/"),
) -> Facts:
    """Return the facts of this rank's system, JSON-able, for `judge_system`; a few kilobytes.

    What belongs to a node is read by its first rank alone.  environ: this process's variables.
    nodes: the ranks of each.  root: where `/proc`, `/sys` and `/dev` are.
    """
    node = next(number for number, ranks in enumerate(nodes) if process.rank in ranks)
    address = None
    if device.type == "cuda":
        of: Any = torch.cuda.get_device_properties(device)
        address = f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"
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
        "rdma": rdma_facts(address, root, whole_node=process.local_rank == 0),
    }


def text_of(path: Path) -> str:
    """Read a small file of the system, stripped; "" where there is none, or it may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def names_in(path: Path) -> list[str]:
    """Return the names in a folder, sorted; none where there is no such folder."""
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError:
        return []


def number_of(text: str) -> int | None:
    """Return the first whole number in a text, None without one."""
    found = re.search(r"\d+", text)
    return int(found[0]) if found else None


def cores_of(text: str) -> list[int]:
    """Return the cores that the kernel writes as "0-3,8"."""
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            cores += range(int(first), int(last or first) + 1)
    return sorted(set(cores))


def as_cores(cores: Iterable[int]) -> str:
    """Return cores as the kernel writes them: "0-3,8"."""
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs(cores))


# ---- software and variables


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


def variable_facts(environ: Mapping[str, str], root: Path = Path("/")) -> Facts:
    """Return the variables of `FAMILIES`, this process's threads, and the node's network cards."""
    return {
        "set": {name: environ[name] for name in sorted(environ) if name.startswith(FAMILIES)},
        "threads": torch.get_num_threads(),
        "cards": names_in(root / "sys/class/net"),
    }


# ---- limits


def limit_facts(root: Path = Path("/"), disk: Callable[[Path], int] | None = None) -> Facts:
    """Return the limits of this process, and what its node's memory and cores are like.

    root: where `/proc` and `/sys` are.  disk: returns the bytes of the file system at a path.
    """
    status, memory = (
        {name: value.strip() for name, _, value in (line.partition(":") for line in text_of(root / path).splitlines())}
        for path in ("proc/self/status", "proc/meminfo")
    )
    kib = {name: number_of(memory.get(name, "")) or 0 for name in ("MemTotal", "SwapTotal", "SwapFree")}
    limits, pages = text_of(root / "proc/self/limits"), root / "sys/kernel/mm/transparent_hugepage"
    nodes = root / "sys/devices/system/node"
    size = disk or (lambda path: shutil.disk_usage(path).total)
    return {
        "files": _limit(limits, "Max open files"),
        "locked": _limit(limits, "Max locked memory"),
        "may lock": bool(int(status.get("CapEff") or "0", 16) >> IPC_LOCK & 1),
        "shared": size(root / "dev/shm") if (root / "dev/shm").is_dir() else None,
        "huge pages": _chosen(text_of(pages / "enabled")),
        "compacts": _chosen(text_of(pages / "defrag")),
        "memory": 1024 * kib["MemTotal"],
        "swap used": 1024 * (kib["SwapTotal"] - kib["SwapFree"]),
        "balancing": text_of(root / "proc/sys/kernel/numa_balancing") not in ("", "0"),
        "cores": cores_of(status.get("Cpus_allowed_list", "")),
        "numa": {
            str(number_of(name)): as_cores(cores_of(text_of(nodes / name / "cpulist")))
            for name in names_in(nodes)
            if re.fullmatch(r"node\d+", name)
        },
    }


def _limit(limits: str, name: str) -> list[int | None] | None:
    """Return the soft and the hard limit, each None where unlimited; None where the kernel does not say."""
    found = re.search(rf"^{name} +(\w+) +(\w+)", limits, re.MULTILINE)
    return [None if value == "unlimited" else int(value) for value in found.groups()] if found else None


def _chosen(text: str) -> str:
    """Return which of "always [madvise] never" is in brackets."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else ""


# ---- PCI devices and network adapters


def rdma_facts(gpu: str | None, root: Path = Path("/"), whole_node: bool = True) -> Facts:
    """Return the facts in `/sys` and `/proc` about this rank's GPU and, if asked for, of its node's adapters.

    gpu: its PCI address, "0000:17:00.0"; None without one.
    """
    devices = root / "sys/bus/pci/devices"
    known = gpu is not None and (devices / gpu).exists()
    card = device_facts(devices / str(gpu)) if known else None
    adapters = [_adapter(root / "sys/class/infiniband" / name) for name in names_in(root / "sys/class/infiniband")]
    modules = [name for name in ("nvidia_peermem", "nv_peer_mem") if (root / "sys/module" / name).exists()]
    is_open = "Open Kernel Module" in text_of(root / "proc/driver/nvidia/version")
    flags = re.search(r"^flags.*", text_of(root / "proc/cpuinfo"), re.MULTILINE)
    node = {
        "modules": [*modules, *(["nvidia-open"] if is_open else [])],
        "linux": text_of(root / "proc/sys/kernel/osrelease"),
        "virtual": flags is not None and "hypervisor" in flags[0].split(),  # its PCI tree need not be the machine's
    }
    paths = [device["path"] for device in [*([card] if card else []), *(a["pci"] for a in adapters)]]
    return {
        "gpu": gpu,
        "gpu numa": card["numa"] if card else None,
        "card": card,
        # Above these devices, whether ACS redirects there; None: not known without being root.
        "bridges": {
            address: redirects(config_of(devices / address))
            for address in sorted({address for path in paths for address in path[:-1]})
        },
        "adapters": adapters if whole_node else [],
        **(node if whole_node else {}),
    }


def _adapter(folder: Path) -> Facts:
    device = folder / "device"
    cards = names_in(device / "net")
    return {
        "name": folder.name,
        "pci": device_facts(device),
        "mtu": number_of(text_of(device / "net" / cards[0] / "mtu")) if cards else None,
        "card": cards[0] if cards else "",
        "ports": [_port(folder / "ports" / port) for port in names_in(folder / "ports")],
    }


def _port(folder: Path) -> Facts:
    types, gids = folder / "gid_attrs/types", folder / "gids"
    gigabits = re.match(r"[\d.]+", text_of(folder / "rate"))
    return {
        "port": folder.name,
        "state": text_of(folder / "state").partition(":")[2].strip(),
        "rate": float(gigabits[0]) if gigabits else None,
        "layer": text_of(folder / "link_layer"),
        "gids": {
            index: text_of(types / index)
            for index in names_in(gids)
            if text_of(gids / index) not in NO_GID and text_of(types / index)
        },
    }


def device_facts(folder: Path) -> Facts:
    """Return where a PCI device is, and what it says of itself.

    folder: that of `/sys/bus/pci/devices`, or a link to it.  path: the addresses from the root port down to the device.
    """
    real = folder.resolve()
    numa = number_of(text_of(real / "numa_node").replace("-1", ""))
    return {
        "address": real.name,
        "path": [part for part in real.parts if ADDRESS.fullmatch(part)],
        "bridge": next((part for part in real.parts if re.fullmatch(r"pci[0-9a-f]{4,}:[0-9a-f]{2}", part)), ""),
        "numa": numa,
        "width": number_of(text_of(real / "current_link_width")),
        "widest": number_of(text_of(real / "max_link_width")),
        "speed": text_of(real / "current_link_speed"),
        "fastest": text_of(real / "max_link_speed"),
        "relaxed": relaxed_ordering(config_of(real)),
        "iommu": text_of(real / "iommu_group/type"),
    }


def config_of(folder: Path) -> bytes:
    """Return a device's configuration space: all of it for root, 64 bytes for others, none where there is none."""
    try:
        return (folder / "config").read_bytes()
    except OSError:
        return b""


def relaxed_ordering(config: bytes) -> bool | None:
    """Return whether a device may order its writes freely; None where its configuration cannot be read."""
    at = config[CAPABILITY_LIST] & ~3 if len(config) > HEADER else 0
    for _ in range(48):  # as many as fit; a list that goes round in circles ends
        if not HEADER <= at <= len(config) - EXPRESS_CONTROL - 2:
            return None
        if config[at] == EXPRESS:
            return bool(int.from_bytes(config[at + EXPRESS_CONTROL : at + EXPRESS_CONTROL + 2], "little") & RELAXED)
        at = config[at + 1] & ~3
    return None


def redirects(config: bytes) -> bool | None:
    """Return whether a bridge's ACS sends what two devices below it exchange up to the root; None: not readable."""
    if len(config) <= EXTENDED + 8:
        return None
    at = EXTENDED
    for _ in range(len(config) // 8):
        head = int.from_bytes(config[at : at + 4], "little")
        if head & 0xFFFF == ACS:
            return bool(int.from_bytes(config[at + ACS_CONTROL : at + ACS_CONTROL + 2], "little") & REDIRECTS)
        at = head >> 20 & ~3
        if not EXTENDED <= at <= len(config) - 8:
            return False
    return False
