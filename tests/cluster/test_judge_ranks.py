"""Ranks and files: a straggler is named with why, healthy noise is not, and what the system says is read."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpfold.cluster.drawn import rank_table
from warpfold.cluster.files import FolderTrial, StoreReads, judge_folder, judge_store
from warpfold.cluster.findings import ClusterFinding
from warpfold.cluster.ranks import (
    Processors,
    RankRates,
    _own_group,
    _stat,
    _throttled,
    judge_ranks,
    parse_nvidia_smi,
    quota_of,
    seem_slow,
    sustained,
)

NODES = [[0, 1], [2, 3]]
SOUND = RankRates({"fp32": 5e10, "bf16": 1e11}, 0.98, 1e10, Processors(1, 8, own=0.95, busy=2.0))
# What an H100 says under load: `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`.
LINE = "GPU-1f2e, 1755, 1980, 61, 640.12, 700.00, 0, 0, 16, 16, 0x0000000000000004\n"
GPU = replace(SOUND, gpu=parse_nvidia_smi(LINE), to_device=2e10, from_device=2e10)


def wrong(findings: list[ClusterFinding], *outcomes: str) -> dict[str, str]:
    return {one.check: one.says for one in findings if one.outcome in (outcomes or ("wrong",))}


def of_one(rates: RankRates, rank: int, sound: RankRates = SOUND) -> list[RankRates]:
    return [rates if rank == number else sound for number in range(4)]


def with_gpu(**fields: str) -> RankRates:
    return replace(GPU, gpu={**GPU.gpu, **fields})


@pytest.mark.parametrize(("rates", "device"), [(SOUND, "cpu"), (GPU, "cuda")])
def test_sound_ranks_are_green(rates: RankRates, device: str) -> None:
    found = judge_ranks([rates] * 4, NODES, device)
    assert not wrong(found, "wrong", "note")
    assert not seem_slow([rates] * 4, device)
    assert not wrong(judge_ranks([rates], [[0]], device), "wrong", "note"), "alone"


@given(st.lists(st.floats(0.7, 1.3), min_size=4, max_size=4))
def test_processors_that_differ_a_little_are_not_wrong(shares: list[float]) -> None:
    rates = [replace(SOUND, matrix={"fp32": 5e10 * share, "bf16": 1e11 * share}) for share in shares]
    assert not wrong(judge_ranks(rates, NODES, "cpu"))


def test_a_straggler_is_named_with_why() -> None:
    slow = {"fp32": 1e10, "bf16": 2e10}
    stopped = replace(SOUND, matrix=slow, processors=replace(SOUND.processors, own=0.2))
    assert seem_slow(of_one(stopped, 2), "cpu")
    says = wrong(judge_ranks(of_one(stopped, 2), NODES, "cpu"))["products in fp32"]
    assert says.startswith("rank 2 reaches 10 GFLOP/s, 0.20 of the median; it had its processor 20% of the time")
    clocked = replace(SOUND, matrix=slow)
    assert "as long as others" in wrong(judge_ranks(of_one(clocked, 1), NODES, "cpu"))["products in bf16"]
    held = replace(SOUND, matrix=slow, processors=replace(SOUND.processors, held=0.8))
    assert "stopped in 80% of its periods" in wrong(judge_ranks(of_one(held, 1), NODES, "cpu"))["products in bf16"]
    assert "memory" in wrong(judge_ranks(of_one(replace(SOUND, memory=2e9), 0), NODES, "cpu"))


def test_gpus_of_a_kind_differ_little() -> None:
    slower = replace(GPU, matrix={"fp32": 4.5e10, "bf16": 0.75e11})
    found = judge_ranks(of_one(slower, 3, GPU), NODES, "cuda")
    assert list(wrong(found)) == ["products in bf16"]
    assert list(wrong(found, "note")) == ["products in fp32"]
    assert "host to device" in wrong(judge_ranks(of_one(replace(GPU, to_device=6e9), 1, GPU), NODES, "cuda"))


@pytest.mark.parametrize(
    ("ill", "check", "says"),
    [
        (with_gpu(reasons="0x0000000000000048"), "clocks of GPUs", "rank 1 is slowed down by hardware, too hot"),
        (with_gpu(**{"ecc.errors.uncorrected.volatile.total": "2"}), "ECC errors", "rank 1: 2 errors of memory"),
        (with_gpu(**{"pcie.link.width.current": "4"}), "PCIe lanes", "rank 1: 4 lanes of 16"),
        (replace(GPU, lasts=0.6), "rate over time", "rank 1 falls to 0.60 of its first rate"),
    ],
)
def test_ill_gpus_are_named(ill: RankRates, check: str, says: str) -> None:
    found = wrong(judge_ranks(of_one(ill, 1, GPU), NODES, "cuda"))
    assert list(found) == [check]
    assert found[check].startswith(says)


def test_a_gpu_of_which_nothing_is_said_is_not_checked() -> None:
    silent = judge_ranks([replace(GPU, gpu={})] * 2, [[0, 1]], "cuda")
    assert wrong(silent, "not checked") == {"clocks of GPUs": "nvidia-smi did not answer on all 2 ranks"}
    assert wrong(judge_ranks([SOUND], [[0]], "cpu"), "not checked")["ECC errors"] == "no GPU"


def test_busy_and_small_machines_are_noted() -> None:
    many = [replace(SOUND, processors=replace(SOUND.processors, threads=8, busy=7.0, stolen=1.0))] * 4
    found = judge_ranks(many, NODES, "cpu")
    assert not wrong(found)
    assert wrong(found, "note")["processors"] == (
        "node 1: 16 threads of 2 ranks on 8 cores; other programs use 5.1 cores; the hypervisor took 1.0 cores"
    )


def test_what_nvidia_smi_says_is_read() -> None:
    assert GPU.gpu["clocks.sm"] == "1755"
    assert GPU.gpu["reasons"] == "0x0000000000000004", "a cap of its power, which a sound GPU may reach"
    assert "ecc.errors.corrected.volatile.total" not in parse_nvidia_smi(LINE.replace(" 0, 0,", " [N/A], [N/A],"))
    assert parse_nvidia_smi("") == {}


def test_what_linux_says_is_read(tmp_path: Path) -> None:
    for file, text in {
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/step/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/job/step/cpu.stat": "usage_usec 5\nnr_periods 100\nnr_throttled 40\n",
        "proc/stat": "cpu  100 10 50 1000 5 3 2 7 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    groups = _own_group(tmp_path)
    assert quota_of(groups) == 1.5
    assert _throttled(groups) == (40, 100)
    busy, stolen = _stat(tmp_path)
    assert busy / stolen == pytest.approx(165 / 7)
    assert quota_of(_own_group(tmp_path / "nothing")) is None
    (tmp_path / "sys/fs/cgroup/job/step/cpu.max").write_text("max 100000\n")
    assert quota_of(groups) is None


def test_a_rate_is_of_all_the_time() -> None:
    now = [0.0]

    def clock() -> float:
        return now[0]

    def run() -> None:
        now[0] += 0.01 if now[0] < 1 else 0.03  # it slows down after a second

    import torch

    rate, windows = sustained(run, torch.device("cpu"), 2.0, clock)
    assert rate == pytest.approx((100 + 33) / 2, rel=0.1)
    assert windows[0] == pytest.approx(100, rel=0.05)
    assert windows[-1] == pytest.approx(33, rel=0.05)


def test_two_measurements_are_one() -> None:
    low = replace(SOUND, matrix={"fp32": 1e10, "bf16": 2e11}, lasts=0.5)
    assert SOUND.better(low).matrix == {"fp32": 5e10, "bf16": 2e11}
    assert low.better(SOUND).lasts == SOUND.lasts


def test_the_table_has_a_row_for_each_rank_or_node() -> None:
    heads, rows = rank_table([SOUND] * 4, NODES)
    assert heads[:3] == ["rank", "node", "products in fp32, GFLOP/s"]
    assert rows[3] == ["3", "1", "50", "100", "10"]
    many = [list(range(8 * node, 8 * node + 8)) for node in range(16)]
    assert len(rank_table([SOUND] * 128, many)[1]) == 16


# ---- files


READS = StoreReads(entries=100, bytes=10**8, seconds=1.0, fresh=0.9, in_all=5000)
TRIAL = FolderTrial(seen=0.01, reads=50, kept_out=True, let_in=True, clock=0.001, written=1e8)


def test_sound_files_are_green() -> None:
    assert not wrong(judge_store(Path("store"), [READS] * 4, NODES), "wrong", "note")
    assert not wrong(judge_folder(Path("runs"), [TRIAL] * 4), "wrong", "note")


@given(st.lists(st.floats(0.7, 1.3), min_size=4, max_size=4))
def test_reads_that_differ_a_little_are_not_wrong(shares: list[float]) -> None:
    assert not wrong(judge_store(Path("store"), [replace(READS, seconds=share) for share in shares], NODES))


def test_stores_that_are_slow_differ_or_are_not_there() -> None:
    def says(*reads: StoreReads) -> str:
        return wrong(judge_store(Path("store"), [READS, READS, *reads], NODES))["store store"]

    slow = replace(READS, seconds=4.0)
    assert says(slow, slow).startswith("node 1 reads 50 MB/s (50 entries), 0.25 of the median")
    assert says(READS, replace(READS, in_all=4000)) == "rank 3 see 4000 entries, the others 5000"
    assert says(READS, StoreReads(error="store: not a store")) == "rank 3 cannot read it: store: not a store"
    (cached,) = judge_store(Path("store"), [replace(READS, fresh=0.1)] * 4, NODES)
    assert "90% came from memory" in cached.says


@pytest.mark.parametrize(
    ("ill", "check", "outcome"),
    [
        (replace(TRIAL, seen=None), "folder", "wrong"),
        (replace(TRIAL, error="read-only"), "folder", "wrong"),
        (replace(TRIAL, seen=3.0), "folder", "note"),
        (replace(TRIAL, torn=1), "rename", "wrong"),
        (replace(TRIAL, kept_out=False), "flock", "wrong"),
        (replace(TRIAL, let_in=False), "flock", "wrong"),
        (replace(TRIAL, locks="No locks available"), "flock", "note"),
        (replace(TRIAL, clock=-20.0), "clock of the file server", "wrong"),
        (replace(TRIAL, clock=2.0), "clock of the file server", "note"),
        (replace(TRIAL, written=1e6), "writing", "note"),
    ],
)
def test_a_folder_that_is_ill(ill: FolderTrial, check: str, outcome: str) -> None:
    (one,) = (one for one in judge_folder(Path("runs"), [TRIAL, TRIAL, ill]) if one.outcome != "ok")
    assert (one.check, one.outcome) == (check, outcome)
    assert one.cure
