"""Resuming: a run that is killed at any time and restarted with the same command equals an uninterrupted run."""

import random
import signal
import time
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.runs import equal_tensors, make_store, rows, tiny_run
from warpfold.data.store.store import Store
from warpfold.training.train import train

STEPS = 12


def begin(store: Path, out: Path, workers: int, window: int = 0) -> BaseProcess:
    """Start a run in a process that can be killed. It is forked, since importing torch takes longer than the run."""

    def run() -> None:
        server: Any = forkserver._forkserver  # type: ignore[attr-defined]
        # Forget the parent's fork server.
        server._forkserver_pid = server._forkserver_alive_fd = server._forkserver_address = None
        torch.set_num_threads(threads)
        train(tiny_run(steps=STEPS, workers=workers, window=window, digest_every=1), Store(store), out)

    threads = torch.get_num_threads()
    process = get_context("fork").Process(target=run)
    process.start()
    return process


def descendants(pid: int | str) -> list[Path]:
    """Return the /proc entries of all descendants of a process; empty without /proc."""
    listing = Path(f"/proc/{pid}/task/{pid}/children")
    own = listing.read_text().split() if listing.exists() else []
    return [Path("/proc") / child for child in own] + [entry for child in own for entry in descendants(child)]


def alive(entry: Path) -> bool:
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill(process: BaseProcess, log: Path, rows_then: int, seconds: float) -> None:
    """Kill a run by SIGKILL some seconds after its log has this many rows, and wait until its workers have ended."""
    while process.is_alive() and (not log.exists() or log.read_bytes().count(b"\n") < rows_then):
        time.sleep(0.01)
    time.sleep(seconds)
    helpers = descendants(process.pid or 0)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, "the run ended before it could be killed"
    for _ in range(300):
        if not any(alive(helper) for helper in helpers):
            return
        time.sleep(0.01)
    pytest.fail("a loader process outlived its run")


def finish(process: BaseProcess) -> None:
    process.join()
    assert process.exitcode == 0


def moments() -> list[tuple[int, float]]:
    """Draw two moments at which a run is killed, as a number of rows and seconds."""
    drawn = [(random.randrange(2, 6), random.uniform(0, 0.5)), (random.randrange(7, 11), random.uniform(0, 0.5))]
    # Shown if the test fails
    print("killed after (rows, seconds):", drawn)
    return drawn


def test_killed_at_random_moments_a_run_is_the_same_to_the_bit(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    train(tiny_run(steps=STEPS, digest_every=1), store, tmp_path / "unbroken")

    out = tmp_path / "killed"
    # The number of workers may change between runs.
    for workers, moment in enumerate(moments()):
        kill(begin(store.path, out, workers), out / "metrics.jsonl", *moment)
    finish(begin(store.path, out, workers=0))

    def results(folder: Path) -> list[dict]:
        return [row for row in rows(folder) if row["kind"] != "session"]

    # This includes digests of the state after each step.
    assert results(out) == results(tmp_path / "unbroken")
    for name in ("params.safetensors", f"checkpoints/step-{STEPS:08d}/state.safetensors"):
        assert equal_tensors(out / name, tmp_path / "unbroken" / name), name


def test_examples_that_passed_each_other_pass_each_other_again(tmp_path: Path) -> None:
    """With a window, the order depends on time. A killed run repeats its own order, and another run can follow it."""
    store = make_store(tmp_path / "store")
    out = tmp_path / "killed"
    seen: dict[int, dict] = {}
    for moment in moments():
        kill(begin(store.path, out, workers=2, window=6), out / "metrics.jsonl", *moment)
        whole = (out / "metrics.jsonl").read_bytes().endswith(b"\n")
        for row in rows(out, whole=whole):
            if row["kind"] == "step":
                assert seen.setdefault(row["step"], row) == row
    finish(begin(store.path, out, workers=2, window=6))
    done = [row for row in rows(out) if row["kind"] == "step"]
    assert [seen.get(row["step"], row) for row in done] == done

    order = [tuple(map(int, line.split())) for line in (out / "order.txt").read_text().splitlines()[1:]]
    used = {place: number for place, number, _ in order}
    # No example is lost or repeated.
    assert sorted(used.values()) == list(used) == list(range(2 * STEPS))
    train(tiny_run(steps=STEPS, digest_every=1), store, tmp_path / "follower", replay=out / "order.txt")
    followed = [[row for row in rows(folder) if row["kind"] != "session"] for folder in (tmp_path / "follower", out)]
    assert followed[0] == followed[1]
