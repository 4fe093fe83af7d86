"""The optimizer against its definition, written out plainly in float64 arithmetic."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from warpfold.engine.optim import RULES, OptimConfig, Optimizer, learning_rate


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2, bias=False))


def example(index: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(index)) * 3


def run(model: nn.Module, optimizer: Optimizer, steps: range) -> list[float]:
    norms = []
    for step in steps:
        for k in range(optimizer.config.accumulate):
            model(example(10 * step + k).to(optimizer.weights.dtype)).square().sum().backward()
            norms.append(float(optimizer.collect()))
        optimizer.step(step)
    return norms


def test_steps_are_those_of_the_supplement() -> None:
    config = OptimConfig(accumulate=3, warmup_steps=4, decay_after_steps=5, average_decay=0.9)
    model, plain = small_model(), small_model().double()
    optimizer = Optimizer(model, config)
    m = [torch.zeros_like(p) for p in plain.parameters()]
    v = [torch.zeros_like(p) for p in plain.parameters()]
    average = [p.detach().clone() for p in plain.parameters()]
    for step in range(7):
        mean = [torch.zeros_like(p) for p in plain.parameters()]
        for k in range(3):
            gradient = torch.autograd.grad(
                plain(example(10 * step + k).double()).square().sum(), list(plain.parameters())
            )
            norm = math.sqrt(sum(float(g.square().sum()) for g in gradient))
            for total, g in zip(mean, gradient):
                total += g * min(1, 0.1 / norm) / 3
        rate = 1e-3 * min(1, (step + 1) / 4) * (0.95 if step >= 5 else 1)
        with torch.no_grad():
            for i, p in enumerate(plain.parameters()):
                m[i] = 0.9 * m[i] + 0.1 * mean[i]
                v[i] = 0.999 * v[i] + 0.001 * mean[i] ** 2
                p -= rate * (m[i] / (1 - 0.9 ** (step + 1))) / ((v[i] / (1 - 0.999 ** (step + 1))).sqrt() + 1e-6)
                average[i] = 0.9 * average[i] + 0.1 * p
    run(model, optimizer, range(7))
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-7)
    with optimizer.averaged():
        for ours, theirs in zip(model.parameters(), average):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-7)


def test_clip_of_the_step_bounds_the_mean() -> None:
    """Two examples whose large gradients almost cancel: their mean is small."""
    for mean, expected in [(1.0, 0.5), (0.1, 0.1)]:
        model = nn.Linear(1, 1, bias=False)
        config = OptimConfig(clip="step", clip_norm=0.5, accumulate=2, beta1=0.0, beta2=0.0)
        optimizer = Optimizer(model, config)
        for factor in (100.0, 2 * mean - 100.0):
            (model.weight.sum() * factor).backward()
            assert float(optimizer.collect()) == pytest.approx(abs(factor), rel=1e-5)
        optimizer.step(0)
        assert float(optimizer.state()["moment1.weight"]) == pytest.approx(expected, rel=1e-4)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    model = small_model()
    optimizer = Optimizer(model, OptimConfig(clip="step", accumulate=2))
    run(model, optimizer, range(1))
    before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    for factor in (1.0, float("nan")):
        (model(example(0)).sum() * factor).backward()
        optimizer.collect()
    optimizer.step(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.state().items())
    run(model, optimizer, range(2, 3))
    assert all(p.isfinite().all() for p in model.parameters())


def test_averaged_weights_are_put_back_even_after_an_error() -> None:
    model = small_model()
    optimizer = Optimizer(model, OptimConfig(average_decay=0.5))
    run(model, optimizer, range(3))
    before = [p.detach().clone() for p in model.parameters()]

    def fail() -> None:
        with optimizer.averaged():
            assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))


def test_a_gradient_that_is_not_finite_adds_nothing() -> None:
    model = small_model()
    optimizer = Optimizer(model, OptimConfig())
    for poison in (float("nan"), float("inf")):
        (model(example(0)).sum() * poison).backward()
        assert not math.isfinite(optimizer.collect())
    assert not optimizer.total.any()
    assert not optimizer.gradient.any()


@pytest.mark.parametrize("poison", ["gradient", "loss"])
def test_the_mean_is_over_the_examples_that_were_used(poison: str) -> None:
    """The result is the same without the example that is not finite; a loss may be NaN while its gradient is finite."""
    model, other = small_model(), small_model()
    config = OptimConfig(accumulate=3, warmup_steps=1)
    optimizer, without = Optimizer(model, config), Optimizer(other, replace(config, accumulate=2))
    for k in range(3):
        loss = model(example(k)).square().sum()
        if k == 1:
            loss = loss * math.nan if poison == "gradient" else loss + math.nan
        loss.backward()
        assert math.isfinite(optimizer.collect(loss)) == (k != 1)
    for k in (0, 2):
        other(example(k)).square().sum().backward()
        without.collect()
    assert optimizer.step(0) == without.step(0) == 1e-3
    assert all(torch.equal(optimizer.state()[name], value) for name, value in without.state().items())


@pytest.mark.parametrize("name", RULES)
def test_a_step_without_examples_changes_nothing(name: str) -> None:
    model = small_model()
    optimizer = Optimizer(model, OptimConfig(name=name))
    run(model, optimizer, range(2))
    before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    (model(example(0)).sum() * math.nan).backward()
    optimizer.collect()
    assert optimizer.step(2) == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.state().items())


def test_a_second_optimizer_takes_the_model_over() -> None:
    model, plain = small_model(), small_model()
    first = Optimizer(model, OptimConfig())
    run(model, first, range(1))
    run(plain, Optimizer(plain, OptimConfig()), range(1))
    run(model, Optimizer(model, OptimConfig()), range(2))
    run(plain, Optimizer(plain, OptimConfig()), range(2))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))
    model(example(0)).sum().backward()
    with pytest.raises(RuntimeError, match="another Optimizer took the model over"):
        first.collect()


@pytest.mark.parametrize("name", RULES)
def test_state_goes_round_to_the_bit(name: str) -> None:
    config = OptimConfig(name=name, accumulate=2)
    straight, broken = small_model(), small_model()
    first = Optimizer(straight, config)
    run(straight, first, range(6))

    second = Optimizer(broken, config)
    run(broken, second, range(3))
    state = {name: t.clone() for name, t in second.state().items()}
    resumed = small_model()
    third = Optimizer(resumed, config)
    third.restore(state)
    run(resumed, third, range(3, 6))
    for key, value in first.state().items():
        assert torch.equal(value, third.state()[key]), key


def test_a_fresh_state_goes_round_too() -> None:
    model = small_model()
    first, second = Optimizer(small_model(), OptimConfig()), Optimizer(model, OptimConfig())
    second.restore(first.state())
    run(model, second, range(1))
    assert second.state()["steps"] == 1


def test_parameters_without_gradient_stay() -> None:
    model = small_model()
    model[0].bias.requires_grad_(False)
    bias = model[0].bias.detach().clone()
    run(model, Optimizer(model, OptimConfig(learning_rate=0.1, warmup_steps=1)), range(2))
    assert torch.equal(model[0].bias, bias)


def test_learning_rate() -> None:
    config = OptimConfig()
    assert learning_rate(config, 0) == pytest.approx(1e-6)
    assert learning_rate(config, 999) == learning_rate(config, 49_999) == 1e-3
    assert learning_rate(config, 50_000) == pytest.approx(0.95e-3)
    assert learning_rate(OptimConfig(warmup_steps=0), 0) == 1e-3


@pytest.mark.parametrize(
    "wrong", [{"accumulate": 0}, {"clip_norm": 0.0}, {"average_decay": 1.0}, {"weight_decay": 0.1}, {"name": "adma"}]
)
def test_settings_that_make_no_sense(wrong: dict) -> None:
    with pytest.raises(ValueError):
        OptimConfig(**wrong)
