"""Cases of every operation, generated from its declaration, for tests on CPUs, in the interpreter and on GPUs.

An operation declares the shapes of its operands in symbols, which of them may be None, and its other arguments
(`register` in ops/dispatch.py, and the signature of its definition).  The settings of a case are the size of each
symbol ("lead" for the leading axes), `with_x` for each optional operand x, `x_order` for the memory order of each
operand x that has positions, and the other arguments.  `SPACES` lists the values of the settings that the declaration
does not determine; the others have the default values of `space`, so that a new operation has cases as soon as it is
declared.  Tensors are surrounded by NaN, which reveals accesses out of bounds.
"""

import importlib
import inspect
import math
import pkgutil
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_type_hints

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import warpfold.ops
from warpfold.check.checks import DRAWS, Jitter, answer, compare, truth
from warpfold.ops.dispatch import Op, Shapes, empty_like, interpreting, register
from warpfold.ops.noise import DropoutFactors, Factors, Noise
from warpfold.ops.transition import HALVES

GUARD = 64  # NaNs before and after a tensor
Shape = tuple[int, ...]
Settings = dict[str, Any]
# Values of a setting in any order, values in the order of the cases, or a function of the settings before it.
Values = tuple[Any, ...] | list[Any] | Callable[[Settings], Any]
# Coordinates and weights have more than 16 bits.
WIDE = ("adam_step", "aligned_errors", "overlaps")
POSITIONS = [(7, 19), (11, 13), (9, 10), (2, 5, 9), (8, 16), (2, 3, 2, 3, 2), (1, 1), (300,)]
# "sliced": of a wider tensor. "turned": within columns. "front": channels first, as in triangle products. "mixed":
# positions in reversed order. "planes": channels before rows. "heads": the third last axis is innermost.
# "far": the axis before the channels outermost, as templates. "shared": equal at all leading axes, with stride 0.
ORDERS = ["plain", "turned", "sliced", "sliced turned", "front", "mixed", "plain", "sliced"]
SMALL_ORDERS = ("sliced", "plain", "turned", "sliced turned")
OWN, GIVEN = "own", "given"


def _shared(s: Settings, *last: int) -> Shape:
    """Return the shape of dropout factors, whose axes in `shared` have size 1."""
    full = (*s["lead"], *last)
    shared = {axis % len(full) for axis in s["shared"]}
    return tuple(1 if axis in shared else size for axis, size in enumerate(full))


