"""Compile the kernels of a model before they are launched, on many processes, into the cache that Triton looks into.

What will be launched is recorded on tensors without memory; each process records it all and compiles its share.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from warpfold.bench.kernels import Workload, launches_of, launching
from warpfold.bulk import pool
from warpfold.cost.example import ModelBench, RandomBlock, TrainingStep
from warpfold.ops.triton.launch import KernelLaunch, read, table_used
from warpfold.parallel.plan import Plan
from warpfold.progress import Progress, no_progress


@dataclass(frozen=True)
class AheadJob:
    """A share of the kernels of some operations, and of the blocks and steps of some models: of `shares`, the one
    numbered `share`.

    table: the launch table of the device that they are for.  most: kernels of all shares together.
    launchers: also what Triton launches each with, which needs the driver's library.
    """

    workloads: tuple[Workload, ...]
    given: tuple[ModelBench, ...]
    table: Path
    arch: int  # 90 of compute capability 9.0
    share: int = 0
    shares: int = 1
    most: int | None = None
    launchers: bool = False

    def divided(self, shares: int) -> Iterator["AheadJob"]:
        """Yield so many jobs that are this one together."""
        return (replace(self, share=share, shares=shares) for share in range(shares))


def compile_shares(job: AheadJob, workers: int, progress: Progress = no_progress) -> tuple[int, list[str]]:
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
        for done, (compiled, reasons) in enumerate(results):
            progress(done + 1, workers, "compiling")
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
    with table_used(read(job.table)):
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
