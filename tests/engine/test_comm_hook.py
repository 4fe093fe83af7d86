"""Test the communication hook for DistributedDataParallel on two and four ranks."""

import copy
import platform
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel

from tests.engine.small_models import LanguageModel, Sentences, padded
from tests.helpers import StandInStreams
from tests.ranks import run_ranks
from warpfold.engine.comm_hook import CompressionState, compression_hook
from warpfold.errors import UserError
from warpfold.parallel.mesh import set_timeouts

NODES: dict[str, Any] = {"hierarchical": True, "ranks_per_node": 2}
CHOICES = [(2, "int8", {}), (2, "1bit", {}), (4, "int8", NODES), (4, "1bit", NODES)]


def hooked(model: nn.Module, method: str, **options: Any) -> tuple[DistributedDataParallel, CompressionState]:
    """Wrap a model with several buckets of 1 KB, which DDP rebuilds after the first pass."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.001)
    state = CompressionState(wrapped, method, **options)  # type: ignore[arg-type]
    wrapped.register_comm_hook(state, compression_hook)
    return wrapped, state


class Straight(nn.Module):
    """A loss that is linear in the weights, so that its gradient does not depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.zeros(shape)) for shape in ((24, 20), (37,), (9, 30)))

    def forward(self, step: int, rank: int) -> Tensor:
        """Return the loss of a step, which differs between ranks."""
        generator = torch.Generator().manual_seed(step * 10 + rank)
        every = [(p * torch.randn(p.shape, generator=generator, dtype=p.dtype)).sum() for p in self.parameters()]
        return torch.stack(every).sum()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def descended(method: str, first: int, last: int, saved: Any = None, **options: Any) -> tuple[nn.Module, Any]:
    """Take plain steps from a saved state or from zero; return the model and the state of its hook on every rank."""
    model = Straight().double()
    wrapped, state = hooked(model, method, start=1, **options)
    if saved is not None:
        model.load_state_dict(saved[0])
        state.load_state_dict(saved[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(first, last):
        wrapped(step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    every: list[Any] = [state.state_dict()]
    dist.broadcast_object_list(every, 0)
    return model, every[0]


@pytest.mark.parametrize(("ranks", "method", "options"), CHOICES)
def test_what_is_left_out_is_carried_over_and_saved(ranks: int, method: str, options: dict[str, Any]) -> None:
    """Weights plus residuals equal the plain sum, also for a run that continues on fewer ranks."""

    def function() -> None:
        total = Straight().double()
        for step in range(5):
            for rank in range(ranks):
                (total(step, rank) / ranks).backward()
        plain = -torch.cat([p.grad.flatten() for p in total.parameters() if p.grad is not None])

        def uncarried(model: nn.Module, state: Any) -> Tensor:
            carried = [state["carried"][name].mean(0) for name, _ in model.named_parameters()]
            assert max(float(x.abs().max()) for x in carried) > 1e-4
            return flat(model) - torch.cat(carried)

        model, state = descended(method, 0, 5, **options)
        assert state["steps"] == 5
        torch.testing.assert_close(uncarried(model, state), plain, rtol=1e-12, atol=1e-12)
        half, of_half = descended(method, 0, 3, **options)
        again, found = descended(method, 3, 5, (half.state_dict(), of_half), **options)
        torch.testing.assert_close(uncarried(again, found), plain, rtol=1e-12, atol=1e-12)
        whole = [torch.empty_like(flat(again)) for _ in range(ranks)]
        dist.all_gather(whole, flat(again))
        assert all(torch.equal(x, whole[0]) for x in whole)

    run_ranks(function, ranks)


def test_what_is_carried_is_shared_out_to_another_number_of_ranks() -> None:
    def function() -> tuple[Any, Any]:
        model, state = descended("int8", 0, 3)
        return model.state_dict(), state

    saved = run_ranks(function, 2)[0]

    def on_four() -> None:
        _, state = descended("int8", 3, 3, saved)
        for name, rows in saved[1]["carried"].items():
            torch.testing.assert_close(state["carried"][name].mean(0), rows.mean(0))

    run_ranks(on_four, 4)


@pytest.mark.parametrize(("ranks", "options"), [(2, {}), (4, NODES)])
def test_whole_gradients_give_what_ddp_gives(ranks: int, options: dict[str, Any]) -> None:
    """Test the first steps with shared, frozen and unused parameters and several passes per step."""

    def trained(**chosen: Any) -> Tensor:
        torch.manual_seed(0)
        model = LanguageModel(0.0).double()
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        if chosen:
            wrapped.register_comm_hook(CompressionState(wrapped, **chosen), compression_hook)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
        data = Sentences()
        for step in range(6):
            torch.manual_seed(step)
            batch = padded([data[(4 * step + dist.get_rank() + i) % 24] for i in range(2)])
            with wrapped.no_sync() if step % 2 == 0 else nullcontext():
                wrapped(batch).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        return flat(model)

    def function() -> tuple[Tensor, Tensor]:
        return trained(method="int8", start=100, **options), trained()

    for ours, theirs in run_ranks(function, ranks):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("method", ["int8", "1bit"])
def test_what_is_not_finite_reaches_all_and_leaves_nothing_behind(method: str) -> None:
    def function() -> None:
        model, rank = Straight().double(), dist.get_rank()
        wrapped, state = hooked(model, method, start=0)
        wrapped(0, rank).backward()
        wrapped.zero_grad()
        wrapped(1, rank).backward()
        before = copy.deepcopy(state.state_dict())
        wrapped.zero_grad()
        (wrapped(2, 0) * (torch.inf if rank == 1 else 1)).backward()
        assert model.a.grad is not None
        assert not model.a.grad.isfinite().all()
        after = state.state_dict()
        for name, rows in before["carried"].items():  # type: ignore[attr-defined]
            assert torch.equal(rows, after["carried"][name])  # type: ignore[index]

    run_ranks(function, 2)


@pytest.mark.parametrize(("ranks", "method", "options"), CHOICES)
def test_a_skipped_step_restores_the_residuals_of_all_buckets(ranks: int, method: str, options: dict[str, Any]) -> None:
    """With inf in one of several buckets, updates plus residuals equal the sum of the other steps."""

    def function() -> None:
        model, rank = Straight().double(), dist.get_rank()
        wrapped, state = hooked(model, method, start=0, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        total = Straight().double()
        for step in range(9):
            loss = wrapped(step, rank)
            if step % 3 == 2:
                (loss + (model.c[0, 0] * torch.inf if rank == 1 else 0)).backward()
                assert len(state._buckets) > 1
                finite = [bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None]
                assert finite == [True, True, False]
            else:
                loss.backward()
                optimizer.step()
                for other in range(ranks):
                    (total(step, other) / ranks).backward()
            optimizer.zero_grad()
        every: list[Any] = [state.state_dict()]
        dist.broadcast_object_list(every, 0)
        carried = torch.cat([every[0]["carried"][name].mean(0) for name, _ in model.named_parameters()])
        counted = torch.cat([p.grad.flatten() for p in total.parameters() if p.grad is not None])
        assert float(carried.abs().max()) > 1e-4
        torch.testing.assert_close(flat(model) - carried, -counted, rtol=1e-12, atol=1e-12)

    run_ranks(function, ranks)


def test_two_models_train_side_by_side() -> None:
    """Two models of a GAN exchange outputs, and each takes steps while gradients of the other arrive."""

    def function() -> list[Tensor]:
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 8)) for _ in range(2)]
        made, judged = (hooked(model, "int8")[0] for model in models)
        optimizers = [torch.optim.Adam(model.parameters()) for model in models]
        for step in range(20):
            torch.manual_seed(2 * step + dist.get_rank())
            (judged(made(torch.randn(4, 8))).square().mean() + judged(torch.randn(4, 8)).mean()).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [flat(model) for model in models]

    one, two = run_ranks(function, 2)
    assert all(torch.equal(x, y) for x, y in zip(one, two))


def test_a_grad_scalers_scale_may_change() -> None:
    """Residuals do not depend on the loss scale: a run whose scale changes takes the steps of one without a scale."""

    def function() -> tuple[Tensor, Tensor]:
        def run(scales: list[float]) -> Tensor:
            model = Straight().double()
            scaler = torch.amp.GradScaler("cpu", init_scale=scales[0])
            wrapped, _ = hooked(model, "1bit", start=0, scaler=scaler)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            for step, scale in enumerate(scales):
                scaler.scale(wrapped(step, dist.get_rank())).backward()
                scaler.step(optimizer)
                scaler.update(new_scale=2 * scale if step % 2 else scale / 1024)
                optimizer.zero_grad()
            return flat(model)

        return run([1.0, 1.0 / 1024, 2.0 / 1024, 2.0**-20, 2.0**-19, 2.0**-29]), run([1.0] * 6)

    for ours, plain in run_ranks(function, 2):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore")  # from torch's Join
def test_ranks_may_have_fewer_batches_under_join() -> None:
    def function() -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        wrapped, _ = hooked(model, "int8")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Join([wrapped]):
            for _ in range(2 + 2 * dist.get_rank()):
                wrapped(torch.ones(1, 6)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return flat(model)

    one, two = run_ranks(function, 2)
    assert torch.equal(one, two)


def test_a_rank_that_does_not_come_is_an_error() -> None:
    def function() -> str:
        model = nn.Linear(3, 1)
        set_timeouts(dist.group.WORLD, 1.0)
        wrapped, state = hooked(model, "int8")
        set_timeouts(state.group.handle, 1.0)
        if dist.get_rank() == 0:
            try:
                wrapped(torch.ones(1, 3)).sum().backward()
            except RuntimeError as error:
                return str(error)
        return ""

    said, _ = run_ranks(function, 2)
    assert "rank 0 of 2 waited 1 s for the others at 'all_to_all of gradients" in said
    assert "had fewer batches?" in said


def test_nodes_are_neighbours_whose_machines_have_one_name() -> None:
    def function(names: str) -> int | str:
        wrapped = DistributedDataParallel(nn.Linear(3, 1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(platform, "node", lambda: names[dist.get_rank()])
            try:
                state = CompressionState(wrapped, "int8", hierarchical=True)
            except UserError as error:
                return str(error)
        return 1 if state.within is None else state.within.wire.group.size

    for *within, said in run_ranks(lambda: [function(names) for names in ("aaaa", "aabb", "abcd", "aaab")], 4):
        assert within == [1, 2, 1]
        assert "the nodes have 3, 1 neighbouring ranks. Remove hierarchical=True" in said


def test_on_a_gpu_a_side_stream_waits_for_the_gradients_and_takes_the_mean() -> None:
    """The streams are emulated."""

    def function() -> list[str]:
        streams = StandInStreams()

        def mean(*given: Any) -> Tensor:
            streams.said.append(f"mean on {streams.now}")
            return original(*given)

        model = Straight().double()
        wrapped, state = hooked(model, "int8", start=100)
        wrapped(0, dist.get_rank()).backward()
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        wrapped.zero_grad()
        original, state._thread, state._side = state._mean, None, streams.stream("side")  # type: ignore[assignment]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state, "_mean", mean)
            streams.put(patch)
            wrapped(0, dist.get_rank()).backward()
        assert all(torch.equal(p.grad, x) for p, x in zip(model.parameters(), expected, strict=True))
        return streams.said

    for said in run_ranks(function, 2):
        assert said == ["side waits for main", "mean on side"] * 2  # two buckets


def test_one_process_alone_and_what_is_refused() -> None:
    with pytest.raises(UserError, match=r"the model is a Linear\. Wrap it in DistributedDataParallel first"):
        CompressionState(nn.Linear(3, 1), "int8")  # type: ignore[arg-type]

    def function() -> list[str]:
        wrapped = DistributedDataParallel(nn.Linear(3, 1))
        state = CompressionState(wrapped, "int8")
        wrapped.register_comm_hook(state, compression_hook)
        wrapped(torch.ones(1, 3)).sum().backward()
        assert wrapped.module.weight.grad.tolist() == [[1.0] * 3]
        assert state.state_dict() == {"steps": 1, "carried": {}}
        said = []
        for options in ({"method": "zip"}, {"method": "1bit", "start": -1}):
            with pytest.raises(UserError) as caught:
                CompressionState(wrapped, **options)  # type: ignore[arg-type]
            said.append(str(caught.value))
        with pytest.raises(UserError) as caught:
            state.load_state_dict({"steps": 1, "carried": {"weight": torch.zeros(1, 5)}})
        return [*said, str(caught.value)]

    unknown, start, other = run_ranks(function, 1)[0]
    assert 'method = "zip" is not one of' in unknown
    assert "start and warmup must not be negative" in start
    assert "weight has 5 numbers in the checkpoint and 3 in the model" in other
