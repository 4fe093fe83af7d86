"""Layers of EsmFold2 (transformers), small."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

PACKAGE = "transformers.models.esmfold2"
ADAPTERS = "esmfold2"
ENVIRONMENT = "esmfold"  # of transformers


def _make(name: str, *args: Any, **kwargs: Any) -> nn.Module:
    from transformers.models.esmfold2 import modeling_esmfold2

    made: nn.Module = getattr(modeling_esmfold2, name)(*args, **kwargs)
    return made


def _of_config(name: str, c: int, chunk: int | None, **kwargs: Any) -> nn.Module:
    from transformers.models.esmfold2.configuration_esmfold2 import EsmFold2Config

    msa = {"hidden_size": 20, "outer_hidden_size": 8, "outer_product_chunk_size": chunk, "head_dim": 6}
    config = EsmFold2Config(pairwise_hidden_size=c, chunk_size=chunk, msa_encoder={**msa, "num_attention_heads": 4})
    return _make(name, config, **kwargs)


_multiplication = partial(_of_config, "EsmFold2TriangleMultiplicativeUpdate")


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "outgoing": partial(_multiplication, 32, None, outgoing=True),
    "incoming": partial(_multiplication, 32, None, outgoing=False),
    "incoming in chunks": partial(_multiplication, 24, 4, outgoing=False),
    "transition": partial(_make, "EsmFold2Transition", 24, 96, None),
    "outer product": partial(_of_config, "EsmFold2OuterProductMean", 24, None),
    "outer product in chunks": partial(_of_config, "EsmFold2OuterProductMean", 20, 3),
    "pair-weighted averaging": partial(_of_config, "EsmFold2MSAPairWeightedAveraging", 24, None),
    "transition in chunks": partial(_make, "EsmFold2Transition", 24, 40, 4),
}
