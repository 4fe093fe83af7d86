"""Check the shapes of an operation's operands against each other.

A kernel takes its sizes from one operand and uses them for the others: it would read past the end of one that is
smaller, and read one that the definition broadcasts wrongly.  So each operation states its operands once:

    Shapes("x [*, c], o [*, i], weight [c, i], factors ([*, c])", names)

Each name of an axis stands for one size, which the first operand that has it decides.  "c d" is a product of sizes, 1
to 4 are themselves; [] is a number.  "*" stands for any leading axes, the same for all operands; "..." for any, not
compared.  In parentheses: any shape that expands to this one.  The check runs twice: `unsupported_reason` before the
fast way is chosen (the definition then broadcasts, or raises its own error), and `require` in the registered operation,
which compiled graphs and direct calls of `torch.ops.warpfold` reach too.

Shapes are plain tuples here: slicing and joining those takes a third to a quarter of the time that torch.Size takes.
"""

import functools
import math
import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

Shape = tuple[int, ...]
Sizes = dict[str, Any]  # of each axis by name; of "*": those of the leading axes
EMPTY = ""  # the reason not to take the fast way where there is nothing to compute: not worth reporting
LEADING = ("*", "...")


class _Operand(NamedTuple):
    name: str
    text: str  # its axes as written
    leading: str  # "*", "..." or "" for none
    axes: tuple[str, ...]  # the others
    expands: bool  # any shape that expands to this one will do


class Shapes:
    """The shapes that operands must have; operands in the text that are not among `names` are left out."""

    def __init__(self, text: str, names: Sequence[str]) -> None:
        self.operands: list[_Operand] = []
        self.positions: list[int] = []  # of the operands among the names
        for name, parenthesis, inner in re.findall(r"(\w+) (\(?)\[(.*?)\]", text):
            if name in names:
                axes = tuple(inner.split(", ")) if inner else ()
                leading = axes[0] if axes[:1] and axes[0] in LEADING else ""
                own = axes[1:] if leading else axes
                written = f"[{inner}] or 1 on an axis" if parenthesis else f"[{inner}]"
                self.operands.append(_Operand(name, written, leading, own, bool(parenthesis)))
                self.positions.append(list(names).index(name))
        # Models call an operation with few different shapes, and looking these up takes less than comparing them.
        self._remembered = functools.lru_cache(maxsize=1024)(self._compare)

    def unsupported_reason(self, given: Sequence[Any]) -> str | None:
        """Return why the fast way does not take these operands, EMPTY if there is nothing to compute, else None.

        The reason holds no sizes, so that a run whose lengths vary logs it once.
        """
        wrong, sizes = self._find(given)
        if wrong is not None:
            return f"{wrong.name} is not {wrong.text} beside the others"
        return EMPTY if sizes["empty"] else None

    def require(self, op: str, args: Sequence[Any]) -> Sizes:
        """Raise ValueError if an operand among `args`, which go by the names, has another shape; return all sizes."""
        given = [args[i] for i in self.positions]
        wrong, sizes = self._find(given)
        if wrong is not None:
            right = _right(wrong, sizes)
            wanted = wrong.text if right is None else f"{wrong.text} = {list(right)}"
            raise ValueError(f"{op}: {wrong.name} is {list(given[self.operands.index(wrong)].shape)}, not {wanted}")
        return sizes

    def _find(self, given: Sequence[Any]) -> tuple[_Operand | None, Sizes]:
        shapes = tuple([None if t is None else t.shape for t in given])
        if torch.compiler.is_compiling():  # a graph can hold no cache, and sizes that it does not know have no hash
            return self._compare(shapes)
        return self._remembered(shapes)

    def _compare(self, shapes: tuple[Shape | None, ...]) -> tuple[_Operand | None, Sizes]:
        """Return the first operand whose shape is wrong, if any, and the sizes found before it."""
        sizes: Sizes = {"1": 1, "2": 2, "3": 3, "4": 4, "empty": False}
        for operand, given in zip(self.operands, shapes):
            if given is None:
                continue
            shape, rank = tuple(given), len(operand.axes)
            sizes["empty"] = sizes["empty"] or 0 in shape
            if operand.expands:
                # After "..." only the axes that are named are compared; axes left out count as shared.
                right = _right(operand, sizes)
                if right is None or not expands_to(shape[-rank:] if operand.leading == "..." else shape, right):
                    return operand, sizes
                continue
            split = len(shape) - rank
            if split < 0 or (split > 0 and not operand.leading):
                return operand, sizes
            if operand.leading == "*" and sizes.setdefault("*", shape[:split]) != shape[:split]:
                return operand, sizes
            for axis, size in zip(operand.axes, shape[split:]):
                if axis not in sizes:
                    sizes[axis] = math.prod([sizes[factor] for factor in axis.split()]) if " " in axis else size
                if sizes[axis] != size:
                    return operand, sizes
        return None, sizes


def _right(operand: _Operand, sizes: Sizes) -> Shape | None:
    """Return the shape that an operand should have, or None if the others do not decide it."""
    leading = sizes.get("*") if operand.leading == "*" else ()
    if leading is None or any(axis not in sizes for axis in operand.axes):
        return None
    return (*leading, *(sizes[axis] for axis in operand.axes))


def broadcast_shape(*shapes: Shape) -> Shape | None:
    """Return the shape that these broadcast to, or None if they do not.

    Like torch.broadcast_shapes, which takes ten times as long for equal shapes, the usual case.
    """
    first = shapes[0]
    for shape in shapes:
        if shape != first:
            break
    else:
        return first
    sizes = []
    for axis in zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1):
        longer = {size for size in axis if size != 1}
        if len(longer) > 1:
            return None
        sizes.append(longer.pop() if longer else 1)
    return tuple(reversed(sizes))


def expands_to(shape: Shape, target: Shape) -> bool:
    """Return whether a tensor of this shape expands to the target."""
    added = len(target) - len(shape)
    if added < 0:
        return False
    for a, b in zip(shape, target[added:]):  # noqa: SIM110  (a generator takes twice the time)
        if a != b and a != 1:
            return False
    return True
