"""A healthy cluster of two nodes with two GPUs each, as files of `/sys` and `/proc`, which tests can change."""

from pathlib import Path

import torch

from warpfold.cluster.facts import Facts, software_facts, system_facts

NODES, PER_NODE = 2, 2
# For each GPU and the adapter at its switch: host bridge, root port, the ports of the switch, and the two devices
TREES = (
    ("pci0000:16", "0000:16:01.0/0000:17:00.0", "0000:18:00.0", "0000:19:00.0", "0000:18:01.0", "0000:1a:00.0"),
    ("pci0000:a0", "0000:a0:01.0/0000:a1:00.0", "0000:a2:00.0", "0000:a3:00.0", "0000:a2:01.0", "0000:a4:00.0"),
)
GPUS = tuple(tree[3] for tree in TREES)
ADAPTERS = tuple(tree[5] for tree in TREES)
CORES = ("0-7", "8-15")


def config(relaxed: bool = True, acs: int | None = 0, size: int = 4096) -> bytes:
    """Build a PCI configuration space.

    It has the capabilities power management (1) and PCI Express, and the extended ones error reporting (1) and ACS.
    acs: the control register, or None without this capability.
    """
    data = bytearray(4096)
    data[0x34] = 0x40
    data[0x40:0x42] = bytes([0x01, 0x60])
    data[0x60:0x62] = bytes([0x10, 0x00])
    data[0x68:0x6A] = (0x2810 if relaxed else 0x2800).to_bytes(2, "little")
    following = 0x150 if acs is not None else 0
    data[0x100:0x104] = (0x0001 | 2 << 16 | following << 20).to_bytes(4, "little")
    if acs is not None:
        data[0x150:0x154] = (0x000D | 1 << 16).to_bytes(4, "little")
        data[0x156:0x158] = acs.to_bytes(2, "little")
    return bytes(data[:size])


class FakeNode:
    """The files of one node, in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for number, (bridge, top, to_gpu, gpu, to_adapter, adapter) in enumerate(TREES):
            switch = f"sys/devices/{bridge}/{top}"
            for path in (f"{switch}/{to_gpu}/{gpu}", f"{switch}/{to_adapter}/{adapter}"):
                self._device(path, number)
            self.adapter(f"mlx5_{number}", adapter)
        for number, cores in enumerate(CORES):
            self.write(f"sys/devices/system/node/node{number}/cpulist", cores)
        self._system()

    def _device(self, path: str, numa: int) -> None:
        """Write a device and the bridges above it."""
        for part in [*Path(path).parents][:-3] + [Path(path)]:
            if part.name.startswith("pci"):
                continue
            self.write(f"{part}/numa_node", str(numa))
            (self.root / part / "config").write_bytes(config())
            self._link(f"sys/bus/pci/devices/{part.name}", str(part))
        self.write(f"{path}/iommu_group/type", "identity")

    def adapter(self, name: str, address: str, layer: str = "InfiniBand") -> None:
        """Write an InfiniBand adapter, or a RoCE adapter with the GIDs of a card that has an IPv4 address."""
        device = next(self.root.glob(f"sys/devices/**/{address}"))
        folder = f"sys/class/infiniband/{name}"
        self._link(f"{folder}/device", str(device.relative_to(self.root)))
        self.write(f"{folder}/ports/1/state", "4: ACTIVE")
        self.write(f"{folder}/ports/1/link_layer", layer)
        gids = {"0": ("fe80:0000:0000:0000:0ac0:ebff:fe00:0001", "IB/RoCE v1")}
        if layer == "Ethernet":
            gids["3"] = ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2")
        for index, (gid, kind) in gids.items():
            self.write(f"{folder}/ports/1/gids/{index}", gid)
            self.write(f"{folder}/ports/1/gid_attrs/types/{index}", kind)

    def _system(self) -> None:
        for module in ("ib_core", "nvidia_peermem"):
            (self.root / "sys/module" / module).mkdir(parents=True)
        for card in ("eth0", "ib0", "lo"):
            (self.root / "sys/class/net" / card).mkdir(parents=True)
        (self.root / "dev/shm").mkdir(parents=True)
        for path, text in {
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu",
            "proc/cpuinfo": "flags\t\t: fpu sse2",
            "proc/sys/kernel/osrelease": "5.15.0",
            "proc/self/limits": "Max open files            65536                1048576              files\n"
            "Max locked memory         unlimited            unlimited            bytes",
            "proc/self/status": "CapEff:\t0000000000000000\nCpus_allowed_list:\t0-7",
        }.items():
            self.write(path, text)

    def write(self, path: str, text: str) -> None:
        """Write a file in the root folder."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def _link(self, path: str, to: str) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(self.root / to)

    def device(self, address: str) -> str:
        """Return the folder of a PCI device's files in the root folder."""
        return f"sys/bus/pci/devices/{address}"


class FakeCluster:
    """Two nodes, and the environment of their ranks. `facts()` reads everything as the ranks would."""

    def __init__(self, folder: Path, gpus: bool = True) -> None:
        self.nodes = [FakeNode(folder / f"gpu-{'ab'[i]}") for i in range(NODES)]
        self.gpus = gpus
        ranks = NODES * PER_NODE
        self.environ: list[dict[str, str]] = [{"NCCL_DEBUG": "WARN", "PATH": "/bin"} for _ in range(ranks)]
        self.software: list[dict[str, str]] = [
            {"NCCL": "2.27.5", "CUDA": "12.8", "GPU": "NVIDIA H100", "launch table": "NVIDIA-H100.json 0a1b2c3d"}
            for _ in range(ranks)
        ]
        self.shared = [16 * 10**9] * NODES
        self.threads = 4
        self.gpu_of: list[str] = [GPUS[rank % PER_NODE] for rank in range(ranks)]
        self.cores: list[str] = [CORES[rank % PER_NODE] for rank in range(ranks)]

    def facts(self) -> list[Facts]:
        """Return the facts of all ranks."""
        return [self._facts(rank) for rank in range(len(self.environ))]

    def _facts(self, rank: int) -> Facts:
        node, local = divmod(rank, PER_NODE)
        root = self.nodes[node].root
        status = root / "proc/self/status"
        lines = [line for line in status.read_text().splitlines() if not line.startswith("Cpus_allowed_list")]
        status.write_text("\n".join([*lines, f"Cpus_allowed_list:\t{self.cores[rank]}"]) + "\n")
        return {
            "rank": rank,
            "node": node,
            "local_rank": local,
            "per_node": PER_NODE,
            "host": root.name,
            "kind": "cuda" if self.gpus else "cpu",
            "software": software_facts(torch.device("cpu"), root) | (self.software[rank] if self.gpus else {}),
            **system_facts(self.environ[rank], self.gpu_of[rank] if self.gpus else None, root, is_first=local == 0),
            "threads": self.threads,
            "shared": self.shared[node],
        }
