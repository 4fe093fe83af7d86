"""OpenFold3 (openfold3 0.5.0): its Pairformer, its MSA module, and AlphaFold2's Evoformer.

Differences from ours: the caller transposes z around the ending node, which therefore is a `starting` layer.
Transitions mask their update. The outer product divides its bias too. Arguments that select one of their kernels
(cuEquivariance, DeepSpeed, Triton, low-memory attention) do not change the results, and are accepted.
"""

from collections.abc import Mapping
from copy import copy
from typing import Any, ClassVar

import torch
from torch import Tensor

from warpfold.adapt.adapter import NotServed, RandomInputs, assemble, cast_by_autocast
from warpfold.adapt.kinds import (
    SEQUENCES,
    AttentionPairBiasAdapter,
    Example,
    GatedAttentionAdapter,
    LayerAdapter,
    OuterProductAdapter,
    PairWeightedAveragingAdapter,
    Parts,
    TransitionAdapter,
    TriangleAttentionAdapter,
    TriangleProductAdapter,
    attention_names,
)
from warpfold.model.axial import ROWS, Executable
from warpfold.model.evoformer import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttention

LAYERS = "openfold3.core.model.layers"
FUSED = (
    "norm=layer_norm_in a,b=linear_ab_p a_gate,b_gate=linear_ab_g gate=linear_g norm_out=layer_norm_out out=linear_z"
)
# The smallest number that their masks may subtract from logits, so that masked keys have no weight.
INFINITE = 1e4


