"""All processes of torch.distributed, for what a user's own loop calls."""

import torch.distributed as dist

from warpfold.parallel.mesh import Group


def world() -> Group:
    """Return the group of all processes; of this one alone where torch.distributed is not initialised."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Group("world")
    ranks = dist.get_world_size()
    return Group("world", dist.get_rank(), ranks, tuple(range(ranks)), dist.group.WORLD)
