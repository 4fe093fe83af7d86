"""Operands of other shapes than an operation has, for the Triton kernels: the definition's answer, or an error."""

import pytest
import torch

from tests.ops.wrong_shapes import KNOWN, OPERANDS, check, operands

# What is read in a wrong place is NaN, or off by about 1.  What is right is off by its rounding in fp32: a hundred
# additions of numbers about 1 cost 1e-5 at most.
CLOSE = 2e-3
TAKEN = ("bias", (2, 1, 2, 5, 1))  # it broadcasts in the kernels too; the others are refused


@pytest.mark.parametrize(("name", "which", "shape"), [(n, *case) for n, cases in KNOWN.items() for case in cases])
def test_shapes_that_were_taken_for_others(name: str, which: str, shape: tuple[int, ...]) -> None:
    op, shapes = OPERANDS[name]
    shapes = shapes | {which: shape}
    taken = op.unsupported_reason(*operands(list(shapes.values()), torch.float32)) is None
    if not taken or (which, shape) == TAKEN:
        check(op, shapes, torch.float32, CLOSE)
    assert taken <= (which in ("bias", "mask", "v"))  # which broadcast over leading axes and, a bias, over all
