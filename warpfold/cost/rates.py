"""Rates of a device by operation: measured (cost/measured_rates.py), or modelled from a data sheet.

The time of one pass of an operation is linear in its calls, floating point operations, exponentials and bytes. Bytes
beyond the cache take longer.
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

# Exponentials per clock of a multiprocessor's special function units, on NVIDIA GPUs from Volta to Blackwell.
EXPS_PER_CLOCK = 16


@dataclass(frozen=True)
class Ceilings:
    """Peak throughput of a device per second.

    flops: of matrix products in the dtype. bytes: read and written by a copy. exps: exponentials; None if unknown, and
    then they count as free. how: source of the values.
    """

    flops: float
    bytes: float
    exps: float | None
    how: str

    def limit(self, cost: Cost) -> float:
        """Compute the seconds of the ideal pass. Only a pass that stores what the ideal recomputes can be faster."""
        return max(cost.bytes / self.bytes, self.computing(cost))

    def computing(self, cost: Cost) -> float:
        """Compute the seconds of products and exponentials."""
        return cost.flops / self.flops + (cost.exps / self.exps if self.exps else 0.0)


def cost(case: OpCase, direction: Pass, itemsize: int) -> Cost:
    """Compute the cost of one pass of an operation, without the bytes of parameters (a few thousandths)."""
    return PROFILES[case.op].cost(case, direction == "forward", itemsize)


def ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure the peak throughput of the device in about a second."""
    cuda = device.type == "cuda"
    n = 8192 if cuda and dtype != torch.float32 else 4096 if cuda else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    flops = 2 * n**3 / _seconds(lambda: a @ b, device)
    # Far larger than any cache.
    source = torch.ones(2**28 if cuda else 2**25, device=device)
    target = torch.empty_like(source)
    bytes_per_second = 2 * source.numel() * 4 / _seconds(lambda: target.copy_(source), device)
    measured = "matrix products and copies measured in this run"
    if cuda:
        exps, exp_source = _gpu_exps(device)
        return Ceilings(flops, bytes_per_second, exps, f"{measured}; {exp_source}")
    # Small enough for the cache.
    x = torch.rand(2**15 * torch.get_num_threads())
    y = torch.empty_like(x)
    return Ceilings(
        flops, bytes_per_second, x.numel() / _seconds(lambda: torch.exp(x, out=y), device), f"{measured}, exp too"
    )


def _gpu_exps(device: torch.device) -> tuple[float | None, str]:
    """Return the exponentials per second of a GPU with the source of the value; None if unknown."""
    properties = torch.cuda.get_device_properties(device)
    # Newer versions of torch report the clock in kHz.
    reported = getattr(properties, "clock_rate", None)
    sheet = sheet_of(properties.name)
    if torch.version.hip is not None or not (reported or sheet):
        return None, "the rate of exponentials is not known, so they count as free"
    clock, source = (1e3 * reported, "as torch says") if reported else (SHEETS[sheet].clock, "by the data sheet")
    units = properties.multi_processor_count
    exp_source = f"exp modelled: {units} x {EXPS_PER_CLOCK} per clock at {clock / 1e9:.2f} GHz, {source}"
    return units * EXPS_PER_CLOCK * clock, exp_source


def finish(device: torch.device) -> None:
    """Wait until a GPU has completed all queued work, so that a host clock measures it. No effect for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(run: Callable[[], object], device: torch.device, repeats: int = 8) -> float:
    """Measure the shortest of several runs after two warm-up runs, since a ceiling assumes an undisturbed device."""
    durations = []
    for _ in range(repeats + 2):
        finish(device)
        start = time.perf_counter()
        run()
        finish(device)
        durations.append(time.perf_counter() - start)
    return min(durations[2:])


# forward: a forward pass without gradients. training: a forward pass that saves tensors. backward: the backward pass.
PassName = Literal["forward", "training", "backward"]
# An operation, its pass, and the dtype.
RateKey = tuple[str, PassName, torch.dtype]
# Bytes of a call that fit in the caches.
CACHED_BYTES = 2**20
# The name of torch's own elementwise operations.
TORCH = "torch"
# Links to host memory. "cuda" is 80 % of the 25 GB/s of PCIe 4 x16.
HOST = {"cpu": Link(0.0, 1e12), "cuda": Link(10e-6, 20e9)}


@dataclass(frozen=True)
class Rate:
    """Seconds per call, floating point operation, exponential and byte.

    far: additional seconds per byte beyond the caches. spread: standard deviation of a run relative to its seconds.
    """

    call: float
    flop: float = 0.0
    exp: float = 0.0
    byte: float = 0.0
    far: float = 0.0
    spread: float = 0.0

    def seconds(self, cost: Cost, calls: float = 1.0) -> float:
        """Compute the seconds of several calls that share a cost evenly."""
        beyond = max(0.0, cost.bytes - CACHED_BYTES * calls)
        computing = self.flop * cost.flops + self.exp * cost.exps
        return self.call * calls + computing + self.byte * cost.bytes + self.far * beyond


class NoRateError(ValueError):
    """There is no rate for an operation or a dtype."""


class Reached(NamedTuple):
    """Fractions of a data sheet's throughput that operations reach: computing in each pass, and moving bytes."""

    forward: float
    backward: float
    bytes: float

    def seconds(self, tops: Ceilings, which: PassName, cost: Cost) -> float:
        """Compute the seconds of an operation as the sum of computing and moving bytes.

        The two do not overlap, because an operation consists of several kernels that are bound by one or the other.
        """
        share = self.backward if which == "backward" else self.forward
        return tops.computing(cost) / share + cost.bytes / tops.bytes / self.bytes


