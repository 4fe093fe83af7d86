"""The profiles of all operations, for benchmarks, the doctor and tuning."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from warpfold.check.op_profile import (
    ALIGNMENTS,
    Argument,
    Cost,
    Kinds,
    LayerKind,
    OpCase,
    OpInputs,
    OpProfile,
    RandomTensors,
    Sizes,
    attention_cost,
)
from warpfold.ops.attention import attention, gated_attention, global_attention
from warpfold.ops.dispatch import Op
from warpfold.ops.linear import EPS, gate, gated_linear_residual, layer_norm, norm_linear
from warpfold.ops.outer import outer_product, outer_product_mean
from warpfold.ops.pairs import aligned_errors, overlaps
from warpfold.ops.transition import transition
from warpfold.ops.triangle import triangle_factor, triangle_multiplication

TRIANGLES = ("64", "128", "256", "384", "512", "1024", "2048")
PAIRS = TRIANGLES[2:6]
# Sizes of the extra MSA.
DEEP = ("1024x256", "5120x384")
RESIDUES = ("64", "128", "256", "384", "512", "768", "1024")


def _attention(where: str, rows: int, length: int, heads: int, width: int, **more: Any) -> OpCase:
    return OpCase(op="attention", where=where, rows=rows, length=length, heads=heads, width=width, **more)


def _global_attention(rows: int, keys: int, heads: int, width: int) -> OpCase:
    at = OpCase(op="global_attention", where="global column", rows=rows, length=1, transposed=True)
    return replace(at, keys=keys, heads=heads, width=width)


def _at(op: str, where: str, rows: int, length: int, channels: int, outputs: int = 0, **more: Any) -> OpCase:
    return OpCase(op=op, where=where, rows=rows, length=length, channels=channels, outputs=outputs, **more)


class _Attention(OpProfile):
    name, op = "attention", attention
    layers = ("attention", "pointwise attention")
    peers = ("sdpa", "sdpa-materialised", "trifast", "cuequivariance", "flash-attn")
    kinds: ClassVar[Kinds] = {
        "row": ALIGNMENTS,
        "column": ALIGNMENTS,
        "global": DEEP,
        "starting": TRIANGLES,
        "ending": TRIANGLES,
    }
    # Every width, rows above and below a program's tile, keys that differ from the queries, batches.
    odd = (
        _attention("msa row", 5, 33, 4, 32, bias=True),
        _attention("msa column", 33, 7, 2, 16, transposed=True),
        _attention("triangle starting", 65, 65, 4, 8, bias=True),
        _attention("triangle ending", 17, 17, 2, 64, bias=True, transposed=True),
        _attention("two batches", 6, 40, 2, 32, bias=True, batches=2),
        _attention("other keys", 3, 5, 2, 16, keys=131, bias=True),
        _attention("template pointwise", 25, 1, 4, 16, keys=4, batches=5),
        _attention("longer than a tile", 2, 150, 1, 32, bias=True),
        _attention("longer than a short row", 2, 390, 1, 8, bias=True),
        _attention("between powers of two", 3, 33, 2, 24, bias=True),
        _attention("between others", 3, 40, 1, 48, transposed=True),
    )

    sizes: ClassVar[Sizes] = {"keys": "keys", "heads": "heads", "width": "width", "bias": "bias", "batches": "batches"}

    def arguments(self, case: OpCase, draw: RandomTensors, masked: bool) -> tuple[Argument, ...]:
        """Draw q, k, v as slices of one projection; for triangle attention, the bias is a slice of it, too."""
        inner, h = case.heads * case.width, case.heads
        from_z = case.bias and case.where != "msa row" and case.rows == case.length and not case.keys
        y = draw.positions(case, 4 * inner + (h if from_z else 0))
        q, k, v = (y[..., i * inner : (i + 1) * inner].unflatten(-1, (h, case.width)).detach() for i in range(3))
        if case.keys:
            # The keys are at other positions than the queries.
            y = draw.positions(replace(case, length=case.keys), 2 * inner)
            k, v = (y[..., i * inner : (i + 1) * inner].unflatten(-1, (h, case.width)).detach() for i in range(2))
        bias = None
        if from_z:
            bias = y[..., 4 * inner :].movedim(-1, -3)[..., None, :, :, :].detach()
        elif case.bias:
            square = replace(case, rows=case.batches * case.length)
            z = draw.positions(square, h)[..., : case.attended, :]
            if case.keys:
                z = draw.normal(*z.shape[:-2], case.keys, h)
            bias = z.movedim(-1, -3)[..., None, :, :, :].detach()
        return q, k, v, draw.mask(case, masked), bias

    def cost(self, case: OpCase, forward: bool, itemsize: int) -> Cost:
        return attention_cost(case, forward, itemsize, case.heads)

    def example(self, kind: str, s: int, r: int) -> OpCase:
        if kind == "row":
            return _attention("msa row", s, r, 8, 32, bias=True)
        if kind == "column":
            return _attention("msa column", r, s, 8, 32, transposed=True)
        if kind == "global":
            return _global_attention(r, s, 8, 8)
        return _attention(f"triangle {kind}", s, s, 4, 32, bias=True, transposed=kind == "ending")

    def numbers(self, case: OpCase) -> int:
        return max(case.logits, case.rows * case.attended * case.width * case.heads)

    def size(self, case: OpCase) -> str:
        return f"{case.row_count}, {case.heads} heads, {case.length} x {case.attended}, width {case.width}"


class _GlobalAttention(OpProfile):
    name, op, part_of = "global_attention", global_attention, "attention"
    layers = ("global attention",)
    odd = (_global_attention(9, 77, 4, 8), _global_attention(3, 130, 8, 32))

    sizes: ClassVar[Sizes] = {"length": 1, "keys": "length", "heads": "heads", "width": "width"}

    def arguments(self, case: OpCase, draw: RandomTensors, masked: bool) -> tuple[Argument, ...]:
        # Keys, values and gates are one projection.
        w = case.width
        y = draw.positions(replace(case, length=case.attended), (2 + case.heads) * w)
        k, v = y[..., :w].detach(), y[..., w : 2 * w].detach()
        return draw.normal(*k.shape[:-2], case.heads, case.width), k, v, draw.mask(case, masked)

    def cost(self, case: OpCase, forward: bool, itemsize: int) -> Cost:
        return attention_cost(case, forward, itemsize, 1)

    def numbers(self, case: OpCase) -> int:
        return max(case.logits, case.rows * case.attended * case.width)

    def size(self, case: OpCase) -> str:
        return f"{case.row_count}, {case.heads} heads, {case.attended} keys, width {case.width}"


class _LayerNorm(OpProfile):
    name = "layer_norm"
    op: ClassVar[Op[..., Tensor]] = layer_norm
    layers: ClassVar[tuple[LayerKind, ...]] = ("global attention",)
    kinds: ClassVar[Kinds] = {"pair": PAIRS, "msa": ALIGNMENTS}
    odd: ClassVar[tuple[OpCase, ...]] = (
        _at("layer_norm", "rows", 7, 19, 128),
        _at("layer_norm", "transposed", 5, 11, 64, transposed=True),
        _at("layer_norm", "odd channels", 3, 5, 41),
        _at("layer_norm", "many channels", 1, 3, 1024),
    )

    sizes: ClassVar[Sizes] = {"channels": "channels"}

    def arguments(self, case: OpCase, draw: RandomTensors, masked: bool) -> tuple[Argument, ...]:
        c = case.channels
        return draw.positions(case, c), draw.parameter(c, mean=1.0), draw.parameter(c)

    def cost(self, case: OpCase, forward: bool, itemsize: int) -> Cost:
        """Count bytes only. Backward reads the gradient and x, and writes the gradient of x."""
        return Cost(0, 0, case.rows * case.length * case.channels * itemsize * (2 if forward else 3))


class _NormLinear(_LayerNorm):
    name, op = "norm_linear", norm_linear
    layers = (
        "attention", "global attention", "projection", "outer product", "triangle product", "triangle output",
    )  # fmt: skip
    odd = (
        _at("norm_linear", "rows", 7, 19, 64, 132),
        _at("norm_linear", "transposed", 5, 21, 128, 8, transposed=True),
        _at("norm_linear", "odd channels", 3, 5, 24, 37),
    )

    sizes: ClassVar[Sizes] = {"channels": "channels", "outputs": "projected"}

    def arguments(self, case: OpCase, draw: RandomTensors, masked: bool) -> tuple[Argument, ...]:
        norm = super().arguments(case, draw, masked)
        weight = draw.parameter(case.outputs, case.channels, scale=case.channels**-0.5)
        # The bias is that of the gate, which is a quarter of the outputs; q, k and v have none.
        return *norm, weight, draw.parameter(max(1, case.outputs // 4))

    def cost(self, case: OpCase, forward: bool, itemsize: int) -> Cost:
        positions = case.rows * case.length
        through = 2 * positions * case.channels * case.outputs
        moved_elements = case.channels + case.outputs if forward else 2 * case.channels + case.outputs
        return Cost(through * (1 if forward else 2), 0, positions * moved_elements * itemsize)

    def example(self, kind: str, s: int, r: int) -> OpCase:
        return replace(super().example(kind, s, r), outputs=1024 if kind == "msa" else 516)

    def size(self, case: OpCase) -> str:
        return f"{case.row_count} of {case.length}, {case.channels} -> {case.outputs}"


class _Gate(OpProfile):
    name = "gate"
    op: ClassVar[Op[..., Tensor]] = gate
    layers: ClassVar[tuple[LayerKind, ...]] = ("triangle output",)
    kinds: ClassVar[Kinds] = {"pair": PAIRS}
    odd: ClassVar[tuple[OpCase, ...]] = (
        _at("gate", "views of a projection", 7, 19, 24),
        _at("gate", "transposed", 5, 131, 32, transposed=True),
    )

    sizes: ClassVar[Sizes] = {"channels": "projected"}

    def arguments(self, case: OpCase, draw: RandomTensors, masked: bool) -> tuple[Argument, ...]:
        # Two projections of one tensor.
        y = draw.positions(case, 2 * case.channels)
        return y[..., : case.channels].detach(), y[..., case.channels :].detach()

    def cost(self, case: OpCase, forward: bool, itemsize: int) -> Cost:
        numbers = case.rows * case.length * case.channels
        return Cost(0, numbers, numbers * itemsize * (3 if forward else 5))


class _GatedLinearResidual(OpProfile):
    name, op = "tail", gated_linear_residual
    layers = ("attention", "global attention")
    # "dropout" is "pair" with dropout factors that the operation draws.
    kinds: ClassVar[Kinds] = {"pair": PAIRS, "msa": ALIGNMENTS, "dropout": PAIRS}
    odd = (
        _at("tail", "rows, dropout", 7, 19, 64, 32, dropped=True),
        _at("tail", "transposed, dropout", 5, 33, 32, 64, transposed=True, dropped=True),
        _at("tail", "rows", 7, 19, 64, 32, dropped=True, drawn=True),
        _at("tail", "transposed", 5, 33, 32, 64, transposed=True, dropped=True, drawn=True),
        _at("tail", "global column", 9, 21, 32, 32, transposed=True, expanded=True),
        _at("tail", "odd channels", 3, 5, 24, 40),
    )

    sizes: ClassVar[Sizes] = {
        "channels": "channels", "outputs": "inner", "dropped": "dropped", "drawn": "dropped", "expanded": "expanded",
    }  # fmt: skip

    def arguments(self, case: OpCase, draw: RandomTensors, masked: bool) -> tuple[Argument, ...]:
        x, o = draw.positions(case, case.channels), draw.positions(case, case.outputs)
        if case.expanded:
            o = o[..., :1, :].expand(o.shape).detach()
        g = draw.positions(case, 4 * case.outputs)[..., 3 * case.outputs :].detach()
        weight = draw.parameter(case.channels, case.outputs, scale=case.outputs**-0.5)
        factors = draw.factors(1, case.length, case.channels, drawn=case.drawn) if case.dropped else None
        return x, o, g, weight, draw.parameter(case.channels), factors

    def cost(self, case: OpCase, forward: bool, itemsize: int) -> Cost:
        """Backward reads the gradient, o and g, and writes the gradients of o and g.

        That of x is the gradient itself.
        """
        positions = case.rows * case.length
        through = 2 * positions * case.channels * case.outputs
        moved_elements = 2 * case.channels + 2 * case.outputs if forward else case.channels + 4 * case.outputs
        return Cost(through * (1 if forward else 2), positions * case.outputs, positions * moved_elements * itemsize)

    def example(self, kind: str, s: int, r: int) -> OpCase:
        case, drawn = super().example(kind, s, r), kind == "dropout"
        return replace(case, outputs=case.channels, dropped=drawn, drawn=drawn)

    def size(self, case: OpCase) -> str:
        dropout = ", dropout drawn" if case.drawn else ", dropout" if case.dropped else ""
        return f"{super().size(case)}, inner {case.outputs}{dropout}"


class _Transition(_LayerNorm):
    name, op = "transition", transition
    layers = ("transition",)
    odd = (
        _at("transition", "rows", 7, 19, 32, 128),
        _at("transition", "odd channels", 3, 5, 24, 56),
        _at("transition", "transposed, SwiGLU", 5, 21, 40, 72, transposed=True, gated=True),
    )

    sizes: ClassVar[Sizes] = {"channels": "channels", "outputs": "hidden", "gated": "gated"}

    def arguments(self, case: OpCase, draw: RandomTensors, masked: bool) -> tuple[Argument, ...]:
        """Draw a layer's arguments. SwiGLU has no biases."""
        norm, c, n = super().arguments(case, draw, masked), case.channels, case.outputs
        down = draw.parameter(c, n, scale=n**-0.5)
        if case.gated:
            return *norm, draw.parameter(2 * n, c, scale=c**-0.5), None, down, None, True, EPS, "swiglu"
        return *norm, draw.parameter(n, c, scale=c**-0.5), draw.parameter(n), down, draw.parameter(c)

    def cost(self, case: OpCase, forward: bool, itemsize: int) -> Cost:
        """Count two products forward; backward four, and the first again, which is recomputed instead of saved."""
        up, down = (2 if case.gated else 1), 1
        products = up + down if forward else 3 * up + 2 * down
        flops = 2 * case.rows * case.length * case.channels * case.outputs * products
        return replace(super().cost(case, forward, itemsize), flops=flops)

    def example(self, kind: str, s: int, r: int) -> OpCase:
        case = super().example(kind, s, r)
        return replace(case, outputs=4 * case.channels)

    def size(self, case: OpCase) -> str:
        return f"{super().size(case)}, inner {case.outputs}{', SwiGLU' if case.gated else ''}"


