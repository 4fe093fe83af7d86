"""An operation at a size, and inputs for it with the strides with which the model calls it.

What the bench, the doctor and their checks run on; tune/sizes.py lists which there are.
"""

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
MASKED = 0.15  # of the keys, in checks; and the last row throughout
DROPPED = 0.25  # of a tail's update
Argument = Tensor | DropoutFactors | None  # of an operation


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation at one size: positions [rows, length], as the layer sees them that calls it.

    Of an outer product: its result's rows, its columns (`keys`), and the sequences (`length`) that it sums over.
    """

    op: Name
    where: str  # which layer that is
    rows: int
    length: int  # of attention: queries
    keys: int = 0  # 0: as many as queries
    heads: int = 0
    width: int = 0  # of a head
    channels: int = 0  # of x; of a gate: of its arguments
    outputs: int = 0  # of norm_linear; of a tail: channels of o and g; of a transition: those between
    bias: bool = False  # of attention
    turned: bool = False  # rows and positions lie in memory the other way round
    dropped: bool = False  # a tail with dropout
    drawn: bool = False  # whose factors it draws itself, from seeded noise, as in every training run
    spread: bool = False  # a tail whose o is the same at all positions of a row, through a stride of zero
    batches: int = 1  # over which rows are spread, each with a bias of its own
    cut_from: int = 0  # the model has so many rows; 0: these

    @property
    def attended(self) -> int:
        """Keys of a row."""
        return self.keys or self.length

    @property
    def logits(self) -> int:
        """Of all rows and heads together; 0 for what is no attention."""
        queries = 1 if self.op == "global_attention" else self.length
        return self.rows * self.heads * queries * self.attended

    @property
    def shape(self) -> str:
        """For people: "256 rows, 4 heads, 256 x 256, width 32"."""
        rows = f"{self.rows} of {self.cut_from} rows" if self.cut_from else f"{self.rows} rows"
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

    def fewer(self, rows: int) -> "Case":
        """The same with about that many rows, whole batches of them; lengths stay."""
        if self.rows <= rows:
            return self
        each = self.rows // self.batches
        batches = max(1, rows // each) if self.batches > 1 else 1
        few = batches * each if self.batches > 1 else max(1, rows)
        return replace(self, rows=few, batches=batches, cut_from=self.cut_from or self.rows)


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call, in order, and which of them have a gradient."""

    case: Case
    args: tuple[Argument, ...]
    names: tuple[str, ...]  # of those with a gradient
    grad: Tensor  # that of the output

    @property
    def wanted(self) -> list[Tensor]:
        """Those with a gradient."""
        return [t for t in self.args if isinstance(t, Tensor) and t.requires_grad]


ARGUMENTS: Mapping[Name, tuple[str, ...]] = {
    "attention": ("q", "k", "v", "mask", "bias"),
    "global_attention": ("q", "k", "v", "mask"),
    "layer_norm": ("x", "weight", "bias"),
    "norm_linear": ("x", "norm_weight", "norm_bias", "weight", "bias"),
    "gate": ("x", "g"),
    "tail": ("x", "o", "g", "weight", "bias", "factors"),
    "transition": ("x", "norm_weight", "norm_bias", "up", "up_bias", "down", "down_bias"),
    "triangle_factor": ("y", "g", "mask"),
    "outer_product": ("a", "b", "weight", "bias", "count"),
}
CONSTANT = ("mask", "factors", "count")


