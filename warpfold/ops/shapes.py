"""What shapes the operands of an operation must have beside each other.

A kernel takes its sizes from one operand and reads the others by them: one that is smaller would be read past its end,
one that the definition broadcasts would be read wrongly.  So an operation lists its operands once, with the names of
their axes and the sizes that follow from the others, and asks twice: `refusal` before the fast way is chosen (the
definition then broadcasts, or raises its own error), `require` in the registered operation, which compiled graphs and
direct calls of `torch.ops.warpfold` reach too.  Either compares a tuple per operand: a fraction of a microsecond.
"""

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


def with_axes(t: Tensor, least: int) -> tuple[int, ...] | None:
    """Return the sizes of an operand that decides on those of others: its own, or None if it has fewer axes."""
    return t.shape if t.dim() >= least else None
