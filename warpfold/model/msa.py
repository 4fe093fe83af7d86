"""The layers of the MSA stack, m [*, s, r, c_m], and the outer product that carries m into z (Algorithms 7-10, 19)."""

import torch
from torch import Tensor, nn

from warpfold.model.attention import AttentionUpdate, GatedAttention, Transition
from warpfold.model.axial import COLS, ROWS, AxialUpdate
from warpfold.model.execution import Tensors
from warpfold.model.layers import DeferredLayerNorm, LayerNorm, Linear, joined
from warpfold.ops.attention import global_attention, masked_mean
from warpfold.ops.gate import gate, gated_linear_residual
from warpfold.ops.noise import Factors
from warpfold.ops.outer import outer_product
from warpfold.ops.transition import Activation


class MSARowAttention(AttentionUpdate):
    """Algorithm 7: attention within each sequence, biased by the pair representation."""

    axis = ROWS
    shared_from_other = True  # rows of z, whichever they are

    def __init__(self, c_m: int, c_z: int, heads: int = 8, rate: float = 0.15) -> None:
        super().__init__()
        self.dropout_rate = rate
        self.norm = LayerNorm(c_m)
        self.norm_z = LayerNorm(c_z)
        self.bias = Linear(c_z, heads, bias=False)
        self.attention = GatedAttention(c_m, heads)

    def shared_of(self, other: Tensor, mask: Tensor | None = None) -> Tensors:
        return DeferredLayerNorm(other, self.norm_z).project(self.bias)  # [*, i, j, h]


class MSAColumnAttention(AttentionUpdate):
    """Algorithm 8: attention within each residue's column, between sequences."""

    axis = COLS
    by_column = True

    def __init__(self, c_m: int, heads: int = 8) -> None:
        super().__init__()
        self.norm = LayerNorm(c_m)
        self.attention = GatedAttention(c_m, heads)


class MSAColumnGlobalAttention(AxialUpdate):
    """Algorithm 19: column attention of the extra MSA, one averaged query per column, shared keys and values."""

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

    def local(self, n: DeferredLayerNorm, mask: Tensor) -> Tensors:
        n, mask = n.transpose(ROWS, COLS), mask.transpose(-2, -1)  # [*, r, s, c], [*, r, s]
        q = self.q(masked_mean(n.value, mask[..., None], axis=-2)).unflatten(-1, (self.heads, -1))
        return q, *n.project(*self.projections)

    def attend(self, local: Tensors, mask: Tensor) -> Tensor:
        """Return o [*, r, s, h d], the same for all sequences."""
        q, g, k, v = local
        o = global_attention(q, k, v, mask.transpose(-2, -1))  # [*, r, h, d]
        return o.flatten(-2)[..., None, :].expand(g.shape)

    def update(self, local: Tensors, shared: Tensors, mask: Tensor) -> Tensor:
        return self.out(gate(self.attend(local, mask), local[1])).transpose(ROWS, COLS)

    def add(self, x: Tensor, local: Tensors, shared: Tensors, mask: Tensor, factors: Factors | None) -> Tensor:
        weight, bias = joined(x.dtype, self.out)
        factors = None if factors is None else factors.transpose(ROWS, COLS)
        o, x = self.attend(local, mask), x.transpose(ROWS, COLS)
        return gated_linear_residual(x, o, local[1], weight, bias, factors).transpose(ROWS, COLS)


class OuterProductMean(AxialUpdate):
    """Algorithm 10: row i of z from column i of m, given every column's b.  x is z, other is m, mask is m's.

    The sum over sequences is divided by how many have both residues, plus `count_added`, `count_least` at least, and
    the output's bias with it (`bias_divided`), as AlphaFold2 has it; others count and divide otherwise.
    """

    count_added = 1e-3
    count_least = 0.0
    bias_divided = True
    axis = ROWS
    operand_axis = COLS
    operand_is_other = True
    shared_cuts = COLS

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

    def shared(self, n: DeferredLayerNorm, mask: Tensor) -> Tensors:
        mask = mask[..., None].to(n.x.dtype)
        return n.project(self.b)[0] * mask, mask

    def local(self, n: DeferredLayerNorm, mask: Tensor) -> Tensors:
        return (n.project(self.a)[0] * mask[..., None].to(n.x.dtype),)

    def local_and_shared(self, n: DeferredLayerNorm, mask: Tensor, other: Tensor | None) -> tuple[Tensors, Tensors]:
        a, b = n.project(*self.projections)
        mask = mask[..., None].to(n.x.dtype)
        return (a * mask,), (b * mask, mask)

    def whole(self, x: Tensor, mask: Tensor, other: Tensor | None, factors: Factors | None) -> Tensor:
        assert other is not None
        return super().whole(x, mask.to(other.dtype), other, factors)  # cast once, for both factors and their count

    def update(self, local: Tensors, shared: Tensors, mask: Tensor) -> Tensor:
        (a,), (b, b_mask) = local, shared
        pairs = torch.einsum("...si,...sjx->...ijx", mask.to(b_mask.dtype), b_mask)  # sequences that have both
        count = pairs + self.count_added
        if self.count_least:
            count = count.clamp(min=self.count_least)
        return outer_product(a, b, *joined(a.dtype, self.out), count, self.bias_divided)


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
