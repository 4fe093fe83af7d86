"""OpenFold's Evoformer and extra MSA stack (openfold 2.0 to 2.2), by its published classes and signatures.

Not tested against the package: it is on no package index (PyPI's `openfold` is something else).  Most of its layers
are in OpenFold3 too, against which these adapters are tested (tests/adapt/test_openfold.py); and `accelerate` compares
each with its own code before it is swapped.
"""

from warpfold.adapt.kinds import TriangleAttentionAdapter
from warpfold.adapt.openfold3 import (
    ColumnAttentions,
    GlobalColumnAttentions,
    Masked,
    OuterProducts,
    RowAttentions,
    Transitions,
    TriangleProducts,
)

MODEL = "openfold.model"
DEEPSPEED, CUEQUIVARIANCE = "use_deepspeed_evo_attention=False, ", "use_cuequivariance_attention=False, "
ATTENTIONS = DEEPSPEED, DEEPSPEED + CUEQUIVARIANCE  # the switches of 2.0, and of 2.2


class OpenFoldProducts(TriangleProducts):
    """Triangle multiplication; with both factors in one projection (AlphaFold2-Multimer), too."""

    serves = tuple(
        f"{MODEL}.triangular_multiplicative_update:{kind}TriangleMultiplicativeUpdate" for kind in ("", "Fused")
    )
    signature = tuple(
        f"(self, z, mask=None, inplace_safe=False, {switch}_add_with_inplace=False, _inplace_chunk_size=256)"
        for switch in ("", "use_cuequivariance_multiplicative_update=False, ")
    )
    refuses_fp16 = "any"  # in which products are scaled, or computed in fp32


class OpenFoldTriangleAttentions(Masked, TriangleAttentionAdapter):
    """Triangle attention, within rows or columns."""

    serves = (f"{MODEL}.triangular_attention:TriangleAttention",)
    signature = tuple(
        f"(self, x, mask=None, chunk_size=None, use_memory_efficient_kernel=False, {switches}use_lma=False, "
        "inplace_safe=False)"
        for switches in ATTENTIONS
    )


class OpenFoldRowAttentions(RowAttentions):
    """Attention within rows of m, with a bias made of z or none."""

    serves = (f"{MODEL}.msa:MSAAttention",)
    signature = tuple(
        f"(self, m, z=None, mask=None, chunk_size=None, use_memory_efficient_kernel=False, {switches}use_lma=False, "
        "use_flash=False, inplace_safe=False, _chunk_logits=None, _checkpoint_chunks=None)"
        for switches in ATTENTIONS
    )


class OpenFoldColumnAttentions(ColumnAttentions):
    """Attention within columns of m."""

    serves = (f"{MODEL}.msa:MSAColumnAttention",)
    signature = tuple(
        f"(self, m, mask=None, chunk_size=None, {switches}use_lma=False, use_flash=False)" for switches in ATTENTIONS
    )


class OpenFoldGlobalColumnAttentions(GlobalColumnAttentions):
    """Global attention within columns of m."""

    serves = (f"{MODEL}.msa:MSAColumnGlobalAttention",)


class OpenFoldOuterProducts(OuterProducts):
    """The outer product mean."""

    serves = (f"{MODEL}.outer_product_mean:OuterProductMean",)
    refuses_fp16 = "any"


class OpenFoldPairTransitions(Transitions):
    """The perceptron of z."""

    serves = (f"{MODEL}.pair_transition:PairTransition",)
    signature = "(self, z, mask=None, chunk_size=None)"
    names = "norm=layer_norm up=linear_1 down=linear_2"
    takes = "x=z mask rows=chunk_size"


class OpenFoldMSATransitions(OpenFoldPairTransitions):
    """The perceptron of m."""

    serves = (f"{MODEL}.evoformer:MSATransition",)
    signature = "(self, m, mask=None, chunk_size=None)"
    takes = "x=m mask rows=chunk_size"
