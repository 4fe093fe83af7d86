"""Count the kernel launches of a GPU with meta tensors, on any machine.

Triton kernels are counted where they would be launched (ops/triton/launch.py). Each torch operation counts as one
launch, except for views and allocations. A few torch operations launch several kernels, so the real number may be
slightly higher.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from warpfold.cost.example import BlockSizes, Job, RandomBlock, TrainingStep, run_example, shortened
from warpfold.cost.fake import fake_mesh
from warpfold.cost.record import features_of, step_share
from warpfold.cost.recorder import ALLOCATE, Recorder
from warpfold.engine.optim import Optimizer
from warpfold.engine.packed import PackedWeights
from warpfold.engine.trainable import freeze
from warpfold.model.alphafold import AlphaFold
from warpfold.ops import dispatch
from warpfold.ops.torch_internals import DispatchMode, tree_leaves
from warpfold.ops.triton.launch import KernelLaunch, recorded, unlaunched
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import DTYPES, Plan, Precision

# A callback with an operation, its arguments, its keyword arguments and its result.
Seen = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], object]


class Operations(DispatchMode):
    """Call `seen` with each torch operation within the context, forward and backward, after it has run.

    For our registered operations, the launchers of their kernels run on meta tensors, and the operations that these
    call are reported instead.
    """

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "warpfold":
            with self:
                return dispatch.implementation(func._opname, args[0])(*args, **kwargs)
        out = func(*args, **kwargs)
        self.seen(func, args, kwargs, out)
        return out


@dataclass(frozen=True)
class LaunchCount:
    """Number of launches of each Triton kernel and each torch operation."""

    triton: Counter[str] = field(default_factory=Counter)
    torch: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Number of all launches. Raises RuntimeError if no launch was recorded."""
        total = self.triton.total() + self.torch.total()
        if total == 0:
            raise RuntimeError("no launch was recorded: nothing ran within the context")
        return total

    def __str__(self) -> str:
        """Format as "104: 26 of Triton, 78 of torch"."""
        return f"{self.total}: {self.triton.total()} of Triton, {self.torch.total()} of torch"


def launches(func: Any, inputs: Any, out: Any) -> bool:
    """Return whether a torch operation launches a kernel: it is neither a view of its inputs nor an allocation."""
    # Operations that change lists of tensors return nothing.
    changed = inputs if out is None else out
    # Tensors on the host launch nothing.
    results = [t for t in tree_leaves(changed) if isinstance(t, Tensor) and not t.is_cpu]
    if func._opname in ALLOCATE or not results:
        return False
    if func._schema.is_mutable:
        return True
    storages = {t.untyped_storage()._cdata for t in tree_leaves(inputs) if isinstance(t, Tensor)}
    return any(t.untyped_storage()._cdata not in storages for t in results if t.numel())


@contextmanager
def counting() -> Iterator[LaunchCount]:
    """Count the launches within the context on meta tensors."""
    count = LaunchCount()

    def seen(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        if launches(func, (args, kwargs), out):
            count.torch[func._opname] += 1

    def launched(launch: KernelLaunch) -> None:
        # Keep no reference to its tensors, because autograd copies gradients that are referenced elsewhere.
        count.triton[launch.kernel.name] += 1

    with dispatch.interpreting(), unlaunched(launched), Operations(seen):
        yield count


def block_launches(
    sizes: BlockSizes, precision: Precision = "bf16", kernels: dispatch.Kernels = "fast"
) -> dict[str, LaunchCount]:
    """Count the launches of an Evoformer block by pass.

    The passes are "forward" without gradients, "training" (a forward pass that saves tensors) and "backward", with the
    gradients of m, z and all parameters, the latter in the packed buffer.
    """
    with torch.device("meta"):
        block = RandomBlock(sizes, Plan(precision=precision, kernels=kernels), "meta")
        # The first pass creates the joined weights.
        block.forward()
        with counting() as forward, torch.no_grad():
            block.forward()
        with counting() as training:
            out = block.forward()
        block.packed.release()
        with counting() as backward:
            torch.autograd.backward(out, block.grads)
    return {"forward": forward, "training": training, "backward": backward}


def launches_of(job: Job, plan: Plan) -> list[KernelLaunch]:
    """Record the launches of Triton kernels on the first GPU of a plan in the order of a job, on any machine.

    The model has one block per stack, because equal blocks launch equal kernels, and one pass before the last. Loops
    over slices run a few iterations. The launch table is that of the context (`launch.table_used`).
    """
    kernels = "fast" if plan.kernels == "strict" else plan.kernels
    plan = replace(plan, graph=False, compile=False, threads=None, tf32=False, keep_blocks=0, kernels=kernels)
    config = replace(shortened(job.model, 1), ensemble=1)
    job, dtype = replace(job, recycles=min(job.recycles, 1)), DTYPES[plan.precision]
    with (
        torch.device("meta"),
        dispatch.standing_for("cuda"),
        fake_mesh(plan.data, plan.axial, plan.branch) as mesh,
        recorded() as launches,
        Recorder(),
    ):
        model = Execution(plan, mesh).bind(AlphaFold(config).train(job.learns))
        model.noise.seed(0)
        batch = features_of(job, job.recycles + 1)
        if job.loss is not None and job.optim is not None:
            freeze(model, job.few_block_finetune)
            optimizer = Optimizer(model, step_share(job, plan, 1), mesh, plan.sync, ranks_per_node=1, dtype=dtype,
                                  scaling=plan.precision == "fp16", batch=plan.batch)  # fmt: skip
            run_example(model, batch, job, plan.batch)
            for _ in range(optimizer.share // plan.batch):
                optimizer.collect()
            optimizer.step(0)
            return launches
        packed = PackedWeights(model, dtype)
        model.requires_grad_(job.gradient is None)
        run_example(model, batch, job, mesh=mesh)
        del packed
    return launches


def step_launches(step: TrainingStep) -> LaunchCount:
    """Count the launches of a training step on "meta" with its present plan."""
    with torch.device("meta"), counting() as count:
        step()
    return count
