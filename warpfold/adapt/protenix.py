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
from warpfold.model.execution import Executable
from warpfold.model.msa import OuterProductMean
from warpfold.model.pair import TriangleAttention, TriangleMultiplication
from warpfold.model.pair_bias import AttentionPairBias, PairWeightedAveraging

LEAST = 2**18  # numbers of z, or of s, that are worth our operations on a CPU: measured
Example = tuple[tuple[Any, ...], dict[str, Any]]


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
    least = LEAST

    def build(self, module: Any) -> Executable:
        """Return our layer, made of the module's parts."""
        if module.layer_norm_in.eps != module.layer_norm_out.eps:
            raise NotServed("its norms differ in eps")
        outgoing = module._outgoing
        a, b = ("a", "b") if outgoing else ("b", "a")  # of ours, a has the column in both
        return made_of(
            TriangleMultiplication,
            outgoing=outgoing,
            fused=False,
            channels=module.linear_z.in_features,
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
        """Return the update, as theirs does."""
        _refuse_fp16(z)
        update = self.update(layer, z, z.new_ones(z.shape[:-1]) if mask is None else mask)
        return z.add_(update) if inplace_safe and _add_with_inplace else update

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        """Return arguments for about n residues."""
        return (random(n, n, module.linear_g.in_features), random.mask(n, n)), {}


class ProtenixTriangleAttention(Adapter):
    """Starting node; the ending node too, if a module says so itself, with the bias of z transposed."""

    serves = _in_model("triangular.triangular:TriangleAttention")
    signature = "(self, x, mask=None, chunk_size=None, triangle_attention='torch', inplace_safe=False)"
    operation = "gated_attention"
    least = LEAST

    def build(self, module: Any) -> Executable:
        """Return our layer, made of the module's parts."""
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
        """Return the update, as theirs does."""
        return self.update(layer, x, x.new_ones(x.shape[:-1]) if mask is None else mask, rows=chunk_size)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        """Return arguments for about n residues."""
        return (random(n, n, module.linear.in_features), random.mask(n, n)), {}


class ProtenixTransition(Adapter):
    """SwiGLU at each position."""

    serves = _in_model("modules.primitives:Transition")
    signature = "(self, x)"
    operation = "transition"
    least = LEAST

    def build(self, module: Any) -> Executable:
        """Return our layer, made of the module's parts."""
        up = StackedOf(LinearOf(module.linear_no_bias_a), LinearOf(module.linear_no_bias_b))
        down, norm = LinearOf(module.linear_no_bias), NormOf(module.layernorm1)
        return made_of(Transition, activation="swiglu", norm=norm, up=up, down=down)

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        """Return the update, as theirs does."""
        return self.update(layer, x, x[..., 0])

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        """Return arguments for about n residues."""
        return (random(n, n, module.linear_no_bias_a.in_features),), {}


class ProtenixOuterProductMean(Adapter):
    """The bias is divided by the count, to which 1e-3 is added, as in AlphaFold2."""

    serves = _in_model("triangular.layers:OuterProductMean")
    signature = "(self, m, mask=None, chunk_size=None, inplace_safe=False)"
    operation = "outer_product"
    least = LEAST

    def build(self, module: Any) -> Executable:
        """Return our layer, made of the module's parts."""
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
        """Return the update, as theirs does."""
        _refuse_fp16(m)
        n = m.shape[-2]
        z = m.new_empty(()).expand(*m.shape[:-3], n, n, len(layer.out.weight))  # of this shape; nothing reads it
        return self.update(layer, z, m.new_ones(m.shape[:-1]) if mask is None else mask, m, chunk_size)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        """Return arguments for about n residues."""
        return (random(5, n, module.linear_1.in_features), random.mask(5, n)), {}


class ProtenixPairWeightedAveraging(Adapter):
    """Each sequence averaged over residues; weights from z, without a mask."""

    serves = ("protenix.model.modules.pairformer:MSAPairWeightedAveraging",)
    signature = "(self, m, z)"
    operation = "pair_weighted_averaging"
    least = LEAST

    def build(self, module: Any) -> Executable:
        """Return our layer, made of the module's parts."""
        v, gate, bias, out = (LinearOf(getattr(module, f"linear_no_bias_{name}")) for name in ("mv", "mg", "z", "out"))
        norm, norm_z = NormOf(module.layernorm_m), NormOf(module.layernorm_z)
        return made_of(PairWeightedAveraging, norm=norm, norm_z=norm_z, v=v, gate=gate, bias=bias, out=out)

    def forward(self, layer: Any, m: Tensor, z: Tensor) -> Tensor:
        """Return the update, as theirs does."""
        return self.update(layer, m, z.new_ones(z.shape[:-1]), z)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        """Return arguments for about n residues."""
        return (
            random(5, n, module.linear_no_bias_mv.in_features),
            random(n, n, module.linear_no_bias_z.in_features),
        ), {}


class ProtenixAttentionPairBias(Adapter):
    """The Pairformer's: not conditioned, every position attends to all."""

    serves = ("protenix.model.modules.transformer:AttentionPairBias",)
    signature = (
        "(self, a, s, z, n_queries=None, n_keys=None, inplace_safe=False, chunk_size=None, "
        "enable_efficient_fusion=False)"
    )
    operation = "attention_pair_bias"
    least = LEAST

    def build(self, module: Any) -> Executable:
        """Return our layer, made of the module's parts."""
        if module.has_s or module.cross_attention_mode:
            raise NotServed("attention that is conditioned, or of other keys")
        theirs = module.attention
        if theirs.linear_g is None:
            raise NotServed("an attention without a gate")
        q, k, v, gate, out = (LinearOf(getattr(theirs, f"linear_{name}")) for name in "qkvgo")
        return made_of(
            AttentionPairBias,
            norm=NormOf(module.layernorm_a),
            norm_z=NormOf(module.layernorm_z),
            bias=LinearOf(module.linear_nobias_z),
            attention=AttentionOf(theirs.num_heads, q, k, v, gate, out),
        )

    def forward(
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
        return self.update(layer, a.unsqueeze(-3), a.new_ones(a.shape[:-1]).unsqueeze(-2), z).squeeze(-3)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        """Return arguments for about n residues."""
        attention, bias = module.attention, module.linear_nobias_z
        return (random(n, attention.linear_q.in_features), None, random(n, n, bias.in_features)), {}

    def cast(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        """Return the module as it is: its logits are fp32, and its own code does not run with values in 16 bits."""
        return module


class OpenddePairWeightedAveraging(ProtenixPairWeightedAveraging):
    """The same, with arguments for a z that is sharded."""

    serves = ("opendde.model.modules.pairformer:MSAPairWeightedAveraging",)
    signature = "(self, m, z, z_pair_spec=None, foldcp_mesh=None)"

    def forward(self, layer: Any, m: Tensor, z: Tensor, z_pair_spec: Any = None, foldcp_mesh: Any = None) -> Tensor:
        """Return the update, as theirs does."""
        if z_pair_spec is not None or foldcp_mesh is not None:
            raise NotServed("a z that is sharded")
        return super().forward(layer, m, z)


class OpenddeAttentionPairBias(ProtenixAttentionPairBias):
    """The same, with another bias as an argument."""

    serves = ("opendde.model.modules.transformer:AttentionPairBias",)
    signature = f"{ProtenixAttentionPairBias.signature[:-1]}, extra_attn_bias=None)"

    def forward(self, layer: Any, a: Tensor, s: Tensor | None, z: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the update, as theirs does."""
        if len(args) > 5 or kwargs.pop("extra_attn_bias", None) is not None:
            raise NotServed("another bias beside that of z")
        return super().forward(layer, a, s, z, *args, **kwargs)


def _refuse_fp16(x: Tensor) -> None:
    """Raise NotServed where autocast gives fp16: their factors are then scaled, or in fp32, lest they overflow."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
        raise NotServed("autocast to fp16")