class _TriangleFactor(_LayerNorm):
    """A factor of some rows of a triangle product, as slices and ranks compute it."""

    name, op = "triangle_factor", triangle_factor
    layers = ("triangle product",)
    kinds: ClassVar[Kinds] = {"pair": PAIRS}
    odd = (_at("triangle_factor", "rows", 7, 19, 24, 40), _at("triangle_factor", "columns", 33, 5, 128, 128))

    sizes: ClassVar[Sizes] = {"channels": "channels", "outputs": "hidden"}

    def arguments(self, case: OpCase, draw: RandomTensors, masked: bool) -> tuple[Argument, ...]:
        x, *norm = super().arguments(case, draw, masked)
        c, o = case.channels, 4 * case.outputs + case.channels
        in_parameters = draw.parameter(o, c, scale=c**-0.5), draw.parameter(o)
        return x, draw.mask(case, masked), *norm, *in_parameters, int(case.where == "columns"), False

    def cost(self, case: OpCase, forward: bool, itemsize: int) -> Cost:
        """Count the projections of the factor and its gate; backward twice each, and once more for recomputation."""
        positions, c, h = case.rows * case.length, case.channels, case.outputs
        passes = 1 if forward else 3
        return Cost(passes * 2 * positions * c * 2 * h, positions * h, passes * positions * (c + h) * itemsize)

    def example(self, kind: str, s: int, r: int) -> OpCase:
        return replace(super().example(kind, s, r), outputs=128)

    def size(self, case: OpCase) -> str:
        return f"{super().size(case)}, inner {case.outputs}"


