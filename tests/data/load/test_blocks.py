"""Check the memory, messages and jobs of worker processes within one process, with a scripted worker."""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np
import pytest
import torch

from warpfold.data.load import workers as module
from warpfold.data.load.ahead import Ahead
from warpfold.data.load.blocks import BlockReader, BlockWriter, receive, send, view
from warpfold.data.load.workers import Failed, Made, Outcome, Workers
from warpfold.errors import StorageError, UserError


def arrays_of(size: int) -> dict[str, np.ndarray]:
    """Return arrays that take up `size` bytes together, a multiple of 64."""
    return {"x": np.arange(size, dtype=np.uint8)}


# Blocks


def test_arrays_are_written_at_multiples_of_64_bytes() -> None:
    arrays: dict[str, np.ndarray] = {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.array([True, False, True]),
        "empty": np.zeros((0, 5), np.int64),
        "c": np.arange(30, dtype=np.int16).reshape(2, 3, 5)[:, ::-1],
        "scalar": np.array(2.5),
    }
    writer, reader = BlockWriter(), BlockReader()
    written = writer.write(arrays)
    assert written.layout == [
        ("a", "<f4", (3, 4), 0), ("b", "|b1", (3,), 64), ("empty", "<i8", (0, 5), 128), ("c", "<i2", (2, 3, 5), 128),
        ("scalar", "<f8", (), 192),
    ]  # fmt: skip
    assert (written.size, written.block, written.capacity, written.gone) == (256, 0, 65536, [])
    whole = reader.read(written)
    assert whole.shape == (256,)
    buffer = torch.from_numpy(whole)
    for name, dtype, shape, offset in written.layout:
        tensor = view(buffer, dtype, shape, offset)
        assert tensor.shape == shape
        np.testing.assert_array_equal(tensor.numpy(), arrays[name])
    # The reader has closed the descriptor.
    assert written.descriptor is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(written.descriptor)


def test_a_block_is_used_again_when_its_last_view_is_gone() -> None:
    writer, reader = BlockWriter(), BlockReader()
    # Capacities are powers of two.
    first, second, third = (reader.read(writer.write(arrays_of(size))) for size in (64, 65536 + 64, 131072))
    other = writer.write(arrays_of(128))
    assert (other.block, other.capacity, other.gone) == (3, 65536, [])
    fourth = reader.read(other)
    assert reader.returned() == []
    part = second[10:20]
    del second, third
    assert reader.returned() == [2]
    assert reader.returned() == []
    writer.returned([2])
    # A block serves arrays of exactly its size.
    again = writer.write(arrays_of(131072))
    assert (again.block, again.capacity, again.descriptor) == (2, 131072, None)
    third = reader.read(again)
    np.testing.assert_array_equal(third, np.arange(131072, dtype=np.uint8))
    np.testing.assert_array_equal(part, np.arange(10, 20))
    del part, first
    assert sorted(reader.returned()) == [0, 1]
    writer.returned([1, 0])
    # The smallest block that is large enough is used, and never the one of a view.
    smallest = writer.write(arrays_of(64))
    assert (smallest.block, smallest.descriptor) == (0, None)
    assert writer.write(arrays_of(64)).block == 1
    # Free blocks that are too small are dropped.
    writer.returned([0, 1])
    large = writer.write(arrays_of(1 << 20))
    assert (large.block, large.capacity, sorted(large.gone)) == (4, 1 << 20, [0, 1])
    np.testing.assert_array_equal(reader.read(large), np.arange(1 << 20, dtype=np.uint8))
    last = writer.write(arrays_of(64))
    assert (last.block, last.gone) == (5, [])
    assert last.descriptor is not None
    os.close(last.descriptor)
    np.testing.assert_array_equal(fourth, np.arange(128))
    with pytest.raises(KeyError):
        reader.read(smallest)


# On macOS, the sender of a descriptor waits until the receiver has it.
needs_two_processes = pytest.mark.skipif(sys.platform == "darwin", reason="needs two processes on macOS")


