"""Whether GPUs and network adapters exchange data without the host: GPU Direct RDMA, as the system shows it.

Sources: NVIDIA's documentation of GPUDirect RDMA (nvidia-peermem; dma-buf from Linux 5.12 with the open modules), and
NCCL's user guide ("Troubleshooting": PCI access control services, RoCE; "Environment Variables").
"""

import re
from collections.abc import Sequence
from pathlib import Path

from warpfold.cluster.facts import (
    Facts,
    names_in,
    number_of,
    of_nodes,
    on_gpus,
    several_nodes,
    sides,
    text_of,
    who,
)
from warpfold.cluster.findings import ClusterFinding
from warpfold.cluster.pci import NEAR, bridges_facts, device_facts, distance, is_virtual
from warpfold.cluster.variables import chosen_of, value_of

DMA_BUF_LINUX = (5, 12)
CHOOSES_GID = (2, 21)  # from this NCCL on it takes the GID of RoCE v2 by itself
ROCE_MTU = 4200  # bytes of a card's MTU that RoCE's packets of 4096 bytes need
NO_GID = {"", "0000:0000:0000:0000:0000:0000:0000:0000", "fe80:0000:0000:0000:0000:0000:0000:0000"}


def rdma_facts(gpu: str | None, root: Path = Path("/"), whole_node: bool = True) -> Facts:
    """Return what `/sys` and `/proc` say of this rank's GPU and, if asked for, of its node's adapters.

    gpu: its PCI address, "0000:17:00.0"; None without one.
    """
    devices = root / "sys/bus/pci/devices"
    known = gpu is not None and (devices / gpu).exists()
    card = device_facts(devices / str(gpu)) if known else None
    adapters = [_adapter(root / "sys/class/infiniband" / name) for name in names_in(root / "sys/class/infiniband")]
    node = {
        "modules": _modules(root),
        "linux": text_of(root / "proc/sys/kernel/osrelease"),
        "virtual": is_virtual(root),
    }
    paths = [device["path"] for device in [*([card] if card else []), *(a["pci"] for a in adapters)]]
    return {
        "gpu": gpu,
        "gpu numa": card["numa"] if card else None,
        "card": card,
        "bridges": bridges_facts(root, paths),
        "adapters": adapters if whole_node else [],
        **(node if whole_node else {}),
    }


def _modules(root: Path) -> list[str]:
    """Return which of the modules that matter are loaded; "nvidia-open" where the GPU's is the open one."""
    found = [name for name in ("nvidia_peermem", "nv_peer_mem", "ib_core") if (root / "sys/module" / name).exists()]
    is_open = "Open Kernel Module" in text_of(root / "proc/driver/nvidia/version")
    return [*found, *(["nvidia-open"] if is_open else [])]


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
    return {
        "port": folder.name,
        "state": text_of(folder / "state").partition(":")[2].strip(),
        "rate": _gigabits(text_of(folder / "rate")),
        "layer": text_of(folder / "link_layer"),
        "gids": {
            index: text_of(types / index)
            for index in names_in(gids)
            if text_of(gids / index) not in NO_GID and text_of(types / index)
        },
    }


def _gigabits(text: str) -> float | None:
    found = re.match(r"[\d.]+", text)
    return float(found[0]) if found else None


def active_ports(adapter: Facts) -> list[Facts]:
    """Return the ports of an adapter that are up."""
    return [port for port in adapter["ports"] if port["state"] == "ACTIVE"]