class _OuterProduct(OpProfile):
    name, op = "outer_product", outer_product
    layers = ("outer product",)
    kinds: ClassVar[Kinds] = {"msa": ALIGNMENTS}
    odd = (
        _at("outer_product", "rows and columns", 9, 33, 8, 24, keys=19),
        _at("outer_product", "odd channels", 17, 3, 7, 11, keys=5),
        _at("outer_product", "more than a tile", 19, 70, 16, 136, keys=18),
    )

    sizes: ClassVar[Sizes] = {
        "rows": "length",
        "keys": "length",
        "length": "rows",
        "channels": "hidden",
        "outputs": "outputs",
    }

    def arguments(self, case: OpCase, draw: RandomTensors, masked: bool) -> tuple[Argument, ...]:
        s, c, z = case.length, case.channels, case.outputs
        a, b = draw.normal(s, case.rows, c), draw.normal(s, case.attended, c)
        masks = (torch.ones(s, n, device=draw.device) for n in (case.rows, case.attended))
        in_parameters = draw.parameter(z, c * c, scale=1 / c), draw.parameter(z)
        return a, b, *in_parameters, *masks, draw.normal(case.rows, case.attended, z)

    def cost(self, case: OpCase, forward: bool, itemsize: int) -> Cost:
        """Count the product and its projection; backward three products (one recomputed) and two projections."""
        pairs, c = case.rows * case.attended, case.channels
        read, written = case.length * (case.rows + case.attended) * c, pairs * case.outputs
        flops = 2 * pairs * c**2 * (case.length + case.outputs if forward else 3 * case.length + 2 * case.outputs)
        return Cost(flops, 0, (read + written if forward else 2 * read + written) * itemsize)

    def example(self, kind: str, s: int, r: int) -> OpCase:
        return _at(self.name, kind, r, s, 32, 128, keys=r)

    def numbers(self, case: OpCase) -> int:
        # The definition has all products in memory.
        products = case.rows * case.attended * case.channels**2
        return max(super().numbers(case), products)

    def size(self, case: OpCase) -> str:
        return f"{case.row_count}, {case.attended} columns, {case.length} sequences, {case.channels} -> {case.outputs}"