@needs_two_processes
def test_a_message_takes_a_new_block_through_a_pipe() -> None:
    writer, reader = BlockWriter(), BlockReader()
    ours, theirs = Pipe()
    for step in range(3):
        written = writer.write({"x": np.full((2, 3), step, np.int32), "y": np.array([step])})
        send(theirs, written)
        message = json.loads(ours.recv_bytes())["written"]
        read = receive(ours, message)
        assert (read.descriptor is None) == (step > 0)
        assert read[:-1] == written[:-1]
        if written.descriptor is not None and read.descriptor != written.descriptor:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(written.descriptor)
        whole = reader.read(read)
        assert view(torch.from_numpy(whole), *read.layout[0][1:]).tolist() == [[step] * 3] * 2
        del whole
        writer.returned(reader.returned())
    ours.close()
    theirs.close()


# The worker's side


def answers_of(pipe: Connection) -> Iterator[Any]:
    """Yield the outcomes that the parent process receives."""
    reader = BlockReader()
    with contextlib.suppress(EOFError):
        while True:
            answer = json.loads(pipe.recv_bytes())
            if "written" in answer:
                written = receive(pipe, answer["written"])
                yield view(torch.from_numpy(reader.read(written).copy()), *written.layout[0][1:]).tolist()
            else:
                yield answer


