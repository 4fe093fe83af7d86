"""The transition on a CPU in blocks, so that the hidden layer never leaves the cache.

The backward pass recomputes the hidden layer: this costs a sixth product and saves a quarter of the block's memory.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.cpu.linear import accumulate, blocks, put, rows, writable
from warpfold.ops.cpu.threads import in_threads, summed
from warpfold.ops.dispatch import Operands, accumulation_dtype, empty_like
from warpfold.ops.transition import HALVES

HIDDEN = 2**20  # hidden activations per block


def transition(t: Operands) -> Tensor:
    """Compute warpfold::transition."""
    x = t.x
    y, dtype = empty_like(x), accumulation_dtype(x)
    nw, nb = t.norm_weight.to(dtype), _cast(t.norm_bias, dtype)
    w1, b1, w2, b2 = (
        t.up.to(x.dtype).t(),
        _cast(t.up_bias, x.dtype),
        t.down.to(x.dtype).t(),
        _cast(t.down_bias, x.dtype),
    )

    def compute(xb: Tensor, yb: Tensor) -> None:
        """Compute a block."""
        xs, results = rows(xb), writable(yb)
        n, _, _ = torch.native_layer_norm(xs, x.shape[-1:], nw, nb, t.eps)
        hidden = _in_place(_before(n, w1, b1, t.activation))
        if t.residual and b2 is not None:
            torch.add(xs, b2, out=results).addmm_(hidden, w2)
        else:
            _linear(hidden, w2, xs if t.residual else b2, results)
        put(yb, results)

    in_threads(compute, blocks(x, x, y, size=_size(t.up)))
    return y


def transition_backward(t: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::transition_backward; one product gives the gradients of up and the norm, as in linear.py."""
    x, up = t.x, t.up
    dx, dtype, c = empty_like(x), accumulation_dtype(x), x.shape[-1]
    nw, nb, w = t.norm_weight.to(dtype), _cast(t.norm_bias, dtype), up.to(dtype)
    one, narrow1, narrow2, b1 = torch.ones_like(nw), up.to(x.dtype), t.down.to(x.dtype), _cast(t.up_bias, x.dtype)

    def zeros() -> list[Tensor]:
        return [torch.zeros_like(w), w.new_zeros(len(w)), torch.zeros_like(t.down, dtype=dtype), w.new_zeros(c)]

    def compute(sums: Sequence[Tensor], xb: Tensor, gb: Tensor, dxb: Tensor) -> None:
        """Compute the gradients of a block, and add to the sums."""
        product, dup_bias, ddown, ddown_bias = sums
        xs, g = rows(xb), rows(gb)
        n, mean, scale = torch.native_layer_norm(xs, [c], nw, nb, t.eps)
        hidden, pre = _hidden(_before(n, narrow1.t(), b1, t.activation))
        accumulate(ddown, g, hidden)
        ddown_bias += g.sum(0, dtype=dtype)
        dpre = _gradient(pre, hidden, torch.mm(g, narrow2))
        standard = (xs.to(dtype) - mean).mul_(scale).to(x.dtype)
        for some, d in zip(_halves(len(up), t.activation), dpre):
            dup_bias[some] += d.sum(0, dtype=dtype)
            accumulate(product[some], d, standard)
        dn = _product(dpre, narrow1)
        dxs, _, _ = torch.ops.aten.native_layer_norm_backward(dn, xs, [c], mean, scale, nw, one, [True, False, False])
        put(dxb, dxs.add_(g) if t.residual else dxs)

    product, dup_bias, ddown, ddown_bias = summed(compute, blocks(x, x, t.grad, dx, size=_size(up)), zeros)
    dup = product * nw if nb is None else product * nw + dup_bias[:, None] * nb
    wholes = (
        *((t.norm_weight, (product * w).sum(0)), (t.norm_bias, dup_bias @ w)),
        *((up, dup), (t.up_bias, dup_bias), (t.down, ddown), (t.down_bias, ddown_bias)),
    )
    gradients = (
        d[:0].to(accumulation_dtype(t.norm_weight)) if p is None else d.to(accumulation_dtype(p)) for p, d in wholes
    )
    return dx, *gradients  # type: ignore[return-value]


def _cast(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


def _linear(x: Tensor, weight: Tensor, added: Tensor | None, out: Tensor | None = None) -> Tensor:
    return torch.mm(x, weight, out=out) if added is None else torch.addmm(added, x, weight, out=out)


def _halves(outputs: int, activation: str) -> list[slice]:
    """Return the slices of `up` that are computed separately: with "swiglu" the gates and the values."""
    size = outputs // HALVES[activation]
    return [slice(start, start + size) for start in range(0, outputs, size)]


def _before(n: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> list[Tensor]:
    """Compute the outputs of `up`, one tensor per slice of `_halves`."""
    halves = _halves(weight.shape[1], activation)
    return [_linear(n, weight[:, some], None if bias is None else bias[some]) for some in halves]


def _in_place(before: list[Tensor]) -> Tensor:
    """Compute the hidden layer in the memory of the outputs of `up`."""
    return before[0].relu_() if len(before) == 1 else F.silu(before[0], inplace=True).mul_(before[1])


def _hidden(before: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Compute the hidden layer and further tensors for the gradient: with "swiglu" gates, values and silu of gates."""
    if len(before) == 1:
        return before[0].relu_(), []
    gate, value = before
    silu = F.silu(gate)
    return silu * value, [gate, value, silu]


def _gradient(pre: list[Tensor], hidden: Tensor, dhidden: Tensor) -> list[Tensor]:
    """Compute the gradients of the outputs of `up` from that of the hidden layer; all arguments are overwritten."""
    if not pre:
        return [dhidden.mul_(hidden.sign_())]
    gate, value, silu = pre
    dgate = torch.ops.aten.silu_backward(value.mul_(dhidden), gate)
    return [dgate, dhidden.mul_(silu)]


def _product(parts: list[Tensor], weight: Tensor) -> Tensor:
    """Multiply the tensors, concatenated along their last axis, by a weight, and round once."""
    if len(parts) == 1:
        return torch.mm(parts[0], weight)
    if weight.dtype.itemsize < 4:
        return torch.mm(torch.cat(parts, 1), weight)
    first = parts[0].shape[1]
    return torch.mm(parts[0], weight[:first]).addmm_(parts[1], weight[first:])


def _size(up: Tensor) -> int:
    return max(1, HIDDEN // len(up))
