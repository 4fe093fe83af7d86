"""Gated self-attention, the core of Algorithms 7, 8, 13 and 14, and the transition of Algorithms 9 and 15."""

from typing import Any

from torch import Tensor, nn

from warpfold.model.axial import COLS, ROWS, AxialUpdate
from warpfold.model.execution import Tensors
from warpfold.model.layers import DeferredLayerNorm, LayerNorm, Linear, joined
from warpfold.ops.attention import attention
from warpfold.ops.gate import gate, gated_linear_residual
from warpfold.ops.gated_attention import gated_attention
from warpfold.ops.noise import Factors
from warpfold.ops.transition import HALVES, Activation, transition


class GatedAttention(nn.Module):
    """The parameters of multi-head attention whose output is gated by the sigmoid of a projection of its input."""

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
        """The linear layers of the gate, q, k and v, in the order in which they are joined: a bias comes first."""
        return self.gate, self.q, self.k, self.v


class AttentionUpdate(AxialUpdate):
    """A trunk layer whose update is a gated attention, within each row or, if `by_column`, within each column.

    Where it is columns, they are exchanged with the rows first.  So `local` is the gate's logits, q, k and v, each
    [*, K, h d], and the K positions that attend to each other are its last axis but one.  `shared` is nothing, or the
    bias of the attention's logits [*, i, j, h], with rows and columns as in x.
    """

    attention: GatedAttention
    by_column = False

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The linear layers of the normalised operand that are joined: the attention's, and a bias of its own."""
        return self.attention.projections

    def transpose_if_column(self, t: Any) -> Any:
        """Exchange rows and columns where the layer attends within columns; called again, it exchanges them back."""
        return t.transpose(ROWS, COLS) if self.by_column else t

    def local(self, n: DeferredLayerNorm, mask: Tensor) -> Tensors:
        return self.transpose_if_column(n).project(*self.attention.projections)

    def attend(self, local: Tensors, shared: Tensors, mask: Tensor) -> Tensor:
        """Return the attention's output [*, K, h d], before gate and projection."""
        q, k, v = (t.unflatten(-1, (self.attention.heads, -1)) for t in local[1:])
        mask = self.transpose_if_column(mask[..., None])[..., 0]
        bias = self.transpose_if_column(shared[0]).movedim(-1, -3)[..., None, :, :, :] if shared else None
        return attention(q, k, v, mask, bias).flatten(-2)  # bias [*, 1, h, K, K]: the same for every row

    def update(self, local: Tensors, shared: Tensors, mask: Tensor) -> Tensor:
        dx: Tensor = self.transpose_if_column(self.attention.out(gate(self.attend(local, shared, mask), local[0])))
        return dx

    def add(self, x: Tensor, local: Tensors, shared: Tensors, mask: Tensor, factors: Factors | None) -> Tensor:
        o = self.attend(local, shared, mask)
        weight, bias = joined(x.dtype, self.attention.out)
        assert bias is not None
        factors = None if factors is None else self.transpose_if_column(factors)
        x = gated_linear_residual(self.transpose_if_column(x), o, local[0], weight, bias, factors)
        new: Tensor = self.transpose_if_column(x)
        return new

    def whole(self, x: Tensor, mask: Tensor, other: Tensor | None, factors: Factors | None) -> Tensor:
        """Return all of x with its update: one operation."""
        if self.shared_from_other:
            assert other is not None
            return self._new(x, self.shared_of(other), self.projections, mask, factors)
        return self._new(x, (), self.projections, mask, factors)

    def add_slice(
        self, x: Tensor, n: DeferredLayerNorm, shared: Tensors, mask: Tensor, factors: Factors | None
    ) -> Tensor:
        """Return one slice of x with its update: one operation."""
        return self._new(x, shared, self.attention.projections, mask, factors)

    def empty_shared(self, part: Tensor, length: int) -> Tensor:
        """Allocate the bias with the heads in front: kernels would lay it out so for each slice."""
        assert self.join_axis is not None
        shape = list(self.transpose_if_column(part).shape)
        shape[ROWS] = length
        empty = part.new_empty(*shape[:-3], shape[-1], *shape[-3:-1]).movedim(-3, -1)
        bias: Tensor = self.transpose_if_column(empty)
        return bias

    def _new(
        self, x: Tensor, shared: Tensors, projections: tuple[Linear, ...], mask: Tensor, factors: Factors | None
    ) -> Tensor:
        """Return rows (or columns) of x with their update; the bias is shared, or made of x by the last projection."""
        norm, turned = self.norm, self.transpose_if_column
        bias = turned(shared[0]).movedim(-1, -3) if shared else None
        into, out_of = joined(x.dtype, *projections), joined(x.dtype, self.attention.out)
        factors, mask = None if factors is None else turned(factors), turned(mask[..., None])[..., 0].contiguous()
        new = gated_attention(
            turned(x), norm.weight, norm.bias, *into, *out_of, mask, bias, self.attention.heads, factors, norm.eps
        )
        back: Tensor = turned(new)
        return back


class Transition(AxialUpdate):
    """Algorithms 9 and 15: a two-layer perceptron at each position alone.  Masked positions are updated too.

    With "swiglu" its layers have no biases (AlphaFold3, Algorithm 11), and `up` makes gates and then values.
    """

    def __init__(self, c: int, factor: int = 4, activation: Activation = "relu") -> None:
        super().__init__()
        self.activation, biased = activation, activation == "relu"
        self.norm = LayerNorm(c)
        self.up = Linear(c, HALVES[activation] * factor * c, biased, init="relu")
        self.down = Linear(factor * c, c, biased, init="final")

    def local(self, n: DeferredLayerNorm, mask: Tensor) -> Tensors:
        return (n.x,)  # normalised on the way

    def update(self, local: Tensors, shared: Tensors, mask: Tensor) -> Tensor:
        return self._transition(local[0], residual=False)

    def add(self, x: Tensor, local: Tensors, shared: Tensors, mask: Tensor, factors: Factors | None) -> Tensor:
        return self._transition(x, residual=True) if factors is None else super().add(x, local, shared, mask, factors)

    def _transition(self, x: Tensor, residual: bool) -> Tensor:
        norm, (up, up_bias), (down, down_bias) = self.norm, joined(x.dtype, self.up), joined(x.dtype, self.down)
        parameters = norm.weight, norm.bias, up, up_bias, down, down_bias
        return transition(x, *parameters, residual, norm.eps, self.activation)