# ---- operations that compute a complete layer of the trunk


def _gated_attention(where: str, rows: int, length: int, channels: int, heads: int, width: int, **more: Any) -> OpCase:
    at = OpCase(op="gated_attention", where=where, rows=rows, length=length, **more)
    return replace(at, channels=channels, heads=heads, width=width)


def _triangle(where: str, n: int, channels: int, hidden: int, dropped: bool = False, drawn: bool = False) -> OpCase:
    """Create a case. `where` contains "incoming", and "fused" for the projections of AlphaFold 2.3."""
    at = OpCase(op="triangle_multiplication", where=where, rows=n, length=n, channels=channels, outputs=hidden)
    return replace(at, dropped=dropped, drawn=drawn)


def _square(case: OpCase) -> OpCase:
    """Make a case square with the same number of positions, since its rows may have been reduced."""
    n = math.isqrt(case.rows * case.length)
    return replace(case, rows=n, length=n)


class _TriangleMultiplication(OpProfile):
    """Algorithms 11 and 12 from the normalised operand to the new residual."""

    name, op = "triangle_multiplication", triangle_multiplication
    layers = ("triangle product",)
    peers = ("cuequivariance",)
    kinds: ClassVar[Kinds] = {"outgoing": RESIDUES, "incoming": RESIDUES}
    odd = (
        _triangle("outgoing, dropout", 9, 24, 40, dropped=True),
        _triangle("incoming, dropout drawn", 17, 32, 16, dropped=True, drawn=True),
        _triangle("incoming, fused", 16, 64, 24),
        _triangle("outgoing, fused, without biases", 5, 128, 128),
    )

    sizes: ClassVar[Sizes] = {"channels": "channels", "outputs": "hidden", "dropped": "dropped", "drawn": "dropped"}

    def arguments(self, case: OpCase, draw: RandomTensors, masked: bool) -> tuple[Argument, ...]:
        """Draw x, the mask and the parameters, without biases if the case says so."""
        case = _square(case)
        c, h, description = case.channels, case.outputs, case.where
        x, o, biased = draw.positions(case, c), 4 * h + c, "without biases" not in description
        in_parameters = draw.parameter(o, c, scale=c**-0.5), draw.parameter(o) if biased else None
        out_parameters = draw.parameter(c, h, scale=h**-0.5), draw.parameter(c) if biased else None
        norm, norm_out = ((draw.parameter(n, mean=1.0), draw.parameter(n)) for n in (c, h))
        factors = draw.factors(1, case.length, c, drawn=case.drawn) if case.dropped else None
        of_layer = "fused" in description, "incoming" not in description, factors
        return x, draw.mask(case, masked), None, *norm, *in_parameters, *norm_out, *out_parameters, *of_layer

    def cost(self, case: OpCase, forward: bool, itemsize: int) -> Cost:
        """Count the projections, the product of the factors and its projection; backward each twice, the first again.

        The factors and their product are written and read, and so are their gradients in the backward pass.
        """
        case = _square(case)
        positions, c, h = case.rows * case.length, case.channels, case.outputs
        projections, other_flops = 2 * (4 * h + c) * c, 2 * h * (case.length + c)
        flops = positions * (projections + other_flops if forward else 3 * projections + 2 * other_flops)
        return Cost(
            flops, positions * (2 * h + c), positions * (2 * c + 6 * h if forward else 3 * c + 9 * h) * itemsize
        )

    def example(self, kind: str, s: int, r: int) -> OpCase:
        return _triangle(kind, s, 128, 128, dropped=True, drawn=True)

    def numbers(self, case: OpCase) -> int:
        return case.rows * case.length * (4 * case.outputs + case.channels)

    def size(self, case: OpCase) -> str:
        dropout = ", dropout drawn" if case.drawn else ", dropout" if case.dropped else ""
        n = _square(case).length
        residues = f"{n} of {case.full_rows} residues" if case.full_rows else f"{n} residues"
        return f"{residues}, {case.channels} channels, inner {case.outputs}{dropout}"


