"""Loss scaling: it changes no number, an overflow changes nothing but the scale, and checkpoints hold it."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.engine.test_optim import example, small_model
from tests.ranks import run_ranks
from warpfold.engine import optim
from warpfold.engine.optim import FIRST_SCALE, MOST_SCALE, LossScale, OptimConfig, Optimizer
from warpfold.parallel.mesh import make_mesh

State = dict[str, Tensor]


def run(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        for k in range(optimizer.share):
            take(model, optimizer, 10 * step + k)
        optimizer.step(step)


def take(model: nn.Module, optimizer: Optimizer, index: int, poison: float = 1.0) -> Tensor:
    """Collect an example; poison: what its gradient is multiplied by, and its loss is not."""
    out = model(example(index))
    out.register_hook(lambda grad: grad * poison)
    loss = out.square().sum()
    optimizer.scaled(loss).backward()
    return optimizer.collect(loss)


def weights(optimizer: Optimizer) -> State:
    return {name: t.clone() for name, t in optimizer.state().items() if not name.startswith("loss_scale")}


@pytest.mark.parametrize("name", ["adam", "lamb"])
@pytest.mark.parametrize("clip", ["example", "step"])
def test_scaling_changes_no_number(clip: str, name: str) -> None:
    """A power of two, and nothing near the ends of fp32: the weights are the same to the bit."""
    config, states = OptimConfig(name=name, accumulate=2, clip=clip), []  # type: ignore[arg-type]
    for scaling in (False, True):
        model = small_model()
        optimizer = Optimizer(model, config, scaling=scaling)
        run(model, optimizer, range(3))
        states.append(weights(optimizer))
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_norms_are_those_without_a_scale() -> None:
    plain, model = small_model(), small_model()
    assert take(model, Optimizer(model, OptimConfig(), scaling=True), 0) == take(
        plain, Optimizer(plain, OptimConfig()), 0
    )


@pytest.mark.parametrize("clip", ["example", "step"])
def test_an_overflow_changes_nothing_but_the_scale(clip: str) -> None:
    model = small_model()
    optimizer = Optimizer(model, OptimConfig(clip=clip), scaling=True)  # type: ignore[arg-type]
    run(model, optimizer, range(2))
    before = weights(optimizer)
    assert not math.isfinite(take(model, optimizer, 0, math.inf))
    assert bool(optimizer.overflowed)
    assert optimizer.step(2) == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(optimizer).items())
    assert optimizer.state()["loss_scale.scale"] == FIRST_SCALE / 2
    run(model, optimizer, range(2, 3))
    assert optimizer.state()["steps"] == 3


def test_a_loss_that_is_not_finite_is_no_overflow() -> None:
    model = small_model()
    optimizer = Optimizer(model, OptimConfig(), scaling=True)
    loss = model(example(0)).sum() * math.nan
    optimizer.scaled(loss).backward()
    optimizer.collect(loss)
    assert not bool(optimizer.overflowed)
    optimizer.step(0)
    assert optimizer.state()["loss_scale.scale"] == FIRST_SCALE


def test_without_a_scale_nothing_overflows() -> None:
    model = small_model()
    optimizer = Optimizer(model, OptimConfig())
    take(model, optimizer, 0, math.inf)
    assert not bool(optimizer.overflowed)


def test_the_scale_is_halved_and_doubled_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "SCALE_GROWTH", 3)
    scale, no, yes = LossScale(torch.device("cpu")), torch.tensor(False), torch.tensor(True)
    seen = []
    for overflowed in (no, no, no, no, no, yes, no, no, no):
        scale.update(overflowed)
        seen.append(float(scale.scale) / FIRST_SCALE)
    assert seen == [1, 1, 2, 2, 2, 1, 1, 1, 2]
    for _ in range(60):
        scale.update(no)
    assert scale.scale == MOST_SCALE
    for _ in range(60):
        scale.update(yes)
    assert scale.scale == 1
    assert not bool(scale.overflowed(torch.tensor(math.inf), yes)), "no smaller scale would help: it is a failure"


def test_a_checkpoint_holds_the_scale_and_one_without_it_fits() -> None:
    model, plain = small_model(), small_model()
    optimizer, without = Optimizer(model, OptimConfig(), scaling=True), Optimizer(plain, OptimConfig())
    take(model, optimizer, 0, math.inf)
    optimizer.step(0)
    run(model, optimizer, range(1, 3))
    state = {name: t.clone() for name, t in optimizer.state().items()}
    resumed = small_model()
    other = Optimizer(resumed, OptimConfig(), scaling=True)
    other.restore(without.state())
    assert other.state()["loss_scale.scale"] == FIRST_SCALE
    other.restore(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in other.state().items())
    without.restore(state)
    for one, its in ((model, optimizer), (resumed, other)):
        run(one, its, range(3, 5))
    assert all(torch.equal(tensor, other.state()[name]) for name, tensor in optimizer.state().items())


def test_an_overflow_on_one_rank_halves_the_scale_of_all() -> None:
    """And the example that overflowed is left out of the mean, as any that is not finite."""

    def on_a_rank(accumulate: int) -> State:
        mesh, model = make_mesh(2), small_model()
        optimizer = Optimizer(model, OptimConfig(accumulate=accumulate), mesh, scaling=True)
        for k in range(optimizer.share):
            index = mesh.data.rank * optimizer.share + k
            take(model, optimizer, index, math.inf if index == 1 else 1.0)
        optimizer.step(0)
        return {name: tensor.clone() for name, tensor in optimizer.state().items()}

    for accumulate in (2, 4):
        first, second = run_ranks(on_a_rank, 2, accumulate)
        assert first["loss_scale.scale"] == FIRST_SCALE / 2
        model = small_model()
        alone = Optimizer(model, OptimConfig(accumulate=accumulate - 1))
        for index in range(accumulate):
            if index != 1:
                take(model, alone, index)
        alone.step(0)
        for name, value in alone.state().items():
            torch.testing.assert_close(first[name], value, rtol=1e-5, atol=1e-8)
            assert torch.equal(first[name], second[name])


def test_model_ranks_agree_on_an_overflow() -> None:
    """A part of the loss that is not finite on one rank is known to the others."""

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

    assert run_ranks(on_a_rank, 2, "loss") == [(False, FIRST_SCALE)] * 2
    assert run_ranks(on_a_rank, 2, "gradient") == [(True, FIRST_SCALE / 2)] * 2
