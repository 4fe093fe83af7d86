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


def test_killed_at_random_moments_a_run_is_the_same_to_the_bit(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    train(tiny_run(steps=STEPS), store, tmp_path / "unbroken")

    out = tmp_path / "killed"
    run = [sys.executable, "-m", "tests.run.runs"]
    command = [*run, str(store.path), str(out), str(STEPS), str(torch.get_num_threads())]
    moments = [(random.randrange(2, 6), random.uniform(0, 0.5)), (random.randrange(7, 11), random.uniform(0, 0.5))]
    print("killed after (rows, seconds):", moments)  # shown when the test fails
    for lines, seconds in moments:
        process = subprocess.Popen(command, cwd=ROOT)
        log = out / "metrics.jsonl"
        while process.poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < lines):
            time.sleep(0.01)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    assert subprocess.run(command, cwd=ROOT).returncode == 0

    assert rows(out) == rows(tmp_path / "unbroken")
    for name in ("params.safetensors", f"checkpoints/step-{STEPS:08d}/state.safetensors"):
        assert equal_tensors(out / name, tmp_path / "unbroken" / name), name
