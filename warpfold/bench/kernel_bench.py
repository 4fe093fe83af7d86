"""Try a kernel's candidates: find where the kernel is used, check that it is right, and time it.

Kernels are launched by their own launchers, and each is timed alone: the launches of a forward and a backward pass are
recorded as they run, then run again one by one.  A candidate whose results are not exact enough (check/checks.py) is
not timed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from warpfold.bench.timing import FLUSH, SETTLE
from warpfold.bulk import pool
from warpfold.check.cases import OPS, PROFILES, inputs, size_in_words
from warpfold.check.checks import DTYPES, run, truth
from warpfold.check.op_profile import OpCase
from warpfold.cost.observe import Operations
from warpfold.ops import dispatch
from warpfold.ops.triton.launch import KERNELS, KernelConfig, KernelLaunch, Key, forced, recorded
from warpfold.progress import Progress

REPEATS = 20
CHECKED = 2**26  # the most numbers in the largest tensor of a case that is checked, in fp64
BUSY = 1_000_000  # cycles, half a millisecond, for which the GPU is kept busy while calls are queued

Seconds = dict[KernelConfig, list[float]]  # of each repeat


@contextmanager
def launching() -> Iterator[list[KernelLaunch]]:
    """Note what registered operations on "meta" would launch within the context."""
    with dispatch.interpreting(), recorded() as launches, Operations(lambda *_: None, launchers=True):
        yield launches


@dataclass(frozen=True)
class Workload:
    """An operation at a size of the model, in a dtype."""

    op: str
    case: OpCase
    dtype: str

    def __str__(self) -> str:
        return f"{self.op}, {self.case.where}, {size_in_words(self.case)}, {self.dtype}"


@dataclass(frozen=True)
class TuningTask:
    """The candidates of a kernel that a workload launches with this key."""

    workload: Workload
    kernel: str
    key: Key

    @property
    def candidates(self) -> list[KernelConfig]:
        """The kernel's candidates in its order, each once."""
        return list(dict.fromkeys(KERNELS[self.kernel].candidates))

    def among(self, launches: Iterable[KernelLaunch]) -> list[KernelLaunch]:
        """Return the launches of this kernel with this key."""
        return [launch for launch in launches if (launch.kernel.name, launch.key) == (self.kernel, self.key)]


class Bench(Protocol):
    """The part of tuning that needs a device; tests replace it."""

    def time(self, task: TuningTask) -> tuple[Seconds, dict[KernelConfig, str]]:
        """Return the seconds of each candidate, and those that are out, with the reason."""


def launches_of(workload: Workload) -> list[KernelLaunch]:
    """Return the launches of a workload's forward and backward pass, on any machine: tensors have no memory."""
    given = inputs(workload.case, DTYPES[workload.dtype], "meta")
    with launching() as launches:
        run(OPS[workload.case.op].fast, given)
    return launches


def tuning_tasks(workloads: Iterable[Workload], quick: bool = False) -> list[TuningTask]:
    """Return every kernel that workloads launch, with its keys, those of one key behind one another.

    quick: of layers with the same sizes (a starting and an ending node) only the first; others of one key decide
    together, so that none inherits what was tuned on another's rows.
    """
    found: dict[tuple[str, Key], list[TuningTask]] = {}
    seen: set[Any] = set()
    for workload in workloads:
        case = workload.case
        sizes = (case.rows, case.length, case.keys, case.heads, case.width, case.channels, case.outputs, case.bias)
        for kernel, key in dict.fromkeys((launch.kernel.name, launch.key) for launch in launches_of(workload)):
            if not (quick and (kernel, key, workload.dtype, sizes) in seen):
                found.setdefault((kernel, key), []).append(TuningTask(workload, kernel, key))
            seen.add((kernel, key, workload.dtype, sizes))
    return [task for tasks in found.values() for task in tasks]


