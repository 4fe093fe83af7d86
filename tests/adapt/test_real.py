"""Compare every layer with an adapter with its own code, for the packages that are installed.

    ./dev adapters                    # every package, each in its own environment

Each layer of layers.py is compared, and its names, parameters and hooks are preserved. The comparison must detect
deliberately wrong adapters.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.adapt.layers import PACKAGES
from warpfold.adapt import accelerate as known
from warpfold.adapt.accelerate import accelerate, acceleration, restore
from warpfold.adapt.adapter import (
    Adapter,
    ForeignAttention,
    ForeignLinear,
    ForeignNorm,
    RandomInputs,
    StackedLinear,
    find_adapter,
    is_swapped,
    qualified_name,
)
from warpfold.adapt.verify import compare, redrawn
from warpfold.model.evoformer import TriangleAttention


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise the tests by the layers of the installed packages."""
    if "name" in metafunc.fixturenames:
        here = [package for package in PACKAGES if is_here(package, metafunc.config)]
        layers = [(package, name) for package in here for name in PACKAGES[package].layers]
        metafunc.parametrize(("package", "name"), layers, ids=lambda words: words.replace(" ", "-"))


def test_every_file_of_adapters_has_layers_and_every_package_an_environment() -> None:
    assert {one.adapters for one in PACKAGES.values()} == set(known.PACKAGES) - {"plain"}  # torch's: test_plain.py
    there = {path.name.partition(".")[0] for path in Path(__file__).parent.glob("environments/*.txt")}
    assert {one.environment for one in PACKAGES.values()} == there


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_agrees(package: str, name: str, dtype: torch.dtype) -> None:
    module = layer_of(package, name)
    adapter = served(module)
    found = compare(adapter.cast(module, dtype), adapter)
    assert found.agrees, f"differs by {found.difference:.1g} in the {found.where}"


def test_all_of_it_stays(package: str, name: str) -> None:
    module = redrawn(layer_of(package, name).eval(), 0)
    adapter, model, calls = served(module), nn.ModuleDict({"layer": module}), []
    module.register_forward_hook(lambda *_: calls.append("after"))
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    parameters, state, class_name = list(model.named_parameters()), model.state_dict(), type(module)
    names = [key for key, _ in model.named_modules()]
    args, kwargs = adapter.example(module, 7, RandomInputs(parameters[0][1]))
    before = module(*args, **kwargs)
    accelerate(model, verify=False)
    assert is_swapped(module)
    assert isinstance(module, class_name)
    assert "layer" in acceleration(model).swapped[0].names
    args, kwargs = adapter.example(module, 7, RandomInputs(parameters[0][1]))  # a layer may modify its inputs
    after = module(*args, **kwargs)
    assert calls == ["before", "after"] * 2
    assert [(key, id(p)) for key, p in model.named_parameters()] == [(key, id(p)) for key, p in parameters]
    assert [key for key, _ in model.named_modules()] == names
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(x, y) for x, y in zip(model.state_dict().values(), state.values()))
    for mine, theirs in zip(tensors(after), tensors(before), strict=True):
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype
    restore(model)
    assert type(module) is class_name


def test_what_is_wrong_differs(package: str, name: str) -> None:
    module = layer_of(package, name)
    adapter = served(module)
    unseen = [what for what, wrong in wrong_adapters(module, adapter) if compare(module, wrong).agrees]
    assert not unseen


@pytest.mark.parametrize("package", PACKAGES)
def test_every_class_has_a_layer(package: str, request: pytest.FixtureRequest) -> None:
    one = PACKAGES[package]
    if not is_here(package, request.config):
        pytest.skip(f"{one.name} is not installed: ./dev adapters {one.environment}")
    made = {qualified_name(kind) for name in one.layers for kind in type(layer_of(package, name)).__mro__}
    served = [name for name in known.adapters() if name.startswith(f"{one.name.partition('.')[0]}.")]
    of_package = [name for name in served if one.name != "transformers" or ".esm." in name]
    assert {name for name in of_package if name.startswith(one.name) and exists(name)} <= made


def is_here(package: str, config: pytest.Config) -> bool:
    """Whether to test a package: it is installed, or must be (`./dev adapters`)."""
    return is_installed(PACKAGES[package].name) or config.getoption("installed", None) == package


def layer_of(package: str, name: str) -> nn.Module:
    """Create a layer, with the same parameters each time."""
    torch.manual_seed(0)
    return PACKAGES[package].layers[name]()


