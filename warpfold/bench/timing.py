"""Time several ways to compute the same thing in turns, so that a slow minute of the machine affects all of them.

On CUDA: by events, with the L2 cache flushed before each pass and the device kept busy until the whole pass is queued,
so that only the device's own time counts.  On a CPU: by the process's clock.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from warpfold.errors import UserError

SETTLE = 2  # warm-up runs, which do not count
FLUSH = 2**28  # bytes; several times the largest L2
STEADY, CALIBRATIONS = 0.02, 50  # a clock is warm when two waits of some milliseconds differ by less; tried so often
LONGEST = 5.0  # seconds for which a device is kept busy while a step is queued


@dataclass(frozen=True)
class Subject:
    """One way to compute something."""

    name: str
    forward: Callable[[], Tensor | tuple[Tensor, ...]]
    wanted: Sequence[Tensor]  # the tensors whose gradients the backward pass computes
    grad: Tensor | tuple[Tensor, ...]  # the gradient of what `forward` returns


@dataclass
class Times:
    """Seconds of each run of one way after the warm-up, and its peak bytes above what was allocated before."""

    forward: list[float] = field(default_factory=list)  # without gradient
    training: list[float] = field(default_factory=list)  # a forward pass that saves tensors for its gradient
    backward: list[float] = field(default_factory=list)
    forward_peak: int | None = None  # None: not measured
    backward_peak: int | None = None  # of forward and backward together
    late: int = 0  # runs in which a device began before all was queued, so that the host's time may be in the figure
    failed: str = ""

    def median(self, which: str) -> float | None:
        """Return the median of "forward", "training" or "backward"; None if it never ran."""
        seconds: list[float] = getattr(self, which)
        return statistics.median(seconds) if seconds else None


def measure(
    subjects: Sequence[Subject], device: torch.device, repeats: int, budget: float = 20.0, peaks: bool = True
) -> dict[str, Times]:
    """Time each way `repeats` times, in turns; fewer if its times would add up to more than `budget` seconds.

    A way that runs out of memory, or that fails in another's code, is left out, with the reason in `failed`.
    """
    timer: CpuTimer = CudaTimer(device) if device.type == "cuda" else CpuTimer()
    found = {s.name: Times() for s in subjects}
    left = {}
    for subject in subjects:
        times = found[subject.name]
        try:
            for _ in range(SETTLE):
                start = time.perf_counter()
                timer.once(subject, Times())
                took = time.perf_counter() - start
                if took > budget / 2:
                    break
            if peaks:
                timer.peaks(subject, times)
            left[subject.name] = max(1, min(repeats, int(budget / max(took, 1e-9))))
        except (RuntimeError, ValueError, TypeError) as error:  # torch's own out-of-memory is a RuntimeError
            times.failed = _reason(error)
    for turn in range(repeats):
        for subject in subjects:
            if turn < left.get(subject.name, 0):
                timer.once(subject, found[subject.name])
    return found


def _reason(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory"
    return f"failed: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


class CpuTimer:
    """Time by the process's clock."""

    def once(self, subject: Subject, times: Times) -> None:
        """Time one forward pass without gradient, then one with it and its backward pass."""
        start = time.perf_counter()
        with torch.no_grad():
            subject.forward()
        times.forward.append(time.perf_counter() - start)
        start = time.perf_counter()
        out = subject.forward()
        middle = time.perf_counter()
        torch.autograd.grad(out, subject.wanted, subject.grad)
        times.training.append(middle - start)
        times.backward.append(time.perf_counter() - middle)

    def peaks(self, subject: Subject, times: Times) -> None:
        """Measure the memory that the passes take above what was allocated before."""
        with torch.no_grad():
            times.forward_peak = self.peak(subject.forward)
        times.backward_peak = self.peak(lambda: torch.autograd.grad(subject.forward(), subject.wanted, subject.grad))

    def peak(self, run: Callable[[], object]) -> int:
        """Return the peak of what torch's CPU allocator held while `run` ran, above what it held before."""
        with without_stderr(), torch.autograd.profiler.profile(profile_memory=True) as profile:
            run()
        results = profile.kineto_results
        held = peak = 0
        for event in sorted(results.events() if results else (), key=lambda e: e.start_ns()):
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        return peak


