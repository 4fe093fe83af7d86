"""Index arithmetic past 2^31 elements: what overflows is found, what does not is not, and no kernel of ours does."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.triton.toy_kernels import (
    COPY,
    LATE,
    LOOKING_UP,
    SMALL_TILES,
    UNTIL,
    WALKING,
    WIDE,
    copy_call,
    product_call,
)
from warpfold.model.alphafold import ModelConfig
from warpfold.ops.triton.compile import distinct
from warpfold.ops.triton.launch import Call, kernels
from warpfold.ops.triton.offsets import RULES, overflows
from warpfold.parallel.plan import Plan, Precision
from warpfold.tune.kernel_calls import calls_of, wider

ROWS, STRIDE = 2**16, 2**15 + 16  # each of 32 bits; the product is not
LAST = (ROWS - 1) * STRIDE


@pytest.mark.parametrize("kernel", [COPY, LATE], ids=lambda kernel: kernel.name)
def test_a_product_of_32_bits_is_caught(kernel) -> None:
    (found,) = {(o.operation, o.interval) for o in overflows(copy_call(kernel, ROWS, STRIDE))}
    assert found == ("32-bit product", (0, LAST))


def test_a_sum_over_a_loop_is_caught() -> None:
    (found,) = overflows(copy_call(WALKING, ROWS, STRIDE, programs=1))
    assert (found.operation, found.interval) == ("32-bit sum", (0, ROWS * STRIDE))
    assert not overflows(copy_call(WALKING, ROWS // 2, STRIDE, programs=1))


def test_an_offset_that_memory_decides_is_caught() -> None:
    assert {(o.operation, o.interval) for o in overflows(copy_call(LOOKING_UP, 4, 64))} == {("64-bit product", None)}


def test_a_count_that_memory_decides_is_bounded_by_what_it_is_the_least_of() -> None:
    (found,) = overflows(copy_call(UNTIL, ROWS, STRIDE, programs=1))
    assert (found.operation, found.interval) == ("32-bit product", (0, LAST))
    assert not overflows(copy_call(UNTIL, ROWS, 2**15, programs=1))


def test_the_place_is_named() -> None:
    assert str(overflows(copy_call(COPY, ROWS, STRIDE))[0]).startswith("toy_kernels.py:")
    assert f"reaches {LAST:,}" in str(overflows(copy_call(COPY, ROWS, STRIDE))[0])


@pytest.mark.parametrize(("rows", "stride"), [(ROWS, 2**15), (2**20, 64), (4, 2**31)])
def test_what_fits_is_let_pass(rows, stride) -> None:
    """Also a stride of more than 32 bits, which Triton passes as 64."""
    assert not overflows(copy_call(COPY, rows, stride))


@pytest.mark.parametrize("rows", [ROWS, 2**30])
def test_64_bits_are_enough(rows) -> None:
    assert not overflows(copy_call(WIDE, rows, STRIDE))


def test_64_bits_may_be_too_few() -> None:
    (found,) = overflows(copy_call(WIDE, 2**30, 2**34))[:1]
    assert found.operation == "64-bit product"


def test_a_grid_that_no_gpu_takes_is_caught() -> None:
    call = copy_call(WIDE, 70_000, 64)
    tall = type(call)(call.kernel, (1, 70_000), call.launch, call.key, call.arguments)
    assert not overflows(call)
    assert [o.where for o in overflows(tall)] == ["_copy_wide: grid axis 1"]


def test_the_same_code_is_looked_at_with_each_call_s_numbers() -> None:
    few, many = copy_call(COPY, ROWS // 2, STRIDE), copy_call(COPY, ROWS, STRIDE)
    assert distinct([few, many]) == [few]
    assert [bool(overflows(call)) for call in (few, many, few)] == [False, True, False]


def test_products_of_tiles_are_followed() -> None:
    assert not overflows(product_call(SMALL_TILES, torch.bfloat16, n=2**17))


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
    """Each rule, against all pairs of numbers in two intervals; a rule may also say that it does not know."""
    (a0, a1), (b0, b1) = (a[0], sum(a)), (b[0], sum(b))
    exact = _python(name.removeprefix("arith."))
    found = RULES[name]((a0, a1), (b0, b1))
    assert found is not None or a0 < 0 or b0 <= 0
    if found is not None:
        results = [exact(x, y) for x in range(a0, a1 + 1) for y in range(b0, b1 + 1)]
        assert found[0] <= min(results)
        assert max(results) <= found[1]


# Everything past 2^31 elements: pairs and alignments with strides of 32 bits, whose products are in danger; an
# alignment by its depth alone; and pairs of which four numbers each, as of lse and bias, are past it.
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


def kernel_calls(run: str) -> list[Call]:
    """Those of a training step that differ in code, in grid or in a number; no machine could compute it."""
    precision, model, sizes = RUNS[run]
    found: dict[object, Call] = {}
    for call in calls_of(Plan(precision=precision), model, sizes):
        numbers = tuple((n, v) for n, v in call.arguments.items() if not isinstance(v, torch.Tensor))
        tensors = tuple((v.dtype, v.storage_offset() % 16) for v in call.arguments.values() if hasattr(v, "dtype"))
        found.setdefault((call.kernel.name, call.grid, call.launch, numbers, tensors), call)
    return list(found.values())


def all_overflows(calls: list[Call]) -> list[str]:
    """Each once."""
    return list(dict.fromkeys(f"{call.kernel.name} {call.grid}: {o}" for call in calls for o in overflows(call)))


def test_no_kernel_overflows() -> None:
    """Every call of one step, of kernels that it does not launch every call of another, and attention once more."""
    seen: set[str] = set()
    for run in RUNS:
        calls = kernel_calls(run)
        attention = [call for call in calls if call.kernel.name.startswith(("attention", "pointwise"))]
        calls = attention if run == "longer" else [call for call in calls if call.kernel.name not in seen]
        assert all_overflows(calls) == []
        seen |= {call.kernel.name for call in calls}
    assert seen == set(kernels())


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_no_call_overflows(run) -> None:
    assert all_overflows(kernel_calls(run)) == []


def test_the_sizes_are_past_32_bits() -> None:
    numbers = [
        a.numel() for call in kernel_calls("long") for a in call.arguments.values() if isinstance(a, torch.Tensor)
    ]
    assert max(numbers) > 2**33
    assert sum(n > 2**31 for n in numbers) > 100
