"""What the loader's processes take: memory, and time to start."""

import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from warpfold.data.features.choose import SampleConfig
from warpfold.data.load.loader import Loader, Maker, Quarantine
from warpfold.data.load.schedule import Order, Schedule, Source, State
from warpfold.data.store.store import Store


def footprint(store: Store, config: SampleConfig, workers: int = 4, examples: int = 40) -> dict[str, Any]:
    """Seconds until the first example comes, and the memory of each worker, in MiB, after so many examples.

    private: what only this process has; shared: its share of what several have, as the kernel counts (Linux).
    """
    began = time.perf_counter()
    order = Order([Source(store)], seed=0)
    with Loader(
        order, Maker((store,), config, 0), Schedule(State(), examples), Quarantine(0), workers=workers
    ) as loader:
        next(loader)
        first = time.perf_counter() - began
        for _ in loader:
            pass
        assert loader.workers is not None
        return {"workers": workers, "first_example_seconds": round(first, 2), **memory(loader.workers.processes())}


def memory(processes: Iterable[int]) -> dict[str, float]:
    """The medians over processes, in MiB."""
    found = [_mib(pid) for pid in processes]
    return {
        "private_mib": round(statistics.median(m["Private_Clean"] + m["Private_Dirty"] for m in found), 1),
        "proportional_mib": round(statistics.median(m["Pss"] for m in found), 1),
    }


def _mib(pid: int) -> dict[str, float]:
    lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
    return {name.rstrip(":"): int(size) / 1024 for name, size, _ in lines}
