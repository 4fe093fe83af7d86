"""Small layers of RoseTTAFold3 (rc-foundry), for test_real.py."""

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from warpfold.adapt.adapter import Adapter
from warpfold.adapt.kinds import TriangleProductAdapter
from warpfold.adapt.rf3 import RF3OuterProduct, RF3TriangleAttention, RF3TriangleProduct

PACKAGE = ADAPTERS = "rf3"


def layer(module: str, kind: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    """Return what makes a layer of rf3.model."""
    return lambda: getattr(importlib.import_module(f"rf3.model.{module}"), kind)(*args, **kwargs)


def pair_bias(c_s: int, c_z: int, heads: int) -> nn.Module:
    """Make an attention with pair bias that computes in the dtype of its parameters, not in bf16 alone."""
    made = layer("layers.pairformer_layers", "AttentionPairBiasPairformerDeepspeed", c_s, 0, c_z, heads)()
    made.force_bfloat16 = False
    return made


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "outgoing": layer("layers.attention", "TriangleMultiplication", 32, 32, "outgoing"),
    "incoming": layer("layers.attention", "TriangleMultiplication", 32, 32, "incoming"),
    "incoming without biases": layer("layers.attention", "TriangleMultiplication", 24, 16, "incoming", False, False),
    "starting": layer("layers.attention", "TriangleAttention", 24, 3, 8),
    "ending": layer("layers.attention", "TriangleAttention", 24, 2, 16, start_node=False),
    "transition": layer("layers.layer_utils", "Transition", 3, 24),
    "outer product": layer("layers.outer_product", "OuterProductMean_AF3", 20, 8, 24),
    "averaging": layer("RF3_blocks", "MSAPairWeightedAverage", 8, 3, 20, 24, True),
    "pair bias": lambda: pair_bias(48, 24, 2),
}


class Transposed(RF3TriangleAttention):
    """Transposes the bias where it should not, and the other way round."""

    def build(self, module: Any) -> Any:
        layer: Any = super().build(module)
        layer.bias_transposed = not layer.bias_transposed
        return layer


class Undivided(RF3TriangleProduct):
    """Does not divide products by the number of residues: eps is then too little by the square of it."""

    forward = TriangleProductAdapter.forward


class OtherWay(RF3TriangleProduct):
    """Takes outgoing products for incoming ones, and the other way round."""

    def outgoing(self, module: Any) -> bool:
        return not super().outgoing(module)


class WithBiasDivided(RF3OuterProduct):
    """Divides the bias too, as AlphaFold2 does."""

    settings: ClassVar = {**RF3OuterProduct.settings, "bias_divided": True}


WRONG: dict[str, tuple[str, Callable[[], Adapter]]] = {
    "the bias transposed, starting": ("starting", Transposed),
    "the bias transposed, ending": ("ending", Transposed),
    "undivided": ("outgoing", Undivided),
    "outgoing as incoming": ("outgoing", OtherWay),
    "incoming as outgoing": ("incoming", OtherWay),
    "the bias divided": ("outer product", WithBiasDivided),
}
