"""The GPU timer with a stub for torch.cuda: queued work, its order, and the durations."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from warpfold.bench import timing
from warpfold.bench.timing import CudaTimer, Subject, Times, Whole, kernels_launched, measure
from warpfold.cost.memory import most_allocated


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the queue of a device that counts one millisecond per entry."""
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            self.at = len(done)
            done.append("mark")

        def query(self) -> bool:
            """Return whether the device has reached the event before the first wait."""
            return "late" in done

        def elapsed_time(self, end: "Event") -> float:
            return float(end.at - self.at)

    stand_ins = {
        "Event": Event,
        "_sleep": lambda cycles: done.append(f"busy {cycles}"),
        "current_stream": lambda device: None,
        "synchronize": lambda device: done.append("wait"),
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 100,
        "max_memory_allocated": lambda device: 164,
    }
    for name, function in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(timing, "FLUSH_BYTES", 16)
    return done


def subject(queue: list[str]) -> Subject:
    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            queue.append("forward")
            return x * 2

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            queue.extend(["backward", "backward"])
            return grad

    x = torch.ones(4, requires_grad=True)
    return Subject("it", lambda: Noted.apply(x), [x], torch.ones(4))


def test_only_what_runs_between_two_marks_counts(queue: list[str]) -> None:
    clock, times = CudaTimer(torch.device("cpu")), Times()
    # The first kernel's mark and wait
    assert clock.cycles_per_second == 10_000_000 / (2 / 1e3)
    queue.clear()
    clock.once(subject(queue), times)
    kinds = [entry.split()[0] for entry in queue]
    assert kinds == [
        *("busy", "mark", "forward", "mark", "wait"),
        *("busy", "mark", "forward", "mark", "backward", "backward", "mark", "wait"),
    ]
    assert times.seconds == {"forward": [2e-3], "training": [2e-3], "backward": [3e-3]}
    assert not times.wall


def test_a_clock_is_calibrated_when_it_is_warm(monkeypatch: pytest.MonkeyPatch, queue: list[str]) -> None:
    """The timer is calibrated on a warm device.

    A cold device waits longer for the same number of cycles. The calibration ends when the rate no longer changes.
    """
    milliseconds = iter([8.0, 4.0, 3.0, 2.5, 2.01, 2.0, 1.0])
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda self, end: next(milliseconds))
    assert CudaTimer(torch.device("cpu")).cycles_per_second == 10_000_000 / 2.0e-3


def test_a_run_that_the_device_began_too_early_is_counted(queue: list[str]) -> None:
    clock, times = CudaTimer(torch.device("cpu")), Times()
    one = subject(queue)
    clock.once(one, times)
    assert times.late == 0
    queue.append("late")
    clock.once(one, times)
    assert (times.late, times.repeats) == (1, 2)


def test_what_is_timed_as_a_whole_takes_turns_and_is_prepared_outside_of_the_clock() -> None:
    order: list[str] = []

    def wrong() -> None:
        raise RuntimeError("no such kernel\nmore")

    ways = [Whole(name, lambda name=name: order.append(name), lambda name=name: order.append(f"for {name}"))  # type: ignore[misc]
            for name in "ab"]  # fmt: skip
    found = measure([ways[0], Whole("wrong", wrong), ways[1]], torch.device("cpu"), repeats=2, peaks=False)
    assert order[-8:] == ["for a", "a", "for b", "b"] * 2
    assert found["a"].median_wall("whole") == (found["a"].median("whole"), None)
    assert found["wrong"].failed == "failed: RuntimeError: no such kernel"


def test_on_a_device_the_wall_is_timed_apart(queue: list[str]) -> None:
    clock, times = CudaTimer(torch.device("cpu"), walls=True), Times()
    queue.clear()
    clock.once(Whole("it", lambda: queue.append("run")), times)
    assert [entry.split()[0] for entry in queue] == ["busy", "mark", "run", "mark", "wait", "wait", "run", "wait"]
    assert times.wall["whole"][0] >= times.host["whole"][0] > 0


def test_a_device_on_which_nothing_was_seen_has_no_count(queue: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: nullcontext(SimpleNamespace(profiler=None)))
    with pytest.raises(RuntimeError, match="recorded no kernel"):
        kernels_launched(lambda: None, torch.device("cpu"))


@pytest.mark.parametrize(("seconds", "ours", "whole"), [(1e-3, 2e-3, 2e-3), (10.0, 0.05, 5.0)])
def test_the_device_is_kept_busy_longer_than_queueing_takes_but_not_for_ever(
    queue: list[str], seconds: float, ours: float, whole: float
) -> None:
    clock = CudaTimer(torch.device("cpu"))
    for one, run, expected in ((subject(queue), "forward", ours), (Whole("it", lambda: None), "whole", whole)):
        clock.queueing["it", run] = seconds
        queue.clear()
        clock.once(one, Times())
        assert int(queue[0].split()[1]) == int(clock.cycles_per_second * expected)


def test_a_gpus_peak_is_its_allocators(queue: list[str]) -> None:
    assert most_allocated(subject(queue).forward, "cuda") == 64


def test_each_part_is_timed_as_often(queue: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "CpuTimer", lambda: CudaTimer(torch.device("cpu")))
    found = measure([subject(queue)], torch.device("cpu"), repeats=4)["it"]
    assert {*found.peaks} == {"forward", "both"}
    assert {len(seconds) for seconds in found.seconds.values()} == {4}
