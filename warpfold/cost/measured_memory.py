"""What a job really takes, on a CPU and on a GPU: the bytes that torch's allocator gives.

To hold `estimate_memory` against.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from warpfold import settings
from warpfold.cost import memory
from warpfold.cost.example import ExampleSizes, Job, random_example, shortened
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.engine.packed import PackedWeights
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import DTYPES, Plan


def work(job: Job, plan: Plan, device: torch.device | str = "cpu") -> None:
    """Do a job once on one device, with random numbers: load the model, and fold an example or train on it."""
    ensemble = job.model.ensemble
    batch = random_example(job.model, job.sizes, device, (job.recycles + 1) * ensemble)
    if not job.learns:
        batch = {name: x for name, x in batch.items() if name not in memory.TRUTH}
    torch.manual_seed(0)
    model = AlphaFold(job.model).to(device).train(job.learns)
    Execution(plan).bind(model)
    model.noise.seed(0)
    if job.loss is None:
        packed = PackedWeights(model.requires_grad_(job.gradient is None), DTYPES[plan.precision])
        if job.gradient is not None:
            memory.gradient_of_example(model, batch, job.recycles, job.gradient)
        else:
            with torch.no_grad():
                memory.predict_example(model, batch, job.recycles)
        del packed
        return
    scaling = plan.precision == "fp16"
    optimizer = Optimizer(model, job.optim or OptimConfig(), dtype=DTYPES[plan.precision], scaling=scaling)
    memory.train_on_example(model, batch, job.recycles, job.loss)
    optimizer.collect()
    optimizer.step(0)


def measured_memory(job: Job, plan: Plan, device: torch.device | str = "cpu") -> int:
    """Return the most bytes that torch's allocator has given at one time while a job was done, by one process."""
    return most_allocated(lambda: work(job, plan, device), device)


def most_allocated(run: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Return the most bytes that torch's allocator has given at one time while a function ran, beyond those before.

    Of operations and of what they need inside.
    """
    gc.collect()  # else what is garbage already may be given back meanwhile, and would count as less
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with without_stderr(), torch.autograd.profiler.profile(profile_memory=True) as profile:
        run()
    results = profile.kineto_results
    now = most = 0
    for event in sorted(results.events() if results else (), key=lambda e: e.start_ns()):
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            now += event.nbytes()
            most = max(most, now)
    return most


@contextmanager
def without_stderr() -> Iterator[None]:
    """Suppress the lines that torch 2.13's profiler writes to file descriptor 2: what it does, and what it missed."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@dataclass(frozen=True)
class MemoryCheck:
    """Bytes that a small job was said to need on a device, and those it took."""

    device: str
    estimated: int
    measured: int

    def says(self) -> str:
        """ "memory: estimated 15.7 MB, measured 15.6 MB; a plan leaves 5 % and 268 MB more free"."""
        share, fixed = memory.MARGIN[memory.kind_of(self.device)]
        return (
            f"memory: estimated {self.estimated / 1e6:.1f} MB, measured {self.measured / 1e6:.1f} MB; "
            f"a plan leaves {share:.0%} and {fixed / 1e6:.0f} MB more free"
        )


def check_memory(device: torch.device) -> MemoryCheck:
    """Fold a small random example with the tiny preset on a device, and compare what it takes with the estimate."""
    model = settings.build(ModelConfig, settings.load("tiny").get("model", {}), "tiny")
    sizes = ExampleSizes(residues=64, sequences=16, extra=32, templates=0)
    job = Job(model=shortened(model, 2), sizes=sizes, recycles=1)
    estimated = memory.estimate_memory(job, Plan(), device.type).peak
    return MemoryCheck(device.type, estimated, measured_memory(job, Plan(), device))
