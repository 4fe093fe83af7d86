"""Table lookups with deterministic gradients, and products without TF32."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from warpfold.model.structure import StructureConfig, StructureModule
from warpfold.ops import dispatch, tensors
from warpfold.ops.tensors import exact_linear, exact_matmul, sums_by_row, take_rows

PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    dispatch.allow_tf32(False)


class Products(TorchDispatchMode):
    """Records each product: the shapes of its operands, and torch's precision setting."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[set[int], str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            lengths = {n for x in args if isinstance(x, Tensor) for n in x.shape[-2:]}
            self.seen.append((lengths, torch.get_float32_matmul_precision()))
        return func(*args, **(kwargs or {}))


def test_tf32_does_not_reach_points_and_frames() -> None:
    c = StructureConfig(layers=2, c=8, heads=2, c_hidden=3, qk_points=2, v_points=3, sidechain_c=7, dropout=0.0)
    module = StructureModule(4, 5, c)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.3)
    s, z = torch.randn(9, 4, requires_grad=True), torch.randn(9, 9, 5, requires_grad=True)
    dispatch.allow_tf32(True)
    with Products() as products:
        output = module(s, z, torch.zeros(9, dtype=torch.long), torch.ones(9))
        output.final_atom37.sum().backward()
    # Features of the logits, features of the values, all projections of s, and the update of the frames.
    geometry = {c.c_hidden + 3 * c.qk_points + 1, c.c_hidden + 3 * c.v_points, 60, 6}
    exact = [how for lengths, how in products.seen if lengths & geometry]
    assert len(exact) == 2 * 4 * 3  # 4 per layer, with 2 gradients
    assert set(exact) == {"highest"}
    assert "high" in {how for _, how in products.seen}  # activations
    assert torch.get_float32_matmul_precision() == "high"


def test_the_setting_comes_back_whoever_leaves_first() -> None:
    dispatch.allow_tf32(True)
    first, second = dispatch.exact_products(), dispatch.exact_products()
    first.__enter__()
    second.__enter__()
    assert dispatch.products == ("ieee",)
    first.__exit__(None, None, None)  # as in two threads
    assert torch.get_float32_matmul_precision() == "highest"
    second.__exit__(None, None, None)
    assert torch.get_float32_matmul_precision() == "high"
    assert "tf32" in dispatch.products


def test_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, other, added = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 3, 4), (5, 4), (5,), (2, 4, 5), (2, 3, 5))
    )
    assert gradcheck(exact_linear, (x, weight, bias))
    assert gradcheck(exact_linear, (x, weight, None))
    assert gradcheck(exact_matmul, (x, other, added))
    assert gradcheck(exact_matmul, (x, other))
    for one in range(3):  # alone
        given = (t if place == one else t.detach() for place, t in enumerate((x, other, added)))
        assert gradcheck(exact_matmul, (*given,))
    torch.testing.assert_close(exact_matmul(x, other, added), added + x @ other)


def test_rows_are_taken_and_their_gradients_add_up() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(5, 3, dtype=torch.float64, generator=generator).requires_grad_()
    index = torch.randint(5, (2, 4, 6), generator=generator)
    assert torch.equal(take_rows(table, index), table[index])
    assert gradcheck(lambda t: take_rows(t, index), (table,))


@pytest.mark.parametrize("ones", [1 << 25, 7 * 100], ids=["at once", "in parts"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_by_a_product_are_those_in_order(ones: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of small integers are exact on a GPU, and rows without an index are zero."""
    monkeypatch.setattr(tensors, "ONES", ones)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-9, 10, (1010, 4), generator=generator).to(dtype)
    index = torch.randint(6, (1010,), generator=generator)
    found = sums_by_row(x, index, 7)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(found, torch.zeros_like(found).index_add_(0, index, x.to(found.dtype)))
    assert not found[6].any()
