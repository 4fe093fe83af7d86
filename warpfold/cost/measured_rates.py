"""Measure the rates of this device by operation, each in about a quarter of a second.

Each pass is timed at a few sizes, from narrow and short to the width of AlphaFold2 and long, and the coefficients of
its rate are fitted to these times.
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
from warpfold.cost.rates import CACHED_BYTES, HOST, TORCH, PassName, Rate, RateKey, Rates, finish
from warpfold.cost.record import record
from warpfold.cost.recorder import Operation
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.model.losses import LossConfig, total_loss
from warpfold.model.permutation import with_truth
from warpfold.model.structure import StructureConfig
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan

Clock = Callable[[], float]
# A cost, its measured seconds, and the number of calls that share it.
Point = tuple[Cost, float, float]


def measured(
    device: torch.device | str,
    dtype: torch.dtype,
    clock: Clock = time.perf_counter,
    tell: Callable[[str], None] = lambda what: None,
) -> Rates:
    """Return the rates of this device. Each is measured at its first use, and cached in this process.

    A prediction uses about a dozen rates, which take about 3.5 s of one core; training uses twice as many.
    dtype: of the trunk. clock: `time.process_time` excludes other processes on this CPU.
    tell: called with the name of each measurement before it starts.
    """
    device = torch.device(device)
    name = f"this {'CPU' if device.type == 'cpu' else torch.cuda.get_device_name(device)}"
    link = LINKS["gloo" if device.type == "cpu" else "NVLink 4"]
    ops = _measured_ops(device, dtype, clock, torch.get_num_threads())
    ops.tell = tell
    return Rates(name, "measured", device.type, {}, 0.0, link, HOST[device.type], ops=ops)


class _MeasuredOps(Mapping[RateKey, Rate]):
    """Rates of operations that are measured when they are first read."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self.device, self.clock, self.rates = device, clock, dict[RateKey, Rate]()
        self.tell: Callable[[str], None] = lambda what: None
        # Rates of torch's operations in isolated loops, by dtype.
        self.loops = dict[torch.dtype, Rate]()

    def __getitem__(self, key: RateKey) -> Rate:
        if key not in self.rates:
            op, pass_name, dtype = key
            if dtype not in self.loops:
                self.loops[dtype] = self._timed((TORCH, "forward", dtype), USUAL)
            loops = self.loops[dtype]
            if op == TORCH:
                # A torch call in a model takes ten times as long as in an isolated loop, because of views, Python and
                # autograd around it.
                self.rates[key] = replace(loops, call=self[OUTSIDE, pass_name, torch.float32].call)
            else:
                # The expected rate is that of torch's own operations, unless it is far below the usual one.
                pairs = zip(astuple(loops)[1:5], astuple(USUAL)[1:5])
                expected = Rate(USUAL.call, *(max(loop, usual / 10) for loop, usual in pairs))
                self.rates[key] = self._timed(key, expected)
        return self.rates[key]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, tuple) and key[0] in MEASURED

    def _timed(self, key: RateKey, usual: Rate) -> Rate:
        op, pass_name, dtype = key
        self.tell(f"how fast this device is: {op}, {pass_name}, {str(dtype).removeprefix('torch.')}")
        with torch.inference_mode(False), torch.set_grad_enabled(pass_name != "forward"):
            timer = _Timer(self.device, self.clock)
            return replace(fitted(list(timer.points(op, pass_name, dtype)), usual), spread=timer.spread)

    def __iter__(self) -> Iterator[RateKey]:
        return iter(self.rates)

    def __len__(self) -> int:
        return len(self.rates)


@cache
def _measured_ops(device: torch.device, dtype: torch.dtype, clock: Clock, threads: int) -> _MeasuredOps:
    """Return the rates that this process has measured with this number of threads."""
    return _MeasuredOps(device, clock)


