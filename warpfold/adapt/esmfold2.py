"""EsmFold2 of Hugging Face's transformers: the layers of its pair stack.  Source: their classes' names and formulas.

There are no biases but in norms, whose parameters stay in fp32.  For incoming products their left factor is our b.
"""

from typing import Any

import torch
from torch import Tensor, nn

from warpfold.adapt.adapter import Adapter, LinearOf, NormOf, NotServed, RandomInputs, made_of
from warpfold.model.attention import Transition
from warpfold.model.axial import COLS, ROWS
from warpfold.model.execution import Executable
from warpfold.model.msa import OuterProductMean
from warpfold.model.pair import TriangleMultiplication
from warpfold.model.pair_bias import PairWeightedAveraging

MODELING = "transformers.models.esmfold2.modeling_esmfold2"


class EsmFold2Layer(Adapter):
    """What their layers have in common: the parameters of norms are in fp32 whatever the others are."""

    def cast(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        module.to(dtype)
        for part in module.modules():
            if type(part).__name__ == "EsmFold2LayerNorm":
                part.float()
        return module


class EsmFold2TriangleMultiplication(EsmFold2Layer):
    """Triangle multiplication; one projection makes left, right and their gates.  Chunks change nothing."""

    serves = (f"{MODELING}:EsmFold2TriangleMultiplicativeUpdate",)
    signature = "(self, pair_grid, visibility=None)"
    operation = "triangle_multiplication"

    def build(self, module: Any) -> Executable:
        """Return ours, with left and right exchanged where it is incoming."""
        outgoing, c = module.flow == "outgoing", module.dim
        left, right, left_gate, right_gate = (LinearOf(module.proj_bundle, slice(i * c, (i + 1) * c)) for i in range(4))
        a, b = ((left, left_gate), (right, right_gate)) if outgoing else ((right, right_gate), (left, left_gate))
        return made_of(
            TriangleMultiplication,
            outgoing=outgoing,
            fused=False,
            channels=c,
            axis=ROWS if outgoing else COLS,
            norm=NormOf(module.norm_start),
            norm_out=NormOf(module.norm_mix),
            out=LinearOf(module.proj_emit),
            gate=LinearOf(module.proj_gate),
            a=a[0],
            a_gate=a[1],
            b=b[0],
            b_gate=b[1],
        )

    def forward(self, layer: Any, pair_grid: Tensor, visibility: Tensor | None = None) -> Tensor:
        x = pair_grid
        return self.update(layer, x, x.new_ones(x.shape[:-1]) if visibility is None else visibility.to(x.dtype))

    def example(self, module: Any, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = random(2, n, n, module.dim).to(module.proj_bundle.weight.dtype)
        return (x,), {"visibility": random.mask(2, n, n).bool()}


class EsmFold2Transition(EsmFold2Layer):
    """The SwiGLU transition of pairs and of an alignment, which adds x."""

    serves = (f"{MODELING}:EsmFold2Transition",)
    signature = "(self, hidden_states)"
    operation = "transition"

    def build(self, module: Any) -> Executable:
        if (name := type(module.mlp.activation_fn).__name__) not in ("SiLU", "SiLUActivation"):
            raise NotServed(f"a perceptron with {name}")
        up, down = LinearOf(module.mlp.gate_up_proj), LinearOf(module.mlp.down_proj)
        return made_of(Transition, activation="swiglu", norm=NormOf(module.norm), up=up, down=down)

    def forward(self, layer: Any, hidden_states: Tensor) -> Tensor:
        return self.renew(layer, hidden_states, hidden_states[..., 0])

    def example(self, module: Any, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        weight = module.mlp.gate_up_proj.weight
        return (random(2, n, 5, weight.shape[1]).to(weight.dtype),), {}


class EsmFold2OuterProduct(EsmFold2Layer):
    """The outer product mean of an alignment [b, r, s, c]; its bias is divided too, by the count of sequences or 1."""

    serves = (f"{MODELING}:EsmFold2OuterProductMean",)
    signature = "(self, msa_states, msa_attention_mask)"
    operation = "outer_product"

    def build(self, module: Any) -> Executable:
        """Return ours, which divides by the count of sequences, 1 at least."""
        c = module.outer_hidden_size
        return made_of(
            OuterProductMean,
            count_added=0.0,
            count_least=1.0,
            norm=NormOf(module.norm),
            a=LinearOf(module.input_proj, slice(0, c)),
            b=LinearOf(module.input_proj, slice(c, 2 * c)),
            out=LinearOf(module.output_proj),
        )

    def forward(self, layer: Any, msa_states: Tensor, msa_attention_mask: Tensor) -> Tensor:
        batch, n = msa_states.shape[:2]
        z = msa_states.new_empty(()).expand(batch, n, n, len(layer.out.weight))  # of this shape; nothing reads it
        return self.update(layer, z, msa_attention_mask.mT.to(z.dtype), msa_states.transpose(1, 2))

    def example(self, module: Any, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        m = random(2, n, 5, module.hidden_size).to(module.input_proj.weight.dtype)
        return (m, random.mask(2, n, 5)), {}


class EsmFold2PairWeightedAveraging(EsmFold2Layer):
    """Each sequence of an alignment [b, r, s, c] averaged over residues, with weights from z."""

    serves = (f"{MODELING}:EsmFold2MSAPairWeightedAveraging",)
    signature = "(self, msa_states, pair_states, pair_attention_mask)"
    operation = "pair_weighted_averaging"

    def build(self, module: Any) -> Executable:
        v, gate, bias, out = (LinearOf(getattr(module, f"{name}_proj")) for name in ("v", "gate", "bias", "o"))
        norm, norm_z = NormOf(module.norm_single), NormOf(module.bias_norm)
        return made_of(PairWeightedAveraging, norm=norm, norm_z=norm_z, v=v, gate=gate, bias=bias, out=out)

    def forward(self, layer: Any, msa_states: Tensor, pair_states: Tensor, pair_attention_mask: Tensor) -> Tensor:
        update = self.update(layer, msa_states.transpose(1, 2), pair_attention_mask, pair_states)
        return update.transpose(1, 2)

    def example(self, module: Any, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        weights = module.v_proj.weight, module.bias_proj.weight
        m, z = random(2, n, 5, weights[0].shape[1]), random(2, n, n, weights[1].shape[1])
        return (m.to(weights[0].dtype), z.to(weights[0].dtype), random.mask(2, n, n).bool()), {}
