"""Gradients of several ranks against those of one: equal values, early sending, no deadlock, replica checks."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers import StandInStreams
from tests.parallel.toys import TINY, Toy, part_of_loss, same, survives_a_break, trained
from tests.ranks import RankError, run_ranks
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.parallel import exchange
from warpfold.parallel.exchange import ALIGN, ClipFactors, Plain, Stages, SyncConfig, make_layout
from warpfold.parallel.mesh import Mesh, make_mesh
from warpfold.parallel.reducer import Reducer
from warpfold.parallel.waits import watched

T = TypeVar("T")
QUICK = OptimConfig(learning_rate=0.01, warmup_steps=2, average_decay=0.9)
STEP = replace(QUICK, clip="step", clip_norm=0.5)
SMALL = SyncConfig(bucket=TINY)
SHARDED = replace(SMALL, shard_state=True)
NODES = replace(SMALL, strategy="hierarchical")


@dataclass(frozen=True)
class Way:
    """A way to train the toy model. examples: of all data ranks; 0 for `config.accumulate` per data rank."""

    data: int
    model: int
    config: OptimConfig = QUICK
    sync: SyncConfig = SMALL
    nodes: int | None = None
    examples: int = 0

    def train(self, steps: range = range(5), state: dict[str, Tensor] | None = None) -> Any:
        return trained(self.data, self.model, self.config, self.sync, steps, state, self.nodes, examples=self.examples)

    def alone(self, steps: range = range(5)) -> dict[str, Tensor]:
        """Train in a single process on the same examples."""
        count = self.examples or self.config.accumulate * self.data
        return trained(1, 1, self.config, SyncConfig(), steps, examples=count)[1]


TWICE, TWICE_STEP = replace(QUICK, accumulate=2), replace(STEP, accumulate=2)
UNIFORM = replace(QUICK, average="uniform", average_from=2)
LAMB, LARS = replace(QUICK, name="lamb", weight_decay=0.1), replace(QUICK, name="lars", weight_decay=0.1)
WAYS = {
    "one example": [Way(1, 2), Way(1, 3), Way(2, 1), Way(2, 2), Way(2, 3), Way(3, 1), Way(3, 2), Way(3, 3)],
    "several": [Way(2, 2, TWICE), Way(2, 2, STEP), Way(3, 2, TWICE_STEP), Way(2, 2, QUICK, SyncConfig())],
    "sharded": [
        *(Way(2, 3, QUICK, SHARDED), Way(3, 1, TWICE, SHARDED), Way(2, 2, STEP, SHARDED)),
        *(Way(2, 2, LAMB, SHARDED), Way(3, 2, LARS, SHARDED), Way(2, 2, UNIFORM, SHARDED)),
    ],
    "unequal shares": [
        *(Way(3, 1, QUICK, SMALL, None, 4), Way(3, 1, STEP, SHARDED, None, 5), Way(2, 2, QUICK, SHARDED, None, 3)),
        *(Way(3, 1, STEP, SMALL, None, 4), Way(3, 1, QUICK, SMALL, None, 5), Way(2, 2, STEP, SMALL, None, 3)),
    ],
    "hierarchical": [
        *(Way(4, 1, QUICK, NODES, 2), Way(4, 1, TWICE, replace(NODES, shard_state=True), 2)),
        *(Way(4, 1, TWICE_STEP, NODES, 2), Way(4, 2, QUICK, NODES, 4)),
    ],
}


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest relative difference of any tensor."""
    assert ours.keys() >= theirs.keys()
    return max(
        float((ours[name] - t).abs().max() / t.abs().max().clamp(min=1e-30)) for name, t in theirs.items() if t.numel()
    )


def on_each(ways: list[Way], function: Callable[[Way], T]) -> Iterator[tuple[Way, list[T]]]:
    """Run `function` for each way on its ranks; ways with equally many ranks share a fork."""
    for ranks in {way.data * way.model for way in ways}:
        of_ranks = [way for way in ways if way.data * way.model == ranks]
        found = run_ranks(lambda some=of_ranks: [function(way) for way in some], ranks)
        yield from zip(of_ranks, map(list, zip(*found)))


@pytest.mark.parametrize("kind", WAYS)
def test_five_steps_are_those_of_one_process(kind: str) -> None:
    """With exchange in the backward pass; weights, moments and averages are equal on every rank, and so are norms."""
    for way, results in on_each(WAYS[kind], Way.train):
        expected = way.alone()
        for rank, (norms, state) in enumerate(results):
            assert worst(state, expected) < 1e-10, way
            assert norms == results[rank - rank % way.model][0]


