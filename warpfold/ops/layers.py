"""The operations that are whole layers of the trunk, as a model calls them: with one record of weights each.

A record names every parameter of its layer, in the order in which the registered operation (ops/triangle.py and
others) takes them.  A call unpacks the record, which is a tuple: `dataclasses.astuple` would copy every tensor, at each
launch.  Operations that are parts of a layer, such as `norm_linear`, take their few tensors one by one.
"""

from typing import Literal, NamedTuple

from torch import Tensor

from warpfold.ops import triangle
from warpfold.ops.linear import EPS
from warpfold.ops.noise import Factors


class TriangleWeights(NamedTuple):
    """The parameters of a triangle multiplication (Algorithms 11 and 12) of c channels, h in a factor.

    weight: the rows that make a, a's gate, b, b's gate and the gate of the product.  With `fused` (AlphaFold 2.3) the
    order is a, b, a's gate, b's gate, gate of the product.  bias: of the first rows of `weight`, all of them or fewer.
    """

    norm_weight: Tensor  # [c]
    norm_bias: Tensor | None  # [c]
    weight: Tensor  # [4 h + c, c]
    bias: Tensor | None  # [at most 4 h + c]
    out_norm_weight: Tensor  # [h]
    out_norm_bias: Tensor | None  # [h]
    out_weight: Tensor  # [c, h]
    out_bias: Tensor | None  # [c]
    fused: bool = False


def triangle_multiplication(
    x: Tensor,
    mask: Tensor,
    weights: TriangleWeights,
    outgoing: bool,
    b: Tensor | None = None,
    factors: Factors | None = None,
    eps: float = EPS,
    residual: bool = True,
) -> Tensor:
    """Compute x + factors * gate * linear(layer_norm(product)), a product of two factors (Algorithms 11 and 12).

    x: [*, i, k, c], the whole pair representation, or some of its rows (outgoing) or columns (incoming).
    mask: [*, i, k].  b: [*, h, n, n], the factor that all slices share; None: computed from x, which is whole.
    factors: of dropout; axes of size 1 are shared; None: ones.  residual: False leaves out x.

    Returns [*, i, k, c] in the dtype of x, laid out in memory as x is.
    """
    return triangle.triangle_multiplication(x, mask, b, *weights, outgoing, factors, eps, residual)


def triangle_factor(
    x: Tensor, mask: Tensor, weights: TriangleWeights, which: Literal["a", "b"], eps: float = EPS
) -> Tensor:
    """Compute one factor, gated and masked, of some rows or columns of x.

    x: [*, i, k, c]; mask: [*, i, k].  Returns [*, h, i, k].
    """
    return triangle.triangle_factor(x, mask, *weights[:4], "ab".index(which), weights.fused, eps)
