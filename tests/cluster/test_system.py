"""The rules of the cluster doctor: a healthy cluster passes, and each fault is reported with a remedy."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from machines import ADAPTERS, GPUS, FakeCluster, config

from warpfold.cluster.facts import Facts, rank_facts
from warpfold.cluster.rules import ClusterFinding, in_words, judge
from warpfold.cluster.subjects import selected, subjects_of
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


def on_ethernet(cluster: FakeCluster) -> None:
    for node in cluster.nodes:
        for number, address in enumerate(ADAPTERS):
            node.adapter(f"mlx5_{number}", address, "Ethernet")


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


def at(device: str, name: str) -> str:
    return f"sys/bus/pci/devices/{device}/{name}"


IB = "sys/class/infiniband/mlx5_1/ports/1"
LIMITS = "proc/self/limits"
FAULTS: list[tuple[str, Break, str, str]] = [
    # Check, fault, text of the finding, and its remedy
    ("NCCL", software(3, "NCCL", "2.26.2"), "2.26.2 on rank 3 (gpu-b)", "LD_LIBRARY_PATH"),
    ("CUDA", software(0, "CUDA", "13.0"), "13.0 on rank 0 (gpu-a)", "same build of torch"),
    ("launch table", software(2, "launch table", "default.json ff"), "default.json ff on rank 2", "copy"),
    ("driver", write(1, "proc/driver/nvidia/version", "NVRM: Kernel Module  550.54.15"),
     "550.54.15 on ranks 2 and 3 (gpu-b)", "driver of those nodes"),
    ("CUDA_LAUNCH_BLOCKING", set_on(2, CUDA_LAUNCH_BLOCKING="1"), "on rank 2 (gpu-b)", "unset CUDA_LAUNCH_BLOCKING"),
    ("NCCL_P2P_DISABLE", set_on(0, 1, 2, 3, NCCL_P2P_DISABLE="1"), "all 4 ranks", "unset"),
    ("NCCL_IB_DISABLE", set_on(0, 1, 2, 3, NCCL_IB_DISABLE="1"), "which have adapters", "unset NCCL_IB_DISABLE"),
    ("NCCL_NET_GDR_LEVEL", set_on(0, 1, 2, 3, NCCL_NET_GDR_LEVEL="LOC"), "GPU Direct RDMA is off", "unset"),
    ("NCCL_DEBUG", set_on(0, 1, 2, 3, NCCL_DEBUG="TRACE"), "every call", "unset NCCL_DEBUG"),
    ("NCCL_ALGO", set_on(1, NCCL_ALGO="Tree"), "not set on ranks 0, 2 and 3", "to all ranks"),
    ("NCCL_SOCKET_IFNAME", set_on(2, 3, NCCL_SOCKET_IFNAME="enp"), "no network card of ranks 2 and 3", "eth0, ib0"),
    ("NCCL_SOCKET_IFNAME", set_on(0, 1, 2, 3, NCCL_SOCKET_IFNAME="=lo"), "does not reach", "joins the nodes"),
    ("GLOO_SOCKET_IFNAME", set_on(0, GLOO_SOCKET_IFNAME="eth"), "no network card of rank 0", "an existing"),
    ("NCCL_IB_HCA", set_on(3, NCCL_IB_HCA="=mlx4_0:1"), "no adapter of rank 3", "mlx5_0, mlx5_1"),
    ("TORCH_DISTRIBUTED_DEBUG", set_on(0, 1, 2, 3, TORCH_DISTRIBUTED_DEBUG="DETAIL"), "synchronise", "unset"),
    ("a GPU for each rank", same_gpu, "ranks 2 and 3 (gpu-b) share a GPU, 0000:19:00.0", "--gpus-per-node"),
    ("threads", attribute("threads", 12), "24 threads of torch on 16 cores", "OMP_NUM_THREADS=8"),
    ("open files", write(1, LIMITS, "Max open files   256   1048576   files"),
     "ranks 2 and 3 (gpu-b) may open 256", "ulimit -n 409"),
    ("locked memory", write(1, LIMITS, "Max locked memory   65536   65536   bytes"),
     "ranks 2 and 3 (gpu-b) may lock", "cap_ipc_lock"),
    ("shared memory", attribute("shared", [16 * 10**9, 67_108_864]), "/dev/shm of ranks 2 and 3 (gpu-b) has 67 MB",
     "--shm-size"),
    ("NUMA of GPU and cores", attribute("cores", ["0-7", "8-15", "8-15", "0-7"]),
     "ranks 2 and 3 (gpu-b) may not use the cores next to their GPUs", "--gpu-bind=closest"),
    ("network adapters", without_second_adapter, "mlx5_0 on node 1 (gpu-b)", "lspci"),
    ("link state", write(1, f"{IB}/state", "1: DOWN"), "mlx5_1 (0000:a4:00.0) at gpu-b: DOWN", "cable"),
    ("kernel module", unload, "node 1 (gpu-b)", "modprobe nvidia-peermem"),
    ("PCIe switch", set_on(0, 1, 2, 3, NCCL_IB_HCA="mlx5_0"), "nearest adapter of ranks 1 and 3", "NCCL_IB_HCA"),
    ("ACS", configured(SWITCH, config(acs=0x001D)), "0000:18:00.0 at gpu-b", "setpci"),
    ("relaxed ordering", configured(ADAPTERS[0], config(relaxed=False)), "mlx5_0 (0000:1a:00.0) at gpu-b: off",
     "mlxconfig -d 0000:1a:00.0"),
    ("IOMMU", write(1, at(ADAPTERS[0], "iommu_group/type"), "DMA-FQ"), "at gpu-b", "iommu=pt"),
    ("IOMMU", write(0, at(GPUS[0], "iommu_group/type"), "DMA"), "GPU 0000:19:00.0 at gpu-a", "NCCL_P2P_DISABLE=1"),
    ("RoCE", and_then(on_ethernet, write(1, f"{IB}/gids/3", "")), "at gpu-b: no GID", "show_gids"),
    ("RoCE", and_then(on_ethernet, set_on(0, 1, 2, 3, NCCL_IB_GID_INDEX="0")), "NCCL_IB_GID_INDEX=0 is",
     "NCCL_IB_GID_INDEX=3"),
    ("RoCE", and_then(on_ethernet, *(software(rank, "NCCL", "2.20.5") for rank in range(4))), "takes GID 0",
     "NCCL_IB_GID_INDEX=3"),
]  # fmt: skip
NOTES: list[tuple[str, Break, str]] = [
    ("GPU", software(3, "GPU", "NVIDIA H200"), "NVIDIA H200 on rank 3"),
    ("NCCL_DEBUG", set_on(0, 1, 2, 3, NCCL_DEBUG="INFO"), "lines at the start"),
]


def judged(facts: list[Facts], *outcomes: str) -> list[ClusterFinding]:
    """Judge facts as they arrive from the ranks, without links and a folder, which are not part of them."""
    findings = judge(subjects_of(json.loads(json.dumps(facts))))
    return [finding for finding in findings if finding.outcome in outcomes and finding.topic not in ("links", "folder")]


def found(cluster: FakeCluster, *outcomes: str) -> list[ClusterFinding]:
    return judged(cluster.facts(), *outcomes)


def test_a_healthy_cluster_is_all_ok(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    assert not found(cluster, "wrong", "note", "not checked")
    findings = found(cluster, "ok")
    assert {finding.topic for finding in findings} == {"software", "environment", "limits", "rdma", "pci"}
    says = {finding.check: finding.says for finding in findings}
    assert says["driver"] == "570.86.15 on all 4 ranks"
    assert says["network adapters"] == "mlx5_0, mlx5_1 on node 0 (gpu-a), node 1 (gpu-b)"
    assert {"locked memory", "kernel module", "PCIe switch", "ACS", "relaxed ordering", "IOMMU"} <= set(says)


def test_so_is_a_healthy_one_on_ethernet(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    on_ethernet(cluster)
    assert not found(cluster, "wrong", "note", "not checked")


@pytest.mark.parametrize(("check", "broken", "says", "cure"), FAULTS, ids=[fault[2][:40] for fault in FAULTS])
def test_a_fault_is_named_with_its_remedy(tmp_path: Path, check: str, broken: Break, says: str, cure: str) -> None:
    cluster = FakeCluster(tmp_path)
    broken(cluster)
    wrong = found(cluster, "wrong")
    assert any(says in one.says and cure in one.cure for one in wrong if one.check == check), wrong
    # A consequence of the fault may also be reported as wrong.
    assert len({finding.check for finding in wrong}) <= 3, wrong


@pytest.mark.parametrize(("check", "broken", "says"), NOTES)
def test_a_note_is_no_fault(tmp_path: Path, check: str, broken: Break, says: str) -> None:
    cluster = FakeCluster(tmp_path)
    broken(cluster)
    assert not found(cluster, "wrong")
    assert any(says in finding.says for finding in found(cluster, "note") if finding.check == check)


def test_configurations_that_only_root_may_read_are_not_checked(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    for node in cluster.nodes:
        for file in node.root.glob("sys/devices/**/config"):
            file.write_bytes(config(size=64))
    unchecked = {finding.check: finding.says for finding in found(cluster, "not checked")}
    assert set(unchecked) == {"ACS", "relaxed ordering"}
    assert all("only root may read" in says for says in unchecked.values())


def test_without_a_gpu_its_checks_say_so(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path, gpus=False)
    assert not found(cluster, "wrong", "note")
    unchecked = {finding.check: finding.says for finding in found(cluster, "not checked")}
    assert unchecked["NUMA of GPU and cores"] == unchecked["NCCL"] == "no GPU"
    assert unchecked["kernel module"] == "no GPU with a network adapter"
    assert unchecked["ACS"].startswith(unchecked["IOMMU"])


def test_a_damaged_configuration_ends(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    loop = bytearray(config())
    # The first entry of the list refers to itself as the next one.
    loop[0x41] = 0x40
    loop[0x100:0x104] = (0x0001 | 0x100 << 20).to_bytes(4, "little")
    for address in (ADAPTERS[0], SWITCH):
        configured(address, bytes(loop))(cluster)
    assert {finding.check for finding in found(cluster, "not checked")} == {"relaxed ordering"}


def test_nodes_with_different_numbers_of_ranks_are_named(tmp_path: Path) -> None:
    facts = FakeCluster(tmp_path).facts()[:3]
    facts[2]["per_node"] = 1
    (wrong,) = judged(facts, "wrong")
    assert (wrong.check, wrong.says) == ("ranks of nodes", "2 on node 0 (gpu-a), 1 on node 1 (gpu-b)")
    assert "--ntasks-per-node" in wrong.cure


def test_gpus_without_adapters_are_judged_by_their_pci_bridges(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    for node in cluster.nodes:
        (node.root / "sys/class/infiniband").rename(node.root / "removed")
    write(1, at(GPUS[1], "iommu_group/type"), "DMA")(cluster)
    configured(SWITCH, config(acs=0x001D))(cluster)
    assert {finding.check for finding in found(cluster, "wrong")} == {"IOMMU", "ACS"}
    assert {finding.check for finding in found(cluster, "note")} == {"network adapters"}


def test_dma_buf_needs_no_module(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    for node in cluster.nodes:
        (node.root / "sys/module/nvidia_peermem").rmdir()
        node.write("proc/driver/nvidia/version", "NVRM: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release")
    assert not found(cluster, "wrong", "note", "not checked")
    assert next(finding.says for finding in found(cluster, "ok") if finding.check == "driver").startswith("570.86.15")


def test_this_machine_can_be_read() -> None:
    facts = rank_facts(ProcessInfo(), torch.device("cpu"), os.environ, [[0]])
    assert json.loads(json.dumps(facts)) == facts
    assert judge(subjects_of([facts]))


@pytest.mark.parametrize(
    ("numbers", "words"),
    [([3], "rank 3 (a)"), ([0, 2, 3], "ranks 0, 2 and 3 (a)"), ([0, 4, 5, 6], "ranks 0 and 4 to 6 (a)"),
     (range(8), "all 8 ranks"), (range(0, 8, 2), "ranks 0, 2, 4 and 6 (a)")],
)  # fmt: skip
def test_ranks_are_named_in_runs(numbers: list[int], words: str) -> None:
    assert in_words([{"rank": number, "host": "a"} for number in numbers], 8) == words


@pytest.mark.parametrize(
    ("value", "names"),
    [("mlx5", ["mlx5_0", "mlx5_1"]), ("=mlx5_1:1", ["mlx5_1"]), ("^mlx5_0", ["mlx5_1", "eth0"]), ("ib", [])],
)
def test_nccl_selects_by_prefix(value: str, names: list[str]) -> None:
    assert selected(value, ["mlx5_0", "mlx5_1", "eth0"]) == names
