"""How fast a device is, operation by operation: measured here in about a second, or modelled from a data sheet.

One pass of an operation takes so long for each call, floating point operation, exponential and byte, and more for bytes
that do not fit into the caches.  These five are fitted to a few sizes, narrow and as wide as AlphaFold2, short and
long, so that a size between them is met.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np
import torch

from warpfold.errors import UserError
from warpfold.model.alphafold import ModelConfig
from warpfold.model.losses import LossConfig
from warpfold.model.structure import StructureConfig
from warpfold.ops.triangle import triangle_product
from warpfold.ops.triangle_slice import projected_factor, triangle_slice
from warpfold.tune.cases import PROFILES
from warpfold.tune.cluster.links import LINKS, Link
from warpfold.tune.example import ExampleSizes
from warpfold.tune.layer_work import COPY, IN_PARTS, PRODUCT
from warpfold.tune.outside import OUTSIDE, OutsideRun, outside_work
from warpfold.tune.profile import Cost, OpCase, RandomTensors
from warpfold.tune.roofline import EXPS_PER_CLOCK, Ceilings
from warpfold.tune.sizes import DataSizes, of_settings

# forward: without gradient; training: a forward pass that keeps what its gradient needs; backward: what follows it.
PassName = Literal["forward", "training", "backward"]
RateKey = tuple[str, PassName, torch.dtype]  # an operation, its pass, and the dtype
Clock = Callable[[], float]
Point = tuple[Cost, float, float]  # a cost, the seconds that it took, and the calls that shared it
NEAR = 2**20  # bytes of a call that the caches hold
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
    an operation without a rate of its own reaches; call: seconds of a call of torch's, which `ops` have in them.
    link: between ranks, host: between the device and host memory.
    """

    name: str
    how: Literal["measured", "modelled"]
    device: str
    tops: Mapping[torch.dtype, Ceilings]
    call: float
    link: Link
    host: Link
    efficiency: float = 1.0
    ops: Mapping[RateKey, Rate] = field(default_factory=dict)

    def seconds(self, op: str, which: PassName, cost: Cost, calls: float, dtype: torch.dtype) -> float:
        """Return what so many calls of an operation take that share a cost evenly, once they have begun.

        Errors: ValueError for a dtype for which nothing is known.
        """
        rate = self.ops.get((TORCH if op == COPY else op, which, dtype))
        if rate is not None:
            return rate.seconds(cost, calls)
        if self.how == "measured":
            raise ValueError(f"no rate of {op}, {which}, {dtype} of {self.name}")
        if dtype not in self.tops:
            known = ", ".join(sorted(str(one).removeprefix("torch.") for one in self.tops))
            raise ValueError(f"the rates of {self.name} are of {known}, not of {str(dtype).removeprefix('torch.')}")
        return KERNEL * kernels_of(op, which) * calls + self.tops[dtype].limit(cost) / self.efficiency

    def launching(self, op: str, which: PassName, calls: float) -> float:
        """Return how long the host launches so many calls, while the device works; 0 where measured rates have it."""
        return 0.0 if self.how == "measured" else self.call * kernels_of(op, which) * calls


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
KERNEL = 2e-6  # seconds that a kernel takes however little it does: until all its programs run, and until they end
# Kernels of a call of our operations, forward and backward, with what torch does in them; all others are torch's, one
# kernel each.  A test counts them (tests/tune/simulate/test_one_count.py).
KERNELS = {
    "gated_attention": (4, 9), "attention": (2, 3), "global_attention": (2, 3), "transition": (1, 4),
    "triangle_multiplication": (3, 7), "projected_factor": (2, 8), "triangle_slice": (4, 12), "gate": (1, 1),
    "outer_product": (2, 5), "norm_linear": (1, 4), "layer_norm": (1, 4), "tail": (1, 3), "aligned_errors": (3, 3),
    PRODUCT: (1, 2),
}  # fmt: skip
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


