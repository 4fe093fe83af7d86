"""Calls of every operation, including those of the model's layers, for tests on CPUs, in the interpreter and on GPUs.

Tensors have the model's layouts and are surrounded by NaN, which reveals accesses out of bounds.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from warpfold.check.checks import answer, truth
from warpfold.ops.attention import attention, gated_attention, global_attention
from warpfold.ops.dispatch import Op, empty_like
from warpfold.ops.linear import empty_linear, gate, gated_linear_residual, layer_norm, norm_linear
from warpfold.ops.noise import Noise
from warpfold.ops.outer import outer_product, outer_product_mean
from warpfold.ops.pairs import aligned_errors, overlaps
from warpfold.ops.transition import HALVES, transition
from warpfold.ops.triangle import empty_factor, triangle_factor, triangle_multiplication

GUARD = 64  # NaNs before and after a tensor
Shape = tuple[int, ...]
Order = Sequence[int] | None  # axes in memory, outermost first
# Arguments that stay in fp32 for all dtypes of activations, and arguments without a gradient.
PARAMETERS = ("weight", "bias", "up", "down", "mask", "count", "radius", "exists")
CONSTANT = ("mask", "factors", "count", "true", "exists", "index", "order", "chain", "slot")
LIKE_FIRST = ("layer_norm", "gate", "gated_linear_residual", "transition", "triangle_multiplication", "gated_attention")


class Draw:
    """Draws random tensors in fp64 with a given order of axes in memory and padding of the innermost axis."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, order: Order = None, pad: int = 0, mean: float = 0.0) -> Tensor:
        order = range(len(shape)) if order is None else order
        sizes = [shape[axis] for axis in order]
        sizes[-1] += pad
        back = [list(order).index(axis) for axis in range(len(shape))]
        values = torch.randn(sizes, dtype=torch.float64, generator=self.generator) + mean
        return values[..., : sizes[-1] - pad].permute(back)

    def norm(self, c: int, biased: bool = True) -> tuple[Tensor, Tensor | None]:
        """Draw weight and bias of a norm."""
        return 1 + 0.3 * self(c), 0.3 * self(c) if biased else None

    def weight(self, outputs: int, inputs: int) -> Tensor:
        """Draw a weight that preserves the scale of its operand."""
        return self(outputs, inputs) * inputs**-0.5

    def mask(self, *shape: int, share: float = 0.7) -> Tensor:
        """Draw zeros and ones, with zeros in the whole last row."""
        mask = (torch.rand(*shape, dtype=torch.float64, generator=self.generator) < share).double()
        mask[..., -1, :] = 0
        return mask


@dataclass
class Drawn:
    """Dropout factors of this shape that the operation draws itself."""

    shape: Shape


@dataclass
class Call:
    """An operation, its arguments by name on the device that computes, and a gradient of the output."""

    op: Op[..., Tensor]
    given: dict[str, Any]
    grad: Tensor

    def answers(self, way: Callable[..., Tensor]) -> dict[str, Tensor]:
        """Compute the output "out" by a function, and the gradients of the arguments that require one."""
        return dict(zip(("out", *self.wanted), answer(way, list(self.given.values()), self.grad)))

    @property
    def wanted(self) -> list[str]:
        """The names of the arguments that require a gradient."""
        return [name for name, t in self.given.items() if isinstance(t, Tensor) and t.requires_grad]

    def mistakes(self, found: dict[str, Tensor] | None = None) -> list[str]:
        """List errors (check/checks.py) of results and their strides; found None: of those of the fast path."""
        ours = self.answers(self.op.fast) if found is None else found
        true = truth(self.op.definition, list(self.given.values()), self.grad, self.wanted)
        wrong = [str(error) for error in true.errors(list(ours.values())) if error.red]
        first, name = next(iter(self.given.values())).detach(), self.op.name
        if name in LIKE_FIRST and ours["out"].stride() != empty_like(first).stride():
            wrong.append(f"the output has strides {ours['out'].stride()}")
        if name == "norm_linear":
            right = empty_linear(first, ours["out"].shape[-1], self.given.get("planes", False))
            if ours["out"].stride() != right.stride():
                wrong.append(f"the output has strides {ours['out'].stride()}")
        if name == "triangle_factor" and ours["out"].stride() != empty_factor(first, ours["out"].shape[-3]).stride():
            wrong.append(f"the factor has strides {ours['out'].stride()}")
        return wrong


