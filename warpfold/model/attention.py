"""Gated self-attention, the core of Algorithms 7, 8, 13 and 14, and the transition of Algorithms 9 and 15."""

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from warpfold.model.axial import COLS, ROWS, AxialUpdate
from warpfold.model.execution import Tensors
from warpfold.model.layers import DeferredLayerNorm, LayerNorm, Linear, NoNorm, joined
from warpfold.ops.attention import attention, gated_attention
from warpfold.ops.gate import gate, gated_linear_residual
from warpfold.ops.noise import Factors
from warpfold.ops.transition import HALVES, Activation, transition


class GatedAttention(nn.Module):
    """The parameters of multi-head attention whose output is gated by the sigmoid of a projection of its input.

    biased: which of its linear layers have a bias: AlphaFold2's gate and output, AlphaFold3's queries.
    """

    def __init__(self, c: int, heads: int, width: int | None = None, biased: Collection[str] = ("gate", "out")) -> None:
        super().__init__()
        width = c // heads if width is None else width
        self.heads = heads
        self.q = Linear(c, heads * width, "q" in biased, init="glorot")
        self.k = Linear(c, heads * width, "k" in biased, init="glorot")
        self.v = Linear(c, heads * width, "v" in biased, init="glorot")
        self.gate = Linear(c, heads * width, "gate" in biased, init="gating")
        self.out = Linear(heads * width, c, "out" in biased, init="final")

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The linear layers of the gate, q, k and v, in the order in which they are joined: a bias comes first."""
        return self.gate, self.q, self.k, self.v


class AttentionUpdate(AxialUpdate):
    """A trunk layer whose update is a gated attention, within each row or, if `by_column`, within each column.

    Where it is columns, they are exchanged with the rows first.  So `local` is the gate's logits, q, k and v, each
    [*, K, h d], and the K positions that attend to each other are its last axis but one.  `shared` is nothing, or the
    bias of the attention's logits [*, i, j, h], with rows and columns as in x: query a and key b of a row have that of
    [a, b], those of a column that of [b, a]; with `bias_transposed` the other way round.
    """

    attention: GatedAttention
    by_column = False
    bias_transposed = False  # no layer of AlphaFold2's

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
        bias = self._bias_of_logits(shared)
        bias = None if bias is None else bias[..., None, :, :, :]  # the same for every row
        return attention(q, k, v, mask, bias).flatten(-2)

    def _bias_of_logits(self, shared: Tensors) -> Tensor | None:
        """Return the bias of queries and keys, [*, h, K, K], if there is one."""
        if not shared:
            return None
        turned = shared[0].transpose(ROWS, COLS) if self.by_column != self.bias_transposed else shared[0]
        return turned.movedim(-1, -3)

    def update(self, local: Tensors, shared: Tensors, mask: Tensor) -> Tensor:
        dx: Tensor = self.transpose_if_column(self.attention.out(gate(self.attend(local, shared, mask), local[0])))
        return dx

    def add(self, x: Tensor, local: Tensors, shared: Tensors, mask: Tensor, factors: Factors | None) -> Tensor:
        o = self.attend(local, shared, mask)
        weight, bias = joined(x.dtype, self.attention.out)
        factors = None if factors is None else self.transpose_if_column(factors)
        x = gated_linear_residual(self.transpose_if_column(x), o, local[0], weight, bias, factors)
        new: Tensor = self.transpose_if_column(x)
        return new

    def whole(self, x: Tensor, mask: Tensor, other: Tensor | None, factors: Factors | None) -> Tensor:
        """Return all of x with its update: one operation."""
        if isinstance(self.norm, NoNorm):
            return super().whole(x, mask, other, factors)
        return self._at_once(x, *self._shared_and_projections(x, mask, other), mask, factors)

    def delta(self, x: Tensor, mask: Tensor, other: Tensor | None = None) -> Tensor:
        """Return the update of all of x: one operation."""
        if isinstance(self.norm, NoNorm):
            return super().delta(x, mask, other)
        return self._at_once(x, *self._shared_and_projections(x, mask, other), mask, None, residual=False)

    def add_slice(
        self, x: Tensor, n: DeferredLayerNorm, shared: Tensors, mask: Tensor, factors: Factors | None
    ) -> Tensor:
        """Return one slice of x with its update: one operation."""
        if isinstance(self.norm, NoNorm):
            return super().add_slice(x, n, shared, mask, factors)
        return self._at_once(x, shared, self.attention.projections, mask, factors)

    def delta_slice(self, x: Tensor, n: DeferredLayerNorm, shared: Tensors, mask: Tensor) -> Tensor:
        """Return the update of one slice of x: one operation."""
        if isinstance(self.norm, NoNorm):
            return super().delta_slice(x, n, shared, mask)
        return self._at_once(x, shared, self.attention.projections, mask, None, residual=False)

    def empty_shared(self, part: Tensor, length: int) -> Tensor:
        """Allocate the bias with the heads in front: kernels would lay it out so for each slice."""
        assert self.join_axis is not None
        shape = list(part.shape)
        shape[self.join_axis] = length
        *leading, rows, columns, heads = shape
        if self.by_column != self.bias_transposed:
            return part.new_empty(*leading, heads, columns, rows).movedim(-3, -1).transpose(ROWS, COLS)
        return part.new_empty(*leading, heads, rows, columns).movedim(-3, -1)

    def _shared_and_projections(
        self, x: Tensor, mask: Tensor, other: Tensor | None
    ) -> tuple[Tensors, tuple[Linear, ...]]:
        """Return what `_at_once` is given of all of x: the bias, or the projection that makes it on the way."""
        if self.shared_from_other:
            assert other is not None
            return self.shared_of(other), self.projections
        if self.bias_transposed:  # on the way it would be made as x lies
            return self.shared(DeferredLayerNorm(x, self.norm), mask), self.attention.projections
        return (), self.projections

    def _at_once(
        self,
        x: Tensor,
        shared: Tensors,
        projections: tuple[Linear, ...],
        mask: Tensor,
        factors: Factors | None,
        residual: bool = True,
    ) -> Tensor:
        """Return rows (or columns) of x with their update, or that alone; the bias is shared, or made of x by the last
        projection."""
        norm, turned, heads, bias = (
            self.norm,
            self.transpose_if_column,
            self.attention.heads,
            self._bias_of_logits(shared),
        )
        into, out_of = joined(x.dtype, *projections), joined(x.dtype, self.attention.out)
        factors, mask = None if factors is None else turned(factors), turned(mask[..., None])[..., 0].contiguous()
        of_norm = norm.weight, norm.bias
        new = gated_attention(turned(x), *of_norm, *into, *out_of, mask, bias, heads, factors, norm.eps, residual)
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
