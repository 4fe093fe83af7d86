"""Operands of wrong shapes raise an error that names the operand, whichever implementation computes."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.cases import Shape, made, within
from tests.ops.test_register import Watch
from warpfold.errors import UserError
from warpfold.ops import dispatch
from warpfold.ops.attention import attention, gated_attention, global_attention
from warpfold.ops.dispatch import Op, broadcast_shape, expands_to, modules
from warpfold.ops.layers import TriangleWeights
from warpfold.ops.layers import triangle_multiplication as triangle
from warpfold.ops.linear import gate, layer_norm, norm_linear
from warpfold.ops.outer import outer_product, outer_product_mean
from warpfold.ops.transition import transition
from warpfold.ops.triangle import triangle_factor, triangle_multiplication

# Values read from a wrong address are NaN or off by about 1.  Correct values have rounding errors in fp64: some 1e-13
# for a hundred additions of numbers near 1 after a norm that divides by a deviation of at least 0.3, and 100 times as
# much for a softmax of logits of several hundred.
CLOSE = 1e-9
ROW = (16,)
# c = 16 and d = 8 are supported by the Triton kernels.  After the shapes come the other arguments.
OPERANDS: dict[str, tuple[Op[..., Tensor], dict[str, Shape], dict[str, Any]]] = {
    "attention": (
        attention,
        {"q": (2, 3, 5, 2, 8), "k": (2, 3, 4, 2, 8), "v": (2, 3, 4, 2, 8), "mask": (2, 3, 4), "bias": (2, 1, 2, 5, 4)},
        {},
    ),
    "global_attention": (global_attention, {"q": (3, 5, 8), "k": (3, 4, 8), "v": (3, 4, 8), "mask": (3, 4)}, {}),
    "layer_norm": (layer_norm, {"x": (3, 4, 16), "weight": ROW, "bias": ROW}, {}),
    "norm_linear": (
        norm_linear,
        {"x": (3, 4, 16), "norm_weight": ROW, "norm_bias": ROW, "weight": (6, 16), "bias": (6,)},
        {},
    ),
    "gate": (gate, {"x": (3, 4, 16), "g": (3, 4, 16)}, {}),
    "transition": (
        transition,
        dict(x=(3, 4, 16), norm_weight=ROW, norm_bias=ROW, up=(6, 16), up_bias=(6,), down=(16, 6), down_bias=ROW),
        {},
    ),
    "triangle_factor": (
        triangle_factor,
        dict(x=(2, 3, 4, 16), mask=(2, 3, 4), norm_weight=ROW, norm_bias=ROW, weight=(36, 16), bias=(36,)),
        {"which": 1, "fused": False},
    ),
    "outer_product": (
        outer_product,
        dict(a=(2, 7, 3, 4), b=(2, 7, 5, 6), weight=(8, 24), bias=(8,), a_mask=(2, 7, 3), b_mask=(2, 7, 5),
             z=(2, 3, 5, 8)),
        {},
    ),
    "outer_product_mean": (
        outer_product_mean,
        dict(x=(2, 5, 3, 16), norm_weight=ROW, norm_bias=ROW, weight=(8, 16), bias=(8,), out_weight=(6, 16),
             out_bias=(6,), mask=(2, 5, 3), z=(2, 3, 3, 6)),
        {},
    ),
    "gated_attention": (
        gated_attention,
        dict(x=(2, 4, 4, 16), norm_weight=ROW, norm_bias=ROW, weight=(64, 16), gate_bias=ROW, out_weight=(16, 16),
             out_bias=ROW, mask=(2, 4, 4), bias=(2, 2, 4, 4)),
        {"heads": 2},
    ),
    "triangle_multiplication": (
        triangle_multiplication,
        dict(x=(2, 4, 4, 16), mask=(2, 4, 4), norm_weight=ROW, norm_bias=ROW, weight=(36, 16), bias=(36,),
             out_norm_weight=(5,), out_norm_bias=(5,), out_weight=(16, 5), out_bias=ROW),
        {"b": None, "outgoing": True, "fused": False},
    ),
    "triangle_multiplication of a slice": (
        triangle_multiplication,
        dict(x=(2, 3, 4, 16), mask=(2, 3, 4), b=(2, 5, 4, 4), norm_weight=ROW, norm_bias=ROW, weight=(36, 16),
             bias=(36,), out_norm_weight=(5,), out_norm_bias=(5,), out_weight=(16, 5), out_bias=ROW),
        {"outgoing": True, "fused": False},
    ),
}  # fmt: skip
# Shapes that a definition would broadcast, and shapes that a kernel would read out of bounds: (operand, shape).
KNOWN: dict[str, list[tuple[str, Shape]]] = {
    "attention": [
        *[("k", (2, 3, 4, 1, 8)), ("v", (2, 3, 3, 2, 8)), ("v", (2, 3, 4, 1, 8)), ("v", (2, 3, 4, 2, 4))],
        *[("mask", (2, 3, 1)), ("mask", (2, 3, 3)), ("mask", (4,)), ("bias", (5, 4)), ("bias", (2, 1, 2, 5, 1))],
        *[("bias", (4, 2, 1, 2, 5, 4)), ("bias", (2, 1, 2, 5, 3))],
    ],
    "global_attention": [("mask", (3, 1)), ("v", (1, 4, 8)), ("mask", (2, 4))],
    "layer_norm": [("weight", (1,)), ("bias", (15,)), ("weight", (16, 16))],
    "norm_linear": [("bias", (1,)), ("weight", (16,)), ("weight", (6, 15)), ("norm_weight", (1,)), ("bias", (5,))],
    "gate": [("g", (3, 1, 16)), ("g", (16,)), ("x", (1, 4, 16)), ("g", (3, 3, 16)), ("x", (2, 3, 4, 16))],
    "transition": [("down", (1, 6)), ("down_bias", (1,)), ("up_bias", (1,)), ("down", (15, 6)), ("up", (6, 15))],
    "triangle_factor": [
        *[("mask", (2, 3, 1)), ("mask", (3, 1)), ("mask", (2, 3, 3)), ("weight", (37, 16)), ("weight", (36, 15))],
        *[("bias", (37,)), ("bias", (3,)), ("norm_bias", (1,))],
    ],
    "outer_product": [
        *[("b", (1, 7, 5, 6)), ("a_mask", (7, 3)), ("b_mask", (2, 7, 1)), ("b_mask", (2, 1, 5)), ("z", (2, 3, 1, 8))],
        *[("z", (3, 5, 8)), ("z", (2, 3, 5, 1)), ("weight", (8, 23))],
    ],
    "outer_product_mean": [
        *[("weight", (9, 16)), ("weight", (6, 16)), ("bias", (9,)), ("bias", (1,)), ("out_weight", (6, 15))],
        *[("mask", (2, 5, 1)), ("mask", (5, 3)), ("z", (2, 3, 1, 6)), ("z", (3, 3, 6)), ("out_bias", (1,))],
    ],
    "gated_attention": [
        *[("x", (2, 4, 3, 16)), ("weight", (65, 16)), ("weight", (66, 16)), ("weight", (64, 15)), ("gate_bias", (65,))],
        *[("mask", (2, 4, 1)), ("mask", (4, 4)), ("bias", (2, 1, 4, 4)), ("bias", (2, 4, 4)), ("bias", (2, 3, 4, 4))],
        *[("bias", (2, 2, 4, 3)), ("out_weight", (16, 15)), ("out_bias", (1,)), ("norm_weight", (1,))],
    ],
    "triangle_multiplication": [
        *[("x", (2, 4, 3, 16)), ("weight", (35, 16)), ("weight", (36, 15)), ("bias", (37,)), ("bias", (3,))],
        *[("mask", (2, 4, 1)), ("mask", (4, 4)), ("out_norm_weight", (1,)), ("out_weight", (16, 4))],
        ("out_bias", (1,)),
    ],
    "triangle_multiplication of a slice": [
        *[("b", (2, 5, 4, 3)), ("b", (2, 5, 3, 3)), ("b", (5, 4, 4)), ("b", (2, 1, 4, 4)), ("b", (2, 5, 5, 5))],
        *[("x", (2, 3, 3, 16)), ("mask", (2, 3, 1))],
    ],
}


# Of these, attention accepts shapes that broadcast and values of another width; a bias may be shorter.
RIGHT: set[tuple[str, str, Shape]] = {
    *[("attention", "v", (2, 3, 4, 2, 4)), ("attention", "mask", (4,)), ("attention", "bias", (5, 4))],
    *[("attention", "bias", (2, 1, 2, 5, 1)), ("global_attention", "v", (1, 4, 8)), ("norm_linear", "bias", (1,))],
    *[("norm_linear", "bias", (5,)), ("triangle_factor", "bias", (3,)), ("outer_product_mean", "bias", (1,))],
    ("triangle_multiplication", "bias", (3,)),
}


@st.composite
def changed(draw: st.DrawFn, name: str) -> dict[str, Shape]:
    """Yield the operands' shapes with one or two changed: an axis added, removed, longer, shorter or of size 1."""
    shapes = dict(OPERANDS[name][1])
    for _ in range(draw(st.integers(1, 2))):
        which = draw(st.sampled_from(sorted(shapes)))
        shape = list(shapes[which])
        axis = draw(st.integers(0, max(0, len(shape) - 1)))
        how = draw(st.sampled_from(["one", "shorter", "longer", "dropped", "added", "last axes"]))
        if not shape or how == "added":
            shape.insert(axis, draw(st.sampled_from([1, 2])))
        elif how == "dropped":
            del shape[axis]
        elif how == "last axes":
            shape = shape[axis:]
        else:
            shape[axis] = {"one": 1, "shorter": max(0, shape[axis] - 1), "longer": shape[axis] + 1}[how]
        shapes[which] = tuple(shape)
    return shapes


