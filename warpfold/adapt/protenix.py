"""Protenix and OpenDDE: the layers of their Pairformer and MSA module (protenix 2.0.0, opendde 1.2.0).

What differs from AlphaFold2: no biases but in norms, in the queries of `AttentionPairBias` and after the outer product,
where they are divided too; the transition is a SwiGLU.  The caller transposes z for the ending node, so each triangle
attention is of the starting node.  `inplace_safe` with `_add_with_inplace` wants z itself with the update added.  The
strings `triangle_attention` and `triangle_multiplicative` choose kernels: a swapped layer computes by our operations
whatever they say.
"""

from typing import Any

import torch
from torch import Tensor, nn

from warpfold.adapt.adapter import Adapter, AttentionOf, LinearOf, NormOf, NotServed, RandomInputs, StackedOf, made_of
from warpfold.model.attention import Transition
from warpfold.model.axial import COLS, ROWS
from warpfold.model.msa import OuterProductMean
from warpfold.model.pair import TriangleAttention, TriangleMultiplication


def _in_model(*names: str) -> tuple[str, ...]:
    """Return classes by their names, of both packages."""
    return tuple(f"{package}.model.{name}" for package in ("protenix", "opendde") for name in names)


class ProtenixTriangleMultiplication(Adapter):
    """Outgoing x_ij = sum_k a_ik b_jk, incoming sum_k a_ki b_kj."""

    serves = _in_model("triangular.triangular:TriangleMultiplicativeUpdate")
    signature = (
        "(self, z, mask=None, inplace_safe=False, _add_with_inplace=False, _inplace_chunk_size=256, "
        "triangle_multiplicative='torch')"
    )
    operation = "triangle_multiplication"

    def build(self, module: Any) -> nn.Module:
        if module.layer_norm_in.eps != module.layer_norm_out.eps:
            raise NotServed("its norms differ in eps")
        outgoing = module._outgoing
        a, b = ("a", "b") if outgoing else ("b", "a")  # of ours, a has the column in both
        return made_of(
            TriangleMultiplication,
            outgoing=outgoing,
            fused=False,
            channels=module.c_hidden,
            axis=ROWS if outgoing else COLS,
            norm=NormOf(module.layer_norm_in),
            a=LinearOf(getattr(module, f"linear_{a}_p")),
            b=LinearOf(getattr(module, f"linear_{b}_p")),
            a_gate=LinearOf(getattr(module, f"linear_{a}_g")),
            b_gate=LinearOf(getattr(module, f"linear_{b}_g")),
            norm_out=NormOf(module.layer_norm_out),
            out=LinearOf(module.linear_z),
            gate=LinearOf(module.linear_g),
        )

    def forward(
        self,
        layer: Any,
        z: Tensor,
        mask: Tensor | None = None,
        inplace_safe: bool = False,
        _add_with_inplace: bool = False,
        _inplace_chunk_size: int | None = 256,
        triangle_multiplicative: str = "torch",
    ) -> Tensor:
        _refuse_fp16(z)
        update = self.update(layer, z, z.new_ones(z.shape[:-1]) if mask is None else mask)
        return z.add_(update) if inplace_safe and _add_with_inplace else update

    def example(self, module: Any, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random(n, n, module.c_z), random.mask(n, n)), {}


class ProtenixTriangleAttention(Adapter):
    """Starting node; the ending node too, if a module says so itself, with the bias of z transposed."""

    serves = _in_model("triangular.triangular:TriangleAttention")
    signature = "(self, x, mask=None, chunk_size=None, triangle_attention='torch', inplace_safe=False)"
    operation = "gated_attention"

    def build(self, module: Any) -> nn.Module:
        mha = module.mha
        if mha.linear_g is None:
            raise NotServed("an attention without a gate")
        q, k, v, gate, out = (LinearOf(getattr(mha, f"linear_{name}")) for name in "qkvgo")
        return made_of(
            TriangleAttention,
            by_column=not module.starting,
            axis=ROWS if module.starting else COLS,
            norm=NormOf(module.layer_norm),
            bias=LinearOf(module.linear),
            attention=AttentionOf(mha.no_heads, q, k, v, gate, out),
        )

    def forward(
        self,
        layer: Any,
        x: Tensor,
        mask: Tensor | None = None,
        chunk_size: int | None = None,
        triangle_attention: str = "torch",
        inplace_safe: bool = False,
    ) -> Tensor:
        return self.update(layer, x, x.new_ones(x.shape[:-1]) if mask is None else mask, rows=chunk_size)

    def example(self, module: Any, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random(n, n, module.c_in), random.mask(n, n)), {}


class ProtenixTransition(Adapter):
    """SwiGLU at each position."""

    serves = _in_model("modules.primitives:Transition")
    signature = "(self, x)"
    operation = "transition"

    def build(self, module: Any) -> nn.Module:
        up = StackedOf(LinearOf(module.linear_no_bias_a), LinearOf(module.linear_no_bias_b))
        down, norm = LinearOf(module.linear_no_bias), NormOf(module.layernorm1)
        return made_of(Transition, activation="swiglu", norm=norm, up=up, down=down)

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        return self.update(layer, x, x[..., 0])

    def example(self, module: Any, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random(n, n, module.c_in),), {}


class ProtenixOuterProductMean(Adapter):
    """The bias is divided by the count, to which 1e-3 is added, as in AlphaFold2."""

    serves = _in_model("triangular.layers:OuterProductMean")
    signature = "(self, m, mask=None, chunk_size=None, inplace_safe=False)"
    operation = "outer_product"

    def build(self, module: Any) -> nn.Module:
        if module.eps != 1e-3:
            raise NotServed(f"eps is {module.eps}, not 1e-3")
        a, b, out = LinearOf(module.linear_1), LinearOf(module.linear_2), LinearOf(module.linear_out)
        return made_of(OuterProductMean, norm=NormOf(module.layer_norm), a=a, b=b, out=out)

    def forward(
        self,
        layer: Any,
        m: Tensor,
        mask: Tensor | None = None,
        chunk_size: int | None = None,
        inplace_safe: bool = False,
    ) -> Tensor:
        _refuse_fp16(m)
        raise NotImplementedError

    def example(self, module: Any, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random(5, n, module.c_m), random.mask(5, n)), {}


def _refuse_fp16(x: Tensor) -> None:
    """Raise NotServed where autocast gives fp16: their factors are then scaled, or in fp32, lest they overflow."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
        raise NotServed("autocast to fp16")
