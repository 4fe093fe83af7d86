"""The planner: its choice fits and is fastest, given keys are respected, and the message if nothing fits is correct.

Memory and time are simple formulas here. The tests check the choice, and that it needs few estimates.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.helpers import tiny_config
from warpfold.arguments import parse_memory
from warpfold.cost import planner
from warpfold.cost.example import ExampleSizes, Job
from warpfold.cost.links import Cluster, Link
from warpfold.cost.machine import Machine
from warpfold.cost.memory import MemoryEstimate, estimate_memory
from warpfold.cost.planner import (
    TIE_TOLERANCE,
    Choice,
    candidates,
    choose,
    examples_of,
    grids,
    max_residues,
    next_smaller_plan,
    ranks_of,
    round_up,
    simplicity,
    upper_bound,
)
from warpfold.cost.replay import StepTime
from warpfold.cost.report import choice_in_words
from warpfold.engine.optim import OptimConfig
from warpfold.errors import UserError
from warpfold.model.evoformer import EvoformerConfig, PairConfig
from warpfold.model.losses import LossConfig
from warpfold.parallel.compress import CompressionConfig
from warpfold.parallel.plan import DTYPES, Plan

GPU = Machine(kind="cuda", free=10**12, name="H100")
FREE = 10**9
# Bytes of the pair representation in training, according to the formula
Z = 100 * 256**2


def sizes(residues: int, sequences: int = 8, extra: int = 16, templates: int = 0) -> ExampleSizes:
    return ExampleSizes(residues=residues, sequences=sequences, extra=extra, templates=templates)


def job(residues: int = 2048, **more: Any) -> Job:
    return Job(model=tiny_config(**more), sizes=sizes(residues), recycles=1)


def training(accumulate: int = 4, outer: str = "middle", blocks: int = 8, **optim: Any) -> Job:
    pair = PairConfig(c_triangle=4, heads=2)
    stack = EvoformerConfig(blocks=blocks, heads=2, c_outer=4, pair=pair, outer=outer)  # type: ignore[arg-type]
    config = OptimConfig(accumulate=accumulate, **optim)
    return Job(model=tiny_config(evoformer=stack), sizes=sizes(256), recycles=1, loss=LossConfig(), optim=config)


def cluster(ranks: int, per_node: int = 8, bandwidth: float = 3e11) -> Cluster:
    link = Link(1e-6, bandwidth)
    return Cluster(ranks=ranks, per_node=per_node, within=link, between=link)


def machine(free: float = 10**12, devices: int = 1, **more: Any) -> Machine:
    return replace(GPU, free=int(free), devices=devices, **more)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Replace memory and time by formulas, and return the plans for which they were called.

    With fast links, each doubling of the ranks that share an example gains a factor of 2 ** 0.7. Each batch has a fixed
    cost for its calls, and gradients are sent.
    """
    found: dict[str, list[Any]] = {"memory": [], "time": []}

    def memory(job: Job, plan: Plan, kind: str = "cpu") -> MemoryEstimate:
        found["memory"].append((job.sizes.residues, plan))
        n = job.sizes.residues
        z, seen = 100 * n * n / plan.axial / plan.branch, n if plan.chunk is None else plan.chunk
        if job.training:
            blocks = job.model.evoformer.blocks
            kept = blocks if plan.recompute is None else plan.keep_blocks
            z *= plan.batch * (kept + (blocks - kept) * (0.9 if plan.recompute == "layer" else 0.1))
            peak = z * (0.5 if plan.offload else 1) / (2 if plan.sync.shard_state else 1)
        else:
            peak = (0.1 if plan.offload else 1) * z + z + 4 * z * seen / n
        return MemoryEstimate(peak=int(peak), weights=0, features=0, host=int(z) if plan.offload else 0)

    def time(job: Job, plan: Plan, rates: object, of: Cluster | None = None) -> StepTime:
        found["time"].append(plan)
        model = plan.axial * plan.branch
        once = job.sizes.residues**2 * 1e-4 / model**0.7 * (1 + (0 if plan.chunk is None else 2 / plan.chunk))
        once *= 1 + (1 + plan.offload - plan.keep_blocks / 20) * {None: 0, "layer": 0.2, "block": 0.3}[plan.recompute]
        turns = planner.share_of(examples_of(job), plan.data, 0)
        sent = (plan.data > 1) * 1e9 * (0.5 if plan.sync.strategy == "hierarchical" else 1)
        sent += turns * (model - 1) * 1e8
        total = turns * (once + 1.0 / plan.batch) + sent / (1e30 if of is None else of.between.bandwidth)
        return StepTime(total, sent=sent)

    monkeypatch.setattr(planner, "estimate_memory", memory)
    monkeypatch.setattr(planner, "step_time", time)
    monkeypatch.setattr(planner, "with_margin", lambda size, kind: size)
    monkeypatch.setattr(planner, "upper_bound", lambda job, plan: MemoryEstimate(peak=10**15, weights=0, features=0))
    return found


