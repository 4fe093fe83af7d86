"""Measure what each rank can do, over some seconds, and say which is slower than others, and why as far as is known.

Measured are products, memory, copies to its device, and its clocks and processors, by all ranks at the same time, as in
training.
"""

import os
import re
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from warpfold.cluster.facts import text_of
from warpfold.cluster.findings import NOTE, WRONG, ClusterFinding, Facts, Fault, Fine, graded, judge, of_usual
from warpfold.cost.rates import finish

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


def measure_rates(device: torch.device, seconds: float, clock: Clock = time.perf_counter) -> Facts:
    """Measure for some `seconds` what this rank can do per second, and what its processors did meanwhile; JSON-able.

    matrix: floating point operations by dtype, over all the time.  lasts: the rate in the last third of the time, of
    that in the first.  memory: bytes read and written.  to_device, from_device: bytes; None where it is the host.
    gpu: what nvidia-smi says while the device computes.
    processors: threads, that it computes with; cores, that it may use; quota, that its cgroup may use (None: no limit);
    held, the share of its periods in which the cgroup was stopped; own, busy, stolen: seconds per second, of this
    process, of all that runs on the node, and taken by a hypervisor.
    """
    groups, before, begin, spent = cgroups(), busy_seconds(), clock(), time.process_time()
    stops = throttled(groups)
    found: Facts = {"matrix": {}, "to_device": None, "from_device": None, "gpu": {}}
    side, windows = SIDE[device.type], [1.0]
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        rate, windows = sustained(lambda: torch.mm(a, b, out=out), device, seconds / 3, clock)  # noqa: B023, called here
        found["matrix"][name] = 2 * side**3 * rate
    third = max(1, len(windows) // 3)
    found["lasts"] = statistics.median(windows[-third:]) / statistics.median(windows[:third])
    if device.type == "cuda":
        for _ in range(int(windows[-1]) + 1):  # a second's work, in which nvidia-smi is asked
            torch.mm(a, b, out=out)
        found["gpu"] = ask_nvidia_smi(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    x = torch.ones(BYTES[device.type], dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    found["memory"] = 2 * x.nbytes * sustained(lambda: y.copy_(x), device, seconds / 6, clock)[0]
    if device.type == "cuda":
        host, there = torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True), x[:HOST_BYTES]
        for name, to, source in (("to_device", there, host), ("from_device", host, there)):
            copy = sustained(lambda: to.copy_(source, non_blocking=True), device, seconds / 6, clock)  # noqa: B023, called here
            found[name] = HOST_BYTES * copy[0]
    took = max(1e-9, clock() - begin)
    busy, stolen = ((now - then) / took for now, then in zip(busy_seconds(), before))
    stopped, periods = (now - then for now, then in zip(throttled(groups), stops))
    found["processors"] = {
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "quota": quota_of(groups),
        "held": stopped / max(1, periods),
        "own": (time.process_time() - spent) / took,
        "busy": busy,
        "stolen": stolen,
    }
    return found


def better(one: Facts, other: Facts) -> Facts:
    """Take the best of two measurements of a rank, with the later one's processors: noise only takes time."""
    best = {name: one[name] and max(one[name], other[name]) for name in ("lasts", "memory", "to_device", "from_device")}
    return {**other, **best, "matrix": {name: max(rate, other["matrix"][name]) for name, rate in one["matrix"].items()}}


def sustained(
    run: Callable[[], object], device: torch.device, seconds: float, clock: Clock
) -> tuple[float, list[float]]:
    """Call a function for so many seconds; return its calls per second, over all of them and in each `WINDOW`."""
    run()
    finish(device)
    windows, first = [], clock()
    begin, calls, in_all, at_once = first, 0, 0, 1
    while True:
        for _ in range(at_once):
            run()
        finish(device)
        now, calls, in_all = clock(), calls + at_once, in_all + at_once
        if now - begin >= WINDOW:
            windows.append(calls / (now - begin))
            at_once = max(1, int(windows[-1] * WINDOW / 10))  # so that a GPU does not wait for each call
            begin, calls = now, 0
        if now - first >= seconds and windows:
            return in_all / (now - first), windows


# ---- what Linux and nvidia-smi say


def cgroups(root: Path = Path("/")) -> list[Path]:
    """Find the folders of this process's cgroup that may limit its processors, its own first (version 2, or 1)."""
    top, found = root / "sys/fs/cgroup", list[Path]()
    for line in text_of(root / "proc/self/cgroup").splitlines():
        controllers, path = line.split(":", 2)[1:]
        if not controllers or "cpu" in controllers.split(","):
            base = top / controllers
            found += [base / path.strip("/"), base]
    return [*dict.fromkeys([*found, top, top / "cpu"])]


def quota_of(groups: list[Path]) -> float | None:
    """Read the cores that a cgroup may use, of the first folder with a limit; None where there is none."""
    for group in groups:
        words = text_of(group / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            return int(words[0]) / int(words[1])
        old = [text_of(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        if all(old) and int(old[0]) > 0:
            return int(old[0]) / int(old[1])
    return None


def throttled(groups: list[Path]) -> tuple[int, int]:
    """Read how often the cgroup was stopped, of how many periods."""
    for group in groups:
        words = text_of(group / "cpu.stat").split()
        said = dict(zip(words[::2], words[1::2]))
        if "nr_periods" in said:
            return int(said["nr_throttled"]), int(said["nr_periods"])
    return 0, 0


def busy_seconds(root: Path = Path("/")) -> tuple[float, float]:
    """Read the seconds for which all processors of the node were busy so far, and were taken by a hypervisor."""
    words = text_of(root / "proc/stat").partition("\n")[0].split()
    if words[:1] != ["cpu"]:
        return 0.0, 0.0
    user, nice, system, _, _, interrupts, soft, stolen, *_ = (int(word) for word in words[1:])
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + interrupts + soft) / ticks, stolen / ticks


def ask_nvidia_smi(uuid: str) -> dict[str, str]:
    """Ask nvidia-smi about a GPU: what it says, by the names of `QUERY`; nothing where it does not answer."""
    for reasons in REASONS:
        names = ",".join((*QUERY, reasons))
        command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={names}", "--format=csv,noheader,nounits"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            continue
        return parse_nvidia_smi(said.stdout)
    return {}


def parse_nvidia_smi(text: str) -> dict[str, str]:
    """Parse a line of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`: the fields that hold something."""
    words = [word.strip() for word in text.strip().partition("\n")[0].split(",")]
    return {name: word for name, word in zip((*QUERY, "reasons"), words) if word and not word.startswith("[")}


# ---- what is said of it


# What is compared between ranks: its unit, and the figure of a rank.
SPEEDS: dict[str, tuple[str, Callable[[Facts], float]]] = {
    "products in fp32": ("GFLOP/s", lambda x: x["matrix"]["fp32"] / 1e9),
    "products in bf16": ("GFLOP/s", lambda x: x["matrix"]["bf16"] / 1e9),
    "memory": ("GB/s", lambda x: x["memory"] / 1e9),
    "host to device": ("GB/s", lambda x: (x["to_device"] or 0) / 1e9),
    "device to host": ("GB/s", lambda x: (x["from_device"] or 0) / 1e9),
}
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
CURES = {
    "cpu": "see what else runs there (top), and what it may use (cgroup, taskset, OMP_NUM_THREADS); or leave it out",
    "cuda": "see nvidia-smi -q -d PERFORMANCE,CLOCK,ECC there; its cooling and power; or leave it out",
}


def _number(x: Facts, name: str) -> int:
    text = x["gpu"].get(name, "0")
    return int(text) if text.isdigit() else 0


FAULTS = (
    *(fault for check, (unit, _) in SPEEDS.items() for fault in graded(
        check, "ranks", lambda x, check=check: x["slow"].get(check, 0), 1, 0,  # type: ignore[misc]
        f"rank {{x[rank]}} reaches {{x[speeds][{check}]:,.3g}} {unit}, {{x[shares][{check}]:.2f}} of the "
        "median{x[because]}", "{x[cure]}", each=lambda x: x["rank"])),
    *graded("rate over time", "ranks", lambda x: x["tires"], 1, 0,
            "rank {x[rank]} falls to {x[lasts]:.2f} of its first rate within seconds{x[because]}", "{x[cure]}",
            each=lambda x: x["rank"]),
    Fault("processors", "ranks", lambda x: x["processors"]["held"] > HELD,
          "{who}: the cgroup was stopped in up to {x[processors][held]:.0%} of its periods",
          "ask for more (--cpus-per-task), or compute with fewer threads", "note",
          worst=lambda x: -x["processors"]["held"]),
    Fault("processors", "nodes", lambda x: x["short"], "node {x[node]}: {x[short]}",
          "start fewer ranks or set OMP_NUM_THREADS; have the node for yourself (--exclusive)", "note",
          each=lambda x: x["node"], also=True),
    Fault("clocks of GPUs", "gpus", lambda x: x["why"],
          "rank {x[rank]} is {x[why]} at {x[gpu][clocks.sm]} of {x[gpu][clocks.max.sm]} MHz, "
          "{x[gpu][temperature.gpu]} °C", CURES["cuda"], each=lambda x: x["rank"]),
    Fault("ECC errors", "gpus", lambda x: _number(x, "ecc.errors.uncorrected.volatile.total"),
          "rank {x[rank]}: {x[gpu][ecc.errors.uncorrected.volatile.total]} errors of memory that could not be "
          "corrected",
          "drain the node and reset the GPU (nvidia-smi -r); if they come again, have it replaced",
          each=lambda x: x["rank"]),
    Fault("PCIe lanes", "gpus",
          lambda x: _number(x, "pcie.link.width.current") < _number(x, "pcie.link.width.max"),
          "rank {x[rank]}: {x[gpu][pcie.link.width.current]} lanes of {x[gpu][pcie.link.width.max]}",
          "have the card seated again, or its riser replaced", each=lambda x: x["rank"]),
    Fault("clocks of GPUs", "gpus", lambda x: not x["gpu"], "nvidia-smi did not answer on {who}",
          outcome="not checked", also=True),
)  # fmt: skip
FINE = (
    *(Fine(check, "ranks", f"{{x[usual][{check}]}}") for check in SPEEDS),
    Fine("rate over time", "ranks", "the last third at {x[least]:.2f} of the first third's rate or more"),
    Fine("processors", "ranks", "cores enough for all threads, and nobody else uses them"),
    *(Fine(check, "cpus", "", lambda x: True, "no GPU") for check in ("clocks of GPUs", "ECC errors")),
    Fine("copies to devices", "cpus", "", lambda x: True, "no GPU"),
    Fine("clocks of GPUs", "answering", "no throttling under load"),
    Fine("ECC errors", "answering", "none that could not be corrected"),
    Fine("PCIe lanes", "answering", "all that the cards have"),
)


def speeds_of(rates: Sequence[Facts]) -> dict[str, list[float]]:
    """Take what is compared between ranks, by check: a figure of each rank, in its unit."""
    of_devices = all(one["to_device"] and one["from_device"] for one in rates)
    return {
        check: [figure(one) for one in rates]
        for check, (_, figure) in SPEEDS.items()
        if of_devices or "device" not in check
    }


def seem_slow(rates: Sequence[Facts], device: str) -> bool:
    """Tell whether some rank should be measured again before anything is said of it."""
    shares = (share for speeds in speeds_of(rates).values() for share in of_usual(speeds))
    return min(shares) < BOUNDS[device][1] or min(one["lasts"] for one in rates) < FALLS[device]


def judge_ranks(rates: Sequence[Facts], nodes: Sequence[Sequence[int]], device: str) -> list[ClusterFinding]:
    """Say what is wrong with the ranks; rates: of `measure_rates`; device: "cpu" or "cuda"."""
    speeds = speeds_of(rates)
    shares, usual = {check: of_usual(found) for check, found in speeds.items()}, {}
    for check, found in speeds.items():
        usual[check] = f"{statistics.median_high(found):,.3g} {SPEEDS[check][0]}"
        if len(rates) > 1:
            usual[check] += f" in the median, {min(found):,.3g} to {max(found):,.3g} on all {len(rates)} ranks"
    had = of_usual([one["processors"]["own"] / max(1, one["processors"]["threads"]) or 1e-9 for one in rates])
    ranks = []
    for rank, one in enumerate(rates):
        cpu, reasons = one["processors"], re.fullmatch(r"0x[0-9a-fA-F]+", one["gpu"].get("reasons", ""))
        why = ", ".join(text for bit, text in THROTTLED.items() if reasons and int(reasons[0], 16) & bit)
        if cpu["held"] > HELD:
            because = f"; its cgroup was stopped in {cpu['held']:.0%} of its periods"
        elif one["gpu"]:
            because = f"; it is {why}" if why else ""
        elif had[rank] < SHARED:
            share = cpu["own"] / max(1, cpu["threads"])
            because = f"; it had its processor {share:.0%} of the time: it was stopped, or others use it"
        else:
            because = "; it had its processor as long as others had theirs"
        ranks.append({
            **one, "rank": rank, "why": why, "because": because, "cure": CURES[device],
            # By how many bounds it is too slow: two is wrong, one a note.
            "slow": {check: sum(found[rank] < bound for bound in BOUNDS[device]) for check, found in shares.items()},
            "tires": (one["lasts"] < FALLS[device]) * (2 if device == "cuda" else 1),
            "least": min(x["lasts"] for x in rates),
            "speeds": {check: found[rank] for check, found in speeds.items()}, "usual": usual,
            "shares": {check: found[rank] for check, found in shares.items()},
            "gpu": defaultdict(lambda: "?", one["gpu"]),
        })  # fmt: skip
    gpus = ranks if device == "cuda" else []
    known = {
        "ranks": ranks,
        "cpus": [] if gpus else ranks,
        "gpus": gpus,
        "answering": [x for x in gpus if x["gpu"]],
        "nodes": [{"node": node, "short": _short([rates[rank] for rank in here], device)}
                  for node, here in enumerate(nodes)],
    }  # fmt: skip
    fine = [row for row in FINE if row.check in speeds or row.check not in SPEEDS]
    return judge("ranks", known, FAULTS, fine)


def _short(rates: Sequence[Facts], device: str) -> str:
    """Say of a node what its ranks lack of its processors."""
    here = [one["processors"] for one in rates]
    cores = min(here[0]["quota"] or here[0]["cores"], max(one["cores"] for one in here))
    threads, busy = sum(one["threads"] for one in here), here[0]["busy"] - sum(one["own"] for one in here)
    said = []
    if device == "cpu" and threads > cores:
        said.append(f"{threads} threads of {len(here)} ranks on {cores:g} cores")
    if busy > TAKEN * cores:
        said.append(f"other programs use {busy:.1f} cores")
    if here[0]["stolen"] > STOLEN * cores:
        said.append(f"the hypervisor took {here[0]['stolen']:.1f} cores")
    return "; ".join(said)


def rank_table(rates: Sequence[Facts], nodes: Sequence[Sequence[int]], most: int) -> tuple[list[str], list[list[str]]]:
    """Make heads and rows of what ranks can do; of more ranks than `most`, the slowest of each node."""
    speeds = speeds_of(rates)
    rows = []
    for number, node in enumerate(nodes):
        if len(rates) <= most:
            rows += [[str(rank), str(number), *(f"{found[rank]:,.3g}" for found in speeds.values())] for rank in node]
        else:
            least = (f"{min(found[rank] for rank in node):,.3g}" for found in speeds.values())
            rows.append([f"{node[0]} to {node[-1]}", str(number), *least])
    return ["rank", "node", *(f"{check}, {SPEEDS[check][0]}" for check in speeds)], rows
