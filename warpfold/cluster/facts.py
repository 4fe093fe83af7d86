"""Read the facts of a rank's system: versions, variables, limits, PCI devices and network adapters.

The facts of a rank are a JSON message of a few kilobytes. Offsets and bits of PCI configuration spaces follow the PCI
Express base specification: the header (capability list), the PCI Express capability (0x10), and the extended capability
Access Control Services (0x000D).
"""

import hashlib
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import warpfold
from warpfold.cost.machine import device_name, package_version
from warpfold.ops.triton.launch import table_for
from warpfold.parallel.team import ProcessInfo

Facts = dict[str, Any]

FAMILIES = ("CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "OMP_", "GOMP_", "TORCH_", "UCX_")
# Bit of CAP_IPC_LOCK in CapEff; see capabilities(7).
IPC_LOCK_BIT = 14
EMPTY_GIDS = {"", "0000:0000:0000:0000:0000:0000:0000:0000", "fe80:0000:0000:0000:0000:0000:0000:0000"}
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# Only root can read more than the header of a configuration space.
HEADER_BYTES = 64
CAPABILITY_LIST, EXPRESS, EXPRESS_CONTROL, RELAXED_BIT = 0x34, 0x10, 8, 1 << 4
EXTENDED, ACS, ACS_CONTROL = 0x100, 0x000D, 6
# P2P request redirect, P2P completion redirect, upstream forwarding.
REDIRECT_BITS = 1 << 2 | 1 << 3 | 1 << 4


def rank_facts(
    process: ProcessInfo, device: torch.device, environ: Mapping[str, str], nodes: Sequence[Sequence[int]]
) -> Facts:
    """Read the facts of this rank as a JSON value for `judge`.

    environ: environment variables of this process. nodes: the ranks of each node.
    """
    node = next(number for number, ranks in enumerate(nodes) if process.rank in ranks)
    gpu = None
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        gpu = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return {
        "rank": process.rank,
        "local_rank": process.local_rank,
        "per_node": len(nodes[node]),
        "node": node,
        "host": platform.node(),
        "kind": "cuda" if device.type == "cuda" else "cpu",
        "software": software_facts(device),
        **system_facts(environ, gpu, is_first=process.local_rank == 0),
    }


def software_facts(device: torch.device, root: Path = Path("/")) -> dict[str, str]:
    """Read the versions of the software, and checksums of the package and the launch table; "" for missing ones."""
    driver = re.search(r"Kernel Module.*?\s(\d[\d.]+)", text_of(root / "proc/driver/nvidia/version"))
    versions = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "warpfold": f"{warpfold.__version__} {_checksum(sorted(Path(warpfold.__file__).parent.rglob('*.py')))}",
        "CUDA": torch.version.cuda or "",
        "NCCL": "",
        "driver": driver[1] if driver else "",
        "GPU": "",
        "launch table": "",
    }
    if device.type == "cuda":
        table = table_for(device)[0].path
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        versions["GPU"], versions["launch table"] = device_name(device), f"{table.name} {_checksum([table])}"
    return versions


def _checksum(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:8]


def system_facts(environ: Mapping[str, str], gpu: str | None, root: Path = Path("/"), is_first: bool = True) -> Facts:
    """Read variables, limits, and the PCI devices of this rank.

    gpu: PCI address of the rank's GPU, such as "0000:17:00.0". root: folder with `/proc`, `/sys` and `/dev`.
    is_first: also read the facts of the node, which the first rank of each node does.
    """
    status = dict(re.findall(r"^(\w+):\s*(.*)$", text_of(root / "proc/self/status"), re.MULTILINE))
    limits = text_of(root / "proc/self/limits")
    soft_limits: dict[str, str] = {}
    for limit in ("Max open files", "Max locked memory"):
        match = re.search(rf"^{limit} +(\w+)", limits, re.MULTILINE)
        soft_limits[limit] = match[1] if match else "unlimited"
    shared = root / "dev/shm"
    devices, adapters = root / "sys/bus/pci/devices", root / "sys/class/infiniband"
    card = pci_facts(devices / gpu) if gpu and (devices / gpu).exists() else None
    if card:
        cpulist = root / f"sys/devices/system/node/node{card['numa']}/cpulist"
        card["cores"] = cores_of(text_of(cpulist)) if card["numa"] is not None else []
    host_adapters = [adapter_facts(adapters / name) for name in names_in(adapters)]
    bridges = {address for device in [*([card] if card else []), *(a["pci"] for a in host_adapters)]
               for address in device["path"][:-1]}  # fmt: skip
    facts = {
        "variables": {name: environ[name] for name in sorted(environ) if name.startswith(FAMILIES)},
        "cards": names_in(root / "sys/class/net"),
        "threads": torch.get_num_threads(),
        "cores": cores_of(status.get("Cpus_allowed_list", "")),
        # None means unlimited or not reported.
        "open files": number_of(soft_limits["Max open files"]),
        "locked": number_of(soft_limits["Max locked memory"]),
        "can lock": bool(int(status.get("CapEff") or "0", 16) >> IPC_LOCK_BIT & 1),
        "shared": shutil.disk_usage(shared).total if shared.is_dir() else 0,
        "gpu": card,
        # Whether ACS redirects at each bridge above these devices; None if only root can read it.
        "bridges": {address: redirects(config_of(devices / address)) for address in sorted(bridges)},
    }
    if is_first:
        driver = text_of(root / "proc/driver/nvidia/version")
        flags = re.search(r"^flags.*", text_of(root / "proc/cpuinfo"), re.MULTILINE)
        facts |= {
            "adapters": host_adapters,
            "peer memory": any((root / "sys/module" / name).exists() for name in ("nvidia_peermem", "nv_peer_mem")),
            "open modules": "Open Kernel Module" in driver,
            "linux": [int(number) for number in re.findall(r"\d+", text_of(root / "proc/sys/kernel/osrelease"))[:2]],
            # The PCI tree of a virtual machine may differ from that of the hardware.
            "virtual": flags is not None and "hypervisor" in flags[0].split(),
        }
    return facts


