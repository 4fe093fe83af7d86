"""Cases of layer_norm and norm_linear, as the model's layers make them and beyond, for the interpreter and a GPU."""

import torch
from torch import Tensor

from tests.ops.triton.layouts import laid

# channels, shape of the positions, order in memory (None: as they stand), padding, of the gradient likewise
Layout = tuple[tuple[int, ...], tuple[int, ...] | None, int]
PLAIN: Layout = ((7, 19), None, 0)
TURNED: Layout = ((11, 13), (1, 0, 2), 0)  # within columns
SLICED: Layout = ((9, 10), None, 8)  # some of the outputs of a projection
BATCHED: Layout = ((2, 5, 9), (0, 2, 1, 3), 8)
FIRST: Layout = ((8, 16), (2, 0, 1), 0)  # channels in front, as a triangle's product lays them
MANY: Layout = ((2, 3, 2, 3, 2), (4, 0, 2, 1, 3, 5), 8)  # axes that cannot be merged
ONE: Layout = ((1, 1), None, 0)

NORMS: dict[str, tuple[int, Layout, Layout]] = {
    "16": (16, PLAIN, TURNED),
    "20, turned": (20, TURNED, TURNED),
    "64, padded rows": (64, SLICED, PLAIN),
    "128": (128, PLAIN, PLAIN),
    "128, turned in a batch": (128, BATCHED, PLAIN),
    "128, channels in front": (128, FIRST, PLAIN),
    "128, many axes": (128, MANY, PLAIN),
    "200": (200, PLAIN, SLICED),
    "256, turned": (256, TURNED, PLAIN),
    "384": (384, PLAIN, PLAIN),
    "384, one": (384, ONE, PLAIN),
    "1024": (1024, PLAIN, PLAIN),
    "64, no bias": (64, BATCHED, PLAIN),
}

# channels, outputs, how many of them have a bias
LINEARS: dict[str, tuple[int, int, int, Layout, Layout]] = {
    "16 to 4": (16, 4, 0, PLAIN, PLAIN),
    "20 to 8, turned": (20, 8, 8, TURNED, PLAIN),
    "64 to 260, as a template's": (64, 260, 64, BATCHED, PLAIN),
    "128 to 132": (128, 132, 132, PLAIN, PLAIN),
    "128 to 516, as a triangle attention's, turned": (128, 516, 128, TURNED, TURNED),
    "128 to 128, channels in front": (128, 128, 128, FIRST, PLAIN),
    "128 to 8, many axes": (128, 8, 0, MANY, PLAIN),
    "200 to 130": (200, 130, 0, SLICED, SLICED),
    "256 to 136, turned": (256, 136, 136, TURNED, PLAIN),
    "384 to 100": (384, 100, 100, PLAIN, PLAIN),
    "1024 to 20, one": (1024, 20, 20, ONE, PLAIN),
    "128 to 40, no bias of the norm": (128, 40, 7, TURNED, PLAIN),
    "384 to 40, no bias of the norm": (384, 40, 0, PLAIN, PLAIN),
}


def _like(shape: tuple[int, ...], c: int, of: Layout) -> Tensor:
    """A gradient of positions of this shape, laid out as the layout says where it speaks of as many axes."""
    _, order, pad = of
    return laid((*shape, c), order if order is not None and len(order) == len(shape) + 1 else None, pad)


def norm_case(name: str, mean: float = 0.0) -> tuple[list[Tensor | None], Tensor]:
    """x, weight and bias; and a gradient of the output."""
    c, (shape, order, pad), of_grad = NORMS[name]
    x = laid((*shape, c), order, pad, mean)
    x[(0,) * (x.dim() - 1)] = mean + 0.5  # nothing but its mean
    return [x, 1 + 0.3 * laid((c,)), None if "no bias" in name else laid((c,), pad=1)], _like(shape, c, of_grad)


def linear_case(name: str, mean: float = 0.0) -> tuple[list[Tensor | None], Tensor]:
    """The arguments of norm_linear; and a gradient of the output."""
    c, outputs, biased, (shape, order, pad), of_grad = LINEARS[name]
    x = laid((*shape, c), order, pad, mean)
    x[(0,) * (x.dim() - 1)] = mean + 0.5
    bias = laid((biased,)) if biased else None
    return (
        [
            *(x, 1 + 0.3 * laid((c,)), None if "no bias of the norm" in name else laid((c,), pad=1)),
            *(laid((outputs, c)) * c**-0.5, bias),
        ],
        _like(shape, outputs, of_grad),
    )


def of_dtype(arguments: list[Tensor | None], dtype: torch.dtype) -> list[torch.dtype]:
    """Parameters are in fp32, whatever the activations are."""
    return [dtype, *[torch.float32] * (len(arguments) - 1)]
