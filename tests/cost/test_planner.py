"""The planner: what it chooses fits and is the fastest that does, given keys stay, and what does not fit is said."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers import tiny_config
from warpfold.cost import planner
from warpfold.cost.example import ExampleSizes
from warpfold.cost.job import Job
from warpfold.cost.machine import Machine, parse_memory
from warpfold.cost.memory import MemoryEstimate, estimate_memory
from warpfold.cost.planner import Choice, choose, longest, rounded, tighter, upper_bound
from warpfold.cost.seconds import TimeEstimate
from warpfold.engine.optim import OptimConfig
from warpfold.errors import UserError
from warpfold.model.evoformer import EvoformerConfig
from warpfold.model.losses import LossConfig
from warpfold.model.pair import PairConfig
from warpfold.parallel.plan import Plan

GPU = Machine(kind="cuda", free=10**12, name="H100")
FREE = 10**9


def sizes(residues: int, sequences: int = 8, extra: int = 16, templates: int = 0) -> ExampleSizes:
    return ExampleSizes(residues=residues, sequences=sequences, extra=extra, templates=templates)


def job(residues: int = 2048, **more: Any) -> Job:
    return Job(model=tiny_config(**more), sizes=sizes(residues), recycles=1)


def training(blocks: int = 8, accumulate: int = 4) -> Job:
    model = tiny_config(
        evoformer=EvoformerConfig(blocks=blocks, heads=2, c_outer=4, pair=PairConfig(c_triangle=4, heads=2))
    )
    return Job(model=model, sizes=sizes(256), recycles=1, loss=LossConfig(), optim=OptimConfig(accumulate=accumulate))


@pytest.fixture
def formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory and time by simple formulas: what is tested is the choice, and how few estimates it needs."""

    def memory(job: Job, plan: Plan, kind: str = "cpu") -> MemoryEstimate:
        n = job.sizes.residues
        z, seen = 100 * n * n / plan.axial, n if plan.chunk is None else plan.chunk
        if job.training:
            kept = job.model.evoformer.blocks - (plan.recompute is not None) * (7 - plan.keep_blocks)
            z *= (1 if plan.offload else 2 * kept) * (0.9 if plan.recompute == "layer" else 1)
        peak = (0.1 if plan.offload else 1) * z + z + 4 * z * seen / n
        return MemoryEstimate(peak=int(peak), weights=0, features=0, host=int(z) if plan.offload else 0)

    def time(job: Job, plan: Plan, rates: object) -> TimeEstimate:
        total = job.sizes.residues**2 / plan.axial**0.5 / (plan.precision == "bf16" or 0.5)
        total *= (
            1
            + (0 if plan.chunk is None else 2 / plan.chunk)
            + (plan.recompute is not None) * (0.5 - plan.keep_blocks / 20)
        )
        return TimeEstimate(total + plan.offload * total, {}, "modelled")

    monkeypatch.setattr(planner, "estimate_memory", memory)
    monkeypatch.setattr(planner, "estimate_seconds", time)
    monkeypatch.setattr(planner, "with_margin", lambda size, kind: size)
    monkeypatch.setattr(planner, "upper_bound", lambda job, plan: MemoryEstimate(peak=10**15, weights=0, features=0))


def free(size: int, **more: Any) -> Machine:
    return replace(GPU, free=size, **more)


@pytest.mark.parametrize(
    ("of_z", "chunk", "offload"),
    [(6, None, False), (5.9, 512, False), (2.3, 128, False), (2.1, 32, False), (1.3, 32, True)],
)
def test_the_fastest_that_fits_is_chosen(formulas: None, of_z: float, chunk: int | None, offload: bool) -> None:
    choice = choose(job(), free(int(of_z * 100 * 2048**2)))
    assert (choice.plan.chunk, choice.plan.in_place, choice.plan.offload) == (chunk, chunk is not None, offload)
    assert choice.plan.precision == "fp32"  # never lowered
    assert choice.memory.peak <= choice.machine.free


