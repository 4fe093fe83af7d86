"""Say which rank is slower than the others, and why as far as that can be known."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

from warpfold.cluster.findings import ClusterFinding, of_ranks
from warpfold.cluster.measure_ranks import RankRates
from warpfold.cluster.slow import NOTE, WRONG, stragglers

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
    return [
        *_judge_speeds(rates, device),
        *_judge_falling(rates, device),
        *(_judge_gpus(rates) if device == "cuda" else _no_gpu()),
        *_judge_processors(rates, nodes, device),
    ]


def _judge_speeds(rates: Sequence[RankRates], device: str) -> Iterator[ClusterFinding]:
    bad, note = BOUNDS[device]
    cure = GPU_CURE if device == "cuda" else CPU_CURE
    for name, speeds in speeds_of(rates).items():
        check, unit = name.split(", ")
        usual, slow = statistics.median_high(speeds), stragglers(speeds, note)
        for rank, share in slow.items():
            outcome: Literal["wrong", "note"] = "wrong" if share < bad else "note"
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
        why = [text for bit, text in THROTTLED.items() if _reasons(rates[rank]) & bit]
        return f"; it is {', '.join(why)}" if why else ""
    shares = [one.processors.own / max(1, one.processors.threads) for one in rates]
    if shares[rank] < SHARED * statistics.median_high(shares):
        return f"; it had its processor {shares[rank]:.0%} of the time: it was stopped, or others use it"
    return "; it had its processor as long as others had theirs"


def _judge_falling(rates: Sequence[RankRates], device: str) -> Iterator[ClusterFinding]:
    falling = {rank: one.lasts for rank, one in enumerate(rates) if one.lasts < FALLS[device]}
    for rank, share in falling.items():
        says = f"rank {rank} falls to {share:.2f} of its first rate within seconds{_because(rates, rank)}"
        if device == "cuda":
            yield ClusterFinding("ranks", "rate over time", "wrong", says, GPU_CURE)
        else:
            yield ClusterFinding("ranks", "rate over time", "note", says, CPU_CURE)
    if not falling:
        says = f"the last third at {min(one.lasts for one in rates):.2f} of the first third's rate or more"
        yield ClusterFinding("ranks", "rate over time", "ok", says)


def _no_gpu() -> Iterator[ClusterFinding]:
    for check in ("clocks of GPUs", "ECC errors", "copies to devices"):
        yield ClusterFinding("ranks", check, "not checked", "no GPU")


def _reasons(one: RankRates) -> int:
    text = one.gpu.get("reasons", "0")
    try:
        return int(text, 16)
    except ValueError:
        return 0


def _judge_gpus(rates: Sequence[RankRates]) -> Iterator[ClusterFinding]:
    silent = [rank for rank, one in enumerate(rates) if not one.gpu]
    if silent:
        says = f"nvidia-smi did not answer on {of_ranks(silent, len(rates))}"
        yield ClusterFinding("ranks", "clocks of GPUs", "not checked", says)
    throttled = broken = narrow = False
    for rank, one in enumerate(rates):
        if why := [text for bit, text in THROTTLED.items() if _reasons(one) & bit]:
            throttled = True
            clock = f" at {one.gpu.get('clocks.sm', '?')} of {one.gpu.get('clocks.max.sm', '?')} MHz"
            says = f"rank {rank} is {', '.join(why)}{clock}, {one.gpu.get('temperature.gpu', '?')} °C"
            yield ClusterFinding("ranks", "clocks of GPUs", "wrong", says, GPU_CURE)
        lost = one.gpu.get("ecc.errors.uncorrected.volatile.total", "0")
        if lost.isdigit() and int(lost):
            broken = True
            says = f"rank {rank}: {lost} errors of memory that could not be corrected"
            cure = "drain the node and reset the GPU (nvidia-smi -r); if they come again, have it replaced"
            yield ClusterFinding("ranks", "ECC errors", "wrong", says, cure)
        width, most = (one.gpu.get(f"pcie.link.width.{name}", "0") for name in ("current", "max"))
        if width.isdigit() and most.isdigit() and int(width) < int(most):
            narrow = True
            says = f"rank {rank}: {width} lanes of {most}"
            yield ClusterFinding(
                "ranks", "PCIe lanes", "wrong", says, "have the card seated again, or its riser replaced"
            )
    if len(silent) < len(rates):
        for check, bad, fine in (
            ("clocks of GPUs", throttled, "no throttling under load"),
            ("ECC errors", broken, "none that could not be corrected"),
            ("PCIe lanes", narrow, "all that the cards have"),
        ):
            if not bad:
                yield ClusterFinding("ranks", check, "ok", fine)


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
