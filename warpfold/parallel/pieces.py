"""Collectives piece by piece, for plans that work in place: what travels is never there a second time, only a piece.

A piece is the same few rows of every rank's shard.  The next one travels while one is put into its place.  (A tensor
that travels at once exists four times: as it is, as what is sent, as what is received, and joined.)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from warpfold.model.execution import Tensors
from warpfold.ops.dispatch import alike
from warpfold.ops.noise import Factors
from warpfold.parallel.collectives import Pending, shard_sizes
from warpfold.parallel.mesh import Group


@dataclass(frozen=True)
class Piece:
    """Some rows of every rank's shard, fewer or none where a shard has ended.

    offsets, sizes: of every rank's, in the whole.  start: of this rank's, in its shard.
    """

    rank: int
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def length(self) -> int:
        """How many rows it has on all ranks."""
        return sum(self.sizes)

    def of_shard(self, x: Tensor, axis: int) -> Tensor:
        """Return this rank's rows, a view of its shard."""
        return x.narrow(axis, self.start, self.sizes[self.rank])


def pieces(length: int, rows: int, group: Group) -> Iterator[Piece]:
    """Yield pieces of at most `rows` rows of each rank's shard; `length`: of the whole.  The same number on all ranks.

    The ranks' sizes in a piece are `shard_sizes` of its length, as collectives want them.
    Errors: RuntimeError where gradients are on.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("a plan with in_place cannot be differentiated: use torch.no_grad(), or chunk alone")
    shards = shard_sizes(length, group.size)
    begins = [0, *accumulate(shards)]
    for start in alike(range(0, max(shards), rows)):
        starts = [min(start, size) for size in shards]
        sizes = tuple(min(rows, size - at) for size, at in zip(shards, starts))
        yield Piece(group.rank, starts[group.rank], tuple(map(sum, zip(begins, starts))), sizes)


def join_pieces(
    begin: Callable[[Piece], Sequence[Pending]],
    axis: int,
    length: int,
    rows: int,
    group: Group,
    empty: Callable[[Tensor], Tensor] = lambda like: like.new_empty(like.shape),
) -> Tensors:
    """Return whole tensors, of which `begin` sets out to make one piece after another.

    begin: starts the collectives of a piece, one for each tensor; each yields the rows of all ranks along `axis`, in
    order.  empty: allocates a whole tensor; given one of its shape that has no memory of its own.
    """
    joined: list[Tensor] = []

    def put(piece: Piece, arriving: Sequence[Pending]) -> None:
        """Wait for a piece, and write it to its place."""
        for index, pending in enumerate(arriving):
            found = pending.wait()
            if len(joined) == index:
                shape = list(found.shape)
                shape[axis] = length
                joined.append(empty(found.narrow(axis, 0, 1).expand(shape)))
            for offset, part in zip(piece.offsets, found.split(piece.sizes, axis)):
                joined[index].narrow(axis, offset, part.shape[axis]).copy_(part)

    before = None
    for piece in pieces(length, rows, group):
        arriving = begin(piece)
        if before is not None:
            put(*before)
        before = piece, arriving
    assert before is not None  # there is a piece of any length but 0
    put(*before)
    return tuple(joined)


def cut_factors(factors: Factors | None, axis: int, start: int, length: int) -> Factors | None:
    """Return some rows of dropout factors, where they differ along `axis`."""
    if factors is None or factors.shape[axis] == 1:
        return factors
    return factors.narrow(axis, start, length)
