"""Layers of plain torch: normalisation and perceptrons; and attention whose bias needs a gradient.

These layers are swapped only if `only=` names them, or if `verify="speed"` measures that ours are faster or smaller on
this device.  Normalisation has a faster backward pass on a CPU.  Perceptrons keep no hidden layer: they need a tenth to
a fifth of the memory, and a GPU does not have to write and read four to eight times their input.  `biased_attention`
never holds all logits, whereas torch has no fused backward pass for such a bias.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError
from torch.overrides import TorchFunctionMode

from warpfold.adapt.adapter import Adapter, LinearOf, NormOf, NotServed, RandomInputs, StackedOf, made_of
from warpfold.model.axial import Executable
from warpfold.model.evoformer import Transition
from warpfold.ops.attention import attention


class LoneNorm(Executable):
    """A layer normalisation."""

    norm: NormOf


class PlainNorm(Adapter):
    """nn.LayerNorm over the last axis."""

    serves = ("torch.nn.modules.normalization:LayerNorm",)
    signature = "(self, input)"
    operation = "layer_norm"
    plain = True

    def build(self, module: nn.Module) -> Executable:
        if len(module.normalized_shape) != 1:  # type: ignore[arg-type]
            raise NotServed("it normalises several axes together")
        return made_of(LoneNorm, norm=NormOf(module))

    def forward(self, layer: LoneNorm, input: Tensor) -> Tensor:
        on = torch.is_autocast_enabled(input.device.type)  # under which torch normalises in fp32
        with layer.computing():
            return layer.norm(input.float() if on and input.dtype.itemsize < 4 else input)

    def example(self, module: nn.Module, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert isinstance(module, nn.LayerNorm)
        return (random(n, n, *module.normalized_shape),), {}


class BiasedAttention(TorchFunctionMode):
    """Within it, F.scaled_dot_product_attention is computed by us where its bias wants a gradient."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return scaled_dot_product_attention(*args, **kwargs)
        return func(*args, **kwargs)


def biased_attention() -> BiasedAttention:
    """Return a context within which attention with a bias that wants a gradient never holds all its logits.

        with warpfold.biased_attention():
            loss = model(batch)
        loss.backward()

    It is F.scaled_dot_product_attention that is replaced, for calls in this thread; calls without such a bias, and
    those that we do not serve (dropout, causal, grouped heads), are torch's own.
    """
    return BiasedAttention()


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call torch's function of this name, or compute it ourselves where the bias wants a gradient.

    query [B, h, Q, d], key, value [B, h, K, d], attn_mask [(B or 1,) (h or 1,) Q, K], added to the logits.
    """
    wants = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
    if not wants or dropout_p or is_causal or enable_gqa or query.dim() != 4 or attn_mask is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if scale is not None:
        query = query * (scale * query.shape[-1] ** 0.5)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    bias = attn_mask.expand(*attn_mask.shape[:-2], query.shape[-2], key.shape[-2])
    mask = q.new_ones(()).expand(k.shape[:2])
    if bias.dim() == 4 and bias.shape[0] != 1:  # each example has a bias of its own
        q, k, v, mask, bias = q[:, None], k[:, None], v[:, None], mask[:, None], bias[:, None]
    elif bias.dim() == 4:
        bias = bias[0]
    o = attention(q, k, v, mask, bias.to(q.dtype))
    return (o.squeeze(1) if o.dim() == 5 else o).transpose(1, 2)


# Perceptrons, whatever their class is called, known by what their forward computes:
#
#     [x +] down(relu(up(norm(x))))         [x +] down(silu(gate(norm(x))) * value(norm(x)))
#
# gate and value may be the halves of one projection.  A module whose parts could be such a perceptron's is traced
# (torch.fx: symbols go through its forward, and nothing is computed), and what comes out is compared with the formulas.

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
    """Return the parts of a module that computes one of the formulas, or None."""
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
    """Return a graph's computation as a tree: (name, ...); "?" where it has no name here."""
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
