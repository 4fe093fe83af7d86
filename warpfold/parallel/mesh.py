"""Ranks in a grid, data x axial x branch, and the groups in which they speak to each other.

Branch is innermost, then axial, then data: ranks that exchange most are neighbours, so on one node.  `torchrun` gives
every process its place; without it there is one process, and every group has one member.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from warpfold.errors import UserError

TIME_LIMIT = 600.0  # seconds that a collective may wait for the others


@dataclass(frozen=True)
class Group:
    """Some ranks, this one among them.  `handle` is torch's process group; None where the group has one member."""

    name: str  # "data", "axial", "branch", "model" (axial and branch), "world"
    rank: int = 0  # of this process within the group
    size: int = 1
    ranks: tuple[int, ...] = (0,)  # of the world, in the group's order
    handle: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Mesh:
    """The groups that this process belongs to."""

    data: Group = Group("data")
    axial: Group = Group("axial")
    branch: Group = Group("branch")
    model: Group = Group("model")  # those that share an example: its loss and its gradients are sums over them
    world: Group = Group("world")


def place(rank: int, data: int, axial: int, branch: int) -> tuple[int, int, int]:
    """(data, axial, branch) coordinates of a rank."""
    return rank // (axial * branch) % data, rank // branch % axial, rank % branch


def check_grid(data: int, axial: int, branch: int, there: int) -> None:
    """UserError unless so many ranks fill the grid."""
    wanted = data * axial * branch
    if wanted != there:
        how = f"with torchrun --nproc-per-node {wanted}" if wanted <= 8 else f"with torchrun, {wanted} processes in all"
        raise UserError(
            f"plan: data {data} x axial {axial} x branch {branch} needs {wanted} processes, there are {there}; "
            f"start it {'without torchrun' if wanted == 1 else how}, or change the plan"
        )


def make_mesh(data: int = 1, axial: int = 1, branch: int = 1, limit: float = TIME_LIMIT) -> Mesh:
    """The grid over the initialised process group, or of this process alone where there is none.

    limit: seconds that a collective may wait for the others.  Every rank must call it, with the same sizes.
    Errors: UserError if the ranks there are do not fill the grid.
    """
    check_grid(data, axial, branch, dist.get_world_size() if dist.is_initialized() else 1)
    if not dist.is_initialized():
        return Mesh()
    at = place(dist.get_rank(), data, axial, branch)
    lines: Mapping[str, tuple[bool, bool, bool]] = {  # which coordinates vary within the group
        "data": (True, False, False),
        "axial": (False, True, False),
        "branch": (False, False, True),
        "model": (False, True, True),
        "world": (True, True, True),
    }
    return Mesh(**{name: _group(name, varies, at, (data, axial, branch), limit) for name, varies in lines.items()})


def _group(name: str, varies: tuple[bool, ...], at: tuple[int, ...], sizes: tuple[int, ...], limit: float) -> Group:
    """This process's group; all groups of the kind are made, by every rank in the same order, as torch wants it."""
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes)):
        fixed = tuple(-1 if free else c for free, c in zip(varies, place(rank, *sizes)))
        members.setdefault(fixed, []).append(rank)
    own = members[tuple(-1 if free else c for free, c in zip(varies, at))]
    handle = None
    if len(own) > 1:
        handles = {key: dist.new_group(ranks, timeout=timedelta(seconds=limit)) for key, ranks in members.items()}
        handle = handles[tuple(-1 if free else c for free, c in zip(varies, at))]
    return Group(name, own.index(dist.get_rank()), len(own), tuple(own), handle)
