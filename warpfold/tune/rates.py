"""How fast a device is, operation by operation: measured here in about a second, or modelled from a data sheet.

One pass of an operation takes so long for each call, floating point operation, exponential and byte, and more for bytes
that do not fit into the caches.  These five are fitted to a few sizes, narrow and as wide as AlphaFold2, short and
long, so that a size between them is met.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np
import torch

from warpfold.errors import UserError
from warpfold.model.alphafold import ModelConfig
from warpfold.tune.cases import PROFILES, inputs
from warpfold.tune.profile import Cost, OpCase
from warpfold.tune.roofline import EXPS_PER_CLOCK, Ceilings
from warpfold.tune.sizes import DataSizes, of_settings
from warpfold.tune.traffic import LINKS, Link

# forward: without gradient; training: a forward pass that keeps what its gradient needs; backward: what follows it.
PassName = Literal["forward", "training", "backward"]
Clock = Callable[[], float]
NEAR = 2**22  # bytes of a call that the caches hold
TORCH = "torch"  # the name of torch's own operations, element by element
HOST = {"cpu": Link(0.0, 1e12), "cuda": Link(10e-6, 20e9)}  # to host memory; PCIe 4 x16, 80 % of 25 GB/s


@dataclass(frozen=True)
class Rate:
    """Seconds of each call, floating point operation, exponential and byte; `far`: of bytes beyond the caches, more."""

    call: float
    flop: float = 0.0
    exp: float = 0.0
    byte: float = 0.0
    far: float = 0.0

    def seconds(self, cost: Cost, calls: float = 1.0) -> float:
        """Return what so many calls take that share a cost evenly."""
        beyond = max(0.0, cost.bytes - NEAR * calls)
        computing = self.flop * cost.flops + self.exp * cost.exps
        return self.call * calls + computing + self.byte * cost.bytes + self.far * beyond


@dataclass(frozen=True)
class Rates:
    """What a device does per second, and how that is known.

    tops: what it can do at best, by dtype.  ops: of an operation, pass and dtype.  efficiency: the share of `tops` that
    an operation without a rate of its own reaches; call: seconds of a call of torch's.  link: between ranks, host:
    between the device and host memory.
    """

    name: str
    how: Literal["measured", "modelled"]
    device: str
    tops: Mapping[torch.dtype, Ceilings]
    call: float
    link: Link
    host: Link
    efficiency: float = 1.0
    ops: Mapping[tuple[str, PassName, torch.dtype], Rate] = field(default_factory=dict)

    def seconds(self, op: str, which: PassName, cost: Cost, calls: float, dtype: torch.dtype) -> float:
        """Return what so many calls of an operation take that share a cost evenly.

        Errors: ValueError for a dtype for which nothing is known.
        """
        rate = self.ops.get((op, which, dtype)) or self.ops.get((TORCH, "forward", dtype))
        if rate is not None:
            return rate.seconds(cost, calls)
        if dtype not in self.tops:
            known = ", ".join(sorted(str(one).removeprefix("torch.") for one in self.tops))
            raise ValueError(f"the rates of {self.name} are of {known}, not of {str(dtype).removeprefix('torch.')}")
        launches = LAUNCHES if op != TORCH else 1
        return self.call * launches * calls + self.tops[dtype].limit(cost) / self.efficiency


class Sheet(NamedTuple):
    """What a maker states: dense products per second by dtype, memory, multiprocessors, clock, links."""

    fp32: float
    tf32: float
    half: float  # bf16 and fp16, summed in fp32
    bytes: float
    units: int
    clock: float
    link: str
    host: float  # bytes per second and direction

    @property
    def exps(self) -> float:
        """Exponentials per second."""
        return self.units * EXPS_PER_CLOCK * self.clock


# Of the makers' data sheets and architecture papers: NVIDIA A100 (SXM 80 GB), H100 (SXM), H200 (SXM), B200 (HGX, half
# of a GB200's two), GeForce RTX 4090 (Ada architecture, appendix A), A10, L4.  TFLOP/s without sparsity; the
# exponentials' clock is the boost clock.
SHEETS = {
    "A100": Sheet(19.5e12, 156e12, 312e12, 2.04e12, 108, 1.41e9, "NVLink 3", 25e9),
    "H100": Sheet(67e12, 494e12, 989e12, 3.35e12, 132, 1.98e9, "NVLink 4", 50e9),
    "H200": Sheet(67e12, 494e12, 989e12, 4.8e12, 132, 1.98e9, "NVLink 4", 50e9),
    "B200": Sheet(75e12, 1.1e15, 2.25e15, 8e12, 148, 1.965e9, "NVLink 4", 50e9),
    "RTX 4090": Sheet(82.6e12, 82.6e12, 165e12, 1.01e12, 128, 2.52e9, "PCIe 4", 25e9),
    "A10": Sheet(31.2e12, 62.5e12, 125e12, 0.6e12, 72, 1.695e9, "PCIe 4", 25e9),
    "L4": Sheet(30.3e12, 60e12, 121e12, 0.3e12, 58, 2.04e9, "PCIe 4", 25e9),
}
REACHED = 0.4  # of what a data sheet says; a guess, between 0.98 of FlashAttention's best and small layers' 0.2
LAUNCHES = 6  # of one of our operations, with what torch does around it; a block counts 50 forward (tune/launches.py)
LAUNCH = 8e-6  # seconds until one more operation of torch's has begun, from Python


def of_gpu(name: str) -> Rates:
    """Return the rates of a GPU by its name, "A100" or "NVIDIA H100 80GB HBM3", modelled from the data sheet.

    Errors: UserError for one that is not known.
    """
    found = next((key for key in sorted(SHEETS, key=len, reverse=True) if key.lower() in name.lower()), None)
    if found is None:
        raise UserError(f"{name}: how fast this GPU is, is not known; known are {', '.join(SHEETS)}")
    sheet = SHEETS[found]
    products = {torch.float32: sheet.fp32, torch.bfloat16: sheet.half, torch.float16: sheet.half}
    tops = {dtype: Ceilings(flops, sheet.bytes, sheet.exps, "data sheet") for dtype, flops in products.items()}
    link, host = LINKS[sheet.link], Link(10e-6, 0.8 * sheet.host)
    return Rates(found, "modelled", "cuda", tops, LAUNCH, link, host, REACHED)


def measured(
    device: torch.device | str, dtype: torch.dtype, training: bool = False, clock: Clock = time.perf_counter
) -> Rates:
    """Measure the rates of this device, once per process: some 1.5 s on a CPU, with `training` three times that.

    dtype: of the trunk; fp32 is measured beside it.  clock: `time.process_time` leaves out what others do on this CPU.
    """
    return _measured(torch.device(device), dtype, training, clock, torch.get_num_threads())


@cache
def _measured(device: torch.device, dtype: torch.dtype, training: bool, clock: Clock, threads: int) -> Rates:
    time_of = _Timer(device, clock)
    ops: dict[tuple[str, PassName, torch.dtype], Rate] = {}
    points: dict[tuple[str, PassName], list[tuple[Cost, float]]] = defaultdict(list)
    for case in _cases(device, training):
        for which, cost, seconds in time_of.case(case, dtype, training):
            points[case.op, which].append((cost, seconds))
    ops |= {(op, which, dtype): fitted(found) for (op, which), found in points.items()}
    for each in {dtype, torch.float32}:
        ops[TORCH, "forward", each] = time_of.torch(each)
    call = ops[TORCH, "forward", dtype].call
    name = f"this {'CPU' if device.type == 'cpu' else torch.cuda.get_device_name(device)}"
    return Rates(name, "measured", device.type, {}, call, LINKS["gloo" if device.type == "cpu" else "NVLink 4"],
                 HOST[device.type], 1.0, ops)  # fmt: skip


NARROW = replace(ModelConfig(), c_m=32, c_z=32, c_e=16)
WIDE = ModelConfig()
PAIR = ("triangle ending", "triangle product", "triangle product, out", "pair transition")
MSA = ("msa row", "msa transition", "outer product")
EXTRA = ("extra msa row", "global column", "msa row bias", "template pair transition")
# Residues, rows and the layers that are timed at this size: those that show how the operations do.
SIZES = (
    (NARROW, 10, 4, PAIR + MSA),
    (NARROW, 48, 16, (*PAIR, *EXTRA, "msa row")),
    (WIDE, 16, 8, PAIR + EXTRA + MSA),
    (WIDE, 64, 32, (*PAIR, *EXTRA, *MSA, "template pointwise")),
    (WIDE, 256, 64, (*PAIR, *EXTRA, "msa column", "template triangle starting")),
)
SMALL = 1e8  # floating point operations of a case at most, forward
LARGE = 2**24  # bytes of a case that shows what memory does


def _cases(device: torch.device, training: bool) -> Iterator[OpCase]:
    """Yield the sizes at which operations are timed."""
    scale = 1 if device.type == "cpu" else 30  # of what a GPU does in the same time
    for model, residues, rows, shown in SIZES:
        data = DataSizes(crop=residues, max_msa=rows, max_extra=rows, max_templates=1)
        for case in of_settings(model, data):
            if case.where in shown:
                case = _cut(case, SMALL * scale)
                yield case if training else replace(case, dropped=False, drawn=False)
    if training:
        for residues in (16, 64):
            yield from (case for case in of_settings(ModelConfig(), DataSizes(crop=residues))
                        if case.op in ("aligned_errors", "overlaps"))  # fmt: skip


def _cut(case: OpCase, flops: float) -> OpCase:
    """Return a case with as many rows as have at most so many floating point operations."""
    cost = PROFILES[case.op].cost(case, True, 4)
    few = min(flops / cost.flops if cost.flops else 1.0, LARGE / cost.bytes)
    if case.batches > 1:
        case = replace(case, rows=case.rows // case.batches, batches=1)
    return case.with_rows(max(1, int(case.rows * few)))


class _Timer:
    """Time passes of operations."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self.device, self.clock = device, clock

    def case(self, case: OpCase, dtype: torch.dtype, training: bool) -> Iterator[tuple[PassName, Cost, float]]:
        """Yield what the passes of an operation cost, and took."""
        given, profile = inputs(case, dtype, self.device), PROFILES[case.op]
        forward = profile.cost(case, True, dtype.itemsize)
        with torch.no_grad():
            yield "forward", forward, self.seconds(lambda: profile.op(*given.args))
        if not training:
            return
        yield "training", forward, self.seconds(lambda: profile.op(*given.args))
        out = profile.op(*given.args)
        backward = self.seconds(lambda: torch.autograd.grad(out, given.wanted, given.grad, retain_graph=True))
        yield "backward", profile.cost(case, False, dtype.itemsize), backward

    def torch(self, dtype: torch.dtype) -> Rate:
        """Measure torch's own operations: sums of two tensors, products of matrices, exponentials."""
        points: list[tuple[Cost, float]] = []

        def point(flops: float, exps: float, numbers: float, run: Callable[..., object], *of: torch.Tensor) -> None:
            points.append((Cost(flops, exps, numbers * dtype.itemsize), self.seconds(lambda: run(*of))))

        for n in (2**6, 2**12, 2**17, 2**20, 2**23):
            x = torch.ones(n, dtype=dtype, device=self.device)
            point(0, 0, 3 * n, torch.add, x, x)
            if n <= 2**20:
                point(0, n, 2 * n, torch.sigmoid, x)
        for n, c in ((64, 64), (512, 128), (2048, 128)):
            a, b = (torch.ones(size, c, dtype=dtype, device=self.device) for size in (n, c))
            point(2 * n * c * c, 0, 2 * n * c + c * c, torch.mm, a, b)
        return fitted(points)

    def seconds(self, run: Callable[[], object], most: int = 3) -> float:
        """Return the least of some runs after a first one; of very short ones, of several in a row."""
        first = self._once(run, 1)
        times = max(1, min(20, int(2e-4 / max(first, 1e-7))))
        repeats = most if first < 0.02 else 1
        return min(self._once(run, times) for _ in range(repeats)) / times

    def _once(self, run: Callable[[], object], times: int) -> float:
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.device)
        start = self.clock()
        for _ in range(times):
            run()
        if cuda:
            torch.cuda.synchronize(self.device)
        return self.clock() - start


def fitted(points: Sequence[tuple[Cost, float]]) -> Rate:
    """Return the rate, none of its parts negative, whose relative errors at some points have the least squares.

    points: what one call costs, and the seconds that it took.
    """
    amounts = np.array([[1.0, cost.flops, cost.exps, cost.bytes, max(0.0, cost.bytes - NEAR)] for cost, _ in points])
    taken = np.array([seconds for _, seconds in points])
    scale = amounts.max(0)
    used = [i for i in range(5) if scale[i] > 0]
    best, least = np.zeros(5), math.inf
    for count in range(1, len(used) + 1):
        for some in map(list, combinations(used, count)):
            found, *_ = np.linalg.lstsq(
                (amounts[:, some] / scale[some]) / taken[:, None], np.ones(len(taken)), rcond=None
            )
            error = float(np.square(amounts[:, some] @ (found / scale[some]) / taken - 1).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(5), error
                best[some] = found / scale[some]
    return Rate(*best.tolist())
