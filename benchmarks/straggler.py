"""Measure the cost of slow examples and of new epochs, and the overhead of the loader's processes.

    python benchmarks/straggler.py --out benchmarks/results/NAME.json        (some three minutes on two cores)

Eight ranks are simulated. The loader and its 64 processes are real; the computation of examples and steps is a sleep.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.batch import Arrays
from warpfold.bench.data import INITIAL, footprint
from warpfold.data.load.examples import ExampleDataset, Quarantine, RunOrder, only
from warpfold.data.load.order import Order, Source
from warpfold.data.load.schedule import Schedule, State
from warpfold.data.store.store import Store, StoreWriter, pack_record
from warpfold.engine.ready import Ready
from warpfold.keyed import keyed_rng


@dataclass(frozen=True)
class Simulation:
    """A simulated run, times in seconds; `slow_share` of the examples take `slow_factor` times as long to make."""

    ranks: int = 8
    steps: int = 200
    step: float = 0.1  # computing, on every rank
    making: float = 0.2  # an example that is not slow
    slow_share: float = 0.05
    slow_factor: float = 10.0
    recycles: int = 3  # at most; drawn for each step, as only examples with equally many passes change places
    workers: int = 8
    ahead: int = 4
    window: int = 32
    examples: int = 480  # of an epoch
    seed: int = 0


@dataclass(frozen=True)
class Sleeper:
    """A maker of examples that only sleeps."""

    case: Simulation

    def __call__(self, source: int, key: str, index: int, passes: int) -> Arrays:
        """Return a nearly empty example, after the time that making a real one takes."""
        slow = keyed_rng(self.case.seed, "slow", index).random() < self.case.slow_share
        time.sleep(self.case.making * (self.case.slow_factor if slow else 1))
        return {"aatype": np.zeros(1, np.int64)}


def straggler(case: Simulation) -> dict[str, Any]:
    """Measure seconds per step without slow examples, with slow examples, and without reordering, one run each.

    A step begins when every rank has its example: a barrier.
    """
    without, in_order = replace(case, slow_share=0.0), replace(case, window=0)
    runs = {"without slow examples": without, "window": case, "in order": in_order}
    seconds = {name: simulate(each) for name, each in runs.items()}
    base = statistics.mean(seconds["without slow examples"])
    return {
        "case": asdict(case),
        "results": {
            name: {
                "seconds_per_step": round(statistics.mean(found), 4),
                "against_without": round(statistics.mean(found) / base, 3),
                "slowest_step": round(max(found), 3),
            }
            for name, found in seconds.items()
        },
    }


def epoch_gap(case: Simulation) -> dict[str, Any]:
    """Measure the waiting time of an epoch's first step with persistent and with new processes, seconds."""
    case = replace(case, ranks=1, slow_share=0.0, examples=20, steps=100)
    warm = case.workers * case.ahead
    seconds = simulate(case)
    going_on = [seconds[step - warm] for step in range(warm, warm + case.steps) if step % case.examples == 0]
    anew = [simulate(replace(case, steps=1), warm=0)[0] for _ in going_on]
    return {
        "examples": case.examples,
        "going_on": round(statistics.median(going_on) - case.step, 4),
        "anew": round(statistics.median(anew) - case.step, 4),
    }


def simulate(case: Simulation, warm: int | None = None) -> list[float]:
    """Return the seconds of each step after the first `warm` ones (by default as many as are made ahead)."""
    warm = case.workers * case.ahead if warm is None else warm
    begin = threading.Barrier(case.ranks)
    ends: list[float] = []

    def run(rank: int, loader: Ready) -> None:
        """Take all steps of a rank; if it fails, break the barrier so that the others do not wait for it."""
        with ExitStack() as unless_done:
            unless_done.callback(begin.abort)
            for _ in loader:
                begin.wait()
                time.sleep(case.step)
                if rank == 0:
                    ends.append(time.perf_counter())
            unless_done.pop_all()

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        with StoreWriter(Path(folder) / "store") as writer:
            for number in range(case.examples):
                writer.add(f"e{number}", pack_record({"aatype": np.zeros(1, np.uint8)}, {}), {"length": 1})
            writer.finish()
        order = Order([Source(Store(Path(folder) / "store"))], case.seed)
        ends.append(time.perf_counter())
        loaders = [stack.enter_context(_loader(case, order, rank, case.steps + warm)) for rank in range(case.ranks)]
        pool = stack.enter_context(ThreadPoolExecutor(case.ranks))
        for done in [pool.submit(run, rank, loader) for rank, loader in enumerate(loaders)]:
            done.result()
    return np.diff(ends)[warm:].tolist()


def _loader(case: Simulation, order: Order, rank: int, steps: int) -> Ready:
    def passes(step: int) -> int:
        return 1 + int(keyed_rng(case.seed, "recycles", step).integers(case.recycles + 1))

    return Ready(
        ExampleDataset(Sleeper(case)),
        order=RunOrder(order, Schedule(State(), steps, case.ranks, rank, case.ranks), Quarantine(0), passes),
        collate=only,
        device="cpu",
        workers=case.workers,
        ahead=case.ahead,
        window=case.window,
    )


def measure(store: Path | None) -> dict[str, Any]:
    """Measure everything and print the results."""
    found: dict[str, Any] = {}
    if store is not None:
        found["footprint"] = footprint(Store(store), INITIAL)
        print("processes:", found["footprint"])
    found["straggler"] = []
    print(f"{'made ahead per worker':24}{'order':24}{'s per step':>12}{'relative':>10}{'slowest':>9}")
    for ahead in (2, 4):
        found["straggler"].append(straggler(replace(Simulation(), ahead=ahead)))
        for name, row in found["straggler"][-1]["results"].items():
            figures = f"{row['seconds_per_step']:12.4f}{row['against_without']:10.3f}{row['slowest_step']:9.3f}"
            print(f"{ahead:<24}{name:24}{figures}", flush=True)
    found["epoch_gap"] = epoch_gap(Simulation())
    print("seconds that an epoch's first step waits:", found["epoch_gap"])
    return found


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--store", type=Path, help="a store, to measure processes that make real examples")
    arguments = parser.parse_args()
    report = {
        "what": "the loader on 8 simulated ranks; its processes",
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        **measure(arguments.store),
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
