"""The axial contract: the trunk's layers, whose updates are independent along one axis, and blocks made of them.

    x  <-  x + dropout(update)

Almost all of AlphaFold2's trunk has this form. A layer declares the axis and defines two methods:

    shared(source, mask)                    the tensors that every slice needs whole: a pair bias, a factor of a product
    update(read, mask, shared, x, factors)  the update of one slice, added to x if x is passed

A slice may be all of x. An *execution* (`PlainExecution` below, warpfold/parallel/execution.py) decides whether the
work is done at once, in chunks, in place or on several ranks. The layer is the same in all cases.

Two laws make every execution correct. tests/laws/test_slicing.py checks them for every subclass:

    shared(source)            is the concatenation of  shared(slice)             along `join_axis`
    update(read, shared)      is the concatenation of  update(slice, shared)     along `axis`

Two provisions make it fast. If the slice is all of x, `update` computes the shared tensors itself (`shared` is None),
and may fuse them with the update. While the shared tensors travel between ranks, `prepare` computes the quantities of
a slice that do not depend on them.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from warpfold.device import Function, Named
from warpfold.host import fetch, fetch_each, store
from warpfold.model.layers import DrawsNoise, LayerNorm, PackedOperands
from warpfold.ops.dispatch import (
    NOTHING,
    Kernels,
    choice,
    subsample,
    uniform_loop,
    upcast_half,
    using,
    with_progress,
)
from warpfold.ops.noise import Factors

Tensors = tuple[Tensor, ...]


class Residues:
    """The residues that this process holds. This class holds all of them.

    Outside the trunk's layers, m [*, s, r, c] is sharded along residues and z [*, i, j, c] along its rows. Tensors
    without a pair axis or an alignment are whole on every process. Axes count from the right.

    The loss of an example is a sum over the processes that share it. A term computed from a shard enters unscaled. A
    term that all `shards` shards compute, or all `replicas` of one shard, is divided by their number.
    """

    shards = 1
    replicas = 1

    def local_shard(self, x: Tensor, axis: int) -> Tensor:
        """Return this process's shard of a tensor that is whole on every process."""
        return x

    def all_gather(self, x: Tensor, axis: int, length: int) -> Tensor:
        """Gather a tensor from the shards of all processes; `length` is its size along `axis`."""
        return x

    def shard_spans(self, length: int) -> list[slice]:
        """Return the range of residues that each process holds, of `length` in all."""
        return [slice(0, length)]

    def transposed(self, z: Tensor, length: int) -> Tensor:
        """Exchange i and j of z [*, i, j, c] and return this process's rows of the result.

        z may contain some of the columns only, each of `length` rows in all. Each process then gets its shard of these.
        """
        return z.transpose(-3, -2)


ALL = Residues()
# Pair positions of the templates that are computed together: four templates of 512 residues. A single larger template
# fills a device.
TEMPLATE_BATCH_POSITIONS = 1 << 20


