"""Measure the speed of data loading on this machine: `warpfold bench data`.

All figures are measured in one run on the user's own store and machine, so their ratios are meaningful.
"""

import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from warpfold import __version__
from warpfold.batch import to_tensors
from warpfold.bench.feeding import STEP, feeding
from warpfold.data.example.raw_example import RawExample, from_chain
from warpfold.data.features.choose import SampleConfig
from warpfold.data.features.make import make_features
from warpfold.data.formats.alignment import read_alignment
from warpfold.data.load.examples import ExampleDataset, Maker, Quarantine, RunOrder, only
from warpfold.data.load.order import Order, Source
from warpfold.data.load.schedule import Schedule, State
from warpfold.data.pack.report import PackEntry, PackReport
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import StoredExample, entry_keys
from warpfold.engine.ready import Ready
from warpfold.errors import UserError
from warpfold.progress import Progress, no_progress

# Examples that the workers make before their memory is measured.
EXAMPLES = 40


def footprint(store: Store, config: SampleConfig, workers: int = 4) -> dict[str, Any]:
    """Measure the seconds until the first example, and the median MiB of a worker after `EXAMPLES` (Linux).

    private: memory of this process only. proportional: including its share of memory that processes share.
    """
    began = time.perf_counter()
    order = RunOrder(Order([Source(store)], seed=0), Schedule(State(), EXAMPLES), Quarantine(0))
    dataset = ExampleDataset(Maker((store,), config, 0))
    with Ready(dataset, order=order, collate=only, workers=workers, device="cpu") as loader:
        samples = iter(loader)
        next(samples)
        first = time.perf_counter() - began
        for _ in samples:
            pass
        used = []
        for pid in loader.processes():
            lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
            used.append({name.rstrip(":"): int(size) / 1024 for name, size, _ in lines})
    return {
        "workers": workers,
        "first_example_seconds": round(first, 2),
        "private_mib": round(statistics.median(m["Private_Clean"] + m["Private_Dirty"] for m in used), 1),
        "proportional_mib": round(statistics.median(m["Pss"] for m in used), 1),
    }


# ---- a store


# Initial training (Supp. table 4).
INITIAL = SampleConfig(crop=256, max_msa=128, max_extra=1024)
# `max_cost` of the row budget.
ROW_BUDGET = 8.0
# Without recycling, and with three recycles.
PASSES = (1, 4)
# Samples of each entry.
DRAWS = 3
# Duration of each measurement of reading.
READING_SECONDS = 2.0


def bench_data(
    store: Store,
    sources: Path | None = None,
    entries: int = 48,
    progress: Progress = no_progress,
    gpus: int = 8,
    cores: int = 16,
    step: float = STEP,
) -> dict[str, Any]:
    """Measure all figures of a store, by name.

    sources: folder with the files from which the store was packed; without it, measurements of these files are left
    out.
    entries: number of entries over all alignment depths, and of entries as training draws them.
    gpus, cores, step: GPUs to feed, cores, and the seconds in which a GPU uses an example (`feeding`).
    Raises UserError for sources that do not belong to the store.
    """
    bench_keys = spread_out(store, entries)
    files = source_files(store, sources, bench_keys) if sources is not None else {}
    parts: dict[str, Callable[[], Any]] = {
        "feeding": lambda: feeding(store, INITIAL, entries, gpus, cores, step),
        "features": lambda: features(store, bench_keys, files),
        "reading": lambda: reading(store),
        "size": lambda: sizes(store),
        "processes": lambda: footprint(store, INITIAL, workers=2),
    }
    if sources is not None:
        parts["pack"] = lambda: packing(store, sources)
    figures: dict[str, Any] = {}
    for done, (name, measure) in enumerate(parts.items()):
        progress(done, len(parts), name)
        figures[name] = measure()
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    versions = {"warpfold": __version__, "torch": torch.__version__, "numpy": np.__version__}
    return {"date": date.today().isoformat(), **machine, **versions, "store": store.path.name, **figures}


def spread_out(store: Store, entries: int) -> list[str]:
    """Select at most `entries` keys evenly over the depths of the alignments, including the deepest one."""
    depths = dict(zip(store.keys, store.column("depth")))
    # One chain of each depth.
    ranked = sorted({depths[key]: key for key in entry_keys(store, assemblies=False)}.items())
    indices = np.unique(np.linspace(0, len(ranked) - 1, min(entries, len(ranked))).round().astype(int))
    return [ranked[index][1] for index in indices]


def kept_entries(store: Store) -> list[PackEntry]:
    """Return the entries of a store's report."""
    return PackReport.from_json(json.loads(store.file("pack.json") or "{}")).kept


