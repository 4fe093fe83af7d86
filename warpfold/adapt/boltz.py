"""Boltz and BoltzGen: the layers of their Pairformer and MSA module (boltz 2.2.1, boltzgen 0.3.2).

What differs from AlphaFold2: no biases but in norms, in the queries of `AttentionPairBias` and after the outer product;
both factors of a triangle product come from one projection; the transition is a SwiGLU; the outer product is divided by
its count, 1 at least, before it is projected.  `use_kernels` asks for cuEquivariance: a swapped layer computes by our
operations either way.  A `chunk_size` counts rows in attention; elsewhere channels, of which ours need no slices.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from warpfold.adapt.adapter import Adapter, AttentionOf, LinearOf, NormOf, NotServed, RandomInputs, StackedOf, made_of
from warpfold.model.attention import Transition
from warpfold.model.axial import COLS, ROWS
from warpfold.model.execution import Executable
from warpfold.model.layers import NoNorm
from warpfold.model.msa import OuterProductMean
from warpfold.model.pair import TriangleAttention, TriangleMultiplication
from warpfold.model.pair_bias import AttentionPairBias, PairWeightedAveraging

LEAST = 2**18  # numbers of z, or of s, that are worth our operations on a CPU: measured
Example = tuple[tuple[Any, ...], dict[str, Any]]


def _layers(name: str, in_boltzgen: str | None = None) -> tuple[str, ...]:
    """Return a class of both packages by its names: boltzgen has some in other modules."""
    return f"boltz.model.layers.{name}", f"boltzgen.model.layers.{in_boltzgen or name}"


class KeptInFp32(Adapter):
    """A layer whose own code multiplies in fp32, and wants parameters alike for what follows."""

    def cast(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        """Return the module as it is."""
        return module


class BoltzTriangleOutgoing(KeptInFp32):
    """x_ij = sum_k a_ik b_jk; a is the first half of the channels."""

    serves = _layers("triangular_mult:TriangleMultiplicationOutgoing", "triangular:TriangleMultiplicationOutgoing")
    signature = "(self, x, mask, use_kernels=False)"
    operation = "triangle_multiplication"
    least = LEAST
    outgoing: ClassVar[bool] = True

    def build(self, module: Any) -> Executable:
        """Return our layer, made of the module's parts."""
        if module.norm_in.eps != module.norm_out.eps:
            raise NotServed("its norms differ in eps")
        c = module.p_out.in_features
        first, second = slice(0, c), slice(c, 2 * c)
        a, b = (first, second) if self.outgoing else (second, first)  # of ours, a has the column in both
        return made_of(
            TriangleMultiplication,
            outgoing=self.outgoing,
            fused=False,
            channels=c,
            axis=ROWS if self.outgoing else COLS,
            norm=NormOf(module.norm_in),
            a=LinearOf(module.p_in, a),
            b=LinearOf(module.p_in, b),
            a_gate=LinearOf(module.g_in, a),
            b_gate=LinearOf(module.g_in, b),
            norm_out=NormOf(module.norm_out),
            out=LinearOf(module.p_out),
            gate=LinearOf(module.g_out),
        )

    def forward(self, layer: Any, x: Tensor, mask: Tensor, use_kernels: bool = False) -> Tensor:
        """Return the update, as theirs does."""
        return self.update(layer, x, mask)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        """Return arguments for about n residues."""
        return (random(2, n, n, module.p_in.in_features), random.mask(2, n, n)), {}


class BoltzTriangleIncoming(BoltzTriangleOutgoing):
    """x_ij = sum_k a_ki b_kj."""

    serves = _layers("triangular_mult:TriangleMultiplicationIncoming", "triangular:TriangleMultiplicationIncoming")
    outgoing = False


class BoltzTriangleAttention(Adapter):
    """Starting node, and ending node with the bias of z transposed, as in AlphaFold2."""

    serves = _layers("triangular_attention.attention:TriangleAttention")
    signature = "(self, x, mask=None, chunk_size=None, use_kernels=False)"
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
        use_kernels: bool = False,
    ) -> Tensor:
        """Return the update, as theirs does."""
        return self.update(layer, x, x.new_ones(x.shape[:-1]) if mask is None else mask, rows=chunk_size)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        """Return arguments for about n residues."""
        return (random(2, n, n, module.c_in), random.mask(2, n, n)), {}


class BoltzTransition(Adapter):
    """SwiGLU at each position."""

    serves = _layers("transition:Transition")
    signature = "(self, x, chunk_size=None)"
    operation = "transition"
    least = LEAST

    def build(self, module: Any) -> Executable:
        """Return our layer, made of the module's parts."""
        if module.fc3.out_features != module.fc1.in_features:
            raise NotServed("a transition to another number of channels")
        up = StackedOf(LinearOf(module.fc1), LinearOf(module.fc2))
        return made_of(Transition, activation="swiglu", norm=NormOf(module.norm), up=up, down=LinearOf(module.fc3))

    def forward(self, layer: Any, x: Tensor, chunk_size: int | None = None) -> Tensor:
        """Return the update, as theirs does."""
        return self.update(layer, x, x[..., 0])

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        """Return arguments for about n residues."""
        return (random(2, n, n, module.fc1.in_features),), {}