class _OuterProductMean(OpProfile):
    """Algorithm 10 from the alignment, [rows, length], to the new pair representation; `width`: of a factor."""

    # Its kernels are those of other operations.
    name, op, tuned = "outer_product_mean", outer_product_mean, False
    layers = ("outer product",)
    kinds: ClassVar[Kinds] = {"msa": ALIGNMENTS}
    odd = (
        _at("outer_product_mean", "few residues", 33, 9, 64, 24, width=8),
        _at("outer_product_mean", "odd channels", 5, 3, 20, 11, width=7),
        _at("outer_product_mean", "more than a tile", 70, 19, 16, 136, width=16),
    )

    sizes: ClassVar[Sizes] = {"channels": "channels", "width": "hidden", "outputs": "outputs"}

    def arguments(self, case: OpCase, draw: RandomTensors, masked: bool) -> tuple[Argument, ...]:
        c, h, p, n = case.channels, case.width, case.outputs, case.length
        in_parameters = draw.parameter(c, mean=1.0), draw.parameter(c), draw.parameter(2 * h, c, scale=c**-0.5)
        out_parameters = draw.parameter(2 * h), draw.parameter(p, h * h, scale=1 / h), draw.parameter(p)
        return draw.positions(case, c), *in_parameters, *out_parameters, draw.mask(case, masked), draw.normal(n, n, p)

    def cost(self, case: OpCase, forward: bool, itemsize: int) -> Cost:
        """Count the projections and the products. m and z are read and written; backward m and the gradients."""
        products = PROFILES["outer_product"].cost(self._products(case), forward, itemsize)
        positions, pairs = case.rows * case.length, case.length**2
        flops = 4 * positions * case.channels * case.width * (1 if forward else 2)
        moved_elements = positions * case.channels * (1 if forward else 2) + (pairs * case.outputs if forward else 0)
        return Cost(products.flops + flops, 0, products.bytes + moved_elements * itemsize)

    def _products(self, case: OpCase) -> OpCase:
        """Return the case of the outer product alone."""
        at = _at("outer_product", case.where, case.length, case.rows, case.width, case.outputs)
        return replace(at, keys=case.length)

    def example(self, kind: str, s: int, r: int) -> OpCase:
        return _at(self.name, kind, s, r, 256, 128, width=32)

    def numbers(self, case: OpCase) -> int:
        return PROFILES["outer_product"].numbers(self._products(case))

    def size(self, case: OpCase) -> str:
        return f"{super().size(case)}, {case.width} of a factor -> {case.outputs}"


