"""Layers of plain torch: normalisation, perceptrons, and attention with a bias that requires a gradient.

Normalisation and perceptrons are swapped only if `only=` names them, or if `verify="speed"` measures that ours are
faster or smaller on this device. Our normalisation has a faster backward pass on a CPU. Our perceptrons do not save the
hidden layer: they need a tenth to a fifth of the memory, and a GPU need not write and read four to eight times the
input. `biased_attention` never holds all logits, while torch has no fused backward pass for such a bias.
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

from warpfold.adapt.adapter import Adapter, ForeignLinear, ForeignNorm, NotServed, RandomInputs, StackedLinear, assemble
from warpfold.model.axial import Executable
from warpfold.model.evoformer import Transition
from warpfold.ops.attention import attention


class NormLayer(Executable):
    """A layer normalisation."""

    norm: ForeignNorm


class PlainNorm(Adapter):
    """nn.LayerNorm over the last axis."""

    serves = ("torch.nn.modules.normalization:LayerNorm",)
    signature = "(self, input)"
    operation = "layer_norm"
    plain = True

    def build(self, module: nn.Module) -> Executable:
        if len(module.normalized_shape) != 1:  # type: ignore[arg-type]
            raise NotServed("it normalises several axes together")
        return assemble(NormLayer, norm=ForeignNorm(module))

    def forward(self, layer: NormLayer, input: Tensor) -> Tensor:
        # Under autocast torch normalises in fp32.
        is_autocast = torch.is_autocast_enabled(input.device.type)
        with layer.computing():
            return layer.norm(input.float() if is_autocast and input.dtype.itemsize < 4 else input)

    def example(self, module: nn.Module, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert isinstance(module, nn.LayerNorm)
        return (random(n, n, *module.normalized_shape),), {}


class BiasedAttention(TorchFunctionMode):
    """Compute F.scaled_dot_product_attention with our attention if its bias requires a gradient."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return scaled_dot_product_attention(*args, **kwargs)
        return func(*args, **kwargs)


