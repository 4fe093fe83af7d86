"""EsmFold2 of Hugging Face's transformers: the layers of its pair stack.  Source: their classes' names and formulas.

There are no biases but in norms, whose parameters stay in fp32.  Chunks change nothing.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from warpfold.adapt.adapter import Adapter, NotServed, RandomInputs
from warpfold.adapt.kinds import (
    Example,
    OuterProductAdapter,
    PairWeightedAveragingAdapter,
    SwigluAdapter,
    TriangleProductAdapter,
)

MODELING = "transformers.models.esmfold2.modeling_esmfold2"


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

    serves = (f"{MODELING}:EsmFold2TriangleMultiplicativeUpdate",)
    signature = "(self, pair_grid, visibility=None)"
    names = "norm=norm_start a,b,a_gate,b_gate=proj_bundle gate=proj_gate norm_out=norm_mix out=proj_emit"

    def outgoing(self, module: Any) -> bool:
        return bool(module.flow == "outgoing")

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        (z, mask), _ = super().example(module, n, random)
        return (z,), {"visibility": mask.bool()}


class EsmFold2Transition(EsmFold2Layer, SwigluAdapter):
    """Serve transitions of pairs and of an alignment; theirs adds x."""

    serves = (f"{MODELING}:EsmFold2Transition",)
    signature = "(self, hidden_states)"
    names = "norm=norm up=mlp.gate_up_proj down=mlp.down_proj"

    def check(self, module: Any) -> None:
        if (name := type(module.mlp.activation_fn).__name__) not in ("SiLU", "SiLUActivation"):
            raise NotServed(f"a perceptron with {name}")

    def forward(self, layer: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.renew(layer, x, x[..., 0])


class EsmFold2OuterProduct(EsmFold2Layer, OuterProductAdapter):
    """Serve an alignment [b, r, s, c]; the bias is divided too, by the count of sequences or 1."""

    serves = (f"{MODELING}:EsmFold2OuterProductMean",)
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

    serves = (f"{MODELING}:EsmFold2MSAPairWeightedAveraging",)
    signature = "(self, msa_states, pair_states, pair_attention_mask)"
    names = "norm=norm_single norm_z=bias_norm bias=bias_proj v=v_proj gate=gate_proj out=o_proj"

    def forward(self, layer: Any, m: Tensor, z: Tensor, mask: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        return super().forward(layer, m.transpose(1, 2), z, mask).transpose(1, 2)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        (m, z, mask), _ = super().example(module, n, random)
        return (m.transpose(1, 2), z, mask.bool()), {}
