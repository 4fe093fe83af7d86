"""Time implementations of the same computation, interleaved, so that a slow machine affects all of them equally.

On CUDA, events measure the device's time. The L2 cache is flushed before each pass, and the device is kept busy until
the whole pass is queued. On request, the host's clock measures each pass once more. On a CPU, the host's clock is used.
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

# Warm-up runs, which do not count.
WARMUP_RUNS = 2
# Bytes that flush the cache, several times the largest L2.
FLUSH_BYTES = 2**28
# A relative speed below this value is reported as slower. Values closer to 1 are within the measurement error.
SLOWER = 0.97
# A device is warm if two waits of some milliseconds differ by less than this fraction. Limit of attempts.
STEADY, CALIBRATIONS, CALIBRATION_CYCLES = 0.02, 50, 10_000_000

# The parts of each run in order, by name.
Runs = Mapping[str, Mapping[str, Callable[[], object]]]


@dataclass(frozen=True)
class Subject:
    """An implementation with gradients. Its runs are "forward" without gradients, and "both" passes.

    wanted: tensors whose gradients the backward pass computes. grad: gradient of the result of `forward`.
    longest: most seconds for which a device is kept busy while a run is queued.
    """

    name: str
    forward: Callable[[], Tensor | tuple[Tensor, ...]]
    wanted: Sequence[Tensor]
    grad: Tensor | tuple[Tensor, ...]
    longest: ClassVar[float] = 0.05

    @property
    def runs(self) -> Runs:
        """A forward pass without gradients; a forward pass that saves tensors ("training") and its backward pass."""
        outputs: list[Tensor | tuple[Tensor, ...]] = []

        def forward() -> None:
            with torch.no_grad():
                self.forward()

        def training() -> None:
            outputs.append(self.forward())

        def backward() -> None:
            torch.autograd.grad(outputs.pop(), self.wanted, self.grad)

        return {"forward": {"forward": forward}, "both": {"training": training, "backward": backward}}

    def prepare(self) -> None:
        """Do nothing, because all runs are equal."""


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output: a tensor, or nested tuples, lists, mappings and dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for item in output:
            yield from tensors_of(item)
    elif isinstance(output, Mapping):
        yield from tensors_of(list(output.values()))
    elif is_dataclass(output):
        yield from tensors_of(list(vars(output).values()))


def subject(name: str, run: Callable[[], Any], wanted: Sequence[Tensor]) -> Subject:
    """Create a subject from any function.

    wanted: tensors whose gradients are computed if the outputs depend on them.
    """

    def forward() -> tuple[Tensor, ...]:
        takes_all = not torch.is_grad_enabled()
        return tuple(x for x in tensors_of(run()) if x.is_floating_point() and (takes_all or x.requires_grad))

    outputs = forward()
    gradients = torch.autograd.grad([x.sum() for x in outputs], wanted, allow_unused=True) if outputs else []
    used = [x for x, gradient in zip(wanted, gradients) if gradient is not None]
    return Subject(name, forward, used, tuple(torch.ones_like(x) for x in outputs))


@dataclass(frozen=True)
class Whole:
    """A function that is timed as a whole."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    longest: ClassVar[float] = 5.0

    @property
    def runs(self) -> Runs:
        return {"whole": {"whole": self.run}}


