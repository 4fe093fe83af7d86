"""How fast a device is, operation by operation: measured (cost/measured_rates.py), or modelled from a data sheet.

One pass of an operation takes so long for each call, floating point operation, exponential and byte, and more for bytes
that do not fit into the caches.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from warpfold.check.cases import PROFILES
from warpfold.check.op_profile import Cost, OpCase
from warpfold.cost.links import LINKS, Link
from warpfold.errors import UserError

Pass = Literal["forward", "backward"]

EXPS_PER_CLOCK = 16  # by a multiprocessor's special function units, on NVIDIA GPUs from Volta to Blackwell


@dataclass(frozen=True)
class Ceilings:
    """What a device can do per second, and how that is known."""

    flops: float  # of matrix products in the dtype
    bytes: float  # of a copy, read and written
    exps: float | None  # None: not known, so they count as free
    how: str

    def limit(self, cost: Cost) -> float:
        """Return the seconds of the ideal pass.  Only a way that stores what the ideal recomputes can be faster."""
        return max(cost.bytes / self.bytes, self.computing(cost))

    def computing(self, cost: Cost) -> float:
        """Return the seconds of its products and exponentials."""
        return cost.flops / self.flops + (cost.exps / self.exps if self.exps else 0.0)


def cost(case: OpCase, direction: Pass, itemsize: int) -> Cost:
    """Return the cost of one pass of an operation, without the bytes of parameters, a few thousandths."""
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
    sheet = sheet_of(found.name)
    if torch.version.hip is not None or not (told or sheet):
        return None, "the rate of exponentials is not known, so they count as free"
    clock, source = (1e3 * told, "as torch says") if told else (SHEETS[sheet].clock, "by the data sheet")
    units = found.multi_processor_count
    how = f"exp modelled: {units} x {EXPS_PER_CLOCK} per clock at {clock / 1e9:.2f} GHz, {source}"
    return units * EXPS_PER_CLOCK * clock, how


def finish(device: torch.device) -> None:
    """Wait until a GPU has done all that it was asked for; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(run: Callable[[], object], device: torch.device, repeats: int = 8) -> float:
    """Return the shortest time after two warm-up runs: a ceiling is what the device does when nothing disturbs it."""
    taken = []
    for _ in range(repeats + 2):
        finish(device)
        start = time.perf_counter()
        run()
        finish(device)
        taken.append(time.perf_counter() - start)
    return min(taken[2:])


# forward: without gradient; training: a forward pass that keeps what its gradient needs; backward: what follows it.
PassName = Literal["forward", "training", "backward"]
RateKey = tuple[str, PassName, torch.dtype]  # an operation, its pass, and the dtype
NEAR = 2**20  # bytes of a call that the caches hold
TORCH = "torch"  # the name of torch's own operations, element by element
HOST = {"cpu": Link(0.0, 1e12), "cuda": Link(10e-6, 20e9)}  # to host memory; PCIe 4 x16, 80 % of 25 GB/s


@dataclass(frozen=True)
class Rate:
    """Seconds of each call, floating point operation, exponential and byte; `far`: of bytes beyond the caches, more.

    spread: the standard deviation of a run, of its seconds.
    """

    call: float
    flop: float = 0.0
    exp: float = 0.0
    byte: float = 0.0
    far: float = 0.0
    spread: float = 0.0

    def seconds(self, cost: Cost, calls: float = 1.0) -> float:
        """Return the seconds of so many calls that share a cost evenly."""
        beyond = max(0.0, cost.bytes - NEAR * calls)
        computing = self.flop * cost.flops + self.exp * cost.exps
        return self.call * calls + computing + self.byte * cost.bytes + self.far * beyond


class NoRateError(ValueError):
    """Nothing is known of an operation, or of a dtype."""


class Reached(NamedTuple):
    """The shares of what a data sheet says that operations reach: computing in each pass, and moving bytes."""

    forward: float
    backward: float
    bytes: float

    def seconds(self, tops: Ceilings, which: PassName, cost: Cost) -> float:
        """Return what an operation takes, which computes and moves by turns: it is several kernels, each bound by one
        of the two."""
        share = self.backward if which == "backward" else self.forward
        return tops.computing(cost) / share + cost.bytes / tops.bytes / self.bytes


# Fitted to a block, steps and predictions on an H200, in bf16, with launches that nobody had tuned, which they meet
# within 14 % (docs/time.md; benchmarks/results/gpu-h200-2026-11-26.json).
REACHED = Reached(forward=0.5, backward=0.125, bytes=0.3)


