"""The profiles of operations that are a whole layer of the trunk; `tune/cases.py` lists them with the others."""

import math
from dataclasses import replace
from typing import ClassVar

from warpfold.ops.triangle_multiplication import triangle_multiplication
from warpfold.tune.profile import Argument, Cost, Kinds, LayerSizes, OpCase, OpProfile, RandomTensors

RESIDUES = ("64", "128", "256", "384", "512", "768", "1024")


def _triangle(where: str, n: int, channels: int, hidden: int, dropped: bool = False, drawn: bool = False) -> OpCase:
    """Return a case; `where` says whether it is incoming, and whether it is fused (AlphaFold 2.3)."""
    at = OpCase(op="triangle_multiplication", where=where, rows=n, length=n, channels=channels, outputs=hidden)
    return replace(at, dropped=dropped, drawn=drawn)


def _square(case: OpCase) -> OpCase:
    """Return a case of as many rows as positions in each: of one whose rows were cut, of as many positions in all."""
    n = math.isqrt(case.rows * case.length)
    return replace(case, rows=n, length=n)


class TriangleMultiplication(OpProfile):
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
