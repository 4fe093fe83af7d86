"""The profiles of operations of the losses, which no layer calls; the others are in check/cases.py."""

from typing import ClassVar

import torch

from warpfold.check.op_profile import Argument, Cost, Kinds, LayerSizes, OpCase, OpProfile, RandomTensors
from warpfold.ops.pairs import aligned_errors, overlaps


class AlignedErrors(OpProfile):
    """`rows` are frames, `length` points, `batches` leading axes; with a `bias`, some pairs do not count."""

    name, op, layers = "aligned_errors", aligned_errors, ("fape",)
    kinds: ClassVar[Kinds] = {"fape": ("256", "384")}
    odd = (
        OpCase(op="aligned_errors", where="side chains", rows=37, length=131),
        OpCase(op="aligned_errors", where="layers, chains", rows=19, length=19, batches=3, bias=True),
    )

    def sizes(self, layer: LayerSizes) -> dict[str, int]:
        return {"batches": layer.batches}

    def arguments(self, case: OpCase, draw: RandomTensors, masked: bool) -> tuple[Argument, ...]:
        leading = (case.batches,) if case.batches > 1 else ()
        frames = [draw.normal(*lead, case.rows, 3, 4) for lead in (leading, ())]  # any matrices will do
        points = [3 * draw.normal(*lead, case.length, 3) for lead in (leading, ())]
        masks = [(draw.normal(n) > -1).to(draw.dtype) for n in (case.rows, case.length)]
        pair_mask = draw.normal(case.rows, case.length) > 0 if case.bias else None
        return frames[0], points[0], frames[1], points[1], *masks, pair_mask

    def cost(self, case: OpCase, forward: bool, itemsize: int) -> Cost:
        """Count of a pair 18 products for its vectors, 3 squares and a root; backward twice again, and 24 more."""
        pairs = case.batches * case.rows * case.length
        return Cost(2 * pairs * (21 if forward else 66), pairs * (1 if forward else 2), 0)

    def example(self, kind: str, s: int, r: int) -> OpCase:
        return OpCase(op=self.name, where=kind, rows=8 * s, length=14 * s)  # rigid groups and atoms of residues

    def numbers(self, case: OpCase) -> int:
        return case.batches * case.rows * case.length

    def size(self, case: OpCase) -> str:
        return f"{case.batches} x {case.rows} frames, {case.length} points"


class Overlaps(OpProfile):
    """`length` atoms, 14 of a residue, in chains of 50 residues."""

    name, op, layers = "overlaps", overlaps, ("clashes",)
    kinds: ClassVar[Kinds] = {"clashes": ("256", "384")}
    odd = (OpCase(op="overlaps", where="clashes", rows=1, length=14 * 9),)

    def sizes(self, layer: LayerSizes) -> dict[str, int]:
        return {}

    def arguments(self, case: OpCase, draw: RandomTensors, masked: bool) -> tuple[Argument, ...]:
        n, size = case.length, case.length ** (1 / 3)  # angstrom: some overlap, most do not
        atoms, radius = draw.normal(n, 3, scale=size), 1.5 + draw.normal(n, scale=0.1)
        number = torch.arange(n, device=draw.device)
        index = number // 14
        return atoms, radius, (draw.normal(n) > -1).to(draw.dtype), index, index, index // 50, number % 14

    def cost(self, case: OpCase, forward: bool, itemsize: int) -> Cost:
        """Count of a pair six products or sums and a root, which its gradient takes again, with six more."""
        return Cost(case.length**2 * (6 if forward else 12), case.length**2, 0)

    def example(self, kind: str, s: int, r: int) -> OpCase:
        return OpCase(op=self.name, where=kind, rows=1, length=14 * s)

    def numbers(self, case: OpCase) -> int:
        return case.length**2

    def size(self, case: OpCase) -> str:
        return f"{case.length} atoms"
