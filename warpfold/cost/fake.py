"""Run one rank of many alone and without computing.

Collectives end at once (torch's fake process group), and tensors have only shapes (device "meta"). Therefore plans for
512 ranks and thousands of residues can be evaluated on any machine.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from warpfold.batch import FEATURES, Batch
from warpfold.cost.recorder import META, Recorder
from warpfold.engine.packed import PackedWeights
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.model.losses import LossConfig, total_loss
from warpfold.ops.torch_internals import fake_process_group
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import Mesh, make_mesh
from warpfold.parallel.plan import Plan


@contextmanager
def fake_ranks(data: int = 1, axial: int = 1, branch: int = 1, rank: int = 0) -> Iterator[Mesh]:
    """Act as rank `rank` of a grid without other processes, and create new tensors on "meta"; see `fake_mesh`."""
    with fake_mesh(data, axial, branch, rank) as mesh, META:
        yield mesh


@contextmanager
def fake_mesh(data: int = 1, axial: int = 1, branch: int = 1, rank: int = 0) -> Iterator[Mesh]:
    """Act as rank `rank` of a grid without other processes. Raises RuntimeError if contexts are nested."""
    if data * axial * branch == 1:
        yield Mesh()
        return
    if dist.is_initialized() and dist.get_backend() == "fake":
        raise RuntimeError("fake ranks need a process without a process group")
    with fake_process_group(rank, data * axial * branch):
        with META:
            mesh = make_mesh(data, axial, branch)
        yield mesh


def fake_batch(**sizes: int) -> Batch:
    """Create the features and labels of warpfold/batch.py on "meta" whose named axes all have a size in `sizes`."""
    batch: Batch = {}
    for name, feature in FEATURES.items():
        if {axis for axis in feature.axes if isinstance(axis, str)} <= set(sizes):
            shape = [sizes[axis] if isinstance(axis, str) else axis for axis in feature.axes]
            batch[name] = torch.empty(shape, dtype=getattr(torch, feature.dtype), device="meta")
    return batch


def memory_of(
    plan: Plan,
    config: ModelConfig,
    sizes: Mapping[str, int],
    losses: LossConfig | None = None,
    recycles: int = 1,
    noted: Callable[[Sequence[int]], bool] = lambda shape: False,
) -> Recorder:
    """Record the memory of the first rank while it folds an example, or trains on it with `losses`.

    Parameters, packed or not, their gradients and the example itself are not included.
    sizes: of the feature table's named axes (`pass` is 1). noted: see `Recorder`.
    """
    training = losses is not None
    with fake_ranks(plan.data, plan.axial, plan.branch) as mesh:
        model = AlphaFold(config).train(training)
        Execution(plan, mesh).bind(model)
        model.noise.seed(0)
        packed = PackedWeights(model, model.execution.dtype, trained=training)
        batch = fake_batch(**{"pass": 1, **sizes})
        with Recorder(noted) as memory, torch.set_grad_enabled(training):
            output = model(batch, recycles)
            if losses is not None:
                total_loss(output, batch, losses, residues=model.residues)[0].backward()
        del packed
    return memory
