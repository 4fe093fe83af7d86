"""Transition and outer product by blocks, against their definitions; and torch's checks of their registration."""

import pytest
import torch

from tests.ops.cpu_cases import DTYPES, LAYOUTS, Largest, given, mistakes
from warpfold.ops.cpu import outer as cpu_outer
from warpfold.ops.cpu import transition as cpu_transition
from warpfold.ops.dispatch import implementation
from warpfold.ops.outer import outer_product
from warpfold.ops.transition import HALVES, transition
from warpfold.ops.triangle import triangle_factor


def _transition(activation: str = "relu", biased: bool = True) -> list[torch.Tensor | None]:
    u = 48 * HALVES[activation]
    x, nw, nb, up, up_bias, down, down_bias = given((2, 13, 17, 24), (24,), (24,), (u, 24), (u,), (24, 48), (24,))
    biases = (nb, up_bias, down_bias) if biased else (None, None, None)
    return [2 * x - 1, nw, biases[0], up / 5, biases[1], down / 7, biases[2]]


def _outer(biased: bool = True) -> list[torch.Tensor | None]:
    a, b, weight, bias = given((2, 9, 13, 5), (2, 9, 7, 6), (11, 30), (11,))
    return [a, b, weight, bias if biased else None]


def _count() -> torch.Tensor:
    return given((2, 13, 7, 1), seed=8)[0].abs().round() + 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("hidden", [2**9, 2**20])  # of a block: some positions, all
def test_transition_is_its_definition(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, layout: str, residual: bool, hidden: int
) -> None:
    monkeypatch.setattr(cpu_transition, "HIDDEN", hidden)
    x, *parameters = _transition()
    assert not mistakes(transition, [LAYOUTS[layout](x), *parameters], 6, dtype, residual=residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("activation", "biased"), [("relu", False), ("swiglu", True), ("swiglu", False)])
def test_activations_and_missing_biases(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, residual: bool, activation: str, biased: bool
) -> None:
    monkeypatch.setattr(cpu_transition, "HIDDEN", 2**12)
    given = _transition(activation, biased)
    assert not mistakes(transition, given, 6, dtype, residual=residual, activation=activation)


def test_swiglu_is_the_formula() -> None:
    """silu of the first half, times the second; the halves lie one after the other in `up`."""
    x, nw, _, up, _, down, _ = _transition("swiglu", biased=False)
    n = torch.nn.functional.layer_norm(x, x.shape[-1:], nw)
    gate, value = n @ up[:48].t(), n @ up[48:].t()
    expected = x + (gate / (1 + (-gate).exp()) * value) @ down.t()
    torch.testing.assert_close(transition(x, nw, None, up, None, down, None, activation="swiglu"), expected)


def test_an_activation_that_does_not_fit_its_weights_is_refused() -> None:
    given = _transition("swiglu")
    assert transition.unsupported_reason(*given) == "up and down do not fit together"
    with pytest.raises(ValueError, match=r"up is \[96, 24\], not \[u, c\] = \[48, 24\]"):
        transition.fast(*given)
    with pytest.raises(ValueError, match="activation is 'gelu', not one of relu, swiglu"):
        transition.fast(*given, activation="gelu")
    with pytest.raises(ValueError, match="activation is 'gelu'"):
        transition(*given, activation="gelu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("products", [1, 2000, 2**20])  # of a block: one row, some, all
def test_outer_product_is_its_definition(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, products: int) -> None:
    monkeypatch.setattr(cpu_outer, "PRODUCTS", products)
    count = _count().clamp_min(1)
    assert not mistakes(outer_product, _outer(), 2, dtype, count=count)
    assert not mistakes(outer_product, _outer(biased=False), 2, dtype, count=count)
    assert not mistakes(outer_product, _outer(), 2, dtype, count=count, bias_divided=False)


def test_a_bias_that_is_not_divided_is_added_last() -> None:
    a, b, weight, bias = _outer()
    expected = outer_product.definition(a, b, weight, None, _count()) + bias
    for way in (outer_product.definition, outer_product.fast):
        torch.testing.assert_close(way(a, b, weight, bias, _count(), False), expected, rtol=1e-12, atol=1e-12)


def test_hidden_layers_and_products_never_exist_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_transition, "HIDDEN", 2**11)
    monkeypatch.setattr(cpu_outer, "PRODUCTS", 2000)
    x, *parameters = _transition()
    with Largest() as seen:
        implementation("transition", x)(x, *parameters, True, 1e-5, "relu")
        implementation("transition_backward", x)(x, x, *parameters, True, 1e-5, "relu")
    assert seen.elements == x.numel()
    a, b, weight, bias = _outer()
    with Largest() as seen:
        out = implementation("outer_product", a)(a, b, weight, bias, _count(), True)
        implementation("outer_product_backward", a)(out, a, b, weight, bias, _count(), True)
    assert max(out.numel(), 2000) >= seen.elements
    assert seen.elements < 2 * 13 * 7 * 30


def _run(name: str) -> torch.Tensor:
    if name in HALVES:
        arguments = _transition(name, biased=name == "relu")
        return transition.fast(*(t if t is None else t.requires_grad_() for t in arguments), activation=name)
    if name == "outer_product":
        return outer_product.fast(*(t.requires_grad_() for t in _outer()), _count())
    y, g = (t.requires_grad_() for t in given((4, 5, 6), (4, 5, 6)))
    return triangle_factor.fast(y, g, torch.ones(4, 5))


@pytest.mark.parametrize("name", ["relu", "swiglu", "outer_product", "triangle_factor"])
def test_torch_finds_schema_shapes_and_gradients_in_order(name: str) -> None:
    seen: list[tuple[object, tuple[object, ...]]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function.namespace == "warpfold":
                seen.append((function, args))
            return function(*args, **(kwargs or {}))

    with Watch():
        _run(name).sin().sum().backward()
    assert len(seen) == 2, "one operation forward and one backward"
    for function, args in seen:
        plain = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
        assert set(torch.library.opcheck(function, plain).values()) == {"SUCCESS"}  # type: ignore[arg-type]
