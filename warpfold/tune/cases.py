"""An operation at one size, and inputs for it with the strides that the model's layers give them.

The bench, the doctor and their checks run on these; tune/sizes.py lists them.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from warpfold.ops.attention import attention, global_attention
from warpfold.ops.dispatch import Op
from warpfold.ops.gate import gate, gated_linear_residual
from warpfold.ops.noise import DropoutFactors, Factors, Noise
from warpfold.ops.norm import layer_norm, norm_linear
from warpfold.ops.outer import outer_product
from warpfold.ops.transition import transition
from warpfold.ops.triangle import triangle_factor

Name = Literal[
    "attention", "global_attention", "layer_norm", "norm_linear", "gate", "tail", "transition", "triangle_factor",
    "outer_product",
]  # fmt: skip
OPS: Mapping[Name, Op[..., Tensor]] = {
    "attention": attention,
    "global_attention": global_attention,
    "layer_norm": layer_norm,
    "norm_linear": norm_linear,
    "gate": gate,
    "tail": gated_linear_residual,
    "transition": transition,
    "triangle_factor": triangle_factor,
    "outer_product": outer_product,
}
NAMES: tuple[Name, ...] = get_args(Name)
MASKED = 0.15  # the share of keys masked in checks, where the last row is masked throughout
DROPPED = 0.25  # the dropout rate
Argument = Tensor | DropoutFactors | None  # of an operation


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """One operation at one size: positions [rows, length], as the layer that calls it sees them.

    For an outer product, [rows, keys] are the positions of the result, and `length` the sequences that it sums over.
    """

    op: Name
    where: str  # the layer that calls it
    rows: int
    length: int  # of attention: queries
    keys: int = 0  # 0: as many as queries
    heads: int = 0
    width: int = 0  # of a head
    channels: int = 0  # of x; of a gate: of both arguments
    outputs: int = 0  # of norm_linear; of a tail: channels of o and g; of a transition: its hidden channels
    bias: bool = False  # of attention
    transposed: bool = False  # rows and positions lie in memory the other way round
    dropped: bool = False  # a tail with dropout
    drawn: bool = False  # whose factors it draws itself, from seeded noise, as in every training run
    expanded: bool = False  # a tail whose o is the same at all positions of a row, with a stride of zero
    batches: int = 1  # in which rows lie, each with a bias of its own
    full_rows: int = 0  # how many rows the model has; 0: these

    @property
    def attended(self) -> int:
        """How many keys a row has."""
        return self.keys or self.length

    @property
    def logits(self) -> int:
        """How many logits all rows and heads have together; 0 if this is not attention."""
        queries = 1 if self.op == "global_attention" else self.length
        return self.rows * self.heads * queries * self.attended

    @property
    def shape(self) -> str:
        """The size in words: "256 rows, 4 heads, 256 x 256, width 32"."""
        rows = f"{self.rows} of {self.full_rows} rows" if self.full_rows else f"{self.rows} rows"
        if self.op == "attention":
            return f"{rows}, {self.heads} heads, {self.length} x {self.attended}, width {self.width}"
        if self.op == "global_attention":
            return f"{rows}, {self.heads} heads, {self.attended} keys, width {self.width}"
        if self.op == "outer_product":
            return f"{rows}, {self.attended} columns, {self.length} sequences, {self.channels} -> {self.outputs}"
        wide = f"{self.channels} -> {self.outputs}" if self.op == "norm_linear" else f"{self.channels} channels"
        inner = f", inner {self.outputs}" if self.op in ("tail", "transition") else ""
        dropout = ", dropout drawn" if self.drawn else ", dropout" if self.dropped else ""
        return f"{rows} of {self.length}, {wide}{inner}{dropout}"

    def with_rows(self, rows: int) -> "OpCase":
        """Return the case with at most that many rows, but whole batches, and at least one; lengths stay."""
        if self.rows <= rows:
            return self
        each = self.rows // self.batches if self.batches > 1 else 1
        few = max(1, rows // each)
        batches = few if self.batches > 1 else 1
        return replace(self, rows=few * each, batches=batches, full_rows=self.full_rows or self.rows)


@dataclass(frozen=True)
class OpInputs:
    """The arguments of one call, in order, and the names of those that have a gradient."""

    case: OpCase
    args: tuple[Argument, ...]
    names: tuple[str, ...]  # of those with a gradient
    grad: Tensor  # that of the output

    @property
    def wanted(self) -> list[Tensor]:
        """The arguments with a gradient."""
        return [t for t in self.args if isinstance(t, Tensor) and t.requires_grad]


CONSTANT = ("mask", "factors", "count")  # the arguments without a gradient


def argument_names(op: Name) -> tuple[str, ...]:
    """Return the names of an operation's arguments, in order."""
    return tuple(inspect.signature(OPS[op].definition).parameters)


