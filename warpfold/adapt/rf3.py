"""RoseTTAFold3 (rc-foundry 0.2.0, its package rf3): the layers of its Pairformer and MSA module.

Differences from AlphaFold2: there are no masks. The bias of the ending node comes from z, not transposed. A triangle
product is divided by the number of residues before its norm, and an outer product by the number of sequences, without
its bias. Transitions are SwiGLU. Most layers are checkpointed, so they save only their inputs for the backward pass,
and ours do the same. With cuEquivariance their own code does not divide the triangle product, so that eps of the norm
has a different effect than here.
"""

from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from warpfold.adapt.adapter import Adapter, NotServed, RandomInputs
from warpfold.adapt.kinds import (
    LEAST,
    AttentionPairBiasAdapter,
    Example,
    OuterProductAdapter,
    PairWeightedAveragingAdapter,
    Parts,
    SwigluAdapter,
    TriangleAttentionAdapter,
    TriangleProductAdapter,
)
from warpfold.model.axial import AxialUpdate

LAYERS = "rf3.model.layers"


class RF3Layer(Adapter):
    """Base of their layers. Comparisons disable their switches to kernels that exist in bf16 only."""

    compared_with: ClassVar = {"use_cuequivariance": False, "force_bfloat16": False}
    least = LEAST


class Checkpointed(RF3Layer):
    """Base of layers that save only their inputs and are recomputed in the backward pass."""

    @classmethod
    def update(cls, layer: AxialUpdate, *args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return super().update(layer, *args, **kwargs)
        compute = super().update
        return cast(Tensor, checkpoint(compute, layer, *args, use_reentrant=False, preserve_rng_state=False, **kwargs))


class RF3TriangleProduct(RF3Layer, TriangleProductAdapter):
    """A product divided by the number of residues n. A mask of 1 / sqrt(n) divides each factor."""

    serves = (f"{LAYERS}.attention:TriangleMultiplication",)
    signature = "(self, pair)"
    takes = "x=pair"
    names = "norm=norm_in a,b=p_in a_gate,b_gate=g_in gate=g_out norm_out=norm_out out=p_out"

    def outgoing(self, module: Any) -> bool:
        return bool(module.direction == "outgoing")

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        return self.update(layer, x, x.new_full(x.shape[:-1], x.shape[-2] ** -0.5))


class RF3TriangleAttention(Checkpointed, TriangleAttentionAdapter):
    """The bias of the ending node comes from z, not transposed."""

    serves = (f"{LAYERS}.attention:TriangleAttention",)
    signature = "(self, pair)"
    takes = "x=pair"
    names = "norm=norm bias=to_b heads=h q=to_q k=to_k v=to_v gate=to_g out=to_out"

    def starting(self, module: Any) -> bool:
        return bool(module.start_node)

    def layer(self, module: Any, parts: Parts) -> Parts:
        return {**super().layer(module, parts), "bias_transposed": not self.starting(module)}


class RF3Transition(Checkpointed, SwigluAdapter):
    """A SwiGLU without biases."""

    serves = (f"{LAYERS}.layer_utils:Transition",)
    signature = "(self, X)"
    takes = "x=X"
    names = "norm=layer_norm_1 up=linear_1,linear_2 down=linear_3"


class RF3OuterProduct(Checkpointed, OuterProductAdapter):
    """The count is the number of all sequences, and the bias is added after the division."""

    serves = (f"{LAYERS}.outer_product:OuterProductMean_AF3",)
    signature = "(self, msa)"
    takes = "x=msa"
    names = "norm=norm a=proj_left b=proj_right out=proj_out"
    settings: ClassVar = {"count_added": 0.0, "bias_divided": False}


class RF3PairWeightedAveraging(Checkpointed, PairWeightedAveragingAdapter):
    """Pair-weighted averaging of an alignment [s, r, c] with a gate for each channel."""

    serves = ("rf3.model.RF3_blocks:MSAPairWeightedAverage",)
    signature = "(self, msa_SI, pair_II)"
    takes = "x=msa_SI other=pair_II"
    names = "norm=norm_msa norm_z=norm_pair bias=to_bias v=to_v gate=to_gate out=to_out"
    batch = ()

    def check(self, module: Any) -> None:
        if not module.separate_gate_for_every_channel:
            raise NotServed("a gate for each head")


class RF3AttentionPairBias(RF3Layer, AttentionPairBiasAdapter):
    """The Pairformer's attention, whose own code casts to bf16 and needs parameters in bf16, or autocast to bf16."""

    serves = (f"{LAYERS}.pairformer_layers:AttentionPairBiasPairformerDeepspeed",)
    signature = "(self, A_I, S_I, Z_II, Beta_II=None)"
    names = "norm=ln_1 norm_z=ln_0 bias=to_b heads=n_head q=to_q k=to_k v=to_v gate=to_g.0 out=to_a"
    batch = ()

    takes = "x=A_I other=Z_II"
    refuses: ClassVar = {"S_I": "a conditioned attention"}

    def forward(self, layer: Any, *_: Any, **given: Any) -> Any:
        """Compute the update.

        A single number as Beta_II shifts all logits equally and is ignored. Raises NotServed for any other Beta_II.
        """
        if given.get("Beta_II") is None or given["Beta_II"].numel() != 1:
            raise NotServed("a bias beside that of z")
        return super().forward(layer, **given)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        args, kwargs = super().example(module, n, random)
        return args, {**kwargs, "S_I": None, "Beta_II": kwargs["A_I"].new_full((1,), 0.5)}