class Masked(LayerAdapter):
    """Base of layers whose masks subtract a number from logits. Fully masked rows are not compared."""

    def check(self, module: Any) -> None:
        """Raise NotServed if masked keys would have weight."""
        if module.inf < INFINITE:
            raise NotServed(f"masks subtract {module.inf:g} only")

    def attended(self, mask: Tensor) -> Tensor | None:
        """Return the mask of defined outputs, or None if all are defined."""
        return mask.any(-1)[..., None, None]

    def compared(self, output: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        defined = self.attended(kwargs["mask"])
        return output if defined is None else output * defined


class TriangleProducts(TriangleProductAdapter):
    """Triangle products, with one projection per factor or with one for both (AlphaFold2-Multimer)."""

    serves = tuple(
        f"{LAYERS}.triangular_multiplicative_update:{kind}TriangleMultiplicativeUpdate" for kind in ("", "Fused")
    )
    signature: ClassVar[str | tuple[str, ...]] = (
        "(self, z, mask=None, inplace_safe=False, use_cueq_triangle_kernels=False, use_triton_triangle_kernels=False, "
        "_add_with_inplace=False, _inplace_chunk_size=256)"
    )
    takes = "x=z mask rows=_inplace_chunk_size"

    def names_of(self, module: Any) -> str:
        return FUSED if hasattr(module, "linear_ab_p") else self.names

    def forward(self, layer: Any, *_: Any, **given: Any) -> Any:
        rows = given.get("_inplace_chunk_size", 256) if given.get("inplace_safe") else None
        adds = given.get("_add_with_inplace") and not given.get("use_cueq_triangle_kernels")
        return super().forward(layer, **given | {"_inplace_chunk_size": rows, "_add_with_inplace": adds})


class TriangleAttentions(Masked, TriangleAttentionAdapter):
    """Attention within rows, or within columns (`starting=False`, for AlphaFold2's ending node)."""

    serves = (f"{LAYERS}.triangular_attention:TriangleAttention",)
    signature: ClassVar[str | tuple[str, ...]] = (
        "(self, x, mask=None, transpose_bias=False, chunk_size=None, use_deepspeed_evo_attention=False, "
        "use_cueq_triangle_kernels=False, use_triton_triangle_kernels=False, use_lma=False, inplace_safe=False)"
    )
    names = f"{TriangleAttentionAdapter.names} bias=linear_z"

    def forward(self, layer: Any, *_: Any, **given: Any) -> Any:
        # The caller has transposed z.
        if given.get("transpose_bias"):
            layer = copy(layer)
            layer.bias_transposed = True
        return super().forward(layer, **given)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        args, kwargs = super().example(module, n, random)
        return args, {**kwargs, "transpose_bias": n > 16}


class RowAttentions(Masked, GatedAttentionAdapter):
    """Attention within rows of m, with a bias from z (Algorithm 7) or without one."""

    serves = (f"{LAYERS}.msa:MSAAttention",)
    signature: ClassVar[str | tuple[str, ...]] = (
        "(self, m, z=None, mask=None, chunk_size=None, use_deepspeed_evo_attention=False, "
        "use_cueq_triangle_kernels=False, use_triton_triangle_kernels=False, use_lma=False, inplace_safe=False, "
        "_chunk_logits=None, _checkpoint_chunks=None)"
    )
    names = f"norm=layer_norm_m heads=mha.no_heads {attention_names('mha.linear_')}"
    takes = "x=m other=z mask rows=chunk_size"

    def build(self, module: Any) -> Executable:
        self.check(module)
        parts = self.layer(module, self.parts(module))
        if module.pair_bias:
            return assemble(MSARowAttention, **parts)
        return assemble(MSAColumnAttention, by_column=False, axis=ROWS, **parts)

    def names_of(self, module: Any) -> str:
        return f"{self.names} norm_z=layer_norm_z bias=linear_z" if module.pair_bias else self.names

    def forward(self, layer: Any, *_: Any, **given: Any) -> Any:
        """Compute the update. Raises NotServed if z is missing, or passed to a layer without bias."""
        if (z := given.get("z")) is None and layer.shares == "other":
            raise NotServed("a row attention without z")
        if z is not None and layer.shares != "other":
            raise NotServed("z for an attention without a bias")
        return super().forward(layer, **given)

    def draw_inputs(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        (c_m,) = self.inputs(module, "q")
        z = {"other": random(2, n, n, *self.inputs(module, "bias"))} if module.pair_bias else {}
        return {"x": random(2, SEQUENCES, n, c_m), "mask": random.mask(2, SEQUENCES, n), **z}


class ColumnLayers(Masked):
    """Base of layers that attend within columns of m."""

    takes = "x=m mask rows=chunk_size"

    def attended(self, mask: Tensor) -> Tensor | None:
        return mask.any(-2)[..., None, :, None]

    def draw_inputs(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        (c,) = self.inputs(module, "q")
        return {"x": random(2, SEQUENCES, n, c), "mask": random.mask(2, n, SEQUENCES).mT}


class ColumnAttentions(ColumnLayers, GatedAttentionAdapter):
    """Attention within columns of m (Algorithm 8)."""

    serves = (f"{LAYERS}.msa:MSAColumnAttention",)
    signature: ClassVar[str | tuple[str, ...]] = (
        "(self, m, mask=None, chunk_size=None, use_deepspeed_evo_attention=False, use_cueq_triangle_kernels=False, "
        "use_triton_triangle_kernels=False, use_lma=False)"
    )
    kind = MSAColumnAttention
    names = f"norm=_msa_att.layer_norm_m heads=_msa_att.mha.no_heads {attention_names('_msa_att.mha.linear_')}"


class GlobalColumnAttentions(ColumnLayers):
    """Global attention within columns of m (Algorithm 19)."""

    serves = (f"{LAYERS}.msa:MSAColumnGlobalAttention",)
    signature = "(self, m, mask=None, chunk_size=None, use_lma=False)"
    operation = "attention"
    kind = MSAColumnGlobalAttention
    names = f"norm=layer_norm_m heads=global_attention.no_heads {attention_names('global_attention.linear_')}"


class PairBiasAttentions(Masked, AttentionPairBiasAdapter):
    """Attention of the single representation with pair bias (AlphaFold3, Algorithm 24, in the trunk)."""

    serves = (f"{LAYERS}.attention_pair_bias:AttentionPairBias",)
    signature = (
        "(self, a, z, mask=None, use_deepspeed_evo_attention=False, use_cueq_triangle_kernels=False, "
        "use_triton_triangle_kernels=False, use_lma=False, use_high_precision_attention=False)"
    )
    names = f"norm=layer_norm_a norm_z=layer_norm_z bias=linear_z heads=mha.no_heads {attention_names('mha.linear_')}"
    takes = "x=a other=z mask"

    def attended(self, mask: Tensor) -> Tensor | None:
        return None

    def forward(self, layer: Any, *_: Any, **given: Any) -> Any:
        """Compute the update. Raises NotServed if logits in fp32 are requested for a narrower input."""
        if given.get("use_high_precision_attention") and cast_by_autocast(given["a"]).element_size() < 4:
            raise NotServed("logits in fp32")
        return super().forward(layer, **given)


class PairAverages(Masked, PairWeightedAveragingAdapter):
    """Pair-weighted averaging of m (AlphaFold3, Algorithm 10)."""

    serves = (f"{LAYERS}.msa:MSAPairWeightedAveraging",)
    signature = "(self, m, z=None, mask=None, chunk_size=None, use_softmax_kernel=False, **kwargs)"
    names = "norm=layer_norm_m norm_z=layer_norm_z bias=linear_z v=linear_v gate=linear_g out=linear_o"
    takes = "x=m other=z mask rows=chunk_size"

    def attended(self, mask: Tensor) -> Tensor | None:
        return mask.any(-1)[..., None, :, None]


class Transitions(TransitionAdapter):
    """The perceptrons of AlphaFold2 (ReLU) and AlphaFold3 (SwiGLU). The update is zero at masked positions."""

    serves: ClassVar[tuple[str, ...]] = tuple(f"{LAYERS}.transition:{kind}Transition" for kind in ("ReLU", "SwiGLU"))
    signature = "(self, x, mask=None, chunk_size=None, ckpt_chunk_size=None)"
    names = "norm=layer_norm up=transition_mlp.layers.0.0 down=transition_mlp.linear_out"
    takes = "x mask rows=chunk_size"

    def names_of(self, module: Any) -> str:
        swiglu_names = "norm=layer_norm up=swiglu.linear_a,swiglu.linear_b down=linear_out"
        return swiglu_names if hasattr(module, "swiglu") else self.names

    def check(self, module: Any) -> None:
        if hasattr(module, "transition_mlp") and (count := len(module.transition_mlp.layers)) != 1:
            raise NotServed(f"{count} hidden layers")

    def layer(self, module: Any, parts: Parts) -> Parts:
        return {**parts, "activation": "swiglu" if hasattr(module, "swiglu") else "relu"}

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        dx = super().compute(layer, x, rows=rows)
        if mask is None:
            return dx
        mask = mask[..., None].to(dx.dtype)
        return dx * mask if torch.is_grad_enabled() else dx.mul_(mask)


class OuterProducts(OuterProductAdapter):
    """The outer product, whose bias is divided too (Algorithm 10)."""

    serves = (f"{LAYERS}.outer_product_mean:OuterProductMean",)
    signature = "(self, m, mask=None, chunk_size=None, inplace_safe=False)"

    def layer(self, module: Any, parts: Parts) -> Parts:
        return {**parts, "count_added": float(module.eps)}
