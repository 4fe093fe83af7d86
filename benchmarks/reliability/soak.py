"""Does anything grow?  A training of many rank-hours, and many predictions, watched from outside.

    python -m benchmarks.reliability soak train OUT [--ranks 4] [--rank-hours 6.5] [--figures F.json]
    python -m benchmarks.reliability soak predict OUT [--predictions 100000] [--figures F.json]

`train`: `warpfold train tiny` on generated proteins, `torchrun`, one thread and one loader process to a rank, until the
ranks' hours add up; then SIGTERM, as a batch system would.  `predict`: `warpfold predict` of random sequences of 8 to
16 residues, with a `tiny` that is narrower yet, all of whose settings are the defaults.  Every few seconds the private
memory, descriptors, threads and seconds of CPU of each process are noted in OUT/samples.jsonl.  A slope is the median
of the slopes between all pairs of samples (Theil-Sen); its interval, 95 %, is that of slopes of resampled blocks of
time.  The first 1,000 steps or predictions of each process are left out: caches and allocators fill, again after a
restart.  Interrupted, also by `kill -9`, what it watches ends with it; the same command continues, and the hours of all
beginnings count.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reliability.figures import keep
from warpfold.engine.checkpoint import AppendedFile

FILLS = 1000  # steps or predictions of a process in which caches and allocators fill, also after a restart
BLOCKS, DRAWS = 20, 400  # of time, and bootstrap samples of them
WINDOWS = 60  # of steps, in which their time is measured
FLAT = 0.01  # growth over the whole run, as a share of the median, that still counts as flat
TICKS = os.sysconf("SC_CLK_TCK")


def processes(pid: int) -> Iterator[int]:
    """Go through a process and all that it has started."""
    try:
        started = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    yield pid
    for child in started:
        yield from processes(int(child))


def measure(pid: int) -> dict[str, Any] | None:
    """Read what a process holds now, by /proc; None if it is gone."""
    folder = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        spent = (folder / "stat").read_text().rpartition(")")[2].split()
        environment = (folder / "environ").read_bytes().split(b"\0")
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        descriptors = len(list((folder / "fd").iterdir()))
    except (OSError, ValueError):
        return None
    if "RssAnon" not in status:  # it has just ended
        return None
    rank = next((word[5:].decode() for word in environment if word.startswith(b"RANK=")), "")
    return {
        "pid": pid,
        "rank": rank,
        "command": command[:80],
        "private_mib": int(status["RssAnon"].split()[0]) / 1024,
        "descriptors": descriptors,
        "threads": int(status["Threads"]),
        "cpu": (int(spent[11]) + int(spent[12])) / TICKS,
    }


def watch(command: Sequence[object], out: Path, count: Callable[[], int], ends: Callable[[float], bool]) -> int:
    """Run a command and note all its processes until it ends, or until `ends` says so of its seconds; return its code.

    count: steps or predictions that are done.  What it says goes to OUT/said.txt.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    end_with_us = partial(ctypes.CDLL(None).prctl, 1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    start, samples = time.monotonic(), AppendedFile(out / "samples.jsonl")
    with closing(samples), open(out / "said.txt", "a") as said:
        whole = list(map(str, command))
        process = subprocess.Popen(whole, env=environment, stdout=said, stderr=said, preexec_fn=end_with_us)
        while process.poll() is None:
            seconds, done = time.monotonic() - start, count()
            rows = [row for pid in processes(process.pid) if (row := measure(pid))]
            sample = {"time": time.time(), "seconds": seconds, "done": done, "processes": rows}
            samples.write(json.dumps(sample) + "\n")
            if ends(seconds):
                process.send_signal(signal.SIGTERM)
                process.wait(600)
                break
            time.sleep(min(5.0, 0.5 + seconds / 100))
    return process.returncode


class Lines:
    """Counts the lines of growing files, reading each byte once."""

    def __init__(self, *files: Callable[[], list[Path]] | Path, having: bytes = b"\n") -> None:
        self.files, self.having, self.seen, self.counts = files, having, defaultdict[Path, int](int), 0

    def __call__(self) -> int:
        for path in [one for file in self.files for one in ([file] if isinstance(file, Path) else file())]:
            if path.exists():
                with open(path, "rb") as file:
                    file.seek(self.seen[path])
                    text = file.read()
                text = text[: text.rfind(b"\n") + 1]
                self.seen[path] += len(text)
                self.counts += text.count(self.having)
        return self.counts


# What the samples say


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """Take the median of the slopes between all pairs of at most 500 points."""
    keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), 500)).astype(int))
    x, y = x[keep], y[keep]
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] - x[first]
    return float(np.median((y[second] - y[first])[apart > 0] / apart[apart > 0]))


