"""Layers of EsmFold2 (transformers), small."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

PACKAGE = "transformers.models.esmfold2"
ADAPTERS = "esmfold2"


def _make(name: str, *args: Any, **kwargs: Any) -> nn.Module:
    from transformers.models.esmfold2 import modeling_esmfold2

    made: nn.Module = getattr(modeling_esmfold2, name)(*args, **kwargs)
    return made


def _multiplication(outgoing: bool, c: int, chunk: int | None) -> nn.Module:
    from transformers.models.esmfold2.configuration_esmfold2 import EsmFold2Config

    config = EsmFold2Config(pairwise_hidden_size=c, chunk_size=chunk)
    return _make("EsmFold2TriangleMultiplicativeUpdate", config, outgoing=outgoing)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "outgoing": partial(_multiplication, True, 32, None),
    "incoming": partial(_multiplication, False, 32, None),
    "incoming in chunks": partial(_multiplication, False, 24, 4),
    "transition": partial(_make, "EsmFold2Transition", 24, 96, None),
    "transition in chunks": partial(_make, "EsmFold2Transition", 24, 40, 4),
}
