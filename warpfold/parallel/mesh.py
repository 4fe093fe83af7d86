"""Ranks in a grid, data x axial x branch, and the groups in which they speak to each other.

Branch is innermost, then axial, then data: ranks that exchange most are neighbours, so on one node.  `torchrun` gives
every process its place; without it there is one process, and every group has one member.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from warpfold.errors import UserError
from warpfold.parallel.waits import waiting

TIME_LIMIT = 600.0  # seconds that a collective may wait for the others
WATCHDOG = 120.0  # seconds later that NCCL's own watchdog ends a process: well after ours (parallel/pulse.py)


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
    limit: float = field(default=TIME_LIMIT, compare=False)  # seconds that a collective may wait for the others


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

    limit: seconds that a collective may wait for the others, those of the initialised group too.
    Groups of the same ranks share one handle, so one connection to each other rank, if the order of their collectives
    is the program's.  Slices (axial, branch) travel apart from gradients (model): in the backward pass the order
    between the two is not the same on all ranks.
    Every rank must call it, with the same sizes.  Errors: UserError if the ranks there are do not fill the grid.
    """
    sizes = data, axial, branch
    check_grid(*sizes, dist.get_world_size() if dist.is_initialized() else 1)
    if not dist.is_initialized():
        return Mesh(limit=limit)
    world = Group("world", dist.get_rank(), math.prod(sizes), tuple(range(math.prod(sizes))), dist.group.WORLD)
    limit_waits(world.handle, limit)
    if world.size == 1:
        world = replace(world, handle=None)
    lines: Mapping[str, tuple[bool, bool, bool]] = {  # which coordinates vary within the group
        "data": (True, False, False),
        "model": (False, True, True),
        "axial": (False, True, False),
        "branch": (False, False, True),
    }
    groups = {}
    for name, varies in lines.items():
        members = _members(varies, sizes)
        slices = name in ("axial", "branch")
        shares = len(members) == 1 and not slices  # with all ranks: their collectives follow each other in one order
        groups[name] = replace(world, name=name) if shares else split(name, members, limit)
    return Mesh(**groups, world=world, limit=limit)


def _members(varies: tuple[bool, ...], sizes: tuple[int, ...]) -> list[list[int]]:
    """The ranks of every group in which these coordinates vary and the others are the same."""
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes)):
        fixed = tuple(-1 if free else c for free, c in zip(varies, place(rank, *sizes)))
        members.setdefault(fixed, []).append(rank)
    return list(members.values())


def split(name: str, members: Sequence[Sequence[int]], limit: float) -> Group:
    """Part all ranks into groups, and return the one that this process belongs to.

    Every rank makes every group, in the same order, as torch wants it.
    """
    rank = dist.get_rank()
    own = next(ranks for ranks in members if rank in ranks)
    handle = None
    if len(own) > 1:
        with waiting(f"making the groups of {name} ranks"):
            handles = [dist.new_group(list(ranks), timeout=timedelta(seconds=limit)) for ranks in members]
        handle = handles[[*members].index(own)]
        limit_waits(handle, limit)
    return Group(name, list(own).index(rank), len(own), tuple(own), handle)


def limit_waits(handle: dist.ProcessGroup | None, limit: float) -> None:
    """Have the collectives of a group give up after `limit` seconds; NCCL's own watchdog later, after ours.

    It ends the process without a word about who is missing, so it is the last resort.
    """
    if handle is None:
        return
    for device, seconds in (("cuda", limit + WATCHDOG), ("cpu", limit)):  # where gloo serves both, the second counts
        if torch.device(device) in handle._device_types:
            backend = handle._get_backend(torch.device(device))
            if hasattr(backend, "_set_default_timeout"):  # the fake one has none
                backend._set_default_timeout(timedelta(seconds=seconds))
