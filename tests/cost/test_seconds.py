"""How long a job takes: the work is what the code does, it adds up, and more of anything takes longer."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from tests.helpers import as_multimer, tiny_config
from warpfold.check.cases import PROFILES
from warpfold.check.op_profile import Cost
from warpfold.cost.example import ExampleSizes, ModelBench
from warpfold.cost.job import Job
from warpfold.cost.layer_work import COPY, PRODUCT, trunk_work
from warpfold.cost.measured_rates import MEASURED, _Timer, fitted, measured
from warpfold.cost.outside import OUTSIDE, OutsideKey, OutsideRun, outside_work
from warpfold.cost.rates import NEAR, TORCH, PassName, Rate, RateKey, Rates, of_gpu
from warpfold.cost.seconds import LAUNCHES, OFFLOAD, RANKS, TimeEstimate, estimate_seconds
from warpfold.engine.optim import OptimConfig
from warpfold.errors import UserError
from warpfold.model.alphafold import ModelConfig
from warpfold.model.losses import LossConfig
from warpfold.parallel.plan import Plan
from warpfold.profile.step_profile import counted_work

SIZES = ExampleSizes(residues=24, sequences=5, extra=6, templates=2)
SLICES = Plan(chunk=4, in_place=True)


class FakeClock:
    """A second passes whenever it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture(scope="module")
def rates() -> Rates:
    return of_gpu("NVIDIA A100-SXM4-80GB")


def job(loss: LossConfig | None = None, recycles: int = 1, **sizes: int) -> Job:
    return Job(model=tiny_config(), sizes=replace(SIZES, **sizes), recycles=recycles, loss=loss)


def with_blocks(count: int) -> ModelConfig:
    config = tiny_config()
    return replace(config, evoformer=replace(config.evoformer, blocks=count))


@pytest.mark.parametrize("axis", ["residues", "sequences", "extra", "templates"])
@pytest.mark.parametrize("plan", [Plan(), SLICES], ids=["whole", "in slices"])
def test_more_of_anything_takes_longer(rates: Rates, axis: str, plan: Plan) -> None:
    launched = replace(rates, call=0.0)  # else a device waits for the host's launches, which are as many
    less, more = (estimate_seconds(job(**{axis: n * getattr(SIZES, axis)}), plan, launched).total for n in (1, 2))
    assert 0 < less < more


def test_parts_add_up(rates: Rates) -> None:
    found = estimate_seconds(job(LossConfig()), Plan(recompute="block"), rates)
    assert found.total == pytest.approx(sum(found.by_layer.values()))
    assert found.how == "modelled"


def test_the_work_of_the_trunk_is_what_its_operations_were_counted_to_do() -> None:
    given = ModelBench(model=tiny_config(), loss=LossConfig(), optim=OptimConfig(), plan=Plan(), sizes=SIZES)
    counted: dict[str, int] = defaultdict(int)
    for key, work in counted_work(given, training=False).items():
        if "stack" in key.layer or "evoformer" in key.layer or key.op == "attention":
            counted[key.op] += work.flops
    said: dict[str, float] = defaultdict(float)
    for one in (work for work in trunk_work(given.model, SIZES, Plan(), forward=True) if work.op != COPY):
        said[PROFILES[one.op].op.name] += one.cost.flops
    for op in ("triangle_multiplication", "transition", "outer_product", "attention"):
        assert counted[op] == said[op] > 0, op
    # Its profile leaves out that z makes the attention's bias: h of 4 h d + h outputs.
    assert 0.95 * counted["gated_attention"] < said["gated_attention"] < counted["gated_attention"]


@pytest.mark.parametrize("plan", [Plan(), SLICES], ids=["whole", "in slices"])
def test_every_block_has_the_same_work(plan: Plan) -> None:
    one, two, three = (
        sum(work.cost.flops for work in trunk_work(with_blocks(count), SIZES, plan, True)) for count in (1, 2, 3)
    )
    assert three - two == two - one > 0


def test_slices_compute_the_same_in_more_calls() -> None:
    def summed(chunk: int, op: str) -> tuple[float, float]:
        found = [w for w in trunk_work(tiny_config(), SIZES, replace(SLICES, chunk=chunk), True) if w.op == op]
        return sum(w.cost.flops for w in found), sum(w.calls for w in found)

    for op in ("gated_attention", "transition", "norm_linear", "projected_factor"):
        (flops, few), (again, many) = summed(SIZES.residues, op), summed(2, op)
        assert again == pytest.approx(flops)
        assert many > few
    assert summed(2, COPY)[1] > 0
    assert summed(2, PRODUCT) == (0, 0)  # it is a part of the operation, which ranks compose of others