class _GatedAttention(OpProfile):
    """Algorithms 7, 8, 13 and 14 from the normalised operand to the new residual."""

    # Its kernels are those of attention, norm and tail.
    name, op, tuned = "gated_attention", gated_attention, False
    layers = ("attention",)
    kinds: ClassVar[Kinds] = {"row": ALIGNMENTS, "column": ALIGNMENTS, "starting": RESIDUES, "ending": RESIDUES}
    odd = (
        _gated_attention("triangle starting", 17, 17, 24, 2, 16, bias=True, dropped=True, drawn=True),
        _gated_attention("triangle ending", 21, 21, 32, 1, 32, bias=True, transposed=True, dropped=True),
        _gated_attention("msa row", 5, 33, 32, 4, 8, bias=True, dropped=True, drawn=True),
        _gated_attention("msa column", 33, 7, 64, 1, 64, transposed=True),
        _gated_attention("two batches", 10, 5, 16, 2, 24, bias=True, batches=2),
        _gated_attention("wider than its channels", 3, 40, 24, 1, 48),
    )

    sizes: ClassVar[Sizes] = {
        "channels": "channels", "heads": "heads", "width": "width", "bias": "bias", "batches": "batches",
        "dropped": "dropped", "drawn": "dropped",
    }  # fmt: skip

    def arguments(self, case: OpCase, draw: RandomTensors, masked: bool) -> tuple[Argument, ...]:
        """Draw x and the parameters. Triangle attention computes its bias from z, unless rows were left out."""
        c, h, inner = case.channels, case.heads, case.heads * case.width
        projects_bias = case.bias and "msa" not in case.where and case.rows == case.batches * case.length
        bias = None
        if case.bias and not projects_bias:
            z = draw.positions(replace(case, rows=case.batches * case.length, transposed=False), h)
            bias = z.movedim(-1, -3).detach()
        norm = draw.positions(case, c), draw.parameter(c, mean=1.0), draw.parameter(c)
        in_parameters = draw.parameter(4 * inner + (h if projects_bias else 0), c, scale=c**-0.5), draw.parameter(inner)
        out_parameters = draw.parameter(c, inner, scale=inner**-0.5), draw.parameter(c)
        factors = draw.factors(1, case.length, c, drawn=case.drawn) if case.dropped else None
        return *norm, *in_parameters, *out_parameters, draw.mask(case, masked), bias, h, factors

    def cost(self, case: OpCase, forward: bool, itemsize: int) -> Cost:
        """Count the products of attention and projections, and the bytes of x, the result and the saved tensors.

        Backward reads the gradient, x, the projection and o, and writes the gradient of x.
        """
        attended = attention_cost(case, forward, itemsize, case.heads)
        positions, inner = case.rows * case.length, case.heads * case.width
        through = 2 * positions * case.channels * 5 * inner * (1 if forward else 2)
        moved_bytes = positions * ((2 if forward else 3) * case.channels + 5 * inner) * itemsize
        return Cost(attended.flops + through, attended.exps + positions * inner, moved_bytes)

    def example(self, kind: str, s: int, r: int) -> OpCase:
        if kind in ("row", "column"):
            rows, length = (s, r) if kind == "row" else (r, s)
            case = _gated_attention(f"msa {kind}", rows, length, 256, 8, 32, transposed=kind == "column")
            return replace(case, bias=kind == "row", dropped=kind == "row", drawn=kind == "row")
        case = _gated_attention(f"triangle {kind}", s, s, 128, 4, 32, transposed=kind == "ending")
        return replace(case, bias=True, dropped=True, drawn=True)

    def numbers(self, case: OpCase) -> int:
        return max(case.logits, case.rows * case.length * 4 * case.heads * case.width)

    def size(self, case: OpCase) -> str:
        at = f"{case.row_count}, {case.channels} channels, {case.heads} heads, {case.length} x {case.length}"
        return f"{at}, width {case.width}{', dropout' if case.dropped else ''}"