def adapter_facts(folder: Path) -> Facts:
    """Read an InfiniBand or RoCE adapter and its ports, below /sys/class/infiniband."""
    ports = []
    for port in names_in(folder / "ports"):
        at = folder / "ports" / port
        kinds = {index: text_of(at / "gid_attrs/types" / index) for index in names_in(at / "gids")
                 if text_of(at / "gids" / index) not in EMPTY_GIDS}  # fmt: skip
        ports.append({
            "state": text_of(at / "state").partition(":")[2].strip(),
            "is ethernet": text_of(at / "link_layer") == "Ethernet",
            "gids": {index: kind for index, kind in kinds.items() if kind},
        })  # fmt: skip
    return {"name": folder.name, "pci": pci_facts(folder / "device"), "ports": ports}


def pci_facts(folder: Path) -> Facts:
    """Read the location and the settings of a PCI device. "path" has the addresses from the root port to the device."""
    real = folder.resolve()
    numa = text_of(real / "numa_node")
    return {
        "address": real.name,
        "path": [part for part in real.parts if PCI_ADDRESS.fullmatch(part)],
        "host bridge": next((part for part in real.parts if re.fullmatch(r"pci[0-9a-f]{4,}:[0-9a-f]{2}", part)), ""),
        "numa": int(numa) if numa.isdigit() else None,
        "relaxed": relaxed_ordering(config_of(real)),
        "iommu": text_of(real / "iommu_group/type"),
    }


def relaxed_ordering(config: bytes) -> bool | None:
    """Return whether a device may reorder its writes; None if its configuration is not readable."""
    at = config[CAPABILITY_LIST] & ~3 if len(config) > HEADER_BYTES else 0
    # A damaged list may be circular, and at most 48 capabilities fit into the space.
    for _ in range(48):
        if not HEADER_BYTES <= at <= len(config) - EXPRESS_CONTROL - 2:
            return None
        if config[at] == EXPRESS:
            control = config[at + EXPRESS_CONTROL : at + EXPRESS_CONTROL + 2]
            return bool(int.from_bytes(control, "little") & RELAXED_BIT)
        at = config[at + 1] & ~3
    return None


def redirects(config: bytes) -> bool | None:
    """Return whether a bridge's ACS redirects traffic between devices below it to the root; None if not readable."""
    if len(config) <= EXTENDED + 8:
        return None
    at = EXTENDED
    for _ in range(len(config) // 8):
        head = int.from_bytes(config[at : at + 4], "little")
        if head & 0xFFFF == ACS:
            return bool(int.from_bytes(config[at + ACS_CONTROL : at + ACS_CONTROL + 2], "little") & REDIRECT_BITS)
        at = head >> 20 & ~3
        if not EXTENDED <= at <= len(config) - 8:
            return False
    return False


# ---- system files


def text_of(path: Path) -> str:
    """Read a system file without surrounding whitespace; "" if it is missing or not readable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def config_of(folder: Path) -> bytes:
    """Read the configuration space of a device, of which other users than root see the header; b"" if missing."""
    try:
        return (folder / "config").read_bytes()
    except OSError:
        return b""


def names_in(path: Path) -> list[str]:
    """List the sorted names in a folder; empty if it is missing or not readable."""
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError:
        return []


def number_of(text: str) -> int | None:
    """Parse the first whole number in a text; None without one."""
    match = re.search(r"\d+", text)
    return int(match[0]) if match else None


def cores_of(text: str) -> list[int]:
    """Parse a list of cores in the kernel's format, such as "0-3,8"."""
    cores: list[int] = []
    for item in text.split(","):
        first, _, last = item.strip().partition("-")
        if first.isdigit():
            cores += range(int(first), int(last or first) + 1)
    return cores
