"""Layers of OpenFold3 (openfold3), small."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from warpfold.adapt.adapter import Adapter
from warpfold.adapt.openfold3 import TriangleAttentions, TriangleProducts

PACKAGE = "openfold3"
ADAPTERS = "openfold3"


def _make(file: str, name: str, *args: Any, biased: str = "", **kwargs: Any) -> nn.Module:
    """Make a layer; with biases in the linear layers that are named (of its attention: "mha.linear_q")."""
    made: nn.Module = getattr(import_module(f"openfold3.core.model.layers.{file}"), name)(*args, **kwargs)
    for linear in biased.split():
        module: Any = made.get_submodule(linear)
        module.bias = nn.Parameter(module.weight.new_zeros(len(module.weight)))
    return made


_multiplication = partial(_make, "triangular_multiplicative_update")
_attention = partial(_make, "triangular_attention")
_msa = partial(_make, "msa")
GATED = "mha.linear_g mha.linear_o"  # what has a bias in AlphaFold2
ALL = "linear_a_p linear_a_g linear_b_p linear_b_g linear_g linear_z"

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "outgoing": partial(_multiplication, "TriangleMultiplicationOutgoing", 24, 16),
    "incoming": partial(_multiplication, "TriangleMultiplicationIncoming", 24, 16),
    "incoming with biases": partial(_multiplication, "TriangleMultiplicationIncoming", 16, 16, biased=ALL),
    "outgoing, fused": partial(_multiplication, "FusedTriangleMultiplicationOutgoing", 24, 16),
    "incoming, fused": partial(_multiplication, "FusedTriangleMultiplicationIncoming", 24, 16),
    "starting": partial(_attention, "TriangleAttention", 24, 8, 3),
    "starting with biases": partial(_attention, "TriangleAttention", 24, 8, 3, biased=GATED),
    "ending": partial(_attention, "TriangleAttentionEndingNode", 24, 8, 3),
    "row": partial(_msa, "MSARowAttentionWithPairBias", 24, 16, 8, 3),
    "row with biases": partial(_msa, "MSARowAttentionWithPairBias", 24, 16, 8, 3, biased=GATED),
    "row without pairs": partial(_msa, "MSAAttention", 24, 8, 3),
    "column": partial(_msa, "MSAColumnAttention", 24, 8, 3),
    "global column": partial(_msa, "MSAColumnGlobalAttention", 24, 8, 3),
    "pair bias": partial(_make, "attention_pair_bias", "AttentionPairBias", 24, 24, 24, 24, 16, 8, 3),
    "pair average": partial(_msa, "MSAPairWeightedAveraging", 24, 8, 16, 3),
    "transition": partial(_make, "transition", "SwiGLUTransition", 24, 4),
    "transition of AlphaFold2": partial(_make, "transition", "ReLUTransition", 24, 2),
    "outer product": partial(_make, "outer_product_mean", "OuterProductMean", 24, 16, 6),
    "outer product with biases": partial(
        _make, "outer_product_mean", "OuterProductMean", 24, 16, 6, biased="linear_1 linear_2"
    ),
}


class OtherBias(TriangleAttentions):
    """Transposes the bias where it should not, and the other way round."""

    def forward(self, layer: Any, x: Any, mask: Any = None, transpose_bias: bool = False, *args: Any, **kw: Any) -> Any:
        return super().forward(layer, x, mask, not transpose_bias, *args, **kw)


class OtherDirection(TriangleProducts):
    """Takes outgoing products for incoming ones, and the other way round."""

    def build(self, module: Any) -> Any:
        layer: Any = super().build(module)
        layer.outgoing = not layer.outgoing
        return layer


class OtherFactor(TriangleProducts):
    """Takes a for b."""

    def build(self, module: Any) -> Any:
        layer: Any = super().build(module)
        layer.a, layer.a_gate, layer.b, layer.b_gate = layer.b, layer.b_gate, layer.a, layer.a_gate
        return layer


WRONG: dict[str, tuple[str, Callable[[], Adapter]]] = {
    "the bias transposed, starting": ("starting", OtherBias),
    "the bias transposed, ending": ("ending", OtherBias),
    "outgoing as incoming": ("outgoing", OtherDirection),
    "incoming as outgoing": ("incoming, fused", OtherDirection),
    "a for b": ("incoming", OtherFactor),
    "a for b, fused": ("outgoing, fused", OtherFactor),
}