@needs_two_processes
def test_a_worker_answers_every_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signals of a terminal are ignored, and the process ends with its parent."""
    handlers: dict[int, Any] = {}
    ended = list[bool]()
    monkeypatch.setattr(module.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(module, "end_with_parent", lambda: ended.append(True))

    def make(kind: str, value: int) -> dict[str, np.ndarray]:
        if kind == "refused":
            raise UserError("damaged")
        if kind == "starved":
            raise MemoryError
        if kind == "unreachable":
            raise StorageError("disk is gone")
        if kind == "failed":
            raise KeyError("bug")
        return {"x": np.array([value, 2 * value])}

    kinds = ["made", "refused", "made", "starved", "unreachable", "made", "failed"]
    ours, theirs = Pipe()
    for value, kind in enumerate(kinds):
        # The first block is free again before the last result.
        ours.send_bytes(json.dumps([[0] if value == 5 else [], [kind, value]]).encode())
    with socket.socket(fileno=os.dup(ours.fileno())) as end:
        end.shutdown(socket.SHUT_WR)
    module._work(None, theirs, make)
    theirs.close()
    # The answers are read when all are written, so the last result has replaced the first one.
    *found, failed = answers_of(ours)
    assert found == [
        {"ready": True}, [5, 10], {"refused": "damaged"}, [2, 4], {"refused": "too little memory"},
        {"unreachable": "disk is gone"}, [5, 10],
    ]  # fmt: skip
    assert list(failed) == ["failed"]
    assert failed["failed"].startswith("Traceback")
    assert failed["failed"].endswith("KeyError: 'bug'\n")
    assert handlers == {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN}
    assert ended == [True]
    # A worker whose parent has ended is silent.
    ours, theirs = Pipe()
    ours.close()
    module._work(None, theirs, make)
    theirs.close()


def test_a_worker_gets_the_variables_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPFOLD_TEST_VALUE", "one")
    function, arguments = module._Environment().__reduce__()
    monkeypatch.setenv("WARPFOLD_TEST_VALUE", "two")
    monkeypatch.setattr(module.os, "environ", variables := {"KEPT": "yes"})
    function(*arguments)
    assert variables["WARPFOLD_TEST_VALUE"] == "one"
    assert variables["KEPT"] == "yes"


# The pool


class ScriptedProcess:
    """A process of which the test is the other end. exitcode: set before it dies."""

    def __init__(self, pipe: Connection, number: int) -> None:
        self.pipe, self.pid, self.exitcode, self.killed, self.joined = pipe, number, cast(int | None, None), 0, 0
        self.writer = BlockWriter()

    def kill(self) -> None:
        self.killed += 1
        self.pipe.close()

    def join(self) -> None:
        self.joined += 1

    def die(self, code: int) -> None:
        self.exitcode = code
        self.pipe.close()

    def job(self) -> tuple[list[int], list[Any]]:
        """Return the next message: the blocks that are free again, and the arguments."""
        assert self.pipe.poll(20), "no job came"
        returned, job = json.loads(self.pipe.recv_bytes())
        return returned, job

    def answer(self, **answer: Any) -> None:
        self.pipe.send_bytes(json.dumps(answer).encode())

    def make(self, value: int) -> None:
        send(self.pipe, self.writer.write({"x": np.array([value])}))


class Pool:
    """A pool of scripted processes. processes: all that were started, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 1, **more: Any) -> None:
        self.processes: list[ScriptedProcess] = []
        self.closed: list[Connection] = []

        def start(_: Workers) -> Any:
            ours, theirs = Pipe()
            self.processes.append(ScriptedProcess(theirs, 100 + len(self.processes)))
            self.closed.append(ours)
            return module._Worker(cast(Any, self.processes[-1]), ours)

        monkeypatch.setattr(Workers, "_start", start)
        self.workers = Workers(arrays_of, count, **more)  # type: ignore[arg-type]

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait until the receiving thread has brought about a condition."""
        with self.workers.changed:
            assert self.workers.changed.wait_for(lambda: bool(condition()), 20), "it never came"

    def outcome(self, ticket: int) -> Outcome:
        self.wait(lambda: ticket in self.workers.outcomes)
        return self.workers.outcomes.pop(ticket)

    def value(self, ticket: int) -> int:
        made = self.outcome(ticket)
        assert isinstance(made, Made)
        assert made.layout == [("x", "<i8", (1,), 0)]
        return int(np.asarray(made.buffer)[:8].view(np.int64)[0])


def test_jobs_are_given_to_processes_that_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, 2)
    with pool.workers as workers:
        one, two = pool.processes
        assert workers.processes() == [100, 101]
        for ticket in range(4):
            workers.submit(ticket, ["entry", ticket])
        two.answer(ready=True)
        assert two.job() == ([], ["entry", 0])
        assert not one.pipe.poll(0)
        assert not two.pipe.poll(0)
        one.answer(ready=True)
        assert one.job() == ([], ["entry", 1])
        two.make(10)
        assert two.job()[1] == ["entry", 2]
        assert pool.value(0) == 10
        one.answer(refused="damaged")
        assert pool.outcome(1) == Failed("damaged")
        assert one.job()[1] == ["entry", 3]
        two.make(12)
        assert pool.value(2) == 12
        # Both results are unreferenced, so their memory is free.
        workers.submit(4, ["last"])
        returned, job = two.job()
        assert (sorted(returned), job) == ([0, 1], ["last"])
        assert not workers.outcomes
    for process in pool.processes:
        assert process.killed >= 1
        assert process.joined == 1
    assert all(pipe.closed for pipe in pool.closed)
    assert not workers._thread.is_alive()
    assert workers._woken.closed


def test_results_are_copied_to_the_buffers_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def buffer(size: int) -> np.ndarray:
        sizes.append(size)
        return np.zeros(size, np.uint8)

    pool = Pool(monkeypatch, buffer=buffer)
    with pool.workers as workers:
        (one,) = pool.processes
        one.answer(ready=True)
        for value in (3, 4):
            workers.submit(value, [])
            returned, _ = one.job()
            # The block is free as soon as it has been copied.
            assert returned == ([] if value == 3 else [0])
            one.make(value)
            assert pool.value(value) == value
    assert sizes == [64, 64]


def test_dropped_jobs_leave_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch)
    with pool.workers as workers:
        workers.drop()
        (one,) = pool.processes
        one.answer(ready=True)
        for ticket in range(3):
            workers.submit(ticket, [ticket])
        one.job()
        one.make(0)
        assert one.job()[1] == [1]
        pool.wait(lambda: 0 in workers.outcomes)
        workers.drop()
        assert not workers.outcomes
        workers.submit(7, [7])
        one.make(1)
        assert one.job()[1] == [7]
        one.make(7)
        assert pool.value(7) == 7
        assert not workers.outcomes


def test_a_process_that_dies_is_replaced_and_its_job_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, 2)
    with pool.workers as workers:
        for process in pool.processes:
            process.answer(ready=True)
        pool.wait(lambda: all(worker.ready for worker in workers._workers))
        reasons = {
            -signal.SIGKILL: "was killed by SIGKILL (too little memory?)",
            -signal.SIGSEGV: "was killed by SIGSEGV",
            3: "ended with exit code 3",
            0: "ended with exit code 0",
        }
        for ticket, (code, reason) in enumerate(reasons.items()):
            idle, dying = pool.processes[0], pool.processes[-1]
            workers.submit(10, ["other"])
            # One job is for each of the two processes.
            idle.job()
            workers.submit(ticket, ["entry"])
            dying.job()
            dying.die(code)
            assert pool.outcome(ticket) == Failed(f"the process that made it {reason}", killed=True)
            assert dying.joined == 1
            assert pool.closed[len(pool.processes) - 2].closed
            assert workers.processes() == [100, 102 + ticket]
            pool.processes[-1].answer(ready=True)
            idle.make(1)
            assert pool.value(10) == 1
            pool.wait(lambda: all(worker.ready for worker in workers._workers))


def fail(pool: Pool) -> Exception:
    """Return the error that waiting for an outcome raises."""

    def wait(once: bool) -> None:
        with pool.workers.changed:
            pool.workers.wait()
            while not once:
                pool.workers.wait()

    with pytest.raises((RuntimeError, UserError, StorageError)) as raised:
        wait(once=False)
    # Later calls raise it at once.
    with pytest.raises(type(raised.value)):
        wait(once=True)
    return raised.value


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"unreachable": "disk is gone"}, StorageError("disk is gone")),
        ({"failed": "Traceback"}, RuntimeError("a loader process failed:\nTraceback")),
    ],
)
def test_errors_of_a_process_are_raised_by_waiting(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, str], error: Exception
) -> None:
    pool = Pool(monkeypatch)
    with pool.workers as workers:
        workers.submit(0, [])
        pool.processes[0].answer(ready=True)
        pool.processes[0].job()
        pool.processes[0].answer(**answer)
        raised = fail(pool)
        assert (type(raised), str(raised)) == (type(error), str(error))


def test_processes_that_cannot_start_end_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them may die once at its start, if another one is ready then."""
    pool = Pool(monkeypatch, 2)
    with pool.workers:
        for _ in range(2):
            number = len(pool.processes)
            pool.processes[-1].die(-9)
            pool.wait(lambda number=number: len(pool.processes) > number)
        pool.processes[-1].answer(ready=True)
        pool.wait(lambda: pool.workers._workers[1].ready)
        pool.processes[0].die(-9)
        pool.wait(lambda: len(pool.processes) == 5)
        pool.processes[-1].die(-9)
        pool.wait(lambda: len(pool.processes) == 6)
        pool.processes[-1].die(-9)
        raised = fail(pool)
        text = "each loader process was killed by SIGKILL (too little memory?) when it started. Use fewer workers."
        assert (type(raised), str(raised)) == (UserError, text)
    pool = Pool(monkeypatch)
    with pool.workers:
        pool.processes[0].die(1)
        raised = fail(pool)
        assert type(raised) is RuntimeError
        assert str(raised).startswith("a loader process could not start because of the error that it has printed")


