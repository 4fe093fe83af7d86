"""Compute what an operation must cost, and measure in the same run what this device can do.

The ideal pass reads every argument once and writes every result once; nothing else goes through memory (the backward
pass recomputes it).  Products and exponentials run one after the other, each on its own units, while memory moves:

    limit = max(bytes / bandwidth,  products / rate + exponentials / rate)

The best published kernels (FlashAttention's forward pass) reach 80 to 98 % of this limit.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from warpfold.check.cases import PROFILES
from warpfold.check.op_profile import Cost, OpCase

Pass = Literal["forward", "backward"]

EXPS_PER_CLOCK = 16  # by a multiprocessor's special function units, on NVIDIA GPUs from Volta to Blackwell
# Boost clock in GHz where torch does not know it, by part of the GPU's name (the vendor's data sheets).
CLOCKS = {"A100": 1.41, "H100": 1.98, "H200": 1.98, "GH200": 1.98, "B200": 1.965}


@dataclass(frozen=True)
class Ceilings:
    """What a device can do per second, and how that is known."""

    flops: float  # of matrix products in the dtype
    bytes: float  # of a copy, read and written
    exps: float | None  # None: not known, so they count as free
    how: str

    def limit(self, cost: Cost) -> float:
        """Return the seconds of the ideal pass.  Only a way that stores what the ideal recomputes can be faster."""
        exps = cost.exps / self.exps if self.exps else 0.0
        return max(cost.bytes / self.bytes, cost.flops / self.flops + exps)


def cost(case: OpCase, direction: Pass, itemsize: int) -> Cost:
    """Return what one pass of an operation must do, without the bytes of parameters, a few thousandths."""
    return PROFILES[case.op].cost(case, direction == "forward", itemsize)


def ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure what the device can do now, in about a second."""
    cuda = device.type == "cuda"
    n = 8192 if cuda and dtype != torch.float32 else 4096 if cuda else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    flops = 2 * n**3 / _seconds(lambda: a @ b, device)
    source = torch.ones(2**28 if cuda else 2**25, device=device)  # far larger than any cache
    target = torch.empty_like(source)
    moved = 2 * source.numel() * 4 / _seconds(lambda: target.copy_(source), device)
    measured = "matrix products and copies measured in this run"
    if cuda:
        exps, how = _gpu_exps(device)
        return Ceilings(flops, moved, exps, f"{measured}; {how}")
    x = torch.rand(2**15 * torch.get_num_threads())  # stays in cache
    y = torch.empty_like(x)
    return Ceilings(flops, moved, x.numel() / _seconds(lambda: torch.exp(x, out=y), device), f"{measured}, exp too")


def _gpu_exps(device: torch.device) -> tuple[float | None, str]:
    found = torch.cuda.get_device_properties(device)
    told = getattr(found, "clock_rate", None)  # kHz; only newer torch has it
    clock = told / 1e6 if told else next((c for name, c in CLOCKS.items() if name in found.name), None)
    if clock is None or torch.version.hip is not None:
        return None, "the rate of exponentials is not known, so they count as free"
    units = found.multi_processor_count
    source = "as torch says" if told else "by the data sheet"
    rate = units * EXPS_PER_CLOCK * clock * 1e9
    return rate, f"exp modelled: {units} x {EXPS_PER_CLOCK} per clock at {clock:.2f} GHz, {source}"


def _seconds(run: Callable[[], object], device: torch.device, repeats: int = 8) -> float:
    """Return the shortest time after two warm-up runs: a ceiling is what the device does when nothing disturbs it."""
    taken = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken[2:])
