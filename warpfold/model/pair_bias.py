"""AlphaFold3's attention with pair bias and pair-weighted averaging, in which z determines the weights.

As in evoformer.py, the docstring of each layer contains its definition, which a test executes.
"""

import torch
from torch import Tensor

from warpfold.model.axial import ROWS, AxialUpdate, Read, Shared, Tensors
from warpfold.model.evoformer import AttentionUpdate, GatedAttention
from warpfold.model.layers import LayerNorm, Linear, joined, project
from warpfold.ops.dispatch import upcast_half
from warpfold.ops.linear import gate, gated_linear_residual
from warpfold.ops.noise import Factors


class AttentionPairBias(AttentionUpdate):
    """AlphaFold3's Algorithm 24 without conditioning: attention within each row of s, biased by z.

    `AttentionUpdate` computes it. This class names the parts only.

        x = norm(s)
        q, k, v = (f(x).unflatten(-1, (heads, -1)) for f in (q, k, v))
        logits = einsum("rihc,rjhc->rhij", q, k) / sqrt(q.shape[-1]) + einsum("ijh->hij", bias(norm_z(z)))
        a = softmax(logits.masked_fill(mask[:, None, None, :] == 0, -1e9), -1)
        o = sigmoid(gate(x)) * einsum("rhij,rjhc->rihc", a, v).flatten(-2)
        s + out(o)

    s: [*, r, N, c_s]; z: [*, N, N, c_z]; mask: [*, r, N]. Pass a single representation [*, N, c_s] as one row,
    `s.unsqueeze(-3)`, and samples that share z as several rows. The norm may be `NoNorm` if s is normalised already.
    """

    axis = ROWS
    # z, or if `bias` is None the bias itself, [*, N, N, heads].
    shares = "other"

    def __init__(self, c_s: int, c_z: int, heads: int = 16) -> None:
        super().__init__()
        self.norm = LayerNorm(c_s)
        self.norm_z = LayerNorm(c_z)
        self.bias = Linear(c_z, heads, bias=False)
        self.attention = GatedAttention(c_s, heads, biased=("q",))


class PairWeightedAveraging(AxialUpdate):
    """AlphaFold3's Algorithm 10: average each row of m over residues, with weights that depend on z only.

        x, logits = norm(m), einsum("ijh->hij", bias(norm_z(z)))
        w = softmax(logits.masked_fill(mask == 0, -1e9), -1)
        o = einsum("hij,sjhc->sihc", w, v(x).unflatten(-1, (len(w), -1))).flatten(-2)
        m + out(sigmoid(gate(x)) * o)

    m: [*, s, r, c_m]; z: [*, i, j, c_z]; mask: [*, i, j], the mask of z (1: i reads from j; if it is 0 for all j, all
    have the same weight). All rows share the weights w, [*, h, i, j].
    """

    axis = ROWS
    shares = mask_of = "other"

    def __init__(self, c_m: int, c_z: int, heads: int = 8, head_width: int = 32) -> None:
        super().__init__()
        self.norm = LayerNorm(c_m)
        self.norm_z = LayerNorm(c_z)
        self.bias = Linear(c_z, heads, bias=False)
        self.gate = Linear(c_m, heads * head_width, bias=False, init="gating")
        self.v = Linear(c_m, heads * head_width, bias=False, init="glorot")
        self.out = Linear(heads * head_width, c_m, bias=False, init="final")

    def join_axis(self, cut: int) -> int:
        # w has no channels, and its heads are in front: axis -3 of z (i) is axis -2 of w.
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
        """Compute x + factors * the average of the values of each row, gated and projected."""
        assert isinstance(read, Tensor)
        assert shared is not None
        g, v = project(read, self.norm, *self.projections)
        values = v.unflatten(-1, (shared[0].shape[-3], -1))
        o = torch.einsum("...hij,...sjhd->...sihd", shared[0], values).flatten(-2)
        if x is None:
            return self.out(gate(o, g))
        return gated_linear_residual(x, o, g, *joined(o.dtype, self.out), factors)