# By operation: values of axes, arguments and other settings, which the functions below use.
SPACES: dict[str, dict[str, Values]] = {
    "adam_step": dict(
        n=(1000, 2500, 50, 1), packed=(None, torch.bfloat16, torch.float16, torch.float32), beta1=(0.9, 0.0),
        beta2=(0.999, 0.0), eps=(1e-6,), decay=(0.99, 0.0), steps=(1, 3, 499, 501, 100_000),
        with_packed=lambda s: s["packed"] is not None,
    ),
    "aligned_errors": dict(
        lead=((), (2, 2), (3,)), f=(37, 9, 21, 1), p=(70, 9, 21, 5), clamp=(3.0, 2.0, math.inf), softening=(0.01, 0.0)
    ),
    "attention": dict(
        lead=[(3,), (2, 3), (11,), (2, 3), (3,), (2,), (1, 2), (2,), (1, 2), (2, 3), (2, 3), (2, 3), (5, 7)],
        Q=[37, 67, 20, 19, 5, 33, 21, 37, 21, 1, 1, 1, 1], K=[37, 67, 20, 33, 1, 40, 48, 70, 35, 4, 33, 1, 32],
        h=[2, 1, 2, 1, 2, 1, 1, 2, 1, 4, 2, 2, 1], d=[16, 16, 16, 64, 8, 8, 32, 24, 48, 16, 24, 8, 64],
        with_bias=[True, False, True, True, True, True, True, True, True, False, False, False, False],
        more=(0,), e=lambda s: s["d"] + s["more"], batched=(False, True), masked=("random", "tail", "clear"),
        q_order=("sliced", "turned", "plain", "front"), k_order=("sliced", "turned", "far", "plain", "shared"),
        v_order=("sliced", "turned", "plain", "shared", "far"), mask_order=("plain", "turned", "shared"),
        bias_order=("heads", "plain"), grad_order=("plain", "turned", "shared"),
        bias_shape=lambda s: (*(s["lead"][:-1] if s["batched"] else ()), 1, s["h"], s["Q"], s["K"]),
    ),
    "dropout_factors": dict(
        stream=(17_000, 0, 3, 123_000), rate=(0.15, 0.1, 0.5, 1 / 3),
        numbers=(
            ((9, 3, 16), (800, 16, 1), 320), ((13, 1, 16), (16, 208, 1), 0), ((3, 5, 8), (2**33 + 40, 8, 1), 2**40 + 3),
            ((2, 3, 2, 3, 2), (1000, 7, 300, 1, 20), 11), ((1,), (1,), 2**31 - 1), ((7, 1, 16), (1, 0, 7), 11),
            ((40_000,), (3,), 1), ((3, 7, 4), (0, 4, 1), 0),
        ),
        shape=lambda s: s["numbers"][0], strides=lambda s: s["numbers"][1], offset=lambda s: s["numbers"][2],
    ),
    "gate": dict(c=(128, 64, 20, 16, 5), x_order=ORDERS),
    "gated_attention": dict(
        heads=[2, 1, 2, 1, 2, 1, 2, 4], width=[8, 16, 24, 48, 8, 32, 16, 8], c=(16, 24, 32),
        K=[9, 9, 21, 7, 3, 18, 7, 5], rows=(3, 5, 2, 7), lead=((), (2,)),
        kind=[OWN, OWN, GIVEN, "", OWN, GIVEN, OWN, ""], with_bias=lambda s: s["kind"] == GIVEN,
        R=lambda s: s["K"] if s["kind"] == OWN else s["rows"],
        i=lambda s: s["heads"] * s["width"], b=lambda s: s["i"], h=lambda s: s["heads"], bias_order=("plain", "heads"),
        o=lambda s: 4 * s["i"] + (s["heads"] if s["kind"] == OWN else 0),
        with_factors=[GIVEN, "drawn", None], shared=((-3,),),
        factors_shape=lambda s: _shared(s, s["R"], s["K"], s["c"]),
    ),
    "gated_linear_residual": dict(
        c=(128, 16, 20, 24, 64, 256, 384), i=(128, 16, 24, 64, 136, 200, 300), x_order=ORDERS,
        with_factors=("drawn", GIVEN, "slice", None), shared=((0,), (-2,), (-1,), (0, -1), (1, 3, 4)),
        factors_shape=lambda s: _shared(s, s["c"]),
    ),
    "global_attention": dict(
        lead=((3,), (2, 3)), h=(8, 4), K=(70, 9), d=(8, 16), more=(0,), e=lambda s: s["d"] + s["more"]
    ),
    "layer_norm": dict(c=(128, 16, 20, 64, 200, 384, 1024), x_order=ORDERS),
    "norm_linear": dict(
        c=[128, 16, 20, 64, 128, 128, 1024, 384, 200, 384, 64, 24], o=[132, 4, 8, 260, 128, 8, 20, 100, 130, 3, 4, 20],
        by_planes=[*(9 * [False]), True, True, True], part=(0.25, 1.0, 0.5),
        planes=lambda s: s["by_planes"] and len(s["lead"]) > 1, b=lambda s: max(1, int(s["o"] * s["part"])),
        x_order=ORDERS, grad_order=("plain", "sliced", "turned", "planes"),
    ),
    "outer_product": dict(
        s=[9, 7, 1, 3, 70, 5], i=[17, 5, 16, 2, 5, 3], j=[3, 18, 3, 5, 9, 2], c=[8, 6, 8, 5, 6, 9],
        d=[32, 11, 8, 16, 11, 64], p=[40, 37, 12, 140, 37, 20], a_order=SMALL_ORDERS, b_order=SMALL_ORDERS,
        least=lambda s: 0.0 if s["bias_divided"] else 1.0, added=lambda s: 1e-3 if s["bias_divided"] else 0.0,
    ),
    "outer_product_mean": dict(
        s=(9, 21, 7, 3), r=(18, 5, 9, 4, 1), c=(32, 20, 24, 300, 16), h=(8, 5, 6, 16), p=(40, 37, 12, 20, 8),
        part=(1.0, 0.5), o=lambda s: 2 * s["h"], q=lambda s: s["h"] ** 2, b=lambda s: max(1, int(s["o"] * s["part"])),
        least=lambda s: 0.0 if s["bias_divided"] else 1.0, added=lambda s: 1e-3 if s["bias_divided"] else 0.0,
    ),
    "overlaps": dict(residues=(6, 1), every_pair=(True, False), n=lambda s: 14 * s["residues"]),
    "transition": dict(
        c=[16, 24, 40, 64, 64, 20, 64, 32], n=[32, 56, 40, 128, 64, 24, 64, 70], x_order=ORDERS,
        activation=["relu", "relu", "swiglu", "relu", "relu", "swiglu", "relu", "swiglu"],
        u=lambda s: HALVES[s["activation"]] * s["n"],
    ),
    "triangle_factor": dict(
        i=(3, 9, 5, 19), k=(18, 9, 16, 4), c=(64, 20, 16, 24), h=(32, 24, 16, 40), which=(0, 1),
        o=lambda s: 4 * s["h"] + s["c"], b=lambda s: 4 * s["h"],
    ),
    "triangle_multiplication": dict(
        n=[16, 9, 5, 5, 7, 3, 18, 19, 9, 16], cut=[0, 0, 0, 0, 0, 0, 5, 3, 1, 16], c=(64, 32, 24, 16, 20),
        h=(32, 16, 40, 10), outgoing=[True, False, True, True, False, False, True, False, False, False],
        o=lambda s: 4 * s["h"] + s["c"], e=lambda s: s["o"], with_b=lambda s: s["cut"] > 0,
        i=lambda s: s["cut"] if s["cut"] and s["outgoing"] else s["n"],
        k=lambda s: s["cut"] if s["cut"] and not s["outgoing"] else s["n"],
        with_factors=(GIVEN, "drawn", None), shared=((-3,),),
        factors_shape=lambda s: _shared(s, s["i"], s["k"], s["c"]),
    ),
}  # fmt: skip