@pytest.mark.parametrize(
    ("of_z", "chunk", "offload"),
    [(6, None, False), (5.9, 512, False), (2.3, 64, False), (2.02, 8, False), (1.3, 32, True)],
)
def test_a_fold_computes_as_much_at_once_as_fits(of_z: float, chunk: int | None, offload: bool) -> None:
    choice = choose(job(), machine(of_z * 100 * 2048**2))
    assert (choice.plan.chunk, choice.plan.in_place, choice.plan.offload) == (chunk, chunk is not None, offload)
    # The planner never lowers the precision by itself.
    assert choice.plan.precision == "fp32"
    assert choice.memory.peak <= choice.machine.free


def test_on_a_gpu_examples_have_few_shapes_where_graphs_may_replay_their_passes() -> None:
    found = candidates(training(4), machine(devices=4), {})
    assert any(plan.axial > 1 for plan in found)
    assert any(plan.offload for plan in found)
    for plan in found:
        may = plan.axial == 1 and not plan.offload
        assert (plan.sizes, plan.why_no_graphs("cuda") is None) == (planner.SIZES if may else 0, may)
    assert candidates(training(4), machine(), {"sizes": 5})[0].sizes == 5
    assert candidates(training(4), machine(), {"graph": False})[0].sizes == 0
    assert candidates(training(4), replace(machine(), kind="cpu"), {})[0].sizes == 0
    assert candidates(job(), machine(), {})[0].sizes == 0


@pytest.mark.parametrize(
    ("of", "fixed", "sync"),
    [
        (job(), {"chunk": 100}, {}),
        (job(), {"offload": False, "precision": "bf16", "kernels": "definition"}, {}),
        (job(), {"axial": 2, "chunk": None}, {}),
        (training(16, "first", clip="step"), {"axial": 2}, {}),
        (training(16, "first", clip="step"), {"data": 2, "recompute": "block", "keep_blocks": 0}, {}),
        (training(16, "first", clip="step"), {"branch": 2}, {"bucket": 3.0}),
        (training(16, "first", clip="step"), {"triangle": "gather", "axial": 4}, {"strategy": "hierarchical"}),
        (training(16, "first", clip="step"), {"batch": 2}, {"shard_state": True, "check_every": 7}),
    ],
)
def test_given_keys_stay(of: Job, fixed: Mapping[str, Any], sync: Mapping[str, Any]) -> None:
    for free in (20 * Z, 10**12) if of.training else (3 * FREE, 10**12):
        choice = choose(of, machine(free, 8), fixed, sync, cluster(8, 4, 1e8))
        for one in choice.considered:
            assert {key: getattr(one.plan, key) for key in fixed} == fixed
            assert {key: getattr(one.plan.sync, key) for key in sync} == sync
            assert ranks_of(one.plan) <= 8


