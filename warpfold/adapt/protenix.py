"""Protenix and OpenDDE: the layers of their Pairformer and MSA module (protenix 2.0.0, opendde 1.2.0).

Differences from AlphaFold2: only norms, the queries of `AttentionPairBias` and the projection of the outer product have
biases, and the outer product's bias is divided by the count as well. The transition is a SwiGLU. The caller transposes
z for the ending node, so each triangle attention is a starting node; modules that are ending nodes themselves are
supported too. `inplace_safe` with `_add_with_inplace` adds the update to z in place. The strings `triangle_attention`
and `triangle_multiplicative` select kernels; a swapped layer computes with our operations for all values.
"""

from typing import Any, ClassVar

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
    attention_names,
)


def _in_model(name: str) -> tuple[str, ...]:
    """Return the full names of a class in both packages."""
    return tuple(f"{package}.model.{name}" for package in ("protenix", "opendde"))


class ProtenixLayer(LayerAdapter):
    """Base of the adapters for their layers, which are called without a batch axis."""

    least = LEAST
    batch = ()


class ProtenixTriangleMultiplication(ProtenixLayer, TriangleProductAdapter):
    """Outgoing and incoming products, with OpenFold's names."""

    serves = _in_model("triangular.triangular:TriangleMultiplicativeUpdate")
    signature = (
        "(self, z, mask=None, inplace_safe=False, _add_with_inplace=False, _inplace_chunk_size=256, "
        "triangle_multiplicative='torch')"
    )
    takes = "x=z mask"
    refuses_fp16 = "autocast"


class ProtenixTriangleAttention(ProtenixLayer, TriangleAttentionAdapter):
    """Starting and ending nodes, with OpenFold's names."""

    serves = _in_model("triangular.triangular:TriangleAttention")
    signature = "(self, x, mask=None, chunk_size=None, triangle_attention='torch', inplace_safe=False)"


class ProtenixTransition(ProtenixLayer, SwigluAdapter):
    """A SwiGLU without biases."""

    serves = _in_model("modules.primitives:Transition")
    signature = "(self, x)"
    names = "norm=layernorm1 up=linear_no_bias_a,linear_no_bias_b down=linear_no_bias"


class ProtenixOuterProductMean(ProtenixLayer, OuterProductAdapter):
    """The bias is divided by the count plus 1e-3, as in AlphaFold2."""

    serves = _in_model("triangular.layers:OuterProductMean")
    signature = "(self, m, mask=None, chunk_size=None, inplace_safe=False)"
    refuses_fp16 = "autocast"

    def check(self, module: Any) -> None:
        if module.eps != 1e-3:
            raise NotServed(f"eps is {module.eps}, not 1e-3")


class ProtenixPairWeightedAveraging(ProtenixLayer, PairWeightedAveragingAdapter):
    """Pair-weighted averaging without a mask. OpenDDE's has arguments for a sharded z."""

    serves = _in_model("modules.pairformer:MSAPairWeightedAveraging")
    signature = ("(self, m, z)", "(self, m, z, z_pair_spec=None, foldcp_mesh=None)")
    names = (
        "norm=layernorm_m norm_z=layernorm_z bias=linear_no_bias_z v=linear_no_bias_mv gate=linear_no_bias_mg "
        "out=linear_no_bias_out"
    )
    takes = "x=m other=z"
    refuses: ClassVar = dict.fromkeys(("z_pair_spec", "foldcp_mesh"), "a z that is sharded")


class ProtenixAttentionPairBias(ProtenixLayer, AttentionPairBiasAdapter):
    """The Pairformer's attention, without conditioning or mask. OpenDDE's has an argument for a second bias.

    The logits are in fp32, and its own code does not run with 16-bit values.
    """

    serves = _in_model("modules.transformer:AttentionPairBias")
    signature = tuple(
        "(self, a, s, z, n_queries=None, n_keys=None, inplace_safe=False, chunk_size=None, "
        f"enable_efficient_fusion=False{more})"
        for more in ("", ", extra_attn_bias=None")
    )
    names = (
        "norm=layernorm_a norm_z=layernorm_z bias=linear_nobias_z heads=attention.num_heads "
        f"{attention_names('attention.linear_')}"
    )
    takes = "x=a other=z"
    refuses: ClassVar = {
        "n_queries": "windows of atoms",
        "enable_efficient_fusion": "a z with its channels in front",
        "extra_attn_bias": "another bias beside that of z",
    }
    computes_in_fp32 = True

    def check(self, module: Any) -> None:
        if module.has_s or module.cross_attention_mode:
            raise NotServed("attention that is conditioned, or of other keys")

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        args, kwargs = super().example(module, n, random)
        return args, {**kwargs, "s": None}