def test_a_run_that_was_broken_is_the_unbroken_one_to_the_bit() -> None:
    ways = [
        Way(2, 2),
        Way(2, 2, QUICK, SHARDED),
        Way(2, 2, UNIFORM),
        Way(3, 1, QUICK, SMALL, None, 4),
        Way(3, 1, STEP, SHARDED, None, 5),
    ]
    for way, results in on_each(ways, lambda way: survives_a_break(lambda *given: way.train(*given)[1])):
        assert all(results), way


@pytest.mark.parametrize("sync", [SMALL, SHARDED], ids=["whole", "sharded"])
def test_moments_of_another_run_come_to_the_ranks_that_own_them(sync: SyncConfig) -> None:
    before = Way(2, 2, QUICK, sync).alone()

    def taken() -> dict[str, Tensor]:
        return trained(2, 2, QUICK, sync, range(0), look=lambda optimizer: optimizer.take_moments(before))[1]

    for state in run_ranks(taken, 4):
        assert all(torch.equal(state[name], x) for name, x in before.items() if name.startswith(("moment", "steps")))


# Time of sending


def begun(way: Way, what: Callable[[Reducer], int]) -> tuple[list[int], int]:
    """Count the buckets in flight at the first layer's gradient of each example, and find that layer's bucket.

    Within the backward pass, the exchange of a sent bucket needs no action of this thread.
    """
    mesh, net, seen = make_mesh(way.data, way.model), Toy(), list[int]()
    optimizer = Optimizer(net, way.config, mesh, way.sync)
    own = next(bucket for bucket, names in enumerate(optimizer.layout.members) if "enter.weight" in names)

    def look(gradient: Tensor) -> None:
        end = time.monotonic() + (10 if optimizer.reducer.early else 0)
        while what(optimizer.reducer) < own and time.monotonic() < end:
            time.sleep(0.001)
        seen.append(what(optimizer.reducer))

    net.enter.weight.register_hook(look)
    for index in range(optimizer.share):
        part_of_loss(net, index, mesh.model.rank, way.model).backward()
        optimizer.collect()
    optimizer.step(0)
    return seen, own