@cache
def operations() -> dict[str, Op[..., Any]]:
    """Find all operations of the package by name."""
    modules = [importlib.import_module(f"warpfold.ops.{m.name}") for m in pkgutil.iter_modules(warpfold.ops.__path__)]
    found = {x.name: x for module in modules for x in vars(module).values() if isinstance(x, Op)}
    return dict(sorted(found.items()))


def declaration(op: Op[..., Any]) -> register:
    """Return the declaration of an operation.  global_attention is not registered, because it calls attention."""
    text = "q [..., h, d], k [..., K, d], v [..., K, e], mask [..., K]"
    return op.declared or register(shapes=text, gradients="q k v")


def operands(op: Op[..., Any]) -> dict[str, Any]:
    """Return the operands of the definition with their axes, by name."""
    declared = declaration(op)
    text = (declared.caller_shapes if declared.adapter else None) or declared.shapes
    shapes = Shapes(text, list(inspect.signature(op.definition).parameters))
    return {operand.name: operand for operand in shapes.operands}


def differentiable(op: Op[..., Any]) -> list[str]:
    """List the operands that have a gradient, by name."""
    return [*declaration(op).gradients.split(), declaration(op).residual]


def space(op: Op[..., Any]) -> dict[str, Values]:
    """Return the values of each setting of an operation's cases."""
    found: dict[str, Values] = {}
    declared, hints = operands(op), get_type_hints(op.definition)
    for name, hint in hints.items():
        if hint in (Tensor | None, Factors | None):
            found[f"with_{name}"] = (True, False)
        elif hint is bool:
            found[name] = (False, True)
    for name, operand in declared.items():
        if operand.leading:
            many = len(operand.axes) > 1
            found.setdefault("lead", ((), (2,), (2, 2)) if many else POSITIONS)
            if "mask" not in name and not operand.expands:
                found[f"{name}_order"] = SMALL_ORDERS
        for axis in operand.axes:
            if not axis.isdigit() and " " not in axis:
                found.setdefault(axis, (16, 5, 24, 3, 1))
    if differentiable(op) != [""]:
        found["grad_order"] = ("plain", "sliced", "turned")
    special = SPACES.get(op.name, {})
    return {name: of for name, of in found.items() if name not in special} | special


