"""Time several ways to compute the same thing in turns, so that a slow minute of the machine affects all of them.

On CUDA: by events, with the L2 cache flushed before each pass and the device kept busy until the whole pass is queued,
so that only the device's own time counts; and once more by the process's clock where that is asked for.  On a CPU: by
the process's clock.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from warpfold.cost.memory import most_allocated
from warpfold.errors import UserError
from warpfold.ops.torch_internals import device_sleep

SETTLE = 2  # warm-up runs, which do not count
FLUSH = 2**28  # bytes; several times the largest L2
SLOWER = 0.97  # a ratio of speeds below it is slower: a clock cannot tell the numbers above it from 1
STEADY, CALIBRATIONS = 0.02, 50  # a clock is warm when two waits of some milliseconds differ by less; tried so often

Runs = Mapping[str, Mapping[str, Callable[[], object]]]  # by name, the parts of each run in their order


@dataclass(frozen=True)
class Subject:
    """One way to compute something that has a gradient: "forward" without it, "both" a forward and a backward pass."""

    name: str
    forward: Callable[[], Tensor | tuple[Tensor, ...]]
    wanted: Sequence[Tensor]  # the tensors whose gradients the backward pass computes
    grad: Tensor | tuple[Tensor, ...]  # the gradient of what `forward` returns
    longest: ClassVar[float] = 0.05  # seconds for which a device is kept busy, at most, while a run is queued

    @property
    def runs(self) -> Runs:
        """A forward pass alone; one that saves tensors for its gradient ("training"), and its backward pass."""
        held: list[Tensor | tuple[Tensor, ...]] = []

        def forward() -> None:
            with torch.no_grad():
                self.forward()

        def training() -> None:
            held.append(self.forward())

        def backward() -> None:
            torch.autograd.grad(held.pop(), self.wanted, self.grad)

        return {"forward": {"forward": forward}, "both": {"training": training, "backward": backward}}

    def prepare(self) -> None:
        """Do nothing: each run is like the others."""


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output: a tensor, or nested tuples, lists, mappings and dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for one in output:
            yield from tensors_of(one)
    elif isinstance(output, Mapping):
        yield from tensors_of(list(output.values()))
    elif is_dataclass(output):
        yield from tensors_of(list(vars(output).values()))


def subject(name: str, run: Callable[[], Any], wanted: Sequence[Tensor]) -> Subject:
    """Make a subject of any function.  wanted: tensors whose gradients are computed, where the outputs have some."""

    def forward() -> tuple[Tensor, ...]:
        every = not torch.is_grad_enabled()
        return tuple(x for x in tensors_of(run()) if x.is_floating_point() and (every or x.requires_grad))

    outputs = forward()
    found = torch.autograd.grad([x.sum() for x in outputs], wanted, allow_unused=True) if outputs else []
    used = [x for x, gradient in zip(wanted, found) if gradient is not None]
    return Subject(name, forward, used, tuple(torch.ones_like(x) for x in outputs))


@dataclass(frozen=True)
class Whole:
    """Something that is timed as a whole."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    longest: ClassVar[float] = 5.0

    @property
    def runs(self) -> Runs:
        return {"whole": {"whole": self.run}}


@dataclass
class Times:
    """Seconds of each run of one way after the warm-up, and its peak bytes above what was allocated before."""

    seconds: dict[str, list[float]] = field(default_factory=dict)  # of each part; of a GPU its own time
    wall: dict[str, list[float]] = field(default_factory=dict)  # of each run, until its result was there
    host: dict[str, list[float]] = field(default_factory=dict)  # until all was queued; a CPU queues nothing
    peaks: dict[str, int] = field(default_factory=dict)  # of each run
    warm_peak: int = 0  # of a GPU, in the warm-up: a graph allocates when it is recorded, and nothing when replayed
    late: int = 0  # runs in which a device began before all was queued, so that the host's time may be in the figure
    failed: str = ""

    @property
    def repeats(self) -> int:
        """How often it was timed."""
        return max(map(len, self.seconds.values()), default=0)

    def median(self, *parts: str) -> float | None:
        """The median seconds of a part, or of several together; None if one never ran."""
        found = [self.seconds.get(part) for part in parts]
        return sum(statistics.median(one) for one in found if one) if all(found) else None

    def median_wall(self, run: str) -> tuple[float | None, float | None]:
        """The median seconds of a run until its result was there, and until all was queued; None: not measured."""
        wall, host = self.wall.get(run), self.host.get(run)
        return statistics.median(wall) if wall else None, statistics.median(host) if host else None