class CudaTimer(CpuTimer):
    """Time by the device's clock, and measure memory as torch's allocator counts it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cache = torch.empty(FLUSH, dtype=torch.int8, device=device)
        self.cycles_per_second = self._calibrated()
        self.queueing: dict[str, float] = {}  # seconds that it last took to queue a way's passes

    def _calibrated(self, cycles: int = 10_000_000) -> float:
        """Return how many cycles the device waits in a second: measured until it no longer changes.

        The first waits are those of a cold device, whose clock is still rising.
        """
        rates: list[float] = []
        while len(rates) < 3 or (abs(rates[-1] / rates[-2] - 1) > STEADY and len(rates) < CALIBRATIONS):
            start = self._mark()
            torch.cuda._sleep(cycles)
            end = self._mark()
            torch.cuda.synchronize(self.device)
            rates.append(cycles / (start.elapsed_time(end) / 1e3))
        return rates[-1]

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _ready(self, subject: Subject) -> None:
        """Flush the cache, and keep the device busy for twice the time that it last took to queue what follows."""
        self.cache.zero_()
        wait = min(2 * self.queueing.get(subject.name, 2e-3), 0.05)
        torch.cuda._sleep(int(self.cycles_per_second * wait))

    def once(self, subject: Subject, times: Times) -> None:
        """Time by events what `CpuTimer.once` times."""
        self._ready(subject)
        with torch.no_grad():
            marks = [self._mark()]
            subject.forward()
            marks.append(self._mark())
        late = marks[0].query()
        torch.cuda.synchronize(self.device)
        times.forward.append(marks[0].elapsed_time(marks[1]) / 1e3)
        self._ready(subject)
        began = time.perf_counter()
        marks = [self._mark()]
        out = subject.forward()
        marks.append(self._mark())
        torch.autograd.grad(out, subject.wanted, subject.grad)
        marks.append(self._mark())
        self.queueing[subject.name] = time.perf_counter() - began
        times.late += late or marks[0].query()
        torch.cuda.synchronize(self.device)
        times.training.append(marks[0].elapsed_time(marks[1]) / 1e3)
        times.backward.append(marks[1].elapsed_time(marks[2]) / 1e3)

    def peak(self, run: Callable[[], object]) -> int:
        """Return the peak of the device's memory while `run` ran, above what was allocated before."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before


@dataclass
class WallTimes:
    """Seconds of each run of a way: until its result was there, until all was queued, and of the device alone."""

    wall: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)  # on a CPU: none, for there is nothing to queue
    device: list[float] = field(default_factory=list)
    peak: int = 0  # on CUDA, bytes above what was allocated before, at most, in the runs that warm up: a graph has its
    # memory from when it is recorded, and its replays allocate nothing
    failed: str = ""

    def median(self, which: str) -> float | None:
        """Return the median of "wall", "host" or "device"; None if it was not measured."""
        seconds: list[float] = getattr(self, which)
        return statistics.median(seconds) if seconds else None


def wall_times(
    runs: Mapping[str, Callable[[], object]],
    device: torch.device,
    repeats: int,
    budget: float = 20.0,
    prepare: Callable[[str], object] = lambda name: None,
) -> dict[str, WallTimes]:
    """Time each of some runs by the process's clock, in turns, from a device with nothing to do to the end of its work;
    and on CUDA once more each time by events, with the device kept busy until all is queued.

    prepare: is called with the name before each run, and is not timed.  A run that fails is left out, as in `measure`.
    """
    found = {name: WallTimes() for name in runs}
    left: dict[str, int] = {}
    cuda = device.type == "cuda"
    for name, run in runs.items():
        before = torch.cuda.memory_allocated(device) if cuda else 0
        if cuda:
            torch.cuda.empty_cache()  # the last way's, which a graph of this one could not use
            torch.cuda.reset_peak_memory_stats(device)
        try:
            for _ in range(SETTLE):
                prepare(name)
                took = _walled(run, device)[0]
                if took > budget / 4 and not cuda:  # a GPU's first run compiles, and the second may record a graph
                    break
            left[name] = max(1, min(repeats, int(budget / max(took, 1e-9))))
        except (RuntimeError, ValueError, TypeError, UserError) as error:
            found[name].failed = _reason(error)
        found[name].peak = torch.cuda.max_memory_allocated(device) - before if cuda else 0
    for turn in range(repeats):
        for name, run in runs.items():
            if turn < left.get(name, 0):
                prepare(name)
                wall, host = _walled(run, device)
                found[name].wall.append(wall)
                if cuda:
                    found[name].host.append(host)
                    prepare(name)
                    found[name].device.append(_kept_busy(run, device, host))
    return found


def _walled(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return the seconds until the result was there, and until all was queued."""
    _finish(device)
    start = time.perf_counter()
    run()
    queued = time.perf_counter()
    _finish(device)
    return time.perf_counter() - start, queued - start


def _kept_busy(run: Callable[[], object], device: torch.device, queueing: float) -> float:
    """Return the seconds by events of a run that the device began when all was queued, as far as the run lets it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rate = CudaTimer(device).cycles_per_second
    torch.cuda._sleep(int(rate * min(2 * queueing, LONGEST)))
    begin.record()
    run()
    end.record()
    _finish(device)
    return begin.elapsed_time(end) / 1e3


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak(run: Callable[[], object], device: torch.device) -> int:
    """Return the peak of a device's memory while `run` ran, above what was allocated before, in bytes."""
    timer: CpuTimer = CudaTimer(device) if device.type == "cuda" else CpuTimer()
    return timer.peak(run)


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


@contextmanager
def without_stderr() -> Iterator[None]:
    """Suppress the lines that torch 2.13's profiler writes to file descriptor 2: what it does, and what it missed."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
