"""One Evoformer block at AlphaFold2's sizes: time and peak memory of each plan, in one run on one machine.

    python benchmarks/block.py --out benchmarks/results/NAME.json        (some minutes on two cores)

Read the figures as ratios within the run: the first plan is the plain definition, everything at once.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from warpfold.model.evoformer import Evoformer, EvoformerConfig
from warpfold.parallel.plan import DTYPES, Plan, apply

SEQUENCES, RESIDUES, C_M, C_Z = 128, 256, 256, 128  # TARGETS, "Speed on a CPU"
CASES = [  # plan, and whether a backward pass follows
    (Plan(), False),
    (Plan(chunk=16, in_place=True), False),
    (Plan(chunk=4, in_place=True), False),
    (Plan(precision="bf16"), False),
    (Plan(chunk=16, in_place=True, precision="bf16"), False),
    (Plan(), True),
    (Plan(chunk=16), True),
    (Plan(precision="bf16"), True),
]


def measure(index: int, repeats: int) -> dict[str, object]:
    """Seconds (median) and peak memory above the imports of one case, in this process."""
    plan, backward = CASES[index]
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.manual_seed(0)
    stack = apply(plan, Evoformer(C_M, C_Z, EvoformerConfig(blocks=1)))
    dtype = DTYPES[plan.precision]
    seconds = []
    for _ in range(repeats + 1):
        m = torch.randn(SEQUENCES, RESIDUES, C_M, dtype=dtype, requires_grad=backward)
        z = torch.randn(RESIDUES, RESIDUES, C_Z, dtype=dtype, requires_grad=backward)
        masks = torch.ones(SEQUENCES, RESIDUES), torch.ones(RESIDUES, RESIDUES)
        start = time.perf_counter()
        with torch.set_grad_enabled(backward):
            out = stack(m, z, *masks)
            if backward:
                sum(x.float().square().mean() for x in out).backward()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base
    return {
        "plan": {name: value for name, value in vars(plan).items() if value not in (None, False)},
        "pass": "forward and backward" if backward else "forward",
        "seconds": round(statistics.median(seconds[1:]), 3),
        "peak_mib": peak // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(json.dumps(measure(arguments.case, arguments.repeats)))
        return
    results = []
    for index in range(len(CASES)):  # a process each, so that peaks do not mix
        command = [sys.executable, __file__, "--case", str(index), "--repeats", str(arguments.repeats)]
        results.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print(results[-1])
    report = {
        "what": f"Evoformer block, {SEQUENCES} x {RESIDUES}, c_m {C_M}, c_z {C_Z}",
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "results": results,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
