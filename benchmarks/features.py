"""Time feature preparation from a packed store on one core, and evaluate the predicted cost.

    python benchmarks/features.py STORE --alignments FILE ... --out benchmarks/results/NAME.json

The script uses one entry per alignment depth, and one with an alignment of `--rows` rows, made from a real one by
exchanging halves of neighbouring rows. `--alignments` adds chains that are longer than the crop; the store lacks their
structures.

A sample is everything from the bytes of the store to the tensors of the feature table: crop 256, 128 clusters, 1,024
extra rows, block deletion. It is timed for 1 to 4 iterations of the trunk, each with its own MSA sample. The mean over
these counts, because training draws the number in each step. Times are CPU seconds of the thread: means over draws of
the best of three, with all settings alternating.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from warpfold.batch import to_tensors
from warpfold.data.example.raw_example import RawExample, compute_profile, from_sequence
from warpfold.data.features.choose import SampleConfig, predicted_cost
from warpfold.data.features.make import make_features
from warpfold.data.formats.alignment import read_alignment
from warpfold.data.store.store import Store, StoreWriter, pack_record
from warpfold.data.store.stored_example import StoredExample, entry_keys, example_arrays, example_notes

EXACT = SampleConfig(crop=256, max_msa=128, max_extra=1024)  # initial training, Supp. table 4
CONFIGS = {
    "exact": EXACT,
    "clusters of the crop": replace(EXACT, clustering="crop"),
    "row budget": replace(EXACT, max_cost=8.0),
    "row budget, runs": replace(EXACT, max_cost=8.0, thin="runs"),
    "row budget, clusters of the crop": replace(EXACT, max_cost=8.0, clustering="crop"),
}
PASSES = (1, 2, 3, 4)  # a training step recycles up to three times, each as often
LEAST_ROWS = 20


def deepened(raw: RawExample, depth: int) -> RawExample:
    """Extend an alignment to `depth` rows: after a variable column, row i continues as row i + k."""
    wanted = -(-depth // raw.depth) * 2
    msa, deletions = [raw.msa], [raw.deletions]
    for k in range(1, wanted):
        cut = raw.length * k // wanted
        msa.append(np.concatenate([raw.msa[:-k, :cut], raw.msa[k:, cut:]], axis=1))
        deletions.append(np.concatenate([raw.deletions[:-k, :cut], raw.deletions[k:, cut:]], axis=1))
    order = np.argsort(np.concatenate([np.arange(len(part)) for part in msa]), kind="stable")  # neighbours stay so
    rows, first = np.unique(np.concatenate(msa)[order], axis=0, return_index=True)
    kept = np.sort(first)[:depth]
    if len(rows) < depth:
        raise SystemExit(f"{raw.name}: no {depth} different rows can be made of {raw.depth}")
    deep = np.concatenate(msa)[order][kept]
    return replace(raw, msa=deep, deletions=np.concatenate(deletions)[order][kept], profile=compute_profile(deep))


def examples(store: Store, rows: int, alignments: list[Path], folder: Path) -> tuple[list[StoredExample], int]:
    """Collect one entry per alignment depth, a deep one, and then those of `alignments` by length, without structures.

    Also returns the number of entries of the first two kinds.
    """
    every = dict(zip(store.keys, store.column("depth")))
    depths = {every[key]: key for key in entry_keys(store, assemblies=False)}
    chosen = [StoredExample(store, depths[depth]) for depth in sorted(depths) if depth >= LEAST_ROWS]
    longest = max(chosen, key=lambda example: (example.depth > rows // 16) * example.length)
    made = {"deep": deepened(StoredExample(store, longest.key).take(slice(None)), rows)}
    read = [read_alignment(path) for path in alignments]
    for path, alignment in sorted(zip(alignments, read), key=lambda pair: len(pair[1].query)):
        name = f"{path.parent.name}/{path.name}"
        made[name] = from_sequence(alignment.query, [alignment], name)
    with StoreWriter(folder / "made") as writer:
        for key, raw in made.items():
            writer.add(key, pack_record(example_arrays(raw), example_notes(raw)), {})
        writer.finish()
    own = Store(folder / "made")
    return [*chosen, *(StoredExample(own, key) for key in made)], len(chosen) + 1


def seconds(example: StoredExample, passes: int, draws: int) -> dict[str, float]:
    """Measure the CPU seconds of a sample under each of CONFIGS: the mean over draws of the best of three."""
    taken: dict[str, list[float]] = {name: [] for name in CONFIGS}
    for draw in range(draws):
        best = dict.fromkeys(CONFIGS, float("inf"))
        for _ in range(3):
            for name, config in CONFIGS.items():  # in turns, since others use this machine too
                start = time.thread_time()
                fresh = StoredExample(example.store, example.key)
                to_tensors(make_features(fresh, config, 0, (example.key, draw), passes, train=True))
                best[name] = min(best[name], time.thread_time() - start)
        for name, least in best.items():
            taken[name].append(least)
    return {name: float(np.mean(each)) for name, each in taken.items()}


def summary(taken: list[float], cost: list[float]) -> dict[str, Any]:
    """Summarise the seconds of every entry and its predicted cost."""
    return {
        "samples_per_second": round(1 / float(np.mean(taken)), 1),
        "slowest": round(1 / max(taken), 1),
        "fastest": round(1 / min(taken), 1),
        "correlation_with_predicted_cost": round(float(np.corrcoef(taken, cost)[0, 1]), 3),
        "milliseconds": [round(1e3 * each, 2) for each in taken],
        "predicted_cost": [round(each, 2) for each in cost],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--rows", type=int, default=39_000, help="of the deep alignment")
    parser.add_argument("--draws", type=int, default=6)
    parser.add_argument("--alignments", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        entries, packed = examples(Store(arguments.store), arguments.rows, arguments.alignments, Path(folder))
        base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        taken = {passes: [seconds(entry, passes, arguments.draws) for entry in entries] for passes in PASSES}
        groups = {"store": slice(packed), "alignments": slice(packed, None)}
        for name, config in CONFIGS.items():
            for group, span in groups.items():
                every = []
                for passes in PASSES if entries[span] else ():
                    every.append([each[name] for each in taken[passes][span]])
                    cost = [predicted_cost(entry.length, entry.depth, config, passes) for entry in entries[span]]
                    results.append({"rows": name, "of": group, "passes": passes, **summary(every[-1], cost)})
                if every:
                    rate = round(1 / float(np.mean(every)), 1)
                    results.append({"rows": name, "of": group, "passes": "1 to 4", "samples_per_second": rate})
        for result in results:
            print({key: value for key, value in result.items() if not isinstance(value, list)})
        report = {
            "what": "store to model-ready features, one core",
            "entries": [{"length": entry.length, "depth": entry.depth} for entry in entries],
            "peak_mib_above_the_start": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) // 1024,
            "date": datetime.date.today().isoformat(),
            "machine": platform.machine(),
            "load_average": round(os.getloadavg()[2], 1),  # of a quarter of an hour, this process included
            "torch": torch.__version__,
            "numpy": np.__version__,
            "results": results,
        }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