def completed(op: Op[..., Any], settings: Mapping[str, Any]) -> Settings:
    """Add the first values of missing settings, and the settings that follow from others."""
    values = space(op)
    found = {name: settings.get(name, of[0]) for name, of in values.items() if not callable(of)}
    for name, of in values.items():
        if callable(of):
            found[name] = of(found)
    return dict(settings) | found


def covering(op: Op[..., Any]) -> list[Settings]:
    """Choose as few cases as contain every value of every setting.  Tuples of values are shuffled."""
    values = {name: of for name, of in space(op).items() if not callable(of)}
    count = max(map(len, values.values()))
    columns = {}
    for name, of in values.items():
        columns[name] = [of[i % len(of)] for i in range(count)]
        if isinstance(of, tuple):
            random.Random(f"{op.name} {name}").shuffle(columns[name])
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def drawn_settings(op: Op[..., Any]) -> st.SearchStrategy[Settings]:
    """Draw the settings of a small case: any sizes up to 9, and listed values of the others."""
    parameters = inspect.signature(op.definition).parameters
    strategies: dict[str, st.SearchStrategy[Any]] = {}
    for name, of in space(op).items():
        if callable(of):
            continue
        if name == "lead":
            shortest, longest = min(map(len, of)), min(4, max(map(len, of)))
            strategies[name] = st.lists(st.integers(1, 9), min_size=shortest, max_size=longest).map(tuple)
        elif name not in parameters and all(type(value) is int for value in of):
            # A norm of a single channel is 0.
            strategies[name] = st.integers(min(2 if name == "c" else 1, *of), 9) if len(of) > 1 else st.integers(0, 8)
        else:
            strategies[name] = st.sampled_from(of)
    return st.fixed_dictionaries(strategies)


class Draw:
    """Draws random tensors in fp64 with a given memory order."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, order: str = "plain") -> Tensor:
        """Draw normal numbers; order: see `ORDERS`."""
        n = len(shape)
        axes, pad = list(range(n)), {"sliced": 8, "sliced turned": 3}.get(order, 0)
        if "turned" in order and n > 2:
            axes[-3], axes[-2] = axes[-2], axes[-3]
        if order == "front":
            axes = [n - 1, *axes[:-1]]
        if order == "far" and n > 1:
            axes = [n - 2, *axes[:-2], n - 1]
        if order == "mixed":
            axes = [*reversed(axes[:-1]), n - 1]
        if order == "planes" and n > 2:
            axes, pad = [*axes[:-3], n - 1, n - 3, n - 2], 3
        if order == "heads":
            axes, pad = [*axes[:-3], n - 2, n - 1, n - 3], 3
        sizes = [shape[axis] + (pad if axis == axes[-1] else 0) for axis in axes]
        values = torch.randn(sizes, dtype=torch.float64, generator=self.generator)
        return (values.narrow(-1, 0, sizes[-1] - pad) if pad else values).permute([axes.index(i) for i in range(n)])

    def mask(self, *shape: int, share: float = 0.75) -> Tensor:
        """Draw zeros and ones, with zeros in the whole last row."""
        mask = (torch.rand(*shape, dtype=torch.float64, generator=self.generator) < share).double()
        if len(shape) > 1:
            mask[..., -1, :] = 0
        return mask


def within(values: Tensor, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Convert values to a dtype with the same strides, inside a buffer of NaN."""
    if not values.is_floating_point():
        return values.to(device)
    span = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, values.stride()))
    buffer = torch.full((GUARD + span + GUARD,), math.nan, dtype=dtype, device=device)
    return buffer.as_strided(values.shape, values.stride(), GUARD).copy_(values)


def shapes_of(op: Op[..., Any], s: Settings) -> dict[str, Shape]:
    """Return the shape of each operand that is present."""
    found = {}
    for name, operand in operands(op).items():
        if s.get(f"with_{name}", True):
            axes = (math.prod(int(n) if n.isdigit() else s[n] for n in axis.split()) for axis in operand.axes)
            found[name] = s.get(f"{name}_shape") or (*(s["lead"] if operand.leading else ()), *axes)
    return found


