"""Measure the overhead of `predict` on many designs of one target, and the growth of its memory.

    python -m benchmarks.designs OUT [--designs 200] [--target 100] [--binder 50] [--figures benchmarks/results/N.json]

The target and the binders are random, without alignments. The model is that of settings/tiny_multimer.toml with random
weights on one thread, because the loop is measured and not the model. Weights that are initialised to zero are random
as well; otherwise all atoms would coincide and clash. The overhead is everything except the model: features, plans,
scores, files, tables and records. The files of the best ten designs are kept. The script compares CPU seconds, which
depend little on the load of the machine, and also reports wall-clock seconds. The same command continues a killed run.
"""

import argparse
import datetime
import json
import platform
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from warpfold import predict, settings
from warpfold.geometry.residue import RESTYPES
from warpfold.model.alphafold import AlphaFold
from warpfold.model.weights.files import save_params
from warpfold.prediction import outputs
from warpfold.prediction.outputs import Prediction
from warpfold.prediction.predictor import Predictor
from warpfold.scoring import interface
from warpfold.training.config import RunConfig

FIRST = 0.2  # of the designs, before memory is looked at: allocators fill
MANY = 10_000  # designs, to which growth is extrapolated


def write_inputs(folder: Path, designs: int, target: int, binder: int) -> tuple[Path, Path]:
    """Write the FASTA file and the parameters, unless they are there."""
    fasta, params = folder / f"designs-{designs}.fasta", folder / "tiny.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    draw, letters = np.random.default_rng(0), np.array(list(RESTYPES))
    first = "".join(draw.choice(letters, target))
    records = (f">d{i:05d}\n{first}:{''.join(draw.choice(letters, binder))}\n" for i in range(designs))
    fasta.write_text("".join(records))
    if not params.exists():
        torch.manual_seed(0)
        config = settings.build(RunConfig, settings.load("tiny_multimer", ("model.heads.pae=true",)), "tiny_multimer")
        model = AlphaFold(config.model)
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.any():
                    parameter.normal_(0, 0.05)
        save_params(params, model, {"max_msa": 16, "max_extra": 16})
    return fasta, params


class Measured:
    """CPU seconds in the model and in the scores, and the memory of this process after each design."""

    def __init__(self) -> None:
        self.model, self.scores, self.memory = 0.0, 0.0, list[float]()
        self.beside = list[float]()  # seconds of CPU of everything else, so far
        compute, plan, pairs = Predictor.compute, Predictor.plan, interface.chain_pair_scores
        together = Predictor.compute_together

        def looked(start: float, designs: int) -> None:
            self.model += time.thread_time() - start
            now = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
            self.beside += designs * [time.process_time() - self.model]
            self.memory += designs * [now]

        def computed(predictor: Predictor, *args: Any) -> Prediction:
            start = time.thread_time()
            found = compute(predictor, *args)
            looked(start, 1)
            return found

        def computed_together(predictor: Predictor, several: Any, *args: Any) -> list[Prediction]:
            start = time.thread_time()
            found = together(predictor, several, *args)
            looked(start, len(several))
            return found

        def planned(predictor: Predictor, *args: Any) -> Any:
            start = time.thread_time()
            found = plan(predictor, *args)
            self.model -= time.thread_time() - start  # it is within `compute`, but not the model
            return found

        def scored(*args: Any) -> Any:
            start = time.thread_time()
            found = pairs(*args)
            self.scores += time.thread_time() - start
            return found

        Predictor.compute, Predictor.plan = computed, planned  # type: ignore[method-assign]
        Predictor.compute_together = computed_together  # type: ignore[method-assign]
        outputs.chain_pair_scores = scored  # type: ignore[attr-defined]

    def each_beside(self) -> float:
        """Compute the CPU seconds per design outside the model, after the first designs."""
        later = self.beside[int(FIRST * len(self.beside)) :]
        return (later[-1] - later[0]) / (len(later) - 1)

    def growth(self) -> dict[str, float]:
        """Fit a line to memory against the number of designs, and extrapolate it."""
        later = np.array(self.memory[int(FIRST * len(self.memory)) :])
        slope = float(np.polyfit(np.arange(len(later)), later, 1)[0])
        return {
            "mib_at_first": round(float(later[0]), 1),
            "mib_at_last": round(float(later[-1]), 1),
            "kib_per_design": round(1024 * slope, 2),
            f"share_over_{MANY}": round(MANY * slope / float(later[0]), 4),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--designs", type=int, default=200)
    parser.add_argument("--target", type=int, default=100)
    parser.add_argument("--binder", type=int, default=50)
    parser.add_argument("--figures", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    fasta, params = write_inputs(chosen.out, chosen.designs, chosen.target, chosen.binder)
    measured, printed = Measured(), [0]

    def tell(done: float, total: int, what: str) -> None:
        """Print the progress."""
        if len(measured.memory) >= printed[-1] + 200:
            printed.append(len(measured.memory))
            print(f"{int(done)}/{total}  {measured.memory[-1]:.0f} MiB", flush=True)

    start = time.process_time()
    summary = predict(
        fasta, params, chosen.out / f"predictions-{chosen.designs}", device="cpu", keep="best:10:ipsae", progress=tell
    )
    whole = time.process_time() - start
    process, count = summary["processes"][-1], len(measured.memory)
    loop = process["computing"] + process["waiting_for_features"] + process["waiting_for_files"]
    model = sum(entry["seconds"]["model"] for entry in summary["predictions"])
    found = {
        "what": __doc__.splitlines()[0],
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, one thread of torch",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "designs": count,
        "residues": chosen.target + chosen.binder,
        "model_cpu_ms": round(1e3 * measured.model / count, 2),
        "scores_cpu_ms": round(1e3 * measured.scores / count, 2),
        "beside_cpu_ms": round(1e3 * measured.each_beside(), 2),
        "cpu_beside_the_model": round(measured.each_beside() * count / measured.model, 4),
        "cpu_seconds_of_begin_and_end": round(whole - measured.model - measured.each_beside() * count, 2),
        "clock_beside_the_model": round(loop / model - 1, 4),
        "memory": measured.growth(),
        "peak_mib_with_the_end": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }
    print(json.dumps(found, indent=1))
    if chosen.figures:
        chosen.figures.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