def interval(x: np.ndarray, y: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Take the 2.5th and 97.5th percentile of slopes of blocks of time that are drawn again."""
    draw, blocks = np.random.default_rng(seed), np.array_split(np.arange(len(x)), BLOCKS)
    blocks = [block for block in blocks if len(block)]
    centres = np.array([x[block].mean() for block in blocks])
    values = np.array([np.median(y[block]) for block in blocks])
    found = []
    for _ in range(DRAWS):
        chosen = np.sort(draw.integers(len(blocks), size=len(blocks)))
        if len(set(chosen)) > 1:
            found.append(slope(centres[chosen], values[chosen]))
    low, high = np.percentile(found, (2.5, 97.5))
    return float(low), float(high)


def judge(x: Sequence[float], y: Sequence[float], whole: float, per: float) -> dict[str, Any]:
    """Say how a quantity changes: its slope for each `per` of x, the growth over `whole` of x, whether it is flat.

    Flat: the interval holds 0, or the growth that its far end stands for is at most `FLAT` of the median.
    """
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    middle, trend, (low, high) = float(np.median(ys)), slope(xs, ys), interval(xs, ys)
    growth = trend * whole / middle if middle else 0.0
    worst = max(abs(low), abs(high)) * whole / middle if middle else 0.0
    return {
        "median": round(middle, 4),
        "first": round(float(np.median(ys[: max(1, len(ys) // BLOCKS)])), 4),
        "last": round(float(np.median(ys[-max(1, len(ys) // BLOCKS) :])), 4),
        "slope": round(trend * per, 5),
        "interval": [round(low * per, 5), round(high * per, 5)],
        "growth_over_the_run": round(growth, 5),
        "flat": bool(low <= 0 <= high or worst <= FLAT),
    }


def read_samples(log: Path) -> list[dict[str, Any]]:
    """Read the whole lines of the samples."""
    return [json.loads(line) for line in log.read_text().split("\n")[:-1]]


def hours_of(log: Path) -> float:
    """Add up the hours of all beginnings: where the seconds fall, another one began."""
    seconds = [sample["seconds"] for sample in read_samples(log)] if log.exists() else []
    return sum(later - earlier for earlier, later in pairwise(seconds) if later > earlier) / 3600


def trends(log: Path, unit: str, per: float, of_time: bool) -> dict[str, Any]:
    """Judge each process that lived long: memory, descriptors, threads, time of CPU and of the clock for each `unit`.

    of_time: against hours, not against what is done (in `per`).
    """
    series: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = defaultdict(list)
    for sample in read_samples(log):
        for row in sample["processes"]:
            series[row["pid"]].append((sample, row))
    longest = max(map(len, series.values()))
    found = {}
    for pid, rows in series.items():
        begun = rows[0][0]["done"]  # by those before it
        rows = [row for row in rows if row[0]["done"] >= begun + FILLS]
        if len(rows) < 0.2 * longest or len(rows) < 3 * BLOCKS:
            continue
        x = [sample["seconds"] / 3600 if of_time else sample["done"] for sample, _ in rows]
        whole = x[-1] - x[0]
        one: dict[str, Any] = {"command": rows[-1][1]["command"][:80], "rank": rows[-1][1]["rank"]}
        for quantity in ("private_mib", "descriptors", "threads"):
            one[quantity] = judge(x, [row[quantity] for _, row in rows], whole, per)
        # Windows of as many steps each, however long they took: /proc counts hundredths of a second.
        done = np.array([sample["done"] for sample, _ in rows])
        places = np.searchsorted(done, np.linspace(done[0], done[-1], WINDOWS + 1)).tolist()
        steps = [(rows[a], rows[b]) for a, b in pairwise(sorted(set(places))) if done[b] > done[a]]
        middle = [a[0]["done"] for a, _ in steps]
        for name, of in (
            (f"cpu_ms_per_{unit}", lambda at: at[1]["cpu"]),
            (f"clock_ms_per_{unit}", lambda at: at[0]["seconds"]),
        ):
            spent = [1e3 * (of(b) - of(a)) / (b[0]["done"] - a[0]["done"]) for a, b in steps]
            if sum(spent) > 0 and len(spent) > BLOCKS:
                one[name] = judge(middle, spent, float(done[-1] - done[0]), 1000.0)
        found[str(pid)] = one
    return found


# The runs


def rows_of(metrics: Path, kind: str) -> list[dict[str, Any]]:
    """Read the rows of one kind of a run's log."""
    rows = (json.loads(line) for line in metrics.read_text().split("\n")[:-1])
    return [row for row in rows if row["kind"] == kind]


def soak_train(out: Path, ranks: int, rank_hours: float) -> dict[str, Any]:
    """Train until the hours are full, and say what has grown."""
    warpfold = [sys.executable, "-m", "warpfold"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if not (out / "store").exists():
        out.mkdir(parents=True, exist_ok=True)
        sample = [*warpfold, "sample", "--proteins", "200", "--out", out / "proteins", "-q"]
        subprocess.run(list(map(str, sample)), env=environment, check=True)
        pack = [*warpfold, "pack", "--structures", out / "proteins", "--msas", out / "proteins", "--out", out / "store"]
        subprocess.run(list(map(str, [*pack, "-q"])), env=environment, check=True)
    log, metrics, ended = out / "samples.jsonl", out / "run" / "metrics.jsonl", out / "ended.json"
    beginnings = json.loads(ended.read_text()) if ended.exists() else []
    before = hours_of(log)
    left = 3600 * (rank_hours / ranks - before)
    changes = [f"plan.data={ranks}", f"optim.accumulate={ranks}", "train.steps=10000000", "train.workers=1"]
    changes += ["train.validate_every=1000", "train.validation_share=0.02", "train.save_every=100"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    command += ["-m", "warpfold", "train", "tiny", "--data", out / "store", "--out", out / "run", "--device", "cpu"]
    command += [word for change in changes for word in ("--set", change)]
    if left > 0:
        steps = Lines(metrics, having=b'"kind": "step"')
        code = watch(command, out, steps, lambda seconds: seconds > left)
        beginnings.append({"hours": hours_of(log) - before, "exit_code": code, "steps": steps()})
        ended.write_text(json.dumps(beginnings))
    losses = [row["loss"] for row in rows_of(metrics, "step")]
    return {
        "ranks": ranks,
        "rank_hours": round(ranks * hours_of(log), 2),
        "beginnings": beginnings,  # that were not killed; torchrun itself exits with 1 when it is told to end
        "steps": len(losses),
        "checkpoints": len(losses) // 100,
        "validations": len(rows_of(metrics, "validation")),
        "loss_of_the_first_and_last_100_steps": [
            round(float(np.mean(part)), 3) for part in (losses[:100], losses[-100:])
        ],
        "slopes_are_per": "hour; of time for a step, 1,000 steps",
        "processes": trends(log, "step", 1.0, of_time=True),
    }


def soak_predict(out: Path, predictions: int) -> dict[str, Any]:
    """Fold so many short sequences, and say what has grown."""
    import torch

    from warpfold import settings
    from warpfold.geometry.residue import RESTYPES
    from warpfold.model.alphafold import AlphaFold
    from warpfold.model.weights.files import save_params
    from warpfold.training.config import RunConfig

    out.mkdir(parents=True, exist_ok=True)
    fasta, params, log, folded = out / "short.fasta", out / "tiny.safetensors", out / "samples.jsonl", out / "folded"
    draw, letters = np.random.default_rng(0), np.array(list(RESTYPES))
    if not params.exists():
        lengths = draw.integers(8, 17, predictions)
        fasta.write_text("".join(f">p{i:06d}\n{''.join(draw.choice(letters, n))}\n" for i, n in enumerate(lengths)))
        torch.manual_seed(0)
        smaller = ("model.evoformer.blocks=1", "model.structure.layers=1", "model.c_m=16", "model.c_z=16")
        model = AlphaFold(settings.build(RunConfig, settings.load("tiny", smaller), "tiny").model)
        save_params(params, model, {"max_msa": 16, "max_extra": 16})
    if (given := fasta.read_bytes().count(b">")) != predictions:
        raise SystemExit(f"{out}: was begun with --predictions {given}; go on with that, or name another folder")
    command = [sys.executable, "-m", "warpfold", "predict", fasta, "--params", params, "--out", folded]
    done = Lines(lambda: sorted((folded / "journal").glob("*.jsonl")), having=b'"entry": ')
    code = watch([*command, "--device", "cpu"], out, done, lambda _: False)
    if code not in (0, 1):
        raise SystemExit(f"{out}: predict ended with {code}, and said.txt says why; the same command continues")
    summary = json.loads((folded / "summary.json").read_text())
    return {
        "predictions": len(summary["predictions"]),
        "failures": len(summary["failures"]),
        "exit_code": code,
        "shared_a_pass": sum("together" in one for one in summary["predictions"]),
        "hours": round(hours_of(log), 2),
        "slopes_are_per": "1,000 predictions",
        "processes": trends(log, "prediction", 1000.0, of_time=False),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="reliability soak", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["train", "predict"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank-hours", type=float, default=6.5)
    parser.add_argument("--predictions", type=int, default=100_000)
    parser.add_argument("--figures", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.what == "train":
        found = soak_train(chosen.out, chosen.ranks, chosen.rank_hours)
    else:
        found = soak_predict(chosen.out, chosen.predictions)
    keep("soak", __doc__, arguments, found, chosen.figures)
