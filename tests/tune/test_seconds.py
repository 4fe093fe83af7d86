"""How long a job takes: the work is what the code does, it adds up, and more of anything takes longer."""

from dataclasses import replace

import pytest
import torch

from tests.helpers import tiny_config
from warpfold.errors import UserError
from warpfold.model.losses import LossConfig
from warpfold.parallel.plan import Plan
from warpfold.tune.example import ExampleSizes
from warpfold.tune.job import Job
from warpfold.tune.rates import Rates, of_gpu
from warpfold.tune.seconds import estimate_seconds

SIZES = ExampleSizes(residues=24, sequences=5, extra=6, templates=2)


@pytest.fixture(scope="module")
def rates() -> Rates:
    return of_gpu("NVIDIA A100-SXM4-80GB")


def job(loss: LossConfig | None = None, recycles: int = 1, **sizes: int) -> Job:
    return Job(model=tiny_config(), sizes=replace(SIZES, **sizes), recycles=recycles, loss=loss)


@pytest.mark.parametrize("axis", ["residues", "sequences", "extra", "templates"])
@pytest.mark.parametrize("plan", [Plan(), Plan(chunk=4, in_place=True)], ids=["whole", "in slices"])
def test_more_of_anything_takes_longer(rates: Rates, axis: str, plan: Plan) -> None:
    less, more = (estimate_seconds(job(**{axis: n * getattr(SIZES, axis)}), plan, rates).total for n in (1, 2))
    assert 0 < less < more


def test_parts_add_up(rates: Rates) -> None:
    found = estimate_seconds(job(LossConfig()), Plan(recompute="block"), rates)
    assert found.total == pytest.approx(sum(found.by_layer.values()))
    assert found.how == "modelled"


def test_a_gpu_that_is_not_known_is_refused() -> None:
    with pytest.raises(UserError, match="TPU v4: how fast this GPU is, is not known; known are A100"):
        of_gpu("TPU v4")


def test_rates_do_not_serve_a_dtype_that_they_do_not_have(rates: Rates) -> None:
    with pytest.raises(ValueError, match="the rates of A100 are of bfloat16, float16, float32, not of float64"):
        estimate_seconds(job(), Plan(precision="fp64"), rates)
    assert torch.bfloat16 in rates.tops
