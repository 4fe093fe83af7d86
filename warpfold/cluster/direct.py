"""GPU Direct RDMA measured: one all-reduce over all nodes, as NCCL does it by itself, and with GPU Direct off.

NCCL reads its variables when a process begins, so each measurement has processes of its own, started by the ranks:
`python -m warpfold.cluster.direct` with the usual variables of torch.distributed.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from warpfold.cluster.findings import ClusterFinding
from warpfold.errors import UserError
from warpfold.parallel.team import ProcessInfo, Team

CHECK = "device to device over the wire"
SIZE = 2**28  # bytes of the message: long enough that bandwidth is what counts
LIMIT = 60  # seconds of a measurement, its start included
OFF = {"NCCL_NET_GDR_LEVEL": "LOC"}  # NCCL's user guide: never
AS_FAST, FASTER = 0.95, 1.05  # of the rate without: slower is wrong, less than 5 % more is no gain


def measure_direct(team: Team, device: torch.device, environ: Mapping[str, str], nodes: int) -> list[ClusterFinding]:
    """Measure what GPU Direct RDMA is worth here.  All ranks must call it, and all return the same.

    environ: this process's variables, which those that measure get, too.  nodes: how many there are.
    """
    if any(kind != "cuda" for kind in team.all_gather_object(device.type, "the device of each rank")):
        return [ClusterFinding("rdma", CHECK, "not checked", "no GPU")]
    if nodes < 2:
        return [ClusterFinding("rdma", CHECK, "not checked", "one node: nothing goes over a wire")]
    rates = []
    for changed in ({}, OFF):
        port = team.broadcast(free_port() if team.is_rank_zero else None, "a port to measure at")
        answers = team.all_gather_object(
            timed_apart(team.process, port, device, {**environ, **changed}), "a measurement"
        )
        failed = [f"rank {rank}: {answer['failed']}" for rank, answer in enumerate(answers) if "failed" in answer]
        if failed:
            cure = "NCCL_DEBUG=INFO python -m torch.distributed.run ... shows which adapter or module NCCL lacks"
            return [ClusterFinding("rdma", CHECK, "wrong", f"an all-reduce failed: {failed[0]}", cure)]
        rates.append(2 * (1 - 1 / len(answers)) * SIZE / max(answer["seconds"] for answer in answers))
    return [judge_direct(*rates)]


def judge_direct(rate: float, without: float) -> ClusterFinding:
    """Return whether GPU Direct RDMA is used and pays.

    rate, without: bytes per second of each rank in an all-reduce, as NCCL does it and with GPU Direct off.
    """
    says = f"all-reduce at {rate / 1e9:.1f} GB/s a rank, {without / 1e9:.1f} GB/s with GPU Direct RDMA off"
    if rate < AS_FAST * without:
        cure = "set NCCL_NET_GDR_LEVEL=LOC until PCIe switch, ACS and relaxed ordering (above) are right"
        return ClusterFinding(
            "rdma", CHECK, "wrong", f"{says}: it costs more than it saves", cure, "export NCCL_NET_GDR_LEVEL=LOC"
        )
    if rate < FASTER * without:
        cure = (
            'NCCL_DEBUG=INFO: "via NET/IB/0/GDRDMA" where it is used; if it is not, see kernel module and PCIe switch'
        )
        return ClusterFinding("rdma", CHECK, "note", f"{says}: it is not used, or the wire is the bound", cure)
    return ClusterFinding("rdma", CHECK, "ok", says)


def free_port() -> int:
    """Return a port that nobody listens at now."""
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False).port


def timed_apart(
    process: ProcessInfo, port: int, device: torch.device, environ: Mapping[str, str], size: int = SIZE
) -> dict[str, Any]:
    """Time an all-reduce in processes started by all ranks: {"seconds"} of one, or {"failed": why}, of this rank's.

    port: where they meet, on the machine of rank 0.  environ: their variables, but for ranks and addresses.
    """
    variables = {name: value for name, value in environ.items() if not name.startswith("TORCHELASTIC")}
    variables |= {
        "RANK": str(process.rank),
        "WORLD_SIZE": str(process.ranks),
        "MASTER_ADDR": process.address,
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, "-m", "warpfold.cluster.direct", str(device), str(size)]
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer within {LIMIT} seconds"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Time an all-reduce of all processes: the median of five, after three that are not counted."""
    if len(sys.argv) != 3:
        raise UserError("warpfold.cluster.direct: give a device and bytes; `warpfold doctor --cluster` does")
    device, size = torch.device(sys.argv[1]), int(sys.argv[2])
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=LIMIT))
    x, times = torch.ones(size // 4, device=device), []
    for _ in range(8):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(x)
        if on_gpu:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
        x.fill_(1)
    print(json.dumps({"seconds": sorted(times[3:])[2]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
