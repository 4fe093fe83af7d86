"""OpenFold3 (openfold3 0.5.0): its Pairformer, its MSA module, and the Evoformer that it keeps of AlphaFold2.

What differs from ours: the caller transposes z around the ending node, so that `starting` layers stand there; the
incoming product calls our a "b"; transitions mask their update; the outer product divides its bias too.  Arguments that
choose a kernel of theirs (cuEquivariance, DeepSpeed, Triton, low-memory attention) mean the same, and are served.
"""

from collections.abc import Mapping
from copy import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from warpfold.adapt.adapter import (
    Adapter,
    AttentionOf,
    LinearOf,
    NormOf,
    NotServed,
    RandomInputs,
    StackedOf,
    cast_by_autocast,
    made_of,
)
from warpfold.model.attention import AttentionUpdate, Transition
from warpfold.model.axial import COLS, ROWS, AxialUpdate
from warpfold.model.msa import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttention, OuterProductMean
from warpfold.model.pair import TriangleAttention, TriangleMultiplication
from warpfold.model.pair_bias import AttentionPairBias, PairWeightedAveraging

LAYERS = "openfold3.core.model.layers"
INFINITE = 1e4  # what their masks subtract from logits is infinite where it is at least this
Example = tuple[tuple[Any, ...], dict[str, Any]]


def linear_of(module: nn.Module | None, outputs: slice | None = None) -> LinearOf:
    """Return the projection of one of their linear layers.  Errors: NotServed for one that is not there, or is cast."""
    if module is None:
        raise NotServed("no gate")
    if getattr(module, "precision", None) is not None:
        raise NotServed("a linear layer with a precision of its own")
    return LinearOf(module, outputs)


def attention_of(mha: Any) -> AttentionOf:
    """Return the parameters of their `Attention`.  Errors: NotServed where it has no gate."""
    q, k, v, gate, out = (linear_of(getattr(mha, f"linear_{name}")) for name in "qkvgo")
    return AttentionOf(int(mha.no_heads), q, k, v, gate, out)


def check_infinite(module: Any) -> None:
    """Raise NotServed where masked logits would count."""
    if module.inf < INFINITE:
        raise NotServed(f"masks subtract {module.inf:g} only")


