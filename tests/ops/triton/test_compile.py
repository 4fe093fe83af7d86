"""Offline compilation: every launch of the shipped tables, on four architectures, within what there is of each.

No GPU is needed.  By default the most demanding call of each kernel is compiled; with --slow every call of the model
that leads to code of its own.
"""

import dataclasses
from collections.abc import Iterable
from functools import cache

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from tests.ops.triton.toy_kernels import COPY, GIANT_TILES, SMALL_TILES, copy_call, product_call
from warpfold.model.alphafold import ModelConfig
from warpfold.ops.triton.compile import BUDGETS, Figures, breaches, compiled, distinct, source
from warpfold.ops.triton.launch import SHIPPED, Call, choice_of, kernels, read, table_used
from warpfold.parallel.plan import Plan, Precision
from warpfold.tune.kernel_calls import calls_of, demanding, wider

INITIAL = {"res": 256, "seq": 128, "extra": 1024, "tmpl": 4}
TABLES = sorted(path.stem for path in SHIPPED.glob("*.json") if path.stem != "interpreter")


@cache
def calls(table: str, precision: Precision) -> tuple[Call, ...]:
    """Every call of a step of initial training, of AlphaFold2 and of a wider model, by a table's launches."""
    plan = Plan(precision=precision)
    with table_used(read(SHIPPED / f"{table}.json")):
        return tuple(call for model in (ModelConfig(), wider()) for call in calls_of(plan, model, INITIAL))


def over_budget(found: Iterable[Call], arch: str) -> list[str]:
    """What each call takes too much of."""
    budget = BUDGETS[arch]
    return [
        f"{call.kernel.name} {call.key} {call.launch} on {arch}: {wrong}"
        for call in found
        for wrong in breaches(call, compiled(call, budget.target), budget)
    ]


@pytest.mark.parametrize("arch", BUDGETS)
def test_the_most_demanding_launches_are_within_the_budget(arch) -> None:
    wrong = over_budget(demanding(calls("default", "bf16")), arch)
    assert not wrong


def test_in_fp32_they_are_too() -> None:
    wrong = over_budget(demanding(calls("default", "fp32")), "sm_80")
    assert not wrong


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("arch", BUDGETS)
@pytest.mark.parametrize("table", TABLES)
def test_every_launch_is_within_the_budget(table, arch, precision) -> None:
    wrong = over_budget(distinct(calls(table, precision), BUDGETS[arch].target), arch)
    assert not wrong


def test_every_kernel_is_compiled() -> None:
    launched = {call.kernel.name for precision in ("bf16", "fp32") for call in calls("default", precision)}
    assert launched == set(kernels())


def test_calls_without_a_gpu_are_launched_by_the_default() -> None:
    assert choice_of(torch.device("meta")).table.path == SHIPPED / "default.json"


@pytest.mark.parametrize("arch", BUDGETS)
def test_giant_tiles_are_over_the_budget(arch) -> None:
    """So the tests above can fail."""
    good, bad = (product_call(tiles, torch.bfloat16) for tiles in (SMALL_TILES, GIANT_TILES))
    assert not over_budget([good], arch)
    found = "\n".join(over_budget([bad], arch))
    assert "bytes of shared memory, of" in found
    assert ("bytes of a thread are spilled" in found) is (arch in ("sm_80", "sm_90"))  # others keep sums elsewhere


@pytest.mark.parametrize("arch", BUDGETS)
def test_instructions_are_counted(arch) -> None:
    """A product runs on tensor cores and loads in wide words; a copy of fp32, one number a thread, does neither."""
    product = compiled(product_call(SMALL_TILES, torch.bfloat16), BUDGETS[arch].target)
    assert product.dots == 1
    assert product.tensor > 0
    assert 0 < product.wide <= product.loads
    copy = compiled(copy_call(COPY, 4, 64), BUDGETS[arch].target)
    assert (copy.dots, copy.tensor, copy.wide) == (0, 0, 0)
    assert 0 < copy.loads <= 2
    assert 0 < copy.registers < 64


def test_products_without_tensor_cores_are_over_the_budget() -> None:
    call = product_call(SMALL_TILES, torch.bfloat16)
    found = compiled(call, BUDGETS["sm_90"].target)
    assert not breaches(call, found, BUDGETS["sm_90"])
    without = dataclasses.replace(found, tensor=0, wide=0)
    assert breaches(call, without, BUDGETS["sm_90"]) == [
        "matrix products without tensor cores",
        "matrix products of which nothing is loaded in 128 bits at once",
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spilled": 4}, "4 bytes of a thread are spilled"),
        ({"shared": 163 * 1024 + 1}, "166913 bytes of shared memory, of 166912"),
        ({"registers": 256}, "256 registers in 4 warps, of 255 and 2048"),
        ({"columns": 513}, "513 columns of tensor memory, of 512"),
    ],
)
def test_each_bound_is_kept(change, words) -> None:
    call = product_call(SMALL_TILES, torch.bfloat16)
    fits = Figures(registers=255, spilled=0, shared=163 * 1024, tensor=1, wide=1, loads=1, dots=1, columns=512)
    assert not breaches(call, fits, BUDGETS["sm_80"])
    assert breaches(call, dataclasses.replace(fits, **change), BUDGETS["sm_80"]) == [words]


def test_many_warps_share_the_registers() -> None:
    call = product_call(dataclasses.replace(SMALL_TILES, warps=16), torch.bfloat16)
    figures = Figures(registers=128, spilled=0, shared=0, tensor=1, wide=1, loads=1, dots=1)
    assert not breaches(call, figures, BUDGETS["sm_90"])
    assert breaches(call, dataclasses.replace(figures, registers=129), BUDGETS["sm_90"])


def test_arguments_are_specialised_as_triton_does() -> None:
    """One is a constant, sixteenths are known as such, what passes 2^31 has 64 bits: what runs is what is compiled."""
    target = GPUTarget("cuda", 90, 32)
    x = torch.empty(64, 64, device="meta")
    call = copy_call(COPY, 1, 2**31 + 16)
    shifted = dataclasses.replace(call, arguments={**call.arguments, "x": x[:, 1:]})
    specialised, options = source(shifted, target)
    assert specialised.signature == {
        "x": "*fp32",
        "y": "*fp32",
        "rows": "constexpr",
        "channels": "i32",
        "stride": "i64",
        "BLOCK": "constexpr",
    }
    assert specialised.constants == {(2,): 1, (5,): 64}
    divisible = {path for path, attributes in specialised.attrs.items() if ["tt.divisibility", 16] in attributes}
    assert divisible == {(1,), (3,), (4,)}
    assert (options.num_warps, options.num_stages) == (1, 1)
    assert options.hash() == make_backend(target).parse_options({"num_warps": 1, "num_stages": 1}).hash()


def test_the_same_code_is_compiled_once() -> None:
    found = [
        copy_call(COPY, rows, stride) for rows, stride in ((4, 64), (5, 64), (5, 80), (5, 65), (1, 64), (1, 2**31))
    ]
    assert distinct(found) == [found[0], found[3], found[4], found[5]]