@dataclass
class _Draw:
    """Draw the random tensors of one case."""

    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator | None = field(init=False, default=None)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.device.type != "meta":  # it has no generator, and needs none: there are no numbers
            self.generator = torch.Generator(self.device).manual_seed(self.seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(*shape, generator=self.generator, device=self.device)
        return (x * scale).to(dtype or self.dtype)

    def parameter(self, *shape: int, mean: float = 0.0, scale: float = 0.1) -> Tensor:
        """Draw a parameter; like the model's, it stays in fp32."""
        return self.normal(*shape, scale=scale, dtype=torch.float32) + mean

    def factors(self, *shape: int, drawn: bool) -> Factors:
        """Draw dropout factors; drawn: leave it to the operation, which draws them from seeded noise."""
        if drawn:
            noise = Noise().to(self.device)
            noise.seed(self.seed)
            return noise.factors(shape, DROPPED, 0, torch.empty((), dtype=self.dtype, device=self.device))
        kept = torch.rand(*shape, generator=self.generator, device=self.device) > DROPPED
        return (kept / (1 - DROPPED)).to(self.dtype)

    def positions(self, case: OpCase, channels: int) -> Tensor:
        """Draw [rows, length, channels] or [batches, rows, ...], laid out as that layer's tensors; each position's
        numbers begin at a multiple of eight, as projections do (ops/norm.py)."""
        padded = -(-channels // 8) * 8
        rows, lead = case.rows // case.batches, ((case.batches,) if case.batches > 1 else ())
        order = (case.length, rows) if case.transposed else (rows, case.length)
        x = self.normal(*lead, *order, padded)[..., :channels]
        return x.transpose(-2, -3) if case.transposed else x

    def mask(self, case: OpCase, masked: bool) -> Tensor:
        """Return a mask of ones; masked: draw one, whose last row is zero."""
        rows, lead = case.rows // case.batches, ((case.batches,) if case.batches > 1 else ())
        shape = (*lead, case.attended, rows) if case.transposed else (*lead, rows, case.attended)
        mask = torch.ones(shape, device=self.device)
        mask = mask.mT if case.transposed else mask
        if masked:
            mask *= torch.rand(mask.shape, generator=self.generator, device=self.device) > MASKED
            mask[..., -1, :] = 0
        return mask


def inputs(
    case: OpCase, dtype: torch.dtype, device: torch.device | str, *, masked: bool = False, seed: int = 0
) -> OpInputs:
    """Draw the inputs of a case, the same each time; masked: with some keys masked, and all keys of one row."""
    draw = _Draw(dtype, torch.device(device), seed=seed)
    args = _MAKE[case.op](case, draw, masked)
    names = []
    for name, t in zip(argument_names(case.op), args):
        if isinstance(t, Tensor) and name not in CONSTANT:
            t.requires_grad_()
            names.append(name)
    with torch.no_grad():
        out = OPS[case.op].definition(*(t.to("meta") if isinstance(t, Tensor) else None for t in args))
    return OpInputs(case, args, tuple(names), draw.normal(*out.shape))


def _attention(case: OpCase, draw: _Draw, masked: bool) -> tuple[Tensor | None, ...]:
    wide, h = case.heads * case.width, case.heads
    from_z = case.bias and case.where != "msa row" and case.rows == case.length and not case.keys
    y = draw.positions(case, 4 * wide + (h if from_z else 0))
    q, k, v = (y[..., i * wide : (i + 1) * wide].unflatten(-1, (h, case.width)).detach() for i in range(3))
    if case.keys:  # other positions than the queries'
        y = draw.positions(replace(case, length=case.keys), 2 * wide)
        k, v = (y[..., i * wide : (i + 1) * wide].unflatten(-1, (h, case.width)).detach() for i in range(2))
    bias = None
    if from_z:
        bias = y[..., 4 * wide :].movedim(-1, -3)[..., None, :, :, :].detach()
    elif case.bias:
        square = replace(case, rows=case.batches * case.length)
        z = draw.positions(square, h)[..., : case.attended, :]
        if case.keys:
            z = draw.normal(*z.shape[:-2], case.keys, h)
        bias = z.movedim(-1, -3)[..., None, :, :, :].detach()
    return q, k, v, draw.mask(case, masked), bias


def _global(case: OpCase, draw: _Draw, masked: bool) -> tuple[Tensor | None, ...]:
    w = case.width  # keys, values and gates are one projection
    y = draw.positions(replace(case, length=case.attended), (2 + case.heads) * w)
    k, v = y[..., :w].detach(), y[..., w : 2 * w].detach()
    return draw.normal(*k.shape[:-2], case.heads, case.width), k, v, draw.mask(case, masked)


def _layer_norm(case: OpCase, draw: _Draw, _: bool) -> tuple[Tensor | None, ...]:
    return draw.positions(case, case.channels), draw.parameter(case.channels, mean=1.0), draw.parameter(case.channels)


def _norm_linear(case: OpCase, draw: _Draw, _: bool) -> tuple[Tensor | None, ...]:
    x, norm_weight, norm_bias = _layer_norm(case, draw, False)
    weight = draw.parameter(case.outputs, case.channels, scale=case.channels**-0.5)
    return x, norm_weight, norm_bias, weight, draw.parameter(case.outputs)


def _gate(case: OpCase, draw: _Draw, _: bool) -> tuple[Tensor | None, ...]:
    y = draw.positions(case, 2 * case.channels)  # two projections of one tensor
    return y[..., : case.channels].detach(), y[..., case.channels :].detach()


def _tail(case: OpCase, draw: _Draw, _: bool) -> tuple[Argument, ...]:
    x, o = draw.positions(case, case.channels), draw.positions(case, case.outputs)
    if case.expanded:
        o = o[..., :1, :].expand(o.shape).detach()
    g = draw.positions(case, 4 * case.outputs)[..., 3 * case.outputs :].detach()
    weight = draw.parameter(case.channels, case.outputs, scale=case.outputs**-0.5)
    factors = draw.factors(1, case.length, case.channels, drawn=case.drawn) if case.dropped else None
    return x, o, g, weight, draw.parameter(case.channels), factors


def _transition(case: OpCase, draw: _Draw, _: bool) -> tuple[Tensor | None, ...]:
    x, norm_weight, norm_bias = _layer_norm(case, draw, False)
    c, n = case.channels, case.outputs
    up = draw.parameter(n, c, scale=c**-0.5), draw.parameter(n)
    return x, norm_weight, norm_bias, *up, draw.parameter(c, n, scale=n**-0.5), draw.parameter(c)


def _factor(case: OpCase, draw: _Draw, masked: bool) -> tuple[Tensor | None, ...]:
    return *_gate(case, draw, False), draw.mask(case, masked)


def _outer(case: OpCase, draw: _Draw, _: bool) -> tuple[Tensor | None, ...]:
    s, c, z = case.length, case.channels, case.outputs
    a, b = draw.normal(s, case.rows, c), draw.normal(s, case.attended, c)
    weight = draw.parameter(z, c * c, scale=1 / c)
    count = torch.full((case.rows, case.attended, 1), s + 1e-3, device=draw.device, dtype=draw.dtype)
    return a, b, weight, draw.parameter(z), count


_MAKE: Mapping[Name, Callable[[OpCase, _Draw, bool], tuple[Argument, ...]]] = {
    "attention": _attention,
    "global_attention": _global,
    "layer_norm": _layer_norm,
    "norm_linear": _norm_linear,
    "gate": _gate,
    "tail": _tail,
    "transition": _transition,
    "triangle_factor": _factor,
    "outer_product": _outer,
}
