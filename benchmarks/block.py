"""Time an Evoformer block at AlphaFold2's sizes and measure its peak memory, for each way to compute it.

    python benchmarks/block.py --out benchmarks/results/NAME.json        (some ten minutes on two cores)

`warpfold bench --block` alternates between the cases in one process. Here each case has its own process, whose peak is
measured, and there are cases with slices and with and without kept memory (`warpfold.device.keep_memory`). The
definitions without kept memory correspond to plain torch.

Compare only ratios within a run, or shares of the matrix multiplication rate that the run measured.
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
from dataclasses import dataclass
from pathlib import Path

import torch

from warpfold.cost.example import BlockSizes, RandomBlock
from warpfold.device import keep_memory
from warpfold.model.evoformer import EvoformerConfig
from warpfold.parallel.plan import DTYPES, Plan

SEQUENCES, RESIDUES, C_M, C_Z = 128, 256, 256, 128  # with true channels, as others report theirs
# What the products of the block alone cost, counted: the backward pass twice the forward, and the weights of attention
# once more.  (Ours multiplies more than that, what it does not keep; it is not counted in its favour.)
GFLOP = {"forward": 216, "forward and backward": 216 + 447}
WAITS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}  # as the command line has it
GEMM = 2048  # side of the matrices that give the rate


@dataclass(frozen=True)
class Case:
    """One way to compute the block."""

    plan: Plan  # with the kernels: "fast" is ours
    backward: bool
    kept: bool = True


def cases() -> list[Case]:
    """List the ways: each dtype, forward and both passes; the definitions with and without memory kept, then ours."""
    ways: list[Case] = []
    for precision in ("fp32", "bf16"):
        for backward in (False, True):
            for slices in ({}, {"chunk": 16, "in_place": True}) if not backward else ({},):
                for kernels, kept in (("definition", False), ("definition", True), ("fast", False), ("fast", True)):
                    plan = Plan(precision=precision, kernels=kernels, **slices)  # type: ignore[arg-type]
                    ways.append(Case(plan, backward, kept))
    return ways


def rate(dtype: torch.dtype) -> float:
    """Measure the best GFLOP/s over a few products of square matrices."""
    a, seconds = torch.randn(GEMM, GEMM).to(dtype), []
    for _ in range(6):
        start = time.perf_counter()
        torch.mm(a, a)
        seconds.append(time.perf_counter() - start)
    return 2 * GEMM**3 / min(seconds) / 1e9


def measure(case: Case, repeats: int) -> dict[str, object]:
    """Measure the seconds (median, minimum) and the peak memory of a case in this process, without the imports."""
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if case.kept:
        keep_memory()
    sizes = BlockSizes(sequences=SEQUENCES, residues=RESIDUES, c_m=C_M, c_z=C_Z, config=EvoformerConfig(blocks=1))
    stack = RandomBlock(sizes, case.plan, "cpu").stack
    dtype, seconds, rates = DTYPES[case.plan.precision], [], []
    for _ in range(repeats + 1):
        m = torch.randn(SEQUENCES, RESIDUES, C_M, dtype=dtype, requires_grad=case.backward)
        z = torch.randn(RESIDUES, RESIDUES, C_Z, dtype=dtype, requires_grad=case.backward)
        masks = torch.ones(SEQUENCES, RESIDUES), torch.ones(RESIDUES, RESIDUES)
        start = time.perf_counter()
        with torch.set_grad_enabled(case.backward):
            out = stack(m, z, *masks)
            if case.backward:
                sum(x.float().square().mean() for x in out).backward()
        seconds.append(time.perf_counter() - start)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base
        del m, z, out
        rates.append(rate(dtype))
    passes = "forward and backward" if case.backward else "forward"
    best, gemm = min(seconds[1:]), max(rates)
    return {
        "plan": {name: getattr(case.plan, name) for name in ("precision", "kernels", "chunk", "in_place")},
        "pass": passes,
        "memory kept": case.kept,
        "seconds": round(statistics.median(seconds[1:]), 3),
        "least": round(best, 3),
        "peak_mib": peak // 1024,
        "gemm_gflops": round(gemm),
        "share_of_gemm": round(GFLOP[passes] / best / gemm, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1, help="how often all cases are run, in turns")
    parser.add_argument("--only", default="", help="cases of these words alone, as 'fp32,fast'")
    parser.add_argument("--jax", metavar="PYTHON", help="run the official JAX code beside ours (jax_block.py)")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    ways = cases()
    if arguments.case is not None:
        print(json.dumps(measure(ways[arguments.case], arguments.repeats)))
        return
    words = arguments.only.split(",")
    chosen = [index for index, case in enumerate(ways) if all(word in str(case) for word in words)]
    commands = [[sys.executable, __file__, "--case", str(index)] for index in chosen]
    if arguments.jax:
        there = [arguments.jax, str(Path(__file__).with_name("jax_block.py")), "--sizes", f"{SEQUENCES},{RESIDUES}"]
        commands += [[*there, *more] for more in (["--subbatch", "4"], [], ["--backward"])]
    results = []
    for number in range(arguments.rounds):
        for command in commands:  # a process each, so that peaks do not mix
            command = [*command, "--repeats", str(arguments.repeats)]
            done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **WAITS})
            results.append({"round": number, **json.loads(done.stdout)})
            print(results[-1], flush=True)
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
