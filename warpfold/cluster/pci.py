"""PCI devices as `/sys` shows them: what joins a GPU and an adapter, and what their configuration spaces say.

Offsets and bits are those of the PCI Express base specification: the header (status, capability list), the PCI
Express capability (0x10), and the extended capability Access Control Services (0x000D).
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from warpfold.cluster.facts import Facts, number_of, text_of

ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
HEADER = 64  # bytes of a configuration space that everybody may read
CAPABILITY_LIST, EXPRESS, EXPRESS_CONTROL, RELAXED = 0x34, 0x10, 8, 1 << 4
EXTENDED, ACS, ACS_CONTROL = 0x100, 0x000D, 6
REDIRECTS = 1 << 2 | 1 << 3 | 1 << 4  # P2P request redirect, P2P completion redirect, upstream forwarding
# How near two devices are, from near to far.
Distance = Literal["one PCIe switch", "one host bridge", "one NUMA node", "different processors"]
NEAR: tuple[Distance, ...] = ("one PCIe switch", "one host bridge", "one NUMA node", "different processors")


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


def bridges_facts(root: Path, paths: Sequence[Sequence[str]]) -> dict[str, bool | None]:
    """Return for each bridge above some devices whether ACS redirects there; None: not known without being root.

    paths: of devices, as `device_facts` has them.
    """
    above = sorted({address for path in paths for address in path[:-1]})
    return {address: redirects(config_of(root / "sys/bus/pci/devices" / address)) for address in above}


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


def distance(a: Facts, b: Facts) -> Distance:
    """Return how near two devices are, by what `device_facts` says of them."""
    shared = [one for one, other in zip(a["path"][:-1], b["path"][:-1]) if one == other]
    if shared:
        return "one PCIe switch"
    if a["bridge"] and a["bridge"] == b["bridge"]:
        return "one host bridge"
    return "one NUMA node" if a["numa"] is not None and a["numa"] == b["numa"] else "different processors"


def is_virtual(root: Path) -> bool:
    """Return whether this is a virtual machine, whose PCI tree need not be the machine's."""
    flags = next((line for line in text_of(root / "proc/cpuinfo").splitlines() if line.startswith("flags")), "")
    return "hypervisor" in flags.split()
