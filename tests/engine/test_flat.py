"""Flat: torch's own optimizers on flat buffers do what they do on the parameters themselves."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim

from warpfold.engine.flat import Flat
from warpfold.engine.flat_buffer import AT_ONCE

CLASSES: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.Adam, {}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    (optim.Adam, {"foreach": False, "maximize": True}),
    (optim.Adam, {"foreach": True}),
    (optim.Adam, {"fused": True, "eps": 1e-3}),
    (optim.AdamW, {"weight_decay": 0.1}),
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.Adamax, {}),
    (optim.Adadelta, {}),
    (optim.ASGD, {"lr": 0.1}),
    (optim.Rprop, {}),
]
WIDE = (AT_ONCE // 100 + 1, 100)  # its gradient is put into its place by a hook


def small(dtype: torch.dtype = torch.float64, seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(7, 33), nn.LayerNorm(33), nn.Linear(33, 130), nn.Linear(130, 140), nn.Linear(140, 3)
    ).to(dtype)


def backward(model: nn.Sequential, step: int, skip: bool = False) -> None:
    """Add the gradient of a step to that of the parameters, or to that of the first ones only."""
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
    h = model[:3](x)
    (h if skip else model[3:](h)).square().mean().backward()


def steps(model: nn.Sequential, optimizer: optim.Optimizer, numbers: range, clip: float | None = None) -> None:
    for step in numbers:
        optimizer.zero_grad()
        backward(model, step, skip=step % 3 == 1)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def assert_equal(a: nn.Module, b: nn.Module, rtol: float = 1e-11) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=rtol * p.abs().max().item())


@st.composite
def trainings(draw: st.DrawFn) -> tuple[Any, ...]:
    shape = st.lists(st.integers(1, 9), max_size=3).map(tuple) | st.just((0, 3))
    groups = draw(st.lists(st.lists(shape, min_size=1, max_size=5), min_size=1, max_size=3))
    count = sum(map(len, groups))
    used = draw(st.lists(st.lists(st.booleans(), min_size=count, max_size=count), min_size=1, max_size=5))
    return groups, used, draw(st.sampled_from(CLASSES)), draw(st.sampled_from([None, 0.5]))


@settings(max_examples=40, deadline=None)
@given(trainings())
def test_groups_shapes_and_unused_parameters(training: tuple[Any, ...]) -> None:
    shapes, used, (optimizer, options), clip = training
    random = torch.Generator().manual_seed(3)

    def make() -> list[nn.Parameter]:
        torch.manual_seed(5)
        return [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for group in shapes for shape in group]

    def in_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        left = iter(parameters)
        return [{"params": [next(left) for _ in group], "lr": 0.01 * (1 + i)} for i, group in enumerate(shapes)]

    theirs, ours = make(), make()
    own, flat = optimizer(in_groups(theirs), **options), Flat(in_groups(ours), optimizer, clip=clip, **options)
    for pattern in used:
        own.zero_grad()
        flat.zero_grad()
        for p, q, is_used in zip(theirs, ours, pattern):
            if is_used:
                factor = torch.randn(p.shape, generator=random, dtype=p.dtype)
                for x in (p, q):
                    (x * factor).sin().sum().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(theirs, clip)
        own.step()
        flat.step()
    for p, q in zip(theirs, ours):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)
    a, b = own.state_dict(), flat.state_dict()
    assert b["param_groups"] == a["param_groups"]
    for i, state in a["state"].items():
        if theirs[i].numel():
            assert state.keys() == b["state"][i].keys()
            for key, value in state.items():
                torch.testing.assert_close(value, b["state"][i][key], rtol=1e-9, atol=1e-9, check_dtype=False)
