"""Memory and time of plans that train only a part of the model."""

from dataclasses import replace

import pytest

from tests.helpers import tiny_config
from warpfold.cost.example import ExampleSizes, Job
from warpfold.cost.machine import Machine
from warpfold.cost.memory import estimate_memory
from warpfold.cost.planner import choose, lower_bound
from warpfold.cost.record import record
from warpfold.cost.recorder import Operation
from warpfold.cost.report import choice_in_words
from warpfold.engine.optim import OptimConfig
from warpfold.engine.trainable import AdapterConfig, FinetuneConfig
from warpfold.model.alphafold import AlphaFold
from warpfold.model.evoformer import EvoformerConfig, PairConfig
from warpfold.model.losses import LossConfig
from warpfold.parallel.plan import Plan

MODEL = tiny_config(evoformer=EvoformerConfig(blocks=5, heads=4, c_outer=6, pair=PairConfig(c_triangle=8)))
JOB = Job(
    model=MODEL,
    sizes=ExampleSizes(residues=40, sequences=12, extra=12, templates=1),
    recycles=1,
    loss=LossConfig(),
    optim=OptimConfig(),
)
PARTS = {
    "structure": FinetuneConfig(trainable=("structure",)),
    "cached": FinetuneConfig(trainable=("structure",), draws=1, trunk="auto"),
    "last block": FinetuneConfig(trainable=("evoformer.blocks.4",)),
    "from the second": FinetuneConfig(trainable=("evoformer.blocks.1", "plddt")),
    "adapters": FinetuneConfig(trainable=(), adapters=AdapterConfig(on=("evoformer",), rank=2)),
    "all": FinetuneConfig(),
}
JOBS = {name: replace(JOB, finetune=finetune) for name, finetune in PARTS.items()}


def test_how_far_the_backward_pass_goes() -> None:
    assert {name: job.backward_blocks for name, job in JOBS.items()} == {
        "structure": 0,
        "cached": 0,
        "last block": 1,
        "from the second": 4,
        "adapters": 5,
        "all": 5,
    }
    assert replace(JOB, finetune=FinetuneConfig(trainable=("templates",))).backward_blocks == 5
    assert replace(JOB, finetune=FinetuneConfig(trainable=("single",))).backward_blocks == 0


@pytest.mark.parametrize("recompute", [None, "block"])
def test_memory_is_that_of_what_is_trained(recompute: str | None) -> None:
    plan = Plan(recompute=recompute)  # type: ignore[arg-type]
    found = {name: estimate_memory(job, plan) for name, job in JOBS.items()}
    kept = {name: max(held.get("kept", 0) for _, held in one.course) for name, one in found.items()}
    assert kept["structure"] < kept["last block"] < kept["from the second"] < kept["all"]
    # The first run also created constants.
    assert kept["structure"] == pytest.approx(kept["cached"], rel=0.1)
    weights = {name: one.weights for name, one in found.items()}
    assert weights["structure"] < weights["from the second"] < weights["all"]
    whole = sum(p.numel() for p in AlphaFold(MODEL).parameters()) * 4
    # Frozen parameters have neither gradient nor moments.
    assert whole < weights["structure"] < 2.2 * whole
    assert lower_bound(JOBS["structure"], plan).peak < lower_bound(JOBS["all"], plan).peak


def test_time_is_that_of_what_runs() -> None:
    def operations(name: str, phase: str) -> float:
        entries = record(JOBS[name], Plan(recompute="block"), gpu=False)
        step = (*entries.early, *entries.last)
        return sum(one.cost.flops * one.times for one in step if isinstance(one, Operation) and one.phase == phase)

    backward = {name: operations(name, "backward") for name in JOBS}
    assert backward["structure"] == backward["cached"]
    assert backward["structure"] < backward["last block"] < backward["from the second"] < backward["all"]
    assert operations("structure", "recomputed") == 0
    assert operations("cached", "early") == 0 < operations("structure", "early")
    assert 4 * operations("cached", "forward") < operations("structure", "forward")


def test_the_planner_says_what_a_kept_trunk_saves() -> None:
    machine = Machine(kind="cuda", free=10**10, name="H100")
    choice = choose(JOBS["cached"], machine, estimate_all=True)
    assert choice.plan.axial == choice.plan.branch == choice.plan.batch == 1
    assert "with the trunk's outputs read from disk" in (said := choice_in_words(choice))
    assert choice.computed is not None
    assert choice.chosen.time is not None
    assert choice.computed > 2 * choice.chosen.time.total
    assert "times as fast as computing them" in said
    assert "read from disk" not in choice_in_words(choose(JOBS["structure"], machine, estimate_all=True))


def test_two_branches_are_not_planned_where_a_part_is_trained() -> None:
    machine = Machine(kind="cuda", free=10**10, name="H100", devices=2)
    for name in ("structure", "adapters"):
        job = replace(JOBS[name], model=replace(MODEL, evoformer=replace(MODEL.evoformer, outer="first")))
        assert {one.plan.branch for one in choose(job, machine, estimate_all=True).considered} == {1}
