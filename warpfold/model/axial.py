"""What the trunk's layers have in common: an update that is independent along one axis.

    x  <-  x + dropout(update(local(n), shared(n)))          n = normed(operand)

Almost all of AlphaFold2's trunk has this form.  A layer states which axis it is, what every slice must see whole
(`shared`: the pair bias, or one factor of a product), and what a slice can prepare from itself alone (`local`).  How
the work is executed, all at once, in chunks, in place, on several ranks, is a *schedule* put on the layer from outside
(warpfold/parallel/schedules.py); the layer never knows.

The operand comes with its norm not yet applied (`Normed`), so that a projection can normalise on the way; and a layer
may add its update itself (`add`), where projection, gate, dropout and residual are one operation.

Two laws make every schedule right; tests/laws/test_slicing.py checks them for every subclass there is:

    shared(n)                     is the join of  shared(slice)                    along `joins`
    update(local(n), shared)      is the join of  update(local(slice), shared)     along `axis`

and two more that what is done at once is what is done in parts: `parts` is (local, shared), and `add` is
x + factors * update.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from warpfold.model.layers import LayerNorm, Linear, Normed
from warpfold.ops.noise import Factors, Noise

# Axes are counted from the right; masks lack the channel axis, so a mask is cut along axis + 1.
ROWS, COLS = -3, -2  # of m [*, s, r, c] and of z [*, i, j, c]

Tensors = tuple[Tensor, ...]
Schedule = Callable[["AxialUpdate", Tensor, Tensor, Tensor | None], Tensor]


def whole(layer: "AxialUpdate", x: Tensor, mask: Tensor, source: Tensor | None = None) -> Tensor:
    """The schedule of one device with memory to spare: everything at once."""
    local, shared = layer.parts(layer.normed(layer.operand(x, source)), mask, source)
    return layer.add(x, local, shared, mask, layer.dropout_factors(x.shape, x))


class AxialUpdate(nn.Module):
    """Base of the trunk's layers; see the module's docstring for the contract.

    Subclasses set `norm` and override `shared`, `local` and `update`.  x and the returned tensor are m or z; `source`
    is the other representation, for the two layers that read both.
    """

    axis: int | None = None  # where x may be cut; None: anywhere
    # `shared` is made from `source`, not from the normalised operand; place by place, so from any slice of it
    shares_source = False
    reads_source = False  # the operand is `source`, not x
    rate = 0.0  # dropout, and the axis along which one draw serves all
    spread = ROWS

    norm: LayerNorm
    schedule: Schedule = staticmethod(whole)  # set from outside; the model never looks at it
    noise: Noise  # where dropout draws from, and this layer's stream of it
    stream: int = 0

    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise()

    @property
    def reads(self) -> int | None:
        """Where the operand is cut when x is cut along `axis`."""
        return self.axis

    @property
    def gathers(self) -> int | None:
        """Where that which `shared` is made from is cut."""
        return self.reads

    @property
    def joins(self) -> int | None:
        """Where the tensors of `shared` are joined: the same axis, unless they have another layout."""
        return self.gathers

    def operand(self, x: Tensor, source: Tensor | None) -> Tensor:
        """The tensor that is normalised and read."""
        if not self.reads_source:
            return x
        assert source is not None
        return source

    def normed(self, operand: Tensor) -> Normed:
        """The operand, or a slice of it, with this layer's norm."""
        return Normed(operand, self.norm)

    def shared(self, n: Normed, mask: Tensor, source: Tensor | None) -> Tensors:
        """What every slice must see whole."""
        return ()

    def local(self, n: Normed, mask: Tensor) -> Tensors:
        """What a slice prepares from itself alone, while `shared` may still be on its way."""
        return (n.value,)

    def parts(self, n: Normed, mask: Tensor, source: Tensor | None) -> tuple[Tensors, Tensors]:
        """`local` and `shared` of all of n: for layers that make both in one pass over it."""
        return self.local(n, mask), self.shared(n, mask, source)

    def update(self, local: Tensors, shared: Tensors, mask: Tensor) -> Tensor:
        """The residual update of one slice."""
        raise NotImplementedError

    def add(self, x: Tensor, local: Tensors, shared: Tensors, mask: Tensor, factors: Factors | None) -> Tensor:
        """One slice of x with its update, of which dropout leaves `factors` (None: all)."""
        dx = self.update(local, shared, mask)
        return x + (dx if factors is None else dx * factors)

    def delta(self, x: Tensor, mask: Tensor, source: Tensor | None = None) -> Tensor:
        """The residual update of all of x, before dropout: what the supplement's algorithm returns."""
        return self.update(*self.parts(self.normed(self.operand(x, source)), mask, source), mask)

    def dropout_factors(self, shape: Sequence[int], like: Tensor) -> Factors | None:
        """The dropout factors for all of x, of this shape, of size 1 along `spread` (Supp. 1.11.6).

        In the dtype of `like`, and cut as x is; None where nothing is dropped.
        """
        if not (self.training and self.rate):
            return None
        spread = list(shape)
        spread[self.spread] = 1
        return self.noise.factors(spread, self.rate, self.stream, like)

    def forward(self, x: Tensor, mask: Tensor, source: Tensor | None = None) -> Tensor:
        return self.schedule(self, x, mask, source)


