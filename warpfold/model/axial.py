"""What the trunk's layers have in common, an update that is independent along one axis; and blocks made of them.

    x  <-  x + dropout(update)

Almost all of AlphaFold2's trunk has this form.  A layer says which axis it is, and two things:

    shared(source, mask)                        what every slice must see whole: a pair bias, one factor of a product
    update(read, mask, shared, x, factors)      the update of one slice, added to x where that is given

All of x is a slice.  How the work is executed, all at once, in chunks, in place or on several ranks, is decided by an
*execution* (`PlainExecution` in warpfold/model/axial.py, warpfold/parallel/execution.py); the layer never knows.

Two laws make every execution right; tests/laws/test_slicing.py checks them for every subclass there is:

    shared(source)            is the join of  shared(slice)                along `join_axis`
    update(read, shared)      is the join of  update(slice, shared)        along `axis`

Two things make it fast.  Where all of x is there, `update` makes what is shared itself, on the way (`shared` is None).
And while what is shared still travels between ranks, a slice may do what it can without it (`prepare`).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from warpfold.device import Function, Named
from warpfold.host import fetch, fetch_each, store
from warpfold.model.layers import DrawsNoise, LayerNorm
from warpfold.ops.dispatch import (
    NOTHING,
    Kernels,
    kernels,
    representative_turns,
    uniform_loop,
    upcast_half,
    using,
    watched,
)
from warpfold.ops.noise import Factors

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

    def layer(
        self,
        layer: "AxialUpdate",
        x: Tensor,
        mask: Tensor,
        other: Tensor | None = None,
        residual: bool = True,
        rows: int | None = None,
    ) -> Tensor:
        """Return x with the layer's update, or without `residual` the update alone, computed for all of x at once.

        rows: how many rows (or columns) to compute together, where the caller chooses; heeded by an execution that cuts
        layers for callers.
        """
        read = layer.named(layer.reads, x, other)
        shared = None
        if layer.shares not in (None, layer.reads):
            shared = layer.shared(layer.named(layer.shares, x, other), mask)
        factors = layer.dropout_factors(x.shape, x) if residual else None
        return layer.update(read, mask, shared, x if residual else None, factors)

    def call(self, model: nn.Module, function: Function, inputs: Mapping[str, Tensor], context: Hashable = ()) -> Named:
        """Call a function of tensors that runs the model; another execution may replay its graph.

        context: what else decides what the function does, such as whether it sends to other ranks.
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
        if self.execution.kernels in (None, kernels()):  # nearly always: a context costs three calls of Python
            return super().__call__(*args, **kwargs)
        with self.computing():
            return super().__call__(*args, **kwargs)

    def computing(self) -> AbstractContextManager[None]:
        """Compute operations as the execution says within the context; a call of the module does."""
        return NOTHING if self.execution.kernels is None else using(self.execution.kernels)

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
        for rows in uniform_loop(slices):
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
        parts = representative_turns(execution.rows(z.shape[-3]))
        for rows, old in watched(fetch_each(z, parts), len(parts)):
            execution.store(z, rows, function(rows, old))
        return z

    def around_trunk(self, x: Tensor) -> Tensor:
        """Return a result of the trunk in the dtype in which this module goes on: in fp32 at least, or as it is."""
        return x if self.execution.everywhere else upcast_half(x)


# Axes are counted from the right; masks lack the channel axis, so a mask is cut along axis + 1.
ROWS, COLS = -3, -2  # of m [*, s, r, c] and of z [*, i, j, c]
Which = Literal["x", "other"]  # of the tensors that a layer is called with
Read = Tensor | Tensors  # a slice of what a layer reads, or what it prepared of that
Shared = Tensors | None


