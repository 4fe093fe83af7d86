"""Fold a random protein with a whole model at a length, under several plans: seconds, and the peak of the tensors.

    python -m benchmarks.gpu_fold --settings monomer --residues 2048,4096 --plans whole,in-place --rows fold.jsonl

A row for each case as soon as it is there.  A case is warmed up by one block of the model at its length, so that its
seconds are of one pass through all blocks, without recycling (on a CPU under the profiler that counts the memory).  One
that runs out of memory says so, and the next runs.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from warpfold.cli.bench import measured
from warpfold.cost.example import ModelBench, random_example, random_model, shortened
from warpfold.cost.machine import describe
from warpfold.cost.measured_memory import most_allocated
from warpfold.cost.memory import TRUTH, predict_example
from warpfold.engine.packed import PackedWeights
from warpfold.files import row_file
from warpfold.parallel.plan import DTYPES, Plan

CHUNK = 128  # rows of z
PLANS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in-place": {"chunk": CHUNK, "in_place": True},
    "offload": {"chunk": CHUNK, "in_place": True, "offload": True},
}


def fold(given: ModelBench, plan: Plan, device: torch.device) -> dict[str, Any]:
    """Fold once by one block, and once by all, which is measured."""
    batch = random_example(given.model, given.sizes, device)
    batch = {name: x for name, x in batch.items() if name not in TRUTH}
    seconds = 0.0

    def once() -> None:
        nonlocal seconds
        start = time.perf_counter()
        predict_example(model, batch, 0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start

    with torch.no_grad():
        for config in (shortened(given.model, 1), given.model):
            model = random_model(config, plan, device).eval()
            packed = PackedWeights(model, DTYPES[plan.precision])
            peak = most_allocated(once, device)
            del packed
    return {"seconds": round(seconds, 3), "peak_mib": round(peak / 2**20, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default="monomer")
    parser.add_argument("--residues", default="2048,4096")
    parser.add_argument("--plans", default="whole,in-place", help=", ".join(PLANS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=Path, help="file for each row, a JSON object a line")
    given = parser.parse_args()
    device = torch.device(given.device)
    machine = describe(device)
    with row_file(given.rows) as sink:
        for residues in map(int, given.residues.split(",")):
            for name in given.plans.split(","):
                case = measured(given.settings, [], {"residues": residues, "templates": 0}, None, 0)
                case = replace(case, model=replace(case.model, templates=replace(case.model.templates, enabled=False)))
                plan = Plan(precision=case.plan.precision, **PLANS[name])
                row = {"what": f"inference, {case.sizes}, recycles 0, {plan.precision}", "way": name, "note": ""}
                try:
                    row |= fold(case, plan, device)
                except torch.OutOfMemoryError:
                    row["note"] = "out of memory"
                sink(row | {"device": machine["device"]})
                print(row, flush=True)
                if device.type == "cuda":
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
