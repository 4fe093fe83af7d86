"""Layers in which z says who reads from whom: attention with pair bias, pair-weighted averaging (AlphaFold3)."""

import torch
from torch import Tensor

from warpfold.model.axial import ROWS, AxialUpdate, Read, Shared, Tensors
from warpfold.model.evoformer import AttentionUpdate, GatedAttention
from warpfold.model.layers import LayerNorm, Linear, joined, project
from warpfold.ops.dispatch import upcast_half
from warpfold.ops.linear import gate, gated_linear_residual
from warpfold.ops.noise import Factors


class AttentionPairBias(AttentionUpdate):
    """AlphaFold3, Algorithm 24 without conditioning: each row of s attends to itself, biased by z.

        x = norm(s)
        q, k, v = (f(x).unflatten(-1, (heads, -1)) for f in (q, k, v))
        logits = einsum("rihc,rjhc->rhij", q, k) / sqrt(q.shape[-1]) + einsum("ijh->hij", bias(norm_z(z)))
        a = softmax(logits.masked_fill(mask[:, None, None, :] == 0, -1e9), -1)
        o = sigmoid(gate(x)) * einsum("rhij,rjhc->rihc", a, v).flatten(-2)
        s + out(o)

    s [*, r, N, c_s], z [*, N, N, c_z], mask [*, r, N].  A single representation [*, N, c_s] is one row,
    `s.unsqueeze(-3)`; samples that share z are several.  The norm may be `NoNorm`, of what is normalised already.
    """

    axis = ROWS
    shares = "other"  # z; or, where there is no `bias`, the bias itself, [*, N, N, heads]

    def __init__(self, c_s: int, c_z: int, heads: int = 16) -> None:
        super().__init__()
        self.norm = LayerNorm(c_s)
        self.norm_z = LayerNorm(c_z)
        self.bias = Linear(c_z, heads, bias=False)
        self.attention = GatedAttention(c_s, heads, biased=("q",))


class PairWeightedAveraging(AxialUpdate):
    """AlphaFold3, Algorithm 10: each row of m is averaged over residues, with weights that z alone decides.

        x, logits = norm(m), einsum("ijh->hij", bias(norm_z(z)))
        w = softmax(logits.masked_fill(mask == 0, -1e9), -1)
        o = einsum("hij,sjhc->sihc", w, v(x).unflatten(-1, (len(w), -1))).flatten(-2)
        m + out(sigmoid(gate(x)) * o)

    m [*, s, r, c_m], other is z [*, i, j, c_z], and the mask is z's, [*, i, j] (1: i reads from j; where it is 0 for
    all j, all weigh alike).  `shared` is the weights [*, h, i, j], the same for every row.
    """

    axis = ROWS
    shares = mask_of = "other"
    norm_z: LayerNorm

    def __init__(self, c_m: int, c_z: int, heads: int = 8, head_width: int = 32) -> None:
        super().__init__()
        self.norm = LayerNorm(c_m)
        self.norm_z = LayerNorm(c_z)
        self.bias = Linear(c_z, heads, bias=False)
        self.gate = Linear(c_m, heads * head_width, bias=False, init="gating")
        self.v = Linear(c_m, heads * head_width, bias=False, init="glorot")
        self.out = Linear(heads * head_width, c_m, bias=False, init="final")

    def join_axis(self, cut: int) -> int:
        return cut + 1

    def shared(self, source: Tensor, mask: Tensor) -> Tensors:
        (logits,) = project(source, self.norm_z, self.bias)
        logits = upcast_half(logits.movedim(-1, -3)).masked_fill(mask[..., None, :, :] == 0, -1e9)
        return (logits.softmax(-1).to(source.dtype),)

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The linear layers of the gate and the values."""
        return self.gate, self.v

    def update(self, read: Read, mask: Tensor, shared: Shared, x: Tensor | None, factors: Factors | None) -> Tensor:
        """Return x + factors * average of the values of each row, gated and projected."""
        assert isinstance(read, Tensor)
        assert shared is not None
        g, v = project(read, self.norm, *self.projections)
        values = v.unflatten(-1, (shared[0].shape[-3], -1))
        o = torch.einsum("...hij,...sjhd->...sihd", shared[0], values).flatten(-2)
        return (
            self.out(gate(o, g)) if x is None else gated_linear_residual(x, o, g, *joined(o.dtype, self.out), factors)
        )