class AxialUpdate(Executable, DrawsNoise):
    """Base of the trunk's layers; see the module's docstring for the contract.

    Subclasses set `norm` and override `update` and, where slices share anything, `shares` and `shared`.  x and the
    returned tensor are m or z; `other` is the other one of them, for layers that read both.
    """

    axis: int | None = None  # where x may be cut; None: anywhere
    reads: Which = "x"  # what `update` reads of each slice
    shares: Which | None = None  # what `shared` is made of
    mask_of: Which = "x"  # whose mask the layer is given
    pieces_axis: int | None = None  # where `shared` is cut along `join_axis`, the update is of x cut along this axis
    dropout_rate = 0.0
    dropout_shared_axis = ROWS  # one draw serves all of this axis

    norm: LayerNorm

    @property
    def read_axis(self) -> int | None:
        """The axis along which what is read is cut when x is cut along `axis`."""
        return self.axis

    def named(self, which: Which | None, x: Tensor, other: Tensor | None) -> Tensor:
        """Return the tensor that `which` names.  Errors: ValueError where that is `other`, which was not given."""
        if which != "other":
            return x
        if other is None:
            raise ValueError(f"{type(self).__name__} reads another tensor beside x, and was given none")
        return other

    def join_axis(self, cut: int) -> int:
        """Return the axis along which tensors of `shared` are joined that are made of a source cut along `cut`."""
        return cut

    def shared(self, source: Tensor, mask: Tensor) -> Tensors:
        """Return the tensors that every slice must see whole, made of what `shares` names, or of a slice of that.

        mask: of the source, where the layer's mask is that (`mask_of`).
        """
        raise NotImplementedError

    def empty_shared(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Allocate one of the tensors of `shared`, whole, to write its parts to.  like: one of them."""
        return like.new_empty(shape)

    def prepare(self, read: Tensor, mask: Tensor) -> Read:
        """Return what `update` takes in place of `read`: the work that a slice can do before it has what is shared."""
        return read

    def update(self, read: Read, mask: Tensor, shared: Shared, x: Tensor | None, factors: Factors | None) -> Tensor:
        """Return x + factors * update of one slice; or, without x, the update: what the supplement's algorithm returns.

        read: the slice of what `reads` names, not yet normalised, or what `prepare` made of it.  mask: of it, where
        the layer's mask is that.  shared: of all slices; None where nothing is shared, or where `read` is all that it
        is made of.  x: the slice itself.  factors: of dropout, cut as x is; None: ones.
        """
        raise NotImplementedError

    def dropout_factors(self, shape: Sequence[int], like: Tensor) -> Factors | None:
        """Return the dropout factors for all of x, of this shape but 1 along `dropout_shared_axis` (Supp. 1.11.6).

        What axes lie before the last three has one draw for all, so that each of several templates is dropped as if it
        were alone, as in the official code.  In the dtype of `like`; to be cut as x is; None where nothing is dropped.
        """
        if not (self.training and self.dropout_rate):
            return None
        drawn = [1] * (len(shape) - 3) + list(shape[-3:])
        drawn[self.dropout_shared_axis] = 1
        return self.noise.factors(drawn, self.dropout_rate, self.stream, like)

    def forward(self, x: Tensor, mask: Tensor, other: Tensor | None = None, residual: bool = True) -> Tensor:
        """Return x with this layer's update, or without `residual` the update alone, before dropout."""
        return self.execution.layer(self, x, mask, other, residual)


def residual(x: Tensor | None, dx: Tensor, factors: Factors | None) -> Tensor:
    """Return x + factors * dx (None: ones), or dx where x is None: the last line of an `update`."""
    if x is None:
        return dx
    return x + (dx if factors is None else dx * factors)


class Step(NamedTuple):
    """A line of a block: `state` is updated by `layer`, which reads `other` beside it (None: nothing).

    The layer may be any module that is called as layer(state, mask) or layer(state, mask, other); only an
    `AxialUpdate` can be cut.
    """

    state: str
    layer: nn.Module
    other: str | None = None

    @property
    def masked(self) -> str:
        """The state whose mask the layer is given."""
        of_other = getattr(self.layer, "mask_of", "x") == "other"
        return self.other if self.other is not None and of_other else self.state


Steps = tuple[Step, ...]


class Block(Executable):
    """Layers one after another, as data: `steps` is what the block does, and an execution runs it.

    A subclass that has a `forward` of its own runs it in plain torch; plans that must cut the states refuse it.
    """

    states: tuple[str, ...] = ("m", "z")

    @property
    def steps(self) -> Steps:
        """The lines of the block, in the order of the supplement."""
        raise NotImplementedError

    def checked_steps(self) -> Steps:
        """Return `steps`.  Errors: ValueError for a step of a state that the block does not have."""
        steps = self.steps
        for step in steps:
            for state in (step.state, step.other):
                if state is not None and state not in self.states:
                    raise ValueError(
                        f"{type(self).__name__}: the step of {type(step.layer).__name__} names the state {state!r}, "
                        f"but the block's states are {', '.join(self.states)}"
                    )
        return steps

    def forward(self, *states_and_masks: Tensor) -> Tensors:
        """Return the new states.

        Called with the states, in the order of `states`, and then with their masks: block(m, z, m_mask, z_mask).
        Errors: ValueError for another number of tensors.
        """
        count = len(self.states)
        if len(states_and_masks) != 2 * count:
            raise ValueError(
                f"{type(self).__name__} takes its states ({', '.join(self.states)}) and their masks, "
                f"{2 * count} tensors, but got {len(states_and_masks)}"
            )
        return self.execution.block(self, states_and_masks[:count], states_and_masks[count:])


class BlockStack(Executable):
    """Blocks one after another, from states and masks to new states."""

    blocks: nn.ModuleList
