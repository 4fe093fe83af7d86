"""How a model runs: by default in plain torch, on one device, everything at once.

Every module that can run in more than one way is an `Executable` and asks its `execution`.  A plan puts another one in
the place of `PLAIN`, for all modules of a model at once (`Execution.bind` in warpfold/parallel/execution.py); nothing
else of a module is ever set from outside.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from warpfold.ops.dispatch import Kernels, using

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

    def transposed(self, z: Tensor, length: int) -> Tensor:
        """Return this process's rows of z [*, i, j, c] with i and j exchanged."""
        return z.transpose(-3, -2)


ALL = Residues()


class PlainExecution:
    """Run layers, blocks and stacks in plain torch: the default, and the meaning of every other execution."""

    dtype: torch.dtype = torch.float32  # of m and z
    kernels: Kernels | None = None  # how operations are computed; None: as they are around the call
    residues: Residues = ALL

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


PLAIN = PlainExecution()


class Executable(nn.Module):
    """A module that can run in more than one way; its `execution` says how."""

    execution: PlainExecution = PLAIN

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.execution.kernels is None:
            return super().__call__(*args, **kwargs)
        with using(self.execution.kernels):
            return super().__call__(*args, **kwargs)

    @property
    def residues(self) -> Residues:
        """The residues that this process holds."""
        return self.execution.residues
