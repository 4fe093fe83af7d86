"""Check the predictions of `warpfold bench data` about waiting steps with real loaders on three kinds of storage.

    python -m benchmarks.feeding STORE --out benchmarks/results/NAME.json          (five minutes)

The storage is the local disk, an emulated slow disk (5 ms, 60 MB/s) or an emulated object store (20 ms, 100 MB/s). For
each of them the script measures the examples per second of one process and of several. Then real loaders feed steps
that sleep: steps of 0.41 s on 8 ranks with two processes each, and steps of one rank that take 1.3 or 0.7 times as long
as its processes need for the examples. The result is the share of time that the steps wait. The predictions are 0, 0
and 0.3.

The examples are the entries of the store with at least 1,000 alignment rows, each with its own copy. Several processes
per core wait for the storage, so two cores suffice.
"""

import argparse
import datetime
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from warpfold.bench.data import INITIAL
from warpfold.bench.feeding import STEP, Emulation, SlowStore, feeding
from warpfold.data.load.examples import ExampleDataset, Maker, Quarantine, RunOrder, Sample, only
from warpfold.data.load.order import Order, Source
from warpfold.data.load.schedule import Schedule, State
from warpfold.data.store.store import Store, StoreWriter, pack_record
from warpfold.data.store.stored_example import StoredExample, entry_keys, example_arrays, example_notes
from warpfold.engine.ready import Ready

CASES = {"local disk": (None, 1), "slow disk": ("5ms,60MB/s", 2), "object store": ("20ms,100MB/s", 8)}  # processes
GPUS, CORES = 8, 16
ROWS = 1000
REPEATS = 3
FACTORS = (1.3, 0.7)  # seconds of a step over those in which the processes make an example


def deep(store: Store, path: Path) -> Path:
    """Write a store with the chains that have deep alignments."""
    depth = dict(zip(store.keys, store.column("depth")))
    with StoreWriter(path) as writer:
        for key in entry_keys(store, assemblies=False):
            if depth[key] >= ROWS:
                raw = StoredExample(store, key).take(slice(None))
                writer.add(key, pack_record(example_arrays(raw), example_notes(raw)), {"depth": depth[key]})
        writer.finish()
    return path


def waiting(store: Store, ranks: int, workers: int, step: float, seconds: float) -> dict[str, float]:
    """Feed the steps of several ranks, one loader for each, and return the share of time that they waited.

    Timing starts when all processes are working. The work of a rank to take an example is not waiting.
    """
    begin = workers * 4  # as many are made ahead
    steps = begin + max(int(seconds / step), 12)
    store.storage.cool()
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(
                Ready(
                    ExampleDataset(Maker((store,), INITIAL, rank)),
                    order=RunOrder(Order([Source(store)], seed=rank), Schedule(State(), steps), Quarantine(0)),
                    collate=only,
                    workers=workers,
                    device="cpu",
                )
            )
            for rank in range(ranks)
        ]
        samples = [iter(loader) for loader in loaders]  # their processes begin

        def rank_of(samples: Iterator[Sample]) -> tuple[float, float]:
            """Run the steps of a rank, and return its waiting and its total seconds."""
            waited = began = 0.0
            for number in range(steps):
                if number == begin:
                    waited, began = 0.0, time.perf_counter()
                asked, busy = time.perf_counter(), time.thread_time()
                next(samples)
                waited += time.perf_counter() - asked - (time.thread_time() - busy)
                time.sleep(step)
            return waited, time.perf_counter() - began

        with ThreadPoolExecutor(ranks) as pool:
            waits, every = map(sum, zip(*pool.map(rank_of, samples)))
    return {"steps": steps - begin, "step_ms": round(1e3 * step, 2), "waiting": round(waits / every, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--entries", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each case")
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        path = deep(Store(asked.store), Path(scratch) / "store")
        for name, (emulated, workers) in CASES.items():
            link = Path(scratch) / "link"
            store = SlowStore(path, Emulation.of(emulated, link)) if emulated else Store(path)
            found = feeding(store, INITIAL, asked.entries, gpus=GPUS, cores=CORES, step=STEP)
            print(found["verdict"], flush=True)
            row: dict[str, Any] = {"storage": name, "emulated": emulated, "feeding": found, "processes": workers}
            for factor in (None, *FACTORS):
                every = []
                for _ in range(REPEATS):
                    if factor is None:
                        every.append(waiting(store, GPUS, CORES // GPUS, STEP, asked.seconds))
                    else:
                        own = feeding(store, INITIAL, asked.entries, gpus=1, cores=workers, step=1.0)
                        every.append(waiting(store, 1, workers, factor / own["examples per second"], asked.seconds))
                    print(name, factor, every[-1], flush=True)
                middle = sorted(every, key=lambda one: one["waiting"])[REPEATS // 2]
                waits = [one["waiting"] for one in every]
                by_arithmetic = 0.0 if factor is None else round(max(0.0, 1 - factor), 2)
                what = f"{GPUS} ranks, {CORES} processes" if factor is None else f"steps of {factor}"
                row[what] = {"by_arithmetic": by_arithmetic, **middle, "all": waits}
            rows.append(row)
    report = {
        "what": __doc__.splitlines()[0],
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[1], 1),
        "rows": rows,
    }
    if asked.out:
        asked.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
