"""Small layers of boltzgen, for test_real.py."""

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

PACKAGE, ADAPTERS = "boltzgen", "boltz"


def layer(module: str, kind: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    """Return what makes a layer of boltzgen.model.layers."""
    return lambda: getattr(importlib.import_module(f"boltzgen.model.layers.{module}"), kind)(*args, **kwargs)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "outgoing": layer("triangular", "TriangleMultiplicationOutgoing", 24),
    "incoming": layer("triangular", "TriangleMultiplicationIncoming", 24),
    "starting": layer("triangular_attention.attention", "TriangleAttentionStartingNode", 24, 8, 3),
    "ending": layer("triangular_attention.attention", "TriangleAttentionEndingNode", 24, 16, 2),
    "transition": layer("transition", "Transition", 24, 40),
    "outer product": layer("outer_product_mean", "OuterProductMean", 20, 8, 24),
    "averaging": layer("pair_averaging", "PairWeightedAveraging", 20, 24, 8, 3),
    "pair bias": layer("attention", "AttentionPairBias", 48, 24, 2),
    "pair bias given": layer("attention", "AttentionPairBias", 48, None, 3, compute_pair_bias=False),
}