def judge_rdma(facts: Sequence[Facts]) -> list[ClusterFinding]:
    """Return whether the way from GPU to wire is as short as it can be, and where it is not."""
    nodes = of_nodes(facts)
    if not any(one["rdma"]["adapters"] for one in nodes):
        if not on_gpus(facts):
            return [_finding(check, "not checked", "no GPU") for check in (*GPU_CHECKS, "network adapters")]
        if several_nodes(facts):
            cure = "load the adapters' driver (MLNX_OFED, rdma-core), and give containers /dev/infiniband"
            return [_finding("network adapters", "note", "no InfiniBand or RoCE adapter: NCCL sends by TCP", cure)]
        return [_finding("network adapters", "ok", "none, and none is needed on one node")]
    links = [*_present(nodes), *_states(nodes), *_rates(nodes), *_roce(nodes, facts), *_widths(facts)]
    if not on_gpus(facts):
        return [*links, *(_finding(check, "not checked", "no GPU") for check in GPU_CHECKS)]
    return [*links, _module(nodes), _nearest(facts), _acs(nodes, facts), _relaxed(nodes), *_iommu(nodes), *_used(facts)]


GPU_CHECKS = ("kernel module", "PCIe switch", "ACS", "relaxed ordering", "adapter of each rank")


def _finding(check: str, outcome: str, says: str, cure: str = "", line: str = "") -> ClusterFinding:
    return ClusterFinding("rdma", check, outcome, says, cure, line)  # type: ignore[arg-type]


def _present(nodes: Sequence[Facts]) -> list[ClusterFinding]:
    """Return whether all nodes have the same adapters."""
    parties = sides(nodes, lambda one: ", ".join(a["name"] for a in one["rdma"]["adapters"]) or "none")
    if len(parties) == 1:
        return [_finding("network adapters", "ok", f"{parties[0][0]} on every node")]
    says = "; ".join(f"{names} at {_hosts(having)}" for names, having in parties)
    return [
        _finding("network adapters", "wrong", says, "look at lspci and dmesg of the nodes that lack one, or drain them")
    ]


def _hosts(nodes: Sequence[Facts]) -> str:
    hosts = [str(one["host"]) for one in nodes]
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")


def _states(nodes: Sequence[Facts]) -> list[ClusterFinding]:
    """Return which adapters have no port that is up, though the same adapter has one elsewhere."""
    up = {a["name"] for one in nodes for a in one["rdma"]["adapters"] if active_ports(a)}
    down = {
        a["name"]: [n for n in nodes for b in n["rdma"]["adapters"] if b["name"] == a["name"] and not active_ports(b)]
        for one in nodes
        for a in one["rdma"]["adapters"]
        if not active_ports(a)
    }
    cure = "look at the cable, the switch's port and the subnet manager (ibstat, ibdiagnet); until then drain the node"
    found = []
    for name, having in sorted(down.items()):
        state = next(
            (p["state"] for a in having[0]["rdma"]["adapters"] if a["name"] == name for p in a["ports"]),
            "without ports",
        )
        broken = name in up or not up
        says = f"{name} is {state or 'not known'} at {_hosts(having)}"
        found.append(_finding("link state", "wrong" if broken else "note", says, cure if broken else ""))
    return found or [_finding("link state", "ok", "a port of each adapter is active")]


def _rates(nodes: Sequence[Facts]) -> list[ClusterFinding]:
    """Return which ports are slower than the same one of other nodes, or than the other adapters of their node."""
    rates = [
        (one, a["name"], port["rate"])
        for one in nodes
        for a in one["rdma"]["adapters"]
        for port in active_ports(a)
        if port["rate"]
    ]
    found = []
    for name in sorted({name for _, name, _ in rates}):
        of_name = [(one, rate) for one, this, rate in rates if this == name]
        best = max(rate for _, rate in of_name)
        if slow := [(one, rate) for one, rate in of_name if rate < best]:
            says = f"{name} runs at {min(rate for _, rate in slow):g} Gb/s at {_hosts([one for one, _ in slow])}"
            cure = "reseat or exchange the cable or transceiver, and look at the switch's port (iblinkinfo, mlxlink)"
            found.append(_finding("link rate", "wrong", f"{says}, elsewhere at {best:g}", cure))
    words = ", ".join(f"{rate:g}" for rate in sorted({rate for *_, rate in rates}, reverse=True))
    return found or ([_finding("link rate", "ok", f"{words} Gb/s")] if rates else [])