def measured(device: torch.device | str, dtype: torch.dtype, clock: Clock = time.perf_counter) -> Rates:
    """Return the rates of this device, each measured when it is first asked for, and then known to this process.

    A prediction in slices asks for some dozen, which takes 1.5 s on a CPU; a training for three times as many.
    dtype: of the trunk.  clock: `time.process_time` leaves out what others do on this CPU.
    """
    return _measured(torch.device(device), dtype, clock, torch.get_num_threads())


@cache
def _measured(device: torch.device, dtype: torch.dtype, clock: Clock, threads: int) -> Rates:
    name = f"this {'CPU' if device.type == 'cpu' else torch.cuda.get_device_name(device)}"
    link = LINKS["gloo" if device.type == "cpu" else "NVLink 4"]
    ops = _MeasuredOps(device, clock)
    return Rates(name, "measured", device.type, {}, 0.0, link, HOST[device.type], 1.0, ops)


def kernels_of(op: str, which: PassName) -> int:
    """Return how many kernels of a GPU a call launches."""
    return KERNELS.get(op, (1, 1))[which == "backward"]


class _MeasuredOps(Mapping[RateKey, Rate]):
    """Rates of operations, measured when they are first read."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self.device, self.clock, self.found = device, clock, dict[RateKey, Rate]()
        self.loops = dict[torch.dtype, Rate]()  # of torch's operations, each in a loop of its own

    def __getitem__(self, key: RateKey) -> Rate:
        if key not in self.found:
            self.found[key] = self._of_torch(*key[1:]) if key[0] == TORCH else self._timed(key, self._usual(key[2]))
        return self.found[key]

    def _timed(self, key: RateKey, usual: Rate) -> Rate:
        op, which, dtype = key
        if op not in MEASURED:
            raise KeyError(key)
        with torch.inference_mode(False), torch.set_grad_enabled(which != "forward"):
            return fitted(list(_Timer(self.device, self.clock).points(op, which, dtype)), usual)

    def _of_torch(self, which: PassName, dtype: torch.dtype) -> Rate:
        """Return what torch's own operations take in a model: a call has its views, Python and autograd around it.

        That is ten times what it takes in a loop of its own.
        """
        return replace(self._loops(dtype), call=self[OUTSIDE, which, torch.float32].call)

    def _loops(self, dtype: torch.dtype) -> Rate:
        if dtype not in self.loops:
            self.loops[dtype] = self._timed((TORCH, "forward", dtype), USUAL)
        return self.loops[dtype]

    def __iter__(self) -> Iterator[RateKey]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def _usual(self, dtype: torch.dtype) -> Rate:
        """Return what torch's own operations take, where that is not far less than usual."""
        torchs = astuple(self._loops(dtype))[1:]
        return Rate(USUAL.call, *(max(t, u / 10) for t, u in zip(torchs, astuple(USUAL)[1:])))


NARROW = replace(ModelConfig(), c_m=32, c_z=32, c_e=16)
WIDE = ModelConfig()
PROBED = replace(ModelConfig(), structure=StructureConfig(layers=1))  # outside of the trunk
PAIR = ("triangle ending", "triangle product", "triangle product, out", "pair transition")
MSA = ("msa row", "msa transition", "outer product")
EXTRA = ("extra msa row", "global column", "msa row bias", "template pair transition")
SMALL, LONG = 1e8, 4e8  # floating point operations of a case at most, forward; of some long rows
# Residues, sequences, the layers that are timed at this size (those that show how the operations do), and `SMALL`.
SIZES = (
    (NARROW, 10, 4, PAIR + MSA, SMALL),
    (NARROW, 48, 16, (*PAIR, *EXTRA, "msa row"), SMALL),
    (WIDE, 16, 8, PAIR + EXTRA + MSA, SMALL),
    (WIDE, 64, 32, (*PAIR, *EXTRA, *MSA, "template pointwise"), SMALL),
    (WIDE, 192, 64, (*PAIR, "msa column", "extra msa row", "template triangle starting"), LONG),
)
WHOLE_PRODUCTS = 64  # residues; a triangle product cannot be cut to a few rows
FEW = 3  # layers of a size that an operation is timed at
LARGE = 2**23  # bytes of a case at most
PARTS = ((8, 16), (16, 64), (64, 64), (4, 192), (32, 192))  # rows of a slice, and residues
MEASURED = {*PROFILES, *IN_PARTS, TORCH, OUTSIDE}
LENGTHS = (12, 64)  # at which what lies outside of the trunk is timed


