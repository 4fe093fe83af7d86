"""Count what a GPU would be told to launch, on a machine that has none: tensors have shapes and no memory.

Triton's kernels are noted where they would be launched (ops/triton/launch.py); of torch's own operations each counts as
one launch, but for views and allocations, which launch nothing.  A few of torch's launch more than one kernel, so that
a GPU's own count may be a little higher; a profile made there says by how much.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from warpfold.cost.example import (
    BlockSizes,
    Job,
    RandomBlock,
    TrainingStep,
    gradient_of_example,
    predict_example,
    shortened,
    train_on_example,
)
from warpfold.cost.fake import fake_mesh
from warpfold.cost.observe import ALLOCATE, Operations, products
from warpfold.cost.record import features_of
from warpfold.cost.recorder import Recorder
from warpfold.engine.optim import Optimizer
from warpfold.engine.packed import PackedWeights
from warpfold.engine.trainable import freeze
from warpfold.model.alphafold import AlphaFold
from warpfold.ops import dispatch
from warpfold.ops.torch_internals import tree_leaves
from warpfold.ops.triton.launch import KernelLaunch, recorded, unlaunched
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import DTYPES, Plan, Precision


@dataclass(frozen=True)
class LaunchCount:
    """How often each kernel of Triton and each operation of torch was launched."""

    triton: Counter[str] = field(default_factory=Counter)
    torch: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """All launches.  Errors: RuntimeError where there was none: whoever counts has then seen nothing."""
        total = self.triton.total() + self.torch.total()
        if total == 0:
            raise RuntimeError("no launch was seen: nothing ran within the count")
        return total

    def __str__(self) -> str:
        """ "104: 26 of Triton, 78 of torch"."""
        return f"{self.total}: {self.triton.total()} of Triton, {self.torch.total()} of torch"


def launches(func: Any, given: Any, out: Any) -> bool:
    """Return whether one of torch's operations launches a kernel: neither a view of what it was given nor memory."""
    made = given if out is None else out  # what changes lists of tensors returns nothing
    results = [t for t in tree_leaves(made) if isinstance(t, Tensor) and not t.is_cpu]  # numbers of the host: nothing
    if func._opname in ALLOCATE or not results:
        return False
    if func._schema.is_mutable:
        return True
    storages = {t.untyped_storage()._cdata for t in tree_leaves(given) if isinstance(t, Tensor)}
    return any(t.untyped_storage()._cdata not in storages for t in results if t.numel())


@contextmanager
def counted_products() -> Iterator[list[int]]:
    """Return the floating point operations of each matrix product within the context."""
    found: list[int] = []
    with Operations(lambda *seen: found.append(products(*seen))):
        yield found


@contextmanager
def counting() -> Iterator[LaunchCount]:
    """Count the launches of what runs within the context, on tensors of the device "meta"."""
    count = LaunchCount()

    def seen(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        if launches(func, (args, kwargs), out):
            count.torch[func._opname] += 1

    def launched(launch: KernelLaunch) -> None:  # and keeps no tensor of it: autograd copies what others hold
        count.triton[launch.kernel.name] += 1

    with dispatch.interpreting(), unlaunched(launched), Operations(seen, launchers=True):
        yield count


def block_launches(
    sizes: BlockSizes, precision: Precision = "bf16", kernels: dispatch.Kernels = "fast"
) -> dict[str, LaunchCount]:
    """Count the launches of an Evoformer block: "forward" without gradient, "training" (a forward pass that keeps what
    its gradient needs) and "backward", with the gradients of m and z, and every parameter's in its place in the buffer.
    """
    with torch.device("meta"):
        block = RandomBlock(sizes, Plan(precision=precision, kernels=kernels), "meta")
        block.forward()  # makes the joined weights, once and for all
        with counting() as forward, torch.no_grad():
            block.forward()
        with counting() as training:
            out = block.forward()
        block.packed.release()
        with counting() as backward:
            torch.autograd.backward(out, block.grads)
    return {"forward": forward, "training": training, "backward": backward}


def launches_of(job: Job, plan: Plan) -> list[KernelLaunch]:
    """Return the launches of Triton kernels on the first GPU of a plan, in the order of a job, on any machine.

    The model has one block of each stack, because equal blocks launch equal kernels, and one pass before the last.
    Loops over slices take a few turns.  The launch tables are those of the context (`launch.table_used`).
    """
    kernels = "fast" if plan.kernels == "strict" else plan.kernels
    plan = replace(plan, graph=False, compile=False, threads=None, tf32=False, keep_blocks=0, kernels=kernels)
    config = replace(shortened(job.model, 1), ensemble=1)
    recycles, dtype = min(job.recycles, 1), DTYPES[plan.precision]
    with (
        torch.device("meta"),
        dispatch.standing_for("cuda"),
        fake_mesh(plan.data, plan.axial, plan.branch) as mesh,
        recorded() as launches,
        Operations(lambda *_: None, launchers=True),
        Recorder(),
    ):
        model = Execution(plan, mesh).bind(AlphaFold(config).train(job.learns))
        model.noise.seed(0)
        batch = features_of(job, recycles + 1)
        if job.loss is not None and job.optim is not None:
            freeze(model, job.finetune_of_few)
            one = replace(
                job.optim, accumulate=plan.data * plan.batch, clip="step" if plan.batch > 1 else job.optim.clip
            )
            scaling = plan.precision == "fp16"
            optimizer = Optimizer(model, one, mesh, plan.sync, 1, dtype, scaling, plan.batch)
            train_on_example(model, batch, recycles, job.loss, plan.batch)
            for _ in range(optimizer.share // plan.batch):
                optimizer.collect()
            optimizer.step(0)
            return launches
        packed = PackedWeights(model, dtype)
        model.requires_grad_(job.gradient is None)
        if job.gradient is not None:
            gradient_of_example(model, batch, recycles, job.gradient, mesh)
        else:
            with torch.no_grad():
                predict_example(model, batch, recycles)
        del packed
    return launches


def step_launches(step: TrainingStep) -> LaunchCount:
    """Count the launches of a training step on "meta", as it is bound."""
    with torch.device("meta"), counting() as count:
        step()
    return count