def _roce(nodes: Sequence[Facts], facts: Sequence[Facts]) -> list[ClusterFinding]:
    """Return what is wrong with adapters on Ethernet: the GID's type, and the MTU."""
    ports = [
        (one, a, port)
        for one in nodes
        for a in one["rdma"]["adapters"]
        for port in active_ports(a)
        if port["layer"] == "Ethernet"
    ]
    if not ports:
        return []
    found = []
    index = next(
        (value for one in facts if (value := value_of(one, "NCCL_IB_GID_INDEX")) not in (None, "", "-1")), None
    )
    two = [(one, a) for one, a, port in ports if not any("v2" in kind for kind in port["gids"].values())]
    if two:
        says = f"{two[0][1]['name']} of {_hosts(_once([one for one, _ in two]))} has no GID of RoCE v2"
        cure = "give the card an IPv4 address, and cma_roce_mode or the driver's default RoCE v2 (show_gids lists them)"
        found.append(_finding("RoCE", "wrong", says, cure))
    elif index is not None:
        other = [(one, a, port["gids"].get(index)) for one, a, port in ports if "v2" not in port["gids"].get(index, "")]
        if other:
            one, a, kind = other[0]
            right = next(i for i, k in next(p["gids"] for o, b, p in ports if o is one and b is a).items() if "v2" in k)
            where = f"{a['name']} at {_hosts(_once([o for o, *_ in other]))}"
            says = f"NCCL_IB_GID_INDEX={index} is {kind or 'no GID'} of {where}"
            cure = f"set NCCL_IB_GID_INDEX={right}, or unset it with NCCL {'.'.join(map(str, CHOOSES_GID))} or newer"
            found.append(_finding("RoCE", "wrong", says, cure, f"export NCCL_IB_GID_INDEX={right}"))
    elif _chooses_not(facts):
        first = next(i for i, kind in ports[0][2]["gids"].items() if "v2" in kind)
        says = "this NCCL takes GID 0 unless NCCL_IB_GID_INDEX is set, which is RoCE v1 and is not routed"
        line = f"export NCCL_IB_GID_INDEX={first}"
        found.append(_finding("RoCE", "wrong", says, f"set NCCL_IB_GID_INDEX={first}", line))
    return [*found, *_mtu([(one, a) for one, a, _ in ports])] or [
        _finding("RoCE", "ok", "GIDs of v2, and MTUs that suit")
    ]


def _once(nodes: Sequence[Facts]) -> list[Facts]:
    return list({one["node"]: one for one in nodes}.values())


def _chooses_not(facts: Sequence[Facts]) -> bool:
    """Return whether a rank's NCCL is older than the one that finds the GID by itself."""
    versions = [str(one["software"]["NCCL"]) for one in facts if one["software"]["NCCL"]]
    return any(tuple(map(int, re.findall(r"\d+", text)[:2])) < CHOOSES_GID for text in versions)


def _mtu(pairs: Sequence[tuple[Facts, Facts]]) -> list[ClusterFinding]:
    known = [(one, a) for one, a in pairs if a["mtu"]]
    sizes = {a["mtu"] for _, a in known}
    if len(sizes) > 1:
        low = min(sizes)
        where = _hosts(_once([one for one, a in known if a["mtu"] == low]))
        says = f"the MTU is {low} at {where}, elsewhere {max(sizes)}: large packets are lost"
        return [_finding("RoCE's MTU", "wrong", says, "ip link set CARD mtu 9000 on all nodes, and on the switches")]
    if sizes and min(sizes) < ROCE_MTU:
        says = f"the MTU is {min(sizes)} everywhere: RoCE sends packets of 1,024 bytes"
        cure = "where the switches allow it: ip link set CARD mtu 9000 on all nodes, for packets of 4,096"
        return [_finding("RoCE's MTU", "note", says, cure)]
    return []


