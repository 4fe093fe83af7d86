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
    a, b = torch.full((first,), torch.nan), torch.full((second,), torch.nan)
    sums.sum_partials(partials, a, b)
    true = partials.double().sum(0)
    # `programs` additions of numbers of at most 5, in fp32.
    torch.testing.assert_close(torch.cat([a, b]).double(), true, rtol=0, atol=5 * programs**1.5 * 2**-24)
