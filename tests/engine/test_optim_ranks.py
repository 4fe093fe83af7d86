"""The optimizer over ranks: which examples count in the mean, what a restore checks, which ranks get the gradients."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.engine.test_optim import example, small_model
from tests.ranks import RankError, run_ranks
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.parallel.compress import CompressionConfig
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.mesh import make_mesh

WAYS = {
    "early": ({}, {}, 2),  # each rank's one example travels during the backward pass, and is weighed when all is there
    "late": ({}, {}, 4),
    "sharded": ({"shard_state": True}, {}, 4),
    "compressed": ({}, {"compression": CompressionConfig(method="int8", start=0)}, 4),
}


def config_of(way: str) -> tuple[OptimConfig, SyncConfig]:
    sync, optim, accumulate = WAYS[way]
    return OptimConfig(accumulate=accumulate, warmup_steps=1, **optim), SyncConfig(**sync)


def collect(optimizer: Optimizer, model: torch.nn.Module, index: int, good: bool = True) -> None:
    loss = model(example(index)).square().sum()
    loss = loss if good else loss * math.nan
    loss.backward()
    optimizer.collect(loss)


@pytest.mark.parametrize("way", ["early", "late", "sharded"])
def test_the_mean_is_over_the_examples_that_any_rank_used(way: str) -> None:
    config, sync = config_of(way)

    def on_a_rank(bad: int) -> dict[str, Tensor]:
        mesh, model = make_mesh(2), small_model()
        optimizer = Optimizer(model, config, mesh, sync)
        for k in range(optimizer.share):
            index = mesh.data.rank * optimizer.share + k
            collect(optimizer, model, index, good=index != bad)
        assert optimizer.step(0) == 1e-3
        return optimizer.state()

    for bad in (0, config.accumulate - 1):
        found = run_ranks(on_a_rank, 2, bad)[0]
        model = small_model()
        alone = Optimizer(model, replace(config, accumulate=config.accumulate - 1))
        for index in range(config.accumulate):
            if index != bad:
                collect(alone, model, index)
        alone.step(0)
        # Sums of at most four float32 numbers in another order; the moments are those sums times constants.
        for name, value in alone.state().items():
            if name.startswith("moment1"):
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_without_examples_changes_nothing_on_any_rank(way: str) -> None:
    def on_a_rank() -> None:
        config, sync = config_of(way)
        mesh, model = make_mesh(2), small_model()
        optimizer = Optimizer(model, config, mesh, sync)

        def step(number: int, good: bool) -> float:
            for k in range(optimizer.share):
                collect(optimizer, model, 10 * number + 5 * mesh.data.rank + k, good)
            return optimizer.step(number)

        step(0, True)
        before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
        assert step(1, False) == 0
        after = optimizer.state()
        assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
        assert step(2, True) > 0
        assert all(p.isfinite().all() for p in model.parameters())

    run_ranks(on_a_rank, 2)


def test_replicas_are_checked_after_a_restore() -> None:
    def on_a_rank() -> None:
        mesh, model = make_mesh(2), small_model()
        optimizer = Optimizer(model, OptimConfig(accumulate=2), mesh)
        state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
        optimizer.restore(state)
        if mesh.world.rank == 1:
            state["weights.0.bias"][0] += 1
        optimizer.restore(state)

    with pytest.raises(RankError, match=r"after reading a checkpoint: weights differ between the 2 ranks: 0\.bias"):
        run_ranks(on_a_rank, 2)


def test_a_second_optimizer_takes_the_hooks_over() -> None:
    def on_a_rank(twice: bool) -> Tensor:
        mesh, model = make_mesh(2), small_model()
        first = Optimizer(model, OptimConfig(accumulate=2, warmup_steps=1), mesh)
        second = Optimizer(model, OptimConfig(accumulate=2, warmup_steps=1), mesh) if twice else first
        collect(second, model, mesh.data.rank)
        second.step(0)
        if twice:
            with pytest.raises(RuntimeError, match="another Optimizer took the model over"):
                first.collect()
        return second.weights

    (once, _), (twice, _) = run_ranks(on_a_rank, 2, False), run_ranks(on_a_rank, 2, True)
    assert torch.equal(once, twice)