def test_a_triangle_product_in_slices_computes_what_it_computes_whole() -> None:
    def flops(plan: Plan) -> float:
        found = trunk_work(tiny_config(), replace(SIZES, templates=0), plan, True)
        return sum(work.cost.flops for work in found if work.layer.startswith("triangle product"))

    assert flops(SLICES) == pytest.approx(flops(Plan()))
    assert flops(Plan(axial=2)) == pytest.approx(flops(Plan()) / 2)


def test_ranks_share_the_trunk(rates: Rates) -> None:
    whole, half = (
        sum(
            w.cost.flops for w in trunk_work(tiny_config(), SIZES, Plan(axial=p, chunk=4), True) if w.op == "transition"
        )
        for p in (1, 2)
    )
    assert whole == 2 * half
    found = estimate_seconds(job(), Plan(axial=2), rates)
    assert found.by_layer[RANKS] > 0
    assert RANKS not in estimate_seconds(job(), Plan(), rates).by_layer


def test_recomputation_adds_a_forward_pass_of_the_trunk(rates: Rates) -> None:
    rates = replace(rates, call=0.0)  # as if graphs held what the host launches
    plain, again = (estimate_seconds(job(LossConfig()), Plan(recompute=way), rates).total for way in (None, "block"))
    some, one_more = (estimate_seconds(job(recycles=n), Plan(), rates).by_layer for n in (0, 1))
    layers = {work.layer for work in trunk_work(tiny_config(), SIZES, Plan(), True)}
    assert again - plain == pytest.approx(sum(one_more[name] - some[name] for name in layers))


def test_blocks_that_keep_everything_are_not_recomputed(rates: Rates) -> None:
    plans = [Plan(recompute="block", keep_blocks=count) for count in (0, 1, 2)]
    none, one, two = (estimate_seconds(job(LossConfig()), plan, rates).total for plan in plans)
    assert none - one == pytest.approx(one - two)
    assert none > one > two > estimate_seconds(job(LossConfig()), Plan(), rates).total  # the other stacks remain


def test_layers_that_one_operation_computes_are_not_computed_again(rates: Rates) -> None:
    plans = [Plan(recompute=way, chunk=chunk) for way in (None, "layer", "block") for chunk in (None, 4)]
    none, sliced, layer, layer_sliced, block, block_sliced = (
        estimate_seconds(job(LossConfig()), plan, replace(rates, call=0.0)).total for plan in plans
    )
    assert none < layer < block
    assert sliced < layer_sliced == pytest.approx(block_sliced)


def test_the_host_launches_ahead_of_the_device(rates: Rates) -> None:
    def seconds(call: float) -> TimeEstimate:
        return estimate_seconds(job(), Plan(), replace(rates, call=call))

    hidden, bound, twice = seconds(0.0), seconds(1e-3), seconds(2e-3)
    assert LAUNCHES not in hidden.by_layer
    assert bound.total == pytest.approx(hidden.total + bound.by_layer[LAUNCHES])
    assert twice.total == pytest.approx(2 * bound.total)


def test_what_travels_while_nothing_is_computed_is_added(rates: Rates) -> None:
    slow = replace(rates, host=replace(rates.host, bandwidth=1.0))
    plan = Plan(chunk=4, in_place=True, offload=True)
    assert OFFLOAD in estimate_seconds(job(), plan, slow).by_layer
    assert estimate_seconds(job(), plan, slow).total > estimate_seconds(job(), plan, rates).total


@pytest.mark.parametrize("config", [tiny_config(), as_multimer(tiny_config())], ids=["monomer", "multimer"])
def test_what_lies_outside_of_the_trunk_is_counted_exactly_for_any_length(config: ModelConfig) -> None:
    sizes = replace(SIZES, residues=26)
    run = OutsideRun(config, None, "definition")
    run.resize(sizes)
    run.counted()
    counted: dict[OutsideKey, list[float]] = defaultdict(lambda: [0, 0, 0, 0])
    for key, work in run.counted().items():
        values = work.flops, work.exps, work.bytes, work.calls
        place = OutsideKey(key.layer.split(".")[0], key.backward)
        counted[place] = [a + b for a, b in zip(counted[place], values)]
    said = outside_work(config, sizes, None, all_of_it=True)
    assert {key: [w.cost.flops, w.cost.exps, w.cost.bytes, w.calls] for key, w in said.items()} == counted