class PlainExecution:
    """Run layers, blocks and stacks in plain torch. This is the default and defines every other execution's results."""

    # The dtype of m and z.
    dtype: torch.dtype = torch.float32
    # Whether the modules after the trunk project in `dtype`. If not, they project in fp32 or wider.
    heads_in_trunk_dtype: bool = False
    # The kernels that compute operations. None: those that are active where the module is called.
    kernels: Kernels | None = None
    residues: Residues = ALL
    # Whether functions may overwrite the tensor that they update, because no gradient needs it.
    in_place: bool = False

    def stack(self, stack: "BlockStack", states: Tensors, masks: Tensors) -> Tensors:
        """Run the blocks of a stack one after another."""
        for block in stack.blocks:
            states = block(*states, *masks)
        return states

    def block(self, block: "Block", states: Tensors, masks: Tensors) -> Tensors:
        """Run the steps of a block one after another; `states` and `masks` in the order of `block.states`."""
        current_states, mask = dict(zip(block.states, states)), dict(zip(block.states, masks))
        for step in block.checked_steps():
            other_inputs = () if step.other is None else (current_states[step.other],)
            current_states[step.state] = step.layer(current_states[step.state], mask[step.masked], *other_inputs)
        return tuple(current_states.values())

    def layer(
        self,
        layer: "AxialUpdate",
        x: Tensor,
        mask: Tensor,
        other: Tensor | None = None,
        residual: bool = True,
        rows: int | None = None,
    ) -> Tensor:
        """Compute x plus the layer's update for all of x at once, or the update alone if `residual` is False.

        rows: the caller's choice of how many rows (or columns) to compute together. This execution ignores it; one that
        slices layers for callers honours it.
        """
        read = x if layer.reads == "x" else layer.named(layer.reads, x, other)
        shared = None
        if layer.shares not in (None, layer.reads):
            shared = layer.shared(layer.named(layer.shares, x, other), mask)
        factors = layer.dropout_factors(x.shape, x) if residual and layer.training else None
        return layer.update(read, mask, shared, x if residual else None, factors)

    def call(self, model: nn.Module, function: Function, inputs: Mapping[str, Tensor], context: Hashable = ()) -> Named:
        """Call a function of tensors that runs the model. Other executions may replay a captured graph instead.

        context: everything besides the inputs that the function depends on, such as whether it sends to other ranks.
        """
        return function(inputs)

    def rows(self, count: int) -> list[slice]:
        """Split `count` rows of z into the slices that are computed together: here one slice, even if `count` is 0."""
        return [slice(0, count)]

    def pair_memory(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Allocate zeros for z in the dtype of the trunk; `like` is a tensor on the computing device."""
        return like.new_zeros(shape, dtype=self.dtype)

    def alloc_rarely_used(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Allocate zeros for a tensor that is read and written less often than z, such as a sum over templates."""
        return self.pair_memory(like, shape)

    def fetch(self, z: Tensor, rows: slice, axis: int = -3) -> Tensor:
        """Return rows of z [*, i, j, c], or columns (axis -2), on the computing device.

        The result is a view, or a copy if z is in host memory.
        """
        return fetch(z, rows, axis)

    def store(self, z: Tensor, rows: slice, new: Tensor, axis: int = -3) -> None:
        """Overwrite rows of z [*, i, j, c], or columns (axis -2)."""
        store(z, rows, new, axis)

    def parts(self, count: int, positions: int) -> list[slice]:
        """Split `count` templates into the slices that are computed together.

        A slice has at most `TEMPLATE_BATCH_POSITIONS` positions, or is a single template. positions: the number of
        positions in the pair representation of one template.
        """
        per_part = max(TEMPLATE_BATCH_POSITIONS // max(positions, 1), 1)
        return [slice(start, min(start + per_part, count)) for start in range(0, count, per_part)]


PLAIN = PlainExecution()


class Executable(nn.Module):
    """Base of modules whose computation can be sliced, sharded or captured: `execution` decides how they run."""

    execution: PlainExecution = PLAIN

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The usual case. Entering a context would cost three Python calls.
        if self.execution.kernels in (None, choice.kernels):
            return super().__call__(*args, **kwargs)
        with self.computing():
            return super().__call__(*args, **kwargs)

    def computing(self) -> AbstractContextManager[None]:
        """Select the execution's kernels within the context. Calling the module does this by itself."""
        return NOTHING if self.execution.kernels is None else using(self.execution.kernels)

    @property
    def residues(self) -> Residues:
        """The residues that this process holds."""
        return self.execution.residues

    def map_rows(self, function: Callable[[slice], Tensor], count: int, axis: int) -> Tensor:
        """Apply a function to slices of `count` rows, as large as the plan allows, and concatenate along `axis`.

        Without gradients each slice's result is written into the output at once, so that the peak memory is the output
        and one slice.
        """
        slices = self.execution.rows(count)
        if len(slices) == 1:
            return function(slices[0])
        if torch.is_grad_enabled():
            return torch.cat([function(rows) for rows in slices], axis)
        output = None
        for rows in uniform_loop(slices):
            result = function(rows)
            if output is None:
                shape = list(result.shape)
                shape[axis] = count
                output = result.new_empty(shape)
            output.narrow(axis, rows.start, rows.stop - rows.start).copy_(result)
        assert output is not None
        return output

    def map_rows_(self, z: Tensor, function: Callable[[slice, Tensor], Tensor]) -> Tensor:
        """Replace the rows of z [*, i, j, c] by function(slice, rows of z), in place if the execution allows it.

        The function returns a tensor with the shape and dtype of the rows.
        """
        execution = self.execution
        if not execution.in_place:
            return self.map_rows(lambda rows: function(rows, execution.fetch(z, rows)), z.shape[-3], -3)
        parts = subsample(execution.rows(z.shape[-3]))
        for rows, old in with_progress(fetch_each(z, parts), len(parts)):
            execution.store(z, rows, function(rows, old))
        return z

    def around_trunk(self, x: Tensor) -> Tensor:
        """Convert a result of the trunk to fp32 or wider, unless this module computes in the trunk's dtype."""
        return x if self.execution.heads_in_trunk_dtype else upcast_half(x)


# Axes of m [*, s, r, c] and of z [*, i, j, c], counted from the right. Masks have no channel axis, so a mask is sliced
# along axis + 1.
ROWS, COLS = -3, -2
# One of the two tensors that a layer is called with.
Which = Literal["x", "other"]
# A slice of the tensor that a layer reads, or the output of `prepare` for this slice.
Read = Tensor | Tensors
Shared = Tensors | None


class AxialUpdate(Executable, DrawsNoise):
    """Base of the trunk's layers; see the module's docstring for the contract.

    Subclasses set `norm` and override `update`. If slices share tensors, they also override `shares` and `shared`. x
    and the output are m or z; `other` is the other of the two, for layers that read both.
    """

    # The axis along which x may be sliced. None: any axis.
    axis: int | None = None
    # The tensor that `update` reads a slice of.
    reads: Which = "x"
    # The tensor from which `shared` is computed. None: slices share nothing.
    shares: Which | None = None
    # The tensor to which the layer's mask belongs.
    mask_of: Which = "x"
    # An update with a slice of `shared` along `join_axis` updates the slice of x along this axis.
    pieces_axis: int | None = None
    dropout_rate = 0.0
    # All positions along this axis share one dropout draw.
    dropout_shared_axis = ROWS

    norm: LayerNorm
    packed: PackedOperands | None = None  # set when the layer's parameters are packed

    def weights(self, dtype: torch.dtype, variant: bool = False) -> Any:
        """Return the layer's parameters as its operation takes them, in `dtype` if they are packed.

        Packed parameters are gathered once and then only checked for changes: where the host launches each kernel,
        looking up every module and parameter takes longer than the launch.
        """
        if self.packed is None or torch.compiler.is_dynamo_compiling():
            return self.gather_weights(dtype, variant)
        return self.packed.gathered(self, dtype, variant)

    def gather_weights(self, dtype: torch.dtype, variant: bool) -> Any:
        """Gather the layer's parameters into the record that its operation takes; see `weights`."""
        raise NotImplementedError

    @property
    def read_axis(self) -> int | None:
        """The axis along which the tensor that is read is sliced when x is sliced along `axis`."""
        return self.axis

    def named(self, which: Which | None, x: Tensor, other: Tensor | None) -> Tensor:
        """Return the tensor that `which` names. Raises ValueError if that is `other` and `other` is None."""
        if which != "other":
            return x
        if other is None:
            raise ValueError(
                f"{type(self).__name__}: the argument `other` is missing. Pass the tensor to read besides x."
            )
        return other

    def join_axis(self, cut: int) -> int:
        """Return the axis along which the tensors of `shared` are concatenated if the source is sliced along `cut`."""
        return cut

    def shared(self, source: Tensor, mask: Tensor) -> Tensors:
        """Compute the tensors that every slice needs whole.

        source: the tensor that `shares` names, or a slice of it. mask: the source's mask if `mask_of` names the source.
        """
        raise NotImplementedError

    def empty_shared(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Allocate a tensor of `shared` for the whole source, to be filled by slices. like: the tensor of a slice."""
        return like.new_empty(shape)

    def prepare(self, read: Tensor, mask: Tensor) -> Read:
        """Compute the quantities of a slice that do not depend on `shared`. `update` accepts them instead of `read`."""
        return read

    def update(self, read: Read, mask: Tensor, shared: Shared, x: Tensor | None, factors: Factors | None) -> Tensor:
        """Compute x + factors * update for one slice, or, if x is None, the update as the supplement's algorithm does.

        read: a slice of the tensor that `reads` names, not yet normalised, or the output of `prepare` for it.
        mask: the mask of `read`, if `mask_of` names the same tensor.
        shared: the output of `shared` for all slices. None: nothing is shared, or `read` is the whole source.
        x: the same slice of x. factors: dropout factors, sliced like x, or None for ones.
        """
        raise NotImplementedError

    def dropout_factors(self, shape: Sequence[int], like: Tensor) -> Factors | None:
        """Draw the dropout factors for x of this shape (Supp. 1.11.6), in the dtype of `like`; None without dropout.

        The factors have size 1 along `dropout_shared_axis` and along all axes before the last three, so several
        templates share one draw, as in the official code. Slice them like x.
        """
        if not (self.training and self.dropout_rate):
            return None
        drawn = [1] * (len(shape) - 3) + list(shape[-3:])
        drawn[self.dropout_shared_axis] = 1
        return self.noise.factors(drawn, self.dropout_rate, self.stream, like)

    def forward(self, x: Tensor, mask: Tensor, other: Tensor | None = None, residual: bool = True) -> Tensor:
        """Compute x plus this layer's update, or, if `residual` is False, the update alone, before dropout."""
        return self.execution.layer(self, x, mask, other, residual)


def residual(x: Tensor | None, dx: Tensor, factors: Factors | None) -> Tensor:
    """Compute x + factors * dx, or dx if x is None, as the last line of `update`. factors None means ones."""
    if x is None:
        return dx
    return x + (dx if factors is None else dx * factors)


class Step(NamedTuple):
    """One step of a block: `layer` updates `state` and also reads `other` unless that is None.

    The layer may be any module that is called as layer(state, mask) or layer(state, mask, other). Only an `AxialUpdate`
    can be sliced.
    """

    state: str
    layer: nn.Module
    other: str | None = None

    @property
    def masked(self) -> str:
        """The state whose mask is passed to the layer."""
        of_other = getattr(self.layer, "mask_of", "x") == "other"
        return self.other if self.other is not None and of_other else self.state


Steps = tuple[Step, ...]


class Block(Executable):
    """A sequence of layers, described by `steps` and run by an execution.

    A subclass may override `forward`, which then runs in plain torch. Plans that must slice the states refuse it.
    """

    states: tuple[str, ...] = ("m", "z")

    @property
    def steps(self) -> Steps:
        """The steps of the block, in the order of the supplement."""
        raise NotImplementedError

    def checked_steps(self) -> Steps:
        """Return `steps`. Raises ValueError if a step names a state that the block does not have."""
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
        """Compute the new states.

        The arguments are the states, in the order of `states`, and then their masks: block(m, z, m_mask, z_mask).
        Raises ValueError for any other number of tensors.
        """
        count = len(self.states)
        if len(states_and_masks) != 2 * count:
            raise ValueError(
                f"{type(self).__name__} takes its states ({', '.join(self.states)}) and their masks, "
                f"{2 * count} tensors, but got {len(states_and_masks)}"
            )
        return self.execution.block(self, states_and_masks[:count], states_and_masks[count:])


class BlockStack(Executable):
    """A sequence of blocks that maps states and masks to new states."""

    blocks: nn.ModuleList