class ChannelProduct(AxialUpdate):
    """A layer whose update mixes two factors of n channel by channel: finish(product(left, right), gate).

    So it may also be cut along the channels of the product, of which every rank then has all rows and columns; that
    costs less than gathering a factor (DESIGN section 1, TARGETS "Communication").  The factors have their channels
    in front, [*, c, ., .], and lie as n does otherwise.
    """

    gate: Linear

    def left(self, n: Normed, mask: Tensor) -> Tensor:
        """The factor of the slice."""
        raise NotImplementedError

    def right(self, n: Normed, mask: Tensor) -> Tensor:
        """The factor that every slice needs whole."""
        raise NotImplementedError

    def opening(self, n: Normed) -> Tensor:
        """How far the gate is open for the product, place by place, before the sigmoid."""
        return n.project(self.gate)[0]

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """[*, i, j, c] of factors [*, c, ., .], of any channels."""
        raise NotImplementedError

    def finish(self, x: Tensor, opening: Tensor) -> Tensor:
        """The update from the product of all channels, place by place."""
        raise NotImplementedError

    def shared(self, n: Normed, mask: Tensor, source: Tensor | None) -> Tensors:
        return (self.right(n, mask),)

    def local(self, n: Normed, mask: Tensor) -> Tensors:
        return self.left(n, mask), self.opening(n)

    def update(self, local: Tensors, shared: Tensors, mask: Tensor) -> Tensor:
        left, opening = local
        return self.finish(self.product(left, *shared), opening)


class Chain(nn.Module):
    """Layers one after another on one representation, in the order in which they were declared."""

    def forward(self, x: Tensor, mask: Tensor, source: Tensor | None = None) -> Tensor:
        for layer in self.children():
            x = layer(x, mask, source)
        return x


def in_turn(msa: nn.Module, msa_args: tuple[Any, ...], pair: nn.Module, pair_args: tuple[Any, ...]) -> tuple[Any, Any]:
    """The two halves of a block one after the other."""
    return msa(*msa_args), pair(*pair_args)


class Branching(nn.Module):
    """A block that may have two halves which do not read each other's results."""

    branches: Callable[..., tuple[Any, Any]] = staticmethod(in_turn)  # set from outside
    independent = False  # whether this one has


def one_by_one(blocks: Iterable[nn.Module], states: Tensors, masks: Tensors) -> Tensors:
    """Blocks one after another, each from states and masks to new states."""
    for block in blocks:
        states = after(block, states, masks)
    return states


def after(block: nn.Module, states: Tensors, masks: Tensors) -> Tensors:
    """What one block makes of the states: as many."""
    new = block(*states, *masks)
    return new if isinstance(new, tuple) else (new,)


class BlockStack(nn.Module):
    """Blocks one after another.  How they run (recomputed, cut over ranks) is set from outside, as schedules are."""

    blocks: nn.ModuleList
    run: Callable[[Iterable[nn.Module], Tensors, Tensors], Tensors] = staticmethod(one_by_one)
