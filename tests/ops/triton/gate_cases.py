"""Cases of gate and tail, as the model's layers make them and beyond: for the interpreter and for a GPU."""

from torch import Tensor

from tests.ops.triton.layouts import laid

Order = tuple[int, ...] | None

# shape; order in memory of x and of g, padding of each (they are parts of wider rows), order of the gradient
GATES: dict[str, tuple[tuple[int, ...], Order, int, Order, int, Order]] = {
    "as they stand": ((7, 19, 128), None, 0, None, 0, None),
    "parts of a projection": ((9, 10, 128), None, 392, None, 392, None),
    "turned": ((11, 13, 64), (1, 0, 2), 0, (1, 0, 2), 8, (0, 1, 2)),
    "one of them turned": ((2, 11, 13, 20), (0, 2, 1, 3), 0, None, 4, (0, 2, 1, 3)),
    "channels in front": ((6, 8, 16), (2, 0, 1), 0, None, 8, (2, 0, 1)),
    "axes that cannot be merged": ((2, 3, 2, 3, 2, 5), (4, 0, 2, 1, 3, 5), 3, None, 1, None),
    "a row": ((300,), None, 0, None, 0, None),
    "few channels": ((3, 5, 4), None, 0, None, 4, None),
}

# shape of the positions, channels, inputs; order of x; of o, of g with its padding; shape of the factors; order of
# the gradient
TAILS: dict[str, tuple[tuple[int, ...], int, int, Order, Order, Order, int, tuple[int, ...] | None, Order]] = {
    "starting node": ((9, 10), 128, 128, None, None, None, 388, (1, 10, 128), None),
    "ending node": ((10, 9), 128, 128, (1, 0, 2), (1, 0, 2), (1, 0, 2), 388, (10, 1, 128), (1, 0, 2)),
    "row attention, in a batch": ((2, 5, 9), 64, 32, None, None, None, 96, (2, 1, 9, 64), None),
    "column attention": ((9, 10), 256, 136, (1, 0, 2), (1, 0, 2), (1, 0, 2), 0, None, (0, 1, 2)),
    "odd": ((7, 13), 20, 200, None, (1, 0, 2), None, 3, (7, 13, 1), None),
    "channels in front": ((6, 8), 16, 24, (2, 0, 1), None, None, 0, (1, 8, 16), (2, 0, 1)),
    "axes that cannot be merged": (
        (2, 3, 2, 3, 2),
        24,
        16,
        (4, 0, 2, 1, 3, 5),
        None,
        None,
        0,
        (2, 1, 2, 1, 1, 24),
        None,
    ),
    "one": ((1,), 384, 300, None, None, None, 0, (1, 1), None),
}

# shape of the positions, channels, order of y and g in memory, and their padding
FACTORS: dict[str, tuple[tuple[int, ...], int, Order, int]] = {
    "outgoing": ((16, 24), 64, None, 264),
    "in a batch, turned": ((2, 9, 10), 20, (0, 2, 1, 3), 4),
    "many axes": ((2, 3, 2, 3, 2), 8, (4, 0, 2, 1, 3, 5), 0),
}


def factor_case(name: str) -> tuple[list[Tensor], Tensor]:
    """y, g and the mask of triangle_factor; and a gradient of the output."""
    shape, c, order, pad = FACTORS[name]
    mask = (laid(shape) > -0.5).double()
    *lead, i, k = shape
    return [laid((*shape, c), order, pad), laid((*shape, c), order, pad + 8), mask], laid((*lead, c, i, k))


def gate_case(name: str) -> tuple[list[Tensor], Tensor]:
    """x and g; and a gradient of the output."""
    shape, x, x_pad, g, g_pad, of_grad = GATES[name]
    return [laid(shape, x, x_pad), laid(shape, g, g_pad)], laid(shape, of_grad)


def tail_case(name: str) -> tuple[list[Tensor | None], Tensor]:
    """The arguments of tail, the factors without those that dropout kept; and a gradient of the output."""
    shape, c, inputs, x, o, g, g_pad, kept, of_grad = TAILS[name]
    factors = None if kept is None else (laid(kept) > -0.5).double() * 1.25
    return (
        [
            laid((*shape, c), x),
            laid((*shape, inputs), o, 8 * (inputs == 136)),
            laid((*shape, inputs), g, g_pad),
            laid((c, inputs)) * inputs**-0.5,
            laid((c,)),
            factors,
        ],
        laid((*shape, c), of_grad),
    )
