"""Perceptrons of plain torch, whatever their class is called: known by what their forward computes.

    [x +] down(relu(up(norm(x))))         [x +] down(silu(gate(norm(x))) * value(norm(x)))

gate and value may be the halves of one projection.  A module whose parts could be such a perceptron's is traced
(torch.fx: symbols go through its forward, and nothing is computed), and what comes out is compared with these formulas.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError

from warpfold.adapt.adapter import Adapter, LinearOf, NormOf, NotServed, RandomInputs, StackedOf, made_of
from warpfold.model.attention import Transition
from warpfold.model.execution import Executable

PARTS = (nn.LayerNorm, nn.Linear, nn.ReLU, nn.SiLU, nn.Dropout, nn.Identity)
MOST = 8  # parts
# What a function, a method or a module without parameters is called in a formula.
CALLED: Mapping[Any, str] = {
    **dict.fromkeys((torch.relu, F.relu, "relu", nn.ReLU), "relu"),
    **dict.fromkeys((F.silu, nn.SiLU), "silu"),
    **dict.fromkeys((operator.mul, torch.mul, "mul"), "mul"),
    **dict.fromkeys((operator.add, torch.add, "add"), "add"),
    **dict.fromkeys((torch.chunk, "chunk"), "chunk"),
    operator.getitem: "item",
}
Formula = tuple[Any, ...]


@dataclass(frozen=True)
class Parts:
    """What a perceptron is made of.  up: one projection; or of gate and value, which may be halves (0, 1) of one."""

    norm: nn.Module
    up: tuple[tuple[nn.Module, int | None], ...]
    down: nn.Module
    residual: bool


class PerceptronLayer(Executable):
    """A perceptron, with x added or not."""

    of: nn.Module
    transition: Transition
    residual: bool


class PlainPerceptron(Adapter):
    """Norm and perceptron, with ReLU or SwiGLU."""

    serves = ("torch.nn.modules.module:Module",)
    operation = "transition"
    plain = True

    def knows(self, module: nn.Module) -> bool:
        return parts_of(module) is not None

    def build(self, module: nn.Module) -> Executable:
        """Return our layer, of what the module's forward computes.  Errors: NotServed for another formula."""
        parts = parts_of(module)
        if parts is None:
            raise NotServed("it is no perceptron any more")
        ups = [self._projection(linear, half) for linear, half in parts.up]
        if len(ups) == 2 and parts.up[0][0] is parts.up[1][0] and parts.up[0][1] == 0:
            ups = [LinearOf(parts.up[0][0])]  # as it lies
        up = ups[0] if len(ups) == 1 else StackedOf(*ups)
        kind, norm, down = "swiglu" if len(parts.up) == 2 else "relu", NormOf(parts.norm), LinearOf(parts.down)
        transition = made_of(Transition, activation=kind, norm=norm, up=up, down=down)
        return made_of(PerceptronLayer, of=module, transition=transition, residual=parts.residual)

    @staticmethod
    def _projection(linear: nn.Module, half: int | None) -> LinearOf:
        if half is None:
            return LinearOf(linear)
        assert isinstance(linear, nn.Linear)
        outputs = linear.out_features // 2
        return LinearOf(linear, slice(half * outputs, (half + 1) * outputs))

    def forward(self, layer: PerceptronLayer, *args: Any, **kwargs: Any) -> Tensor:
        """Return the perceptron of x.  Errors: NotServed for more arguments than x, and for dropout in training."""
        given = [x for x in (*args, *kwargs.values()) if x is not None]
        if len(given) != 1 or not isinstance(given[0], Tensor):
            raise NotServed("more than one argument")
        if any(isinstance(part, nn.Dropout) and part.training and part.p for part in layer.of.children()):
            raise NotServed("dropout in training")
        x = given[0]
        with layer.computing():
            step = self.renew if layer.residual else self.update
            return step(layer.transition, x, x[..., 0])

    def example(self, module: nn.Module, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        parts = parts_of(module)
        assert parts is not None
        assert isinstance(parts.norm, nn.LayerNorm)
        return (random(n, n, *parts.norm.normalized_shape),), {}


def parts_of(module: nn.Module) -> Parts | None:
    """Return what a module is made of if it computes one of the formulas, or None."""
    parts = list(module.children())
    counts = [sum(isinstance(part, kind) for part in parts) for kind in (nn.LayerNorm, nn.Linear)]
    if len(parts) > MOST or counts[0] != 1 or counts[1] not in (2, 3) or not all(type(p) in PARTS for p in parts):
        return None
    if vars(module)["_parameters"] or "forward" in vars(module):
        return None
    try:
        graph = fx.symbolic_trace(module).graph
    except (
        TraceError,
        TypeError,
        ValueError,
        RuntimeError,
        AttributeError,
        LookupError,
    ):  # whatever it needs a number for
        return None
    return _parts(_formula(module, graph))


def _formula(module: nn.Module, graph: fx.Graph) -> Formula:
    """Return what a graph computes, as a tree: (name, ...); "?" for what has no name here."""
    known: dict[fx.Node, Any] = {}

    def value(x: Any) -> Any:
        return known.get(x, ("?",)) if isinstance(x, fx.Node) else x

    first = True
    for node in graph.nodes:
        args = tuple(value(x) for x in (*node.args, *node.kwargs.values()))
        if node.op == "placeholder":
            known[node] = ("x",) if first else ("?",)
            first = False
        elif node.op == "call_module":
            part = module.get_submodule(str(node.target))
            if isinstance(part, nn.LayerNorm | nn.Linear):
                known[node] = ("norm" if isinstance(part, nn.LayerNorm) else "linear", part, *args)
            elif isinstance(part, nn.Dropout | nn.Identity):
                known[node] = args[0]
            else:
                known[node] = (CALLED.get(type(part), "?"), *args)
        elif node.op == "output":
            return args[0] if isinstance(args[0], tuple) else ("?",)
        else:
            known[node] = (CALLED.get(node.target, "?"), *args)
    return ("?",)


def _parts(formula: Formula) -> Parts | None:
    """Return the parts of a formula that is known."""
    residual = formula[0] == "add" and len(formula) == 3 and ("x",) in formula[1:]
    if residual:
        formula = formula[2] if formula[1] == ("x",) else formula[1]
    if formula[0] != "linear" or len(formula) != 3:
        return None
    _, down, hidden = formula
    if hidden[0] == "relu" and len(hidden) in (2, 3):  # F.relu also has `inplace`
        ups = [hidden[1]]
    elif hidden[0] == "mul" and len(hidden) == 3 and "silu" in (hidden[1][0], hidden[2][0]):
        gate, rest = (hidden[1], hidden[2]) if hidden[1][0] == "silu" else (hidden[2], hidden[1])
        ups = [gate[1], rest]
    else:
        return None
    found = [_projected(up) for up in ups]
    norms = {norm for _, _, norm in found if norm is not None}
    if len(norms) != 1 or any(norm is None for _, _, norm in found):
        return None
    halves = [half for _, half, _ in found]
    if halves not in ([None], [None, None]) and (found[0][0] is not found[1][0] or set(halves) != {0, 1}):
        return None
    up = tuple((linear, half) for linear, half, _ in found if linear is not None)
    return Parts(norms.pop(), up, down, residual)


def _projected(up: Formula) -> tuple[nn.Module | None, int | None, nn.Module | None]:
    """Return the projection that a formula is, which half of it, and of which norm of x; None for what it is not."""
    half = None
    if up[0] == "item" and len(up) == 3 and up[1][0] == "chunk" and up[1][2:] in ((2, -1),) and up[2] in (0, 1):
        up, half = up[1][1], up[2]
    if up[0] == "linear" and len(up) == 3 and up[2][:1] == ("norm",) and up[2][2:] == (("x",),):
        return up[1], half, up[2][1]
    return None, None, None
