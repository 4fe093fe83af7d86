"""Tensors of which every rank holds a shard, as the trunk's layers pass them on under an axial plan.

Plans that work in place move them piece by piece: what travels is never there a second time, only a piece.  A piece is
the same few rows of every rank's shard.  The next one travels while one is put into its place.  (A tensor that travels
at once exists four times: as it is, as what is sent, as what is received, and joined.)
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from warpfold.model.axial import COLS, ROWS, Residues, Tensors
from warpfold.ops.dispatch import alike
from warpfold.parallel.collectives import Pending, all_gather, all_to_all, local_shard, shard_sizes
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

    @property
    def part(self) -> slice:
        """Which rows of this rank's shard it has."""
        return slice(self.start, self.start + self.sizes[self.rank])

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
) -> Tensors:
    """Return whole tensors, of which `begin` sets out to make one piece after another.

    begin: starts the collectives of a piece, one for each tensor; each yields the rows of all ranks along `axis`, in
    order.
    """
    joined: list[Tensor] = []

    def put(piece: Piece, arriving: Sequence[Pending]) -> None:
        """Wait for a piece, and write it to its place."""
        for index, pending in enumerate(arriving):
            found = pending.wait()
            if len(joined) == index:
                shape = list(found.shape)
                shape[axis] = length
                joined.append(found.new_empty(shape))
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


class ShardedTensor:
    """m [*, s, r, c] or z [*, i, j, c], sharded along ROWS or COLS, or for a while along both.

    The second shard is made from the first by an all-to-all that is started when its use is foreseen (`start`) and
    awaited at its use (`along`).  lengths: of the whole along both axes.
    piece: for plans that work in place, how many numbers travel at a time.  The second shard is then made at its use,
    in pieces, and the first is given up, also by those who gave it to the stack: it is empty afterwards.
    """

    def __init__(
        self,
        axis: int,
        shard: Tensor | Pending,
        lengths: Mapping[int, int],
        group: Group,
        name: str,
        piece: int | None = None,
    ) -> None:
        self.lengths, self.group, self.name = lengths, group, name
        self.piece = piece if group.size > 1 else None
        self._shards = {axis: shard if isinstance(shard, Pending) else Pending(shard)}

    @property
    def present(self) -> int:
        """An axis along which its shard is here already; if none is, that of one on its way."""
        return next((axis for axis, pending in self._shards.items() if pending.arrived), next(iter(self._shards)))

    def start(self, axis: int) -> None:
        """Begin to make the shard along `axis`, unless it is there or on its way, or there is nothing to make it of."""
        had = self.present
        if axis not in self._shards and self._shards[had].arrived and self.piece is None:
            x = self._shards[had].wait()
            self._shards[axis] = all_to_all(x, had, axis, self.lengths[had], self.group, self._name_of_move(axis))

    def pending(self, axis: int) -> Pending:
        """Return this rank's shard along `axis`, which may be on its way."""
        if axis not in self._shards:
            self._shards[self.present].wait()
            if self.piece is not None:
                self._move(axis)
            self.start(axis)
        return self._shards[axis]

    def _move(self, axis: int) -> None:
        """Make the shard along `axis` in pieces, and give up the other one."""
        had = self.present
        x = self._shards.pop(had).wait()

        def begin(piece: Piece) -> list[Pending]:
            part = piece.of_shard(x, had)
            return [all_to_all(part, had, axis, piece.length, self.group, self._name_of_move(axis))]

        (new,) = join_pieces(begin, had, self.lengths[had], self.rows(had, x), self.group)
        x.data = x.new_empty(0)  # its memory is free, whoever still has the tensor
        self._shards[axis] = Pending(new)

    def rows(self, axis: int, like: Tensor | None = None) -> int:
        """Return how many rows along `axis` make a piece, the same on all ranks; `like`: any shard."""
        assert self.piece is not None
        whole = math.prod(self.whole_shape(self.along(self.present) if like is None else like))
        return max(self.piece * self.lengths[axis] // max(whole, 1), 1)

    def _name_of_move(self, axis: int) -> str:
        return f"{self.name} to {'rows' if axis == ROWS else 'columns'}"

    def along(self, axis: int) -> Tensor:
        """Return this rank's shard along `axis`, once it is there."""
        return self.pending(axis).wait()

    def only(self, axis: int) -> "ShardedTensor":
        """Return the same with this one shard alone: what a block keeps of its input."""
        self.start(axis)
        if axis not in self._shards:  # it comes from a rank that has not sent it yet
            axis = self.present
        self._shards[axis].given = True
        return self.with_shard(axis, self._shards[axis])

    def with_shard(self, axis: int, shard: Tensor | Pending) -> "ShardedTensor":
        """Return another tensor of the same whole shape."""
        return ShardedTensor(axis, shard, self.lengths, self.group, self.name, self.piece)

    def shard_shape(self, axis: int, like: Tensor) -> list[int]:
        """Return the shape of this rank's shard along `axis`; `like`: any shard of it."""
        shape = self.whole_shape(like)
        shape[axis] = shard_sizes(self.lengths[axis], self.group.size)[self.group.rank]
        return shape

    def whole_shape(self, like: Tensor) -> list[int]:
        """Return the shape of the whole; `like`: any shard of it."""
        shape = list(like.shape)
        shape[ROWS], shape[COLS] = self.lengths[ROWS], self.lengths[COLS]
        return shape


class ShardedResidues(Residues):
    """The residues of one rank of an axial group; `replicas` branch ranks hold the same."""

    def __init__(self, group: Group, replicas: int = 1) -> None:
        self.group, self.shards, self.replicas = group, group.size, replicas

    def local_shard(self, x: Tensor, axis: int) -> Tensor:
        return local_shard(x, axis, self.group)

    def all_gather(self, x: Tensor, axis: int, length: int) -> Tensor:
        return all_gather(x, axis, length, self.group, "residues").wait()

    def shard_spans(self, length: int) -> list[slice]:
        ends = [0, *accumulate(shard_sizes(length, self.group.size))]
        return [slice(*pair) for pair in pairwise(ends)]

    def transposed(self, z: Tensor, length: int) -> Tensor:
        return all_to_all(z, ROWS, COLS, length, self.group, "pairs").wait().transpose(ROWS, COLS)
