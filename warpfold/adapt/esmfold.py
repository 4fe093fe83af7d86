"""EsmFold of Hugging Face's transformers: the layers of its trunk.  Source: their classes' names and formulas.

Masks are ones and zeros of any dtype; a pair that is masked is attended by nobody.  For incoming products their a is
our b: x_ij = sum_k a_ki b_kj.
"""

from typing import Any

import torch
from torch import Tensor, nn

from warpfold.adapt.adapter import (
    Adapter,
    AttentionOf,
    LinearOf,
    NormOf,
    NotServed,
    RandomInputs,
    cast_by_autocast,
    made_of,
)
from warpfold.model.attention import Transition
from warpfold.model.axial import COLS, ROWS
from warpfold.model.execution import Executable
from warpfold.model.layers import DeferredLayerNorm
from warpfold.model.pair import TriangleAttention, TriangleMultiplication

MASKED = 1e6  # what theirs subtracts from the logits of masked keys is more than this, so that they have no weight


def pair_mask(random: RandomInputs, *shape: int) -> Tensor:
    """Return a random mask [*, n, n] in which no row and no column is all zeros: what such a row is, differs."""
    mask = random.mask(*shape)
    mask.diagonal(dim1=-2, dim2=-1).fill_(1)
    return mask


class EsmFoldTriangleAttention(Adapter):
    """Triangle attention, starting and ending: the bias of an ending node's logits is of z transposed."""

    serves = ("transformers.models.esm.modeling_esmfold:EsmFoldTriangleAttention",)
    signature = (
        "(self, x, mask=None, chunk_size=None, use_memory_efficient_kernel=False, use_lma=False, inplace_safe=False)"
    )
    operation = "gated_attention"

    def build(self, module: Any) -> Executable:
        """Return ours, of the norm, the bias and the attention.  Errors: NotServed without a gate."""
        attention = module.mha
        if attention.linear_g is None:
            raise NotServed("attention without a gate")
        if module.inf < MASKED:
            raise NotServed(f"inf = {module.inf:g}, which leaves masked keys some weight")
        q, k, v, gate, out = (LinearOf(getattr(attention, f"linear_{name}")) for name in "qkvgo")
        axis = ROWS if module.starting else COLS
        return made_of(
            TriangleAttention,
            by_column=not module.starting,
            axis=axis,
            norm=NormOf(module.layer_norm),
            bias=LinearOf(module.linear),
            attention=AttentionOf(module.no_heads, q, k, v, gate, out),
        )

    def forward(
        self,
        layer: Any,
        x: Tensor,
        mask: Tensor | None = None,
        chunk_size: int | None = None,
        use_memory_efficient_kernel: bool = False,
        use_lma: bool = False,
        inplace_safe: bool = False,
    ) -> Tensor:
        """Return the update; rows are computed `chunk_size` at a time, but for a gradient: theirs then keeps all."""
        if use_memory_efficient_kernel and use_lma:
            raise NotServed("two algorithms are asked for at once")
        rows = None if torch.is_grad_enabled() and x.requires_grad else chunk_size
        return self.update(layer, x, ones(x) if mask is None else (mask == 1).to(x.dtype), rows=rows)

    def example(self, module: Any, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random(2, n, n, module.c_in), pair_mask(random, 2, n, n)), {}


class EsmFoldTriangleMultiplication(Adapter):
    """Triangle multiplication, outgoing and incoming; also the way that writes over z (`inplace_safe`)."""

    serves = ("transformers.models.esm.modeling_esmfold:EsmFoldTriangleMultiplicativeUpdate",)
    signature = "(self, z, mask=None, inplace_safe=False, _add_with_inplace=False, _inplace_chunk_size=256)"
    operation = "triangle_multiplication"

    def build(self, module: Any) -> Executable:
        """Return ours, with a and b exchanged where it is incoming."""
        outgoing = module._outgoing
        a, a_gate = LinearOf(module.linear_a_p), LinearOf(module.linear_a_g)
        b, b_gate = LinearOf(module.linear_b_p), LinearOf(module.linear_b_g)
        if not outgoing:
            a, a_gate, b, b_gate = b, b_gate, a, a_gate
        return made_of(
            TriangleMultiplication,
            outgoing=outgoing,
            fused=False,
            channels=len(module.linear_a_p.weight),
            axis=ROWS if outgoing else COLS,
            norm=NormOf(module.layer_norm_in),
            norm_out=NormOf(module.layer_norm_out),
            out=LinearOf(module.linear_z),
            gate=LinearOf(module.linear_g),
            a=a,
            a_gate=a_gate,
            b=b,
            b_gate=b_gate,
        )

    def forward(
        self,
        layer: Any,
        z: Tensor,
        mask: Tensor | None = None,
        inplace_safe: bool = False,
        _add_with_inplace: bool = False,
        _inplace_chunk_size: int | None = 256,
    ) -> Tensor:
        """Return the update, or z itself with the update in it or in its place."""
        half = torch.is_autocast_enabled(z.device.type) and torch.get_autocast_dtype(z.device.type) == torch.float16
        if half and not inplace_safe:
            raise NotServed("products in fp32 under an autocast to fp16")
        if inplace_safe and torch.is_grad_enabled() and z.requires_grad:
            raise NotServed("z is written over, but wants a gradient")
        if inplace_safe and _inplace_chunk_size is None:
            raise NotServed("z is written over without a chunk size")
        dz = self.update(layer, z, ones(z) if mask is None else mask.to(z.dtype))
        if not inplace_safe:
            return dz
        return z.add_(dz) if _add_with_inplace else z.copy_(dz)

    def example(self, module: Any, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random(2, n, n, module.linear_g.weight.shape[1]), random.mask(2, n, n)), {}


