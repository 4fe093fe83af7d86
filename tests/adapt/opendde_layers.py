"""Small layers of opendde, for test_real.py."""

import importlib
import os
from collections.abc import Callable
from typing import Any

from torch import nn

PACKAGE, ADAPTERS = "opendde", "protenix"


def layer(module: str, kind: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    """Return what makes a layer of opendde.model; its norms are torch's, as there is no compiler for others."""

    def make() -> nn.Module:
        os.environ["LAYERNORM_TYPE"] = "torch"  # read where the package is imported
        made: nn.Module = getattr(importlib.import_module(f"opendde.model.{module}"), kind)(*args, **kwargs)
        return made

    return make


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "outgoing": layer("triangular.triangular", "TriangleMultiplicationOutgoing", 24, 20),
    "incoming": layer("triangular.triangular", "TriangleMultiplicationIncoming", 24, 24),
    "starting": layer("triangular.triangular", "TriangleAttention", 24, 8, 3),
    "ending": layer("triangular.triangular", "TriangleAttention", 24, 16, 2, False),
    "transition": layer("modules.primitives", "Transition", 24, 3),
    "outer product": layer("triangular.layers", "OuterProductMean", 20, 24, 8),
    "averaging": layer("modules.pairformer", "MSAPairWeightedAveraging", 20, 8, 24, 3),
    "pair bias": layer("modules.transformer", "AttentionPairBias", False, True, 2, 48, 8, 24),
}
