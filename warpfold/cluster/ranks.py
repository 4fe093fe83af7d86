"""Measure what each rank can do, over some seconds, and say which is slower than others, and why as far as is known.

Measured are products, memory, copies to its device, and its clocks and processors, by all ranks at the same time, as in
training.
"""

import os
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from warpfold.cluster.findings import ClusterFinding, Fault, Fine, Outcome, all_fine, judge, of_ranks
from warpfold.cluster.slow import NOTE, WRONG, stragglers

Clock = Callable[[], float]

SIDE = {"cpu": 512, "cuda": 8192}  # of the matrices
BYTES = {"cpu": 2**26, "cuda": 2**29}  # of a copy in memory
HOST_BYTES = 2**26  # of a copy between host and device
WINDOW = 0.1  # seconds for which a rate is taken
QUERY = (
    "uuid", "clocks.sm", "clocks.max.sm", "temperature.gpu", "power.draw", "power.limit",
    "ecc.errors.uncorrected.volatile.total", "ecc.errors.corrected.volatile.total",
    "pcie.link.width.current", "pcie.link.width.max",
)  # fmt: skip
# The name of the reasons since driver 535, and before.
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")


@dataclass(frozen=True)
class Processors:
    """What a node's processors did while a rank was measured, of this rank's view.

    threads: that it computes with.  cores: it may use.  quota: cores that its cgroup may use; None: no limit.
    held: the share of its periods in which the cgroup was stopped.  own, busy, stolen: seconds per second, of this
    process, of all that runs on the node, and taken by a hypervisor.
    """

    threads: int
    cores: int
    quota: float | None = None
    held: float = 0.0
    own: float = 0.0
    busy: float = 0.0
    stolen: float = 0.0


@dataclass(frozen=True)
class RankRates:
    """What a rank can do per second.

    matrix: floating point operations by dtype, over all the time.  lasts: the rate in the last third of the time, of
    that in the first.  memory: bytes read and written.  to_device, from_device: bytes; None where it is the host.
    gpu: what nvidia-smi says while the device computes.
    """

    matrix: dict[str, float]
    lasts: float
    memory: float
    processors: Processors
    to_device: float | None = None
    from_device: float | None = None
    gpu: dict[str, str] = field(default_factory=dict)

    def better(self, other: "RankRates") -> "RankRates":
        """Return the best of two measurements, with the later one's processors: noise only takes time."""
        return replace(
            other,
            matrix={name: max(rate, other.matrix[name]) for name, rate in self.matrix.items()},
            lasts=max(self.lasts, other.lasts),
            memory=max(self.memory, other.memory),
            to_device=None if self.to_device is None else max(self.to_device, other.to_device or 0.0),
            from_device=None if self.from_device is None else max(self.from_device, other.from_device or 0.0),
        )

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "RankRates":
        """Return what `asdict` made JSON of."""
        return cls(**{**said, "processors": Processors(**said["processors"])})


