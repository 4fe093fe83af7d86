"""One rank of many, run alone and without computing: what it would say, and what it would hold.

Nothing travels (torch's fake process group: collectives end at once), and nothing is stored (tensors on the device
"meta": shapes alone).  So plans for 512 ranks and thousands of residues can be counted on any machine.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from warpfold.batch import FEATURES, Batch
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.model.losses import LossConfig, total_loss
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import Mesh, make_mesh
from warpfold.parallel.plan import Plan


@contextmanager
def fake_ranks(data: int = 1, axial: int = 1, branch: int = 1, rank: int = 0) -> Iterator[Mesh]:
    """Within it, this process is rank `rank` of a grid whose others do not exist, and new tensors are on "meta".

    Errors: RuntimeError where torch.distributed is in use already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it makes the backend known

    if dist.is_initialized():
        raise RuntimeError("fake ranks need a process that is no rank of real ones")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=data * axial * branch)
    try:
        with torch.device("meta"):
            yield make_mesh(data, axial, branch)
    finally:
        dist.destroy_process_group()


def fake_batch(**sizes: int) -> Batch:
    """The features of the table (warpfold/batch.py) on "meta", labels too, whose named axes have a size in `sizes`."""
    given = {name: f for name, f in FEATURES.items() if {a for a in f.axes if isinstance(a, str)} <= set(sizes)}
    shapes = {name: [sizes[a] if isinstance(a, str) else a for a in f.axes] for name, f in given.items()}
    return {
        name: torch.empty(shape, dtype=getattr(torch, FEATURES[name].dtype), device="meta")
        for name, shape in shapes.items()
    }


@dataclass(frozen=True)
class Held:
    """A piece of memory, as the operation that made it left it."""

    bytes: int
    shape: tuple[int, ...]
    made_by: str


class Memory(TorchDispatchMode):
    """Within it, every piece of memory that an operation makes is counted while it lives.

    What operations need for themselves while they run, and what existed before, is not seen.

    peak: the most bytes at one time; at_peak: what they were; seen: shapes for which `noted` is true, with who made
    them.
    """

    def __init__(self, noted: Callable[[Sequence[int]], bool] = lambda shape: False) -> None:
        super().__init__()
        self.noted = noted
        self.now = self.peak = 0
        self.seen: set[tuple[str, tuple[int, ...]]] = set()
        self._live: dict[int, Held] = {}
        self._at_peak: list[Held] | None = None  # None: what lives now

    @property
    def at_peak(self) -> list[Held]:
        """What was held when most was held, largest first."""
        held = list(self._live.values()) if self._at_peak is None else self._at_peak
        return sorted(held, key=lambda h: -h.bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._note(tensor, str(func))
        return out

    def _note(self, tensor: Tensor, made_by: str) -> None:
        storage, shape = tensor.untyped_storage(), tuple(tensor.shape)
        key = storage._cdata
        if key in self._live:  # two results in one piece
            return
        self._live[key] = Held(storage.nbytes(), shape, made_by)
        weakref.finalize(storage, self._forget, key)
        if self.noted(shape):
            self.seen.add((made_by, shape))
        self.now += storage.nbytes()
        if self.now > self.peak:
            self.peak, self._at_peak = self.now, None

    def _forget(self, key: int) -> None:
        if self._at_peak is None:
            self._at_peak = list(self._live.values())
        self.now -= self._live.pop(key).bytes


def memory_of(
    plan: Plan,
    config: ModelConfig,
    sizes: Mapping[str, int],
    losses: LossConfig | None = None,
    recycles: int = 1,
    noted: Callable[[Sequence[int]], bool] = lambda shape: False,
) -> Memory:
    """What the first rank holds while it folds one example, or with `losses` trains on it; parameters, their gradients
    and the example itself apart.

    sizes: of the feature table's named axes (`pass`: 1).  noted: as in `Memory`.
    """
    training = losses is not None
    with fake_ranks(plan.data, plan.axial, plan.branch) as mesh:
        model = AlphaFold(config).train(training)
        Execution(plan, mesh).bind(model)
        model.noise.seed(0)
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        batch = fake_batch(**{"pass": 1, **sizes})
        with Memory(noted) as memory, torch.set_grad_enabled(training):
            output = model(batch, recycles)
            if losses is not None:
                total_loss(output, batch, losses, residues=model.residues)[0].backward()
    return memory