# Batches ahead


class Batch:
    """A planned batch."""

    def __init__(self, place: int, kind: str = "a", name: str = "") -> None:
        self.place, self.kind, self.job, self.name = place, kind, (0, [place, name]), name


class Finished:
    """Workers whose jobs finish when the test says so."""

    def __init__(self) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.jobs: list[tuple[int, Sequence[Any]]] = []
        self.changed = threading.Condition()
        self.waits: list[dict[int, Outcome]] = []

    def submit(self, ticket: int, job: Sequence[Any]) -> None:
        self.jobs.append((ticket, job))

    def wait(self) -> None:
        self.outcomes |= self.waits.pop(0)


def made(*places: int) -> dict[int, Outcome]:
    return {place: Made([], place) for place in places}


def refuse(planned: Batch, failed: Failed) -> Batch:
    raise AssertionError("nothing failed")


def test_batches_are_taken_in_order_or_within_the_window() -> None:
    for window, expected in ((0, [0, 1, 2, 3, 4, 5]), (2, [1, 2, 0, 3, 4, 5]), (1, [1, 0, 2, 3, 4, 5])):
        workers = Finished()
        ahead = Ahead[Batch](cast(Any, workers), refuse, window)
        for place in range(6):
            ahead.add(Batch(place, name=f"e{place}"))
        assert workers.jobs == [(place, (0, [place, f"e{place}"])) for place in range(6)]
        # Until 0 is made, only batches within the window may precede it.
        workers.outcomes |= made(1, 2, 3, 4, 5)
        workers.waits = [made(0)]
        taken: list[int] = []
        while (found := ahead.take(wait=False)) is not None:
            taken.append(found[0].place)
        assert len(ahead) == 6 - len(taken)
        while (found := ahead.take(wait=True)) is not None:
            assert found[1] == Made([], found[0].place)
            taken.append(found[0].place)
            assert [planned.place for planned in ahead] == sorted(set(range(6)) - set(taken))
        assert taken == expected
        assert not workers.outcomes
        assert not workers.waits
        assert len(ahead) == 0


