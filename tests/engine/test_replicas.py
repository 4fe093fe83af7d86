"""warpfold.Replicas trains as torch's DistributedDataParallel does, on two ranks and on four."""

import copy
import importlib
import re
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.engine.replica_models import TinyLanguage, TinyVision, pictures, sentences
from tests.ranks import run_ranks
from tests.test_docs import ROOT, blocks
from warpfold.engine.flat import Flat
from warpfold.engine.replicas import Replicas
from warpfold.engine.resume import Checkpoints
from warpfold.engine.state_messages import broadcast_state
from warpfold.errors import UserError
from warpfold.parallel.compress import CompressionConfig
from warpfold.parallel.mesh import set_timeouts
from warpfold.parallel.waits import LostError, watched

BOUND = 1e-11  # float64: some hundred additions in another order, through a few steps
STEPS = 4
ADAM = (
    torch.optim.AdamW,
    {"lr": 1e-2, "eps": 1e-3},
)  # with torch's eps, 1e-8, gradients that are zero but for rounding count
SGD = torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}


def vision_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    """One rank's loss; the layer `sometimes` is used by every rank, by some, or by none, in turn."""
    x, labels = pictures(step, rank)
    sometimes = (True, rank == 0, False, rank == 1)[step % 4]
    return F.cross_entropy(model(x, sometimes), labels)


def language_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(sentences(step, rank))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: weights, which decay, and the rest at another rate."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "lr": 3e-3},
    ]


