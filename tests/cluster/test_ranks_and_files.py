"""Ranks and files: a straggler is named with why, healthy noise is not, and what the system says is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from warpfold.cluster.files import judge_folder, judge_store
from warpfold.cluster.findings import ClusterFinding, Facts, of_ranks, of_usual
from warpfold.cluster.ranks import (
    better,
    busy_seconds,
    cgroups,
    judge_ranks,
    parse_nvidia_smi,
    quota_of,
    rank_table,
    seem_slow,
    sustained,
    throttled,
)

NODES = [[0, 1], [2, 3]]
PROCESSORS = {"threads": 1, "cores": 8, "quota": None, "held": 0.0, "own": 0.95, "busy": 2.0, "stolen": 0.0}
SOUND: Facts = {
    "matrix": {"fp32": 5e10, "bf16": 1e11}, "lasts": 0.98, "memory": 1e10, "to_device": None, "from_device": None,
    "gpu": {}, "processors": PROCESSORS,
}  # fmt: skip
# What an H100 says under load: `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`.
LINE = "GPU-1f2e, 1755, 1980, 61, 640.12, 700.00, 0, 0, 16, 16, 0x0000000000000004\n"
GPU = SOUND | {"gpu": parse_nvidia_smi(LINE), "to_device": 2e10, "from_device": 2e10}
SLOW = {"fp32": 1e10, "bf16": 2e10}


def on(**processors: Any) -> dict[str, Any]:
    return {"processors": PROCESSORS | processors}


def wrong(findings: list[ClusterFinding], *outcomes: str) -> dict[str, str]:
    return {one.check: one.says for one in findings if one.outcome in (outcomes or ("wrong",))}


def of_one(ill: Facts, rank: int = 1, sound: Facts = SOUND) -> list[Facts]:
    return [sound | (ill if rank == number else {}) for number in range(4)]


@pytest.mark.parametrize(("rates", "device"), [(SOUND, "cpu"), (GPU, "cuda")])
def test_sound_ranks_are_green(rates: Facts, device: str) -> None:
    found = judge_ranks([rates] * 4, NODES, device)
    assert not wrong(found, "wrong", "note")
    assert not seem_slow([rates] * 4, device)
    assert not wrong(judge_ranks([rates], [[0]], device), "wrong", "note"), "alone"
    if device == "cpu":
        assert wrong(found, "not checked")["ECC errors"] == "no GPU"


@given(st.lists(st.floats(0.7, 1.3), min_size=4, max_size=4))
def test_what_differs_a_little_is_not_wrong(shares: list[float]) -> None:
    rates = [SOUND | {"matrix": {"fp32": 5e10 * share, "bf16": 1e11 * share}} for share in shares]
    assert not wrong(judge_ranks(rates, NODES, "cpu"))
    assert not wrong(judge_store(Path("store"), [READS | {"seconds": share} for share in shares], NODES))


@given(st.data(), st.integers(3, 12))
def test_a_straggler_is_far_below_the_usual(data: st.DataObject, ranks: int) -> None:
    speeds = [data.draw(st.floats(0.7, 1.3)) for _ in range(ranks)]
    odd = data.draw(st.integers(0, ranks - 1))
    assert min(of_usual(speeds)) > 0.5 > of_usual([*speeds[:odd], 0.3, *speeds[odd + 1 :]])[odd]


GPU_FIELDS = {
    "throttled": {"reasons": "0x0000000000000048"},
    "ECC": {"ecc.errors.uncorrected.volatile.total": "2"},
    "lanes": {"pcie.link.width.current": "4"},
}
ILL_GPUS = {name: {"gpu": GPU["gpu"] | fields} for name, fields in GPU_FIELDS.items()}


@pytest.mark.parametrize(
    ("ill", "sound", "check", "says"),
    [
        ({"matrix": SLOW} | on(own=0.2), SOUND, "products in fp32",
         "rank 1 reaches 10 GFLOP/s, 0.20 of the median; it had its processor 20% of the time"),
        ({"matrix": SLOW}, SOUND, "products in bf16", "0.20 of the median; it had its processor as long as others"),
        ({"matrix": SLOW} | on(held=0.8), SOUND, "products in bf16", "stopped in 80% of its periods"),
        ({"memory": 2e9}, SOUND, "memory", "rank 1 reaches 2 GB/s"),
        ({"matrix": {"fp32": 4.5e10, "bf16": 0.75e11}}, GPU, "products in bf16", "0.75 of the median"),
        ({"to_device": 6e9}, GPU, "host to device", "rank 1 reaches 6 GB/s"),
        ({"lasts": 0.6}, GPU, "rate over time", "rank 1 falls to 0.60 of its first rate"),
        (ILL_GPUS["throttled"], GPU, "clocks of GPUs", "rank 1 is slowed down by hardware, too hot"),
        (ILL_GPUS["ECC"], GPU, "ECC errors", "rank 1: 2 errors of memory"),
        (ILL_GPUS["lanes"], GPU, "PCIe lanes", "rank 1: 4 lanes of 16"),
    ],
)  # fmt: skip
def test_an_ill_rank_is_named_with_why(ill: Facts, sound: Facts, check: str, says: str) -> None:
    rates, device = of_one(ill, 1, sound), "cuda" if sound is GPU else "cpu"
    found = wrong(judge_ranks(rates, NODES, device))
    assert says in found.pop(check)
    assert not found or check.startswith("products"), "nothing else is wrong"
    if not ill.keys() & {"gpu"}:
        assert seem_slow(rates, device)


def test_gpus_of_a_kind_that_differ_a_little_are_noted() -> None:
    slower = of_one({"matrix": {"fp32": 4.5e10, "bf16": 1e11}}, 3, GPU)
    assert list(wrong(judge_ranks(slower, NODES, "cuda"), "wrong", "note")) == ["products in fp32"]
    silent = judge_ranks([GPU | {"gpu": {}}] * 2, [[0, 1]], "cuda")
    assert wrong(silent, "not checked") == {"clocks of GPUs": "nvidia-smi did not answer on all 2 ranks"}


def test_busy_and_small_machines_are_noted() -> None:
    found = judge_ranks([SOUND | on(threads=8, busy=7.0, stolen=1.0)] * 4, NODES, "cpu")
    assert not wrong(found)
    assert wrong(found, "note")["processors"] == (
        "node 1: 16 threads of 2 ranks on 8 cores; other programs use 5.1 cores; the hypervisor took 1.0 cores"
    )


def test_what_nvidia_smi_says_is_read() -> None:
    assert GPU["gpu"]["clocks.sm"] == "1755"
    assert GPU["gpu"]["reasons"] == "0x0000000000000004", "a cap of its power, which a sound GPU may reach"
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
    groups = cgroups(tmp_path)
    assert quota_of(groups) == 1.5
    assert throttled(groups) == (40, 100)
    busy, stolen = busy_seconds(tmp_path)
    assert busy / stolen == pytest.approx(165 / 7)
    assert quota_of(cgroups(tmp_path / "nothing")) is None
    (tmp_path / "sys/fs/cgroup/job/step/cpu.max").write_text("max 100000\n")
    assert quota_of(groups) is None


def test_a_rate_is_of_all_the_time() -> None:
    now = [0.0]

    def clock() -> float:
        return now[0]

    def run() -> None:
        now[0] += 0.01 if now[0] < 1 else 0.03  # it slows down after a second

    rate, windows = sustained(run, torch.device("cpu"), 2.0, clock)
    assert rate == pytest.approx((100 + 33) / 2, rel=0.1)
    assert windows[0] == pytest.approx(100, rel=0.05)
    assert windows[-1] == pytest.approx(33, rel=0.05)


def test_two_measurements_are_one() -> None:
    low = SOUND | {"matrix": {"fp32": 1e10, "bf16": 2e11}, "lasts": 0.5}
    assert better(SOUND, low)["matrix"] == {"fp32": 5e10, "bf16": 2e11}
    assert better(low, SOUND)["lasts"] == SOUND["lasts"]
    assert better(GPU, GPU) == GPU


def test_the_table_has_a_row_for_each_rank_or_node() -> None:
    heads, rows = rank_table([SOUND] * 4, NODES, 64)
    assert heads[:3] == ["rank", "node", "products in fp32, GFLOP/s"]
    assert rows[3] == ["3", "1", "50", "100", "10"]
    many = [list(range(8 * node, 8 * node + 8)) for node in range(16)]
    assert len(rank_table([SOUND] * 128, many, 64)[1]) == 16


# ---- files


READS: Facts = {"entries": 100, "bytes": 10**8, "seconds": 1.0, "fresh": 0.9, "in_all": 5000, "error": ""}
TRIAL: Facts = {
    "seen": 0.01, "torn": 0, "reads": 50, "kept_out": True, "let_in": True, "clock": 0.001, "written": 1e8,
    "error": "", "locks": "",
}  # fmt: skip


def test_sound_files_are_green() -> None:
    assert not wrong(judge_store(Path("store"), [READS] * 4, NODES), "wrong", "note")
    assert not wrong(judge_folder(Path("runs"), [TRIAL] * 4), "wrong", "note")


def test_stores_that_are_slow_differ_or_are_not_there() -> None:
    def says(*reads: Facts) -> str:
        return wrong(judge_store(Path("store"), [READS, READS, *reads], NODES))["store store"]

    slow = READS | {"seconds": 4.0}
    assert says(slow, slow).startswith("node 1 reads 50 MB/s (50 entries), 0.25 of the median")
    assert says(READS, READS | {"in_all": 4000}) == "rank 3 see 4000 entries, the others 5000"
    assert says(READS, READS | {"error": "store: not a store"}) == "rank 3 cannot read it: store: not a store"
    (cached,) = judge_store(Path("store"), [READS | {"fresh": 0.1}] * 4, NODES)
    assert "90% came from memory" in cached.says


@pytest.mark.parametrize(
    ("ill", "check", "outcome"),
    [
        ({"seen": None}, "folder", "wrong"),
        ({"error": "read-only"}, "folder", "wrong"),
        ({"seen": 3.0}, "folder", "note"),
        ({"torn": 1}, "rename", "wrong"),
        ({"kept_out": False}, "flock", "wrong"),
        ({"let_in": False}, "flock", "wrong"),
        ({"locks": "No locks available"}, "flock", "note"),
        ({"clock": -20.0}, "clock of the file server", "wrong"),
        ({"clock": 2.0}, "clock of the file server", "note"),
        ({"written": 1e6}, "writing", "note"),
    ],
)
def test_a_folder_that_is_ill(ill: Facts, check: str, outcome: str) -> None:
    (one,) = (one for one in judge_folder(Path("runs"), [TRIAL, TRIAL, TRIAL | ill]) if one.outcome != "ok")
    assert (one.check, one.outcome) == (check, outcome)
    assert one.cure


# ---- words


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0 and 1"),
        ([7, 6, 5, 4], "ranks 4 to 7"),
        ([1, 4, 9], "ranks 1, 4 and 9"),
        ([0, 1, 2, 8, 10, 11, 12], "ranks 0 to 2, 8 and 10 to 12"),
        (range(16), "all 16 ranks"),
    ],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert of_ranks(ranks, 16) == words


def test_what_is_wrong_has_a_cure() -> None:
    with pytest.raises(ValueError, match="needs a cure"):
        ClusterFinding("links", "latency", "wrong", "rank 3 answers late")