def test_buckets_travel_while_the_backward_pass_runs_and_in_one_order() -> None:
    """With a rank's only example, whose clipping factor follows, and with its last one, where only the mean is clipped.

    Some examples do not use some layers. With data x model ranks, the exchange follows the model ranks' sum.
    """
    only, last = OptimConfig(accumulate=2), OptimConfig(clip="step", accumulate=4)
    ways = [Way(2, 1, only), Way(2, 1, last), Way(2, 2, only), Way(2, 2, last)]
    for way, found in on_each(ways, lambda way: begun(way, lambda reducer: len(reducer._in_flight))):
        assert found == [([0] * (way.config.accumulate // 2 - 1) + [4], 4)] * len(found)
    two = replace(QUICK, accumulate=2)
    assert run_ranks(lambda: begun(Way(1, 2, two), lambda reducer: reducer.sent_buckets), 2) == [([4, 4], 4)] * 2


def test_exchanged_early_or_late_and_on_a_side_stream_the_weights_are_the_same_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With fake streams, the weights are bitwise equal.

    Each exchange starts on the side stream after a wait for the gradients, and the main stream waits for the side
    stream before it reads.
    """
    streams = StandInStreams()
    said = streams.said

    def reduce_scatter(exchange: Plain, x: Tensor, factors: ClipFactors | None = None) -> Stages[Tensor]:
        said.append(f"exchange on {streams.now}")
        return (yield from original(exchange, x, factors))

    def with_streams(self: Reducer, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        self._thread, self._side = None, streams.stream("side")  # type: ignore[assignment]

    original, init, begin = Plain.reduce_scatter, Reducer.__init__, Reducer.begin

    def on_a_rank() -> None:
        for way in (Way(2, 2), Way(2, 2, TWICE_STEP)):
            norms, early = way.train()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Reducer, "begin", lambda self, early, add_to=None: begin(self, False))
                late_norms, late = way.train()
            assert norms == late_norms
            assert same(early, late)
        early = Way(2, 2).train()[1]
        streams.put(monkeypatch)
        monkeypatch.setattr(Plain, "reduce_scatter", reduce_scatter)
        monkeypatch.setattr(Reducer, "__init__", with_streams)
        assert same(Way(2, 2).train()[1], early)
        buckets = said.index("main waits for side") // 2
        assert buckets > 1
        assert said == (["side waits for main", "exchange on side"] * buckets + ["main waits for side"]) * 5

    run_ranks(on_a_rank, 4)


def test_bytes_are_those_of_a_ring() -> None:
    """For n elements and D ranks, (D - 1) / D are sent and as many received. Sharding the state needs no more."""

    def sent(shard_state: bool) -> tuple[dict[str, int], int]:
        net = nn.Linear(31, 33).double()
        torch.nn.init.zeros_(net.weight)
        torch.nn.init.zeros_(net.bias)
        told: Counter[str] = Counter()
        with watched(lambda event: told.update({event.title: event.bytes})):
            sync = SyncConfig(shard_state=shard_state, check_every=0)
            optimizer = Optimizer(net, OptimConfig(accumulate=3), make_mesh(3), sync)
            net(torch.ones(1, 31, dtype=torch.float64)).sum().backward()
            optimizer.collect()
            optimizer.step(0)
        return dict(told), optimizer.layout.size * 8

    for counted, size in run_ranks(lambda: [sent(False), sent(True)], 3)[1]:
        what, once = "of gradients or weights over data ranks", size * 2 // 3
        assert counted == {f"all_to_all {what}": once, f"all_gather {what}": once + 2 * 8}  # plus clipping factors


# Unusual examples


def test_an_example_without_any_gradient_is_zeros() -> None:
    def step(empty_rank: int) -> Tensor:
        mesh, net = make_mesh(1, 2), Toy()
        optimizer = Optimizer(net, QUICK, mesh, SMALL)
        if mesh.model.rank != empty_rank:
            net(torch.ones(1, 3, dtype=torch.float64), True).sum().backward()
        assert optimizer.collect() > 0
        optimizer.step(0)
        return optimizer.weights

    found = [weights for both in run_ranks(lambda: [step(0), step(1)], 2) for weights in both]
    for weights in found:
        torch.testing.assert_close(weights, found[0], rtol=1e-12, atol=0)


# Strategies


def test_bf16_rounds_what_travels_and_nothing_else() -> None:
    way = Way(2, 1, STEP, replace(SHARDED, strategy="bf16"))
    expected = way.alone(range(1))
    results = run_ranks(lambda: way.train(range(1)), 2)
    for _, state in results:
        for name in (name for name in expected if name.startswith("moment1.")):
            torch.testing.assert_close(state[name], expected[name], rtol=2e-2, atol=1e-4, msg=name)
        assert torch.equal(state["weights.enter.weight"], results[0][1]["weights.enter.weight"])
    assert worst(results[0][1], expected) > 1e-5


def test_auto_chooses_the_same_on_every_rank_and_keeps_its_choice() -> None:
    sync = replace(SHARDED, strategy="auto")

    def run(forced: int | None) -> tuple[str, dict[str, float], dict[str, Tensor]]:
        mesh, net = make_mesh(4), Toy()
        optimizer = Optimizer(net, replace(QUICK, accumulate=4), mesh, sync, ranks_per_node=2)
        chosen = optimizer.reducer.strategy
        if forced is not None:
            optimizer.restore({**optimizer.state(), "sync.strategy": torch.tensor(forced)})
        for step in range(2):
            part_of_loss(net, 4 * step + mesh.data.rank, 0, 1).backward()
            optimizer.collect()
            optimizer.step(step)
        return optimizer.reducer.strategy if forced else chosen, optimizer.strategy_seconds, optimizer.state()

    results = run_ranks(lambda: [run(None), run(2)], 4)
    assert len({(chosen, *seconds.values()) for (chosen, seconds, _), _ in results}) == 1
    (chosen, seconds, _), _ = results[0]
    assert seconds.keys() == {"plain", "hierarchical"}
    assert chosen == ("hierarchical" if seconds["hierarchical"] < 0.9 * seconds["plain"] else "plain")
    expected = Way(4, 1).alone(range(2))
    for _, (name, _, state) in results:
        # As in the checkpoint, for any measurement.
        assert name == "hierarchical"
        assert worst(state, expected) < 1e-10


def test_a_rank_that_comes_late_to_a_measurement_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """In simulated time, another rank is 100 s late for each round, and the first collective waits for it."""
    now, late = 0.0, True

    def send(*_: Any, seconds: float = 0.0, **__: Any) -> None:
        nonlocal now, late
        now, late = now + seconds + 100 * late, False

    class Simulated:
        late_factors = True

        def reduce_scatter(self, x: Tensor) -> Stages[Tensor]:
            send(seconds=2)
            yield
            return x

        def all_gather(self, piece: Tensor, out: Tensor) -> Stages[None]:
            nonlocal late
            send(seconds=1)
            yield
            late = True

    monkeypatch.setattr(exchange.dist, "all_reduce", send)
    monkeypatch.setattr(exchange.time, "perf_counter", lambda: now)
    # hidden: the first half overlaps with the backward pass.
    for hidden, seconds in ((False, 3), (True, 1)):
        given: Any = {"plain": Simulated()}
        assert exchange.choose(given, Mesh(), torch.zeros(4), [slice(0, 4)], hidden) == ("plain", {"plain": seconds})


@pytest.mark.parametrize("data", [2, 3])
def test_hierarchical_sums_need_nodes(data: int) -> None:
    with pytest.raises(RankError, match=r"several nodes with several data ranks on each"):
        run_ranks(Way(data, 1, QUICK, NODES, 2).train, data)
    if data == 2:
        auto = replace(NODES, strategy="auto")
        run_ranks(lambda: [Way(2, 1, QUICK, auto, nodes).train(range(1)) for nodes in (None, 1, 2)], 2)


# Errors


def test_a_replica_that_differs_is_named() -> None:
    def run(when: int) -> None:
        mesh, net = make_mesh(3), Toy()
        if when == 0 and mesh.data.rank == 1:
            with torch.no_grad():
                net.leave.bias[2] += 1e-12
        optimizer = Optimizer(net, replace(QUICK, accumulate=3), mesh, SyncConfig(check_every=2))
        for step in range(2):
            if step == 1 and mesh.data.rank == 1:
                optimizer.layout.view(optimizer.weights, "enter.weight")[3, 1] += 1e-12
            optimizer.collect()
            optimizer.step(step)

    with pytest.raises(RankError, match=r"at the start: .*: leave\.bias \(rank 0, 2 against 1\)\. Continue"):
        run_ranks(run, 3, 0)
    with pytest.raises(RankError, match=r"after step 2: .*: enter\.weight \(rank 0, 2 against 1\)\. Continue"):
        run_ranks(run, 3, 1)


def twice(net: Toy, optimizer: Optimizer) -> None:
    """Call backward twice before `collect`."""
    for _ in range(2):
        net(torch.ones(1, 3, dtype=torch.float64), True).sum().backward()


def failing(net: Toy, optimizer: Optimizer) -> None:
    """Fail in the exchange, which runs concurrently with the backward pass."""
    optimizer.reducer.exchange.reduce_scatter = Mock(side_effect=MemoryError("no room to receive"))  # type: ignore[method-assign]
    part_of_loss(net, 0, 0, 2).backward()


@pytest.mark.parametrize(
    ("data", "fault", "says"),
    [
        (1, twice, r"scale: its gradient changed after it was sent"),
        (2, failing, "MemoryError: no room to receive"),
        (4, twice, r"optim.accumulate = 2 examples per step cannot be shared by plan.data = 4"),
    ],
)
def test_what_fails_is_raised_and_misuse_names_the_parameter(
    data: int, fault: Callable[[Toy, Optimizer], None], says: str
) -> None:
    def fail() -> None:
        net = Toy()
        optimizer = Optimizer(net, TWICE, make_mesh(data, 4 // data if data > 1 else 2), SMALL)
        fault(net, optimizer)
        optimizer.collect()

    with pytest.raises(RankError, match=says):
        run_ranks(fail, 4 if data > 1 else 2)
    assert not dist.is_initialized()


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


def test_settings_make_sense_and_a_bucket_has_enough_for_each_rank_unless_it_was_given() -> None:
    for wrong in ({"bucket": 0.0}, {"check_every": -1}):
        with pytest.raises(ValueError):
            SyncConfig(**wrong)  # type: ignore[arg-type]
    for given, ranks, mebibytes in ((16, 256, 16), (16, 2048, 128), (4, 2048, 4), (32, 2, 32)):
        assert SyncConfig(bucket=given).bucket_bytes(ranks) == mebibytes * 2**20
