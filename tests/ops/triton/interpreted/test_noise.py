"""Dropout factors: the Triton kernels, interpreted, draw what the definition draws, bit for bit."""

import pytest
import torch
from torch import Tensor

from tests.ops.triton.layouts import exact_bf16, laid, poisoned, within
from warpfold.check.checks import answer
from warpfold.ops.linear import gated_linear_residual
from warpfold.ops.noise import DropoutFactors, dropout_factors

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
KEY = torch.tensor([0xF0E1D2C3, 0xFFFFFFFF + 5 * 0x85EBCA6B])  # the second word of a later pass is longer than 32 bits

# shape, strides and offset of the numbers
DRAWS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "a whole tensor": ((1, 19, 64), (1216, 64, 1), 0),
    "a slice of columns": ((9, 3, 16), (800, 16, 1), 320),
    "turned": ((13, 1, 16), (16, 208, 1), 0),
    "past 2^32": ((3, 5, 8), (2**33 + 40, 8, 1), 2**40 + 3),
    "axes that cannot be merged": ((2, 3, 2, 3, 2), (1000, 7, 300, 1, 20), 11),
    "one": ((1,), (1,), 2**31 - 1),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stream", [0, 3, 123_000])
def test_a_draw_is_its_definition(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, stream: int) -> None:
    draw = (KEY, stream, 0.15, *DRAWS[name], DTYPES[dtype])
    assert dropout_factors.unsupported_reason(*draw) is None
    with poisoned(monkeypatch), exact_bf16(monkeypatch):
        fast = dropout_factors.fast(*draw)
    assert torch.equal(fast, dropout_factors.definition(*draw))


# shape of the positions, channels, inputs; order of x in memory; shape, strides and offset of the draw
TAILS: dict[str, tuple[tuple[int, ...], int, int, tuple[int, ...] | None, tuple[int, ...], tuple[int, ...], int]] = {
    "row attention": ((5, 19), 32, 16, None, (1, 19, 32), (608, 32, 1), 0),
    "ending node, turned": ((9, 10), 16, 24, (1, 0, 2), (9, 1, 16), (16, 144, 1), 0),
    "a slice of rows": ((3, 19), 32, 16, None, (3, 1, 32), (32, 608, 1), 7 * 32),
    "a slice of columns": ((7, 5), 20, 40, None, (7, 5, 20), (400, 20, 1), 60),
    "past 2^32": ((4, 6), 16, 16, None, (4, 6, 16), (2**32 + 16, 16, 1), 2**35),
    "axes that cannot be merged": (
        (2, 3, 2, 3, 2),
        24,
        16,
        (4, 0, 2, 1, 3, 5),
        (2, 1, 2, 1, 1, 24),
        (48, 48, 24, 24, 24, 1),
        5,
    ),
}


@pytest.mark.parametrize("name", TAILS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tail_draws_what_it_would_be_given(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    """The same kernels with the factors drawn before: every number is the same, forward and backward."""
    shape, c, inputs, order, *draw = TAILS[name]
    values = [laid((*shape, c), order), laid((*shape, inputs)), laid((*shape, inputs), None, 8)]
    x, o, g = (within(t, DTYPES[dtype]) for t in values)
    weight, bias = within(laid((c, inputs)), torch.float32), within(laid((c,)), torch.float32)
    grad = laid((*shape, c), order).to(DTYPES[dtype])
    factors = DropoutFactors(KEY, 5000, 0.25, DTYPES[dtype], *draw)
    kept: Tensor = dropout_factors.definition(KEY, 5000, 0.25, *draw, DTYPES[dtype])
    assert gated_linear_residual.unsupported_reason(x, o, g, weight, bias, factors) is None
    with poisoned(monkeypatch), exact_bf16(monkeypatch):
        ours = answer(lambda *given: gated_linear_residual.fast(*given, factors), [x, o, g, weight, bias], grad)
        given = answer(lambda *given: gated_linear_residual.fast(*given, kept), [x, o, g, weight, bias], grad)
    for drawn, loaded in zip(ours, given, strict=True):
        assert drawn.isfinite().all()
        assert torch.equal(drawn, loaded)
    assert 0 < (kept == 0).float().mean() < 1
