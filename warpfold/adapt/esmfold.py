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

    def forward(self, layer: Any, *_: Any, **given: Any) -> Any:
        """Compute the update; rows `chunk_size` at a time, but for a gradient: theirs then keeps all."""
        if given.get("use_memory_efficient_kernel") and given.get("use_lma"):
            raise NotServed("two algorithms are asked for at once")
        if torch.is_grad_enabled() and given["x"].requires_grad:
            given["chunk_size"] = None
        return super().forward(layer, **given)

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        return super().compute(layer, x, None if mask is None else mask == 1, rows=rows)

    def drawn(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        found = super().drawn(module, n, random)
        # In no row all zeros, and in no column: what such a row is, differs.
        found["mask"].diagonal(dim1=-2, dim2=-1).fill_(1)
        return found


class EsmFoldTriangleMultiplication(TriangleProductAdapter):
    """Also the way that writes over z (`inplace_safe`)."""

    serves = (f"{MODELING}:EsmFoldTriangleMultiplicativeUpdate",)
    signature = "(self, z, mask=None, inplace_safe=False, _add_with_inplace=False, _inplace_chunk_size=256)"

    takes = "x=z mask"

    def forward(self, layer: Any, *_: Any, **given: Any) -> Any:
        """Compute the update, or z itself with the update in it or in its place."""
        z = given["z"]
        if not given.get("inplace_safe"):
            refuse_fp16(z)
        elif torch.is_grad_enabled() and z.requires_grad:
            raise NotServed("z is written over, but wants a gradient")
        elif given.get("_inplace_chunk_size", 256) is None:
            raise NotServed("z is written over without a chunk size")
        new = super().forward(layer, **given)
        return z.copy_(new) if given.get("inplace_safe") and new is not z else new


class EsmFoldResidueMLP(TransitionAdapter):
    """The transition of sequence and pairs, which adds x; dropout is theirs."""

    serves = (f"{MODELING}:EsmFoldResidueMLP",)
    signature = "(self, x)"
    names = "norm=mlp.0 up=mlp.1 down=mlp.3"
    adds = True

    def check(self, module: Any) -> None:
        if not isinstance(activation := module.mlp[2], nn.ReLU):
            raise NotServed(f"a perceptron with {type(activation).__name__}")

    def layer(self, module: Any, parts: Parts) -> Parts:
        return {**super().layer(module, parts), "dropout": (module.mlp[4],)}  # no part of ours

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        (dropout,) = layer.dropout
        if dropout.training and dropout.p:
            return x + dropout(self.update(layer, x, x[..., 0]))
        return super().compute(layer, x)


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
    takes = "x=pairwise_state"

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        return layer(cast_by_autocast(x))

    def drawn(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        return {"x": random(2, n, n, module.linear.weight.shape[1])}


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
    takes = "x=sequence_state"

    def layer(self, module: Any, parts: Parts) -> Parts:
        """Complete the parts with the two halves of the inputs of the last projection."""
        half = module.o_proj.weight.shape[1] // 2
        halves = {"of_products": slice(0, half), "of_differences": slice(half, None)}
        return parts | {name: ColumnsOf(module.o_proj, inputs) for name, inputs in halves.items()}

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        return layer(cast_by_autocast(x))

    def drawn(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        return {"x": random(2, n, module.proj.weight.shape[1])}


class ColumnsOf(LinearOf):
    """Some of the inputs of a linear layer that is another model's."""

    def __init__(self, module: nn.Module, inputs: slice) -> None:
        super().__init__(module)
        self.inputs = inputs

    @property
    def weight(self) -> Tensor:
        """The weight [o, inputs]."""
        return super().weight[:, self.inputs]


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
    takes = "x=pair_grid mask=visibility"

    def outgoing(self, module: Any) -> bool:
        return bool(module.flow == "outgoing")

    def drawn(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        found = super().drawn(module, n, random)
        return found | {"mask": found["mask"].bool()}


class EsmFold2Transition(EsmFold2Layer, SwigluAdapter):
    """Serve transitions of pairs and of an alignment; theirs adds x."""

    serves = (f"{MODELING2}:EsmFold2Transition",)
    signature = "(self, hidden_states)"
    names = "norm=norm up=mlp.gate_up_proj down=mlp.down_proj"
    takes = "x=hidden_states"
    adds = True

    def check(self, module: Any) -> None:
        if (name := type(module.mlp.activation_fn).__name__) not in ("SiLU", "SiLUActivation"):
            raise NotServed(f"a perceptron with {name}")


class EsmFold2OuterProduct(EsmFold2Layer, OuterProductAdapter):
    """Serve an alignment [b, r, s, c]; the bias is divided too, by the count of sequences or 1."""

    serves = (f"{MODELING2}:EsmFold2OuterProductMean",)
    signature = "(self, msa_states, msa_attention_mask)"
    names = "norm=norm a,b=input_proj out=output_proj"
    settings: ClassVar = {"count_added": 0.0, "count_least": 1.0}

    takes = "x=msa_states mask=msa_attention_mask"

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        return super().compute(layer, x.transpose(1, 2), None if mask is None else mask.mT)

    def drawn(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        found = super().drawn(module, n, random)
        return {"x": found["x"].transpose(1, 2), "mask": found["mask"].mT}


class EsmFold2PairWeightedAveraging(EsmFold2Layer, PairWeightedAveragingAdapter):
    """Serve an alignment [b, r, s, c]."""

    serves = (f"{MODELING2}:EsmFold2MSAPairWeightedAveraging",)
    signature = "(self, msa_states, pair_states, pair_attention_mask)"
    names = "norm=norm_single norm_z=bias_norm bias=bias_proj v=v_proj gate=gate_proj out=o_proj"

    takes = "x=msa_states other=pair_states mask=pair_attention_mask"

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        return super().compute(layer, x.transpose(1, 2), mask, other).transpose(1, 2)

    def drawn(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        found = super().drawn(module, n, random)
        return found | {"x": found["x"].transpose(1, 2), "mask": found["mask"].bool()}
