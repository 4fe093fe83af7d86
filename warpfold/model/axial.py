"""What the trunk's layers have in common: an update that is independent along one axis.

    x  <-  x + dropout(update(local(n), shared(n)))          n = norm(operand)

Almost all of AlphaFold2's trunk has this form.  A layer states which axis it is, what every slice must see whole
(`shared`: the pair bias, or one factor of a product), and what a slice can prepare from itself alone (`local`).  How
the work is executed, all at once, in chunks, in place, on several ranks, is a *schedule* put on the layer from outside
(warpfold/parallel/schedules.py); the layer never knows.

Two laws make every schedule right; tests/laws/test_slicing.py checks them for every subclass there is:

    shared(n)                     is the join of  shared(slice)                    along `joins`
    update(local(n), shared)      is the join of  update(local(slice), shared)     along `axis`
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from warpfold.ops.noise import Noise

# Axes are counted from the right; masks lack the channel axis, so a mask is cut along axis + 1.
ROWS, COLS = -3, -2  # of m [*, s, r, c] and of z [*, i, j, c]

Tensors = tuple[Tensor, ...]
Schedule = Callable[["AxialUpdate", Tensor, Tensor, Tensor | None], Tensor]


def whole(layer: "AxialUpdate", x: Tensor, mask: Tensor, source: Tensor | None = None) -> Tensor:
    """The schedule of one device with memory to spare: everything at once."""
    dx = layer.delta(x, mask, source)
    factors = layer.dropout_factors(x)
    return x + (dx if factors is None else dx * factors)


class AxialUpdate(nn.Module):
    """Base of the trunk's layers; see the module's docstring for the contract.

    Subclasses set `norm` and override `shared`, `local` and `update`.  x and the returned tensor are m or z; `source`
    is the other representation, for the two layers that read both.
    """

    axis: int | None = None  # where x may be cut; None: anywhere
    shares_source = False  # `shared` is made from `source`, not from the normalised operand
    rate = 0.0  # dropout, and the axis along which one draw serves all
    spread = ROWS

    norm: nn.Module
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
        """The tensor that is normalised and read: x itself, unless a subclass says otherwise."""
        return x

    def shared(self, n: Tensor, mask: Tensor, source: Tensor | None) -> Tensors:
        """What every slice must see whole."""
        return ()

    def local(self, n: Tensor, mask: Tensor) -> Tensors:
        """What a slice prepares from itself alone, while `shared` may still be on its way."""
        return (n,)

    def update(self, local: Tensors, shared: Tensors, mask: Tensor) -> Tensor:
        """The residual update of one slice."""
        raise NotImplementedError

    def delta(self, x: Tensor, mask: Tensor, source: Tensor | None = None) -> Tensor:
        """The residual update of all of x, before dropout: what the supplement's algorithm returns."""
        n = self.norm(self.operand(x, source))
        return self.update(self.local(n, mask), self.shared(n, mask, source), mask)

    def dropout_factors(self, x: Tensor) -> Tensor | None:
        """The dropout factors for all of x, of size 1 along `spread` (Supp. 1.11.6); None where nothing is dropped."""
        if not (self.training and self.rate):
            return None
        shape = list(x.shape)
        shape[self.spread] = 1
        return self.noise.keep(shape, self.rate, self.stream, x)

    def forward(self, x: Tensor, mask: Tensor, source: Tensor | None = None) -> Tensor:
        return self.schedule(self, x, mask, source)


def run_block(block: nn.Module, *args: Tensor) -> Any:
    """A block as it is."""
    return block(*args)


class BlockStack(nn.Module):
    """Blocks one after another.  How a block is run (recomputed, compiled) is set from outside, as schedules are."""

    run_block: Callable[..., Any] = staticmethod(run_block)
