"""How fast a device is, operation by operation: measured (cost/measured_rates.py), or modelled from a data sheet.

One pass of an operation takes so long for each call, floating point operation, exponential and byte, and more for bytes
that do not fit into the caches.
"""

import inspect
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from warpfold.check.cases import PROFILES
from warpfold.check.op_profile import Cost, OpCase
from warpfold.cost.links import LINKS, Link
from warpfold.errors import UserError
from warpfold.ops.dispatch import Op
from warpfold.ops.triangle import factor_channels

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
# within 14 % (docs/explanation/plans.md; benchmarks/results/gpu-h200-2026-11-26.json).
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


# The work of a call, by the operation's registered name: `CASES` reads the sizes of a call from its arguments, and the
# operation's profile (check/cases.py) has the cost of these sizes.  An operation without a profile
# counts as the bytes of its operands, at the rates of torch's own operations.

Arguments = Mapping[str, Any]  # of a call, by the names that the definition gives them
NAMES = {profile.op: name for name, profile in PROFILES.items()}


def name_of(op: Op[..., Any]) -> str:
    """Return the name under which the rates of a device know an operation."""
    return NAMES.get(op, op.name)


def arguments_of(op: Op[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """Return the arguments of a call by name."""
    return _signature(op).bind(*args, **kwargs).arguments


@cache
def _signature(op: Op[..., Any]) -> inspect.Signature:
    return inspect.signature(op.definition)


def call_cost(op: Op[..., Any], given: Arguments, forward: bool) -> Cost:
    """Return the cost of one pass of a call; of an operation without a profile, the bytes that it is given."""
    name, first = name_of(op), next(x for x in given.values() if isinstance(x, Tensor))
    itemsize = first.element_size()
    if name == "triangle_multiplication" and given.get("b") is not None:
        return _slice_cost(first, given["b"], forward)
    if name not in CASES:
        return Cost(0, 0, (1 if forward else 2) * sum(x.nbytes for x in given.values() if isinstance(x, Tensor)))
    cost = PROFILES[name].cost(OpCase(op=name, where="", **CASES[name](given)), forward, itemsize)
    return scaled(cost, _together(first)) if name == "triangle_multiplication" else cost


def _together(x: Tensor) -> int:
    """Return how many pair representations go through an operation at once, which its profile knows one of."""
    return math.prod(x.shape[:-3])


def _positions(x: Tensor) -> dict[str, int]:
    """Return rows and their length, as far as a cost depends on them: each position by itself."""
    return {"rows": x.numel() // max(1, x.shape[-1]), "length": 1, "channels": x.shape[-1]}


def _attention(given: Arguments) -> dict[str, Any]:
    q, k, bias = given["q"], given["k"], given.get("bias")
    *_, queries, heads, width = q.shape
    keys = k.shape[-3]
    batches = 1 if bias is None else max(1, bias.numel() // (heads * queries * keys))
    rows = q.numel() // (queries * heads * width)
    at = {"rows": rows, "length": queries, "keys": keys, "heads": heads, "width": width}
    return at | {"bias": bias is not None, "batches": batches}


def _global_attention(given: Arguments) -> dict[str, Any]:
    q, k = given["q"], given["k"]
    *_, heads, width = q.shape
    return {"rows": q.numel() // (heads * width), "length": 1, "keys": k.shape[-2], "heads": heads, "width": width}


def _gated_attention(given: Arguments) -> dict[str, Any]:
    x, heads = given["x"], given["heads"]
    width = given["out_weight"].shape[1] // heads
    rows, own = x.numel() // (x.shape[-2] * x.shape[-1]), given["weight"].shape[0] > 4 * heads * width
    at = {"rows": rows, "length": x.shape[-2], "channels": x.shape[-1], "heads": heads, "width": width}
    return at | {"bias": own or given["bias"] is not None}


def _triangle_multiplication(given: Arguments) -> dict[str, Any]:
    x = given["x"]
    return {"rows": x.shape[-3], "length": x.shape[-2], "channels": x.shape[-1],
            "outputs": given["out_weight"].shape[1]}  # fmt: skip


def _transition(given: Arguments) -> dict[str, Any]:
    gated = given["up"].shape[0] > given["down"].shape[1]
    return _positions(given["x"]) | {"outputs": given["down"].shape[1], "gated": gated}


def _outer_product(given: Arguments) -> dict[str, Any]:
    a, b = given["a"], given["b"]
    return {"rows": a.shape[-2], "keys": b.shape[-2], "length": a.shape[-3], "channels": a.shape[-1],
            "outputs": given["weight"].shape[0]}  # fmt: skip


def _outer_product_mean(given: Arguments) -> dict[str, Any]:
    x, weight = given["x"], given["out_weight"]
    return {"rows": x.shape[-3], "length": x.shape[-2], "channels": x.shape[-1], "width": math.isqrt(weight.shape[1]),
            "outputs": weight.shape[0]}  # fmt: skip


def _aligned_errors(given: Arguments) -> dict[str, Any]:
    frames, points = given["frames"], given["points"]
    rows = frames.shape[-3]
    return {"rows": rows, "length": points.shape[-2], "batches": frames.numel() // (rows * 12)}


CASES: dict[str, Callable[[Arguments], dict[str, Any]]] = {
    "attention": _attention,
    "global_attention": _global_attention,
    "gated_attention": _gated_attention,
    "layer_norm": lambda given: _positions(given["x"]),
    "norm_linear": lambda given: _positions(given["x"]) | {"outputs": given["weight"].shape[0]},
    "gate": lambda given: _positions(given["x"]),
    "tail": lambda given: _positions(given["x"]) | {"outputs": given["o"].shape[-1]},
    "transition": _transition,
    "triangle_factor": lambda given: _positions(given["x"]) | {"outputs": factor_channels(given["weight"])},
    "triangle_multiplication": _triangle_multiplication,
    "outer_product": _outer_product,
    "outer_product_mean": _outer_product_mean,
    "aligned_errors": _aligned_errors,
    "overlaps": lambda given: {"rows": 1, "length": given["atoms"].shape[-2]},
}


def _slice_cost(x: Tensor, b: Tensor, forward: bool) -> Cost:
    """Return the cost of some rows or columns of a triangle product, where b is given: every slice reads all of it."""
    channels, (hidden, residues, _) = x.shape[-1], b.shape[-3:]
    positions, passes = x.numel() // max(1, channels), 1 if forward else 2
    # The projections of a and of its gate are made once more in the backward pass.
    factor = (1 if forward else 3) * 2 * positions * channels * 2 * hidden
    product = passes * 2 * positions * residues * hidden
    tail = passes * 2 * positions * channels * (channels + hidden)
    numbers = positions * (3 * channels + 4 * hidden) + b.numel()
    return Cost(factor + product + tail, positions * (hidden + channels), passes * numbers * x.element_size())


def scaled(cost: Cost, factor: float) -> Cost:
    """Return so many times a cost."""
    return Cost(cost.flops * factor, cost.exps * factor, cost.bytes * factor)