@pytest.mark.parametrize(
    "fixed",
    [{"chunk": 100}, {"chunk": None}, {"offload": False}, {"precision": "bf16", "kernels": "definition"}, {"axial": 2}],
)
def test_given_keys_stay(formulas: None, fixed: Mapping[str, Any]) -> None:
    for size in (3 * FREE, 10**12):
        choice = choose(job(), free(size, devices=2), fixed)
        for one in choice.considered:
            assert {key: getattr(one.plan, key) for key in fixed} == fixed
            assert one.plan.data * one.plan.axial == 2


def test_keys_that_do_not_go_together_are_an_error(formulas: None) -> None:
    with pytest.raises(ValueError, match="in_place needs"):
        choose(job(), GPU, {"in_place": True, "chunk": None})


def test_what_fits_nowhere_is_refused_with_what_would_fit(formulas: None) -> None:
    with pytest.raises(
        UserError, match=r"2,048 residues .* needs .* are free; what would fit: 4 devices; at most 1,\d\d\d residues"
    ) as said:
        choose(job(), free(int(0.8 * 100 * 2048**2)))
    assert "\n" not in str(said.value)


def test_a_machine_too_small_for_anything_is_refused_after_few_estimates(formulas: None) -> None:
    with pytest.raises(UserError, match="are free; not even a few residues fit; give more memory"):
        choose(job(), free(500))


def test_a_plan_that_ran_out_is_followed_by_tighter_ones(formulas: None) -> None:
    choice: Choice | None = choose(job(), GPU)
    needs = []
    while choice is not None:
        needs.append(choice.memory.peak)
        choice = tighter(choice)
    assert len(needs) > 4
    assert needs == sorted(set(needs), reverse=True)


def test_devices_share_an_example_only_where_that_is_faster_or_needed(formulas: None) -> None:
    machine = free(10**12, devices=4)
    one, many = choose(job(), machine), choose(job(), machine, examples=100)
    assert (one.plan.data, one.plan.axial) == (1, 4)
    assert (many.plan.data, many.plan.axial) == (4, 1)
    large = choose(job(), free(int(1.3 * 100 * 2048**2 / 2), devices=4), examples=100)
    assert large.plan.axial > 1


def test_a_training_keeps_as_much_as_fits(formulas: None) -> None:
    z = 100 * 256**2
    every = choose(training(), free(10**12)).plan
    assert (every.recompute, every.keep_blocks) == (None, 0)
    some = choose(training(), free(60 * z))
    assert some.plan.recompute in ("block", "layer")
    assert 0 < some.plan.keep_blocks < 7
    more = planner.estimate(some.job, replace(some.plan, keep_blocks=some.plan.keep_blocks + 1), some.machine)
    assert more.peak > some.machine.free >= some.memory.peak
    least = choose(training(), free(11 * z)).plan
    assert (least.recompute, least.keep_blocks, least.offload) == ("layer", 0, False)
    assert choose(training(), free(7 * z)).plan.offload
    given = choose(training(), free(60 * z), {"keep_blocks": 0}).plan
    assert given.keep_blocks == 0
    assert given.recompute is not None


def test_the_examples_of_a_step_are_shared_out_evenly(formulas: None) -> None:
    for devices, accumulate in ((4, 4), (4, 2), (6, 3)):
        plan = choose(training(accumulate=accumulate), free(10**12, devices=devices)).plan
        assert plan.data * plan.axial == devices
        assert accumulate % plan.data == 0


def test_how_long_a_protein_can_be(formulas: None) -> None:
    most = longest(job(), free(6 * 100 * 3000**2), Plan())
    assert 2960 <= most <= 3000
    assert longest(job(), free(50), Plan()) == 0


