"""Boltz and BoltzGen: the layers of their Pairformer and MSA module (boltz 2.2.1, boltzgen 0.3.2).

What differs from AlphaFold2: no biases but in norms, in the queries of `AttentionPairBias` and after the outer product;
both factors of a triangle product come from one projection; the transition is a SwiGLU; the outer product is divided by
its count, 1 at least, before it is projected.  `use_kernels` asks for cuEquivariance: a swapped layer computes by our
operations either way.  A `chunk_size` counts rows in attention; elsewhere channels, of which ours need no slices.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from warpfold.adapt.adapter import NotServed, RandomInputs, places_of
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
    """Name classes of both packages: boltzgen has some in other modules."""
    return tuple(f"{package}.model.layers.{name}" for package in ("boltz", "boltzgen") for name in names)


class BoltzTriangleMultiplication(TriangleProductAdapter):
    """One projection makes a and b, another one their gates."""

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
    in_fp32 = True

    def outgoing(self, module: Any) -> bool:
        return any(kind.__name__ == "TriangleMultiplicationOutgoing" for kind in type(module).__mro__)


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
    takes = "x=m mask"
    settings: ClassVar = {"count_added": 0.0, "count_least": 1.0, "bias_divided": False}
    least = LEAST


class BoltzPairWeightedAveraging(PairWeightedAveragingAdapter):
    """With the mask of z."""

    serves = _layers("pair_averaging:PairWeightedAveraging")
    signature = "(self, m, z, mask, chunk_heads=<class 'bool'>)"
    names = "norm=norm_m norm_z=norm_z v=proj_m gate=proj_g bias=proj_z out=proj_o"
    least = LEAST


class BoltzAttentionPairBias(AttentionPairBiasAdapter):
    """Of Boltz-1, s is normalised here, unless `initial_norm` is False; of Boltz-2, s comes normalised.

    z is the pair representation, or the bias itself (diffusion).
    """

    serves = (*(_layers("attention:AttentionPairBias")), "boltz.model.layers.attentionv2:AttentionPairBias")
    signature = (
        "(self, s, z, mask, multiplicity=1, to_keys=None, model_cache=None)",
        "(self, s, z, mask, k_in, multiplicity=1)",
    )
    names = f"heads=num_heads {attention_names('proj_')}"
    refuses: ClassVar = {"to_keys": "keys of other positions", "model_cache": "a cache of the projected z"}
    least = LEAST
    in_fp32 = True

    def names_of(self, module: Any) -> str:
        norm = " norm=norm_s" if hasattr(module, "norm_s") else ""
        bias = " norm_z=proj_z.0 bias=proj_z.1" if getattr(module, "compute_pair_bias", True) else ""
        return self.names + norm + bias

    def check(self, module: Any) -> None:
        if getattr(module, "use_qk_norm", False):
            raise NotServed("queries and keys are normalised")

    def forward(self, layer: Any, *_: Any, **given: Any) -> Any:
        """Compute the update of s [B multiplicity, N, c_s]: each z [B, N, N, .] serves so many samples, as rows."""
        s, mask, multiplicity = given["s"], given["mask"], given.get("multiplicity", 1)
        if given.get("k_in", s) is not s:
            raise NotServed("keys of other positions than the queries")
        rows = {name: t.unflatten(0, (-1, multiplicity)) for name, t in (("s", s), ("mask", mask))}
        return super().forward(layer, **given | rows).flatten(0, 1)

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        return self.update(layer, x, mask, other)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        args, given = super().example(module, n, random)
        for name, more in (("s", given["s"].flip(0) / 2), ("mask", given["mask"].flip(0))):
            given[name] = torch.cat([given[name], more])
        keys = {"k_in": given["s"]} if "k_in" in places_of(type(module).forward) else {}
        return args, {**given, **keys, "multiplicity": 2}
