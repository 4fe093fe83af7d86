"""Update rules against their definitions, written out parameter by parameter."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.test_optim import example, run, small_model
from tests.ranks import run_ranks
from warpfold.engine.optim import RULES, OptimConfig, Optimizer, PlainRule
from warpfold.parallel.exchange import ALIGN, SyncConfig
from warpfold.parallel.mesh import make_mesh

State = dict[str, Tensor]  # a parameter's, zeros at first where it has the parameter's shape


def adam(p: Tensor, g: Tensor, state: State, rate: float, step: int) -> Tensor:
    """Kingma and Ba 2015, algorithm 1."""
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    v = state["v"] = 0.999 * state.get("v", 0) + 0.001 * g**2
    return p - rate * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-6)


def lamb(p: Tensor, g: Tensor, state: State, rate: float, step: int) -> Tensor:
    """You et al. 2020, algorithm 2."""
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    v = state["v"] = 0.999 * state.get("v", 0) + 0.001 * g**2
    r = (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-6)
    u = r + 0.01 * p
    return p - rate * (p.norm() / u.norm() if p.any() and u.any() else 1) * u


def lars(p: Tensor, g: Tensor, state: State, rate: float, step: int) -> Tensor:
    """You et al. 2017, algorithm 1."""
    trust = 0.02 * p.norm() / (g.norm() + 0.01 * p.norm()) if p.any() and g.any() else 1
    m = state["m"] = 0.9 * state.get("m", 0) + rate * trust * (g + 0.01 * p)
    return p - m


class NormedDescent(PlainRule):
    """A rule without moments that keeps a number for each parameter, the same on every rank."""

    decays_weights = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.slopes = torch.zeros_like(self.norms(self.weights))
        self.replicated["slopes"] = self.slopes

    def step(self, rate: Tensor, gradient: Tensor) -> None:
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


def config_of(name: str) -> OptimConfig:
    decay = 0.01 if RULES[name].decays_weights else 0.0
    return OptimConfig(
        name=name, learning_rate=1e-2, warmup_steps=4, weight_decay=decay, trust=0.02, clip_norm=math.inf
    )


def test_every_rule_has_its_definition_here() -> None:
    assert set(RULES) == set(DEFINITIONS)


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rules_are_those_of_the_papers(name: str, dtype: torch.dtype) -> None:
    model, plain = small_model().to(dtype), small_model().double()
    for net in (model, plain):
        nn.init.zeros_(net[0].bias)  # LAMB and LARS do not scale what is zero
    run(model, Optimizer(model, config_of(name)), range(7))
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


def test_state_of_any_size_goes_through_a_checkpoint_and_over_ranks() -> None:
    """One rank continues from what two ranks saved, each of which owns half of the weights, and the other way round."""

    def half(state: State | None, ranks: int) -> State:
        mesh = make_mesh(ranks) if ranks > 1 else None
        model = small_model()
        sync = SyncConfig(shard_state=ranks > 1)
        optimizer = Optimizer(model, OptimConfig(name="normed descent", accumulate=2), mesh, sync)
        if state:
            optimizer.restore(state)
        rank = mesh.data.rank if mesh else 0
        for k in range(optimizer.share):
            model(example(rank * optimizer.share + k + 5 * bool(state))).square().sum().backward()
            optimizer.collect()
        optimizer.step(0)
        return {name: tensor.clone() for name, tensor in optimizer.state().items()}

    def of_two(state: State | None) -> State:
        return run_ranks(half, 2, state, 2)[0]

    alone, shared = half(half(None, 1), 1), of_two(None)
    assert shared["slopes"].shape == (3,)
    for found in (of_two(shared), half(shared, 1), of_two(half(None, 1))):
        assert found.keys() == alone.keys()
        for name, value in alone.items():  # sums of float32 in another order
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-8)


def test_norms_of_large_parameters_are_right_in_float32() -> None:
    """Millions of squares added one by one in float32 would be wrong by several per cent."""
    model = nn.ParameterList([torch.ones(3), torch.full((1500, 1500), 0.37), torch.full((5,), 1e-3)])
    optimizer = Optimizer(model, OptimConfig(name="lamb"))
    norms = optimizer.rule.norms(optimizer.weights)
    expected = torch.stack([torch.linalg.vector_norm(p.detach().double()) for p in model])
    torch.testing.assert_close(norms.double(), expected, rtol=1e-6, atol=0)
