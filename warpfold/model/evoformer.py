"""The Evoformer and its layers: m [*, s, r, c_m], z [*, i, j, c_z] (Algorithms 6 to 15, 18 and 19).

The extra MSA stack is an Evoformer with global column attention. The template stack consists of pair stacks in another
order (template.py).

The docstring of each layer contains its definition: a few lines of torch in the supplement's letters, without leading
axes and dropout. The last line is the return value. Submodules are called by their names, including those of
`attention`. tests/model/test_definitions.py executes the definitions and compares the results with the layers.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from warpfold.model.axial import (
    COLS,
    ROWS,
    AxialUpdate,
    Block,
    BlockStack,
    Read,
    Shared,
    Step,
    Steps,
    Tensors,
    residual,
)
from warpfold.model.layers import LayerNorm, Linear, NoNorm, joined, project
from warpfold.ops.attention import attention, global_attention, masked_mean
from warpfold.ops.layers import (
    AttentionWeights,
    OuterProductWeights,
    TransitionWeights,
    TriangleWeights,
    gated_attention,
    outer_product_mean,
    transition,
    triangle_factor,
    triangle_multiplication,
)
from warpfold.ops.linear import gate, gated_linear_residual
from warpfold.ops.noise import Factors
from warpfold.ops.outer import outer_product
from warpfold.ops.transition import HALVES, Activation
from warpfold.ops.triangle import empty_rows, triangle_product


class GatedAttention(nn.Module):
    """The parameters of multi-head attention with a gated output: q, k, v, gate and out.

    biased: the names of the linear layers that have a bias. In AlphaFold2 these are gate and out, in AlphaFold3 q.
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
        """The linear layers of the gate, q, k and v, in the order of `joined`: layers with a bias come first."""
        return self.gate, self.q, self.k, self.v


