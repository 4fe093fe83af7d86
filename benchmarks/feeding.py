"""Do steps wait where the arithmetic of `warpfold bench data` says that they need not?  Three storages, real loaders.

    python -m benchmarks.feeding STORE --out benchmarks/results/NAME.json          (two minutes)

For each storage (this disk; a slow disk, 5 ms and 60 MB/s; an object store, 20 ms and 100 MB/s: both emulated) the
examples of one process are measured, and so how many a second some processes make.  Then a real loader with as many
processes feeds steps that are sleeps, each a little longer than that asks for (1.3 times), or shorter (0.7): measured
is the share of the time that steps wait for examples, where arithmetic says none, and three tenths.

The examples are those of the store with an alignment of 1,000 rows or more, each with its own copy of it.  Of processes
that wait for their storage there are more than one a core: so a machine with two cores shows what waits do.
"""

import argparse
import datetime
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

from warpfold.bench.data import INITIAL
from warpfold.bench.feeding import Emulation, SlowStore, feeding
from warpfold.data.load.loader import Loader, Maker, Quarantine
from warpfold.data.load.order import Order, Source
from warpfold.data.load.schedule import Schedule, State
from warpfold.data.store.store import Store, StoreWriter, pack_record
from warpfold.data.store.stored_example import chain_keys, example_arrays, example_notes, read_example

CASES = {"local disk": (None, 1), "slow disk": ("5ms,60MB/s", 2), "object store": ("20ms,100MB/s", 8)}  # processes
ROWS = 1000
REPEATS = 3
FACTORS = (1.3, 0.7)  # seconds of a step over those in which the processes make an example


def deep(store: Store, path: Path) -> Path:
    """Write a store of the chains with deep alignments."""
    depth = dict(zip(store.keys, store.column("depth")))
    with StoreWriter(path) as writer:
        for key in chain_keys(store):
            if depth[key] >= ROWS:
                raw = read_example(store, key)
                writer.add(key, pack_record(example_arrays(raw), example_notes(raw)), {"depth": depth[key]})
        writer.finish()
    return path


def waiting(store: Store, workers: int, step: float, seconds: float) -> dict[str, float]:
    """Feed steps from a loader, and return the share of the time that they waited, once all processes were at work."""
    begin = workers * 4  # as many are made ahead
    steps = begin + max(int(seconds / step), 50)
    store.storage.cool()
    waited = slept = 0.0
    schedule = Schedule(State(), steps)
    with Loader(
        Order([Source(store)], seed=1), Maker((store,), INITIAL, 1), schedule, Quarantine(0), workers=workers
    ) as loader:
        for number in range(steps):
            began = time.perf_counter()
            next(loader)
            got = time.perf_counter()
            time.sleep(step)
            if number >= begin:
                waited += got - began
                slept += time.perf_counter() - got
    return {"steps": steps - begin, "step_ms": round(1e3 * step, 2), "waiting": round(waited / (waited + slept), 3)}


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
            found = feeding(store, INITIAL, asked.entries, gpus=8, cores=16, step=0.41)
            print(found["verdict"], flush=True)
            row: dict[str, Any] = {"storage": name, "emulated": emulated, "feeding": found, "processes": workers}
            for factor in FACTORS:
                every = []
                for _ in range(REPEATS):
                    own = feeding(store, INITIAL, asked.entries, gpus=1, cores=workers, step=1.0)
                    every.append(waiting(store, workers, factor / own["examples per second"], asked.seconds))
                    print(name, factor, every[-1], flush=True)
                middle = sorted(every, key=lambda one: one["waiting"])[REPEATS // 2]
                waits = [one["waiting"] for one in every]
                row[f"steps of {factor}"] = {"by_arithmetic": round(max(0.0, 1 - factor), 2), **middle, "all": waits}
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
