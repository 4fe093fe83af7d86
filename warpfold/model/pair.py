"""The layers of the pair stack, z [*, i, j, c_z]: triangle updates and transition (Algorithms 11-15).

The Evoformer, the extra MSA stack and the template stack all use these, the last in another order.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from warpfold.model.attention import AttentionUpdate, GatedAttention, Transition
from warpfold.model.axial import COLS, ROWS, Block, ChannelProduct, Step, Steps
from warpfold.model.execution import Tensors
from warpfold.model.layers import DeferredLayerNorm, LayerNorm, Linear, LinearSlice, Projection, joined
from warpfold.ops.gate import gate
from warpfold.ops.noise import Factors
from warpfold.ops.transition import Activation
from warpfold.ops.triangle import (
    projected_factor,
    triangle_factor,
    triangle_multiplication,
    triangle_product,
    triangle_slice,
)


@dataclass(frozen=True, kw_only=True)
class PairConfig:
    """The settings of a pair stack; the defaults are the Evoformer's."""

    heads: int = 4  # Algorithms 13 and 14
    head_width: int | None = None  # None: c_z / heads
    c_triangle: int = 128  # Algorithms 11 and 12: c
    transition: int = 4  # Algorithm 15: n
    activation: Activation = "relu"  # of the transition; "swiglu" is AlphaFold3's: another model
    rate: float = 0.25  # dropout, Algorithm 6
    fused: bool = False  # one projection for both factors of a triangle product (AlphaFold 2.3, Multimer v3)
    order: Literal["multiplication_first", "attention_first"] = "multiplication_first"


class TriangleMultiplication(ChannelProduct):
    """Algorithms 11 and 12.  Outgoing: each row i alone, given b.  Incoming: each column j alone, given b.

    outgoing  x_ij = sum_k a_ik b_jk         incoming  x_ij = sum_k a_kj b_ki

    In both, the slice brings its a and its gate, and b is shared.  (For incoming this a is the supplement's b.)  The
    factors have their channels in front, [*, c, ., .], as the product wants them: b is laid out once for all slices.
    """

    def __init__(self, c_z: int, c: int, outgoing: bool, rate: float = 0.25, fused: bool = False) -> None:
        super().__init__()
        self.outgoing, self.fused, self.channels, self.dropout_rate = outgoing, fused, c, rate
        self.axis = ROWS if outgoing else COLS
        self.norm = LayerNorm(c_z)
        if fused:  # a in the first half of the channels, b in the second
            self.ab = Linear(c_z, 2 * c)
            self.ab_gate = Linear(c_z, 2 * c, init="gating")
        else:
            self.a = Linear(c_z, c)
            self.b = Linear(c_z, c)
            self.a_gate = Linear(c_z, c, init="gating")
            self.b_gate = Linear(c_z, c, init="gating")
        self.norm_out = LayerNorm(c)
        self.out = Linear(c, c_z, init="final")
        self.gate = Linear(c_z, c_z, init="gating")

    @property
    def join_axis(self) -> int:
        return -2 if self.outgoing else -1  # rows or columns, with no channel axis behind them

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The linear layers of both factors, of their gates, and of the product's gate."""
        if self.fused:
            return self.ab, self.ab_gate, self.gate
        return self.a, self.a_gate, self.b, self.b_gate, self.gate

    def left(self, n: DeferredLayerNorm, mask: Tensor) -> Tensor:
        return self._factor(0, n, mask)

    def right(self, n: DeferredLayerNorm, mask: Tensor) -> Tensor:
        return self._factor(1, n, mask)

    def local_and_shared(self, n: DeferredLayerNorm, mask: Tensor, other: Tensor | None) -> tuple[Tensors, Tensors]:
        projected = n.project(*self.projections)
        if self.fused:
            (a, b), (a_gate, b_gate), g = projected[0].chunk(2, -1), projected[1].chunk(2, -1), projected[2]
        else:
            a, a_gate, b, b_gate, g = projected
        return (triangle_factor(a, a_gate, mask), g), (triangle_factor(b, b_gate, mask),)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        return triangle_product(left, right, self.outgoing)

    def finish(self, x: Tensor, gate_logits: Tensor) -> Tensor:
        return gate(DeferredLayerNorm(x, self.norm_out).project(self.out)[0], gate_logits)

    def whole(self, x: Tensor, mask: Tensor, other: Tensor | None, factors: Factors | None) -> Tensor:
        """Return all of x with its update: one operation."""
        if self.norm.eps != self.norm_out.eps:  # an operation has one
            return super().whole(x, mask, other, factors)
        return self._at_once(x, mask, factors)

    def delta(self, x: Tensor, mask: Tensor, other: Tensor | None = None) -> Tensor:
        """Return the update of all of x: one operation."""
        if self.norm.eps != self.norm_out.eps:
            return super().delta(x, mask, other)
        return self._at_once(x, mask, None, residual=False)

    def add_slice(
        self, x: Tensor, n: DeferredLayerNorm, shared: Tensors, mask: Tensor, factors: Factors | None
    ) -> Tensor:
        """Return one slice of x with its update: one operation."""
        if self.norm.eps != self.norm_out.eps:
            return super().add_slice(x, n, shared, mask, factors)
        return self._slice(x, shared, mask, factors)

    def delta_slice(self, x: Tensor, n: DeferredLayerNorm, shared: Tensors, mask: Tensor) -> Tensor:
        """Return the update of one slice of x: one operation."""
        if self.norm.eps != self.norm_out.eps:
            return super().delta_slice(x, n, shared, mask)
        return self._slice(x, shared, mask, None, residual=False)

    def _at_once(self, x: Tensor, mask: Tensor, factors: Factors | None, residual: bool = True) -> Tensor:
        norm, norm_out = self.norm, self.norm_out
        into = norm.weight, norm.bias, *joined(x.dtype, *self.projections)
        out_of = norm_out.weight, norm_out.bias, *joined(x.dtype, self.out)
        return triangle_multiplication(x, mask, *into, *out_of, self.outgoing, self.fused, factors, norm.eps, residual)

    def _slice(
        self, x: Tensor, shared: Tensors, mask: Tensor, factors: Factors | None, residual: bool = True
    ) -> Tensor:
        norm, norm_out = self.norm, self.norm_out
        into, of_gate = joined(x.dtype, *self._of_factor(0)), joined(x.dtype, self.gate)
        of_norm, of_norm_out = (norm.weight, norm.bias), (norm_out.weight, norm_out.bias)
        out_of = joined(x.dtype, self.out)
        how = self.outgoing, factors, norm.eps, residual
        return triangle_slice(x, mask, shared[0], of_norm, into, of_gate, of_norm_out, out_of, *how)

    def _factor(self, half: int, n: DeferredLayerNorm, mask: Tensor) -> Tensor:
        norm = n.norm.weight, n.norm.bias
        return projected_factor(n.x, mask, norm, joined(n.x.dtype, *self._of_factor(half)), n.norm.eps)

    def _of_factor(self, half: int) -> tuple[Projection, Projection]:
        """Return the projections of a (half 0) or b (half 1) of the product, and of its gate."""
        if self.fused:
            return _half(self.ab, half), _half(self.ab_gate, half)
        return (self.b, self.b_gate) if half else (self.a, self.a_gate)