def test_only_batches_of_one_kind_change_places() -> None:
    workers = Finished()
    ahead = Ahead[Batch](cast(Any, workers), refuse, 10)
    for place, kind in enumerate("abbaab"):
        ahead.add(Batch(place, kind))
    workers.outcomes |= made(2, 3, 4, 5)
    # The places are those of kinds a, b, b, a, a and b.
    taken = [cast(Any, ahead.take(wait=False))[0].place for _ in range(3)]
    assert taken == [3, 2, 5]
    assert cast(Any, ahead.take(wait=False))[0].place == 4
    assert ahead.take(wait=False) is None
    workers.waits = [made(1), made(0)]
    assert [cast(Any, ahead.take(wait=True))[0].place for _ in range(2)] == [0, 1]
    assert ahead.take(wait=True) is None


def test_without_workers_the_caller_takes_the_first_batch() -> None:
    ahead = Ahead[Batch](None, refuse, 3)
    for place in range(3):
        ahead.add(Batch(place))
    assert ahead.take(wait=True) is None
    assert [ahead.first().place for _ in range(2)] == [0, 1]
    assert [planned.place for planned in ahead] == [2]
    ahead.add(Batch(3))
    assert [ahead.first().place for _ in range(2)] == [2, 3]
    assert len(ahead) == 0


def test_a_batch_is_made_again_once_and_then_replaced() -> None:
    failures: list[tuple[str, Failed]] = []

    def substitute(planned: Batch, failed: Failed) -> Batch:
        failures.append((planned.name, failed))
        return Batch(planned.place, name=f"{planned.name}'")

    workers = Finished()
    ahead = Ahead[Batch](cast(Any, workers), substitute, 0)
    for place in range(2):
        ahead.add(Batch(place, name=f"e{place}"))
    workers.jobs.clear()
    killed = Failed("killed", killed=True)
    # Batch 0 dies three times and is replaced after the second time. Batch 1 is refused.
    for results, jobs in (
        ({0: killed, 1: Failed("damaged")}, [(0, "e0"), (1, "e1'")]),
        ({0: killed}, [(0, "e0'")]),
        ({0: killed}, [(0, "e0'")]),
        ({0: Failed("damaged")}, [(0, "e0''")]),
    ):
        workers.outcomes |= results
        assert ahead.take(wait=False) is None
        assert not workers.outcomes
        assert [(place, job[1][1]) for place, job in workers.jobs] == jobs
        workers.jobs.clear()
    workers.outcomes |= made(1)
    workers.waits = [made(0)]
    taken = [cast(Any, ahead.take(wait=True))[0].name for _ in range(2)]
    assert taken == ["e0''", "e1'"]
    assert failures == [
        ("e1", Failed("damaged")),
        ("e0", Failed("killed, twice", killed=True)),
        ("e0'", Failed("damaged")),
    ]
