"""Memory of a plan: estimated as the running sum of a recorded run's allocations, and measured by torch's allocator."""

import gc
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import torch

from warpfold import settings
from warpfold.batch import LABELS
from warpfold.cost.example import (
    ExampleSizes,
    Job,
    random_example,
    run_example,
    shortened,
)
from warpfold.cost.record import (
    Device,
    ExampleRecord,
    exchange_plan,
    features_of,
    record_example,
    record_optimizer,
    step_share,
)
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.engine.packed import PackedWeights
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import DTYPES, Plan

# Most moments of a course.
MAX_MOMENTS = 300
# Memory in addition to tensors, as a fraction of their bytes and in bytes: workspaces of torch's libraries and
# fragmentation. The values for GPUs are assumptions.
MARGIN = {"cpu": (0.05, 192 << 20), "cuda": (0.05, 512 << 20), "mps": (0.05, 512 << 20)}


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of one rank on its device in bytes, at the peak and over the run.

    peak: all tensors including weights and features. weights: parameters, packed copies, gradients and optimizer state.
    at_peak: bytes by owner, whose sum is the peak. course: moments of the run in order, as pairs of the name of the
    running code and the bytes by owner. host: bytes in host memory, if the run uses another device.
    at_least: whether it is a lower bound (`planner.lower_bound`).
    """

    peak: int
    weights: int
    features: int
    at_peak: dict[str, int] = field(default_factory=dict)
    course: list[tuple[str, dict[str, int]]] = field(default_factory=list)
    host: int = 0
    at_least: bool = False


def with_margin(bytes: int, device: str = "cpu") -> int:
    """Compute the bytes that must be free on a device for a number of bytes of tensors."""
    share, fixed = MARGIN[kind_of(device)]
    return int(bytes * (1 + share)) + fixed


def kind_of(device: str) -> Device:
    """Return the kind of a device such as "cuda:1"."""
    return "cuda" if device.startswith("cuda") else "mps" if device.startswith("mps") else "cpu"


def estimate_memory(job: Job, plan: Plan, device: str = "cpu") -> MemoryEstimate:
    """Estimate the memory of a plan's first rank during a job. Other ranks need no more.

    device: "cpu", "cuda" or "mps". The additional memory of `graph` and `compile` is unknown and not included.
    """
    plan = replace(plan, threads=None, compile=False, graph=False, tf32=False)
    return _estimate_memory(job, plan, kind_of(device))


@lru_cache(maxsize=4096)
def _estimate_memory(job: Job, plan: Plan, device: Device) -> MemoryEstimate:
    optim = step_share(job, plan, 1) if job.learns else None
    # Hierarchical sums need only few bytes more, but depend on the placement of the ranks, which is unknown here.
    plain = exchange_plan(replace(plan, sync=replace(plan.sync, strategy="plain")))
    weights = record_optimizer(job.model, plain, optim, device, job.finetune)
    # A prediction on a GPU copies the features of one pass at a time.
    passes = job.model.ensemble * (job.recycles + 1 if device == "cpu" or job.learns else 1)
    features = sum(x.nbytes for x in features_of(job, passes).values()) * plan.batch
    run = record_example(job, plan, device)
    at_peak, course = _timeline(run, {"weights": weights.held, "features": features})
    if job.gradient == "all":
        # Only one pass was recorded, but every pass saves tensors.
        for owner_bytes in (at_peak, *(owner_bytes for _, owner_bytes in course)):
            owner_bytes["kept"] = owner_bytes.get("kept", 0) * (job.recycles + 1)
    for name, peak in (("loading", weights.loading), ("update", weights.update)):
        moment = {"weights": weights.held, "features": features if name == "update" else 0, name: peak - weights.held}
        course.insert(0 if name == "loading" else len(course), (name, moment))
        at_peak = max(at_peak, moment, key=lambda owner_bytes: sum(owner_bytes.values()))
    host = run.host_peak
    if plan.offload and plan.in_place:
        # z in host memory, which has no memory on "meta" (warpfold/host.py). An ensemble also has a recycled copy and a
        # sum.
        z_bytes = job.sizes.residues**2 * job.model.c_z * DTYPES[plan.precision].itemsize
        host += min(job.model.ensemble, 3) * z_bytes
    return MemoryEstimate(
        peak=sum(at_peak.values()),
        weights=weights.held,
        features=features,
        at_peak={name: owner_bytes for name, owner_bytes in at_peak.items() if owner_bytes},
        course=course,
        host=host,
    )


def _timeline(run: ExampleRecord, always: dict[str, int]) -> tuple[dict[str, int], list[tuple[str, dict[str, int]]]]:
    """Sum the bytes by owner, at the peak and at the worst moment of each span of the course."""
    last = run.moments + 1
    changes: dict[str, list[int]] = defaultdict(lambda: [0] * (last + 1))
    for piece in run.pieces:
        if not piece.host:
            byte_changes = changes[run.watch.owner_of(piece)]
            byte_changes[piece.born] += piece.bytes
            byte_changes[last if piece.died is None else piece.died] -= piece.bytes
    # The saved tensors of blocks that were not run start when the block that represents them has ended, and end when
    # its first saved tensor is released.
    since = run.watch.backward_from
    for block, count in run.stands_for.items():
        ended = run.watch.begun.get((block[0], block[1] + 1))
        if since is None or ended is None:
            continue
        block_pieces = [p for p in run.pieces if p.place.block == block and p.born <= ended and not p.place.backward]
        if saved := [(p.died, p.bytes) for p in block_pieces if p.died is not None and p.died > since and not p.host]:
            kept_bytes = (count - 1) * sum(size for _, size in saved)
            changes["kept"][ended] += kept_bytes
            changes["kept"][min(died for died, _ in saved)] -= kept_bytes
    owners = {name: list(accumulate(byte_changes)) for name, byte_changes in changes.items()}
    total = [sum(at) for at in zip(*owners.values())] if owners else [0] * (last + 1)

    def at(moment: int) -> dict[str, int]:
        return always | {name: byte_changes[moment] for name, byte_changes in owners.items() if byte_changes[moment]}

    begun = [*run.course, (last, "")]
    spans = [(start, stop, name) for (start, name), (stop, _) in pairwise(begun) if stop > start]
    joined = -(-len(spans) // MAX_MOMENTS) if spans else 1
    course = []
    for first in range(0, len(spans), joined):
        group = spans[first : first + joined]
        worst = max(range(group[0][0], group[-1][1]), key=total.__getitem__)
        course.append((group[0][2], at(worst)))
    return at(max(range(last), key=total.__getitem__)), course


# Measurement


def work(job: Job, plan: Plan, device: torch.device | str = "cpu") -> None:
    """Run a job once on one device with random numbers: load the model, and fold an example or train on it."""
    ensemble = job.model.ensemble
    batch = random_example(job.model, job.sizes, device, (job.recycles + 1) * ensemble)
    if not job.learns:
        batch = {name: x for name, x in batch.items() if name not in LABELS}
    torch.manual_seed(0)
    model = AlphaFold(job.model).to(device).train(job.learns)
    Execution(plan).bind(model)
    model.noise.seed(0)
    if job.loss is None:
        packed = PackedWeights(model.requires_grad_(job.gradient is None), DTYPES[plan.precision])
        run_example(model, batch, job)
        del packed
        return
    scaling = plan.precision == "fp16"
    optimizer = Optimizer(model, job.optim or OptimConfig(), dtype=DTYPES[plan.precision], scaling=scaling)
    run_example(model, batch, job)
    optimizer.collect()
    optimizer.step(0)


def measured_memory(job: Job, plan: Plan, device: torch.device | str = "cpu") -> int:
    """Measure the peak of torch's allocator during a job in this process."""
    return most_allocated(lambda: work(job, plan, device), device)