def biased_attention() -> BiasedAttention:
    """Return a context in which attention with a bias that requires a gradient never holds all its logits.

        with warpfold.biased_attention():
            loss = model(batch)
        loss.backward()

    The context replaces F.scaled_dot_product_attention for calls in this thread. Torch computes calls without such a
    bias, and calls with dropout, a causal mask or grouped heads.
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
    """Compute torch's function of this name with our attention if the bias requires a gradient.

    query: [B, h, Q, d]; key, value: [B, h, K, d]; attn_mask: [(B or 1,) (h or 1,) Q, K], added to the logits.
    """
    needs_gradient = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
    if not needs_gradient or dropout_p or is_causal or enable_gqa or query.dim() != 4 or attn_mask is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if scale is not None:
        query = query * (scale * query.shape[-1] ** 0.5)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    bias = attn_mask.expand(*attn_mask.shape[:-2], query.shape[-2], key.shape[-2])
    mask = q.new_ones(()).expand(k.shape[:2])
    # Each example has its own bias.
    if bias.dim() == 4 and bias.shape[0] != 1:
        q, k, v, mask, bias = q[:, None], k[:, None], v[:, None], mask[:, None], bias[:, None]
    elif bias.dim() == 4:
        bias = bias[0]
    o = attention(q, k, v, mask, bias.to(q.dtype))
    return (o.squeeze(1) if o.dim() == 5 else o).transpose(1, 2)


# Perceptrons of any class, recognised by the formula of their forward:
#
#     [x +] down(relu(up(norm(x))))         [x +] down(silu(gate(norm(x))) * value(norm(x)))
#
# gate and value may be the halves of one projection. A module with suitable submodules is traced with torch.fx, and the
# graph is compared with these formulas.

PARTS = (nn.LayerNorm, nn.Linear, nn.ReLU, nn.SiLU, nn.Dropout, nn.Identity)
MAX_PARTS = 8
# The names of functions, methods and modules without parameters in a formula.
FORMULA_NAMES: Mapping[Any, str] = {
    **dict.fromkeys((torch.relu, F.relu, "relu", nn.ReLU), "relu"),
    **dict.fromkeys((F.silu, nn.SiLU), "silu"),
    **dict.fromkeys((operator.mul, torch.mul, "mul"), "mul"),
    **dict.fromkeys((operator.add, torch.add, "add"), "add"),
    **dict.fromkeys((torch.chunk, "chunk"), "chunk"),
    operator.getitem: "item",
}
Formula = tuple[Any, ...]


@dataclass(frozen=True)
class PerceptronParts:
    """The parts of a perceptron.

    up: one projection, or those of gate and value, each with the half (0 or 1) of the projection that it is, or None.
    """

    norm: nn.Module
    up: tuple[tuple[nn.Module, int | None], ...]
    down: nn.Module
    residual: bool


class PerceptronLayer(Executable):
    """A perceptron. residual: whether its forward adds x."""

    of: nn.Module
    transition: Transition
    residual: bool


class PlainPerceptron(Adapter):
    """Norm and perceptron, with ReLU or SwiGLU."""

    serves = ("torch.nn.modules.module:Module",)
    operation = "transition"
    plain = True

    def knows(self, module: nn.Module) -> bool:
        return perceptron_parts(module) is not None

    def build(self, module: nn.Module) -> Executable:
        """Build our layer from the formula of the module's forward. Raises NotServed for any other formula."""
        parts = perceptron_parts(module)
        if parts is None:
            raise NotServed("its forward no longer matches a known formula")
        ups = [self._projection(linear, half) for linear, half in parts.up]
        if len(ups) == 2 and parts.up[0][0] is parts.up[1][0] and parts.up[0][1] == 0:
            # The whole projection has the layout of ours.
            ups = [ForeignLinear(parts.up[0][0])]
        up = ups[0] if len(ups) == 1 else StackedLinear(*ups)
        activation = "swiglu" if len(parts.up) == 2 else "relu"
        norm, down = ForeignNorm(parts.norm), ForeignLinear(parts.down)
        transition = assemble(Transition, activation=activation, norm=norm, up=up, down=down)
        return assemble(PerceptronLayer, of=module, transition=transition, residual=parts.residual)

    @staticmethod
    def _projection(linear: nn.Module, half: int | None) -> ForeignLinear:
        if half is None:
            return ForeignLinear(linear)
        assert isinstance(linear, nn.Linear)
        outputs = linear.out_features // 2
        return ForeignLinear(linear, slice(half * outputs, (half + 1) * outputs))

    def forward(self, layer: PerceptronLayer, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the perceptron of x. Raises NotServed for further arguments, and for dropout in training."""
        arguments = [x for x in (*args, *kwargs.values()) if x is not None]
        if len(arguments) != 1 or not isinstance(arguments[0], Tensor):
            raise NotServed("more than one argument")
        if any(isinstance(part, nn.Dropout) and part.training and part.p for part in layer.of.children()):
            raise NotServed("dropout in training")
        x = arguments[0]
        with layer.computing():
            step = self.add_update if layer.residual else self.update
            return step(layer.transition, x, x[..., 0])

    def example(self, module: nn.Module, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        parts = perceptron_parts(module)
        assert parts is not None
        assert isinstance(parts.norm, nn.LayerNorm)
        return (random(n, n, *parts.norm.normalized_shape),), {}


def perceptron_parts(module: nn.Module) -> PerceptronParts | None:
    """Return the parts of a module that computes one of the formulas, or None for other modules."""
    parts = list(module.children())
    counts = [sum(isinstance(part, kind) for part in parts) for kind in (nn.LayerNorm, nn.Linear)]
    if len(parts) > MAX_PARTS or counts[0] != 1 or counts[1] not in (2, 3) or not all(type(p) in PARTS for p in parts):
        return None
    if vars(module)["_parameters"] or "forward" in vars(module):
        return None
    try:
        graph = fx.symbolic_trace(module).graph
    # Tracing fails where the forward needs a number.
    except (TraceError, TypeError, ValueError, RuntimeError, AttributeError, LookupError):
        return None
    return _match(_formula(module, graph))


def _formula(module: nn.Module, graph: fx.Graph) -> Formula:
    """Convert a graph to a tree of tuples (name, arguments...), with "?" for functions without a name here."""
    formulas: dict[fx.Node, Any] = {}

    def value(x: Any) -> Any:
        return formulas.get(x, ("?",)) if isinstance(x, fx.Node) else x

    first = True
    for node in graph.nodes:
        args = tuple(value(x) for x in (*node.args, *node.kwargs.values()))
        if node.op == "placeholder":
            formulas[node] = ("x",) if first else ("?",)
            first = False
        elif node.op == "call_module":
            part = module.get_submodule(str(node.target))
            if isinstance(part, nn.LayerNorm | nn.Linear):
                formulas[node] = ("norm" if isinstance(part, nn.LayerNorm) else "linear", part, *args)
            elif isinstance(part, nn.Dropout | nn.Identity):
                formulas[node] = args[0]
            else:
                formulas[node] = (FORMULA_NAMES.get(type(part), "?"), *args)
        elif node.op == "output":
            return args[0] if isinstance(args[0], tuple) else ("?",)
        else:
            formulas[node] = (FORMULA_NAMES.get(node.target, "?"), *args)
    return ("?",)


def _match(formula: Formula) -> PerceptronParts | None:
    """Return the parts of a formula of a perceptron, or None for other formulas."""
    residual = formula[0] == "add" and len(formula) == 3 and ("x",) in formula[1:]
    if residual:
        formula = formula[2] if formula[1] == ("x",) else formula[1]
    if formula[0] != "linear" or len(formula) != 3:
        return None
    _, down, hidden = formula
    # F.relu has two arguments, with `inplace`.
    if hidden[0] == "relu" and len(hidden) in (2, 3):
        ups = [hidden[1]]
    elif hidden[0] == "mul" and len(hidden) == 3 and "silu" in (hidden[1][0], hidden[2][0]):
        gate, value = (hidden[1], hidden[2]) if hidden[1][0] == "silu" else (hidden[2], hidden[1])
        ups = [gate[1], value]
    else:
        return None
    projections = [_match_projection(up) for up in ups]
    norms = {norm for _, _, norm in projections if norm is not None}
    if len(norms) != 1 or any(norm is None for _, _, norm in projections):
        return None
    halves = [half for _, half, _ in projections]
    if halves not in ([None], [None, None]) and (projections[0][0] is not projections[1][0] or set(halves) != {0, 1}):
        return None
    up = tuple((linear, half) for linear, half, _ in projections if linear is not None)
    return PerceptronParts(norms.pop(), up, down, residual)


def _match_projection(up: Formula) -> tuple[nn.Module | None, int | None, nn.Module | None]:
    """Return the projection of a formula, the half of its outputs (None: all), and the norm of x that it projects.

    All are None for a formula that is no such projection.
    """
    half = None
    if up[0] == "item" and len(up) == 3 and up[1][0] == "chunk" and up[1][2:] in ((2, -1),) and up[2] in (0, 1):
        up, half = up[1][1], up[2]
    if up[0] == "linear" and len(up) == 3 and up[2][:1] == ("norm",) and up[2][2:] == (("x",),):
        return up[1], half, up[2][1]
    return None, None, None
