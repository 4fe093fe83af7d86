"""A replayed step equals a normal step bit for bit, whatever the host has changed since the recording."""

import gc
import logging
import re
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from typer.testing import CliRunner

from tests.helpers import as_multimer, filled_model, random_batch, tiny_config
from tests.laws.test_plans import Work, example
from tests.ranks import run_ranks
from tests.recorder import LeftoverRecorder, OperationRecorder
from tests.training.runs import equal_tensors, make_store, rows, tiny_run
from warpfold import device
from warpfold.batch import Batch, passes
from warpfold.cli import app
from warpfold.data.load.examples import Sample
from warpfold.device import ALIGNED, CUDARecorder, Graphs, Named, outside_graph
from warpfold.engine.learn import Learner
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.errors import LostError, UserError
from warpfold.model import permutation
from warpfold.model.losses import LossConfig
from warpfold.parallel.compress import CompressionConfig
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import Mesh, make_mesh
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import Team
from warpfold.parallel.waits import Event, watched
from warpfold.settings import to_toml
from warpfold.training.train import train

WORK = Work(residues=8, sequences=3, extra=3, templates=1, recycles=2)
LOSSES = LossConfig(violation=1.0, experimentally_resolved=0.01, predicted_aligned_error=0.1)


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> OperationRecorder:
    """Record operations instead of CUDA graphs."""
    found = OperationRecorder()
    monkeypatch.setattr(device, "find_recorder", lambda _: found)
    return found


def sample(index: int, recycles: int, work: Work = WORK) -> Sample:
    features = passes(example(work, index), 0, recycles + 1)
    single = {name: x.float() if x.is_floating_point() else x for name, x in features.items()}
    return Sample(index, f"example {index}", single)


def learner(plan: Plan, config: OptimConfig, work: Work = WORK, mesh: Mesh | None = None) -> Learner:
    outer: Literal["first", "middle"] = "first" if plan.branch > 1 else "middle"
    settings = tiny_config(recycles=2, evoformer=replace(tiny_config().evoformer, blocks=1, outer=outer))
    model = filled_model(as_multimer(settings) if work.chains else settings).train()
    execution = Execution(plan, mesh)
    execution.bind(model)
    optimizer = Optimizer(model, config, mesh, plan.sync, batch=plan.batch, uses_graphs=execution.records)
    return Learner(model, optimizer, LOSSES, 5, Team(mesh=mesh or Mesh()))


def steps(
    plan: Plan, config: OptimConfig, work: Work = WORK, count: int = 4, mesh: Mesh | None = None
) -> tuple[list[list[float]], Named, Graphs]:
    """Run some training steps; return the examples' results, the final state and the graphs."""
    one, said = learner(plan, config, work, mesh), []
    for step in range(count):
        recycles = (2, 0, 1, 2)[step]
        for first in range(0, one.optimizer.share, plan.batch):
            index = step * config.accumulate + first + 10 * one.optimizer.mesh.data.rank
            found = one.learn([sample(index + i, recycles, work) for i in range(plan.batch)], recycles)
            said += [[float(x) for x in (*each.losses.values(), each.norm, each.lddt_ca)] for each in found]
        said.append([float(one.step(step))])
    execution = one.model.execution
    assert isinstance(execution, Execution)
    return said, one.optimizer.state(), execution.graphs


