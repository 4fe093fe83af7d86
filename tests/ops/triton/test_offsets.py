"""Index arithmetic beyond 2^31 elements: overflows are detected, and our kernels have none."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from tests.ops.triton.budgets import distinct
from tests.ops.triton.model_launches import launches_of, wider
from tests.ops.triton.offsets import RULES, overflows
from tests.ops.triton.toy_kernels import (
    COPY,
    LATE,
    LOOKING_UP,
    SMALL_TILES,
    UNTIL,
    WALKING,
    WIDE,
    copy_launch,
    product_launch,
)
from warpfold.model.alphafold import ModelConfig
from warpfold.ops.triton.launch import KernelLaunch, kernels
from warpfold.parallel.plan import Plan, Precision

ROWS, STRIDE = 2**16, 2**15 + 16  # 32 bits each, unlike the product
LAST = (ROWS - 1) * STRIDE


@pytest.mark.parametrize("kernel", [COPY, LATE], ids=lambda kernel: kernel.name)
def test_a_product_of_32_bits_is_caught(kernel) -> None:
    (found,) = {(o.operation, o.interval) for o in overflows(copy_launch(kernel, ROWS, STRIDE))}
    assert found == ("32-bit product", (0, LAST))


def test_a_sum_over_a_loop_is_caught() -> None:
    (found,) = overflows(copy_launch(WALKING, ROWS, STRIDE, programs=1))
    assert (found.operation, found.interval) == ("32-bit sum", (0, ROWS * STRIDE))
    assert not overflows(copy_launch(WALKING, ROWS // 2, STRIDE, programs=1))


def test_an_offset_that_memory_decides_is_caught() -> None:
    assert {(o.operation, o.interval) for o in overflows(copy_launch(LOOKING_UP, 4, 64))} == {("64-bit product", None)}


def test_a_count_that_memory_decides_is_bounded_by_what_it_is_the_least_of() -> None:
    (found,) = overflows(copy_launch(UNTIL, ROWS, STRIDE, programs=1))
    assert (found.operation, found.interval) == ("32-bit product", (0, LAST))
    assert not overflows(copy_launch(UNTIL, ROWS, 2**15, programs=1))


def test_the_place_is_named() -> None:
    assert str(overflows(copy_launch(COPY, ROWS, STRIDE))[0]).startswith("toy_kernels.py:")
    assert f"reaches {LAST:,}" in str(overflows(copy_launch(COPY, ROWS, STRIDE))[0])


@pytest.mark.parametrize(("rows", "stride"), [(ROWS, 2**15), (2**20, 64), (4, 2**31)])
def test_what_fits_is_let_pass(rows, stride) -> None:
    """This includes strides of more than 32 bits, which Triton passes in 64 bits."""
    assert not overflows(copy_launch(COPY, rows, stride))


@pytest.mark.parametrize("rows", [ROWS, 2**30])
def test_64_bits_are_enough(rows) -> None:
    assert not overflows(copy_launch(WIDE, rows, STRIDE))


def test_64_bits_may_be_too_few() -> None:
    (found,) = overflows(copy_launch(WIDE, 2**30, 2**34))[:1]
    assert found.operation == "64-bit product"


def test_a_grid_that_no_gpu_takes_is_caught() -> None:
    launch = copy_launch(WIDE, 70_000, 64)
    tall = replace(launch, grid=(1, 70_000))
    assert not overflows(launch)
    assert [o.where for o in overflows(tall)] == ["_copy_wide: grid axis 1"]


def test_the_same_code_is_looked_at_with_each_launch_s_numbers() -> None:
    few, many = copy_launch(COPY, ROWS // 2, STRIDE), copy_launch(COPY, ROWS, STRIDE)
    assert distinct([few, many]) == [few]
    assert [bool(overflows(launch)) for launch in (few, many, few)] == [False, True, False]


def test_products_of_tiles_are_followed() -> None:
    assert not overflows(product_launch(SMALL_TILES, torch.bfloat16, n=2**17))


def _python(name: str) -> Callable[[int, int], int]:
    return {
        "addi": lambda a, b: a + b,
        "subi": lambda a, b: a - b,
        "muli": lambda a, b: a * b,
        "divsi": lambda a, b: math.trunc(a / b),
        "remsi": lambda a, b: int(math.fmod(a, b)),
        "divui": lambda a, b: a // b,
        "remui": lambda a, b: a % b,
        "minsi": min,
        "maxsi": max,
        "shli": lambda a, b: a << b,
        "shrsi": lambda a, b: a >> b,
    }[name]


@pytest.mark.parametrize("name", sorted(RULES))
@given(a=st.tuples(st.integers(-40, 40), st.integers(0, 9)), b=st.tuples(st.integers(-3, 9), st.integers(0, 5)))
def test_intervals_hold_every_result(name, a, b) -> None:
    """Each rule contains the results for all pairs of numbers in two intervals, or is unbounded."""
    (a0, a1), (b0, b1) = (a[0], sum(a)), (b[0], sum(b))
    exact = _python(name.removeprefix("arith."))
    found = RULES[name]((a0, a1), (b0, b1))
    assert found is not None or a0 < 0 or b0 <= 0
    if found is not None:
        results = [exact(x, y) for x in range(a0, a1 + 1) for y in range(b0, b1 + 1)]
        assert found[0] <= min(results)
        assert max(results) <= found[1]


# Cases beyond 2^31 elements: pairs and alignments with 32-bit strides, whose products may overflow, a deep alignment,
# and pairs with four numbers each, like lse and bias.
LONG = {"res": 4300, "seq": 3000, "extra": 16_000, "tmpl": 1}
DEEP = {"res": 300, "seq": 30_000, "extra": 120_000, "tmpl": 1}
LONGER = {"res": 25_000, "seq": 600, "extra": 4000, "tmpl": 2}
RUNS: dict[str, tuple[Precision, ModelConfig, dict[str, int]]] = {
    "long": ("bf16", ModelConfig(), LONG),
    "deep": ("bf16", ModelConfig(), DEEP),
    "wider": ("bf16", wider(), LONG),
    "fp32": ("fp32", ModelConfig(), LONG),
    "longer": ("bf16", ModelConfig(), LONGER),
}


def kernel_launches(run: str) -> list[KernelLaunch]:
    """Record the launches of a training step, too large for any machine, that differ in code, grid or numbers."""
    precision, model, sizes = RUNS[run]
    found: dict[object, KernelLaunch] = {}
    for launch in launches_of(Plan(precision=precision), model, sizes):
        leaves = tree_leaves(list(launch.arguments.values()))
        numbers = tuple(str(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
        tensors = tuple((t.dtype, t.storage_offset() % 16) for t in launch.tensors)
        found.setdefault((launch.kernel.name, launch.grid, launch.config, numbers, tensors), launch)
    return list(found.values())


def all_overflows(launches: list[KernelLaunch]) -> list[str]:
    """Return each overflow once."""
    return list(dict.fromkeys(f"{one.kernel.name} {one.grid}: {o}" for one in launches for o in overflows(one)))


def test_no_kernel_overflows() -> None:
    """Check all launches of one step, all launches of another for kernels that it lacks, and attention again."""
    seen: set[str] = set()
    for run in RUNS:
        found = kernel_launches(run)
        attention = [one for one in found if one.kernel.name.startswith("attention")]
        found = attention if run == "longer" else [one for one in found if one.kernel.name not in seen]
        assert all_overflows(found) == []
        seen |= {one.kernel.name for one in found}
    assert seen == set(kernels())


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_no_launch_overflows(run) -> None:
    assert all_overflows(kernel_launches(run)) == []


def test_the_sizes_are_past_32_bits() -> None:
    numbers = [t.numel() for launch in kernel_launches("long") for t in launch.tensors]
    assert max(numbers) > 2**33
    assert sum(n > 2**31 for n in numbers) > 100