def most_allocated(run: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Measure the peak of torch's allocator while a function runs, in bytes above the memory before.

    Workspaces of operations are included.
    """
    # Existing garbage that is released during the run would reduce the result.
    gc.collect()
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
    """Suppress the progress and warning lines that torch 2.13's profiler writes to file descriptor 2."""
    sys.stderr.flush()
    original = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)


@dataclass(frozen=True)
class MemoryCheck:
    """The estimated and the measured memory of a small job on a device, in bytes."""

    device: str
    estimated: int
    measured: int

    def says(self) -> str:
        """Format as "memory: estimated 15.7 MB, measured 15.6 MB; a plan leaves 5 % and 268 MB more free"."""
        share, fixed = MARGIN[kind_of(self.device)]
        return (
            f"memory: estimated {self.estimated / 1e6:.1f} MB, measured {self.measured / 1e6:.1f} MB; "
            f"a plan leaves {share:.0%} and {fixed / 1e6:.0f} MB more free"
        )


def check_memory(device: torch.device) -> MemoryCheck:
    """Fold a small random example with the tiny preset on a device, and compare its memory with the estimate."""
    model = settings.build(ModelConfig, settings.load("tiny").get("model", {}), "tiny")
    sizes = ExampleSizes(residues=64, sequences=16, extra=32, templates=0)
    job = Job(model=shortened(model, 2), sizes=sizes, recycles=1)
    estimated = estimate_memory(job, Plan(), device.type).peak
    return MemoryCheck(device.type, estimated, measured_memory(job, Plan(), device))
