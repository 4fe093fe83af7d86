"""Sums over programs, in the tiles of the default table, against torch."""

import pytest
import torch

from warpfold.ops.triton import positions as sums
from warpfold.ops.triton.launch import recorded


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
        sums.sum_partials(sums.Sum(partials, tuple(parts)))
        # `programs` additions of numbers of at most 5, in fp32.
        torch.testing.assert_close(torch.cat(parts).double(), true, rtol=0, atol=5 * programs**1.5 * 2**-24)


def test_sums_of_several_partials_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a number of programs and a width of its own; some are summed span by span first."""
    monkeypatch.setattr(sums, "ONCE", 64)
    monkeypatch.setattr(sums, "SPANS", 4)
    drawn = torch.Generator().manual_seed(0)
    partials = [torch.randn(*size, generator=drawn) for size in ((70, 130), (3, 5), (64, 33), (200, 1))]
    results = [tuple(torch.full((size,), torch.nan) for size in each) for each in ((100, 30), (5,), (0, 33), (1,))]
    with recorded() as made:
        sums.sum_partials(*map(sums.Sum, partials, results))
    assert len(made) == 2
    for launch in made:
        launch.run()
    for of, parts in zip(partials, results):
        bound = 5 * len(of) ** 1.5 * 2**-24  # as above
        torch.testing.assert_close(torch.cat(parts).double(), of.double().sum(0), rtol=0, atol=bound)
