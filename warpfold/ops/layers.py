"""Operations that are whole layers of the trunk, with one record of parameters each.

A record names the parameters of its layer in the order in which the registered operation (ops/attention.py and others)
takes them.  Records are named tuples, which a call unpacks at no cost; `dataclasses.astuple` would copy every tensor at
each launch.  Smaller operations, such as `norm_linear`, take their few tensors separately.

Parameters may have any float dtype, and each bias may be None.  `factors` are the dropout factors: axes of size 1 are
shared, and None stands for ones.  With residual = False, x is not added to the result.
"""

from typing import Literal, NamedTuple

from torch import Tensor

from warpfold.ops.attention import gated_attention as _gated_attention
from warpfold.ops.linear import EPS
from warpfold.ops.noise import Factors
from warpfold.ops.outer import ADDED
from warpfold.ops.outer import outer_product_mean as _outer_product_mean
from warpfold.ops.transition import Activation
from warpfold.ops.transition import transition as _transition
from warpfold.ops.triangle import triangle_factor as _triangle_factor
from warpfold.ops.triangle import triangle_multiplication as _triangle_multiplication


class AttentionWeights(NamedTuple):
    """The parameters of a gated attention with c channels, h heads and i = h x width channels in all heads.

    weight: the rows of the gate, q, k and v.  h further rows, if present, project the bias from x.
    """

    norm_weight: Tensor  # [c]
    norm_bias: Tensor | None  # [c]
    weight: Tensor  # [4 i, c] or [4 i + h, c]
    gate_bias: Tensor | None  # first rows of `weight`
    out_weight: Tensor  # [c, i]
    out_bias: Tensor | None  # [c]
    heads: int


def gated_attention(
    x: Tensor,
    mask: Tensor,
    weights: AttentionWeights,
    bias: Tensor | None = None,
    factors: Factors | None = None,
    eps: float = EPS,
    residual: bool = True,
) -> Tensor:
    """Compute x + factors * linear(gate(attention)) of the normalised x, within each row (Algorithms 7, 8, 13, 14).

    x: [*, R, K, c].  mask: [*, R, K], 1: attend.  bias: [*, h, K, K] of the logits, the same for all rows.
    Returns [*, R, K, c] in the dtype and layout of x.
    """
    return _gated_attention(x, *weights[:6], mask, bias, weights.heads, factors, eps, residual)


class TransitionWeights(NamedTuple):
    """The parameters of a transition with c channels and n hidden units.  up: [n, c], for SwiGLU [2 n, c]."""

    norm_weight: Tensor  # [c]
    norm_bias: Tensor | None  # [c]
    up: Tensor
    up_bias: Tensor | None
    down: Tensor  # [c, n]
    down_bias: Tensor | None  # [c]


def transition(
    x: Tensor, weights: TransitionWeights, activation: Activation = "relu", eps: float = EPS, residual: bool = True
) -> Tensor:
    """Compute x + linear(activation(linear(layer_norm(x)))): x [*, c] -> [*, c], in the layout of x."""
    return _transition(x, *weights, residual, eps, activation)


class OuterProductWeights(NamedTuple):
    """The parameters of an outer product mean with h channels per factor and p channels of z."""

    norm_weight: Tensor  # [c]
    norm_bias: Tensor | None  # [c]
    weight: Tensor  # [2 h, c]: the rows of a, then those of b
    bias: Tensor | None  # first rows of `weight`
    out_weight: Tensor  # [p, h h], the left channel outermost
    out_bias: Tensor | None  # [p]


def outer_product_mean(
    x: Tensor,
    mask: Tensor,
    weights: OuterProductWeights,
    z: Tensor | None = None,
    added: float = ADDED,
    least: float = 0.0,
    bias_divided: bool = True,
    eps: float = EPS,
) -> Tensor:
    """Compute z + linear(sum over s of a_si x b_sj) / count, of masked projections a, b of the normalised x
    (Algorithm 10).

    x: [*, s, r, c].  mask: [*, s, r].  z: [*, r, r, p]; None: nothing is added.  The count is the number of sequences
    with both residues, plus `added`, and at least `least`.  With `bias_divided` the bias is divided by the count, too.
    Returns [*, r, r, p] in the dtype of x.
    """
    return _outer_product_mean(x, *weights, mask, z, added, least, bias_divided, eps)


class TriangleWeights(NamedTuple):
    """The parameters of a triangle multiplication (Algorithms 11 and 12) with c channels and h channels per factor.

    weight: the rows of a, a's gate, b, b's gate and the gate of the product.  With `fused` (AlphaFold 2.3) the order is
    a, b, a's gate, b's gate, gate of the product.
    """

    norm_weight: Tensor  # [c]
    norm_bias: Tensor | None  # [c]
    weight: Tensor  # [4 h + c, c]
    bias: Tensor | None  # first rows of `weight`
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
    mask: [*, i, k].  b: [*, h, n, n], the factor that all slices share; None: computed from x, which must be whole.
    Returns [*, i, k, c] in the dtype and layout of x.
    """
    return _triangle_multiplication(x, mask, b, *weights, outgoing, factors, eps, residual)


def triangle_factor(
    x: Tensor, mask: Tensor, weights: TriangleWeights, which: Literal["a", "b"], eps: float = EPS
) -> Tensor:
    """Compute a factor, gated and masked, of some rows or columns of x.

    x: [*, i, k, c]; mask: [*, i, k].  Returns [*, h, i, k].
    """
    return _triangle_factor(x, mask, *weights[:4], "ab".index(which), weights.fused, eps)
