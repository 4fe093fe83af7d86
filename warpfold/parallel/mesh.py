"""Ranks in a grid, data x axial x branch, and the groups in which they communicate.

Branch is innermost, then axial, then data: ranks that communicate most are neighbours, and so on one node.  `torchrun`
gives every process its rank; without it there is one process, and every group has one member.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from warpfold.errors import UserError
from warpfold.ops.torch_internals import group_limit, set_group_limit
from warpfold.parallel.waits import waiting

TIME_LIMIT = 600.0  # seconds that a collective may wait for the others
START_LIMIT = 120.0  # seconds that the processes of a run may take to meet at the start
WATCHDOG = (
    120.0  # seconds that NCCL's own watchdog waits longer: it ends a process well after ours (parallel/heartbeat.py)
)


@dataclass(frozen=True)
class Group:
    """Some ranks, including this one.  `handle` is torch's process group; None for a group of one."""

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


def coordinates(rank: int, data: int, axial: int, branch: int) -> tuple[int, int, int]:
    """Return the (data, axial, branch) coordinates of a rank."""
    return rank // (axial * branch) % data, rank // branch % axial, rank % branch


def check_grid(data: int, axial: int, branch: int, there: int) -> None:
    """Raise UserError unless `there` ranks fill the grid."""
    wanted = data * axial * branch
    if wanted != there:
        how = f"with torchrun --nproc-per-node {wanted}" if wanted <= 8 else f"with torchrun, {wanted} processes in all"
        raise UserError(
            f"plan: data {data} x axial {axial} x branch {branch} needs {wanted} processes, there are {there}; "
            f"start it {'without torchrun' if wanted == 1 else how}, or change the plan"
        )


def make_mesh(data: int = 1, axial: int = 1, branch: int = 1, limit: float = TIME_LIMIT, idle: int = 0) -> Mesh:
    """Make the grid over the initialised process group, or of this process alone where there is none.

    limit: seconds that a collective may wait for the others, also one of the initialised group.  idle: how many of its
    last ranks are in no group of the grid.
    Groups of the same ranks share one handle, and so one connection to each other rank, if all ranks call their
    collectives in one order.  Slices (axial, branch) do not share a handle with gradients (model): in the backward pass
    the order between the two differs from rank to rank.
    Every rank must call it, with the same sizes.  Errors: UserError if the ranks do not fill the grid.
    """
    sizes = data, axial, branch
    there, used = dist.get_world_size() if dist.is_initialized() else 1, math.prod(sizes)
    check_grid(*sizes, there - idle)
    if not dist.is_initialized():
        return Mesh(limit=limit)
    if idle:
        world = split("world", [range(used), range(used, there)], limit)
    else:
        world = Group("world", dist.get_rank(), there, tuple(range(there)), dist.group.WORLD if there > 1 else None)
        set_timeouts(dist.group.WORLD, limit)
        connect(world)
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
        shares = len(members) == 1 and not slices  # the group of all ranks serves it too
        groups[name] = replace(world, name=name) if shares else split(name, members, limit)
    return Mesh(**groups, world=world, limit=limit) if dist.get_rank() < used else Mesh(limit=limit)


def _members(varies: tuple[bool, ...], sizes: tuple[int, ...]) -> list[list[int]]:
    """Return the ranks of every group in which these coordinates vary and the others are the same."""
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes)):
        fixed = tuple(-1 if free else c for free, c in zip(varies, coordinates(rank, *sizes)))
        members.setdefault(fixed, []).append(rank)
    return list(members.values())


def split(name: str, members: Sequence[Sequence[int]], limit: float) -> Group:
    """Split all ranks into groups, and return the one that this process belongs to, perhaps alone.

    Every rank makes every group, in the same order, as torch requires.
    """
    rank = dist.get_rank()
    own = next((ranks for ranks in members if rank in ranks), (rank,))
    handle = None
    if max(map(len, members)) > 1:
        with waiting(f"making the groups of {name} ranks"):
            handles = [dist.new_group(list(ranks), timeout=timedelta(seconds=limit)) for ranks in members]
        handle = next((made for ranks, made in zip(members, handles) if ranks is own and len(own) > 1), None)
        set_timeouts(handle, limit)
    group = Group(name, list(own).index(rank), len(own), tuple(own), handle)
    connect(group)
    return group


def connect(group: Group) -> None:
    """Call a group's first collective, on which NCCL makes its communicator, when all ranks are known to come.

    Else the first would fall into a backward pass, beside collectives of other groups whose order differs from rank to
    rank: NCCL may wait there for ever.  One process, or a group of one, does nothing.
    """
    handle = group.handle
    if handle is None:
        return
    for device, serves in backends(handle).items():
        if device == "cpu" or serves == "nccl":  # gloo and the fake one connect all devices at once
            with waiting(f"connecting the {group.name} ranks"):
                dist.all_reduce(torch.zeros(1, device=device), group=handle)
                if serves == "nccl":
                    torch.cuda.synchronize()


def backends(handle: dist.ProcessGroup) -> dict[str, str]:
    """Return which backend of a group serves each kind of device: {"cpu": "gloo", "cuda": "nccl"}."""
    pairs = (one.partition(":") for one in dist.get_backend_config(handle).split(","))
    return {device: backend for device, _, backend in pairs}


def set_timeouts(handle: dist.ProcessGroup | None, limit: float) -> None:
    """Have the collectives of a group give up after `limit` seconds, and NCCL's own watchdog after ours.

    NCCL's ends the process without saying who is missing, so it is the last resort.
    """
    if handle is None:
        return
    for device, seconds in (("cuda", limit + WATCHDOG), ("cpu", limit)):  # if gloo serves both, the second value counts
        # The fake backend has no limit.
        if backends(handle).get(device, "fake") != "fake":
            set_group_limit(handle, torch.device(device), seconds)


def time_limit(handle: dist.ProcessGroup | None, device: torch.device) -> float:
    """Return how many seconds a group's collectives may wait for the others; `TIME_LIMIT` without a group."""
    return TIME_LIMIT if handle is None else group_limit(handle, device)


def world() -> Group:
    """Return the group of all processes; of this one alone where torch.distributed is not initialised."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Group("world")
    ranks = dist.get_world_size()
    return Group("world", dist.get_rank(), ranks, tuple(range(ranks)), dist.group.WORLD)
