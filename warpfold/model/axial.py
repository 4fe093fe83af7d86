"""What the trunk's layers have in common, an update that is independent along one axis; and blocks made of them.

    x  <-  x + dropout(update(local(n), shared(n)))          n = layer_norm(operand)

Almost all of AlphaFold2's trunk has this form.  A layer states which axis it is, what every slice must see whole
(`shared`: the pair bias, or one factor of a product), and what a slice can prepare from itself alone (`local`).  How
the work is executed, all at once, in chunks, in place or on several ranks, is decided by an *execution*
(warpfold/model/execution.py, warpfold/parallel/execution.py); the layer never knows.

The operand comes with its norm not yet applied (`DeferredLayerNorm`), so that a projection can normalise on the way;
and a layer may add its update itself (`add`), where projection, gate, dropout and residual are one operation.

Two laws make every execution right; tests/laws/test_slicing.py checks them for every subclass there is:

    shared(n)                     is the join of  shared(slice)                    along `join_axis`
    update(local(n), shared)      is the join of  update(local(slice), shared)     along `axis`

and more say that what is done at once equals what is done in parts: `local_and_shared` is (local, shared), `add` is
x + factors * update, `add_slice` is `local` and `add` of a slice, and `whole` is `add` of all of x.  `delta` and
`delta_slice` are the updates alone, for a caller that adds them: whole is x + factors * delta.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from warpfold.model.execution import Executable, Tensors
from warpfold.model.layers import DeferredLayerNorm, DrawsNoise, LayerNorm, Linear
from warpfold.ops.noise import Factors

# Axes are counted from the right; masks lack the channel axis, so a mask is cut along axis + 1.
ROWS, COLS = -3, -2  # of m [*, s, r, c] and of z [*, i, j, c]


class AxialUpdate(Executable, DrawsNoise):
    """Base of the trunk's layers; see the module's docstring for the contract.

    Subclasses set `norm` and override `shared`, `local` and `update`.  x and the returned tensor are m or z; `other`
    is the other one of them, for the two layers that read both.
    """

    axis: int | None = None  # where x may be cut; None: anywhere
    operand_is_other = False  # the layer normalises and reads `other`, not x
    shared_from_other = False  # `shared` is made from `other` (`shared_of`), position by position
    mask_of_other = False  # the mask is that of `other`, and belongs to what is shared
    shared_cuts: int | None = None  # where `shared` is cut along `join_axis`, the update is of x cut along this axis
    dropout_rate = 0.0
    dropout_shared_axis = ROWS  # one draw serves all of this axis

    norm: LayerNorm

    @property
    def operand_axis(self) -> int | None:
        """The axis along which the operand is cut when x is cut along `axis`."""
        return self.axis

    @property
    def shared_axis(self) -> int | None:
        """The axis along which the tensor that `shared` is made from may be cut; None where nothing is shared."""
        return self.operand_axis

    @property
    def join_axis(self) -> int | None:
        """The axis along which tensors of `shared` are joined: `shared_axis`, unless they have another layout."""
        return self.shared_axis

    def operand(self, x: Tensor, other: Tensor | None) -> Tensor:
        """Return the tensor that the layer normalises and reads."""
        if not self.operand_is_other:
            return x
        assert other is not None
        return other

    def local(self, n: DeferredLayerNorm, mask: Tensor) -> Tensors:
        """Return what a slice prepares from itself alone, while `shared` may still be on its way."""
        return (n.value,)

    def shared(self, n: DeferredLayerNorm, mask: Tensor) -> Tensors:
        """Return what every slice must see whole."""
        return ()

    def shared_of(self, other: Tensor, mask: Tensor | None = None) -> Tensors:
        """Return the same, for a layer that makes it from the other representation (`shared_from_other`).

        mask: of that, for a layer that wants it (`mask_of_other`); None: ones.
        """
        raise NotImplementedError

    def local_and_shared(self, n: DeferredLayerNorm, mask: Tensor, other: Tensor | None) -> tuple[Tensors, Tensors]:
        """Return `local` and `shared` of all of n; overridden by layers that make both in one pass over it."""
        local = self.local(n, mask)
        if self.shared_from_other:
            assert other is not None
            return local, self.shared_of(other, mask if self.mask_of_other else None)
        return local, self.shared(n, mask)

    def update(self, local: Tensors, shared: Tensors, mask: Tensor) -> Tensor:
        """Return the residual update of one slice."""
        raise NotImplementedError

    def add(self, x: Tensor, local: Tensors, shared: Tensors, mask: Tensor, factors: Factors | None) -> Tensor:
        """Return one slice of x plus its update times the dropout factors (None: ones)."""
        dx = self.update(local, shared, mask)
        return x + (dx if factors is None else dx * factors)

    def add_slice(
        self, x: Tensor, n: DeferredLayerNorm, shared: Tensors, mask: Tensor, factors: Factors | None
    ) -> Tensor:
        """Return one slice of x with its update, of its part of the operand; overridden where that is one operation."""
        return self.add(x, self.local(n, mask), shared, mask, factors)

    def delta_slice(self, x: Tensor, n: DeferredLayerNorm, shared: Tensors, mask: Tensor) -> Tensor:
        """Return the residual update of one slice of x, before dropout; overridden where that is one operation."""
        return self.update(self.local(n, mask), shared, mask)

    def empty_shared(self, part: Tensor, length: int) -> Tensor:
        """Allocate a tensor of `shared` of which one slice's is `part`; laid out in memory as slices read it."""
        assert self.join_axis is not None
        shape = list(part.shape)
        shape[self.join_axis] = length
        return part.new_empty(shape)

    def whole(self, x: Tensor, mask: Tensor, other: Tensor | None, factors: Factors | None) -> Tensor:
        """Return all of x with its update; overridden by layers for which that is one operation."""
        n = DeferredLayerNorm(self.operand(x, other), self.norm)
        return self.add(x, *self.local_and_shared(n, mask, other), mask, factors)

    def delta(self, x: Tensor, mask: Tensor, other: Tensor | None = None) -> Tensor:
        """Return the residual update of all of x, before dropout: what the supplement's algorithm returns.

        Overridden where that is one operation, as `whole`.
        """
        n = DeferredLayerNorm(self.operand(x, other), self.norm)
        return self.update(*self.local_and_shared(n, mask, other), mask)

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

    def forward(self, x: Tensor, mask: Tensor, other: Tensor | None = None) -> Tensor:
        """Return x with this layer's update; mask: of the operand."""
        return self.execution.layer(self, x, mask, other)


