"""One rank of many, run alone and without computing.

Nothing travels (torch's fake process group: collectives end at once), and nothing is stored (tensors on the device
"meta": shapes alone).  So plans for 512 ranks and thousands of residues can be counted on any machine.
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
    """Within it, this process is rank `rank` of a grid whose others do not exist, and new tensors are on "meta".

    Errors: as of `fake_mesh`.
    """
    with fake_mesh(data, axial, branch, rank) as mesh, META:
        yield mesh


@contextmanager
def fake_mesh(data: int = 1, axial: int = 1, branch: int = 1, rank: int = 0) -> Iterator[Mesh]:
    """Within it, this process is rank `rank` of a grid whose others do not exist.

    Errors: RuntimeError within another one.
    """
    if data * axial * branch == 1:
        yield Mesh()
        return
    if dist.is_initialized() and dist.get_backend() == "fake":
        raise RuntimeError("fake ranks need a process that is no rank of others")
    with fake_process_group(rank, data * axial * branch):
        with META:
            mesh = make_mesh(data, axial, branch)
        yield mesh


def fake_batch(**sizes: int) -> Batch:
    """The features of the table (warpfold/batch.py) on "meta", labels too, whose named axes have a size in `sizes`."""
    given = {name: f for name, f in FEATURES.items() if {a for a in f.axes if isinstance(a, str)} <= set(sizes)}
    shapes = {name: [sizes[a] if isinstance(a, str) else a for a in f.axes] for name, f in given.items()}
    return {
        name: torch.empty(shape, dtype=getattr(torch, FEATURES[name].dtype), device="meta")
        for name, shape in shapes.items()
    }


def memory_of(
    plan: Plan,
    config: ModelConfig,
    sizes: Mapping[str, int],
    losses: LossConfig | None = None,
    recycles: int = 1,
    noted: Callable[[Sequence[int]], bool] = lambda shape: False,
) -> Recorder:
    """What the first rank holds while it folds one example, or with `losses` trains on it; parameters, packed or not,
    their gradients and the example itself apart.

    sizes: of the feature table's named axes (`pass`: 1).  noted: as in `Recorder`.
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
