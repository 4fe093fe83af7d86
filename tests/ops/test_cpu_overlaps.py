"""overlaps: the fast way of a CPU against the definition."""

from typing import Any

import pytest
import torch

from tests.ops.triton.layouts import laid, within
from warpfold.check.checks import answer, wrong
from warpfold.ops.pairs import overlaps


def overlapping(residues: int, every_pair: bool) -> list[Any]:
    """Residues of 14 atoms in two chains, one number twice and one chain counted backwards; two atoms in one place."""
    n = 14 * residues
    values = 2 * laid((n, 3))
    values[n // 2] = values[0]
    atoms, radius = within(values, torch.float32), within(1.6 + 0.2 * laid((n,)), torch.float32)
    exists = (laid((n,), mean=1.0) > 0).float()
    numbers = torch.tensor([3, 4, 4, 5, 9, 8])[:residues].repeat_interleave(14)
    chain = torch.tensor([1, 1, 1, 1, 2, 2])[:residues].repeat_interleave(14)
    slot, place = torch.arange(14).repeat(residues), torch.arange(residues).repeat_interleave(14)
    return [atoms, radius, exists, numbers, place if every_pair else numbers, chain, slot]


@pytest.mark.parametrize("every_pair", [False, True])
def test_it_is_the_definition(every_pair: bool) -> None:
    given = overlapping(6, every_pair)
    grad = torch.randn(3, len(given[0]), generator=torch.Generator().manual_seed(0))
    fast = answer(overlaps.fast, given, grad)
    assert not wrong(overlaps.definition, given, grad, fast)
    assert torch.equal(fast[0][1:], overlaps.definition(*given)[1:])