# ---- operations of the losses


class _AlignedErrors(OpProfile):
    """FAPE: `rows` are frames, `length` points, `batches` leading axes. With a `bias`, some pairs are masked."""

    name, op, layers = "aligned_errors", aligned_errors, ("fape",)
    kinds: ClassVar[Kinds] = {"fape": ("256", "384")}
    odd = (
        OpCase(op="aligned_errors", where="side chains", rows=37, length=131),
        OpCase(op="aligned_errors", where="layers, chains", rows=19, length=19, batches=3, bias=True),
    )

    sizes: ClassVar[Sizes] = {"batches": "batches"}

    def arguments(self, case: OpCase, draw: RandomTensors, masked: bool) -> tuple[Argument, ...]:
        leading = (case.batches,) if case.batches > 1 else ()
        # The matrices need not be rotations.
        frames = [draw.normal(*lead, case.rows, 3, 4) for lead in (leading, ())]
        points = [3 * draw.normal(*lead, case.length, 3) for lead in (leading, ())]
        masks = [(draw.normal(n) > -1).to(draw.dtype) for n in (case.rows, case.length)]
        pair_mask = draw.normal(case.rows, case.length) > 0 if case.bias else None
        return frames[0], points[0], frames[1], points[1], *masks, pair_mask

    def cost(self, case: OpCase, forward: bool, itemsize: int) -> Cost:
        """Count 18 products for the vectors of a pair, 3 squares and a root; backward twice as many, and 24 more."""
        pairs = case.batches * case.rows * case.length
        return Cost(2 * pairs * (21 if forward else 66), pairs * (1 if forward else 2), 0)

    def example(self, kind: str, s: int, r: int) -> OpCase:
        # Residues have 8 rigid groups and 14 atoms.
        return OpCase(op=self.name, where=kind, rows=8 * s, length=14 * s)

    def numbers(self, case: OpCase) -> int:
        return case.batches * case.rows * case.length

    def size(self, case: OpCase) -> str:
        return f"{case.batches} x {case.rows} frames, {case.length} points"