def served(module: nn.Module) -> Adapter:
    adapter, why = find_adapter(module, known.adapters())
    assert why is None
    assert adapter is not None, f"{qualified_name(type(module))} is not served"
    return adapter


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # containers of the layer
        return False


def exists(name: str) -> bool:
    """Whether the installed version has a class."""
    module, _, kind = name.partition(":")
    try:
        return hasattr(importlib.import_module(module), kind)
    except ImportError:
        return False


def tensors(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [x for x in output if isinstance(x, Tensor)]


# Deliberately wrong adapters.


def wrong_adapters(module: nn.Module, adapter: Adapter) -> Iterator[tuple[str, Adapter]]:
    """Yield deliberately wrong adapters of a module, each with a description of its single error."""
    layer = adapter.build(module)
    args, kwargs = adapter.example(module, 7, RandomInputs(next(module.parameters())))
    if any(is_mask(x) for x in (*args, *kwargs.values())):
        yield "mask left out", without_masks(adapter)
    switches = ["outgoing", "bias_divided", *(["bias_transposed"] if getattr(layer, "shares", None) else [])]
    switches += ["by_column"] if isinstance(layer, TriangleAttention) else []
    for name in (name for name in switches if hasattr(layer, name)):
        yield f"not {name}", changed(adapter, lambda made, name=name: setattr(made, name, not getattr(made, name)))
    for pair in (("a", "b"), ("a_gate", "b_gate"), ("v", "gate")):
        weights = [getattr(getattr(layer, name, None), "weight", None) for name in pair]
        if all(x is not None for x in weights) and weights[0].shape == weights[1].shape:
            yield " for ".join(pair), changed(adapter, lambda made, pair=pair: exchange(made, *pair))
    for path, part in parts(layer):
        if isinstance(part, ForeignLinear | StackedLinear) and len(part.weight) > 1:
            yield f"{path}: halves swapped", with_part(adapter, path, SwappedHalves)
        # The bias of norm_z shifts all logits of a query equally, which changes no weight.
        if isinstance(part, ForeignNorm) and part.bias is not None and path[-1] != "norm_z":
            yield f"{path}: without its bias", with_part(adapter, path, WithoutBias)


def parts(owner: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the parts from which our layer was assembled."""
    for name, part in (*vars(owner).items(), *getattr(owner, "_modules", {}).items()):
        if isinstance(part, ForeignLinear | StackedLinear | ForeignNorm):
            yield (*path, name), part
        elif isinstance(part, nn.Module | ForeignAttention):
            yield from parts(part, (*path, name))


class SwappedHalves:
    """A projection with exchanged halves of outputs, but not of biases."""

    packed = None

    def __init__(self, right: Any) -> None:
        self.right = right

    @property
    def weight(self) -> Tensor:
        return self.right.weight.roll(len(self.right.weight) // 2, 0)

    @property
    def bias(self) -> Tensor | None:
        return self.right.bias

    __call__ = ForeignLinear.__call__


class WithoutBias(ForeignNorm):
    """A norm that ignores its bias."""

    def __init__(self, right: ForeignNorm) -> None:
        super().__init__(right.module)

    @property
    def bias(self) -> Tensor | None:
        return torch.zeros_like(self.weight)


def changed(adapter: Adapter, change: Callable[[Any], None]) -> Adapter:
    """Return an adapter that changes every layer after building it."""

    def build(self: Adapter, module: nn.Module) -> nn.Module:
        layer = type(adapter).build(self, module)
        change(layer)
        return layer

    return type("Wrong", (type(adapter),), {"build": build})()


def exchange(layer: Any, one: str, other: str) -> None:
    vars(layer)[one], vars(layer)[other] = vars(layer)[other], vars(layer)[one]


def with_part(adapter: Adapter, path: tuple[str, ...], wrong: Callable[[Any], Any]) -> Adapter:
    """Return an adapter that replaces one part by a wrong one."""

    def change(owner: Any) -> None:
        for name in path[:-1]:
            owner = getattr(owner, name)
        vars(owner)[path[-1]] = wrong(getattr(owner, path[-1]))

    return changed(adapter, change)


def without_masks(adapter: Adapter) -> Adapter:
    """Return an adapter that replaces every mask by ones."""

    def forward(self: Adapter, layer: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(torch.ones_like(x) if is_mask(x) else x for x in args)
        kwargs = {name: torch.ones_like(x) if is_mask(x) else x for name, x in kwargs.items()}
        return type(adapter).forward(self, layer, *args, **kwargs)

    return type("Wrong", (type(adapter),), {"forward": forward})()


def is_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and bool(((x == 0) | (x == 1)).all())
