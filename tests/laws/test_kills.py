"""Kill and resume: every command that continues, stopped at any moment, ends with the files of an undisturbed run.

Python's audit events report the changes of a folder: files opened for writing, and files and folders that are made,
renamed and removed. The tests stop a run before changes that they count, so a failure repeats.
benchmarks/reliability/kills.py kills the same commands at random times, and trainings on several ranks, too.
"""

import os
import random
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.continued import SCENARIOS, Compared, Scenario, be_warpfold, differing, import_all, write_inputs
from tests.data.pack.killers import Here
from tests.ranks import descendants, forget_fork_server, forked
from tests.training.runs import equal_tensors, make_store, rows, tiny_run
from warpfold.cli.common import CONTINUE
from warpfold.data.pack import jobs as pack_jobs
from warpfold.data.store.store import Store
from warpfold.training.train import train

pytestmark = pytest.mark.usefixtures("one_thread")

MOVES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate")
# Commands of which several may run in a folder. Others refuse the second.
TOLERANT = ("search", "relax")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def on_changes(root: Path, do: Callable[[int], None]) -> None:
    """Call a function before each change below a folder, with the number of earlier changes, in this process."""
    counter = count()

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in MOVES and (event != "open" or not arguments[2] & WRITES):
            return
        path = arguments[0]
        if isinstance(path, str | os.PathLike) and os.path.abspath(os.fspath(path)).startswith(f"{root}/"):
            do(next(counter))

    sys.addaudithook(heard)


