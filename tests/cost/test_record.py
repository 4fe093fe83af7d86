"""Records contain the operations and messages that a running model makes, in the order of the code."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from warpfold.cost import record as record_module
from warpfold.cost import replay as replay_module
from warpfold.cost.example import ExampleSizes, Job, ModelBench, TrainingStep, shortened
from warpfold.cost.links import Cluster, Link
from warpfold.cost.memory import estimate_memory
from warpfold.cost.planner import parameters
from warpfold.cost.rates import TORCH, of_gpu
from warpfold.cost.record import RecordedStep, record
from warpfold.cost.recorder import HOST, Await, Begin, Entry, Operation, Recorder
from warpfold.cost.replay import Pace, replay, step_time
from warpfold.engine.optim import OptimConfig
from warpfold.engine.packed import packed_order
from warpfold.engine.trainable import FinetuneConfig
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.model.evoformer import EvoformerConfig, PairConfig
from warpfold.model.losses import LossConfig
from warpfold.model.structure import StructureConfig
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.plan import Plan

SIZES = ExampleSizes(residues=16, sequences=8, extra=8, templates=1)
NARROW = replace(
    shortened(ModelConfig(), 1),
    c_m=16, c_z=8, c_e=8,
    structure=StructureConfig(layers=1),
    evoformer=EvoformerConfig(blocks=1, heads=2, c_outer=4, pair=PairConfig(heads=2, c_triangle=8)),
)  # fmt: skip


# A model that is quick to record
TRUNK = replace(NARROW, templates=replace(NARROW.templates, enabled=False), extra_blocks=0)


def traffic(entries: Sequence[Entry]) -> dict[tuple[str, str], tuple[float, float]]:
    """Count the collectives that begin, and the bytes that leave in them, by group and phase."""
    calls, sent = defaultdict[tuple[str, str], float](float), defaultdict[tuple[str, str], float](float)
    for entry in entries:
        if isinstance(entry, Begin) and entry.group != HOST:
            calls[entry.group, entry.phase] += entry.times
            sent[entry.group, entry.phase] += entry.times * entry.sent
    return {key: (calls[key], sent[key]) for key in calls}


def job(blocks: int = 1, model: ModelConfig = TRUNK) -> Job:
    model = replace(model, evoformer=replace(model.evoformer, blocks=blocks))
    return Job(model=model, sizes=SIZES, recycles=1, loss=LossConfig(), optim=OptimConfig())


@cache
def recorded(
    plan: Plan, blocks: int = 1, examples: int = 1, per_node: int | None = None, gpu: bool = False
) -> RecordedStep:
    return record(job(blocks), plan, examples, per_node, gpu)


def test_every_collective_is_awaited_once_and_after_it_began() -> None:
    for plan in (Plan(data=2, axial=2, recompute="block"), Plan(data=4)):
        under_way: set[int] = set()
        for entry in recorded(plan).step(recycles=2):
            if isinstance(entry, Begin):
                assert entry.number not in under_way
                assert under_way.issuperset(entry.after)
                under_way.add(entry.number)
                under_way.difference_update(entry.after)
            elif isinstance(entry, Await):
                under_way.remove(entry.number)
        assert not under_way


def test_gradients_begin_while_the_backward_pass_runs_and_are_summed_over_the_model_ranks_first() -> None:
    plan = Plan(data=2, axial=2, sync=SyncConfig(bucket=0.05))
    entries = recorded(plan).last
    at = {e.number: i for i, e in enumerate(entries) if isinstance(e, Begin) and e.kind != "all_reduce"}
    model = [e for e in entries if isinstance(e, Begin) and e.group == "model" and e.kind == "reduce_scatter"]
    data = [e for e in entries if isinstance(e, Begin) and e.group == "data" and e.kind == "all_to_all"]
    assert len(model) == len(data) > 2
    assert [e.after for e in data] == [(e.number,) for e in model]
    last = max(i for i, e in enumerate(entries) if isinstance(e, Operation) and e.op != TORCH)
    assert at[data[0].number] < last
    # The update gathers the pieces of all ranks: as many bytes as were sent for the sum.
    assert traffic(entries)["data", "backward"][1] == pytest.approx(
        traffic(recorded(plan).update)["data", "update"][1], rel=0.01
    )


def test_parameters_are_those_of_the_whole_model() -> None:
    model = replace(NARROW, evoformer=replace(NARROW.evoformer, blocks=3), extra_blocks=2)
    whole = AlphaFold(model)
    order, together = packed_order(whole)
    parameters, joined = record_module.parameters_of(model)
    assert list(parameters) == order
    assert joined == together
    assert {name: x.shape for name, x in parameters.items()} == {n: x.shape for n, x in whole.named_parameters()}


@pytest.mark.parametrize("plan", [Plan(data=4), Plan(data=2, axial=2, sync=SyncConfig(bucket=0.02, shard_state=True))])
def test_one_parameter_stands_for_a_bucket(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages and the memory of the optimizer are the same as with all parameters."""

    def run() -> record_module.OptimizerRun:
        record_module.record_optimizer.cache_clear()
        optim = record_module.step_share(job(3), plan, 1)
        return record_module.record_optimizer(job(3).model, plan, optim, "cpu", FinetuneConfig())

    few = run()
    monkeypatch.setattr(record_module, "needs_every_parameter", lambda optim, finetune: True)
    every = run()
    record_module.record_optimizer.cache_clear()
    assert few.exchanges == every.exchanges
    assert few.exchanges[0].backward
    assert few.held == pytest.approx(every.held, abs=16)
    assert few.update == pytest.approx(every.update, abs=16)
    assert few.loading == pytest.approx(every.loading, rel=0.01)


