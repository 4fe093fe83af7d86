"""In fp16 the CPU's fast ways are as near to the truth as definitions in fp16 are."""

import pytest
import torch

from warpfold.check import checks
from warpfold.check.cases import PROFILES
from warpfold.check.op_profile import OpCase

FIRST = [profile.odd[0] for profile in PROFILES.values()]


@pytest.mark.parametrize("case", FIRST, ids=[case.op for case in FIRST])
def test_a_fast_way_is_as_exact_as_the_definition(case: OpCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checks.DTYPES, "fp16", torch.float16)
    verdict = checks.check(case, "fp16", "cpu")
    assert verdict.way == "cpu", verdict.reason
    assert not verdict.red, verdict.says()
