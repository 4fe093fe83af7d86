"""Rows of a table by their indices, and the sums that are their gradient."""

import pytest
import torch
from torch.autograd import gradcheck

from warpfold.ops import tensors
from warpfold.ops.tensors import sums_by_row, take_rows


def test_rows_are_taken_and_their_gradients_add_up() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(5, 3, dtype=torch.float64, generator=generator).requires_grad_()
    index = torch.randint(5, (2, 4, 6), generator=generator)
    assert torch.equal(take_rows(table, index), table[index])
    assert gradcheck(lambda t: take_rows(t, index), (table,))


@pytest.mark.parametrize("ones", [1 << 25, 7 * 100], ids=["at once", "in parts"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_by_a_product_are_those_in_order(ones: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU computes: exact sums of small whole numbers; a row that nothing asks for is zero."""
    monkeypatch.setattr(tensors, "ONES", ones)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-9, 10, (1010, 4), generator=generator).to(dtype)
    index = torch.randint(6, (1010,), generator=generator)
    found = sums_by_row(x, index, 7)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(found, torch.zeros_like(found).index_add_(0, index, x.to(found.dtype)))
    assert not found[6].any()
