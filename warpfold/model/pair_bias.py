"""Layers in which z says who reads from whom: attention with pair bias, pair-weighted averaging (AlphaFold3)."""

import torch
from torch import Tensor

from warpfold.model.attention import AttentionUpdate, GatedAttention
from warpfold.model.axial import ROWS, AxialUpdate
from warpfold.model.execution import Tensors
from warpfold.model.layers import DeferredLayerNorm, LayerNorm, Linear, joined
from warpfold.ops.gate import gate, gated_linear_residual
from warpfold.ops.noise import Factors
from warpfold.ops.tensors import upcast_half


class AttentionPairBias(AttentionUpdate):
    """AlphaFold3, Algorithm 24 without conditioning: each row of s attends to itself, biased by z.

    s [*, r, N, c_s], z [*, N, N, c_z], mask [*, r, N].  A single representation [*, N, c_s] is one row,
    `s.unsqueeze(-3)`; samples that share z are several.  The norm may be `NoNorm`, of what is normalised already.
    """

    axis = ROWS
    shared_from_other = True
    norm_z: LayerNorm
    bias: Linear | None  # None: `other` is the bias, [*, N, N, heads]

    def __init__(self, c_s: int, c_z: int, heads: int = 16) -> None:
        super().__init__()
        self.norm = LayerNorm(c_s)
        self.norm_z = LayerNorm(c_z)
        self.bias = Linear(c_z, heads, bias=False)
        self.attention = GatedAttention(c_s, heads, biased=("q",))

    def shared_of(self, other: Tensor, mask: Tensor | None = None) -> Tensors:
        if self.bias is None:
            return (other,)
        return DeferredLayerNorm(other, self.norm_z).project(self.bias)  # [*, i, j, h]


class PairWeightedAveraging(AxialUpdate):
    """AlphaFold3, Algorithm 10: each row of m is averaged over residues, with weights that z alone decides.

    m [*, s, r, c_m], other is z [*, i, j, c_z], and the mask is z's, [*, i, j] (1: i reads from j; where it is 0 for
    all j, all weigh alike).  `shared` is the weights [*, h, i, j], the same for every row; `local` the gate's logits
    and the values, [*, s, j, h d].
    """

    axis = ROWS
    shared_from_other = mask_of_other = True
    norm_z: LayerNorm

    def __init__(self, c_m: int, c_z: int, heads: int = 8, head_width: int = 32) -> None:
        super().__init__()
        self.norm = LayerNorm(c_m)
        self.norm_z = LayerNorm(c_z)
        self.bias = Linear(c_z, heads, bias=False)
        self.gate = Linear(c_m, heads * head_width, bias=False, init="gating")
        self.v = Linear(c_m, heads * head_width, bias=False, init="glorot")
        self.out = Linear(heads * head_width, c_m, bias=False, init="final")

    @property
    def join_axis(self) -> int:
        return -2  # of the weights

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The linear layers of the gate and the values."""
        return self.gate, self.v

    def shared_of(self, other: Tensor, mask: Tensor | None = None) -> Tensors:
        (logits,) = DeferredLayerNorm(other, self.norm_z).project(self.bias)
        logits = upcast_half(logits.movedim(-1, -3))
        if mask is not None:
            logits = logits.masked_fill(mask[..., None, :, :] == 0, -1e9)
        return (logits.softmax(-1).to(other.dtype),)

    def local(self, n: DeferredLayerNorm, mask: Tensor) -> Tensors:
        return n.project(*self.projections)

    def average(self, local: Tensors, shared: Tensors) -> Tensor:
        """Return the weighted averages of the values, [*, s, i, h d]."""
        (weights,), values = shared, local[1].unflatten(-1, (shared[0].shape[-3], -1))
        return torch.einsum("...hij,...sjhd->...sihd", weights, values).flatten(-2)

    def update(self, local: Tensors, shared: Tensors, mask: Tensor) -> Tensor:
        return self.out(gate(self.average(local, shared), local[0]))

    def add(self, x: Tensor, local: Tensors, shared: Tensors, mask: Tensor, factors: Factors | None) -> Tensor:
        return gated_linear_residual(x, self.average(local, shared), local[0], *joined(x.dtype, self.out), factors)