class AttentionUpdate(AxialUpdate):
    """Base of the trunk's gated attentions, within each row of x or, if `by_column`, within each column.

    Slices share nothing, or the bias of the logits [*, h, K, K]. In row attention, the bias of query a and key b comes
    from z[a, b]; in column attention from z[b, a]. `bias_transposed` exchanges the two.
    """

    attention: GatedAttention
    # The projection to the bias. None: `other` is the bias.
    bias: Linear | None
    # The norm before `bias`, if the bias does not come from x.
    norm_z: LayerNorm
    by_column = False
    # True in some layers of other models; False in all of AlphaFold2's.
    bias_transposed = False

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The linear layers that project x: the attention's, and the bias if it comes from x."""
        bias_layers = (self.bias,) if self.shares == "x" and self.bias is not None else ()
        return *self.attention.projections, *bias_layers

    def gather_weights(self, dtype: torch.dtype, variant: bool) -> AttentionWeights:
        """Gather the layer's parameters; variant: with the projection that makes the bias from x."""
        norm, attention = self.norm, self.attention
        in_weights = joined(dtype, *(self.projections if variant else attention.projections))
        return AttentionWeights(norm.weight, norm.bias, *in_weights, *joined(dtype, attention.out), attention.heads)

    def join_axis(self, cut: int) -> int:
        keys = (cut == ROWS) == (self.by_column != self.bias_transposed)
        return -1 if keys else -2

    def shared(self, source: Tensor, mask: Tensor) -> Tensors:
        source = source.transpose(ROWS, COLS) if self.by_column != self.bias_transposed else source
        if self.bias is None:
            return (source.movedim(-1, -3),)
        (bias,) = project(source, self.norm if self.shares == "x" else self.norm_z, self.bias, planes=True)
        return (bias.movedim(-1, -3),)

    def empty_shared(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        return empty_rows(like, *shape)

    def update(self, read: Read, mask: Tensor, shared: Shared, x: Tensor | None, factors: Factors | None) -> Tensor:
        """Compute x + factors * attention, gated and projected."""
        assert isinstance(read, Tensor)
        norm = self.norm
        # The fused operation below computes a bias that is not transposed.
        if shared is None and self.bias_transposed:
            shared = self.shared(read, mask)
        bias = None if shared is None else shared[0]
        if self.by_column:
            read, mask = read.transpose(ROWS, COLS), mask.mT
            x = None if x is None else x.transpose(ROWS, COLS)
            factors = None if factors is None else factors.transpose(ROWS, COLS)
        # With a norm, the whole update is one operation.
        if not isinstance(norm, NoNorm):
            weights = self.weights(read.dtype, shared is None)
            new = gated_attention(read, mask.contiguous(), weights, bias, factors, norm.eps, residual=x is not None)
        else:
            heads, out = self.attention.heads, self.attention.out
            g, *qkv = project(read, norm, *self.attention.projections)
            q, k, v = (t.unflatten(-1, (heads, -1)) for t in qkv)
            # All rows share the bias.
            bias = None if bias is None else bias[..., None, :, :, :]
            o = attention(q, k, v, mask, bias).flatten(-2)
            new = out(gate(o, g)) if x is None else gated_linear_residual(x, o, g, *joined(o.dtype, out), factors)
        return new.transpose(ROWS, COLS) if self.by_column else new


class Transition(AxialUpdate):
    """Algorithms 9 and 15, MSATransition and PairTransition: a two-layer perceptron at each position.

        a = up(norm(z))
        z + down(relu(a) if activation == "relu" else silu(a.chunk(2, -1)[0]) * a.chunk(2, -1)[1])

    Masked positions are updated too. With "swiglu" the layers have no biases (AlphaFold3, Algorithm 11), and the output
    of `up` contains first the gates and then the values.
    """

    def __init__(self, c: int, factor: int = 4, activation: Activation = "relu") -> None:
        super().__init__()
        self.activation, biased = activation, activation == "relu"
        self.norm = LayerNorm(c)
        self.up = Linear(c, HALVES[activation] * factor * c, biased, init="relu")
        self.down = Linear(factor * c, c, biased, init="final")

    def gather_weights(self, dtype: torch.dtype, variant: bool) -> TransitionWeights:
        """Gather the layer's parameters."""
        norm = self.norm
        return TransitionWeights(norm.weight, norm.bias, *joined(dtype, self.up), *joined(dtype, self.down))

    def update(self, read: Read, mask: Tensor, shared: Shared, x: Tensor | None, factors: Factors | None) -> Tensor:
        """Compute x + factors * perceptron(read)."""
        assert isinstance(read, Tensor)
        # Without dropout the operation adds the residual itself.
        adds_residual = x is not None and factors is None
        new = transition(read, self.weights(read.dtype), self.activation, self.norm.eps, residual=adds_residual)
        return new if adds_residual else residual(x, new, factors)


class MSARowAttention(AttentionUpdate):
    """Algorithm 7, MSARowAttentionWithPairBias: attention within each sequence, biased by the pair representation.

        x = norm(m)
        q, k, v = (f(x).unflatten(-1, (heads, -1)) for f in (q, k, v))
        logits = einsum("sihc,sjhc->shij", q, k) / sqrt(q.shape[-1]) + einsum("ijh->hij", bias(norm_z(z)))
        a = softmax(logits.masked_fill(mask[:, None, None, :] == 0, -1e9), -1)
        o = sigmoid(gate(x)) * einsum("shij,sjhc->sihc", a, v).flatten(-2)
        m + out(o)

    m: [*, s, i, c_m]; mask: [*, s, i]; z: [*, i, j, c_z]. All sequences share the bias.
    """

    axis = ROWS
    shares = "other"

    def __init__(self, c_m: int, c_z: int, heads: int = 8, rate: float = 0.15) -> None:
        super().__init__()
        self.dropout_rate = rate
        self.norm = LayerNorm(c_m)
        self.norm_z = LayerNorm(c_z)
        self.bias = Linear(c_z, heads, bias=False)
        self.attention = GatedAttention(c_m, heads)


class MSAColumnAttention(AttentionUpdate):
    """Algorithm 8, MSAColumnAttention: attention between the sequences, within each column (residue).

        x = norm(m)
        q, k, v = (f(x).unflatten(-1, (heads, -1)) for f in (q, k, v))
        logits = einsum("sihc,tihc->hist", q, k) / sqrt(q.shape[-1])
        a = softmax(logits.masked_fill(mask.T[:, None, :] == 0, -1e9), -1)
        o = sigmoid(gate(x)) * einsum("hist,tihc->sihc", a, v).flatten(-2)
        m + out(o)

    m: [*, s, i, c_m]; mask: [*, s, i].
    """

    axis = COLS
    by_column = True

    def __init__(self, c_m: int, heads: int = 8) -> None:
        super().__init__()
        self.norm = LayerNorm(c_m)
        self.attention = GatedAttention(c_m, heads)


class MSAColumnGlobalAttention(AxialUpdate):
    """Algorithm 19, MSAColumnGlobalAttention: column attention with one averaged query per column.

        x = norm(m)
        mean = einsum("si,sic->ic", mask, x) / (mask.sum(0)[:, None] + 1e-10)
        logits = einsum("ihc,tic->iht", q(mean).unflatten(-1, (heads, -1)), k(x)) / sqrt(k(x).shape[-1])
        a = softmax(logits.masked_fill(mask.T[:, None, :] == 0, -1e9), -1)
        o = sigmoid(gate(x)) * einsum("iht,tic->ihc", a, v(x)).flatten(-2)
        m + out(o)

    m: [*, s, i, c_m]; mask: [*, s, i]. All heads share the keys and values.
    """

    axis = COLS

    def __init__(self, c_m: int, heads: int = 8) -> None:
        super().__init__()
        width = c_m // heads
        self.heads = heads
        self.norm = LayerNorm(c_m)
        self.q = Linear(c_m, heads * width, bias=False, init="glorot")
        self.k = Linear(c_m, width, bias=False, init="glorot")
        self.v = Linear(c_m, width, bias=False, init="glorot")
        self.gate = Linear(c_m, heads * width, init="gating")
        self.out = Linear(heads * width, c_m, init="final")

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The linear layers of the gate, k and v, which project m. q projects the mean over the sequences."""
        return self.gate, self.k, self.v

    def update(self, read: Read, mask: Tensor, shared: Shared, x: Tensor | None, factors: Factors | None) -> Tensor:
        """Compute x + factors * attention of each column."""
        assert isinstance(read, Tensor)
        # To [*, r, s, c] and [*, r, s].
        read, mask = read.transpose(ROWS, COLS), mask.mT
        q = self.q(masked_mean(self.norm(read), mask[..., None], axis=-2)).unflatten(-1, (self.heads, -1))
        g, k, v = project(read, self.norm, *self.projections)
        # All sequences of a column get the same output before the gate.
        o = global_attention(q, k, v, mask).flatten(-2)[..., None, :].expand(g.shape)
        if x is None:
            return self.out(gate(o, g)).transpose(ROWS, COLS)
        factors = None if factors is None else factors.transpose(ROWS, COLS)
        m = gated_linear_residual(x.transpose(ROWS, COLS), o, g, *joined(o.dtype, self.out), factors)
        return m.transpose(ROWS, COLS)


class OuterProductMean(AxialUpdate):
    """Algorithm 10, OuterProductMean: update z by the mean over sequences of the outer products of columns of m.

        a, b = (f(norm(m)) * mask[..., None] for f in (a, b))
        o = einsum("sic,sjd->ijcd", a, b).flatten(-2)
        count = einsum("si,sj->ij", mask, mask)[..., None]
        z + out(o) / (count + count_added)

    z: [*, i, j, c_z]; m: [*, s, i, c_m]; mask: [*, s, i], the mask of m. Row i of z needs a of column i and b of all
    columns. The sum over sequences, and with it the bias of `out`, is divided by the number of sequences that have both
    residues. The three attributes below describe this division; other models' layers override them.
    """

    # Added to the number of sequences.
    count_added = 1e-3
    # Lower limit of the number of sequences.
    count_least = 0.0
    # Whether the bias of `out` is divided too.
    bias_divided = True
    axis = ROWS
    read_axis = pieces_axis = COLS
    reads = shares = mask_of = "other"

    def __init__(self, c_m: int, c_z: int, c: int = 32) -> None:
        super().__init__()
        self.norm = LayerNorm(c_m)
        self.a = Linear(c_m, c)
        self.b = Linear(c_m, c)
        # The input channels are the products of the channels of a (outermost) and b.
        self.out = Linear(c * c, c_z, init="final")

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The linear layers of both factors."""
        return self.a, self.b

    def gather_weights(self, dtype: torch.dtype, variant: bool) -> OuterProductWeights:
        """Gather the layer's parameters."""
        norm, in_weights, out_weights = self.norm, joined(dtype, *self.projections), joined(dtype, self.out)
        return OuterProductWeights(norm.weight, norm.bias, *in_weights, *out_weights)

    def shared(self, source: Tensor, mask: Tensor) -> Tensors:
        mask = mask[..., None].to(source.dtype)
        return project(source, self.norm, self.b)[0] * mask, mask

    def prepare(self, read: Tensor, mask: Tensor) -> Tensors:
        return (project(read, self.norm, self.a)[0] * mask[..., None].to(read.dtype),)

    def update(self, read: Read, mask: Tensor, shared: Shared, x: Tensor | None, factors: Factors | None) -> Tensor:
        """Compute x + factors * mean over sequences of the outer products of the slice's a and the whole b."""
        # Without dropout the operation adds the residual z itself.
        z = x if factors is None else None
        added, least, divided = self.count_added, self.count_least, self.bias_divided
        norm = self.norm
        if isinstance(norm, NoNorm) and shared is None:
            assert isinstance(read, Tensor)
            shared = self.shared(read, mask)
        # If the slice is all of z, the whole update is one operation.
        if shared is None:
            assert isinstance(read, Tensor)
            new = outer_product_mean(read, mask, self.weights(read.dtype), z, added, least, divided, norm.eps)
        else:
            (a,), (b, b_mask) = self.prepare(read, mask) if isinstance(read, Tensor) else read, shared
            out_of = joined(a.dtype, self.out)
            new = outer_product(a, b, *out_of, mask, b_mask[..., 0], z, added, least, divided)
        return residual(None if z is not None else x, new, factors)


class MSAStack(nn.Module):
    """The MSA half of a block: row attention, column attention (global for the extra MSA), transition."""

    def __init__(
        self,
        c_m: int,
        c_z: int,
        heads: int = 8,
        factor: int = 4,
        rate: float = 0.15,
        global_column: bool = False,
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        self.row = MSARowAttention(c_m, c_z, heads, rate)
        self.column = MSAColumnGlobalAttention(c_m, heads) if global_column else MSAColumnAttention(c_m, heads)
        self.transition = Transition(c_m, factor, activation)


@dataclass(frozen=True, kw_only=True)
class PairConfig:
    """The settings of a pair stack; the defaults are the Evoformer's."""

    # Heads of the triangle attention (Algorithms 13 and 14).
    heads: int = 4
    # None: c_z / heads.
    head_width: int | None = None
    # c of Algorithms 11 and 12.
    c_triangle: int = 128
    # n of Algorithm 15.
    transition: int = 4
    # Activation of the transition. "swiglu" is AlphaFold3's and makes a different model.
    activation: Activation = "relu"
    # Dropout rate (Algorithm 6).
    rate: float = 0.25
    # One projection for both factors of a triangle product (AlphaFold 2.3, Multimer v3).
    fused: bool = False
    order: Literal["multiplication_first", "attention_first"] = "multiplication_first"


class TriangleMultiplication(AxialUpdate):
    """Algorithms 11 and 12, TriangleMultiplication: update edge ij from the two other edges of every triangle ijk.

        x = norm(z)
        ab, g = (ab(x), ab_gate(x)) if fused else (cat([a(x), b(x)], -1), cat([a_gate(x), b_gate(x)], -1))
        a, b = (sigmoid(g) * ab * mask[..., None]).chunk(2, -1)
        o = einsum("ikc,jkc->ijc", a, b) if outgoing else einsum("kjc,kic->ijc", a, b)
        z + sigmoid(gate(x)) * out(norm_out(o))

    z: [*, i, j, c_z]; mask: [*, i, j]. Outgoing, a and b are the supplement's. Incoming, they are exchanged, as in
    AlphaFold's code: a is the supplement's b. In both cases a slice, which is a row i or a column j, needs its own a,
    and all slices share b. With `fused`, one projection computes a and b (AlphaFold 2.3). The methods below keep the
    channels of the factors in front, [*, c, ., .], as matrix products read them.
    """

    shares = "x"

    def __init__(self, c_z: int, c: int, outgoing: bool, rate: float = 0.25, fused: bool = False) -> None:
        super().__init__()
        self.outgoing, self.fused, self.channels, self.dropout_rate = outgoing, fused, c, rate
        self.axis = ROWS if outgoing else COLS
        self.norm = LayerNorm(c_z)
        if fused:
            # The first half of the channels is a, the second is b.
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
    def projections(self) -> tuple[Linear, ...]:
        """The linear layers of both factors, of their gates, and of the output's gate."""
        if self.fused:
            return self.ab, self.ab_gate, self.gate
        return self.a, self.a_gate, self.b, self.b_gate, self.gate

    def gather_weights(self, dtype: torch.dtype, variant: bool) -> TriangleWeights:
        """Gather the layer's parameters."""
        # Each look-up of a module is a Python call, which matters where the host limits the speed.
        norm, norm_out = self.norm, self.norm_out
        in_weights, out_weights = joined(dtype, *self.projections), joined(dtype, self.out)
        norms_out = norm_out.weight, norm_out.bias
        return TriangleWeights(norm.weight, norm.bias, *in_weights, *norms_out, *out_weights, self.fused)

    def join_axis(self, cut: int) -> int:
        # The factors have no channel axis at the end.
        return cut + 1

    def factor(self, which: Literal["a", "b"], z: Tensor, mask: Tensor) -> Tensor:
        """Compute a or b of some rows or columns of z, [*, c, ., .] (lines 1 and 2)."""
        return triangle_factor(z, mask, self.weights(z.dtype), which, self.norm.eps)

    def shared(self, source: Tensor, mask: Tensor) -> Tensors:
        return (self.factor("b", source, mask),)

    def empty_shared(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        return empty_rows(like, *shape)

    def prepare(self, read: Tensor, mask: Tensor) -> Tensors:
        """Compute a and the logits of the output's gate, which a rank does while it waits for b."""
        return self.factor("a", read, mask), *project(read, self.norm, self.gate)

    def finish(self, product: Tensor, gate_logits: Tensor, x: Tensor | None, factors: Factors | None) -> Tensor:
        """Compute x + factors * sigmoid(gate) * out(norm_out(product)) for a product [*, i, j, c] (lines 3 and 4)."""
        (dx,) = project(product, self.norm_out, self.out)
        return residual(x, gate(dx, gate_logits), factors)

    def update(self, read: Read, mask: Tensor, shared: Shared, x: Tensor | None, factors: Factors | None) -> Tensor:
        """Compute x + factors * update from the slice's a and the whole b."""
        b = None if shared is None else shared[0]
        if not isinstance(read, Tensor):
            a, gate_logits = read
            assert b is not None
            return self.finish(triangle_product(a, b, self.outgoing), gate_logits, x, factors)
        return triangle_multiplication(
            read, mask, self.weights(read.dtype), self.outgoing, b, factors, self.norm.eps, residual=x is not None
        )


class TriangleAttention(AttentionUpdate):
    """Algorithms 13 and 14, TriangleAttention: attention within each row i (starting node) or column j (ending node).

        z, mask = (z.transpose(0, 1), mask.T) if by_column else (z, mask)
        x = norm(z)
        q, k, v = (f(x).unflatten(-1, (heads, -1)) for f in (q, k, v))
        logits = einsum("ijhc,ikhc->hijk", q, k) / sqrt(q.shape[-1]) + einsum("jkh->hjk", bias(x))[:, None]
        a = softmax(logits.masked_fill(mask[:, None, :] == 0, -1e9), -1)
        z = z + out(sigmoid(gate(x)) * einsum("hijk,ikhc->ijhc", a, v).flatten(-2))
        z.transpose(0, 1) if by_column else z

    z: [*, i, j, c_z]; mask: [*, i, j]. The ending nodes of RoseTTAFold3 and OpenFold3 set `bias_transposed`.
    """

    shares = "x"

    def __init__(
        self, c_z: int, starting: bool, heads: int = 4, head_width: int | None = None, rate: float = 0.25
    ) -> None:
        super().__init__()
        self.by_column, self.dropout_rate = not starting, rate
        self.axis = self.dropout_shared_axis = ROWS if starting else COLS
        self.norm = LayerNorm(c_z)
        self.bias = Linear(c_z, heads, bias=False)
        self.attention = GatedAttention(c_z, heads, head_width)


class PairStack(Block):
    """The pair half of a block (Algorithm 6, lines 6 to 10): the triangle updates and the transition.

        layers = (outgoing, incoming, starting, ending)
        for layer in layers if multiplication_first else layers[2:] + layers[:2]:
            z = layer(z, mask)
        transition(z, mask)

    z: [*, i, j, c_z]; mask: [*, i, j].
    """

    states = ("z",)

    def __init__(self, c_z: int, config: PairConfig) -> None:
        super().__init__()
        c = config
        self.multiplication_first = c.order == "multiplication_first"
        # In the order of the steps, since parameters are numbered, initialised and packed in the order of creation.
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
        triangle_steps = multiplication + attention if self.multiplication_first else attention + multiplication
        return *triangle_steps, Step("z", self.transition)


# Limit for the blocks of a stack. AlphaFold2 has 48.
MAX_BLOCKS = 10_000


@dataclass(frozen=True, kw_only=True)
class EvoformerConfig:
    """The settings of an Evoformer stack; the defaults are the main stack's (Supp. 1.6)."""

    blocks: int = 48
    # Heads of row and column attention (Algorithms 7 and 8).
    heads: int = 8
    # n of Algorithm 9.
    transition: int = 4
    # Activation of the MSA transition. "swiglu" is AlphaFold3's and makes a different model.
    activation: Activation = "relu"
    # Dropout rate of row attention (Algorithm 6).
    rate: float = 0.15
    # c of Algorithm 10.
    c_outer: int = 32
    # Position of the outer product in a block. "middle" is AlphaFold2's order and "first" is Multimer's. With "last"
    # (HelixFold's parallel order, a different model) both halves read the block's input.
    outer: Literal["middle", "first", "last"] = "middle"
    pair: PairConfig = field(default_factory=PairConfig)

    def __post_init__(self) -> None:
        if self.blocks > MAX_BLOCKS:
            raise ValueError(f"blocks = {self.blocks}: must be at most {MAX_BLOCKS:,}")
        if self.outer not in ("middle", "first", "last"):
            raise ValueError(f'outer = {self.outer!r}: must be "middle", "first" or "last"')


class EvoformerBlock(Block):
    """One block of Algorithm 6, EvoformerStack, or with global column attention of Algorithm 18, ExtraMsaStack.

        m = msa.transition(msa.column(msa.row(m, m_mask, z), m_mask), m_mask)
        z = outer(z, m_mask, m)
        m, pair(z, z_mask)[0]

    m: [*, s, r, c_m]; z: [*, r, r, c_z]; m_mask: [*, s, r]; z_mask: [*, r, r]. This is the order "middle" of
    `EvoformerConfig.outer`. With "first" the line of the outer product comes first, with "last" it comes last.
    """

    def __init__(self, c_m: int, c_z: int, config: EvoformerConfig, global_column: bool = False) -> None:
        super().__init__()
        self.order = config.outer
        c = config
        self.msa = MSAStack(c_m, c_z, c.heads, c.transition, c.rate, global_column, c.activation)
        self.outer = OuterProductMean(c_m, c_z, config.c_outer)
        self.pair = PairStack(c_z, config.pair)

    @property
    def steps(self) -> Steps:
        """The lines of Algorithm 6, with the outer product at the configured position."""
        layers = self.msa
        msa = Step("m", layers.row, "z"), Step("m", layers.column), Step("m", layers.transition)
        outer = (Step("z", self.outer, "m"),)
        pair = self.pair.steps
        return {"first": outer + msa + pair, "middle": msa + outer + pair, "last": msa + pair + outer}[self.order]


class Evoformer(BlockStack):
    """Algorithm 6, EvoformerStack, or with `global_column` Algorithm 18, ExtraMsaStack.

        for block in blocks:
            m, z = block(m, z, m_mask, z_mask)
        m, z

    m: [*, s, r, c_m]; z: [*, r, r, c_z]; m_mask: [*, s, r]; z_mask: [*, r, r].
    """

    def __init__(self, c_m: int, c_z: int, config: EvoformerConfig, global_column: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(EvoformerBlock(c_m, c_z, config, global_column) for _ in range(config.blocks))

    def forward(self, m: Tensor, z: Tensor, m_mask: Tensor, z_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the new m and z."""
        m, z = self.execution.stack(self, (m, z), (m_mask, z_mask))
        return m, z
