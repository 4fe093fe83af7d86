"""What a plan is said to take and what a simulation finds are one count: of operations, kernels and seconds."""

from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache

import pytest

from warpfold.cost.example import shortened
from warpfold.cost.job import Job
from warpfold.cost.layer_work import COPY, PRODUCT, trunk_work
from warpfold.cost.machine import planned_cluster, planned_machine
from warpfold.cost.rates import KERNELS, TORCH, kernels_of, of_gpu
from warpfold.cost.record import Operation, RecordedStep, record
from warpfold.cost.replay import Pace
from warpfold.cost.simulation import replay_longest
from warpfold.cost.step_seconds import example_seconds
from warpfold.parallel.plan import Plan
from warpfold.training.config import load_settings
from warpfold.training.planning import training_job

HALF = {"precision": "bf16"}
PLANS = {
    "whole": Plan(**HALF),
    "recomputed": Plan(**HALF, recompute="block"),
    "layers recomputed": Plan(**HALF, recompute="layer"),
    "axial 4": Plan(**HALF, axial=4, triangle="gather"),
    "axial 2, channels": Plan(**HALF, axial=2, triangle="channels"),
    "branch 2": Plan(**HALF, branch=2),
}
# Of torch's calls around our operations the formula knows the mean of a layer, of what is hidden nothing.
NEAR = 0.2


@cache
def job(blocks: int, outer: str) -> Job:
    given = load_settings("monomer", [f"model.evoformer.outer={outer}"])
    found = training_job(given, given.config())
    return replace(found, model=shortened(found.model, blocks), recycles=0)


@cache
def recorded(name: str, blocks: int) -> list[RecordedStep]:
    plan = PLANS[name]
    return [record(job_of(name, blocks), plan, branch=branch) for branch in range(plan.branch)]


def job_of(name: str, blocks: int) -> Job:
    return job(blocks, "first" if PLANS[name].branch > 1 else "middle")


def operations(name: str, blocks: int) -> list[Operation]:
    return [entry for entry in recorded(name, blocks)[0].example if isinstance(entry, Operation)]


@pytest.mark.parametrize("name", ["whole", "axial 4", "axial 2, channels"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_block_is_said_to_do_what_its_operations_were_recorded_to_do(name: str, phase: str) -> None:
    done: dict[str, float] = defaultdict(float)
    said: dict[str, float] = defaultdict(float)
    for blocks, sign in ((1, -1), (2, 1)):
        for entry in operations(name, blocks):
            if entry.phase == phase and entry.op != TORCH:
                done[entry.op] += sign * entry.cost.flops
        this = job_of(name, blocks)
        for work in trunk_work(this.model, this.sizes, PLANS[name], phase == "forward"):
            if work.op not in (COPY, PRODUCT):
                said[work.op] += sign * work.cost.flops
    assert said.keys() <= done.keys()
    for op, flops in said.items():
        assert flops == pytest.approx(done[op], rel=1e-6), op


def test_operations_launch_as_many_kernels_as_is_said() -> None:
    seen: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for name in ("whole", "axial 4"):
        for entry in operations(name, 2):
            if entry.op in KERNELS:
                seen[entry.op, entry.which][entry.launches] += 1
    assert len(seen) > 2 * (len(KERNELS) - 3)  # all but what slices and violations alone call
    for (op, which), launches in seen.items():
        mean = sum(number * times for number, times in launches.items()) / launches.total()
        assert kernels_of(op, which) == pytest.approx(mean, abs=1), (op, which, launches)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PLANS)
def test_an_example_takes_as_long_by_plan_as_in_a_simulation(name: str) -> None:
    plan, rates = PLANS[name], of_gpu("H100")
    ranks = plan.axial * plan.branch
    cluster = planned_cluster(planned_machine("H100", None, ranks))
    found = replay_longest(recorded(name, 2), 0, plan, Pace.of(rates, cluster))
    said = example_seconds(job_of(name, 2), plan, rates, cluster)
    assert said.total == pytest.approx(found.seconds, rel=NEAR)