NARROW = replace(ModelConfig(), c_m=32, c_z=32, c_e=16)
WIDE = ModelConfig()
# A model with everything that is outside of the trunk, and the name of this work in the rates of a device.
PROBED = replace(shortened(ModelConfig(), 0), structure=StructureConfig(layers=1))
OUTSIDE = "outside of the trunk"
PAIR = ("triangle ending", "triangle product", "triangle product, out", "pair transition")
MSA = ("msa row", "msa transition", "outer product")
EXTRA = ("extra msa row", "global column", "msa row bias", "template pair transition")
# Most floating point operations of a forward case; of a case with long rows.
SMALL, LONG = 1e8, 4e8
# Width, residues, sequences, the representative layers that are timed at this size, and the limit of operations.
SIZES = (
    (NARROW, 10, 4, PAIR + MSA, SMALL),
    (NARROW, 48, 16, (*PAIR, *EXTRA, "msa row"), SMALL),
    (WIDE, 16, 8, PAIR + EXTRA + MSA, SMALL),
    (WIDE, 64, 32, (*PAIR, *EXTRA, *MSA, "template pointwise"), SMALL),
    (WIDE, 192, 64, (*PAIR, "msa column", "extra msa row", "template triangle starting"), LONG),
)
# Most residues of a triangle product, which cannot be reduced to a few rows.
MAX_PRODUCT_RESIDUES = 64
# Layers of a size at which an operation is timed, and most bytes of a case.
LAYERS_PER_SIZE = 3
MAX_CASE_BYTES = 2**23
MEASURED = {*PROFILES, TORCH, OUTSIDE}
# Runs of each case after a warm-up run.
RUNS = 3
# Residues at which the model outside of the trunk is timed.
LENGTHS = (12, 64)


def _cases(op: str, training: bool, scale: float) -> Iterator[OpCase]:
    """Yield the cases at which an operation is timed. scale: throughput of the device relative to a CPU."""
    of_losses = op in ("aligned_errors", "overlaps")
    sizes = tuple((WIDE, n, 1, ("backbone", "side chains", "clashes"), SMALL) for n in (16, 64)) if of_losses else SIZES
    for model, residues, rows, shown, flops in sizes:
        data = DataSizes(crop=residues, max_msa=rows, max_extra=rows, max_templates=1)
        square = op == "triangle_multiplication"
        if square and residues > MAX_PRODUCT_RESIDUES * scale:
            continue
        layers = [case for case in of_settings(model, data) if case.op == op and case.where in shown]
        for case in layers[:: max(1, math.ceil(len(layers) / LAYERS_PER_SIZE))]:
            if not (square or of_losses):
                # Reduce the rows to the limits of operations and bytes.
                cost = PROFILES[op].cost(case, True, 4)
                share = min(flops * scale / cost.flops if cost.flops else 1.0, MAX_CASE_BYTES / cost.bytes)
                case = case.with_rows(max(1, int(case.rows * share)))
            yield case if training else replace(case, dropped=False, drawn=False)