def source_files(store: Store, folder: Path, keys: Sequence[str]) -> dict[str, tuple[Path, list[Path]]]:
    """Return the structure file and the alignment files of each entry according to the store's reports.

    Raises UserError if a file is missing.
    """
    entries = {entry.name: entry for entry in kept_entries(store)}
    files = {}
    for key in keys:
        paths = [folder / name for name in (entries[key].file, *entries[key].alignments)]
        if missing := [path for path in paths if not path.is_file()]:
            raise UserError(
                f"{missing[0]}: no such file. Pass the folder with the files of the packed store as --sources."
            )
        files[key] = paths[0], paths[1:]
    return files


def features(
    store: Store, keys: Sequence[str], files: dict[str, tuple[Path, list[Path]]]
) -> dict[str, dict[str, float | None]]:
    """Measure the samples per second of one core, from the store or the source files to feature tensors.

    Seconds are the thread's CPU time, and each entry is sampled equally often. "exact" uses all rows that block
    deletion leaves, as in the paper.
    """
    torch.set_num_threads(1)
    exact, budget = INITIAL, replace(INITIAL, max_cost=ROW_BUDGET)

    def stored(config: SampleConfig, passes: int) -> float:
        return _rate(lambda key: StoredExample(store, key), keys, config, passes, DRAWS)

    def parsed(key: str) -> RawExample:
        from warpfold.data.structure.mmcif import read_structure

        structure, alignments = files[key]
        whole = read_structure(structure)
        chain = whole.chains[key.removeprefix(f"{whole.id}_")]
        return from_chain(key, whole, chain, [read_alignment(path) for path in alignments])

    return {
        f"{passes} {'passes' if passes > 1 else 'pass'}": {
            "store, row budget": stored(budget, passes),
            "store, exact": stored(exact, passes),
            "source files, exact": _rate(parsed, keys, exact, passes, 1) if files else None,
        }
        for passes in PASSES
    }


def _rate(
    read: Callable[[str], StoredExample | RawExample],
    keys: Sequence[str],
    config: SampleConfig,
    passes: int,
    draws: int,
) -> float:
    def one(key: str, draw: int) -> None:
        to_tensors(make_features(read(key), config, 0, (key, draw), passes, train=True))

    # Warm-up.
    one(keys[-1], draws)
    began = time.thread_time()
    for key in keys:
        for draw in range(draws):
            one(key, draw)
    return round(len(keys) * draws / (time.thread_time() - began), 2)


def reading(store: Store) -> dict[str, float]:
    """Measure MB/s and records/s of reading complete records in random order with checksums, cold and warm.

    For "cold", the kernel is asked to drop the shards from its cache, which some file systems ignore.
    """
    order = random.Random(0).sample(store.keys, len(store.keys))
    rates = {}
    for state in ("cold", "warm"):
        if state == "cold":
            store.storage.cool()
        count = size = 0
        began = time.perf_counter()
        for key in order:
            record = store.record(key)
            record.fetch(dict.fromkeys(record.arrays))
            size += sum(record.read(name).nbytes for name in record.arrays)
            count += 1
            if (elapsed := time.perf_counter() - began) > READING_SECONDS:
                break
        rates[f"{state}, records per second"] = round(count / elapsed, 1)
        rates[f"{state}, MB/s unpacked"] = round(size / elapsed / 1e6, 1)
    return rates


def sizes(store: Store) -> dict[str, float]:
    """Return the MB of the store, and of the files from which it was packed."""
    plan = json.loads(store.file("sources.json") or "{}")
    source_bytes = sum(kind["bytes"] for kind in plan["inputs"].values())
    store_bytes = store.nbytes
    return {
        "store MB": round(store_bytes / 1e6, 1),
        "source files MB": round(source_bytes / 1e6, 1),
        "ratio": round(store_bytes / source_bytes, 2),
    }


def packing(store: Store, folder: Path) -> dict[str, float]:
    """Measure the seconds of packing the store's sources again, with one, two and one process per core."""
    from warpfold.data.pack.pack import pack

    entries = kept_entries(store)
    structures = sorted({folder / entry.file for entry in entries})
    alignments = sorted({folder / name for entry in entries for name in entry.alignments})
    cores = os.cpu_count() or 1
    seconds = {}
    for workers in sorted({1, 2, cores}):
        with tempfile.TemporaryDirectory() as scratch:
            began = time.perf_counter()
            pack(structures, alignments, Path(scratch) / "store", workers=workers)
            seconds[f"workers {workers}, seconds"] = round(time.perf_counter() - began, 1)
    return seconds


def rows(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Format the figures as rows of a table: measurement, conditions, figure."""
    lines = []
    for part, figures in report.items():
        if isinstance(figures, dict):
            for name, figure in figures.items():
                # The verdict is printed as a sentence.
                if name == "verdict":
                    continue
                inner = figure.items() if isinstance(figure, dict) else [("", figure)]
                for sub, value in inner:
                    shown = f"{value:g}" if isinstance(value, int | float) else str(value)
                    shown = "not measured" if value is None else shown
                    lines.append((part, f"{name}, {sub}" if sub else name, shown))
    return lines
