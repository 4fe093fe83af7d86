"""Rules of attention for the interpreted Triton kernels, with the gradient kernels of long and of short rows."""

from typing import Any

import pytest
import torch

from tests.ops.attention_rules import *  # noqa: F403
from tests.ops.cases import made, poisoned
from warpfold.ops.triton import attention as launchers
from warpfold.ops.triton.launch import configs, forced


@pytest.fixture(autouse=True, params=[False, True], ids=["long", "short"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute gradients with the kernels of long rows, and with those of short rows."""
    monkeypatch.setattr(launchers, "serves_short", lambda *_: request.param)


@pytest.mark.parametrize("sizes", [dict(Q=37, K=70, d=24), dict(Q=67, K=67, h=1, with_bias=False, q_order="turned")])
def test_with_several_tiles_of_keys_and_with_one(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any]) -> None:
    (one,) = configs("BLOCK_Q BLOCK_K", (64, 128, 4, 1))
    for tiles in ({}, {"attention_short": one}):
        call = made("attention", torch.float32, lead=(2,), **sizes)
        with poisoned(monkeypatch), forced(tiles):
            found = call.answers(call.op.fast)
        assert not call.mistakes(found)
