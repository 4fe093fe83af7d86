"""Test bulk work: order, shards, and workers that die."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.killers import DiesTwice
from warpfold import __version__, bulk
from warpfold.bulk import IsolatedProcess, JobPart, ProcessDied, ProcessPool, in_order, pool, run_program
from warpfold.errors import UserError

ROOT = Path(__file__).parents[1]


def square(number: int) -> int:
    return number * number


def die(number: int) -> int:
    os._exit(1)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_jobs(workers: int) -> None:
    with pool(workers) as executor:
        assert list(in_order(square, range(20), executor, ahead=3)) == [n * n for n in range(20)]


def test_a_program_ends_with_who_waits_for_it_and_so_does_what_it_has_started(tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            run_program(["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/child; wait"])
    finally:
        signal.signal(signal.SIGALRM, before)
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    until = time.monotonic() + 5
    while child.exists() and child.read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_dead_worker_is_the_users_to_know() -> None:
    with pytest.raises(UserError, match="worker processes died repeatedly"), pool(2) as executor:
        list(in_order(die, range(3), executor))


@pytest.mark.parametrize("ahead", [1, 3, 64])
def test_two_workers_each_killed_once_change_nothing(tmp_path: Path, ahead: int) -> None:
    left: list[int] = []

    def again(jobs: list[int]) -> list[int]:
        left.extend(jobs)
        return jobs

    with pool(2) as executor:
        dies = DiesTwice("tests.test_bulk", "square", tmp_path / "killed")
        assert list(in_order(dies, range(12), executor, ahead, again)) == [n * n for n in range(12)]
    assert dies.deaths == 2
    assert 2 <= len(left) <= 24


def test_later_jobs_get_new_processes_after_a_death() -> None:
    with pool(2) as executor:
        assert isinstance(executor, ProcessPool)
        with pytest.raises(BrokenProcessPool):
            executor.submit(die, 1).result()
        assert executor.submit(square, 3).result() == 9


def test_a_job_apart_that_kills_its_process_is_named_as_such() -> None:
    with IsolatedProcess() as apart:
        assert apart(square, 3) == 9
        with pytest.raises(ProcessDied):
            apart(die, 1)
        assert apart(square, 4) == 16


def test_processes_that_cannot_start_blame_no_job(tmp_path: Path) -> None:
    """A script without `if __name__ == "__main__"` runs again in each process that it starts."""
    script = "from warpfold.bulk import IsolatedProcess\nwith IsolatedProcess() as apart:\n    apart(len, [])\n"
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "UserError: worker processes cannot be started" in done.stderr


def linger(file: str) -> None:
    """Write the process id to a file, then sleep."""
    Path(file).write_text(str(os.getpid()))
    time.sleep(300)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in Linux's /proc")
def test_no_worker_outlives_a_run_that_was_killed(tmp_path: Path) -> None:
    run = subprocess.Popen([sys.executable, "-m", "tests.test_bulk", str(tmp_path / "pid")], cwd=ROOT)
    try:
        worker = wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        assert (Path("/proc") / worker).exists()
    finally:
        run.kill()
        run.wait()
    wait_for(lambda: not running(worker))


def running(process: str) -> bool:
    """Return whether a process runs.  A zombie, which waits for its parent, does not count."""
    try:
        return " Z " not in (Path("/proc") / process / "stat").read_text()
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Wait until `condition` returns a true value, and return that value."""
    end = time.monotonic() + seconds
    while not (said := condition()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)
    return said


class Cluster:
    """Stand-in for the Dask client that `_versions_on_dask` queries."""

    def __init__(self, scheduler: Any, worker: Any) -> None:
        self.scheduler, self.worker = scheduler, worker

    def run_on_scheduler(self, function: Callable[[], str]) -> Any:
        if isinstance(self.scheduler, Exception):
            raise self.scheduler
        return self.scheduler

    def run(self, function: Callable[[], str], on_error: str) -> dict[str, Any]:
        return {"tcp://worker:1": self.worker}


@pytest.mark.parametrize(
    ("scheduler", "worker", "found"),
    [
        (ImportError("No module named 'warpfold'"), __version__, "its scheduler has no WarpFold .*No module named"),
        (__version__, "0.0.1", r"tcp://worker:1 has no WarpFold .*\(0.0.1\); install it there"),
        (__version__, Exception("No module named 'warpfold'"), "tcp://worker:1 has no WarpFold .*No module named"),
    ],
)
def test_a_dask_cluster_with_another_warpfold(scheduler: Any, worker: Any, found: str) -> None:
    def check(cluster: Any) -> None:
        bulk._check_versions("address", bulk._versions_on_dask(cluster))

    check(Cluster(__version__, __version__))
    with pytest.raises(UserError, match=f"--cluster address: {found}"):
        check(Cluster(scheduler, worker))


def test_dask_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    said = re.escape("--cluster tcp://host:8786: needs Dask; pip install '.[cluster]'")
    with pytest.raises(UserError, match=said), pool(cluster="tcp://host:8786"):
        pass


@pytest.mark.parametrize("address", ["tcp//nonsense", "ray", "ray://host:10001"])
def test_an_address_at_which_no_dask_scheduler_answers(address: str) -> None:
    pytest.importorskip("distributed", reason="Dask is not installed")
    with (
        pytest.raises(UserError, match=f"^--cluster {address}: no Dask scheduler answers there"),
        pool(cluster=address),
    ):
        pass


@given(st.integers(0, 50), st.integers(1, 9))
def test_parts_are_a_partition(jobs: int, count: int) -> None:
    parts = [JobPart.parse(f"{number + 1}/{count}").of(range(jobs)) for number in range(count)]
    assert sorted(job for part in parts for job in part) == list(range(jobs))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


# A test kills this process.  Its argument is a file.
if __name__ == "__main__":
    with pool(2) as executor:
        list(in_order(linger, sys.argv[1:], executor))
