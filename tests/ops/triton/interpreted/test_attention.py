"""Rules of attention for the interpreted Triton kernels, with the gradient kernels of long and of short rows."""

import pytest
import torch

from tests.ops.attention_rules import *  # noqa: F403
from tests.ops.cases import CASES, made, poisoned
from warpfold.ops.triton import attention as launchers
from warpfold.ops.triton.launch import configs, forced


@pytest.fixture(autouse=True, params=[False, True], ids=["long", "short"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute gradients with the kernels of long rows, and with those of short rows."""
    monkeypatch.setattr(launchers, "serves_short", lambda *_: request.param)


@pytest.mark.parametrize("name", ["attention 24 wide", "attention columns, no bias"])
def test_with_several_tiles_of_keys_and_with_one(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert name in CASES
    (one,) = configs("BLOCK_Q BLOCK_K", (64, 128, 4, 1))
    for tiles in ({}, {"attention_short": one}):
        call = made(name, torch.float32)
        with poisoned(monkeypatch), forced(tiles):
            found = call.answers(call.op.fast)
        assert not call.mistakes(found)
