"""Protenix and OpenDDE: the layers of their Pairformer and MSA module (protenix 2.0.0, opendde 1.2.0).

What differs from AlphaFold2: no biases but in norms, in the queries of `AttentionPairBias` and after the outer product,
where they are divided too; the transition is a SwiGLU.  The caller transposes z for the ending node, so each triangle
attention is of the starting node; one that says itself that it is of the ending node is served, too.  `inplace_safe`
with `_add_with_inplace` wants z itself with the update added.  The strings `triangle_attention` and
`triangle_multiplicative` choose kernels: a swapped layer computes by our operations whatever they say.
"""

from typing import Any

import torch
from torch import Tensor, nn

from warpfold.adapt.adapter import NotServed, RandomInputs
from warpfold.adapt.kinds import (
    LEAST,
    AttentionPairBiasAdapter,
    Example,
    LayerAdapter,
    OuterProductAdapter,
    PairWeightedAveragingAdapter,
    SwigluAdapter,
    TriangleAttentionAdapter,
    TriangleProductAdapter,
    WithoutMask,
    attention_names,
    refuse_fp16,
)


def _in_model(*names: str) -> tuple[str, ...]:
    """Return classes by their names, of both packages."""
    return tuple(f"{package}.model.{name}" for package in ("protenix", "opendde") for name in names)


class ProtenixLayer(LayerAdapter):
    """What their layers have in common: they are called without a batch."""

    least = LEAST
    batch = ()


class ProtenixTriangleMultiplication(ProtenixLayer, TriangleProductAdapter):
    """Outgoing and incoming, by OpenFold's names."""

    serves = _in_model("triangular.triangular:TriangleMultiplicativeUpdate")
    signature = (
        "(self, z, mask=None, inplace_safe=False, _add_with_inplace=False, _inplace_chunk_size=256, "
        "triangle_multiplicative='torch')"
    )

    def forward(
        self,
        layer: Any,
        z: Tensor,
        mask: Tensor | None = None,
        inplace_safe: bool = False,
        _add_with_inplace: bool = False,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        """Return the update; or z with it, in place."""
        refuse_fp16(z)
        update: Tensor = super().forward(layer, z, mask)
        return z.add_(update) if inplace_safe and _add_with_inplace else update


class ProtenixTriangleAttention(ProtenixLayer, TriangleAttentionAdapter):
    """Starting and ending, by OpenFold's names."""

    serves = _in_model("triangular.triangular:TriangleAttention")
    signature = "(self, x, mask=None, chunk_size=None, triangle_attention='torch', inplace_safe=False)"


class ProtenixTransition(ProtenixLayer, SwigluAdapter):
    """Without biases."""

    serves = _in_model("modules.primitives:Transition")
    signature = "(self, x)"
    names = "norm=layernorm1 up=linear_no_bias_a,linear_no_bias_b down=linear_no_bias"


class ProtenixOuterProductMean(ProtenixLayer, OuterProductAdapter):
    """The bias is divided by the count, to which 1e-3 is added, as in AlphaFold2."""

    serves = _in_model("triangular.layers:OuterProductMean")
    signature = "(self, m, mask=None, chunk_size=None, inplace_safe=False)"

    def check(self, module: Any) -> None:
        if module.eps != 1e-3:
            raise NotServed(f"eps is {module.eps}, not 1e-3")

    def forward(self, layer: Any, m: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        refuse_fp16(m)
        return super().forward(layer, m, *args, **kwargs)


class ProtenixPairWeightedAveraging(ProtenixLayer, WithoutMask, PairWeightedAveragingAdapter):
    """All residues count."""

    serves = ("protenix.model.modules.pairformer:MSAPairWeightedAveraging",)
    signature = "(self, m, z)"
    names = (
        "norm=layernorm_m norm_z=layernorm_z bias=linear_no_bias_z v=linear_no_bias_mv gate=linear_no_bias_mg "
        "out=linear_no_bias_out"
    )


class ProtenixAttentionPairBias(ProtenixLayer, AttentionPairBiasAdapter):
    """The Pairformer's: not conditioned, every position attends to all."""

    serves = ("protenix.model.modules.transformer:AttentionPairBias",)
    signature = (
        "(self, a, s, z, n_queries=None, n_keys=None, inplace_safe=False, chunk_size=None, "
        "enable_efficient_fusion=False)"
    )
    names = (
        "norm=layernorm_a norm_z=layernorm_z bias=linear_nobias_z heads=attention.num_heads "
        f"{attention_names('attention.linear_')}"
    )

    def check(self, module: Any) -> None:
        if module.has_s or module.cross_attention_mode:
            raise NotServed("attention that is conditioned, or of other keys")

    def forward(  # type: ignore[override]  # its class has another signature
        self,
        layer: Any,
        a: Tensor,
        s: Tensor | None,
        z: Tensor,
        n_queries: int | None = None,
        n_keys: int | None = None,
        inplace_safe: bool = False,
        chunk_size: int | None = None,
        enable_efficient_fusion: bool = False,
    ) -> Tensor:
        """Return the update, as theirs does."""
        if (n_queries and n_keys) or enable_efficient_fusion:
            raise NotServed("windows of atoms, or a z with its channels in front")
        return super().forward(layer, a, z)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        (a, z, _), _ = super().example(module, n, random)
        return (a, None, z), {}

    def cast(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        """Return the module as it is: its logits are fp32, and its own code does not run with values in 16 bits."""
        return module


class OpenddePairWeightedAveraging(ProtenixPairWeightedAveraging):
    """The same, with arguments for a z that is sharded."""

    serves = ("opendde.model.modules.pairformer:MSAPairWeightedAveraging",)
    signature = "(self, m, z, z_pair_spec=None, foldcp_mesh=None)"

    def forward(self, layer: Any, m: Tensor, z: Tensor, z_pair_spec: Any = None, foldcp_mesh: Any = None) -> Tensor:
        if z_pair_spec is not None or foldcp_mesh is not None:
            raise NotServed("a z that is sharded")
        return super().forward(layer, m, z)


class OpenddeAttentionPairBias(ProtenixAttentionPairBias):
    """The same, with another bias as an argument."""

    serves = ("opendde.model.modules.transformer:AttentionPairBias",)
    signature = f"{ProtenixAttentionPairBias.signature[:-1]}, extra_attn_bias=None)"

    def forward(  # type: ignore[override]  # its class has another signature
        self, layer: Any, a: Tensor, s: Tensor | None, z: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        if any(bias is not None for bias in (*args[5:], kwargs.pop("extra_attn_bias", None))):
            raise NotServed("another bias beside that of z")
        return super().forward(layer, a, s, z, *args[:5], **kwargs)
