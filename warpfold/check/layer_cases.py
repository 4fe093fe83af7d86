"""The profiles of operations that are a whole layer of the trunk; `check/cases.py` lists them with the others."""

import math
from dataclasses import replace
from typing import Any, ClassVar

from warpfold.check.op_profile import (
    ALIGNMENTS,
    Argument,
    Cost,
    Kinds,
    LayerSizes,
    OpCase,
    OpProfile,
    RandomTensors,
    attention_cost,
)
from warpfold.ops.attention import gated_attention
from warpfold.ops.triangle import triangle_multiplication

RESIDUES = ("64", "128", "256", "384", "512", "768", "1024")


def _gated_attention(where: str, rows: int, length: int, channels: int, heads: int, width: int, **more: Any) -> OpCase:
    at = OpCase(op="gated_attention", where=where, rows=rows, length=length, **more)
    return replace(at, channels=channels, heads=heads, width=width)


def _triangle(where: str, n: int, channels: int, hidden: int, dropped: bool = False, drawn: bool = False) -> OpCase:
    """Return a case; `where` says whether it is incoming, and whether it is fused (AlphaFold 2.3)."""
    at = OpCase(op="triangle_multiplication", where=where, rows=n, length=n, channels=channels, outputs=hidden)
    return replace(at, dropped=dropped, drawn=drawn)


def _square(case: OpCase) -> OpCase:
    """Return a case of as many rows as positions in each: of one whose rows were cut, of as many positions in all."""
    n = math.isqrt(case.rows * case.length)
    return replace(case, rows=n, length=n)


class TriangleMultiplicationProfile(OpProfile):
    """Algorithms 11 and 12 from the normalised operand to the new residual."""

    name, op = "triangle_multiplication", triangle_multiplication
    layers = ("triangle product",)
    kinds: ClassVar[Kinds] = {"outgoing": RESIDUES, "incoming": RESIDUES}
    odd = (
        _triangle("outgoing, dropout", 9, 24, 40, dropped=True),
        _triangle("incoming, dropout drawn", 17, 32, 16, dropped=True, drawn=True),
        _triangle("incoming, fused", 16, 64, 24),
        _triangle("outgoing, fused, without biases", 5, 128, 128),
    )

    def sizes(self, layer: LayerSizes) -> dict[str, int]:
        return {
            "channels": layer.channels, "outputs": layer.hidden, "dropped": layer.dropped, "drawn": layer.dropped
        }  # fmt: skip

    def arguments(self, case: OpCase, draw: RandomTensors, masked: bool) -> tuple[Argument, ...]:
        """Draw x, the mask and the parameters; without biases where the case says so."""
        case = _square(case)
        c, h, where = case.channels, case.outputs, case.where
        x, o, biased = draw.positions(case, c), 4 * h + c, "without biases" not in where
        into = draw.parameter(o, c, scale=c**-0.5), draw.parameter(o) if biased else None
        out_of = draw.parameter(c, h, scale=h**-0.5), draw.parameter(c) if biased else None
        norm, norm_out = ((draw.parameter(n, mean=1.0), draw.parameter(n)) for n in (c, h))
        factors = draw.factors(1, case.length, c, drawn=case.drawn) if case.dropped else None
        of_layer = "incoming" not in where, "fused" in where, factors
        return x, draw.mask(case, masked), *norm, *into, *norm_out, *out_of, *of_layer

    def cost(self, case: OpCase, forward: bool, itemsize: int) -> Cost:
        """Count the projections, the product of the factors and its projection; backward each twice and the first once
        more; the factors and their product are written and read, and so are, backward, their gradients."""
        case = _square(case)
        positions, c, h = case.rows * case.length, case.channels, case.outputs
        projections, rest = 2 * (4 * h + c) * c, 2 * h * (case.length + c)
        flops = positions * (projections + rest if forward else 3 * projections + 2 * rest)
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


class GatedAttentionProfile(OpProfile):
    """Algorithms 7, 8, 13 and 14 from the normalised operand to the new residual."""

    name, op, tuned = "gated_attention", gated_attention, False  # its kernels are those of attention, norm and tail
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

    def sizes(self, layer: LayerSizes) -> dict[str, int]:
        sizes = {"channels": layer.channels, "heads": layer.heads, "width": layer.width, "bias": layer.bias}
        return sizes | {"batches": layer.batches, "dropped": layer.dropped, "drawn": layer.dropped}

    def arguments(self, case: OpCase, draw: RandomTensors, masked: bool) -> tuple[Argument, ...]:
        """Draw x and the parameters; z itself makes the bias of its attention, unless rows of it were left out."""
        c, h, inner = case.channels, case.heads, case.heads * case.width
        own = case.bias and "msa" not in case.where and case.rows == case.batches * case.length
        bias = None
        if case.bias and not own:
            z = draw.positions(replace(case, rows=case.batches * case.length, transposed=False), h)
            bias = z.movedim(-1, -3).detach()
        norm = draw.positions(case, c), draw.parameter(c, mean=1.0), draw.parameter(c)
        into = draw.parameter(4 * inner + (h if own else 0), c, scale=c**-0.5), draw.parameter(inner)
        out_of = draw.parameter(c, inner, scale=inner**-0.5), draw.parameter(c)
        factors = draw.factors(1, case.length, c, drawn=case.drawn) if case.dropped else None
        return *norm, *into, *out_of, draw.mask(case, masked), bias, h, factors

    def cost(self, case: OpCase, forward: bool, itemsize: int) -> Cost:
        """Count what attention and the projections multiply; x, the result and what is kept of each position.

        Backward reads grad, x, the projection and o, and writes the gradient of x.
        """
        attended = attention_cost(case, forward, itemsize, case.heads)
        positions, inner = case.rows * case.length, case.heads * case.width
        through = 2 * positions * case.channels * 5 * inner * (1 if forward else 2)
        moved = positions * ((2 if forward else 3) * case.channels + 5 * inner) * itemsize
        return Cost(attended.flops + through, attended.exps + positions * inner, moved)

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
