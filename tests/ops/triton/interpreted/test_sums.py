"""Sums over programs, in the tiles of the default table, against torch."""

import pytest
import torch

from warpfold.ops.triton import sums


@pytest.mark.parametrize(("programs", "first", "second"), [(1, 7, 0), (5, 100, 28), (70, 64, 65), (300, 33, 3)])
@pytest.mark.parametrize("once", [1, 1024])
@pytest.mark.usefixtures("default_tiles")
def test_sums_over_programs(monkeypatch: pytest.MonkeyPatch, programs: int, first: int, second: int, once: int) -> None:
    """Whether they are summed up at once or span by span; what one test leaves in memory is no other's."""
    monkeypatch.setattr(sums, "ONCE", once)
    monkeypatch.setattr(sums, "SPANS", 4)
    partials = torch.randn(programs, first + second, generator=torch.Generator().manual_seed(programs))
    true = partials.double().sum(0)
    for sizes in ((first, second), (1, 0, 2, first - 3, second)):
        parts = [torch.full((size,), torch.nan) for size in sizes]
        sums.sum_partials(partials, *parts)
        # `programs` additions of numbers of at most 5, in fp32.
        torch.testing.assert_close(torch.cat(parts).double(), true, rtol=0, atol=5 * programs**1.5 * 2**-24)
