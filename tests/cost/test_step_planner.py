"""Plans of trainings on many ranks: the choice is as fast as any by its own figures, fits, and keeps what was given."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers import tiny_config
from warpfold.cost import planner, step_planner
from warpfold.cost.example import ExampleSizes
from warpfold.cost.job import Job
from warpfold.cost.links import Cluster, Link
from warpfold.cost.machine import Machine
from warpfold.cost.memory import MemoryEstimate
from warpfold.cost.rates import Rates, of_gpu
from warpfold.cost.step_planner import EQUAL, StepChoice, choose_step, examples_of, grids, ranks_of, simplicity
from warpfold.cost.step_words import choice_in_words
from warpfold.engine.optim import OptimConfig
from warpfold.errors import UserError
from warpfold.model.evoformer import EvoformerConfig
from warpfold.model.losses import LossConfig
from warpfold.model.pair import PairConfig
from warpfold.parallel.compress import CompressionConfig
from warpfold.parallel.plan import Plan

SIZES = ExampleSizes(residues=64, sequences=8, extra=16, templates=0)
NVLINK, INFINITE = Link(5e-6, 3e11), Link(0.0, 1e30)


def training(accumulate: int = 8, outer: str = "middle", blocks: int = 8, **optim: Any) -> Job:
    pair = PairConfig(c_triangle=4, heads=2)
    stack = EvoformerConfig(blocks=blocks, heads=2, c_outer=4, pair=pair, outer=outer)  # type: ignore[arg-type]
    optim_config = OptimConfig(accumulate=accumulate, **optim)
    return Job(model=tiny_config(evoformer=stack), sizes=SIZES, recycles=1, loss=LossConfig(), optim=optim_config)


def cluster(ranks: int, per_node: int | None = None, between: Link = NVLINK, within: Link = NVLINK) -> Cluster:
    return Cluster(ranks=ranks, per_node=per_node or ranks, within=within, between=between)


@pytest.fixture(scope="module")
def rates() -> Rates:
    return replace(of_gpu("A100"), call=0.0)  # else so small a model waits for the host alone


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """A rank needs 100 bytes for what is kept of a block, 90 where layers and 10 where blocks are recomputed; all of it
    is shared out.  What was asked.
    """
    asked: list[Plan] = []

    def estimate(job: Job, plan: Plan, kind: str = "cpu") -> MemoryEstimate:
        asked.append(plan)
        blocks = job.model.evoformer.blocks
        kept = blocks if plan.recompute is None else plan.keep_blocks
        held = 100 * kept + (90 if plan.recompute == "layer" else 10) * (blocks - kept)
        held *= plan.batch * (0.5 if plan.offload else 1)
        return MemoryEstimate(peak=int(held / plan.axial / plan.branch), weights=0, features=0)

    monkeypatch.setattr(planner, "estimate_memory", estimate)
    nothing = MemoryEstimate(peak=0, weights=0, features=0)
    monkeypatch.setattr(planner, "lower_bound", lambda job, plan: nothing)
    monkeypatch.setattr(planner, "with_margin", lambda size, kind: size)
    return asked


def choose(job: Job, of: Cluster, rates: Rates, free: int = 10**12, fixed: Mapping[str, Any] | None = None,
           sync: Mapping[str, Any] | None = None) -> StepChoice:  # fmt: skip
    return choose_step(job, Machine(kind="cuda", free=free, devices=of.ranks), of, rates, fixed, sync)


CLUSTERS = [
    cluster(2),
    cluster(4, 2, Link(5e-5, 1e8)),
    cluster(8, 4, Link(1e-3, 1e9)),
    cluster(16, 8, Link(1e-5, 1e7), Link(1e-4, 1e8)),
]
JOBS = [training(1, "first"), training(8), training(8, "last", clip="step"), training(6, "first", clip="step")]


@pytest.mark.parametrize("of", CLUSTERS)
@pytest.mark.parametrize("job", JOBS)
def test_no_plan_that_fits_is_clearly_faster(job: Job, of: Cluster, rates: Rates) -> None:
    for free in (10**12, 500, 120):
        choice = choose(job, of, rates, free)
        fitting = [one for one in choice.considered if one.memory is not None and not one.reason]
        assert choice.chosen in fitting
        for one in fitting:
            assert choice.chosen.time.total <= EQUAL * one.time.total
            near = one.time.total <= EQUAL * min(other.time.total for other in fitting)
            assert not near or simplicity(choice.plan) <= simplicity(one.plan)
        assert choice.chosen.memory is not None
        assert choice.chosen.memory.peak <= free
        for one in choice.considered:  # what was not looked at is slower than what is
            assert one.memory is not None or one.time.total > choice.chosen.time.total
            plan = one.plan
            assert ranks_of(plan) <= of.ranks
            assert plan.batch == 1 or examples_of(job) % (plan.data * plan.batch) == 0
            assert plan.branch == 1 or job.model.evoformer.outer != "middle"


@pytest.mark.parametrize("job", JOBS)
def test_a_slower_link_never_has_it_send_more(job: Job, rates: Rates) -> None:
    """But for what plans that count as equal may differ by."""
    for per_node in (1, 2):
        sent = []
        for slower in (1.0, 100.0, 1e6):
            between = Link(0.0, NVLINK.bandwidth / slower)
            sent.append(choose(job, cluster(8, per_node, between), rates).chosen.time.sent)
        assert sent[1] <= EQUAL * sent[0]
        assert sent[2] <= EQUAL * sent[1]


def test_infinite_links_leave_computing_to_decide(rates: Rates) -> None:
    free = replace(cluster(8, 4, INFINITE, INFINITE), call=0.0)
    choice = choose(training(8, clip="step", blocks=2), free, rates)
    assert choice.chosen.time.by_part.get("gradients", 0.0) == pytest.approx(0, abs=1e-9)
    assert "between ranks" not in choice.chosen.time.by_part or choice.chosen.time.by_part["between ranks"] < 1e-9
    assert (choice.plan.data, choice.plan.axial, choice.plan.sync.strategy) == (8, 1, "plain")


@pytest.mark.parametrize(
    ("fixed", "sync"),
    [
        ({"axial": 2}, {}),
        ({"data": 2, "recompute": "block", "keep_blocks": 0}, {}),
        ({"branch": 2}, {"bucket": 3.0}),
        ({"triangle": "gather", "axial": 4}, {"strategy": "hierarchical"}),
        ({"batch": 2}, {"shard_state": True, "check_every": 7}),
        ({"precision": "bf16", "offload": False}, {"strategy": "auto"}),
    ],
)
def test_given_keys_stay(rates: Rates, fixed: Mapping[str, Any], sync: Mapping[str, Any]) -> None:
    for free in (10**12, 400):
        choice = choose(training(16, "first", clip="step"), cluster(8, 4, Link(1e-4, 1e8)), rates, free, fixed, sync)
        for one in choice.considered:
            assert {key: getattr(one.plan, key) for key in fixed} == fixed
            assert {key: getattr(one.plan.sync, key) for key in sync} == sync


def test_what_cannot_be_is_refused_with_a_reason(rates: Rates) -> None:
    with pytest.raises(ValueError, match=r"plan.data = 3: 4 ranks cannot share a step of 8 so"):
        choose(training(8), cluster(4), rates, fixed={"data": 3})
    with pytest.raises(ValueError, match="keep_blocks"):
        choose(training(8), cluster(4), rates, fixed={"keep_blocks": 2, "recompute": None})
    with pytest.raises(UserError, match=r"what would fit|not even a few residues fit"):
        choose(training(8), cluster(4), rates, free=5)


def test_as_many_blocks_are_kept_as_fit(rates: Rates) -> None:
    job, free = training(4, blocks=40), 20 * 100 + 20 * 10
    choice = choose(job, cluster(4), rates, free, fixed={"offload": False})
    assert (choice.plan.recompute, choice.plan.keep_blocks) == ("block", 20)
    given = choose(job, cluster(4), rates, free, fixed={"recompute": "block"})
    assert given.plan.keep_blocks == 20
    none = choose(job, cluster(4), rates, free, fixed={"recompute": "block", "keep_blocks": 0})
    assert none.plan.keep_blocks == 0


def test_data_comes_before_axial_before_branch(rates: Rates) -> None:
    def grid(accumulate: int, ranks: int) -> tuple[int, int, int]:
        plan = choose(training(accumulate, "first"), cluster(ranks), rates).plan
        return plan.data, plan.axial, plan.branch

    assert grid(8, 4) == (4, 1, 1)
    assert grid(2, 4)[0] == 2
    assert simplicity(Plan(data=4)) < simplicity(Plan(data=2, axial=2)) < simplicity(Plan(data=2, branch=2))
    assert simplicity(Plan(data=4)) < simplicity(Plan(data=4, recompute="block"))


def test_grids_of_fewer_ranks_are_among_those_of_more() -> None:
    """So that the best of these takes no longer."""
    for outer in ("middle", "first"):
        before: set[tuple[int, int, int]] = set()
        for ranks in (1, 2, 3, 6, 7, 16, 17, 48, 100):
            of = cluster(ranks, 8)
            found = {(d, axial, branch) for axial, branch, data in grids(training(24, outer), of, {}) for d in data}
            assert before <= found
            assert all(data * axial * branch <= ranks and data <= 24 for data, axial, branch in found)
            before = found


@pytest.mark.parametrize("job", [training(128), training(2, "first", 2)], ids=["128", "2"])
def test_more_devices_are_never_planned_slower(job: Job, rates: Rates) -> None:
    """Three took 2.8 times as long as two, 96 2.7 times as long as 64: a share had to be the same on all."""
    least = float("inf")
    for ranks in (1, 2, 3, 4, 5, 7, 8, 11, 16, 24, 64, 96):
        choice = choose(job, cluster(ranks, 8, Link(3e-5, 3e11)), rates)
        fastest = min(one.time.total for one in choice.considered)
        assert fastest <= least
        assert choice.chosen.time.total <= EQUAL * fastest
        assert choice.idle == ranks - ranks_of(choice.plan)
        least = fastest


def test_examples_go_together_where_calls_are_dear_and_clips_allow_it(rates: Rates) -> None:
    dear = replace(rates, call=1e-3)
    assert choose(training(8, clip="step"), cluster(2), dear).plan.batch == 4
    kept = {"recompute": None, "offload": False}
    assert choose(training(8, clip="step"), cluster(2), dear, 1700, kept).plan.batch == 2
    assert choose(training(8), cluster(2), dear).plan.batch == 1


def test_devices_are_idle_where_sharing_examples_gains_nothing(rates: Rates) -> None:
    slow = cluster(8, 1, between=Link(1e-4, 1e9))
    choice = choose(training(4), slow, rates)
    assert (choice.plan.data, choice.plan.axial, choice.idle) == (4, 1, 4)
    assert "data 4, everything kept, 4 of 8 devices idle: " in choice_in_words(choice)
    assert choose(training(8), slow, rates).idle == 0
    crowded = choose(training(4), slow, rates, 79, {"offload": False})  # one by itself has no room
    assert crowded.plan.axial > 1


def test_compression_is_left_as_it_was_asked_for(rates: Rates) -> None:
    job = training(8, compression=CompressionConfig(method="int8"))
    for one in choose(job, cluster(8, 4, Link(1e-4, 1e7)), rates).considered:
        assert (one.plan.sync.strategy, one.plan.sync.shard_state) == ("plain", False)


def test_few_estimates_of_memory_serve_thousands_of_ranks(rates: Rates, memory: list[Plan]) -> None:
    choose(training(128), cluster(2048, 8, Link(3e-5, 3e11)), rates)
    assert len(set(memory)) <= 8
    assert max(plan.data for plan in memory) <= step_planner.ALIKE


def test_the_line_says_what_and_why(rates: Rates) -> None:
    said = choice_in_words(choose(training(4, blocks=40), cluster(4), rates, free=2200, fixed={"offload": False}))
    assert "\n" not in said
    for part in ("data 4, blocks recomputed, all but the last 20: ", " a step, ", "% of what 4 devices do alone; ",
                 "data 4, everything kept", " needs ", "would take"):  # fmt: skip
        assert part in said, said