def _widths(facts: Sequence[Facts]) -> list[ClusterFinding]:
    """Return which GPUs and adapters have fewer PCIe lanes, and which adapters slower ones, than they could."""
    found = []
    devices = [(one, one["rdma"]["card"], "the GPU") for one in facts if one["rdma"]["card"]]
    devices += [(one, a["pci"], a["name"]) for one in of_nodes(facts) for a in one["rdma"]["adapters"]]
    for one, pci, name in devices:
        says = ""
        if pci["width"] and pci["widest"] and pci["width"] < pci["widest"]:
            says = f"{pci['width']} of {pci['widest']} PCIe lanes"
        elif name != "the GPU" and pci["speed"] and pci["speed"] != pci["fastest"]:  # an idle GPU's lanes slow down
            says = f"PCIe lanes of {pci['speed']}, not {pci['fastest']}"
        if says:
            cure = "reseat it or move it to another slot; look at the slot's lanes and bifurcation in the BIOS"
            found.append(
                _finding("PCIe lanes", "wrong", f"{name} ({pci['address']}) at {one['host']} has {says}", cure)
            )
    return found or [_finding("PCIe lanes", "ok", "as many and as fast as GPUs and adapters can have")]


def _module(nodes: Sequence[Facts]) -> ClusterFinding:
    check, lacking, how = "kernel module", [], set()
    for one in nodes:
        modules = one["rdma"]["modules"]
        linux = tuple(map(int, re.findall(r"\d+", one["rdma"]["linux"])[:2]))
        if "nvidia_peermem" in modules or "nv_peer_mem" in modules:
            how.add("nvidia_peermem is loaded")
        elif "nvidia-open" in modules and linux >= DMA_BUF_LINUX:
            how.add("dma-buf: open modules, and a Linux that has it")
        else:
            lacking.append(one)
    if lacking:
        says = f"neither nvidia_peermem nor dma-buf at {_hosts(lacking)}: GPUs send through the host's memory"
        cure = "modprobe nvidia-peermem, and its name into /etc/modules-load.d/; or the open modules and Linux 5.12"
        return _finding(check, "wrong", says, cure)
    return _finding(check, "ok", "; ".join(sorted(how)))


def adapter_of(one: Facts, adapters: Sequence[Facts]) -> Facts | None:
    """Return the adapter that a rank will use: the nearest that is up; of equally near ones ranks take turns.

    NCCL looks at rates too, and may use several: NCCL_DEBUG=INFO prints its choice.
    """
    names = [a["name"] for a in adapters if active_ports(a)]
    wanted = chosen_of(value_of(one, "NCCL_IB_HCA") or "", names) if value_of(one, "NCCL_IB_HCA") else names
    able = [a for a in adapters if a["name"] in wanted]
    card = one["rdma"]["card"]
    if not able or card is None:
        return None
    nearest = min(NEAR.index(distance(card, a["pci"])) for a in able)
    near = [a for a in able if NEAR.index(distance(card, a["pci"])) == nearest]
    found: Facts = near[one["local_rank"] % len(near)]
    return found


def _chosen(facts: Sequence[Facts]) -> list[tuple[Facts, Facts | None]]:
    """Return each rank on a GPU with its adapter."""
    of_node = {one["node"]: one["rdma"]["adapters"] for one in of_nodes(facts)}
    return [(one, adapter_of(one, of_node.get(one["node"], []))) for one in facts if one["rdma"]["card"]]


def _nearest(facts: Sequence[Facts]) -> ClusterFinding:
    check, chosen = "PCIe switch", _chosen(facts)
    far = [(one, distance(one["rdma"]["card"], a["pci"])) for one, a in chosen if a is not None]
    across = [one for one, how in far if how in NEAR[2:]]
    if across:
        says = f"the nearest adapter of {who(across, facts)} is at another host bridge or processor: no GPU Direct RDMA"
        cure = (
            "choose nodes with an adapter at each GPU's switch, or use only GPUs that have one; NCCL_IB_HCA may hide it"
        )
        return _finding(check, "wrong", says, cure)
    behind = [one for one, how in far if how == NEAR[1]]
    if behind:
        says = f"GPU and adapter of {who(behind, facts)} meet at the host bridge, not at a switch"
        cure = (
            "measure it: with NCCL_NET_GDR_LEVEL=PHB NCCL uses GPU Direct RDMA there too; move the adapter if it may be"
        )
        return _finding(check, "note", says, cure)
    if not far:
        return _finding(check, "not checked", "the system does not say where GPUs and adapters are")
    return _finding(check, "ok", "every GPU has an adapter at its own switch")


