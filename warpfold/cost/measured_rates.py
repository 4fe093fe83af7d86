"""Measure how fast this device is, operation by operation, each in about a quarter of a second.

One pass is timed at a few sizes, narrow and as wide as AlphaFold2, short and long, so that a size between them is met;
the numbers of its rate are fitted to those.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import combinations

import numpy as np
import torch

from warpfold.batch import Batch
from warpfold.check.cases import PROFILES
from warpfold.check.op_profile import Cost, OpCase, RandomTensors
from warpfold.check.sizes import DataSizes, of_settings
from warpfold.cost.example import ExampleSizes, Job, predict_example, random_example, shortened
from warpfold.cost.links import LINKS
from warpfold.cost.rates import HOST, NEAR, TORCH, PassName, Rate, RateKey, Rates, finish
from warpfold.cost.record import record
from warpfold.cost.recorder import Operation
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.model.losses import LossConfig, total_loss
from warpfold.model.permutation import with_truth
from warpfold.model.structure import StructureConfig
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan

Clock = Callable[[], float]
Point = tuple[Cost, float, float]  # a cost, the seconds that it took, and the calls that shared it


def measured(
    device: torch.device | str,
    dtype: torch.dtype,
    clock: Clock = time.perf_counter,
    tell: Callable[[str], None] = lambda what: None,
) -> Rates:
    """Return the rates of this device, each measured when it is first asked for, and then known to this process.

    A prediction asks for about a dozen, which takes some 3.5 s of one core; a training for twice as many.
    dtype: of the trunk.  clock: `time.process_time` leaves out what others do on this CPU.
    tell: called with what is measured, before it is.
    """
    rates = _measured(torch.device(device), dtype, clock, torch.get_num_threads())
    assert isinstance(rates.ops, _MeasuredOps)
    rates.ops.tell = tell
    return rates


@cache
def _measured(device: torch.device, dtype: torch.dtype, clock: Clock, threads: int) -> Rates:
    name = f"this {'CPU' if device.type == 'cpu' else torch.cuda.get_device_name(device)}"
    link = LINKS["gloo" if device.type == "cpu" else "NVLink 4"]
    ops = _MeasuredOps(device, clock)
    return Rates(name, "measured", device.type, {}, 0.0, link, HOST[device.type], ops=ops)


class _MeasuredOps(Mapping[RateKey, Rate]):
    """Rates of operations, measured when they are first read."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self.device, self.clock, self.found = device, clock, dict[RateKey, Rate]()
        self.tell: Callable[[str], None] = lambda what: None
        self.loops = dict[torch.dtype, Rate]()  # of torch's operations, each in a loop of its own

    def __getitem__(self, key: RateKey) -> Rate:
        if key not in self.found:
            self.found[key] = self._of_torch(*key[1:]) if key[0] == TORCH else self._timed(key, self._usual(key[2]))
        return self.found[key]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, tuple) and key[0] in MEASURED

    def _timed(self, key: RateKey, usual: Rate) -> Rate:
        op, which, dtype = key
        self.tell(f"how fast this device is: {op}, {which}, {str(dtype).removeprefix('torch.')}")
        with torch.inference_mode(False), torch.set_grad_enabled(which != "forward"):
            timer = _Timer(self.device, self.clock)
            return replace(fitted(list(timer.points(op, which, dtype)), usual), spread=timer.spread)

    def _of_torch(self, which: PassName, dtype: torch.dtype) -> Rate:
        """Return the rate of torch's own operations in a model: a call has its views, Python and autograd around it.

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
        """Return the rate of torch's own operations, where that is not far less than usual."""
        torchs = astuple(self._loops(dtype))[1:5]
        return Rate(USUAL.call, *(max(t, u / 10) for t, u in zip(torchs, astuple(USUAL)[1:5])))


