"""How much memory a plan needs, found by running the model's own code on tensors without memory.

Nothing is computed and nothing is stored: every operation says which shapes it makes, those of ours by running what
computes them (ops/cpu, or the launchers of ops/triton), and what they make is followed from its making to its release.
Blocks of a stack are alike, so a few are run, and what one of them keeps for the backward pass counts for those that
are not.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import torch

from warpfold.batch import Batch
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.engine.packed import PackedWeights
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.model.losses import total_loss
from warpfold.ops import dispatch
from warpfold.ops.triton.launch import unlaunched
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import Mesh
from warpfold.parallel.plan import DTYPES, Plan
from warpfold.tune.example import left_out, shortened
from warpfold.tune.fake import Memory, fake_batch, fake_ranks
from warpfold.tune.job import Job

Device = Literal["cpu", "cuda"]
UNIT = {"cpu": 64, "cuda": 512}  # bytes: torch's allocators give multiples of these
BLOCKS = 3  # of a stack that are run: the first, one that stands for others, the last
# Beside what tensors hold: workspaces of torch's libraries and what lies unused between tensors, as a share of them
# and in bytes.  Not measured on a GPU.
MARGIN = {"cpu": (0.05, 64 << 20), "cuda": (0.05, 512 << 20)}


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """What one rank holds on its device at the peak, in bytes, and over the run.

    peak: of all tensors, weights and features included.  weights: parameters, packed copies, gradients, the optimizer's
    state.  at_peak: by owner; the peak is their sum.  course: moments of the run in order, by name of what runs, and
    what each owner holds then.  host: in host memory, where a run on another device keeps something there.
    """

    peak: int
    weights: int
    features: int
    at_peak: dict[str, int] = field(default_factory=dict)
    course: list[tuple[str, dict[str, int]]] = field(default_factory=list)
    host: int = 0


def with_margin(bytes: int, device: str = "cpu") -> int:
    """Return what must be free on a device for so many bytes of tensors."""
    share, fixed = MARGIN["cuda" if device.startswith("cuda") else "cpu"]
    return int(bytes * (1 + share)) + fixed


def estimate_memory(job: Job, plan: Plan, device: str = "cpu") -> MemoryEstimate:
    """Return what the first rank of a plan holds while it does a job; others hold no more.

    device: "cpu" or "cuda".  `kernels = "strict"` counts as "fast".
    """
    kind: Device = "cuda" if device.startswith("cuda") else "cpu"
    kernels = "fast" if plan.kernels == "strict" else plan.kernels
    return _estimate(job, replace(plan, threads=None, compile=False, graph=False, tf32=False, kernels=kernels), kind)


@lru_cache(maxsize=4096)
def _estimate(job: Job, plan: Plan, device: Device) -> MemoryEstimate:
    weights = _weights(job.model, plan, job.optim, job.training, device)
    features = sum(x.nbytes for x in features_of(job).values()) * plan.batch
    more = max(job.model.evoformer.blocks - BLOCKS, 0)
    run = _run(job, plan, device, BLOCKS)
    peak = run.peak
    if more and job.training:  # each block more keeps as much as the last one that was run
        peak += more * (peak - _run(job, plan, device, BLOCKS - 1).peak)
    held = {"weights": weights, "features": features, "run": peak}
    return MemoryEstimate(peak=sum(held.values()), weights=weights, features=features, at_peak=held)


def features_of(job: Job, passes: int | None = None) -> Batch:
    """Return the features of a job, without memory; passes: by default all there are."""
    sizes = job.sizes
    passes = (job.recycles + 1) * job.model.ensemble if passes is None else passes
    axes = {"res": sizes.residues, "seq": sizes.sequences, "extra": sizes.extra, "pass": passes}
    axes |= {"tmpl": sizes.templates} if job.model.templates.enabled else {}
    axes |= {"row": sizes.sequences + sizes.extra} if job.model.multimer is not None else {}
    return {name: x for name, x in fake_batch(**axes).items() if name not in left_out(job.model)}


def _weights(model: ModelConfig, plan: Plan, optim: OptimConfig | None, training: bool, device: Device) -> int:
    """Return the bytes of everything that lies on the device as long as a model does; each block has the same."""
    most = max(model.evoformer.blocks, model.extra_blocks)
    if most <= BLOCKS:
        return _weights_of(model, plan, optim, training, device)
    few = _weights_of(shortened(model, 2), plan, optim, training, device)
    for name in ("evoformer", "extra_blocks"):
        blocks = model.evoformer.blocks if name == "evoformer" else model.extra_blocks
        changed = replace(model.evoformer, blocks=min(blocks, 3)) if name == "evoformer" else min(blocks, 3)
        one = _weights_of(replace(shortened(model, 2), **{name: changed}), plan, optim, training, device)
        few += max(blocks - 2, 0) * (one - _weights_of(shortened(model, 2), plan, optim, training, device))
    return few


@lru_cache(maxsize=256)
def _weights_of(model: ModelConfig, plan: Plan, optim: OptimConfig | None, training: bool, device: Device) -> int:
    with fake_ranks(plan.data, plan.axial, plan.branch) as mesh, Memory(unit=UNIT[device]) as memory:
        made = AlphaFold(model)
        dtype = DTYPES[plan.precision]
        if plan.precision == "fp64":
            made.double()
        if training:
            packed: object = _optimizer(made, plan, optim or OptimConfig(), mesh)
        else:
            packed = PackedWeights(made.eval(), dtype)
        held = memory.now
        del packed
    return held


def _optimizer(model: AlphaFold, plan: Plan, optim: OptimConfig, mesh: Mesh) -> Optimizer:
    one = replace(optim, accumulate=plan.data * plan.batch)
    scaling = plan.precision == "fp16"
    return Optimizer(model, one, mesh, plan.sync, 1, DTYPES[plan.precision], scaling, plan.batch)


def _run(job: Job, plan: Plan, device: Device, blocks: int) -> Memory:
    """Run few blocks of the model, and return what there was beside weights and features."""
    model = shortened(job.model, blocks)
    ensemble = min(model.ensemble, 3)
    recycles = min(job.recycles, 1)
    with _on(device), fake_ranks(plan.data, plan.axial, plan.branch) as mesh:
        made = AlphaFold(replace(model, ensemble=ensemble)).train(job.training)
        Execution(plan, mesh).bind(made)
        PackedWeights(made, DTYPES[plan.precision], trained=job.training)
        made.noise.seed(0)
        batch = features_of(job, (recycles + 1) * ensemble)
        with Memory(unit=UNIT[device]) as memory, torch.set_grad_enabled(job.training):
            output = made(batch, recycles)
            if job.loss is not None:
                total_loss(output, batch, job.loss, residues=made.residues)[0].backward()
    return memory


@contextmanager
def _on(device: Device) -> Iterator[None]:
    """Run operations as that device does, on tensors without memory."""
    with dispatch.standing_for(device), unlaunched() if device == "cuda" else nullcontext():
        yield