def test_a_fit_finds_the_rate_that_made_the_points() -> None:
    rate = Rate(call=1e-5, flop=2e-11, exp=1e-9, byte=1e-10, far=3e-10)
    costs = [Cost(1e6, 0, 1e3), Cost(1e8, 1e5, 1e6), Cost(1e7, 1e7, 4 * NEAR), Cost(0, 1e3, 9 * NEAR), Cost(0, 0, 0)]
    costs += [Cost(1e9, 1e6, NEAR / 2)]
    found = fitted([(cost, rate.seconds(cost), 1) for cost in costs])
    assert vars(found) == pytest.approx(vars(rate), rel=1e-6)


def test_a_fit_is_never_negative() -> None:
    found = fitted([(Cost(1e6, 0, 1e3), 1e-3, 1), (Cost(1e9, 0, 1e6), 1e-4, 1)])
    assert min(vars(found).values()) >= 0


def test_a_gpu_that_is_not_known_is_refused() -> None:
    with pytest.raises(UserError, match="TPU v4: how fast this GPU is, is not known; known are A100"):
        of_gpu("TPU v4")


def test_a_forward_rate_does_not_stand_in_for_a_backward_pass(rates: Rates) -> None:
    rate, dtypes = Rate(1e-5), (torch.float32, torch.bfloat16)
    known = {(op, "forward", dtype): rate for op in (*MEASURED, TORCH) for dtype in dtypes}
    forward = replace(rates, how="measured", tops={}, ops=known)
    assert estimate_seconds(job(), SLICES, forward).total > 0
    with pytest.raises(ValueError, match=r"no rate of \w+, (training|backward), torch.float32 of A100"):
        estimate_seconds(job(LossConfig()), Plan(), forward)


@pytest.mark.parametrize("which", ["forward", "training", "backward"])
def test_what_nobody_asks_for_is_not_measured(which: PassName) -> None:
    said: list[str] = []
    found = measured("cpu", torch.float32, clock=FakeClock(), tell=said.append)
    before = set(found.ops)
    key: RateKey = ("outer_product", which, torch.float32)
    assert found.ops[key].call >= 0
    assert found.ops[key].call >= 0
    assert set(found.ops) - before == {key}
    assert sum("outer_product" in what for what in said) == 1  # before it is measured, not when it is read


@pytest.mark.parametrize("which", ["forward", "training", "backward"])
def test_a_call_of_torch_in_a_model_costs_what_calls_outside_of_the_trunk_do(which: PassName) -> None:
    """In a loop of its own it has no views, no autograd and little Python around it."""
    found = measured("cpu", torch.float32, clock=FakeClock())
    assert found.ops[TORCH, which, torch.float32].call == found.ops[OUTSIDE, which, torch.float32].call > 0


def test_a_rate_is_that_of_the_middle_run() -> None:
    """A run in which others have a core for themselves, or lose it, says nothing of a step, which is a sum."""
    marks = iter([0.0, 1.0, 1.0, 1.5, 2.0, 3.1, 4.0, 13.0])  # runs of 1 (the first), 0.5, 1.1 and 9 seconds
    timer = _Timer(torch.device("cpu"), lambda: next(marks))
    assert timer.seconds(lambda: None) == pytest.approx(1.1)


def test_how_much_runs_of_the_same_differ_is_kept() -> None:
    """But not what others' turns on the core add."""
    marks = iter([0.0, 1.0, 1.0, 2.0, 2.0, 2.9, 3.0, 4.1])  # 1, 0.9 and 1.1 seconds after the first: a tenth
    timer = _Timer(torch.device("cpu"), FakeClock(), busy=lambda: next(marks))
    timer.seconds(lambda: None)
    assert timer.spread == pytest.approx(0.1)
    marks = iter([0.0, 1.0, 1.0, 2.0, 2.0, 2.9, 3.0, 4.1])
    timer = _Timer(torch.device("cpu"), lambda: next(marks), busy=FakeClock())
    timer.seconds(lambda: None)
    assert timer.spread == 0
    assert measured("cpu", torch.float32).spread("transition", "forward", torch.float32) > 0
    assert of_gpu("H100").spread("transition", "forward", torch.float32) == 0


def test_rates_do_not_serve_a_dtype_that_they_do_not_have(rates: Rates) -> None:
    with pytest.raises(ValueError, match="the rates of A100 are of bfloat16, float16, float32, not of float64"):
        estimate_seconds(job(), Plan(precision="fp64"), rates)
    assert torch.bfloat16 in rates.tops
