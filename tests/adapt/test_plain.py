"""Layers of plain torch: equal to torch's, and swapped only if requested or measured to be faster."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import warpfold
from warpfold.adapt.accelerate import adapters
from warpfold.adapt.adapter import Adapter, find_adapter, swap
from warpfold.adapt.verify import compare
from warpfold.errors import UserError
from warpfold.ops.dispatch import always_fast, refusals

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "norm": lambda: nn.LayerNorm(24),
    "norm without bias": lambda: nn.LayerNorm(24, bias=False),
}
LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "norm of two axes": (lambda: nn.LayerNorm((2, 3)), "several axes"),
    "norm without weights": (lambda: nn.LayerNorm(3, elementwise_affine=False), "has no weight"),
}


def adapter(module: nn.Module) -> Adapter:
    found, why = find_adapter(module, adapters())
    assert found is not None
    assert why is None
    return found


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_are_equal_to_torchs(name: str, dtype: torch.dtype) -> None:
    module = LAYERS[name]().to(dtype)
    found = compare(module, adapter(module))
    assert found.agrees, found


@pytest.mark.parametrize("name", LEFT)
def test_layers_that_differ_are_left(name: str) -> None:
    make, why = LEFT[name]
    with pytest.raises(UserError, match=why):
        warpfold.accelerate(nn.Sequential(make()), only="0", strict=True)


def test_plain_torch_is_swapped_where_asked_for() -> None:
    class Scaled(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = nn.Sequential(nn.LayerNorm(8), Scaled(8))
    with pytest.raises(UserError, match="plain torch: swapped where only= names it"):
        warpfold.accelerate(model)
    x = torch.randn(3, 8)
    y = model(x)
    warpfold.accelerate(model, only="layer_norm")
    assert torch.allclose(model(x), y, atol=1e-6)
    assert [kind.names for kind in warpfold.acceleration(model).swapped] == [("0",)]


# ---- attention with a bias that requires a gradient


@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7), (1, 3, 5, 7), (2, 3, 5, 7), (2, 1, 1, 7)])
def test_attention_with_a_bias_has_torchs_gradients(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7))
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(2, 3, 5, 8, dtype=torch.float64)

    def run() -> list[Tensor]:
        o = F.scaled_dot_product_attention(q, k, v, bias, scale=0.3)
        return [o, *torch.autograd.grad(o, [q, k, v, bias], grad)]

    want = run()
    with warpfold.biased_attention(), always_fast():
        got = run()
    for a, b in zip(want, got):
        assert a.shape == b.shape
        assert (a - b).abs().max() < 1e-12


def test_other_attention_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*of: Any) -> None:
        raise AssertionError

    q, bias = torch.randn(1, 2, 4, 8), torch.zeros(4, 4, requires_grad=True)
    monkeypatch.setattr("warpfold.adapt.plain.attention", never)
    with warpfold.biased_attention():
        for options in ({}, {"attn_mask": bias.detach()}, {"is_causal": True}, {"attn_mask": bias, "dropout_p": 0.5}):
            assert F.scaled_dot_product_attention(q, q, q, **options).shape == q.shape  # type: ignore[arg-type]
        with torch.no_grad():
            F.scaled_dot_product_attention(q, q, q, bias)
        with pytest.raises(AssertionError):
            F.scaled_dot_product_attention(q, q, q, bias)


# ---- perceptrons, recognised by their formulas


class Feed(nn.Module):
    """A perceptron whose forward is selected by `how`."""

    def __init__(self, how: str, p: float = 0.0) -> None:
        super().__init__()
        self.how, self.ln, self.drop = how, nn.LayerNorm(12), nn.Dropout(p)
        packed = "packed" in how
        self.w1, self.w2 = nn.Linear(12, 40 if packed else 20), nn.Linear(20, 12)
        if "swiglu" in how and not packed:
            self.w3 = nn.Linear(12, 20)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.ln(x)
        if "packed" in self.how:
            a, b = self.w1(y).chunk(2, dim=-1)
            h = a * F.silu(b) if "value first" in self.how else F.silu(a) * b
        elif "swiglu" in self.how:
            h = F.silu(self.w1(y)) * self.w3(y)
        elif "twice" in self.how:
            h = self.w1(y + x).relu()
        else:
            h = F.gelu(self.w1(y)) if "gelu" in self.how else F.relu(self.w1(y))
        out = self.drop(self.w2(h))
        return x + out if "residual" in self.how else out


HOW = ("relu", "relu, residual", "swiglu", "swiglu, residual", "swiglu packed", "swiglu packed, value first")


@pytest.mark.parametrize("how", HOW)
def test_perceptrons_are_known_by_what_they_compute(how: str) -> None:
    module = Feed(how)
    found = compare(module, adapter(module))
    assert found.agrees, found
    assert found.difference < 1e-4


def test_a_sequence_of_layers_is_a_perceptron() -> None:
    module = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 12))
    x = torch.randn(3, 12)
    want = module(x)
    warpfold.accelerate(module, only="transition")
    assert torch.allclose(module(x), want, atol=1e-6)
    warpfold.restore(module)


@pytest.mark.parametrize("how", ["gelu", "twice"])
def test_other_perceptrons_are_not_known(how: str) -> None:
    assert find_adapter(Feed(how), adapters()) == (None, None)


def test_dropout_of_a_perceptron_is_its_own() -> None:
    module, x = Feed("relu", p=0.5), torch.randn(4, 12)
    swap(module, adapter(module), adapter(module).build(module))
    before = refusals()
    assert not torch.equal(module.train()(x), module(x))
    assert sum("dropout" in name for name in refusals(before)) == 1
    assert torch.equal(module.eval()(x), module(x))
