"""triangle_multiplication: a whole layer as one operation, from what its norm reads to the new residual.

For the backward pass it keeps a, b and their product, channels in front, and the statistics of both norms, beside x:
all written on the way anyway.  Not the projections: five times the size of x, and one product to make again, in blocks.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.dispatch import backend, faster_on_cpu
from warpfold.ops.gate import gate
from warpfold.ops.noise import FACTOR_OPERANDS, Factors
from warpfold.ops.norm import EPS, ROW, empty_statistics, layer_norm, norm_linear
from warpfold.ops.register import register
from warpfold.ops.shapes import Sizes
from warpfold.ops.tensors import empty_like, empty_parameters
from warpfold.ops.triangle import triangle_factor, triangle_product

KERNEL_CHANNELS = (256, 128)  # of x and of a factor, at most, that a GPU's kernels take


def row_pitch(x: Tensor) -> int:
    """Return how many elements a row of a plane takes in memory: in half precision whole sectors of a GPU's.

    So that a matrix product reads rows of any length in wide words.
    """
    n: int = x.shape[-2]
    return -(-n // ROW) * ROW if x.element_size() == 2 and backend(x) == "triton" else n


def empty_planes(x: Tensor, channels: int) -> Tensor:
    """Allocate a factor or the product, [*, channels, n, n] in order, but for what pads the rows."""
    *leading, n, _, _ = x.shape
    return x.new_empty(*leading, channels, n, row_pitch(x)).narrow(-1, 0, n)


def split_projections(y: Tensor, hidden: int, fused: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return a, its gate, b, its gate and the gate of the product, of what `weight` makes."""
    first, second, third, fourth, g = y.split([hidden] * 4 + [y.shape[-1] - 4 * hidden], -1)
    return (first, third, second, fourth, g) if fused else (first, second, third, fourth, g)


def _empty(x: Tensor, mask: Tensor, _nw: Tensor, _nb: Any, _w: Tensor, _b: Any, out_nw: Tensor, *more: Any) -> Any:
    if not more[-1]:
        return empty_like(x), *(x.new_empty(0) for _ in range(7))
    planes = (empty_planes(x, out_nw.shape[0]) for _ in range(3))
    return empty_like(x), *planes, *empty_statistics(x), *empty_statistics(x)


def _wrong_sizes(weight: Tensor, bias: Tensor | None, out_weight: Tensor) -> str:
    """Return what is wrong with the sizes that shapes cannot describe, or nothing."""
    outputs, (c, hidden) = weight.shape[0], out_weight.shape
    if outputs != 4 * hidden + c:
        return "weight is not [4 h + c, c]"
    return "bias is longer than the outputs" if bias is not None and bias.shape[0] > outputs else ""


def _check(op: str, sizes: Sizes, operands: Mapping[str, Any]) -> None:
    if wrong := _wrong_sizes(*(operands[name] for name in ("weight", "bias", "out_weight"))):
        raise ValueError(f"{op}: {wrong}")


def _unsupported(x: Tensor, mask: Tensor, _nw: Tensor, _nb: Any, weight: Tensor, bias: Any, *more: Any) -> str | None:
    return _wrong_sizes(weight, bias, more[2]) or None


def served_by_kernels(x: Tensor, hidden: int) -> bool:
    """Return whether a GPU's kernels take this x: 16 bits, at most so many channels.

    Products of fp32 are made without tensor cores, of operands in registers, which whole tiles do not fit.
    """
    return x.element_size() == 2 and all(n <= most for n, most in zip((x.shape[-1], hidden), KERNEL_CHANNELS))


def _composed(registered: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call the registered operation; on a GPU whose kernels do not take x, its parts one after another."""
    x, mask, norm_weight, norm_bias, weight, bias, *rest = args
    out_nw, out_nb, out_weight, out_bias, outgoing, fused, factors, eps, residual = rest
    if backend(x) == "cpu" or served_by_kernels(x, out_weight.shape[1]):
        return registered(*args)
    y = norm_linear(x, norm_weight, norm_bias, weight, bias, eps)
    a, a_gate, b, b_gate, g = split_projections(y, out_weight.shape[1], fused)
    product = triangle_product(triangle_factor(a, a_gate, mask), triangle_factor(b, b_gate, mask), outgoing)
    dx = gate(norm_linear(product, out_nw, out_nb, out_weight, out_bias, eps), g)
    dx = dx if factors is None else dx * factors
    return x + dx if residual else dx


@register(
    shapes="x [*, n, n, c], mask [*, n, n], norm_weight [c], norm_bias [c], weight [o, c], bias [b], "
    "out_norm_weight [h], out_norm_bias [h], out_weight [c, h], out_bias [c], factors ([*, n, n, c]), key [2], "
    "grad [*, n, n, c], a [*, h, n, n], b [*, h, n, n], product [*, h, n, n], mean [*, n, n], scale [*, n, n], "
    "out_mean [*, n, n], out_scale [*, n, n]",
    empty=_empty,
    results="out a b product mean scale out_mean out_scale",
    keeps="x mask norm_weight norm_bias weight bias out_norm_weight out_norm_bias out_weight out_bias a b product mean "
    "scale out_mean out_scale factors outgoing fused residual",
    gradients="x norm_weight norm_bias weight bias out_norm_weight out_norm_bias out_weight out_bias",
    empty_gradients=lambda grad, x, mask, *kept: (empty_like(x), *empty_parameters(*kept[:8])),
    kept=True,
    check=_check,
    expand=FACTOR_OPERANDS,
    adapter=_composed,
    unsupported_reason=_unsupported,
    # Decided by the projections.
    prefer_definition=lambda x, mask, norm_weight, norm_bias, weight, *_: faster_on_cpu(
        x, x.numel() // max(1, x.shape[-1]) * weight.shape[0], 2**20
    ),
)
def triangle_multiplication(
    x: Tensor,
    mask: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    out_norm_weight: Tensor,
    out_norm_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    outgoing: bool,
    fused: bool,
    factors: Factors | None = None,
    eps: float = EPS,
    residual: bool = True,
) -> Tensor:
    """Return x + factors * gate(linear(layer_norm(product))), a product of two factors of x (Algorithms 11 and 12); or
    that without the first x where `residual` is False.

    x [*, n, n, c], mask [*, n, n] of a and b, norm_weight, norm_bias [c], out_norm_weight, out_norm_bias [h],
    out_weight [c, h], out_bias [c], factors of dropout (axes of size 1 are shared; None: ones) -> [*, n, n, c] in the
    dtype of x, laid out in memory as x is.  Parameters of any float dtype; any bias may be None.

    weight [4 h + c, c] makes a, its gate, b, its gate, and the gate of the product, one below the other; fused
    (AlphaFold 2.3): a, b, a's gate, b's gate, the product's.  bias [b] belongs to its first b outputs.
    outgoing: sum_k a_ik b_jk; incoming: sum_k a_kj b_ki.
    """
    y = norm_linear.definition(x, norm_weight, norm_bias, weight, bias, eps)
    a, a_gate, b, b_gate, g = split_projections(y, out_weight.shape[1], fused)
    a, b = triangle_factor.definition(a, a_gate, mask), triangle_factor.definition(b, b_gate, mask)
    n = layer_norm.definition(triangle_product(a, b, outgoing), out_norm_weight, out_norm_bias, eps)
    dx = gate.definition(F.linear(n, out_weight.to(x.dtype), None if out_bias is None else out_bias.to(x.dtype)), g)
    dx = dx if factors is None else dx * factors
    return x + dx if residual else dx
