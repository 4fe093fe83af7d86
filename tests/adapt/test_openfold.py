"""OpenFold's adapters, with the layers of OpenFold3 that are the same but for names."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.adapt.layers import OF_OPENFOLD3
from warpfold.adapt import openfold
from warpfold.adapt.accelerate import adapters
from warpfold.adapt.adapter import NotServed
from warpfold.adapt.verify import compare

SAME = {
    "incoming with biases": openfold.OpenFoldProducts,
    "outgoing, fused": openfold.OpenFoldProducts,
    "starting with biases": openfold.OpenFoldTriangleAttentions,
    "ending": openfold.OpenFoldTriangleAttentions,
    "row with biases": openfold.OpenFoldRowAttentions,
    "row without pairs": openfold.OpenFoldRowAttentions,
    "column": openfold.OpenFoldColumnAttentions,
    "global column": openfold.OpenFoldGlobalColumnAttentions,
    "outer product with biases": openfold.OpenFoldOuterProducts,
    "transition of AlphaFold2": openfold.OpenFoldPairTransitions,
}


def as_theirs(module: Any) -> nn.Module:
    """Return a layer of OpenFold3 whose projections go by OpenFold's names as well."""
    for new, old in (("linear", "linear_z"), ("linear_1", "transition_mlp.layers.0.0")):
        if any(name == old for name, _ in module.named_modules()) and not hasattr(module, new):
            object.__setattr__(module, new, module.get_submodule(old))
    if hasattr(module, "transition_mlp"):
        object.__setattr__(module, "linear_2", module.transition_mlp.linear_out)
    return module


@pytest.mark.parametrize("name", SAME)
def test_agrees_with_openfold3(name: str) -> None:
    pytest.importorskip("openfold3", reason="openfold3 is not installed: ./dev adapters openfold3")
    torch.manual_seed(0)
    module = OF_OPENFOLD3[name]()

    class Named(SAME[name]):  # type: ignore[misc]
        takes = SAME[name].takes if "transition" not in name else openfold.Transitions.takes  # of OpenFold3's arguments

        def build(self, copied: Any) -> Any:
            return super().build(as_theirs(copied))

        def example(self, copied: Any, n: int, random: Any) -> Any:
            return super().example(as_theirs(copied), n, random)

    found = compare(module, Named())
    assert found.agrees, f"differs by {found.difference:.1g} in the {found.where}"


def test_both_versions_are_known() -> None:
    adapter = adapters()["openfold.model.triangular_attention:TriangleAttention"]
    assert [("cuequivariance" in signature) for signature in adapter.signature] == [False, True]


def test_fp16_is_left_to_their_own_code() -> None:
    adapter = adapters()["openfold.model.outer_product_mean:OuterProductMean"]
    with pytest.raises(NotServed, match="fp16"):
        adapter.forward(None, m=torch.zeros(1, 2, 3, dtype=torch.float16))
