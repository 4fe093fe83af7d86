"""Small layers of other packages, at least one for each class that an adapter serves. No package is imported here.

A layer is defined by "module:Class" below the package's folder of layers, and by its arguments.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Make = Callable[[], nn.Module]


@dataclass(frozen=True)
class Package:
    """A package with adapters.

    name: as imported. adapters: the module of warpfold.adapt. layers: by description. environment: the one that `./dev
    adapters` creates.
    """

    name: str
    adapters: str
    layers: dict[str, Make]
    environment: str


def layer(name: str, *args: Any, **kwargs: Any) -> Make:
    """Return a function that imports "package.module:Class" and creates a layer of it."""

    def make() -> nn.Module:
        # Protenix and OpenDDE would compile their norms otherwise, and there is no compiler.
        os.environ["LAYERNORM_TYPE"] = "torch"
        module, _, kind = name.partition(":")
        made: nn.Module = getattr(importlib.import_module(module), kind)(*args, **kwargs)
        return made

    return make


def under(folder: str, layers: dict[str, tuple[Any, ...]]) -> dict[str, Make]:
    """Return the layers of a table from descriptions to "module:Class" below a folder and positional arguments."""
    return {words: layer(f"{folder}.{name}", *args) for words, (name, *args) in layers.items()}


def changed(make: Make, change: Callable[[Any], None]) -> Make:
    """Return a function that creates a layer and changes it."""

    def made() -> nn.Module:
        module = make()
        change(module)
        return module

    return made


def biased(make: Make, *linears: str) -> Make:
    """Return a function that creates a layer and adds biases to the named linear layers."""

    def change(made: nn.Module) -> None:
        for name in linears:
            module: Any = made.get_submodule(name)
            module.bias = nn.Parameter(module.weight.new_zeros(len(module.weight)))

    return changed(make, change)


def esmfold_product(outgoing: bool, c: int) -> Make:
    def make() -> nn.Module:
        config = layer(
            "transformers.models.esm.configuration_esm:TrunkConfig", pairwise_state_dim=c, pairwise_head_width=4
        )
        return layer(f"{ESM}:EsmFoldTriangleMultiplicativeUpdate", config(), _outgoing=outgoing)()

    return make


def of_esmfold2(kind: str, c: int, chunk: int | None = None, **kwargs: Any) -> Make:
    def make() -> nn.Module:
        msa = {"hidden_size": 20, "outer_hidden_size": 8, "outer_product_chunk_size": chunk, "head_dim": 6}
        msa |= {"num_attention_heads": 4}
        config = layer(
            f"{ESM2}.configuration_esmfold2:EsmFold2Config", pairwise_hidden_size=c, chunk_size=chunk, msa_encoder=msa
        )
        return layer(f"{ESM2}.modeling_esmfold2:EsmFold2{kind}", config(), **kwargs)()

    return make


ESM, ESM2 = "transformers.models.esm.modeling_esmfold", "transformers.models.esmfold2"
ATTENTION = "triangular_attention.attention:TriangleAttention"
BOLTZ, BOLTZGEN = "boltz.model.layers", "boltzgen.model.layers"
OF_BOLTZ = {
    "starting": (f"{ATTENTION}StartingNode", 24, 8, 3),
    "ending": (f"{ATTENTION}EndingNode", 24, 16, 2),
    "transition": ("transition:Transition", 24, 40),
    "outer product": ("outer_product_mean:OuterProductMean", 20, 8, 24),
    "averaging": ("pair_averaging:PairWeightedAveraging", 20, 24, 8, 3),
}
OF_PROTENIX = {
    "outgoing": ("triangular.triangular:TriangleMultiplicationOutgoing", 24, 20),
    "incoming": ("triangular.triangular:TriangleMultiplicationIncoming", 24, 24),
    "starting": ("triangular.triangular:TriangleAttention", 24, 8, 3),
    "ending": ("triangular.triangular:TriangleAttention", 24, 16, 2, False),
    "transition": ("modules.primitives:Transition", 24, 3),
    "outer product": ("triangular.layers:OuterProductMean", 20, 24, 8),
    "averaging": ("modules.pairformer:MSAPairWeightedAveraging", 20, 8, 24, 3),
    "pair bias": ("modules.transformer:AttentionPairBias", False, True, 2, 48, 8, 24),
}
PRODUCT = "triangular_multiplicative_update"
OF_OPENFOLD3 = under(
    "openfold3.core.model.layers",
    {
        "outgoing": (f"{PRODUCT}:TriangleMultiplicationOutgoing", 24, 16),
        "incoming": (f"{PRODUCT}:TriangleMultiplicationIncoming", 24, 16),
        "outgoing, fused": (f"{PRODUCT}:FusedTriangleMultiplicationOutgoing", 24, 16),
        "incoming, fused": (f"{PRODUCT}:FusedTriangleMultiplicationIncoming", 24, 16),
        "starting": ("triangular_attention:TriangleAttention", 24, 8, 3),
        "ending": ("triangular_attention:TriangleAttentionEndingNode", 24, 8, 3),
        "row": ("msa:MSARowAttentionWithPairBias", 24, 16, 8, 3),
        "row without pairs": ("msa:MSAAttention", 24, 8, 3),
        "column": ("msa:MSAColumnAttention", 24, 8, 3),
        "global column": ("msa:MSAColumnGlobalAttention", 24, 8, 3),
        "pair bias": ("attention_pair_bias:AttentionPairBias", 24, 24, 24, 24, 16, 8, 3),
        "pair average": ("msa:MSAPairWeightedAveraging", 24, 8, 16, 3),
        "transition": ("transition:SwiGLUTransition", 24, 4),
        "transition of AlphaFold2": ("transition:ReLUTransition", 24, 2),
        "outer product": ("outer_product_mean:OuterProductMean", 24, 16, 6),
    },
)
GATED = "mha.linear_g", "mha.linear_o"  # the biases of AlphaFold2
OF_OPENFOLD3 |= {
    "incoming with biases": biased(
        OF_OPENFOLD3["incoming"], *(f"linear_{name}" for name in ("a_p", "a_g", "b_p", "b_g", "g", "z"))
    ),
    "starting with biases": biased(OF_OPENFOLD3["starting"], *GATED),
    "row with biases": biased(OF_OPENFOLD3["row"], *GATED),
    "outer product with biases": biased(OF_OPENFOLD3["outer product"], "linear_1", "linear_2"),
}
PACKAGES = {
    "boltz": Package("boltz", "boltz", under(BOLTZ, OF_BOLTZ | {
        "outgoing": ("triangular_mult:TriangleMultiplicationOutgoing", 24),
        "incoming": ("triangular_mult:TriangleMultiplicationIncoming", 24),
        "pair bias": ("attentionv2:AttentionPairBias", 48, 24, 2),
        "pair bias of Boltz-1": ("attention:AttentionPairBias", 48, 24, 2),
    }) | {
        "pair bias given": layer(f"{BOLTZ}.attentionv2:AttentionPairBias", 48, None, 3, compute_pair_bias=False),
        "pair bias of Boltz-1 without norm": layer(
            f"{BOLTZ}.attention:AttentionPairBias", 32, 24, 2, initial_norm=False
        ),
    }, "boltz"),
    "boltzgen": Package("boltzgen", "boltz", under(BOLTZGEN, OF_BOLTZ | {
        "outgoing": ("triangular:TriangleMultiplicationOutgoing", 24),
        "incoming": ("triangular:TriangleMultiplicationIncoming", 24),
        "pair bias": ("attention:AttentionPairBias", 48, 24, 2),
    }) | {
        "pair bias given": layer(f"{BOLTZGEN}.attention:AttentionPairBias", 48, None, 3, compute_pair_bias=False)
    }, "boltzgen"),
    "protenix": Package("protenix", "protenix", under("protenix.model", OF_PROTENIX | {
        "ending": ("triangular.triangular:TriangleAttentionEndingNode", 24, 16, 2),
    }), "protenix"),
    "opendde": Package("opendde", "protenix", under("opendde.model", OF_PROTENIX), "opendde"),
    "rf3": Package("rf3", "rf3", under("rf3.model", {
        "outgoing": ("layers.attention:TriangleMultiplication", 32, 32, "outgoing"),
        "incoming": ("layers.attention:TriangleMultiplication", 32, 32, "incoming"),
        "incoming without biases": ("layers.attention:TriangleMultiplication", 24, 16, "incoming", False, False),
        "starting": ("layers.attention:TriangleAttention", 24, 3, 8),
        "transition": ("layers.layer_utils:Transition", 3, 24),
        "outer product": ("layers.outer_product:OuterProductMean_AF3", 20, 8, 24),
        "averaging": ("RF3_blocks:MSAPairWeightedAverage", 8, 3, 20, 24, True),
    }) | {
        "ending": layer("rf3.model.layers.attention:TriangleAttention", 24, 2, 16, start_node=False),
        # Computes in the dtype of its parameters instead of bf16 only.
        "pair bias": changed(
            layer("rf3.model.layers.pairformer_layers:AttentionPairBiasPairformerDeepspeed", 48, 0, 24, 2),
            lambda made: setattr(made, "force_bfloat16", False),
        ),
    }, "rf3"),
    "openfold3": Package("openfold3", "openfold3", OF_OPENFOLD3, "openfold3"),
    "esmfold": Package("transformers", "esmfold", under("transformers.models.esm", {
        "transition": ("modeling_esmfold:EsmFoldResidueMLP", 24, 96),
        "sequence to pair": ("modeling_esmfold:EsmFoldSequenceToPair", 48, 8, 24),
        "pair to sequence": ("modeling_esmfold:EsmFoldPairToSequence", 24, 6),
    }) | {
        "starting": layer(f"{ESM}:EsmFoldTriangleAttention", 32, 8, 4, starting=True),
        "ending": layer(f"{ESM}:EsmFoldTriangleAttention", 32, 8, 4, starting=False),
        "ending of 24 wide heads": layer(f"{ESM}:EsmFoldTriangleAttention", 20, 24, 2, starting=False),
        "narrow transition": layer(f"{ESM}:EsmFoldResidueMLP", 24, 20, dropout=0.1),
        "outgoing": esmfold_product(True, 32),
        "incoming": esmfold_product(False, 20),
    }, "esmfold"),
    "esmfold2": Package(ESM2, "esmfold", {
        "outgoing": of_esmfold2("TriangleMultiplicativeUpdate", 32, outgoing=True),
        "incoming": of_esmfold2("TriangleMultiplicativeUpdate", 32, outgoing=False),
        "incoming in chunks": of_esmfold2("TriangleMultiplicativeUpdate", 24, 4, outgoing=False),
        "outer product": of_esmfold2("OuterProductMean", 24),
        "outer product in chunks": of_esmfold2("OuterProductMean", 20, 3),
        "averaging": of_esmfold2("MSAPairWeightedAveraging", 24),
        "transition": layer(f"{ESM2}.modeling_esmfold2:EsmFold2Transition", 24, 96, None),
        "transition in chunks": layer(f"{ESM2}.modeling_esmfold2:EsmFold2Transition", 24, 40, 4),
    }, "esmfold"),
}  # fmt: skip