@dataclass(frozen=True)
class Run:
    """A command in a folder of its own, which has the subfolder `out`."""

    scenario: Scenario
    inputs: Path
    folder: Path

    def start(self, signals: Mapping[int, int] | None = None) -> int:
        """Start the command in a fork and return its process.

        signals: those that the process sends to itself, by the numbers of the changes before which it sends them.
        """
        if child := os.fork():
            return child
        forget_fork_server()
        # After a kill, `pack` repeats some jobs in a process of their own, which takes seconds to start.
        pack_jobs.IsolatedProcess = Here  # type: ignore[assignment, misc]
        self.scenario.patch()
        os.chdir(self.folder)
        counted = os.open(self.folder / "changes", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

        def changing(number: int) -> None:
            os.write(counted, b"1")
            if signals is not None and signals.get(number) == signal.SIGSTOP:
                # Unlike `os.kill`, this stops the process before this thread goes on to the next change.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            elif signals is not None and number in signals:
                os.kill(os.getpid(), signals[number])

        on_changes(self.folder / "out", changing)
        be_warpfold(self.scenario.arguments(self.inputs, Path("out")), self.folder / "said.txt", {"COLUMNS": "200"})

    @property
    def said(self) -> str:
        """Return stdout and stderr of all runs in the folder."""
        return (self.folder / "said.txt").read_text()

    @property
    def changes(self) -> int:
        """Count the changes that the last run in the folder began."""
        return (self.folder / "changes").stat().st_size

    def stopped(self, moment: int, number: int = signal.SIGKILL) -> int:
        """Run until a signal arrives before a change, and return the exit code."""
        return wait(self.start({moment: number}))

    def finish(self) -> Compared:
        """Run to the end and return the output."""
        code = wait(self.start())
        assert (code, "Traceback" in self.said) == (0, False), self.said
        return self.scenario.compared(self.folder / "out")

    def tear_logs(self) -> None:
        """Add half of its last line to the newest file of each log."""
        for pattern in self.scenario.logs:
            path = max((self.folder / "out").glob(pattern), key=lambda path: path.stat().st_mtime_ns)
            line = path.read_bytes().splitlines()[-1]
            with open(path, "ab") as file:
                file.write(line[: len(line) // 2])


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@dataclass(frozen=True)
class Law:
    """Runs of a scenario.  whole: the output of an undisturbed run.  changes: the number of its changes."""

    scenario: Scenario
    inputs: Path
    folder: Path
    whole: Compared
    changes: int

    def run(self, name: str) -> Run:
        """Make a folder for a run."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / name).mkdir(parents=True)
        self.scenario.before(self.inputs, self.folder / name / "out")
        return Run(self.scenario, self.inputs, self.folder / name)

    def check(self, run: Run) -> None:
        """Finish a run and compare."""
        lines = differing(run.finish(), self.whole)
        assert not lines, "\n".join(lines)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("kills") / "inputs")


@pytest.fixture(scope="module", params=SCENARIOS, ids=lambda scenario: scenario.name)
def law(request: pytest.FixtureRequest, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Law]:
    folder, scenario = tmp_path_factory.mktemp("law"), request.param
    run = Law(scenario, inputs, folder, {}, 0).run("whole")
    whole = run.finish()
    import_all(run.folder / "said.txt")
    yield Law(scenario, inputs, folder, whole, run.changes)
    shutil.rmtree(folder)


def test_every_command_that_continues_has_a_scenario() -> None:
    assert {scenario.command for scenario in SCENARIOS} == CONTINUE


def test_stopped_in_any_way_it_continues_to_the_files_of_an_undisturbed_run(law: Law) -> None:
    """The moments are drawn from the first quarter, since a run that continues has fewer changes left."""
    draw, run = random.Random(law.scenario.name), law.run("stopped")
    moments = [draw.randrange(1, law.changes // 4) for _ in range(3)]
    assert run.stopped(moments[0]) == -signal.SIGKILL
    assert run.stopped(moments[1], signal.SIGINT) == 130
    words = ["warpfold", *law.scenario.arguments(law.inputs, Path("out"))]
    assert f"the same command continues: {shlex.join(words)}\n" in run.said
    ends = {"train": {0}, "pack": {143}}.get(law.scenario.command, {130, 143, -signal.SIGTERM})
    assert run.stopped(moments[2], signal.SIGTERM) in ends
    law.check(run)


def test_a_second_one_at_the_same_time_changes_nothing_and_a_late_kill_repeats_little(law: Law) -> None:
    draw, run, half = random.Random(law.scenario.name), law.run("two"), law.changes // 2
    pause, end = draw.randrange(half // 2, half), draw.randrange(half, law.changes)
    first = run.start({pause: signal.SIGSTOP, end: signal.SIGKILL})
    assert os.WIFSTOPPED(os.waitpid(first, os.WUNTRACED)[1])
    second, deadline = run.start(), time.monotonic() + 10
    while (waits := os.waitid(os.P_PID, second, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.01)
    os.kill(first, signal.SIGCONT)
    code, said = wait(second), run.said
    if code == 2:
        assert re.search("^error: .* another (process|run) is ", said, re.M)
        assert wait(first) == -signal.SIGKILL
        run.tear_logs()
    else:
        # If the first was stopped while it held a lock for a moment, the second waited until the first was killed.
        assert code == 0
        assert waits or law.scenario.command in TOLERANT
        assert wait(first) in (0, -signal.SIGKILL)
    law.check(run)
    # A run that begins again would repeat all changes before the kill.
    assert end + run.changes - law.changes < half


@pytest.mark.parametrize("law", [one for one in SCENARIOS if one.name == "pack"], indirect=True, ids=["pack"])
def test_pack_killed_before_any_change_leaves_no_incomplete_store(law: Law) -> None:
    exists = set[bool]()
    for moment in range(law.changes):
        run = law.run("any")
        assert run.stopped(moment) == -signal.SIGKILL
        if (store := run.folder / "out/store").exists():
            assert list(Store(store).verify()) == []
        exists.add(store.exists())
        law.check(run)
        assert [path.name for path in (run.folder / "out").iterdir()] == ["store"]
        # The store is written again at once, and everything else is kept.
        assert moment + run.changes - law.changes < law.changes // 2
    assert exists == {False, True}


# Loader processes


def is_alive(entry: Path) -> bool:
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_after(process: BaseProcess, log: Path, rows_then: int, seconds: float) -> None:
    """Kill a training some seconds after its log has this many rows, and wait until its loader processes have ended."""
    while process.is_alive() and (not log.exists() or log.read_bytes().count(b"\n") < rows_then):
        time.sleep(0.01)
    time.sleep(seconds)
    helpers = descendants(process.pid or 0)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, "the run ended before it could be killed"
    end = time.monotonic() + 20
    while any(map(is_alive, helpers)):
        assert time.monotonic() < end, "a loader process outlived its run"
        time.sleep(0.01)


def test_examples_that_passed_each_other_pass_each_other_again(tmp_path: Path) -> None:
    """With a window, the order depends on time. A killed run repeats its own order, and another run can follow it.

    The number of loader processes may change between runs.
    """
    store, out, last = make_store(tmp_path / "store"), tmp_path / "killed", 12
    config = tiny_run(steps=last, digest_every=1)

    def run(workers: int, pipe: Connection) -> None:
        train(replace(config, train=replace(config.train, workers=workers, window=6)), Store(store.path), out)

    seen: dict[int, dict] = {}
    moments = [(random.randrange(2, 6), random.uniform(0, 0.5)), (random.randrange(7, 11), random.uniform(0, 0.5))]
    # Shown if the test fails
    print("killed after (rows, seconds):", moments)
    for workers, moment in enumerate(moments, 1):
        with forked([partial(run, workers)]) as [(process, _)]:
            kill_after(process, out / "metrics.jsonl", *moment)
        whole = (out / "metrics.jsonl").read_bytes().endswith(b"\n")
        for row in rows(out, whole=whole):
            if row["kind"] == "step":
                assert seen.setdefault(row["step"], row) == row
    with forked([partial(run, 2)]) as [(process, _)]:
        process.join()
        assert process.exitcode == 0
    done = [row for row in rows(out) if row["kind"] == "step"]
    assert [seen.get(row["step"], row) for row in done] == done

    order = [tuple(map(int, line.split())) for line in (out / "order.txt").read_text().splitlines()[1:]]
    used = {place: number for place, number, _ in order}
    # No example is lost or repeated.
    assert sorted(used.values()) == list(used) == list(range(2 * last))
    train(config, store, tmp_path / "follower", replay=out / "order.txt")
    followed = [[row for row in rows(folder) if row["kind"] != "session"] for folder in (tmp_path / "follower", out)]
    assert followed[0] == followed[1]
    for name in ("params.safetensors", f"checkpoints/step-{last:08d}/state.safetensors"):
        assert equal_tensors(tmp_path / "follower" / name, out / name), name
