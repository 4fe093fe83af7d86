"""Run `predict` on a small proteome of generated sequences: seconds against length, waiting times, memory.

    python -m benchmarks.proteome OUT [--proteins 1000] [--workers 2] [--figures benchmarks/results/NAME.json]

Lengths are lognormal (median 100 residues), cut to 30 to 400; sequences are random, so alignments are their own row.
The model is a smaller version (`SMALLER`) of settings/tiny.toml with random weights, because the loop is measured and
not the model. OUT/predictions/report.html has the figure. The same command continues a killed run.
"""

import argparse
import datetime
import json
import platform
import resource
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from warpfold import predict, settings
from warpfold.geometry.residue import RESTYPES
from warpfold.model.alphafold import AlphaFold
from warpfold.model.weights.files import save_params
from warpfold.training.config import RunConfig

SHORTEST, MEDIAN, LONGEST, SPREAD = 30, 100, 400, 0.5
SMALLER = ("model.evoformer.blocks=1", "model.structure.layers=1", "model.c_m=16", "model.c_z=16")
BINS = (30, 50, 75, 100, 150, 200, 300, 401)  # residues


def write_inputs(folder: Path, proteins: int) -> tuple[Path, Path]:
    """Write the FASTA file and the parameters, unless they are there."""
    fasta, params = folder / f"proteome-{proteins}.fasta", folder / "tiny.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    draw, letters = np.random.default_rng(0), np.array(list(RESTYPES))
    lengths = np.clip(draw.lognormal(np.log(MEDIAN), SPREAD, proteins), SHORTEST, LONGEST).astype(int)
    fasta.write_text("".join(f">p{i:05d}\n{''.join(draw.choice(letters, n))}\n" for i, n in enumerate(lengths)))
    if not params.exists():
        torch.manual_seed(0)
        config = settings.build(RunConfig, settings.load("tiny", SMALLER), "tiny")
        save_params(params, AlphaFold(config.model), {"max_msa": 16, "max_extra": 16})
    return fasta, params


class Told:
    """Records the time of each prediction and the memory of this process at that time."""

    def __init__(self) -> None:
        self.start, self.rows, self.lock = time.perf_counter(), list[tuple[float, int, float]](), threading.Lock()

    def __call__(self, done: int, total: int, what: str) -> None:
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
        with self.lock:
            self.rows.append((time.perf_counter() - self.start, done, memory))
            if done % 25 == 0:
                print(f"{self.rows[-1][0]:8.0f} s  {done}/{total}  {memory:.0f} MiB  {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--proteins", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--figures", type=Path)
    chosen = parser.parse_args()
    fasta, params = write_inputs(chosen.out, chosen.proteins)
    told = Told()
    summary = predict(fasta, params, chosen.out / "predictions", device="cpu", progress=told, workers=chosen.workers)
    entries = summary["predictions"]
    length = np.array([entry["length"] for entry in entries])
    model, features = (np.array([entry["seconds"][kind] for entry in entries]) for kind in ("model", "features"))
    bins = []
    for low, high in pairwise(BINS):
        inside = (length >= low) & (length < high)
        if inside.any():
            each = {"residues": f"{low} to {high - 1}", "proteins": int(inside.sum())}
            each["model_ms_per_residue_median"] = round(float(np.median(1e3 * model[inside] / length[inside])), 3)
            bins.append(each | {"features_ms_median": round(float(np.median(1e3 * features[inside])), 2)})
    found = {
        "what": __doc__.splitlines()[0],
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {chosen.workers} workers",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "proteins": len(entries),
        "failures": len(summary["failures"]),
        "residues": int(length.sum()),
        "seconds": summary["seconds"],
        "first_result_seconds": round(next((at for at, done, _ in told.rows if done > told.rows[0][1]), 0.0), 2),
        "shared_a_pass": sum("together" in entry for entry in entries),
        "processes": summary["processes"],
        "by_length": bins,
        "parent_memory_mib": [round(told.rows[len(told.rows) * i // 10][2]) for i in range(10)],
    }
    print(json.dumps(found, indent=1))
    if chosen.figures:
        chosen.figures.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
