"""A label that structures know, learnt beside them: the share of a protein's residues that are in helices.

    python benchmarks/labels.py --out benchmarks/results/NAME.json

Generated proteins, some held out.  The share is computed from the true structures (Ca of i and i + 3 nearer than 6
angstrom, and of i and i + 4 nearer than 7.2) and written as a table; `tiny` learns structures and label together, from
nothing; `predict` folds the held-out proteins and writes the value.  Beside it what needs no structure: the mean of the
training's labels, and ridge regression on amino-acid composition and length.
"""

import argparse
import csv
import datetime
import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import warpfold as wf
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.mmcif import read_structure
from warpfold.geometry.residue import ATOM_ORDER, RESTYPES

TRAINING, HELD_OUT = 160, 40  # proteins


def helix_share(chain: Chain) -> float:
    """Return the share of residues that a helix covers."""
    ca = chain.positions[:, ATOM_ORDER["CA"]]
    begins = (np.linalg.norm(ca[4:] - ca[:-4], axis=-1) < 7.2) & (np.linalg.norm(ca[3:-1] - ca[:-4], axis=-1) < 6.0)
    inside = np.zeros(len(ca), bool)
    for place in np.flatnonzero(begins):
        inside[place : place + 5] = True
    return float(inside.mean())


def composition(chain: Chain) -> list[float]:
    counts = [chain.sequence.count(letter) / len(chain.sequence) for letter in RESTYPES]
    return [*counts, len(chain.sequence) / 50, 1.0]


def agreement(predicted: np.ndarray, true: np.ndarray) -> dict[str, float | None]:
    """Return the mean absolute error and the correlation."""
    r = None if np.ptp(predicted) == 0 else round(float(np.corrcoef(predicted, true)[0, 1]), 3)
    return {"mean absolute error": round(float(np.abs(predicted - true).mean()), 4), "correlation": r}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder, began = Path(tempfile.mkdtemp(prefix="labels-")), time.time()
    wf.sample(folder / "all", proteins=TRAINING + HELD_OUT, min_length=24, max_length=36, seed=12)
    files = sorted((folder / "all/mmcif").iterdir())
    for place, file in enumerate(files):
        purpose = folder / ("training" if place < TRAINING else "held_out")
        purpose.mkdir(exist_ok=True)
        shutil.copy(file, purpose)
    wf.pack(folder / "training", folder / "all/msas", folder / "store")
    chains = {}
    for file in files:
        structure = read_structure(file)
        for name, chain in structure.chains.items():
            chains[f"{structure.id}_{name}"] = chain
    keys = list(wf.Store(folder / "store").keys)
    with (folder / "labels.csv").open("w", newline="") as table:
        csv.writer(table).writerows([("entry", "value"), *((key, helix_share(chains[key])) for key in keys)])
    settings = {"train.steps": given.steps, "train.validation": 0.0, "data.crop": 36}
    params = wf.train("tiny", folder / "store", folder / "run", labels=folder / "labels.csv", set=settings).params
    queries = sorted((folder / "held_out").iterdir())
    found = wf.predict(queries, params, folder / "folded", msa=folder / "all/msas")
    by_sequence = {chain.sequence: chain for key, chain in chains.items() if key not in keys}
    pairs = [(by_sequence[entry["sequence"]], entry["label"]["value"]) for entry in found["predictions"]]
    true = np.array([helix_share(chain) for chain, _ in pairs])
    labels = np.array([helix_share(chains[key]) for key in keys])
    x = np.array([composition(chains[key]) for key in keys])
    ridge = np.linalg.solve(x.T @ x + 0.01 * np.eye(x.shape[1]), x.T @ labels)
    result = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "steps": given.steps,
        "proteins": {"training": len(keys), "held out": len(pairs)},
        "helix share": {"mean": round(float(true.mean()), 3), "deviation": round(float(true.std()), 3)},
        "held out": {
            "the head": agreement(np.array([value for _, value in pairs]), true),
            "composition and length": agreement(np.array([composition(chain) for chain, _ in pairs]) @ ridge, true),
            "the mean": agreement(np.full(len(true), labels.mean()), true),
        },
        "seconds": round(time.time() - began),
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
