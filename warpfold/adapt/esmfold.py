"""EsmFold and EsmFold2 of Hugging Face's transformers: layers of their trunks.

Source: their classes' names and formulas.

Masks are ones and zeros of any dtype; a pair that is masked is attended by nobody.  For incoming products their a is
our b: x_ij = sum_k a_ki b_kj.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from warpfold.adapt.adapter import Adapter, LinearOf, NotServed, RandomInputs, cast_by_autocast
from warpfold.adapt.kinds import (
    Example,
    LayerAdapter,
    OuterProductAdapter,
    PairWeightedAveragingAdapter,
    Parts,
    SwigluAdapter,
    TransitionAdapter,
    TriangleAttentionAdapter,
    TriangleProductAdapter,
    refuse_fp16,
)
from warpfold.model.axial import Executable
from warpfold.model.layers import project

MODELING = "transformers.models.esm.modeling_esmfold"
MASKED = 1e6  # what theirs subtracts from the logits of masked keys is more than this, so that they have no weight


class EsmFoldTriangleAttention(TriangleAttentionAdapter):
    """The bias of the ending node is of z transposed."""

    serves = (f"{MODELING}:EsmFoldTriangleAttention",)
    signature = (
        "(self, x, mask=None, chunk_size=None, use_memory_efficient_kernel=False, use_lma=False, inplace_safe=False)"
    )

    def check(self, module: Any) -> None:
        if module.inf < MASKED:
            raise NotServed(f"inf = {module.inf:g}, which leaves masked keys some weight")

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
        return super().forward(layer, x, None if mask is None else mask == 1, rows)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        (x, mask), named = super().example(module, n, random)
        mask.diagonal(dim1=-2, dim2=-1).fill_(1)  # in no row all zeros, and in no column: what such a row is, differs
        return (x, mask), named


class EsmFoldTriangleMultiplication(TriangleProductAdapter):
    """Also the way that writes over z (`inplace_safe`)."""

    serves = (f"{MODELING}:EsmFoldTriangleMultiplicativeUpdate",)
    signature = "(self, z, mask=None, inplace_safe=False, _add_with_inplace=False, _inplace_chunk_size=256)"

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
        if not inplace_safe:
            refuse_fp16(z)
        elif torch.is_grad_enabled() and z.requires_grad:
            raise NotServed("z is written over, but wants a gradient")
        elif _inplace_chunk_size is None:
            raise NotServed("z is written over without a chunk size")
        dz: Tensor = super().forward(layer, z, mask)
        if not inplace_safe:
            return dz
        return z.add_(dz) if _add_with_inplace else z.copy_(dz)


class EsmFoldResidueMLP(TransitionAdapter):
    """The transition of sequence and pairs, which adds x; dropout is theirs."""

    serves = (f"{MODELING}:EsmFoldResidueMLP",)
    signature = "(self, x)"
    names = "norm=mlp.0 up=mlp.1 down=mlp.3"

    def check(self, module: Any) -> None:
        if not isinstance(activation := module.mlp[2], nn.ReLU):
            raise NotServed(f"a perceptron with {type(activation).__name__}")

    def layer(self, module: Any, parts: Parts) -> Parts:
        return {**super().layer(module, parts), "dropout": (module.mlp[4],)}  # no part of ours

    def forward(self, layer: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
        (dropout,) = layer.dropout
        if dropout.training and dropout.p:
            new: Tensor = x + dropout(super().forward(layer, x))
            return new
        return self.renew(layer, x, x[..., 0])


class NormedLinear(Executable):
    """A projection of a normalised tensor, which is not kept."""

    norm: Any
    linear: Any

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.norm, self.linear)[0]


class EsmFoldPairToSequence(LayerAdapter):
    """The bias of the sequence's attention."""

    serves = (f"{MODELING}:EsmFoldPairToSequence",)
    signature = "(self, pairwise_state)"
    operation = "norm_linear"
    kind = NormedLinear
    names = "norm=layernorm linear=linear"

    def forward(self, layer: Any, pairwise_state: Tensor) -> Tensor:
        bias: Tensor = layer(cast_by_autocast(pairwise_state))
        return bias

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
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
        q, k = project(s, self.norm, self.proj)[0].chunk(2, -1)
        products, differences = (part.weight.to(q.dtype) for part in (self.of_products, self.of_differences))
        bias = self.of_products.bias.to(q.dtype) - k @ differences.t()  # [b, i, c]
        if k.shape[1] < len(products):  # the products are fewer numbers than the matrices
            pairs = nn.functional.linear(q[:, None] * k[:, :, None], products)
            return pairs.add_(bias[:, :, None]).add_((q @ differences.t())[:, None])
        matrices = (k[..., None, :] * products + differences).flatten(0, 1)  # [b i, c, h]
        rows = q[:, None].expand(-1, k.shape[1], -1, -1).flatten(0, 1)  # [b i, j, h]
        pairs = torch.baddbmm(bias.flatten(0, 1)[:, None], rows, matrices.mT)
        return pairs.unflatten(0, k.shape[:2])


