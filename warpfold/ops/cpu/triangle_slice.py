"""Parts of a triangle multiplication on a CPU, block by block, as in triangle_multiplication.py: channels in front."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.cpu.blocks import gate_values, put, rows, writable
from warpfold.ops.cpu.triangle_multiplication import examples, folded, linear, row_slices, standardised
from warpfold.ops.noise import Factors
from warpfold.ops.norm import EPS
from warpfold.ops.tensors import accumulation_dtype, empty_like
from warpfold.ops.triangle import empty_factor


def projected_factor(x: Tensor, mask: Tensor, norm: Any, into: Any, eps: float = EPS) -> Tensor:
    """Compute `projected_factor`."""
    weight, bias = into[0].to(x.dtype), into[1]
    half = len(weight) // 2
    if bias is not None:
        bias = F.pad(bias.to(x.dtype), (0, len(weight) - len(bias)))[:, None]
    factor, of_norm = empty_factor(x[..., :1].expand(*x.shape[:-1], half)), _cast_norm(x, norm)
    for at in examples(x):
        for some in row_slices(x):
            y = torch.mm(weight, _normed(rows(x[at][some]), of_norm, eps).t())
            if bias is not None:
                y += bias
            masked = mask[at][some].reshape(1, -1).to(x.dtype)
            made = torch.sigmoid(y[half:]).mul_(masked).mul_(y[:half])
            factor[at][:, some] = made.view(half, -1, x.shape[-2])
    return factor


def triangle_slice(
    x: Tensor,
    mask: Tensor,
    b: Tensor,
    norm: Any,
    into: Any,
    of_gate: Any,
    norm_out: Any,
    out_of: Any,
    outgoing: bool,
    factors: Factors | None = None,
    eps: float = EPS,
    residual: bool = True,
) -> Tensor:
    """Compute `triangle_slice`; the slice is normalised twice, so that its gate exists for a block alone."""
    a = projected_factor(x, mask, norm, into, eps)
    product = a @ b.mT if outgoing else (a.mT @ b).mT  # b.mT @ a, up to four times as fast where columns are few
    del a
    out, of_norm = empty_like(x), _cast_norm(x, norm)
    gate_weight, gate_bias = of_gate[0].to(x.dtype).t(), of_gate[1]
    weight, shift = folded(x, *norm_out, *out_of)
    f = None if factors is None else (x.new_ones(()) * factors).expand(x.shape)
    for at in examples(x):
        for some in row_slices(x):
            xs, results = rows(x[at][some]), writable(out[at][some])
            standard, _, _ = standardised(product[at][:, some].flatten(1), eps)
            logits = torch.mm(_normed(xs, of_norm, eps), gate_weight)
            if gate_bias is not None:
                logits += gate_bias.to(x.dtype)
            dx = linear(standard.to(x.dtype).t(), weight.t(), shift)
            torch.mul(dx, gate_values(logits), out=results)
            if f is not None:
                results *= rows(f[at][some])
            if residual:
                results += xs
            put(out[at][some], results)
    return out


def _cast_norm(x: Tensor, norm: Any) -> tuple[Tensor, Tensor | None]:
    weight, bias = norm
    return weight.to(accumulation_dtype(x)), None if bias is None else bias.to(accumulation_dtype(x))


def _normed(xs: Tensor, norm: tuple[Tensor, Tensor | None], eps: float) -> Tensor:
    weight, bias = norm
    return torch.native_layer_norm(xs, [xs.shape[1]], weight, bias, eps)[0]
