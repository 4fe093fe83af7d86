"""Measure packing, merging, opening and ordering of a million entries, each in its own process.

    python -m benchmarks.million --entries 10000 100000 1000000 --out benchmarks/results/NAME.json

The entries are generated. Their records have a few bytes, and their names, sizes, dates and clusters resemble those of
the PDB. The results therefore cover only what grows with the number of entries: results of jobs, the report, the index
and the order.

* part: `PartWriter` stores the results of the jobs, as it does for the workers of `warpfold pack`.
* merge: the store is written from the part, with clusters of equal sequences and the report.
* open: the store is opened by a first process, which checks the index, and by 4 processes like workers of the loader,
  with the private memory of each.
* epoch: one epoch of "uniform".
* weights: those of "paper".
* held out: clusters are drawn for validation.
* costs: the predicted cost of each example.

Times are CPU seconds, because other processes may be running. MB are the peak of the process, or the growth in a step.
"""

import argparse
import json
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.data.features.choose import SampleConfig
from warpfold.data.load.order import Order, Source, feature_costs, paper_weights, split_keys
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import merge
from warpfold.data.pack.part import HIT_FILES, PartWriter
from warpfold.data.store.store import Store, pack_record

STAGES = ("part", "merge", "open", "order")
LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def private() -> float:
    """Return the private memory of this process, MB."""
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]]
    return sum(int(size) for name, size, _ in lines if name in ("Private_Clean:", "Private_Dirty:", "Swap:")) / 1e3


def make_part(folder: Path, entries: int) -> dict[str, float]:
    """Store the results of the jobs."""
    record = pack_record({"aatype": np.zeros(20, np.uint8)}, {"name": "x"})
    draw = random.Random(0)
    kinds = {name: {"files": entries, "bytes": entries, "digest": "0"} for name in ("structures", "alignments")}
    options = PackOptions(cluster_identity=1.0).recorded()
    manifest = {"part": "1/1", "warpfold": "benchmark", "options": options, "inputs": kinds, "clusters": None}
    writer = PartWriter(folder / "part", manifest)
    for number in range(entries):
        name = f"{number:07d}_A"
        entry = {
            "name": name, "file": f"{number:07d}.cif", "kept": True, "length": draw.randint(20, 1000),
            "depth": draw.randint(1, 10_000), "templates": draw.randint(0, 20),
            "resolution": draw.randint(100, 400) / 100,
            "release_date": f"20{draw.randint(10, 26)}-{draw.randint(1, 12):02d}-{draw.randint(1, 28):02d}",
            "method": "X-RAY DIFFRACTION", "alignments": [f"{name}/bfd.a3m"],
            "sequence": "".join(draw.choices(LETTERS, k=3)) + str(draw.randrange(entries) // 3),
            "record": [0, record.header, record.crc],
        }  # fmt: skip
        writer.add(f"structure {number:07d}.cif", {"entries": [entry], "bad": {}}, [record.data])
    writer.add(HIT_FILES, [])
    writer.finish()
    writer.close()
    return {"files": len(list((folder / "part").iterdir()))}


def merged(folder: Path) -> dict[str, float]:
    """Write the store."""
    report = merge([folder / "part"], folder / "store")
    index = (folder / "store/index.wfi").stat().st_size
    return {"entries": len(report.kept), "index, MB": round(index / 1e6, 1)}


def opened(folder: Path) -> dict[str, float]:
    """Open the store in this process and in others."""
    before, began, cpu = private(), time.perf_counter(), time.process_time()
    store = Store(folder / "store")
    found = {"wall": time.perf_counter() - began, "checked": time.process_time() - cpu}
    code = (
        "import time; from benchmarks.million import *; before = private(); cpu = time.process_time();"
        f"store = Store({str(store.path)!r}, True); row = store.index.row('0000007_A');"
        "print(time.process_time() - cpu, private() - before); sys.stdout.flush(); sys.stdin.read()"
    )
    run = [sys.executable, "-c", code]
    others = [subprocess.Popen(run, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) for _ in range(4)]
    said = [[float(text) for text in one.stdout.readline().split()] for one in others if one.stdout]
    found |= {"worker": max(one[0] for one in said), "worker alone, MB": max(one[1] for one in said)}
    found["here, MB"] = private() - before
    for one in others:
        one.communicate("")
    return {name: round(value, 4) for name, value in found.items()}


def ordered(folder: Path) -> dict[str, float]:
    """Order an epoch, compute weights, hold out clusters, and predict costs."""
    store = Store(folder / "store")
    source, found = Source(store), {}
    order = Order([source], 0)
    for name, work in {
        "epoch": lambda: sum(1 for _ in map(order.entry, range(len(source.keys)))),
        "weights": lambda: paper_weights(source),
        "held out": lambda: split_keys(store, 100, 0),
        "costs": lambda: feature_costs(source, SampleConfig(crop=256, max_msa=128, max_extra=1024)),
    }.items():
        before, cpu = private(), time.process_time()
        result = work()
        found[name] = round(time.process_time() - cpu, 3)
        found[f"{name}, MB"] = round(private() - before, 1)
        del result
    return found


def stage(name: str, folder: Path, entries: int) -> dict[str, float]:
    """Run one of `STAGES` in this process."""
    cpu = time.process_time()
    work = {
        "part": lambda: make_part(folder, entries),
        "merge": lambda: merged(folder),
        "open": lambda: opened(folder),
        "order": lambda: ordered(folder),
    }
    found = work[name]()
    found["seconds"] = round(time.process_time() - cpu, 2)
    return found | {"peak, MB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--stage", nargs=2, metavar=("NAME", "FOLDER"), help="for this script itself")
    given = parser.parse_args()
    if given.stage:
        print(json.dumps(stage(given.stage[0], Path(given.stage[1]), given.entries[0])))
        return
    results: list[dict[str, Any]] = []
    for entries in given.entries:
        with tempfile.TemporaryDirectory() as folder:
            row: dict[str, Any] = {"entries": entries}
            for name in STAGES:
                run = [sys.executable, "-m", "benchmarks.million", "--entries", str(entries), "--stage", name, folder]
                row[name] = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
                print(entries, name, row[name], flush=True)
        results.append(row)
    about = {"what": "a million entries", "date": date.today().isoformat(), "machine": platform.machine()}
    if given.out:
        given.out.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