class EsmFoldSequenceToPair(LayerAdapter):
    """What the sequence adds to the pairs."""

    serves = (f"{MODELING}:EsmFoldSequenceToPair",)
    signature = "(self, sequence_state)"
    operation = "pairs_of_sequence"
    kind = PairsOfSequence
    names = "norm=layernorm proj=proj"

    def layer(self, module: Any, parts: Parts) -> Parts:
        return parts | halves(module)

    def forward(self, layer: Any, sequence_state: Tensor) -> Tensor:
        pairs: Tensor = layer(cast_by_autocast(sequence_state))
        return pairs

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
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


# EsmFold2: there are no biases but in norms, whose parameters stay in fp32.  Chunks change nothing.

MODELING2 = "transformers.models.esmfold2.modeling_esmfold2"


class EsmFold2Layer(Adapter):
    """What their layers have in common: the parameters of norms are in fp32 whatever the others are."""

    def cast(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        module.to(dtype)
        for part in module.modules():
            if type(part).__name__ == "EsmFold2LayerNorm":
                part.float()
        return module


class EsmFold2TriangleMultiplication(EsmFold2Layer, TriangleProductAdapter):
    """One projection makes both factors and their gates."""

    serves = (f"{MODELING2}:EsmFold2TriangleMultiplicativeUpdate",)
    signature = "(self, pair_grid, visibility=None)"
    names = "norm=norm_start a,b,a_gate,b_gate=proj_bundle gate=proj_gate norm_out=norm_mix out=proj_emit"

    def outgoing(self, module: Any) -> bool:
        return bool(module.flow == "outgoing")

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        (z, mask), _ = super().example(module, n, random)
        return (z,), {"visibility": mask.bool()}


class EsmFold2Transition(EsmFold2Layer, SwigluAdapter):
    """Serve transitions of pairs and of an alignment; theirs adds x."""

    serves = (f"{MODELING2}:EsmFold2Transition",)
    signature = "(self, hidden_states)"
    names = "norm=norm up=mlp.gate_up_proj down=mlp.down_proj"

    def check(self, module: Any) -> None:
        if (name := type(module.mlp.activation_fn).__name__) not in ("SiLU", "SiLUActivation"):
            raise NotServed(f"a perceptron with {name}")

    def forward(self, layer: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.renew(layer, x, x[..., 0])


class EsmFold2OuterProduct(EsmFold2Layer, OuterProductAdapter):
    """Serve an alignment [b, r, s, c]; the bias is divided too, by the count of sequences or 1."""

    serves = (f"{MODELING2}:EsmFold2OuterProductMean",)
    signature = "(self, msa_states, msa_attention_mask)"
    names = "norm=norm a,b=input_proj out=output_proj"
    settings: ClassVar = {"count_added": 0.0, "count_least": 1.0}

    def forward(  # type: ignore[override]  # its class has another signature
        self, layer: Any, msa_states: Tensor, msa_attention_mask: Tensor
    ) -> Tensor:
        return super().forward(layer, msa_states.transpose(1, 2), msa_attention_mask.mT)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        (m, mask), _ = super().example(module, n, random)
        return (m.transpose(1, 2), mask.mT), {}


class EsmFold2PairWeightedAveraging(EsmFold2Layer, PairWeightedAveragingAdapter):
    """Serve an alignment [b, r, s, c]."""

    serves = (f"{MODELING2}:EsmFold2MSAPairWeightedAveraging",)
    signature = "(self, msa_states, pair_states, pair_attention_mask)"
    names = "norm=norm_single norm_z=bias_norm bias=bias_proj v=v_proj gate=gate_proj out=o_proj"

    def forward(self, layer: Any, m: Tensor, z: Tensor, mask: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        return super().forward(layer, m.transpose(1, 2), z, mask).transpose(1, 2)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        (m, z, mask), _ = super().example(module, n, random)
        return (m.transpose(1, 2), z, mask.bool()), {}