def _factors(draw: Draw, shape: Shape, kind: str, dtype: torch.dtype, device: str) -> Factors:
    """Draw dropout factors, or describe factors that the operation draws, perhaps those of a slice."""
    if kind == GIVEN:
        return within(1.25 * (draw(*shape) > -0.5).double(), dtype, device)
    noise = Noise().to(device)
    noise.seed(1)
    whole = (*shape[:-1], 2 * shape[-1]) if kind == "slice" else shape
    found = noise.factors(whole, 0.25, 3, torch.empty((), dtype=dtype, device=device))
    return found.narrow(-1, shape[-1], shape[-1]) if kind == "slice" else found


def _finish_atoms(t: dict[str, Any], s: Settings, draw: Draw) -> None:
    """Make residues of 14 atoms in two chains: one number twice, one chain in descending order, two equal positions."""
    residues = s["residues"]
    t["atoms"] = 2 * draw(s["n"], 3)
    t["atoms"][s["n"] // 2] = t["atoms"][0]
    t["radius"], t["exists"] = 1.6 + 0.2 * draw(s["n"]), draw.mask(s["n"], share=0.85)
    t["index"] = torch.tensor([3, 4, 4, 5, 9, 8] * residues)[:residues].repeat_interleave(14)
    t["order"] = torch.arange(residues).repeat_interleave(14) if s["every_pair"] else t["index"]
    t["chain"] = torch.tensor([1, 1, 1, 1, 2, 2] * residues)[:residues].repeat_interleave(14)
    t["slot"] = torch.arange(14).repeat(residues)


def _finish_attention(t: dict[str, Any], s: Settings, draw: Draw) -> None:
    keys = t["mask"].shape[-1]
    if s["masked"] == "clear":
        t["mask"].fill_(1)
    if s["masked"] == "tail":  # padding of a different length in each row
        lengths = torch.randint(1, keys + 1, (*s["lead"], 1), generator=draw.generator)
        t["mask"] = (torch.arange(keys) < lengths).double()


def _finish_adam(t: dict[str, Any], s: Settings, draw: Draw) -> None:
    """Make buffers in the middle of a run."""
    t["moment1"], t["moment2"] = t["moment1"] * 0.1, t["moment2"].square() * 0.01
    t["packed"] = None if t["packed"] is None else t["weights"].float().to(s["packed"])
    t["used"], t["steps"] = torch.tensor(True), torch.tensor(float(s["steps"]))
    t["scale"], t["rate"] = (torch.tensor(x, dtype=torch.float64) for x in (0.25, 1e-2))


def _finish_norm(t: dict[str, Any], s: Settings, draw: Draw) -> None:
    t["x"] += s.get("mean", 0.0)
    t["x"][(slice(1),) * (t["x"].dim() - 1)] = s.get("mean", 0.0) + 0.5  # nothing but its mean


def _finish_product(t: dict[str, Any], s: Settings, draw: Draw) -> None:
    """Make factors that are 0 where their masks are, and some counts of 0."""
    t["a"] *= t["a_mask"][..., None]
    t["b"] *= t["b_mask"][..., None]
    t["a_mask"][..., 0], t["b_mask"][..., -1] = 0, 0  # where factors are not 0


def _finish_transition(t: dict[str, Any], s: Settings, draw: Draw) -> None:
    if s["activation"] == "relu" and t["up_bias"] is not None:
        t["up_bias"] += 5 * t["up_bias"].sign()  # at 0 rounding could flip gradients


# What the values of an operation's operands must be besides random numbers.
FINISHES: dict[str, Callable[[dict[str, Any], Settings, Draw], object]] = {
    "adam_step": _finish_adam,
    "attention": _finish_attention,
    # The second word has more than 32 bits.
    "dropout_factors": lambda t, s, draw: t.update(key=torch.tensor([0xF0E1D2C3, 0xFFFFFFFF + 5 * 0x85EBCA6B])),
    "layer_norm": _finish_norm,
    "norm_linear": _finish_norm,
    "outer_product": _finish_product,
    "outer_product_mean": lambda t, s, draw: t["mask"][..., 0].zero_(),
    "overlaps": _finish_atoms,
    "transition": _finish_transition,
}


@dataclass
class Call:
    """An operation, its arguments by name on the device that computes, and a gradient of the output."""

    op: Op[..., Any]
    given: dict[str, Any]
    grad: Tensor | None
    settings: Settings

    @property
    def args(self) -> list[Any]:
        """The arguments in order."""
        return list(self.given.values())

    @property
    def wanted(self) -> list[str]:
        """The names of the arguments that require a gradient."""
        return [name for name, t in self.given.items() if isinstance(t, Tensor) and t.requires_grad]

    def answers(self, way: Callable[..., Any]) -> dict[str, Tensor]:
        """Compute the output "out" by a function, and the gradients of the arguments that require one.

        For an operation in place: the operands that it changes.
        """
        if declaration(self.op).mutates:
            return self._changed(way, self.given)
        if self.grad is None:
            return {"out": way(*self.args)}
        return dict(zip(("out", *self.wanted), answer(way, self.args, self.grad)))

    def _changed(self, way: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Tensor]:
        own = {name: within(t, t.dtype, str(t.device)) if isinstance(t, Tensor) else t for name, t in given.items()}
        way(*own.values())
        changed = {name: own[name] for name in declaration(self.op).mutates.split() if own[name] is not None}
        for name, t in changed.items():
            buffer = t.as_strided((GUARD + t.numel() + GUARD,), (1,), 0)
            assert buffer[:GUARD].isnan().all(), f"{name}: written before its beginning"
            assert buffer[-GUARD:].isnan().all(), f"{name}: written past its end"
        # A fast path may overwrite the gradient.
        return {name: t for name, t in changed.items() if name != "gradient"}

    def mistakes(self, found: dict[str, Tensor] | None = None) -> list[str]:
        """List errors (check/checks.py) of results and their strides; found None: of those of the fast path."""
        ours = self.answers(self.op.fast) if found is None else found
        if declaration(self.op).mutates:
            wrong = self._mistakes_in_place(ours)
        elif self.grad is None:
            right = self.op.definition(*(t.cpu() if isinstance(t, Tensor) else t for t in self.args))
            wrong = [] if torch.equal(ours["out"].cpu(), right) else ["the output differs from that of a CPU"]
        else:
            true = truth(self.op.definition, self.args, self.grad, self.wanted)
            wrong = [str(error) for error in true.errors(list(ours.values())) if error.red]
            wrong += self._misplaced(ours["out"])
        return [f"{self.op.name} {self.settings}: {line}" for line in wrong]

    def _mistakes_in_place(self, ours: dict[str, Tensor]) -> list[str]:
        mutated = declaration(self.op).mutates.split()
        wide = {n: t.double() if n in mutated and t is not None else t for n, t in self.given.items()}
        exact, draws = self._changed(self.op.definition, wide), []
        for seed in range(DRAWS):
            with Jitter(seed):
                draws.append(self._changed(self.op.definition, self.given))
        errors = []
        for name, right in exact.items():
            off = [(float((d[name] - right).norm()), float((d[name] - right).abs().max())) for d in draws]
            errors.append(compare(name, ours[name], right, off, draws[0][name].dtype))
        return [str(error) for error in errors if error.red]

    def _misplaced(self, out: Tensor) -> list[str]:
        """List deviations of the output's strides from those that are declared."""
        first = self.args[0].detach()
        like = [empty_like(first).stride()] if "layout of x" in str(self.op.__doc__) else []
        with torch.no_grad(), interpreting() if out.is_cuda else nullcontext():
            like.append(self.op.fast(*map(to_meta, self.args)).stride())
        return [f"the output has strides {out.stride()}, not {right}" for right in like if out.stride() != right]


def to_meta(x: Any) -> Any:
    """Return an argument with the same strides on the device "meta"."""
    if isinstance(x, DropoutFactors):
        return replace(x, key=x.key.to("meta"))
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def made(name: str, dtype: torch.dtype, device: str = "cpu", /, **settings: Any) -> Call:
    """Make a call of an operation in a dtype on a device; settings: those that differ from the first values."""
    op = operations()[name]
    s, draw, declared = completed(op, settings), Draw(), operands(op)
    shapes = shapes_of(op, s)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dtype = wide if name in WIDE else dtype
    values: dict[str, Any] = {}
    for parameter, of in inspect.signature(op.definition).parameters.items():
        shape = shapes.get(parameter)
        if shape is None:
            values[parameter] = None if parameter in declared else s.get(parameter, of.default)
            if parameter == "dtype":
                values[parameter] = dtype
        elif parameter == "factors":
            values[parameter] = _factors(draw, shape, s["with_factors"], dtype, device)
        else:
            order = s.get(f"{parameter}_order", "plain")
            values[parameter] = _values(draw, parameter, declared[parameter], shape, order)
    if name in FINISHES:
        FINISHES[name](values, s, draw)
    given: dict[str, Any] = {}
    for parameter, value in values.items():
        if isinstance(value, Tensor) and parameter != "factors":
            activation = declared[parameter].leading and "mask" not in parameter
            chosen = dtype if activation else wide if value.dtype == torch.float64 else value.dtype
            value = within(value, chosen, device)
            if s.get(f"{parameter}_order") == "shared":
                value = value[(slice(1),) * len(s["lead"])].expand(value.shape)
            value.requires_grad_(parameter in differentiable(op))
        given[parameter] = value
    return placed(op, given, s)


def placed(
    op: Op[..., Any], given: dict[str, Any], settings: Settings | None = None, grad: Tensor | None = None
) -> Call:
    """Make the call of these arguments.  grad: the gradient of the output, or None for a random one."""
    s = settings or {}
    if differentiable(op) == [""]:
        return Call(op, given, None, s)
    first = next(iter(given.values()))
    if grad is None:
        with torch.no_grad():
            shape = op.definition(*(to_meta(None if name == "factors" else t) for name, t in given.items())).shape
        order = s.get("grad_order", "plain")
        grad = within(Draw(1)(*shape, order=order), first.dtype, str(first.device))
        grad = grad[(slice(1),) * len(s["lead"])].expand(shape) if order == "shared" else grad
    return Call(op, given, grad, s)


def _values(draw: Draw, name: str, operand: Any, shape: Shape, order: str) -> Tensor:
    """Draw an operand by its name and its axes."""
    if "mask" in name:
        mask = draw.mask(*shape)
        return mask.mT.contiguous().mT if order == "turned" else mask.bool() if name == "pair_mask" else mask
    if operand.axes[-2:-1] == ("h",) and len(operand.axes) == 3:
        return draw(*shape[:-2], math.prod(shape[-2:]), order=order).unflatten(-1, shape[-2:])  # slices of a projection
    values = draw(*shape, order=order)
    if not operand.leading and len(shape) == 2:
        return values * shape[-1] ** -0.5  # preserves the scale of its operand
    return 1 + 0.3 * values if len(shape) == 1 and name.endswith("weight") else values


@contextmanager
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill new tensors with NaN within the context, and check at its end that the NaNs around them are unchanged."""
    buffers: list[tuple[Tensor, int]] = []
    plain = Tensor.new_empty

    def new_empty(self: Tensor, *size: int | Sequence[int], **options: torch.dtype) -> Tensor:
        t = plain(self, *size, **options)
        if not t.is_floating_point() or t.device.type == "meta":
            return t
        count = t.numel()
        buffer = torch.full((GUARD + count + GUARD,), math.nan, dtype=t.dtype, device=t.device)
        buffers.append((buffer, count))
        return buffer[GUARD : GUARD + count].view(t.shape)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "new_empty", new_empty)
        yield
    assert buffers, "no kernel ran"
    for buffer, count in buffers:
        assert buffer[:GUARD].isnan().all(), "written before the beginning of a tensor"
        assert buffer[GUARD + count :].isnan().all(), "written past the end of a tensor"


CASES: dict[str, tuple[str, Settings]] = {
    f"{name} {i}": (name, settings) for name, op in operations().items() for i, settings in enumerate(covering(op))
}


def case(name: str, dtype: torch.dtype, device: str = "cpu") -> Call:
    """Make the generated call of this name."""
    op, settings = CASES[name]
    return made(op, dtype, device, **settings)


# The first and the last case of each operation.
FEW = [name for name, (op, _) in CASES.items() if name in (f"{op} 0", f"{op} {len(covering(operations()[op])) - 1}")]
# Calls that a recipe repeats, unlike draws, and one tensor as two arguments.
REPEATED = [
    name
    for name in (*FEW, "gated_attention 2")
    if CASES[name][0] != "dropout_factors"
    and CASES[name][1].get("with_factors") not in ("drawn", "slice")
    and CASES[name][1].get("every_pair", True)
]
