"""Count the messages of an Evoformer block under a plan, by running one of its ranks on fake ranks.

Tests of `Plan.by_channels`, which chooses how products are sharded, compare its choice with these counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, get_args

import torch

from warpfold.cost.fake import fake_mesh
from warpfold.cost.links import Kind, Link
from warpfold.model.evoformer import Evoformer, EvoformerConfig
from warpfold.parallel.collectives import shard_sizes
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import DTYPES, Plan
from warpfold.parallel.waits import Event, watched

Phase = Literal["forward", "recomputed", "backward"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, kw_only=True)
class TrafficBlock:
    """An Evoformer block and the size of its input. The defaults are those of initial training (Supp. 1.11)."""

    sequences: int = 128
    residues: int = 256
    c_m: int = 256
    c_z: int = 128
    evoformer: EvoformerConfig = field(default_factory=EvoformerConfig)
    global_column: bool = False  # of the extra MSA stack


@dataclass(frozen=True)
class Traffic:
    """The collectives of this rank, and the bytes that it sends to others in all of them."""

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.calls + other.calls, self.bytes + other.bytes)

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.calls - other.calls, self.bytes - other.bytes)


@dataclass(frozen=True)
class Move:
    """A communicated tensor of a block's passes. The backward pass of a gather is a reduce-scatter."""

    name: str  # which tensor of which layer
    kind: Kind  # "all_gather", "all_to_all", "sendrecv" (parallel/collectives.py)
    forward: Traffic = Traffic()
    recomputed: Traffic = Traffic()
    backward: Traffic = Traffic()


def total(moves: Iterable[Move], phase: Phase) -> Traffic:
    """Add up all that moves in one pass."""
    return sum((getattr(move, phase) for move in moves), Traffic())


def count(plan: Plan, block: TrafficBlock, branch_rank: int = 0) -> list[Move]:
    """Count the messages of an additional block in a stack under `plan`, forward and backward, on fake ranks.

    Counts are those of the first axial rank of branch `branch_rank`; no other rank holds more.
    """
    less, more = (_count(plan, block, blocks, branch_rank) for blocks in (1, 2))
    return [
        Move(name, move.kind, **{phase: getattr(move, phase) - getattr(less[name], phase) for phase in PHASES})
        for name, move in more.items()
    ]


def _count(plan: Plan, block: TrafficBlock, blocks: int, branch_rank: int) -> dict[str, Move]:
    """Count the messages of a stack of `blocks` blocks."""
    events: list[Event] = []
    ranks = fake_mesh(axial=plan.axial, branch=plan.branch, rank=branch_rank)
    with ranks as mesh, torch.device("meta"), watched(events.append):
        config = replace(block.evoformer, blocks=blocks)
        stack = Execution(plan, mesh).bind(Evoformer(block.c_m, block.c_z, config, block.global_column))
        here, dtype = shard_sizes(block.residues, plan.axial)[0], DTYPES[plan.precision]
        m = torch.empty(block.sequences, here, block.c_m, dtype=dtype, requires_grad=True)
        z = torch.empty(here, block.residues, block.c_z, dtype=dtype, requires_grad=True)
        m, z = stack(m, z, torch.empty(block.sequences, block.residues), torch.empty(here, block.residues))
        before = len(events)
        torch.autograd.backward((m, z), (torch.empty_like(m), torch.empty_like(z)))
    found: dict[str, Move] = {}
    for index, event in enumerate(events):
        if event.what == "start":
            phase = "backward" if event.backward else "forward" if index < before else "recomputed"
            name = event.name.strip()
            move = found.setdefault(name, Move(name, event.kind))
            found[name] = replace(move, **{phase: getattr(move, phase) + Traffic(1, event.bytes)})
    return found


@cache
def moves(block: TrafficBlock, ranks: int, by_channels: bool) -> list[Move]:
    """Count the messages of a bf16 block under an axial plan without branches or recomputation."""
    return count(Plan(axial=ranks, triangle="channels" if by_channels else "gather", precision="bf16"), block)


def seconds(moves: Iterable[Move], link: Link) -> float:
    """Estimate the seconds of communication of a block's two passes without overlap."""
    both = total(moves := list(moves), "forward") + total(moves, "backward")
    return both.calls * link.latency + both.bytes / link.bandwidth
