"""Operands of every operation, one of them not of the shape that it should have, in the middle of NaN."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from warpfold.ops.attention import attention, global_attention
from warpfold.ops.dispatch import Op
from warpfold.ops.linear import gate, layer_norm, norm_linear
from warpfold.ops.outer import outer_product
from warpfold.ops.transition import transition
from warpfold.ops.triangle import triangle_factor

Shape = tuple[int, ...]
GUARD = 256  # numbers of NaN around an operand

# c = 16 and d = 8: of those that the Triton kernels serve.  The last of some operands may be left out.
OPERANDS: dict[str, tuple[Op[..., Tensor], dict[str, Shape]]] = {
    "attention": (
        attention,
        {"q": (2, 3, 5, 2, 8), "k": (2, 3, 4, 2, 8), "v": (2, 3, 4, 2, 8), "mask": (2, 3, 4), "bias": (2, 1, 2, 5, 4)},
    ),
    "global_attention": (global_attention, {"q": (3, 5, 8), "k": (3, 4, 8), "v": (3, 4, 8), "mask": (3, 4)}),
    "layer_norm": (layer_norm, {"x": (3, 4, 16), "weight": (16,), "bias": (16,)}),
    "norm_linear": (
        norm_linear,
        {"x": (3, 4, 16), "norm_weight": (16,), "norm_bias": (16,), "weight": (6, 16), "bias": (6,)},
    ),
    "gate": (gate, {"x": (3, 4, 16), "g": (3, 4, 16)}),
    "transition": (
        transition,
        {
            "x": (3, 4, 16),
            "norm_weight": (16,),
            "norm_bias": (16,),
            "up": (6, 16),
            "up_bias": (6,),
            "down": (16, 6),
            "down_bias": (16,),
        },
    ),
    "triangle_factor": (triangle_factor, {"y": (2, 3, 4, 16), "g": (2, 3, 4, 16), "mask": (2, 3, 4)}),
    "outer_product": (
        outer_product,
        {"a": (2, 7, 3, 4), "b": (2, 7, 5, 6), "weight": (8, 24), "bias": (8,), "count": (2, 3, 5, 1)},
    ),
}
# Of those that broadcast in a definition, and of those that a kernel would read past the end: (operand, shape).
KNOWN: dict[str, list[tuple[str, Shape]]] = {
    "attention": [
        ("k", (2, 3, 4, 1, 8)),
        ("v", (2, 3, 3, 2, 8)),
        ("v", (2, 3, 4, 1, 8)),
        ("v", (2, 3, 4, 2, 4)),
        ("mask", (2, 3, 1)),
        ("mask", (2, 3, 3)),
        ("mask", (4,)),
        ("bias", (5, 4)),
        ("bias", (2, 1, 2, 5, 1)),
        ("bias", (4, 2, 1, 2, 5, 4)),
        ("bias", (2, 1, 2, 5, 3)),
    ],
    "global_attention": [("mask", (3, 1)), ("v", (1, 4, 8)), ("mask", (2, 4))],
    "layer_norm": [("weight", (1,)), ("bias", (15,)), ("weight", (16, 16))],
    "norm_linear": [("bias", (1,)), ("weight", (16,)), ("weight", (6, 15)), ("norm_weight", (1,)), ("bias", (5,))],
    "gate": [("g", (3, 1, 16)), ("g", (16,)), ("x", (1, 4, 16)), ("g", (3, 3, 16)), ("x", (2, 3, 4, 16))],
    "transition": [("down", (1, 6)), ("down_bias", (1,)), ("up_bias", (1,)), ("down", (15, 6)), ("up", (6, 15))],
    "triangle_factor": [("mask", (2, 3, 1)), ("mask", (3, 1)), ("g", (2, 1, 4, 16)), ("mask", (2, 3, 3))],
    "outer_product": [("b", (1, 7, 5, 6)), ("count", (3, 5, 1)), ("count", (2, 3, 5, 8)), ("count", (2, 3, 4, 1))],
}


@st.composite
def changed(draw: st.DrawFn, name: str) -> dict[str, Shape]:
    """The shapes of an operation's operands, of which one or two have an axis more, less, longer, shorter or of 1."""
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


def operands(shapes: Sequence[Shape], dtype: torch.dtype) -> list[Tensor]:
    """Random tensors, each in a buffer of NaN: who reads past one has NaN."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in shapes:
        values = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
        buffer = torch.full((2 * GUARD + values.numel(),), math.nan, dtype=dtype)
        made.append(buffer[GUARD : GUARD + values.numel()].view(shape).copy_(values))
    return made


def outcome(run: Callable[..., Tensor], given: Sequence[Tensor], wanted: Sequence[str], names: Sequence[str]) -> object:
    """The output and the gradients of those wanted; or the error, which comes before anything is computed."""
    leaves = [t.detach().requires_grad_(name in wanted) for name, t in zip(names, given)]
    try:
        out = run(*leaves)
    except (RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:  # the last: heads without width
        return error
    towards = torch.linspace(-1, 1, max(out.numel(), 1), dtype=out.dtype)[: out.numel()].view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, [t for t in leaves if t.requires_grad], towards)]


def check(op: Any, shapes: dict[str, Shape], dtype: torch.dtype, close: float) -> tuple[object, object]:
    """Assert that the operation, as chosen, is its definition or fails as that does, and that its fast way alone is
    the definition or fails; return the outcomes of the two."""
    names = list(shapes)
    wanted = [name for name in names if name not in ("mask", "count")]
    given = operands(list(shapes.values()), dtype)
    truth = outcome(op.definition, given, wanted, names)
    taken = op.unsupported_reason(*given) is None
    chosen = outcome(op.fast if taken else op.definition, given, wanted, names)  # though it is small
    alone = chosen if taken else outcome(op.fast, given, wanted, names)
    for found in (chosen, alone):
        if isinstance(found, Exception):
            assert isinstance(truth, Exception) or found is alone, f"{shapes}: {found!r}, the definition: fine"
        else:
            assert not isinstance(truth, Exception), f"{shapes}: computed, where the definition says {truth!r}"
            assert isinstance(found, list)
            assert isinstance(truth, list)
            for ours, right in zip(found, truth, strict=True):
                assert not ours.isnan().any(), f"{shapes}: read past the end of an operand"
                torch.testing.assert_close(ours, right, rtol=close, atol=close, msg=lambda m: f"{shapes}: {m}")
    return chosen, alone