@dataclass(frozen=True)
class Rates:
    """What a device does per second, and how that is known.

    tops: what it can do at best, by dtype.  ops: of an operation, pass and dtype.  reached: the shares of `tops` that
    operations without a rate of their own reach; call: seconds of a call of torch's, which `ops` have in them.
    link: between ranks, host: between the device and host memory.
    """

    name: str
    how: Literal["measured", "modelled"]
    device: str
    tops: Mapping[torch.dtype, Ceilings]
    call: float
    link: Link
    host: Link
    reached: Reached = REACHED
    ops: Mapping[RateKey, Rate] = field(default_factory=dict)

    def seconds(self, op: str, which: PassName, cost: Cost, calls: float, dtype: torch.dtype) -> float:
        """Return the seconds of so many calls of an operation that share a cost evenly, once they have begun.

        A data sheet's leave out what a call takes.  Errors: NoRateError for a dtype for which nothing is known.
        """
        if self.how == "measured":
            if (op, which, dtype) not in self.ops:
                raise NoRateError(f"no rate of {op}, {which}, {dtype} of {self.name}")
            return self.ops[op, which, dtype].seconds(cost, calls)
        if dtype not in self.tops:
            known = ", ".join(sorted(str(one).removeprefix("torch.") for one in self.tops))
            raise NoRateError(f"the rates of {self.name} are of {known}, not of {str(dtype).removeprefix('torch.')}")
        return self.reached.seconds(self.tops[dtype], which, cost)

    def spread(self, op: str, which: PassName, dtype: torch.dtype) -> float:
        """Return the standard deviation of an operation's run, of its seconds; 0 where nothing is measured."""
        return self.ops[op, which, dtype].spread if (op, which, dtype) in self.ops else 0.0


class Sheet(NamedTuple):
    """What a maker states: dense products per second by dtype, memory, multiprocessors, boost clock, links."""

    fp32: float
    half: float  # bf16 and fp16, summed in fp32
    memory: float  # bytes; an A100 and an L4 or A10 also come with less
    bytes: float  # of it, per second
    units: int
    clock: float
    link: str
    host: float  # bytes per second and direction

    @property
    def exps(self) -> float:
        """Exponentials per second."""
        return self.units * EXPS_PER_CLOCK * self.clock


# Of the makers' data sheets and architecture papers: NVIDIA A100 (SXM 80 GB), H100 (SXM), H200 (SXM), B200 (HGX, half
# of a GB200's two), GeForce RTX 4090 (Ada architecture, appendix A), A10, L4.  TFLOP/s without sparsity.
SHEETS = {
    "A100": Sheet(19.5e12, 312e12, 80e9, 2.04e12, 108, 1.41e9, "NVLink 3", 25e9),
    "H100": Sheet(67e12, 989e12, 80e9, 3.35e12, 132, 1.98e9, "NVLink 4", 50e9),
    "H200": Sheet(67e12, 989e12, 141e9, 4.8e12, 132, 1.98e9, "NVLink 4", 50e9),
    "B200": Sheet(75e12, 2.25e15, 180e9, 8e12, 148, 1.965e9, "NVLink 4", 50e9),
    "RTX 4090": Sheet(82.6e12, 165e12, 24e9, 1.01e12, 128, 2.52e9, "PCIe 4", 25e9),
    "A10": Sheet(31.2e12, 125e12, 24e9, 0.6e12, 72, 1.695e9, "PCIe 4", 25e9),
    "L4": Sheet(30.3e12, 121e12, 24e9, 0.3e12, 58, 2.04e9, "PCIe 4", 25e9),
}
KERNEL = 2e-6  # seconds that a kernel takes however little it does: until all its programs run, and until they end
LAUNCH = 8e-6  # seconds until one more operation of torch's has begun, from Python
# Likewise of one of our kernels, on the H200's machine: of a step without graphs, and of predictions in slices of 128
# rows.  The latter was before recipes (ops/triton/recipe.py), which a GPU has not met yet.
OURS, OURS_WITHOUT_GRADIENT = 250e-6, 180e-6


def sheet_of(name: str) -> str:
    """Return which of `SHEETS` a GPU's is, by its name, "A100" or "NVIDIA H100 80GB HBM3"; "" where none is known."""
    return next((key for key in sorted(SHEETS, key=len, reverse=True) if key.lower() in name.lower()), "")


def of_gpu(name: str) -> Rates:
    """Return the rates of a GPU by its name, as of `sheet_of`, modelled from the data sheet.

    Errors: UserError for one that is not known.
    """
    found = sheet_of(name)
    if not found:
        raise UserError(f"{name}: how fast this GPU is, is not known; known are {', '.join(SHEETS)}")
    sheet = SHEETS[found]
    products = {torch.float32: sheet.fp32, torch.bfloat16: sheet.half, torch.float16: sheet.half}
    tops = {dtype: Ceilings(flops, sheet.bytes, sheet.exps, "data sheet") for dtype, flops in products.items()}
    link, host = LINKS[sheet.link], Link(10e-6, 0.8 * sheet.host)
    return Rates(found, "modelled", "cuda", tops, LAUNCH, link, host)
