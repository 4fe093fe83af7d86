"""Cases of triangle_multiplication, as the model's layers make them and beyond: for the interpreter and for a GPU."""

from typing import Any

import torch
from torch import Tensor

from tests.ops.triton.layouts import laid, within

# leading axes, residues, channels of x, of a factor; whether there are biases; dropout factors; outgoing; fused;
# whether x lies in memory with its positions turned; the update alone, without biases of norms, is "alone"
MULTIPLICATIONS: dict[str, tuple[tuple[int, ...], int, int, int, bool, bool, bool, bool, bool]] = {
    "outgoing": ((), 16, 64, 32, True, True, True, False, False),
    "incoming, rows that are padded": ((), 9, 32, 16, True, False, False, False, False),
    "fused, without biases, turned": ((2,), 5, 24, 40, False, True, True, True, True),
    "outgoing, alone": ((2,), 5, 24, 16, False, True, True, False, True),
    "fused, incoming, in two batches": ((2, 2), 3, 20, 16, True, True, False, True, False),
}


def multiplication_case(name: str, dtype: torch.dtype) -> tuple[list[Any], Tensor]:
    """The arguments of triangle_multiplication, tensors in buffers of NaN; and a gradient of the output."""
    lead, n, c, h, biased, dropped, outgoing, fused, turned = MULTIPLICATIONS[name]
    axes, o = len(lead) + 3, 4 * h + c
    order = (*range(len(lead)), axes - 2, axes - 3, axes - 1) if turned else None
    x = laid((*lead, n, n, c), order, 8 * (not turned))
    mask = (laid((*lead, n, n)) > -0.8).double()
    of = [1 + 0.3 * laid((c,)), 0.3 * laid((c,), pad=1), laid((o, c)) * c**-0.5, laid((o,)) if biased else None]
    out = [1 + 0.3 * laid((h,)), 0.3 * laid((h,), pad=1), laid((c, h)) * h**-0.5, laid((c,)) if biased else None]
    alone = "alone" in name
    if alone:
        of[1] = out[1] = None
    parameters = [None if p is None else within(p, torch.float32) for p in (*of, *out)]
    shared = (*(1 for _ in lead), 1, n, c)
    factors = within((laid(shared) > -0.5).double() * 1.25, dtype).detach() if dropped else None
    arguments = [within(x, dtype), within(mask, torch.float32).detach(), *parameters, outgoing, fused, factors]
    arguments += [1e-5, False] if alone else []
    return arguments, within(laid((*lead, n, n, c), pad=8), dtype).detach()
