"""How a model runs: by default in plain torch, on one device, everything at once.

Every module that can run in more than one way is an `Executable` and asks its `execution`.  A plan puts another one in
the place of `PLAIN`, for all modules of a model at once (`Execution.bind` in warpfold/parallel/execution.py); nothing
else of a module is ever set from outside.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from warpfold.device import Function, Named
from warpfold.host import fetch, fetch_each, store
from warpfold.ops.dispatch import Kernels, alike, enough, using, watched
from warpfold.ops.tensors import upcast_half

if TYPE_CHECKING:
    from warpfold.model.axial import AxialUpdate, Block, BlockStack

Tensors = tuple[Tensor, ...]


class Residues:
    """The residues that this process holds: here all of them.

    Outside the trunk's layers, m [*, s, r, c] is sharded along residues and z [*, i, j, c] along its rows, and
    everything without a pair axis or an alignment is whole on every process.  Axes count from the right.

    The loss of an example is a sum over the processes that share it: what comes from a shard counts as it is, what
    every process computes alike (of `shards` shards, or in `replicas` of the same shard) is divided by their number.
    """

    shards = 1
    replicas = 1

    def local_shard(self, x: Tensor, axis: int) -> Tensor:
        """Return this process's shard of a tensor that every process has whole."""
        return x

    def all_gather(self, x: Tensor, axis: int, length: int) -> Tensor:
        """Return the whole of a tensor of which every process has its shard; `length`: of the whole along `axis`."""
        return x

    def shard_spans(self, length: int) -> list[slice]:
        """Return which of so many residues each process holds."""
        return [slice(0, length)]

    def transposed(self, z: Tensor, length: int) -> Tensor:
        """Return this process's rows of z [*, i, j, c] with i and j exchanged.

        z may have some columns alone, of `length` rows in all: each process then gets its shard of them.
        """
        return z.transpose(-3, -2)


ALL = Residues()
TOGETHER = 1 << 20  # positions of templates: four of 512 residues; larger ones fill a device one by one


class PlainExecution:
    """Run layers, blocks and stacks in plain torch: the default, and the meaning of every other execution."""

    dtype: torch.dtype = torch.float32  # of m and z
    everywhere: bool = False  # whether what follows the trunk projects in this dtype too, and not in fp32 at least
    kernels: Kernels | None = None  # how operations are computed; None: as they are around the call
    residues: Residues = ALL
    in_place: bool = False  # whether what a function is given to update may be written over: no gradient needs it

    def stack(self, stack: "BlockStack", states: Tensors, masks: Tensors) -> Tensors:
        """Run the blocks of a stack one after another."""
        for block in stack.blocks:
            states = block(*states, *masks)
        return states

    def block(self, block: "Block", states: Tensors, masks: Tensors) -> Tensors:
        """Run the steps of a block one after another; `states` and `masks` in the order of `block.states`."""
        held, mask = dict(zip(block.states, states)), dict(zip(block.states, masks))
        for step in block.checked_steps():
            others = () if step.other is None else (held[step.other],)
            held[step.state] = step.layer(held[step.state], mask[step.masked], *others)
        return tuple(held.values())

    def layer(self, layer: "AxialUpdate", x: Tensor, mask: Tensor, other: Tensor | None = None) -> Tensor:
        """Return x with the layer's update, computed for all of x at once."""
        return layer.whole(x, mask, other, layer.dropout_factors(x.shape, x))

    def delta(
        self, layer: "AxialUpdate", x: Tensor, mask: Tensor, other: Tensor | None = None, rows: int | None = None
    ) -> Tensor:
        """Return the layer's update of all of x without x itself, for a caller that adds it.

        rows: how many rows (or columns) to compute together, where the caller chooses; None: all.
        """
        return layer.delta(x, mask, other)

    def call(
        self, model: nn.Module, function: Function, inputs: Mapping[str, Tensor], reason: str | None = None
    ) -> Named:
        """Return what a function of tensors that runs the model returns; another execution may replay its graph.

        reason: why it cannot be recorded.
        """
        return function(inputs)

    def rows(self, count: int) -> list[slice]:
        """Return which of so many rows of z are computed together: here all; at least one slice, even of none."""
        return [slice(0, count)]

    def pair_memory(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Allocate zeros for z, in the dtype of the trunk; `like`: a tensor on the device that computes."""
        return like.new_zeros(shape, dtype=self.dtype)

    def aside(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Allocate zeros for what is read and written seldom beside z, such as a sum over templates."""
        return self.pair_memory(like, shape)

    def fetch(self, z: Tensor, rows: slice, axis: int = -3) -> Tensor:
        """Return rows of z [*, i, j, c], or columns (axis -2), where they are computed with: a view, or a copy of what
        lies in host memory."""
        return fetch(z, rows, axis)

    def store(self, z: Tensor, rows: slice, new: Tensor, axis: int = -3) -> None:
        """Write new rows over those of z [*, i, j, c], or columns (axis -2)."""
        store(z, rows, new, axis)

    def parts(self, count: int, positions: int) -> list[slice]:
        """Return which of so many templates are computed together: as many as have `TOGETHER` positions, or one.

        positions: of the pair representation of one.
        """
        each = max(TOGETHER // max(positions, 1), 1)
        return [slice(start, min(start + each, count)) for start in range(0, count, each)]


PLAIN = PlainExecution()


class Executable(nn.Module):
    """A module that can run in more than one way; its `execution` says how."""

    execution: PlainExecution = PLAIN

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.computing():
            return super().__call__(*args, **kwargs)

    def computing(self) -> AbstractContextManager[None]:
        """Compute operations as the execution says within the context; a call of the module does."""
        return nullcontext() if self.execution.kernels is None else using(self.execution.kernels)

    @property
    def residues(self) -> Residues:
        """The residues that this process holds."""
        return self.execution.residues

    def by_rows(self, function: Callable[[slice], Tensor], count: int, axis: int) -> Tensor:
        """Return the join along `axis` of what a function makes of so many rows, as many at a time as the plan says.

        Without gradients each part is written to its place at once, so that there is never more than the result and
        one part.
        """
        slices = self.execution.rows(count)
        if len(slices) == 1:
            return function(slices[0])
        if torch.is_grad_enabled():
            return torch.cat([function(rows) for rows in slices], axis)
        joined = None
        for rows in alike(slices):
            part = function(rows)
            if joined is None:
                shape = list(part.shape)
                shape[axis] = count
                joined = part.new_empty(shape)
            joined.narrow(axis, rows.start, rows.stop - rows.start).copy_(part)
        assert joined is not None
        return joined

    def renew_rows(self, z: Tensor, function: Callable[[slice, Tensor], Tensor]) -> Tensor:
        """Return z [*, i, j, c] with what a function makes of each slice and its rows of z; in place where that may be.

        What is made has the shape and the dtype of what is given.
        """
        execution = self.execution
        if not execution.in_place:
            return self.by_rows(lambda rows: function(rows, execution.fetch(z, rows)), z.shape[-3], -3)
        parts = enough(execution.rows(z.shape[-3]))
        for rows, old in watched(fetch_each(z, parts), len(parts)):
            execution.store(z, rows, function(rows, old))
        return z

    def around_trunk(self, x: Tensor) -> Tensor:
        """Return what the trunk computed in the dtype in which this module goes on: in fp32 at least, or as it is."""
        return x if self.execution.everywhere else upcast_half(x)
