"""The law of resuming: a run killed at any moment, started again with the same command, is the run that was not."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from tests.run.runs import equal_tensors, make_store, rows, tiny_run
from warpfold.run.train import train

ROOT = Path(__file__).parents[2]
STEPS = 12


def begin(store: Path, out: Path, workers: int) -> subprocess.Popen:
    arguments = [store, out, STEPS, torch.get_num_threads(), workers]
    return subprocess.Popen([sys.executable, "-m", "tests.run.runs", *map(str, arguments)], cwd=ROOT)


def children(process: subprocess.Popen) -> list[Path]:
    """The entries in /proc of a process's children; none where there is no /proc."""
    listing = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [Path("/proc") / pid for pid in listing.read_text().split()] if listing.exists() else []


def alive(entry: Path) -> bool:
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_killed_at_random_moments_a_run_is_the_same_to_the_bit(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    train(tiny_run(steps=STEPS), store, tmp_path / "unbroken")

    out = tmp_path / "killed"
    log = out / "metrics.jsonl"
    moments = [(random.randrange(2, 6), random.uniform(0, 0.5)), (random.randrange(7, 11), random.uniform(0, 0.5))]
    print("killed after (rows, seconds):", moments)  # shown when the test fails
    for workers, (rows_then, seconds) in enumerate(moments):  # how examples are prepared may change on the way
        process = begin(store.path, out, workers)
        while process.poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < rows_then):
            time.sleep(0.01)
        time.sleep(seconds)
        helpers = children(process)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
        time.sleep(1)
        assert not any(alive(helper) for helper in helpers), "a loader process outlived its run"
    assert begin(store.path, out, workers=0).wait() == 0

    assert rows(out) == rows(tmp_path / "unbroken")
    for name in ("params.safetensors", f"checkpoints/step-{STEPS:08d}/state.safetensors"):
        assert equal_tensors(out / name, tmp_path / "unbroken" / name), name
