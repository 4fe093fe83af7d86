"""overlaps: the Triton kernels, interpreted, against the definition."""

import pytest
import torch

from tests.ops.test_cpu_overlaps import overlapping
from tests.ops.triton.layouts import poisoned
from warpfold.check.checks import answer, wrong
from warpfold.ops.pairs import overlaps


@pytest.mark.parametrize("residues", [1, 6])
def test_overlaps(monkeypatch: pytest.MonkeyPatch, residues: int) -> None:
    for every_pair in (False, True):
        given = overlapping(residues, every_pair)
        assert overlaps.unsupported_reason(*given) is None
        grad = torch.randn(3, len(given[0]), generator=torch.Generator().manual_seed(0))
        with poisoned(monkeypatch):
            fast = answer(overlaps.fast, given, grad)
        assert not wrong(overlaps.definition, given, grad, fast)
        assert torch.equal(fast[0][1:], overlaps.definition(*given)[1:])
