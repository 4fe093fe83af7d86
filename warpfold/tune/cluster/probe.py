"""Measure within a second or two how the ranks of a run are joined, when it begins and nobody has said it.

`warpfold doctor --cluster` measures more, and says what is wrong.  Here pairs of ranks send to each other, all pairs of
their kind at once, as collectives do; the slowest pair counts.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from warpfold.parallel.collectives import all_gather_flat
from warpfold.parallel.team import Team
from warpfold.parallel.waits import waiting
from warpfold.tune.cluster.collectives import Placement, collective_seconds
from warpfold.tune.cluster.links import Cluster, Link

Clock = Callable[[], float]
SMALL, LEAST, MOST = 8, 2**16, 2**26  # bytes of a message
PINGS, REPEATS = 11, 2
LONG = 0.05  # seconds of a message that is long enough to tell the bandwidth


def measure_cluster(team: Team, device: torch.device | str, clock: Clock = time.perf_counter) -> Cluster:
    """Return how all ranks are joined, the same on each.  All ranks call it.

    A rank's node is that of its number, as `torchrun` gives numbers; where nodes are not full, each rank is one.
    """
    ranks, each = team.process.ranks, max(1, team.process.ranks_per_node)
    each = each if ranks % each == 0 else ranks if ranks < each else 1
    rank, device = team.process.rank, torch.device(device)
    node, at = divmod(rank, each)
    beside = node * each + (at ^ 1) if (at ^ 1) < each else None
    opposite = (node ^ 1) * each + at if (node ^ 1) * each < ranks else None
    within = _link(beside, team, device, clock) if each > 1 else None
    between = _link(opposite, team, device, clock) if ranks > each else None
    one = within or between
    assert one is not None
    between = one if between is None else Link(between.latency, between.bandwidth * each)
    found = Cluster(ranks=ranks, per_node=each, within=within or one, between=between, call=0.0, how="measured")
    small = _gathered(team, device, clock)
    expected = collective_seconds("all_gather", SMALL * (ranks - 1), Placement(ranks, each), found)
    call = max(small - expected, 0.1 * small)
    return Cluster(ranks=ranks, per_node=each, within=found.within, between=between, call=call, how="measured")


def _link(partner: int | None, team: Team, device: torch.device, clock: Clock) -> Link:
    """Return the link of the slowest pair of ranks; partner: this rank's, if it has one."""
    pings = [_exchanged(SMALL, partner, team, device, clock) for _ in range(PINGS + 1)]
    latency = min(pings[1:])  # the first makes the connection, and noise only adds time
    size, took = LEAST, 0.0
    while took < LONG and size < MOST:
        size *= 4
        took = min(_exchanged(size, partner, team, device, clock) for _ in range(REPEATS))
    return Link(latency, size / max(took - latency, 0.1 * took))


def _exchanged(size: int, partner: int | None, team: Team, device: torch.device, clock: Clock) -> float:
    """Return the seconds in which every rank sends its partner so many bytes, and gets as many; of the slowest."""
    x, found = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    _meet(team, device)
    begin = clock()
    if partner is not None:
        both = [dist.P2POp(dist.isend, x, partner), dist.P2POp(dist.irecv, found, partner)]
        with waiting(f"a message from rank {partner}"):
            for work in dist.batch_isend_irecv(both):
                work.wait()
            _finish(device)
    return _slowest(clock() - begin if partner is not None else 0.0, team, device)


def _gathered(team: Team, device: torch.device, clock: Clock) -> float:
    """Return the seconds of an all-gather of all ranks that carries next to nothing."""
    x = torch.zeros(SMALL, dtype=torch.uint8, device=device)
    out, spent = x.new_empty(SMALL * team.process.ranks), []
    for _ in range(PINGS + 1):
        _meet(team, device)
        begin = clock()
        with waiting("a small all_gather"):
            all_gather_flat(out, x, group=team.mesh.world.handle)
            _finish(device)
        spent.append(_slowest(clock() - begin, team, device))
    return min(spent[1:])


def _meet(team: Team, device: torch.device) -> None:
    _slowest(0.0, team, device)


def _slowest(seconds: float, team: Team, device: torch.device) -> float:
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    with waiting("measuring links"):
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=team.mesh.world.handle)
    return float(slowest)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
