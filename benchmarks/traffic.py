"""What the ranks of a plan send each other in an Evoformer block: counted, in closed form, and what it costs.

`count` runs a block on fake ranks and listens.  `moves` says the same in closed form (a law test compares the two), so
that a plan can be judged without running anything, and `seconds` puts a price on it: what `Plan.by_channels` is held
to when it chooses how triangle products are cut.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch

from warpfold.tune.fake import fake_ranks
from warpfold.model.evoformer import Evoformer, EvoformerConfig
from warpfold.parallel.collectives import shard_sizes
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import DTYPES, Plan
from warpfold.parallel.waits import Event, watched

Phase = Literal["forward", "recomputed", "backward"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, kw_only=True)
class Block:
    """An Evoformer block and the size of what runs through it; the defaults are initial training's (Supp. 1.11)."""

    sequences: int = 128
    residues: int = 256
    c_m: int = 256
    c_z: int = 128
    evoformer: EvoformerConfig = field(default_factory=EvoformerConfig)
    global_column: bool = False  # of the extra MSA stack


@dataclass(frozen=True)
class Traffic:
    """Collectives that this rank takes part in, and the bytes that it sends to others in all of them."""

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.calls + other.calls, self.bytes + other.bytes)

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.calls - other.calls, self.bytes - other.bytes)


@dataclass(frozen=True)
class Move:
    """A tensor that moves, in the passes of one block.  The backward pass of a gather is a reduce-scatter."""

    name: str  # which tensor of which layer
    kind: str  # "all_gather", "all_to_all", "sendrecv" (parallel/collectives.py)
    forward: Traffic = Traffic()
    recomputed: Traffic = Traffic()
    backward: Traffic = Traffic()


def total(moves: Iterable[Move], phase: Phase) -> Traffic:
    """Add up all that moves in one pass."""
    return sum((getattr(move, phase) for move in moves), Traffic())


def count(plan: Plan, block: Block, branch_rank: int = 0) -> list[Move]:
    """Count what one more block in a stack sends under `plan`, while it runs forward and backward on fake ranks.

    Counts are those of the first axial rank of branch `branch_rank`; no other rank holds more.
    """
    less, more = (_count(plan, block, blocks, branch_rank) for blocks in (1, 2))
    return [
        Move(name, move.kind, **{phase: getattr(move, phase) - getattr(less[name], phase) for phase in PHASES})
        for name, move in more.items()
    ]


def _count(plan: Plan, block: Block, blocks: int, branch_rank: int) -> dict[str, Move]:
    """Count what a stack of `blocks` blocks sends."""
    events: list[Event] = []
    with fake_ranks(axial=plan.axial, branch=plan.branch, rank=branch_rank) as mesh, watched(events.append):
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


def moves(block: Block, ranks: int, by_channels: bool, itemsize: int = 2) -> list[Move]:
    """Return what `count` counts for an axial plan without branches or recomputation, in closed form.

    itemsize: bytes of a number.  With p ranks that divide everything, gathering E numbers sends (p - 1) / p E, and
    turning them (p - 1) / p^2 E.
    """
    s, n, c = block.sequences, block.residues, block.evoformer
    c_triangle, heads = c.pair.c_triangle, c.pair.heads

    def largest(length: int) -> int:
        return shard_sizes(length, ranks)[0]

    def gather(name: str, others: int, gradient: bool = True) -> Move:
        sent = Traffic(1, (ranks - 1) * largest(n) * others * itemsize)
        return Move(name, "all_gather", sent, backward=sent if gradient else Traffic())

    def turn(name: str, had: int, wanted: int, others: int, times: int = 1) -> Move:
        there = largest(had) * (wanted - largest(wanted)) * others * itemsize
        back = largest(wanted) * (had - largest(had)) * others * itemsize
        return Move(name, "all_to_all", Traffic(times, times * there), backward=Traffic(times, times * back))

    turns = 1 if by_channels else 2
    found = [
        turn("m to rows", n, s, block.c_m),
        gather("msa.row shared 0", n * c.heads),
        turn("m to columns", s, n, block.c_m),
        gather("outer shared 0", s * c.c_outer),
        gather("outer shared 1", s, gradient=False),
        turn("z to columns", n, n, block.c_z, turns),
        turn("z to rows", n, n, block.c_z, turns),
        gather("pair.starting shared 0", n * heads),
        gather("pair.ending shared 0", n * heads),
    ]
    for layer in ("outgoing", "incoming"):
        if by_channels:
            found += [turn(f"pair.{layer} {factor}", n, c_triangle, n) for factor in ("right", "left")]
            found += [turn(f"pair.{layer} product", c_triangle, n, n)]
        else:
            found += [gather(f"pair.{layer} shared 0", n * c_triangle)]
    return [move for move in found if ranks > 1]


@dataclass(frozen=True)
class Link:
    """What joins the ranks: a collective of x bytes per rank takes latency + x / bandwidth.

    latency: seconds; bandwidth: bytes per second that a rank can send.
    """

    latency: float
    bandwidth: float

    @property
    def call(self) -> float:
        """The bytes that could travel in the time that a collective costs whatever its size."""
        return self.latency * self.bandwidth


# Modelled, not measured: 80 % of what the makers state for a rank and direction, and the usual time of a small call.
# "gloo" was measured: four ranks on two cores, loopback (benchmarks/results/cluster-2core-epyc-2026-11-20.json).
LINKS = {
    "NVLink 4": Link(20e-6, 360e9),
    "NVLink 3": Link(20e-6, 240e9),
    "InfiniBand 400 Gb/s": Link(30e-6, 40e9),
    "Ethernet 25 Gb/s": Link(60e-6, 2.5e9),
    "gloo": Link(1.7e-3, 0.53e9),
}


def seconds(moves: Iterable[Move], link: Link) -> float:
    """Return how long the two passes of a block wait for its moves if nothing is computed meanwhile."""
    both = total(moves := list(moves), "forward") + total(moves, "backward")
    return both.calls * link.latency + both.bytes / link.bandwidth
