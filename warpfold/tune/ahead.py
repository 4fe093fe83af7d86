"""Compile the kernels of a model before they are launched, on many processes, into the cache that Triton looks into.

What will be launched is recorded on tensors without memory; each process records it all and compiles its share.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from warpfold.bulk import pool
from warpfold.ops.triton.launch import KernelLaunch, read, table_used
from warpfold.parallel.plan import Plan
from warpfold.progress import Progress, no_progress
from warpfold.tune.example import ModelBench, RandomBlock, TrainingStep
from warpfold.tune.kernel_bench import Workload, launches_of, launching
from warpfold.tune.sizes import shapes

Shapes = tuple[tuple[str, str], ...]  # operations and their shapes, ("attention", "starting:256")


@dataclass(frozen=True)
class AheadJob:
    """A share of the kernels of some operations, a block and a step: of `shares`, the one numbered `share`.

    table: the launch table of the device that they are for.  given: None for no block and no step.
    """

    shapes: Shapes
    given: ModelBench | None
    table: Path
    arch: int  # 90 of compute capability 9.0
    share: int = 0
    shares: int = 1


def compile_shares(
    shapes: Shapes,
    given: ModelBench | None,
    table: Path,
    arch: int,
    workers: int,
    progress: Progress = no_progress,
) -> dict[str, int]:
    """Compile everything in `workers` processes; return how many kernels were, and how many could not be."""
    jobs = [AheadJob(shapes, given, table, arch, share, workers) for share in range(workers)]
    found = {"compiled": 0, "failed": 0}
    with pool(workers) as executor:
        results = map(compile_share, jobs) if executor is None else executor.map(compile_share, jobs)
        for done, (compiled, failed) in enumerate(results):
            progress(done + 1, workers, "compiling")
            found["compiled"] += compiled
            found["failed"] += failed
    if not found["compiled"]:
        raise RuntimeError("nothing was compiled: no launch was recorded")
    return found


def compile_share(job: AheadJob) -> tuple[int, int]:
    """Compile one share; return how many kernels were compiled, and how many could not be: a launch will say why."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import PTXASError
    from triton.compiler.errors import CompilationError

    from warpfold.ops.triton.compile import compiled, identity

    target, done, failed = GPUTarget("cuda", job.arch, 32), 0, 0
    distinct = {identity(launch, target): launch for launch in recorded_launches(job)}
    for key in sorted(distinct)[job.share :: job.shares]:
        try:
            compiled(distinct[key], target)
            done += 1
        except (PTXASError, CompilationError):
            failed += 1
    return done, failed


def recorded_launches(job: AheadJob) -> list[KernelLaunch]:
    """Return every launch of the job's operations, of its block and of its step, whatever its share."""
    found: list[KernelLaunch] = []
    with table_used(read(job.table)):
        for op, shape in job.shapes:
            for _, case in shapes(op, [shape]):
                found += launches_of(Workload(op, case, "bf16"))
        if job.given is not None:
            found += _of_model(job.given)
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
