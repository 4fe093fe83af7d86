"""Every layer of other people's packages that is served here, against their own code, where a package is installed.

    ./dev adapters                    # every package, each in an environment of its own

Each layer of layers.py is compared; what it is called by, holds and is hooked by stays; and adapters that are wrong on
purpose are found to differ, so that the comparison is known to see what it should.
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
    AttentionOf,
    LinearOf,
    NormOf,
    RandomInputs,
    StackedOf,
    adapter_of,
    is_swapped,
    name_of,
)
from warpfold.adapt.verify import compare, redrawn
from warpfold.model.evoformer import TriangleAttention


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every layer of the packages that are here; of another, `test_every_class_has_a_layer` says that it is not."""
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
    parameters, state, of_class = list(model.named_parameters()), model.state_dict(), type(module)
    names = [key for key, _ in model.named_modules()]
    args, kwargs = adapter.example(module, 7, RandomInputs(parameters[0][1]))
    before = module(*args, **kwargs)
    accelerate(model, verify=False)
    assert is_swapped(module)
    assert isinstance(module, of_class)
    assert "layer" in acceleration(model).swapped[0].names
    args, kwargs = adapter.example(module, 7, RandomInputs(parameters[0][1]))  # a layer may work in place
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
    assert type(module) is of_class


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
    made = {name_of(kind) for name in one.layers for kind in type(layer_of(package, name)).__mro__}
    served = [name for name in known.adapters() if name.startswith(f"{one.name.partition('.')[0]}.")]
    of_package = [name for name in served if one.name != "transformers" or ".esm." in name]
    assert {name for name in of_package if name.startswith(one.name) and exists(name)} <= made


def is_here(package: str, config: pytest.Config) -> bool:
    """Return whether a package's tests run: it is installed, or has to be (`./dev adapters`)."""
    return is_installed(PACKAGES[package].name) or config.getoption("installed", None) == package


def layer_of(package: str, name: str) -> nn.Module:
    """Make a layer, the same each time."""
    torch.manual_seed(0)
    return PACKAGES[package].layers[name]()


def served(module: nn.Module) -> Adapter:
    adapter, why = adapter_of(module, known.adapters())
    assert why is None
    assert adapter is not None, f"{name_of(type(module))} is not served"
    return adapter


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what it is part of
        return False


def exists(name: str) -> bool:
    """Return whether a class is in the version that is installed."""
    module, _, kind = name.partition(":")
    try:
        return hasattr(importlib.import_module(module), kind)
    except ImportError:
        return False


def tensors(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [x for x in output if isinstance(x, Tensor)]


# Adapters that are wrong on purpose.


def wrong_adapters(module: nn.Module, adapter: Adapter) -> Iterator[tuple[str, Adapter]]:
    """Yield adapters of a module, each with one thing wrong, and what it is."""
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
        if isinstance(part, LinearOf | StackedOf) and len(part.weight) > 1:
            yield f"{path}: halves swapped", with_part(adapter, path, SwappedHalves)
        # norm_z: its bias is added to all logits of a query alike, which changes no weight.
        if isinstance(part, NormOf) and part.bias is not None and path[-1] != "norm_z":
            yield f"{path}: without its bias", with_part(adapter, path, WithoutBias)


def parts(owner: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield what a layer of ours was made of."""
    for name, part in (*vars(owner).items(), *getattr(owner, "_modules", {}).items()):
        if isinstance(part, LinearOf | StackedOf | NormOf):
            yield (*path, name), part
        elif isinstance(part, nn.Module | AttentionOf):
            yield from parts(part, (*path, name))


class SwappedHalves:
    """A projection whose two halves of outputs changed places, all but their biases."""

    packed = None

    def __init__(self, right: Any) -> None:
        self.right = right

    @property
    def weight(self) -> Tensor:
        return self.right.weight.roll(len(self.right.weight) // 2, 0)

    @property
    def bias(self) -> Tensor | None:
        return self.right.bias

    __call__ = LinearOf.__call__


class WithoutBias(NormOf):
    """A norm that leaves its bias out."""

    def __init__(self, right: NormOf) -> None:
        super().__init__(right.module)

    @property
    def bias(self) -> Tensor | None:
        return torch.zeros_like(self.weight)


def changed(adapter: Adapter, change: Callable[[Any], None]) -> Adapter:
    """Return an adapter that changes every layer that it makes."""

    def build(self: Adapter, module: nn.Module) -> nn.Module:
        layer = type(adapter).build(self, module)
        change(layer)
        return layer

    return type("Wrong", (type(adapter),), {"build": build})()


def exchange(layer: Any, one: str, other: str) -> None:
    vars(layer)[one], vars(layer)[other] = vars(layer)[other], vars(layer)[one]


def with_part(adapter: Adapter, path: tuple[str, ...], wrong: Callable[[Any], Any]) -> Adapter:
    """Return an adapter that puts something wrong in the place of one part."""

    def change(owner: Any) -> None:
        for name in path[:-1]:
            owner = getattr(owner, name)
        vars(owner)[path[-1]] = wrong(getattr(owner, path[-1]))

    return changed(adapter, change)


def without_masks(adapter: Adapter) -> Adapter:
    """Return an adapter that takes every mask for ones."""

    def forward(self: Adapter, layer: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(torch.ones_like(x) if is_mask(x) else x for x in args)
        kwargs = {name: torch.ones_like(x) if is_mask(x) else x for name, x in kwargs.items()}
        return type(adapter).forward(self, layer, *args, **kwargs)

    return type("Wrong", (type(adapter),), {"forward": forward})()


def is_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and bool(((x == 0) | (x == 1)).all())
