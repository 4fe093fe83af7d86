"""What shapes the operands of an operation must have beside each other.

A kernel takes its sizes from one operand and reads the others by them: one that is smaller would be read past its end,
one that the definition broadcasts would be read wrongly.  So an operation lists its operands once, with the names of
their axes and the sizes that follow from the others, and asks twice: `refusal` before the fast way is chosen (the
definition then broadcasts, or raises its own error), `require` in the registered operation, which compiled graphs and
direct calls of `torch.ops.warpfold` reach too.  Either compares a tuple per operand: a fraction of a microsecond.
"""

from itertools import zip_longest

from torch import Tensor

# Its name; its axes by name; the tensor, or None where it is left out; its sizes, or None if it has too few axes.
Operand = tuple[str, str, Tensor | None, tuple[int, ...] | None]


def refusal(*operands: Operand) -> str | None:
    """Return why the fast way does not take these operands, or None: the first whose sizes are not as listed.

    The reason holds no sizes, so that a run whose lengths vary logs it once.
    """
    for name, axes, t, sizes in operands:
        if t is not None and t.shape != sizes:
            return f"{name} is not {axes} beside the others"
    return None


def require(op: str, *operands: Operand) -> None:
    """Raise ValueError if an operand's sizes are not as listed."""
    for name, axes, t, sizes in operands:
        if t is not None and t.shape != sizes:
            wanted = axes if sizes is None else f"{axes} = {list(sizes)}"
            raise ValueError(f"{op}: {name} is {list(t.shape)}, not {wanted}")


def together(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape that these broadcast to, or None if they do not.

    As torch.broadcast_shapes, which takes ten times as long for what is nearly always asked: shapes that are equal.
    """
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return tuple(first)
    sizes = []
    for axis in zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1):
        wide = {size for size in axis if size != 1}
        if len(wide) > 1:
            return None
        sizes.append(wide.pop() if wide else 1)
    return tuple(reversed(sizes))


def spreads(shape: tuple[int, ...], over: tuple[int, ...]) -> bool:
    """Return whether a tensor of this shape expands to that one."""
    return len(shape) <= len(over) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(over)))


def with_axes(t: Tensor, least: int) -> tuple[int, ...] | None:
    """Return the sizes of an operand that decides on those of others: its own, or None if it has fewer axes."""
    return t.shape if t.dim() >= least else None