def _half(linear: Linear, half: int) -> Projection:
    """Return one half of the outputs of a fused projection."""
    bias: Tensor | None = linear.bias
    return LinearSlice(linear.weight.chunk(2)[half], None if bias is None else bias.chunk(2)[half])


class TriangleAttention(AttentionUpdate):
    """Algorithms 13 and 14.  Starting node: within each row i.  Ending node: within each column j, on z transposed.

    RoseTTAFold3's and OpenFold3's ending nodes are `bias_transposed`.
    """

    def __init__(
        self, c_z: int, starting: bool, heads: int = 4, head_width: int | None = None, rate: float = 0.25
    ) -> None:
        super().__init__()
        self.by_column, self.dropout_rate = not starting, rate
        self.axis = self.dropout_shared_axis = ROWS if starting else COLS
        self.norm = LayerNorm(c_z)
        self.bias = Linear(c_z, heads, bias=False)
        self.attention = GatedAttention(c_z, heads, head_width)

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The linear layers of the gate, q, k, v and the bias."""
        return *self.attention.projections, self.bias

    def shared(self, n: DeferredLayerNorm, mask: Tensor) -> Tensors:
        return n.project(self.bias)  # [*, i, j, h]

    def local_and_shared(self, n: DeferredLayerNorm, mask: Tensor, other: Tensor | None) -> tuple[Tensors, Tensors]:
        *local, bias = self.transpose_if_column(n).project(*self.projections)
        return tuple(local), (self.transpose_if_column(bias),)


class PairStack(Block):
    """The pair half of a block: triangle updates and transition; z [*, i, j, c_z] and its mask [*, i, j] -> z."""

    states = ("z",)

    def __init__(self, c_z: int, config: PairConfig) -> None:
        super().__init__()
        c = config
        self.multiplication_first = c.order == "multiplication_first"
        # In the order of the steps: parameters are numbered, drawn and laid out for the optimiser in this order.
        for kind in ("mul", "att") if self.multiplication_first else ("att", "mul"):
            if kind == "mul":
                self.outgoing = TriangleMultiplication(c_z, c.c_triangle, True, c.rate, c.fused)
                self.incoming = TriangleMultiplication(c_z, c.c_triangle, False, c.rate, c.fused)
            else:
                self.starting = TriangleAttention(c_z, True, c.heads, c.head_width, c.rate)
                self.ending = TriangleAttention(c_z, False, c.heads, c.head_width, c.rate)
        self.transition = Transition(c_z, c.transition, c.activation)

    @property
    def steps(self) -> Steps:
        """Lines 6 to 10 of Algorithm 6; with attention first, lines 2 to 6 of Algorithm 16."""
        multiplication = Step("z", self.outgoing), Step("z", self.incoming)
        attention = Step("z", self.starting), Step("z", self.ending)
        both = multiplication + attention if self.multiplication_first else attention + multiplication
        return *both, Step("z", self.transition)
