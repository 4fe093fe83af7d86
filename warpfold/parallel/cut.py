"""Tensors of which every rank holds a slice, as the trunk's layers pass them on under an axial plan."""

from collections.abc import Mapping

from torch import Tensor

from warpfold.model.axial import COLS, ROWS
from warpfold.model.residues import Residues
from warpfold.parallel.collectives import Pending, all_gather, all_to_all, local_shard, shard_sizes
from warpfold.parallel.mesh import Group


class Cut:
    """m [*, s, r, c] or z [*, i, j, c], cut along ROWS or COLS, or for a while along both: the second slice is made
    from the first by an all-to-all that is started when its use is foreseen (`start`) and awaited at it (`along`).

    lengths: of the whole along both axes.  by_channels: how its triangle products are cut (parallel/sharded.py).
    """

    def __init__(
        self,
        axis: int,
        held: Tensor | Pending,
        lengths: Mapping[int, int],
        group: Group,
        name: str,
        by_channels: bool = False,
    ) -> None:
        self.lengths, self.group, self.name, self.by_channels = lengths, group, name, by_channels
        self._held = {axis: held if isinstance(held, Pending) else Pending(held)}

    @property
    def present(self) -> int:
        """An axis along which it can be had without waiting, if there is one."""
        return next((axis for axis, pending in self._held.items() if pending.arrived), next(iter(self._held)))

    def start(self, axis: int) -> None:
        """Begin to make the slice along `axis`, unless it is there or on its way, or there is nothing to make it of."""
        had = self.present
        if axis not in self._held and self._held[had].arrived:
            x = self._held[had].wait()
            name = f"{self.name} to {'rows' if axis == ROWS else 'columns'}"
            self._held[axis] = all_to_all(x, had, axis, self.lengths[had], self.group, name)

    def pending(self, axis: int) -> Pending:
        """This rank's slice along `axis`, which may be on its way."""
        if axis not in self._held:
            self._held[self.present].wait()
            self.start(axis)
        return self._held[axis]

    def along(self, axis: int) -> Tensor:
        """This rank's slice along `axis`."""
        return self.pending(axis).wait()

    def only(self, axis: int) -> "Cut":
        """The same, of this one slice: what a block keeps of its input."""
        self.start(axis)
        if axis not in self._held:  # it comes from a rank that has not sent it yet
            axis = self.present
        self._held[axis].given = True
        return self.with_slice(axis, self._held[axis])

    def with_slice(self, axis: int, held: Tensor | Pending) -> "Cut":
        """Another tensor of the same whole shape."""
        return Cut(axis, held, self.lengths, self.group, self.name, self.by_channels)

    def slice_shape(self, axis: int, like: Tensor) -> list[int]:
        """The shape of this rank's slice along `axis`; `like`: any slice of it."""
        shape = self.whole_shape(like)
        shape[axis] = shard_sizes(self.lengths[axis], self.group.size)[self.group.rank]
        return shape

    def whole_shape(self, like: Tensor) -> list[int]:
        """The shape of the whole; `like`: any slice of it."""
        shape = list(like.shape)
        shape[ROWS], shape[COLS] = self.lengths[ROWS], self.lengths[COLS]
        return shape


class MSAMask:
    """The mask [*, s, r] of m, whole on every rank, as its layers ask for it."""

    def __init__(self, whole: Tensor, group: Group) -> None:
        self.whole, self.group = whole, group

    def along(self, axis: int) -> Tensor:
        """This rank's slice; `axis` is one of m's, which has channels behind."""
        return local_shard(self.whole, axis + 1, self.group)


class PairMask:
    """The mask of z, of which this rank has its rows [*, i, j]; it is symmetric, so they are its columns too."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def along(self, axis: int) -> Tensor:
        """This rank's slice."""
        return self.rows if axis == ROWS else self.rows.mT


class CutResidues(Residues):
    """The residues of one rank of an axial group, of which there may be `copies` (branch ranks)."""

    def __init__(self, group: Group, copies: int = 1) -> None:
        self.group, self.cuts, self.copies = group, group.size, copies

    def mine(self, x: Tensor, axis: int) -> Tensor:
        return local_shard(x, axis, self.group)

    def whole(self, x: Tensor, axis: int, length: int) -> Tensor:
        return all_gather(x, axis, length, self.group, "residues").wait()

    def transposed(self, z: Tensor, length: int) -> Tensor:
        return all_to_all(z, ROWS, COLS, length, self.group, "pairs").wait().transpose(ROWS, COLS)