def compile_ahead(todo: Sequence[TuningTask], device: torch.device, workers: int, progress: Progress) -> None:
    """Fill Triton's cache with every candidate, by many processes.

    A candidate that does not compile is skipped: its trial will report the error.
    """
    if torch.version.hip is not None or workers <= 1:
        return
    major, minor = torch.cuda.get_device_capability(device)
    first = list(todo)
    with pool(workers) as executor:
        assert executor is not None
        for done, _ in enumerate(executor.map(_compile, first, [10 * major + minor] * len(first))):
            progress(done + 1, len(first), "compiling")


def _compile(task: TuningTask, arch: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import PTXASError
    from triton.compiler.errors import CompilationError

    from warpfold.ops.triton.compile import compiled

    launches_of(task.workload)  # loads, and so registers, the kernel
    # A check has fewer rows than the model: another number, which Triton may specialise the code for.
    places = dict.fromkeys((task.workload, replace(task.workload, case=with_room(task.workload.case))))
    for candidate in task.candidates:
        for place in places:
            with forced({task.kernel: candidate}):
                launches = task.among(launches_of(place))
            try:
                for launch in launches:
                    compiled(launch, GPUTarget("cuda", arch, 32))
            except (PTXASError, CompilationError):
                continue


class GpuBench:
    """A bench on a CUDA device."""

    def __init__(self, device: torch.device, repeats: int = REPEATS) -> None:
        self.device, self.repeats = device, repeats
        self.cache = torch.empty(FLUSH, dtype=torch.int8, device=device)
        self.workload: Workload | None = None

    def time(self, task: TuningTask) -> tuple[Seconds, dict[KernelConfig, str]]:
        """Check each candidate at a size that the definition has room for, and time it at the whole."""
        if task.workload != self.workload:
            self._prepare(task.workload)
        launches: dict[KernelConfig, list[KernelLaunch]] = {}
        out: dict[KernelConfig, str] = {}
        for candidate in task.candidates:
            with forced({task.kernel: candidate}):
                reason = self._reason_against()
                if reason:
                    out[candidate] = reason
                    continue
                with recorded(run=True) as made:
                    run(self.fast, self.whole)
            if of_task := task.among(made):
                launches[candidate] = of_task
            else:
                out[candidate] = "not launched with this key"
        return self._time(launches), out

    def _prepare(self, workload: Workload) -> None:
        """Draw inputs and compute the definition's results, for all kernels of a workload."""
        dtype, op = DTYPES[workload.dtype], OPS[workload.case.op]
        self.workload, self.fast = workload, op.fast
        self.whole = inputs(workload.case, dtype, self.device)
        self.checked = inputs(with_room(workload.case), dtype, self.device, masked=True)
        self.truth = truth(op.definition, self.checked.args, self.checked.grad, self.checked.names)

    def _reason_against(self) -> str:
        """Return why the candidate that is forced now is out; an empty string if it is right."""
        from triton.backends.nvidia.compiler import PTXASError
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources

        try:
            ours = run(self.fast, self.checked)
            torch.cuda.synchronize(self.device)
        except (OutOfResources, PTXASError, CompilationError) as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        red = [e.name for e in self.truth.errors(ours) if e.red]
        return f"not exact: {', '.join(red)}" if red else ""

    def _time(self, launches: Mapping[KernelConfig, Sequence[KernelLaunch]]) -> Seconds:
        """Time the candidates in turn, the cache flushed before each, the GPU busy until all is queued."""
        marks: dict[KernelConfig, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {c: [] for c in launches}
        with torch.cuda.device(self.device):
            for _ in range(SETTLE + self.repeats):
                for candidate, made in launches.items():
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    self.cache.zero_()
                    torch.cuda._sleep(BUSY)
                    begin.record()
                    for launch in made:
                        launch.run()
                    end.record()
                    marks[candidate].append((begin, end))
                torch.cuda.synchronize()
        return {c: [a.elapsed_time(b) / 1e3 for a, b in found[SETTLE:]] for c, found in marks.items()}


def with_room(case: OpCase) -> OpCase:
    """Return the case with no more rows than its definition in fp64 has room for."""
    return case.with_rows(case.rows * CHECKED // PROFILES[case.op].numbers(case))
