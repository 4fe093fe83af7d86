"""Adapters from tables of names, for layers in the style of other packages."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import warpfold
from tests.adapt.stand_in import KNOWN, ServesMlp, TheirModel
from warpfold.adapt import accelerate as subject
from warpfold.adapt.adapter import NotServed, bare_signature, find_adapter, swap
from warpfold.adapt.kinds import SwigluAdapter, TriangleAttentionAdapter, TriangleProductAdapter
from warpfold.adapt.verify import compare
from warpfold.errors import UserError


class DividedProduct(nn.Module):
    """A triangle product divided by the number of residues, with one projection for both factors and one for gates."""

    def __init__(self, c: int, hidden: int, outgoing: bool) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(c), nn.LayerNorm(hidden)
        self.both, self.gates = nn.Linear(c, 2 * hidden), nn.Linear(c, 2 * hidden, bias=False)
        self.last, self.gate = nn.Linear(hidden, c), nn.Linear(c, c)
        self.equation = "...ikc,...jkc->...ijc" if outgoing else "...kic,...kjc->...ijc"

    def forward(self, pairs: Tensor) -> Tensor:
        y = self.before(pairs)
        a, b = (self.both(y) * self.gates(y).sigmoid()).chunk(2, -1)
        product = torch.einsum(self.equation, a, b) / pairs.shape[-2]
        return self.last(self.after(product)) * self.gate(y).sigmoid()


class ServesDividedProduct(TriangleProductAdapter):
    serves = (f"{__name__}:DividedProduct",)
    signature = "(self, pairs)"
    takes = "x=pairs"
    names = "norm=before a,b=both a_gate,b_gate=gates gate=gate norm_out=after out=last"

    def outgoing(self, module: Any) -> bool:
        return bool(module.equation.startswith("...ik"))

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        return self.update(layer, x, x.new_full(x.shape[:-1], x.shape[-2] ** -0.5))


class Undivided(ServesDividedProduct):
    compute = TriangleProductAdapter.compute


class Exchanged(ServesDividedProduct):
    names = f"{ServesDividedProduct.names} a,b=gates a_gate,b_gate=both"


@pytest.mark.parametrize("outgoing", [True, False], ids=["outgoing", "incoming"])
def test_a_product_that_is_divided_is_one_of_factors_that_are(outgoing: bool) -> None:
    """eps has the same effect as there. Without the division it would be n^2 times too small."""
    torch.manual_seed(0)
    module = DividedProduct(12, 8, outgoing)
    assert compare(module, ServesDividedProduct()).agrees
    assert not compare(module, Undivided()).agrees
    assert not compare(module, Exchanged()).agrees


class Gated(nn.Module):
    """A perceptron with unusual argument names."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.inside = nn.ModuleDict({"norm": nn.LayerNorm(c), "gate": nn.Linear(c, 2 * c, bias=False)})
        self.value, self.last = nn.Linear(c, 2 * c, bias=False), nn.Linear(2 * c, c, bias=False)

    def forward(self, things: Tensor, scale: float = 1.0, chunk_size: int | None = None) -> Tensor:
        y = self.inside["norm"](things)
        return scale * self.last(nn.functional.silu(self.inside["gate"](y)) * self.value(y))


class ServesGated(SwigluAdapter):
    serves = (f"{__name__}:Gated",)
    signature = "(self, things, scale=1.0, chunk_size=None)"
    takes = "x=things"
    names = "norm=inside.norm up=inside.gate,value down=last"

    def forward(self, layer: Any, *_: Any, **given: Any) -> Any:
        return super().forward(layer, **given) * given.get("scale", 1.0)


def test_parts_may_lie_inside_and_two_be_one() -> None:
    assert compare(Gated(10), ServesGated()).agrees


def test_what_is_given_by_name_comes_in_its_place() -> None:
    module, x = Gated(10), torch.randn(2, 7, 10)
    want = module(x), module(x, 2.0)
    swap(module, ServesGated(), ServesGated().build(module))
    calls = (
        (((), {"things": x}), ((x,), {"chunk_size": 4})),
        (((), {"things": x, "scale": 2.0}), ((x,), {"scale": 2.0})),
    )
    for wanted, ways in zip(want, calls):
        for args, kwargs in ways:
            assert torch.allclose(module(*args, **kwargs), wanted, atol=1e-6)


def test_a_part_that_a_module_goes_without_is_named() -> None:
    class Attention(nn.Module):
        starting = True
        gate, norm, one = None, nn.LayerNorm(8), nn.Linear(8, 8)

    class Serves(TriangleAttentionAdapter):
        names = "norm=norm bias=one q=one k=one v=one gate=gate out=one heads=training"

    with pytest.raises(NotServed, match="no gate"):
        Serves().build(Attention())
    Attention.gate = nn.Sequential(nn.Linear(8, 8))  # type: ignore[assignment]
    with pytest.raises(NotServed, match="its Sequential has modules inside"):
        Serves().build(Attention())


def handed_on(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def test_a_signature_is_known_through_a_decorator_that_hides_it() -> None:
    """The check of the signature thus also leaves decorated layers that changed it."""

    class Hidden(Gated):
        forward = handed_on(Gated.forward)

    adapter, known = ServesGated(), {f"{__name__}:{Hidden.__qualname__}": ServesGated()}
    assert bare_signature(Hidden.forward) == adapter.signature
    assert find_adapter(Hidden(10), known)[1] is None
    Hidden.forward = handed_on(handed_on(lambda self, things, mask: things))  # type: ignore[assignment]
    assert "its forward is (self, things, mask)" in str(find_adapter(Hidden(10), known)[1])
    assert bare_signature(lambda *args, **kwargs: (args, kwargs)) == "(*args, **kwargs)"


class Fp32Alone(ServesMlp):
    """A layer whose own code multiplies with fp32 numbers, and so fails with 16-bit parameters."""

    serves = (f"{__name__}:MultipliesInFp32",)


class MultipliesInFp32(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(c), nn.Linear(c, 4 * c), nn.Linear(4 * c, c)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu().float())


def test_a_layer_whose_own_code_does_not_run_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "adapters", lambda: {**KNOWN, Fp32Alone.serves[0]: Fp32Alone()})
    monkeypatch.setattr(subject, "keep_memory", lambda: None)
    model = TheirModel(blocks=1)
    model.blocks[0].mlp = MultipliesInFp32(16)
    warpfold.accelerate(model)
    assert len(warpfold.acceleration(model).swapped) == 3
    warpfold.accelerate(warpfold.restore(model).bfloat16())
    left = {kind.class_name: kind.why for kind in warpfold.acceleration(model).left}
    assert left["MultipliesInFp32"].startswith("its own code does not run with parameters of bfloat16: ")
    assert len(warpfold.acceleration(model).swapped) == 2
    with pytest.raises(UserError, match=r"mlp .* cannot be swapped: its own code does not run"):
        warpfold.accelerate(warpfold.restore(model), strict=True)