def mask_of(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask of x [*, c]: ones where there is none."""
    return x.new_ones(x.shape[:-1]) if mask is None else mask.expand(x.shape[:-1])


class TriangleProducts(Adapter):
    """Triangle multiplication; with both factors in one projection (AlphaFold2-Multimer), too."""

    serves = tuple(
        f"{LAYERS}.triangular_multiplicative_update:{kind}TriangleMultiplicativeUpdate" for kind in ("", "Fused")
    )
    signature: ClassVar[str | tuple[str, ...]] = (
        "(self, z, mask=None, inplace_safe=False, use_cueq_triangle_kernels=False, use_triton_triangle_kernels=False, "
        "_add_with_inplace=False, _inplace_chunk_size=256)"
    )
    operation = "triangle_multiplication"

    def build(self, module: Any) -> AxialUpdate:
        """Return our layer; the factors of an incoming product change places."""
        parts: list[tuple[Any, slice | None]]
        if hasattr(module, "linear_ab_p"):
            halves = slice(0, module.c_hidden), slice(module.c_hidden, None)
            parts = [(module.linear_ab_p, half) for half in halves] + [(module.linear_ab_g, half) for half in halves]
        else:
            parts = [(getattr(module, f"linear_{name}"), None) for name in ("a_p", "b_p", "a_g", "b_g")]
        a, b, a_gate, b_gate = (linear_of(*part) for part in parts)
        outgoing = bool(module._outgoing)
        if not outgoing:
            a, b, a_gate, b_gate = b, a, b_gate, a_gate
        layer = made_of(
            TriangleMultiplication,
            norm=NormOf(module.layer_norm_in),
            norm_out=NormOf(module.layer_norm_out),
            gate=linear_of(module.linear_g),
            out=linear_of(module.linear_z),
            **dict(a=a, a_gate=a_gate, b=b, b_gate=b_gate, outgoing=outgoing, fused=False, channels=module.c_hidden),
        )
        layer.axis = ROWS if outgoing else COLS
        return layer

    def forward(
        self,
        layer: Any,
        z: Tensor,
        mask: Tensor | None = None,
        inplace_safe: bool = False,
        use_cueq_triangle_kernels: bool = False,
        use_triton_triangle_kernels: bool = False,
        _add_with_inplace: bool = False,
        _inplace_chunk_size: int | None = 256,
    ) -> Tensor:
        """Return the update; z with it, in place, where the caller wants that."""
        dz = self.update(layer, z, mask_of(z, mask), rows=_inplace_chunk_size if inplace_safe else None)
        if inplace_safe and _add_with_inplace and not use_cueq_triangle_kernels:
            return z.add_(dz)
        return dz

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        return (random(2, n, n, module.c_z), random.mask(2, n, n)), {}


class TriangleAttentions(Adapter):
    """Triangle attention, within rows; or within columns (`starting=False`, which AlphaFold2's ending node may be)."""

    serves = (f"{LAYERS}.triangular_attention:TriangleAttention",)
    signature: ClassVar[str | tuple[str, ...]] = (
        "(self, x, mask=None, transpose_bias=False, chunk_size=None, use_deepspeed_evo_attention=False, "
        "use_cueq_triangle_kernels=False, use_triton_triangle_kernels=False, use_lma=False, inplace_safe=False)"
    )
    operation = "gated_attention"
    bias = "linear_z"  # the name of the projection that makes it

    def build(self, module: Any) -> AxialUpdate:
        """Return our layer, within rows or columns as theirs is."""
        check_infinite(module)
        attention = attention_of(module.mha)
        layer = made_of(
            TriangleAttention,
            norm=NormOf(module.layer_norm),
            bias=linear_of(getattr(module, self.bias)),
            attention=attention,
            by_column=not module.starting,
        )
        layer.axis = ROWS if module.starting else COLS
        return layer

    def forward(
        self,
        layer: TriangleAttention,
        x: Tensor,
        mask: Tensor | None = None,
        transpose_bias: bool = False,
        chunk_size: int | None = None,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        """Return the update; transpose_bias: of a z that the caller has transposed."""
        if transpose_bias:
            layer = copy(layer)
            layer.bias_transposed = True
        return self.update(layer, x, mask_of(x, mask), rows=chunk_size)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        return (random(2, n, n, module.c_in), random.mask(2, n, n), n > 16), {}

    def compared(self, output: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        return attended(output, args[1])


class RowAttentions(Adapter):
    """Attention within rows of m, with a bias made of z (Algorithm 7) or none."""

    serves = (f"{LAYERS}.msa:MSAAttention",)
    signature: ClassVar[str | tuple[str, ...]] = (
        "(self, m, z=None, mask=None, chunk_size=None, use_deepspeed_evo_attention=False, "
        "use_cueq_triangle_kernels=False, use_triton_triangle_kernels=False, use_lma=False, inplace_safe=False, "
        "_chunk_logits=None, _checkpoint_chunks=None)"
    )
    operation = "gated_attention"

    def build(self, module: Any) -> AxialUpdate:
        check_infinite(module)
        parts = dict(norm=NormOf(module.layer_norm_m), attention=attention_of(module.mha))
        if module.pair_bias:
            norm_z = NormOf(module.layer_norm_z)
            return made_of(MSARowAttention, norm_z=norm_z, bias=linear_of(module.linear_z), **parts)
        return made_of(MSAColumnAttention, by_column=False, axis=ROWS, **parts)

    def forward(
        self,
        layer: AttentionUpdate,
        m: Tensor,
        z: Tensor | None = None,
        mask: Tensor | None = None,
        chunk_size: int | None = None,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        """Return the update.  Errors: NotServed where z is missing, or not wanted."""
        if (z is None) == layer.shared_from_other:
            raise NotServed("a row attention without z" if z is None else "z for an attention without a bias")
        return self.update(layer, m, mask_of(m, mask), z, chunk_size)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        z = {"z": random(2, n, n, module.c_z)} if module.pair_bias else {}
        return (random(2, 5, n, module.c_in),), {**z, "mask": random.mask(2, 5, n)}

    def compared(self, output: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        return attended(output, kwargs["mask"])


class ColumnAttentions(Adapter):
    """Attention within columns of m (Algorithm 8)."""

    serves = (f"{LAYERS}.msa:MSAColumnAttention",)
    signature: ClassVar[str | tuple[str, ...]] = (
        "(self, m, mask=None, chunk_size=None, use_deepspeed_evo_attention=False, use_cueq_triangle_kernels=False, "
        "use_triton_triangle_kernels=False, use_lma=False)"
    )
    operation = "gated_attention"

    def build(self, module: Any) -> AxialUpdate:
        check_infinite(module)
        inner = module._msa_att
        return made_of(MSAColumnAttention, norm=NormOf(inner.layer_norm_m), attention=attention_of(inner.mha))

    def forward(
        self, layer: Any, m: Tensor, mask: Tensor | None = None, chunk_size: int | None = None, *_: Any, **__: Any
    ) -> Tensor:
        return self.update(layer, m, mask_of(m, mask), rows=chunk_size)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        return (random(2, 5, n, channels(module)), random.mask(2, n, 5).mT), {}

    def compared(self, output: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        return attended(output.transpose(ROWS, COLS), args[1].mT)


class GlobalColumnAttentions(ColumnAttentions):
    """Global attention within columns of m (Algorithm 19)."""

    serves = (f"{LAYERS}.msa:MSAColumnGlobalAttention",)
    signature = "(self, m, mask=None, chunk_size=None, use_lma=False)"
    operation = "attention"

    def build(self, module: Any) -> AxialUpdate:
        check_infinite(module)
        inner = module.global_attention
        parts = {name: linear_of(getattr(inner, f"linear_{letter}")) for name, letter in PROJECTIONS}
        return made_of(MSAColumnGlobalAttention, heads=int(inner.no_heads), norm=NormOf(module.layer_norm_m), **parts)


class PairBiasAttentions(Adapter):
    """Attention of the single representation, biased by z (AlphaFold3, Algorithm 24, of the trunk)."""

    serves = (f"{LAYERS}.attention_pair_bias:AttentionPairBias",)
    signature = (
        "(self, a, z, mask=None, use_deepspeed_evo_attention=False, use_cueq_triangle_kernels=False, "
        "use_triton_triangle_kernels=False, use_lma=False, use_high_precision_attention=False)"
    )
    operation = "gated_attention"

    def build(self, module: Any) -> AxialUpdate:
        check_infinite(module)
        norms = {"norm": NormOf(module.layer_norm_a), "norm_z": NormOf(module.layer_norm_z)}
        return made_of(AttentionPairBias, bias=linear_of(module.linear_z), attention=attention_of(module.mha), **norms)

    def forward(
        self, layer: Any, a: Tensor, z: Tensor, mask: Tensor | None = None, *switches: bool, **named: bool
    ) -> Tensor:
        """Return the update.  Errors: NotServed for logits in fp32 of what is not, and for samples that share z."""
        precise = any(switches[4:]) or named.get("use_high_precision_attention", False)
        if precise and cast_by_autocast(a).element_size() < 4:
            raise NotServed("logits in fp32")
        if a.shape[:-2] != z.shape[:-3]:
            raise NotServed("samples that share z")
        return self.update(layer, a.unsqueeze(ROWS), mask_of(a, mask).unsqueeze(-2), z).squeeze(ROWS)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        return (random(2, n, module.c_q), random(2, n, n, module.c_z), random.mask(2, n)), {}


class PairAverages(Adapter):
    """The average of m that z decides (AlphaFold3, Algorithm 10)."""

    serves = (f"{LAYERS}.msa:MSAPairWeightedAveraging",)
    signature = "(self, m, z=None, mask=None, chunk_size=None, use_softmax_kernel=False, **kwargs)"
    operation = "pair-weighted average"

    def build(self, module: Any) -> AxialUpdate:
        check_infinite(module)
        norms = {"norm": NormOf(module.layer_norm_m), "norm_z": NormOf(module.layer_norm_z)}
        bias, v, gate, out = (linear_of(getattr(module, f"linear_{name}")) for name in "zvgo")
        return made_of(PairWeightedAveraging, bias=bias, v=v, gate=gate, out=out, **norms)

    def forward(
        self,
        layer: Any,
        m: Tensor,
        z: Tensor,
        mask: Tensor | None = None,
        chunk_size: int | None = None,
        use_softmax_kernel: bool = False,
        **_: Any,
    ) -> Tensor:
        """Return the update; mask: of z."""
        return self.update(layer, m, mask_of(z, mask), z, chunk_size)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        return (random(2, 5, n, module.c_in), random(2, n, n, module.c_z), random.mask(2, n, n)), {}

    def compared(self, output: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        return output * args[2].any(-1)[..., None, :, None]


class Transitions(Adapter):
    """The perceptrons of AlphaFold2 (ReLU) and AlphaFold3 (SwiGLU)."""

    serves = tuple(f"{LAYERS}.transition:{kind}Transition" for kind in ("ReLU", "SwiGLU"))
    signature = "(self, x, mask=None, chunk_size=None, ckpt_chunk_size=None)"
    operation = "transition"

    def build(self, module: Any) -> AxialUpdate:
        """Return our layer.  Errors: NotServed for more than one hidden layer."""
        norm = NormOf(module.layer_norm)
        if hasattr(module, "swiglu"):
            both = StackedOf(linear_of(module.swiglu.linear_a), linear_of(module.swiglu.linear_b))
            return made_of(Transition, norm=norm, up=both, down=linear_of(module.linear_out), activation="swiglu")
        inner = module.transition_mlp
        if len(inner.layers) != 1:
            raise NotServed(f"{len(inner.layers)} hidden layers")
        up, down = linear_of(inner.layers[0][0]), linear_of(inner.linear_out)
        return made_of(Transition, norm=norm, up=up, down=down, activation="relu")

    def forward(
        self,
        layer: Any,
        x: Tensor,
        mask: Tensor | None = None,
        chunk_size: int | None = None,
        ckpt_chunk_size: int | None = None,
    ) -> Tensor:
        """Return the update, zero where masked."""
        dx = self.update(layer, x, mask_of(x, mask), rows=chunk_size)
        if mask is None:
            return dx
        mask = mask[..., None].to(dx.dtype)
        return dx * mask if torch.is_grad_enabled() else dx.mul_(mask)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        return (random(2, 3, n, module.c_in), random.mask(2, 3, n)), {}


class OuterProducts(Adapter):
    """The outer product mean (Algorithm 10)."""

    serves = (f"{LAYERS}.outer_product_mean:OuterProductMean",)
    signature = "(self, m, mask=None, chunk_size=None, inplace_safe=False)"
    operation = "outer_product"

    def build(self, module: Any) -> AxialUpdate:
        a, b, out = (linear_of(getattr(module, f"linear_{name}")) for name in ("1", "2", "out"))
        layer = made_of(
            OuterProductMean, norm=NormOf(module.layer_norm), a=a, b=b, out=out, count_added=float(module.eps)
        )
        return layer

    def forward(
        self,
        layer: OuterProductMean,
        m: Tensor,
        mask: Tensor | None = None,
        chunk_size: int | None = None,
        inplace_safe: bool = False,
    ) -> Tensor:
        """Return the update of z."""
        n = m.shape[-2]
        z = m.new_empty(()).expand(*m.shape[:-3], n, n, len(layer.out.weight))  # of this shape only: nothing reads it
        return self.update(layer, z, mask_of(m, mask), m, chunk_size)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        return (random(2, 5, n, module.c_m), random.mask(2, 5, n)), {}


PROJECTIONS = (("q", "q"), ("k", "k"), ("v", "v"), ("gate", "g"), ("out", "o"))


def channels(module: Any) -> int:
    """Return how many channels m has, of a module that attends within its columns."""
    return int(getattr(module, "c_m", None) or module.c_in)


def attended(output: Tensor, mask: Tensor) -> Tensor:
    """Return an attention's output where there is anything to attend to; the rest is not defined."""
    return output * mask.any(-1)[..., None, None]