@dataclass
class Times:
    """Times of an implementation after the warm-up, and its peak memory above that before.

    seconds: of each part; on a GPU, the device's time. wall: of each run, until its result existed. host: of each run,
    until all work was queued; empty for a CPU. peaks: bytes of each run. warm_peak: bytes of a GPU during the warm-up,
    because a graph allocates when it is recorded and not when it is replayed. late: runs in which the device started
    before all work was queued, so that the host's time may be included. failed: reason, or "".
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)
    host: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    warm_peak: int = 0
    late: int = 0
    failed: str = ""

    @property
    def repeats(self) -> int:
        """Number of timed runs."""
        return max(map(len, self.seconds.values()), default=0)

    def median(self, *parts: str) -> float | None:
        """Compute the sum of the median seconds of one or several parts; None if a part never ran."""
        seconds = [self.seconds.get(part) for part in parts]
        return sum(statistics.median(values) for values in seconds if values) if all(seconds) else None

    def median_wall(self, run: str) -> tuple[float | None, float | None]:
        """Compute the median seconds of a run until its result existed, and until all work was queued; else None."""
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
    """Time each subject `repeats` times, interleaved; fewer times if they would take more than `budget` seconds.

    walls: on a GPU, time each run once more by the host's clock, from an idle device to its end.
    If a subject runs out of memory or fails in another package, the reason is in `failed`.
    """
    cuda = device.type == "cuda"
    timer: CpuTimer = CudaTimer(device, walls) if cuda else CpuTimer()
    results = {s.name: Times() for s in subjects}
    runs_left = {}
    for subject in subjects:
        times, before = results[subject.name], 0
        if cuda:
            # A graph of this subject could not use the cached memory of the previous one.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        try:
            for _ in range(WARMUP_RUNS):
                start = time.perf_counter()
                timer.once(subject, Times())
                took = time.perf_counter() - start
                # On a GPU both are needed: the first run compiles, and the second may record a graph.
                if took > budget / 2 and not cuda:
                    break
            times.warm_peak = torch.cuda.max_memory_allocated(device) - before if cuda else 0
            for name, parts in subject.runs.items() if peaks else ():
                subject.prepare()
                times.peaks[name] = most_allocated(lambda: [run() for run in parts.values()], device)  # noqa: B023, called here
            runs_left[subject.name] = max(1, int(min(repeats, budget / max(took, 1e-9))))
        except (RuntimeError, ValueError, TypeError, UserError) as error:
            # torch's out-of-memory error is a RuntimeError.
            text = str(error).strip()
            times.failed = f"failed: {type(error).__name__}: {text.splitlines()[0] if text else ''}"
            if isinstance(error, torch.OutOfMemoryError | MemoryError):
                times.failed = "out of memory"
    for number in range(repeats):
        for subject in subjects:
            if number < runs_left.get(subject.name, 0):
                timer.once(subject, results[subject.name])
    return results


class CpuTimer:
    """Time by the host's clock."""

    def once(self, subject: Subject | Whole, times: Times) -> None:
        """Time each run of a subject once."""
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
        self.cache = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        # Seconds of the last time in which a run was queued.
        self.queueing: dict[tuple[str, str], float] = {}
        # The clock of a cold device is still rising during the first waits, so the cycles per second are measured until
        # they are steady.
        rates: list[float] = []
        while len(rates) < 3 or (abs(rates[-1] / rates[-2] - 1) > STEADY and len(rates) < CALIBRATIONS):
            start = self._mark()
            device_sleep(CALIBRATION_CYCLES)
            end = self._mark()
            torch.cuda.synchronize(self.device)
            rates.append(CALIBRATION_CYCLES / (start.elapsed_time(end) / 1e3))
        self.cycles_per_second = rates[-1]

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def once(self, subject: Subject | Whole, times: Times) -> None:
        """Time each run by events with a flushed cache, while the device is busy for twice the time of queueing it."""
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
            # The device was late if it had reached the first mark before all work was queued.
            late |= marks[0].query()
            # The events' times exist only when the device has passed them.
            torch.cuda.synchronize(self.device)
            for part, begin, end in zip(parts, marks, marks[1:]):
                times.seconds.setdefault(part, []).append(begin.elapsed_time(end) / 1e3)
            if self.walls:
                subject.prepare()
                # The device must be idle at the start, and finished at the end.
                torch.cuda.synchronize(self.device)
                began = time.perf_counter()
                for run in parts.values():
                    run()
                times.host.setdefault(name, []).append(time.perf_counter() - began)
                torch.cuda.synchronize(self.device)
                times.wall.setdefault(name, []).append(time.perf_counter() - began)
        times.late += late


def kernels_launched(run: Callable[[], object], device: torch.device) -> int:
    """Count the kernels, copies and fills on a CUDA device by the profiler.

    Raises RuntimeError if there are none, because every run launches some.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize(device)
    # Use the recorded events directly: building torch's tree of events, about ten thousand in a step, takes seconds.
    recorded = profile.profiler and profile.profiler.kineto_results
    events = recorded.events() if recorded else ()
    count = sum(event.device_type() == torch.autograd.DeviceType.CUDA for event in events)
    if count == 0:
        raise RuntimeError("the profiler recorded no kernel on the device: launches cannot be counted here")
    return count
