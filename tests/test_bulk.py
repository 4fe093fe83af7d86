"""Bulk work: order, parts, and workers that die."""

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
from tests.ray_stand_in import StandIn
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
    with pytest.raises(UserError, match="worker processes died again and again"), pool(2) as executor:
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
    """Says which process it is, and stays."""
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
    """Whether a process is there, and not only its entry, which may wait for whoever started it."""
    try:
        return " Z " not in (Path("/proc") / process / "stat").read_text()
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """What `condition` says, once that is anything."""
    end = time.monotonic() + seconds
    while not (said := condition()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)
    return said


class Cluster:
    """What `_versions_on_dask` asks a client."""

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


@pytest.mark.parametrize(
    ("address", "missing", "said"),
    [
        ("tcp://host:8786", "distributed", "needs Dask; pip install 'warpfold[cluster]'"),
        ("ray", "ray", "needs Ray; pip install 'warpfold[ray]'"),
        ("ray://host:10001", "ray", "needs Ray; pip install 'warpfold[ray]'"),
    ],
)
def test_what_talks_to_a_cluster_is_not_installed(
    address: str, missing: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=re.escape(f"--cluster {address}: {said}")), pool(cluster=address):
        pass


@pytest.mark.parametrize(("address", "package"), [("tcp//nonsense", "distributed"), ("ray:nonsense", "ray")])
def test_a_cluster_that_is_not_there(address: str, package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    with pytest.raises(UserError, match=f"^--cluster {address}: no .* answers there"), pool(cluster=address):
        pass


# ---- Ray, by a stand-in: tests/test_bulk_commands.py has what needs Ray itself


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(monkeypatch, __version__)


def test_ray_does_the_jobs_and_leaves_the_session_as_it_was(ray: StandIn) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pool(cluster="ray") as executor:
        assert executor is not None
        assert executor.size == 3
        assert list(in_order(square, range(12), executor)) == [n * n for n in range(12)]
        assert signal.getsignal(signal.SIGTERM) == before
    assert ray.calls == ["init auto", "shutdown"]
    with pool(cluster="ray://host:10001"):
        pass
    assert ray.calls[2:] == ["init ray://host:10001", "shutdown"]
    ray.connected = True  # by who called us: it is theirs to end
    with pool(cluster="ray"):
        pass
    assert ray.calls[4:] == []


@pytest.mark.parametrize(("wanted", "there", "given"), [(True, 2, 1), (True, 0, 0), (False, 2, 0)])
def test_ray_gives_each_job_a_gpu_where_it_needs_one(ray: StandIn, wanted: bool, there: int, given: int) -> None:
    ray.resources["GPU"] = there
    with pool(cluster="ray", gpus=wanted) as executor:
        assert executor is not None
        assert executor.size == (2 if given else 3)
        assert list(in_order(square, [2], executor)) == [4]
    assert ray.options["num_gpus"] == given


def test_what_a_job_says_on_ray_is_what_it_says_here(ray: StandIn) -> None:
    """And Ray's own text, with the traceback of the worker, comes with it."""
    with pytest.raises(UserError, match=r"^--shard x: expected I/N") as raised, pool(cluster="ray") as executor:
        list(in_order(JobPart.parse, ["x"], executor))
    assert "traceback of the worker" in str(raised.value.__cause__)
    with pytest.raises(ZeroDivisionError), pool(cluster="ray") as executor:
        list(in_order(divide, [0], executor))
    assert ray.calls.count("shutdown") == 2


def divide(number: int) -> float:
    return 1 / number


def test_an_error_drops_the_jobs_of_ray_that_wait(ray: StandIn) -> None:
    def interrupted() -> None:
        with pool(cluster="ray") as executor:
            assert executor is not None
            executor.submit(StandIn.never)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert ray.calls == ["init auto", "cancel", "shutdown"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("WorkerCrashedError", "a job's workers died again and again (it died)"),
        ("OutOfMemoryError", "a job's workers died again and again (it died)"),
        ("RaySystemError", "Ray failed (it died)"),
    ],
)
def test_a_job_that_kills_its_workers_on_ray(ray: StandIn, error: str, said: str) -> None:
    ray.fails_with = error
    with pytest.raises(UserError, match=re.escape(f"--cluster ray: {said}")), pool(cluster="ray") as executor:
        list(in_order(square, [1], executor))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("0.0.1", "node1 has no WarpFold .* \\(0.0.1\\); install it there"),
        (None, "node1 has no WarpFold .* \\(ModuleNotFoundError: No module named 'warpfold'\\); install it there"),
    ],
)
def test_a_ray_cluster_with_another_warpfold(ray: StandIn, found: str | None, said: str) -> None:
    ray.versions["node1"] = found
    with pytest.raises(UserError, match=f"^--cluster ray: {said}$"), pool(cluster="ray"):
        pass
    assert ray.calls == ["init auto", "shutdown"]


def test_a_ray_cluster_that_does_not_answer(ray: StandIn) -> None:
    ray.init_fails = ConnectionError("Could not find any running Ray instance.\nSecond line.")
    said = r"no Ray cluster answers there \(Could not find any running Ray instance.\)$"
    with pytest.raises(UserError, match=f"^--cluster ray: {said}"), pool(cluster="ray"):
        pass
    ray.init_fails = ConnectionError("Initialization failure:\nTraceback (most recent call last):\nit is full\n")
    with pytest.raises(UserError, match=r"\(it is full\)$"), pool(cluster="ray"):
        pass


@given(st.integers(0, 50), st.integers(1, 9))
def test_parts_are_a_partition(jobs: int, count: int) -> None:
    parts = [JobPart.parse(f"{number + 1}/{count}").of(range(jobs)) for number in range(count)]
    assert sorted(job for part in parts for job in part) == list(range(jobs))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("text", ["", "3", "0/2", "3/2", "a/b", "-1/2", "1/2/3"])
def test_what_is_no_part(text: str) -> None:
    with pytest.raises(UserError, match="--shard"):
        JobPart.parse(text)


if __name__ == "__main__":  # a run to be killed: FILE
    with pool(2) as executor:
        list(in_order(linger, sys.argv[1:], executor))