def within(values: Tensor, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Convert values to a dtype with the same strides, inside a buffer of NaN."""
    if not values.is_floating_point():
        return values.to(device)
    span = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, values.stride()))
    buffer = torch.full((GUARD + span + GUARD,), math.nan, dtype=dtype, device=device)
    return buffer.as_strided(values.shape, values.stride(), GUARD).copy_(values)


def placed(
    op: Op[..., Tensor], values: Sequence[Any], dtype: torch.dtype, device: str = "cpu", grad: Tensor | None = None
) -> Call:
    """Make a call of these values in a dtype on a device.

    grad: the gradient of the output, or None for a random one.
    """
    wide, given = torch.float64 if dtype == torch.float64 else torch.float32, {}
    dtype = wide if op in (overlaps, aligned_errors) else dtype  # more than 16 bits for coordinates
    for name, value in zip(op.arguments._fields, values):
        kind = name.split("_")[-1]
        if isinstance(value, Drawn):
            noise = Noise().to(device)
            noise.seed(1)
            value = noise.factors(value.shape, 0.25, 3, torch.empty((), dtype=dtype, device=device))
        elif isinstance(value, Tensor):
            stays = kind in PARAMETERS and not (name == "bias" and value.dim() > 2)
            value = within(value.detach(), wide if stays else dtype, device)
            has = value.is_floating_point() and kind not in CONSTANT and not name.startswith("true")
            value = value.requires_grad_(has)
        given[name] = value
    if grad is None:
        shapes = [v.to("meta") if isinstance(v, Tensor) else None if n == "factors" else v for n, v in given.items()]
        with torch.no_grad():
            grad = Draw()(*op.definition(*shapes).shape)
    return Call(op, given, within(grad, dtype, device))


def made(name: str, dtype: torch.dtype, device: str = "cpu", **more: Any) -> Call:
    """Make the call of this name in the table; more: arguments that differ."""
    op, make, sizes = CASES[name]
    values, *grad = make(Draw(), **(sizes | more))
    return placed(op, values, dtype, device, *grad)


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


# A layout has the shape of the positions, the memory order of positions and channels, and the padding.
PLAIN: tuple[Shape, Order, int] = ((7, 19), None, 0)
TURNED: tuple[Shape, Order, int] = ((11, 13), (1, 0, 2), 0)  # within columns
SLICED: tuple[Shape, Order, int] = ((9, 10), None, 8)  # a slice of projections
BATCHED: tuple[Shape, Order, int] = ((2, 5, 9), (0, 2, 1, 3), 8)
FIRST: tuple[Shape, Order, int] = ((8, 16), (2, 0, 1), 0)  # channels first, as triangle products
MANY: tuple[Shape, Order, int] = ((2, 3, 2, 3, 2), (4, 0, 2, 1, 3, 5), 8)  # axes that cannot be merged
ONE: tuple[Shape, Order, int] = ((1, 1), None, 0)
Layout = tuple[Shape, Order, int]


def _x(draw: Draw, c: int, of: Layout, mean: float = 0.0) -> Tensor:
    shape, order, pad = of
    return draw(*shape, c, order=order, pad=pad, mean=mean)


def norms(draw: Draw, c: int, of: Layout, biased: bool = True, mean: float = 0.0) -> tuple[Any, ...]:
    x = _x(draw, c, of, mean)
    x[(0,) * (x.dim() - 1)] = mean + 0.5  # nothing but its mean
    return ([x, *draw.norm(c, biased)],)


def linears(
    draw: Draw, c: int, outputs: int, biases: int, of: Layout, norm_biased: bool = True, mean: float = 0.0,
    planes: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """planes: write the result, and its gradient, by outputs."""
    (norm,) = norms(draw, c, of, norm_biased, mean)
    turned = draw(*of[0], outputs, order=of[1]) if of[0] == TURNED[0] else draw(*of[0], outputs, pad=of[2])
    if planes:
        turned = draw(*of[0][:-2], outputs, *of[0][-2:], pad=3).movedim(-3, -1)
    return [*norm, draw.weight(outputs, c), draw(biases) if biases else None, 1e-5, planes], turned


def gates(draw: Draw, shape: Shape, x: Order, x_pad: int, g: Order, g_pad: int, of_grad: Order) -> tuple[Any, ...]:
    return [draw(*shape, order=x, pad=x_pad), draw(*shape, order=g, pad=g_pad)], draw(*shape, order=of_grad)


def residuals(
    draw: Draw, shape: Shape, c: int, inputs: int, x: Order, o: Order, g: Order, g_pad: int, kept: Any, of_grad: Order
) -> tuple[Any, ...]:
    factors = kept if kept is None or isinstance(kept, Drawn) else 1.25 * (draw(*kept) > -0.5)
    values = [draw(*shape, c, order=x), draw(*shape, inputs, order=o), draw(*shape, inputs, order=g, pad=g_pad)]
    return [*values, draw.weight(c, inputs), draw(c), factors], draw(*shape, c, order=of_grad)


def triangle_factors(
    draw: Draw, shape: Shape, c: int, h: int, which: int, fused: bool, biased: bool = True, turned: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Make factors of some rows and columns of x."""
    axes = len(shape)
    x = draw(*shape, c, order=(*range(axes - 2), axes - 1, axes - 2, axes) if turned else None, pad=8 * (not turned))
    into = *draw.norm(c, biased), draw.weight(4 * h + c, c), draw(4 * h) if biased else None
    return [x, draw.mask(*shape), *into, which, fused, 1e-5], draw(*shape[:-2], h, *shape[-2:], pad=3)


def transitions(
    draw: Draw, c: int, n: int, activation: str, biased: str, residual: bool, of: Layout
) -> tuple[Any, ...]:
    """biased: the layers with a bias, among the norm, up and down."""
    x, u = _x(draw, c, of), HALVES[activation] * n
    of_norm, of_up, of_down = (draw(size) if kind in biased else None for kind, size in zip("nud", (c, u, c)))
    if activation == "relu" and of_up is not None:
        of_up += 5 * of_up.sign()  # at 0 rounding could flip gradients
    values = [x, draw.norm(c)[0], of_norm, draw.weight(u, c), of_up, draw.weight(c, n), of_down]
    return [*values, residual, 1e-5, activation], draw(*of[0], c, order=of[1], pad=8 if of[2] == 0 else 0)


def outers(
    draw: Draw, batches: int, s: int, i: int, j: int, c: int, d: int, z: int, biased: bool = True, divided: bool = True,
    alone: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Draw arguments of the outer product. a and b are halves of a projection, and some counts are 0.

    divided: whether the bias is divided too. alone: whether there is no z.
    """
    a_mask, b_mask = draw.mask(batches, s, i), draw.mask(batches, s, j)
    a, b = draw(batches, s, i, c, pad=8) * a_mask[..., None], draw(batches, s, j, d, pad=3) * b_mask[..., None]
    a_mask[..., 0], b_mask[..., -1] = 0, 0  # where factors are not 0
    pair = None if alone else draw(batches, i, j, z)
    how = a_mask, b_mask, pair, *((1e-3, 0.0) if divided else (0.0, 1.0)), divided
    return [a, b, draw.weight(z, c * d), draw(z) if biased else None, *how], draw(batches, i, j, z, pad=5)


def outer_means(
    draw: Draw, lead: Shape, s: int, r: int, c: int, h: int, z: int, biased: str = "nwo", divided: bool = True,
    alone: bool = False, turned: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Draw arguments of the outer product mean.

    biased: the layers with a bias, from "n" (norm), "w" (projection) and "o" (output). turned: whether residues come
    before sequences in memory.
    """
    order = (*range(len(lead)), len(lead) + 1, len(lead), len(lead) + 2) if turned else None
    x, mask = draw(*lead, s, r, c, order=order, pad=8), draw.mask(*lead, s, r)
    mask[..., 0] = 0
    of_norm, of_projection, of_out = (k in biased for k in "nwo")
    into = *draw.norm(c, of_norm), draw.weight(2 * h, c), draw(2 * h) if of_projection else None
    out_of = draw.weight(z, h * h), draw(z) if of_out else None
    pair = None if alone else draw(*lead, r, r, z)
    how = mask, pair, *((1e-3, 0.0) if divided else (0.0, 1.0)), divided
    return [x, *into, *out_of, *how, 1e-5], draw(*lead, r, r, z, pad=5)


def triangles(
    draw: Draw, lead: Shape, n: int, c: int, h: int, outgoing: bool, fused: bool, biased: bool = True,
    turned: bool = False, dropped: str = "", alone: bool = False, cut: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """Draw arguments of the triangle multiplication.

    dropped: the dropout factors, "" (none), "given" or "drawn". alone: whether there are no x and no biases of norms.
    cut: the number of rows or columns of a slice, which uses the whole b; 0 for no slice.
    """
    rows, columns = (cut or n, n) if outgoing else (n, cut or n)
    axes, shared = len(lead) + 3, (*(1 for _ in lead), 1, columns, c)
    order = (*range(len(lead)), axes - 2, axes - 3, axes - 1) if turned else None
    x = draw(*lead, rows, columns, c, order=order, pad=8 * (not turned))
    b = draw(*lead, h, n, n, pad=5) if cut else None
    into = *draw.norm(c, not alone), draw.weight(4 * h + c, c), draw(4 * h + c) if biased else None
    out_of = *draw.norm(h, not alone), draw.weight(c, h), draw(c) if biased else None
    kept = {"": None, "given": 1.25 * (draw(*shared) > -0.5), "drawn": Drawn(shared)}[dropped]
    values = [
        x,
        (draw(*lead, rows, columns) > -0.8).double(),
        b,
        *into,
        *out_of,
        fused,
        outgoing,
        kept,
        1e-5,
        not alone,
    ]
    return values, draw(*lead, rows, columns, c, pad=8)


def layers(
    draw: Draw, lead: Shape, length: int, c: int, heads: int, width: int, bias: str = "", turned: bool = False,
    biases: bool = True, dropped: str = "", alone: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """bias: "own", "given" or "projected" (heads innermost); the others as in `triangles`."""
    inner, shape, shared = heads * width, (*lead, length), (*(1 for _ in lead), length, c)
    order = (*range(len(lead) - 1), len(lead), len(lead) - 1, len(lead) + 1)
    x = draw(*shape, c, order=order if turned else None, pad=8)
    square = (length, length, heads)
    made = {"given": draw(*lead[:-1], heads, length, length), "projected": draw(*lead[:-1], *square).movedim(-1, -3)}
    into = draw.weight(4 * inner + (heads if bias == "own" else 0), c), draw(inner) if biases else None
    kept = {"": None, "given": 1.25 * (draw(*shared) > -0.5), "drawn": Drawn(shared)}[dropped]
    out_of = draw.weight(c, inner), draw(c) if biases else None
    values = [x, *draw.norm(c, not alone), *into, *out_of, draw.mask(*shape, share=0.85), made.get(bias), heads, kept]
    return ([*values, 1e-5, not alone],)


def attentions(
    draw: Draw, lead: Shape, queries: int, keys: int, heads: int, width: int, layout: str = "own", bias: str = "shared",
    mask: str = "random",
) -> tuple[Any, ...]:  # fmt: skip
    """layout: "row" (q, k and v are slices of a projection), "column" (the same, transposed), "own" (separate tensors).
    bias: "", "shared" (one for all), "batched" (one for each index of the leading axes except rows).
    mask: "clear", "random" (with the whole last row masked), "tail" (padding of a different length in each row).
    """
    c, vectors = heads * width, (heads, width)
    if layout == "own":
        q, k, v = (draw(*lead, n, *vectors) for n in (queries, keys, keys))
    else:
        turned = layout == "column"
        x = draw(*lead[:-1], *((keys, lead[-1]) if turned else (lead[-1], keys)), 3 * c, pad=16)
        x = x.transpose(-2, -3) if turned else x
        q, k, v = (t.unflatten(-1, vectors) for t in x.split(c, -1))
        q = q[..., :queries, :, :]
    own = lead[:-1] if bias == "batched" else ()
    z = draw(*own, queries, keys, heads, pad=3).movedim(-1, -3)[..., None, :, :, :] if bias else None
    lengths = torch.randint(1, keys + 1, (*lead, 1), generator=draw.generator)
    tail = (torch.arange(keys) < lengths).double()
    attended = {"clear": torch.ones(*lead, keys).double(), "random": draw.mask(*lead, keys), "tail": tail}[mask]
    return [q, k, v, attended, z], draw(*lead, queries, *vectors)


def global_attentions(draw: Draw, columns: int, queries: int, keys: int, width: int) -> tuple[Any, ...]:
    """Make queries of one head, with keys and values that have the strides of the alignment."""
    k, v = (draw(columns, keys, width, order=(1, 0, 2)) for _ in range(2))
    return ([draw(columns, queries, width), k, v, draw.mask(columns, keys)],)


def frames(
    draw: Draw, f: int, p: int, leading: Shape = (), some: bool = False, clamp: float = 3.0, softening: float = 0.01
) -> tuple[Any, ...]:
    """some: use a pair mask."""
    ours, true = [draw(*leading, f, 3, 4), 2 * draw(*leading, p, 3)], [draw(f, 3, 4, mean=0.1), 2 * draw(p, 3)]
    masks = [(draw(n) > -0.8).double() for n in (f, p)]
    return ([*ours, *true, *masks, draw(f, p) > 0 if some else None, clamp, softening],)


def atoms(draw: Draw, residues: int, every_pair: bool) -> tuple[Any, ...]:
    """Make residues of 14 atoms in two chains: one number twice, one chain in descending order, two equal positions."""
    n = 14 * residues
    places = 2 * draw(n, 3)
    places[n // 2] = places[0]
    numbers = torch.tensor([3, 4, 4, 5, 9, 8])[:residues].repeat_interleave(14)
    chain = torch.tensor([1, 1, 1, 1, 2, 2])[:residues].repeat_interleave(14)
    slot, place = torch.arange(14).repeat(residues), torch.arange(residues).repeat_interleave(14)
    exists = (draw(n, mean=1.0) > 0).double()
    return ([places, 1.6 + 0.2 * draw(n), exists, numbers, place if every_pair else numbers, chain, slot],)


SIX = (4, 0, 2, 1, 3, 5)
_TABLE: dict[Op[..., Tensor], tuple[Callable[..., tuple[Any, ...]], dict[str, tuple[Any, ...]]]] = {
    layer_norm: (norms, {
        "16": (16, PLAIN), "20, turned": (20, TURNED), "64, padded rows, no bias": (64, SLICED, False),
        "128, turned in a batch": (128, BATCHED), "128, channels in front": (128, FIRST), "128, many axes": (128, MANY),
        "200": (200, PLAIN), "384, one": (384, ONE), "1024": (1024, PLAIN),
    }),
    norm_linear: (linears, {
        "16 to 4": (16, 4, 0, PLAIN), "20 to 8, turned": (20, 8, 8, TURNED),
        "64 to 260, as a template's": (64, 260, 64, BATCHED), "128 to 132": (128, 132, 132, PLAIN),
        "128 to 128, channels in front": (128, 128, 128, FIRST), "128 to 8, many axes": (128, 8, 0, MANY),
        "200 to 130": (200, 130, 0, SLICED), "384 to 100": (384, 100, 100, PLAIN),
        "1024 to 20, one": (1024, 20, 20, ONE), "128 to 40, no bias of the norm": (128, 40, 7, TURNED, False),
        "384 to 40, no bias of the norm": (384, 40, 0, PLAIN, False),
        "64 to 4, planes": (64, 4, 0, PLAIN, True, 0.0, True), "384 to 3, planes": (384, 3, 2, PLAIN, True, 0.0, True),
        "24 to 20, planes, turned in a batch": (24, 20, 20, BATCHED, True, 0.0, True),
    }),
    gate: (gates, {
        "as they stand": ((7, 19, 128), None, 0, None, 0, None),
        "parts of a projection": ((9, 10, 128), None, 392, None, 392, None),
        "turned": ((11, 13, 64), (1, 0, 2), 0, (1, 0, 2), 8, (0, 1, 2)),
        "one of them turned": ((2, 11, 13, 20), (0, 2, 1, 3), 0, None, 4, (0, 2, 1, 3)),
        "channels in front": ((6, 8, 16), (2, 0, 1), 0, None, 8, (2, 0, 1)),
        "axes that cannot be merged": ((2, 3, 2, 3, 2, 5), SIX, 3, None, 1, None),
        "a row of few": ((300,), None, 0, None, 4, None),
    }),
    gated_linear_residual: (residuals, {
        "starting node": ((9, 10), 128, 128, None, None, None, 388, (1, 10, 128), None),
        "ending node": ((10, 9), 128, 128, (1, 0, 2), (1, 0, 2), (1, 0, 2), 388, (10, 1, 128), (1, 0, 2)),
        "row attention, drawn": ((2, 5, 9), 64, 32, None, None, None, 96, Drawn((2, 1, 9, 64)), None),
        "column attention": ((9, 10), 256, 136, (1, 0, 2), (1, 0, 2), (1, 0, 2), 0, None, (0, 1, 2)),
        "odd": ((7, 13), 20, 200, None, (1, 0, 2), None, 3, (7, 13, 1), None),
        "channels in front": ((6, 8), 16, 24, (2, 0, 1), None, None, 0, (1, 8, 16), (2, 0, 1)),
        "many axes": ((2, 3, 2, 3, 2), 24, 16, SIX, None, None, 0, Drawn((2, 1, 2, 1, 1, 24)), None),
        "one": ((1,), 384, 300, None, None, None, 0, (1, 1), None),
    }),
    triangle_factor: (triangle_factors, {
        "a of rows": ((3, 18), 64, 32, 0, False), "b of columns, fused": ((2, 19, 4), 20, 24, 1, True),
        "b of all, turned": ((9, 9), 16, 16, 1, False, False, True), "a, fused": ((5, 16), 24, 40, 0, True),
    }),
    transition: (transitions, {
        "16, as a small model's": (16, 32, "relu", "nud", True, PLAIN),
        "24, turned": (24, 56, "relu", "nud", True, TURNED),
        "40, SwiGLU, a batch": (40, 40, "swiglu", "n", True, BATCHED),
        "64, as a template's": (64, 128, "relu", "nud", False, SLICED),
        "64, channels in front": (64, 64, "relu", "u", True, FIRST),
        "20, SwiGLU, one": (20, 24, "swiglu", "ud", False, ONE),
        "32, SwiGLU, many axes": (32, 70, "swiglu", "", True, MANY),
    }),
    outer_product: (outers, {
        "as the model's": (1, 9, 17, 18, 8, 32, 40), "odd": (2, 70, 5, 9, 6, 11, 37),
        "one sequence, no bias": (1, 1, 16, 3, 8, 8, 12, False), "many outputs": (1, 3, 2, 5, 5, 16, 140),
        "odd, added last": (2, 20, 5, 9, 6, 11, 37, True, False), "wide factors": (1, 5, 3, 2, 9, 64, 20),
        "alone": (2, 5, 7, 6, 8, 8, 12, True, False, True),
    }),
    outer_product_mean: (outer_means, {
        "as the model's": ((), 9, 18, 32, 8, 40), "odd, no biases": ((2,), 21, 5, 20, 5, 37, "", False, True),
        "added last, turned": ((2,), 7, 9, 24, 6, 12, "nwo", False, False, True),
        "two batches, wide": ((2, 2), 3, 4, 300, 16, 20, "nw"), "one residue": ((), 3, 1, 16, 8, 8),
    }),
    triangle_multiplication: (triangles, {
        "outgoing": ((), 16, 64, 32, True, False, True, False, "given"),
        "incoming, rows that are padded": ((), 9, 32, 16, False, False),
        "fused, without biases, turned": ((2,), 5, 24, 40, True, True, False, True, "drawn"),
        "outgoing, alone": ((2,), 5, 24, 16, True, False, False, True, "given", True),
        "incoming, alone": ((), 7, 16, 10, False, False, False, True, "drawn", True),
        "fused, incoming, in two batches": ((2, 2), 3, 20, 16, False, True, True, False, "drawn"),
        "rows of outgoing": ((), 18, 32, 16, True, False, True, False, "given", False, 5),
        "columns of incoming": ((2,), 19, 24, 40, False, False, True, False, "drawn", False, 3),
        "columns of incoming, fused, alone": ((), 9, 16, 10, False, True, False, True, "given", True, 2),
        "all columns of incoming": ((), 16, 16, 16, False, False, True, False, "", False, 16),
    }),
    gated_attention: (layers, {
        "triangle, starting": ((9,), 9, 16, 2, 8, "own", False, True, "drawn"),
        "triangle, ending": ((9,), 9, 16, 1, 16, "own", True, True, "given"),
        "row of an alignment": ((3,), 21, 24, 2, 24, "projected"),
        "column of an alignment": ((5,), 7, 16, 1, 48, "", True),
        "batch, no biases": ((2, 3), 3, 16, 2, 8, "own", False, False),
        "batch, given bias": ((2, 2), 18, 16, 1, 32, "given"),
        "update alone": ((2, 7), 7, 16, 2, 8, "own", False, False, "drawn", True),
        "update alone, turned": ((5,), 7, 16, 1, 24, "", True, True, "given", True),
    }),
    attention: (attentions, {
        "several tiles": ((3,), 37, 37, 2, 16, "row"), "no mask": ((3,), 37, 37, 2, 16, "row", "shared", "clear"),
        "columns, no bias": ((2, 3), 67, 67, 1, 16, "column", "", "tail"),
        "two slabs": ((11,), 20, 20, 2, 16, "column"),  # slabs of 6 and 5 rows
        "a bias a batch, 64 wide": ((2, 3), 19, 33, 1, 64, "own", "batched", "tail"),
        "one key": ((3,), 5, 1, 2, 8, "own", "shared", "clear"), "8 wide": ((2,), 33, 40, 1, 8),
        "32 wide": ((1, 2), 21, 48, 1, 32, "own", "shared", "tail"),
        "24 wide": ((2,), 37, 70, 2, 24, "own", "shared", "tail"),
        "48 wide": ((1, 2), 21, 35, 1, 48, "own", "batched"),
        "one query": ((5, 7), 1, 4, 4, 16, "own", ""), "one query, 24 wide": ((2, 3), 1, 33, 2, 24, "own", ""),
        "one query, one key": ((2, 3), 1, 1, 2, 8, "own", ""), "one query, 64 wide": ((5, 7), 1, 32, 4, 64, "own", ""),
    }),
    global_attention: (global_attentions, {"": (3, 8, 70, 8)}),
    aligned_errors: (frames, {
        "side chains": (37, 70), "layers": (9, 9, (2, 2), False, 2.0, 0.0), "chains": (21, 21, (3,), True, 2.0),
        "a frame, no cap": (1, 5, (), False, math.inf, 0.0),
    }),
    overlaps: (atoms, {"of one residue": (1, False), "of numbers": (6, False), "of every pair": (6, True)}),
}  # fmt: skip
# For each call: the operation, the function that makes its arguments, and the parameters of this function.
CASES: dict[str, tuple[Op[..., Tensor], Callable[..., tuple[Any, ...]], dict[str, Any]]] = {
    f"{op.name} {name}".strip(): (op, make, dict(zip(list(inspect.signature(make).parameters)[1:], sizes)))
    for op, (make, table) in _TABLE.items()
    for name, sizes in table.items()
}