def test_what_cannot_be_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="in_place needs"):
        choose(job(), GPU, {"in_place": True, "chunk": None})
    with pytest.raises(ValueError, match=r"plan.data = 3: 4 ranks cannot divide a step of 8"):
        choose(training(8), machine(devices=4), {"data": 3})
    with pytest.raises(ValueError, match="keep_blocks"):
        choose(training(8), machine(devices=4), {"keep_blocks": 2, "recompute": None})


def test_what_fits_nowhere_is_refused_with_what_would_fit(asked: dict[str, list[Any]]) -> None:
    message = r"2,048 residues .* needs .* are free; what would fit: 4 devices; at most 1,\d\d\d residues"
    with pytest.raises(UserError, match=message) as said:
        choose(job(), machine(0.8 * 100 * 2048**2))
    assert "\n" not in str(said.value)
    for one in (job(), training()):
        with pytest.raises(UserError, match="are free; not even a few residues fit; give more memory"):
            choose(one, machine(5))
    asked["memory"].clear()
    with pytest.raises(UserError, match=r"needs at least [0-9,.]+ GB .*; what would fit: at most [0-9,]+ residues"):
        choose(job(200_000), machine(FREE, host=FREE))
    assert len(asked["memory"]) < 12
    # These estimates find the length that would fit.
    assert max(residues for residues, _ in asked["memory"]) < 10_000


