"""What shapes the operands of an operation must have beside each other.

A kernel takes its sizes from one operand and reads the others by them: one that is smaller would be read past its end,
one that the definition broadcasts would be read wrongly.  So an operation lists its operands once, with the names of
their axes and the sizes that follow from the others, and asks twice: `refusal` before the fast way is chosen (the
definition then broadcasts, or raises its own error), `require` in the registered operation, which compiled graphs and
direct calls of `torch.ops.warpfold` reach too.

Both run on every call, so shapes are plain tuples here, read from each tensor once: slicing and joining those takes a
fifth of the time that torch.Size takes.
"""

from itertools import zip_longest

from torch import Tensor

Shape = tuple[int, ...]
# Its name; its axes by name; its shape, or None where it is left out; the right shape, or None if it has too few axes.
Operand = tuple[str, str, Shape | None, Shape | None]


def shape_of(t: Tensor | None) -> Shape | None:
    """Return the shape of an operand that may be left out."""
    return None if t is None else tuple(t.shape)


def refusal(*operands: Operand) -> str | None:
    """Return why the fast way does not take these operands, or None: the first whose sizes are not as listed.

    The reason holds no sizes, so that a run whose lengths vary logs it once.
    """
    for name, axes, shape, right in operands:
        if shape is not None and shape != right:
            return f"{name} is not {axes} beside the others"
    return None


def require(op: str, *operands: Operand) -> None:
    """Raise ValueError if an operand's sizes are not as listed."""
    for name, axes, shape, right in operands:
        if shape is not None and shape != right:
            wanted = axes if right is None else f"{axes} = {list(right)}"
            raise ValueError(f"{op}: {name} is {list(shape)}, not {wanted}")


def together(*shapes: Shape) -> Shape | None:
    """Return the shape that these broadcast to, or None if they do not.

    As torch.broadcast_shapes, which takes ten times as long for what is nearly always asked: shapes that are equal.
    """
    first = shapes[0]
    for shape in shapes:
        if shape != first:
            break
    else:
        return first
    sizes = []
    for axis in zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1):
        wide = {size for size in axis if size != 1}
        if len(wide) > 1:
            return None
        sizes.append(wide.pop() if wide else 1)
    return tuple(reversed(sizes))


def spreads(shape: Shape, over: Shape) -> bool:
    """Return whether a tensor of this shape expands to that one."""
    added = len(over) - len(shape)
    if added < 0:
        return False
    for a, b in zip(shape, over[added:]):  # noqa: SIM110  (a generator takes twice the time)
        if a != b and a != 1:
            return False
    return True


def with_axes(shape: Shape, least: int) -> Shape | None:
    """Return the right shape of an operand that decides on those of others: its own, or None if it has fewer axes."""
    return shape if len(shape) >= least else None