@dataclass
class _Draw:
    """Random tensors of one case."""

    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator | None = field(init=False, default=None)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.device.type != "meta":  # where there are no numbers
            self.generator = torch.Generator(self.device).manual_seed(self.seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(*shape, generator=self.generator, device=self.device)
        return (x * scale).to(dtype or self.dtype)

    def parameter(self, *shape: int, mean: float = 0.0, scale: float = 0.1) -> Tensor:
        """Parameters stay in fp32, as the model's."""
        return self.normal(*shape, scale=scale, dtype=torch.float32) + mean

    def factors(self, *shape: int, drawn: bool) -> Factors:
        """Dropout factors; drawn: left to the operation to draw, from seeded noise."""
        if drawn:
            noise = Noise().to(self.device)
            noise.seed(self.seed)
            return noise.factors(shape, DROPPED, 0, torch.empty((), dtype=self.dtype, device=self.device))
        kept = torch.rand(*shape, generator=self.generator, device=self.device) > DROPPED
        return (kept / (1 - DROPPED)).to(self.dtype)

    def positions(self, case: Case, channels: int) -> Tensor:
        """[rows, length, channels] or [batches, rows, ...], laid out as that layer's tensors; each position's numbers
        begin at a multiple of eight, as projections do (ops/norm.py)."""
        padded = -(-channels // 8) * 8
        rows, lead = case.rows // case.batches, ((case.batches,) if case.batches > 1 else ())
        order = (case.length, rows) if case.turned else (rows, case.length)
        x = self.normal(*lead, *order, padded)[..., :channels]
        return x.transpose(-2, -3) if case.turned else x


def inputs(
    case: Case, dtype: torch.dtype, device: torch.device | str, *, masked: bool = False, seed: int = 0
) -> Inputs:
    """Random inputs of a case, the same each time; masked: with keys masked, and a row of which all are."""
    draw = _Draw(dtype, torch.device(device), seed=seed)
    args = _MAKE[case.op](case, draw, masked)
    names = []
    for name, t in zip(ARGUMENTS[case.op], args):
        if isinstance(t, Tensor) and name not in CONSTANT:
            t.requires_grad_()
            names.append(name)
    with torch.no_grad():
        out = OPS[case.op].definition(*(t.to("meta") if isinstance(t, Tensor) else None for t in args))
    return Inputs(case, args, tuple(names), draw.normal(*out.shape))


def _mask(case: Case, draw: _Draw, masked: bool) -> Tensor:
    rows, lead = case.rows // case.batches, ((case.batches,) if case.batches > 1 else ())
    shape = (*lead, case.attended, rows) if case.turned else (*lead, rows, case.attended)
    mask = torch.ones(shape, device=draw.device)
    mask = mask.mT if case.turned else mask
    if masked:
        mask *= torch.rand(mask.shape, generator=draw.generator, device=draw.device) > MASKED
        mask[..., -1, :] = 0
    return mask


def _attention(case: Case, draw: _Draw, masked: bool) -> tuple[Tensor | None, ...]:
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
    return q, k, v, _mask(case, draw, masked), bias


def _global(case: Case, draw: _Draw, masked: bool) -> tuple[Tensor | None, ...]:
    w = case.width  # keys, values and gates are one projection
    y = draw.positions(replace(case, length=case.attended), (2 + case.heads) * w)
    k, v = y[..., :w].detach(), y[..., w : 2 * w].detach()
    return draw.normal(*k.shape[:-2], case.heads, case.width), k, v, _mask(case, draw, masked)


def _layer_norm(case: Case, draw: _Draw, _: bool) -> tuple[Tensor | None, ...]:
    return draw.positions(case, case.channels), draw.parameter(case.channels, mean=1.0), draw.parameter(case.channels)


def _norm_linear(case: Case, draw: _Draw, _: bool) -> tuple[Tensor | None, ...]:
    x, norm_weight, norm_bias = _layer_norm(case, draw, False)
    weight = draw.parameter(case.outputs, case.channels, scale=case.channels**-0.5)
    return x, norm_weight, norm_bias, weight, draw.parameter(case.outputs)


def _gate(case: Case, draw: _Draw, _: bool) -> tuple[Tensor | None, ...]:
    y = draw.positions(case, 2 * case.channels)  # two projections of one tensor
    return y[..., : case.channels].detach(), y[..., case.channels :].detach()


def _tail(case: Case, draw: _Draw, _: bool) -> tuple[Argument, ...]:
    x, o = draw.positions(case, case.channels), draw.positions(case, case.outputs)
    if case.spread:
        o = o[..., :1, :].expand(o.shape).detach()
    g = draw.positions(case, 4 * case.outputs)[..., 3 * case.outputs :].detach()
    weight = draw.parameter(case.channels, case.outputs, scale=case.outputs**-0.5)
    factors = draw.factors(1, case.length, case.channels, drawn=case.drawn) if case.dropped else None
    return x, o, g, weight, draw.parameter(case.channels), factors


def _transition(case: Case, draw: _Draw, _: bool) -> tuple[Tensor | None, ...]:
    x, norm_weight, norm_bias = _layer_norm(case, draw, False)
    c, n = case.channels, case.outputs
    up = draw.parameter(n, c, scale=c**-0.5), draw.parameter(n)
    return x, norm_weight, norm_bias, *up, draw.parameter(c, n, scale=n**-0.5), draw.parameter(c)


def _factor(case: Case, draw: _Draw, masked: bool) -> tuple[Tensor | None, ...]:
    return *_gate(case, draw, False), _mask(case, draw, masked)


def _outer(case: Case, draw: _Draw, _: bool) -> tuple[Tensor | None, ...]:
    s, c, z = case.length, case.channels, case.outputs
    a, b = draw.normal(s, case.rows, c), draw.normal(s, case.attended, c)
    weight = draw.parameter(z, c * c, scale=1 / c)
    count = torch.full((case.rows, case.attended, 1), s + 1e-3, device=draw.device, dtype=draw.dtype)
    return a, b, weight, draw.parameter(z), count


_MAKE: Mapping[Name, Callable[[Case, _Draw, bool], tuple[Argument, ...]]] = {
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
