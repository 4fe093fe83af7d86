"""Tensors of which every rank holds a shard, as the trunk's layers pass them on under an axial plan."""

from collections.abc import Mapping
from itertools import accumulate, pairwise

from torch import Tensor

from warpfold.model.axial import COLS, ROWS
from warpfold.model.execution import Residues
from warpfold.parallel.collectives import Pending, all_gather, all_to_all, local_shard, shard_sizes
from warpfold.parallel.mesh import Group


class ShardedTensor:
    """m [*, s, r, c] or z [*, i, j, c], sharded along ROWS or COLS, or for a while along both.

    The second shard is made from the first by an all-to-all that is started when its use is foreseen (`start`) and
    awaited at its use (`along`).  lengths: of the whole along both axes.
    """

    def __init__(self, axis: int, shard: Tensor | Pending, lengths: Mapping[int, int], group: Group, name: str) -> None:
        self.lengths, self.group, self.name = lengths, group, name
        self._shards = {axis: shard if isinstance(shard, Pending) else Pending(shard)}

    @property
    def present(self) -> int:
        """An axis along which its shard is here already; if none is, that of one on its way."""
        return next((axis for axis, pending in self._shards.items() if pending.arrived), next(iter(self._shards)))

    def start(self, axis: int) -> None:
        """Begin to make the shard along `axis`, unless it is there or on its way, or there is nothing to make it of."""
        had = self.present
        if axis not in self._shards and self._shards[had].arrived:
            x = self._shards[had].wait()
            name = f"{self.name} to {'rows' if axis == ROWS else 'columns'}"
            self._shards[axis] = all_to_all(x, had, axis, self.lengths[had], self.group, name)

    def pending(self, axis: int) -> Pending:
        """Return this rank's shard along `axis`, which may be on its way."""
        if axis not in self._shards:
            self._shards[self.present].wait()
            self.start(axis)
        return self._shards[axis]

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
        return ShardedTensor(axis, shard, self.lengths, self.group, self.name)

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