@dataclass(frozen=True)
class _Timer:
    """Time passes of operations."""

    device: torch.device
    clock: Clock
    # CPU time, which excludes the time in which the process is descheduled.
    busy: Clock = time.process_time
    # Relative variances of repeated runs.
    variances: list[float] = field(default_factory=list)

    @property
    def spread(self) -> float:
        """Standard deviation of a run relative to its seconds, without the time of other processes on its core."""
        return math.sqrt(statistics.mean(self.variances))

    def points(self, op: str, which: PassName, dtype: torch.dtype) -> Iterator[Point]:
        """Time one pass of an operation at some sizes. The caller enables or disables gradients."""
        if op == TORCH:
            yield from self._of_torch(dtype)
        elif op == OUTSIDE:
            yield from self._outside(which)
        else:
            for case in _cases(op, which != "forward", 1 if self.device.type == "cpu" else 30):
                profile = PROFILES[op]
                args, _ = profile.drawn(case, RandomTensors(dtype, self.device))
                inputs = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad]
                cost = profile.cost(case, which != "backward", dtype.itemsize)
                yield cost, self._pass(which, partial(profile.op, *args), inputs), 1

    def _pass(self, which: PassName, run: Callable[[], torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
        if which != "backward":
            return self.seconds(run)
        out = run()
        return self.seconds(partial(torch.autograd.grad, out, wanted, torch.ones_like(out), retain_graph=True))

    def _outside(self, which: PassName) -> Iterator[Point]:
        """Time a model without blocks in fp32. Its cost is read from a record."""
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

            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            backward = partial(torch.autograd.grad, forward(), trained, retain_graph=True, allow_unused=True)
            yield cost, self.seconds(forward if which == "training" else backward), calls

    def _of_torch(self, dtype: torch.dtype) -> Iterator[Point]:
        """Time torch's own operations: additions, exponentials and matrix products."""
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
        """Measure the median of some runs after a warm-up run, each with cold caches.

        In a step, operations find cold caches, too. The median represents their average, whereas the minimum can be as
        low as half of it if ranks share cores.
        """
        self._once(run)
        durations, busy = zip(*(self._once(run) for _ in range(RUNS)))
        self.variances.append(statistics.variance(busy) / max(statistics.mean(busy), 1e-9) ** 2)
        return statistics.median(durations)

    def _once(self, run: Callable[[], object]) -> tuple[float, float]:
        """Run a function; returns its seconds, and the seconds for which the device was busy with it."""
        # Evict the operands from the caches.
        self.others.add_(1)
        finish(self.device)
        start, busy = self.clock(), self.busy()
        run()
        finish(self.device)
        busy, duration = self.busy() - busy, self.clock() - start
        return duration, duration if self.device.type == "cuda" else busy

    @cached_property
    def others(self) -> torch.Tensor:
        """A tensor that fills the caches."""
        return torch.zeros(2**23 if self.device.type == "cpu" else 2**26, device=self.device)


# The rate of a core of a few GHz, for coefficients that the points do not determine.
USUAL = Rate(call=5e-5, flop=2e-11, exp=1e-9, byte=1e-10, far=1e-10)
# Regularisation: the squared relative error that counts as much as a coefficient of twice its usual value.
REGULARISATION = 0.005


def summed(costs: Iterable[Cost]) -> Cost:
    """Add up costs."""
    all_costs = list(costs)
    return Cost(*(sum(getattr(cost, name) for cost in all_costs) for name in ("flops", "exps", "bytes")))


def fitted(points: Sequence[Point], usual: Rate | None = None) -> Rate:
    """Fit a rate with non-negative coefficients to points by least squares of the relative errors.

    usual: a rate to which coefficients are regularised that the points do not determine.
    """
    amounts = np.array(
        [[n, cost.flops, cost.exps, cost.bytes, max(0.0, cost.bytes - CACHED_BYTES * n)] for cost, _, n in points]
    )
    used = [i for i in range(5) if amounts[:, i].any()]
    equations, right = amounts / np.array([[seconds] for _, seconds, _ in points]), np.ones(len(points))
    if usual is not None:
        expected = np.array(astuple(usual)[:5])
        weight = math.sqrt(REGULARISATION)
        equations = np.vstack([equations, np.diag(weight / expected)[used]])
        right = np.append(right, np.full(len(used), weight))
    # The columns are scaled, because their units differ by many orders of magnitude.
    units = np.maximum(equations.max(0), 1e-300)
    best, least = np.zeros(5), math.inf
    # Solve for every subset of coefficients, with the others 0, and keep the best solution without negative ones.
    for count in range(1, len(used) + 1):
        for subset in map(list, combinations(used, count)):
            solution, *_ = np.linalg.lstsq(equations[:, subset] / units[subset], right, rcond=None)
            error = float(np.square(equations[:, subset] / units[subset] @ solution - right).sum())
            if (solution >= 0).all() and error < least:
                best, least = np.zeros(5), error
                best[subset] = solution / units[subset]
    return Rate(*best.tolist())
