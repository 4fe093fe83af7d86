"""On a GPU: the checks that bench and doctor stand on, and the device's clock."""

import pytest
import torch

from warpfold.bench.ops import bench
from warpfold.bench.timing import CudaTimer, Subject, Times, measure
from warpfold.check.cases import ODD
from warpfold.check.checks import DTYPES, check
from warpfold.check.op_profile import OpCase
from warpfold.cost.rates import ceilings

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ODD, ids=lambda case: f"{case.op} {case.where}")
def test_odd_sizes(case: OpCase, dtype: str) -> None:
    verdict = check(case, dtype, CUDA)
    assert not verdict.red, verdict.says()


def test_the_clock_is_the_device_s() -> None:
    """A product that is known takes what the ceiling says, whatever this process does meanwhile."""
    n = 4096
    a = torch.randn(n, n, device=CUDA).bfloat16().requires_grad_()
    b = torch.randn(n, n, device=CUDA).bfloat16()
    times = measure([Subject("product", lambda: a @ b, [a], torch.ones_like(b))], CUDA, repeats=10)["product"]
    rate = 2 * n**3 / (times.median("forward") or 1)
    assert 0.3 < rate / ceilings(CUDA, torch.bfloat16).flops < 1.5
    assert times.peaks["forward"] == 2 * n * n
    small = Times()
    clock = CudaTimer(CUDA)
    x = torch.ones(8, device=CUDA, requires_grad=True)
    for _ in range(5):
        clock.once(Subject("small", lambda: x * 2, [x], torch.ones_like(x)), small)
    assert min(small.seconds["forward"]) < 3e-5  # a launch from this process takes as long; the device alone does not


def test_the_bench_runs() -> None:
    found = bench(["attention", "layer_norm"], CUDA, ["bf16"], ["starting:64", "pair:64"], repeats=3)
    ours = [row for row in found["rows"] if row["way"] == "ours"]
    assert {(row["op"], row["pass"]) for row in ours} == {
        (op, direction) for op in ("attention", "layer_norm") for direction in ("forward", "backward")
    }
    assert all(row["peak_mib"] > 0 for row in ours)
    assert "launches" in found["machine"]
