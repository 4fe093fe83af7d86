"""Small layers of boltz, for test_real.py."""

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from warpfold.adapt.adapter import Adapter
from warpfold.adapt.boltz import (
    BoltzOuterProduct,
    BoltzPairWeightedAveraging,
    BoltzTriangleIncoming,
    BoltzTriangleOutgoing,
)

PACKAGE = ADAPTERS = "boltz"


def layer(module: str, kind: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    """Return what makes a layer of boltz.model.layers."""
    return lambda: getattr(importlib.import_module(f"boltz.model.layers.{module}"), kind)(*args, **kwargs)


TRIANGLE_ATTENTION = "triangular_attention.attention"
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "outgoing": layer("triangular_mult", "TriangleMultiplicationOutgoing", 24),
    "incoming": layer("triangular_mult", "TriangleMultiplicationIncoming", 24),
    "starting": layer(TRIANGLE_ATTENTION, "TriangleAttentionStartingNode", 24, 8, 3),
    "ending": layer(TRIANGLE_ATTENTION, "TriangleAttentionEndingNode", 24, 16, 2),
    "transition": layer("transition", "Transition", 24, 40),
    "outer product": layer("outer_product_mean", "OuterProductMean", 20, 8, 24),
    "averaging": layer("pair_averaging", "PairWeightedAveraging", 20, 24, 8, 3),
    "pair bias": layer("attentionv2", "AttentionPairBias", 48, 24, 2),
    "pair bias given": layer("attentionv2", "AttentionPairBias", 48, None, 3, compute_pair_bias=False),
    "pair bias of Boltz-1": layer("attention", "AttentionPairBias", 48, 24, 2),
    "pair bias of Boltz-1 without norm": layer("attention", "AttentionPairBias", 32, 24, 2, initial_norm=False),
}


class ExchangedFactors(BoltzTriangleIncoming):
    """Takes a for b, as if their incoming product were the supplement's."""

    def build(self, module: Any) -> Any:
        layer: Any = super().build(module)
        layer.a, layer.a_gate, layer.b, layer.b_gate = layer.b, layer.b_gate, layer.a, layer.a_gate
        return layer


class DividedBias(BoltzOuterProduct):
    """Divides the bias too, as AlphaFold2 does."""

    def build(self, module: Any) -> Any:
        layer: Any = super().build(module)
        layer.bias_divided = True
        return layer


class GateForValue(BoltzPairWeightedAveraging):
    """Takes the gate's projection for the values'."""

    def build(self, module: Any) -> Any:
        layer: Any = super().build(module)
        layer.v, layer.gate = layer.gate, layer.v
        return layer


WRONG: dict[str, tuple[str, Callable[[], Adapter]]] = {
    "outgoing as incoming": ("outgoing", BoltzTriangleIncoming),
    "incoming as outgoing": ("incoming", BoltzTriangleOutgoing),
    "a for b": ("incoming", ExchangedFactors),
    "the bias divided": ("outer product", DividedBias),
    "gate for value": ("averaging", GateForValue),
}
