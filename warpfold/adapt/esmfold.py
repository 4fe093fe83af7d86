"""EsmFold and EsmFold2 of Hugging Face's transformers: layers of their trunks.

Source: the names and formulas of their classes. Masks are ones and zeros of any dtype, and no query attends to a masked
pair. In incoming products their a is our b: x_ij = sum_k a_ki b_kj (`TriangleProductAdapter.layer` exchanges them).
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from warpfold.adapt.adapter import Adapter, ForeignLinear, NotServed, RandomInputs, cast_by_autocast
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
# The smallest number that their code may subtract from the logits of masked keys, so that these have no weight.
MASKED = 1e6


class EsmFoldTriangleAttention(TriangleAttentionAdapter):
    """The bias of the ending node comes from z transposed."""

    serves = (f"{MODELING}:EsmFoldTriangleAttention",)
    signature = (
        "(self, x, mask=None, chunk_size=None, use_memory_efficient_kernel=False, use_lma=False, inplace_safe=False)"
    )

    def check(self, module: Any) -> None:
        if module.inf < MASKED:
            raise NotServed(f"inf = {module.inf:g}, which leaves masked keys some weight")

    def forward(self, layer: Any, *_: Any, **given: Any) -> Any:
        """Compute the update in slices of `chunk_size` rows; with a gradient all rows at once, like their code."""
        if given.get("use_memory_efficient_kernel") and given.get("use_lma"):
            raise NotServed("two algorithms are asked for at once")
        if torch.is_grad_enabled() and given["x"].requires_grad:
            given["chunk_size"] = None
        return super().forward(layer, **given)

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        return super().compute(layer, x, None if mask is None else mask == 1, rows=rows)

    def draw_inputs(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        drawn = super().draw_inputs(module, n, random)
        # No row or column may be fully masked, because the results for such rows differ.
        drawn["mask"].diagonal(dim1=-2, dim2=-1).fill_(1)
        return drawn


class EsmFoldTriangleMultiplication(TriangleProductAdapter):
    """Triangle products, including calls that overwrite z (`inplace_safe`)."""

    serves = (f"{MODELING}:EsmFoldTriangleMultiplicativeUpdate",)
    signature = "(self, z, mask=None, inplace_safe=False, _add_with_inplace=False, _inplace_chunk_size=256)"

    takes = "x=z mask"

    def forward(self, layer: Any, *_: Any, **given: Any) -> Any:
        """Compute the update, or write to z in place the update or z plus the update."""
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
    """The transition of sequence and pairs, which adds x. Their module applies dropout."""

    serves = (f"{MODELING}:EsmFoldResidueMLP",)
    signature = "(self, x)"
    names = "norm=mlp.0 up=mlp.1 down=mlp.3"
    adds = True

    def check(self, module: Any) -> None:
        if not isinstance(activation := module.mlp[2], nn.ReLU):
            raise NotServed(f"a perceptron with {type(activation).__name__}")

    def layer(self, module: Any, parts: Parts) -> Parts:
        # In a tuple, so that it does not become a submodule.
        return {**super().layer(module, parts), "dropout": (module.mlp[4],)}

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        (dropout,) = layer.dropout
        if dropout.training and dropout.p:
            return x + dropout(self.update(layer, x, x[..., 0]))
        return super().compute(layer, x)


class NormedLinear(Executable):
    """A projection of a normalised tensor, which is not saved."""

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

    def draw_inputs(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        return {"x": random(2, n, n, module.linear.weight.shape[1])}


class PairsOfSequence(Executable):
    """A linear layer of products q_j k_i and differences q_j - k_i, for each pair (i, j) of residues.

    The layer of the differences is the difference of two layers of residues. The sum is linear in q_j, so it is the
    product of q_j with a matrix of residue i. For many residues neither products nor differences are computed.
    """

    norm: Any
    proj: Any
    on_products: Any
    on_differences: Any

    def forward(self, s: Tensor) -> Tensor:
        """Compute [b, i, j, c] from s [b, r, c_s]."""
        q, k = project(s, self.norm, self.proj)[0].chunk(2, -1)
        products, differences = (linear.weight.to(q.dtype) for linear in (self.on_products, self.on_differences))
        # [b, i, c]
        bias = self.on_products.bias.to(q.dtype) - k @ differences.t()
        # For few residues the products are smaller than the matrices.
        if k.shape[1] < len(products):
            pairs = nn.functional.linear(q[:, None] * k[:, :, None], products)
            return pairs.add_(bias[:, :, None]).add_((q @ differences.t())[:, None])
        # [b i, c, h], and [b i, j, h].
        matrices = (k[..., None, :] * products + differences).flatten(0, 1)
        rows = q[:, None].expand(-1, k.shape[1], -1, -1).flatten(0, 1)
        pairs = torch.baddbmm(bias.flatten(0, 1)[:, None], rows, matrices.mT)
        return pairs.unflatten(0, k.shape[:2])


class InputSlice(ForeignLinear):
    """A linear layer of another model, restricted to some of its inputs."""

    def __init__(self, module: nn.Module, inputs: slice) -> None:
        super().__init__(module)
        self.inputs = inputs

    @property
    def weight(self) -> Tensor:
        """The weight [o, inputs]."""
        return super().weight[:, self.inputs]


class EsmFoldSequenceToPair(LayerAdapter):
    """The update of the pairs from the sequence."""

    serves = (f"{MODELING}:EsmFoldSequenceToPair",)
    signature = "(self, sequence_state)"
    operation = "pairs_of_sequence"
    kind = PairsOfSequence
    names = "norm=layernorm proj=proj"
    takes = "x=sequence_state"

    def layer(self, module: Any, parts: Parts) -> Parts:
        """Add the two halves of the inputs of the last projection to the parts."""
        half = module.o_proj.weight.shape[1] // 2
        halves = {"on_products": slice(0, half), "on_differences": slice(half, None)}
        return parts | {name: InputSlice(module.o_proj, inputs) for name, inputs in halves.items()}

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        return layer(cast_by_autocast(x))

    def draw_inputs(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        return {"x": random(2, n, module.proj.weight.shape[1])}


# EsmFold2: only norms have biases, and their parameters stay in fp32. Chunks do not change the results.

MODELING2 = "transformers.models.esmfold2.modeling_esmfold2"


class EsmFold2Layer(Adapter):
    """Base of the adapters for their layers, which keep the parameters of norms in fp32."""

    def cast(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        module.to(dtype)
        for part in module.modules():
            if type(part).__name__ == "EsmFold2LayerNorm":
                part.float()
        return module


class EsmFold2TriangleMultiplication(EsmFold2Layer, TriangleProductAdapter):
    """One projection computes both factors and their gates."""

    serves = (f"{MODELING2}:EsmFold2TriangleMultiplicativeUpdate",)
    signature = "(self, pair_grid, visibility=None)"
    names = "norm=norm_start a,b,a_gate,b_gate=proj_bundle gate=proj_gate norm_out=norm_mix out=proj_emit"
    takes = "x=pair_grid mask=visibility"

    def outgoing(self, module: Any) -> bool:
        return bool(module.flow == "outgoing")

    def draw_inputs(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        drawn = super().draw_inputs(module, n, random)
        return drawn | {"mask": drawn["mask"].bool()}


class EsmFold2Transition(EsmFold2Layer, SwigluAdapter):
    """Transitions of pairs and of alignments, which add x."""

    serves = (f"{MODELING2}:EsmFold2Transition",)
    signature = "(self, hidden_states)"
    names = "norm=norm up=mlp.gate_up_proj down=mlp.down_proj"
    takes = "x=hidden_states"
    adds = True

    def check(self, module: Any) -> None:
        if (name := type(module.mlp.activation_fn).__name__) not in ("SiLU", "SiLUActivation"):
            raise NotServed(f"a perceptron with {name}")


class EsmFold2OuterProduct(EsmFold2Layer, OuterProductAdapter):
    """The outer product of an alignment [b, r, s, c]. The bias is divided too, by the count of sequences or by 1."""

    serves = (f"{MODELING2}:EsmFold2OuterProductMean",)
    signature = "(self, msa_states, msa_attention_mask)"
    names = "norm=norm a,b=input_proj out=output_proj"
    settings: ClassVar = {"count_added": 0.0, "count_least": 1.0}

    takes = "x=msa_states mask=msa_attention_mask"

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        return super().compute(layer, x.transpose(1, 2), None if mask is None else mask.mT)

    def draw_inputs(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        drawn = super().draw_inputs(module, n, random)
        return {"x": drawn["x"].transpose(1, 2), "mask": drawn["mask"].mT}


class EsmFold2PairWeightedAveraging(EsmFold2Layer, PairWeightedAveragingAdapter):
    """Pair-weighted averaging of an alignment [b, r, s, c]."""

    serves = (f"{MODELING2}:EsmFold2MSAPairWeightedAveraging",)
    signature = "(self, msa_states, pair_states, pair_attention_mask)"
    names = "norm=norm_single norm_z=bias_norm bias=bias_proj v=v_proj gate=gate_proj out=o_proj"

    takes = "x=msa_states other=pair_states mask=pair_attention_mask"

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        return super().compute(layer, x.transpose(1, 2), mask, other).transpose(1, 2)

    def draw_inputs(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        drawn = super().draw_inputs(module, n, random)
        return drawn | {"x": drawn["x"].transpose(1, 2), "mask": drawn["mask"].bool()}
