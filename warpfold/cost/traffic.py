"""What the ranks of an example send each other in an Evoformer block, in closed form, and how long that takes.

What travels for gradients: cost/gradient_traffic.py.  A law test compares the closed form with what fake ranks send
(benchmarks/traffic.py, tests/test_traffic.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from warpfold.cost.collectives import Kind
from warpfold.cost.links import Link
from warpfold.model.evoformer import EvoformerConfig
from warpfold.parallel.collectives import shard_sizes

Phase = Literal["forward", "recomputed", "backward"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, kw_only=True)
class TrafficBlock:
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
    kind: Kind  # "all_gather", "all_to_all", "sendrecv" (parallel/collectives.py)
    forward: Traffic = Traffic()
    recomputed: Traffic = Traffic()
    backward: Traffic = Traffic()


def total(moves: Iterable[Move], phase: Phase) -> Traffic:
    """Add up all that moves in one pass."""
    return sum((getattr(move, phase) for move in moves), Traffic())


def moves(block: TrafficBlock, ranks: int, by_channels: bool, itemsize: int = 2) -> list[Move]:
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


def swaps(block: TrafficBlock, ranks: int, itemsize: int = 2) -> tuple[Move, Move]:
    """Return what two branches send each other after a block: the first its shard of m, the second that of z.

    ranks: axial ones.  The backward pass sends the gradient of what was received.
    """
    here = shard_sizes(block.residues, ranks)[0]
    m, z = block.sequences * here * block.c_m * itemsize, here * block.residues * block.c_z * itemsize
    return (
        Move("m of the other branch", "sendrecv", Traffic(1, m), backward=Traffic(1, z)),
        Move("z of the other branch", "sendrecv", Traffic(1, z), backward=Traffic(1, m)),
    )


def seconds(moves: Iterable[Move], link: Link) -> float:
    """Return how long the two passes of a block wait for its moves if nothing is computed meanwhile."""
    both = total(moves := list(moves), "forward") + total(moves, "backward")
    return both.calls * link.latency + both.bytes / link.bandwidth
