"""Operands of wrong shapes raise an error that names the operand, whichever implementation computes."""

import inspect
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.cases import GIVEN, OWN, Shape, completed, made, operations, shapes_of, space, within
from tests.ops.test_register import watched
from warpfold.errors import UserError
from warpfold.ops import dispatch
from warpfold.ops.attention import attention, global_attention
from warpfold.ops.dispatch import Op, broadcast_shape, expands_to, modules
from warpfold.ops.layers import TriangleWeights
from warpfold.ops.layers import triangle_multiplication as triangle
from warpfold.ops.linear import gate
from warpfold.ops.transition import transition

# Values read from a wrong address are NaN or off by about 1.  Correct values have rounding errors in fp64: some 1e-13
# for a hundred additions of numbers near 1 after a norm that divides by a deviation of at least 0.3, and 100 times as
# much for a softmax of logits of several hundred.
CLOSE = 1e-9
# Sizes of all operations, for which Triton kernels exist.
SIZES: dict[str, Any] = dict(
    lead=(3, 2), c=16, d=8, h=5, i=3, j=4, k=6, s=7, r=3, p=8, o=6, n=4, Q=5, K=4, heads=3, width=8, rows=5, kind=GIVEN,
    batched=True, with_factors=GIVEN, shared=(1,), part=1.0,
)  # fmt: skip
# Operations whose operands may have any values, and the settings of further cases.
SHAPED: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in operations()}
for name in ("adam_step", "aligned_errors", "dropout_factors", "overlaps"):
    del SHAPED[name]
SHAPED["gated_attention with its own bias"] = "gated_attention", {"kind": OWN}
SHAPED["triangle_multiplication of a slice"] = "triangle_multiplication", {"cut": 3}
# Operands of which some other shape is right: broadcast by attention, shorter biases, and axes of no other operand.
ACCEPTED: dict[str, set[str]] = {
    "attention": {"q", "k", "v", "mask", "bias"}, "global_attention": {"q", "k", "v", "mask"},
    "gated_attention": {"gate_bias", "factors"}, "gated_attention with its own bias": {"gate_bias", "factors"},
    "gated_linear_residual": {"factors"}, "layer_norm": {"x"}, "norm_linear": {"x", "weight", "bias"},
    "outer_product_mean": {"bias"}, "transition": {"x"}, "triangle_factor": {"bias"},
    "triangle_multiplication": {"bias", "factors"}, "triangle_multiplication of a slice": {"bias", "factors"},
}  # fmt: skip


@cache
def small(name: str) -> tuple[Op[..., Tensor], dict[str, Shape], dict[str, Any]]:
    """Return an operation, the shapes of its operands, and its other arguments."""
    of, more = SHAPED[name]
    op, settings = operations()[of], SIZES | more
    shapes = shapes_of(op, completed(op, settings))
    given = made(of, torch.float64, **settings).given
    return op, shapes, {n: x for n, x in given.items() if n not in shapes}


def changes(shapes: dict[str, Shape]) -> list[tuple[str, Shape]]:
    """List the shapes in which an axis of an operand has size 1, is shorter, longer, dropped or added."""
    found = []
    for which, shape in shapes.items():
        found.append((which, (1, *shape)))
        for axis, size in enumerate(shape):
            before, after = shape[:axis], shape[axis + 1 :]
            found += [(which, (*before, n, *after)) for n in {1, size - 1, size + 1}]
            found.append((which, (*before, *after)))
    return found


@st.composite
def changed(draw: st.DrawFn, name: str) -> dict[str, Shape]:
    """Yield the operands' shapes with one or two changed: an axis added, removed, longer, shorter or of size 1."""
    shapes = dict(small(name)[1])
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
    given = {n: within(t, dtype) for n, t in values.items()} | small(name)[2]
    return {n: given[n] for n in inspect.signature(small(name)[0].definition).parameters}


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
    op, given = small(name)[0], operands(name, shapes, dtype)
    wanted = [n for n in shapes if not n.endswith(("mask", "factors"))]
    chosen = outcome(op, given, wanted)
    with dispatch.using("definition"):
        plain = outcome(op, given, wanted)
    fast = outcome(op.fast, given, wanted)
    if isinstance(chosen, Exception):
        assert isinstance(chosen, ValueError), f"{shapes}: {chosen!r}"
        assert re.match(rf"{op.name}: ({'|'.join(shapes)}|the leading axes) .*\[", str(chosen)), f"{shapes}: {chosen!r}"
        assert str(plain) == str(chosen)
        assert isinstance(fast, Exception), f"{shapes}: {chosen!r}, but the fast path computes it"
        return False
    truth = outcome(op.definition, given, wanted)
    assert not isinstance(truth, Exception), f"{shapes}: computed, where the definition says {truth!r}"
    for found in (chosen, plain) if isinstance(fast, Exception) else (chosen, plain, fast):
        assert isinstance(found, list), f"{shapes}: {found!r}"
        assert isinstance(truth, list)
        for ours, right in zip(found, truth, strict=True):
            assert not ours.isnan().any(), f"{shapes}: read past the end of an operand"
            torch.testing.assert_close(ours, right, rtol=close, atol=close, msg=lambda m: f"{shapes}: {m}")
    return True


