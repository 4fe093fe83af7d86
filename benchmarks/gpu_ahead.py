"""Compile on all cores what a call of gpu_session.sh is about to launch, so that no part of it waits for the compiler.

    python benchmarks/gpu_ahead.py --step monomer 256 bf16 --doctor monomer bf16 --op attention starting:256,ending:256

Compiles for the GPU that is there, by its launch table, and makes the launchers too; where there is none, for an H100
by the default table.  Exit code 1 where a kernel could not be compiled.
"""

import argparse
import os
import sys
from dataclasses import replace

import torch

from warpfold import settings
from warpfold.bench.ahead import AheadJob, compile_shares
from warpfold.bench.doctor import cases_of, cut
from warpfold.bench.kernels import Workload
from warpfold.check.sizes import shapes
from warpfold.cli.bench import measured
from warpfold.cost.example import ExampleSizes, ModelBench
from warpfold.ops.triton.launch import SHIPPED, table_for


def graph_tests() -> list[ModelBench]:
    """Return what the tests of replayed steps train, but that each has an example to itself."""
    from tests.helpers import tiny_config
    from tests.laws.test_graphs import CASES, LOSSES, WORK

    model = tiny_config(recycles=2)
    sizes = ExampleSizes(residues=WORK.residues, sequences=WORK.sequences, extra=WORK.extra, templates=WORK.templates)
    return [
        ModelBench(
            model=model, loss=LOSSES, optim=config, plan=replace(plan, batch=1), sizes=sizes, recycles=WORK.recycles
        )
        for plan, config in CASES.values()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pair = {"nargs": 2, "action": "append", "default": []}
    three = {**pair, "nargs": 3, "metavar": ("SETTINGS", "RESIDUES", "DTYPE")}
    parser.add_argument("--step", **three, help="a block and a step")
    parser.add_argument("--graphs", action="store_true", help="the steps of tests/laws/test_gpu_graphs.py")
    parser.add_argument("--doctor", **pair, metavar=("SETTINGS", "DTYPE"), help="what `doctor --kernels` checks")
    parser.add_argument(
        "--op", **pair, metavar=("OP", "SHAPES"), help="an operation at shapes of `bench --op`, in bf16"
    )
    parser.add_argument("--most", type=int, help="compile so many kernels at most: to rehearse")
    given = parser.parse_args()
    cuda = torch.cuda.is_available()
    table, arch = SHIPPED / "default.json", 90
    if cuda:
        major, minor = torch.cuda.get_device_capability()
        table, arch = table_for(torch.device("cuda"))[0].path, 10 * major + minor
    workloads = []
    for op, named in given.op:
        found = shapes(op, named.split(","))
        if not found:
            parser.error(f"--op {op} {named}: none is a shape of it")
        workloads += [Workload(op, case, "bf16") for _, case in found]
    workloads += [
        Workload(case.op, cut(case, torch.device("cuda")), dtype)
        for source, dtype in given.doctor
        for case in cases_of(settings.load(source), source)
    ]
    steps = [  # of a model with one block: it launches what all do
        measured(source, [f"plan.precision={dtype}"], {"residues": int(residues)}, 1, 0)
        for source, residues, dtype in given.step
    ]
    steps += graph_tests() if given.graphs else []
    job = AheadJob(tuple(workloads), tuple(steps), table, arch, most=given.most, launchers=cuda)
    compiled, failed = compile_shares(job, 1 if given.most else os.cpu_count() or 1)
    print(f"{compiled} kernels compiled, {len(failed)} not", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
