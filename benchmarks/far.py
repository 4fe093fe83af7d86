"""Compute the memory per rank and the time of a pass for up to 64 ranks and 30,000 residues.

    python -m benchmarks.far --out benchmarks/results/NAME.json         (minutes)

Peaks are recorded on fake tensors, with the allocations of GPU kernels (cost/recorder.py), for one block of each stack:
m, z, factors, biases and slices. Weights, features and everything outside the trunk are not included. Times are
modelled from data sheets (cost/rates.py), not measured.
"""

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import torch

from warpfold.cost.example import ExampleSizes, Job
from warpfold.cost.fake import fake_mesh
from warpfold.cost.rates import of_gpu
from warpfold.cost.record import UNIT
from warpfold.cost.recorder import Recorder
from warpfold.cost.replay import step_time
from warpfold.model.alphafold import HeadsConfig, ModelConfig
from warpfold.model.evoformer import Evoformer, EvoformerConfig
from warpfold.ops.dispatch import standing_for
from warpfold.ops.triton.launch import unlaunched
from warpfold.parallel.collectives import shard_sizes
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan

SEQUENCES, EXTRA, C_Z = 512, 1024, 128
SLICES = 16  # of a shard: rows of each are `chunk`
CASES = {5_000: (1, 2, 4, 8), 10_000: (1, 4, 8, 16), 20_000: (16, 32, 64), 30_000: (32, 64)}
GPU = "H100"


def plan_of(residues: int, ranks: int) -> Plan:
    """Create an in-place bf16 plan whose slices are parts of the shard."""
    return Plan(axial=ranks, chunk=max(residues // ranks // SLICES, 1), in_place=True, precision="bf16")


def held(residues: int, ranks: int) -> tuple[int, list[str]]:
    """Compute the peak bytes of the first rank in either stack, and the largest tensors at that moment."""
    found: list[Recorder] = []
    for rows, width, extra in ((SEQUENCES, 256, False), (EXTRA, 64, True)):
        with standing_for("cuda"), unlaunched(), fake_mesh(axial=ranks) as mesh, torch.device("meta"), torch.no_grad():
            stack = Evoformer(width, C_Z, EvoformerConfig(blocks=1), global_column=extra).eval()
            Execution(plan_of(residues, ranks), mesh).bind(stack)
            here = shard_sizes(residues, ranks)[0]
            masks = torch.empty(rows, residues), torch.empty(here, residues)
            with Recorder(unit=UNIT["cuda"]) as memory:
                m = torch.empty(rows, here, width, dtype=torch.bfloat16)
                z = torch.empty(here, residues, C_Z, dtype=torch.bfloat16)
                m, z = stack(m, z, *masks)
        found.append(memory)
    most = max(found, key=lambda memory: memory.peak)
    return most.peak, [f"{tuple(h.shape)} {h.bytes / 1e9:.2f} GB" for h in most.at_peak[:5]]


def row(residues: int, ranks: int) -> dict[str, Any]:
    """Compute one row of the table."""
    peak, largest = held(residues, ranks)
    model = ModelConfig(heads=HeadsConfig(pae=True))
    sizes = ExampleSizes(residues=residues, sequences=SEQUENCES, extra=EXTRA, templates=0)
    time = step_time(Job(model=model, sizes=sizes, recycles=0), plan_of(residues, ranks), of_gpu(GPU))
    return {
        "residues": residues,
        "ranks": ranks,
        "peak_gb": round(peak / 1e9, 2),
        "in_shards_of_z": round(peak * ranks / (residues**2 * C_Z * 2), 2),
        "seconds_of_a_pass_modelled": round(time.total, 1),
        "largest": largest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    arguments = parser.parse_args()
    rows = []
    for residues, counts in CASES.items():
        for ranks in counts:
            rows.append(row(residues, ranks))
            print(rows[-1], flush=True)
    if arguments.out:
        report = {"what": __doc__.splitlines()[0], "date": datetime.date.today().isoformat(), "gpu": GPU, "rows": rows}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
