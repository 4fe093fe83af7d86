"""How candidates for a kernel's launch are tried: where it is used, whether it is right, and how long it takes.

Kernels are launched by their own launchers, and each is timed alone: the calls of a forward and a backward pass are
noted as they run, then run again by themselves.  No candidate is timed whose results are not as exact as they have to
be (tune/checks.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from warpfold.bulk import pool
from warpfold.ops.triton.launch import KERNELS, Call, Key, Launch, forced, recorded
from warpfold.progress import Progress
from warpfold.tune.cases import OPS, OpCase, inputs
from warpfold.tune.checks import DTYPES, run, truth
from warpfold.tune.kernel_calls import launching
from warpfold.tune.timing import FLUSH, SETTLE

REPEATS = 20
CHECKED = 2**26  # logits, or numbers of the widest tensor, of a case that is checked: in fp64 there is room for it
BUSY = 1_000_000  # cycles, half a millisecond, for which the GPU is kept busy while calls are queued

Seconds = dict[Launch, list[float]]  # of each repeat


@dataclass(frozen=True)
class Place:
    """An operation at a size of the model, in a dtype."""

    op: str
    case: OpCase
    dtype: str

    def __str__(self) -> str:
        return f"{self.op}, {self.case.where}, {self.case.shape}, {self.dtype}"


@dataclass(frozen=True)
class Task:
    """The candidates of a kernel that a place launches with this key."""

    place: Place
    kernel: str
    key: Key

    @property
    def candidates(self) -> list[Launch]:
        """In the kernel's order, each once."""
        return list(dict.fromkeys(KERNELS[self.kernel].candidates))


class Bench(Protocol):
    """The device's side of tuning, which tests replace."""

    def time(self, task: Task) -> tuple[Seconds, dict[Launch, str]]:
        """Seconds of each candidate, and those that are out, with the reason."""


def noted(place: Place) -> list[Call]:
    """The kernel calls of a place's forward and backward pass, on any machine: tensors have no memory."""
    given = inputs(place.case, DTYPES[place.dtype], "meta")
    with launching() as calls:
        run(OPS[place.case.op].fast, given)
    return calls


def tasks(places: Iterable[Place], quick: bool = False) -> list[Task]:
    """Every kernel that places launch, with its keys; quick: each kernel with each key at one place alone."""
    found: list[Task] = []
    seen: set[tuple[str, Key]] = set()
    for place in places:
        for kernel, key in dict.fromkeys((call.kernel.name, call.key) for call in noted(place)):
            if not (quick and (kernel, key) in seen):
                found.append(Task(place, kernel, key))
            seen.add((kernel, key))
    return found


def compile_ahead(todo: Sequence[Task], device: torch.device, workers: int, progress: Progress | None = None) -> None:
    """Fill Triton's cache with every candidate, by many processes; what is not in it is compiled where it is tried.

    What cannot be compiled is let pass: its trial says so.
    """
    if torch.version.hip is not None or workers <= 1:
        return
    major, minor = torch.cuda.get_device_capability(device)
    first = list({(task.kernel, task.key, task.place.dtype): task for task in todo}.values())
    with pool(workers) as executor:
        assert executor is not None
        for done, _ in enumerate(executor.map(_compile, first, [10 * major + minor] * len(first))):
            if progress:
                progress(done + 1, len(first), "compiling")


def _compile(task: Task, arch: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import PTXASError
    from triton.compiler.errors import CompilationError

    from warpfold.ops.triton.compile import compiled

    noted(task.place)  # loads, and so registers, the kernel
    for candidate in task.candidates:
        with forced({task.kernel: candidate}):
            calls = [call for call in noted(task.place) if (call.kernel.name, call.key) == (task.kernel, task.key)]
        try:
            compiled(calls[0], GPUTarget("cuda", arch, 32))
        except (PTXASError, CompilationError):
            continue


class GpuBench:
    """A bench on a CUDA device."""

    def __init__(self, device: torch.device, repeats: int = REPEATS) -> None:
        self.device, self.repeats = device, repeats
        self.cache = torch.empty(FLUSH, dtype=torch.int8, device=device)
        self.place: Place | None = None

    def time(self, task: Task) -> tuple[Seconds, dict[Launch, str]]:
        """As `Bench.time`: checked at a size that the definition has room for, timed at the whole."""
        if task.place != self.place:
            self._prepare(task.place)
        calls: dict[Launch, list[Call]] = {}
        out: dict[Launch, str] = {}
        for candidate in task.candidates:
            with forced({task.kernel: candidate}):
                reason = self._wrong()
                if reason:
                    out[candidate] = reason
                    continue
                with recorded(run=True) as made:
                    run(self.way, self.whole)
            mine = [call for call in made if (call.kernel.name, call.key) == (task.kernel, task.key)]
            if mine:
                calls[candidate] = mine
            else:
                out[candidate] = "not launched with this key"
        return self._time(calls), out

    def _prepare(self, place: Place) -> None:
        """OpInputs, and what the definition makes of them, for all kernels of a place."""
        dtype, op = DTYPES[place.dtype], OPS[place.case.op]
        self.place, self.way = place, op.fast
        self.whole = inputs(place.case, dtype, self.device)
        self.small = inputs(smaller(place.case), dtype, self.device, masked=True)
        self.truth = truth(op.definition, self.small.args, self.small.grad, self.small.names)

    def _wrong(self) -> str:
        """Why the launch that is forced now is out; nothing if it is right."""
        from triton.backends.nvidia.compiler import PTXASError
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources

        try:
            ours = run(self.way, self.small)
            torch.cuda.synchronize(self.device)
        except (OutOfResources, PTXASError, CompilationError) as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        red = [e.name for e in self.truth.errors(ours) if e.red]
        return f"not exact: {', '.join(red)}" if red else ""

    def _time(self, calls: Mapping[Launch, Sequence[Call]]) -> Seconds:
        """In turn, the cache flushed before each, the GPU busy until all is queued."""
        marks: dict[Launch, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {c: [] for c in calls}
        with torch.cuda.device(self.device):
            for _ in range(SETTLE + self.repeats):
                for candidate, made in calls.items():
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    self.cache.zero_()
                    torch.cuda._sleep(BUSY)
                    begin.record()
                    for call in made:
                        call.run()
                    end.record()
                    marks[candidate].append((begin, end))
                torch.cuda.synchronize()
        return {c: [a.elapsed_time(b) / 1e3 for a, b in found[SETTLE:]] for c, found in marks.items()}


def smaller(case: OpCase) -> OpCase:
    """The same with no more rows than its definition in fp64 has room for."""
    numbers = case.logits or case.rows * case.length * max(case.channels, case.outputs)
    return case.with_rows(case.rows * CHECKED // numbers) if numbers > CHECKED else case
