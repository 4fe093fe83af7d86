"""Test the optimizer and its update rules against float64 definitions, on one rank and on several."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.mac import mac
from tests.ranks import RankError, run_ranks
from warpfold.engine import optim
from warpfold.engine.optim import (
    FIRST_LOSS_SCALE,
    MAX_LOSS_SCALE,
    RULES,
    LossScale,
    OptimConfig,
    Optimizer,
    PlainRule,
    learning_rate,
)
from warpfold.parallel.compress import CompressionConfig
from warpfold.parallel.exchange import ALIGN, SyncConfig
from warpfold.parallel.mesh import make_mesh

State = dict[str, Tensor]


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2, bias=False))


def example(index: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(index)) * 3


def collect(model: nn.Module, optimizer: Optimizer, index: int, poison: float = 1.0, loss_too: bool = True) -> float:
    """Collect an example; return the norm.  poison: a factor of its gradient, and with `loss_too` of its loss."""
    out = model(example(index).to(optimizer.weights.dtype))
    out.register_hook(lambda grad: grad * poison)
    loss = out.square().sum()
    optimizer.scaled(loss).backward()
    return float(optimizer.collect(loss * poison if loss_too else loss))


def run(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        for k in range(optimizer.share):
            collect(model, optimizer, 10 * step + k)
        optimizer.step(step)


def state_of(optimizer: Optimizer) -> State:
    return {name: tensor.clone() for name, tensor in optimizer.state().items()}


def same(ours: State, theirs: State, but: str | tuple[str, ...] = "-") -> bool:
    """Whether all bits of two tensors are equal."""
    return all(torch.equal(ours[name], x) for name, x in theirs.items() if not name.startswith(but))


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


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_uniform_average_is_the_mean_of_the_weights_since_its_beginning(rule: str) -> None:
    model, start = small_model(), 3
    config = OptimConfig(name=rule, warmup_steps=1, average="uniform", average_from=start, average_decay=0.9)
    optimizer, plain = Optimizer(model, config), [p.detach().clone() for p in model.parameters()]
    seen: list[list[torch.Tensor]] = []
    for step in range(7):
        # A checkpoint and the step are the whole state.
        if step == 5:
            again = Optimizer(model := small_model(), config)
            again.restore(state_of(optimizer))
            optimizer = again
        run(model, optimizer, range(step, step + 1))
        seen.append([p.detach().clone() for p in model.parameters()])
        if step < start:
            plain = [0.9 * a + 0.1 * p for a, p in zip(plain, seen[-1])]
        else:
            plain = [torch.stack(weights).mean(0) for weights in zip(*seen[start:])]
        with optimizer.averaged():
            for ours, right in zip(model.parameters(), plain):
                torch.testing.assert_close(ours.detach(), right, rtol=1e-5, atol=1e-7)
    assert any(not torch.allclose(p, q, rtol=1e-5) for p, q in zip(seen[-1], plain))


def test_moments_of_another_run_go_on_where_both_have_them() -> None:
    config = OptimConfig(warmup_steps=1)
    first, whole = small_model(), small_model()
    before = Optimizer(first, config)
    run(first, before, range(3))
    run(whole, Optimizer(whole, config), range(4))
    state = state_of(before)

    second = small_model()
    second.load_state_dict(first.state_dict())
    optimizer = Optimizer(second, config)
    assert optimizer.take_moments(state) == []
    run(second, optimizer, range(3, 4))
    assert all(torch.equal(p, q) for p, q in zip(second.parameters(), whole.parameters()))

    names = [name for name, _ in second.named_parameters()]
    del state[f"moment1.{names[0]}"]
    state[f"moment2.{names[1]}"] = torch.ones(1)
    optimizer = Optimizer(second, config)
    assert optimizer.take_moments(state) == names[:2]
    found = state_of(optimizer)
    assert found["steps"] == 3
    assert torch.equal(found[f"moment2.{names[-1]}"], state[f"moment2.{names[-1]}"])


def test_clip_of_the_step_bounds_the_mean() -> None:
    """Two examples have large gradients with a small mean."""
    for mean, expected in [(1.0, 0.5), (0.1, 0.1)]:
        model = nn.Linear(1, 1, bias=False)
        config = OptimConfig(clip="step", clip_norm=0.5, accumulate=2, beta1=0.0, beta2=0.0)
        optimizer = Optimizer(model, config)
        for factor in (100.0, 2 * mean - 100.0):
            (model.weight.sum() * factor).backward()
            assert float(optimizer.collect()) == pytest.approx(abs(factor), rel=1e-5)
        optimizer.step(0)
        assert float(optimizer.state()["moment1.weight"]) == pytest.approx(expected, rel=1e-4)


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


def test_a_second_optimizer_takes_the_model_over() -> None:
    model, plain = small_model(), small_model()
    first = Optimizer(model, OptimConfig())
    run(model, first, range(1))
    run(plain, Optimizer(plain, OptimConfig()), range(1))
    run(model, Optimizer(model, OptimConfig()), range(2))
    run(plain, Optimizer(plain, OptimConfig()), range(2))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))
    model(example(0)).sum().backward()
    with pytest.raises(RuntimeError, match="another Optimizer or a Predictor took over the model"):
        first.collect()


def test_parameters_without_gradient_stay() -> None:
    model = small_model()
    model[0].bias.requires_grad_(False)
    bias = model[0].bias.detach().clone()
    run(model, Optimizer(model, OptimConfig(learning_rate=0.1, warmup_steps=1)), range(2))
    assert torch.equal(model[0].bias, bias)


@pytest.mark.parametrize(
    "wrong",
    [
        {"accumulate": 0},
        {"clip_norm": 0.0},
        {"average_decay": 1.0},
        {"weight_decay": 0.1},
        {"name": "adma"},
        {"decay_steps": 9},
        {"average_from": 9},
        {"average": "uniform", "average_from": -1},
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        OptimConfig(**wrong)


def test_learning_rate() -> None:
    config = OptimConfig()
    assert learning_rate(config, 0) == pytest.approx(1e-6)
    assert learning_rate(config, 999) == learning_rate(config, 49_999) == 1e-3
    assert learning_rate(config, 50_000) == pytest.approx(0.95e-3)
    assert learning_rate(OptimConfig(warmup_steps=0), 0) == 1e-3


@pytest.mark.parametrize(("decay", "half", "quarter"), [("linear", 0.55, 0.775), ("cosine", 0.55, 0.8682)])
def test_a_rate_that_falls_by_and_by(decay: Any, half: float, quarter: float) -> None:
    falls = {"decay_after_steps": 100, "decay_steps": 40, "decay_factor": 0.1}
    config = OptimConfig(warmup_steps=0, learning_rate=1.0, decay=decay, **falls)
    assert learning_rate(config, 0) == learning_rate(config, 99) == 1
    assert learning_rate(config, 109) == pytest.approx(quarter, abs=1e-4)
    assert learning_rate(config, 119) == pytest.approx(half)
    assert learning_rate(config, 139) == learning_rate(config, 10_000) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="decay_steps"):
        OptimConfig(decay=decay)


# Rules


def adam(p: Tensor, g: Tensor, state: State, rate: float, step: int) -> Tensor:
    """Kingma and Ba 2015, algorithm 1."""
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    v = state["v"] = 0.999 * state.get("v", 0) + 0.001 * g**2
    return p - rate * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-6)


def lamb(p: Tensor, g: Tensor, state: State, rate: float, step: int) -> Tensor:
    """You et al. 2020, algorithm 2."""
    u = p - adam(p, g, state, 1.0, step) + 0.01 * p
    return p - rate * (p.norm() / u.norm() if p.any() and u.any() else 1) * u


def lars(p: Tensor, g: Tensor, state: State, rate: float, step: int) -> Tensor:
    """You et al. 2017, algorithm 1."""
    trust = 0.02 * p.norm() / (g.norm() + 0.01 * p.norm()) if p.any() and g.any() else 1
    m = state["m"] = 0.9 * state.get("m", 0) + rate * trust * (g + 0.01 * p)
    return p - m


class NormedDescent(PlainRule):
    """A rule without moments that has a number for each parameter, equal on every rank.

    Like a rule that decomposes matrices, it fails for gradients that are not finite.
    """

    decays_weights = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.slopes = torch.zeros_like(self.norms(self.weights))
        self.replicated["slopes"] = self.slopes

    def step(self, rate: Tensor, gradient: Tensor) -> None:
        assert gradient.isfinite().all()
        self.slopes.mul_(0.9).add_(self.norms(gradient), alpha=0.1)
        rows = self.per_row(self.slopes + 1e-3)
        self.weights.view(-1, ALIGN).sub_(rate * gradient.view(-1, ALIGN) / rows)


def normed_descent(p: Tensor, g: Tensor, state: State, rate: float, step: int) -> Tensor:
    slope = state["slope"] = 0.9 * state.get("slope", 0) + 0.1 * g.norm()
    return p - rate * g / (slope + 1e-3)


DEFINITIONS: dict[str, Callable[[Tensor, Tensor, State, float, int], Tensor]] = {
    "adam": adam,
    "lamb": lamb,
    "lars": lars,
    "normed descent": normed_descent,
}


@pytest.fixture(autouse=True)
def _with_another_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "normed descent", NormedDescent)


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rules_are_those_of_the_papers(name: str, dtype: torch.dtype) -> None:
    assert set(RULES) == set(DEFINITIONS)
    decay = 0.01 if RULES[name].decays_weights else 0.0
    numbers = {"learning_rate": 1e-2, "warmup_steps": 4, "weight_decay": decay, "trust": 0.02, "clip_norm": math.inf}
    model, plain = small_model().to(dtype), small_model().double()
    for net in (model, plain):
        # LAMB and LARS do not scale a zero parameter.
        nn.init.zeros_(net[0].bias)
    run(model, Optimizer(model, OptimConfig(name=name, **numbers)), range(7))  # type: ignore[arg-type]
    parameters, states = list(plain.parameters()), [{} for _ in plain.parameters()]
    for step in range(7):
        gradients = torch.autograd.grad(plain(example(10 * step).double()).square().sum(), parameters)
        rate = 1e-2 * min(1, (step + 1) / 4)
        with torch.no_grad():
            for p, g, state in zip(parameters, gradients, states):
                p.copy_(DEFINITIONS[name](p, g, state, rate, step))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)
        assert not torch.equal(ours, torch.zeros_like(ours))


@pytest.mark.parametrize("name", DEFINITIONS)
def test_state_goes_round_to_the_bit_and_a_step_without_examples_changes_nothing(name: str) -> None:
    config = OptimConfig(name=name, accumulate=2)
    straight, broken = small_model(), small_model()
    first, second = Optimizer(straight, config), Optimizer(broken, config)
    second.restore(first.state())  # a new optimizer
    run(straight, first, range(6))
    run(broken, second, range(3))
    state = state_of(second)
    for _ in range(2):
        assert not math.isfinite(collect(broken, second, 0, math.nan))
    assert not second.total.any()
    assert not second.gradient.any()
    assert second.step(3) == 0
    assert same(second.state(), state)
    resumed = small_model()
    third = Optimizer(resumed, config)
    third.restore(state)
    run(resumed, third, range(3, 6))
    assert same(third.state(), first.state())


def test_norms_of_large_parameters_are_right_in_float32() -> None:
    """Adding millions of squares one by one in float32 would give an error of several per cent."""
    model = nn.ParameterList([torch.ones(3), torch.full((1500, 1500), 0.37), torch.full((5,), 1e-3)])
    optimizer = Optimizer(model, OptimConfig(name="lamb"))
    norms = optimizer.rule.norms(optimizer.weights)
    expected = torch.stack([torch.linalg.vector_norm(p.detach().double()) for p in model])
    torch.testing.assert_close(norms.double(), expected, rtol=1e-6, atol=0)


def test_norms_are_the_same_on_an_apple_gpu_which_adds_them_up_in_another_way() -> None:
    config = OptimConfig(name="lamb")
    here = Optimizer(small_model(), config)
    with mac():
        there = Optimizer(small_model().to("mps"), config)
        norms = there.rule.norms(there.weights).cpu()
    torch.testing.assert_close(norms, here.rule.norms(here.weights))


# Examples that are not finite


@pytest.mark.parametrize("poison", ["gradient", "loss"])
def test_the_mean_is_over_the_examples_that_were_used(poison: str) -> None:
    """An example that is not finite has no effect.  A loss may be NaN although its gradient is finite."""
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
        collect(other, without, k)
    assert optimizer.step(0) == without.step(0) == 1e-3
    assert same(optimizer.state(), without.state())


@pytest.mark.parametrize("name", DEFINITIONS)
def test_where_the_step_is_clipped_one_that_is_not_finite_changes_nothing(name: str) -> None:
    model = small_model()
    optimizer = Optimizer(model, OptimConfig(name=name, clip="step", accumulate=2))
    run(model, optimizer, range(1))
    before = state_of(optimizer)
    for poison in (1.0, math.nan):
        collect(model, optimizer, 0, poison)
    optimizer.step(1)
    assert same(optimizer.state(), before)
    run(model, optimizer, range(2, 3))
    assert all(p.isfinite().all() for p in model.parameters())


# Loss scaling


@pytest.mark.parametrize(("clip", "name"), [("example", "adam"), ("step", "adam"), ("example", "lamb")])
def test_scaling_changes_no_number_and_an_overflow_only_the_scale(clip: Any, name: str) -> None:
    """The scale is a power of two, and no number is near the limits of fp32, so no bit of norms or weights changes."""
    config = OptimConfig(name=name, accumulate=2, clip=clip)
    model, plain = small_model(), small_model()
    optimizer, without = Optimizer(model, config, scaling=True), Optimizer(plain, config)
    assert collect(model, optimizer, 5) == collect(plain, without, 5)
    assert collect(model, optimizer, 6) == collect(plain, without, 6)
    optimizer.step(0), without.step(0)
    run(model, optimizer, range(1, 3))
    run(plain, without, range(1, 3))
    assert same(optimizer.state(), without.state())
    before = state_of(optimizer)
    for index in range(2):
        assert not math.isfinite(collect(model, optimizer, index, math.inf, loss_too=False))
        assert bool(optimizer.overflowed)
        collect(plain, without, index, math.inf, loss_too=False)
        assert not bool(without.overflowed), "there is no scale"
    assert optimizer.step(3) == 0
    assert same(optimizer.state(), before, but="loss_scale")
    assert optimizer.state()["loss_scale.scale"] == FIRST_LOSS_SCALE / 2


def test_a_loss_that_is_not_finite_is_no_overflow() -> None:
    model = small_model()
    optimizer = Optimizer(model, OptimConfig(), scaling=True)
    collect(model, optimizer, 0, math.nan)
    assert not bool(optimizer.overflowed)
    optimizer.step(0)
    assert optimizer.state()["loss_scale.scale"] == FIRST_LOSS_SCALE


def test_the_scale_is_halved_and_doubled_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "SCALE_GROWTH_STEPS", 3)
    scale, no, yes = LossScale(torch.device("cpu")), torch.tensor(False), torch.tensor(True)
    seen = []
    for overflowed in (no, no, no, no, no, yes, no, no, no):
        scale.update(overflowed)
        seen.append(float(scale.scale) / FIRST_LOSS_SCALE)
    assert seen == [1, 1, 2, 2, 2, 1, 1, 1, 2]
    for _ in range(60):
        scale.update(no)
    assert scale.scale == MAX_LOSS_SCALE
    for _ in range(60):
        scale.update(yes)
    assert scale.scale == 1
    assert not bool(scale.overflowed(torch.tensor(math.inf), yes)), "no smaller scale would help: it is a failure"


def test_a_checkpoint_holds_the_scale_and_one_without_it_fits() -> None:
    model, plain, resumed = small_model(), small_model(), small_model()
    optimizer, without = Optimizer(model, OptimConfig(), scaling=True), Optimizer(plain, OptimConfig())
    collect(model, optimizer, 0, math.inf, loss_too=False)
    optimizer.step(0)
    run(model, optimizer, range(1, 3))
    state = state_of(optimizer)
    other = Optimizer(resumed, OptimConfig(), scaling=True)
    other.restore(without.state())
    assert other.state()["loss_scale.scale"] == FIRST_LOSS_SCALE
    other.restore(state)
    assert same(other.state(), state)
    without.restore(state)
    for one, its in ((model, optimizer), (resumed, other)):
        run(one, its, range(3, 5))
    assert same(optimizer.state(), other.state())


# Ranks

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    # The one example of each rank travels during the backward pass, and is scaled after its arrival.
    "early": ({}, {}, 2),
    "late": ({}, {}, 4),
    "sharded": ({"shard_state": True}, {}, 4),
    "scaled": ({}, {}, 4),
    "compressed": ({}, {"compression": CompressionConfig(method="int8", start=0)}, 4),
}


def optimizer_of(way: str, model: nn.Module) -> Optimizer:
    sync, options, accumulate = WAYS[way]
    config = OptimConfig(accumulate=accumulate, warmup_steps=1, **options)
    return Optimizer(model, config, make_mesh(2), SyncConfig(**sync), scaling=way == "scaled")


def test_the_mean_is_over_the_examples_that_any_rank_used() -> None:
    """An overflow on one rank halves the scale of all ranks."""

    def on_a_rank(way: str, last: bool) -> State:
        model = small_model()
        optimizer = optimizer_of(way, model)
        bad = optimizer.config.accumulate - 1 if last else 0
        for index in range(optimizer.mesh.data.rank * optimizer.share, optimizer.config.accumulate)[: optimizer.share]:
            collect(model, optimizer, index, math.inf if index == bad else 1.0, loss_too=way != "scaled")
        assert optimizer.step(0) == 1e-3
        return state_of(optimizer)

    cases = [(way, last) for way in WAYS if way != "compressed" for last in (False, True)]
    for (way, last), *both in zip(cases, *run_ranks(lambda: [on_a_rank(*case) for case in cases], 2)):
        accumulate = WAYS[way][2]
        model = small_model()
        alone = Optimizer(model, OptimConfig(accumulate=accumulate - 1, warmup_steps=1))
        for index in range(accumulate):
            if index != (accumulate - 1 if last else 0):
                collect(model, alone, index)
        alone.step(0)
        # Sums of at most four float32 numbers in another order; the moments are those sums times constants.
        for name, value in alone.state().items():
            if name.startswith("moment1"):
                torch.testing.assert_close(both[0][name], value, rtol=1e-5, atol=1e-8)
        assert same(*both)
        assert way != "scaled" or both[0]["loss_scale.scale"] == FIRST_LOSS_SCALE / 2


def test_a_step_without_examples_changes_nothing_on_any_rank() -> None:
    def on_a_rank(way: str) -> None:
        model = small_model()
        optimizer = optimizer_of(way, model)

        def step(number: int, poison: float) -> float:
            for k in range(optimizer.share):
                collect(model, optimizer, 10 * number + 5 * optimizer.mesh.data.rank + k, poison)
            return float(optimizer.step(number))

        step(0, 1.0)
        before = state_of(optimizer)
        carried = [] if optimizer.reducer.compressor is None else [optimizer.reducer.compressor.local["residual"]]
        kept = [x.clone() for x in carried]
        assert all(x.any() for x in kept)
        assert step(1, math.nan) == 0
        assert all(torch.equal(x, y) for x, y in zip(carried, kept))
        assert same(optimizer.state(), before, but=("loss_scale", "compression.steps"))
        assert step(2, 1.0) > 0
        assert all(p.isfinite().all() for p in model.parameters())

    run_ranks(lambda: [on_a_rank(way) for way in WAYS], 2)


def test_model_ranks_agree_on_an_overflow() -> None:
    """All ranks learn that one rank's part of the loss is not finite."""

    def on_a_rank(where: str) -> tuple[bool, float]:
        mesh, model = make_mesh(1, 2), small_model()
        optimizer = Optimizer(model, OptimConfig(), mesh, scaling=True)
        mine = mesh.model.rank == 1
        loss = model(example(0)).square().sum() * (math.nan if mine and where == "loss" else 1.0)
        scaled = optimizer.scaled(loss) * (math.inf if mine and where == "gradient" else 1.0)
        scaled.backward()
        optimizer.collect(loss)
        overflowed = bool(optimizer.overflowed)
        optimizer.step(0)
        return overflowed, float(optimizer.state()["loss_scale.scale"])

    both = run_ranks(lambda: [on_a_rank("loss"), on_a_rank("gradient")], 2)
    assert both == [[(False, FIRST_LOSS_SCALE), (True, FIRST_LOSS_SCALE / 2)]] * 2


