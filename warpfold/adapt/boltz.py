"""Boltz and BoltzGen: the layers of their Pairformer and MSA module (boltz 2.2.1, boltzgen 0.3.2).

What differs from AlphaFold2: no biases but in norms, in the queries of `AttentionPairBias` and after the outer product;
both factors of a triangle product come from one projection; the transition is a SwiGLU; the outer product is divided by
its count, 1 at least, before it is projected.  `use_kernels` asks for cuEquivariance: a swapped layer computes by our
operations either way.  A `chunk_size` counts rows in attention; elsewhere channels, of which ours need no slices.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from warpfold.adapt.adapter import Adapter, NotServed, RandomInputs
from warpfold.adapt.kinds import (
    LEAST,
    AttentionPairBiasAdapter,
    Example,
    OuterProductAdapter,
    PairWeightedAveragingAdapter,
    SwigluAdapter,
    TriangleAttentionAdapter,
    TriangleProductAdapter,
    attention_names,
)


def _layers(name: str, in_boltzgen: str | None = None) -> tuple[str, ...]:
    """Return a class of both packages by its names: boltzgen has some in other modules."""
    return f"boltz.model.layers.{name}", f"boltzgen.model.layers.{in_boltzgen or name}"


class KeptInFp32(Adapter):
    """A layer whose own code multiplies in fp32, and wants parameters alike for what follows."""

    def cast(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        """Return the module as it is."""
        return module


class BoltzTriangleOutgoing(KeptInFp32, TriangleProductAdapter):
    """One projection makes a and b, another one their gates."""

    serves = _layers("triangular_mult:TriangleMultiplicationOutgoing", "triangular:TriangleMultiplicationOutgoing")
    signature = "(self, x, mask, use_kernels=False)"
    names = "norm=norm_in a,b=p_in a_gate,b_gate=g_in gate=g_out norm_out=norm_out out=p_out"
    least = LEAST

    def outgoing(self, module: Any) -> bool:
        return True


class BoltzTriangleIncoming(BoltzTriangleOutgoing):
    """The same."""

    serves = _layers("triangular_mult:TriangleMultiplicationIncoming", "triangular:TriangleMultiplicationIncoming")

    def outgoing(self, module: Any) -> bool:
        return False


class BoltzTriangleAttention(TriangleAttentionAdapter):
    """The bias of the ending node is of z transposed, as in AlphaFold2."""

    serves = _layers("triangular_attention.attention:TriangleAttention")
    signature = "(self, x, mask=None, chunk_size=None, use_kernels=False)"
    least = LEAST


class BoltzTransition(SwigluAdapter):
    """Without biases."""

    serves = _layers("transition:Transition")
    signature = "(self, x, chunk_size=None)"
    names = "norm=norm up=fc1,fc2 down=fc3"
    least = LEAST

    def check(self, module: Any) -> None:
        if module.fc3.out_features != module.fc1.in_features:
            raise NotServed("a transition to another number of channels")


class BoltzOuterProduct(OuterProductAdapter):
    """The bias is added after the division, by the count of sequences or 1."""

    serves = _layers("outer_product_mean:OuterProductMean")
    signature = "(self, m, mask, chunk_size=None)"
    names = "norm=norm a=proj_a b=proj_b out=proj_o"
    settings: ClassVar = {"count_added": 0.0, "count_least": 1.0, "bias_divided": False}
    least = LEAST

    def forward(self, layer: Any, m: Tensor, mask: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        return super().forward(layer, m, mask)


class BoltzPairWeightedAveraging(PairWeightedAveragingAdapter):
    """With the mask of z."""

    serves = _layers("pair_averaging:PairWeightedAveraging")
    signature = "(self, m, z, mask, chunk_heads=<class 'bool'>)"
    names = "norm=norm_m norm_z=norm_z v=proj_m gate=proj_g bias=proj_z out=proj_o"
    least = LEAST


class BoltzAttentionPairBias(KeptInFp32, AttentionPairBiasAdapter):
    """Boltz-2's: s comes normalised; z is the pair representation, or the bias itself (diffusion)."""

    serves: ClassVar[tuple[str, ...]] = (
        "boltz.model.layers.attentionv2:AttentionPairBias",
        "boltzgen.model.layers.attention:AttentionPairBias",
    )
    signature = "(self, s, z, mask, k_in, multiplicity=1)"
    names = f"heads=num_heads {attention_names('proj_')}"
    least = LEAST

    def names_of(self, module: Any) -> str:
        of_s = " norm=norm_s" if hasattr(module, "norm_s") else ""
        return (
            self.names + of_s + (" norm_z=proj_z.0 bias=proj_z.1" if getattr(module, "compute_pair_bias", True) else "")
        )

    def check(self, module: Any) -> None:
        if getattr(module, "use_qk_norm", False):
            raise NotServed("queries and keys are normalised")

    def forward(  # type: ignore[override]  # its class has another signature
        self, layer: Any, s: Tensor, z: Tensor, mask: Tensor, k_in: Tensor, multiplicity: int = 1
    ) -> Tensor:
        if k_in is not s:
            raise NotServed("keys of other positions than the queries")
        return self.samples(layer, s, z, mask, multiplicity)

    def samples(self, layer: Any, s: Tensor, z: Tensor, mask: Tensor, multiplicity: int) -> Tensor:
        """Return the update of s [B multiplicity, N, c_s]: each z [B, N, N, .] serves so many samples, as rows."""
        s, mask = (t.unflatten(0, (-1, multiplicity)) for t in (s, mask))
        return self.update(layer, s, mask, z).flatten(0, 1)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        (s, z, mask), _ = super().example(module, n, random)
        s, mask = torch.cat([s, s.flip(0) / 2]), torch.cat([mask, mask.flip(0)])
        return (s, z, mask, s), {"multiplicity": 2}


class BoltzOneAttentionPairBias(BoltzAttentionPairBias):
    """Boltz-1's: s is normalised here, unless `initial_norm` is False."""

    serves = ("boltz.model.layers.attention:AttentionPairBias",)
    signature = "(self, s, z, mask, multiplicity=1, to_keys=None, model_cache=None)"

    def forward(  # type: ignore[override]  # its class has another signature
        self,
        layer: Any,
        s: Tensor,
        z: Tensor,
        mask: Tensor,
        multiplicity: int = 1,
        to_keys: Any = None,
        model_cache: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the update, as theirs does."""
        if to_keys is not None or model_cache is not None:
            raise NotServed("keys of other positions, or a cache of the projected z")
        return self.samples(layer, s, z, mask, multiplicity)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        (s, z, mask, _), multiplicity = super().example(module, n, random)
        return (s, z, mask), multiplicity
