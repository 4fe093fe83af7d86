"""The grid of ranks, data x axial x branch, and the groups in which they communicate.

Branch is the innermost axis, then axial, then data, so that the ranks that communicate most are neighbours on one node.
`torchrun` assigns the rank of each process. Without it there is one process, and every group has one member.
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

# Seconds that a collective may wait for other ranks.
TIME_LIMIT = 600.0
# Seconds in which the processes of a run must meet at the start.
START_LIMIT = 120.0
# Additional seconds of NCCL's own watchdog, so that ours (parallel/heartbeat.py) ends the process first.
NCCL_WATCHDOG_DELAY = 120.0


@dataclass(frozen=True)
class Group:
    """A group of ranks that includes this one.

    name: "data", "axial", "branch", "model" (axial and branch) or "world". rank: of this process within the group.
    ranks: global ranks in the order of the group. handle: torch's process group; None for a group of one.
    """

    name: str
    rank: int = 0
    size: int = 1
    ranks: tuple[int, ...] = (0,)
    handle: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Mesh:
    """The groups of this process.

    model: the ranks that share an example. Its loss and its gradients are sums over them.
    limit: seconds that a collective may wait for other ranks.
    """

    data: Group = Group("data")
    axial: Group = Group("axial")
    branch: Group = Group("branch")
    model: Group = Group("model")
    world: Group = Group("world")
    limit: float = field(default=TIME_LIMIT, compare=False)


def coordinates(rank: int, data: int, axial: int, branch: int) -> tuple[int, int, int]:
    """Return the (data, axial, branch) coordinates of a rank."""
    return rank // (axial * branch) % data, rank // branch % axial, rank % branch


def check_grid(data: int, axial: int, branch: int, there: int) -> None:
    """Raise UserError unless `there` ranks fill the grid."""
    needed = data * axial * branch
    if needed != there:
        start_command = (
            f"with torchrun --nproc-per-node {needed}" if needed <= 8 else f"with torchrun, {needed} processes in all"
        )
        raise UserError(
            f"plan: data {data} x axial {axial} x branch {branch} needs {needed} processes, there are {there}. "
            f"Start it {'without torchrun' if needed == 1 else start_command}, or change the plan."
        )


def make_mesh(data: int = 1, axial: int = 1, branch: int = 1, limit: float = TIME_LIMIT, idle: int = 0) -> Mesh:
    """Create the grid over the initialised process group, or of this process alone without one.

    Every rank must call it with the same sizes.
    limit: seconds that a collective may wait for other ranks, also in the initialised group.
    idle: number of last ranks that belong to no group of the grid.
    Groups of the same ranks share a handle, and so a connection, if all ranks call their collectives in the same order.
    Groups for slices (axial, branch) share no handle with the group for gradients (model), because the order between
    the two differs between ranks in the backward pass.
    Raises UserError if the ranks do not fill the grid.
    """
    sizes = data, axial, branch
    world_size, used = dist.get_world_size() if dist.is_initialized() else 1, math.prod(sizes)
    check_grid(*sizes, world_size - idle)
    if not dist.is_initialized():
        return Mesh(limit=limit)
    if idle:
        world = split("world", [range(used), range(used, world_size)], limit)
    else:
        world = Group(
            "world", dist.get_rank(), world_size, tuple(range(world_size)), dist.group.WORLD if world_size > 1 else None
        )
        set_timeouts(dist.group.WORLD, limit)
        connect(world)
    # Which of the coordinates (data, axial, branch) vary within each group.
    lines: Mapping[str, tuple[bool, bool, bool]] = {
        "data": (True, False, False),
        "model": (False, True, True),
        "axial": (False, True, False),
        "branch": (False, False, True),
    }
    groups = {}
    for name, varies in lines.items():
        members = _members(varies, sizes)
        slices = name in ("axial", "branch")
        # A group of all ranks uses the handle of the world.
        shares = len(members) == 1 and not slices
        groups[name] = replace(world, name=name) if shares else split(name, members, limit)
    return Mesh(**groups, world=world, limit=limit) if dist.get_rank() < used else Mesh(limit=limit)


def _members(varies: tuple[bool, ...], sizes: tuple[int, ...]) -> list[list[int]]:
    """List the ranks of every group in which these coordinates vary and the others are equal."""
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes)):
        fixed = tuple(-1 if free else c for free, c in zip(varies, coordinates(rank, *sizes)))
        members.setdefault(fixed, []).append(rank)
    return list(members.values())


def split(name: str, members: Sequence[Sequence[int]], limit: float) -> Group:
    """Split all ranks into groups, and return the group of this process, which may be a group of one.

    Every rank must call it: torch requires that all ranks create all groups in the same order.
    """
    rank = dist.get_rank()
    own_ranks = next((ranks for ranks in members if rank in ranks), (rank,))
    handle = None
    if max(map(len, members)) > 1:
        with waiting(f"making the groups of {name} ranks"):
            handles = [dist.new_group(list(ranks), timeout=timedelta(seconds=limit)) for ranks in members]
        handle = next(
            (handle for ranks, handle in zip(members, handles) if ranks is own_ranks and len(own_ranks) > 1), None
        )
        set_timeouts(handle, limit)
    group = Group(name, list(own_ranks).index(rank), len(own_ranks), tuple(own_ranks), handle)
    connect(group)
    return group


def connect(group: Group) -> None:
    """Run a first collective of a group, on which NCCL creates its communicator. All ranks of the group must call it.

    Otherwise the first collective would run in a backward pass, concurrently with collectives of other groups in an
    order that differs between ranks, where NCCL may deadlock. Does nothing for a group of one.
    """
    handle = group.handle
    if handle is None:
        return
    for device, serves in backends(handle).items():
        # One collective suffices for gloo and for the fake backend, which connect all devices at once.
        if device == "cpu" or serves == "nccl":
            with waiting(f"connecting the {group.name} ranks"):
                dist.all_reduce(torch.zeros(1, device=device), group=handle)
                if serves == "nccl":
                    # The collective is asynchronous: wait until the connection exists, or fails within this wait.
                    torch.cuda.synchronize()


def backends(handle: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend of a group for each kind of device, such as {"cpu": "gloo", "cuda": "nccl"}."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(handle).split(","))
    return {device: backend for device, _, backend in pairs}


def set_timeouts(handle: dist.ProcessGroup | None, limit: float) -> None:
    """Set the time-out of a group's collectives to `limit` seconds, and a longer one for NCCL's own watchdog.

    NCCL's watchdog ends the process without naming the missing ranks, so ours should be first.
    """
    if handle is None:
        return
    # If gloo serves both devices, the second value takes effect.
    for device, seconds in (("cuda", limit + NCCL_WATCHDOG_DELAY), ("cpu", limit)):
        # The fake backend has no time-out.
        if backends(handle).get(device, "fake") != "fake":
            set_group_limit(handle, torch.device(device), seconds)


def time_limit(handle: dist.ProcessGroup | None, device: torch.device) -> float:
    """Return the time-out of a group's collectives in seconds; `TIME_LIMIT` without a group."""
    return TIME_LIMIT if handle is None else group_limit(handle, device)


def world() -> Group:
    """Return the group of all processes, or of this process alone if torch.distributed is not initialised."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Group("world")
    ranks = dist.get_world_size()
    return Group("world", dist.get_rank(), ranks, tuple(range(ranks)), dist.group.WORLD)
