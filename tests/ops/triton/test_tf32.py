"""plan.tf32 sets the precision of fp32 products of torch and the kernels, for the whole process."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.ops.triton.budgets import BUDGETS, Figures, figures
from warpfold.bench.kernels import Workload, launches_of
from warpfold.check.op_profile import OpCase
from warpfold.ops import dispatch
from warpfold.ops.triton.launch import KernelLaunch
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    dispatch.allow_tf32(False)


def products(dtype: str) -> list[KernelLaunch]:
    case = OpCase(op="transition", where="rows", rows=64, length=64, channels=128, outputs=512)
    return launches_of(Workload("transition", case, dtype))


def compiled(launch: KernelLaunch, arch: str) -> Figures:
    return figures(launch, BUDGETS[arch].target)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_use_tensor_cores_for_fp32_where_the_plan_allows_it(arch: str) -> None:
    launch = products("fp32")[0]
    assert not compiled(launch, arch).tensor
    dispatch.allow_tf32(True)
    found = compiled(launch, arch)
    assert found.tensor
    assert not found.spilled


def test_products_of_16_bits_stay_as_they_are() -> None:
    launch = products("bf16")[0]
    exact = compiled(launch, "sm_90")
    dispatch.allow_tf32(True)
    assert compiled(launch, "sm_90") == exact


def test_torch_is_told_so_that_it_can_be_read() -> None:
    for allowed in (True, False):
        dispatch.allow_tf32(allowed)
        assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")
        assert torch.backends.cuda.matmul.allow_tf32 is allowed


def test_a_cpu_has_none_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "warpfold"):
        execution = Execution(Plan(tf32=True))
        execution.bind(nn.Linear(2, 2))
    assert "plan.tf32 changes nothing" in caplog.text
    assert torch.get_float32_matmul_precision() == "highest"
    assert str(execution) == "one device, fp32, tf32, fast kernels"