def test_a_second_optimizer_takes_the_hooks_over_and_a_restore_checks_replicas() -> None:
    def on_a_rank(twice: bool) -> Tensor:
        mesh, model = make_mesh(2), small_model()
        first = Optimizer(model, OptimConfig(accumulate=2, warmup_steps=1), mesh)
        second = Optimizer(model, OptimConfig(accumulate=2, warmup_steps=1), mesh) if twice else first
        collect(model, second, mesh.data.rank)
        second.step(0)
        if twice:
            with pytest.raises(RuntimeError, match="another Optimizer or a Predictor took over the model"):
                first.collect()
        return second.weights

    def restored() -> None:
        (once, twice) = on_a_rank(False), on_a_rank(True)
        assert torch.equal(once, twice)
        mesh = make_mesh(2)
        optimizer = Optimizer(small_model(), OptimConfig(accumulate=2), mesh)
        state = state_of(optimizer)
        optimizer.restore(state)
        if mesh.world.rank == 1:
            state["weights.0.bias"][0] += 1
        optimizer.restore(state)

    with pytest.raises(RankError, match=r"after reading a checkpoint: weights differ between the 2 ranks: 0\.bias"):
        run_ranks(restored, 2)


def test_state_of_any_size_goes_through_a_checkpoint_and_over_ranks() -> None:
    """One rank continues from the state of two ranks, each with half of the weights, and vice versa."""

    def half(state: State | None, ranks: int) -> State:
        mesh = make_mesh(ranks) if ranks > 1 else None
        model = small_model()
        sync = SyncConfig(shard_state=ranks > 1)
        optimizer = Optimizer(model, OptimConfig(name="normed descent", accumulate=2), mesh, sync)
        if state:
            optimizer.restore(state)
        for k in range(optimizer.share):
            collect(model, optimizer, (mesh.data.rank if mesh else 0) * optimizer.share + k + 5 * bool(state))
        optimizer.step(0)
        return state_of(optimizer)

    first = half(None, 1)
    alone, (shared, after, given) = (
        half(first, 1),
        run_ranks(lambda: [shared := half(None, 2), half(shared, 2), half(first, 2)], 2)[0],
    )
    assert shared["slopes"].shape == (3,)
    for found in (after, given, half(shared, 1)):
        assert found.keys() == alone.keys()
        # The float32 sums have another order.
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-8)
