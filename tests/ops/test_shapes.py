"""Operands of other shapes than an operation has: computed as its definition computes them, or an error."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.wrong_shapes import KNOWN, OPERANDS, changed, check, operands
from warpfold.errors import UserError
from warpfold.ops import dispatch
from warpfold.ops.attention import attention
from warpfold.ops.dispatch import broadcast_shape, expands_to
from warpfold.ops.linear import gate

# What is read in a wrong place is NaN, or off by about 1.  What is right is off by its rounding in fp64: a hundred
# additions of numbers about 1, after a norm that divides by a deviation of 0.3 or more, cost some 1e-13.
CLOSE = 1e-11


@pytest.mark.parametrize("name", OPERANDS)
def test_the_right_shapes_are_not_refused(name: str) -> None:
    op, shapes = OPERANDS[name]
    assert op.unsupported_reason(*operands(list(shapes.values()), torch.float64)) is None
    _, alone = check(op, shapes, torch.float64, CLOSE)
    assert isinstance(alone, list)


@pytest.mark.parametrize(("name", "which", "shape"), [(n, *case) for n, cases in KNOWN.items() for case in cases])
def test_shapes_that_were_taken_for_others(name: str, which: str, shape: tuple[int, ...]) -> None:
    op, shapes = OPERANDS[name]
    check(op, shapes | {which: shape}, torch.float64, CLOSE)


@pytest.mark.parametrize("name", OPERANDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_the_shapes(name: str, data: st.DataObject) -> None:
    check(OPERANDS[name][0], data.draw(changed(name)), torch.float64, CLOSE)


REGISTERED = {
    "attention": [(1, 3, 5, 2, 8), (1, 3, 4, 2, 8), (1, 3, 4, 2, 8), (1, 3, 4), (1, 2, 5, 4)],
    "attention_backward": [
        *[(1, 3, 5, 2, 8), (1, 3, 5, 2, 8), (1, 3, 4, 2, 8), (1, 3, 4, 2, 8), (1, 3, 4), (1, 2, 5, 4)],
        *[(1, 3, 5, 2, 8), (1, 3, 2, 5), True],
    ],
    "gate": [(3, 16), (3, 16)],
    "gate_backward": [(3, 16), (3, 16), (3, 16)],
    "gated_linear_residual": [(3, 16), (3, 8), (3, 8), (16, 8), (16,), (3, 16), None, [], 0, 0, 0.0],
    "gated_linear_residual_backward": [(3, 16), (3, 8), (3, 8), (16, 8), (16,), (3, 16), None, [], 0, 0, 0.0],
    "layer_norm": [(3, 16), (16,), (16,), 1e-5],
    "layer_norm_backward": [(3, 16), (3, 16), (16,), (3,), (3,)],
    "norm_linear": [(3, 16), (16,), (16,), (6, 16), (6,), 1e-5],
    "norm_linear_backward": [(3, 6), (3, 16), (16,), (16,), (6, 16), (6,), (3,), (3,)],
    "transition": [(3, 16), (16,), (16,), (12, 16), (12,), (16, 6), (16,), True, 1e-5, "swiglu"],
    "transition_backward": [(3, 16), (3, 16), (16,), (16,), (6, 16), (6,), (16, 6), (16,), True, 1e-5, "relu"],
    "triangle_factor": [(3, 4, 16), (3, 4, 16), (3, 4)],
    "triangle_factor_backward": [(16, 3, 4), (3, 4, 16), (3, 4, 16), (3, 4)],
    "outer_product": [(1, 7, 3, 4), (1, 7, 5, 6), (8, 24), (8,), (1, 3, 5, 1), True],
    "outer_product_backward": [(1, 3, 5, 8), (1, 7, 3, 4), (1, 7, 5, 6), (8, 24), (8,), (1, 3, 5, 1), True],
}

# Axes that no other operand has: positions, the width of values, and the biases, which may be fewer than outputs.
FREE = {("attention", 2, 4), ("layer_norm", 0, 0), ("norm_linear", 0, 0), ("transition", 0, 0)}
FREE |= {("norm_linear", 4, 0), ("norm_linear_backward", 5, 0)}


@pytest.mark.parametrize("name", REGISTERED)
def test_registered_operations_name_the_operand_that_is_wrong(name: str) -> None:
    """Called directly, as compiled graphs do.  Each axis of each operand in turn is one shorter."""
    run = getattr(torch.ops.warpfold, name)
    right = REGISTERED[name]

    def call(shapes: list[object]) -> None:
        run(*(torch.ones(s, dtype=torch.float64) if isinstance(s, tuple) else s for s in shapes))

    call(right)
    for i, shape in enumerate(right):
        for axis in range(len(shape) if isinstance(shape, tuple) else 0):
            short = (*shape[:axis], shape[axis] - 1, *shape[axis + 1 :])
            if 0 in short or (name, i, axis) in FREE:
                continue
            with pytest.raises(ValueError, match=rf"warpfold::{name}: .* is \["):
                call([*right[:i], short, *right[i + 1 :]])


def test_strides_of_a_draw_are_as_many_as_axes() -> None:
    x, o, weight, key = torch.ones(3, 16), torch.ones(3, 8), torch.ones(16, 8), torch.tensor([1, 2])
    run = torch.ops.warpfold.gated_linear_residual
    assert run(x, o, o, weight, x[0], None, key, [16, 1], 0, 0, 0.5).shape == (3, 16)
    with pytest.raises(ValueError, match="1 strides of the elements drawn for, but x has 2 axes"):
        run(x, o, o, weight, x[0], None, key, [1], 0, 0, 0.5)
    with pytest.raises(ValueError, match=r"key is \[3\], not \[2\]"):
        run(x, o, o, weight, x[0], None, torch.tensor([1, 2, 3]), [16, 1], 0, 0, 0.5)


def test_a_refusal_says_which_operand_and_strict_makes_it_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_refused", type(dispatch._refused)())
    big, row = torch.ones(2**17, 16), torch.ones(16)
    gate(big, row)
    assert dispatch.refusals() == {"gate: g is not [*, c] beside the others": 1}
    with dispatch.using("strict"), pytest.raises(UserError, match=r"gate: g is not \[\*, c\]"):
        gate(big, row)


def test_leading_axes_broadcast_as_torch_has_it() -> None:
    for shapes in [((2, 3), (2, 3)), ((2, 1), (3,), (1, 3)), ((), (2,)), ((0,), (1,)), ((), ())]:
        assert broadcast_shape(*shapes) == torch.broadcast_shapes(*shapes)
    assert broadcast_shape((2,), (3,)) is None
    assert expands_to((1, 3), (2, 3))
    assert not expands_to((2, 3), (1, 3))
    assert not expands_to((1, 1, 3), (1, 3))


def test_a_bias_of_fewer_axes_and_axes_of_one_are_not_refused() -> None:
    q, mask = torch.ones(2, 3, 5, 4, 8), torch.ones(2, 3, 5)
    for shape in [(), (5,), (5, 5), (4, 1, 5), (1, 1, 4, 5, 5), (2, 1, 1, 1, 1)]:
        assert attention.unsupported_reason(q, q, q, mask, torch.ones(shape)) is None
