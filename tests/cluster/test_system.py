"""What is read of a cluster: on a healthy one all is ok, and each fault is found, named, and cured."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from machines import ADAPTERS, GPUS, FakeCluster, config

from warpfold.cluster.facts import system_facts
from warpfold.cluster.findings import ClusterFinding
from warpfold.cluster.rules import judge_system
from warpfold.parallel.team import ProcessInfo

Break = Callable[[FakeCluster], object]
SWITCH = "0000:18:00.0"


def set_on(*ranks: int, **variables: str) -> Break:
    return lambda cluster: [cluster.environ[rank].update(variables) for rank in ranks]


def software(rank: int, name: str, value: str) -> Break:
    return lambda cluster: cluster.software[rank].update({name: value})


def write(node: int, path: str, text: str) -> Break:
    return lambda cluster: cluster.nodes[node].write(path, text)


def everywhere(path: str, text: str) -> Break:
    return lambda cluster: [node.write(path, text) for node in cluster.nodes]


def configured(address: str, data: bytes) -> Break:
    return lambda cluster: (cluster.nodes[1].root / f"sys/bus/pci/devices/{address}/config").write_bytes(data)


def unload(cluster: FakeCluster) -> None:
    (cluster.nodes[1].root / "sys/module/nvidia_peermem").rmdir()


def on_ethernet(cluster: FakeCluster, mtu: int = 9000) -> None:
    for node in cluster.nodes:
        for number, address in enumerate(ADAPTERS):
            node.adapter(f"mlx5_{number}", address, "Ethernet", mtu)


def and_then(*steps: Break) -> Break:
    return lambda cluster: [step(cluster) for step in steps]


def without_second_adapter(cluster: FakeCluster) -> None:
    link = cluster.nodes[1].root / "sys/class/infiniband"
    link.rename(link.with_name("gone"))
    (link / "mlx5_0").mkdir(parents=True)
    for path in (link.with_name("gone") / "mlx5_0").iterdir():
        path.rename(link / "mlx5_0" / path.name)


def same_gpu(cluster: FakeCluster) -> None:
    cluster.gpu_of[3] = GPUS[0]
    cluster.environ[3]["CUDA_VISIBLE_DEVICES"] = "0"


def attribute(name: str, value: object) -> Break:
    return lambda cluster: setattr(cluster, name, value)


def smaller(cluster: FakeCluster) -> None:
    """One of the second node's GPUs has fallen off the bus."""
    (cluster.nodes[1].root / "proc/driver/nvidia/gpus/0000:a3:00.0").rename(cluster.nodes[1].root / "lost")


def at(device: str, name: str) -> str:
    return f"sys/bus/pci/devices/{device}/{name}"