@pytest.mark.parametrize("name", SHAPED)
def test_each_shape_is_right_or_an_error(name: str) -> None:
    shapes = small(name)[1]
    assert check(name, shapes)
    assert {which for which, shape in changes(shapes) if check(name, shapes | {which: shape})} == ACCEPTED.get(
        name, set()
    )


@pytest.mark.parametrize("name", SHAPED)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_the_shapes(name: str, data: st.DataObject) -> None:
    check(name, data.draw(changed(name)))


@pytest.mark.parametrize("name", [name for name, op in operations().items() if "lead" in space(op)])
def test_no_operation_makes_a_word_of_nothing(name: str) -> None:
    call = made(name, torch.float32, lead=(0, 3))
    assert call.op.unsupported_reason(*call.args) == dispatch.EMPTY


def test_an_empty_operand_that_does_not_broadcast_is_an_error() -> None:
    q, k, mask = torch.ones(3, 2, 5, 8), torch.ones(0, 2, 4, 8), torch.ones(3, 2, 4)
    for kernels in ("fast", "definition"):
        with dispatch.using(kernels), pytest.raises(ValueError, match="do not broadcast"):  # type: ignore[arg-type]
            global_attention(q, k, k, mask)


# Axes that no other operand has: positions, width of values, outputs, and biases, which may be shorter than outputs.
FREE = {("attention", "v", 4), *(("layer_norm", "x", i) for i in (0, 1)), *(("transition", "x", i) for i in (0, 1))}
FREE |= {("norm_linear", "weight", 0), *(("norm_linear", "x", i) for i in (0, 1))}
FREE |= {(f"norm_linear{back}", "bias", 0) for back in ("", "_backward")}
FREE |= {(f"outer_product_mean{back}", "bias", 0) for back in ("", "_backward")}
FREE |= {(f"gated_attention{back}", "gate_bias", 0) for back in ("", "_backward")}
FREE |= {(f"triangle_{which}{back}", "bias", 0) for which in ("factor", "multiplication") for back in ("", "_backward")}


# global_attention calls attention.
REGISTERED = SHAPED | {name: (name, {}) for name in operations() if name not in SHAPED}
del REGISTERED["global_attention"]


@pytest.mark.parametrize("name", REGISTERED)
def test_registered_operations_name_the_operand_that_is_wrong(name: str) -> None:
    """Call the operations directly, like compiled graphs, with one axis of one operand shortened by one at a time."""
    of, more = REGISTERED[name]
    for function, right in watched(made(of, torch.float64, **SIZES | more)):
        op = function._opname  # type: ignore[attr-defined]
        for i, (operand, t) in enumerate(zip(modules[op][1], right)):
            for axis, size in enumerate(t.shape if isinstance(t, Tensor) else ()):
                if size > 1 and (op, operand, axis) not in FREE:
                    with pytest.raises(ValueError, match=rf"warpfold::{op}: "):
                        function(*right[:i], t.narrow(axis, 0, size - 1), *right[i + 1 :])  # type: ignore[operator,union-attr]


def test_what_shapes_cannot_say_is_checked_too() -> None:
    x, o, weight, key = torch.ones(3, 16), torch.ones(3, 8), torch.ones(16, 8), torch.tensor([1, 2])
    run = torch.ops.warpfold.gated_linear_residual
    assert run(x, o, o, weight, x[0], None, key, [16, 1], 0, 0, 0.5).shape == (3, 16)
    with pytest.raises(ValueError, match="the dropout factors have 1 strides, but x has 2 axes"):
        run(x, o, o, weight, x[0], None, key, [1], 0, 0, 0.5)
    with pytest.raises(ValueError, match=r"key is \[3\], not \[2\]"):
        run(x, o, o, weight, x[0], None, torch.tensor([1, 2, 3]), [16, 1], 0, 0, 0.5)
    given = made("transition", torch.float64, c=40, n=40, activation="swiglu").given | {"activation": "relu"}
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