class ChannelProduct(AxialUpdate):
    """A layer whose update mixes two factors of n channel by channel: finish(product(left, right), gate_logits).

    So it may also be cut along the product's channels: a rank then has all rows and columns of a few of them, which
    sends less than gathering a factor does, from three ranks on (docs/communication.md).  The factors have their
    channels in front, [*, c, ., .], and lie as n does otherwise.
    """

    channels: int  # of the product
    gate: Linear

    def left(self, n: DeferredLayerNorm, mask: Tensor) -> Tensor:
        """Return the factor of the slice."""
        raise NotImplementedError

    def right(self, n: DeferredLayerNorm, mask: Tensor) -> Tensor:
        """Return the factor that every slice needs whole."""
        raise NotImplementedError

    def gate_logits(self, n: DeferredLayerNorm) -> Tensor:
        """Return the gate of the product before its sigmoid."""
        return n.project(self.gate)[0]

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return [*, i, j, c] of factors [*, c, ., .], of any channels."""
        raise NotImplementedError

    def finish(self, x: Tensor, gate_logits: Tensor) -> Tensor:
        """Return the update, given the product of all channels; position by position."""
        raise NotImplementedError

    def shared(self, n: DeferredLayerNorm, mask: Tensor) -> Tensors:
        return (self.right(n, mask),)

    def local(self, n: DeferredLayerNorm, mask: Tensor) -> Tensors:
        return self.left(n, mask), self.gate_logits(n)

    def update(self, local: Tensors, shared: Tensors, mask: Tensor) -> Tensor:
        left, gate_logits = local
        return self.finish(self.product(left, *shared), gate_logits)


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
        """The state whose mask the layer is given: the one that it normalises and reads, unless it says otherwise."""
        of_other = getattr(self.layer, "operand_is_other", False) or getattr(self.layer, "mask_of_other", False)
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