# Fitted to a block, training steps and predictions on an H200 in bf16 with untuned launches. The error is at most 14 %
# (benchmarks/results/gpu-h200-2026-11-26.json).
REACHED = Reached(forward=0.5, backward=0.125, bytes=0.3)


@dataclass(frozen=True)
class Rates:
    """Rates of a device with their source.

    tops: peak throughput by dtype. ops: rates by operation, pass and dtype. reached: fractions of `tops` for operations
    without a rate in `ops`. call: seconds of a torch call, which the rates of `ops` include.
    link: between ranks. host: between the device and host memory.
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
        """Compute the seconds of several calls of an operation that share a cost evenly.

        Rates of a data sheet do not include the time of calls. Raises NoRateError for a dtype without rates.
        """
        if self.how == "measured":
            if (op, which, dtype) not in self.ops:
                raise NoRateError(f"{self.name}: no rate of {op}, {which}, {dtype}")
            return self.ops[op, which, dtype].seconds(cost, calls)
        if dtype not in self.tops:
            dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in self.tops))
            raise NoRateError(f"{self.name}: its rates are for {dtypes}, not for {str(dtype).removeprefix('torch.')}")
        return self.reached.seconds(self.tops[dtype], which, cost)

    def spread(self, op: str, which: PassName, dtype: torch.dtype) -> float:
        """Return the standard deviation of an operation's run relative to its seconds; 0 if it was not measured."""
        return self.ops[op, which, dtype].spread if (op, which, dtype) in self.ops else 0.0


class Sheet(NamedTuple):
    """A vendor's specification.

    fp32, half: floating point operations per second of dense products; half is bf16 or fp16 with fp32 accumulation.
    memory: bytes; A100, L4 and A10 are also sold with less. bytes: memory bandwidth per second.
    units: multiprocessors. clock: boost clock in Hz. link: key of `LINKS`. host: bytes per second and direction.
    """

    fp32: float
    half: float
    memory: float
    bytes: float
    units: int
    clock: float
    link: str
    host: float

    @property
    def exps(self) -> float:
        """Exponentials per second."""
        return self.units * EXPS_PER_CLOCK * self.clock


# Sources: data sheets and architecture papers of NVIDIA A100 (SXM 80 GB), H100 (SXM), H200 (SXM), B200 (HGX, half of a
# GB200's two), GeForce RTX 4090 (Ada architecture, appendix A), A10 and L4. Throughput without sparsity.
SHEETS = {
    "A100": Sheet(19.5e12, 312e12, 80e9, 2.04e12, 108, 1.41e9, "NVLink 3", 25e9),
    "H100": Sheet(67e12, 989e12, 80e9, 3.35e12, 132, 1.98e9, "NVLink 4", 50e9),
    "H200": Sheet(67e12, 989e12, 141e9, 4.8e12, 132, 1.98e9, "NVLink 4", 50e9),
    "B200": Sheet(75e12, 2.25e15, 180e9, 8e12, 148, 1.965e9, "NVLink 4", 50e9),
    "RTX 4090": Sheet(82.6e12, 165e12, 24e9, 1.01e12, 128, 2.52e9, "PCIe 4", 25e9),
    "A10": Sheet(31.2e12, 125e12, 24e9, 0.6e12, 72, 1.695e9, "PCIe 4", 25e9),
    "L4": Sheet(30.3e12, 121e12, 24e9, 0.3e12, 58, 2.04e9, "PCIe 4", 25e9),
}
# Seconds that any kernel takes on the device: until all of its programs run, and until they end.
KERNEL = 2e-6
# Seconds of the host to launch a torch operation from Python.
LAUNCH = 8e-6
# Seconds of the host to launch one of our kernels, on the machine of the H200: in a step without graphs, and in
# predictions in slices of 128 rows. The latter was measured without cached launches (ops/triton/recipe.py).
OURS, OURS_WITHOUT_GRADIENT = 250e-6, 180e-6