def measure(
    subjects: Sequence[Subject | Whole],
    device: torch.device,
    repeats: int,
    budget: float = 20.0,
    peaks: bool = True,
    walls: bool = False,
) -> dict[str, Times]:
    """Time each way `repeats` times, in turns; fewer if its times would add up to more than `budget` seconds.

    walls: on a GPU time each run once more by the process's clock, from a device with nothing to do to its end.
    A way that runs out of memory, or that fails in another's code, is left out, with the reason in `failed`.
    """
    cuda = device.type == "cuda"
    timer: CpuTimer = CudaTimer(device, walls) if cuda else CpuTimer()
    found = {s.name: Times() for s in subjects}
    left = {}
    for subject in subjects:
        times, before = found[subject.name], 0
        if cuda:
            torch.cuda.empty_cache()  # the last way's, which a graph of this one could not use
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        try:
            for _ in range(SETTLE):
                start = time.perf_counter()
                timer.once(subject, Times())
                took = time.perf_counter() - start
                if took > budget / 2 and not cuda:  # a GPU's first run compiles, and the second may record a graph
                    break
            times.warm_peak = torch.cuda.max_memory_allocated(device) - before if cuda else 0
            for name, parts in subject.runs.items() if peaks else ():
                subject.prepare()
                times.peaks[name] = most_allocated(lambda: [run() for run in parts.values()], device)  # noqa: B023, called here
            left[subject.name] = max(1, int(min(repeats, budget / max(took, 1e-9))))
        except (RuntimeError, ValueError, TypeError, UserError) as error:  # torch's own out-of-memory is a RuntimeError
            text = str(error).strip()
            times.failed = f"failed: {type(error).__name__}: {text.splitlines()[0] if text else ''}"
            if isinstance(error, torch.OutOfMemoryError | MemoryError):
                times.failed = "out of memory"
    for turn in range(repeats):
        for subject in subjects:
            if turn < left.get(subject.name, 0):
                timer.once(subject, found[subject.name])
    return found


class CpuTimer:
    """Time by the process's clock."""

    def once(self, subject: Subject | Whole, times: Times) -> None:
        """Time each run of a way once."""
        for name, parts in subject.runs.items():
            subject.prepare()
            marks = [time.perf_counter()]
            for run in parts.values():
                run()
                marks.append(time.perf_counter())
            for part, begin, end in zip(parts, marks, marks[1:]):
                times.seconds.setdefault(part, []).append(end - begin)
            times.wall.setdefault(name, []).append(marks[-1] - marks[0])


class CudaTimer(CpuTimer):
    """Time by the device's clock."""

    def __init__(self, device: torch.device, walls: bool = False) -> None:
        self.device, self.walls = device, walls
        self.cache = torch.empty(FLUSH, dtype=torch.int8, device=device)
        self.cycles_per_second = self._calibrated()
        self.queueing: dict[tuple[str, str], float] = {}  # seconds that it last took to queue a way's run

    def _calibrated(self, cycles: int = 10_000_000) -> float:
        """Measure how many cycles the device waits in a second, until it no longer changes.

        The first waits are those of a cold device, whose clock is still rising.
        """
        rates: list[float] = []
        while len(rates) < 3 or (abs(rates[-1] / rates[-2] - 1) > STEADY and len(rates) < CALIBRATIONS):
            start = self._mark()
            device_sleep(cycles)
            end = self._mark()
            torch.cuda.synchronize(self.device)
            rates.append(cycles / (start.elapsed_time(end) / 1e3))
        return rates[-1]

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def once(self, subject: Subject | Whole, times: Times) -> None:
        """Time each run by events, the cache flushed, the device busy for twice the time that it took to queue it."""
        late = False
        for name, parts in subject.runs.items():
            subject.prepare()
            self.cache.zero_()
            wait = min(2 * self.queueing.get((subject.name, name), 2e-3), subject.longest)
            device_sleep(int(self.cycles_per_second * wait))
            began = time.perf_counter()
            marks = [self._mark()]
            for run in parts.values():
                run()
                marks.append(self._mark())
            self.queueing[subject.name, name] = time.perf_counter() - began
            late |= marks[0].query()
            torch.cuda.synchronize(self.device)
            for part, begin, end in zip(parts, marks, marks[1:]):
                times.seconds.setdefault(part, []).append(begin.elapsed_time(end) / 1e3)
            if self.walls:
                subject.prepare()
                torch.cuda.synchronize(self.device)
                began = time.perf_counter()
                for run in parts.values():
                    run()
                times.host.setdefault(name, []).append(time.perf_counter() - began)
                torch.cuda.synchronize(self.device)
                times.wall.setdefault(name, []).append(time.perf_counter() - began)
        times.late += late


def kernels_launched(run: Callable[[], object], device: torch.device) -> int:
    """Count the kernels, copies and fills that ran on a CUDA device, as the profiler saw them.

    Errors: RuntimeError where it saw none: then it saw nothing, for every run launches some.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize(device)
    # What the profiler recorded: torch's tree of events, of some ten thousand in a step, takes seconds to make.
    recorded = profile.profiler and profile.profiler.kineto_results
    events = recorded.events() if recorded else ()
    count = sum(event.device_type() == torch.autograd.DeviceType.CUDA for event in events)
    if count == 0:
        raise RuntimeError("the profiler saw no kernel on the device: launches cannot be counted here")
    return count