def operands(name: str, shapes: dict[str, Shape], dtype: torch.dtype) -> dict[str, Any]:
    """Draw random operands in buffers of NaN, which reveal reads out of bounds."""
    draw = torch.Generator().manual_seed(0)
    values = {n: torch.rand(shape, generator=draw, dtype=torch.float64) + 0.5 for n, shape in shapes.items()}
    return {n: within(t, dtype) for n, t in values.items()} | OPERANDS[name][2]


def outcome(run: Callable[..., Tensor], given: dict[str, Any], wanted: Sequence[str]) -> object:
    """Return the output and the gradients, or the error, which must be raised before anything is computed."""
    leaves = {n: t.detach().requires_grad_(n in wanted) if isinstance(t, Tensor) else t for n, t in given.items()}
    try:
        out = run(**leaves)
    except (RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:  # heads of width 0
        return error
    towards = torch.linspace(-1, 1, max(out.numel(), 1), dtype=out.dtype)[: out.numel()].view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, [leaves[n] for n in wanted], towards)]


def check(name: str, shapes: dict[str, Shape], dtype: torch.dtype = torch.float64, close: float = CLOSE) -> bool:
    """Assert that the operation equals its definition, or that both raise the same error, which names an operand.

    Returns whether the operation accepts these shapes.
    """
    op, given = OPERANDS[name][0], operands(name, shapes, dtype)
    wanted = [n for n in shapes if not n.endswith("mask")]
    truth, chosen = outcome(op.definition, given, wanted), outcome(op, given, wanted)
    with dispatch.using("definition"):
        plain = outcome(op, given, wanted)
    fast = outcome(op.fast, given, wanted)
    if isinstance(chosen, Exception):
        assert isinstance(chosen, ValueError), f"{shapes}: {chosen!r}"
        assert re.match(rf"{op.name}: ({'|'.join(shapes)}|the leading axes) .*\[", str(chosen)), f"{shapes}: {chosen!r}"
        assert str(plain) == str(chosen)
        assert isinstance(fast, Exception), f"{shapes}: {chosen!r}, but the fast path computes it"
        return False
    assert not isinstance(truth, Exception), f"{shapes}: computed, where the definition says {truth!r}"
    for found in (chosen, plain) if isinstance(fast, Exception) else (chosen, plain, fast):
        assert isinstance(found, list), f"{shapes}: {found!r}"
        assert isinstance(truth, list)
        for ours, right in zip(found, truth, strict=True):
            assert not ours.isnan().any(), f"{shapes}: read past the end of an operand"
            torch.testing.assert_close(ours, right, rtol=close, atol=close, msg=lambda m: f"{shapes}: {m}")
    return True


