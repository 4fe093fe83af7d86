"""The Evoformer and its layers: m [*, s, r, c_m], z [*, i, j, c_z] (Algorithms 6 to 15, 18 and 19).

The extra MSA stack is one with global column attention; the template stack is made of the pair stack alone, in another
order.

The docstring of each layer is its definition: lines of torch in the supplement's letters, without leading axes and
dropout, the last of which is what a call returns.  Submodules go by their names, also those of `attention`.
tests/model/test_definitions.py executes the lines and compares them with the layer.
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

    `shared` is nothing, or the bias of the attention's logits [*, h, K, K]: query a and key b of a row have that of
    z[a, b], those of a column that of z[b, a]; with `bias_transposed` the other way round.
    """

    attention: GatedAttention
    bias: Linear | None  # makes the bias; None: `other` is the bias
    norm_z: LayerNorm  # of what the bias is made of, where that is not x
    by_column = False
    bias_transposed = False  # no layer of AlphaFold2's

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The linear layers of what is read that are joined: the attention's, and that of a bias of x itself."""
        own = (self.bias,) if self.shares == "x" and self.bias is not None else ()
        return *self.attention.projections, *own

    def join_axis(self, cut: int) -> int:
        keys = (cut == ROWS) == (self.by_column != self.bias_transposed)
        return -1 if keys else -2

    def shared(self, source: Tensor, mask: Tensor) -> Tensors:
        turned = source.transpose(ROWS, COLS) if self.by_column != self.bias_transposed else source
        if self.bias is None:  # as it is
            return (turned.movedim(-1, -3),)
        (bias,) = project(turned, self.norm if self.shares == "x" else self.norm_z, self.bias, planes=True)
        return (bias.movedim(-1, -3),)

    def empty_shared(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        return empty_rows(like, *shape)

    def update(self, read: Read, mask: Tensor, shared: Shared, x: Tensor | None, factors: Factors | None) -> Tensor:
        """Return x + factors * attention, gated and projected."""
        assert isinstance(read, Tensor)
        norm, heads, out = self.norm, self.attention.heads, self.attention.out
        if shared is None and self.bias_transposed:  # on the way it would be made as x lies
            shared = self.shared(read, mask)
        bias = None if shared is None else shared[0]
        if self.by_column:
            read, mask = read.transpose(ROWS, COLS), mask.mT
            x = None if x is None else x.transpose(ROWS, COLS)
            factors = None if factors is None else factors.transpose(ROWS, COLS)
        if not isinstance(norm, NoNorm):  # all of it is one operation
            into = joined(read.dtype, *(self.projections if shared is None else self.attention.projections))
            weights = AttentionWeights(norm.weight, norm.bias, *into, *joined(read.dtype, out), heads)
            new = gated_attention(read, mask.contiguous(), weights, bias, factors, norm.eps, residual=x is not None)
        else:
            g, *qkv = project(read, norm, *self.attention.projections)
            q, k, v = (t.unflatten(-1, (heads, -1)) for t in qkv)
            bias = None if bias is None else bias[..., None, :, :, :]  # the same for every row
            o = attention(q, k, v, mask, bias).flatten(-2)
            new = out(gate(o, g)) if x is None else gated_linear_residual(x, o, g, *joined(o.dtype, out), factors)
        return new.transpose(ROWS, COLS) if self.by_column else new


class Transition(AxialUpdate):
    """Algorithms 9 and 15: a two-layer perceptron at each position alone.  Masked positions are updated too.

        a = up(norm(z))
        z + down(relu(a) if activation == "relu" else silu(a.chunk(2, -1)[0]) * a.chunk(2, -1)[1])

    With "swiglu" its layers have no biases (AlphaFold3, Algorithm 11), and `up` makes gates and then values.
    """

    def __init__(self, c: int, factor: int = 4, activation: Activation = "relu") -> None:
        super().__init__()
        self.activation, biased = activation, activation == "relu"
        self.norm = LayerNorm(c)
        self.up = Linear(c, HALVES[activation] * factor * c, biased, init="relu")
        self.down = Linear(factor * c, c, biased, init="final")

    def update(self, read: Read, mask: Tensor, shared: Shared, x: Tensor | None, factors: Factors | None) -> Tensor:
        """Return x + factors * perceptron of the slice."""
        assert isinstance(read, Tensor)
        norm, at_once = self.norm, x is not None and factors is None
        up, down = joined(read.dtype, self.up), joined(read.dtype, self.down)
        weights = TransitionWeights(norm.weight, norm.bias, *up, *down)
        new = transition(read, weights, self.activation, norm.eps, residual=at_once)
        return new if at_once else residual(x, new, factors)


class MSARowAttention(AttentionUpdate):
    """Algorithm 7: attention within each sequence, biased by the pair representation.

        x = norm(m)
        q, k, v = (f(x).unflatten(-1, (heads, -1)) for f in (q, k, v))
        logits = einsum("sihc,sjhc->shij", q, k) / sqrt(q.shape[-1]) + einsum("ijh->hij", bias(norm_z(z)))
        a = softmax(logits.masked_fill(mask[:, None, None, :] == 0, -1e9), -1)
        o = sigmoid(gate(x)) * einsum("shij,sjhc->sihc", a, v).flatten(-2)
        m + out(o)

    m: [*, s, i, c_m]; mask: [*, s, i]; z: [*, i, j, c_z].  The bias is shared by all sequences.
    """

    axis = ROWS
    shares = "other"  # rows of z, whichever they are

    def __init__(self, c_m: int, c_z: int, heads: int = 8, rate: float = 0.15) -> None:
        super().__init__()
        self.dropout_rate = rate
        self.norm = LayerNorm(c_m)
        self.norm_z = LayerNorm(c_z)
        self.bias = Linear(c_z, heads, bias=False)
        self.attention = GatedAttention(c_m, heads)


class MSAColumnAttention(AttentionUpdate):
    """Algorithm 8: attention within each residue's column, between sequences.

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
    """Algorithm 19: column attention of the extra MSA, one averaged query per column, shared keys and values.

        x = norm(m)
        mean = einsum("si,sic->ic", mask, x) / (mask.sum(0)[:, None] + 1e-10)
        logits = einsum("ihc,tic->iht", q(mean).unflatten(-1, (heads, -1)), k(x)) / sqrt(k(x).shape[-1])
        a = softmax(logits.masked_fill(mask.T[:, None, :] == 0, -1e9), -1)
        o = sigmoid(gate(x)) * einsum("iht,tic->ihc", a, v(x)).flatten(-2)
        m + out(o)

    m: [*, s, i, c_m]; mask: [*, s, i].
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
        """The linear layers of the gate, k and v; q is of the mean over the sequences."""
        return self.gate, self.k, self.v

    def update(self, read: Read, mask: Tensor, shared: Shared, x: Tensor | None, factors: Factors | None) -> Tensor:
        """Return x + factors * attention of each column."""
        assert isinstance(read, Tensor)
        read, mask = read.transpose(ROWS, COLS), mask.mT  # [*, r, s, c], [*, r, s]
        q = self.q(masked_mean(self.norm(read), mask[..., None], axis=-2)).unflatten(-1, (self.heads, -1))
        g, k, v = project(read, self.norm, *self.projections)
        o = global_attention(q, k, v, mask).flatten(-2)[..., None, :].expand(g.shape)  # the same for all sequences
        if x is None:
            return self.out(gate(o, g)).transpose(ROWS, COLS)
        factors = None if factors is None else factors.transpose(ROWS, COLS)
        return gated_linear_residual(x.transpose(ROWS, COLS), o, g, *joined(o.dtype, self.out), factors).transpose(
            ROWS, COLS
        )


class OuterProductMean(AxialUpdate):
    """Algorithm 10: row i of z from column i of m, given every column's b.  x is z, other is m, mask is m's.

        a, b = (f(norm(m)) * mask[..., None] for f in (a, b))
        o = einsum("sic,sjd->ijcd", a, b).flatten(-2)
        count = einsum("si,sj->ij", mask, mask)[..., None]
        z + out(o) / (count + count_added)

    The sum over sequences is divided by how many have both residues, plus `count_added`, `count_least` at least, and
    the output's bias with it (`bias_divided`), as AlphaFold2 has it; others count and divide otherwise.
    """

    count_added = 1e-3
    count_least = 0.0
    bias_divided = True
    axis = ROWS
    read_axis = pieces_axis = COLS
    reads = shares = mask_of = "other"

    def __init__(self, c_m: int, c_z: int, c: int = 32) -> None:
        super().__init__()
        self.norm = LayerNorm(c_m)
        self.a = Linear(c_m, c)
        self.b = Linear(c_m, c)
        self.out = Linear(c * c, c_z, init="final")  # from the products, left channel outermost

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The linear layers of both factors."""
        return self.a, self.b

    def shared(self, source: Tensor, mask: Tensor) -> Tensors:
        mask = mask[..., None].to(source.dtype)
        return project(source, self.norm, self.b)[0] * mask, mask

    def prepare(self, read: Tensor, mask: Tensor) -> Tensors:
        return (project(read, self.norm, self.a)[0] * mask[..., None].to(read.dtype),)

    def update(self, read: Read, mask: Tensor, shared: Shared, x: Tensor | None, factors: Factors | None) -> Tensor:
        """Return x + factors * mean over sequences of the outer products of a, of the slice, and b."""
        z = x if factors is None else None  # to which the operation adds
        added, least, divided = self.count_added, self.count_least, self.bias_divided
        if isinstance(self.norm, NoNorm) and shared is None:
            assert isinstance(read, Tensor)
            shared = self.shared(read, mask)
        if shared is None:  # all of it is one operation
            assert isinstance(read, Tensor)
            norm, dtype = self.norm, read.dtype
            into, out_of = joined(dtype, *self.projections), joined(dtype, self.out)
            weights = OuterProductWeights(norm.weight, norm.bias, *into, *out_of)
            new = outer_product_mean(read, mask, weights, z, added, least, divided, norm.eps)
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

    heads: int = 4  # Algorithms 13 and 14
    head_width: int | None = None  # None: c_z / heads
    c_triangle: int = 128  # Algorithms 11 and 12: c
    transition: int = 4  # Algorithm 15: n
    activation: Activation = "relu"  # of the transition; "swiglu" is AlphaFold3's: another model
    rate: float = 0.25  # dropout, Algorithm 6
    fused: bool = False  # one projection for both factors of a triangle product (AlphaFold 2.3, Multimer v3)
    order: Literal["multiplication_first", "attention_first"] = "multiplication_first"


class TriangleMultiplication(AxialUpdate):
    """Algorithms 11 and 12: update edge ij from the two other edges of every triangle ijk.

        x = norm(z)
        a, b = (sigmoid(g(x)) * f(x) * mask[..., None] for f, g in ((a, a_gate), (b, b_gate)))
        o = einsum("ikc,jkc->ijc", a, b) if outgoing else einsum("kjc,kic->ijc", a, b)
        z + sigmoid(gate(x)) * out(norm_out(o))

    Outgoing, a and b are those of the supplement.  Incoming, they are exchanged, as in AlphaFold's code: this a is the
    supplement's b.  So in both the slice, a row i or a column j, brings its own a, and b is shared by all slices.
    With `fused`, one projection makes a and b (AlphaFold 2.3).  The factors have their channels in front, [*, c, ., .],
    as matrix products read them: b is laid out once for all slices.
    """

    shares = "x"

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
    def projections(self) -> tuple[Linear, ...]:
        """The linear layers of both factors, of their gates, and of the product's gate."""
        if self.fused:
            return self.ab, self.ab_gate, self.gate
        return self.a, self.a_gate, self.b, self.b_gate, self.gate

    def weights(self, dtype: torch.dtype) -> TriangleWeights:
        """Return the parameters as the operations take them, in `dtype` where they are packed."""
        # Each look-up of a module is a call of Python, which counts where the host decides the speed.
        norm, norm_out = self.norm, self.norm_out
        into, out_of = joined(dtype, *self.projections), joined(dtype, self.out)
        norms_out = norm_out.weight, norm_out.bias
        return TriangleWeights(norm.weight, norm.bias, *into, *norms_out, *out_of, self.fused)

    def join_axis(self, cut: int) -> int:
        return cut + 1  # no channel axis is behind it

    def factor(self, which: Literal["a", "b"], z: Tensor, mask: Tensor) -> Tensor:
        """Compute a or b of some rows or columns of z, [*, c, ., .] (lines 1 and 2)."""
        return triangle_factor(z, mask, self.weights(z.dtype), which, self.norm.eps)

    def shared(self, source: Tensor, mask: Tensor) -> Tensors:
        return (self.factor("b", source, mask),)

    def empty_shared(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        return empty_rows(like, *shape)

    def prepare(self, read: Tensor, mask: Tensor) -> Tensors:
        """Compute a and the logits of the product's gate, which need no b: what a rank does while b travels."""
        return self.factor("a", read, mask), *project(read, self.norm, self.gate)

    def finish(self, product: Tensor, gate_logits: Tensor, x: Tensor | None, factors: Factors | None) -> Tensor:
        """Compute x + factors * gate * linear(norm(product)), of a product [*, i, j, c] (lines 3 and 4)."""
        (dx,) = project(product, self.norm_out, self.out)
        return residual(x, gate(dx, gate_logits), factors)

    def update(self, read: Read, mask: Tensor, shared: Shared, x: Tensor | None, factors: Factors | None) -> Tensor:
        """Compute x + factors * gate * linear(norm(product)) of the slice's a and the whole b."""
        b = None if shared is None else shared[0]
        if not isinstance(read, Tensor):
            a, gate_logits = read
            assert b is not None
            return self.finish(triangle_product(a, b, self.outgoing), gate_logits, x, factors)
        return triangle_multiplication(
            read, mask, self.weights(read.dtype), self.outgoing, b, factors, self.norm.eps, residual=x is not None
        )


class TriangleAttention(AttentionUpdate):
    """Algorithms 13 and 14.  Starting node: within each row i.  Ending node: within each column j, on z transposed.

        z, mask = (z.transpose(0, 1), mask.T) if by_column else (z, mask)
        x = norm(z)
        q, k, v = (f(x).unflatten(-1, (heads, -1)) for f in (q, k, v))
        logits = einsum("ijhc,ikhc->hijk", q, k) / sqrt(q.shape[-1]) + einsum("jkh->hjk", bias(x))[:, None]
        a = softmax(logits.masked_fill(mask[:, None, :] == 0, -1e9), -1)
        z = z + out(sigmoid(gate(x)) * einsum("hijk,ikhc->ijhc", a, v).flatten(-2))
        z.transpose(0, 1) if by_column else z

    RoseTTAFold3's and OpenFold3's ending nodes are `bias_transposed`.
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
    """The pair half of a block: triangle updates and transition; z [*, i, j, c_z] and its mask [*, i, j] -> z.

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


MOST_BLOCKS = 10_000  # of a stack; AlphaFold2 has 48


@dataclass(frozen=True, kw_only=True)
class EvoformerConfig:
    """The settings of an Evoformer stack; the defaults are the main stack's (Supp. 1.6)."""

    blocks: int = 48
    heads: int = 8  # Algorithms 7 and 8
    transition: int = 4  # Algorithm 9: n
    activation: Activation = "relu"  # of the transition; "swiglu" is AlphaFold3's: another model
    rate: float = 0.15  # dropout of row attention, Algorithm 6
    c_outer: int = 32  # Algorithm 10: c
    # Where the outer product stands: "middle" is AlphaFold2's order; "first" is Multimer's; with "last" both halves
    # read the block's input and the outer product closes it (HelixFold's parallel order: another model).
    outer: Literal["middle", "first", "last"] = "middle"
    pair: PairConfig = field(default_factory=PairConfig)

    def __post_init__(self) -> None:
        if self.blocks > MOST_BLOCKS:
            raise ValueError(f"blocks = {self.blocks}: must be at most {MOST_BLOCKS:,}")


class EvoformerBlock(Block):
    """Algorithm 6 (and 18, with global column attention).

        m = msa.transition(msa.column(msa.row(m, m_mask, z), m_mask), m_mask)
        z = outer(z, m_mask, m)
        m, pair(z, z_mask)[0]

    This is the order "middle"; with "first" the outer product comes before the other lines, with "last" after them.
    m [*, s, r, c_m], z [*, r, r, c_z], m_mask [*, s, r], z_mask [*, r, r] -> m, z.
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
        """The lines of Algorithm 6, with the outer product where the settings have it."""
        msa = Step("m", self.msa.row, "z"), Step("m", self.msa.column), Step("m", self.msa.transition)
        outer = (Step("z", self.outer, "m"),)
        pair = self.pair.steps
        return {"first": outer + msa + pair, "middle": msa + outer + pair, "last": msa + pair + outer}[self.order]


class Evoformer(BlockStack):
    """A stack of blocks: the main one, or the extra MSA stack (Algorithm 18) with `global_column`."""

    def __init__(self, c_m: int, c_z: int, config: EvoformerConfig, global_column: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(EvoformerBlock(c_m, c_z, config, global_column) for _ in range(config.blocks))

    def forward(self, m: Tensor, z: Tensor, m_mask: Tensor, z_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new m [*, s, r, c_m] and z [*, r, r, c_z], given m_mask [*, s, r] and z_mask [*, r, r]."""
        m, z = self.execution.stack(self, (m, z), (m_mask, z_mask))
        return m, z