def _cases(op: str, training: bool, scale: float) -> Iterator[OpCase]:
    """Yield the sizes at which an operation is timed; scale: how much more a device does than a CPU meanwhile."""
    of_losses = op in ("aligned_errors", "overlaps")
    sizes = tuple((WIDE, n, 1, ("backbone", "side chains", "clashes"), SMALL) for n in (16, 64)) if of_losses else SIZES
    for model, residues, rows, shown, flops in sizes:
        data = DataSizes(crop=residues, max_msa=rows, max_extra=rows, max_templates=1)
        square = op == "triangle_multiplication"
        if square and residues > WHOLE_PRODUCTS * scale:
            continue
        found = [case for case in of_settings(model, data) if case.op == op and case.where in shown]
        for case in found[:: max(1, math.ceil(len(found) / FEW))]:
            case = case if square or of_losses else _cut(case, flops * scale)
            yield case if training else replace(case, dropped=False, drawn=False)


def _cut(case: OpCase, flops: float) -> OpCase:
    """Return a case with as many rows as have at most so many floating point operations."""
    cost = PROFILES[case.op].cost(case, True, 4)
    few = min(flops / cost.flops if cost.flops else 1.0, LARGE / cost.bytes)
    return case.with_rows(max(1, int(case.rows * few)))


