"""What slow examples and new epochs cost a step, on ranks that are only simulated.

The loader is the real one, with its processes, one for each rank; making an example and computing a step are sleeps.
So a machine of few cores shows what many would do, and the figures are those of the loader alone.
"""

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
from warpfold.data.features.choose import keyed_rng
from warpfold.data.load.loader import Loader, Quarantine
from warpfold.data.load.schedule import Order, Schedule, Source, State
from warpfold.data.store.store import Store, StoreWriter, pack_record


@dataclass(frozen=True)
class Case:
    """One simulated run, times in seconds: `slow_share` of the examples take `slow_factor` times as long to make."""

    ranks: int = 8
    steps: int = 200
    step: float = 0.1  # computing, on every rank
    making: float = 0.2  # an example that is not slow
    slow_share: float = 0.05
    slow_factor: float = 10.0
    recycles: int = 3  # drawn for each step: only examples with equally many passes change places
    workers: int = 8
    ahead: int = 4
    window: int = 32
    examples: int = 480  # of an epoch
    seed: int = 0


@dataclass(frozen=True)
class Sleeper:
    """A maker whose work is sleep."""

    case: Case

    def __call__(self, source: int, key: str, index: int, passes: int) -> Arrays:
        """An example of next to nothing, after the time that it takes."""
        slow = keyed_rng(self.case.seed, "slow", index).random() < self.case.slow_share
        time.sleep(self.case.making * (self.case.slow_factor if slow else 1))
        return {"aatype": np.zeros(1, np.int64)}


def straggler(case: Case) -> dict[str, Any]:
    """Seconds per step with slow examples, without any, and with slow ones that come in order, in one run of each.

    A step begins when every rank has its example, and takes the slowest to end: a barrier.
    """
    cases = {
        "without slow examples": replace(case, slow_share=0.0),
        "window": case,
        "in order": replace(case, window=0),
    }
    seconds = {name: simulate(each) for name, each in cases.items()}
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


def epoch_gap(case: Case) -> dict[str, Any]:
    """Seconds that the first step of an epoch waits: with the processes going on, and begun anew for each epoch."""
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


def simulate(case: Case, warm: int | None = None) -> list[float]:
    """Seconds of each step, the first `warm` ones apart (by default as many as are made ahead)."""
    warm = case.workers * case.ahead if warm is None else warm
    begin = threading.Barrier(case.ranks)
    ends: list[float] = []

    def run(rank: int, loader: Loader) -> None:
        """What a rank does; if one fails, the others do not wait for it."""
        with ExitStack() as unless_done:
            unless_done.callback(begin.abort)
            for _ in loader:
                begin.wait()
                time.sleep(case.step)
                if rank == 0:
                    ends.append(time.perf_counter())
            unless_done.pop_all()

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        order = Order([Source(_empty_store(Path(folder) / "store", case.examples))], case.seed)
        ends.append(time.perf_counter())
        loaders = [stack.enter_context(_loader(case, order, rank, case.steps + warm)) for rank in range(case.ranks)]
        pool = stack.enter_context(ThreadPoolExecutor(case.ranks))
        for done in [pool.submit(run, rank, loader) for rank, loader in enumerate(loaders)]:
            done.result()
    return np.diff(ends)[warm:].tolist()


def _loader(case: Case, order: Order, rank: int, steps: int) -> Loader:
    def passes(step: int) -> int:
        return 1 + int(keyed_rng(case.seed, "recycles", step).integers(case.recycles + 1))

    return Loader(
        order,
        Sleeper(case),
        Schedule(State(), steps, rank=rank, ranks=case.ranks),
        Quarantine(0),
        passes=passes,
        workers=case.workers,
        ahead=case.ahead,
        window=case.window,
    )


def _empty_store(path: Path, examples: int) -> Store:
    with StoreWriter(path) as writer:
        for number in range(examples):
            writer.add(f"e{number}", pack_record({"aatype": np.zeros(1, np.uint8)}, {}), {"length": 1})
        writer.finish()
    return Store(path)