class _Overlaps(OpProfile):
    """Clashes: `length` atoms, 14 per residue, in chains of 50 residues."""

    name, op, layers = "overlaps", overlaps, ("clashes",)
    kinds: ClassVar[Kinds] = {"clashes": ("256", "384")}
    odd = (OpCase(op="overlaps", where="clashes", rows=1, length=14 * 9),)

    sizes: ClassVar[Sizes] = {}

    def arguments(self, case: OpCase, draw: RandomTensors, masked: bool) -> tuple[Argument, ...]:
        # At this size in angstrom, some atoms overlap.
        n, size = case.length, case.length ** (1 / 3)
        atoms, radius = draw.normal(n, 3, scale=size), 1.5 + draw.normal(n, scale=0.1)
        number = torch.arange(n, device=draw.device)
        index = number // 14
        return atoms, radius, (draw.normal(n) > -1).to(draw.dtype), index, index, index // 50, number % 14

    def cost(self, case: OpCase, forward: bool, itemsize: int) -> Cost:
        """Count six products or sums and a root per pair; the gradient takes them again, and six more."""
        return Cost(case.length**2 * (6 if forward else 12), case.length**2, 0)

    def example(self, kind: str, s: int, r: int) -> OpCase:
        return OpCase(op=self.name, where=kind, rows=1, length=14 * s)

    def numbers(self, case: OpCase) -> int:
        return case.length**2

    def size(self, case: OpCase) -> str:
        return f"{case.length} atoms"


# ---- all of them


PROFILES: Mapping[str, OpProfile] = {
    profile.name: profile
    for profile in (
        _Attention(), _GlobalAttention(), _GatedAttention(), _LayerNorm(), _NormLinear(), _Gate(),
        _GatedLinearResidual(), _Transition(), _TriangleFactor(), _OuterProduct(), _OuterProductMean(),
        _TriangleMultiplication(), _AlignedErrors(), _Overlaps(),
    )
}  # fmt: skip
OPS = {name: profile.op for name, profile in PROFILES.items()}
# Choices of --op.
BENCHED = tuple(name for name, profile in PROFILES.items() if profile.kinds)
TUNED = tuple(name for name in BENCHED if PROFILES[name].tuned)
ODD = tuple(case for profile in PROFILES.values() for case in profile.odd)


def meant_by(ops: Iterable[str]) -> list[str]:
    """Return the operations that --op selects: "attention" includes global attention, which has the same kernels."""
    ops = set(ops)
    return [name for name, profile in PROFILES.items() if ops & {name, profile.part_of}]


def size_in_words(case: OpCase) -> str:
    """Describe the size of a case: "256 rows, 4 heads, 256 x 256, width 32"."""
    return PROFILES[case.op].size(case)


def inputs(case: OpCase, dtype: torch.dtype, device: torch.device | str, *, masked: bool = False) -> OpInputs:
    """Draw the inputs of a case with a fixed seed. masked: with random masked keys, and one row of only masked keys."""
    return PROFILES[case.op].inputs(case, dtype, torch.device(device), masked)