def peer(
    model: nn.Module, loss: Callable[..., Tensor], accumulate: int, kind: Any, rates: dict[str, float]
) -> nn.Module:
    """Train a copy by DDP, from rank 0's weights."""
    copied = copy.deepcopy(model)
    wrapped = DistributedDataParallel(copied, find_unused_parameters=True)
    optimizer = kind(groups(copied), **rates)
    for step in range(STEPS):
        for part in range(accumulate):
            with wrapped.no_sync() if part < accumulate - 1 else nullcontext():
                loss(wrapped, step * accumulate + part, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return copied


def ours(
    model: nn.Module, loss: Callable[..., Tensor], accumulate: int, kind: Any, rates: dict[str, float], **options: Any
) -> nn.Module:
    """Train a copy by Replicas, from rank 0's weights."""
    copied = copy.deepcopy(model)
    optimizer = Flat(groups(copied), kind, **rates)
    replicas = Replicas(copied, optimizer, bucket_mb=0.002, **options)
    for step in range(STEPS):
        for part in range(accumulate):
            with replicas.no_sync() if part < accumulate - 1 else nullcontext():
                loss(copied, step * accumulate + part, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    replicas.check()
    return copied


def difference(a: nn.Module, b: nn.Module) -> float:
    """The greatest difference of two models' weights, relative to the greatest number; on rank 0 of buffers, too."""
    mine, other = a.state_dict(), b.state_dict()
    assert list(mine) == list(other)
    names = list(mine) if dist.get_rank() == 0 else [name for name, _ in a.named_parameters()]  # DDP's lag elsewhere
    return max(float((mine[k] - other[k]).abs().max() / other[k].abs().max().clamp(min=1e-3)) for k in names)


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(dist.get_rank())  # other weights on every rank
    return kind().double()


def compared(options: list[dict[str, Any]]) -> dict[str, float]:
    """Train both models by DDP and by Replicas with each of the options; return the differences."""
    found = {}
    for name, kind, loss in (("vision", TinyVision, vision_loss), ("language", TinyLanguage, language_loss)):
        model = made(kind)
        for accumulate, optimizer in ((1, ADAM), (3, SGD)):
            theirs = peer(model, loss, accumulate, *optimizer)
            for choice in options:
                mine = ours(model, loss, accumulate, *optimizer, **choice)
                found[f"{name} {accumulate} {choice}"] = difference(mine, theirs)
    return found


def test_equal_to_ddp_on_two_ranks() -> None:
    for found in run_ranks(compared, 2, [{}, {"shard": True}]):
        assert max(found.values()) < BOUND, found


@pytest.mark.slow
def test_equal_to_ddp_on_four_ranks() -> None:
    nodes = {"hierarchical": True, "ranks_per_node": 2}
    for found in run_ranks(compared, 4, [{}, {"shard": True}, nodes, {**nodes, "shard": True}], timeout=240):
        assert max(found.values()) < BOUND, found


def test_hierarchical_sums_on_four_ranks() -> None:
    def function() -> float:
        model = made(TinyVision)
        theirs = peer(model, vision_loss, 1, *ADAM)
        mine = ours(model, vision_loss, 1, *ADAM, hierarchical=True, ranks_per_node=2)
        return difference(mine, theirs)

    assert max(run_ranks(function, 4)) < BOUND


def test_gradients_after_backward_are_those_of_ddp() -> None:
    """Means, None where no rank used a parameter; NaN and infinity reach all; two backward passes add up."""

    def function() -> None:
        rank = dist.get_rank()
        model = made(TinyVision)
        copied = copy.deepcopy(model)
        wrapped = DistributedDataParallel(copied, find_unused_parameters=True)
        Replicas(model, Flat([p for p in model.parameters() if p.requires_grad], torch.optim.SGD, lr=0.1))
        for step in range(3):  # step 1: rank 0 alone uses `sometimes`; step 2: none does, its gradient stays
            for each in (wrapped, model):
                vision_loss(each, step, rank).backward()
            for (name, p), other in zip(model.named_parameters(), copied.parameters()):
                assert (p.grad is None) == (other.grad is None), name
                if p.grad is not None:
                    torch.testing.assert_close(p.grad, other.grad, rtol=BOUND, atol=BOUND)
        model.zero_grad()
        copied.zero_grad()
        for each in (wrapped, model):
            (vision_loss(each, 0, rank) * (torch.nan if rank == 1 else 1)).backward()
        for p, other in zip(model.parameters(), copied.parameters()):
            assert p.grad is None or bool(p.grad.isnan().all()) == bool(other.grad.isnan().all())

    run_ranks(function, 2)


def test_a_rank_whose_loss_reaches_no_parameter_takes_part() -> None:
    def function() -> Tensor:
        model = nn.Linear(3, 1, bias=False)
        optimizer = Flat(model, torch.optim.SGD, lr=1.0)
        Replicas(model, optimizer)
        nn.init.zeros_(model.weight)
        if dist.get_rank() == 0:
            model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model.weight.detach().clone()

    for weight in run_ranks(function, 2):
        assert weight.tolist() == [[-0.5] * 3]


def test_averages_begin_with_rank_0s_weights() -> None:
    def function() -> None:
        torch.manual_seed(dist.get_rank())
        model = nn.Linear(5, 4).bfloat16()
        optimizer = Flat(model, torch.optim.SGD, lr=1.0, ema=0.5, master=True)
        Replicas(model, optimizer, shard=True)
        torch.manual_seed(0)
        expected = nn.Linear(5, 4).bfloat16()
        for named in (model.state_dict(), optimizer.averaged_state_dict(model)):
            assert all(torch.equal(x, named[name]) for name, x in expected.state_dict().items())
        optimizer.step()  # without a gradient: nothing changes
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters()))

    run_ranks(function, 2)


def test_a_model_is_copied_as_before_and_may_get_other_replicas() -> None:
    def function() -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False))
        for _ in range(2):  # the second replaces the first
            optimizer = Flat(model, torch.optim.SGD, lr=1.0)
            Replicas(model, optimizer)
            optimizer.zero_grad()
            model[0](torch.full((1, 3), float(dist.get_rank()))).sum().backward()
            assert model[0].weight.grad.tolist() == [[0.5] * 3] * 2
        assert not any(vars(p) for p in model.parameters())  # attributes would be pickled with the model
        copied = copy.deepcopy(model)
        copied[0](torch.ones(1, 3)).sum().backward()  # alone: no other rank is asked
        assert torch.equal(copied[0].weight, model[0].weight)

    run_ranks(function, 2)


