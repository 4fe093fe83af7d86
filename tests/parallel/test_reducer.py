"""Gradients of several ranks against those of one: the same numbers, sent early, never a hang, replicas checked."""

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parallel.toys import TINY, Toy, part_of_loss, trained
from tests.ranks import RankError, run_ranks
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.parallel.exchange import ALIGN, ClipFactors, Plain, Stages, SyncConfig, make_layout
from warpfold.parallel.mesh import Mesh, make_mesh
from warpfold.parallel.reducer import Reducer
from warpfold.parallel.waits import watched

GRIDS = [(1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3)]
QUICK = OptimConfig(learning_rate=0.01, warmup_steps=2, average_decay=0.9)
STEP = dataclasses.replace(QUICK, clip="step", clip_norm=0.5)
SMALL = SyncConfig(bucket=TINY)


def alone(config: OptimConfig, data: int, **more) -> dict[str, Tensor]:
    """One process that sees the examples of `data` data ranks."""
    config = dataclasses.replace(config, accumulate=config.accumulate * data)
    return trained(1, 1, config, SyncConfig(), **more)[1]


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest relative difference of any tensor."""
    assert ours.keys() >= theirs.keys()
    return max(
        float((ours[name] - t).abs().max() / t.abs().max().clamp(min=1e-30)) for name, t in theirs.items() if t.numel()
    )


@pytest.mark.parametrize(("data", "model"), GRIDS)
def test_five_steps_are_those_of_one_process(data: int, model: int) -> None:
    """Exchanged in the backward pass; weights, moments and averages; every rank has them, and the same norms."""
    expected = alone(QUICK, data)
    results = run_ranks(trained, data * model, data, model, QUICK, SMALL)
    for _, state in results:
        assert worst(state, expected) < 1e-10
    for rank, (norms, _) in enumerate(results):
        assert norms == results[rank - rank % model][0]


@pytest.mark.parametrize(
    ("data", "model", "config", "sync"),
    [
        (2, 2, dataclasses.replace(QUICK, accumulate=2), SMALL),
        (2, 2, STEP, SMALL),
        (3, 2, dataclasses.replace(STEP, accumulate=2), SMALL),
        (2, 2, QUICK, SyncConfig()),  # one bucket
        (2, 3, QUICK, dataclasses.replace(SMALL, shard_state=True)),
        (3, 1, dataclasses.replace(QUICK, accumulate=2), dataclasses.replace(SMALL, shard_state=True)),
        (2, 2, STEP, dataclasses.replace(SMALL, shard_state=True)),
        (2, 2, dataclasses.replace(QUICK, name="lamb", weight_decay=0.1), SMALL),
        (2, 2, dataclasses.replace(QUICK, name="lamb"), dataclasses.replace(SMALL, shard_state=True)),
        (3, 2, dataclasses.replace(QUICK, name="lars", weight_decay=0.1), dataclasses.replace(SMALL, shard_state=True)),
    ],
)
def test_every_way_to_run_is_that_of_one_process(data: int, model: int, config: OptimConfig, sync: SyncConfig) -> None:
    expected = alone(config, data)
    for _, state in run_ranks(trained, data * model, data, model, config, sync):
        assert worst(state, expected) < 1e-10


def test_gradients_are_those_of_one_process() -> None:
    def gradients(data: int, model: int) -> dict[str, Tensor]:
        mesh = make_mesh(data, model) if data * model > 1 else Mesh()
        net, config = Toy(), OptimConfig(clip_norm=float("inf"), accumulate=4)
        optimizer = Optimizer(net, config, mesh, SMALL)
        for index in range(mesh.data.rank, 4, data):
            part_of_loss(net, index, mesh.model.rank, model).backward()
            optimizer.collect()
        total, factor = optimizer.reducer.mean(optimizer.total, torch.tensor(optimizer.share))
        whole = optimizer.reducer.all_gather(total * factor, torch.empty_like(optimizer.weights))
        return {name: optimizer.layout.view(whole, name).clone() for name in optimizer.layout.places}

    plain = Toy()
    for k in range(4):
        (part_of_loss(plain, k, 0, 1) / 4).backward()
    expected = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in plain.named_parameters()}
    assert not expected["never.weight"].any()
    assert worst(gradients(1, 1), expected) < 1e-10
    for data, model in [(1, 2), (2, 1), (2, 2), (1, 3), (4, 1)]:
        for ours in run_ranks(gradients, data * model, data, model):
            assert worst(ours, expected) < 1e-10, (data, model)


def test_buckets_travel_while_the_backward_pass_runs_and_in_one_order() -> None:
    """Whatever takes part on a rank: when a layer gets its gradient, all buckets before its own are on their way."""

    def sent_by_then(index: int) -> tuple[list[int], int]:
        mesh, net = make_mesh(1, 2), Toy()
        optimizer = Optimizer(net, QUICK, mesh, SMALL)
        seen = []
        net.enter.weight.register_hook(lambda gradient: seen.append(optimizer.reducer.sent_buckets))
        part_of_loss(net, index, mesh.model.rank, 2).backward()
        optimizer.collect()
        own = next(bucket for bucket, names in enumerate(optimizer.layout.members) if "enter.weight" in names)
        return seen, own

    for index in (0, 1):  # with and without the part that some examples use
        for seen, bucket in run_ranks(sent_by_then, 2, index):
            assert bucket == 4
            assert seen == [bucket]


@pytest.mark.parametrize("config", [QUICK, STEP], ids=["example", "step"])
@pytest.mark.parametrize(("data", "model", "examples"), [(3, 1, 4), (3, 1, 5), (2, 2, 3)])
def test_unequal_shares_are_one_process(config: OptimConfig, data: int, model: int, examples: int) -> None:
    """Weights, moments and average of ranks that have one or two examples of a step, and to the bit when continued."""
    theirs = trained(1, 1, config, SyncConfig(), examples=examples)[1]
    for shard in (False, True):
        sync = SyncConfig(bucket=TINY, shard_state=shard)
        first = run_ranks(trained, data * model, data, model, config, sync, range(5), None, None, None, examples)[0]
        assert worst(first[1], theirs) < 1e-10
        half = run_ranks(trained, data * model, data, model, config, sync, range(2), None, None, None, examples)[0][1]
        again = run_ranks(trained, data * model, data, model, config, sync, range(2, 5), half, None, None, examples)
        assert all(torch.equal(value, first[1][name]) for name, value in again[0][1].items())


@pytest.mark.parametrize(("clip", "accumulate"), [("example", 2), ("step", 4)])
def test_the_data_ranks_exchange_begins_in_the_backward_pass(clip: str, accumulate: int) -> None:
    """Of a rank's only example, whose clipping factor follows; of its last, where only the mean is clipped."""

    def begun() -> list[int]:
        mesh, net = make_mesh(2), Toy()
        optimizer = Optimizer(net, OptimConfig(clip=clip, accumulate=accumulate), mesh, SMALL)
        seen = []
        net.enter.weight.register_hook(lambda gradient: seen.append(len(optimizer.reducer._in_flight)))
        for index in range(optimizer.share):
            part_of_loss(net, index, 0, 1).backward()
            optimizer.collect()
        optimizer.step(0)
        return seen

    assert run_ranks(begun, 2) == [[0] * (accumulate // 2 - 1) + [4]] * 2


@pytest.mark.parametrize(("clip", "accumulate"), [("example", 2), ("step", 4)])
def test_the_exchange_follows_the_model_ranks_sum_within_the_backward_pass(clip: str, accumulate: int) -> None:
    """Data x model ranks: begun of every bucket before the first layer's, while the backward pass is at that layer."""

    def begun() -> tuple[list[int], int]:
        mesh, net = make_mesh(2, 2), Toy()
        optimizer = Optimizer(net, OptimConfig(clip=clip, accumulate=accumulate), mesh, SMALL)
        own = next(bucket for bucket, names in enumerate(optimizer.layout.members) if "enter.weight" in names)
        seen: list[int] = []

        def look(gradient: Tensor) -> None:
            """Within the backward pass: the exchange of what was sent needs nothing of this thread any more."""
            end = time.monotonic() + (10 if optimizer.reducer.early else 0)
            while len(optimizer.reducer._in_flight) < own and time.monotonic() < end:
                time.sleep(0.001)
            seen.append(len(optimizer.reducer._in_flight))

        net.enter.weight.register_hook(look)
        for index in range(optimizer.share):
            part_of_loss(net, index, mesh.model.rank, 2).backward()
            optimizer.collect()
        optimizer.step(0)
        return seen, own

    for seen, own in run_ranks(begun, 4):
        assert own == 4
        assert seen == [0] * (accumulate // 2 - 1) + [own]


@pytest.mark.parametrize("config", [QUICK, dataclasses.replace(STEP, accumulate=2)], ids=["example", "step"])
def test_exchanged_early_or_late_the_weights_are_the_same_to_the_bit(
    config: OptimConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = run_ranks(trained, 4, 2, 2, config, SMALL)
    begin = Reducer.begin
    monkeypatch.setattr(Reducer, "begin", lambda self, early, add_to=None: begin(self, False))
    for (norms, ours), (late_norms, theirs) in zip(early, run_ranks(trained, 4, 2, 2, config, SMALL)):
        assert norms == late_norms
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_on_a_gpu_a_stream_beside_waits_and_the_next_use_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that are not there: each exchange is launched on the side stream, which has waited for the gradients, and
    the main stream waits for it before it reads; the weights are those of the thread to the bit."""
    said: list[str] = []
    now = "main"

    class Stream(SimpleNamespace):
        def wait_stream(self, other: "Stream") -> None:
            said.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        nonlocal now
        before, now = now, stream.name
        yield
        now = before

    def reduce_scatter(exchange: Plain, x: Tensor, factors: ClipFactors | None = None) -> Stages[Tensor]:
        said.append(f"exchange on {now}")
        return (yield from original(exchange, x, factors))

    original = Plain.reduce_scatter
    init = Reducer.__init__

    def with_streams(self: Reducer, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        self._thread, self._side = None, Stream(name="side")  # type: ignore[assignment]

    threaded = run_ranks(trained, 4, 2, 2, QUICK, SMALL)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(name=now))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(Plain, "reduce_scatter", reduce_scatter)
    monkeypatch.setattr(Reducer, "__init__", with_streams)

    def on_a_rank() -> tuple[list[str], dict[str, Tensor]]:
        _, state = trained(2, 2, QUICK, SMALL, steps=range(5))
        return said, state

    for (order, ours), (_, theirs) in zip(run_ranks(on_a_rank, 4), threaded):
        buckets = order.index("main waits for side") // 2
        step = ["side waits for main", "exchange on side"] * buckets + ["main waits for side"]
        assert buckets > 1
        assert order == step * 5
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_what_fails_beside_the_backward_pass_is_raised_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        mesh, net = make_mesh(2, 2), Toy()
        optimizer = Optimizer(net, dataclasses.replace(QUICK, accumulate=2), mesh, SMALL)
        monkeypatch.setattr(
            optimizer.reducer.exchange, "reduce_scatter", Mock(side_effect=MemoryError("no room to receive"))
        )
        part_of_loss(net, 0, mesh.model.rank, 2).backward()
        optimizer.collect()

    with pytest.raises(RankError, match="MemoryError: no room to receive"):
        run_ranks(fail, 4)


def test_an_example_without_any_gradient_is_zeros() -> None:
    def step(empty_rank: int) -> Tensor:
        mesh, net = make_mesh(1, 2), Toy()
        optimizer = Optimizer(net, QUICK, mesh, SMALL)
        if mesh.model.rank != empty_rank:
            net(torch.ones(1, 3, dtype=torch.float64), True).sum().backward()
        assert optimizer.collect() > 0
        optimizer.step(0)
        return optimizer.weights

    first, second = (run_ranks(step, 2, rank) for rank in (0, 1))
    for weights in [*first, *second]:
        torch.testing.assert_close(weights, first[0], rtol=1e-12, atol=0)


def test_an_example_that_is_not_finite_adds_nothing_anywhere() -> None:
    def step(clip: str) -> tuple[float, Tensor, Tensor]:
        mesh, net = make_mesh(2, 2), Toy()
        optimizer = Optimizer(net, OptimConfig(clip=clip, accumulate=2), mesh, SMALL)
        before = optimizer.weights.clone()
        poison = float("nan") if mesh.data.rank == 1 else 1.0
        (part_of_loss(net, 0, mesh.model.rank, 2) * poison).backward()
        norm = optimizer.collect()
        optimizer.step(0)
        return norm, before, optimizer.weights

    results = run_ranks(step, 4, "example")
    for rank, (norm, before, after) in enumerate(results):
        assert (norm == norm) == (rank < 2)
        assert after.isfinite().all()
        assert not torch.equal(before, after)
        assert torch.equal(after, results[0][2])
    for _, before, after in run_ranks(step, 4, "step"):
        assert torch.equal(before, after)


@pytest.mark.parametrize(("clip", "accumulate"), [("example", 1), ("example", 2), ("step", 2)])
@pytest.mark.parametrize("shard_state", [False, True])
def test_hierarchical_sums_are_plain_ones(clip: str, accumulate: int, shard_state: bool) -> None:
    config = dataclasses.replace(QUICK, clip=clip, accumulate=accumulate)
    sync = SyncConfig(strategy="hierarchical", bucket=TINY, shard_state=shard_state)
    expected = alone(config, 4)
    for _, state in run_ranks(lambda: trained(4, 1, config, sync, ranks_per_node=2), 4):
        assert worst(state, expected) < 1e-10


def test_hierarchical_sums_beside_model_ranks() -> None:
    expected = alone(QUICK, 4)
    for _, state in run_ranks(lambda: trained(4, 2, QUICK, SyncConfig(strategy="hierarchical"), ranks_per_node=4), 8):
        assert worst(state, expected) < 1e-10


def test_bf16_rounds_what_travels_and_nothing_else() -> None:
    sync = SyncConfig(strategy="bf16", bucket=TINY, shard_state=True)
    expected = alone(STEP, 2, steps=range(1))
    results = run_ranks(lambda: trained(2, 1, STEP, sync, steps=range(1)), 2)
    for _, state in results:
        for name in Toy().state_dict():
            if f"moment1.{name}" in expected:
                torch.testing.assert_close(
                    state[f"moment1.{name}"], expected[f"moment1.{name}"], rtol=2e-2, atol=1e-4, msg=name
                )
        assert torch.equal(state["weights.enter.weight"], results[0][1]["weights.enter.weight"])
    assert worst(results[0][1], expected) > 1e-5


def test_auto_chooses_the_same_on_every_rank_and_keeps_its_choice() -> None:
    sync = SyncConfig(strategy="auto", bucket=TINY, shard_state=True)

    def run(forced: int | None) -> tuple[str, dict[str, float], dict[str, Tensor]]:
        mesh, net = make_mesh(4), Toy()
        optimizer = Optimizer(net, dataclasses.replace(QUICK, accumulate=4), mesh, sync, ranks_per_node=2)
        chosen = optimizer.reducer.strategy
        if forced is not None:
            optimizer.restore({**optimizer.state(), "sync.strategy": torch.tensor(forced)})
        for step in range(2):
            part_of_loss(net, 4 * step + mesh.data.rank, 0, 1).backward()
            optimizer.collect()
            optimizer.step(step)
        return optimizer.reducer.strategy if forced else chosen, optimizer.measured, optimizer.state()

    results = run_ranks(run, 4, None)
    assert len({(chosen, *seconds.values()) for chosen, seconds, _ in results}) == 1
    assert results[0][1].keys() == {"plain", "hierarchical"}
    chosen, seconds, _ = results[0]
    assert chosen == ("hierarchical" if seconds["hierarchical"] < 0.9 * seconds["plain"] else "plain")
    expected = alone(QUICK, 4, steps=range(2))
    for name, _, state in run_ranks(run, 4, 2):
        assert name == "hierarchical"  # as in the checkpoint, whatever was measured
        assert worst(state, expected) < 1e-10


@pytest.mark.parametrize(("nodes", "data"), [(None, 2), (1, 2), (2, 2), (2, 3)])
def test_hierarchical_sums_need_nodes(nodes: int | None, data: int) -> None:
    sync = SyncConfig(strategy="hierarchical")
    with pytest.raises(RankError, match=r"several nodes with several data ranks on each"):
        run_ranks(lambda: trained(data, 1, QUICK, sync, ranks_per_node=nodes), data)
    if nodes != 2 or data != 3:
        auto = dataclasses.replace(sync, strategy="auto")
        run_ranks(lambda: trained(data, 1, QUICK, auto, steps=range(1), ranks_per_node=nodes), data)


@pytest.mark.parametrize("shard_state", [False, True])
def test_a_run_that_was_broken_is_the_unbroken_one_to_the_bit(shard_state: bool) -> None:
    sync = dataclasses.replace(SMALL, shard_state=shard_state)
    whole = run_ranks(lambda: trained(2, 2, QUICK, sync), 4)
    (_, half), *_ = run_ranks(lambda: trained(2, 2, QUICK, sync, steps=range(3)), 4)
    rest = run_ranks(lambda: trained(2, 2, QUICK, sync, steps=range(3, 5), state=half), 4)
    for (_, ours), (_, theirs) in zip(rest, whole):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_checkpoint_fits_any_number_of_ranks() -> None:
    """Two model ranks and two data ranks with sharded state, then three data ranks, then one process."""
    sharded = dataclasses.replace(SMALL, shard_state=True)
    (_, state), *_ = run_ranks(lambda: trained(2, 2, QUICK, sharded, steps=range(2)), 4)
    expected = alone(QUICK, 2, steps=range(2))
    assert worst(state, expected) < 1e-10
    expected = trained(1, 1, dataclasses.replace(QUICK, accumulate=3), SyncConfig(), range(2, 4), expected)[1]
    results = run_ranks(lambda: trained(3, 1, QUICK, sharded, steps=range(2, 4), state=state), 3)
    assert worst(results[0][1], expected) < 1e-10
    expected = trained(1, 1, QUICK, SyncConfig(), range(4, 6), expected)[1]
    assert worst(trained(1, 1, QUICK, SyncConfig(), range(4, 6), results[0][1])[1], expected) < 1e-10


def test_averaged_weights_are_whole_on_every_rank() -> None:
    def look() -> Tensor:
        mesh, net = make_mesh(2, 2), Toy()
        config, sync = dataclasses.replace(QUICK, accumulate=2), dataclasses.replace(SMALL, shard_state=True)
        optimizer = Optimizer(net, config, mesh, sync)
        for step in range(2):
            part_of_loss(net, 2 * step + mesh.data.rank, mesh.model.rank, 2).backward()
            optimizer.collect()
            optimizer.step(step)
        before = optimizer.weights.clone()
        with optimizer.averaged():
            found = net.enter.weight.detach().clone()
        assert torch.equal(optimizer.weights, before)
        return found

    expected = alone(QUICK, 2, steps=range(2))["average.enter.weight"]
    for found in run_ranks(look, 4):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_a_replica_that_differs_is_named() -> None:
    def run(when: int) -> None:
        mesh, net = make_mesh(3), Toy()
        if when == 0 and mesh.data.rank == 1:
            with torch.no_grad():
                net.leave.bias[2] += 1e-12
        optimizer = Optimizer(net, dataclasses.replace(QUICK, accumulate=3), mesh, SyncConfig(check_every=2))
        for step in range(2):
            if step == 1 and mesh.data.rank == 1:
                optimizer.layout.view(optimizer.weights, "enter.weight")[3, 1] += 1e-12
            optimizer.collect()
            optimizer.step(step)

    with pytest.raises(RankError, match=r"at the start: .*: leave\.bias \(rank 0, 2 against 1\); "):
        run_ranks(run, 3, 0)
    with pytest.raises(RankError, match=r"after step 2: .*: enter\.weight \(rank 0, 2 against 1\); "):
        run_ranks(run, 3, 1)


def test_every_data_rank_needs_an_example() -> None:
    with pytest.raises(RankError, match=r"optim.accumulate = 1 examples per step cannot be shared by plan.data = 2"):
        run_ranks(lambda: Optimizer(Toy(), OptimConfig(accumulate=1), make_mesh(2)), 2)


def test_misuse_is_an_error_that_names_the_parameter() -> None:
    def twice() -> None:
        net = Toy()
        optimizer = Optimizer(net, QUICK, make_mesh(1, 2), SMALL)
        for _ in range(2):
            net(torch.ones(1, 3, dtype=torch.float64), True).sum().backward()
        optimizer.collect()

    def lost() -> None:
        net = Toy()
        optimizer = Optimizer(net, QUICK, make_mesh(1, 2), SMALL)
        net.zero_grad(set_to_none=True)
        net(torch.ones(1, 3, dtype=torch.float64), True).sum().backward()
        optimizer.collect()

    with pytest.raises(RankError, match=r"scale: a gradient after it was sent"):
        run_ranks(twice, 2)
    with pytest.raises(RankError, match=r"scale: its grad is not the optimiser's buffer"):
        run_ranks(lost, 2)


def test_bytes_are_those_of_a_ring() -> None:
    """n numbers over D ranks: (D - 1) / D of them out, and as many back; sharding the state costs nothing."""

    def sent(shard_state: bool) -> tuple[dict[str, int], int]:
        net = nn.Linear(31, 33).double()
        torch.nn.init.zeros_(net.weight)
        torch.nn.init.zeros_(net.bias)
        sync = SyncConfig(shard_state=shard_state, check_every=0)
        told: Counter[str] = Counter()
        with watched(lambda event: told.update({event.title: event.bytes})):
            optimizer = Optimizer(net, OptimConfig(accumulate=3), make_mesh(3), sync)
            net(torch.ones(1, 31, dtype=torch.float64)).sum().backward()
            optimizer.collect()
            optimizer.step(0)
        return dict(told), optimizer.layout.size * 8

    for shard_state in (False, True):
        for counted, size in run_ranks(sent, 3, shard_state):
            what = "of gradients or weights over data ranks"
            once = size * 2 // 3
            assert counted == {f"all_to_all {what}": once, f"all_gather {what}": once + 2 * 8}  # + factors


def test_a_layout_tears_no_parameter_and_cuts_evenly() -> None:
    named = {f"p{i}": torch.zeros(size) for i, size in enumerate([5, 100, 1, 64, 33, 16])}
    layout = make_layout(named, 4 * 60, ranks=6)
    assert [set(m) for m in layout.members] == [{"p5", "p4", "p3"}, {"p2", "p1"}, {"p0"}]
    ends = [0]
    for bucket in reversed(layout.buckets):
        assert bucket.start == ends[-1]
        assert (bucket.stop - bucket.start) % (6 * ALIGN) == 0
        ends.append(bucket.stop)
    assert ends[-1] == layout.size
    flat = torch.arange(layout.size)
    shards = [layout.shard(flat, 6, index) for index in range(6)]
    for bucket, piece in zip(layout.buckets, layout.within(6)):
        assert torch.equal(torch.cat([shard[piece] for shard in shards]), flat[bucket])
    found = {name: [] for name in named}
    for index, shard in enumerate(shards):
        for segment in layout.segments(6, index):
            found[segment.name].append(shard[segment.where])
            assert int(shard[segment.where][0]) == layout.places[segment.name].start + segment.first
    assert all(torch.equal(torch.cat(parts), flat[layout.places[name]]) for name, parts in found.items())


@pytest.mark.parametrize("wrong", [{"bucket": 0.0}, {"check_every": -1}])
def test_settings_that_make_no_sense(wrong: dict) -> None:
    with pytest.raises(ValueError):
        SyncConfig(**wrong)


def test_ranks_leave_no_group_behind() -> None:
    assert not dist.is_initialized()


@pytest.mark.parametrize(("given", "ranks", "mebibytes"), [(16, 256, 16), (16, 2048, 128), (4, 2048, 4), (32, 2, 32)])
def test_a_bucket_has_enough_for_each_rank_unless_it_was_given(given: float, ranks: int, mebibytes: float) -> None:
    assert SyncConfig(bucket=given).bucket_bytes(ranks) == mebibytes * 2**20
