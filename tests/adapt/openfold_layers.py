"""Layers of OpenFold (openfold), small: where its own package is installed, which is on no package index."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

PACKAGE = "openfold.model"
ADAPTERS = "openfold"
ENVIRONMENT = None  # PyPI's `openfold` is something else


def _make(file: str, name: str, *args: Any, **kwargs: Any) -> nn.Module:
    made: nn.Module = getattr(import_module(f"openfold.model.{file}"), name)(*args, **kwargs)
    return made


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "outgoing": partial(_make, "triangular_multiplicative_update", "TriangleMultiplicationOutgoing", 24, 16),
    "incoming": partial(_make, "triangular_multiplicative_update", "TriangleMultiplicationIncoming", 24, 16),
    "incoming, fused": partial(
        _make, "triangular_multiplicative_update", "FusedTriangleMultiplicationIncoming", 24, 16
    ),
    "starting": partial(_make, "triangular_attention", "TriangleAttention", 24, 8, 3),
    "ending": partial(_make, "triangular_attention", "TriangleAttentionEndingNode", 24, 8, 3),
    "row": partial(_make, "msa", "MSARowAttentionWithPairBias", 24, 16, 8, 3),
    "column": partial(_make, "msa", "MSAColumnAttention", 24, 8, 3),
    "global column": partial(_make, "msa", "MSAColumnGlobalAttention", 24, 8, 3),
    "outer product": partial(_make, "outer_product_mean", "OuterProductMean", 24, 16, 6),
    "transition of z": partial(_make, "pair_transition", "PairTransition", 24, 2),
    "transition of m": partial(_make, "evoformer", "MSATransition", 24, 2),
}
