"""Compile on all cores what a call of gpu_session.sh is about to launch, so that no part of it waits for the compiler.

What will be launched is recorded on tensors without memory; each process records it all and compiles its share, into
the cache that Triton looks into.

    python benchmarks/gpu_ahead.py --step monomer 256 bf16 --doctor monomer bf16 --op attention starting:256,ending:256

Compiles for the GPU that is there, by its launch table, and makes the launchers too; where there is none, for an H100
by its family's table.  Exit code 1 where a kernel could not be compiled.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from warpfold import settings
from warpfold.bench.doctor import cases_of, cut
from warpfold.bench.kernels import Workload, launches_of, launching
from warpfold.bulk import pool
from warpfold.check.sizes import shapes
from warpfold.cli.bench import measured
from warpfold.cost.example import ExampleSizes, ModelBench, RandomBlock, TrainingStep
from warpfold.ops.triton.launch import SHIPPED, KernelLaunch, read, table_used, tables_for
from warpfold.parallel.plan import Plan


@dataclass(frozen=True)
class AheadJob:
    """A share of the kernels of some operations, and of the blocks and steps of some models: of `shares`, the one
    numbered `share`.

    tables: the launch tables of the device that they are for, the first goes before the others.
    most: kernels of all shares together.
    launchers: also what Triton launches each with, which needs the driver's library.
    """

    workloads: tuple[Workload, ...]
    given: tuple[ModelBench, ...]
    tables: tuple[Path, ...]
    arch: int  # 90 of compute capability 9.0
    share: int = 0
    shares: int = 1
    most: int | None = None
    launchers: bool = False

    def divided(self, shares: int) -> Iterator["AheadJob"]:
        """Yield so many jobs that are this one together."""
        return (replace(self, share=share, shares=shares) for share in range(shares))


def compile_shares(job: AheadJob, workers: int) -> tuple[int, list[str]]:
    """Compile everything in `workers` processes; return how many kernels were, and of each that could not be, why.

    Errors: RuntimeError where there was nothing to compile.
    """
    found, failed = 0, []
    with pool(workers) as executor:
        results = (
            map(compile_share, job.divided(1))
            if executor is None
            else executor.map(compile_share, job.divided(workers))
        )
        for compiled, reasons in results:
            found += compiled
            failed += reasons
    if not found + len(failed):
        raise RuntimeError("nothing was compiled: no launch was recorded")
    return found, failed


def compile_share(job: AheadJob) -> tuple[int, list[str]]:
    """Compile one share; return how many kernels were compiled, and of each that could not be, why."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import PTXASError
    from triton.compiler.errors import CompilationError

    from warpfold.ops.triton.compile import compiled, identity, make_launcher, reason

    target, done, failed = GPUTarget("cuda", job.arch, 32), 0, []
    distinct = {identity(launch, target): launch for launch in recorded_launches(job)}
    for key in sorted(distinct)[: job.most][job.share :: job.shares]:
        try:
            kernel = compiled(distinct[key], target)
            if job.launchers:
                make_launcher(kernel)
            done += 1
        except (PTXASError, CompilationError, RuntimeError) as error:  # the last of a pass of the compiler
            failed.append(f"{distinct[key].kernel.name}: {reason(error)}")
    return done, failed


def recorded_launches(job: AheadJob) -> list[KernelLaunch]:
    """Return every launch of the job's operations, of its blocks and of its steps, whatever its share."""
    found: list[KernelLaunch] = []
    with table_used(*map(read, job.tables)):
        for workload in job.workloads:
            found += launches_of(workload)
        for given in job.given:
            found += _of_model(given)
    return found


def _of_model(given: ModelBench) -> list[KernelLaunch]:
    with torch.device("meta"):
        block = RandomBlock(given.block, Plan(precision=given.plan.precision), "meta")
        with launching() as of_block:
            with torch.no_grad():
                block.forward()
            torch.autograd.grad(block.forward(), block.wanted, block.grads)
        step = TrainingStep(given, "meta")
        step.bind(given.plan)
        with launching() as of_step:
            step()
    return of_block + of_step


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
    tables, arch = (SHIPPED / "sm_90.json",), 90
    if cuda:
        major, minor = torch.cuda.get_device_capability()
        arch = 10 * major + minor
        tables = tuple(table.path for table in tables_for(torch.device("cuda")))
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
    job = AheadJob(tuple(workloads), tuple(steps), tables, arch, most=given.most, launchers=cuda)
    compiled, failed = compile_shares(job, 1 if given.most else os.cpu_count() or 1)
    print(f"{compiled} kernels compiled, {len(failed)} not", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