def test_plans_that_run_an_example_alike_share_a_record() -> None:
    record_module._record_example.cache_clear()
    for plan in (Plan(), Plan(data=4), Plan(data=2, sync=SyncConfig(bucket=0.1, shard_state=True)), Plan(sizes=2)):
        record(job(), plan, gpu=True)
        estimate_memory(job(), plan, "cuda")
    assert record_module._record_example.cache_info().misses == 1


def test_the_gradients_of_all_parameters_travel() -> None:
    sent = traffic(recorded(Plan(data=4)).last)["data", "backward"][1]
    assert sent == pytest.approx(4 * parameters(job().model) * 3 / 4, rel=0.02)
    assert sent >= 4 * parameters(job().model) * 3 / 4


def test_only_the_last_example_of_a_rank_sends_gradients() -> None:
    found = recorded(Plan(data=2), examples=3)
    assert not traffic(found.example)
    assert traffic(found.last)["data", "backward"]
    one, three = (sum(e.times for e in s.step(0) if isinstance(e, Operation)) for s in (recorded(Plan(data=2)), found))
    assert three > 2.5 * one


def test_recorded_passes_are_launched_at_once_and_gradients_travel_within_them() -> None:
    """Count launches and messages with one example on each of two ranks, and with three examples on one rank."""
    few, own = Plan(data=2, sizes=1), Plan(data=2, sizes=1, graph=False)
    graphs, eager = (recorded(plan, gpu=True) for plan in (few, own))
    for part in ("early", "last"):
        first, *others = (e for e in getattr(graphs, part) if isinstance(e, Operation))
        kernels = sum(e.launches for e in getattr(eager, part) if isinstance(e, Operation))
        assert not first.replayed
        assert sum(one.launches for one in others) == kernels
        assert sum(one.launches for one in others if one.replayed) > 0.95 * kernels
    assert not any(e.replayed for e in graphs.update if isinstance(e, Operation))
    alone = recorded(Plan(sizes=1), gpu=True, examples=3)
    for part in ("early", "example", "last", "update"):
        first, *others = (e for e in getattr(alone, part) if isinstance(e, Operation))
        assert (first.replayed, {one.replayed for one in others}) == (False, {True})
    cluster = Cluster(ranks=2, per_node=1, within=Link(1e-6, 1e9), between=Link(1e-6, 1e9))
    pace = Pace.of(of_gpu("H100"), cluster)
    replayed, launched = replay(graphs.step(1), few, pace), replay(eager.step(1), own, pace)
    assert replayed.launch < launched.launch / 4
    assert traffic(graphs.last) == traffic(eager.last)


def test_ranks_that_share_an_example_replay_their_messages_and_then_send_gradients() -> None:
    own = Plan(data=2, axial=2, sizes=1)
    asked = replace(own, graph=True)
    eager, graphs = recorded(own, gpu=True), recorded(asked, gpu=True)
    assert traffic(graphs.last) == traffic(eager.last)
    assert traffic(graphs.early) == traffic(eager.early)
    begun = [e for e in graphs.last if isinstance(e, Begin)]
    assert {e.replayed for e in begun if e.group == "axial"} == {True}
    last = max(i for i, e in enumerate(graphs.last) if getattr(e, "replayed", False))
    sums = [
        i for i, e in enumerate(graphs.last) if isinstance(e, Begin) and e.kind == "reduce_scatter" and not e.replayed
    ]
    assert min(sums) > last, "gradients travel behind the graph"
    assert not any(e.replayed for e in graphs.update if not isinstance(e, Await))
    cluster = Cluster(ranks=4, per_node=4, within=Link(1e-6, 1e11), between=Link(1e-6, 1e11))
    pace = Pace.of(of_gpu("H100"), cluster)
    assert replay(graphs.step(1), asked, pace).launch < replay(eager.step(1), own, pace).launch / 4


def test_hierarchical_sums_go_within_nodes_first() -> None:
    found = recorded(Plan(data=4, sync=SyncConfig(strategy="hierarchical")), per_node=2)
    assert {group for group, _ in traffic([*found.last, *found.update])} == {"node", "nodes", "data"}