def test_bf16_is_suggested_with_what_it_costs_on_a_cpu_that_lacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def would_fit(kind: Literal["cpu", "cuda"]) -> str:
        with pytest.raises(UserError) as said:
            choose(job(), Machine(kind=kind, free=int(0.8 * 100 * 2048**2)), {"chunk": 64})
        return str(said.value).partition("what would fit: ")[2]

    monkeypatch.setattr(planner, "estimate_memory", lambda job, plan, device: MemoryEstimate(
        peak=100 * job.sizes.residues**2 * DTYPES[plan.precision].itemsize // 4, weights=0, features=0))  # fmt: skip
    (tmp_path / "cpuinfo").write_text("flags : fma avx2\n")
    monkeypatch.setattr("warpfold.device.Path", lambda _: tmp_path / "cpuinfo")
    assert "bf16 (plan.precision), though many times slower on this CPU" in would_fit("cpu")
    assert "bf16 (plan.precision); " in would_fit("cuda")


def test_a_plan_that_ran_out_is_followed_by_tighter_ones() -> None:
    choice: Choice | None = choose(job(), GPU)
    needs = []
    while choice is not None:
        needs.append(choice.memory.peak)
        choice = next_smaller_plan(choice)
    assert len(needs) > 4
    assert needs == sorted(set(needs), reverse=True)


def test_devices_share_a_fold_only_where_that_is_faster_or_needed() -> None:
    one, many = choose(job(), machine(devices=4)), choose(job(), machine(devices=4), examples=100)
    assert (one.plan.data, one.plan.axial) == (1, 4)
    assert (many.plan.data, many.plan.axial) == (4, 1)
    large = choose(job(), machine(1.3 * 100 * 2048**2 / 2, 4), examples=100)
    assert large.plan.axial > 1


def test_a_training_keeps_as_much_as_fits() -> None:
    every = choose(training(), GPU).plan
    assert (every.recompute, every.keep_blocks, every.offload) == (None, 0, False)
    some = choose(training(), machine(4 * Z))
    assert (some.plan.recompute, some.plan.keep_blocks) == ("block", 3)
    more = planner.estimate(some.job, replace(some.plan, keep_blocks=4), some.machine)
    assert more.peak > some.machine.free >= some.memory.peak
    assert choose(training(), machine(0.7 * Z)).plan.offload
    given = choose(training(), machine(4 * Z), {"keep_blocks": 0}).plan
    assert (given.recompute, given.keep_blocks) == ("block", 0)


CLUSTERS = [cluster(2), cluster(4, 2, 1e8), cluster(8, 4, 1e9), cluster(16, 8, 1e7)]
JOBS = [training(1, "first"), training(8), training(8, "last", clip="step"), training(6, "first", clip="step")]


@pytest.mark.parametrize("of", CLUSTERS)
@pytest.mark.parametrize("one", JOBS)
def test_no_plan_that_fits_is_clearly_faster(one: Job, of: Cluster) -> None:
    for free in (10**12, 5 * Z, 1.2 * Z):
        choice = choose(one, machine(free, of.ranks), cluster=of)
        fitting = [other for other in choice.considered if other.memory is not None and not other.reason]
        assert choice.chosen in fitting
        assert choice.chosen.time is not None
        assert choice.memory.peak <= free
        least = min(other.time.total for other in fitting if other.time)
        for other in fitting:
            assert other.time is not None
            assert choice.chosen.time.total <= TIE_TOLERANCE * other.time.total
            key = ranks_of(choice.plan), simplicity(choice.plan)
            assert other.time.total > TIE_TOLERANCE * least or key <= (ranks_of(other.plan), simplicity(other.plan))
        for other in choice.considered:
            plan = other.plan
            assert ranks_of(plan) <= of.ranks
            assert plan.batch == 1 or examples_of(one) % (plan.data * plan.batch) == 0
            assert plan.branch == 1 or one.model.evoformer.outer != "middle"


@pytest.mark.parametrize("one", [training(128), training(2, "first", 2)], ids=["128", "2"])
def test_more_devices_are_never_planned_slower(one: Job) -> None:
    """A step on more devices is never planned to take longer.

    Earlier, the share had to be equal on all ranks: three devices took 2.8 times as long as two, and 96 took 2.7 times
    as long as 64.
    """
    least = float("inf")
    for ranks in (1, 2, 3, 4, 5, 7, 8, 11, 16, 24, 64, 96):
        choice = choose(one, machine(devices=ranks), cluster=cluster(ranks))
        assert choice.chosen.time is not None
        fastest = min(other.time.total for other in choice.considered if other.time)
        assert fastest <= least
        assert choice.chosen.time.total <= TIE_TOLERANCE * fastest
        assert choice.idle == ranks - ranks_of(choice.plan)
        least = fastest


def test_grids_of_fewer_ranks_are_among_those_of_more() -> None:
    """Every grid of fewer ranks is also a candidate for more ranks, so that the best of these is never slower."""
    for outer in ("middle", "first"):
        before: set[tuple[int, int, int]] = set()
        for ranks in (1, 2, 3, 6, 7, 16, 17, 48, 100):
            found = set(grids(training(24, outer), cluster(ranks), {}))
            assert before <= found
            assert all(data * axial * branch <= ranks and data <= 24 for data, axial, branch in found)
            before = found


def test_data_comes_before_axial_before_branch() -> None:
    def grid(accumulate: int, ranks: int) -> tuple[int, int, int]:
        plan = choose(training(accumulate, "first"), machine(devices=ranks), cluster=cluster(ranks)).plan
        return plan.data, plan.axial, plan.branch

    assert grid(8, 4) == (4, 1, 1)
    assert grid(2, 4) == (2, 2, 1)
    assert simplicity(Plan(data=4)) < simplicity(Plan(data=2, axial=2)) < simplicity(Plan(data=2, branch=2))
    assert simplicity(Plan(data=4)) < simplicity(Plan(data=4, recompute="block"))


def test_examples_go_together_where_calls_are_dear_and_clips_allow_it() -> None:
    def batch(one: Job, free: float = 10**12, **fixed: Any) -> int:
        return choose(one, machine(free, 2), fixed, cluster=cluster(2)).plan.batch

    small = training(8, clip="step")
    small = replace(small, sizes=sizes(16))
    assert batch(small) == 4
    assert batch(small, 8 * 100 * 16**2 * 2.1, recompute=None, offload=False) == 2
    assert batch(replace(training(8), sizes=sizes(16))) == 1


def test_devices_are_idle_where_sharing_examples_gains_nothing() -> None:
    slow = cluster(8, 1, 1e6)
    choice = choose(training(4), machine(devices=8), cluster=slow)
    assert (choice.plan.axial, choice.idle) == (1, 8 - choice.plan.data)
    assert "of 8 devices idle: " in choice_in_words(choice)
    crowded = choose(training(4), machine(0.75 * Z, 8), {"offload": False}, {"shard_state": False}, slow)
    assert crowded.plan.axial > 1, "one by itself has no room"


def test_a_plan_that_keeps_everything_on_each_device_is_taken_at_once(asked: dict[str, list[Any]]) -> None:
    for ranks in (1, 4, 16):
        asked["memory"].clear()
        choice = choose(training(16), machine(devices=ranks), cluster=cluster(ranks))
        assert (choice.plan.data, choice.plan.axial, choice.plan.recompute) == (ranks, 1, None)
        grids_asked = {(plan.data > 1, plan.axial, plan.recompute) for _, plan in asked["memory"]}
        assert grids_asked == {(ranks > 1, 1, None)}
    assert choose(training(16), machine(4 * Z, 4), cluster=cluster(4)).plan.recompute == "block"
    # Three ranks cannot divide two examples evenly. On a CPU this grid is chosen without estimates if an example fits
    # into the caches.
    small = replace(training(2), sizes=sizes(48))
    cpu = replace(machine(devices=3), kind="cpu", name="")
    assert choose(small, cpu, cluster=cluster(3)).plan == Plan(data=2)
    assert planner.is_evident(small, Plan(data=2), cpu)
    assert not planner.is_evident(training(2), Plan(data=2), cpu)


def test_of_equally_fast_plans_the_one_with_fewer_devices_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second half of 16 devices makes a step only 4 % faster, so that 8 devices are chosen."""

    def time(job: Job, plan: Plan, rates: object, of: Cluster | None = None) -> StepTime:
        turns = planner.share_of(examples_of(job), plan.data, 0)
        return StepTime(turns / min(plan.axial, 2) * (0.96 if plan.axial > 2 else 1))

    monkeypatch.setattr(planner, "step_time", time)
    choice = choose(training(4), machine(devices=16), cluster=cluster(16))
    assert ranks_of(choice.plan) == 8
    assert "8 devices do the same" in choice_in_words(choice)


def test_a_key_is_tried_only_if_it_could_save_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = {"gate": 9.0, "waiting for data messages": 0.1}

    def time(job: Job, plan: Plan, rates: object, of: Cluster | None = None) -> StepTime:
        return StepTime(10.0, waits, overhead=0.1)

    monkeypatch.setattr(planner, "step_time", time)
    one = training(4, clip="step")
    assert len(choose(one, machine(devices=4), cluster=cluster(4, 2)).considered) == 1
    waits["waiting for data messages"] = 1.0
    tried = [other.plan for other in choose(one, machine(devices=4), cluster=cluster(4, 2)).considered[1:]]
    assert tried
    assert all(plan.sync != Plan().sync and plan.batch == 1 for plan in tried)


def test_slow_links_have_it_send_less() -> None:
    def chosen(bandwidth: float) -> Any:
        return choose(training(8, compression=CompressionConfig(method="none")), machine(devices=8),
                      cluster=cluster(8, 4, bandwidth)).chosen  # fmt: skip

    fast, slow = chosen(1e12), chosen(1e8)
    assert fast.plan.sync.strategy == "plain"
    assert slow.plan.sync.strategy == "hierarchical"
    assert slow.time.sent < fast.time.sent
    job = training(8, compression=CompressionConfig(method="int8"))
    for one in choose(job, machine(devices=8), cluster=cluster(8, 4, 1e7)).considered:
        assert (one.plan.sync.strategy, one.plan.sync.shard_state) == ("plain", False)


def test_few_plans_are_recorded_for_thousands_of_ranks(asked: dict[str, list[Any]]) -> None:
    choose(training(128), machine(devices=2048), cluster=cluster(2048, 8, 3e11))
    assert len(set(asked["memory"])) <= 16
    assert max(plan.data for _, plan in asked["memory"]) <= planner.MAX_ESTIMATED_RANKS
    assert len(set(asked["time"])) <= 20


def test_the_line_says_what_and_why() -> None:
    said = choice_in_words(choose(training(4), machine(4 * Z, 4), {"offload": False}, cluster=cluster(4)))
    assert "\n" not in said
    for part in ("data 4, blocks recomputed, all but the last 3: ", " a step, ", "% of what 4 devices do alone; ",
                 "data 4, everything kept needs "):  # fmt: skip
        assert part in said, said


def test_how_long_a_protein_can_be() -> None:
    most = max_residues(job(), machine(6 * 100 * 3000**2), Plan())
    assert 2900 <= most <= 3000
    assert max_residues(job(), machine(50), Plan()) == 0


def test_progress_turns_before_each_estimate(asked: dict[str, list[Any]]) -> None:
    turns: list[tuple[float, int]] = []

    def tell(done: float, total: int, what: str) -> None:
        assert 0 <= done < total
        assert what
        turns.append((done / total, len(asked["memory"]) + len(asked["time"])))

    choose(job(), machine(6 * 100 * 2048**2), estimate_all=True, tell=tell)
    choose(training(8), machine(5 * Z, 4), cluster=cluster(4), tell=tell)
    gaps = [b - a for (_, a), (_, b) in pairwise(turns)]
    assert max(gaps) <= 1 + 1, "more than an estimate of rounded sizes and one of its own without a word"


def test_thousands_of_lengths_are_few_estimates() -> None:
    assert len({round_up(job(residues)).sizes.residues for residues in range(30, 2000)}) < 110
    for residues in (1, 30, 257, 1023, 5000):
        assert residues <= round_up(job(residues)).sizes.residues <= 1.07 * residues


def test_small_jobs_need_no_estimate(asked: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "upper_bound", upper_bound)
    choice = choose(job(60), Machine(kind="cpu", free=4 * 10**9))
    assert choice.plan == Plan()
    choice = choose(training(), Machine(kind="cpu", free=10**11), {"threads": 1})
    assert choice.plan == Plan(threads=1)
    assert choice.trivially_fits
    assert not asked["memory"]


@pytest.mark.slow
@pytest.mark.parametrize("one", [job(24), job(200), training(blocks=2)], ids=["24", "200", "training"])
def test_the_upper_bound_is_one(one: Job) -> None:
    """The result of `upper_bound` is larger than the peak of the actual code."""
    assert estimate_memory(one, Plan(), "cpu").peak < upper_bound(one, Plan()).peak


@pytest.mark.slow
@pytest.mark.parametrize("is_training", [False, True])
def test_the_lower_bound_is_one(is_training: bool) -> None:
    """For every plan, the memory of the actual code without the weights is at least the bound."""
    for residues in (24, 70):
        given = replace(training(1, blocks=3), sizes=sizes(residues)) if is_training else job(residues)
        plans = candidates(given, replace(GPU, devices=2), {}) + [Plan(precision="bf16"), Plan(axial=2)]
        for plan in dict.fromkeys(plans):
            needed, bound = estimate_memory(given, plan, "cuda"), planner.lower_bound(given, plan)
            assert bound.peak <= needed.peak - needed.weights, plan
            assert bound.host <= needed.host, plan
        assert planner.lower_bound(given, plans[0]).peak > 0


def test_slices_need_less_by_the_code_itself() -> None:
    """The actual memory of a long protein also decreases from each value of `chunk` to the next."""
    one = Job(model=tiny_config(), sizes=sizes(512), recycles=1)
    plans = [Plan(), Plan(chunk=128, in_place=True), Plan(chunk=32, in_place=True)]
    peaks = [estimate_memory(one, plan, "cuda").peak for plan in plans]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize(("text", "size"), [("24GB", 24 * 10**9), ("1.5 GiB", 3 * 2**29), ("24000MB", 24 * 10**9)])
def test_memory_has_a_unit(text: str, size: int) -> None:
    assert parse_memory(text) == size
