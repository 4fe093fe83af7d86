"""Features of assemblies from a packed store, beside those of single chains: seconds per residue, one core.

    python benchmarks/assemblies.py STORE --out benchmarks/results/NAME.json

STORE: packed with `--assemblies`.  Measured are its assemblies of two chains or more, and some that are made of its
chains with the deepest alignments, whose rows get organisms at random: pairs of them, and copies of one.

An assembly's seconds per residue are compared with those of its different chains, each drawn alone as for a monomer,
with the same settings (initial training of AlphaFold2): all settings in turns, the best of three, means over draws.
"""

import argparse
import datetime
import json
import os
import platform
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from warpfold.batch import to_tensors
from warpfold.data.example.pairing import make_pairing
from warpfold.data.example.raw_example import CA
from warpfold.data.features.choose import SampleConfig
from warpfold.data.features.make import make_features
from warpfold.data.store.store import Store, StoreWriter, pack_record
from warpfold.data.store.stored_example import (
    CHAINS,
    StoredExample,
    chains_of,
    example_arrays,
    example_notes,
    open_entry,
    pack_assembly,
    read_example,
)

EXACT = SampleConfig(crop=256, max_msa=128, max_extra=1024)  # initial training, Supp. table 4
PASSES = (1, 2, 3, 4)  # a training step recycles up to three times, each as often
DEEPEST = 4  # chains of which assemblies are made
ORGANISMS = 4000
APART = 30.0  # angstrom, between the copies that are made


def made_store(store: Store, folder: Path) -> Store:
    """Make a store of pairs of the deepest chains, and of two, four and twelve copies of each."""
    depths = dict(zip(store.keys, store.column("depth")))
    lengths = dict(zip(store.keys, store.column("length")))
    chains = {key for each in chains_of(store).values() for key in each}
    by_depth = {(lengths[key], depths[key]): key for key in sorted(chains, key=lambda key: depths[key])}
    deepest = list(by_depth.values())[-DEEPEST:]
    rng = np.random.default_rng(0)
    groups = {f"{a}+{b}": [a, b] for a, b in pairwise(deepest)}
    groups |= {f"{count}x{key}": [key] * count for key in deepest for count in (2, 4, 12)}
    with StoreWriter(folder / "made") as writer:
        for key in deepest:
            raw = read_example(store, key)
            species = rng.integers(1, ORGANISMS, raw.depth).astype(np.uint64)
            paired = replace(raw, pairing=make_pairing(raw.msa, species, np.ones(raw.depth, bool)))
            assert raw.positions is not None
            arrays = {**example_arrays(paired), "ca": raw.positions[:, CA]}
            writer.add(key, pack_record(arrays, example_notes(paired)), {CHAINS: None})
        for name, keys in groups.items():
            operators = np.tile(np.eye(3, 4), (len(keys), 1, 1))
            operators[:, 0, 3] = APART * np.arange(len(keys))
            entities = [list(dict.fromkeys(keys)).index(key) + 1 for key in keys]
            ids = [f"c{number}" for number in range(len(keys))]
            writer.add(name, pack_assembly(name, ids, keys, entities, operators), {CHAINS: keys})
        writer.finish()
    return Store(folder / "made")


def seconds_per_residue(store: Store, key: str, assembly: bool, passes: int, draw: int) -> float:
    """Return the thread's seconds for one sample, per residue of its crop."""
    start = time.thread_time()
    features = to_tensors(make_features(open_entry(store, key, assembly), EXACT, 0, (key, draw), passes, train=True))
    return (time.thread_time() - start) / len(features["aatype"])


def compared(store: Store, key: str, draws: int) -> dict[str, object]:
    """Return an assembly's microseconds per residue, and those of its chains, for each number of passes."""
    chains = chains_of(store)[key]
    runs = [(key, True), *((chain, False) for chain in dict.fromkeys(chains))]
    found: dict[str, object] = {
        "assembly": key,
        "chains": len(chains),
        "residues": sum(StoredExample(store, chain).length for chain in chains),
        "rows": [StoredExample(store, chain).depth for chain in dict.fromkeys(chains)],
    }
    taken = np.zeros((len(PASSES), draws, 2))
    for i, passes in enumerate(PASSES):
        for draw in range(draws):
            best = dict.fromkeys(runs, float("inf"))
            for _ in range(3):
                for run in runs:  # in turns, since others use this machine too
                    best[run] = min(best[run], seconds_per_residue(store, *run, passes, draw))
            taken[i, draw] = best[key, True], np.mean([best[run] for run in runs[1:]])
    micro = 1e6 * taken.mean(1)
    found["microseconds_per_residue"] = [round(float(x), 1) for x in micro[:, 0]]
    found["of_its_chains"] = [round(float(x), 1) for x in micro[:, 1]]
    found["ratio"] = round(float(micro[:, 0].mean() / micro[:, 1].mean()), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--most", type=int, default=20, help="assemblies of the store, the deepest first")
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    store = Store(arguments.store)
    depths = dict(zip(store.keys, store.column("depth")))
    real = sorted((key for key, each in chains_of(store).items() if len(each) > 1), key=lambda key: -depths[key])
    with tempfile.TemporaryDirectory() as folder:
        own = made_store(store, Path(folder))
        results = []
        for kind, here, keys in (("made", own, chains_of(own)), ("real", store, real[: arguments.most])):
            for key in keys:
                results.append({"kind": kind, **compared(here, key, arguments.draws)})
                print(results[-1], flush=True)
    ratios = {}
    for kind in ("made", "real"):
        every = [result for result in results if result["kind"] == kind]
        sums = [np.sum([result[name] for result in every]) for name in ("microseconds_per_residue", "of_its_chains")]
        ratios[kind] = round(float(sums[0] / sums[1]), 2)
    print(ratios)
    report = {
        "what": "store to model-ready features, one core: assemblies beside single chains",
        "ratio": ratios,
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "load_average": round(os.getloadavg()[2], 1),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "results": results,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