def test_progress_turns_before_each_estimate(formulas: None, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[float] = []
    waiting, near = [0], False  # estimates since the last turn
    estimate = planner.estimate_memory

    def counted(*given: Any) -> MemoryEstimate:
        waiting.append(waiting.pop() + 1)
        assert waiting[0] <= 1 + near, f"another estimate without a word after {turns}"
        return estimate(*given)

    def tell(done: float, total: int, what: str) -> None:
        assert 0 <= done < total
        assert what
        waiting[0] = 0
        turns.append(done / total)

    monkeypatch.setattr(planner, "estimate_memory", counted)
    looked = choose(job(), free(6 * 100 * 2048**2), every=True, tell=tell).considered
    assert len(turns) == 2 * len(looked)  # the time of each, and its memory
    assert turns == sorted(turns)
    turns.clear()
    longest(job(), free(6 * 100 * 3000**2), Plan(), tell)
    assert len(turns) > 2
    assert turns == sorted(turns)
    choose(training(), free(60 * 100 * 256**2), tell=tell)
    near = True  # too large by so little that an estimate of rounded sizes is followed by one of its own
    with pytest.raises(UserError, match="what would fit"):
        choose(job(), free(int(0.8 * 100 * 2048**2)), every=True, tell=tell)


def test_thousands_of_lengths_are_few_estimates() -> None:
    assert len({rounded(job(residues)).sizes.residues for residues in range(30, 2000)}) < 110
    for residues in (1, 30, 257, 1023, 5000):
        assert residues <= rounded(job(residues)).sizes.residues <= 1.07 * residues


def test_small_jobs_need_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: object) -> MemoryEstimate:
        raise AssertionError("estimated")

    monkeypatch.setattr(planner, "estimate_memory", never)
    choice = choose(job(60), Machine(kind="cpu", free=4 * 10**9))
    assert choice.plan == Plan()
    choice = choose(training(), Machine(kind="cpu", free=10**11), {"threads": 1})
    assert choice.plan == Plan(threads=1)


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(job(24), marks=pytest.mark.slow),
        pytest.param(job(200), marks=pytest.mark.slow),
        pytest.param(training(2), marks=pytest.mark.slow),
    ],
)
def test_the_bound_is_one(one: Job) -> None:
    """What `upper_bound` says is more than the code holds."""
    assert estimate_memory(one, Plan(), "cpu").peak < upper_bound(one, Plan()).peak


@pytest.mark.slow
@pytest.mark.parametrize("is_training", [False, True])
def test_the_lower_bound_is_one(is_training: bool) -> None:
    """Of every plan, what the code itself holds beside the weights is more."""
    machine = replace(GPU, devices=2)
    for residues in (24, 70):
        given = replace(training(3, 1), sizes=sizes(residues)) if is_training else job(residues)
        plans = planner.candidates(given, machine, {}, kept=False) + [Plan(precision="bf16"), Plan(axial=2)]
        for plan in dict.fromkeys(plans):
            needed, bound = estimate_memory(given, plan, "cuda"), planner.lower_bound(given, plan)
            assert bound.peak <= needed.peak - needed.weights, plan
            assert bound.host <= needed.host, plan
        assert planner.lower_bound(given, plans[0]).peak > 0


def test_what_is_far_too_large_is_refused_without_an_estimate(formulas: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """30,000 residues of the monomer took minutes; nor are rates measured."""
    asked: list[int] = []
    estimate = planner.estimate_memory
    monkeypatch.setattr(
        planner, "estimate_memory", lambda job, *more: asked.append(job.sizes.residues) or estimate(job, *more)
    )
    monkeypatch.setattr(planner, "estimate_seconds", None)
    with pytest.raises(UserError, match=r"needs at least [0-9,.]+ GB .*; what would fit: at most [0-9,]+ residues"):
        choose(job(200_000), free(FREE, host=FREE))
    assert len(asked) < 12
    assert max(asked) < 10_000  # to say what would fit


def test_slices_need_less_by_the_code_itself() -> None:
    """The ladder's order holds for the real figure: each rung of a long protein is tighter than the one before."""
    one = Job(model=tiny_config(), sizes=sizes(512), recycles=1)
    plans = [Plan(), Plan(chunk=128, in_place=True), Plan(chunk=32, in_place=True)]
    peaks = [estimate_memory(one, plan, "cuda").peak for plan in plans]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize(("text", "size"), [("24GB", 24 * 10**9), ("1.5 GiB", 3 * 2**29), ("24000MB", 24 * 10**9)])
def test_memory_has_a_unit(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["24", "-1GB", "0GB", "lots", "", "GB", "1e9GB", "24 G B", "nanGB", "9" * 400 + "GB"])
def test_what_is_no_memory_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--memory .*: not an amount of memory; give a number with its unit"):
        parse_memory(text)
