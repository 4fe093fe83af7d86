"""Check that all ranks still have the same weights, by a checksum of every parameter."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from warpfold.parallel.buckets import Layout
from warpfold.parallel.collectives import all_gather_flat
from warpfold.parallel.mesh import Group
from warpfold.parallel.waits import waiting


class ReplicaError(RuntimeError):
    """Ranks that should hold the same weights do not."""


def check_replicas(weights: Tensor, layout: Layout, world: Group, when: str) -> None:
    """Compare the flat weights of all ranks, parameter by parameter and bit by bit.  Every rank must call it.

    Errors: ReplicaError on every rank, with the first parameters that differ and which ranks agree, most of them first.
    """
    if world.size == 1:
        return
    sums = checksums(weights, layout)
    extremes = torch.cat([sums, ~sums])  # the largest of ~x is ~ the smallest x
    with waiting(f"comparing the weights {when}"):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=world.handle)
    largest, smallest = extremes[: len(sums)], ~extremes[len(sums) :]
    if torch.equal(largest, smallest):
        return
    table = sums.new_empty(world.size * len(sums))
    with waiting(f"comparing the weights {when}"):
        all_gather_flat(table, sums, group=world.handle)
    table = table.view(world.size, -1).cpu()
    found = []
    for number, name in enumerate(layout.places):
        column = table[:, number].tolist()
        versions = [version for version, _ in Counter(column).most_common()]
        if len(versions) > 1:
            alike = [", ".join(str(rank) for rank, of in enumerate(column) if of == version) for version in versions]
            found.append(f"{name} (rank {' against '.join(alike)})")
    more = f" and {len(found) - 3} parameters more" if len(found) > 3 else ""
    raise ReplicaError(
        f"{when}: weights differ between the {world.size} ranks: {'; '.join(found[:3])}{more}; "
        "continue from the last checkpoint, and suspect those ranks' memory, device or software"
    )


def checksums(flat: Tensor, layout: Layout) -> Tensor:
    """Return a checksum of each parameter, int64 [parameters].

    It is the sum, modulo 2^64, of the elements' bits times odd factors that depend on their index.  A change of any one
    element changes it; so does, almost surely, any other change.
    """
    bits = flat.view(torch.int64 if flat.element_size() == 8 else torch.int32)
    sums = []
    for where in layout.places.values():
        factors = torch.arange(where.stop - where.start, device=flat.device) * 0x1E3779B97F4A7C15 | 1
        sums.append((bits[where] * factors).sum())
    return torch.stack(sums)