@dataclass(frozen=True)
class _Timer:
    """Time passes of operations."""

    device: torch.device
    clock: Clock

    def points(self, op: str, which: PassName, dtype: torch.dtype) -> Iterator[Point]:
        """Time one pass of an operation at some sizes; whether gradients are on is the caller's."""
        if op == TORCH:
            yield from self._of_torch(dtype)
        elif op == OUTSIDE:
            yield from self._outside(which)
        elif op in IN_PARTS:
            yield from self._in_parts(op, which, dtype)
        else:
            for case in _cases(op, which != "forward", 1 if self.device.type == "cpu" else 30):
                profile = PROFILES[op]
                args, _ = profile.drawn(case, RandomTensors(dtype, self.device))
                wanted = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad]
                cost = profile.cost(case, which != "backward", dtype.itemsize)
                yield cost, self._pass(which, partial(profile.op, *args), wanted), 1

    def _in_parts(self, op: str, which: PassName, dtype: torch.dtype) -> Iterator[Point]:
        """Time parts of a triangle product, for a slice of its rows."""

        def ones(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
            return torch.full(shape, 0.01, dtype=of, device=self.device, requires_grad=which != "forward")

        c = h = WIDE.c_z
        for rows, n in PARTS:
            x, mask = ones(rows, n, c), torch.ones(rows, n, device=self.device)
            norm = ones(c, of=torch.float32), ones(c, of=torch.float32)
            into, square = ((ones(out, c, of=torch.float32), ones(out, of=torch.float32)) for out in (2 * h, c))
            other, slice_ = ones(h, n, n), ones(h, rows, n)
            run, wanted = {
                "projected_factor": (partial(projected_factor, x, mask, norm, into), (x,)),
                "triangle_slice": (
                    partial(triangle_slice, x, mask, other, norm, into, square, norm, square, True), (x, other)
                ),
                PRODUCT: (partial(_product, slice_, other), (slice_, other)),
            }[op]  # fmt: skip
            cost = IN_PARTS[op](rows, n, c, h, dtype.itemsize, which != "backward")
            yield cost, self._pass(which, run, wanted), 1

    def _pass(self, which: PassName, run: Callable[[], torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
        if which != "backward":
            return self.seconds(run)
        out = run()
        return self.seconds(partial(torch.autograd.grad, out, wanted, torch.ones_like(out), retain_graph=True))

    def _outside(self, which: PassName) -> Iterator[Point]:
        """Time what lies outside of the trunk, in fp32, by running it."""
        loss = None if which == "forward" else LossConfig()
        run = OutsideRun(PROBED, loss, device=self.device)
        for residues in LENGTHS:
            sizes = ExampleSizes(residues=residues, sequences=8, extra=8, templates=1)
            run.resize(sizes)
            work = outside_work(PROBED, sizes, loss, all_of_it=True)
            some = [one for key, one in work.items() if key.backward == (which == "backward")]
            seconds = run.timed(self.seconds, which == "backward")
            yield summed(one.cost for one in some), seconds, sum(one.calls for one in some)

    def _of_torch(self, dtype: torch.dtype) -> Iterator[Point]:
        """Time torch's own operations: sums of two tensors, exponentials, products of matrices."""
        for n in (2**6, 2**12, 2**17, 2**20, 2**23):
            x, y = (torch.ones(n, dtype=dtype, device=self.device) for _ in range(2))
            yield Cost(0, 0, 3 * n * dtype.itemsize), self.seconds(partial(torch.add, x, y)), 1
            if n <= 2**20:
                yield Cost(0, n, 2 * n * dtype.itemsize), self.seconds(partial(torch.sigmoid, x)), 1
        for n, c in ((64, 64), (512, 128), (2048, 128)):
            a, b = (torch.ones(size, c, dtype=dtype, device=self.device) for size in (n, c))
            cost = Cost(2 * n * c * c, 0, (2 * n * c + c * c) * dtype.itemsize)
            yield cost, self.seconds(partial(torch.mm, a, b)), 1

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the median of some runs after a first one, each with little of its own left in any cache.

        So operations find them in a step, which is long, and the sum of many: the least of some runs is a lucky turn's,
        up to half of what operations take on average where ranks share cores.
        """
        self._once(run)
        return statistics.median(self._once(run) for _ in range(3))

    def _once(self, run: Callable[[], object]) -> float:
        self.others.add_(1)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.device)
        start = self.clock()
        run()
        if cuda:
            torch.cuda.synchronize(self.device)
        return self.clock() - start

    @cached_property
    def others(self) -> torch.Tensor:
        """What fills the caches."""
        return torch.zeros(2**23 if self.device.type == "cpu" else 2**26, device=self.device)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of factors as the norm that follows reads it."""
    return triangle_product(a, b, True).contiguous()


# Seconds of a core of a few GHz, for what the points do not tell.
USUAL = Rate(call=5e-5, flop=2e-11, exp=1e-9, byte=1e-10, far=1e-10)
NEARNESS = 0.005  # the square of the relative error that counts as much as a part twice as large as usual


def summed(costs: Iterable[Cost]) -> Cost:
    """Return the sum of costs."""
    found = list(costs)
    return Cost(sum(one.flops for one in found), sum(one.exps for one in found), sum(one.bytes for one in found))


def fitted(points: Sequence[Point], usual: Rate | None = None) -> Rate:
    """Return the rate, none of its parts negative, whose relative errors at some points have the least squares.

    usual: where the points leave it open which part takes the time, the rate stays near this one.
    """
    amounts = np.array(
        [[n, cost.flops, cost.exps, cost.bytes, max(0.0, cost.bytes - NEAR * n)] for cost, _, n in points]
    )
    used = [i for i in range(5) if amounts[:, i].any()]
    equations, right = amounts / np.array([[seconds] for _, seconds, _ in points]), np.ones(len(points))
    if usual is not None:
        expected = np.array(astuple(usual))
        scale = np.diag(math.sqrt(NEARNESS) / expected)[used]
        equations, right = np.vstack([equations, scale]), np.append(right, np.full(len(used), math.sqrt(NEARNESS)))
    units = np.maximum(equations.max(0), 1e-300)
    best, least = np.zeros(5), math.inf
    for count in range(1, len(used) + 1):
        for some in map(list, combinations(used, count)):
            found, *_ = np.linalg.lstsq(equations[:, some] / units[some], right, rcond=None)
            error = float(np.square(equations[:, some] / units[some] @ found - right).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(5), error
                best[some] = found / units[some]
    return Rate(*best.tolist())