CASES = {
    "adam, clipped examples": (Plan(), OptimConfig(accumulate=2, warmup_steps=9)),
    "recomputed layers, batches, lamb": (
        Plan(recompute="layer", batch=2, sizes=1),
        OptimConfig(name="lamb", accumulate=2, clip="step"),
    ),
    "bf16, recomputed blocks, chunks, lars": (
        Plan(precision="bf16", recompute="block", chunk=5),
        OptimConfig(name="lars", warmup_steps=2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_replayed_step_is_the_step(name: str) -> None:
    """Examples, dropout, numbers of recycles and learning rates differ in every step."""
    plan, config = CASES[name]
    expected, weights, _ = steps(plan, config)
    found, replayed, graphs = steps(replace(plan, graph=True), config)
    assert found == expected
    examples = [tuple(said) for said in found if len(said) > 1]
    assert len(set(examples)) == len(examples)  # all results differ
    for key in weights:
        assert torch.equal(replayed[key], weights[key]), key
    assert graphs.recorded == 3  # a pass without gradient, the last pass, the update
    assert graphs.replayed >= 5
    assert not graphs.refused


@pytest.mark.parametrize("name", CASES)
def test_a_recording_leaves_no_tensors_and_no_garbage(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that only one graph's replay fills would share memory with earlier graphs."""
    monkeypatch.setattr(device, "find_recorder", lambda _: LeftoverRecorder())
    plan, config = CASES[name]
    found, _, graphs = steps(replace(plan, graph=True), config)
    assert found == steps(plan, config)[0]
    assert graphs.recorded == 3


RANKS = {  # of two data ranks; and how many graphs there are: of passes without gradient, of others, and of those in
    # which gradients begin to travel
    "shares of two and one": (OptimConfig(accumulate=3), SyncConfig(bucket=0.01), 2),
    "an example each": (OptimConfig(accumulate=2), SyncConfig(bucket=0.01), 2),
    "whole steps clipped, lamb, sharded state": (
        OptimConfig(name="lamb", accumulate=4, clip="step", warmup_steps=2),
        SyncConfig(shard_state=True, bucket=0.01),
        3,
    ),
    "int8": (OptimConfig(accumulate=2, compression=CompressionConfig(method="int8", start=1)), SyncConfig(), 2),
}


@pytest.mark.parametrize("name", RANKS)
def test_data_ranks_record_their_passes_and_send_what_they_would(name: str, recorder: OperationRecorder) -> None:
    config, sync, count = RANKS[name]
    plan = Plan(data=2, sync=sync, graph=False)
    cuts: list[int] = []

    def on_a_rank() -> bool:
        record = recorder.record

        def noted(function: Callable[[], Named]) -> tuple[Named, Callable[[], None]]:
            found = record(function)
            cuts.append(recorder.cuts)
            return found

        recorder.record = noted  # type: ignore[method-assign]
        mesh = make_mesh(2)
        expected, weights, _ = steps(plan, config, mesh=mesh)
        found, replayed, graphs = steps(replace(plan, graph=True), config, mesh=mesh)
        assert found == expected
        for key in weights:
            assert torch.equal(replayed[key], weights[key]), key
        assert graphs.recorded == len(cuts) == count  # but for the update, in which ranks exchange
        sends = name in ("an example each", "whole steps clipped, lamb, sharded state")
        assert (max(cuts) > 3) == sends, "buckets begin to travel between the parts of a backward pass"
        assert graphs.replayed > 4
        assert not graphs.refused
        return True

    assert run_ranks(on_a_rank, 2) == [True, True]


@pytest.mark.parametrize("step_to_come", [1, 3])
def test_a_rank_that_meets_a_new_shape_sends_what_others_replay(step_to_come: int) -> None:
    """With two shapes, one rank replays a graph with cuts during the first call of the other rank."""
    config = OptimConfig(accumulate=2)

    def on_a_rank() -> bool:
        mesh = make_mesh(2)

        def trained(graph: bool) -> tuple[list[float], Named]:
            one, said = learner(Plan(data=2, sync=SyncConfig(bucket=0.01), graph=graph), config, mesh=mesh), []
            for step in range(5):
                new = mesh.data.rank == 1 and step == step_to_come
                example = sample(2 * step + mesh.data.rank, 1, replace(WORK, residues=9) if new else WORK)
                (found,) = one.learn([example], 1)
                said += [float(found.losses[""]), float(found.norm), float(one.step(step))]
            return said, one.optimizer.state()

        (expected, weights), (found, replayed) = trained(False), trained(True)
        assert found == expected
        for key in weights:
            assert torch.equal(replayed[key], weights[key]), key
        return True

    assert run_ranks(on_a_rank, 2) == [True, True]


@pytest.mark.parametrize("first", [True, False])
def test_a_graph_of_a_pass_that_sends_does_not_serve_one_that_does_not(first: bool) -> None:
    """Calls of one function with the same shapes differ in their context, which says whether a call sends."""
    model, execution = torch.nn.Linear(1, 1), Execution(Plan(graph=True))
    sends, sent = first, list[int]()

    def function(inputs: Mapping[str, torch.Tensor]) -> Named:
        if sends:
            outside_graph(lambda: sent.append(step))
        return {"x": 2 * inputs["x"]}

    for step in range(8):
        sends = first if step < 3 else step % 2 == 0
        found = execution.call(model, function, {"x": torch.full((2,), float(step))}, ("sends", sends))
        assert found["x"].tolist() == [2.0 * step] * 2
        assert (step in sent) == sends
    assert execution.graphs.recorded == 2


COMPLEX = Work(chains=(3, 2, 3), sequences=3, extra=2, templates=1, residues=8, recycles=2)
SHARED = {  # ranks that share an example
    "axial": (Plan(axial=2), OptimConfig(accumulate=2)),
    "axial, equal chains": (Plan(axial=2), OptimConfig()),
    "axial, recomputed, bf16": (Plan(axial=2, recompute="block", precision="bf16"), OptimConfig()),
    "branches": (Plan(branch=2), OptimConfig()),
    "axial, data, sharded state": (
        Plan(data=2, axial=2, sync=SyncConfig(shard_state=True, bucket=0.01)),
        OptimConfig(accumulate=2),
    ),
    "axial, branches": (Plan(axial=2, branch=2), OptimConfig()),
    "axial, data, of two examples the second sends": (
        Plan(data=2, axial=2, sync=SyncConfig(bucket=0.01)),
        OptimConfig(accumulate=4, clip="step"),
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_ranks_that_share_an_example_record_their_messages(name: str, recorder: OperationRecorder) -> None:
    """All messages start and end within a part of a recording, because a capture must not end with pending messages."""
    plan, config = SHARED[name]
    work, nearest = COMPLEX if "chains" in name else WORK, permutation.nearest_copies
    messages: list[int] = []

    def on_a_rank() -> bool:
        record, under_way = recorder.record, set[int]()

        def note(event: Event) -> None:
            if event.number >= 0:
                (under_way.add if event.what == "start" else under_way.remove)(event.number)

        def noted(function: Callable[[], Named]) -> tuple[Named, Callable[[], None]]:
            assert not under_way
            found = record(function)
            assert not under_way
            messages.append(recorder.messages)
            return found

        def between_parts(*given: torch.Tensor) -> torch.Tensor:
            assert not under_way
            return nearest(*given)

        recorder.record = noted  # type: ignore[method-assign]
        mesh = make_mesh(plan.data, plan.axial, plan.branch)
        expected, weights, _ = steps(replace(plan, graph=False), config, work, mesh=mesh)
        permutation.nearest_copies = between_parts
        with watched(note):
            found, replayed, graphs = steps(replace(plan, graph=True), config, work, mesh=mesh)
        assert found == expected
        for key in weights:
            assert torch.equal(replayed[key], weights[key]), key
        # A pass without gradient, and the last pass; a pass that sends has its own graph.
        assert graphs.recorded == len(messages) == (3 if "second sends" in name else 2)
        assert min(messages) > 1
        assert graphs.replayed >= 4
        assert not graphs.refused
        return True

    ranks = plan.data * plan.axial * plan.branch
    assert run_ranks(on_a_rank, ranks) == [True] * ranks


def test_graphs_that_one_rank_records_again_are_recorded_again_by_those_that_share_its_example(
    recorder: OperationRecorder,
) -> None:
    """NCCL does not allow messages between a rank that records and a rank that replays."""

    def on_a_rank() -> int:
        mesh, record, recorded = make_mesh(1, 2), recorder.record, list[Callable[[], Named]]()
        recorder.warm_up = lambda function: (function(), mesh.axial.rank == 1)  # type: ignore[method-assign]
        recorder.record = lambda function: recorded.append(function) or record(function)  # type: ignore
        model, execution = torch.nn.Linear(1, 1), Execution(Plan(axial=2, graph=True), mesh)
        for size in (1, 1, 1, 2, 1, 1):
            execution.call(model, double, {"x": torch.ones(size)})
        assert execution.graphs.rerecorded == 1
        return len(recorded)

    assert run_ranks(on_a_rank, 2) == [2, 2]


def test_a_gradient_that_is_not_finite_is_left_out_by_a_graph_too() -> None:
    one = learner(Plan(graph=True), OptimConfig(clip_norm=1.0))
    for step in range(4):
        features = dict(sample(step, 0).features)
        if step == 3:
            features["msa_feat"] = features["msa_feat"] * torch.inf
        before = one.optimizer.weights.clone()
        (found,) = one.learn([Sample(step, "", features)], 0)
        rate = float(one.step(step))
        changed = not torch.equal(one.optimizer.weights, before)
        assert (changed, rate > 0, bool(found.norm.isfinite())) == ((True,) * 3 if step < 3 else (False,) * 3)


def test_weights_that_are_loaded_between_replays_are_those_that_a_graph_reads() -> None:
    said = []
    for graph in (True, False):
        one = learner(Plan(graph=graph, precision="bf16"), OptimConfig())
        one.optimizer = Optimizer(one.model, OptimConfig(), dtype=torch.bfloat16)
        for step in range(4):
            if step == 3:
                one.model.load_state_dict({name: 0.5 * x for name, x in one.model.state_dict().items()})
            (found,) = one.learn([sample(step, 0)], 0)
            one.step(step)
        said.append(float(found.losses[""]))
    assert said[0] == said[1]


def test_each_replay_assigns_equal_chains_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies in the examples have either order, and the host assigns them between the parts of a pass."""
    nearest, chosen = permutation.nearest_copies, list[list[int]]()

    def noted(*given: torch.Tensor) -> torch.Tensor:
        found = nearest(*given)
        chosen.append(found.tolist())
        return found

    monkeypatch.setattr(permutation, "nearest_copies", noted)
    plan, config = Plan(), OptimConfig()
    expected, weights, _ = steps(plan, config, COMPLEX)
    found, replayed, graphs = steps(replace(plan, graph=True), config, COMPLEX)
    assert found == expected
    assert all(torch.equal(replayed[key], weights[key]) for key in weights)
    assert chosen[: len(chosen) // 2] == chosen[len(chosen) // 2 :]
    assert len({tuple(one) for one in chosen[:4]}) > 1
    assert graphs.recorded == 3  # passes without gradient, the last pass, and the update
    assert not graphs.refused


# Graphs


def double(inputs: Batch) -> Named:
    return {"twice": inputs["x"] * 2}


def reads(inputs: Batch) -> Named:
    return {"x": inputs["x"] * float(inputs["x"].sum())}


def test_each_form_is_recorded_when_it_comes_again() -> None:
    graphs = Graphs()
    for number in range(3):
        for form in (torch.ones(2), torch.ones(3), torch.ones(3).double()):
            assert torch.equal(graphs.call(double, {"x": form * number})["twice"], form * 2 * number)
    assert (graphs.recorded, graphs.replayed) == (3, 6)
    graphs.call(double, {"x": torch.ones(2)}, context="another")
    assert graphs.replayed == 6


def test_results_stay_when_the_graph_is_used_again() -> None:
    graphs = Graphs()
    first, second, third = (graphs.call(double, {"x": torch.full((2,), float(i))})["twice"] for i in range(3))
    assert [x[0].item() for x in (first, second, third)] == [0, 2, 4]


def test_what_the_host_does_between_is_done_in_each_replay() -> None:
    seen: list[float] = []

    def sends(inputs: Batch) -> Named:
        twice = inputs["x"] * 2
        outside_graph(lambda: seen.append(float(twice[0])))
        return {"x": twice + 1}

    graphs = Graphs()
    for number in range(4):
        assert graphs.call(sends, {"x": torch.full((2,), float(number))})["x"][0] == 2 * number + 1
    assert seen == [0, 2, 4, 6]
    assert graphs.replayed == 3


def test_graphs_of_many_shapes_share_the_memory_of_their_inputs_and_results() -> None:
    graphs = Graphs()
    for _ in range(3):
        for size in (1000, 10, 500):
            given = {"x": torch.ones(size), "mask": torch.zeros(size, dtype=torch.bool), "none": torch.ones(0, 3)}
            assert torch.equal(graphs.call(double, given)["twice"], given["x"] * 2)
    assert len(graphs._buffers["inputs"]) == 4096 + 1024  # rounded up to 512 bytes
    assert len(graphs._buffers["results"]) == 4096
    assert graphs.recorded == 3


def test_the_least_recently_used_graph_is_deleted_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graphs, "MAX_SHAPES", 2)
    graphs = Graphs()

    def called(size: int) -> tuple[int, int]:
        """Call the function; return the number of graphs and of replayed calls."""
        assert torch.equal(graphs.call(double, {"x": torch.ones(size)})["twice"], torch.full((size,), 2.0))
        return graphs.recorded, graphs.replayed

    assert [called(size) for size in (1, 1, 2, 2, 1)] == [(0, 0), (1, 1), (1, 1), (2, 2), (2, 3)]
    assert not graphs.refused
    assert called(3) == (1, 3)  # 2 was used less recently than 1
    assert called(1) == (1, 4)
    assert [called(2), called(2)] == [(1, 4), (2, 5)]
    assert graphs.refused == {"graph of double: more than 2 shapes (plan.sizes makes them fewer)": 2}


def test_the_first_call_reads_the_memory_that_the_recording_reads() -> None:
    """Kernels depend on alignment and strides, and cannot be compiled during a recording."""
    seen: list[tuple[int, tuple[int, ...]]] = []

    def noted(inputs: Batch) -> Named:
        seen.append((inputs["x"].data_ptr(), inputs["x"].stride()))
        return {"x": inputs["x"] + 1}

    memory = torch.arange(40.0)
    for x in (memory[3:12].view(3, 3), memory[:12].view(3, 4).T, memory[5:6].expand(3)):
        graphs, expected = Graphs(), x + 1
        seen.clear()
        for _ in range(3):
            assert torch.equal(graphs.call(noted, {"mask": torch.ones(1), "x": x})["x"], expected)
        assert len(seen) == 2
        assert seen[0] == seen[1]
        assert x.data_ptr() != seen[0][0]
        assert (seen[0][0] - graphs._buffers["inputs"].data_ptr()) % ALIGNED == 0


def test_results_of_a_first_call_stay_when_its_inputs_are_overwritten() -> None:
    graphs = Graphs()
    first = graphs.call(lambda inputs: dict(inputs), {"x": torch.ones(2)})["x"]
    graphs.call(double, {"x": torch.zeros(2)})
    assert first.tolist() == [1, 1]


def test_what_the_host_reads_cannot_be_recorded() -> None:
    graphs = Graphs()
    graphs.call(reads, {"x": torch.ones(2)})
    with pytest.raises(UserError, match=r"reads cannot be recorded .*the host reads a number"):
        graphs.call(reads, {"x": torch.ones(2)})


def test_a_rank_that_is_lost_while_others_record_is_not_called_bad_settings() -> None:
    calls = 0

    def loses(inputs: Batch) -> Named:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise LostError("a sum", 1.0, RuntimeError("closed by peer"))
        return dict(inputs)

    graphs = Graphs()
    graphs.call(loses, {"x": torch.ones(2)})
    with pytest.raises(LostError, match="closed by peer"):
        graphs.call(loses, {"x": torch.ones(2)})


class FakeCapture:
    """Stand-in for `torch.cuda.CUDAGraph`: a capture that can be invalidated, of calls that run immediately."""

    captures: list["FakeCapture"] = []  # noqa: RUF012  (replaced by each test)
    begins = 0  # captures that may start; 0: any

    def __init__(self) -> None:
        self.state, self.is_valid = "new", True
        self.captures.append(self)

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        if self.begins and len(self.captures) > self.begins:
            raise RuntimeError("CUDA error: out of streams")
        assert self.state == "new"
        self.state = "capturing"

    def capture_end(self) -> None:
        assert self.state == "capturing", "a capture ends that has not begun"
        self.state = "ended"
        if not self.is_valid:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        assert self.state == "ended"


class FakePool:
    """Stand-in for `torch.cuda.MemPool` that reports the addresses of tensors."""

    id = (0, 1)

    def __init__(self) -> None:
        self.blocks: dict[int, object] = {}  # owner by address

    def snapshot(self) -> list[dict[str, object]]:
        held = {address: block() if callable(block) else block for address, block in self.blocks.items()}
        kind = {True: "active_allocated", False: "inactive"}
        return [{"address": a, "blocks": [{"state": kind[bool(b)], "size": 1}]} for a, b in held.items()]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> CUDARecorder:
    """Make a recorder of CUDA graphs with a stand-in for CUDA."""
    monkeypatch.setattr(FakeCapture, "captures", [])
    for name, value in {
        "CUDAGraph": FakeCapture, "MemPool": FakePool, "Stream": lambda device: None, "device": nullcontext,
        "stream": nullcontext, "synchronize": lambda device: None, "empty_cache": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return CUDARecorder(torch.device("cpu"))


def invalidates() -> Named:
    FakeCapture.captures[-1].is_valid = False
    raise ValueError("a kernel was loaded while the stream captured")


def test_a_capture_that_fails_says_why(fake: CUDARecorder) -> None:
    """Ending a failed capture raises another error without the cause."""
    with pytest.raises(ValueError, match="a kernel was loaded"):
        fake.record(invalidates)
    assert FakeCapture.captures[-1].state == "ended"
    with pytest.raises(ValueError, match="a kernel was loaded"):
        fake.record(lambda: (outside_graph(lambda: None), invalidates())[1])
    assert {each.state for each in FakeCapture.captures} == {"ended"}
    fake.record(dict)  # it can still record


def test_a_capture_that_is_invalid_without_an_error_is_one(fake: CUDARecorder) -> None:
    def silent() -> Named:
        FakeCapture.captures[-1].is_valid = False
        return {}

    with pytest.raises(RuntimeError, match="a previous error during capture"):
        fake.record(silent)


def test_a_capture_that_did_not_begin_does_not_end(fake: CUDARecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCapture, "begins", 2)  # the pool's graph, the first part
    with pytest.raises(RuntimeError, match="out of streams"):
        fake.record(lambda: outside_graph(lambda: None) or {})
    assert [each.state for each in FakeCapture.captures] == ["ended", "ended", "new"]


def test_a_recording_that_leaves_memory_in_the_pool_is_an_error(fake: CUDARecorder) -> None:
    pool = fake._pool
    assert isinstance(pool, FakePool)
    pool.blocks[512] = True  # from an earlier call
    fake.record(dict)

    def leaves() -> Named:
        pool.blocks[1024] = True
        return {}

    with pytest.raises(RuntimeError, match="1 tensors that were made in the recording are still in use"):
        fake.record(leaves)
    fake.record(dict)


def test_memory_that_only_a_reference_cycle_holds_is_no_error(fake: CUDARecorder) -> None:
    pool = fake._pool
    assert isinstance(pool, FakePool)
    fake.record(cyclic(pool))


def cyclic(pool: FakePool) -> Callable[[], Named]:
    """Make a function that leaves a block of the pool to the garbage collector."""

    class Cycle:
        def __init__(self) -> None:
            self.own = self
            pool.blocks[2048] = True

        def __del__(self) -> None:
            pool.blocks[2048] = False

    def function() -> Named:
        Cycle()
        return {}

    return function


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_no_garbage_is_collected_while_a_graph_is_captured(fake: CUDARecorder, fails: bool, enabled: bool) -> None:
    pool = fake._pool
    assert isinstance(pool, FakePool)
    fake.record(dict)
    cyclic(pool)()
    seen = []

    def function() -> Named:
        seen.append((gc.isenabled(), pool.blocks[2048]))
        if fails:
            raise ValueError
        return {}

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ValueError) if fails else nullcontext():
            fake.record(function)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [(False, False)]  # earlier garbage is gone


def test_a_pool_keeps_one_graph_that_is_never_deleted(fake: CUDARecorder) -> None:
    """torch cannot record into a pool whose last graph was deleted, so one graph keeps the pool alive."""
    fake.record(dict)
    assert [each.state for each in FakeCapture.captures] == ["ended", "ended"]
    fake.record(dict)
    assert len(FakeCapture.captures) == 3


def test_graphs_that_are_recorded_again_are_deleted_and_reported(
    recorder: OperationRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warpfold.plan")
    graphs = Graphs()
    for _ in range(2):
        graphs.call(double, {"x": torch.ones(2)})
    (first,) = (weakref.ref(graph.replay) for graph in graphs._graphs.values() if graph is not None)
    recorder.warm_up = lambda function: (function(), True)  # type: ignore[method-assign]
    graphs.call(double, {"x": torch.ones(3)})
    assert (graphs.recorded, graphs.rerecorded) == (0, 1)
    assert caplog.messages == ["graphs: recording 1 again, 1 so far"]
    gc.collect()
    assert first() is None


def test_a_cpu_has_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    graphs = Graphs()
    assert graphs.call(double, {"x": torch.ones(1)})["twice"] == 2
    assert graphs.refused == {"graph of double: a cpu has no graphs": 1}


def test_why_a_plan_has_no_graphs() -> None:
    features = random_batch(passes=2)
    model = Execution(Plan(graph=True, offload=True)).bind(filled_model(tiny_config())).train()
    model.recycle(features, 1)
    reason = "graph of recycling_pass: the copies of plan.offload are not recorded"
    assert list(model.execution.graphs.refused) == [reason]


def test_where_graphs_are_recorded_unless_it_is_said() -> None:
    few = Plan(sizes=2, data=8)
    assert few.graph == "auto"
    assert few.why_no_graphs("cuda") is None
    for changes, kind, why in (
        ({}, "cpu", "a cpu has no graphs"),
        ({"graph": False}, "cuda", "plan.graph is false"),
        ({"axial": 2}, "cuda", "ranks that share an example need plan.graph = true"),
        ({"branch": 2}, "cuda", "ranks that share an example need plan.graph = true"),
        ({"offload": True}, "cuda", "the copies of plan.offload"),
        ({"sizes": 0}, "cuda", "too many shapes; plan.sizes"),
    ):
        assert str(replace(few, **changes).why_no_graphs(kind)).count(why) == 1  # type: ignore[arg-type]
    for changes in ({"sizes": 0}, {"axial": 2}, {"branch": 2}):
        assert replace(few, graph=True, **changes).why_no_graphs("cuda") is None  # type: ignore[arg-type]
    for graph, records in (("auto", False), (False, False), (True, True)):  # CPU
        execution = Execution(replace(few, graph=graph))
        execution.bind(torch.nn.Linear(1, 1))
        assert execution.records is records


def test_a_run_with_graphs_is_the_run(tmp_path: Path) -> None:
    """The run has few shapes, validates, and is stopped and continued."""
    store, config = make_store(tmp_path / "store"), replace(tiny_run(steps=4), plan=Plan(sizes=1))
    train(config, store, tmp_path / "plain")
    with_graphs = replace(config, plan=replace(config.plan, graph=True))
    train(replace(with_graphs, train=replace(config.train, steps=3)), store, tmp_path / "run")
    summary = train(with_graphs, store, tmp_path / "run")
    assert summary.finished
    assert not summary.unrecorded
    one, other = ([row for row in rows(tmp_path / way) if row["kind"] == "step"] for way in ("run", "plain"))
    assert one == other
    assert equal_tensors(tmp_path / "run/params.safetensors", tmp_path / "plain/params.safetensors")


def test_the_end_of_a_run_says_how_often_graphs_were_recorded_again(
    tmp_path: Path, recorder: OperationRecorder
) -> None:
    store, config = make_store(tmp_path / "store"), replace(tiny_run(steps=4), plan=Plan(sizes=1, graph=True))
    (tmp_path / "settings.toml").write_text(to_toml(config))
    command = ["train", str(tmp_path / "settings.toml"), "--data", str(store.path), "--device", "cpu", "--out"]
    shown = CliRunner().invoke(app, [*command, str(tmp_path / "once")])
    assert (shown.exit_code, "recorded again" in shown.stderr) == (0, False), shown.stderr
    warm_up = recorder.warm_up
    recorder.warm_up = lambda function: (warm_up(function)[0], True)  # type: ignore[method-assign]
    shown = CliRunner().invoke(app, [*command, str(tmp_path / "again")])
    assert shown.exit_code == 0
    assert re.search(r"slower than necessary: CUDA graphs were recorded again \d+ times", shown.stderr)