def sheet_of(name: str) -> str:
    """Find the key of `SHEETS` for the name of a GPU, such as "A100" or "NVIDIA H100 80GB HBM3"; "" if unknown."""
    return next((key for key in sorted(SHEETS, key=len, reverse=True) if key.lower() in name.lower()), "")


def of_gpu(name: str) -> Rates:
    """Model the rates of a GPU by its data sheet. name: see `sheet_of`. Raises UserError for an unknown GPU."""
    key = sheet_of(name)
    if not key:
        raise UserError(f"{name}: no data sheet of this GPU. Pass one of {', '.join(SHEETS)}.")
    sheet = SHEETS[key]
    products = {torch.float32: sheet.fp32, torch.bfloat16: sheet.half, torch.float16: sheet.half}
    tops = {dtype: Ceilings(flops, sheet.bytes, sheet.exps, "data sheet") for dtype, flops in products.items()}
    link, host = LINKS[sheet.link], Link(10e-6, 0.8 * sheet.host)
    return Rates(key, "modelled", "cuda", tops, LAUNCH, link, host)


# The cost of a call: `CASES` reads the sizes of a call from its arguments, and the operation's profile
# (check/cases.py) computes the cost of these sizes. The cost of an operation without a profile is the bytes of its
# operands, at the rates of torch's own operations.

# Arguments of a call by their names in the definition.
Arguments = Mapping[str, Any]
NAMES = {profile.op: name for name, profile in PROFILES.items()}


def name_of(op: Op[..., Any]) -> str:
    """Return the name of an operation in the rates of a device."""
    return NAMES.get(op, op.name)


def arguments_of(op: Op[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """Bind the arguments of a call to their names."""
    return _signature(op).bind(*args, **kwargs).arguments


@cache
def _signature(op: Op[..., Any]) -> inspect.Signature:
    return inspect.signature(op.definition)


def call_cost(op: Op[..., Any], given: Arguments, forward: bool) -> Cost:
    """Compute the cost of one pass of a call; without a profile, the bytes of its operands."""
    name, first = name_of(op), next(x for x in given.values() if isinstance(x, Tensor))
    itemsize = first.element_size()
    if name == "triangle_multiplication" and given.get("b") is not None:
        return _slice_cost(first, given["b"], forward)
    if name not in CASES:
        return Cost(0, 0, (1 if forward else 2) * sum(x.nbytes for x in given.values() if isinstance(x, Tensor)))
    cost = PROFILES[name].cost(OpCase(op=name, where="", **CASES[name](given)), forward, itemsize)
    # The profile of a triangle product is for a single pair representation.
    return scaled(cost, math.prod(first.shape[:-3])) if name == "triangle_multiplication" else cost


def _positions(x: Tensor) -> dict[str, int]:
    """Return the sizes of an operation that treats each position separately."""
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
    rows, projects_bias = x.numel() // (x.shape[-2] * x.shape[-1]), given["weight"].shape[0] > 4 * heads * width
    at = {"rows": rows, "length": x.shape[-2], "channels": x.shape[-1], "heads": heads, "width": width}
    return at | {"bias": projects_bias or given["bias"] is not None}


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
    """Compute the cost of some rows or columns of a triangle product, which reads the given factor b completely."""
    channels, (hidden, residues, _) = x.shape[-1], b.shape[-3:]
    positions, passes = x.numel() // max(1, channels), 1 if forward else 2
    # The backward pass recomputes the projections of a and of its gate.
    factor = (1 if forward else 3) * 2 * positions * channels * 2 * hidden
    product = passes * 2 * positions * residues * hidden
    tail = passes * 2 * positions * channels * (channels + hidden)
    numbers = positions * (3 * channels + 4 * hidden) + b.numel()
    return Cost(factor + product + tail, positions * (hidden + channels), passes * numbers * x.element_size())


def scaled(cost: Cost, factor: float) -> Cost:
    """Multiply a cost by a factor."""
    return Cost(cost.flops * factor, cost.exps * factor, cost.bytes * factor)