IB = "sys/class/infiniband/mlx5_1/ports/1"
LIMITS = "proc/self/limits"
FAULTS: list[tuple[str, Break, str, str]] = [
    # the check, what is broken, what is said, what cures it
    ("NCCL", software(3, "NCCL", "2.26.2"), "2.26.2 on rank 3 (gpu-b)", "LD_LIBRARY_PATH"),
    ("CUDA", software(0, "CUDA", "13.0"), "13.0 on rank 0 (gpu-a)", "same build of torch"),
    ("launch table", software(2, "launch table", "default.json ff"), "default.json ff on rank 2", "copy"),
    ("driver", write(1, "proc/driver/nvidia/version", "NVRM: Kernel Module  550.54.15"),
     "550.54.15 on ranks 2 and 3 (gpu-b)", "driver of those nodes"),
    ("CUDA_LAUNCH_BLOCKING", set_on(2, CUDA_LAUNCH_BLOCKING="1"), "on rank 2 (gpu-b)", "unset CUDA_LAUNCH_BLOCKING"),
    ("NCCL_P2P_DISABLE", set_on(0, 1, 2, 3, NCCL_P2P_DISABLE="1"), "all 4 ranks", "unset"),
    ("NCCL_IB_DISABLE", set_on(0, 1, 2, 3, NCCL_IB_DISABLE="1"), "which have adapters", "unset NCCL_IB_DISABLE"),
    ("NCCL_NET_GDR_LEVEL", set_on(0, 1, 2, 3, NCCL_NET_GDR_LEVEL="LOC"), "GPU Direct RDMA is off", "unset"),
    ("NCCL_DEBUG", set_on(0, 1, 2, 3, NCCL_DEBUG="TRACE"), "every call", "NCCL_DEBUG=WARN"),
    ("NCCL_ALGO", set_on(1, NCCL_ALGO="Tree"), "not set on ranks 0, 2 and 3", "to all ranks"),
    ("NCCL_SOCKET_IFNAME", set_on(2, 3, NCCL_SOCKET_IFNAME="enp"), "no network card of ranks 2 and 3", "eth0, ib0"),
    ("NCCL_SOCKET_IFNAME", set_on(0, 1, 2, 3, NCCL_SOCKET_IFNAME="=lo"), "does not reach", "joins the nodes"),
    ("GLOO_SOCKET_IFNAME", set_on(0, GLOO_SOCKET_IFNAME="eth"), "no network card of rank 0", "name one"),
    ("NCCL_IB_HCA", set_on(3, NCCL_IB_HCA="=mlx4_0:1"), "no adapter of rank 3", "mlx5_0, mlx5_1"),
    ("TORCH_DISTRIBUTED_DEBUG", set_on(0, 1, 2, 3, TORCH_DISTRIBUTED_DEBUG="DETAIL"), "once more", "unset"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", set_on(1, PYTORCH_NO_CUDA_MEMORY_CACHING="0"), "rank 1", "unset"),
    ("TRITON_INTERPRET", set_on(0, 1, 2, 3, TRITON_INTERPRET="1"), "interpreted", "unset"),
    ("a GPU for each rank", same_gpu, "ranks 2 and 3 (gpu-b) have the same GPU, 0000:19:00.0", "--gpus-per-node"),
    ("threads", attribute("threads", 12), "24 threads of torch's on 16 cores", "OMP_NUM_THREADS=8"),
    ("open files", write(1, LIMITS, "Max open files   256   1048576   files"),
     "ranks 2 and 3 (gpu-b) may open 256", "ulimit -n 65536"),
    ("locked memory", write(1, LIMITS, "Max locked memory   65536   65536   bytes"),
     "ranks 2 and 3 (gpu-b) may lock", "cap_ipc_lock"),
    ("shared memory", attribute("shared", [16 * 10**9, 67_108_864]), "/dev/shm of ranks 2 and 3 (gpu-b) has 67 MB",
     "--shm-size"),
    ("swap", write(1, "proc/meminfo", "MemTotal: 1000000 kB\nSwapTotal: 900000 kB\nSwapFree: 100000 kB"),
     "lies on disk at rank 2", "swapoff"),
    ("pinning", attribute("cores", ["0", "0", "0-7", "8-15"]), "ranks 0 and 1 (gpu-a) are all pinned to cores 0",
     "--cpu-bind"),
    ("NUMA of GPU and cores", attribute("cores", ["0-7", "8-15", "8-15", "0-7"]),
     "rank 2 has cores 8-15, its GPU's are 0-7", "--gpu-bind=closest"),
    ("network adapters", without_second_adapter, "mlx5_0 on node 1 (gpu-b)", "lspci"),
    ("link state", write(1, f"{IB}/state", "1: DOWN"), "mlx5_1 is DOWN at gpu-b", "cable"),
    ("link rate", write(1, f"{IB}/rate", "100 Gb/sec (4X EDR)"), "mlx5_1 runs at 100 Gb/s at gpu-b", "cable"),
    ("PCIe lanes", write(1, at(GPUS[1], "current_link_width"), "8"), "the GPU (0000:a3:00.0) at gpu-b", "reseat"),
    ("PCIe lanes", write(0, at(ADAPTERS[0], "current_link_speed"), "8.0 GT/s PCIe"), "mlx5_0 (0000:1a:00.0) at gpu-a",
     "reseat"),
    ("kernel module", unload, "at gpu-b", "modprobe nvidia-peermem"),
    ("PCIe switch", set_on(0, 1, 2, 3, NCCL_IB_HCA="mlx5_0"), "nearest adapter of ranks 1 and 3", "NCCL_IB_HCA"),
    ("ACS", configured(SWITCH, config(acs=0x001D)), "gpu-b (first 0000:18:00.0)", "setpci"),
    ("relaxed ordering", configured(ADAPTERS[0], config(relaxed=False)), "first mlx5_0 at gpu-b", "PCI_WR_ORDERING"),
    ("IOMMU", write(1, at(ADAPTERS[0], "iommu_group/type"), "DMA-FQ"), "at gpu-b", "iommu=pt"),
    ("RoCE", and_then(on_ethernet, write(1, f"{IB}/gids/3", "")), "mlx5_1 of gpu-b has no GID", "show_gids"),
    ("RoCE", and_then(on_ethernet, set_on(0, 1, 2, 3, NCCL_IB_GID_INDEX="0")), "NCCL_IB_GID_INDEX=0 is",
     "NCCL_IB_GID_INDEX=3"),
    ("RoCE", and_then(on_ethernet, *(software(rank, "NCCL", "2.20.5") for rank in range(4))), "takes GID 0",
     "NCCL_IB_GID_INDEX=3"),
    ("RoCE's MTU", and_then(on_ethernet, write(1, at(ADAPTERS[1], "net/eth1/mtu"), "1500")), "1500 at gpu-b",
     "mtu 9000"),
]  # fmt: skip
NOTES: list[tuple[str, Break, str]] = [
    ("GPU", software(3, "GPU", "NVIDIA H200"), "NVIDIA H200 on rank 3"),
    ("GPUs of nodes", smaller, "2 on node 0 (gpu-a), 1 on node 1 (gpu-b)"),
    ("cores of nodes", attribute("cores", ["0-7", "8-15", "0-3", "8-11"]), "16 on node 0 (gpu-a), 8 on node 1 (gpu-b)"),
    ("memory of nodes", write(1, "proc/meminfo", "MemTotal: 960000 kB"),
     "1.0 GB on node 0 (gpu-a), 983 MB on node 1 (gpu-b)"),
    ("NCCL_DEBUG", set_on(0, 1, 2, 3, NCCL_DEBUG="INFO"), "lines at the start"),
    ("huge pages", write(1, "sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]"), "off for rank 2"),
    ("huge pages", everywhere("sys/kernel/mm/transparent_hugepage/defrag", "[always] madvise never"), "compacted"),
    ("NUMA of GPU and cores", attribute("cores", ["0-15"] * 4), "all 4 ranks may also run on cores far"),
    ("NUMA of GPU and cores", everywhere("proc/sys/kernel/numa_balancing", "1"), "pages move"),
    ("RoCE's MTU", lambda cluster: on_ethernet(cluster, 1500), "the MTU is 1500 everywhere"),
]  # fmt: skip


def found(cluster: FakeCluster, *outcomes: str) -> list[ClusterFinding]:
    facts = json.loads(json.dumps(cluster.facts()))  # as it travels
    return [finding for finding in judge_system(facts) if finding.outcome in outcomes]


def test_a_healthy_cluster_is_all_ok(tmp_path: Path) -> None:
    findings = judge_system(FakeCluster(tmp_path).facts())
    assert {finding.outcome for finding in findings} == {"ok"}
    assert {finding.topic for finding in findings} == {"software", "rdma"}
    says = {finding.check: finding.says for finding in findings}
    assert says["adapter of each rank"] == "mlx5_0: local ranks 0; mlx5_1: local ranks 1"
    assert says["driver"] == "570.86.15 on all 4 ranks"


def test_so_is_a_healthy_one_on_ethernet(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    on_ethernet(cluster)
    assert not found(cluster, "wrong", "note", "not checked")


@pytest.mark.parametrize(("check", "broken", "says", "cure"), FAULTS, ids=[fault[2][:40] for fault in FAULTS])
def test_a_fault_is_found_named_and_cured(tmp_path: Path, check: str, broken: Break, says: str, cure: str) -> None:
    cluster = FakeCluster(tmp_path)
    broken(cluster)
    wrong = found(cluster, "wrong")
    assert check in {finding.check for finding in wrong}, found(cluster, "wrong", "note", "not checked")
    assert any(says in finding.says and cure in finding.cure for finding in wrong if finding.check == check), wrong
    assert len({finding.check for finding in wrong}) <= 3, wrong  # what follows from it may be wrong, too


@pytest.mark.parametrize(("check", "broken", "says"), NOTES)
def test_what_should_be_known_is_no_fault(tmp_path: Path, check: str, broken: Break, says: str) -> None:
    cluster = FakeCluster(tmp_path)
    broken(cluster)
    assert not found(cluster, "wrong")
    assert any(says in finding.says for finding in found(cluster, "note") if finding.check == check)


@pytest.mark.parametrize("check", ["ACS", "relaxed ordering"])
def test_what_only_root_may_read_is_not_checked(tmp_path: Path, check: str) -> None:
    cluster = FakeCluster(tmp_path)
    for node in cluster.nodes:
        for file in node.root.glob("sys/devices/**/config"):
            file.write_bytes(config(size=64))
    (finding,) = [finding for finding in found(cluster, "not checked") if finding.check == check]
    assert "only root may read" in finding.says


def test_without_a_gpu_its_checks_say_so(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path, gpus=False)
    cluster.threads = 8
    assert not found(cluster, "wrong")
    unchecked = found(cluster, "not checked")
    assert {finding.says for finding in unchecked} == {"no GPU"}
    assert {"kernel module", "PCIe switch", "ACS", "NUMA of GPU and cores"} <= {finding.check for finding in unchecked}
    (idle,) = [finding for finding in found(cluster, "note") if finding.check == "GPUs in use"]
    assert idle.says.startswith("2 GPUs are not used by all 4 ranks")


def test_a_damaged_configuration_ends(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    loop = bytearray(config())
    loop[0x41] = 0x40  # the list's first entry names itself as the next
    loop[0x100:0x104] = (0x0001 | 0x100 << 20).to_bytes(4, "little")
    for address in (ADAPTERS[0], SWITCH):
        configured(address, bytes(loop))(cluster)
    assert {finding.check for finding in found(cluster, "not checked")} == {"relaxed ordering"}


def test_nodes_with_other_numbers_of_ranks_are_named(tmp_path: Path) -> None:
    facts = FakeCluster(tmp_path).facts()[:3]
    facts[2]["per_node"] = 1
    (wrong,) = [finding for finding in judge_system(facts) if finding.outcome == "wrong"]
    assert (wrong.check, wrong.says) == ("ranks of nodes", "2 on node 0 (gpu-a), 1 on node 1 (gpu-b)")
    assert "--ntasks-per-node" in wrong.cure


def test_of_many_nodes_those_that_are_as_most_are_counted(tmp_path: Path) -> None:
    first = FakeCluster(tmp_path).facts()[0]
    many = [{**first, "rank": rank, "node": rank, "host": f"gpu-{rank}"} for rank in range(256)]

    def odd(memory: int) -> list[str]:
        many[77] = {**many[77], "limits": {**first["limits"], "memory": memory}}
        return [finding.says for finding in judge_system(many) if finding.outcome != "ok"]

    assert odd(1_010_000_000) == []  # of 1.024 GB
    assert odd(900_000_000) == ["1.0 GB on 255 nodes, 900 MB on node 77 (gpu-77)"]


def test_dma_buf_needs_no_module(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    for node in cluster.nodes:
        (node.root / "sys/module/nvidia_peermem").rmdir()
        node.write("proc/driver/nvidia/version", "NVRM: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release")
    says = {finding.check: (finding.outcome, finding.says) for finding in judge_system(cluster.facts())}
    assert says["kernel module"] == ("ok", "dma-buf: open modules, and a Linux that has it")
    assert says["driver"] == ("ok", "570.86.15 on all 4 ranks")


def test_this_machine_can_be_read() -> None:
    facts = system_facts(ProcessInfo(), torch.device("cpu"), os.environ, [[0]])
    assert json.loads(json.dumps(facts)) == facts
    assert judge_system([facts])