def _acs(nodes: Sequence[Facts], facts: Sequence[Facts]) -> ClusterFinding:
    bridges = [(one, address, on) for one in facts for address, on in one["rdma"]["bridges"].items()]
    redirecting = sorted({(str(one["host"]), address) for one, address, on in bridges if on})
    if redirecting:
        hosts, (_, address) = sorted({host for host, _ in redirecting}), redirecting[0]
        says = f"{len(redirecting)} bridges at {', '.join(hosts[:4])} (first {address}) redirect to the root"
        cure = (
            "switch ACS off in the BIOS, or as root for each bridge at every boot: setpci -s ADDRESS ECAP_ACS+6.w=0000"
        )
        return _finding("ACS", "wrong", says, cure)
    if all(one["rdma"]["virtual"] for one in nodes):
        return _finding("ACS", "not checked", "a virtual machine: its host's bridges are not visible")
    if not bridges or any(on is None for *_, on in bridges):
        return _finding("ACS", "not checked", "only root may read the bridges' configuration: run doctor as root once")
    return _finding("ACS", "ok", "no bridge above GPUs and adapters redirects")


def _relaxed(nodes: Sequence[Facts]) -> ClusterFinding:
    check = "relaxed ordering"
    states = [(one, a) for one in nodes for a in one["rdma"]["adapters"]]
    off = [(one, a) for one, a in states if a["pci"]["relaxed"] is False]
    if off:
        one, a = off[0]
        says = f"off for {len(off)} adapters, first {a['name']} at {one['host']}: writes to GPUs wait for each other"
        cure = (
            f"mlxconfig -d {a['pci']['address']} set PCI_WR_ORDERING=1 and a cold boot, or the BIOS' relaxed ordering"
        )
        return _finding(check, "wrong", says, cure)
    if any(a["pci"]["relaxed"] is None for _, a in states):
        return _finding(check, "not checked", "only root may read the adapters' configuration: run doctor as root once")
    return _finding(check, "ok", "on for every adapter")


def _iommu(nodes: Sequence[Facts]) -> list[ClusterFinding]:
    """Return a finding where an IOMMU translates what devices exchange, on machines that are none of a host's."""
    translated = [
        one
        for one in nodes
        if not one["rdma"]["virtual"] and any(str(a["pci"]["iommu"]).startswith("DMA") for a in one["rdma"]["adapters"])
    ]
    if not translated:
        return []
    says = f"an IOMMU translates every transfer between devices at {_hosts(translated)}"
    cure = "boot with iommu=pt (intel_iommu=on iommu=pt), or switch VT-d / AMD-Vi off in the BIOS"
    return [_finding("IOMMU", "wrong", says, cure)]


def _used(facts: Sequence[Facts]) -> list[ClusterFinding]:
    """Return which adapter each rank will use."""
    chosen = _chosen(facts)
    by_adapter = {
        name: [one for one, a in chosen if a is not None and a["name"] == name]
        for name in sorted({a["name"] for _, a in chosen if a is not None})
    }
    if not by_adapter:
        return [_finding("adapter of each rank", "not checked", "the system does not say where GPUs and adapters are")]
    locals_of = {name: sorted({one["local_rank"] for one in having}) for name, having in by_adapter.items()}
    says = "; ".join(f"{name}: local ranks {', '.join(map(str, ranks))}" for name, ranks in locals_of.items())
    return [_finding("adapter of each rank", "ok", says)]