@pytest.mark.parametrize("name", OPERANDS)
def test_shapes_that_are_right_and_shapes_that_were_taken_for_others(name: str) -> None:
    shapes = OPERANDS[name][1]
    assert check(name, shapes)
    for which, shape in KNOWN[name]:
        assert check(name, shapes | {which: shape}) == ((name, which, shape) in RIGHT)


@pytest.mark.parametrize("name", OPERANDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_the_shapes(name: str, data: st.DataObject) -> None:
    check(name, data.draw(changed(name)))


REGISTERED = (
    *("attention a bias a batch, 64 wide", "gate turned", "gated_linear_residual starting node", "overlaps of numbers"),
    *("norm_linear 128 to 40, no bias of the norm", "transition 24, turned", "triangle_factor b of columns, fused"),
    *(
        "layer_norm 20, turned",
        "outer_product odd",
        "triangle_multiplication outgoing",
        "aligned_errors chains",
        "triangle_multiplication columns of incoming",
    ),
    *("outer_product_mean as the model's", "gated_attention batch, given bias", "gated_attention batch, no biases"),
)
# Axes that no other operand has: positions, width of values, outputs, and biases, which may be shorter than outputs.
FREE = {("attention", "v", 4), *(("layer_norm", "x", i) for i in (0, 1)), *(("transition", "x", i) for i in (0, 1))}
FREE |= {("norm_linear", "weight", 0), *(("norm_linear", "x", i) for i in (0, 1))}
FREE |= {(f"norm_linear{back}", "bias", 0) for back in ("", "_backward")}
FREE |= {(f"outer_product_mean{back}", "bias", 0) for back in ("", "_backward")}
FREE |= {(f"gated_attention{back}", "gate_bias", 0) for back in ("", "_backward")}
FREE |= {(f"triangle_{which}{back}", "bias", 0) for which in ("factor", "multiplication") for back in ("", "_backward")}


@pytest.mark.parametrize("name", REGISTERED)
def test_registered_operations_name_the_operand_that_is_wrong(name: str) -> None:
    """Call the operations directly, like compiled graphs, with one axis of one operand shortened by one at a time."""
    call = made(name, torch.float64)
    with Watch() as watch:
        call.answers(call.op.fast)
    for function, args in watch.seen:
        op, right = function._opname, [a.detach() if isinstance(a, Tensor) else a for a in args]  # type: ignore[attr-defined]
        for i, (operand, t) in enumerate(zip(modules[op][1], right)):
            for axis, size in enumerate(t.shape if isinstance(t, Tensor) else ()):
                if size > 1 and (op, operand, axis) not in FREE:
                    with pytest.raises(ValueError, match=rf"warpfold::{op}: "):
                        function(*right[:i], t.narrow(axis, 0, size - 1), *right[i + 1 :])  # type: ignore[operator]


def test_what_shapes_cannot_say_is_checked_too() -> None:
    x, o, weight, key = torch.ones(3, 16), torch.ones(3, 8), torch.ones(16, 8), torch.tensor([1, 2])
    run = torch.ops.warpfold.gated_linear_residual
    assert run(x, o, o, weight, x[0], None, key, [16, 1], 0, 0, 0.5).shape == (3, 16)
    with pytest.raises(ValueError, match="the dropout factors have 1 strides, but x has 2 axes"):
        run(x, o, o, weight, x[0], None, key, [1], 0, 0, 0.5)
    with pytest.raises(ValueError, match=r"key is \[3\], not \[2\]"):
        run(x, o, o, weight, x[0], None, torch.tensor([1, 2, 3]), [16, 1], 0, 0, 0.5)
    given = made("transition 40, SwiGLU, a batch", torch.float64).given | {"activation": "relu"}
    for way in (transition.fast, transition):
        with pytest.raises(ValueError, match=r"up is \[80, 40\], not \[u, c\] = \[40, 40\], as down is \[40, 40\]"):
            way(**given)
    for way in (transition.fast, transition):
        with pytest.raises(ValueError, match="activation is 'gelu', not one of relu, swiglu"):
            way(**given | {"activation": "gelu"})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_error_says_what_decides_the_shape(device: str) -> None:
    sizes = (16,), (16,), (36, 16), (36,), (5,), (5,), (16, 5), (16,)
    weights = TriangleWeights(*(torch.ones(n, device=device) for n in sizes))
    x, mask = torch.ones(4, 4, 16, device=device), torch.ones(3, 5, device=device)
    said = r"triangle_multiplication: mask is \[3, 5\], not \[\*, i, k\] = \[4, 4\], as x is \[4, 4, 16\]"
    for kernels in ("fast", "strict", "definition"):
        with dispatch.using(kernels), pytest.raises(ValueError, match=said):  # type: ignore[arg-type]
            triangle(x, mask, weights, True)
    said = r"out_weight is \[16, 4\], not \[c, h\] = \[16, 5\], as x is \[4, 4, 16\] and out_norm_weight is \[5\]"
    with pytest.raises(ValueError, match=said):
        triangle(x, mask.new_ones(4, 4), weights._replace(out_weight=mask.new_ones(16, 4)), True)


def test_a_refusal_is_counted_and_strict_makes_it_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_refused", type(dispatch._refused)())
    big = torch.ones(2**17, 16)
    gate(big, big.double())
    assert dispatch.refusals() == {"gate: x and g differ in dtype": 1}
    with dispatch.using("strict"), pytest.raises(UserError, match="gate: x and g differ in dtype"):
        gate(big, big.double())


def test_leading_axes_broadcast_as_torch_has_it() -> None:
    for shapes in [((2, 3), (2, 3)), ((2, 1), (3,), (1, 3)), ((), (2,)), ((0,), (1,)), ((), ())]:
        assert broadcast_shape(*shapes) == torch.broadcast_shapes(*shapes)
    assert broadcast_shape((2,), (3,)) is None
    assert expands_to((1, 3), (2, 3))
    assert not expands_to((2, 3), (1, 3))
    assert not expands_to((1, 1, 3), (1, 3))


def test_a_bias_of_fewer_axes_is_served_and_one_that_differs_between_rows_is_not() -> None:
    q, mask = torch.ones(2, 3, 5, 4, 8), torch.ones(2, 3, 5)
    for shape in [(), (5,), (5, 5), (4, 1, 5), (1, 1, 4, 5, 5), (2, 1, 1, 1, 1), (1, 4, 5, 5), (2, 1, 4, 5, 5)]:
        assert attention.unsupported_reason(q, q, q, mask, torch.ones(shape)) is None
    for shape in [(3, 4, 5, 5), (2, 3, 4, 5, 5)]:
        assert attention.unsupported_reason(q, q, q, mask, torch.ones(shape)) == "the bias differs from row to row"
