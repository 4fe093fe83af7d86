"""overlaps: the Triton kernels, interpreted, against the definition."""

import pytest
import torch

from tests.ops.triton.layouts import laid, poisoned, within
from warpfold.check.checks import answer, wrong
from warpfold.ops.overlaps import overlaps


@pytest.mark.parametrize("residues", [1, 6])
def test_overlaps(monkeypatch: pytest.MonkeyPatch, residues: int) -> None:
    """Residues of 14 atoms in two chains, one number twice and one chain counted backwards; two atoms in one place."""
    n = 14 * residues
    values = 2 * laid((n, 3))
    values[n // 2] = values[0]
    atoms, radius = within(values, torch.float32), within(1.6 + 0.2 * laid((n,)), torch.float32)
    exists = (laid((n,), mean=1.0) > 0).float()
    numbers = torch.tensor([3, 4, 4, 5, 9, 8])[:residues].repeat_interleave(14)
    chain = torch.tensor([1, 1, 1, 1, 2, 2])[:residues].repeat_interleave(14)
    slot, place = torch.arange(14).repeat(residues), torch.arange(residues).repeat_interleave(14)
    for order in (numbers, place):
        given = [atoms, radius, exists, numbers, order, chain, slot]
        assert overlaps.unsupported_reason(*given) is None
        grad = torch.randn(3, n, generator=torch.Generator().manual_seed(0))
        with poisoned(monkeypatch):
            fast = answer(overlaps.fast, given, grad)
        assert not wrong(overlaps.definition, given, grad, fast)
        assert torch.equal(fast[0][1:], overlaps.definition(*given)[1:])