def test_the_pages_script_runs_on_two_ranks(tmp_path: Path) -> None:
    """docs/kit.md's train.py, under processes."""
    for block in blocks(ROOT / "docs" / "kit.md", "python"):
        if name := re.match(r"# (small|train)\.py\n", block):
            (tmp_path / f"{name[1]}.py").write_text(block, encoding="utf-8")

    def function() -> dict[str, Tensor]:
        sys.path.insert(0, str(tmp_path))
        return dict(importlib.import_module("train").train().state_dict())

    one, two = run_ranks(function, 2)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_several_dtypes_and_the_optimizers_state() -> None:
    """Weights in three dtypes; with shard=True each rank keeps half the moments, and state_dict is torch's, whole."""

    def function() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20).bfloat16(), nn.Linear(20, 10).double())
        copied = copy.deepcopy(model)
        plain = torch.optim.Adam(copied.parameters(), lr=1e-2)
        optimizer = Flat(model, torch.optim.Adam, lr=1e-2)
        Replicas(model, optimizer, shard=True)
        for step in range(2):
            torch.manual_seed(step)
            values = [torch.randn_like(p) for p in model.parameters()]  # the same on both ranks: so is the mean
            for each in (model, copied):
                torch.stack([(p * v).sum().double() for p, v in zip(each.parameters(), values)]).sum().backward()
            for each in (optimizer, plain):
                each.step()
                each.zero_grad()
        mine, theirs = optimizer.state_dict()["state"], plain.state_dict()["state"]
        for p, other, i in zip(model.parameters(), copied.parameters(), theirs):
            near = {"rtol": 0.0, "atol": 1e-3} if p.dtype == torch.bfloat16 else {}  # numbers up to 0.2 have 8 bits
            torch.testing.assert_close(p, other, **near)
            for kind in ("exp_avg", "exp_avg_sq", "step"):
                torch.testing.assert_close(mine[i][kind], theirs[i][kind])
        for buffer in optimizer.buffers:
            assert all(len(moment) == len(buffer.weights) // 2 for moment in buffer.moments.values())

    run_ranks(function, 2)


class Straight(nn.Module):
    """A loss that is linear in the weights: its gradient does not depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(24, 20)), nn.Parameter(torch.zeros(37))

    def forward(self, step: int, rank: int) -> Tensor:
        """Return the loss of a step, other on each rank."""
        generator = torch.Generator().manual_seed(step * 10 + rank)
        factors = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in (self.a, self.b)]
        return (self.a * factors[0]).sum() + (self.b * factors[1]).sum()


def compressed(steps: int, method: str, state: Any = None, **options: Any) -> tuple[nn.Module, Replicas]:
    """Descend by plain steps with a compression, from a saved state of weights and Replicas or from zero."""
    model = Straight().double()
    optimizer = Flat(model, torch.optim.SGD, lr=1.0)
    config = CompressionConfig(method=method, start=1, warmup=2, ratio=0.1, rank=2)
    replicas = Replicas(model, optimizer, compression=config, **options)
    first = 0
    if state is not None:
        first, weights, carried = state
        model.load_state_dict(weights)
        replicas.load_state_dict(carried)
    for step in range(first, first + steps):
        model(step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, replicas


def what_is_carried(model: nn.Module, replicas: Replicas) -> Tensor:
    """What was applied less what is carried over, as flat weights; on rank 0."""
    carried = replicas.state_dict()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    if dist.get_rank():
        return flat
    residual = carried["0.residual"].mean(0)
    places = replicas.optimizer.buffers[0].places.values()
    return flat - torch.cat([residual[place] for place in places])


@pytest.mark.parametrize(
    ("ranks", "methods", "options"),
    [
        (2, ("int8", "1bit", "topk", "powersgd"), {}),
        (4, ("int8", "powersgd"), {"hierarchical": True, "ranks_per_node": 2}),
    ],
)
def test_compression_carries_over_what_it_leaves_out(
    ranks: int, methods: tuple[str, ...], options: dict[str, Any]
) -> None:
    """Weights and carried gradients add up to the plain sum; a run that is continued from a checkpoint is the same."""

    def function() -> None:
        total = Straight().double()
        for step in range(5):
            for rank in range(ranks):
                (total(step, rank) / ranks).backward()
        plain = torch.cat([-p.grad.flatten() for p in total.parameters() if p.grad is not None])
        for method in methods:
            model, replicas = compressed(5, method, **options)
            found = what_is_carried(model, replicas)
            if dist.get_rank() == 0:
                torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12, msg=method)
                assert float((found - torch.cat([p.flatten() for p in model.parameters()])).abs().max()) > 1e-4, method
            half, of_half = compressed(3, method, **options)
            state = broadcast_state(of_half.state_dict(), 0, replicas.wire, torch.device("cpu"))
            again, _ = compressed(2, method, (3, half.state_dict(), state), **options)
            assert torch.equal(again.a, model.a), method

    run_ranks(function, ranks)


@pytest.mark.parametrize("options", [{"compression": "int8"}, {"shard": True}])
def test_a_checkpoint_continues_to_the_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    def function() -> None:
        def made_again(name: str, first: int, last: int) -> nn.Module:
            model = made(TinyVision)
            optimizer = Flat(groups(model), ADAM[0], **ADAM[1])
            replicas = Replicas(model, optimizer, **options)
            folder = Checkpoints(tmp_path / name)
            step, _ = folder.load_latest(model=model, optimizer=optimizer, more={"replicas": replicas})
            assert step == first
            for step in range(first, last):
                vision_loss(model, step, dist.get_rank()).backward()
                optimizer.step()
                optimizer.zero_grad()
            folder.save(last, model=model, optimizer=optimizer, more={"replicas": replicas})
            return model

        whole = made_again("whole", 0, 5)
        made_again("halves", 0, 3)
        halves = made_again("halves", 3, 5)
        assert all(torch.equal(p, q) for p, q in zip(whole.state_dict().values(), halves.state_dict().values()))

    run_ranks(function, 2)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, {}), (2, {"shard": True}), (4, {"hierarchical": True, "ranks_per_node": 2})],
)
def test_bf16_rounds_what_is_sent(ranks: int, options: dict[str, Any]) -> None:
    """Every contribution, or a node's, and the mean lose at most a part of 2^-8: bf16 has eight bits."""

    def function() -> None:
        every = [Straight() for _ in range(ranks)]
        for rank, each in enumerate(every):
            each(0, rank).backward()
        model = Straight()
        optimizer = Flat(model, torch.optim.SGD, lr=1.0)
        replicas = Replicas(model, optimizer, compression="bf16", bucket_mb=0.001, **options)
        model(0, dist.get_rank()).backward()
        optimizer.step()
        replicas.check()
        for kind in ("a", "b"):
            parts = torch.stack([getattr(each, kind).grad for each in every])
            wrong = (getattr(model, kind) + parts.mean(0)).abs()
            assert bool((wrong <= 2.01 * 2**-8 * parts.abs().mean(0)).all())
            assert options.get("shard") or wrong.max() > 0

    run_ranks(function, ranks)


def test_compression_sends_what_is_not_finite_whole_and_keeps_its_carry() -> None:
    def function() -> None:
        model = Straight().double()
        optimizer = Flat(model, torch.optim.SGD, lr=1.0)
        replicas = Replicas(model, optimizer, compression="int8")
        model(0, dist.get_rank()).backward()
        before = {k: x.clone() for k, x in replicas.state_dict().items()}
        optimizer.zero_grad()
        (model(1, 0) * (torch.inf if dist.get_rank() == 1 else 1)).backward()
        assert model.a.grad is not None
        assert not model.a.grad.isfinite().any()
        after = replicas.state_dict()
        assert all(torch.equal(before[k], after[k]) for k in before)

    run_ranks(function, 2)


@pytest.mark.filterwarnings("ignore")  # torch's, of Join
def test_join_is_that_of_ddp() -> None:
    """Ranks with 5 and 3 batches: the means are DDP's, and all ranks end with one state, buffers included."""

    def function() -> dict[str, Tensor]:
        rank = dist.get_rank()
        batches = 3 if rank == 0 else 5
        model = made(TinyVision)
        copied = copy.deepcopy(model)
        wrapped = DistributedDataParallel(copied, find_unused_parameters=True)
        plain = torch.optim.SGD(groups(copied), lr=0.1)
        with Join([wrapped]):
            for step in range(batches):
                vision_loss(wrapped, step, rank).backward()
                plain.step()
                plain.zero_grad()
        optimizer = Flat(groups(model), torch.optim.SGD, lr=0.1)
        replicas = Replicas(model, optimizer)
        with replicas.join():
            for step in range(batches):
                vision_loss(model, step, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
        replicas.check()
        for (name, p), other in zip(model.named_parameters(), copied.parameters()):
            torch.testing.assert_close(p, other, rtol=BOUND, atol=BOUND, msg=name)
        return model.state_dict()

    one, two = run_ranks(function, 2)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_fewer_batches_without_join_are_a_clear_error() -> None:
    def function() -> str:
        set_timeouts(dist.group.WORLD, 1.0)
        model = nn.Linear(3, 1)
        optimizer = Flat(model, torch.optim.SGD, lr=1.0)
        Replicas(model, optimizer)
        for _ in range(2 - dist.get_rank()):
            try:
                model(torch.ones(1, 3)).sum().backward()
            except LostError as error:
                return str(error)
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(1.5)
        return ""

    message, _ = run_ranks(function, 2)
    assert re.match(r"Replicas: rank 0 of 2 waited 1 s for the others at '.*'.*fewer batches\?.*join", message)
    assert "\n" not in message


def test_buckets_are_sent_during_the_backward_pass() -> None:
    """Once the order is known, all but the bucket of the first layer travel before that has its gradient."""

    def function() -> list[int]:
        layers = nn.ModuleDict({str(i): nn.Linear(16, 16, bias=False) for i in (3, 1, 0, 2)})  # in another order
        optimizer = Flat(layers, torch.optim.SGD, lr=1.0)
        replicas = Replicas(layers, optimizer, bucket_mb=16 * 16 * 4 / 1e6)
        assert replicas.mean is not None
        assert len(replicas.mean.buckets) == 4
        sent, found = [], []
        layers["0"].weight.register_hook(lambda _: found.append(sum(sent)))
        with watched(lambda event: sent.append(event.bytes >= 1024)):
            for _ in range(2):
                sent.clear()
                x = torch.ones(2, 16)
                for i in range(4):
                    x = layers[str(i)](x)
                x.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return found

    for found in run_ranks(function, 2):
        assert found == [1, 3]  # at first in the order of registration: 2, and then 0 is waited for


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_compiled_model_trains_the_same(backend: str) -> None:
    def function() -> None:
        torch.manual_seed(dist.get_rank())
        models = [nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()]
        models.append(copy.deepcopy(models[0]))
        for model, call in ((models[0], models[0]), (models[1], torch.compile(models[1], backend=backend))):
            optimizer = Flat(model, torch.optim.SGD, lr=0.1)
            Replicas(call, optimizer)
            for step in range(3):
                torch.manual_seed(2 * step + dist.get_rank())
                call(torch.randn(4, 3, dtype=torch.float64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert difference(*models) < BOUND

    run_ranks(function, 2)


def test_one_process_needs_no_group() -> None:
    model = nn.Linear(3, 1)
    optimizer = Flat(model, torch.optim.SGD, lr=1.0)
    replicas = Replicas(model, optimizer, hierarchical=True, compression="int8")
    with replicas.join(), replicas.no_sync():
        model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    replicas.check()
    replicas.load_state_dict(replicas.state_dict())
    assert optimizer.reducer is None
    assert replicas.state_dict() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "zip"}, r'compression = "zip" is not one of bf16, int8, 1bit, topk, powersgd, None'),
        ({"compression": "int8", "shard": True}, "shard=True .*choose one"),
        ({"bucket_mb": 0}, "bucket_mb = 0 must be positive"),
    ],
)
def test_choices_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(UserError, match=message):
        Replicas(model, Flat(model, torch.optim.SGD, lr=1.0), **options)


