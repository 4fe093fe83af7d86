"""Boltz and BoltzGen: the layers of their Pairformer and MSA module (boltz 2.2.1, boltzgen 0.3.2).

Differences from AlphaFold2: only norms, the queries of `AttentionPairBias` and the projection of the outer product have
biases. Both factors of a triangle product come from one projection. The transition is a SwiGLU. The outer product is
divided by its count, or by 1 if that is larger, before the projection. `use_kernels` selects cuEquivariance; a swapped
layer computes with our operations in both cases. `chunk_size` counts rows in attention. In other layers it counts
channels and is ignored, since our layers need no slices of channels.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from warpfold.adapt.adapter import NotServed, RandomInputs, positional_names
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


def _layers(*names: str) -> tuple[str, ...]:
    """Return the full names of classes in both packages."""
    return tuple(f"{package}.model.layers.{name}" for package in ("boltz", "boltzgen") for name in names)


class BoltzTriangleMultiplication(TriangleProductAdapter):
    """One projection computes a and b, another one their gates."""

    serves = _layers(
        *(
            f"{file}:TriangleMultiplication{way}"
            for file in ("triangular_mult", "triangular")
            for way in ("Outgoing", "Incoming")
        )
    )
    signature = "(self, x, mask, use_kernels=False)"
    names = "norm=norm_in a,b=p_in a_gate,b_gate=g_in gate=g_out norm_out=norm_out out=p_out"
    least = LEAST
    computes_in_fp32 = True

    def outgoing(self, module: Any) -> bool:
        return any(kind.__name__ == "TriangleMultiplicationOutgoing" for kind in type(module).__mro__)


class BoltzTriangleAttention(TriangleAttentionAdapter):
    """The bias of the ending node comes from z transposed, as in AlphaFold2."""

    serves = _layers("triangular_attention.attention:TriangleAttention")
    signature = "(self, x, mask=None, chunk_size=None, use_kernels=False)"
    least = LEAST


class BoltzTransition(SwigluAdapter):
    """A SwiGLU without biases."""

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
    takes = "x=m mask"
    settings: ClassVar = {"count_added": 0.0, "count_least": 1.0, "bias_divided": False}
    least = LEAST


class BoltzPairWeightedAveraging(PairWeightedAveragingAdapter):
    """Pair-weighted averaging with the mask of z."""

    serves = _layers("pair_averaging:PairWeightedAveraging")
    signature = "(self, m, z, mask, chunk_heads=<class 'bool'>)"
    names = "norm=norm_m norm_z=norm_z v=proj_m gate=proj_g bias=proj_z out=proj_o"
    least = LEAST


class BoltzAttentionPairBias(AttentionPairBiasAdapter):
    """In Boltz-1 the layer normalises s, unless `initial_norm` is False. In Boltz-2 the caller normalises s.

    z is the pair representation, or in the diffusion module the bias itself.
    """

    serves = (*(_layers("attention:AttentionPairBias")), "boltz.model.layers.attentionv2:AttentionPairBias")
    signature = (
        "(self, s, z, mask, multiplicity=1, to_keys=None, model_cache=None)",
        "(self, s, z, mask, k_in, multiplicity=1)",
    )
    names = f"heads=num_heads {attention_names('proj_')}"
    refuses: ClassVar = {"to_keys": "keys of other positions", "model_cache": "a cache of the projected z"}
    least = LEAST
    computes_in_fp32 = True

    def names_of(self, module: Any) -> str:
        norm = " norm=norm_s" if hasattr(module, "norm_s") else ""
        bias = " norm_z=proj_z.0 bias=proj_z.1" if getattr(module, "compute_pair_bias", True) else ""
        return self.names + norm + bias

    def check(self, module: Any) -> None:
        if getattr(module, "use_qk_norm", False):
            raise NotServed("queries and keys are normalised")

    def forward(self, layer: Any, *_: Any, **given: Any) -> Any:
        """Compute the update of s [B multiplicity, N, c_s]. The samples that share a z [B, N, N, .] become rows."""
        s, mask, multiplicity = given["s"], given["mask"], given.get("multiplicity", 1)
        if given.get("k_in", s) is not s:
            raise NotServed("keys of other positions than the queries")
        rows = {name: t.unflatten(0, (-1, multiplicity)) for name, t in (("s", s), ("mask", mask))}
        return super().forward(layer, **given | rows).flatten(0, 1)

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        return self.update(layer, x, mask, other)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        args, kwargs = super().example(module, n, random)
        for name, second in (("s", kwargs["s"].flip(0) / 2), ("mask", kwargs["mask"].flip(0))):
            kwargs[name] = torch.cat([kwargs[name], second])
        keys = {"k_in": kwargs["s"]} if "k_in" in positional_names(type(module).forward) else {}
        return args, {**kwargs, **keys, "multiplicity": 2}
