"""The transition on a CPU in blocks, so that the hidden layer never leaves the cache.

The backward pass recomputes the hidden layer: this costs a sixth product and saves a quarter of the block's memory.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.cpu.linear import accumulate, blocks, put, rows, standardise, through_norm, writable
from warpfold.ops.cpu.threads import in_threads, summed
from warpfold.ops.dispatch import Operands, accumulation_dtype, empty_like
from warpfold.ops.transition import HALVES

HIDDEN = 2**20  # hidden activations per block


def transition(t: Operands) -> Tensor:
    """Compute warpfold::transition."""
    x = t.x
    y, wide = empty_like(x), accumulation_dtype(x)
    norm_weight, norm_bias = t.norm_weight.to(wide), _cast(t.norm_bias, wide)
    up, up_bias = t.up.to(x.dtype).t(), _cast(t.up_bias, x.dtype)
    down, down_bias = t.down.to(x.dtype).t(), _cast(t.down_bias, x.dtype)

    def compute(xb: Tensor, yb: Tensor) -> None:
        """Compute a block."""
        xs, results = rows(xb), writable(yb)
        n, _, _ = torch.native_layer_norm(xs, x.shape[-1:], norm_weight, norm_bias, t.eps)
        before = _before(n, up, up_bias, t.activation)
        hidden = before[0].relu_() if len(before) == 1 else F.silu(before[0], inplace=True).mul_(before[1])
        if t.residual and down_bias is not None:
            torch.add(xs, down_bias, out=results).addmm_(hidden, down)
        else:
            _linear(hidden, down, xs if t.residual else down_bias, results)
        put(yb, results)

    in_threads(compute, blocks(x, x, y, size=max(1, HIDDEN // len(t.up))))
    return y


def transition_backward(t: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::transition_backward; one product gives the gradients of up and the norm, as in linear.py."""
    x = t.x
    dx, wide, half = empty_like(x), accumulation_dtype(x), len(t.up) // HALVES[t.activation]
    nw, nb, w = t.norm_weight.to(wide), _cast(t.norm_bias, wide), t.up.to(wide)
    up, up_bias, down = t.up.to(x.dtype), _cast(t.up_bias, x.dtype), t.down.to(x.dtype)

    def zeros() -> list[Tensor]:
        return [w.new_zeros(shape) for shape in (w.shape, w.shape[:1], t.down.shape, x.shape[-1:])]

    def compute(sums: Sequence[Tensor], xb: Tensor, gb: Tensor, dxb: Tensor) -> None:
        """Compute the gradients of a block, and add to the sums."""
        product, dup_bias, ddown, ddown_bias = sums
        xs, g = rows(xb), rows(gb)
        n, mean, scale = torch.native_layer_norm(xs, x.shape[-1:], nw, nb, t.eps)
        before = _before(n, up.t(), up_bias, t.activation)
        if len(before) == 1:
            hidden = before[0].relu_()
        else:
            gate, value = before
            silu = F.silu(gate)
            hidden = silu * value
        accumulate(ddown, g, hidden)
        ddown_bias += g.sum(0, dtype=wide)
        dhidden = torch.mm(g, down)
        if len(before) == 1:
            dbefore = [dhidden.mul_(hidden.sign_())]
        else:
            dbefore = [torch.ops.aten.silu_backward(value.mul_(dhidden), gate), dhidden.mul_(silu)]
        standard = standardise(xs, mean, scale).to(x.dtype)
        for half_rows, d in zip((slice(0, half), slice(half, None)), dbefore):
            dup_bias[half_rows] += d.sum(0, dtype=wide)
            accumulate(product[half_rows], d, standard)
        if len(dbefore) == 1:
            dn = torch.mm(dbefore[0], up)
        elif up.dtype.itemsize < 4:
            # One product rounds once.
            dn = torch.mm(torch.cat(dbefore, 1), up)
        else:
            dn = torch.mm(dbefore[0], up[:half]).addmm_(dbefore[1], up[half:])
        dxs = through_norm(dn, xs, mean, scale, nw)
        put(dxb, dxs.add_(g) if t.residual else dxs)

    parts = blocks(x, x, t.grad, dx, size=max(1, HIDDEN // len(t.up)))
    product, dup_bias, ddown, ddown_bias = summed(compute, parts, zeros)
    dup = product * nw if nb is None else product * nw + dup_bias[:, None] * nb
    wholes = (
        *((t.norm_weight, (product * w).sum(0)), (t.norm_bias, dup_bias @ w)),
        *((t.up, dup), (t.up_bias, dup_bias), (t.down, ddown), (t.down_bias, ddown_bias)),
    )
    gradients = (
        d[:0].to(accumulation_dtype(t.norm_weight)) if p is None else d.to(accumulation_dtype(p)) for p, d in wholes
    )
    return dx, *gradients  # type: ignore[return-value]


def _cast(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


def _linear(x: Tensor, weight: Tensor, added: Tensor | None, out: Tensor | None = None) -> Tensor:
    return torch.mm(x, weight, out=out) if added is None else torch.addmm(added, x, weight, out=out)


def _before(n: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> list[Tensor]:
    """Compute the outputs of `up`, with "swiglu" separately for the gates and the values."""
    size = weight.shape[1] // HALVES[activation]
    halves = [slice(start, start + size) for start in range(0, weight.shape[1], size)]
    return [_linear(n, weight[:, half], None if bias is None else bias[half]) for half in halves]
