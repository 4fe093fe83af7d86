"""Layers of EsmFold (transformers), small."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from warpfold.adapt.adapter import Adapter
from warpfold.adapt.esmfold import EsmFoldTriangleAttention, EsmFoldTriangleMultiplication
from warpfold.model.axial import Executable

PACKAGE = "transformers"
ADAPTERS = "esmfold"


def _make(name: str, *args: Any, **kwargs: Any) -> nn.Module:
    from transformers.models.esm import modeling_esmfold

    made: nn.Module = getattr(modeling_esmfold, name)(*args, **kwargs)
    return made


def _multiplication(outgoing: bool, c: int) -> nn.Module:
    from transformers.models.esm.configuration_esm import TrunkConfig

    return _make(
        "EsmFoldTriangleMultiplicativeUpdate",
        TrunkConfig(pairwise_state_dim=c, pairwise_head_width=4),
        _outgoing=outgoing,
    )


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "starting": partial(_make, "EsmFoldTriangleAttention", 32, 8, 4, starting=True),
    "ending": partial(_make, "EsmFoldTriangleAttention", 32, 8, 4, starting=False),
    "ending of 24 wide heads": partial(_make, "EsmFoldTriangleAttention", 20, 24, 2, starting=False),
    "outgoing": partial(_multiplication, True, 32),
    "incoming": partial(_multiplication, False, 32),
    "incoming of 20": partial(_multiplication, False, 20),
    "transition": partial(_make, "EsmFoldResidueMLP", 24, 96),
    "narrow transition": partial(_make, "EsmFoldResidueMLP", 24, 20, dropout=0.1),
    "sequence to pair": partial(_make, "EsmFoldSequenceToPair", 48, 8, 24),
    "pair to sequence": partial(_make, "EsmFoldPairToSequence", 24, 6),
}


class OtherNode(EsmFoldTriangleAttention):
    """Takes a starting node for an ending one, and the other way round."""

    def build(self, module: Any) -> Executable:
        layer: Any = super().build(module)
        layer.by_column = not layer.by_column
        return layer


class OtherDirection(EsmFoldTriangleMultiplication):
    """Takes outgoing products for incoming ones, and the other way round."""

    def build(self, module: Any) -> Executable:
        layer: Any = super().build(module)
        layer.outgoing = not layer.outgoing
        return layer


class OtherFactor(EsmFoldTriangleMultiplication):
    """Takes a for b."""

    def build(self, module: Any) -> Executable:
        layer: Any = super().build(module)
        layer.a, layer.a_gate, layer.b, layer.b_gate = layer.b, layer.b_gate, layer.a, layer.a_gate
        return layer


WRONG: dict[str, tuple[str, Callable[[], Adapter]]] = {
    "the bias transposed": ("ending", OtherNode),
    "the bias transposed, starting": ("starting", OtherNode),
    "incoming as outgoing": ("incoming", OtherDirection),
    "outgoing as incoming": ("outgoing", OtherDirection),
    "a for b": ("incoming", OtherFactor),
}
