"""Recipes: what an operation is repeated by, and when it must be worked out again.  No kernel runs here."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

from tests.launches import Launches
from warpfold.ops import dispatch
from warpfold.ops.attention import gated_attention
from warpfold.ops.linear import layer_norm
from warpfold.ops.triton import launch, recipe
from warpfold.ops.triton.launch import KernelConfig, LaunchTable, TableEntry, forced, recorded, table_used

Launched = list[dict[str, Any]]  # the arguments and options of each launch
WEIGHT = torch.ones(16)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """Kernels are not run but noted here; tensors on a CPU go to them, without gradient; nothing is known at first."""
    found: Launched = []
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda kernel, grid: lambda **given: found.append(given))
    layer_norm._recipes.clear()
    launch.reset()
    with dispatch.interpreting(), torch.no_grad():
        yield found
    layer_norm._recipes.clear()
    launch.reset()


def norm(x: Tensor | None = None) -> Tensor:
    """A call with a layout that is always the same, or with this tensor."""
    return layer_norm(torch.randn(4, 6, 16) if x is None else x, WEIGHT, None)


def test_a_second_call_launches_the_same_with_its_own_tensors(launched: Launched) -> None:
    x = torch.randn(4, 6, 16)
    first, second = norm(), norm(x)
    before, now = launched
    assert len(layer_norm._recipes) == 1
    assert now["x"].data is x
    assert now["y"].data.data_ptr() == second.data_ptr() != first.data_ptr()
    plain = [name for name, value in now.items() if not isinstance(value, tuple | Tensor)]
    assert {name: now[name] for name in plain} == {name: before[name] for name in plain}
    assert now["x"].strides == before["x"].strides
    assert type(now["x"]) is type(before["x"])
    assert second.stride() == first.stride()


def test_a_slice_is_repeated_where_it_lies(launched: Launched) -> None:
    z = torch.randn(3, 4, 6, 16)
    for part in z:
        norm(part)
    assert [each["x"].data.data_ptr() for each in launched] == [part.data_ptr() for part in z]
    assert len(layer_norm._recipes) == 1


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 7, 16), torch.randn(4, 16, 6).mT, torch.randn(4, 6, 16, dtype=torch.bfloat16),
        torch.randn(4, 6, 24)[..., :16],
    ],
    ids=["shape", "strides", "dtype", "padding"],
)  # fmt: skip
def test_another_layout_is_worked_out(launched: Launched, x: Tensor) -> None:
    norm()
    norm(x)
    assert len(layer_norm._recipes) == 2


def test_what_lies_behind_a_tensor_counts() -> None:
    """A bias whose rows are padded is read past its end, where there is something."""
    padded = torch.randn(7 * 16)
    with_more, without = padded.as_strided((5, 6), (16, 1)), padded[: 4 * 16 + 6].clone().as_strided((5, 6), (16, 1))
    assert recipe.layout([with_more]) != recipe.layout([without])
    assert recipe.layout([with_more]) == recipe.layout([padded[16:].as_strided((5, 6), (16, 1))])


def test_nothing_is_repeated_where_somebody_looks_on(launched: Launched) -> None:
    norm()
    (known,) = layer_norm._recipes.values()
    calls: list[object] = []
    layer_norm._recipes[next(iter(layer_norm._recipes))] = type(
        "Told", (), {"repeat": lambda self, given: calls.append(0) or known.repeat(given)}
    )()
    norm()
    assert len(calls) == 1
    with recorded() as launches:
        norm()
    with Launches() as seen:
        norm()
    with torch.enable_grad():
        norm(torch.randn(4, 6, 16, requires_grad=True))
    with torch.profiler.profile():
        norm()
    assert len(launches) == 1
    assert seen.count > 0
    assert len(calls) == 1


def of_warps(warps: int) -> LaunchTable:
    """A table of which launches are known by their warps."""
    entry = TableEntry("layer_norm", (16, 4), KernelConfig({"BLOCK_M": 16}, warps, 1))
    return LaunchTable(launch.SHIPPED / "toy.json", {}, (entry,))


def with_forced(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    with forced({"layer_norm": KernelConfig({"BLOCK_M": 16}, 32, 1)}):
        call()


def with_table(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    with table_used(of_warps(32)):
        call()


def with_a_new_table(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(launch, "tables_for", lambda device: (of_warps(32),))
        launch.reset()
        call()
    launch.reset()


@pytest.mark.parametrize("change", [with_forced, with_table, with_a_new_table])
def test_another_launch_table_is_heeded_at_once(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, change: Callable[..., None]
) -> None:
    norm()
    norm()
    change(norm, monkeypatch)
    norm()
    usual = launched[0]["num_warps"]
    assert [each["num_warps"] for each in launched] == [usual, usual, 32, usual]


def test_tf32_is_heeded_at_once(launched: Launched) -> None:
    norm()
    dispatch.allow_tf32(True)
    try:
        norm()
    finally:
        dispatch.allow_tf32(False)
    norm()
    assert ["tf32" in each[launch.DOTS] for each in launched] == [False, True, False]


def test_refusals_are_counted_each_time(launched: Launched) -> None:
    before = dispatch.refusals()
    x = torch.randn(4, 2**12 * 16)
    for _ in range(2):
        layer_norm(x, torch.ones(x.shape[-1]), None)
    assert sum(dispatch.refusals(before).values()) == 2


def test_a_recipe_holds_no_memory_and_frees_what_it_is_done_with(launched: Launched) -> None:
    """Of a gated attention nothing but the result is left at the end; what no kernel is given is not allocated."""
    c = 32
    x, bias = torch.randn(6, 8, c), torch.randn(2, 8, 8)
    weights = [torch.ones(c), None, torch.randn(4 * c, c), None, torch.randn(c, c), None]
    gated_attention._recipes.clear()
    gated_attention(x, *weights, torch.ones(6, 8), bias, 2)
    (known,) = gated_attention._recipes.values()
    slots = [slot for _, _, unused in known._steps for slot in unused]
    assert len(slots) == len(set(slots))
    allocated = [made for _, made, _ in known._steps if made is not None]
    assert set(allocated) - set(slots) == {known._result.slot}
    held = [value for step in known._steps for value in (getattr(step[0], "__closure__", None) or ())]
    assert not any(isinstance(cell.cell_contents, Tensor) for cell in held)
    gated_attention._recipes.clear()


def test_as_many_recipes_are_kept_as_are_wanted(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "MOST", 2)
    for n in (3, 4, 5):
        norm(torch.randn(n, 16))
    assert len(layer_norm._recipes) == 1