class BoltzOuterProduct(Adapter):
    """The bias is added after the division, by the count of sequences or 1."""

    serves = _layers("outer_product_mean:OuterProductMean")
    signature = "(self, m, mask, chunk_size=None)"
    operation = "outer_product"
    least = LEAST

    def build(self, module: Any) -> Executable:
        """Return our layer, made of the module's parts."""
        return made_of(
            OuterProductMean,
            count_added=0.0,
            count_least=1.0,
            bias_divided=False,
            norm=NormOf(module.norm),
            a=LinearOf(module.proj_a),
            b=LinearOf(module.proj_b),
            out=LinearOf(module.proj_o),
        )

    def forward(self, layer: Any, m: Tensor, mask: Tensor, chunk_size: int | None = None) -> Tensor:
        """Return the update, as theirs does."""
        n = m.shape[-2]
        z = m.new_empty(()).expand(*m.shape[:-3], n, n, len(layer.out.weight))  # of this shape; nothing reads it
        return self.update(layer, z, mask, m)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        """Return arguments for about n residues."""
        return (random(2, 5, n, module.proj_a.in_features), random.mask(2, 5, n)), {}


class BoltzPairWeightedAveraging(Adapter):
    """Each sequence averaged over residues; weights from z."""

    serves = _layers("pair_averaging:PairWeightedAveraging")
    signature = "(self, m, z, mask, chunk_heads=<class 'bool'>)"
    operation = "pair_weighted_averaging"
    least = LEAST

    def build(self, module: Any) -> Executable:
        """Return our layer, made of the module's parts."""
        v, gate, bias, out = (LinearOf(getattr(module, f"proj_{name}")) for name in "mgzo")
        norm, norm_z = NormOf(module.norm_m), NormOf(module.norm_z)
        return made_of(PairWeightedAveraging, norm=norm, norm_z=norm_z, v=v, gate=gate, bias=bias, out=out)

    def forward(self, layer: Any, m: Tensor, z: Tensor, mask: Tensor, chunk_heads: Any = bool) -> Tensor:
        """Return the update, as theirs does."""
        return self.update(layer, m, mask, z)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        """Return arguments for about n residues."""
        return (random(2, 5, n, module.c_m), random(2, n, n, module.c_z), random.mask(2, n, n)), {}


class BoltzAttentionPairBias(KeptInFp32):
    """Boltz-2's: s comes normalised; z is the pair representation, or the bias itself (diffusion)."""

    serves: ClassVar[tuple[str, ...]] = (
        "boltz.model.layers.attentionv2:AttentionPairBias",
        "boltzgen.model.layers.attention:AttentionPairBias",
    )
    signature = "(self, s, z, mask, k_in, multiplicity=1)"
    operation = "attention_pair_bias"
    least = LEAST

    def build(self, module: Any) -> Executable:
        """Return our layer, made of the module's parts."""
        if getattr(module, "use_qk_norm", False):
            raise NotServed("queries and keys are normalised")
        norm_z, bias = None, None
        if getattr(module, "compute_pair_bias", True):
            norm_z, bias = NormOf(module.proj_z[0]), LinearOf(module.proj_z[1])
        q, k, v, gate, out = (LinearOf(getattr(module, f"proj_{name}")) for name in "qkvgo")
        attention = AttentionOf(module.num_heads, q, k, v, gate, out)
        norm = NormOf(module.norm_s) if hasattr(module, "norm_s") else NoNorm()
        return made_of(AttentionPairBias, norm=norm, norm_z=norm_z, bias=bias, attention=attention)

    def forward(self, layer: Any, s: Tensor, z: Tensor, mask: Tensor, k_in: Tensor, multiplicity: int = 1) -> Tensor:
        """Return the update, as theirs does."""
        if k_in is not s:
            raise NotServed("keys of other positions than the queries")
        return self.samples(layer, s, z, mask, multiplicity)

    def samples(self, layer: Any, s: Tensor, z: Tensor, mask: Tensor, multiplicity: int) -> Tensor:
        """Return the update of s [B multiplicity, N, c_s]: each z [B, N, N, .] serves so many samples, as rows."""
        s, mask = (t.unflatten(0, (-1, multiplicity)) for t in (s, mask))
        return self.update(layer, s, mask, z).flatten(0, 1)

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        """Return arguments for about n residues."""
        c_z = module.proj_z[1].in_features if getattr(module, "compute_pair_bias", True) else module.num_heads
        s = random(4, n, module.c_s)
        return (s, random(2, n, n, c_z), random.mask(4, n), s), {"multiplicity": 2}


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
        """Return arguments for about n residues."""
        (s, z, mask, _), multiplicity = super().example(module, n, random)
        return (s, z, mask), multiplicity
