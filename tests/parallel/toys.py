"""A small model for the reducer's tests: uneven sizes, shared weights, weights used twice, unused weights."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.mesh import Mesh, make_mesh

# Rows of an example, which model ranks share.
ROWS = 6
TINY = 200 / 2**20  # MiB: about 25 elements


class Toy(nn.Module):
    """Modules that every example uses, that some use, that only the first model rank uses, and that none uses."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.enter = nn.Linear(3, 7)
        self.sometimes = nn.Linear(7, 7)
        self.twice = nn.Linear(7, 7)
        self.never = nn.Linear(5, 3)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.twice.weight
        self.first_rank = nn.Linear(7, 2)
        self.leave = nn.Linear(7, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.double()

    def forward(self, x: Tensor, sometimes: bool) -> Tensor:
        x = self.enter(x).tanh()
        if sometimes:
            x = x + self.sometimes(x)
        with torch.no_grad():
            before = self.twice(x)  # a recycling pass
        x = x + before + checkpoint(self.twice, x, use_reentrant=False).tanh()
        x = x + self.twice(x) + checkpoint(self.tied, x, use_reentrant=False).tanh()
        return self.leave(x) * self.scale


def example(index: int) -> Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


def part_of_loss(model: Toy, index: int, rank: int, ranks: int) -> Tensor:
    """Compute the part of rank `rank` in the loss of example `index`. The loss is the sum over the model ranks."""
    x = example(index)
    if rank:
        x = x.detach()
    loss = model(x, sometimes=index % 3 == 0)[rank::ranks].square().sum() * (1 + index % 4)
    if rank == 0:
        loss = loss + model.first_rank(model.enter(x)).pow(3).mean()
    return loss


def trained(
    data: int,
    model: int,
    config: OptimConfig,
    sync: SyncConfig,
    steps: range = range(5),
    state: dict[str, Tensor] | None = None,
    ranks_per_node: int | None = None,
    look: Callable[[Optimizer], None] | None = None,
    examples: int = 0,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train the toy on a data x model grid; returns this rank's norms and the final state. Call it on every rank.

    `config.accumulate` is the number of examples per data rank. `examples` replaces it by the number of examples of all
    data ranks.
    """
    mesh = make_mesh(data, model) if data * model > 1 else Mesh()
    net = Toy()
    config = replace(config, accumulate=examples or config.accumulate * data)
    optimizer = Optimizer(net, config, mesh, sync, ranks_per_node=ranks_per_node)
    if state is not None:
        optimizer.restore(state)
    norms = []
    for step in steps:
        for index in range(step * config.accumulate + mesh.data.rank, (step + 1) * config.accumulate, data):
            part_of_loss(net, index, mesh.model.rank, model).backward()
            norms.append(float(optimizer.collect()))
        optimizer.step(step)
    if look:
        look(optimizer)
    return norms, {name: tensor.clone() for name, tensor in optimizer.state().items()}


def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def survives_a_break(train: Callable[[range, dict[str, Tensor] | None], dict[str, Tensor]]) -> bool:
    """Return whether continuing from rank 0's state after three steps gives bitwise the unbroken run on this rank."""
    whole, half = train(range(5), None), [train(range(3), None)]
    dist.broadcast_object_list(half, 0)
    return same(train(range(3, 5), half[0]), whole)
