"""Gated self-attention, the core of Algorithms 7, 8, 13 and 14, and the transition of Algorithms 9 and 15."""

from typing import Any

from torch import Tensor, nn

from warpfold.model.axial import COLS, ROWS, AxialUpdate
from warpfold.model.execution import Tensors
from warpfold.model.layers import DeferredLayerNorm, LayerNorm, Linear
from warpfold.ops.attention import attention
from warpfold.ops.gate import gate, tail
from warpfold.ops.noise import Factors
from warpfold.ops.transition import transition


class GatedAttention(nn.Module):
    """Multi-head attention whose output is gated by the sigmoid of a projection of its input.

    It works in three steps, so that the first can be done while the bias is on its way and the last joins the
    residual: `projections` of n [*, K, c] are q, k, v and the gate g, each [*, K, h d]; `attend` within the
    last-but-one axis of n gives o [*, K, h d]; then `update` or `add`.
    """

    def __init__(self, c: int, heads: int, width: int | None = None) -> None:
        super().__init__()
        width = c // heads if width is None else width
        self.heads = heads
        self.q = Linear(c, heads * width, bias=False, init="glorot")
        self.k = Linear(c, heads * width, bias=False, init="glorot")
        self.v = Linear(c, heads * width, bias=False, init="glorot")
        self.gate = Linear(c, heads * width, init="gating")
        self.out = Linear(heads * width, c, init="final")

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The linear layers of q, k, v and the gate."""
        return self.q, self.k, self.v, self.gate

    def attend(self, projected: Tensors, mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return o [*, K, h d] of what `projections` give, mask [*, K] and bias [*, h, K, K]."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in projected[:3])
        return attention(q, k, v, mask, bias).flatten(-2)

    def update(self, o: Tensor, g: Tensor) -> Tensor:
        """Return the update [*, K, c] of o and the gate's logits g, both [*, K, h d]."""
        return self.out(gate(o, g))

    def add(self, x: Tensor, o: Tensor, g: Tensor, factors: Factors | None) -> Tensor:
        """Return x [*, K, c] plus the update times the dropout factors (None: ones)."""
        assert self.out.bias is not None
        return tail(x, o, g, self.out.weight, self.out.bias, factors)


class AttentionUpdate(AxialUpdate):
    """A trunk layer whose update is a gated attention, within each row or, if `by_column`, within each column."""

    attention: GatedAttention
    by_column = False

    def transpose_if_column(self, t: Any) -> Any:
        """Exchange rows and columns where the layer attends within columns; called again, it exchanges them back."""
        return t.transpose(ROWS, COLS) if self.by_column else t

    def bias_of(self, shared: Tensors) -> Tensor | None:
        """Return the additive bias [*, 1, h, K, K] of the logits, or None."""
        return None

    def local(self, n: DeferredLayerNorm, mask: Tensor) -> Tensors:
        return self.transpose_if_column(n).project(*self.attention.projections)

    def attend(self, local: Tensors, shared: Tensors, mask: Tensor) -> Tensor:
        """Return o of the slice, with rows and columns as in `local`."""
        mask = self.transpose_if_column(mask[..., None])[..., 0]
        return self.attention.attend(local, mask, self.bias_of(shared))

    def update(self, local: Tensors, shared: Tensors, mask: Tensor) -> Tensor:
        dx: Tensor = self.transpose_if_column(self.attention.update(self.attend(local, shared, mask), local[3]))
        return dx

    def add(self, x: Tensor, local: Tensors, shared: Tensors, mask: Tensor, factors: Factors | None) -> Tensor:
        factors = None if factors is None else self.transpose_if_column(factors)
        o = self.attend(local, shared, mask)
        new: Tensor = self.transpose_if_column(self.attention.add(self.transpose_if_column(x), o, local[3], factors))
        return new


class Transition(AxialUpdate):
    """Algorithms 9 and 15: a two-layer perceptron at each position alone.  Masked positions are updated too."""

    def __init__(self, c: int, factor: int = 4) -> None:
        super().__init__()
        self.norm = LayerNorm(c)
        self.up = Linear(c, factor * c, init="relu")
        self.down = Linear(factor * c, c, init="final")

    def local(self, n: DeferredLayerNorm, mask: Tensor) -> Tensors:
        return (n.x,)  # normalised on the way

    def update(self, local: Tensors, shared: Tensors, mask: Tensor) -> Tensor:
        return self._transition(local[0], residual=False)

    def add(self, x: Tensor, local: Tensors, shared: Tensors, mask: Tensor, factors: Factors | None) -> Tensor:
        return self._transition(x, residual=True) if factors is None else super().add(x, local, shared, mask, factors)

    def _transition(self, x: Tensor, residual: bool) -> Tensor:
        norm, up, down = self.norm, self.up, self.down
        parameters = norm.weight, norm.bias, up.weight, up.bias, down.weight, down.bias
        return transition(x, *parameters, residual, norm.eps)