NARROW = replace(ModelConfig(), c_m=32, c_z=32, c_e=16)
WIDE = ModelConfig()
PROBED = replace(shortened(ModelConfig(), 0), structure=StructureConfig(layers=1))  # what lies outside of the trunk
OUTSIDE = "outside of the trunk"  # the name of what is done there, among the rates of a device
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
MEASURED = {*PROFILES, TORCH, OUTSIDE}
RUNS = 3  # of each size, after a first one
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
    busy: Clock = time.process_time  # CPU time: leaves out the time in which the process is descheduled
    variances: list[float] = field(default_factory=list)  # of runs of the same, relative

    @property
    def spread(self) -> float:
        """The standard deviation of a run, of its seconds, other processes' turns on its core aside."""
        return math.sqrt(statistics.mean(self.variances))

    def points(self, op: str, which: PassName, dtype: torch.dtype) -> Iterator[Point]:
        """Time one pass of an operation at some sizes; whether gradients are on is the caller's."""
        if op == TORCH:
            yield from self._of_torch(dtype)
        elif op == OUTSIDE:
            yield from self._outside(which)
        else:
            for case in _cases(op, which != "forward", 1 if self.device.type == "cpu" else 30):
                profile = PROFILES[op]
                args, _ = profile.drawn(case, RandomTensors(dtype, self.device))
                wanted = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad]
                cost = profile.cost(case, which != "backward", dtype.itemsize)
                yield cost, self._pass(which, partial(profile.op, *args), wanted), 1

    def _pass(self, which: PassName, run: Callable[[], torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
        if which != "backward":
            return self.seconds(run)
        out = run()
        return self.seconds(partial(torch.autograd.grad, out, wanted, torch.ones_like(out), retain_graph=True))

    def _outside(self, which: PassName) -> Iterator[Point]:
        """Time a model without blocks, in fp32: what it does is recorded."""
        loss = None if which == "forward" else LossConfig()
        model = AlphaFold(PROBED).to(self.device).train(loss is not None)
        model.noise.seed(0)
        Execution(Plan()).bind(model)
        for residues in LENGTHS:
            sizes = ExampleSizes(residues=residues, sequences=8, extra=8, templates=1)
            batch = random_example(PROBED, sizes, self.device)
            entries = record(Job(model=PROBED, sizes=sizes, loss=loss), Plan(), gpu=self.device.type == "cuda").last
            done = [e for e in entries if isinstance(e, Operation) and (e.phase == "backward") == (which == "backward")]
            cost, calls = summed(e.cost for e in done), sum(max(1, e.launches) for e in done)
            if loss is None:
                with torch.no_grad():
                    yield cost, self.seconds(partial(predict_example, model, batch, 0)), calls
                continue

            def forward(batch: Batch = batch, loss: LossConfig = loss) -> torch.Tensor:
                output = model(batch, 0)
                return total_loss(output, with_truth(batch, output.structure.final_atom37), loss)[0]

            wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
            backward = partial(torch.autograd.grad, forward(), wanted, retain_graph=True, allow_unused=True)
            yield cost, self.seconds(forward if which == "training" else backward), calls

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
        taken, busy = zip(*(self._once(run) for _ in range(RUNS)))
        self.variances.append(statistics.variance(busy) / max(statistics.mean(busy), 1e-9) ** 2)
        return statistics.median(taken)

    def _once(self, run: Callable[[], object]) -> tuple[float, float]:
        """Run it; return the seconds that this took, and those in which the device was busy with it."""
        self.others.add_(1)
        finish(self.device)
        start, busy = self.clock(), self.busy()
        run()
        finish(self.device)
        busy, taken = self.busy() - busy, self.clock() - start
        return taken, taken if self.device.type == "cuda" else busy

    @cached_property
    def others(self) -> torch.Tensor:
        """What fills the caches."""
        return torch.zeros(2**23 if self.device.type == "cpu" else 2**26, device=self.device)


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
        expected = np.array(astuple(usual)[:5])
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