@pytest.mark.parametrize("blocks", [1, 5])
def test_recorded_products_are_those_that_are_counted(blocks: int) -> None:
    """The recorded products equal those that torch's counter finds.

    Forward, the two recorded blocks represent all. Backward, a fused operation recomputes a part of itself.
    """
    whole = job(blocks, replace(NARROW, extra_blocks=3))
    bench = ModelBench(model=whole.model, loss=LossConfig(), optim=OptimConfig(), plan=Plan(), sizes=SIZES)
    step = TrainingStep(bench, "meta")
    step.bind(Plan(kernels="definition"))
    with torch.device("meta"), FlopCounterMode(display=False) as counted:
        step.model(step.batch, 0)
    assert flops(whole, Plan()) == pytest.approx(counted.get_total_flops(), rel=0.02)


def flops(of: Job, plan: Plan, phase: str = "forward") -> float:
    last = [e for e in record(of, plan, gpu=False).last if isinstance(e, Operation) and e.phase == phase]
    return sum(e.times * e.cost.flops for e in last if e.op not in ("aligned_errors", "overlaps"))


def test_ways_to_run_an_example_compute_the_same_and_recompute_what_they_say() -> None:
    """Slices (only a few of which are run) and ranks (each with its share) perform the same number of products."""
    of = job(4, replace(NARROW, extra_blocks=3))
    once, fold = flops(of, Plan()), replace(of, loss=None, optim=None)
    for chunk in (1, 4):
        plan = Plan(chunk=chunk, in_place=True)
        assert flops(fold, plan, "early") == pytest.approx(flops(fold, Plan(), "early"), rel=0.05)
    assert once / 2 < flops(of, Plan(axial=2)) < 0.75 * once
    kept, three = (flops(of, Plan(recompute="block", keep_blocks=n), "recomputed") for n in (0, 3))
    assert kept > three > 0 == flops(of, Plan(), "recomputed")
    assert kept > (kept - three) * 4 / 3, "the extra stack is computed again, too"


@pytest.mark.parametrize("plan", [Plan(), Plan(data=2), Plan(axial=2, recompute="block"), Plan(data=2, batch=2)])
def test_the_time_of_a_plan_is_the_mean_over_recycling_passes(plan: Plan) -> None:
    link, ranks, rates = Link(1e-6, 1e9), plan.data * plan.axial, of_gpu("H100")
    cluster = Cluster(ranks=ranks, per_node=2, within=link, between=link)
    of = replace(job(), optim=OptimConfig(accumulate=4, clip="step"))
    recorded, pace = record(of, plan, 4 // plan.data, 2, gpu=True), Pace.of(rates, cluster)
    steps = [replay(recorded.step(passes), plan, pace).seconds for passes in range(of.recycles + 1)]
    planned = step_time(of, plan, rates, cluster)
    assert planned.total == pytest.approx(sum(steps) / len(steps))
    assert planned.total == pytest.approx(sum(planned.by_part.values()))


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("plan", [Plan(), Plan(chunk=4, in_place=True)], ids=str)
def test_what_is_repeated_is_what_would_have_run(plan: Plan, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fold, each stack and operation is run once per kind of arguments; the totals equal those of a full run."""
    sizes = replace(SIZES, templates=4)
    fold = Job(model=replace(NARROW, ensemble=2, extra_blocks=1), sizes=sizes, recycles=1)

    def totals() -> dict[tuple[str, str], tuple[float, ...]]:
        found: dict[tuple[str, str], tuple[float, ...]] = {}
        record_module._record_example.cache_clear()
        for e in record(fold, plan, gpu=gpu).last:
            if not isinstance(e, Operation):
                continue
            new = (e.times, e.times * e.launches, e.times * e.cost.flops, e.times * e.cost.bytes)
            found[e.op, e.part] = tuple(a + b for a, b in zip(found.get((e.op, e.part), (0.0,) * 4), new))
        return found

    # The first run creates the constant tables.
    totals()
    repeated = totals()
    monkeypatch.setattr(Recorder, "run", lambda self, what, function, args, kwargs: function(*args, **kwargs))
    run = totals()
    assert repeated.keys() == run.keys()
    assert all(repeated[key] == pytest.approx(run[key]) for key in run)


def test_kernels_that_a_gpu_would_launch_are_counted() -> None:
    pytest.importorskip("triton")
    found = recorded(Plan(recompute="block", precision="bf16"), gpu=True)
    kernels = Counter[str]()
    for entry in found.last:
        if isinstance(entry, Operation):
            kernels[entry.phase] += entry.launches
    assert kernels["backward"] > kernels["forward"] > kernels["recomputed"] > 20


def test_each_step_is_replayed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    replayed = replay_module.replay_longest

    def counted(halves, recycles, *more):
        passes.append(recycles)
        return replayed(halves, recycles, *more)

    monkeypatch.setattr(replay_module, "replay_longest", counted)
    link = Link(1e-6, 1e9)
    cluster = Cluster(ranks=2, per_node=2, within=link, between=link)
    step_time(job(), Plan(data=2), of_gpu("H100"), cluster)
    assert passes == [0, 1]