def test_refused_models_and_optimizers() -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(UserError, match=r"warpfold.Flat\(model, torch.optim.SGD"):
        Replicas(model, torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="bias requires a gradient but is not the optimizer's"):
        Replicas(model, Flat([model.weight], torch.optim.SGD, lr=1.0))

    def function() -> list[str]:
        return [refused(DistributedDataParallel), refused(fully_shard), refused(distributed), differ()]

    def refused(wrap: Callable[[nn.Module], nn.Module]) -> str:
        torch.manual_seed(0)
        model = wrap(nn.Linear(4, 2))
        with pytest.raises(UserError) as caught:
            Replicas(model, Flat(model, torch.optim.SGD, lr=1.0))
        return str(caught.value)

    def distributed(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (2,))
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
        return model

    def differ() -> str:
        model = nn.Linear(4, 2 + dist.get_rank())
        with pytest.raises(UserError) as caught:
            Replicas(model, Flat(model, torch.optim.SGD, lr=1.0))
        return str(caught.value)

    wrapped, sharded, placed, different = run_ranks(function, 2)[1]
    assert "wrapped in torch's DistributedDataParallel" in wrapped
    assert "DTensor" in sharded or "FSDP" in sharded
    assert "DTensor" in placed
    assert different == "Replicas: the ranks have different models; on rank 1 there is weight [3, 4] torch.float32 True"
