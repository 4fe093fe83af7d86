"""Compare estimated with measured memory of plans: `python benchmarks/memory.py`.

Each case runs in its own process. Tensor bytes are those of torch's allocator, including temporary buffers of
operations: from torch's profiler on a CPU, and from its statistics on a GPU (`--device cuda`). Process memory is the
growth of the largest resident size (CPU, Linux).
"""

import argparse
import datetime
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from warpfold.cost.example import ExampleSizes, Job, shortened
from warpfold.cost.machine import describe
from warpfold.cost.memory import estimate_memory, measured_memory, with_margin, work
from warpfold.engine.optim import OptimConfig
from warpfold.model.alphafold import ModelConfig
from warpfold.model.losses import LossConfig
from warpfold.parallel.plan import Plan
from warpfold.settings import build, load

LOSSES = LossConfig(violation=1.0, experimentally_resolved=0.01)
SIZES = [(96, 128, 256, 2), (192, 32, 64, 1), (384, 16, 32, 0)]
SHORT = SIZES[:2]  # of the presets but the first
QUICK = [(96, 4, 8, 0)]
TRAINED = 96  # residues, at most
FOLDING: list[dict[str, Any]] = [
    {},
    {"chunk": 16, "in_place": True},
    {"precision": "bf16"},
    {"chunk": 16, "in_place": True, "precision": "bf16"},
]
TRAINING: list[dict[str, Any]] = [
    {},
    {"recompute": "block"},
    {"recompute": "layer"},
    {"recompute": "block", "keep_blocks": 2},
    {"recompute": "block", "precision": "bf16"},
]


def resident_memory(job: Job, plan: Plan) -> int:
    """Measure the largest growth of the resident memory of this process during a job, bytes (Linux)."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith(name + ":")).split()[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = status("VmRSS")
    work(job, plan)
    return status("VmHWM") - before


def model_of(preset: str, blocks: int) -> ModelConfig:
    """Build the model of a preset with its width and few blocks."""
    given = build(ModelConfig, load(preset).get("model", {}), preset)
    short = shortened(given, blocks)
    return replace(short, evoformer=replace(short.evoformer, blocks=blocks))


def cases(presets: list[str], quick: bool) -> list[dict[str, Any]]:
    """List the grid of presets, sizes and plans."""
    found = []
    for preset in presets:
        for residues, sequences, extra, templates in QUICK if quick else SIZES if preset == presets[0] else SHORT:
            sizes = {"residues": residues, "sequences": sequences, "extra": extra, "templates": templates}
            plans = [(plan, False) for plan in FOLDING]
            if residues <= TRAINED:
                plans += [(plan, True) for plan in TRAINING]
            found += [{"preset": preset, "sizes": sizes, "plan": plan, "training": train} for plan, train in plans]
    return found


def run_case(case: dict[str, Any], device: str) -> dict[str, Any]:
    """Estimate and measure one case in this process."""
    sizes, plan = ExampleSizes(**case["sizes"]), Plan(**case["plan"])
    more: dict[str, Any] = {"loss": LOSSES, "optim": OptimConfig()} if case["training"] else {}
    blocks = 4 if plan.keep_blocks else 2
    job = Job(model=model_of(case["preset"], blocks), sizes=sizes, recycles=1, **more)
    torch.set_num_threads(1)
    small = ExampleSizes(residues=24, sequences=4, extra=4, templates=sizes.templates)
    work(replace(job, sizes=small), plan, device)  # libraries are loaded, and their code comes into memory, once
    resident = resident_memory(job, plan) if device == "cpu" else None
    tensors = measured_memory(job, plan, device)
    estimate = estimate_memory(job, plan, device)
    return {
        **case,
        "estimate": estimate.peak,
        "tensors": tensors,
        "resident": resident,
        "with_margin": with_margin(estimate.peak, device),
        "at_peak": estimate.at_peak,
        "ratio": round(estimate.peak / tensors, 4),
    }


def main() -> None:
    """Run the grid, print a line for each case, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help="one case as JSON, in this process")
    parser.add_argument("--quick", action="store_true", help="the shortest length alone")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--presets", default="monomer,tiny,multimer")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    given = parser.parse_args()
    if given.case:
        print(json.dumps(run_case(json.loads(given.case), given.device)))
        return
    found = []
    for case in cases(given.presets.split(","), given.quick):
        command = [sys.executable, "-m", "benchmarks.memory", "--device", given.device, "--case", json.dumps(case)]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            print(case, "failed:", ran.stderr.strip().splitlines()[-1:], flush=True)
            continue
        row = json.loads(ran.stdout.splitlines()[-1])
        found.append(row)
        says = f"{row['preset']:9}{list(row['sizes'].values())} {row['plan']} {'training' if row['training'] else ''}"
        mb = {
            name: "" if row[name] is None else f"{row[name] / 1e6:,.0f}"
            for name in ("estimate", "tensors", "resident", "with_margin")
        }
        print(says, mb, row["ratio"], flush=True)
        if given.output:  # as they are measured: a run that is stopped keeps what it has
            machine = describe(torch.device(given.device))
            report = {"date": str(datetime.date.today()), "machine": machine, "cases": found}
            given.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