class EsmFoldResidueMLP(Adapter):
    """The transition of sequence and pairs, which adds x; dropout is theirs."""

    serves = ("transformers.models.esm.modeling_esmfold:EsmFoldResidueMLP",)
    signature = "(self, x)"
    operation = "transition"

    def build(self, module: Any) -> Executable:
        norm, up, activation, down, dropout = module.mlp
        if not isinstance(activation, nn.ReLU):
            raise NotServed(f"a perceptron with {type(activation).__name__}")
        parts = {"norm": NormOf(norm), "up": LinearOf(up), "down": LinearOf(down)}
        return made_of(Transition, activation="relu", dropout=(dropout,), **parts)

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        (dropout,), mask = layer.dropout, x[..., 0]
        if dropout.training and dropout.p:
            new: Tensor = x + dropout(self.update(layer, x, mask))
            return new
        return self.renew(layer, x, mask)

    def example(self, module: Any, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random(2, n, n, module.mlp[1].weight.shape[1]),), {}


class NormedLinear(Executable):
    """A projection of a normalised tensor, which is not kept."""

    norm: Any
    linear: Any

    def forward(self, x: Tensor) -> Tensor:
        return DeferredLayerNorm(x, self.norm).project(self.linear)[0]


class EsmFoldPairToSequence(Adapter):
    """The bias of the sequence's attention."""

    serves = ("transformers.models.esm.modeling_esmfold:EsmFoldPairToSequence",)
    signature = "(self, pairwise_state)"
    operation = "norm_linear"

    def build(self, module: Any) -> Executable:
        return made_of(NormedLinear, norm=NormOf(module.layernorm), linear=LinearOf(module.linear))

    def forward(self, layer: Any, pairwise_state: Tensor) -> Tensor:
        bias: Tensor = layer(cast_by_autocast(pairwise_state))
        return bias

    def example(self, module: Any, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random(2, n, n, module.linear.weight.shape[1]),), {}


class PairsOfSequence(Executable):
    """A linear layer of products and differences of two vectors, for each pair (i, j): of q_j k_i and q_j - k_i.

    Of differences it is a difference of linear layers of residues.  All of it is linear in q, so it is also q_j times
    a matrix of residue i: of many residues neither products nor differences are made.
    """

    norm: Any
    proj: Any
    of_products: Any
    of_differences: Any

    def forward(self, s: Tensor) -> Tensor:
        """Return [b, i, j, c] of s [b, r, c_s]."""
        q, k = DeferredLayerNorm(s, self.norm).project(self.proj)[0].chunk(2, -1)
        products, differences = (part.weight.to(q.dtype) for part in (self.of_products, self.of_differences))
        bias = self.of_products.bias.to(q.dtype) - k @ differences.t()  # [b, i, c]
        if k.shape[1] < len(products):  # the products are fewer numbers than the matrices
            pairs = nn.functional.linear(q[:, None] * k[:, :, None], products)
            return pairs.add_(bias[:, :, None]).add_((q @ differences.t())[:, None])
        matrices = (k[..., None, :] * products + differences).flatten(0, 1)  # [b i, c, h]
        rows = q[:, None].expand(-1, k.shape[1], -1, -1).flatten(0, 1)  # [b i, j, h]
        pairs = torch.baddbmm(bias.flatten(0, 1)[:, None], rows, matrices.mT)
        return pairs.unflatten(0, k.shape[:2])


class EsmFoldSequenceToPair(Adapter):
    """What the sequence adds to the pairs."""

    serves = ("transformers.models.esm.modeling_esmfold:EsmFoldSequenceToPair",)
    signature = "(self, sequence_state)"
    operation = "pairs_of_sequence"

    def build(self, module: Any) -> Executable:
        return made_of(PairsOfSequence, norm=NormOf(module.layernorm), proj=LinearOf(module.proj), **halves(module))

    def forward(self, layer: Any, sequence_state: Tensor) -> Tensor:
        pairs: Tensor = layer(cast_by_autocast(sequence_state))
        return pairs

    def example(self, module: Any, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random(2, n, module.proj.weight.shape[1]),), {}


class ColumnsOf(LinearOf):
    """Some of the inputs of a linear layer that is another model's."""

    def __init__(self, module: nn.Module, inputs: slice) -> None:
        super().__init__(module)
        self.inputs = inputs

    @property
    def weight(self) -> Tensor:
        """The weight [o, inputs]."""
        return super().weight[:, self.inputs]


def halves(module: Any) -> dict[str, ColumnsOf]:
    """Return the two halves of the inputs of EsmFoldSequenceToPair's last projection."""
    half = module.o_proj.weight.shape[1] // 2
    first, second = slice(0, half), slice(half, None)
    return {"of_products": ColumnsOf(module.o_proj, first), "of_differences": ColumnsOf(module.o_proj, second)}


def ones(x: Tensor) -> Tensor:
    """Return a mask of x [*, c] that leaves nothing out."""
    return x.new_ones(x.shape[:-1])