def measure_rates(device: torch.device, seconds: float, clock: Clock = time.perf_counter) -> RankRates:
    """Measure this rank for some `seconds`."""
    groups, before, begin, spent = _own_group(), _stat(), clock(), time.process_time()
    periods = _throttled(groups)
    matrix: dict[str, float] = {}
    windows: list[float] = []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        side = SIDE[device.type]
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)

        def product(a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor = out) -> None:
            torch.mm(a, b, out=out)

        rate, windows = sustained(product, device, seconds / 3, clock)
        matrix[name] = 2 * side**3 * rate
    third = max(1, len(windows) // 3)
    lasts = statistics.median(windows[-third:]) / statistics.median(windows[:third])
    gpu = _under_load(device, windows[-1], product) if device.type == "cuda" else {}
    x = torch.ones(BYTES[device.type], dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    memory = 2 * x.nbytes * sustained(lambda: y.copy_(x), device, seconds / 6, clock)[0]
    there = back = None
    if device.type == "cuda":
        host = torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
        on_device = x[:HOST_BYTES]
        there = HOST_BYTES * sustained(lambda: on_device.copy_(host, non_blocking=True), device, seconds / 6, clock)[0]
        back = HOST_BYTES * sustained(lambda: host.copy_(on_device, non_blocking=True), device, seconds / 6, clock)[0]
    took = max(1e-9, clock() - begin)
    busy, stolen = ((now - then) / took for now, then in zip(_stat(), before))
    stops, all_periods = (now - then for now, then in zip(_throttled(groups), periods))
    processors = Processors(
        torch.get_num_threads(), cores(), quota_of(groups), stops / max(1, all_periods),
        (time.process_time() - spent) / took, busy, stolen,
    )  # fmt: skip
    return RankRates(matrix, lasts, memory, processors, there, back, gpu)


def sustained(
    run: Callable[[], object], device: torch.device, seconds: float, clock: Clock
) -> tuple[float, list[float]]:
    """Call a function for so many seconds; return its calls per second, over all of them and in each `WINDOW`."""
    run()
    _finish(device)
    windows, first = [], clock()
    begin, calls, in_all, at_once = first, 0, 0, 1
    while True:
        for _ in range(at_once):
            run()
        _finish(device)
        now, calls, in_all = clock(), calls + at_once, in_all + at_once
        if now - begin >= WINDOW:
            windows.append(calls / (now - begin))
            at_once = max(1, int(windows[-1] * WINDOW / 10))  # so that a GPU does not wait for each call
            begin, calls = now, 0
        if now - first >= seconds and windows:
            return in_all / (now - first), windows


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# What Linux says


def _own_group(root: Path = Path("/")) -> list[Path]:
    """Return the folders of this process's cgroup that may limit its processors, its own first (version 2, or 1)."""
    top = root / "sys/fs/cgroup"
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        controllers, path = line.split(":", 2)[1:]
        if not controllers or "cpu" in controllers.split(","):
            base = top / controllers if controllers else top
            found += [base / path.strip("/"), base]
    return [*dict.fromkeys([*found, top, top / "cpu"])]


def quota_of(groups: list[Path]) -> float | None:
    """Return the cores that a cgroup may use, of the first folder with a limit; None where there is none."""
    for group in groups:
        words = " ".join(_lines(group / "cpu.max")).split()
        if len(words) == 2 and words[0] != "max":
            return int(words[0]) / int(words[1])
        old = [" ".join(_lines(group / f"cpu.cfs_{name}_us")) for name in ("quota", "period")]
        if all(old) and int(old[0]) > 0:
            return int(old[0]) / int(old[1])
    return None


def _throttled(groups: list[Path]) -> tuple[int, int]:
    """Return how often the cgroup was stopped, of how many periods."""
    for group in groups:
        said = dict(line.split(maxsplit=1) for line in _lines(group / "cpu.stat") if " " in line)
        if "nr_periods" in said:
            return int(said["nr_throttled"]), int(said["nr_periods"])
    return 0, 0


def _stat(root: Path = Path("/")) -> tuple[float, float]:
    """Return the seconds for which all processors of the node were busy so far, and were taken by a hypervisor."""
    for line in _lines(root / "proc/stat"):
        if line.startswith("cpu "):
            user, nice, system, _, _, interrupts, soft, stolen, *_ = (int(word) for word in line.split()[1:])
            ticks = os.sysconf("SC_CLK_TCK")
            return (user + nice + system + interrupts + soft) / ticks, stolen / ticks
    return 0.0, 0.0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


# What nvidia-smi says


def _under_load(device: torch.device, calls: float, product: Callable[[], None]) -> dict[str, str]:
    """Ask nvidia-smi about a device that computes: give it a second's work, and do not wait for it."""
    for _ in range(int(calls) + 1):
        product()
    said = ask_nvidia_smi(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    _finish(device)
    return said


def ask_nvidia_smi(uuid: str) -> dict[str, str]:
    """Return what nvidia-smi says of a GPU, by the names of `QUERY`; nothing where it does not answer."""
    for reasons in REASONS:
        names = (*QUERY, reasons)
        command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            continue
        return parse_nvidia_smi(said.stdout)
    return {}


def parse_nvidia_smi(text: str) -> dict[str, str]:
    """Return the fields of a line of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` that hold something."""
    words = [word.strip() for word in text.strip().splitlines()[0].split(",")] if text.strip() else []
    return {name: word for name, word in zip((*QUERY, "reasons"), words) if word and not word.startswith("[")}


# ---- what is said of it


# Shares of the median below which a rank is wrong, and worth a note: GPUs of a kind differ by a few per cent.
BOUNDS = {"cpu": (WRONG, NOTE), "cuda": (0.8, 0.92)}
FALLS = {"cpu": 0.6, "cuda": 0.85}  # the last rate of the first
HELD = 0.1  # of its periods in which a cgroup was stopped
STOLEN = 0.05  # of a node's cores that a hypervisor took
TAKEN = 0.25  # of a node's cores that others use
SHARED = 0.7  # of the usual share of its processor, below which a rank is slow for that reason
# Of NVML's clocks event reasons: those that a sound GPU does not give under load.  A cap of its power it may.
THROTTLED = {
    0x8: "slowed down by hardware",
    0x20: "too hot (software slowdown)",
    0x40: "too hot (hardware slowdown)",
    0x80: "power brake of its supply",
}
CPU_CURE = "see what else runs there (top), and what it may use (cgroup, taskset, OMP_NUM_THREADS); or leave it out"
GPU_CURE = "see nvidia-smi -q -d PERFORMANCE,CLOCK,ECC there; its cooling and power; or leave it out"


def speeds_of(rates: Sequence[RankRates]) -> dict[str, list[float]]:
    """Return what is compared between ranks, by name, a figure of each rank: GFLOP/s or GB/s."""
    found = {f"products in {name}, GFLOP/s": [one.matrix[name] / 1e9 for one in rates] for name in rates[0].matrix}
    found["memory, GB/s"] = [one.memory / 1e9 for one in rates]
    if all(one.to_device and one.from_device for one in rates):
        found["host to device, GB/s"] = [(one.to_device or 0.0) / 1e9 for one in rates]
        found["device to host, GB/s"] = [(one.from_device or 0.0) / 1e9 for one in rates]
    return found


def seem_slow(rates: Sequence[RankRates], device: str) -> bool:
    """Return whether some rank should be measured again before anything is said of it."""
    note = BOUNDS[device][1]
    return any(stragglers(speeds, note) for speeds in speeds_of(rates).values()) or any(
        one.lasts < FALLS[device] for one in rates
    )


def judge_ranks(rates: Sequence[RankRates], nodes: Sequence[Sequence[int]], device: str) -> list[ClusterFinding]:
    """Return what is wrong with the ranks; device: "cpu" or "cuda"."""
    found = [*_judge_speeds(rates, device), *_judge_falling(rates, device), *_judge_processors(rates, nodes, device)]
    if device != "cuda":
        checks = ("clocks of GPUs", "ECC errors", "copies to devices")
        return [*found, *(ClusterFinding("ranks", check, "not checked", "no GPU") for check in checks)]
    ranks = [
        asdict(one) | {"rank": rank, "host": "", "why": _throttled_by(one), "gpu": defaultdict(lambda: "?", one.gpu)}
        for rank, one in enumerate(rates)
    ]
    known = {"ranks": ranks, "answering": [x for x in ranks if x["gpu"]]}
    if silent := [x["rank"] for x in ranks if not x["gpu"]]:
        says = f"nvidia-smi did not answer on {of_ranks(silent, len(rates))}"
        found.append(ClusterFinding("ranks", "clocks of GPUs", "not checked", says))
    of_gpus = judge(GPUS, known, "ranks")
    return [*found, *of_gpus, *all_fine(FINE, known, of_gpus)]


def _throttled_by(one: RankRates) -> str:
    """Return why a GPU's clock is low, by NVML's reasons."""
    try:
        reasons = int(one.gpu.get("reasons", "0"), 16)
    except ValueError:
        return ""
    return ", ".join(text for bit, text in THROTTLED.items() if reasons & bit)


def _number(x: Mapping[str, Any], name: str) -> int:
    text = x["gpu"].get(name, "0")
    return int(text) if text.isdigit() else 0


GPUS = (
    Fault("clocks of GPUs", "answering", lambda x: x["why"],
          "rank {x[rank]} is {x[why]} at {x[gpu][clocks.sm]} of {x[gpu][clocks.max.sm]} MHz, "
          "{x[gpu][temperature.gpu]} °C", GPU_CURE, each=lambda x: x["rank"]),
    Fault("ECC errors", "answering", lambda x: _number(x, "ecc.errors.uncorrected.volatile.total"),
          "rank {x[rank]}: {x[gpu][ecc.errors.uncorrected.volatile.total]} errors of memory that could not be "
          "corrected",
          "drain the node and reset the GPU (nvidia-smi -r); if they come again, have it replaced",
          each=lambda x: x["rank"]),
    Fault("PCIe lanes", "answering",
          lambda x: _number(x, "pcie.link.width.current") < _number(x, "pcie.link.width.max"),
          "rank {x[rank]}: {x[gpu][pcie.link.width.current]} lanes of {x[gpu][pcie.link.width.max]}",
          "have the card seated again, or its riser replaced", each=lambda x: x["rank"]),
)  # fmt: skip
FINE = (
    Fine("clocks of GPUs", "answering", "no throttling under load", topic="ranks"),
    Fine("ECC errors", "answering", "none that could not be corrected", topic="ranks"),
    Fine("PCIe lanes", "answering", "all that the cards have", topic="ranks"),
)


def _judge_speeds(rates: Sequence[RankRates], device: str) -> Iterator[ClusterFinding]:
    bad, note = BOUNDS[device]
    cure = GPU_CURE if device == "cuda" else CPU_CURE
    for name, speeds in speeds_of(rates).items():
        check, unit = name.split(", ")
        usual, slow = statistics.median_high(speeds), stragglers(speeds, note)
        for rank, share in slow.items():
            outcome: Outcome = "wrong" if share < bad else "note"
            says = f"rank {rank} reaches {speeds[rank]:,.3g} {unit}, {share:.2f} of the median{_because(rates, rank)}"
            yield ClusterFinding("ranks", check, outcome, says, cure)
        if not slow:
            says = f"{usual:,.3g} {unit}"
            if len(rates) > 1:
                says += f" in the median, {min(speeds):,.3g} to {max(speeds):,.3g} on all {len(rates)} ranks"
            yield ClusterFinding("ranks", check, "ok", says)


def _because(rates: Sequence[RankRates], rank: int) -> str:
    """Say why a rank may be slow: it shares its processor, or not."""
    own = rates[rank].processors
    if own.held > HELD:
        return f"; its cgroup was stopped in {own.held:.0%} of its periods"
    if rates[rank].gpu:
        why = _throttled_by(rates[rank])
        return f"; it is {why}" if why else ""
    shares = [one.processors.own / max(1, one.processors.threads) for one in rates]
    if shares[rank] < SHARED * statistics.median_high(shares):
        return f"; it had its processor {shares[rank]:.0%} of the time: it was stopped, or others use it"
    return "; it had its processor as long as others had theirs"


def _judge_falling(rates: Sequence[RankRates], device: str) -> Iterator[ClusterFinding]:
    falling = {rank: one.lasts for rank, one in enumerate(rates) if one.lasts < FALLS[device]}
    for rank, share in falling.items():
        says = f"rank {rank} falls to {share:.2f} of its first rate within seconds{_because(rates, rank)}"
        outcome: Outcome = "wrong" if device == "cuda" else "note"
        yield ClusterFinding("ranks", "rate over time", outcome, says, GPU_CURE if device == "cuda" else CPU_CURE)
    if not falling:
        says = f"the last third at {min(one.lasts for one in rates):.2f} of the first third's rate or more"
        yield ClusterFinding("ranks", "rate over time", "ok", says)


def _judge_processors(
    rates: Sequence[RankRates], nodes: Sequence[Sequence[int]], device: str
) -> Iterator[ClusterFinding]:
    noted = False
    held = [rank for rank, one in enumerate(rates) if one.processors.held > HELD]
    if held:
        noted = True
        most = max(rates[rank].processors.held for rank in held)
        says = f"{of_ranks(held, len(rates))}: the cgroup was stopped in up to {most:.0%} of its periods"
        yield ClusterFinding(
            "ranks", "processors", "note", says, "ask for more (--cpus-per-task), or compute with fewer threads"
        )
    for number, node in enumerate(nodes):
        here = [rates[rank].processors for rank in node]
        cores = min(here[0].quota or here[0].cores, max(one.cores for one in here))
        threads, busy = sum(one.threads for one in here), here[0].busy - sum(one.own for one in here)
        said = []
        if device == "cpu" and threads > cores:
            said.append(f"{threads} threads of {len(node)} ranks on {cores:g} cores")
        if busy > TAKEN * cores:
            said.append(f"other programs use {busy:.1f} cores")
        if here[0].stolen > STOLEN * cores:
            said.append(f"the hypervisor took {here[0].stolen:.1f} cores")
        if said:
            noted = True
            cure = "start fewer ranks or set OMP_NUM_THREADS; have the node for yourself (--exclusive)"
            yield ClusterFinding("ranks", "processors", "note", f"node {number}: {'; '.join(said)}", cure)
    if not noted:
        yield ClusterFinding("ranks", "processors", "ok", "cores enough for all threads, and nobody else uses them")
