"""Cases of transition and outer_product, as the model's layers make them and beyond, for the interpreter and a GPU."""

import torch
from torch import Tensor

from tests.ops.triton.layouts import laid
from tests.ops.triton.norm_cases import BATCHED, FIRST, MANY, ONE, PLAIN, SLICED, TURNED, Layout
from warpfold.ops.transition import HALVES

# channels, hidden channels, activation, which biases (of norm, up, down), residual
TRANSITIONS: dict[str, tuple[int, int, str, str, bool, Layout]] = {
    "16, as a small model's": (16, 32, "relu", "nud", True, PLAIN),
    "24, turned": (24, 56, "relu", "nud", True, TURNED),
    "40, SwiGLU, a batch": (40, 40, "swiglu", "n", True, BATCHED),
    "64, as a template's": (64, 128, "relu", "nud", False, SLICED),
    "64, channels in front": (64, 64, "relu", "u", True, FIRST),
    "20, SwiGLU, one": (20, 24, "swiglu", "ud", False, ONE),
    "32, SwiGLU, many axes": (32, 70, "swiglu", "", True, MANY),
}

# batches, sequences, left and right positions, left and right channels, outputs, whether there is a bias; one that is
# not divided is "added last"
OUTERS: dict[str, tuple[int, int, int, int, int, int, int, bool]] = {
    "as the model's": (1, 9, 17, 18, 8, 32, 40, True),
    "odd": (2, 70, 5, 9, 6, 11, 37, True),
    "one sequence, no bias": (1, 1, 16, 3, 8, 8, 12, False),
    "many outputs": (1, 3, 2, 5, 5, 16, 140, True),
    "odd, added last": (2, 20, 5, 9, 6, 11, 37, True),
    "wide factors": (1, 5, 3, 2, 9, 64, 20, True),
}


def transition_case(name: str) -> tuple[list[Tensor | None], Tensor, bool, str]:
    """Return the tensors of a transition, a gradient of its output, `residual` and the activation."""
    c, n, activation, biased, residual, (shape, order, pad) = TRANSITIONS[name]
    x, u = laid((*shape, c), order, pad), HALVES[activation] * n
    biases = (laid((size,), pad=1) if kind in biased else None for kind, size in zip("nud", (c, u, c)))
    up, down = laid((u, c)) * c**-0.5, laid((c, n)) * n**-0.5
    of_norm, of_up, of_down = biases
    if activation == "relu" and of_up is not None:
        # Away from 0, where one rounding makes or unmakes a whole gradient.
        of_up += 5 * of_up.sign()
    grad = laid((*shape, c), order, 8 if pad == 0 else 0)
    return [x, 1 + 0.3 * laid((c,)), of_norm, up, of_up, down, of_down], grad, residual, activation


def outer_case(name: str) -> tuple[list[Tensor | None], Tensor]:
    """Return the arguments of an outer product, and a gradient of its output; a and b lie as halves of a projection."""
    batches, s, i, j, c, d, z, biased = OUTERS[name]
    a, b = laid((batches, s, i, c), pad=8), laid((batches, s, j, d), pad=3)
    weight, bias = laid((z, c * d)) * (c * d) ** -0.5, laid((z,)) if biased else None
    count = laid((batches, i, j, 1)).abs().round() + 1e-3  # 0 where no sequence has both
    if "added last" in name:
        count.clamp_(min=1)
    return [a, b, weight, bias, count], laid((batches, i, j, z), pad=5)


def dtypes(arguments: list[Tensor | None], first: int, dtype: torch.dtype) -> list[torch.dtype]:
    """Return the dtypes of arguments of which the first so many are activations, and the others stay in fp32."""
    return [dtype if i < first else torch.float32 for i in range(len(arguments))]
